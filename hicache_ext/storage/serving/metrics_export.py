"""Every counter, level and latency of the tiers at SGLang's Prometheus endpoint (``--enable-metrics``).

SGLang's scheduler processes do not answer ``/metrics`` themselves: prometheus_client's multiprocess mode, set up by
SGLang, transfers values in files. A thread here moves the counts once a second, so that counting stays cheap. Latencies
are passed on call by call.

Names follow from what is counted: ``TierMetrics.add("promotion", "stored")`` is
``hicache_ext_promotion_total{tier=..., reason="stored"}``, a level ``queue_bytes`` is the gauge
``hicache_ext_queue_bytes``, and all latencies are ``hicache_ext_call_seconds``. Counters that belong to no tier
have a prefix (``hicache_ext_pull_decision_total``). So a new count needs no change here except its help text;
docs/metrics.md lists them all.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hicache_ext import __version__
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.metrics import LATENCY_BOUNDS, Observer, TierMetrics

logger = logging.getLogger(__name__)

PREFIX = "hicache_ext_"
CALL_SECONDS = PREFIX + "call_seconds"
BUILD_INFO = PREFIX + "build_info"

_INTERVAL = 1.0
_UNFIT = re.compile(r"[^a-zA-Z0-9_]")

HELP = {
    "get": "Pages read from a tier, by result; tier 'all' is what SGLang was answered.",
    "set": "Pages written to a tier, by result; tier 'all' is what SGLang was answered.",
    "chain_pages": "Pages of the chains that SGLang looked up: asked for, found, used.",
    "bytes": "Bytes read, written and evicted.",
    "corrupt": "Page objects that were refused, by reason.",
    "unsealed": "Pages that were missing in a sealed tier, and are there without a seal.",
    "lossy": "Pages that were restored, but not to the bit, by codec.",
    "evicted": "Pages evicted, by reason.",
    "timeout": "Calls that their deadline ended, by call.",
    "late": "Calls that ended after their deadline, by call.",
    "retry": "Pages whose transfer was tried again, by call.",
    "breaker_probe": "Probes of a tier that is left out, by outcome.",
    "exists_budget": "Look-ups on the scheduler's thread that were answered from what was known, by reason.",
    "io": "Pages moved through the page cache although the tier uses direct I/O.",
    "path_out_of_service": "Paths of a file tier taken out of service.",
    "path_back_in_service": "Paths of a file tier back in service.",
    "node": "Redis nodes that went up or down.",
    "connection": "Connections to Redis nodes, opened and lost.",
    "redirect": "Pages whose slot another Redis node serves.",
    "suspect": "Pages that arrived damaged and were looked at again, by what was found.",
    "scrub": "Pages read in the background because one beside them was bad, and slabs and packs read to the end.",
    "cleared": "Pages removed by a clear in the background.",
    "rejected": "Pages not tried, by reason.",
    "error": "Failures of the medium.",
    "distrusted": "1 once SGLang's release was found to store wrong pages of the model, so that nothing is stored or "
    "served; else 0.",
    "serving": "1 while pages are stored and served; 0 until the weights are identified, and while L1 is of old ones.",
    "config_in_force": "0 after a configuration file that was not taken over; else 1.",
    "unserved_pool": "1 for a host pool that cannot be served, so that nothing is; 0 for the others.",
    "failure": "Calls that raised and were answered as a miss.",
    "admission": "Pages offered to a tier, by whether they were to be written, and why.",
    "dropped_pages": "Pages dropped from a queue in the background.",
    "promotion": "Pages on their way to the nearer tier, by outcome.",
    "prefetch": "Pages fetched ahead of the read, by outcome.",
    "prefetch_bytes": "Bytes fetched ahead of the read, by outcome.",
    "breaker": "State changes of the circuit breaker.",
    "breaker_state": "The circuit breaker now: 0 closed or none, 1 half open, 2 open.",
    "failing": "1 while every read, write or look-up of the tier fails, by which; 0 since one was answered.",
    "tier_up": "1 while the tier can be reached; 0 also before it was reached for the first time.",
    "capacity_bytes": "Bytes that the tier may take; NaN where it has no limit or does not know.",
    "used_bytes": "Bytes that pages take in the tier; NaN where it does not know.",
    "free_bytes": "Bytes that the tier can still take without evicting; NaN where it does not know.",
    "pages": "Pages in the tier; NaN where it does not know.",
    "no_space_since_seconds": "Unix time since which the disk has no room for the tier's capacity; 0 while it has.",
    "evicted_age_seconds": "Seconds since the last use of the pages evicted last; 0 before the first eviction.",
    "hit_share_at_half": "Share of page uses that half the capacity would serve; NaN where the tier does not know.",
    "hit_share_at_capacity": "Share of page uses that the capacity serves; NaN where the tier does not know.",
    "hit_share_at_twice": "Share of page uses that twice the capacity would serve; NaN where the tier does not know.",
    "hit_share_at_four_times": "Share of page uses that four times the capacity would serve; NaN where not known.",
    "tenant_pages": "Pages of each tenant in a file tier with slabs.",
    "tenant_bytes": "Bytes of disk that each tenant's pages take in a file tier with slabs.",
    "tenant_hits": "Pages read from a file tier with slabs, by the tenant whose they are.",
    "tenant_evicted": "Pages that this process evicted, by tenant.",
    "tenant_refused": "Pages that the write budget refused a tenant.",
    "queue_pages": "Pages waiting in a queue.",
    "queue_bytes": "Bytes waiting in a queue.",
    "prefetch_buffer_bytes": "Bytes fetched ahead, read or not, and those being fetched.",
    "pull_decision": "Prefixes in storage, by what was decided about them and why.",
    "pull_tokens": "Tokens of prefixes in storage, pulled or recomputed.",
    "pull_probe": "Measurements of tiers that the pull rule leaves out, by tier.",
    "copy_load": "Copies from host to device, by engine and why it was that one.",
    "copy_back_up": "Copies from device to host, by engine and why it was that one.",
    "linker_ahead": "Requests for which the external linker read while they waited in the queue, by outcome.",
    "linker_load": "Requests whose stored pages the external linker was to load, by outcome.",
    "linker_offload": "Nodes of the prefix tree that the external linker was to store, by outcome.",
    "linker_offload_failed": "Nodes that the external linker did not store, by what failed.",
    "linker_staging_pages": "Pages in the external linker's staging memory, by direction.",
    "linker_waiting": "Nodes that the external linker has not stored yet.",
    "record_request": "Requests for the recording: written, asked again, and dropped with the reason.",
    "pd_write_request": "Requests of a decode node, by what its writer did with them.",
    "pd_write_page": "Pages that a decode node's writer handed to storage, by result; present: were there.",
    "pd_write_write": "Writes of a decode node: calls, and those tried again.",
    "pd_write_copy": "Copies to host memory that could not begin, by reason.",
    "pd_write_dropped": "Pages dropped for want of host memory, by policy.",
    "pd_write_lost": "Pages never written, by reason.",
    "pd_write_hint": "Hints of a decode node, by what became of them.",
    "hints_hint": "Hints that a prefill node read, by what it did with them.",
    "hints_board": "Looks for hints that failed.",
    "hints_page": "Pages that hints named, by outcome.",
    "kv_hints_action": "What requests said about KV, by type of action.",
    "kv_hints_ignored": "Actions of requests that were not followed, by reason.",
    "kv_hints_tenant_refused": "Leases refused, by tenant.",
    "kv_hints_page": "Pages that requests named, by what became of them.",
    "events_block": "Pages that routers were told of, by what became of them.",
    "events_blocks": "Pages that a router is told of now, by medium.",
    "events_batch": "Batches of KV events sent, or failed.",
    "events_look": "Looks at what the tiers hold, for KV events.",
    "events_replay": "Requests of routers that missed KV events, by the answer.",
    "pd_write_failure": "Calls of a decode node's writer that raised.",
    "pd_write_waiting_pages": "Pages of a decode node that wait to be written.",
    "pd_write_host_used_tokens": "Host memory of a decode node in use, in tokens.",
}


def metric_name(counted: str) -> str:
    """Return the Prometheus name of an event or level (with its prefix), without the ``_total`` of counters."""
    return PREFIX + _UNFIT.sub("_", counted)


class Exporter:
    """Moves the counts of ``sources()`` into prometheus_client until it is closed. One per backend."""

    def __init__(self, sources: Callable[[], Iterable[TierMetrics]], labels: Mapping[str, str]) -> None:
        self._sources = sources
        self._labels = {**dict.fromkeys(_LABELS, "0"), "model_name": "", **labels}
        self._watched: dict[TierMetrics, Observer] = {}
        self._loop = BackgroundLoop("hicache-metrics", self._export_quietly)
        _build_info().labels(**self._labels, version=__version__).set(1)
        self.export()
        self._loop.wake(_INTERVAL)

    def export(self) -> None:
        """Export everything now."""
        sources = list(self._sources())
        for metrics in sources:
            self._watch(metrics)
            self._export_counts(metrics)
            for (name, reason), value in metrics.levels().items():
                self._child(_gauge(metrics.prefix + name), metrics, reason=reason).set(value)
        for metrics in [known for known in self._watched if known not in sources]:
            self._let_go(metrics, sources)

    def _export_counts(self, metrics: TierMetrics) -> None:
        for event, reason, amount in metrics.growth():
            self._child(_counter(metrics.prefix + event), metrics, reason=reason).inc(amount)

    def _let_go(self, metrics: TierMetrics, sources: Sequence[TierMetrics]) -> None:
        """Export the last counts of a removed tier and reset its levels."""
        metrics.unwatch(self._watched[metrics])
        self._export_counts(metrics)
        successors = [source for source in sources if (source.tier, source.prefix) == (metrics.tier, metrics.prefix)]
        for name, reason in metrics.levels():
            if not any((name, reason) in source.levels() for source in successors):
                self._child(_gauge(metrics.prefix + name), metrics, reason=reason).set(_WHEN_GONE.get(name, 0))
        del self._watched[metrics]

    def close(self) -> None:
        """Export one last time, release all tiers, end the thread. Idempotent."""
        if not self._loop.stopping:
            self._loop.stop()
            self._export_quietly()
            # The server keeps running after a detach: its tiers must not be shown as up forever.
            self._sources = lambda: ()
            self._export_quietly()

    def _export_quietly(self) -> float:
        try:
            self.export()
        except Exception:
            logger.exception("hicache_ext: exporting metrics")
        return _INTERVAL

    def _watch(self, metrics: TierMetrics) -> None:
        """Pass on every latency to the histogram."""
        if metrics not in self._watched:
            histogram = _histogram()
            observe = functools.lru_cache(None)(lambda operation: self._child(histogram, metrics, operation=operation))

            def pass_on(operation: str, seconds: float) -> None:
                try:
                    observe(operation).observe(seconds)
                except Exception as error:  # noqa: BLE001 - the disk of the file behind it may be full
                    logger.debug("hicache_ext: a latency was not exported: %s", error)

            for operation in metrics.calls():
                observe(operation)
            self._watched[metrics] = pass_on
            metrics.watch(pass_on)

    def _child(self, family: Any, metrics: TierMetrics, **more: str) -> Any:
        return family.labels(**self._labels, tier=metrics.tier, **more)


def export_if_possible(sources: Callable[[], Iterable[TierMetrics]], labels: Mapping[str, str]) -> Exporter | None:
    """Start an exporter to this server's Prometheus endpoint. Never raises: metrics must not prevent a start."""
    try:
        return Exporter(sources, labels)
    except Exception as error:  # noqa: BLE001 - prometheus_client missing, or its directory gone
        logger.warning("hicache_ext: no metrics at the Prometheus endpoint: %s", error)
        return None


_LABELS = ("model_name", "tp_rank", "pp_rank", "dp_rank", "attn_cp_rank", "dcp_rank")
"""Label names as in SGLang's own metrics, so that both can be joined."""

_WHEN_GONE = {"tier_up": math.nan}
"""Levels of a removed tier other than 0: a tier taken out of the configuration is not down."""


# One family per name and process, shared by all exporters: prometheus_client keeps values by name. They are in no
# registry, because the process that answers /metrics collects from the files of all processes.


@functools.lru_cache(None)
def _family(kind: str, name: str, about: str, *labels: str, **more: Any) -> Any:
    import prometheus_client

    return getattr(prometheus_client, kind)(name, about, [*labels, *_LABELS], registry=None, **more)


def _counter(event: str) -> Any:
    return _family("Counter", metric_name(event), _help(event), "tier", "reason")


def _gauge(name: str) -> Any:
    labels = "tier", "reason"
    return _family("Gauge", metric_name(name), _help(name), *labels, multiprocess_mode="mostrecent")


def _build_info() -> Any:
    return _family("Gauge", BUILD_INFO, "Always 1; what runs.", "version", multiprocess_mode="mostrecent")


def _histogram() -> Any:
    about = "Seconds of whole calls on a tier, by operation."
    return _family("Histogram", CALL_SECONDS, about, "tier", "operation", buckets=LATENCY_BOUNDS)


def _help(counted: str) -> str:
    return HELP.get(counted, f"What the tier counts as {counted!r}, by reason.")
