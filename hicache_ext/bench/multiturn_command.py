"""``hicache-ext bench multiturn``: conversations with servers and pairs that run, or with servers it starts."""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from hicache_ext.bench.harness import fresh_directory
from hicache_ext.bench.multiturn_arms import ARMS, made_arm
from hicache_ext.bench.multiturn_report import ArmResult, entries, panels, summary, tables
from hicache_ext.bench.multiturn_targets import Answer, Endpoint, RunningPair, Target
from hicache_ext.bench.multiturn_workload import Conversation, Workload
from hicache_ext.bench.report import Report, add_output_arguments, machine_facts, positive
from hicache_ext.errors import BenchmarkError, MissingPackageError
from hicache_ext.packages import need

_PACKAGES = ("hicache-ext", "sglang", "torch")


def configure(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, ARMS)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser, arms: Mapping[str, str]) -> None:
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
    made = parser.add_argument_group("servers that are started for the run, one after the other")
    described = "; ".join(f"{name}: {what}" for name, what in arms.items())
    made.add_argument("--arm", action="append", default=[], choices=tuple(arms), help=described)
    made.add_argument("--model-path", help="their model (default: a small real one that comes as a package)")
    made.add_argument("--page-size", type=positive, default=64, help="tokens per page (default: %(default)s)")
    made.add_argument("--directory", type=Path, metavar="PATH", help="where storage lies (default: a temporary one)")
    made.add_argument("--capacity", default="32GiB", help="of our file tier (default: %(default)s)")
    made.add_argument("--logs", type=Path, metavar="DIRECTORY", help="where they log (default: deleted)")
    made.add_argument("server_arguments", nargs="*", metavar="-- SERVER ARGUMENT", help="for sglang.launch_server")
    parser.add_argument(
        "--rounds", type=positive, default=1, help="how often all arms take their turn (default: %(default)s)"
    )
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
    if arguments.arm:
        need("sglang", "torch")
    with fresh_directory(arguments.directory or Path(tempfile.gettempdir())) as directory:
        return compare(arguments, lambda number: targets(arguments, directory / str(number)))


def targets(arguments: argparse.Namespace, directory: Path) -> list[Target]:
    """What the arguments name, for one round. Raises BenchmarkError."""
    found = running_targets(arguments)
    if arguments.arm:
        model, model_arguments = model_of(arguments, directory.parent)
        found += [
            made_arm(
                arm,
                model,
                directory / arm,
                log_file=(arguments.logs or directory) / f"{arm}.log",
                page_size=arguments.page_size,
                capacity=arguments.capacity,
                server_arguments=[*model_arguments, *arguments.server_arguments],
            )
            for arm in arguments.arm
        ]
    return found


def model_of(arguments: argparse.Namespace, directory: Path) -> tuple[str, Sequence[str]]:
    """The model for servers that are started, made in ``directory`` unless one was named; and what it needs."""
    if arguments.model_path is not None:
        return arguments.model_path, ()
    from hicache_ext.testing.small_model import NAME, arguments_to_serve, make_small_model  # torch

    try:
        return str(make_small_model(directory / NAME)), arguments_to_serve()
    except MissingPackageError as error:
        raise BenchmarkError(f"{error}, or name a model: --model-path") from error


def compare(
    arguments: argparse.Namespace,
    targets: Callable[[int], Sequence[Target]],
    arms: Mapping[str, str] = ARMS,
    title: str = "Multi-turn conversations",
) -> int:
    """Have the same conversations with each of ``targets(number of the round)``; print and write what came out.

    ``arms``: what each of those that can be started is, for the page.
    """
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
    rounds: dict[str, list[ArmResult]] = {}
    for number in range(arguments.rounds):
        # Other conversations in each round: what runs already has the last one's in its caches.
        said = replace(workload, seed=workload.seed + number)
        for target in targets(number):
            with target:
                result = converse(target, said, flush=arguments.flush, settle=arguments.settle)
            rounds.setdefault(target.name, []).append(result)
            print(f"{target.name}: done in {result.seconds:.1f} s", flush=True)
    if not rounds:
        raise BenchmarkError("nothing to talk to: give --endpoint, --pair or --arm")
    results = [ArmResult.of(of_one) for of_one in rounds.values()]
    hidden = {path: name for path, name in ((arguments.logs, "LOGS"), (arguments.directory, "PATH")) if path}
    if arguments.model_path:
        hidden[Path(arguments.model_path)] = Path(arguments.model_path).name
    report = Report(
        "multiturn",
        title + (f", {_model_name(arguments)}" if arguments.arm else ""),
        machine_facts(Path.cwd(), _PACKAGES),
        {"workload": asdict(workload), "flush": arguments.flush, "results": entries(results)},
        tables(results),
        panels(results),
        _method(arguments, arms),
        summary=summary(results),
    )
    report.show()
    report.write(arguments, hidden)
    return 0


def _model_name(arguments: argparse.Namespace) -> str:
    if arguments.model_path is not None:
        return Path(arguments.model_path).name
    from hicache_ext.testing.small_model import NAME

    return NAME


def _method(arguments: argparse.Namespace, arms: Mapping[str, str]) -> str:
    words = [
        "All users ask at once, and every user has had turn t before any has turn t + 1; a prompt is the whole",
        "conversation so far. Medians over users and rounds, quartiles as bars. Equal conversations in all arms,",
        "others in each round. In the first turn a user may find the shared tokens that another one has just computed:",
        "how many do is chance.",
    ]
    if arguments.flush:
        words += [
            "After each turn the device and host memory of every arm is emptied, as other users' prompts would do it:",
            "what is not in storage is computed again.",
        ]
    if arguments.arm:
        words += [
            "The arms run one after the other, each with servers of its own and an empty storage directory, pages of",
            f"{arguments.page_size} tokens and the prefetch policy `wait_complete`. Two first requests pay for what is",
            "loaded and compiled once.",
        ]
        words += [f"*{name}*: {what}." for name, what in arms.items() if name in arguments.arm]
    return "\n".join(words) + "\n"


def converse(target: Target, workload: Workload, *, flush: bool = False, settle: float = 0.0) -> ArmResult:
    """All users, turn by turn: every user has had turn t before any has turn t + 1. Raises BenchmarkError."""
    conversations = [Conversation(user, workload) for user in range(workload.users)]
    # First requests pay for what is connected, loaded and compiled once, a restore as well. They share nothing with the
    # users.
    warm_up = Conversation(-1, Workload(system_tokens=512, vocabulary=7, seed=workload.seed + 1))
    for _ in range(2):
        target.ask(warm_up, 4)
        if flush:
            target.flush()
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
