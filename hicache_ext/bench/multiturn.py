"""``hicache-ext bench multiturn``: conversations with servers that run."""

from __future__ import annotations

import argparse
import http.client
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from hicache_ext.bench.frame import (
    Quartiles,
    Table,
    add_json_argument,
    machine_facts,
    number,
    positive,
    report,
)
from hicache_ext.errors import CommandError, ServerError
from hicache_ext.runtime.commands import terminated_in_order
from hicache_ext.runtime.shown import shown_address
from hicache_ext.testing.client import Generation, SglangClient


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--endpoint", action="append", default=[], metavar="NAME=URL", help="a server that runs")
    add_arguments(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is said, and where the figures go."""
    default = Workload()
    parser.add_argument(
        "--rounds", type=positive, default=1, help="how often all take their turn (default: %(default)s)"
    )
    parser.add_argument("--users", type=positive, default=default.users)
    parser.add_argument("--turns", type=positive, default=default.turns)
    parser.add_argument("--system-tokens", type=int, default=default.system_tokens, help="shared by all users")
    parser.add_argument("--question-tokens", type=int, nargs=2, default=default.question_tokens, metavar=("FROM", "TO"))
    parser.add_argument("--answer-tokens", type=int, nargs=2, default=default.answer_tokens, metavar=("FROM", "TO"))
    parser.add_argument("--seed", type=int, default=default.seed, help="another one where a server has heard it all")
    parser.add_argument("--settle", type=float, default=0.0, metavar="SECONDS", help="after each turn, for writes")
    parser.add_argument("--flush", action="store_true", help="empty L1 and L2 of the prefilling node after each turn")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Talk to every endpoint in turn, print and write what came out."""
    found = [endpoint(text) for text in arguments.endpoint]
    return compare(arguments, lambda number: found)


# -- what is said ------------------------------------------------------------------------------------------------------

_VOCABULARY = 250
"""Token ids are drawn below this, which every model has."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The shape of a run; equal values give equal requests."""

    users: int = 8
    turns: int = 10
    system_tokens: int = 256
    """Shared by all users."""
    question_tokens: Sequence[int] = (40, 80)
    """New tokens of a user's turn, from and to."""
    answer_tokens: Sequence[int] = (60, 100)
    """Length of an answer, from and to; the end-of-sequence token is ignored."""
    seed: int = 1

    def system_prompt(self) -> list[int]:
        return _said(random.Random(self.seed), self.system_tokens)

    def question(self, user: int, turn: int) -> tuple[list[int], int]:
        """Return the new tokens of a user's turn, and how many to generate."""
        generator = random.Random(f"{self.seed}/{user}/{turn}")
        return _said(generator, generator.randint(*self.question_tokens)), generator.randint(*self.answer_tokens)


def _said(generator: random.Random, tokens: int) -> list[int]:
    return [generator.randrange(_VOCABULARY) for _ in range(tokens)]


# -- whom it is said to ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """Something to talk to while the context is open that ``start`` makes: it has ``generate`` and ``flush_cache`` as
    SglangClient has them."""

    name: str
    address: str
    start: Callable[[], AbstractContextManager[Any]]
    flushes: bool = True


def endpoint(text: str) -> Target:
    """Return a server that runs, of NAME=URL. Raises CommandError."""
    name, _, url = text.partition("=")
    if not name or not url:
        raise CommandError(f"--endpoint {text}: want NAME=URL")
    return Target(name, f"{url}/generate", partial(nullcontext, SglangClient(url)))


def converse(target: Target, workload: Workload, *, flush: bool = False, settle: float = 0.0) -> ArmResult:
    """Let all users ask, turn by turn: every user has had turn t before any has turn t + 1. Raises CommandError."""
    conversations = [workload.system_prompt() for _ in range(workload.users)]
    turns: list[list[Generation]] = []
    seconds = 0.0
    try:
        with target.start() as server:

            def end_turn() -> None:
                time.sleep(settle)
                if flush and target.flushes:
                    server.flush_cache()

            # First requests pay for what is connected, loaded and compiled once, a restore as well. They share nothing
            # with the users.
            warm_up = Workload(system_tokens=512, seed=workload.seed + 1_000_000).system_prompt()
            for _ in range(2):
                server.generate(warm_up, 4, sampling={"ignore_eos": True})
                end_turn()
            for turn in range(workload.turns):
                started = time.monotonic()
                turns.append(_all_ask(server, conversations, workload, turn))
                seconds += time.monotonic() - started
                end_turn()
    except (ServerError, OSError, ValueError, http.client.HTTPException) as error:
        problem = "" if isinstance(error, ServerError) else " cannot be reached"
        raise CommandError(shown_address(f"{target.address}{problem}: {error}")) from error
    return ArmResult(target.name, [turns], seconds)


def _all_ask(server: Any, conversations: Sequence[list[int]], workload: Workload, turn: int) -> list[Generation]:
    """Have every user take this turn, all at the same time; ``conversations``: the tokens that each user and the server
    have said so far. Raises the first error."""
    answers: dict[int, Generation] = {}
    errors: list[Exception] = []

    def talk(user: int) -> None:
        question, tokens = workload.question(user, turn)
        conversations[user].extend(question)
        try:
            answers[user] = server.generate(conversations[user], tokens, sampling={"ignore_eos": True})
            conversations[user].extend(answers[user].output_ids)
        except Exception as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append(error)

    # Threads and not a pool of them: who interrupts the run waits for no answer before the servers end.
    threads = [threading.Thread(target=talk, args=(user,)) for user in range(len(conversations))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [answers[user] for user in range(len(conversations))]


# -- what came out -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArmResult:
    """``rounds[r][t][u]`` is what user u was answered in turn t of round r; ``seconds`` without start and flushes."""

    name: str
    rounds: Sequence[Sequence[Sequence[Generation]]]
    seconds: float

    @property
    def turns(self) -> list[list[Generation]]:
        """The answers of each turn, of all rounds."""
        return [[answer for turn in turns for answer in turn] for turns in zip(*self.rounds, strict=True)]

    def later_turns(self) -> list[float]:
        """Return for each round the medians of the first tokens from turn 2 on, added up."""
        return [sum(_first_tokens(turn).median for turn in turns[1:]) for turns in self.rounds]

    def entry(self) -> dict[str, Any]:
        """Return what the JSON document says of it; rates are of all users together."""
        answers = [answer for turn in self.turns for answer in turn]
        return {
            "arm": self.name,
            "rounds": len(self.rounds),
            "seconds": self.seconds,
            "output_tokens_per_second": sum(len(answer.output_ids) for answer in answers) / self.seconds,
            "prompt_tokens_computed": sum(answer.prompt_tokens - answer.cached_tokens for answer in answers),
            "turns": [
                {
                    "time_to_first_token": [answer.time_to_first_token for answer in turn],
                    "total_time": [answer.total_time for answer in turn],
                    "prompt_tokens": [answer.prompt_tokens for answer in turn],
                    "cached": [cached(answer) for answer in turn],
                }
                for turn in self.turns
            ],
        }


def cached(answer: Generation) -> dict[str, int]:
    """Return the cached tokens by source: device, host, storage, or unknown where the server does not say."""
    details = answer.meta_info.get("cached_tokens_details") or {"unknown": answer.cached_tokens}
    return {source: count for source, count in details.items() if isinstance(count, int)}


def cached_shares(turn: Sequence[Generation]) -> dict[str, float]:
    """Return the share of the prompt tokens that came from each source."""
    sources = dict.fromkeys(source for answer in turn for source in cached(answer))
    prompt_tokens = max(1, sum(answer.prompt_tokens for answer in turn))
    return {source: sum(cached(a).get(source, 0) for a in turn) / prompt_tokens for source in sources}


def _first_tokens(turn: Sequence[Generation]) -> Quartiles:
    return Quartiles.of([answer.time_to_first_token for answer in turn])


def tables(results: Sequence[ArmResult]) -> Iterator[Table]:
    """Yield what came out by turn, and over the run."""
    names = tuple(result.name for result in results)
    by_turn = list(enumerate(zip(*(result.turns for result in results), strict=True), 1))
    first = tuple((str(n), *(number(_first_tokens(turn).median * 1e3) for turn in turns)) for n, turns in by_turn)
    yield Table("time to first token by turn, ms, median over users", ("turn", *names), first)
    shares = tuple((str(n), *(f"{sum(cached_shares(turn).values()):.1%}" for turn in turns)) for n, turns in by_turn)
    yield Table("cached share of the prompts by turn", ("turn", *names), shares)
    rows = []
    for result in results:
        # Rounds have other conversations, so that arms are compared round by round.
        pairs = zip(result.later_turns(), results[0].later_turns(), strict=True)
        ratios = [later / base for later, base in pairs if base]
        last = ", ".join(f"{source} {share:.0%}" for source, share in cached_shares(result.turns[-1]).items() if share)
        spread = f"{Quartiles.of(ratios).median:.2f} [{min(ratios):.2f} {max(ratios):.2f}]" if ratios else "-"
        entry = result.entry()
        figures = number(entry["output_tokens_per_second"]), spread, f"{entry['prompt_tokens_computed']:,}"
        rows.append((result.name, *figures, last or "none"))
    headers = ("", "output tokens/s", f"first tokens from turn 2, x {names[0]} [least most]", "prompt tokens computed")
    yield Table("whole run", (*headers, "cached in the last turn"), tuple(rows))


def compare(arguments: argparse.Namespace, targets: Callable[[int], Sequence[Target]]) -> int:
    """Have the same conversations with each of ``targets(number of the round)``; print and write what came out."""
    workload = Workload(**{field.name: getattr(arguments, field.name) for field in fields(Workload)})
    measured: dict[str, ArmResult] = {}
    for round_number in range(arguments.rounds):
        # Other conversations in each round: what runs already has the last one's in its caches.
        said = replace(workload, seed=workload.seed + round_number)
        for target in targets(round_number):
            with terminated_in_order():
                result = converse(target, said, flush=arguments.flush, settle=arguments.settle)
            before = measured.get(target.name, ArmResult(target.name, [], 0.0))
            rounds = [*before.rounds, *result.rounds]
            measured[target.name] = ArmResult(target.name, rounds, before.seconds + result.seconds)
            print(f"{target.name}: done in {result.seconds:.1f} s", flush=True)
    if not measured:
        raise CommandError("nothing to talk to: give --endpoint")
    results = list(measured.values())
    machine = machine_facts(Path.cwd(), ("hicache-ext", "sglang", "torch"))
    entries = [result.entry() for result in results]
    figures = {"workload": asdict(workload), "flush": arguments.flush, "results": entries}
    report(arguments, "multiturn", machine, figures, tables(results))
    return 0
