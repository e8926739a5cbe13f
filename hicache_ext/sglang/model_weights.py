"""Which weights this server computes its KV with: the target model's and the draft models', as SGLang loads them.

Every model of a server, target or draft, goes through ``ModelRunner.load_model``.
The hook on it notes the files before the load, lets them be read meanwhile (fingerprint.py), and looks once more
afterwards. It also says what SGLang has resolved the launch arguments to: dtypes and quantisation live in the runner.

Draft weights count because KV of draft layers lies in the same pages as the target's (EAGLE, MTP) or in pools of its
own. A draft in the target's own files (MTP layers of one checkpoint) adds nothing.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hicache_ext.config import load_document
from hicache_ext.config.model import HicacheExtConfig
from hicache_ext.errors import HicacheExtError, UnsupportedError
from hicache_ext.page.fingerprint import ModelFingerprint
from hicache_ext.sglang import loaded_models
from hicache_ext.sglang.launch_facts import LaunchFacts, resolved
from hicache_ext.sglang.loaded_models import LoadedModel

logger = logging.getLogger(__name__)

RECORDS = "weights"
"""The directory beside a tier's pages in which digests of weight files are remembered."""

_FROM_FILES = frozenset(
    {"auto", "pt", "safetensors", "instanttensor", "npcache", "sharded_state", "gguf", "bitsandbytes", "mistral"}
    | {"layered", "fastsafetensors", "runai_streamer"}
)
"""Values of ``--load-format`` with which the weights are what lies in the files at ``--model-path``."""
_DUMMY = "dummy"
"""No files: random weights, the same in every server."""


class ModelWeights:
    """The weights of a server's target and drafts, taken together."""

    def __init__(self, target: ModelFingerprint, drafts: list[ModelFingerprint]) -> None:
        self._all = [target, *drafts]

    @property
    def problem(self) -> str | None:
        """Why the weights cannot be identified."""
        return next((model.problem for model in self._all if model.problem is not None), None)

    @property
    def fingerprint(self) -> str:
        """Of the target. Means nothing before ``when_known`` has called, nor where there is a ``problem``."""
        return str(self._all[0].digest)

    @property
    def draft(self) -> str:
        """Of all drafts with files of their own, likewise; "" without any."""
        digests = [str(model.digest) for model in self._all[1:]]
        if len(digests) < 2:
            return "".join(digests)
        return hashlib.sha256("\0".join(digests).encode()).hexdigest()[:32]

    def start(self, remember_in: Path | None) -> None:
        for model in self._all:
            model.start(remember_in)

    def when_known(self, callback: Callable[[], None]) -> None:
        """Call the method ``callback`` when all is known, and again when that changes; here, or on a thread that reads
        files. Its object is not kept alive for that."""
        lock, waiting, method = threading.Lock(), len(self._all), weakref.WeakMethod(callback)

        def one_done() -> None:
            nonlocal waiting
            with lock:
                waiting -= 1
                last = waiting <= 0
            if last and (call := method()) is not None:
                call()

        for model in self._all:
            model.when_done(one_done)


def around_load(original: Callable[..., Any], runner: Any, *arguments: Any, **named: Any) -> Any:
    """AROUND hook on ModelRunner.load_model [scheduler thread, before the server answers anything]."""
    before = _quietly(_noted, runner)
    result = original(runner, *arguments, **named)
    _quietly(_look_again, runner, before)
    return result


def after_late_load(_: Any, runner: Any, *__: Any, **___: Any) -> None:
    """AFTER hook on ModelRunner.finalize_startup_weight_load [scheduler thread]."""
    for model in loaded_models.loaded:
        if model.runner is runner:
            _quietly(model.fingerprint.loaded)


def weights_of_server(facts: LaunchFacts) -> ModelWeights:
    """Of the server in this process. Where the hook saw no load (it is not in force), the files as they are now.

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
    drafts = [model.fingerprint for model in loaded_models.drafts()]
    if (loaded := loaded_models.target()) is not None:
        target = loaded.fingerprint
    else:
        target = ModelFingerprint(facts.model_path or "", facts.revision, weights=facts.load_format != _DUMMY)
        weights = (facts.draft_load_format or facts.load_format) != _DUMMY
        drafts = [
            ModelFingerprint(path, revision, weights=weights)
            for path, revision in facts.drafts
            if (path, revision) != (facts.model_path, facts.revision)
        ]
    others = list(dict.fromkeys(draft for draft in drafts if draft is not target))
    return ModelWeights(target, others)


def records_directory(config: HicacheExtConfig) -> Path | None:
    """Where digests of weight files are remembered: beside the identities of the first tier that keeps them in a
    directory, None without one."""
    kept = [tier.directories() for tier in config.tiers.values() if tier.keeps_identities and not tier.remote]
    return next((Path(directories[0]) / RECORDS for directories in kept if directories), None)


def _noted(runner: Any) -> ModelFingerprint:
    config = runner.model_config
    path, revision = str(config.model_path), getattr(config, "revision", None)
    for model in loaded_models.loaded:
        if (model.fingerprint.model_path, model.fingerprint.revision) == (path, revision):
            return model.fingerprint
    load_format = resolved("load_format")
    if getattr(runner, "is_draft_worker", False):
        load_format = resolved("speculative_draft_load_format") or load_format
    fingerprint = ModelFingerprint(path, revision, weights=load_format != _DUMMY)
    if fingerprint.found and (configured := _configured()) is not None and configured.model.fingerprint == "auto":
        directory = records_directory(configured)
        # What the tier's own directory is to be, the tier decides later.
        fingerprint.start(directory if directory is not None and directory.parent.is_dir() else None)
    return fingerprint


def _look_again(runner: Any, before: ModelFingerprint | None) -> None:
    if before is None or not before.found or not before.loaded():
        before = _noted(runner)  # SGLang has fetched files meanwhile
    draft = bool(getattr(runner, "is_draft_worker", False))
    loaded_models.loaded.append(LoadedModel(runner, draft, before))


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
