"""What a multi-turn benchmark talks to: a running endpoint, a running pair, or servers of the CPU rig made for it."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from hicache_ext.bench.multiturn_workload import Conversation
from hicache_ext.config.model import ExtraConfig
from hicache_ext.errors import BenchmarkError, ServerError
from hicache_ext.testing.server import SglangServer
from tests.rigs.pd_pair import PdPair

_TIMEOUT = 600.0
_PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """One turn's answer; times in seconds from sending the request."""

    time_to_first_token: float
    total_time: float
    output_ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    completion_tokens: int
    cached: Mapping[str, int]
    """Tokens by source: device, host, storage, or unknown where the endpoint does not say."""


class Target(Protocol):
    """Something to talk to; ``ask`` is called from several threads."""

    name: str

    def __enter__(self) -> Target: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def ask(self, conversation: Conversation, tokens: int) -> Answer: ...

    def flush(self) -> None:
        """Empty L1 and L2 of the node that prefills."""


class Endpoint:
    """A server that runs already: SGLang's ``/generate``, or ``/v1/completions`` of anything."""

    def __init__(self, name: str, url: str, api: str, model: str = "default") -> None:
        self.name = name
        self._url = url.rstrip("/")
        self._ask = {"generate": self._generate, "openai": self._complete}[api]
        self._model = model

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def ask(self, conversation: Conversation, tokens: int) -> Answer:
        return self._ask(conversation, tokens)

    def flush(self) -> None:
        _post(f"{self._url}/flush_cache?timeout=60", None).close()

    def _generate(self, conversation: Conversation, tokens: int) -> Answer:
        return generate(self._url, conversation.tokens, tokens, {})

    def _complete(self, conversation: Conversation, tokens: int) -> Answer:
        body = {
            "model": self._model,
            "prompt": conversation.text,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text, first = "", None
        usage: dict[str, Any] = {}
        started = time.monotonic()
        for event in _events(f"{self._url}/v1/completions", body):
            for choice in event.get("choices", ()):
                text += choice.get("text", "")
                if text and first is None:
                    first = time.monotonic() - started
            usage = event.get("usage") or usage
        total = time.monotonic() - started
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            total if first is None else first,
            total,
            (),
            text,
            usage.get("prompt_tokens", 0),
            usage.get("completion_tokens", 0),
            {"unknown": details.get("cached_tokens", 0)},
        )


class RunningPair:
    """A disaggregated pair that runs already, without a router."""

    def __init__(self, name: str, prefill_url: str, decode_url: str, bootstrap_host: str, bootstrap_port: int) -> None:
        self.name = name
        self._prefill = prefill_url.rstrip("/")
        self._decode = decode_url.rstrip("/")
        self._meeting = {"bootstrap_host": bootstrap_host, "bootstrap_port": bootstrap_port}
        self._rooms = itertools.count(time.time_ns() % 2**40)

    def __enter__(self) -> RunningPair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def ask(self, conversation: Conversation, tokens: int) -> Answer:
        meeting = {**self._meeting, "bootstrap_room": next(self._rooms)}
        prefilled: list[Answer] = []
        prefilling = threading.Thread(
            target=lambda: prefilled.append(generate(self._prefill, conversation.tokens, tokens, meeting))
        )
        prefilling.start()
        answer = generate(self._decode, conversation.tokens, tokens, meeting)
        prefilling.join()
        if not prefilled:
            raise BenchmarkError(f"{self.name}: the prefill node did not answer")
        return Answer(
            answer.time_to_first_token,
            answer.total_time,
            answer.output_ids,
            answer.text,
            answer.prompt_tokens,
            answer.completion_tokens,
            prefilled[0].cached,
        )

    def flush(self) -> None:
        _post(f"{self._prefill}/flush_cache?timeout=60", None).close()


class RigTarget:
    """A server or a pair of the rig, started for one run with an empty storage directory."""

    def __init__(self, name: str, start: Callable[[ExitStack], SglangServer | PdPair]) -> None:
        self.name = name
        self._start = start
        self._stack = ExitStack()
        self._server: SglangServer | PdPair | None = None

    def __enter__(self) -> RigTarget:
        self._server = self._start(self._stack)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server = None
        self._stack.close()

    def ask(self, conversation: Conversation, tokens: int) -> Answer:
        assert self._server is not None
        try:
            answer = self._server.generate(conversation.tokens, tokens, sampling={"ignore_eos": True})
        except (ServerError, OSError) as error:
            raise BenchmarkError(f"{self.name}: {error}") from error
        return Answer(
            answer.time_to_first_token,
            answer.total_time,
            answer.output_ids,
            "",
            answer.prompt_tokens,
            len(answer.output_ids),
            {"device": answer.cached.device, "host": answer.cached.host, "storage": answer.cached.storage},
        )

    def flush(self) -> None:
        server = self._server.prefill if isinstance(self._server, PdPair) else self._server
        assert server is not None
        server.flush_cache()


SINGLE_ARMS = ("no-cache", "l2", "sglang-file", "ours")
PAIR_ARMS = ("pd-without", "pd-sglang", "pd-ours")
ARMS = {
    "no-cache": "one server, no hierarchical cache",
    "l2": "one server, HiCache with host memory only",
    "sglang-file": "one server, HiCache with SGLang's file backend",
    "ours": "one server, HiCache with a file tier of hicache_ext",
    "pd-without": "a pair, decode node without offload",
    "pd-sglang": "a pair, SGLang's own decode offload into our tier",
    "pd-ours": "a pair, decode writer of hicache_ext",
}


def rig_target(arm: str, model: Path, directory: Path) -> RigTarget:
    """The target of one of ``ARMS``; logs and pages go to ``directory``."""
    place = directory / arm
    config = _our_config(place / "pool", written_by_us=arm != "pd-sglang")

    def start(stack: ExitStack) -> SglangServer | PdPair:
        place.mkdir(parents=True, exist_ok=True)
        if arm in PAIR_ARMS:
            return stack.enter_context(
                PdPair(
                    model,
                    directory=place,
                    prefill_config=config,
                    decode_config=config,
                    decode_offload=arm != "pd-without",
                    page_size=_PAGE_SIZE,
                )
            )
        backend = {"sglang-file": "file", "ours": "dynamic"}.get(arm)
        return stack.enter_context(
            SglangServer(
                model,
                log_file=place / "server.log",
                page_size=_PAGE_SIZE,
                hierarchical_cache=arm != "no-cache",
                storage_backend=backend,
                extra_config=config if arm == "ours" else {"prefetch_threshold": 16} if arm == "sglang-file" else None,
                environment={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": os.fspath(place / "pool")},
            )
        )

    return RigTarget(arm, start)


def generate(url: str, tokens: list[int], count: int, body: Mapping[str, Any]) -> Answer:
    """One streamed, greedy answer of SGLang's ``/generate``."""
    request = {
        "input_ids": tokens,
        "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
        "stream": True,
        **body,
    }
    first: float | None = None
    last: dict[str, Any] = {}
    started = time.monotonic()
    for last in _events(f"{url}/generate", request):
        if first is None and last.get("output_ids"):
            first = time.monotonic() - started
    total = time.monotonic() - started
    meta = last.get("meta_info")
    if not meta or "prompt_tokens" not in meta:
        raise BenchmarkError(f"{url} gave no complete answer: {str(last)[:300]}")
    details = meta.get("cached_tokens_details") or {"unknown": meta.get("cached_tokens", 0)}
    return Answer(
        total if first is None else first,
        total,
        tuple(last.get("output_ids", ())),
        last.get("text", ""),
        meta["prompt_tokens"],
        meta.get("completion_tokens", 0),
        {source: count for source, count in details.items() if isinstance(count, int)},
    )


def _events(url: str, body: Mapping[str, Any]) -> Any:
    with _post(url, body) as response:
        for line in response:
            data = line.strip().removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield json.loads(data)


def _post(url: str, body: Mapping[str, Any] | None) -> Any:
    try:
        request = urllib.request.Request(
            url,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        raise BenchmarkError(f"{url} answered {error.code}: {error.read().decode(errors='replace')[:300]}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise BenchmarkError(f"{url} cannot be reached: {error}") from error


def _our_config(pool: Path, *, written_by_us: bool) -> dict[str, Any]:
    section: dict[str, Any] = {"tiers": {"pool": {"type": "file", "path": os.fspath(pool), "capacity": "2GiB"}}}
    if not written_by_us:
        section["pd"] = {"write": {"enabled": False}}
    return {**ExtraConfig.around(section), "prefetch_threshold": 16}
