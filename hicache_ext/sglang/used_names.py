"""Every name, signature and hook of SGLang that this package uses: one list.

The self-check (self_check.py) looks them up in the installed release, ``hicache-ext doctor`` prints what it found, and
hooks.py takes its hooks from here. Imports neither torch nor SGLang.

A name that a feature needs and a release lacks switches the feature off there; without ``since``, in every release.
With ``since``, older releases do without it (releases.py says how), and only those from there on must have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Feature:
    """What a user loses together when one of the names or hooks that it needs is missing.

    ``by_halves``: hooks that only watch; those that exist stay in force although the feature counts as off.
    """

    name: str
    loss: str
    by_halves: bool = False


STORAGE = Feature("storage", "the server cannot start with this backend")
WEIGHTS_UPDATES = Feature("weights updates", "do not update weights online", by_halves=True)
MODEL_WEIGHTS = Feature("weights at the start", "weights are identified by their files as they are after the load")
ADAPTERS = Feature("LoRA adapters", "adapters cannot be told apart", by_halves=True)
COPIES = Feature("copy engines", "copies between host and device stay with SGLang's own path")
DECODE_WRITER = Feature("decode writer", "a decode node writes as SGLang does")
DRAFTS = Feature("drafts of every rank", "rank 0 alone writes the draft of an MLA model, whose heads differ per rank")
EVENTS = Feature("KV events", "routers are told nothing")
PREFILL_COST = Feature("cost of prefill", "pull or recompute does not know what a prefill takes")
REQUEST_TRACES = Feature(
    "traces of requests", "spans of storage do not say which request they belong to, and nothing is recorded"
)
READ_AHEAD = Feature("reading ahead", "the scheduler waits while a prompt is read through the external linker")

LINKER = Feature("external linker", "pages move through HiCache's host memory alone")

HOOKED = (
    *(WEIGHTS_UPDATES, MODEL_WEIGHTS, ADAPTERS, COPIES, DECODE_WRITER, DRAFTS, PREFILL_COST, REQUEST_TRACES),
    READ_AHEAD,
)
"""Those that change functions of SGLang, through its plug-ins."""
FEATURES = (STORAGE, *HOOKED, EVENTS, LINKER)


HookKind = Literal["before", "after", "around"]

LAUNCH_ARGUMENTS = "sglang.srt.server_args.ServerArgs"
"""Owner of the launch arguments, which SGLang declares in many classes (``srt/arg_groups/fields``)."""


@dataclass(frozen=True, slots=True)
class Use:
    """``names`` of ``owner``, a dotted class or module of SGLang; "old|new" is found under either name.

    ``takes``: the parameters that are used of a function (``names`` is one then), without ``self``; "name?" need not be
    there. ``answered``: SGLang calls, and a function of ours answers, which ignores what comes behind these.
    ``class_as``: the function constructs a class of ours that it holds under this name; ``takes`` is of that call.
    ``may_go``: nothing is lost without it. ``hook``: SGLang's HookType, where this package hooks it.
    """

    owner: str
    names: tuple[str, ...]
    features: tuple[Feature, ...]
    takes: tuple[str, ...] = ()
    answered: bool = False
    since: str = ""
    hook: HookKind | None = None
    class_as: str = ""
    may_go: bool = False

    @property
    def target(self) -> str:
        """The dotted name of a hooked function."""
        return f"{self.owner}.{self.names[0]}"


def _names(owner: str, names: str, *features: Feature, since: str = "") -> Use:
    return Use(f"sglang.srt.{owner}", tuple(names.split()), features, since=since)


def _call(owner: str, name: str, takes: str, *features: Feature) -> Use:
    """A function that we call."""
    return Use(f"sglang.srt.{owner}", (name,), features, tuple(takes.split()))


def _answer(name: str, takes: str, may_go: bool = False) -> Use:
    """A call of SGLang's on its storage backend."""
    return Use(f"sglang.srt.{_STORAGE}.HiCacheStorage", (name,), (STORAGE,), tuple(takes.split()), True, may_go=may_go)


def _constructor(owner: str, name: str, class_as: str, takes: str, feature: Feature) -> Use:
    return Use(f"sglang.srt.{owner}", (name,), (feature,), tuple(takes.split()), True, class_as=class_as)


def _hook(kind: HookKind, owner: str, name: str, feature: Feature, takes: str | None = None, since: str = "") -> Use:
    """``takes``: the parameters that our function knows; None where it passes on whatever comes."""
    parameters = tuple((takes or "").split())
    return Use(f"sglang.srt.{owner}", (name,), (feature,), parameters, takes is not None, since, kind)


_STORAGE = "mem_cache.hicache_storage"
_HOST_POOL = "mem_cache.pool_host"
_MHA, _MLA = f"{_HOST_POOL}.mha.MHATokenToKVPoolHost", f"{_HOST_POOL}.mla.MLATokenToKVPoolHost"
_UPDATER = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_SCHEDULER = "managers.scheduler.Scheduler"
_RUNNER = "model_executor.model_runner.ModelRunner"
_LORA = "lora.lora_manager.LoRAManager"
_REQUEST = "managers.schedule_batch.Req"
_OFFLOAD = "disaggregation.decode_kvcache_offload_manager.DecodeKVCacheOffloadManager"
_CONTROLLER = "managers.cache_controller"
_HYBRID = "mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_COPY = "device_pool host_indices device_indices"
_LINKER = "mem_cache.unified_cache.unified_cache_linker"
_ASSEMBLER = "mem_cache.hybrid_cache.hybrid_pool_assembler"
_TRANSFERS = "mem_cache.l2_transfer.L2TransferEngine"


def _duty(name: str, takes: str) -> Use:
    """A call of SGLang's on its external linker."""
    return Use(f"sglang.srt.{_LINKER}.UnifiedCacheLinker", (name,), (LINKER,), tuple(takes.split()), True)


USED: tuple[Use, ...] = (
    # What SGLang calls.
    _constructor(
        "mem_cache.storage.backend_factory.StorageBackendFactory",
        "_create_dynamic_backend",
        "backend_class",
        "storage_config kwargs?",
        STORAGE,
    ),
    _answer("register_mem_pool_host", "mem_pool_host"),
    _answer("register_mem_host_pool_v2", "host_pool host_pool_name"),
    _answer("batch_exists", "keys extra_info?"),
    _answer("batch_exists_v2", "keys pool_transfers extra_info?"),
    _answer("batch_get_v1", "keys host_indices extra_info?"),
    _answer("batch_set_v1", "keys host_indices extra_info?"),
    _answer("batch_get_v2", "transfers extra_info?"),
    _answer("batch_set_v2", "transfers extra_info?"),
    _answer("exists", "key"),
    _answer("get", "key target_location target_sizes"),
    _answer("batch_get", "keys target_locations target_sizes", may_go=True),
    _answer("set", "key value target_location target_sizes"),
    _answer("batch_set", "keys values target_locations target_sizes", may_go=True),
    _answer("clear", ""),
    _answer("get_stats", ""),
    # What it hands over.
    _names(
        f"{_STORAGE}.HiCacheStorageConfig",
        "tp_rank tp_size pp_rank pp_size attn_cp_rank attn_cp_size is_mla_model|is_rank_replicated model_name"
        " tp_lcm_size extra_config dp_rank",
        STORAGE,
    ),
    _names(f"{_STORAGE}.HiCacheStorageConfig", "dcp_rank dcp_size", STORAGE, since="0.5.23"),
    _names(_STORAGE, "HiCacheStorageExtraInfo", STORAGE),
    _names(f"{_STORAGE}.PoolName", "KV MAMBA", STORAGE),
    _names(f"{_STORAGE}.PoolHitPolicy", "ALL_PAGES TRAILING_PAGES", STORAGE),
    _names(f"{_STORAGE}.PoolHitPolicy", "BLOCK_GROUPS", STORAGE, since="0.5.22"),
    _names(f"{_STORAGE}.PoolTransfer", "name host_indices keys hit_policy", STORAGE),
    _call(
        f"{_STORAGE}.PoolTransferResult",
        "__init__",
        "kv_hit_pages extra_pool_hit_pages restorable_prefix_pages",
        STORAGE,
    ),
    _call(
        "observability.metrics_collector.StorageMetrics",
        "__init__",
        "prefetch_pgs backup_pgs prefetch_bandwidth backup_bandwidth",
        STORAGE,
    ),
    _names(f"{_HOST_POOL}.base.HostKVCache", "page_size size layout dtype kv_buffer dcp_rank dcp_size", STORAGE),
    _names(f"{_HOST_POOL}.base.HostKVCache", "get_dummy_flat_data_page", STORAGE),
    _call(f"{_HOST_POOL}.base.HostKVCache", "get_data_page", "index", STORAGE),
    _call(f"{_HOST_POOL}.base.HostKVCache", "set_from_flat_data_page", "index data_page", STORAGE),
    _call(_MHA, "get_page_buffer_meta", "indices", STORAGE),
    _call(_MHA, "get_split_heads_page_buffer_meta", "indices split_factor", STORAGE),
    _call(_MLA, "get_page_buffer_meta", "indices", STORAGE),
    # What the identity of pages and the role of the server are read from. A name that is gone would read as "not set".
    _names("runtime_context", "get_server_args get_memory get_model get_spec", STORAGE),
    _call("arg_groups.arg_utils", "namespace_of", "cls", STORAGE),
    _call("arg_groups.arg_utils", "record_fields", "cls", STORAGE),
    Use(
        LAUNCH_ARGUMENTS,
        (
            *("model_path", "revision", "load_format", "enable_lora", "kv_cache_dtype", "dtype", "quantization"),
            *("speculative_draft_model_path", "speculative_draft_model_revision", "speculative_draft_load_format"),
            *("disaggregation_mode", "enable_metrics", "hicache_storage_backend"),
            *("hicache_storage_backend_extra_config", "enable_hierarchical_cache"),
            *("disaggregation_decode_enable_offload_kvcache", "enable_weights_cpu_backup"),
            *("json_model_override_args", "modelopt_quant", "model_loader_extra_config"),
            *("quantization_param_path", "decrypted_config_file", "decrypted_draft_config_file"),
            *("forward_hooks", "rl_quant_profile", "weight_cache_mode", "modelopt_checkpoint_restore_path"),
        ),
        (STORAGE,),
    ),
    _names("plugins.hook_registry", "HookType", *HOOKED),
    _call("plugins.hook_registry.HookRegistry", "register", "target hook hook_type", *HOOKED),
    *(
        _hook("before", _UPDATER, f"update_weights_from_{source}", WEIGHTS_UPDATES)
        for source in ("disk", "distributed", "tensor", "ipc")
    ),
    # Between begin and end somebody else may write the weights, with no call at all (P2P, RDMA).
    _hook("before", _UPDATER, "begin_weight_update", WEIGHTS_UPDATES),
    _hook("before", _UPDATER, "end_weight_update", WEIGHTS_UPDATES),
    _hook("before", _UPDATER, "release_memory_occupation", WEIGHTS_UPDATES),
    _names(_UPDATER, "tp_cpu_group", WEIGHTS_UPDATES),
    _names("managers.io_struct.ReleaseMemoryOccupationReqInput", "tags", WEIGHTS_UPDATES),
    _hook("after", _SCHEDULER, "flush_cache", WEIGHTS_UPDATES),
    _hook("around", _RUNNER, "load_model", MODEL_WEIGHTS),
    # SGLang can load weights while it does other things at the start.
    _hook("after", _RUNNER, "finalize_startup_weight_load", MODEL_WEIGHTS),
    _names(_RUNNER, "model_config is_draft_worker kv_cache_dtype kv_cache_dtype_str", MODEL_WEIGHTS),
    _names("configs.model_config.ModelConfig", "model_path revision dtype quantization", MODEL_WEIGHTS),
    _hook("after", _LORA, "init_state", ADAPTERS),
    _hook("after", _LORA, "load_lora_weights", ADAPTERS),
    _hook("after", _LORA, "load_lora_weights_from_tensors", ADAPTERS),
    _names(_LORA, "loras lora_refs target_modules memory_pool", ADAPTERS),
    _names("lora.lora.LoRAAdapter", "config layers embedding_layers added_tokens_embeddings", ADAPTERS),
    _names("lora.lora.LoRALayer", "weights", ADAPTERS),
    _names("lora.lora_config.LoRAConfig", "hf_config added_tokens_config", ADAPTERS),
    _names("lora.lora_registry.LoRARef", "lora_id lora_name", ADAPTERS),
    _hook("after", _REQUEST, "__init__", ADAPTERS),
    _names(_REQUEST, "lora_id extra_key", ADAPTERS),
    *(
        use
        for pool in (_MHA, _MLA)
        for use in (
            _hook("around", pool, "load_to_device_per_layer", COPIES, f"{_COPY} layer_id io_backend is_draft"),
            _hook("around", pool, "backup_from_device_all_layer", COPIES, f"{_COPY} io_backend"),
        )
    ),
    _names(_MHA, "k_buffer v_buffer layer_num target_layer_num head_num head_dim", COPIES),
    _names(_MHA, "device_k_buffers device_v_buffers", COPIES, since="0.5.22"),
    _names(_MHA, "v_head_dim", COPIES, since="0.5.22"),
    _names(_MHA, "_buffer_infos", COPIES, since="0.5.23"),
    _names(_MLA, "kv_buffer layer_num target_layer_num token_stride_size dcp_rank dcp_size _is_dummy", COPIES),
    _names(_MLA, "device_kv_buffers", COPIES, since="0.5.22"),
    _names(_MLA, "_native_buffers _layer_shard_enabled _target_layer_indices", COPIES, since="0.5.23"),
    _names(_MLA, "_host_layer_by_controller _buffer_index_by_layer", COPIES, since="0.5.23"),
    _names(f"{_HOST_POOL}.base.HostKVCache", "device_row_stride_bytes", COPIES, since="0.5.22"),
    _names(f"{_HOST_POOL}.base.HostKVCache", "pin_memory", COPIES),
    _hook("around", _OFFLOAD, "__init__", DECODE_WRITER),
    _hook("around", _OFFLOAD, "offload_kv_cache", DECODE_WRITER, "req"),
    _hook("around", _OFFLOAD, "check_offload_progress", DECODE_WRITER, ""),
    # Without it memory that a copy still reads may be given to another request.
    _hook("around", _OFFLOAD, "drain_before_retraction", DECODE_WRITER, ""),
    _hook("around", _OFFLOAD, "release_host_resources", DECODE_WRITER, ""),
    _names(
        _OFFLOAD,
        "kv_cache req_to_token_pool page_size cache_controller decode_host_mem_pool ongoing_offload tp_group"
        " tp_world_size _mark_offload_started _mark_offload_finished _has_inflight_offload _release_finished_req",
        DECODE_WRITER,
    ),
    _names(
        f"{_CONTROLLER}.HiCacheController",
        "write_queue ack_write_queue start_writing storage_backend storage_host_pool backup_skip",
        DECODE_WRITER,
    ),
    _call(f"{_CONTROLLER}.CacheOperation", "__init__", "host_indices device_indices node_id", DECODE_WRITER),
    _names(f"{_CONTROLLER}.CacheOperation", "node_ids", DECODE_WRITER),
    _names(f"{_CONTROLLER}.HiCacheAck", "finish_event node_ids", DECODE_WRITER),
    _names(
        _HYBRID,
        "parse_storage_backend_extra_config",
        DECODE_WRITER,
    ),
    _names("runtime_context", "get_context", DECODE_WRITER),
    _names("speculative.spec_info.SpeculativeAlgorithm", "from_string is_eagle", DECODE_WRITER),
    _names("mem_cache.memory_pool", "DSATokenToKVPool MHATokenToKVPool MLATokenToKVPool", DECODE_WRITER),
    _names("mem_cache.memory_pool.ReqToTokenPool", "req_to_token", DECODE_WRITER),
    _call("mem_cache.radix_cache.RadixKey", "__init__", "token_ids extra_key cache_salt", DECODE_WRITER),
    _call("mem_cache.utils", "get_storage_hash_str", "key prior_hash page_size", DECODE_WRITER),
    _names(
        _REQUEST,
        "origin_input_ids output_ids finished kv sampling_params finished_reason extra_key cache_salt",
        DECODE_WRITER,
    ),
    _hook("around", _HYBRID, "should_backup", DRAFTS, "transfer"),
    _hook("around", _SCHEDULER, "run_batch", PREFILL_COST),
    _hook("around", _SCHEDULER, "process_batch_result", PREFILL_COST),
    _hook("around", _SCHEDULER, "get_new_batch_prefill", READ_AHEAD),
    _names(
        _SCHEDULER,
        "waiting_queue running_batch chunked_req last_batch tree_cache _add_request_to_queue require_mlp_sync"
        " enable_priority_scheduling schedule_low_priority_values_first",
        READ_AHEAD,
    ),
    _call(_REQUEST, "init_next_round_input", "tree_cache cow_mamba", READ_AHEAD),
    _names(_REQUEST, "session priority", READ_AHEAD),
    _names("session.session_controller.Session", "streaming", READ_AHEAD),
    _hook("before", _SCHEDULER, "_prefetch_kvcache", REQUEST_TRACES),
    *(
        _hook("around", controller, call, REQUEST_TRACES)
        for controller in (f"{_CONTROLLER}.HiCacheController", _HYBRID)
        for call in ("_storage_hit_query", "_page_transfer")
    ),
    _names(f"{_CONTROLLER}.PrefetchOperation", "request_id all_hash_values last_hash", REQUEST_TRACES),
    _names(_REQUEST, "rid time_stats", REQUEST_TRACES),
    _names("observability.req_time_stats.SchedulerReqTimeStats", "trace_ctx", REQUEST_TRACES),
    _names("observability.trace.TraceReqContext", "root_span_context", REQUEST_TRACES),
    _names("disaggregation.kv_events", "AllBlocksCleared KVEventBatch select_kv_publisher_dp_rank", EVENTS),
    _names("runtime_context", "get_parallel", EVENTS),
    _names("disaggregation.kv_events.StorageMedium", "DISK EXTERNAL", EVENTS),
    _names("disaggregation.kv_events.BlockRemoved", "block_hashes medium", EVENTS),
    _names(
        "disaggregation.kv_events.BlockStored",
        "block_hashes parent_block_hash token_ids block_size lora_id medium",
        EVENTS,
    ),
    _constructor(
        "mem_cache.unified_cache.linker_factory",
        "create_unified_cache_linker",
        "linker_cls",
        "server_args params components extra_config forward_stream?",
        LINKER,
    ),
    _duty("lookup", "rid transfers"),
    _duty("load", "rid transfers"),
    _duty("start_layer_wise_loading", ""),
    _duty("finish_layer_wise_loading", "counter_index"),
    _duty("cancel_queued_load", "rid"),
    _duty("offload", "transfers session_id?"),
    _duty("num_completed_offloads", ""),
    _duty("pop_completed_offload", ""),
    _duty("reset", ""),
    _duty("close", ""),
    _names(f"{_LINKER}.UnifiedCacheLinker", "record_offload_ready forward_stream layer_done_counter pools", LINKER),
    _names(_LINKER, "UnifiedCacheLinker LayerWiseLoadCounter", LINKER),
    _names(f"{_LINKER}.LayerWiseLoadCounter", "num_layers update_producer complete fail finish reset", LINKER),
    _call(f"{_STORAGE}.PoolTransfer", "__init__", "name host_indices device_indices", LINKER),
    _names(f"{_STORAGE}.HiCacheStorageConfig", "is_storage_writer", LINKER),
    # SGLang's host pools, a small fraction of their size, are the memory through which pages pass.
    _names(_ASSEMBLER, "_select_strategy", LINKER),
    _call(
        f"{_ASSEMBLER}.StackStrategy", "build", "cache kvcache params server_args load_cache_event model_name", LINKER
    ),
    _names(
        f"{_ASSEMBLER}.StackBuildResult",
        "host_pool_group cache_controller sidecars register_req_to_token_counter",
        LINKER,
    ),
    _names(f"{_STORAGE}.SidecarPoolSpec", "pool_name indices_from_pool hit_policy", LINKER),
    _names(f"{_HOST_POOL}.base", "host_memory_budget_scope", LINKER),
    _names(f"{_HOST_POOL}.base.HostKVCache", "available_size size_per_token", LINKER),
    _names(f"{_HOST_POOL}.group.HostPoolGroup", "entries entry_map anchor_entry destroy", LINKER),
    _call(f"{_HOST_POOL}.group.HostPoolGroup", "alloc", "need_size pool", LINKER),
    _call(f"{_HOST_POOL}.group.HostPoolGroup", "free", "indices pool", LINKER),
    _names(f"{_HOST_POOL}.group.PoolEntry", "name host_pool", LINKER),
    _names(
        _HYBRID,
        "device transfer_layer_id_max l2_transfer_engine move_hybrid_indices"
        " _move_write_operation _l2_transfers _l2_load_transfers _generate_storage_config",
        LINKER,
    ),
    _call(f"{_CONTROLLER}.CacheOperation", "__init__", "host_indices device_indices node_id pool_transfers", LINKER),
    _call(_TRANSFERS, "submit_device_to_host", "transfers", LINKER),
    _call(_TRANSFERS, "submit_host_to_device", "transfers transfer_layer_id_max on_layer_done", LINKER),
    _names("mem_cache.l2_transfer.TransferCompletion", "finish_event", LINKER),
    _names(
        "mem_cache.cache_init_params.CacheInitParams",
        "req_to_token_pool token_to_kv_pool_allocator page_size pp_size tp_cache_group attn_cp_cache_group"
        " attn_tp_cache_group sidecar_draft_device_pools",
        LINKER,
    ),
    _names("runtime_context", "get_memory get_parallel get_serving", LINKER),
    Use(
        LAUNCH_ARGUMENTS,
        (
            *("enable_unified_cache_external_linker", "unified_cache_external_linker_backend"),
            *("unified_cache_external_linker_config", "served_model_name", "hicache_mem_layout"),
            *("hicache_io_backend", "hicache_host_memory_mode", "hicache_size", "hicache_ratio"),
            "hicache_write_policy",
        ),
        (LINKER,),
    ),
    _names("managers.schedule_batch.ScheduleBatch", "reqs forward_mode extend_num_tokens", PREFILL_COST),
    _names("model_executor.forward_batch_info.ForwardMode", "is_extend", PREFILL_COST),
)
