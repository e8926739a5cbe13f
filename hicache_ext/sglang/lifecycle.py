"""The life of a backend from construction to close: registration, weights updates, statistics, metrics.

backend.py handles the pages themselves.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.observability.metrics_collector import StorageMetrics

from hicache_ext.config import HicacheExtConfig, load_config, read_document
from hicache_ext.config.model import hints_over
from hicache_ext.config.problems import listed
from hicache_ext.errors import UnsupportedError
from hicache_ext.kernels.selection import kernel_metrics, make_selector
from hicache_ext.page.identity import PageIdentity, Shard
from hicache_ext.page.transforms.header import LOSSY_CODECS
from hicache_ext.runtime.call_deadline import answering_at_once
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics, TransferSamples
from hicache_ext.runtime.threads import call_within
from hicache_ext.sglang import kernel_hooks
from hicache_ext.sglang.launch_arguments import longest_prompt, read_launch_facts, resolved_or, unicode_text
from hicache_ext.sglang.plugin import not_in_force
from hicache_ext.sglang.process import attached
from hicache_ext.sglang.releases import (
    installed_release,
    rank_replicated,
    refuse_old_release,
    untested,
)
from hicache_ext.sglang.served_pools import KV, ONE_FOR_ALL, ServedPools
from hicache_ext.sglang.used_names import (
    ADAPTERS,
    DECODE_WRITER,
    DRAFTS,
    HOOKED,
    LINKER,
    PREFILL_COST,
    REQUEST_TRACES,
    STORAGE,
    Feature,
    check_installed,
    lacking,
)
from hicache_ext.storage.contract import tenants
from hicache_ext.storage.contract.abilities import HintBoard, board_among
from hicache_ext.storage.contract.reports import reported
from hicache_ext.storage.contract.store import PageKeys
from hicache_ext.storage.opening import open_tiers, server_view
from hicache_ext.storage.serving.kv_hints import KvHints, Said
from hicache_ext.storage.tiering import observers

if TYPE_CHECKING:
    from hicache_ext.storage.serving.config_file import ConfigFile
    from hicache_ext.storage.serving.hints import HintSender
    from hicache_ext.storage.tiering.pulling import PullRule
    from hicache_ext.storage.tiering.recording import Recorder

logger = logging.getLogger(__name__)

_NO_DEADLINE = nullcontext()
_HINTS_INTERVAL = 0.5
"""Seconds between two polls of a prefill node for hints."""
_HINTS_TIMEOUT = 1.0
"""Seconds that close() waits for a hint that is being followed."""
_HINTED_BYTES = 32 * 1024 * 1024
"""Bytes of pages that one batch of a hint moves."""
_HINTED_KEYS = 2048
"""Most keys that one batch of a hint looks up."""
_LOAD_TIMEOUT = 20.0
"""Seconds that startup, or attaching to a running server, waits for SGLang's page hashes."""
_SMALL_PAGES = 16
"""Tokens per page below which a warning is logged; SGLang's default is one token per page."""


# Calls from SGLang never raise: it would lose the operation at best and a thread at worst. A failure counts as a miss.

_Method = TypeVar("_Method", bound=Callable[..., Any])


def answering(otherwise: Callable[..., Any]) -> Callable[[_Method], _Method]:
    """Make a method that SGLang calls never raise: on failure it calls its object's ``report_failure`` and returns
    ``otherwise(*arguments)``, or ``otherwise()`` where the arguments are unusable.

    Arguments that the method does not have are ignored: SGLang passes some that nobody here needs, and a later release
    may pass more (used_names.py warns of it).
    """

    def decorate(method: _Method) -> _Method:
        names = tuple(inspect.signature(method).parameters)[1:]
        known = frozenset(names)

        @functools.wraps(method)
        def guarded(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            if len(args) > len(names) or not kwargs.keys() <= known:
                args, kwargs = args[: len(names)], {name: kwargs[name] for name in names if name in kwargs}
            try:
                return method(self, *args, **kwargs)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - SystemExit would end SGLang's I/O thread
                self.report_failure(method.__name__, error)
                try:
                    return otherwise(*args, **kwargs)
                except Exception:  # noqa: BLE001 - the arguments are to blame; already reported
                    return otherwise()

        guarded.reports_failures = True  # type: ignore[attr-defined]
        return cast("_Method", guarded)

    return decorate


def guarded_calls(backend: type) -> list[str]:
    """Return the names of a class's methods whose failures are reported."""
    return [name for name in dir(backend) if hasattr(getattr(backend, name), "reports_failures")]


class BackendLifecycle(HiCacheStorage):  # type: ignore[misc]  # SGLang is untyped here
    """See the module docstring. Scheduler thread only, except ``report_failure``."""

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None, *_: Any, **__: Any
    ) -> None:
        """Raises ConfigError, StoreSetupError or UnsupportedError with one sentence: SGLang then does not start."""
        refuse_old_release()
        refuse_release_without(STORAGE, "storage", "use another release")
        self._facts = read_launch_facts()
        if self._facts.role_may_change:
            reason = "tiers are those of the role at the start, and with each switch SGLang clears the whole storage"
            raise UnsupportedError("--enable-pd-role-switch", reason, "leave it out, or the storage backend")
        self._lower_ranks = int(storage_config.tp_rank or 0) + int(storage_config.pp_rank or 0)
        view = server_view(self._facts.role, int(storage_config.tp_rank or 0))
        if self._facts.config_file is not None and os.path.isfile(self._facts.config_file):
            # SGLang's YAML parser reads 010 as 8 and takes the last value of a duplicate key: check the file again.
            read_document(self._facts.config_file)
        configured = load_config(storage_config.extra_config or {})
        self._config: HicacheExtConfig = view(configured)
        # Pages from a lossy tier, and everything computed from them, belong to identities of their own.
        facts = self._facts
        if configured.lossy_codecs:
            from hicache_ext.page.transforms.codec import lossy_fact

            facts = replace(facts, compute=lossy_fact(facts.compute, configured.lossy_codecs))
        self.served = ServedPools(storage_config, self._config, facts, self._register_identity, self.clear)
        self._failures = TierMetrics("backend")
        self._failures.declare({"failure": [*guarded_calls(type(self)), "host_indices"]})
        self._extra_metrics: dict[TierMetrics, Callable[[], None]] = {}
        self._log = LimitedLog(logger, 1.0)
        self._prefetched = TransferSamples()
        self._backed_up = TransferSamples()
        kernel_hooks.use(make_selector(self._config.kernels))
        # SGLang constructs its backend on the scheduler's thread. Outside a server every thread may wait.
        self._scheduler = threading.get_ident() if self._facts.model_path is not None else None
        self._recorder: Recorder | None = None
        self._config_file: ConfigFile | None = None
        self._pull_rule: PullRule | None = None
        self._kv_hints: KvHints | None = None
        self.hint_sender: HintSender | None = None
        """Set if hints are on and this process speaks for its replica."""
        self.pd_metrics = TierMetrics("pd_write", prefix="pd_write_")
        """Metrics of a decode node's writer and of the hints it sends."""
        self._spans = observers.begin_tracing(self._config.tracing)
        with ExitStack() as closing:
            closing.callback(lambda: observers.end(self._spans))
            exporting = closing.enter_context(ExitStack())  # ends late, to export what the others count while closing
            closing.callback(lambda: observers.end(self._recorder))
            # SGLang asks all ranks of a replica for the same pages, so one speaks for all.
            is_speaker = not any(getattr(storage_config, rank, 0) for rank in ONE_FOR_ALL)
            if is_speaker and self._config.record is not None:
                from hicache_ext.sglang.announcements import recording_of

                self._recorder = recording_of(self._config, storage_config, self.served)
            if self._recorder is not None:
                self.export_also(self._recorder.metrics)
            self._store = open_tiers(self._config, writers=_writer_count(storage_config))
            closing.callback(self._store.close)
            self._start_features(storage_config, view, closing, exporting, is_speaker)
            attached.add(self)
            closing.callback(attached.discard, self)
            self._warn_at_start()
            logger.info(
                "hicache_ext: role %s, model %r revision %r epoch %s, tiers %s",
                self._config.role,
                self.served.model.id,
                self.served.model.revision,
                self.served.model.weights_epoch,
                self._store.describe().details,
            )
            self.served.start()
            self._load_page_hashes()
            self._closing = closing.pop_all()

    def _load_page_hashes(self) -> None:
        """Have SGLang build or load its extension for page hashes, in a server. Otherwise the first prompt waits for it
        (ten seconds, once per machine), and a flush meanwhile ends the server: SGLang's threads do not stop in time. A
        build that takes longer than ``_LOAD_TIMEOUT`` goes on in background: a stopped process may hold its lock."""
        if self._facts.model_path is None:
            return

        def load() -> None:
            try:
                from sglang.srt.mem_cache.utils import get_hash_str

                get_hash_str([1])
            except Exception as error:  # noqa: BLE001 - the interface in use may need no page hashes
                logger.error(
                    "hicache_ext: SGLang cannot load its extension for page hashes, without which HiCache ends the "
                    "server at the first prompt (hicache-ext doctor says what to install): %s",
                    error.__cause__ or error,
                )

        if call_within(_LOAD_TIMEOUT, "hicache-ext-page-hashes", load) is None:
            logger.warning(
                "hicache_ext: SGLang is building its extension for page hashes; the first prompt waits for it"
            )

    # -- a feature's modules are imported only where it is switched on ------------------------------------------------

    def _start_features(
        self,
        ranks: HiCacheStorageConfig,
        view: Callable[[HicacheExtConfig], HicacheExtConfig],
        closing: ExitStack,
        exporting: ExitStack,
        is_speaker: bool,
    ) -> None:
        """Start the configured features. Raises ConfigError or MissingPackageError."""
        config = self._config
        if self._facts.config_file is not None or config.watch_config:
            from hicache_ext.storage.serving.config_file import config_file_of

            self._config_file = config_file_of(
                self._facts.config_file,
                self._store,
                config,
                view=view,
                # What lossy codecs restore differs from what is computed, which is no reason for distrust.
                distrust=None if config.lossy_codecs else self.distrust,
                port=resolved_or("port", None),
            )
            if self._config_file is not None:
                closing.callback(self._config_file.close)
        if config.pd.pull.mode != "off":
            from hicache_ext.sglang.scheduler_hooks import prefill_cost
            from hicache_ext.storage.tiering.pulling import PullRule

            self._pull_rule = PullRule(config.pd.pull, prefill_cost())
            self.export_also(self._pull_rule.metrics)
        if config.pd.hints.enabled and config.role == "prefill":
            from hicache_ext.storage.serving.hints import HintReceiver

            board = self._hint_board(config.retrieve_locations)
            hints = HintReceiver(board, self._bring_inward, self._hint_scope, _HINTS_INTERVAL)
            closing.callback(lambda: hints.close(_HINTS_TIMEOUT))
            self.export_also(hints.metrics)
        if is_speaker:
            self._begin_kv_hints(closing)
        if is_speaker and config.events is not None:
            from hicache_ext.sglang.announcements import kv_events

            events = kv_events(config, config.events, ranks, self.served, self._store)
            if events is not None:
                closing.callback(events.close)
                self.export_also(events.metrics)
        if resolved_or("enable_metrics", False):
            from hicache_ext.storage.serving.metrics_export import export_if_possible

            exporter = export_if_possible(self._export_sources, _process_labels(ranks))
            if exporter is not None:
                exporting.callback(exporter.close)

    def _page_size(self) -> int:
        """Return the tokens per page; 0 while unknown."""
        pool = self.served.usable(KV)
        return 0 if pool is None or pool.pages is None else self.served.page_size

    def _begin_kv_hints(self, closing: ExitStack) -> None:
        tell_prefill = None
        if self._config.pd.hints.enabled:
            from hicache_ext.storage.serving.hints import HintSender

            board = self._hint_board(self._config.store_locations)
            sender = HintSender(board, lambda: self._hint_scope() or b"", self.pd_metrics, self.stored_leading)
            self.hint_sender = sender
            tell_prefill = sender.announce
            closing.callback(lambda: sender.close(_HINTS_TIMEOUT))
            self.export_also(self.pd_metrics)
        longest, tiers = self._config.longest_lease, lambda: self._store.tiers
        self._kv_hints = hints = KvHints(longest, tiers, self._page_size, self._bring_inward, tell_prefill)
        closing.callback(lambda: hints.close(_HINTS_TIMEOUT))
        self.export_also(hints.metrics)

    # -- hints, for the pages of this server's KV pool (storage/serving/) ------------------------------------------

    def _hint_board(self, locations: Sequence[str]) -> Callable[[], HintBoard]:
        """Return a function that finds the board of the tier that carries hints from decode to prefill nodes."""
        over = hints_over(self._config.pd.hints, locations) or ""
        return lambda: board_among(self._store.tiers, over)

    def _hint_scope(self) -> bytes | None:
        """Return a digest that is equal on nodes with the same weights and page size; None until both are known."""
        pool = self.served.usable(KV)
        if pool is None or not pool.identities:
            return None
        identity = pool.identities[0]
        common = replace(identity.pool, kind="hint", layout="", segments=(), geometry=())
        return PageIdentity(identity.model, common, Shard()).digest()

    def _bring_inward(self, page_hashes: Sequence[bytes]) -> Counter[str]:
        """Move pages that are likely to be requested soon to the tier ``promote_to`` [threads of hints]."""
        pool = self.served.usable(KV)
        outcomes: Counter[str] = Counter()
        if pool is None or pool.pages is None:
            return outcomes
        batch = max(1, min(_HINTED_KEYS, _HINTED_BYTES // pool.pages.page_bytes))
        for first in range(0, len(page_hashes), batch):
            if self.served.unavailable or outcomes["absent"] or outcomes["dropped"]:
                outcomes["dropped"] += len(page_hashes) - first
                break
            for digest in pool.digests:
                keys = [digest + page_hash for page_hash in page_hashes[first : first + batch]]
                outcomes.update(self._store.bring_inward(keys))
        return outcomes

    # -- registration ----------------------------------------------------------------------------------------------

    # Both ignore additional arguments of later SGLang releases, as all ``answering`` methods do.
    def register_mem_pool_host(self, mem_pool_host: Any, *_: Any, **__: Any) -> None:
        self.mem_pool_host = mem_pool_host
        self.served.bind(KV, mem_pool_host)
        of_shard = getattr(mem_pool_host, "size", 0) * getattr(mem_pool_host, "dcp_size", 1)
        tokens = getattr(mem_pool_host, "logical_size", of_shard)
        self.warn_of_sizes(mem_pool_host.page_size, tokens, "host memory", "--hicache-ratio or --hicache-size")

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any, *_: Any, **__: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self.served.try_bind(name_of(host_pool_name), host_pool)

    def _register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        with self._store_call():
            self._store.register_identity(digest, document)

    # -- pages that were found wrong -------------------------------------------------------------------------------

    def distrust(self, why: str) -> None:
        """Store and serve nothing until a restart, and remove this rank's pages, because answers from restored pages
        differed from computed ones [control]."""
        logger.error(
            "hicache_ext: SGLANG %s STORES WRONG PAGES OF %r: %s. Nothing is stored or served until a restart, and the "
            "pages are removed. Before it, give every server of the model another hicache_ext.model.weights_epoch, so "
            "that none meets the pages that others wrote (docs/runbook.md#hicachedistrusted)",
            installed_release(),
            self.served.model.id,
            why,
        )
        if not self.served.distrust():
            logger.warning("hicache_ext: some of the pages are removed later")

    # -- weights updates -------------------------------------------------------------------------------------------

    fed_by_decode_writer = False
    """Whether our decode manager writes through this backend."""

    @property
    def flushes_with_cache(self) -> bool:
        """Whether SGLang's flush empties the queues in front of this backend; a decode node's offload does not."""
        return hasattr(self, "registered_pools") and not self.fed_by_decode_writer

    def take_hints(self, said: Said, request: Any, ignore: str) -> None:
        """Queue the KV hints of one of SGLang's requests, unless there is a reason to ``ignore`` them [scheduler]. One
        rank acts for all."""
        if self._kv_hints is not None:
            tokens = request.origin_input_ids
            self._kv_hints.offer(said, tokens, request.extra_key, request.cache_salt, ignore=ignore)

    def note_tenant(self, said: object, request: Any) -> None:
        """Record which tenant owns the pages of one of SGLang's requests [scheduler]. Each rank does so for its own."""
        if (owners := tenants.in_force()) is not None:
            keys = request.extra_key, request.cache_salt
            owners.offer(owners.tenant_of(said, *keys), request.origin_input_ids, *keys, self._page_size())

    @answering(lambda *_, **__: 0)
    def stored_leading(self, keys: Sequence[str], name: str = KV) -> int:
        """Return how many leading pages have every part in the pool, for prefill nodes to find [pd writer, hints]."""
        pool = self.served.usable(name)
        if pool is None or not pool.digests:
            return 0
        first = PageKeys.of_hashes(pool.digests[0], keys)
        return min((self._store.count_leading_in_pool(first.under(digest)) for digest in pool.digests), default=0)

    # -- administration --------------------------------------------------------------------------------------------

    @answering(lambda *_, **__: False)
    def clear(self) -> bool:
        """Remove the pages of this rank's own identities and no others. Does not wait for the disk."""
        digests = self.served.digests_to_clear()
        if digests is not None:
            with self._store_call():
                self._store.clear(digests)
        return True

    @answering(lambda *_, **__: None)
    def get_stats(self) -> StorageMetrics | None:
        if self._prefetched.empty and self._backed_up.empty:
            return None
        prefetch_pages, prefetch_bandwidth = self._prefetched.drain()
        backup_pages, backup_bandwidth = self._backed_up.drain()
        return StorageMetrics(
            prefetch_pgs=prefetch_pages,
            backup_pgs=backup_pages,
            prefetch_bandwidth=prefetch_bandwidth,
            backup_bandwidth=backup_bandwidth,
        )

    @answering(lambda *_, **__: None)
    def close(self) -> None:
        self.served.closed = True
        self._closing.close()

    def export_also(self, metrics: TierMetrics, set_levels: Callable[[], None] = lambda: None) -> None:
        """Export ``metrics`` together with those of the tiers, as long as this backend lives.

        ``set_levels`` is called before each export [exporter]."""
        self._extra_metrics[metrics] = set_levels

    def _export_sources(self) -> list[TierMetrics]:
        for set_levels in list(self._extra_metrics.values()):
            set_levels()
        self._failures.set_level("distrusted", "", float(self.served.distrusted))
        self._failures.set_level("serving", "", float(not self.served.unavailable))
        in_force = self._config_file is None or self._config_file.in_force
        self._failures.set_level("config_in_force", "", float(in_force))
        for pool in list(self.served.bound) + list(self.served.unserved):
            self._failures.set_level("unserved_pool", pool, float(pool in self.served.unserved))
        own = [self._failures, kernel_metrics, *self._extra_metrics]
        return [*own, self._store.metrics, *reported(self._store.tiers)]

    def _warn_at_start(self) -> None:
        if self._facts.model_path is None:
            return
        policy = resolved_or("hicache_storage_prefetch_policy", None)
        if policy == "best_effort" and self._config.role != "decode":
            logger.warning(
                "hicache_ext: --hicache-storage-prefetch-policy best_effort: SGLang waits for no page, so that on an "
                "idle server nothing comes from storage; timeout (its default) and wait_complete wait"
            )
        if lossy := {name: tier.codec for name, tier in self._config.tiers.items() if tier.codec in LOSSY_CODECS}:
            logger.warning(
                "hicache_ext: what is restored from %s is not what was computed, and no exact server reads this one's "
                "pages (docs/codecs.md)",
                listed([f"tier {name} ({codec})" for name, codec in lossy.items()]),
            )
        names = ", ".join(f"--{name.replace('_', '-')}" for name in self._facts.unknown_arguments)
        unknown = f"hicache_ext does not know {names}: pages are shared with servers that were given the same"
        for sentence in (untested(installed_release()), unknown if names else None):
            if sentence is not None and not self._lower_ranks:
                logger.warning("%s", sentence)
        unused = {
            ADAPTERS: not self._facts.lora,
            DECODE_WRITER: self._config.role != "decode",
            DRAFTS: True,  # reported where a pool needs it
            LINKER: True,  # the linker does not start without its hooks
            PREFILL_COST: self._pull_rule is None,
            REQUEST_TRACES: self._spans is None and self._recorder is None,
        }
        for sentence in not_in_force([feature for feature in HOOKED if not unused.get(feature)]).values():
            logger.warning("hicache_ext: %s", sentence)

    def warn_of_sizes(self, page_size: int, tokens: int, memory: str, remedy: str) -> None:
        """Warn of sizes that make storage slow or useless: only ``tokens`` tokens of one prompt fit into ``memory``."""
        if self._facts.model_path is None or self._lower_ranks:
            return
        if page_size < _SMALL_PAGES:
            sentence = "hicache_ext: --page-size %d: a prompt of 4,000 tokens makes %s keys, and %d with --page-size 64"
            logger.warning(sentence, page_size, f"{4000 // page_size:,}", 4000 // 64)
        longest = longest_prompt()
        if self._config.role != "decode" and longest is not None and tokens < longest:
            sentence = (
                "hicache_ext: %s holds %s tokens of a prompt, which may have %s: the rest is computed, whatever is"
            )
            logger.warning(f"{sentence} stored; raise %s", memory, f"{tokens:,}", f"{longest:,}", remedy)

    def _store_call(self) -> AbstractContextManager[None]:
        """Return a context for store calls: on the scheduler's thread, guards answer immediately from what is known."""
        return answering_at_once() if threading.get_ident() == self._scheduler else _NO_DEADLINE

    def declare_failures(self, calls: Iterable[str]) -> None:
        """Declare further methods whose failures may be reported."""
        self._failures.declare({"failure": calls})

    def report_failure(self, call: str, error: BaseException) -> None:
        """Count a failure that SGLang must not see; log it with its traceback, at most once a second."""
        self._failures.add("failure", call)
        words = "hicache_ext: %s failed and is answered as a miss: %s"
        self._log.log(logging.ERROR, "failure", words, call, error, exc_info=error)


def name_of(name: Any) -> str:
    return str(getattr(name, "value", name))


def refuse_release_without(feature: Feature, whose: str, remedy: str) -> None:
    """Raise UnsupportedError if the installed release lacks something that a feature needs."""
    if (words := lacking(check_installed(), feature)) is not None:
        remedy += "; hicache-ext doctor shows all that is missing"
        raise UnsupportedError(f"SGLang {installed_release()}", f"it lacks {words}, which {whose} needs", remedy)


def _writer_count(storage_config: HiCacheStorageConfig) -> int:
    """Return how many ranks write pages of their own; among ranks that hold the same pages only one writes."""
    sizes = ["pp_size", "attn_cp_size"] + ([] if rank_replicated(storage_config) else ["tp_size"])
    return math.prod(max(1, int(getattr(storage_config, size, None) or 1)) for size in sizes)


def _process_labels(config: HiCacheStorageConfig) -> dict[str, str]:
    """Return labels for the model and the process of a server, like those of SGLang's own metrics."""
    ranks = ("tp_rank", "pp_rank", "dp_rank", "attn_cp_rank", "dcp_rank")
    return {
        "model_name": unicode_text(config.model_name or ""),
        **{rank: str(getattr(config, rank, None) or 0) for rank in ranks},
    }
