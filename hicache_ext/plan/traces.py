"""Where a plan's requests come from: recordings, published traces, and workloads described by a few numbers."""

from __future__ import annotations

import heapq
import itertools
import math
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ext.config import parse_duration
from hicache_ext.errors import ConfigError, RecordingError
from hicache_ext.page.recording import MAGIC, MOST_TOKENS, SUFFIX, Entry, read_file
from hicache_ext.runtime.whole_file import json_in, number_of

MOONCAKE_BLOCK = 512
"""Tokens per block in Mooncake's traces."""
MOST_BLOCKS = 200_000_000
"""Most blocks of all requests together."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. A block is a number; equal numbers mean equal prefixes."""

    name: str
    times: npt.NDArray[np.float64]
    """Seconds since the first request."""
    offsets: npt.NDArray[np.int64]
    """Request ``i`` consists of ``blocks[offsets[i]:offsets[i + 1]]``."""
    blocks: npt.NDArray[np.int32]
    prompt: npt.NDArray[np.int64]
    """Tokens of each prompt."""
    output: npt.NDArray[np.int64]
    """Tokens of each answer; 0 if unknown."""
    block_tokens: int
    remarks: tuple[str, ...] = ()
    session: npt.NDArray[np.int64] | None = None
    """The conversation of each request, numbered from 0; None if the source does not name conversations."""

    def __len__(self) -> int:
        return len(self.times)

    @property
    def distinct(self) -> int:
        return int(self.blocks.max()) + 1 if len(self.blocks) else 0

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last."""
        return float(self.times[-1]) if len(self.times) else 0.0

    def chains(self) -> Iterator[list[int]]:
        """Yield the blocks of each request. Together they may be many times larger than the file."""
        for a, b in itertools.pairwise(self.offsets.tolist()):
            yield self.blocks[a:b].tolist()


class Request(NamedTuple):
    """One request of a trace under construction. Blocks may be any integers."""

    moment: float
    """Time of arrival in seconds."""
    chain: Sequence[int] | npt.NDArray[np.uint64]
    prompt: int | None = None
    """Tokens of the prompt; None: as many as its blocks hold."""
    output: int = 0
    session: object = None
    """Any hashable name of the conversation."""


def made_of(
    name: str,
    requests: Iterable[Request],
    block_tokens: int,
    remarks: tuple[str, ...] = (),
    names: npt.NDArray[np.uint64] | None = None,
) -> Trace:
    """Make a trace of these requests, sorted by time. ``names``: all distinct blocks in ascending order; pass them if
    the chains together are many times larger."""
    ordered = sorted(requests, key=lambda request: request.moment)
    chains = [np.asarray(request.chain, np.uint64) for request in ordered]
    offsets = np.cumsum([0, *map(len, chains)], dtype=np.int64)
    names = np.unique(np.concatenate([*chains, np.zeros(0, np.uint64)])) if names is None else names
    blocks = np.empty(offsets[-1], np.int32)
    for chain, (begin, end) in zip(chains, itertools.pairwise(offsets.tolist()), strict=True):
        blocks[begin:end] = np.searchsorted(names, chain)
    moments = np.array([request.moment for request in ordered], np.float64)
    prompts = [len(request.chain) * block_tokens if request.prompt is None else request.prompt for request in ordered]
    outputs = np.array([request.output for request in ordered], np.int64)
    numbers: dict[object, int] = {}
    sessions = None
    if all(request.session is not None for request in ordered):
        sessions = np.array([numbers.setdefault(request.session, len(numbers)) for request in ordered], np.int64)
    since = moments - moments[:1]
    return Trace(name, since, offsets, blocks, np.array(prompts, np.int64), outputs, block_tokens, remarks, sessions)


def read_trace(path: str | os.PathLike[str], block_tokens: int | None = None) -> Trace:
    """Read a directory of recordings, one recording, or JSON lines as Mooncake publishes them. Raises RecordingError,
    OSError.

    ``block_tokens``: tokens per block of JSON lines, if not 512.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob(f"*{SUFFIX}"))
        if not files:
            raise RecordingError(path, f"has no recording (*{SUFFIX}) in it")
        return _from_recordings(path.name, files)
    with path.open("rb") as file:
        beginning = file.read(len(MAGIC))
    if beginning[:-1] == MAGIC[:-1]:
        return _from_recordings(path.name, [path])
    return _from_json_lines(path, block_tokens or MOONCAKE_BLOCK)


def _from_recordings(name: str, files: Sequence[Path]) -> Trace:
    entries: list[Entry] = []
    salts, sizes, torn = set(), set(), 0
    for path in files:
        header, found, whole = read_file(path)
        torn += not whole
        if found:
            salts.add(header["salt"])
            sizes.add(header["page_size"])
        entries += found
    if not entries:
        raise RecordingError(name, "holds no request")
    if len(sizes) > 1:
        raise RecordingError(name, f"has pages of {', '.join(map(str, sorted(sizes)))} tokens: take them one by one")
    size = sizes.pop() or 1
    remarks = []
    if torn:
        remarks.append(f"{torn} of {len(files)} files end amid a block: what was being written when a process died")
    if len(salts) > 1:
        remarks.append(f"files have {len(salts)} different salts: pages of one never equal those of another")
    if (total := sum(entry.length for entry in entries)) > MOST_BLOCKS:
        problem = f"asks for {total} pages in {len(entries)} requests, and a plan takes {MOST_BLOCKS}: take fewer files"
        raise RecordingError(name, problem)
    requests = (Request(entry.moment, entry.chain, entry.prompt) for entry in entries)
    return made_of(name, requests, size, tuple(remarks), np.unique(np.concatenate([entry.names for entry in entries])))


def _from_json_lines(path: Path, block_tokens: int) -> Trace:
    requests: list[Request] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                request = json_in(line)
                chain = [_whole(block, 1 << 64) for block in request["hash_ids"]]
                moment = number_of(request["timestamp"]) / 1000
                prompt = _whole(request.get("input_length", len(chain) * block_tokens))
                output, session = _whole(request.get("output_length", 0)), request.get("session")
                requests.append(Request(moment, chain, prompt, output, None if session is None else str(session)))
            except (ArithmeticError, ValueError, KeyError, TypeError, AttributeError):
                wanted = "a JSON object with timestamp (ms), input_length, output_length and hash_ids"
                raise RecordingError(path, f"is no trace: line {number} is not {wanted}") from None
    if not requests:
        raise RecordingError(path, "holds no request")
    return made_of(path.name, requests, block_tokens)


def _whole(value: Any, below: int = MOST_TOKENS + 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < below:
        raise ValueError(value)
    return value


# -- workloads ---------------------------------------------------------------------------------------------------------

BLOCK_TOKENS = 512
_DURATIONS = ("think", "span")


@dataclass(frozen=True, slots=True)
class Chat:
    """Conversations. Turns are geometric, think times log-normal (sigma 1), lengths exponential; all are means."""

    rate: float = 1.0
    """Conversations that begin per second in the whole fleet."""
    turns: float = 5.0
    think: float = 60.0
    """Median seconds between an answer and the next question."""
    systems: int = 10
    """Distinct system prompts; the i-th is used in proportion to 1 / i."""
    system: int = 2048
    """Tokens of one system prompt."""
    first: int = 4096
    """New tokens in the first turn."""
    question: int = 512
    """New tokens in each later turn."""
    answer: int = 512
    span: float = 3600.0
    """Seconds of traffic."""
    seed: int = 1


def parse_workload(text: str) -> Chat:
    """Parse ``rate=2,turns=6,think=90s,...``. Raises ConfigError with one sentence."""
    allowed = ", ".join(f"{field.name}={field.default}" for field in fields(Chat))
    values: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        key, equals, word = part.partition("=")
        if not equals or key.strip() not in Chat.__slots__:
            raise ConfigError("--workload", f"{part.strip()!r} is not accepted", allowed)
        key = key.strip()
        try:
            value = parse_duration(word if not _is_number(word) else float(word)) if key in _DURATIONS else float(word)
        except (ValueError, ConfigError):
            raise ConfigError("--workload", f"{key} is {word!r}, which is no number", allowed) from None
        whole = key in ("systems", "system", "first", "question", "answer", "seed")
        if not math.isfinite(value) or value < (1 if key == "turns" else 0) or (whole and value != int(value)):
            raise ConfigError("--workload", f"{key} cannot be {word}", allowed)
        values[key] = int(value) if whole else value
    chat = Chat(**values)  # type: ignore[arg-type]
    if not chat.rate or not chat.span or not chat.systems:
        raise ConfigError("--workload", "rate, span and systems must be above 0", allowed)
    requests = chat.rate * chat.span * chat.turns
    if requests * (chat.system + chat.first + chat.turns * (chat.question + chat.answer)) / BLOCK_TOKENS > MOST_BLOCKS:
        raise ConfigError("--workload", f"some {requests:.0f} requests are more than fit here", "a shorter span")
    return chat


def _is_number(word: str) -> bool:
    return word.replace(".", "", 1).isdecimal()


def generate(chat: Chat) -> Trace:
    """Generate the requests of a workload in blocks of 512 tokens. Equal workloads yield equal requests."""
    chance = random.Random(chat.seed)
    fresh = iter(range(1 << 62))
    systems = [[next(fresh) for _ in range(chat.system // BLOCK_TOKENS)] for _ in range(chat.systems)]
    weights = [1 / (place + 1) for place in range(chat.systems)]
    requests: list[Request] = []
    due: list[tuple[float, int, list[int], int]] = []
    """Heap of next turns: time, conversation, chain so far, tokens so far."""
    starts = chance.expovariate(chat.rate)
    begun = 0
    while True:
        if due and due[0][0] <= starts:
            moment, session, chain, tokens = heapq.heappop(due)
            new = round(chance.expovariate(1 / max(1, chat.question)))
        else:
            moment, chain = starts, chance.choices(systems, weights)[0]
            tokens = chat.system
            new = round(chance.expovariate(1 / max(1, chat.first)))
            starts += chance.expovariate(chat.rate)
            session, begun = begun, begun + 1
        if moment > chat.span:
            if starts > chat.span and not (due and due[0][0] <= chat.span):
                break
            continue
        tokens += max(1, new)
        chain = [*chain, *(next(fresh) for _ in range(tokens // BLOCK_TOKENS - len(chain)))]
        answer = max(1, round(chance.expovariate(1 / max(1, chat.answer))))
        requests.append(Request(moment, chain, tokens, answer, session))
        if chance.random() >= 1 / chat.turns:
            again = moment + chance.lognormvariate(math.log(max(chat.think, 1e-9)), 1.0)
            heapq.heappush(due, (again, session, chain, tokens + answer))
    return made_of(f"a workload of {chat.rate:g} conversations/s", requests, BLOCK_TOKENS)
