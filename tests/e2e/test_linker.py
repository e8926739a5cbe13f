"""SGLang's other door to storage (docs/linker.md): real servers restore layer by layer, and never a wrong byte."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hicache_ext.cli.server_commands import read_samples
from hicache_ext.config.model import SECTION
from hicache_ext.config.render import linker_config
from hicache_ext.errors import ServerError
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.testing.client import Generation
from tests.e2e.conftest import FIRST_PROMPT, SECOND_PROMPT, file_tier_config, prompt_of
from tests.e2e.test_file_tier import damage
from tests.e2e.test_hybrid_models import PROMPTS as HYBRID_PROMPTS
from tests.e2e.test_hybrid_models import restorable
from tests.rigs.redis_servers import RedisServer, redis_program
from tests.rigs.rig_server import RigServer
from tests.rigs.server_hooks import hybrid_environment
from tests.rigs.tiny_hybrid import ARGUMENTS, KINDS, Kind, make_tiny_hybrid
from tests.storage.raw_access import stored_keys
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE_SIZE = 16
REUSABLE = len(FIRST_PROMPT) - PAGE_SIZE
STAGED = "hicache_ext_linker_staging_pages"


def linked(model: Path, log_file: Path, config: dict[str, Any], **settings: Any) -> RigServer:
    return RigServer(
        model,
        log_file=log_file,
        page_size=PAGE_SIZE,
        linker_config=linker_config({SECTION: config[SECTION]}),
        **settings,
    )


def identities_in(pool: Path) -> set[bytes]:
    return {key[:IDENTITY_LENGTH] for key in stored_keys(pool)}


def hierarchical(model: Path, log_file: Path, config: dict[str, Any], **settings: Any) -> RigServer:
    return RigServer(
        model, log_file=log_file, page_size=PAGE_SIZE, storage_backend="dynamic", extra_config=config, **settings
    )


def test_both_doors_restore_each_others_pages_after_flush_restart_and_rot(
    tiny_model: Path, tmp_path: Path, cold_answer: Callable[[Sequence[int]], Generation]
) -> None:
    pool = tmp_path / "l3"
    config = file_tier_config(pool, layout="pages")
    first, second = cold_answer(FIRST_PROMPT), cold_answer(SECOND_PROMPT)

    with linked(tiny_model, tmp_path / "first.log", config) as server:
        assert server.generate(FIRST_PROMPT).cached_tokens == 0
        server.flush_cache()
        restored = server.generate(FIRST_PROMPT)
        assert (restored.cached_tokens, restored.cached.device) == (REUSABLE, 0)
        assert restored.output_ids == first.output_ids
        server.flush_cache()
    identities = identities_in(pool)

    with hierarchical(tiny_model, tmp_path / "hicache.log", config) as server:
        restored = server.generate(FIRST_PROMPT)
        assert restored.cached.storage == REUSABLE
        assert restored.output_ids == first.output_ids
        assert server.generate(SECOND_PROMPT).cached_tokens == 0
        server.flush_cache()
    assert identities_in(pool) == identities

    with linked(tiny_model, tmp_path / "second.log", config) as server:
        for prompt, cold in ((FIRST_PROMPT, first), (SECOND_PROMPT, second)):
            restored = server.generate(prompt)
            assert (restored.cached_tokens, restored.cached.device) == (REUSABLE, 0)
            assert restored.output_ids == cold.output_ids
        assert damage(pool)
        server.flush_cache()
        after_damage = server.generate(FIRST_PROMPT)
        assert after_damage.cached_tokens == 0
        assert after_damage.output_ids == first.output_ids
        server.flush_cache()
        healed = server.generate(FIRST_PROMPT)
        assert healed.cached_tokens == REUSABLE
        assert healed.output_ids == first.output_ids


def test_two_ranks_restore_together_or_not_at_all(tiny_model: Path, tmp_path: Path) -> None:
    pool = tmp_path / "l3"
    with linked(tiny_model, tmp_path / "server.log", file_tier_config(pool, layout="pages"), tp=2) as server:
        cold = server.generate(FIRST_PROMPT)
        assert cold.cached_tokens == 0
        server.flush_cache()
        restored = server.generate(FIRST_PROMPT)
        assert restored.cached_tokens == REUSABLE
        assert restored.output_ids == cold.output_ids

        # The last pages of one rank are damaged: what both ranks have is restored, the rest is computed.
        identities = sorted(identities_in(pool))
        assert len(identities) == 2
        assert damage(pool, identities[0])
        server.flush_cache()
        after_damage = server.generate(FIRST_PROMPT)
        assert after_damage.cached_tokens == 0
        assert after_damage.output_ids == cold.output_ids
        server.flush_cache()
        healed = server.generate(FIRST_PROMPT)
        assert healed.cached_tokens == REUSABLE
        assert healed.output_ids == cold.output_ids


@pytest.mark.parametrize("kind", KINDS)
def test_all_pools_of_a_hybrid_model_pass_through_either_door(tmp_path: Path, kind: Kind) -> None:
    model = make_tiny_hybrid(tmp_path / kind, kind)
    config = file_tier_config(tmp_path / "l3")
    first, second = HYBRID_PROMPTS["first"], [*SECOND_PROMPT, *range(70)]

    settings: dict[str, Any] = {
        "extra_arguments": ARGUMENTS.get(kind, ()),
        "environment": hybrid_environment(),
    }
    with hierarchical(model, tmp_path / "hicache.log", config, **settings) as server:
        cold = server.generate(first)
        assert cold.cached_tokens == 0
        server.flush_cache()

    with linked(model, tmp_path / "linker.log", config, **settings) as server:
        restored = server.generate(first)
        assert (restored.cached_tokens, restored.cached.device) == (restorable(kind, len(first)), 0)
        assert restored.output_ids == cold.output_ids
        computed = server.generate(second)
        assert computed.cached_tokens == 0
        assert computed.output_ids != cold.output_ids
        server.flush_cache()
        again = server.generate(second)
        assert (again.cached_tokens, again.cached.device) == (restorable(kind, len(second)), 0)
        assert again.output_ids == computed.output_ids
        server.flush_cache()
        longer = server.generate([*second, *range(70, 170)])
        assert longer.cached_tokens == restorable(kind, len(second))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if redis_program() is None:
        pytest.skip("missing: redis-server")
    with RedisServer(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


BUSY_PROMPTS = [prompt_of(17 + 2 * number, 3) for number in range(6)]
"""More than the device holds at once, so that they come from the pool again and again."""


class Busy(NamedTuple):
    """A server over Redis that is told to retract requests now and then."""

    server: RigServer
    cold: list[Generation]
    """Its answers to each of BUSY_PROMPTS before anything was stored."""


@pytest.fixture(scope="module")
def busy(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, pool: RedisServer) -> Iterator[Busy]:
    config = {"hicache_ext": {"tiers": {"pool": {"type": "redis", "url": pool.url, "timeout": "5s"}}}}
    with linked(
        tiny_model,
        tmp_path_factory.mktemp("busy") / "server.log",
        config,
        # In 16 bits other batches round differently.
        extra_arguments=("--enable-metrics", "--max-total-tokens", "3072", "--dtype", "float32"),
        environment={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "25"},
    ) as server:
        cold = [server.generate(prompt, 60) for prompt in BUSY_PROMPTS]
        assert [answer.cached_tokens for answer in cold] == [0] * len(BUSY_PROMPTS)
        server.flush_cache()
        yield Busy(server, cold)


def from_the_pool(answer: Generation) -> bool:
    return answer.cached_tokens > answer.cached.device


def test_requests_that_are_cut_off_or_retracted_leave_no_staging_memory_in_use(busy: Busy) -> None:
    server, draw = busy.server, random.Random(5)
    answers: list[tuple[int, Generation]] = []
    uncut: list[tuple[int, Generation]] = []

    def ask(number: int, aborts: bool) -> None:
        prompt, name = number % len(BUSY_PROMPTS), f"request-{number:04}"
        if aborts:
            cut = threading.Timer(draw.random() / 2, server.request, ("POST", "/abort_request", {"rid": name}))
            cut.start()
        try:
            answer = server.generate(BUSY_PROMPTS[prompt], 60, rid=name)
            answers.append((prompt, answer))
            if not aborts:
                uncut.append((prompt, answer))
        except ServerError:
            assert aborts

    for burst in range(4):
        threads = [
            threading.Thread(target=ask, args=(6 * burst + place, (burst + place) % 2 == 1)) for place in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.flush_cache()

    assert len(uncut) == 12
    assert [answer.output_ids for _, answer in uncut] == [busy.cold[prompt].output_ids for prompt, _ in uncut]
    for prompt, answer in answers:
        assert answer.output_ids == busy.cold[prompt].output_ids[: len(answer.output_ids)]
    assert any(from_the_pool(answer) for _, answer in answers)
    assert "Testing retraction" in server.log_file.read_text(errors="replace")
    wait_until_nothing_is_staged(server)


def test_a_pool_killed_under_load_costs_no_request(busy: Busy, pool: RedisServer) -> None:
    server = busy.server
    answers: list[tuple[int, Generation]] = []
    errors: list[BaseException] = []
    over = threading.Event()

    def ask(first: int) -> None:
        for number in itertools.count(first):
            prompt = number % len(BUSY_PROMPTS)
            if over.is_set():
                return
            try:
                answers.append((prompt, server.generate(BUSY_PROMPTS[prompt], 60)))
            except (ServerError, OSError) as error:
                errors.append(error)
                return

    def wait_for(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 120
        while not condition() and not errors:
            assert time.monotonic() < deadline, what
            time.sleep(0.02)

    threads = [threading.Thread(target=ask, args=(2 * number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: sum(from_the_pool(answer) for _, answer in answers) >= 3, "nothing came from the pool")
    pool.stop()
    before = len(answers)
    wait_for(lambda: len(answers) >= before + 12, "requests stopped being answered")
    over.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all(answer.output_ids == busy.cold[prompt].output_ids for prompt, answer in answers)
    server.flush_cache()
    without = server.generate(BUSY_PROMPTS[0], 60)
    assert without.cached_tokens == 0
    assert without.output_ids == busy.cold[0].output_ids
    wait_until_nothing_is_staged(server)


def test_a_pool_that_does_not_answer_holds_up_nobody_else(tiny_model: Path, tmp_path: Path) -> None:
    if redis_program() is None:
        pytest.skip("missing: redis-server")
    with RedisServer(tmp_path / "pool") as pool:
        tier = {"type": "redis", "url": pool.url, "timeout": "3s"}
        config = {"hicache_ext": {"tiers": {"pool": tier}, "linker": {"load_timeout": "3s"}}}
        with linked(tiny_model, tmp_path / "server.log", config, extra_arguments=("--enable-metrics",)) as server:
            cold = server.generate(FIRST_PROMPT)
            server.flush_cache()
            assert server.generate(FIRST_PROMPT).cached_tokens == REUSABLE
            server.flush_cache()
            tokens: list[float] = []

            def listen() -> None:
                sampling = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
                asked = {"input_ids": [7, 8, 9], "sampling_params": sampling, "stream": True}
                tokens.extend(time.monotonic() for _ in server.events("/generate", asked, 240))

            talk = threading.Thread(target=listen)
            talk.start()
            while len(tokens) < 5:
                time.sleep(0.01)
            pool.freeze()
            begun = time.monotonic()
            answer = server.generate(FIRST_PROMPT)
            took = time.monotonic() - begun
            pool.thaw()
            meanwhile = [moment for moment in tokens if begun <= moment <= begun + took]
            talk.join()
            assert answer.cached_tokens == 0
            assert answer.output_ids == cold.output_ids
            assert took > 1.0, "the pool was not waited for"
            longest = max(later - earlier for earlier, later in itertools.pairwise([begun, *meanwhile]))
            assert longest < took / 2, "the other request had to wait for the pool"


def wait_until_nothing_is_staged(server: RigServer) -> None:
    """The exporter looks once a second."""
    wait_until(lambda: read_samples(server.get("/metrics")).total(STAGED) == 0, "empty staging memory")
