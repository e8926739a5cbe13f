"""Multi-turn conversations, seeded: what the users of a chat service send."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

_WORDS = 4096


@dataclass(frozen=True, slots=True)
class Workload:
    """The shape of a run; equal values give equal requests."""

    users: int = 8
    turns: int = 10
    system_tokens: int = 256
    """Shared by all users."""
    question_tokens: tuple[int, int] = (40, 80)
    """New tokens of a user's turn, from and to."""
    answer_tokens: tuple[int, int] = (60, 100)
    """Length of an answer, from and to; the end-of-sequence token is ignored."""
    think_seconds: float = 0.0
    """Before a turn a user waits up to twice this."""
    vocabulary: int = 250
    """Token ids are drawn below this."""
    seed: int = 1


@dataclass(slots=True)
class Conversation:
    """One user. ``tokens`` is for endpoints that take token ids, ``text`` for those that take text."""

    user: int
    workload: Workload
    tokens: list[int] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        self._say(random.Random(self.workload.seed), self.workload.system_tokens)

    def ask(self, turn: int) -> tuple[int, float]:
        """Add the question of ``turn``; tokens to generate, and seconds to think before."""
        generator = random.Random(f"{self.workload.seed}/{self.user}/{turn}")
        self._say(generator, generator.randint(*self.workload.question_tokens))
        return generator.randint(*self.workload.answer_tokens), generator.uniform(0, 2 * self.workload.think_seconds)

    def answered(self, output_ids: tuple[int, ...], text: str) -> None:
        self.tokens += output_ids
        self.text += text

    def _say(self, generator: random.Random, tokens: int) -> None:
        spoken = [generator.randrange(self.workload.vocabulary) for _ in range(tokens)]
        self.tokens += spoken
        self.text += "".join(f" word{number * 17 % _WORDS}" for number in spoken)
