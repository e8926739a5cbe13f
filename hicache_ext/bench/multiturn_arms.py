"""Servers that ``hicache-ext bench multiturn`` starts itself, one after the other, all with one model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from hicache_ext.bench.multiturn_targets import Answer, Target, answer_of
from hicache_ext.bench.multiturn_workload import Conversation
from hicache_ext.config.model import ExtraConfig
from hicache_ext.errors import BenchmarkError, ServerError
from hicache_ext.testing.client import Generation
from hicache_ext.testing.server import SglangServer

ARMS = {
    "no-storage": "HiCache with device and host memory alone",
    "sglang-file": "HiCache with SGLang's own file backend",
    "ours": "HiCache with a file tier of hicache_ext",
    "on-device": "HiCache without storage, whose caches are never flushed: the limit",
}


class Talker(Protocol):
    """What was started: a server, or a pair of which one node prefills."""

    def generate(
        self, prompt: Sequence[int], max_new_tokens: int, *, sampling: Mapping[str, Any] | None = None
    ) -> Generation:
        """One answer."""

    def flush_cache(self) -> None:
        """Empty L1 and L2 of the node that prefills."""


class MadeTarget(Target):
    """Started for one run, with an empty storage directory."""

    def __init__(self, name: str, start: Callable[[ExitStack], Talker], *, flushes: bool = True) -> None:
        self.name = name
        self._start = start
        self._flushes = flushes
        self._stack = ExitStack()
        self._talker: Talker | None = None

    def __enter__(self) -> MadeTarget:
        try:
            self._talker = self._start(self._stack)
        except ServerError as error:
            self._stack.close()
            raise BenchmarkError(f"{self.name}: {error}") from error
        return self

    def __exit__(self, *error: object) -> None:
        self._talker = None
        self._stack.close()

    def ask(self, conversation: Conversation, tokens: int) -> Answer:
        try:
            return answer_of(self._running().generate(conversation.tokens, tokens, sampling={"ignore_eos": True}))
        except (ServerError, OSError) as error:
            raise BenchmarkError(f"{self.name}: {error}") from error

    def flush(self) -> None:
        if self._flushes:
            self._running().flush_cache()

    def _running(self) -> Talker:
        if self._talker is None:
            raise BenchmarkError(f"{self.name} is not running")
        return self._talker


def made_arm(
    arm: str,
    model: str,
    directory: Path,
    *,
    log_file: Path,
    page_size: int,
    capacity: str,
    server_arguments: Sequence[str] = (),
) -> MadeTarget:
    """The server of one of ``ARMS``; its pages go to ``directory``."""
    pool = directory / "pages"
    config: dict[str, Any] | None = None
    if arm == "ours":
        config = ExtraConfig.around({"tiers": {"disk": {"type": "file", "path": str(pool), "capacity": capacity}}})
    elif arm == "sglang-file":
        config = {}
    if config is not None:
        config["prefetch_threshold"] = page_size

    def start(stack: ExitStack) -> SglangServer:
        return stack.enter_context(
            SglangServer(
                model,
                log_file=log_file,
                page_size=page_size,
                storage_backend={"sglang-file": "file", "ours": "dynamic"}.get(arm),
                extra_config=config,
                extra_arguments=server_arguments,
                environment={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": os.fspath(pool)},
                start_timeout=1800,
            )
        )

    return MadeTarget(arm, start, flushes=arm != "on-device")
