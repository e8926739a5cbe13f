"""What ``hicache-ext doctor`` is told about a Mooncake pool."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import mmap
import re
import secrets
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

from hicache_ext.config.units import rounded_size
from hicache_ext.storage.contract.diagnosis import Finding, Level
from hicache_ext.storage.tiers.mooncake import engine
from hicache_ext.storage.tiers.mooncake.config import MooncakeTierConfig
from hicache_ext.storage.tiers.mooncake.engine import Attachment, address_of

_PACKAGES = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")
_SAMPLE_BYTES = 1 << 20
_SAMPLES = 8
_LATENCY_SAMPLES = 20
_METRIC = re.compile(r"^(\w+)(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


def examine(tier: MooncakeTierConfig, attachment: Attachment) -> list[Finding]:
    """Never raises; bounded by the tier's time-outs."""
    findings = [_version()]
    if attachment.engine.master_answers(tier.longest_call):
        findings.append(Finding("master", Level.OK, f"{tier.master} accepts connections"))
    else:
        findings.append(Finding("master", Level.ERROR, f"{tier.master} does not answer", "start mooncake_master"))
    with attachment.client() as client:
        if client is None:
            findings.append(
                Finding("client", Level.ERROR, "not attached to the pool", "see the log for why; it retries by itself")
            )
        else:
            findings.extend(_round_trip(client, tier.prefix))
    findings.extend(_capacity(tier))
    if tier.protocol == "tcp":
        findings.append(Finding("protocol", Level.NOTE, "tcp", "use protocol: rdma where the network has it"))
    findings.append(
        Finding(
            "lease",
            Level.NOTE,
            "the master's --default_kv_lease_ttl cannot be read from a client",
            "10s or less: what is asked for cannot be evicted for that long",
        )
    )
    return findings


def _version() -> Finding:
    installed = []
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed.append(f"{package} {importlib.metadata.version(package)}")
    if len(installed) > 1:
        return Finding(
            "client library", Level.ERROR, " and ".join(installed), "uninstall one: they overwrite each other"
        )
    return Finding("client library", Level.OK, "".join(installed) or "mooncake, not installed as a package")


def _round_trip(client: Any, prefix: str) -> Iterator[Finding]:
    """A page-sized object written, read back, compared and removed; latency and bandwidth."""
    begun = time.perf_counter()
    for _ in range(_LATENCY_SAMPLES):
        code = client.is_exist(f"{prefix}/doctor/none")
        if code < 0:
            yield Finding("latency", Level.ERROR, f"the master answers {engine.reason_of(code)}", "see its log")
            return
    latency = (time.perf_counter() - begun) / _LATENCY_SAMPLES
    yield Finding("latency", Level.OK, f"{latency * 1e3:.2f} ms a question to the master")
    memory = memoryview(mmap.mmap(-1, _SAMPLES * _SAMPLE_BYTES))
    pattern = secrets.token_bytes(_SAMPLE_BYTES)
    for sample in range(_SAMPLES):
        memory[sample * _SAMPLE_BYTES : (sample + 1) * _SAMPLE_BYTES] = pattern
    names = [f"{prefix}/doctor/{secrets.token_hex(8)}" for _ in range(_SAMPLES)]
    addresses = [[address_of(memory) + sample * _SAMPLE_BYTES] for sample in range(_SAMPLES)]
    sizes = [[_SAMPLE_BYTES]] * _SAMPLES
    registered = client.register_buffer(address_of(memory), memory.nbytes)
    try:
        begun = time.perf_counter()
        codes = client.batch_put_from_multi_buffers(names, addresses, sizes)
        writing = time.perf_counter() - begun
        if any(codes):
            remedy = (
                "add segments, or lower --eviction_high_watermark_ratio" if engine.NO_SPACE in codes else "see its log"
            )
            reasons = ", ".join(sorted({engine.reason_of(code) for code in codes if code}))
            yield Finding("round trip", Level.ERROR, f"writing: {reasons}", remedy)
            return
        memory[:] = bytes(memory.nbytes)
        begun = time.perf_counter()
        codes = client.batch_get_into_multi_buffers(names, addresses, sizes)
        reading = time.perf_counter() - begun
        if any(code != _SAMPLE_BYTES for code in codes) or bytes(memory) != pattern * _SAMPLES:
            yield Finding("round trip", Level.ERROR, "what was read is not what was written", "check the network")
            return
        write_rate, read_rate = (_SAMPLES * _SAMPLE_BYTES / seconds / 1e6 for seconds in (writing, reading))
        yield Finding("round trip", Level.OK, f"write {write_rate:.0f} MB/s, read {read_rate:.0f} MB/s, 1 MiB objects")
    finally:
        client.batch_remove(names, True)
        if registered == engine.OK:
            client.unregister_buffer(address_of(memory))


def _capacity(tier: MooncakeTierConfig) -> Iterator[Finding]:
    if tier.metrics is None:
        yield Finding("capacity", Level.NOTE, "not known", "set metrics to the master's --metrics_port address")
        return
    try:
        # Proxies of the environment are not for the cluster's own servers.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{tier.metrics}/metrics", timeout=tier.longest_call) as response:
            text = response.read(1 << 22).decode(errors="replace")
    except (OSError, ValueError) as error:
        yield Finding("capacity", Level.WARNING, f"{tier.metrics} does not answer ({error})", "check metrics")
        return
    values = {name: float(value) for name, value in _METRIC.findall(text)}
    used, total = values.get("master_allocated_bytes"), values.get("master_total_capacity_bytes")
    if used is None or not total or not math.isfinite(used + total):
        yield Finding("capacity", Level.WARNING, "the pool has no memory", "start holders that contribute segments")
        return
    seen = f"{rounded_size(used)} of {rounded_size(total)} used ({used / total:.0%})"
    keys = values.get("master_key_count")
    yield Finding("capacity", Level.OK, seen + (f", {keys:.0f} objects" if keys is not None else ""))
