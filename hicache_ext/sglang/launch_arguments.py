"""The launch arguments of a server, and how each affects the bytes of a page at given tokens.

Every argument of the tested releases is in exactly one of these lists; tests/backend/test_launch_arguments.py checks
it. An argument of a later release that is in none counts whenever it is given. See docs/decisions/launch-arguments.md.
"""

from __future__ import annotations

import enum
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_ext.config import ServerRole
from hicache_ext.errors import UnsupportedError
from hicache_ext.sglang import process

logger = logging.getLogger(__name__)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


IDENTIFIED_OTHERWISE = _names("""
    model_path revision served_model_name trust_remote_code load_format
    dtype quantization kv_cache_dtype mamba_ssm_dtype
    speculative_algorithm speculative_draft_model_path speculative_draft_model_revision speculative_draft_load_format
    speculative_draft_kv_cache_dtype speculative_draft_model_quantization enable_multi_layer_eagle
    enable_lora lora_paths lora_target_modules
    tp_size pp_size attn_cp_size dcp_size
    page_size hicache_mem_layout enable_page_major_kv_layout
""")
"""Arguments whose effect is in the identity already: the bytes of the model's files and its code, what its runner
resolved, the host pool, the shard; adapters are in page hashes."""

WEIGHTS = ("weight_cache_mode", "modelopt_checkpoint_restore_path", "kt_weight_path", "uno_lora_path", "download_dir")
"""Arguments that load weights from outside the model's path: refused, unless the configuration names the weights. A
download directory has no effect if the model's path exists."""

SHAPING_AS_RESOLVED = (
    *("json_model_override_args", "modelopt_quant", "model_loader_extra_config"),
    *("forward_hooks", "rl_quant_profile"),
)
"""Arguments that count with their resolved value, to stay compatible with pages of earlier versions."""

SHAPING_FILES = (
    *("quantization_param_path", "decrypted_config_file", "decrypted_draft_config_file"),
    "dllm_algorithm_config",
)
"""Arguments that name a small file, which counts by its content."""

SHAPING = _names("""
    model_impl model_config_parser is_embedding quantize_and_serve enable_mis dllm_algorithm
    enable_deterministic_inference rl_on_policy_target
    enable_tf32_matmul enable_quant_communications prefill_kv_cache_dequant_dtype dsv4_prefill_backend
    deepep_dispatcher_output_dtype flashinfer_a2a_dispatch_type flashinfer_mxfp4_moe_precision
    enable_w4a4_mxfp4_megamoe speculative_enable_w4a4_mxfp4_megamoe enforce_shared_experts_fusion
    enable_deepseek_v4_fp4_indexer qsa_indexer_dtype
    kt_method kt_num_gpu_experts kt_max_deferred_experts_per_token
    enable_hisparse hisparse_config enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay
    speculative_draft_window_size speculative_draft_sink_size
    enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds enable_int8_mamba_checkpoint
    enable_precise_embedding_interpolation mm_process_config image_processor_backend disable_fast_image_processor
    experts_shared_outer_loras enable_kv_cache_sharding enable_dsa_cache_layer_split c128_page_size
""")
"""Arguments that change the formula, intermediate number formats, or the place of bytes: in the identity when given."""

SHAPING_VALUES = (
    ("load_format", "dummy"),
    ("ep_dispatch_algorithm", "fake"),
    ("disaggregation_transfer_backend", "fake"),
)
"""Values with which a server computes no model's KV (for measurements), of arguments that otherwise shape nothing."""

KERNELS = _names("""
    device cuda_graph_config cuda_graph_backend_prefill cuda_graph_backend_decode cuda_graph_tc_compiler
    attention_backend decode_attention_backend prefill_attention_backend mm_attention_backend
    speculative_attention_mode speculative_draft_attention_backend enable_lean_attention flashinfer_mla_disable_ragged
    triton_attention_reduce_in_fp32 triton_attention_num_kv_splits triton_attention_split_tile_size
    disable_chunked_prefix_cache enable_fused_qk_norm_rope enable_nvidia_megakernel enable_amd_monokernel
    dsa_prefill_backend dsa_decode_backend dsa_paged_mqa_logits_backend dsa_topk_backend dsa_triton_union
    enable_dsa_fused_indexer speculative_dsa_topk_backend dsv4_attn_backend
    fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend
    disable_flashinfer_autotune flashinfer_autotune_skip_ops enable_torch_compile torch_compile_max_bs
    mamba_backend linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend
    linear_attn_verify_backend enable_linear_replayssm linear_replayssm_cache_len enable_linear_replayssm_spec
    lora_backend lora_use_virtual_experts
    moe_runner_backend moe_a2a_backend speculative_moe_runner_backend speculative_moe_a2a_backend
    deepep_v2_mode deepep_mode fuseep_mode deepep_config enable_waterfill enable_fused_moe_sum_all_reduce
    disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion enable_megamoe_for_layernorm_sp
    enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem
    enable_scattered_sconv boundary_reduction speculative_boundary_reduction enable_flashinfer_allreduce_fusion
    enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion
    disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode
    dwdp_size ep_size moe_dp_size moe_dense_tp_size dcp_comm_backend dcp_replicate_q_proj enable_prefill_cp cp_strategy
    enable_cp_decode_attn_tp enable_attn_tp_input_scattered enable_shared_experts_attn_tp shared_experts_tp_size
    enable_dense_mlp_attn_tp enable_layernorm_sp disable_attn_tp_gather mm_enable_dp_encoder
""")
"""Arguments that choose the implementation of the same formula. They change its rounding, as another batch size does:
part of the identity only on a server that must compute the same bits every time."""

HARMLESS = _names("""
    base_gpu_id gpu_id_step random_seed mlx_enable_sampling watchdog_timeout soft_watchdog_timeout sleep_on_idle use_ray
    custom_sigquit_handler numa_node gc_threshold
    decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank decoupled_spec_role
    disaggregation_mode disaggregation_transfer_backend disaggregation_enable_kv_checksum disaggregation_bootstrap_port
    disaggregation_ib_device disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
    disaggregation_decode_retraction_backup num_reserved_decode_tokens disaggregation_decode_extra_slots
    disaggregation_decode_polling_interval enable_pd_role_switch optimistic_prefill_attempts encoder_only language_only
    language_model_only encoder_transfer_backend encoder_urls encoder_bootstrap_port encoder_register_urls
    enable_adaptive_dispatch_to_encoder enable_pdmux pdmux_config_path sm_group_num
    disaggregation_decode_host_receive_threshold disaggregation_decode_allocation_policy
    enable_fp32_lm_head enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup
    enable_custom_logit_processor enable_return_hidden_states return_hidden_states_mode enable_return_routed_experts
    enable_return_indexer_topk sampling_mask_max_tokens disable_outlines_disk_cache sampling_backend grammar_backend
    mamba_max_states_per_path mamba_radix_cache_strategy uses_mamba_radix_cache mamba_track_interval
    int8_mamba_ckpt_size cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill
    cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_prefill_max_context disable_prefill_cuda_graph
    disable_decode_cuda_graph disable_cuda_graph disable_cuda_graph_padding enable_profile_cuda_graph
    enable_cudagraph_gc debug_cuda_graph enable_torch_compile_debug_mode enable_layerwise_nvtx_marker pre_warm_nccl
    ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm
    eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold
    expert_distribution_recorder_mode expert_distribution_recorder_buffer_size expert_balancedness_report_mode
    elastic_ep_backend enable_elastic_expert_backup mooncake_ib_device ep_join_mode elastic_ep_scale_timeout kt_cpuinfer
    kt_threadpool_count enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold
    cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step offload_mode ple_offload_embedding
    ple_offload_backend ple_offload_dir dllm_fdfo enable_watermark watermark_config watermark_key watermark_key_b
    watermark_context_window watermark_mixing_probability watermark_max_probability watermark_default_enabled
    watermark_enforce_all enable_return_aux_hidden_states aux_hidden_state_capture return_aux_hidden_state_layer_ids
    enable_paged_experts paged_experts_num_resident
    enable_lora_overlap_loading max_lora_rank max_loaded_loras max_loras_per_batch lora_eviction_policy
    max_lora_chunk_size lora_strict_loading lora_drain_wait_threshold
    radix_eviction_policy _radix_eviction_policy_explicitly_set radix_eviction_policy_config disable_radix_cache
    enable_unified_memory enable_session_radix_cache radix_cache_backend enable_hierarchical_cache
    hicache_host_memory_mode hicache_ratio hicache_size hicache_host_memory_fraction hicache_write_policy
    hicache_io_backend hicache_storage_backend hicache_storage_prefetch_policy hicache_storage_backend_extra_config
    hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts
    enable_unified_cache_external_linker unified_cache_external_linker_backend enable_linker_mla_dedup enable_lmcache
    lmcache_config_file enable_flexkv flexkv_config_file unified_cache_external_linker_config
    enable_multimodal enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_processor_worker_num mm_io_worker_num
    allowed_media_domains media_url_max_file_size_mb mm_preprocess_cache_size_mb trust_mm_content_hashes
    limit_mm_data_per_request enable_mm_global_cache mm_global_cache_backend mm_feature_transport
    context_length modelopt_checkpoint_save_path modelopt_export_path startup_weight_load_mode custom_weight_loader
    weight_loader_disable_mmap weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
    weight_loader_drop_cache_after_load remote_instance_weight_loader_seed_instance_ip
    remote_instance_weight_loader_seed_instance_service_port remote_instance_weight_loader_send_weights_group_ports
    remote_instance_weight_loader_backend remote_instance_weight_loader_start_seed_via_transfer_engine
    engine_info_bootstrap_port modelexpress_config model_checksum delete_ckpt_after_loading
    checkpoint_engine_wait_weights_before_ready weight_cache_socket weight_cache_timeout
    log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target
    uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics smg_http_sidecar_port
    enable_mfu_metrics enable_metrics_for_all_schedulers load_snapshot_publish_interval
    tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels extra_metric_labels
    bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
    generation_tokens_buckets gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging
    kv_events_config load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id
    forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint otlp_service_name
    export_metrics_to_file export_metrics_to_file_dir stat_loggers kv_canary kv_canary_real_data
    kv_canary_sweep_interval debug_tensor_dump_output_folder debug_tensor_dump_layers debug_tensor_dump_input_file
    msprobe_dump_config
    nccl_port dist_timeout dist_init_addr gated_launch_port nnodes node_rank pp_max_micro_batch_size
    pp_async_batch_depth dp_size load_balance_method enable_dp_attention enable_dp_attention_local_control_broadcast
    enable_dp_lm_head enable_tp_lm_head_all_to_all enable_p2p_check ep_join_rank_offset elastic_ep_initial_size
    max_ep_size attn_dp_size enable_cp_tp_group_sharing
    mem_fraction_static max_running_requests max_queued_requests max_total_tokens chunked_prefill_size
    prefill_decode_interval enable_dynamic_chunking max_prefill_tokens prefill_max_requests schedule_policy
    enable_priority_scheduling disable_priority_preemption default_priority_value abort_on_priority_when_disabled
    schedule_low_priority_values_first priority_scheduling_preemption_threshold retraction_policy
    schedule_conservativeness swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set swa_prefix_tails
    disable_hybrid_swa_memory prefill_only_disable_kv_cache disable_overlap_schedule num_continuous_decode_steps
    scheduler_recv_interval enable_mixed_chunk max_mamba_cache_size mamba_full_memory_ratio enable_prefill_delayer
    prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
    prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms
    min_free_slots_delay prefill_decode_interval_min_bs
    enable_response_store tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num
    skip_tokenizer_init host port fastapi_root_path smg_grpc_mode grpc_mode grpc_port grpc_response_timeout_secs
    grpc_worker_threads sidecar sidecar_args skip_server_warmup warmups enable_http2 http2_max_concurrent_streams
    http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh
    api_key admin_api_key weight_version chat_template trust_request_chat_template hf_chat_template_name
    completion_template file_storage_path enable_cache_report return_input_ids return_output_ids reasoning_parser
    default_chat_template_kwargs strip_thinking_cache enable_strict_thinking tool_call_parser tool_server
    sampling_defaults asr_max_buffer_seconds asr_max_concurrent_sessions preferred_sampling_params allow_auto_truncate
    stream_interval batch_notify_size stream_response_default_include_usage incremental_streaming_output
    enable_streaming_session constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
    constrained_json_max_whitespace_cnt enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
    dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode disable_tokenizer_batch_decode
    enable_http_worker_reuseport
    speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens speculative_dflash_block_size
    speculative_domino_candidate_pool_size speculative_dspark_block_size speculative_dspark_sps_table_path
    speculative_dspark_confidence_sts_path speculative_dspark_align_verify_tokens_to_graph_tier
    speculative_accept_threshold_single speculative_accept_threshold_acc speculative_use_rejection_sampling
    speculative_token_map _speculative_draft_quantization_explicitly_set speculative_skip_dp_mlp_sync
    speculative_adaptive speculative_adaptive_config spec_trace_dir speculative_ngram_min_bfs_breadth
    speculative_ngram_max_bfs_breadth speculative_ngram_match_type speculative_ngram_max_trie_depth
    speculative_ngram_capacity speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
    speculative_ngram_external_corpus_max_tokens speculative_use_block_verification
""")
"""Arguments that change no byte at given tokens: sampling, scheduling, sizes, transport, observability, tokenizing."""

_KNOWN = HARMLESS.union(KERNELS, SHAPING, SHAPING_AS_RESOLVED, SHAPING_FILES, IDENTIFIED_OTHERWISE, WEIGHTS)
_SAME_BITS = frozenset(["enable_deterministic_inference", "rl_on_policy_target"])


def given_arguments(arguments: Any) -> dict[str, Any]:
    """Return the launch arguments that are not at their defaults, as typed. ``arguments`` is SGLang's ServerArgs.

    A default may resolve to another value on another machine, but always to the same formula.
    """
    from sglang.srt.arg_groups.arg_utils import record_fields

    given = {}
    for field in record_fields(type(arguments)):
        value, factory = getattr(arguments, field.name), field.default_factory
        if _json(value) != _json(factory() if callable(factory) else field.default):
            given[field.name] = value
    return given


def shaping(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the part of ``given_arguments`` for a page's identity, except files and what SGLang resolves.

    An unknown argument contributes a digest of its value, which may be a secret.
    """
    counted = SHAPING if _SAME_BITS.isdisjoint(given) else SHAPING | KERNELS
    facts = {
        name: value if isinstance(value, str) else _json(value) for name, value in given.items() if name in counted
    }
    for name in unknown(given):
        facts[name] = f"sha256:{hashlib.sha256(_json(given[name]).encode()).hexdigest()[:32]}"
    return facts


def unknown(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names in ``given_arguments`` that this package does not know."""
    return tuple(sorted(given.keys() - _KNOWN))


def _json(value: Any) -> str:
    """Return JSON text that is equal in every process for equal values."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """Return a value as JSON types, without addresses and orderings that differ between processes."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _plain(item) for key, item in value.items()}
        return sorted([_json(key), _json(item)] for key, item in value.items())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(_json, value))
    if isinstance(value, enum.Enum):
        return [type(value).__qualname__, value.name]
    if isinstance(value, bytes | complex | type):
        return repr(value)
    # Use an object's fields, if it has any, but never its address.
    return [type(value).__qualname__, _plain(vars(value)) if hasattr(value, "__dict__") else None]


# -- facts that SGLang's storage config does not carry -----------------------------------------------------------------
# In every scheduler, ``sglang.srt.runtime_context`` holds the arguments and their resolved values; the model's runner
# holds what it determined while loading.

_ROLES: dict[str, ServerRole] = {"prefill": "prefill", "decode": "decode"}
"""SGLang's ``--disaggregation-mode``; "null" is a server that is not disaggregated."""

_NAMES_OF_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
"""Values of ``--kv-cache-dtype`` that carry no more information than the resolved dtype."""

_STORAGE_ARGUMENTS = (
    *("enable_hierarchical_cache", "hicache_storage_backend"),
    *("disaggregation_decode_enable_offload_kvcache", "enable_unified_cache_external_linker"),
)


@dataclass(frozen=True, slots=True)
class LaunchFacts:
    """``kv_cache_dtype`` is what the KV pools hold ("float8_e4m3fn", "bfloat16", ...), None outside a server.

    ``role`` is the server's role in a disaggregated pair. ``drafts`` holds model path and revision of each draft model;
    ``lora`` says whether requests may name an adapter.
    """

    model_path: str | None = None
    revision: str | None = None
    load_format: str = "auto"
    draft_load_format: str | None = None
    weights_from_elsewhere: tuple[str, ...] = ()
    """Launch arguments that load weights from elsewhere than the files at the model's path."""
    drafts: tuple[tuple[str, str | None], ...] = ()
    lora: bool = False
    kv_cache_dtype: str | None = None
    compute: str = ""
    unknown_arguments: tuple[str, ...] = ()
    """Given launch arguments that this package does not know; ``compute`` has a digest of each."""
    role: ServerRole = "both"
    parts_of_pages: bool = False
    """Whether ranks that would otherwise hold the same KV hold only stripes or layers of it."""
    role_may_change: bool = False
    """Whether SGLang may switch the server between prefill and decode while it runs."""
    config_file: str | None = None
    """The file named by ``--hicache-storage-backend-extra-config @FILE``; None if given inline."""


def read_launch_facts() -> LaunchFacts:
    """Return the facts of this process's server; empty outside a server (tests, tools).

    Raises UnsupportedError for a server whose arguments cannot be read: it must not count as no server.
    """
    try:
        from sglang.srt.runtime_context import get_server_args

        arguments = get_server_args()
    except Exception as error:  # noqa: BLE001 - outside a server SGLang may raise anything here
        logger.debug("no server arguments: %s", error)
        arguments = None
    if arguments is None:
        return LaunchFacts()
    try:
        draft = resolved("speculative_draft_model_path")
        given = given_arguments(arguments)
        return LaunchFacts(
            model_path=resolved("model_path"),
            revision=resolved("revision"),
            load_format=str(resolved("load_format") or "auto"),
            draft_load_format=resolved("speculative_draft_load_format"),
            weights_from_elsewhere=tuple(_weights_from_elsewhere(resolved("model_path"), draft)),
            drafts=((draft, resolved("speculative_draft_model_revision")),) if draft else (),
            lora=bool(resolved("enable_lora")),
            kv_cache_dtype=_kv_cache_dtype(_target_runner()) or resolved("kv_cache_dtype"),
            compute=_compute(given),
            unknown_arguments=unknown(given),
            role=_ROLES.get(str(resolved("disaggregation_mode")), "both"),
            parts_of_pages=bool(resolved("enable_kv_cache_sharding") or resolved("enable_dsa_cache_layer_split")),
            role_may_change=bool(resolved("enable_pd_role_switch")),
            config_file=_config_file(),
        )
    except Exception as error:
        raise UnsupportedError("this SGLang", f"its launch arguments cannot be read ({error})") from error


def uses_storage() -> bool:
    """Return whether SGLang may ever call a storage backend in this process; True if unknown (tests)."""
    return any(resolved_or(argument, True) for argument in _STORAGE_ARGUMENTS)


def resolved_or(argument: str, otherwise: Any) -> Any:
    """Return ``resolved(argument)``, or ``otherwise`` if that is unknown."""
    try:
        return resolved(argument)
    except Exception as error:  # noqa: BLE001 - outside a server SGLang may raise anything here
        logger.debug("--%s is not known: %s", argument, error)
        return otherwise


def resolved(argument: str) -> Any:
    """Return the resolved value of a launch argument; None for one that SGLang lacks. Raises outside a server.

    ``get_server_args()`` has the values as typed ("auto" and the like); SGLang's namespaces have the resolved ones.
    """
    from sglang.srt import runtime_context
    from sglang.srt.arg_groups.arg_utils import namespace_of

    arguments: Any = runtime_context.get_server_args()
    path = namespace_of(type(arguments)).get(argument)
    if path is None:
        return getattr(arguments, argument, None)
    first, *rest = path.split(".")
    namespace = getattr(runtime_context, f"get_{first}")()
    for name in rest:
        namespace = getattr(namespace, name)
    return getattr(namespace, argument)


def unicode_text(name: str) -> str:
    """Return ``name``, which may be a path, in a form that can be encoded: non-UTF-8 bytes become ``\\udcXX``."""
    return name.encode("utf-8", "backslashreplace").decode()


def longest_prompt() -> int | None:
    """Return the tokens that a prompt may have: the model's context, or what the device holds. None if unknown.

    It only serves a warning, so a release without these names merely loses that warning."""
    runner = _target_runner()
    known = (
        getattr(getattr(runner, "model_config", None), "context_len", None),
        getattr(runner, "max_total_num_tokens", None),
    )
    return min((tokens for tokens in known if isinstance(tokens, int)), default=None)


def _target_runner() -> Any:
    target = process.target()
    return target and target.runner


def _kv_cache_dtype(runner: Any) -> str | None:
    """Return what a runner's pools hold: the tensors' dtype, prefixed with the encoding's name if that says more."""
    dtype = getattr(runner, "kv_cache_dtype", None)
    if dtype is None:
        return None
    name, stored = str(getattr(runner, "kv_cache_dtype_str", "auto")), str(dtype).removeprefix("torch.")
    return stored if name in _NAMES_OF_DTYPES else f"{name}/{stored}"


def _weights_from_elsewhere(*models: str | None) -> Iterator[str]:
    for name in WEIGHTS:
        if resolved(name) in (None, "", "off") or (
            name == "download_dir" and all(map(os.path.exists, filter(None, models)))
        ):
            continue
        yield name.replace("_", "-")
    if "qlora_adapter_name_or_path" in str(resolved("model_loader_extra_config")):
        yield "model-loader-extra-config"


def _compute(given: Mapping[str, Any]) -> str:
    compute = shaping(given)
    as_resolved = {name: resolved(name) for name in SHAPING_AS_RESOLVED}
    compute |= {name: str(value) for name, value in as_resolved.items() if value and value != "{}"}
    compute |= {name: value for name, value in SHAPING_VALUES if resolved(name) == value}
    for name in SHAPING_FILES:
        if path := resolved(name):
            compute[name] = _digest_of_small_file(path)
    target = _target_runner()
    if target is None:
        computed = {"dtype": resolved("dtype"), "quantization": resolved("quantization")}
    else:
        computed = _compute_facts(target)
    compute |= {name: value for name, value in computed.items() if value is not None}
    # Drafts may use another dtype for layers and KV, in pools that look like the target's.
    if drafts := sorted({json.dumps(_compute_facts(model.runner), sort_keys=True) for model in process.drafts()}):
        compute["drafts"] = ",".join(drafts)
    return json.dumps(compute, sort_keys=True)


def _compute_facts(runner: Any) -> dict[str, str | None]:
    """Return dtype and quantisation of a model's layers, as its loader resolved them, and the dtype of its KV."""
    config = getattr(runner, "model_config", None)
    dtype, quantization = getattr(config, "dtype", None), getattr(config, "quantization", None)
    return {
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "quantization": None if quantization is None else str(quantization),
        "kv": _kv_cache_dtype(runner),
    }


def _digest_of_small_file(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]
    except OSError:
        return path


_given_as: ContextVar[str | None] = ContextVar("_given_as", default=None)


@contextmanager
def configuration_given_as(argument: str | None) -> Iterator[None]:
    """Remember the typed ``--hicache-storage-backend-extra-config`` while SGLang sees another value there (pd/)."""
    token = _given_as.set(argument)
    try:
        yield
    finally:
        _given_as.reset(token)


def _config_file() -> str | None:
    given = _given_as.get() or resolved_or("hicache_storage_backend_extra_config", None)
    return os.path.abspath(given[1:]) if isinstance(given, str) and given.startswith("@") else None


def logical_dtype(stored: str, kv_cache_dtype: str | None, override: str | None) -> str | None:
    """Return the dtype that the bytes encode; None if it cannot be known.

    SGLang keeps fp8 KV in uint8 tensors: e4m3 and e5m2 look alike there, and only the launch argument tells them apart.
    ``stored`` is the pool's torch dtype without "torch.", ``override`` the configured ``kv_dtype``.
    """
    known = override or kv_cache_dtype
    if stored in ("uint8", "int8"):
        return f"{known}/{stored}" if known else None
    # An override never hides the tensor's own dtype: bf16 and fp16 pages are equally long.
    return f"{override}/{stored}" if override else stored
