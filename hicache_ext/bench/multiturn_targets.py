"""What a multi-turn benchmark talks to: a running endpoint, or a running pair."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from hicache_ext.bench.multiturn_workload import Conversation
from hicache_ext.errors import BenchmarkError

_TIMEOUT = 600.0


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


class Target:
    """Something to talk to, while its context is open; ``ask`` is called from several threads."""

    name: str

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def ask(self, conversation: Conversation, tokens: int) -> Answer:
        """``tokens`` more tokens of the conversation. Raises BenchmarkError."""
        raise NotImplementedError

    def flush(self) -> None:
        """Empty L1 and L2 of the node that prefills."""
        raise NotImplementedError


class Endpoint(Target):
    """A server that runs already: SGLang's ``/generate``, or ``/v1/completions`` of anything."""

    def __init__(self, name: str, url: str, api: str, model: str = "default") -> None:
        self.name = name
        self._url = url.rstrip("/")
        self._ask = {"generate": self._generate, "openai": self._complete}[api]
        self._model = model

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


class RunningPair(Target):
    """A disaggregated pair that runs already, without a router."""

    def __init__(self, name: str, prefill_url: str, decode_url: str, bootstrap_host: str, bootstrap_port: int) -> None:
        self.name = name
        self._prefill = prefill_url.rstrip("/")
        self._decode = decode_url.rstrip("/")
        self._meeting = {"bootstrap_host": bootstrap_host, "bootstrap_port": bootstrap_port}
        self._rooms = itertools.count(time.time_ns() % 2**40)

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
        return replace(answer, cached=prefilled[0].cached)

    def flush(self) -> None:
        _post(f"{self._prefill}/flush_cache?timeout=60", None).close()


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
