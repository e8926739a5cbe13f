"""Identifies the weights behind this server's KV: target, drafts, adapters; at startup and after online updates."""

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


# -- weights at startup ------------------------------------------------------------------------------------------------
# Every model of a server, target or draft, goes through ``ModelRunner.load_model``. The hook on it records the files
# before the load, has them read during it (fingerprint.py), and checks them again afterwards. It also keeps the runner,
# which has the resolved dtypes and quantisation.
#
# Draft weights count because draft layers keep their KV in the target's pages (EAGLE, MTP) or in pools of their own.
# A draft in the target's own files (MTP layers of one checkpoint) adds nothing.

RECORDS = "weights"
"""The directory next to a tier's pages in which digests of weight files are cached."""

_FROM_FILES = frozenset(
    {"auto", "pt", "safetensors", "instanttensor", "npcache", "sharded_state", "gguf", "bitsandbytes", "mistral"}
    | {"layered", "fastsafetensors", "runai_streamer"}
)
"""Values of ``--load-format`` that load the weights from the files at ``--model-path``."""
_DUMMY = "dummy"
"""The value for random weights without files, the same in every server."""


def around_load(original: Callable[..., Any], runner: Any, *arguments: Any, **named: Any) -> Any:
    """AROUND hook on ModelRunner.load_model [scheduler thread, before the server answers anything]."""
    before = _quietly(_fingerprint_of, runner)
    result = original(runner, *arguments, **named)
    _quietly(_record_load, runner, before)
    return result


def after_late_load(_: Any, runner: Any, *__: Any, **___: Any) -> None:
    """AFTER hook on ModelRunner.finalize_startup_weight_load [scheduler thread]."""
    for model in process.loaded:
        if model.runner is runner:
            _quietly(model.fingerprint.loaded)


def problem_of(weights: Sequence[ModelFingerprint]) -> str | None:
    """Return why the weights cannot be identified; None if they can."""
    return next((model.problem for model in weights if model.problem is not None), None)


def weights_of_server(facts: LaunchFacts) -> list[ModelFingerprint]:
    """Return the fingerprints of this process's server, the target's first. If the hook saw no load (it is not in
    force), use the files as they are now.

    Raises UnsupportedError if the weights do not come from files.
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
    """Return where digests of weight files are cached: next to the identities of the first tier that keeps them in a
    directory; None without such a tier."""
    kept = [tier.directories() for tier in config.tiers.values() if tier.keeps_identities and not tier.remote]
    return next((Path(directories[0]) / RECORDS for directories in kept if directories), None)


def _fingerprint_of(runner: Any) -> ModelFingerprint:
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
        # The tier creates its directory itself; if it is still missing, the backend starts the fingerprint later.
        if directory is None or directory.parent.is_dir():
            fingerprint.start(directory)
    return fingerprint


def _record_load(runner: Any, before: ModelFingerprint | None) -> None:
    if before is None or not before.found or not before.loaded():
        before = _fingerprint_of(runner)  # SGLang has fetched files meanwhile
    draft = bool(getattr(runner, "is_draft_worker", False))
    process.loaded.append(LoadedModel(runner, draft, before))


def _configured() -> HicacheExtConfig | None:
    """Return the configuration of this server's backend; None if it has no such backend (yet)."""
    if resolved("hicache_storage_backend") != "dynamic":
        return None
    try:
        return load_document(resolved("hicache_storage_backend_extra_config")).hicache_ext
    except HicacheExtError:
        return None  # another backend, or ours, whose constructor reports the problem


def _quietly(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call without raising, so that SGLang's load continues; the backend then reads the weights itself."""
    try:
        return call(*arguments)
    except Exception as error:  # noqa: BLE001
        logger.warning("hicache_ext: the weights could not be looked at while they were loaded: %s", error)
        return None


# -- online updates ----------------------------------------------------------------------------------------------------
# SGLang does not tell its storage backend about them. Every call that may change weights counts as a change, before it
# runs and also if it fails: an update that stops half-way leaves unknown weights. From then on the backend serves and
# stores nothing until SGLang has flushed its caches, because L1 and L2 hold KV of the old weights. The flush starts a
# new weights epoch, hence other keys.
#
# An epoch is a random number drawn by the first rank of a tensor-parallel group and broadcast to the other ranks, which
# SGLang brings to the same point. Each launch or update gets another. Reasons: docs/decisions/weights-identity.md.

updated_to: str | None = None
"""The epoch of the last update in this process; None while the weights are as loaded."""
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
    """BEFORE hook [scheduler thread]: the weights' memory is released, and is undefined when it is resumed."""
    tags = getattr(recv_req, "tags", None)
    # The weights survive if SGLang backs them up in host memory and restores them.
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
    """Return a random number equal on all ranks of ``group``. Ranks that cannot agree differ, which only costs hits."""
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
# is part of a request's ``extra_key`` and so of its page hashes. After an adapter is loaded, one hook digests its
# content; when a request is constructed, another replaces the ``lora_id`` in its ``extra_key`` by the digest. Radix
# tree, host memory, storage and decode nodes then use the digest.
#
# The digest covers the tensors that SGLang holds: it is equal for all ways to load (path, HTTP, tensors), and no file
# can change in between. The tensors may be mapped from a file, and SGLang copies them to the device repeatedly, so an
# adapter overwritten in place would change in the running server: they are copied to private memory here. Incidents and
# choices: docs/decisions/weights-identity.md.

_DOMAIN = b"hicache_ext/adapter/1\0"
_NOT_SHAPING = ("base_model_name_or_path", "inference_mode", "revision", "task_type", "auto_mapping", "peft_version")
"""Keys of an adapter's configuration that do not change what its layers compute. All others count."""
_THREADS = 4

_digests: dict[str, str] = {}
"""SGLang's lora_id -> digest, for every adapter loaded in this process. Ids are never reused."""


def after_lora_start(_: Any, manager: Any, *__: Any, **___: Any) -> None:
    """AFTER hook: the adapters of the command line are loaded, and the modules they apply to are known."""
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
        digest = _unique_digest()
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
        digest = _digests[lora_id] = _unique_digest()
        logger.error("hicache_ext: LoRA adapter %s was loaded unseen; its KV is not reused", lora_id)
    request.extra_key = namespaced_extra_key(request.extra_key.removesuffix(lora_id), digest)


def adapter_digest(adapter: Any, server_modules: Collection[str]) -> str:
    """Return a digest, 32 hexadecimal digits, of everything that a loaded LoRAAdapter adds to the base model.

    ``server_modules`` are the modules to which the server applies adapters; it ignores tensors of other modules.
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


def _unique_digest() -> str:
    """Return a random digest: no other adapter finds its pages, nor does this one after a restart."""
    return uuid.uuid4().hex


def _tensors_of(adapter: Any) -> list[dict[str, torch.Tensor]]:
    """Return SGLang's own dictionaries of every layer and of the embeddings."""
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
