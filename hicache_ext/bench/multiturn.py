"""``hicache-ext bench multiturn``: conversations with servers and pairs that run, or with servers it starts."""

from __future__ import annotations

import argparse
import http.client
import itertools
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from hicache_ext.bench.frame import (
    Panel,
    Quartiles,
    Report,
    Table,
    add_output_arguments,
    fresh_directory,
    machine_facts,
    number,
    plot_point,
    positive,
)
from hicache_ext.config.model import ExtraConfig
from hicache_ext.errors import BenchmarkError, MissingPackageError, ServerError
from hicache_ext.packages import need
from hicache_ext.runtime.shown import shown_address
from hicache_ext.runtime.signals import terminated_in_order
from hicache_ext.testing.client import Generation, SglangClient
from hicache_ext.testing.server import SglangServer

# -- what is said ------------------------------------------------------------------------------------------------------

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


# -- whom it is said to ------------------------------------------------------------------------------------------------

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
    """Something to talk to, while its context is open."""

    name: str

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def ask(self, conversation: Conversation, tokens: int) -> Answer:
        """Have it say so many more tokens of the conversation; called from several threads. Raises BenchmarkError."""
        raise NotImplementedError

    def flush(self) -> None:
        """Empty L1 and L2 of the node that prefills."""
        raise NotImplementedError


class Endpoint(Target):
    """A server that runs already: SGLang's ``/generate``, or ``/v1/completions`` of anything."""

    def __init__(self, name: str, url: str, api: str, model: str = "default") -> None:
        self.name = name
        self._client = SglangClient(url)
        self._in_text = api == "openai"
        self._model = model

    def ask(self, conversation: Conversation, tokens: int) -> Answer:
        return self._complete(conversation, tokens) if self._in_text else _generated(self._client, conversation, tokens)

    def flush(self) -> None:
        with _one_sentence(self._client.url):
            self._client.flush_cache(60)

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


# -- servers that are started ------------------------------------------------------------------------------------------

ARMS = {
    "no-storage": "HiCache with device and host memory alone",
    "sglang-file": "HiCache with SGLang's own file backend",
    "ours": "HiCache with a file tier of hicache_ext",
    "on-device": "HiCache without storage, whose caches are never flushed: the limit",
}


class MadeTarget(Target):
    """A server, or a pair, that is started for one run with an empty storage directory.

    What ``start`` returns has ``generate`` and ``flush_cache`` as SglangServer has them.
    """

    def __init__(self, name: str, start: Callable[[ExitStack], Any], *, flushes: bool = True) -> None:
        self.name = name
        self._start = start
        self._flushes = flushes
        self._stack = ExitStack()
        self._talker: Any = None

    def __enter__(self) -> MadeTarget:
        try:
            self._talker = self._start(self._stack)
        except ServerError as error:
            self._stack.close()
            raise BenchmarkError(f"{self.name}: {error}") from error
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def ask(self, conversation: Conversation, tokens: int) -> Answer:
        try:
            return answer_of(self._talker.generate(conversation.tokens, tokens, sampling={"ignore_eos": True}))
        except (ServerError, OSError) as error:
            raise BenchmarkError(f"{self.name}: {error}") from error

    def flush(self) -> None:
        if self._flushes:
            self._talker.flush_cache()


def _made_arm(
    arm: str, model: str, directory: Path, arguments: argparse.Namespace, server_arguments: Sequence[str]
) -> MadeTarget:
    """Return the server of one of ``ARMS``; its pages go to ``directory``."""
    pool = directory / "pages"
    config: dict[str, Any] | None = None
    if arm == "ours":
        tier = {"type": "file", "path": str(pool), "capacity": arguments.capacity}
        config = ExtraConfig.around({"tiers": {"disk": tier}})
    elif arm == "sglang-file":
        config = {}
    if config is not None:
        config["prefetch_threshold"] = arguments.page_size

    def start(stack: ExitStack) -> SglangServer:
        return stack.enter_context(
            SglangServer(
                model,
                log_file=(arguments.logs or directory.parent) / f"{arm}.log",
                page_size=arguments.page_size,
                storage_backend={"sglang-file": "file", "ours": "dynamic"}.get(arm),
                extra_config=config,
                extra_arguments=server_arguments,
                environment={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": os.fspath(pool)},
                start_timeout=1800,
            )
        )

    return MadeTarget(arm, start, flushes=arm != "on-device")


# -- what came out -----------------------------------------------------------------------------------------------------


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
        """Return the cached share of the prompt tokens of a turn."""
        return sum(self.cached_by_source(turn).values())

    def cached_by_source(self, turn: int) -> dict[str, float]:
        answers = self.turns[turn]
        sources = dict.fromkeys(source for answer in answers for source in answer.cached)
        prompt_tokens = max(1, sum(answer.prompt_tokens for answer in answers))
        return {source: sum(a.cached.get(source, 0) for a in answers) / prompt_tokens for source in sources}

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were prefilled, over all turns."""
        return sum(a.prompt_tokens - sum(a.cached.values()) for turn in self.turns for a in turn)

    @property
    def output_rate(self) -> float:
        """Generated tokens per second, all users together."""
        return sum(a.completion_tokens for turn in self.turns for a in turn) / self.seconds


def tables(results: Sequence[ArmResult]) -> list[Table]:
    """By turn, and over the run."""
    names = tuple(result.name for result in results)
    turns = range(len(results[0].turns))
    first = tuple((str(t + 1), *(number(r.first_token(t).median * 1e3) for r in results)) for t in turns)
    shares = tuple((str(t + 1), *(f"{r.cached_share(t) * 100:.1f}" for r in results)) for t in turns)
    by_turn = [
        Table("time to first token by turn, ms, median over users", ("turn", *names), first),
        Table("cached share of the prompts by turn, %", ("turn", *names), shares),
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
    lines = {}
    for result in results:
        found = [(turn, result.first_token(turn)) for turn in turns]
        lines[result.name] = [(str(t + 1), of.median * 1e3, of.lower * 1e3, of.upper * 1e3) for t, of in found]
    return Panel(title, "turn", "ms", lines)


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


# -- the command -------------------------------------------------------------------------------------------------------

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
        given = [*model_arguments, *arguments.server_arguments]
        found += [_made_arm(arm, model, directory / arm, arguments, given) for arm in arguments.arm]
    return found


def model_of(arguments: argparse.Namespace, directory: Path) -> tuple[str, Sequence[str]]:
    """The model for servers that are started, made in ``directory`` unless one was named; and what it needs."""
    if arguments.model_path is not None:
        return arguments.model_path, ()
    from hicache_ext.testing import small_model  # torch

    try:
        return str(small_model.make_small_model(directory / small_model.NAME)), small_model.arguments_to_serve()
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
    for round_number in range(arguments.rounds):
        # Other conversations in each round: what runs already has the last one's in its caches.
        said = replace(workload, seed=workload.seed + round_number)
        for target in targets(round_number):
            with terminated_in_order(), target:
                result = converse(target, said, flush=arguments.flush, settle=arguments.settle)
            rounds.setdefault(target.name, []).append(result)
            print(f"{target.name}: done in {result.seconds:.1f} s", flush=True)
    if not rounds:
        raise BenchmarkError("nothing to talk to: give --endpoint, --pair or --arm")
    results = [ArmResult.of(of_one) for of_one in rounds.values()]
    if arguments.arm:
        from hicache_ext.testing.small_model import NAME

        title += f", {Path(arguments.model_path or NAME).name}"
    hidden = {path: name for path, name in ((arguments.logs, "LOGS"), (arguments.directory, "PATH")) if path}
    if arguments.model_path:
        hidden[Path(arguments.model_path)] = Path(arguments.model_path).name
    report = Report(
        "multiturn",
        title,
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
        turns.append(_all_ask(target, conversations, turn))
        seconds += time.monotonic() - started
        for conversation, answer in zip(conversations, turns[-1], strict=True):
            conversation.answered(answer.output_ids, answer.text)
        time.sleep(settle)
        if flush:
            target.flush()
    return ArmResult(target.name, turns, seconds)


def _all_ask(target: Target, conversations: Sequence[Conversation], turn: int) -> list[Answer]:
    """Have every user take this turn, all at the same time. Raises the first BenchmarkError."""
    answers: dict[int, Answer | BenchmarkError] = {}

    def talk(user: int) -> None:
        tokens, think = conversations[user].ask(turn)
        time.sleep(think)
        try:
            answers[user] = target.ask(conversations[user], tokens)
        except BenchmarkError as error:
            answers[user] = error

    # Threads and not a pool of them: who interrupts the run waits for no answer before the servers end.
    threads = [threading.Thread(target=talk, args=(user,)) for user in range(len(conversations))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = []
    for user in range(len(conversations)):
        answer = answers[user]
        if isinstance(answer, BenchmarkError):
            raise answer
        found.append(answer)
    return found


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
