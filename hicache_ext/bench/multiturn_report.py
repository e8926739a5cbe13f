"""From the answers of a multi-turn run to tables, JSON and plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hicache_ext.bench.harness import Quartiles
from hicache_ext.bench.multiturn_targets import Answer
from hicache_ext.bench.report import Panel, Table, number, plot_point


@dataclass(frozen=True, slots=True)
class ArmResult:
    """``turns[t][u]`` is user u's answer in turn t; ``seconds`` the time of the whole arm without start and flushes."""

    name: str
    turns: Sequence[Sequence[Answer]]
    seconds: float
    rounds: int = 1
    """How many the users of ``turns`` came in, as many in each, one round after the other."""

    @classmethod
    def of(cls, rounds: Sequence[ArmResult]) -> ArmResult:
        """Several rounds of one arm as one: more users, one after the other."""
        turns = [
            [answer for turn in turns for answer in turn] for turns in zip(*(r.turns for r in rounds), strict=True)
        ]
        return cls(rounds[0].name, turns, sum(r.seconds for r in rounds), len(rounds))

    def later_turns(self, number: int) -> float:
        """The medians of the first tokens from turn 2 on, in one round, summed up."""
        users = len(self.turns[0]) // self.rounds
        of_round = [turn[number * users : (number + 1) * users] for turn in self.turns[1:]]
        return sum(Quartiles.of([answer.time_to_first_token for answer in turn]).median for turn in of_round)

    def first_token(self, turn: int) -> Quartiles:
        return Quartiles.of([answer.time_to_first_token for answer in self.turns[turn]])

    def cached_share(self, turn: int) -> float:
        """Cached tokens of the prompts of a turn."""
        return sum(sum(answer.cached.values()) for answer in self.turns[turn]) / self._prompt_tokens(turn)

    def cached_by_source(self, turn: int) -> dict[str, float]:
        sources = dict.fromkeys(source for answer in self.turns[turn] for source in answer.cached)
        prompt_tokens = self._prompt_tokens(turn)
        return {source: sum(a.cached.get(source, 0) for a in self.turns[turn]) / prompt_tokens for source in sources}

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were prefilled, over all turns."""
        return sum(a.prompt_tokens - sum(a.cached.values()) for turn in self.turns for a in turn)

    @property
    def output_rate(self) -> float:
        """Generated tokens per second, all users together."""
        return sum(a.completion_tokens for turn in self.turns for a in turn) / self.seconds

    def _prompt_tokens(self, turn: int) -> int:
        return max(1, sum(answer.prompt_tokens for answer in self.turns[turn]))


def tables(results: Sequence[ArmResult]) -> list[Table]:
    """By turn, and over the run."""
    names = tuple(result.name for result in results)
    turns = range(len(results[0].turns))
    by_turn = [
        Table(
            "time to first token by turn, ms, median over users",
            ("turn", *names),
            tuple((str(t + 1), *(number(r.first_token(t).median * 1e3) for r in results)) for t in turns),
        ),
        Table(
            "cached share of the prompts by turn, %",
            ("turn", *names),
            tuple((str(t + 1), *(f"{r.cached_share(t) * 100:.1f}" for r in results)) for t in turns),
        ),
    ]
    rows = tuple(
        (
            result.name,
            number(result.output_rate),
            f"{result.computed_tokens:,}",
            number(result.computed_tokens / max(1, results[0].computed_tokens)),
            ", ".join(
                f"{source} {share * 100:.0f}%" for source, share in result.cached_by_source(turns[-1]).items() if share
            )
            or "none",
        )
        for result in results
    )
    headers = ("arm", "output tokens/s", "prompt tokens computed", "ratio to the first", "cached in the last turn")
    return [*by_turn, Table("whole run", headers, rows)]


def summary(results: Sequence[ArmResult]) -> str:
    """What it comes to: the later turns of each arm against those of the fastest one; empty where nothing compares.

    It is a headline for arms that were slower in every one of several rounds. Rounds have other conversations, so that
    arms are compared round by round.
    """
    turns = range(1, len(results[0].turns))
    later = {result.name: sum(result.first_token(turn).median for turn in turns) for result in results}
    best, *others = sorted(results, key=lambda result: later[result.name])
    if not others or not all(best.later_turns(number) for number in range(best.rounds)):
        return ""
    slower: list[str] = []
    alike: list[str] = []
    for other in others:
        ratios = [other.later_turns(number) / best.later_turns(number) for number in range(best.rounds)]
        spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if best.rounds > 1 else ""
        told = slower if best.rounds > 1 and min(ratios) > 1 else alike
        told.append(f"{other.name} {later[other.name] / later[best.name]:.2f}{spread}")
    what = f"Time to the first token from turn 2 on, against {best.name}"
    sentences = [f"**{what}, {best.rounds} rounds: {', '.join(slower)}.**"] if slower else []
    if alike and best.rounds == 1:
        sentences.append(
            f"{what}: {', '.join(alike)}. That is one round, and no verdict: see the spread with --rounds 5."
        )
    elif alike:
        sentences.append(f"Not told apart from {best.name} in {best.rounds} rounds: {', '.join(alike)}.")
    ordered = [best, *others]
    last = ", ".join(f"{result.name} {number(result.first_token(turns[-1]).median * 1e3)} ms" for result in ordered)
    computed = ", ".join(f"{result.name} {result.computed_tokens:,}" for result in ordered)
    sentences.append(f"In turn {len(turns) + 1}: {last}. Prompt tokens computed in all turns: {computed}.")
    return " ".join(sentences)


def panels(results: Sequence[ArmResult]) -> list[Panel]:
    turns = range(len(results[0].turns))
    found = [_first_tokens("time to first token", results, turns)]
    slowest = max(results, key=lambda result: sum(result.first_token(turn).median for turn in turns))
    others = [result for result in results if result is not slowest]
    if len(others) > 1 and len(turns) > 1:
        # Beside one that computes everything nobody could tell the others apart.
        found.append(_first_tokens(f"the same without {slowest.name}, from turn 2 on", others, turns[1:]))
    shares = {r.name: [plot_point(str(t + 1), r.cached_share(t) * 100) for t in turns] for r in results}
    return [*found, Panel("cached share of the prompt", "turn", "%", shares)]


def _first_tokens(title: str, results: Sequence[ArmResult], turns: Iterable[int]) -> Panel:
    return Panel(
        title, "turn", "ms", {r.name: [(str(t + 1), *_milliseconds(r.first_token(t))) for t in turns] for r in results}
    )


def entries(results: Sequence[ArmResult]) -> list[Mapping[str, Any]]:
    """For the JSON document."""
    return [
        {
            "arm": result.name,
            "rounds": result.rounds,
            "seconds": result.seconds,
            "output_tokens_per_second": result.output_rate,
            "prompt_tokens_computed": result.computed_tokens,
            "turns": [
                {
                    "time_to_first_token": [answer.time_to_first_token for answer in turn],
                    "total_time": [answer.total_time for answer in turn],
                    "prompt_tokens": [answer.prompt_tokens for answer in turn],
                    "cached": [dict(answer.cached) for answer in turn],
                }
                for turn in result.turns
            ],
        }
        for result in results
    ]


def _milliseconds(seconds: Quartiles) -> tuple[float, float, float]:
    return seconds.median * 1e3, seconds.lower * 1e3, seconds.upper * 1e3
