"""``hicache-ext bench kernels``: every copy engine against SGLang's own path, and the calibration that picks one.

Measured on SGLang's own pools, pages in random order, from the call until the last byte is there, submission included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hicache_ext.bench.frame import Table, machine_facts, number, report, today
from hicache_ext.config.values import format_size
from hicache_ext.errors import CommandError, CopyError
from hicache_ext.kernels.calibration import Calibration, Measurement, calibration_file, write_calibration
from hicache_ext.kernels.engine import SGLANG, Direction, Operation, ReferenceEngine
from hicache_ext.kernels.geometry import page_tokens
from hicache_ext.kernels.selection import ENGINES
from hicache_ext.sglang import kernel_hooks as sglang_hooks
from hicache_ext.testing.host_pools import mha_pools

_COMBINATIONS = (
    ("layer_first", "kernel"),
    ("layer_first", "direct"),
    ("page_first", "kernel"),
    ("page_first_direct", "direct"),
)
_LAYERS = 4
_REPEATS = 3
_HEADS = (1, 4, 8)
"""KV heads of a rank: rows of 256 B, 1 KiB and 2 KiB."""
_PAGE_SIZES = (16, 64)
_TOKENS = (1024, 8192, 32_768)
_SECONDS, _QUICK_SECONDS = 60.0, 5.0


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, write; with ``--calibrate`` also where servers look."""
    found = calibrate(_QUICK_SECONDS if arguments.quick else _SECONDS)
    figures = {"gpu": found.gpu, "driver": found.driver, "measurements": [asdict(one) for one in found.measurements]}
    machine = machine_facts(Path("."), ("hicache-ext", "torch", "triton", "sglang", "numpy"))
    print(f"{found.gpu}, driver {found.driver}")
    report(arguments, "kernels", machine, figures, _tables(found.measurements))
    if arguments.calibrate:
        path = calibration_file(found.gpu)
        write_calibration(path, found)
        print(f"{len(found.measurements)} measurements of {found.gpu} written to {path}")
    return 0


def _tables(measurements: Sequence[Measurement]) -> Iterator[Table]:
    """Yield a table for each direction, layout and place of the indices."""
    groups: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        place = "CPU" if measurement.indices == "cpu" else "GPU"
        title = f"{measurement.direction}: {measurement.layout}, indices on the {place}"
        groups.setdefault(title, []).append(measurement)
    for title, group in groups.items():
        names = list(dict.fromkeys(name for measurement in group for name in measurement.seconds))
        rows = tuple(
            (
                f"{format_size(m.bytes_per_layer)} in runs of {format_size(m.run_bytes)}",
                *(number(m.seconds[name] * 1e6) if name in m.seconds else "-" for name in names),
            )
            for m in group
        )
        yield Table(f"{title}: us per layer, medians", ("", *names), rows)


def calibrate(seconds: float) -> Calibration:
    """Measure for about ``seconds``. Raises CommandError without a GPU, or without SGLang to compare with."""
    if not torch.cuda.is_available():
        raise CommandError("a calibration needs a CUDA device; this machine has none")
    sglang_hooks.use(None)
    measurements: list[Measurement] = []
    ends = time.monotonic() + seconds
    pools = [(heads, size, *how) for heads in _HEADS for size in _PAGE_SIZES for how in _COMBINATIONS]
    for heads, page_size, layout, io_backend in pools:
        if time.monotonic() > ends:
            print("the time is over; larger rows are judged by the nearest that was measured", flush=True)
            break
        print(f"{layout}, {io_backend}, {heads} KV heads, pages of {page_size} tokens", flush=True)
        try:
            measurements += _measure_pool(layout, io_backend, heads, page_size)
        except Exception as error:  # noqa: BLE001 - what SGLang cannot do on this machine is left out
            print(f"  left out: {type(error).__name__}: {str(error)[:200]}", flush=True)
    if not measurements:
        raise CommandError("nothing could be measured: SGLang's pools cannot be built on this machine")
    return Calibration(torch.cuda.get_device_name(), driver_version(), today(), tuple(measurements))


def _measure_pool(layout: str, io_backend: str, heads: int, page_size: int) -> Iterator[Measurement]:
    most = max(_TOKENS) + page_size
    pool = mha_pools(
        layout=layout,
        page_size=page_size,
        pages=most // page_size,
        layers=_LAYERS,
        heads=heads,
        head_dim=128,
        device="cuda",
    ).host
    try:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        engines = {}
        for name, make in ENGINES.items():
            if name != ReferenceEngine.name:
                try:
                    engines[name] = make()
                except (CopyError, ImportError):
                    continue
        stack = sglang_hooks.bound(pool).stack
        for tokens in _TOKENS:
            pages = torch.randperm(tokens // page_size)
            host = page_tokens(pages, page_size)
            device = page_tokens(torch.randperm(tokens // page_size), page_size)
            if io_backend == "kernel":
                host, device = host.cuda(), device.cuda()
            for direction in Direction:
                operation = Operation(stack, direction, host, device)
                seconds = {SGLANG: _timed(_sglangs_own(pool, direction, host, device, io_backend), stream)}
                for name, engine in engines.items():
                    with torch.cuda.stream(stream):
                        refused = engine.refusal(operation)
                    if refused is None:
                        try:
                            seconds[name] = _timed(partial(_by_engine, engine, stack, direction, host, device), stream)
                        except CopyError:
                            continue
                yield Measurement.of(operation, {name: value / _LAYERS for name, value in seconds.items()})
    finally:
        pool.destroy()


def _by_engine(engine: Any, stack: Any, direction: Direction, host: torch.Tensor, device: torch.Tensor) -> None:
    # A new operation each time: an operation keeps the plan that its first copy makes.
    submit = engine.begin(Operation(stack, direction, host, device))
    for first, last in [(0, len(stack.copies))] if direction is Direction.BACK_UP else stack.layers:
        submit(first, last)


def _sglangs_own(
    pool: Any, direction: Direction, host: torch.Tensor, device: torch.Tensor, io_backend: str
) -> Callable[[], None]:
    """Return what SGLang itself would do, past any hook of ours."""
    name = "load_to_device_per_layer" if direction is Direction.LOAD else "backup_from_device_all_layer"
    method = getattr(type(pool), name)
    method = getattr(method, "__wrapped__", method)
    if direction is Direction.BACK_UP and getattr(pool, "can_use_write_back_jit", False):
        host = host.cpu()  # where SGLang's controller leaves them for this path

    def copy() -> None:
        if direction is Direction.BACK_UP:
            method(pool, None, host, device, io_backend)
            return
        for layer in range(_LAYERS):
            method(pool, None, host, device, layer, io_backend)

    return copy


def _timed(copy: Callable[[], None], stream: Any) -> float:
    """Return the median seconds from the call until the last byte is there."""
    times = []
    with torch.cuda.stream(stream):
        for repeat in range(_REPEATS + 1):
            stream.synchronize()
            started = time.perf_counter()
            copy()
            stream.synchronize()
            if repeat:
                times.append(time.perf_counter() - started)
    return statistics.median(times)


def driver_version() -> str:
    """Return the version of the kernel module, or "unknown"."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            words = file.readline().split()
    except OSError:
        return "unknown"
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")
