"""Workloads that are described in a few numbers: conversations that come at a rate, behind shared system prompts."""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, fields

from hicache_ext.config import parse_duration
from hicache_ext.errors import ConfigError
from hicache_ext.plan.traces import MOST_BLOCKS, Trace, made_of

BLOCK_TOKENS = 512
_DURATIONS = ("think", "span")


@dataclass(frozen=True, slots=True)
class Chat:
    """Conversations. Turns are geometric, thinking is log-normal with sigma 1, lengths are exponential; all by mean."""

    rate: float = 1.0
    """Conversations that begin in a second, of the whole fleet."""
    turns: float = 5.0
    think: float = 60.0
    """Median seconds between an answer and the next question."""
    systems: int = 10
    """Different system prompts; the i-th is used in proportion to 1 / i."""
    system: int = 2048
    """Tokens of one."""
    first: int = 4096
    """New tokens of the first turn."""
    question: int = 512
    """New tokens of a later turn."""
    answer: int = 512
    span: float = 3600.0
    """Seconds of traffic."""
    seed: int = 1


def parse_workload(text: str) -> Chat:
    """``rate=2,turns=6,think=90s,...``. Raises ConfigError with one sentence."""
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
    """The requests of a workload, in blocks of 512 tokens. The same chat gives the same requests."""
    chance = random.Random(chat.seed)
    fresh = iter(range(1 << 62))
    systems = [[next(fresh) for _ in range(chat.system // BLOCK_TOKENS)] for _ in range(chat.systems)]
    weights = [1 / (place + 1) for place in range(chat.systems)]
    chains: list[list[int]] = []
    times: list[float] = []
    prompts: list[int] = []
    outputs: list[int] = []
    due: list[tuple[float, int, list[int], int]] = []
    """When, a number that makes them differ, the chain so far, tokens so far."""
    starts = chance.expovariate(chat.rate)
    number = 0
    while True:
        if due and due[0][0] <= starts:
            moment, _, chain, tokens = heapq.heappop(due)
            new = round(chance.expovariate(1 / max(1, chat.question)))
        else:
            moment, chain = starts, chance.choices(systems, weights)[0]
            tokens = chat.system
            new = round(chance.expovariate(1 / max(1, chat.first)))
            starts += chance.expovariate(chat.rate)
        if moment > chat.span:
            if starts > chat.span and not (due and due[0][0] <= chat.span):
                break
            continue
        tokens += max(1, new)
        chain = [*chain, *(next(fresh) for _ in range(tokens // BLOCK_TOKENS - len(chain)))]
        answer = max(1, round(chance.expovariate(1 / max(1, chat.answer))))
        chains.append(chain)
        times.append(moment)
        prompts.append(tokens)
        outputs.append(answer)
        if chance.random() >= 1 / chat.turns:
            number += 1
            heapq.heappush(
                due,
                (moment + chance.lognormvariate(math.log(max(chat.think, 1e-9)), 1.0), number, chain, tokens + answer),
            )
    name = f"a workload of {chat.rate:g} conversations/s"
    return made_of(name, chains, times, BLOCK_TOKENS, prompt=prompts, output=outputs)
