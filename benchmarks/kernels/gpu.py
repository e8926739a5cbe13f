"""What copies reach on a GPU, and what they cost the work beside them. Needs CUDA; every figure is of this machine.

Contenders besides the engines: one large pinned copy (the peak), torch's gather and scatter (the reference engine), and
SGLang's own kernels where they can be compiled. Copies run in a stream of their own; a time ends when the last byte is
there.
"""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hicache_ext.bench.kernels import driver_version
from hicache_ext.errors import CopyError
from hicache_ext.kernels.batched_dma import BatchedDmaEngine, open_driver
from hicache_ext.kernels.engine import CopyEngine, Direction, Operation, ReferenceEngine
from hicache_ext.kernels.geometry import LayerStack, device_rows, host_rows, page_tokens
from hicache_ext.kernels.selection import Selector
from hicache_ext.kernels.triton_engine import TritonEngine
from hicache_ext.runtime.metrics import TierMetrics
from tests.rigs.layerwise import LayerwiseLoader, copy_now

Copy = Callable[[], None]
"""Submits one copy to the current stream."""

SEGMENTS = tuple(kib << 10 for kib in (4, 8, 16, 24, 28, 32, 64, 128, 256))
COUNTS = (64, 256, 1024, 4096, 10_000)
TRITON_PROGRAMS = (2, 4, 8, 16)
PEAK = "one pinned copy"

_MOST_BYTES = 1 << 29
_MATMUL = 8192
_WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class Rate:
    """One contender at one point: bytes per second, and seconds of this thread's time until it was submitted."""

    contender: str
    direction: Direction
    segment_bytes: int
    count: int
    bytes_per_second: float
    submit_seconds: float


@dataclass(frozen=True, slots=True)
class Interference:
    """What a contender's copies cost the work in another stream: 0.02 is 2% slower."""

    contender: str
    direction: Direction
    work: str
    slow_down: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Layers loaded while the layers before them compute."""

    contender: str
    load_seconds: float
    compute_seconds: float
    together_seconds: float
    stall_seconds: float
    """Per layer, on average: what the forward pass waited for its bytes."""


def gpu_facts() -> dict[str, Any]:
    """What a reader must know about the GPU."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver_version(),
        "cuda": torch.version.cuda,
    }


def engines(programs: Sequence[int] = TRITON_PROGRAMS) -> Iterator[tuple[str, CopyEngine]]:
    """Every engine that this machine has, in the variants that are measured."""
    try:
        yield "batched_dma", BatchedDmaEngine(open_driver())
    except CopyError as error:
        print(f"  note: batched_dma is left out: {error}", flush=True)
    if importlib.util.find_spec("triton"):
        for number in programs:
            yield f"triton, {number} programs", TritonEngine(programs=number)
    yield "torch index copies", ReferenceEngine()


class Segments:
    """``count`` segments apart from each other on both sides, in one pinned and one device buffer."""

    def __init__(self, host: torch.Tensor, device: torch.Tensor, segment_bytes: int, count: int) -> None:
        slots = 2 * count
        self.segment_bytes, self.count = segment_bytes, count
        self.host = host[: slots * segment_bytes]
        self.device = device[: slots * segment_bytes].view(slots, segment_bytes)
        rows = host_rows(
            self.host,
            layout="layer_first",
            layer=0,
            layer_num=1,
            page_size=1,
            token_count=slots,
            segments=1,
            segment_bytes=segment_bytes,
        )
        on_device = device_rows(self.device, page_size=1, row_stride=segment_bytes, segment_bytes=segment_bytes)
        self.stack = LayerStack(
            [[(rows, on_device)]],
            page_size=1,
            segments=1,
            segment_bytes=segment_bytes,
            layout="layer_first",
            registrations=[(host.data_ptr(), host.numel())],
        )
        self.host_tokens = 2 * torch.randperm(count)
        self.device_tokens = 2 * torch.randperm(count)

    @property
    def total(self) -> int:
        return self.segment_bytes * self.count

    def copy_by(self, engine: CopyEngine, direction: Direction) -> Copy:
        """A copy of all segments; planned anew each time, as SGLang does for each operation."""
        on_gpu = isinstance(engine, TritonEngine)
        host_tokens, device_tokens = (
            (tokens.cuda() if on_gpu else tokens) for tokens in (self.host_tokens, self.device_tokens)
        )
        return lambda: copy_now(engine, Operation(self.stack, direction, host_tokens, device_tokens))

    def copy_at_once(self, direction: Direction) -> Copy:
        """As many bytes in one piece: the peak."""
        host, device = self.host[: self.total], self.device.view(-1)[: self.total]
        target, source = (device, host) if direction is Direction.LOAD else (host, device)

        def copy() -> None:
            target.copy_(source, non_blocking=True)

        return copy

    def copy_by_sglang(self, direction: Direction) -> Iterator[tuple[str, Copy]]:
        """SGLang's own kernels, those of them that can be had here."""
        host, device = self.host.view(-1, self.segment_bytes), self.device
        host_tokens, device_tokens = self.host_tokens.cuda(), self.device_tokens.cuda()
        if direction is Direction.LOAD:
            target, target_tokens, source, source_tokens = device, device_tokens, host, host_tokens
        else:
            target, target_tokens, source, source_tokens = host, host_tokens, device, device_tokens

        def by_jit() -> None:
            hicache.transfer_hicache_one_layer_mla(
                cache_dst=target,
                indices_dst=target_tokens,
                cache_src=source,
                indices_src=source_tokens,
                element_dim=self.segment_bytes,
            )

        def by_aot() -> None:
            kvcacheio.transfer_kv_per_layer_mla(
                src=source,
                dst=target,
                src_indices=source_tokens,
                dst_indices=target_tokens,
                item_size=self.segment_bytes,
            )

        try:
            import sglang.kernels.ops.kvcache.hicache as hicache

            if hicache.can_use_hicache_jit_kernel(element_size=self.segment_bytes, page_size=1):
                yield "SGLang, JIT kernel", by_jit
        except Exception as error:  # noqa: BLE001 - a compiler may be missing in many ways
            _note_once(f"SGLang's JIT kernel is left out: {type(error).__name__}: {str(error)[:120]}")
        try:
            # Not an import statement: the type checker must accept it with and without the package.
            kvcacheio: Any = importlib.import_module("sgl_kernel.kvcacheio")

            yield "SGLang, AOT kernel", by_aot
        except Exception as error:  # noqa: BLE001 - as above
            _note_once(f"SGLang's AOT kernel is left out: {type(error).__name__}: {str(error)[:120]}")


_noted: set[str] = set()


def _note_once(text: str) -> None:
    if text not in _noted:
        _noted.add(text)
        print(f"  note: {text}", flush=True)


def buffers(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pinned and device memory of ``size`` bytes, touched."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    host.fill_(1)
    return host, torch.zeros(size, dtype=torch.uint8, device="cuda")


def timed(copy: Copy, stream: Any, repeats: int) -> tuple[float, float]:
    """Median seconds until the bytes are there, and until the call returned."""
    totals, submits = [], []
    with torch.cuda.stream(stream):
        for repeat in range(_WARM_UPS + repeats):
            stream.synchronize()
            started = time.perf_counter()
            copy()
            submitted = time.perf_counter()
            stream.synchronize()
            if repeat >= _WARM_UPS:
                totals.append(time.perf_counter() - started)
                submits.append(submitted - started)
    return statistics.median(totals), statistics.median(submits)


def rates(segments: Sequence[int], counts: Sequence[int], repeats: int) -> Iterator[Rate]:
    """Every contender at every size that fits, both directions."""
    host, device = buffers(2 * _MOST_BYTES)
    stream = _stream()
    made = list(engines())
    for segment_bytes in segments:
        for count in counts:
            if segment_bytes * count > _MOST_BYTES:
                continue
            case = Segments(host, device, segment_bytes, count)
            for direction in Direction:
                contenders: list[tuple[str, Copy]] = [(PEAK, case.copy_at_once(direction))]
                contenders += [(name, case.copy_by(engine, direction)) for name, engine in made]
                contenders += case.copy_by_sglang(direction)
                for name, copy in contenders:
                    try:
                        seconds, submit = timed(copy, stream, repeats)
                    except Exception as error:  # noqa: BLE001 - one contender must not end the run
                        _note_once(f"{name} failed at {segment_bytes} x {count}: {type(error).__name__}: {error}")
                        continue
                    yield Rate(name, direction, segment_bytes, count, case.total / seconds, submit)


def interferences(segment_bytes: int = 32 << 10, count: int = 8192) -> Iterator[Interference]:
    """How much slower a matrix product and attention become beside each contender's copies."""
    host, device = buffers(2 * segment_bytes * count)
    case = Segments(host, device, segment_bytes, count)
    copies, compute = _stream(), _stream()
    for work_name, work in _works():
        alone = _work_seconds(work, compute)
        for direction in Direction:
            contenders: list[tuple[str, Copy]] = [(PEAK, case.copy_at_once(direction))]
            contenders += [(name, case.copy_by(engine, direction)) for name, engine in engines()]
            contenders += case.copy_by_sglang(direction)
            for name, copy in contenders:
                try:
                    slow_down, rate = _beside(work, alone, copy, case.total, copies, compute)
                except Exception as error:  # noqa: BLE001 - one contender must not end the run
                    _note_once(f"{name} failed beside {work_name}: {type(error).__name__}: {error}")
                    continue
                yield Interference(name, direction, work_name, slow_down, rate)


def _works() -> Iterator[tuple[str, Callable[[], None]]]:
    left = torch.randn(_MATMUL, _MATMUL, dtype=torch.bfloat16, device="cuda")
    right = torch.randn_like(left)
    out = torch.empty_like(left)

    def matmul() -> None:
        torch.matmul(left, right, out=out)

    yield f"matmul {_MATMUL}^3 bf16", matmul
    query = torch.randn(1, 32, 8192, 128, dtype=torch.bfloat16, device="cuda")

    def attention() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)

    yield "attention 32 heads x 8192 tokens", attention


def _work_seconds(work: Callable[[], None], stream: Any, rounds: int = 40) -> float:
    """Seconds of one round, by events on the GPU."""
    events = _enqueue(work, stream, rounds)
    stream.synchronize()
    return _median_round(events)


def _enqueue(work: Callable[[], None], stream: Any, rounds: int) -> list[Any]:
    """``rounds`` rounds with an event around each, submitted without waiting."""
    event_class: Any = torch.cuda.Event
    events = [event_class(enable_timing=True) for _ in range(rounds + 1)]
    with torch.cuda.stream(stream):
        for _ in range(5):
            work()
        for event in events[:-1]:
            event.record()
            work()
        events[-1].record()
    return events


def _median_round(events: Sequence[Any]) -> float:
    """Seconds; the median of single rounds, so that a hiccup does not count."""
    return statistics.median(float(first.elapsed_time(second)) for first, second in itertools.pairwise(events)) / 1e3


def _beside(
    work: Callable[[], None], alone: float, copy: Copy, total: int, copies: Any, compute: Any
) -> tuple[float, float]:
    """Slow-down of rounds that ran while copies ran, and the copies' rate meanwhile."""
    with torch.cuda.stream(copies):
        copy()
        copies.synchronize()
    events = _enqueue(work, compute, max(10, int(0.2 / alone)))
    # The GPU has work for the next 200 ms; copies are submitted meanwhile, as SGLang's scheduler does.
    started, moved = time.perf_counter(), 0
    with torch.cuda.stream(copies):
        while not events[-1].query():
            copy()
            copies.synchronize()
            moved += total
    elapsed = time.perf_counter() - started
    compute.synchronize()
    return _median_round(events) / alone - 1, moved / elapsed


def pipelines(
    *, layers: int = 32, tokens: int = 32_768, row_bytes: int = 2048, page_size: int = 64
) -> Iterator[Pipeline]:
    """A prefix of ``tokens`` loaded layer by layer under compute that takes about 3 ms a layer."""
    for layout in ("page_first_direct", "layer_first"):
        stack, _memory = _model_stack(layout, layers, tokens, row_bytes, page_size)
        pages = torch.randperm(tokens // page_size)
        indices = page_tokens(torch.arange(tokens // page_size), page_size), page_tokens(pages, page_size)
        for name, engine in engines(programs=(4,)):
            try:
                yield _pipeline(f"{name}, {layout}", engine, stack, indices, layers)
            except Exception as error:  # noqa: BLE001 - one contender must not end the run
                _note_once(f"{name} failed in the pipeline: {type(error).__name__}: {error}")
        del _memory, stack
        torch.cuda.empty_cache()


def _pipeline(
    name: str,
    engine: CopyEngine,
    stack: LayerStack,
    indices: tuple[torch.Tensor, torch.Tensor],
    layers: int,
) -> Pipeline:
    own = Selector({engine.name: lambda: engine}, engine=engine.name, metrics=TierMetrics("bench"))
    loader = LayerwiseLoader(stack, own, ReferenceEngine())
    compute = _compute_of_a_layer(3e-3)
    stream = _stream()

    def run(*, load: bool, work: bool) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.cuda.stream(stream):
            loading = loader.load(*indices) if load else None
            for layer in range(layers):
                if loading is not None:
                    loading.wait(layer)
                if work:
                    compute()
        torch.cuda.synchronize()
        return time.perf_counter() - started

    run(load=True, work=True)
    load_alone, compute_alone, together = (
        statistics.median(run(load=load, work=work) for _ in range(5))
        for load, work in ((True, False), (False, True), (True, True))
    )
    return Pipeline(name, load_alone, compute_alone, together, max(0.0, together - compute_alone) / layers)


def _compute_of_a_layer(seconds: float) -> Callable[[], None]:
    left = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(left)

    def once() -> None:
        torch.matmul(left, left, out=out)

    rounds = max(1, round(seconds / _work_seconds(once, _stream())))

    def layer() -> None:
        for _ in range(rounds):
            once()

    return layer


def _model_stack(
    layout: str, layers: int, tokens: int, row_bytes: int, page_size: int
) -> tuple[LayerStack, tuple[torch.Tensor, list[torch.Tensor]]]:
    """K and V of a model: a host pool of ``tokens`` and as many device slots, and the memory that holds them."""
    component = layers * tokens * row_bytes
    host = torch.empty(2 * component, dtype=torch.uint8, pin_memory=True)
    host.fill_(1)
    device = [torch.zeros(tokens, row_bytes, dtype=torch.uint8, device="cuda") for _ in range(2 * layers)]
    copies = [
        [
            (
                host_rows(
                    host[part * component : (part + 1) * component],
                    layout=layout,
                    layer=layer,
                    layer_num=layers,
                    page_size=page_size,
                    token_count=tokens,
                    segments=1,
                    segment_bytes=row_bytes,
                ),
                device_rows(
                    device[2 * layer + part], page_size=page_size, row_stride=row_bytes, segment_bytes=row_bytes
                ),
            )
            for part in range(2)
        ]
        for layer in range(layers)
    ]
    stack = LayerStack(
        copies,
        page_size=page_size,
        segments=1,
        segment_bytes=row_bytes,
        layout=layout,
        registrations=[(host.data_ptr(), host.numel())],
    )
    return stack, (host, device)


def _stream() -> Any:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
