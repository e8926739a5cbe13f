"""Every name, signature and hook of SGLang that this package uses: one list, and its check against the sources of the
installed release.

``hicache-ext doctor`` prints the findings, and plugin.py registers the hooks. Imports neither torch nor SGLang: it
reads SGLang's sources. That works where SGLang cannot be imported (no GPU, a release other than the installed one),
sees attributes that only instances have (``self.x = ...``), and changes nothing.

If a release lacks a name that a feature needs, the feature is off there. With ``since``, only releases from that one on
must have the name; older ones do without it (see releases.py).
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import Parameter
from pathlib import Path
from typing import Any

from hicache_ext.sglang.releases import comes_with, installed_release


@dataclass(frozen=True, slots=True)
class Feature:
    """What a user loses if any of the names or hooks that it needs is missing.

    ``partly`` marks hooks that only observe: the existing ones stay in force although the feature counts as off.
    """

    name: str
    loss: str
    partly: bool = False


STORAGE = Feature("storage", "the server cannot start with this backend")
WEIGHTS_UPDATES = Feature("weights updates", "do not update weights online", partly=True)
MODEL_WEIGHTS = Feature("weights at the start", "weights are identified by their files as they are after the load")
ADAPTERS = Feature("LoRA adapters", "adapters cannot be told apart", partly=True)
COPIES = Feature("copy engines", "copies between host and device stay with SGLang's own path")
DECODE_WRITER = Feature("decode writer", "a decode node writes as SGLang does")
DRAFTS = Feature("drafts of every rank", "rank 0 alone writes the draft of an MLA model, whose heads differ per rank")
EVENTS = Feature("KV events", "routers are told nothing")
PREFILL_COST = Feature("cost of prefill", "pull or recompute does not know what a prefill takes")
REQUEST_TRACES = Feature(
    "traces of requests", "spans of storage do not say which request they belong to, and nothing is recorded"
)
KV_HINTS = Feature("hints of requests", "no_store, retain and all else that requests say about KV is ignored")
LINKER = Feature("external linker", "pages move through HiCache's host memory alone")

HOOKED = (
    *(WEIGHTS_UPDATES, MODEL_WEIGHTS, ADAPTERS, COPIES, DECODE_WRITER, DRAFTS, PREFILL_COST, REQUEST_TRACES),
    *(LINKER, KV_HINTS),
)
"""Features that hook functions of SGLang, through its plug-ins."""
FEATURES = (STORAGE, *HOOKED, EVENTS)

LAUNCH_ARGUMENTS = "sglang.srt.server_args.ServerArgs"
"""Owner of the launch arguments, which SGLang declares in many classes (``srt/arg_groups/fields``)."""


@dataclass(frozen=True, slots=True)
class Use:
    """``names`` of ``owner``, a dotted class or module of SGLang; "old|new" is found under either name.

    ``takes`` lists the parameters of a function that are used (``names`` has one item then), without ``self``; "name?"
    is optional. ``answered`` means that SGLang calls a function of ours, which ignores all other parameters.
    ``may_go``: nothing is lost without it. ``before`` is the first release without it, or without need of it. ``hook``
    is our function that hooks it, "module.name" of this package; its first word is SGLang's HookType.
    """

    owner: str
    names: tuple[str, ...]
    features: tuple[Feature, ...]
    takes: tuple[str, ...] = ()
    answered: bool = False
    since: str = ""
    hook: str = ""
    may_go: bool = False
    before: str = ""

    @property
    def target(self) -> str:
        """Dotted name of a hooked function."""
        return f"{self.owner}.{self.names[0]}"

    @property
    def kind(self) -> str:
        """SGLang's HookType: "before", "after", "around" or "replace"."""
        return self.hook.partition(".")[2].partition("_")[0]

    @property
    def function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = pkgutil.resolve_name(f"{__package__}.{self.hook}")
        return function


_TABLE = """
storage
  mem_cache.storage.backend_factory.StorageBackendFactory
    _create_dynamic_backend
  mem_cache.hicache_storage.HiCacheStorage
    register_mem_pool_host(mem_pool_host) <-
    register_mem_host_pool_v2(host_pool host_pool_name) <-
    batch_exists(keys extra_info?) <-
    batch_exists_v2(keys pool_transfers extra_info?) <-
    batch_get_v1(keys host_indices extra_info?) <-
    batch_set_v1(keys host_indices extra_info?) <-
    batch_get_v2(transfers extra_info?) <-
    batch_set_v2(transfers extra_info?) <-
    exists(key) <-
    get(key target_location target_sizes) <-
    may go batch_get(keys target_locations target_sizes) <-
    set(key value target_location target_sizes) <-
    may go batch_set(keys values target_locations target_sizes) <-
    clear() <-
    get_stats() <-
  mem_cache.hicache_storage.HiCacheStorageConfig
    tp_rank tp_size pp_rank pp_size attn_cp_rank attn_cp_size is_mla_model|is_rank_replicated model_name tp_lcm_size
    extra_config dp_rank
    since 0.5.23 dcp_rank dcp_size
  mem_cache.hicache_storage: HiCacheStorageExtraInfo
  mem_cache.hicache_storage.PoolName: KV MAMBA
  mem_cache.hicache_storage.PoolHitPolicy
    ALL_PAGES TRAILING_PAGES
    since 0.5.22 BLOCK_GROUPS
  mem_cache.hicache_storage.PoolTransfer: name host_indices keys hit_policy
  mem_cache.hicache_storage.PoolTransferResult: __init__(kv_hit_pages extra_pool_hit_pages restorable_prefix_pages)
  observability.metrics_collector.StorageMetrics: __init__(prefetch_pgs backup_pgs prefetch_bandwidth backup_bandwidth)
  mem_cache.utils
    may go get_hash_str(token_ids)
  mem_cache.pool_host.base.HostKVCache
    page_size size layout dtype kv_buffer dcp_rank dcp_size
    get_dummy_flat_data_page
    get_data_page(index)
    set_from_flat_data_page(index data_page)
  mem_cache.pool_host.mha.MHATokenToKVPoolHost
    get_page_buffer_meta(indices)
    get_split_heads_page_buffer_meta(indices split_factor)
  mem_cache.pool_host.mla.MLATokenToKVPoolHost: get_page_buffer_meta(indices)
  # What the identity of pages and the role of the server are read from. A name that is gone would read as "not set".
  runtime_context: get_server_args get_memory get_model get_spec
  arg_groups.arg_utils
    namespace_of(cls)
    record_fields(cls)
  server_args.ServerArgs
    model_path revision load_format enable_lora kv_cache_dtype dtype quantization speculative_draft_model_path
    speculative_draft_model_revision speculative_draft_load_format disaggregation_mode enable_metrics
    hicache_storage_backend hicache_storage_backend_extra_config enable_hierarchical_cache
    disaggregation_decode_enable_offload_kvcache enable_weights_cpu_backup json_model_override_args modelopt_quant
    model_loader_extra_config quantization_param_path decrypted_config_file decrypted_draft_config_file forward_hooks
    rl_quant_profile weight_cache_mode modelopt_checkpoint_restore_path
every hook
  plugins.hook_registry: HookType
  plugins.hook_registry.HookRegistry: register(target hook hook_type)
weights updates
  managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager
    update_weights_from_disk update_weights_from_distributed <- model_weights.before_update
    update_weights_from_tensor update_weights_from_ipc <- model_weights.before_update
    # Between begin and end somebody else may write the weights, with no call at all (P2P, RDMA).
    begin_weight_update end_weight_update <- model_weights.before_update
    release_memory_occupation <- model_weights.before_release
    tp_cpu_group
  managers.io_struct.ReleaseMemoryOccupationReqInput: tags
  managers.scheduler.Scheduler: flush_cache <- model_weights.after_flush
weights at the start
  model_executor.model_runner.ModelRunner
    load_model <- model_weights.around_load
    # SGLang can load weights while it does other things at the start.
    finalize_startup_weight_load <- model_weights.after_late_load
    model_config is_draft_worker kv_cache_dtype kv_cache_dtype_str
  configs.model_config.ModelConfig: model_path revision dtype quantization
LoRA adapters
  lora.lora_manager.LoRAManager
    init_state <- model_weights.after_lora_start
    load_lora_weights load_lora_weights_from_tensors <- model_weights.after_lora_load
    loras lora_refs target_modules memory_pool
  lora.lora.LoRAAdapter: config layers embedding_layers added_tokens_embeddings
  lora.lora.LoRALayer: weights
  lora.lora_config.LoRAConfig: hf_config added_tokens_config
  lora.lora_registry.LoRARef: lora_id lora_name
  managers.schedule_batch.Req
    __init__ <- model_weights.after_request
    lora_id extra_key
copy engines
  mem_cache.pool_host.mha.MHATokenToKVPoolHost
    load_to_device_per_layer <- kernel_hooks.around_load
    load_to_device_per_layer(device_pool host_indices device_indices layer_id io_backend is_draft) <-
    backup_from_device_all_layer(device_pool host_indices device_indices io_backend) <- kernel_hooks.around_back_up
    k_buffer v_buffer layer_num target_layer_num head_num head_dim
    since 0.5.22 device_k_buffers device_v_buffers
    since 0.5.22 v_head_dim
    since 0.5.23 _buffer_infos
  mem_cache.pool_host.mla.MLATokenToKVPoolHost
    load_to_device_per_layer <- kernel_hooks.around_load
    load_to_device_per_layer(device_pool host_indices device_indices layer_id io_backend is_draft) <-
    backup_from_device_all_layer(device_pool host_indices device_indices io_backend) <- kernel_hooks.around_back_up
    kv_buffer layer_num target_layer_num token_stride_size dcp_rank dcp_size _is_dummy
    since 0.5.22 device_kv_buffers
    since 0.5.23 _native_buffers _layer_shard_enabled _target_layer_indices
    since 0.5.23 _host_layer_by_controller _buffer_index_by_layer
  mem_cache.pool_host.base.HostKVCache
    since 0.5.22 device_row_stride_bytes
    pin_memory
decode writer
  disaggregation.decode_kvcache_offload_manager
    DecodeKVCacheOffloadManager <- decode_manager.replace_manager
  disaggregation.decode_kvcache_offload_manager.DecodeKVCacheOffloadManager
    __init__(req_to_token_pool token_to_kv_pool_allocator tp_group tree_cache) <-
    offload_kv_cache(req) <-
    check_offload_progress() <-
    # Without it memory that a copy still reads may be given to another request.
    drain_before_retraction() <-
    finalize_release_on_finish(req) <-
    has_inflight_device_transfer() <-
    release_host_resources() <-
    ongoing_offload
  mem_cache.common: release_kv_cache
  managers.cache_controller.HiCacheController
    write_queue ack_write_queue start_writing storage_backend storage_host_pool backup_skip
  managers.cache_controller.HiCacheAck: finish_event
  mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController: parse_storage_backend_extra_config
  mem_cache.cache_init_params.CacheInitParams
    __init__(disable req_to_token_pool token_to_kv_pool_allocator page_size tp_cache_group)
    mtp_draft_device_pools
  runtime_context: get_context get_schedule get_exec mamba_track_grid
  speculative.spec_info.SpeculativeAlgorithm: from_string is_eagle is_frozen_kv_mtp is_none
  speculative.base_spec_worker: _can_pack_hicache_mtp(spec_algorithm draft_runners)
  model_executor.model_runner.ModelRunner: token_to_kv_pool
  mem_cache.memory_pool: DSATokenToKVPool HybridLinearKVPool MHATokenToKVPool MLATokenToKVPool
  mem_cache.swa_memory_pool: SWAKVPool
  mem_cache.deepseek_v4_memory_pool: DeepSeekV4TokenToKVPool
  mem_cache.deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool: swa_kv_pool kv_pools kv_layout compressed_kv_layout_option
  mem_cache.deepseek_v4_memory_pool.DeepSeekV4SingleKVPool: kv_layout
  managers.schedule_batch.ReqKvInfo
    req_pool_idx get_evicted_seqlen mamba_last_track_seqlen mamba_last_track_idx mamba_ping_pong_track_buffer
  mem_cache.base_prefix_cache.BasePrefixCache: since 0.5.23 swa_retain_window
  mem_cache.memory_pool.ReqToTokenPool: req_to_token
  mem_cache.radix_cache.RadixKey: __init__(token_ids extra_key is_bigram cache_salt)
  mem_cache.utils: get_storage_hash_str(key prior_hash page_size)
  managers.schedule_batch.Req
    origin_input_ids output_ids finished kv sampling_params extra_key cache_salt retraction_count
host pools of a model
  mem_cache.hybrid_cache.hybrid_pool_assembler: _select_strategy ComponentType
  mem_cache.hybrid_cache.hybrid_pool_assembler: build_hicache_draft_sidecars(draft_device_pools tree_cache)
  mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController: register_host_pool_entry(entry)
  mem_cache.hybrid_cache.hybrid_pool_assembler.StackStrategy
    build(cache kvcache params server_args load_cache_event model_name storage_backend storage_backend_extra_config)
  mem_cache.hybrid_cache.hybrid_pool_assembler.StackBuildResult
    host_pool_group cache_controller sidecars register_req_to_token_counter
  mem_cache.pool_host.group.HostPoolGroup
    entry_map anchor_entry destroy
    alloc(need_size pool)
    free(indices pool)
  mem_cache.pool_host.group.PoolEntry: name host_pool
  mem_cache.pool_host.base.HostKVCache: available_size
  mem_cache.hicache_storage.SidecarPoolSpec: pool_name indices_from_pool hit_policy
  mem_cache.hicache_storage.PoolTransfer: __init__(name host_indices device_indices)
  managers.cache_controller.CacheOperation: __init__(host_indices device_indices node_id pool_transfers)
drafts of every rank
  mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController
    should_backup(transfer) <- scheduler_hooks.around_should_backup
cost of prefill
  managers.scheduler.Scheduler
    run_batch <- scheduler_hooks.around_run
    process_batch_result <- scheduler_hooks.around_result
  managers.schedule_batch.ScheduleBatch: reqs forward_mode extend_num_tokens
  model_executor.forward_batch_info.ForwardMode: is_extend
hints of requests
  managers.scheduler.Scheduler
    _add_request_to_queue(req is_retracted) <- scheduler_hooks.before_queued
    spec_algorithm
  managers.schedule_batch.Req
    kv_hints skip_radix_cache_insert sampling_params rid origin_input_ids extra_key cache_salt
  managers.kv_hints.KvHintsEnvelope: protocol_version message_id actions
  managers.kv_hints.KvHintAction: action_type action_version payload
  speculative.spec_info.SpeculativeAlgorithm: is_eagle
  # Where a request that stays out of the tree goes on behind its first part.
  mem_cache.common
    before 0.5.22 maybe_cache_unfinished_req(req tree_cache) <- scheduler_hooks.around_unfinished
    since 0.5.22 checkpoint_kv_cache(req tree_cache) <- scheduler_hooks.around_checkpoint
  mem_cache.unified_radix_cache.UnifiedRadixCache
    before 0.5.22 advance_unpublished_req(req chunked)
    advance_unpublished_req(req)
traces of requests
  managers.scheduler.Scheduler: _prefetch_kvcache <- scheduler_hooks.before_prefetch
  managers.cache_controller.HiCacheController
    _storage_hit_query <- scheduler_hooks.around_look_up
    _page_transfer <- scheduler_hooks.around_storage
  mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController
    _storage_hit_query <- scheduler_hooks.around_look_up
    _page_transfer <- scheduler_hooks.around_storage
  managers.cache_controller.PrefetchOperation: request_id all_hash_values last_hash
  managers.schedule_batch.Req: rid time_stats
  observability.req_time_stats.SchedulerReqTimeStats: trace_ctx
  observability.trace.TraceReqContext: root_span_context
KV events
  disaggregation.kv_events: AllBlocksCleared KVEventBatch select_kv_publisher_dp_rank
  runtime_context: get_parallel
  disaggregation.kv_events.StorageMedium: DISK EXTERNAL
  disaggregation.kv_events.BlockRemoved: block_hashes medium
  disaggregation.kv_events.BlockStored: block_hashes parent_block_hash token_ids block_size lora_id medium
external linker
  mem_cache.unified_cache.linker_factory
    create_unified_cache_linker
  mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinker
    lookup(rid transfers) <-
    load(rid transfers) <-
    start_layer_wise_loading() <-
    finish_layer_wise_loading(counter_index) <-
    cancel_queued_load(rid) <-
    offload(transfers session_id?) <-
    num_completed_offloads() <-
    pop_completed_offload() <-
    reset() <-
    close() <-
    record_offload_ready forward_stream layer_done_counter pools
  mem_cache.unified_cache.unified_cache_linker: UnifiedCacheLinker LayerWiseLoadCounter
  mem_cache.unified_cache.unified_cache_linker.LayerWiseLoadCounter
    update_producer complete fail finish reset
  mem_cache.hicache_storage.HiCacheStorageConfig: is_storage_writer
  mem_cache.pool_host.base: host_memory_budget_scope
  mem_cache.pool_host.group.HostPoolGroup: entries
  mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController
    device transfer_layer_id_max l2_transfer_engine move_hybrid_indices _move_write_operation _l2_transfers
    _l2_load_transfers _generate_storage_config
  mem_cache.l2_transfer.L2TransferEngine
    submit_device_to_host(transfers)
    submit_host_to_device(transfers transfer_layer_id_max on_layer_done)
  mem_cache.l2_transfer.TransferCompletion: finish_event
  mem_cache.cache_init_params.CacheInitParams
    req_to_token_pool token_to_kv_pool_allocator page_size pp_size tp_cache_group attn_cp_cache_group
    attn_tp_cache_group sidecar_draft_device_pools
  runtime_context: get_memory get_parallel get_serving
  # Pages are read while their request waits in the queue.
  managers.scheduler.Scheduler
    get_new_batch_prefill <- scheduler_hooks.around_new_batch
    waiting_queue running_batch chunked_req last_batch tree_cache _add_request_to_queue require_mlp_sync
    enable_priority_scheduling schedule_low_priority_values_first
  managers.schedule_batch.Req
    init_next_round_input(tree_cache cow_mamba)
    session priority
  session.session_controller.Session: streaming
  server_args.ServerArgs
    enable_unified_cache_external_linker unified_cache_external_linker_backend unified_cache_external_linker_config
    served_model_name hicache_mem_layout hicache_io_backend hicache_host_memory_mode hicache_size hicache_ratio
    hicache_write_policy
"""
"""Features, below each its owners in ``sglang.srt``, and below these the names in use: names that are read; a function
that is called, with its parameters; one that SGLang calls and we implement (``<-``); one that we hook
(``<- function``), with the parameters that our hook knows, if any."""

_MEMBER = re.compile(r"(?:since (\S+) )?(?:before (\S+) )?(may go )?([^(<]+?)(?:\((.*)\))?(?: (<-)(?: (\S+))?)?")


def _read(table: str) -> Iterator[Use]:
    groups: dict[str, tuple[Feature, ...]] = {"every hook": HOOKED, "host pools of a model": (DECODE_WRITER, LINKER)}
    by_name = groups | {feature.name: (feature,) for feature in FEATURES}
    features: tuple[Feature, ...] = ()
    owner = ""
    for line in table.splitlines():
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if text == line:
            features = by_name[text]
            continue
        if not line.startswith("    "):
            owner, _, text = text.partition(": ")
            if not text:
                continue  # its members are on the lines below
        if (found := _MEMBER.fullmatch(text)) is None:
            raise ValueError(f"{owner}: {text}")
        since, before, may_go, names, takes, arrow, ours = found.groups(default="")
        answered = bool(arrow) and found[5] is not None
        for used in names.split() if ours else [names]:
            named, taken = tuple(used.split()), tuple(takes.split())
            yield Use(f"sglang.srt.{owner}", named, features, taken, answered, since, ours, bool(may_go), before)


USED: tuple[Use, ...] = tuple(_read(_TABLE))

HOOKS: tuple[Use, ...] = tuple(use for use in USED if use.hook)


# -- the check ---------------------------------------------------------------------------------------------------------

_ARGUMENT_FIELDS = "sglang.srt.arg_groups.fields"
_BASE_CLASSES = {
    "sglang.srt.mem_cache.hicache_storage.HiCacheStorage": STORAGE,
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinker": LINKER,
}
"""Classes of SGLang that ours derive from -> feature that is lost if they require methods that ours lack."""


Checked = tuple[Use, tuple[str, ...]]
"""A use, and a text for each of its names that is missing or differs from how it is used."""


@cache
def check_installed() -> tuple[Checked, ...]:
    """Check the release that a server in this environment runs. Raises UnsupportedError without one."""
    return tuple(check(Sources.installed(), installed_release()))


def check(sources: Sources, release: str, used: Sequence[Use] = USED) -> Iterator[Checked]:
    """Yield each of ``used`` that this release must have, then what else SGLang requires of a backend or a linker."""
    for use in used:
        if belongs_to(release, use):
            yield use, _missing(sources, use)
    for owner, feature in _BASE_CLASSES.items():
        ours = [use for use in used if use.owner == owner]
        answered = {name for use in ours for name in use.names}
        if ours and (duties := sorted(sources.abstract_methods(owner) - answered)):
            unanswered = tuple(f"{name}, which this package does not answer" for name in duties)
            yield Use(owner, tuple(duties), (feature,)), unanswered


def belongs_to(release: str, use: Use) -> bool:
    gone = bool(use.before) and comes_with(release, use.before)
    return not gone and (not use.since or comes_with(release, use.since))


def lacking(checked: Collection[Checked], feature: Feature) -> str | None:
    """Return, as words for a sentence, what this release lacks that ``feature`` needs; None if nothing."""
    texts = [text for use, missing in checked if feature in use.features for text in missing]
    return None if not texts else texts[0] + (f" and {len(texts) - 1} more" if len(texts) > 1 else "")


def features_off(checked: Collection[Checked]) -> dict[Feature, str]:
    """Return the features that this release cannot have -> what it lacks."""
    return {feature: words for feature in FEATURES if (words := lacking(checked, feature)) is not None}


def _missing(sources: Sources, use: Use) -> tuple[str, ...]:
    known = sources.members(use.owner)
    if known is None:
        return (use.owner,)
    # A constructor may be generated, so it is never missing.
    gone = [name for name in use.names if name != "__init__" and known.keys().isdisjoint(name.split("|"))]
    if gone:
        return () if use.may_go else tuple(f"{use.owner}.{' or '.join(name.split('|'))}" for name in gone)
    if not use.takes and not use.answered:
        return ()
    parameters = sources.parameters(use.owner, use.names[0])
    if parameters is None:
        return (f"{use.target} as a function",)
    wanted = [name.removesuffix("?") for name in use.takes]
    positional = [item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD]
    found = [item.name for item in parameters if item.kind is not item.VAR_KEYWORD]
    required = {item.name for item in parameters if item.name in found and item.default is item.empty}
    present = [name for name in positional if name in wanted]
    # An unknown parameter in front of a known one would be mistaken for it.
    in_front = positional[: positional.index(present[-1])] if present and use.answered else ()
    takes_any = len(found) < len(parameters)
    changes = [f"without {name}" for name in use.takes if name not in found and not (takes_any or name.endswith("?"))]
    changes += [f"with {name}" for name in found if name not in wanted and (name in required or name in in_front)]
    if use.answered and present != [name for name in wanted if name in present]:
        changes.append("in another order")
    return (f"{use.target} as it is used (it is {', '.join(changes)})",) if changes else ()


class Sources:
    """The sources of one release of SGLang, parsed on demand."""

    def __init__(self, package: Path) -> None:
        """``package`` is the directory ``sglang``."""
        self._package = package
        self._modules: dict[str, ast.Module | None] = {}
        self._members: dict[str, dict[str, ast.AST] | None] = {}
        self._imports: dict[str, dict[str, tuple[str, str]]] = {}
        self._lineages: dict[str, list[ast.ClassDef]] = {}

    @classmethod
    def installed(cls) -> Sources:
        """Return the sources that ``import sglang`` would import here."""
        specification = importlib.util.find_spec("sglang")
        places = list(specification.submodule_search_locations or ()) if specification is not None else []
        return cls(Path(places[0]) if places else Path("/nonexistent"))

    def members(self, owner: str) -> dict[str, ast.AST] | None:
        """Return what a module or class defines, by name, including members of base classes and of instances."""
        if owner not in self._members:
            found: list[dict[str, ast.AST]] = []
            if owner == LAUNCH_ARGUMENTS:
                files = sorted(self._path(_ARGUMENT_FIELDS).glob("*.py"))
                trees = [self._module(f"{_ARGUMENT_FIELDS}.{file.stem}") for file in files]
                nodes = [node for tree in trees if tree for node in ast.walk(tree)]
                found = [{}, *(_own_members(node) for node in nodes if isinstance(node, ast.ClassDef))]
            elif (module := self._module(owner)) is not None:
                found = [_by_name(_definitions(module)), dict.fromkeys(self._imports_of(owner), module)]
            else:
                found = [*map(_own_members, self._lineage(owner))]
            pairs = itertools.chain.from_iterable(map(dict.items, found))
            self._members[owner] = _by_name(pairs) if found else None
        return self._members[owner]

    def parameters(self, owner: str, name: str) -> list[Parameter] | None:
        """Return a function's parameters without ``self``; for a generated constructor, the fields of its class."""
        function = (self.members(owner) or {}).get(name)
        if not isinstance(function, _FUNCTIONS):
            lineage = self._lineage(owner)[::-1] if name == "__init__" else []
            # The fields of a dataclass begin with those of its base classes.
            fields = [node for item in lineage for node in item.body if isinstance(node, ast.AnnAssign)]
            found = [_parameter(field, node.value) for node in fields for field in _assigned(node)]
            return found if lineage else None
        arguments = function.args
        named = [*arguments.posonlyargs, *arguments.args]
        defaults = [None] * (len(named) - len(arguments.defaults)) + arguments.defaults
        found = [_parameter(item.arg, default) for item, default in zip(named, defaults, strict=True)]
        if self._module(owner) is None and not any("staticmethod" in ast.unparse(d) for d in function.decorator_list):
            found = found[1:]
        keyword_only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        found += [_parameter(item.arg, default, Parameter.KEYWORD_ONLY) for item, default in keyword_only]
        return found + ([Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD)] if arguments.kwarg else [])

    def abstract_methods(self, owner: str) -> set[str]:
        return {
            node.name
            for definition in self._lineage(owner)[:1]
            for node in definition.body
            if isinstance(node, ast.FunctionDef)
            and any("abstractmethod" in ast.unparse(decorator) for decorator in node.decorator_list)
        }

    def _path(self, module: str) -> Path:
        return self._package.joinpath(*module.split(".")[1:])

    def _module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            path = self._path(name)
            file = next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()), None)
            self._modules[name] = ast.parse(file.read_bytes()) if file is not None else None
        return self._modules[name]

    def _imports_of(self, module: str) -> dict[str, tuple[str, str]]:
        """Return a module's imports: local name -> (module, name in it), with "" as the name of an imported module."""
        if module not in self._imports:
            found = self._imports[module] = {}
            for node in ast.walk(self._module(module) or ast.Module([], [])):
                if isinstance(node, ast.ImportFrom):
                    parent = module.rsplit(".", node.level)[0] if node.level else ""
                    source = ".".join(part for part in (parent, node.module or "") if part)
                    found |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
                elif isinstance(node, ast.Import):
                    found |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
        return self._imports[module]

    def _lineage(self, owner: str) -> list[ast.ClassDef]:
        """Return a class, given its dotted name, followed by its base classes; imports are followed. [] if unknown."""
        if owner not in self._lineages:
            self._lineages[owner] = []  # a cycle of imports or bases ends here
            module, _, name = owner.rpartition(".")
            found = (self.members(module) or {}).get(name) if module.startswith("sglang") else None
            if isinstance(found, ast.ClassDef):
                # Strip the subscript of bases like Generic[X].
                bases = [base.value if isinstance(base, ast.Subscript) else base for base in found.bases]
                lineages = [self._lineage(f"{module}.{ast.unparse(base)}") for base in bases]
                self._lineages[owner] = [found, *itertools.chain.from_iterable(lineages)]
            elif found is not None and name in self._imports_of(module):
                self._lineages[owner] = self._lineage(".".join(self._imports_of(module)[name]))
        return self._lineages[owner]


def _parameter(name: str, default: ast.expr | None, kind: Any = Parameter.POSITIONAL_OR_KEYWORD) -> Parameter:
    return Parameter(name, kind, default=Parameter.empty if default is None else default)


_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_DEFINITIONS = _FUNCTIONS | ast.ClassDef


def _definitions(tree: ast.Module | ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    """Yield what a module or class defines at its top level, also inside ``if`` and ``try``."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop(0)
        if isinstance(node, _DEFINITIONS):
            yield node.name, node
        elif isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
            pending += list(ast.iter_child_nodes(node))
        else:
            for name in _assigned(node):
                yield name, node


def _by_name(found: Iterable[tuple[str, ast.AST]]) -> dict[str, ast.AST]:
    """Return the first node of each name, preferring functions and classes: other nodes wrap them, or replace them if
    an import fails."""
    members: dict[str, ast.AST] = {}
    for name, node in found:
        is_defined = isinstance(node, _DEFINITIONS) and not isinstance(members.get(name), _DEFINITIONS)
        if is_defined or name not in members:
            members[name] = node
    return members


def _own_members(definition: ast.ClassDef) -> dict[str, ast.AST]:
    """Return what a class defines, and what its methods set on ``self``."""
    members = [*_definitions(definition)]
    nodes = [inner for _, node in members if isinstance(node, _FUNCTIONS) for inner in ast.walk(node)]
    stored = [inner for inner in nodes if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)]
    members += [(inner.attr, inner) for inner in stored if ast.unparse(inner.value) == "self"]
    return _by_name(members)


def _assigned(node: ast.AST) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]
