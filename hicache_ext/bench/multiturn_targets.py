"""What a multi-turn benchmark talks to: a running endpoint, or a running pair."""

from __future__ import annotations

import http.client
import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

from hicache_ext.bench.multiturn_workload import Conversation
from hicache_ext.errors import BenchmarkError, ServerError
from hicache_ext.runtime.shown import shown_address
from hicache_ext.testing.client import Generation, SglangClient

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

    def __exit__(self, *error: object) -> None:
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
        self._client = SglangClient(url)
        self._ask = {"generate": self._generate, "openai": self._complete}[api]
        self._model = model

    def ask(self, conversation: Conversation, tokens: int) -> Answer:
        return self._ask(conversation, tokens)

    def flush(self) -> None:
        with _one_sentence(self._client.url):
            self._client.flush_cache(60)

    def _generate(self, conversation: Conversation, tokens: int) -> Answer:
        return _generated(self._client, conversation, tokens)

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
        with _one_sentence(f"{self._client.url}/v1/completions"):
            for event in self._client.events("/v1/completions", body, _TIMEOUT):
                text += "".join(choice.get("text", "") for choice in event.get("choices", ()))
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
        self._prefill, self._decode = SglangClient(prefill_url), SglangClient(decode_url)
        self._meeting = {"bootstrap_host": bootstrap_host, "bootstrap_port": bootstrap_port}
        self._rooms = itertools.count(time.time_ns() % 2**40)

    def ask(self, conversation: Conversation, tokens: int) -> Answer:
        meeting = {**self._meeting, "bootstrap_room": next(self._rooms)}
        prefilled: list[Answer] = []
        prefilling = threading.Thread(
            target=lambda: prefilled.append(_generated(self._prefill, conversation, tokens, **meeting))
        )
        prefilling.start()
        answer = _generated(self._decode, conversation, tokens, **meeting)
        prefilling.join()
        if not prefilled:
            raise BenchmarkError(f"{self.name}: the prefill node did not answer")
        return replace(answer, cached=prefilled[0].cached)

    def flush(self) -> None:
        with _one_sentence(self._prefill.url):
            self._prefill.flush_cache(60)


def answer_of(generation: Generation) -> Answer:
    details = generation.meta_info.get("cached_tokens_details") or {"unknown": generation.cached_tokens}
    return Answer(
        generation.time_to_first_token,
        generation.total_time,
        generation.output_ids,
        generation.text,
        generation.prompt_tokens,
        generation.meta_info.get("completion_tokens", 0),
        {source: count for source, count in details.items() if isinstance(count, int)},
    )


def _generated(client: SglangClient, conversation: Conversation, tokens: int, **body: Any) -> Answer:
    with _one_sentence(f"{client.url}/generate"):
        sampling = {"ignore_eos": True}
        return answer_of(client.generate(conversation.tokens, tokens, sampling=sampling, timeout=_TIMEOUT, **body))


@contextmanager
def _one_sentence(url: str) -> Iterator[None]:
    try:
        yield
    except ServerError as error:
        raise BenchmarkError(shown_address(f"{url}: {error}")) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise BenchmarkError(shown_address(f"{url} cannot be reached: {error}")) from error
