"""Which weights this server computes its KV with: target, drafts, adapters; at the start and after online updates."""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hicache_ext.config import load_document
from hicache_ext.config.model import HicacheExtConfig
from hicache_ext.errors import HicacheExtError, UnsupportedError
from hicache_ext.page.fingerprint import ModelFingerprint
from hicache_ext.page.hashes import namespaced_extra_key
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.sglang import process
from hicache_ext.sglang.launch_arguments import LaunchFacts, resolved, resolved_or, uses_storage
from hicache_ext.sglang.process import LoadedModel, attached_backends

logger = logging.getLogger(__name__)


# -- weights at the start ----------------------------------------------------------------------------------------------
# Every model of a server, target or draft, goes through ``ModelRunner.load_model``.
# The hook on it notes the files before the load, lets them be read meanwhile (fingerprint.py), and looks once more
# afterwards. It also says what SGLang has resolved the launch arguments to: dtypes and quantisation live in the runner.
#
# Draft weights count because KV of draft layers lies in the same pages as the target's (EAGLE, MTP) or in pools of its
# own. A draft in the target's own files (MTP layers of one checkpoint) adds nothing.

RECORDS = "weights"
"""The directory beside a tier's pages in which digests of weight files are remembered."""

_FROM_FILES = frozenset(
    {"auto", "pt", "safetensors", "instanttensor", "npcache", "sharded_state", "gguf", "bitsandbytes", "mistral"}
    | {"layered", "fastsafetensors", "runai_streamer"}
)
"""Values of ``--load-format`` with which the weights are what lies in the files at ``--model-path``."""
_DUMMY = "dummy"
"""No files: random weights, the same in every server."""


def around_load(original: Callable[..., Any], runner: Any, *arguments: Any, **named: Any) -> Any:
    """AROUND hook on ModelRunner.load_model [scheduler thread, before the server answers anything]."""
    before = _quietly(_noted, runner)
    result = original(runner, *arguments, **named)
    _quietly(_look_again, runner, before)
    return result


def after_late_load(_: Any, runner: Any, *__: Any, **___: Any) -> None:
    """AFTER hook on ModelRunner.finalize_startup_weight_load [scheduler thread]."""
    for model in process.loaded:
        if model.runner is runner:
            _quietly(model.fingerprint.loaded)


def problem_of(weights: Sequence[ModelFingerprint]) -> str | None:
    """Why the weights cannot be identified."""
    return next((model.problem for model in weights if model.problem is not None), None)


def weights_of_server(facts: LaunchFacts) -> list[ModelFingerprint]:
    """Of the server in this process, the target's first. Where the hook saw no load (it is not in force), the files as
    they are now.

    Raises UnsupportedError where the weights do not come from files.
    """
    elsewhere = [f"--{argument}" for argument in facts.weights_from_elsewhere]
    formats = {"load-format": facts.load_format, "speculative-draft-load-format": facts.draft_load_format or "auto"}
    elsewhere += [f"--{name} {kind}" for name, kind in formats.items() if kind not in _FROM_FILES | {_DUMMY}]
    if elsewhere:
        raise UnsupportedError(
            elsewhere[0],
            "the weights come from elsewhere than the files at the model's path, so nothing tells which they are",
            "set hicache_ext.model.fingerprint to a text that changes whenever the weights do",
        )
    drafts = [model.fingerprint for model in process.drafts()]
    if (loaded := process.target()) is not None:
        target = loaded.fingerprint
    else:
        target = ModelFingerprint(facts.model_path or "", facts.revision, weights=facts.load_format != _DUMMY)
        weights = (facts.draft_load_format or facts.load_format) != _DUMMY
        drafts = [
            ModelFingerprint(path, revision, weights=weights)
            for path, revision in facts.drafts
            if (path, revision) != (facts.model_path, facts.revision)
        ]
    return list(dict.fromkeys([target, *drafts]))


def records_directory(config: HicacheExtConfig) -> Path | None:
    """Where digests of weight files are remembered: beside the identities of the first tier that keeps them in a
    directory, None without one."""
    kept = [tier.directories() for tier in config.tiers.values() if tier.keeps_identities and not tier.remote]
    return next((Path(directories[0]) / RECORDS for directories in kept if directories), None)


def _noted(runner: Any) -> ModelFingerprint:
    config = runner.model_config
    path, revision = str(config.model_path), getattr(config, "revision", None)
    for model in process.loaded:
        if (model.fingerprint.model_path, model.fingerprint.revision) == (path, revision):
            return model.fingerprint
    load_format = resolved("load_format")
    if getattr(runner, "is_draft_worker", False):
        load_format = resolved("speculative_draft_load_format") or load_format
    fingerprint = ModelFingerprint(path, revision, weights=load_format != _DUMMY)
    if fingerprint.found and (configured := _configured()) is not None and configured.model.fingerprint == "auto":
        directory = records_directory(configured)
        # The tier makes its own directory. The backend, which comes behind it, then begins.
        if directory is None or directory.parent.is_dir():
            fingerprint.start(directory)
    return fingerprint


def _look_again(runner: Any, before: ModelFingerprint | None) -> None:
    if before is None or not before.found or not before.loaded():
        before = _noted(runner)  # SGLang has fetched files meanwhile
    draft = bool(getattr(runner, "is_draft_worker", False))
    process.loaded.append(LoadedModel(runner, draft, before))


def _configured() -> HicacheExtConfig | None:
    """What this server's backend will be configured with; None where it has no such backend (yet)."""
    if resolved("hicache_storage_backend") != "dynamic":
        return None
    try:
        return load_document(resolved("hicache_storage_backend_extra_config")).hicache_ext
    except HicacheExtError:
        return None  # somebody else's backend; or ours, whose constructor says what is wrong


def _quietly(call: Callable[..., Any], *arguments: Any) -> Any:
    """SGLang's load goes on whatever happens here; the backend finds nothing noted, and begins by itself."""
    try:
        return call(*arguments)
    except Exception as error:  # noqa: BLE001
        logger.warning("hicache_ext: the weights could not be looked at while they were loaded: %s", error)
        return None


# -- online updates ----------------------------------------------------------------------------------------------------
# SGLang does not tell its storage backend of them. Every call that may change weights counts as a change, before it
# runs and also if it fails: an update that stops half-way leaves unknown weights. From then on the backend serves and
# stores nothing until SGLang has flushed its caches, because L1 and L2 hold KV of the old weights. With the flush a new
# weights epoch begins, hence other keys.
#
# An epoch is a random number drawn by the first rank of a tensor-parallel group and broadcast to the others, which
# SGLang brings to the same point. No other launch or update has the same. Reasons: docs/decisions/weights-identity.md.

updated_to: str | None = None
"""The epoch of the last update in this process; None while the weights are those that were loaded."""
flushed = True
"""Whether SGLang's caches hold nothing from before that update."""


def before_update(manager: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook [scheduler thread]: the weights are about to change."""
    global updated_to, flushed
    updated_to = _agreed(getattr(manager, "tp_cpu_group", None))
    flushed = False
    for backend in attached_backends():
        backend.served.suspended = True


def before_release(manager: Any, recv_req: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook [scheduler thread]: memory of the weights is released, and comes back with any content."""
    tags = getattr(recv_req, "tags", None)
    # Unless SGLang keeps a backup of them in host memory and restores it.
    if (not tags or "weights" in tags) and not resolved_or("enable_weights_cpu_backup", False):
        before_update(manager)


def after_flush(result: Any, *_: Any, **__: Any) -> None:
    """AFTER hook [scheduler thread]: a successful flush ends the suspension, under the new epoch."""
    global flushed
    if not result or updated_to is None or flushed:
        return
    flushed = True
    for backend in attached_backends():
        if backend.flushes_with_cache:
            backend.served.advance_weights_epoch(updated_to)
            backend.served.suspended = False
        else:
            # The flush does not empty a decode node's offload queue: it may hold pages of the old weights.
            logger.warning("hicache_ext: the weights were updated; this decode node stores no KV until it is restarted")


def _agreed(group: Any) -> str:
    """A random number, equal on all ranks of ``group``. Ranks that cannot agree get different ones: misses, no harm."""
    drawn = [uuid.uuid4().hex[:16]]
    try:
        import torch.distributed as ranks

        if group is not None and ranks.is_initialized() and ranks.get_world_size(group) > 1:
            ranks.broadcast_object_list(drawn, src=ranks.get_process_group_ranks(group)[0], group=group)
    except Exception as error:  # noqa: BLE001 - an update must go on
        logger.warning("hicache_ext: the ranks could not agree on a weights epoch and will not find pages: %s", error)
    return str(drawn[0])


# -- LoRA adapters -----------------------------------------------------------------------------------------------------
# Adapters of equal weights share pages, adapters of different weights never do.
#
# SGLang names adapters by a ``lora_id`` (a digest of name and path, or a random number for one loaded over HTTP), which
# is part of a request's ``extra_key`` and so of its page hashes. Two hooks: after an adapter is loaded, its content is
# digested; when a request is made, the digest replaces the ``lora_id`` in its ``extra_key``. Radix tree, host memory,
# storage and decode nodes follow from there.
#
# The digest is of the tensors that SGLang holds: equal on all ways to load (path, HTTP, tensors), and no file can
# change in between. The tensors may be mapped from a file, and SGLang copies them to the device repeatedly. So they are
# made private here, or an adapter overwritten in place would change in the running server. Incidents and choices:
# docs/decisions/weights-identity.md.

_DOMAIN = b"hicache_ext/adapter/1\0"
_NOT_SHAPING = ("base_model_name_or_path", "inference_mode", "revision", "task_type", "auto_mapping", "peft_version")
"""Keys of an adapter's configuration that do not change what its layers compute. All others count."""
_THREADS = 4

_digests: dict[str, str] = {}
"""SGLang's lora_id -> digest, for every adapter loaded in this process. No id is used twice."""


def after_lora_start(_: Any, manager: Any, *__: Any, **___: Any) -> None:
    """AFTER hook: the adapters of the command line are loaded, and the modules that they apply to are known."""
    for lora_id, lora_ref in manager.lora_refs.items() if uses_storage() else ():
        _identify(manager, lora_id, lora_ref.lora_name)


def after_lora_load(_: Any, manager: Any, lora_ref: Any, *__: Any, **___: Any) -> None:
    """AFTER hook: the weights of an adapter are in host memory [scheduler thread, which waits for the load]."""
    if hasattr(manager, "memory_pool") and uses_storage():  # or else after_lora_start comes
        _identify(manager, lora_ref.lora_id, lora_ref.lora_name)


def _identify(manager: Any, lora_id: str, name: str) -> None:
    try:
        adapter = manager.loras[lora_id]
        _make_private(adapter)
        digest = adapter_digest(adapter, manager.target_modules)
        logger.info("hicache_ext: pages of LoRA adapter %s have the adapter digest %s", name, digest)
    except Exception:
        digest = _unheard_of()
        logger.exception("hicache_ext: LoRA adapter %s cannot be identified; its KV is not reused", name)
    _digests[lora_id] = digest


def after_request(_: Any, request: Any, *__: Any, **___: Any) -> None:
    """AFTER hook on the constructor of a request [scheduler thread]."""
    lora_id = request.lora_id
    if lora_id is None:
        request.extra_key = namespaced_extra_key(request.extra_key)
        return
    digest = _digests.get(lora_id)
    if digest is None and not uses_storage():
        return
    if digest is None:
        digest = _digests[lora_id] = _unheard_of()
        logger.error("hicache_ext: LoRA adapter %s was loaded unseen; its KV is not reused", lora_id)
    request.extra_key = namespaced_extra_key(request.extra_key.removesuffix(lora_id), digest)


def adapter_digest(adapter: Any, server_modules: Collection[str]) -> str:
    """32 hexadecimal digits over everything that a loaded LoRAAdapter adds to the base model.

    ``server_modules``: the modules to which the server applies adapters. It ignores tensors of others.
    """
    config = {name: value for name, value in adapter.config.hf_config.items() if name not in _NOT_SHAPING}
    if isinstance(config.get("target_modules"), list | set | tuple):
        config["target_modules"] = sorted(config["target_modules"])
    config["added_tokens"] = adapter.config.added_tokens_config
    digest = hashlib.sha256(_DOMAIN + json.dumps(config, sort_keys=True, default=str).encode())
    tensors = _tensors_of(adapter)
    threads = ThreadPool("hicache-adapter")
    try:
        parts = threads.run(len(tensors), lambda i: _digest_of_tensors(server_modules, tensors[i]), _THREADS)
    finally:
        threads.close()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:32]


def _unheard_of() -> str:
    """A random digest: its pages are never found by another adapter, nor by this one after a restart."""
    return uuid.uuid4().hex


def _tensors_of(adapter: Any) -> list[dict[str, torch.Tensor]]:
    """SGLang's own dictionaries, of every layer and of the embeddings."""
    return [*(layer.weights for layer in adapter.layers), adapter.embedding_layers, adapter.added_tokens_embeddings]


def _make_private(adapter: Any) -> None:
    for tensors in _tensors_of(adapter):
        for name, tensor in tensors.items():
            tensors[name] = tensor.clone()


def _digest_of_tensors(server_modules: Collection[str], tensors: Mapping[str, torch.Tensor]) -> bytes:
    digest = hashlib.sha256(len(tensors).to_bytes(8, "little"))
    for name, tensor in sorted(tensors.items()):
        applied = any(module in name for module in server_modules)
        facts = json.dumps([name, str(tensor.dtype), list(tensor.shape), applied]).encode()
        digest.update(len(facts).to_bytes(8, "little") + facts)
        raw: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(raw)
    return digest.digest()
