"""Asking a running SGLang server: streamed generation, and where the cached tokens of a prompt came from."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hicache_ext.errors import ServerError


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Where the cached tokens of a prompt came from, in tokens. SGLang reports it only when there were any."""

    device: int = 0
    host: int = 0
    storage: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer of ``/generate``. Times are seconds from sending the request to the first token and to the end.

    ``cached_tokens`` of the ``prompt_tokens`` were not computed; ``cached`` says where they came from. ``meta_info`` is
    SGLang's, as it came.
    """

    text: str
    output_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    cached: CachedTokens
    time_to_first_token: float
    total_time: float
    meta_info: Mapping[str, Any] = field(repr=False)


class SglangClient:
    """A client of the server at ``url`` that sends these headers. Any number of threads may use it concurrently."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", **(headers or {})}

    def log_tail(self) -> str:
        """The end of the server's log, for messages, where there is one."""
        return ""

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 16,
        *,
        sampling: Mapping[str, Any] | None = None,
        timeout: float = 240,
        **body: Any,
    ) -> Generation:
        """One greedy completion of a text or of token ids, streamed to measure the time to the first token.

        ``sampling`` adds to the sampling parameters and ``body`` to the request (``bootstrap_room`` and the like).
        Raises ``ServerError`` when the server refuses or dies while it answers, ``OSError`` when it is gone.
        """
        request = {
            **({"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}),
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, **(sampling or {})},
            "stream": True,
            **body,
        }
        start = time.monotonic()
        first_token: float | None = None
        last: dict[str, Any] = {}
        for last in self.events("/generate", request, timeout):
            if "error" in last:
                raise ServerError(f"/generate failed: {last['error']}")
            if first_token is None and last.get("output_ids"):
                first_token = time.monotonic() - start
        total = time.monotonic() - start
        meta = last.get("meta_info", {})
        if "prompt_tokens" not in meta:
            raise ServerError(f"/generate was cut off before it began: {meta.get('finish_reason')}")
        return _generation(last["text"], last["output_ids"], meta, total if first_token is None else first_token, total)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], max_new_tokens: int, *, timeout: float = 240, **body: Any
    ) -> Generation:
        """One greedy answer of the chat route with its log-probabilities, at once: its first token's time is that of
        the last. Raises as ``generate``."""
        asked = {"temperature": 0, "max_tokens": max_new_tokens, "ignore_eos": True, "model": "default"}
        told = {"logprobs": True, "return_meta_info": True}
        start = time.monotonic()
        request = {"messages": messages, **asked, **told, **body}
        answer = self.request("POST", "/v1/chat/completions", request, timeout=timeout)
        total = time.monotonic() - start
        try:
            choice = json.loads(answer)["choices"][0]
            meta = choice["meta_info"]
            output_ids = [entry[1] for entry in meta["output_token_logprobs"]]
            return _generation(choice["message"]["content"] or "", output_ids, meta, total, total)
        except (ValueError, LookupError, TypeError):
            raise ServerError("/v1/chat/completions says nothing of what it did (return_meta_info)") from None

    def events(self, path: str, body: Mapping[str, Any], timeout: float) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer. Raises ``ServerError`` when it breaks off."""
        with self._open("POST", path, body, timeout) as response:
            for line in response:
                if line.strip() == b"data: [DONE]":
                    return
                if line.startswith(b"data:"):
                    yield json.loads(line[len(b"data:") :])
        # http.client takes a connection that broke between two chunks for the end of the answer.
        raise ServerError(f"the answer to {path} broke off: the server died\n{self.log_tail()}")

    def flush_cache(self, timeout: float = 60) -> None:
        """Empty L1 and L2, after every running request, host copy and storage write is done.

        The wait is SGLang's own (``/flush_cache?timeout=``): it is idle only when its lists of ongoing write-throughs,
        load-backs, prefetches and backups are empty, so nothing on its way to storage is lost.
        Raises ``ServerError`` if that takes longer than ``timeout`` seconds.
        """
        with self._open("POST", f"/flush_cache?timeout={timeout}", None, timeout + 30):
            pass

    def wait_until_ready(self, timeout: float, look: Callable[[], None] = lambda: None) -> None:
        """Wait until the server answers; ``look`` is called before each time it is asked, and may raise. Raises
        ServerError."""
        deadline = time.monotonic() + timeout
        while True:
            look()
            try:
                # /health stays 503 until a warm-up request has run, which the rig leaves out.
                self.get("/server_info", timeout=20)
                return
            except (OSError, ServerError, http.client.HTTPException):
                if time.monotonic() > deadline:
                    raise ServerError(f"the server was not ready after {timeout:g} s:\n{self.log_tail()}") from None
            time.sleep(0.1)

    def get(self, path: str, timeout: float = 30) -> str:
        """Body of a GET request, for instance of ``/server_info`` or ``/metrics``."""
        return self.request("GET", path, timeout=timeout)

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout: float = 60) -> str:
        """Body of the answer to any request, for instance POST to ``/update_weights_from_disk``."""
        with self._open(method, path, body, timeout) as response:
            return str(response.read(), "utf-8", "replace")

    def _open(self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers=self._headers,
            method=method,
        )
        try:
            # Proxies of the environment are not for these servers.
            return self._opener().open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            answer = error.read().decode(errors="replace")
            raise ServerError(f"{method} {path} answered {error.code}: {answer}\n{self.log_tail()}") from error

    def _opener(self) -> urllib.request.OpenerDirector:
        return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _generation(
    text: str, output_ids: Sequence[int], meta: Mapping[str, Any], first_token: float, total: float
) -> Generation:
    details = meta.get("cached_tokens_details") or {}
    return Generation(
        text=text,
        output_ids=tuple(output_ids),
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        cached=CachedTokens(**{source: details.get(source, 0) for source in ("device", "host", "storage")}),
        time_to_first_token=first_token,
        total_time=total,
        meta_info=meta,
    )
