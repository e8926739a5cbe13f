"""The findings of ``hicache-ext doctor`` about a Mooncake pool."""

from __future__ import annotations

import math
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

from hicache_ext.config.values import rounded_size
from hicache_ext.packages import installed_version
from hicache_ext.storage.contract.diagnosis import Finding, Level
from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.contract.trial import try_store
from hicache_ext.storage.tiers.mooncake.config import MooncakeTierConfig
from hicache_ext.storage.tiers.mooncake.engine import Attachment

_PACKAGES = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")
_METRIC = re.compile(r"^(\w+)(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


def examine(store: PageStore, tier: MooncakeTierConfig, attachment: Attachment) -> list[Finding]:
    """Return findings about the pool. Never raises; the tier's timeouts bound every step."""
    findings = [_version()]
    if attachment.port_answers(tier.longest_call):
        findings.append(Finding("master", Level.OK, f"{tier.master} accepts connections"))
    else:
        findings.append(Finding("master", Level.ERROR, f"{tier.master} does not answer", "start mooncake_master"))
    if attachment.attached:
        findings.extend(_round_trip(store))
    else:
        findings.append(
            Finding("client", Level.ERROR, "not attached to the pool", "see the log for why; it retries by itself")
        )
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
    installed = [f"{package} {version}" for package in _PACKAGES if (version := installed_version(package)) is not None]
    if len(installed) > 1:
        return Finding(
            "client library", Level.ERROR, " and ".join(installed), "uninstall one: they overwrite each other"
        )
    return Finding("client library", Level.OK, "".join(installed) or "mooncake, not installed as a package")


def _round_trip(store: PageStore) -> Iterator[Finding]:
    full = store.metrics.value("rejected", "full")
    for finding in try_store(store):
        if finding.level is Level.ERROR and store.metrics.value("rejected", "full") > full:
            finding = replace(finding, remedy="add segments, or lower --eviction_high_watermark_ratio")
        yield finding


def _capacity(tier: MooncakeTierConfig) -> Iterator[Finding]:
    if tier.metrics is None:
        yield Finding("capacity", Level.NOTE, "not known", "set metrics to the master's --metrics_port address")
        return
    try:
        # Proxies from the environment must not be used for the cluster's own servers.
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
