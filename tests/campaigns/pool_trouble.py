"""A pool that is killed, frozen, slowed and made to lie under a real SGLang server with load, as a time line.

    python -m tests.campaigns.pool_trouble --report docs/reports/pool-trouble.md

Two servers of the same configuration, a disk tier, one of them with a pool behind it: a real redis-server, reached
through a proxy that can make the connection bad. Both get the same bursts of requests at a steady pace, in turn, the
order changing each time. Half of the prompts were computed earlier and lie in the pool alone; half are new. What is
asked while the pool is in trouble should cost what it costs without a pool, once the first deadline is over, no first
token should ever wait much longer than it does on the other server, the answers should be the same, and the pool should
come back without a restart.

Writes the report, beside it a JSON file with every request, and a plot. Needs redis-server and matplotlib.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from hicache_ext.cli.stats_command import Samples, read_samples
from hicache_ext.config.model import ExtraConfig
from hicache_ext.config.tier import READ_TIMEOUT
from hicache_ext.runtime.signals import terminated_in_order
from hicache_ext.testing.client import Generation
from hicache_ext.testing.server import SglangServer
from hicache_ext.testing.small_model import arguments_to_serve, make_small_model
from hicache_ext.testing.tiny_model import make_tiny_model
from tests.campaigns.pool_trouble_report import write_report
from tests.rigs.redis_servers import RedisServer
from tests.rigs.trouble_proxy import Trouble, TroubleProxy

PAGE_SIZE = 16
WITH_POOL, WITHOUT = "with pool", "without"
_OUTPUT_TOKENS = 8
_SEEDING_THREADS = 4
_WARM_UP_REQUESTS = 10
_LONGEST_RECOVERY = 90.0
_LONGEST_EXPECTED_RECOVERY = 40.0
"""The longest pause between two probes of a breaker is 30 s, and then calls come back over 5 s."""
_LONGEST_DRAIN = 60.0
_TROUBLES = 5
_BREAKER_LINE = re.compile(r"tier pool (is left out: [^;]*|answers again after [^;]*|is in full use again)")


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the time line; seconds from the first request on."""

    name: str
    begin: float
    end: float
    recovered: float | None = None
    """Of a healthy phase after trouble: seconds until a request was served from the pool again; None: it was not."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One request. ``at`` is when it was sent, ``first_token`` seconds from then on."""

    at: float
    phase: str
    server: str
    known: bool
    first_token: float
    stored_tokens: int
    """Tokens of the prompt that came from storage."""
    right: bool
    burst: int = 0
    """The same prompts were asked for in the same burst of the other server."""


@dataclass(slots=True)
class TimeLine:
    timeout: float
    """Of the pool, for what a first token waits for."""
    tokens: int
    observations: list[Observation] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    """What the tier's breaker said, by the time of the burst after which it was seen."""
    counters: dict[str, float] = field(default_factory=dict)


class Prompts:
    """Prompts that share no page with each other; the known ones are taken once each."""

    def __init__(self, seed: int, tokens: int) -> None:
        self._random = random.Random(seed)
        self._tokens = tokens
        self._known: list[tuple[list[int], tuple[int, ...]]] = []

    def new(self) -> list[int]:
        return [self._random.randrange(250) for _ in range(self._tokens)]

    def add_known(self, prompts: Sequence[list[int]], answers: Sequence[Generation]) -> None:
        self._known += [(prompt, answer.output_ids) for prompt, answer in zip(prompts, answers, strict=True)]

    def take_known(self) -> tuple[list[int], tuple[int, ...]]:
        if not self._known:
            raise RuntimeError("all prompts that the pool holds have been asked: recovery took longer than expected")
        return self._known.pop()


class Run:
    """The servers, the pool and the pace; ``phase`` after ``phase`` goes into ``line``."""

    def __init__(self, servers: dict[str, SglangServer], prompts: Prompts, line: TimeLine, period: float) -> None:
        self._servers = servers
        self._prompts = prompts
        self._period = period
        self.line = line
        self._begun = time.monotonic()
        self._threads = ThreadPoolExecutor(2)
        self._bursts = 0
        self._log_read = self._log_size()

    def now(self) -> float:
        return time.monotonic() - self._begun

    def phase(self, name: str, seconds: float) -> None:
        """Bursts for that long."""
        begin = self.now()
        while self.now() < begin + seconds:
            self._burst(name)
        self.line.phases.append(Phase(name, begin, self.now()))

    def recovery(self, name: str, seconds: float) -> None:
        """Bursts until the pool serves again, and then for that long."""
        begin = self.now()
        recovered: float | None = None
        while self.now() < begin + _LONGEST_RECOVERY and (
            recovered is None or self.now() < begin + recovered + seconds
        ):
            served = self._burst(name)
            if recovered is None and served:
                recovered = self.now() - begin
        self.line.phases.append(Phase(name, begin, self.now(), recovered))

    def close(self) -> None:
        self._threads.shutdown()

    def _burst(self, phase: str) -> bool:
        """One known and one new prompt at once, to one server and then to the other; whether the pool served."""
        started = time.monotonic()
        known, expected = self._prompts.take_known()
        asked = [known, self._prompts.new()]
        order = [WITH_POOL, WITHOUT] if self._bursts % 2 else [WITHOUT, WITH_POOL]
        self._bursts += 1
        answers: dict[str, list[tuple[float, Generation]]] = {}
        for name in order:
            answers[name] = list(self._threads.map(lambda prompt: self._ask(name, prompt), asked))  # noqa: B023
        right = [expected, answers[WITHOUT][1][1].output_ids]
        for name, given in answers.items():
            for number, (at, answer) in enumerate(given):
                self.line.observations.append(
                    Observation(
                        at=at,
                        phase=phase,
                        server=name,
                        known=number == 0,
                        first_token=answer.time_to_first_token,
                        stored_tokens=answer.cached.storage,
                        right=answer.output_ids == right[number],
                        burst=self._bursts,
                    )
                )
        self._note_events()
        time.sleep(max(0.0, started + self._period - time.monotonic()))
        return answers[WITH_POOL][0][1].cached.storage > 0

    def _ask(self, name: str, prompt: list[int]) -> tuple[float, Generation]:
        at = self.now()
        return at, self._servers[name].generate(prompt, _OUTPUT_TOKENS, timeout=300)

    def _log_size(self) -> int:
        return self._servers[WITH_POOL].log_file.stat().st_size

    def _note_events(self) -> None:
        with self._servers[WITH_POOL].log_file.open("rb") as log:
            log.seek(self._log_read)
            text = log.read()
        # The server may be in the middle of a line: that one is read whole the next time.
        text = text[: text.rfind(b"\n") + 1]
        self._log_read += len(text)
        self.line.events += [(self.now(), said) for said in _BREAKER_LINE.findall(text.decode(errors="replace"))]


def run(arguments: argparse.Namespace, directory: Path) -> TimeLine:
    """The whole time line. Raises ServerError or RuntimeError when a server does not come up."""
    if arguments.real_model:
        model, given = make_small_model(directory / "model"), (*arguments_to_serve(), "--max-total-tokens", "8192")
    else:
        model, given = make_tiny_model(directory / "model"), ()
    timeout = READ_TIMEOUT if arguments.timeout is None else arguments.timeout
    line = TimeLine(timeout=timeout, tokens=arguments.tokens)
    prompts = Prompts(arguments.seed, arguments.tokens)
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(directory / "redis"))
        proxy = stack.enter_context(TroubleProxy(redis.port, delay=arguments.delay))
        servers = _start_servers(stack, model, given, directory, proxy, arguments.timeout)
        _seed(servers, directory, prompts, _known_prompts_needed(arguments))
        # The pool comes back with what it held.
        assert redis.command("SAVE").startswith("+OK"), "redis-server did not save its pages"
        troubles = _troubles(redis, proxy)
        before = read_samples(servers[WITH_POOL].get("/metrics"))
        running = Run(servers, prompts, line, arguments.period)
        stack.callback(running.close)
        running.recovery("healthy", arguments.healthy)
        for name, begin, end in troubles:
            print(f"{running.now():.0f} s: {name}", flush=True)
            begin()
            running.phase(name, arguments.trouble)
            end()
            running.recovery("healthy", arguments.healthy)
        time.sleep(2)  # metrics are exported once a second
        line.counters = _grown(before, read_samples(servers[WITH_POOL].get("/metrics")))
        for server in servers.values():
            assert "is answered as a miss" not in server.log_file.read_text(), "a call raised"
    return line


def _start_servers(
    stack: ExitStack,
    model: Path,
    server_arguments: Sequence[str],
    directory: Path,
    proxy: TroubleProxy,
    timeout: float | None,
) -> dict[str, SglangServer]:
    """Both at once; they differ in the pool and in the directory of their disk tier."""
    servers: dict[str, SglangServer] = {}
    pool = {"type": "redis", "url": f"redis://127.0.0.1:{proxy.port}"}
    if timeout is not None:
        pool["timeout"] = f"{timeout:g}s"
    for name, tiers in ((WITH_POOL, {"pool": pool}), (WITHOUT, {})):
        place = directory / name.replace(" ", "-")
        place.mkdir()
        disk = {"type": "file", "path": str(place / "nvme"), "capacity": "4GiB", "layout": "pages"}
        config = place / "hicache.yaml"
        config.write_text(yaml.safe_dump(ExtraConfig.around({"tiers": {"nvme": disk, **tiers}})))
        servers[name] = SglangServer(
            model,
            log_file=place / "server.log",
            page_size=PAGE_SIZE,
            storage_backend="dynamic",
            extra_config=f"@{config}",
            extra_arguments=("--enable-metrics", *server_arguments),
        )
        stack.callback(servers[name].stop)
    with ThreadPoolExecutor(2) as starting:
        list(starting.map(lambda server: server.start(), servers.values()))
    return servers


def _seed(servers: dict[str, SglangServer], directory: Path, prompts: Prompts, count: int) -> None:
    """Prompts that an earlier day computed: in the pool, and nowhere else."""
    print(f"computing {count} prompts for the pool", flush=True)
    # A server's first requests take seconds.
    for _ in range(_WARM_UP_REQUESTS):
        servers[WITHOUT].generate(prompts.new(), _OUTPUT_TOKENS)
    server = servers[WITH_POOL]
    known = [prompts.new() for _ in range(count)]
    with ThreadPoolExecutor(_SEEDING_THREADS) as threads:
        prompts.add_known(known, list(threads.map(lambda prompt: server.generate(prompt, _OUTPUT_TOKENS), known)))
    server.flush_cache()
    _wait_until_written(server)
    for file in (directory / WITH_POOL.replace(" ", "-") / "nvme").glob("pages/*/*/*.page"):
        file.unlink()


def _wait_until_written(server: SglangServer) -> None:
    """The pool is written in the background, behind the disk."""
    deadline = time.monotonic() + _LONGEST_DRAIN
    time.sleep(2)  # metrics are exported once a second
    while waiting := read_samples(server.get("/metrics")).total("hicache_ext_queue_pages", tier="pool"):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{waiting:g} pages still wait to be written to the pool")
        time.sleep(0.5)


def _known_prompts_needed(arguments: argparse.Namespace) -> int:
    # The breaker's pauses between probes double: after a short trouble the next one comes soon.
    healthy = min(_LONGEST_EXPECTED_RECOVERY, arguments.trouble + 10) + arguments.healthy
    return round((_TROUBLES * (arguments.trouble + healthy) + arguments.healthy) / arguments.period)


def _troubles(redis: RedisServer, proxy: TroubleProxy) -> list[tuple[str, Callable[[], None], Callable[[], None]]]:
    """(name, how it begins, how it ends)."""

    def kill() -> None:
        redis.kill()
        proxy.trouble = Trouble.REFUSING

    def restart() -> None:
        redis.start()
        proxy.trouble = Trouble.NONE

    def becomes(trouble: Trouble) -> Callable[[], None]:
        return lambda: setattr(proxy, "trouble", trouble)

    well = becomes(Trouble.NONE)
    return [
        ("killed", kill, restart),
        ("frozen", redis.freeze, redis.thaw),
        (f"{proxy.delay:g} s a call", becomes(Trouble.SLOW), well),
        ("damaged pages", becomes(Trouble.FLIPPED), well),
        ("random bytes", becomes(Trouble.NONSENSE), well),
    ]


def _grown(before: Samples, after: Samples) -> dict[str, float]:
    """What the pool's counters grew by."""
    grown = {}
    for event in ("get", "corrupt", "rejected", "breaker", "breaker_probe", "timeout"):
        name = f"hicache_ext_{event}_total"
        old = before.by("reason", name, tier="pool")
        for reason, value in sorted(after.by("reason", name, tier="pool").items()):
            if value - old.get(reason, 0.0):
                grown[f"{event} {reason}".strip()] = value - old.get(reason, 0.0)
    return grown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trouble", type=float, default=25.0, help="seconds of each trouble (default: %(default)s)")
    parser.add_argument(
        "--healthy", type=float, default=10.0, help="seconds after each recovery (default: %(default)s)"
    )
    parser.add_argument("--period", type=float, default=0.7, help="seconds from burst to burst (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=768, help="of each prompt (default: %(default)s)")
    parser.add_argument("--timeout", type=float, help="of the pool, seconds (default: the tier's own)")
    parser.add_argument("--delay", type=float, default=2.0, help="seconds a call when slow (default: %(default)s)")
    parser.add_argument("--real-model", action="store_true", help="SmolLM2-135M instead of a tiny one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="where servers and tiers work (default: the temporary one)")
    parser.add_argument("--report", type=Path, help="FILE.md; FILE.json and FILE.png beside it")
    arguments = parser.parse_args()
    begun = time.monotonic()
    with (
        terminated_in_order(),
        tempfile.TemporaryDirectory(prefix="hce-trouble-", dir=arguments.directory) as directory,
    ):
        line = run(arguments, Path(directory))
    text, well = write_report(line, arguments, time.monotonic() - begun)
    print(text)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
