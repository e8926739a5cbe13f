"""``hicache-ext bench multiturn``: multi-turn conversations against running servers and pairs."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from hicache_ext.bench.multiturn_report import ArmResult, entries, panels, tables
from hicache_ext.bench.multiturn_targets import Answer, Endpoint, RunningPair, Target
from hicache_ext.bench.multiturn_workload import Conversation, Workload
from hicache_ext.bench.report import Report, add_output_arguments, machine_facts, positive
from hicache_ext.errors import BenchmarkError

_PACKAGES = ("hicache-ext", "sglang", "torch")


def configure(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whom to talk to, what is said, and where the figures go."""
    default = Workload()
    parser.add_argument("--endpoint", action="append", default=[], metavar="NAME=URL", help="a server that runs")
    parser.add_argument(
        "--pair",
        action="append",
        default=[],
        metavar="NAME=PREFILL_URL,DECODE_URL,BOOTSTRAP_HOST:PORT",
        help="a pair that runs",
    )
    parser.add_argument("--api", choices=("generate", "openai"), default="generate", help="of the endpoints")
    parser.add_argument("--model", default="default", help="model name for --api openai")
    parser.add_argument("--users", type=positive, default=default.users)
    parser.add_argument("--turns", type=positive, default=default.turns)
    parser.add_argument("--system-tokens", type=int, default=default.system_tokens, help="shared by all users")
    parser.add_argument("--question-tokens", type=int, nargs=2, default=default.question_tokens, metavar=("FROM", "TO"))
    parser.add_argument("--answer-tokens", type=int, nargs=2, default=default.answer_tokens, metavar=("FROM", "TO"))
    parser.add_argument("--think", type=float, default=default.think_seconds, metavar="SECONDS", help="before a turn")
    parser.add_argument("--vocabulary", type=int, default=default.vocabulary, help="token ids are drawn below this")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--settle", type=float, default=0.0, metavar="SECONDS", help="after each turn, for writes")
    parser.add_argument("--flush", action="store_true", help="empty L1 and L2 of the prefilling node after each turn")
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Talk to every target in turn, print and write what came out."""
    return compare(arguments, running_targets(arguments))


def compare(arguments: argparse.Namespace, targets: Sequence[Target], hidden: Mapping[Path, str] | None = None) -> int:
    """Have the same conversations with each of ``targets``; print and write what came out."""
    if not targets:
        raise BenchmarkError("nothing to talk to: give --endpoint or --pair")
    workload = Workload(
        users=arguments.users,
        turns=arguments.turns,
        system_tokens=arguments.system_tokens,
        question_tokens=tuple(arguments.question_tokens),
        answer_tokens=tuple(arguments.answer_tokens),
        think_seconds=arguments.think,
        vocabulary=arguments.vocabulary,
        seed=arguments.seed,
    )
    results = []
    for target in targets:
        with target:
            results.append(converse(target, workload, flush=arguments.flush, settle=arguments.settle))
        print(f"{target.name}: done in {results[-1].seconds:.1f} s", flush=True)
    report = Report(
        "multiturn",
        "Multi-turn conversations",
        machine_facts(Path.cwd(), _PACKAGES),
        {"workload": asdict(workload), "flush": arguments.flush, "results": entries(results)},
        tables(results),
        panels(results),
    )
    report.show()
    report.write(arguments, hidden)
    return 0


def converse(target: Target, workload: Workload, *, flush: bool = False, settle: float = 0.0) -> ArmResult:
    """All users, turn by turn: every user has had turn t before any has turn t + 1. Raises BenchmarkError."""
    conversations = [Conversation(user, workload) for user in range(workload.users)]
    # A pair's first request meets connections that are not open yet; it shares nothing with the users.
    target.ask(Conversation(-1, Workload(system_tokens=32, vocabulary=7, seed=workload.seed + 1)), 4)
    turns: list[list[Answer]] = []
    seconds = 0.0
    for turn in range(workload.turns):
        started = time.monotonic()
        turns.append(_at_once([_turn_of(target, conversation, turn) for conversation in conversations]))
        seconds += time.monotonic() - started
        for conversation, answer in zip(conversations, turns[-1], strict=True):
            conversation.answered(answer.output_ids, answer.text)
        time.sleep(settle)
        if flush:
            target.flush()
    return ArmResult(target.name, turns, seconds)


def _turn_of(target: Target, conversation: Conversation, turn: int) -> Callable[[], Answer]:
    def talk() -> Answer:
        tokens, think = conversation.ask(turn)
        time.sleep(think)
        return target.ask(conversation, tokens)

    return talk


def _at_once(talks: Sequence[Callable[[], Answer]]) -> list[Answer]:
    answers: dict[int, Answer] = {}
    trouble: list[BenchmarkError] = []

    def one(user: int) -> None:
        try:
            answers[user] = talks[user]()
        except BenchmarkError as error:
            trouble.append(error)

    threads = [threading.Thread(target=one, args=(user,)) for user in range(len(talks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if trouble:
        raise trouble[0]
    return [answers[user] for user in range(len(talks))]


def running_targets(arguments: argparse.Namespace) -> list[Target]:
    """The servers and pairs that the arguments name. Raises BenchmarkError."""
    targets: list[Target] = []
    for text in arguments.endpoint:
        name, url = _named(text, "--endpoint")
        targets.append(Endpoint(name, url, arguments.api, arguments.model))
    for text in arguments.pair:
        name, places = _named(text, "--pair")
        prefill, _, rest = places.partition(",")
        decode, _, bootstrap = rest.partition(",")
        host, _, port = bootstrap.rpartition(":")
        if not host or not port.isdigit():
            raise BenchmarkError(f"--pair {text}: want NAME=PREFILL_URL,DECODE_URL,BOOTSTRAP_HOST:PORT")
        targets.append(RunningPair(name, prefill, decode, host, int(port)))
    return targets


def _named(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise BenchmarkError(f"{option} {text}: want NAME={'URL' if option == '--endpoint' else '...'}")
    return name, value
