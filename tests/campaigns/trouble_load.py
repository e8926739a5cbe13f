"""The load of pool_trouble.py: users that come back, users that are new, and both asking on, of two servers in turn.

A *returning* user talked to another node: the history lies in the pool and nowhere on this one. A *new* user brings as
long a text that nobody has seen, which is written to the pool. A burst is one of each at once, and then, at once, the
next question of both, whose history the server itself has just had. The same bursts go to both servers, one server
after the other, the order changing each time: while one waits for a deadline, the other is asked nothing.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from hicache_ext.testing.client import Generation
from hicache_ext.testing.server import SglangServer

WITH_POOL, WITHOUT = "with pool", "without"
HEALTHY = "healthy"
RETURNING, NEW, NEXT = "returning", "new", "next question"
ANSWER_TOKENS = 6
_LONGEST_RECOVERY = 90.0
_VOCABULARY = 250
_BREAKER_LINE = re.compile(r"tier pool (is left out: [^;]*|answers again after [^;]*|is in full use again)")
_OURS = re.compile(rb"hicache_ext")


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the time line; seconds from the first request on."""

    name: str
    begin: float
    end: float
    recovered: float | None = None
    """Of a healthy phase after trouble: seconds until a request was served from the pool again; None: it was not."""
    log_lines: int = 0
    """That the package wrote into the log of the server with the pool."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One request. ``at`` is when it was sent, ``first_token`` seconds from then on."""

    at: float
    phase: str
    server: str
    user: str
    """RETURNING, NEW or NEXT."""
    first_token: float
    stored_tokens: int
    """Tokens of the prompt that came from storage."""
    right: bool
    burst: int = 0
    place: int = 0
    """The same prompt was asked for at this place of the same burst of the other server."""


@dataclass(slots=True)
class TimeLine:
    timeout: float
    """Of the pool, for what a first token waits for."""
    tokens: int
    """Of a history."""
    observations: list[Observation] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    """What the tier's breaker said, by the time of the burst after which it was seen."""
    counters: dict[str, float] = field(default_factory=dict)
    engine: str = ""
    remarks: list[str] = field(default_factory=list)
    """What the report has to say of this engine."""


class Conversations:
    """Histories that share no page with each other; the known ones lie in the pool and are taken once each."""

    def __init__(self, seed: int, tokens: int, question: int = 16) -> None:
        self._random = random.Random(seed)
        self._tokens = tokens
        self._question = question
        self._known: list[list[int]] = []
        self.ran_out = 0
        """How often nothing was left that the pool holds: recoveries took longer than expected."""

    def new(self) -> list[int]:
        return self._some(self._tokens)

    def add_known(self, histories: Sequence[list[int]]) -> None:
        self._known += histories

    def returning(self) -> list[int]:
        """A history of the pool and a question. Once all of them were asked: one that the pool has not."""
        if not self._known:
            self.ran_out += 1
        return (self._known.pop() if self._known else self.new()) + self._some(self._question)

    def question(self) -> list[int]:
        return self._some(self._question)

    def _some(self, tokens: int) -> list[int]:
        return [self._random.randrange(_VOCABULARY) for _ in range(tokens)]


@dataclass(frozen=True, slots=True)
class _Asked:
    at: float
    user: str
    answer: Generation


class Run:
    """The servers, the pool and the pace; ``phase`` after ``phase`` goes into ``line``."""

    def __init__(
        self, servers: Mapping[str, SglangServer], conversations: Conversations, line: TimeLine, period: float
    ) -> None:
        self._servers = servers
        self._conversations = conversations
        self._period = period
        self.line = line
        self._begun = time.monotonic()
        self._threads = ThreadPoolExecutor(2)
        self._bursts = 0
        self._log_read = servers[WITH_POOL].log_file.stat().st_size
        self._log_lines = 0

    def now(self) -> float:
        return time.monotonic() - self._begun

    def phase(self, name: str, seconds: float) -> None:
        """Bursts for that long."""
        begin = self.now()
        while self.now() < begin + seconds:
            self._burst(name)
        self._end(name, begin)

    def recovery(self, seconds: float) -> None:
        """Bursts until the pool serves again, and then for that long."""
        begin = self.now()
        recovered: float | None = None
        while self.now() < begin + _LONGEST_RECOVERY and (
            recovered is None or self.now() < begin + recovered + seconds
        ):
            served = self._burst(HEALTHY)
            if recovered is None and served:
                recovered = self.now() - begin
        self._end(HEALTHY, begin, recovered)

    def close(self) -> None:
        self._threads.shutdown()

    def _end(self, name: str, begin: float, recovered: float | None = None) -> None:
        self.line.phases.append(Phase(name, begin, self.now(), recovered, self._log_lines))
        self._log_lines = 0

    def _burst(self, phase: str) -> bool:
        """Whether the pool served the user who came back."""
        started = time.monotonic()
        asked = [self._conversations.returning(), self._conversations.new()]
        further = [self._conversations.question() for _ in asked]
        order = [WITH_POOL, WITHOUT] if self._bursts % 2 else [WITHOUT, WITH_POOL]
        self._bursts += 1
        answers = {name: self._both_turns(self._servers[name], asked, further) for name in order}
        for name, given in answers.items():
            for place, one in enumerate(given):
                self.line.observations.append(
                    Observation(
                        at=one.at,
                        phase=phase,
                        server=name,
                        user=one.user,
                        first_token=one.answer.time_to_first_token,
                        stored_tokens=one.answer.cached.storage,
                        right=one.answer.output_ids == answers[WITHOUT][place].answer.output_ids,
                        burst=self._bursts,
                        place=place,
                    )
                )
        self._read_log()
        time.sleep(max(0.0, started + self._period - time.monotonic()))
        return answers[WITH_POOL][0].answer.cached.storage > 0

    def _both_turns(
        self, server: SglangServer, asked: Sequence[list[int]], further: Sequence[list[int]]
    ) -> list[_Asked]:
        first = self._at_once(server, asked, (RETURNING, NEW))
        again = [
            [*prompt, *one.answer.output_ids, *question]
            for prompt, one, question in zip(asked, first, further, strict=True)
        ]
        return first + self._at_once(server, again, (NEXT, NEXT))

    def _at_once(self, server: SglangServer, prompts: Sequence[list[int]], users: Sequence[str]) -> list[_Asked]:
        def ask(prompt: list[int], user: str) -> _Asked:
            at = self.now()
            return _Asked(at, user, server.generate(prompt, ANSWER_TOKENS, timeout=300))

        return list(self._threads.map(ask, prompts, users))

    def _read_log(self) -> None:
        with self._servers[WITH_POOL].log_file.open("rb") as log:
            log.seek(self._log_read)
            text = log.read()
        # The server may be in the middle of a line: that one is read whole the next time.
        text = text[: text.rfind(b"\n") + 1]
        self._log_read += len(text)
        self._log_lines += sum(1 for line in text.splitlines() if _OURS.search(line))
        self.line.events += [(self.now(), said) for said in _BREAKER_LINE.findall(text.decode(errors="replace"))]
