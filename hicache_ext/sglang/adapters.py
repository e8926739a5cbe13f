"""LoRA: adapters of equal weights share pages, adapters of different weights never do.

SGLang names adapters by a ``lora_id`` (a digest of name and path, or a random number for one loaded over HTTP), which
is part of a request's ``extra_key`` and so of its page hashes. Two hooks: after an adapter is loaded, its content is
digested; when a request is made, the digest replaces the ``lora_id`` in its ``extra_key``. Radix tree, host memory,
storage and decode nodes follow from there.

The digest is of the tensors that SGLang holds: equal on all ways to load (path, HTTP, tensors), and no file can change
in between. The tensors may be mapped from a file, and SGLang copies them to the device repeatedly. So they are made
private here, or an adapter overwritten in place would change in the running server.
Incidents and choices: docs/decisions/weights-identity.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Collection, Mapping
from typing import Any

import torch

from hicache_ext.page.hashes import namespaced_extra_key
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.sglang.launch_facts import uses_storage

logger = logging.getLogger(__name__)

_DOMAIN = b"hicache_ext/adapter/1\0"
_NOT_SHAPING = ("base_model_name_or_path", "inference_mode", "revision", "task_type", "auto_mapping", "peft_version")
"""Keys of an adapter's configuration that do not change what its layers compute. All others count."""
_THREADS = 4

_digests: dict[str, str] = {}
"""SGLang's lora_id -> digest, for every adapter loaded in this process. No id is used twice."""


def after_start(_: Any, manager: Any, *__: Any, **___: Any) -> None:
    """AFTER hook: the adapters of the command line are loaded, and the modules that they apply to are known."""
    for lora_id, lora_ref in manager.lora_refs.items() if uses_storage() else ():
        _identify(manager, lora_id, lora_ref.lora_name)


def after_load(_: Any, manager: Any, lora_ref: Any, *__: Any, **___: Any) -> None:
    """AFTER hook: the weights of an adapter are in host memory [scheduler thread, which waits for the load]."""
    if hasattr(manager, "memory_pool") and uses_storage():  # or else after_start comes
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
