"""What operators are shown of a real server is what its answers say."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import hicache_ext
from hicache_ext.cli.main import main
from hicache_ext.cli.stats_command import Samples, read_samples
from hicache_ext.storage.contract.registry import series_of_type
from hicache_ext.storage.contract.reports import OF_EVERY_TIER, UNKNOWN
from hicache_ext.testing.client import Generation
from hicache_ext.testing.server import SglangServer, free_port
from tests.e2e.conftest import file_tier_config

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE_SIZE = 16
LENGTH = 640
REUSABLE = LENGTH - PAGE_SIZE


def prompt(number: int) -> list[int]:
    tokens = random.Random(number)
    return [tokens.randrange(250) for _ in range(LENGTH)]


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not there"
        time.sleep(0.1)


def samples(server: SglangServer) -> Samples:
    return read_samples(server.get("/metrics"))


def chain_pages(server: SglangServer, tier: str) -> list[float]:
    found = samples(server).by("reason", "hicache_ext_chain_pages_total", tier=tier)
    return [found[stage] for stage in ("asked", "found", "used")]


def test_the_figures_of_a_server_are_those_of_its_answers(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = file_tier_config(tmp_path / "l3")
    tiers = config["hicache_ext"]["tiers"]
    tiers["disk"]["io"] = "buffered"
    # A pool that nobody has ever reached.
    tiers["pool"] = {"type": "redis", "url": f"redis://127.0.0.1:{free_port()}", "required": False, "timeout": "1s"}
    file = tmp_path / "hicache.yaml"
    file.write_text(yaml.safe_dump(config))
    with SglangServer(
        tiny_model,
        log_file=tmp_path / "server.log",
        page_size=PAGE_SIZE,
        storage_backend="dynamic",
        extra_config=f"@{file}",
        extra_arguments=("--enable-metrics",),
    ) as server:
        the_series_are_there_before_the_first_request(server)
        assert main(["stats", server.url, "--once"]) == 0
        assert capsys.readouterr().out.startswith("prompt tokens: no request has ended yet")

        answers: list[Generation] = []

        def ask(number: int) -> Generation:
            answers.append(server.generate(prompt(number)))
            return answers[-1]

        for number in (1, 2, 3):
            assert ask(number).cached_tokens == 0
        assert ask(3).cached.device == REUSABLE
        server.flush_cache()  # waits for the writes
        wait_for(lambda: samples(server).total("hicache_ext_pages", tier="disk") >= 3 * LENGTH / PAGE_SIZE, "pages")
        for number in (1, 2):
            assert ask(number).cached.storage == REUSABLE
        assert ask(4).cached_tokens == 0

        tokens = LENGTH * len(answers)
        assert tokens == sum(answer.prompt_tokens for answer in answers)
        from_storage = sum(answer.cached.storage for answer in answers)
        on_device = sum(answer.cached.device for answer in answers)
        in_host = sum(answer.cached.host for answer in answers)
        assert (from_storage, on_device, in_host) == (2 * REUSABLE, REUSABLE, 0)
        computed = tokens - from_storage - on_device
        wait_for(lambda: samples(server).total("sglang:prompt_tokens_total") == tokens, "all prompts")
        # Before the flush three prompts that nobody had, after it two that storage had and one that it lacked. What was
        # on the device was not asked for.
        asked, used = 6 * REUSABLE / PAGE_SIZE, 2 * REUSABLE / PAGE_SIZE
        wait_for(lambda: chain_pages(server, "all") == [asked, used, used], "the pages asked for")
        assert chain_pages(server, "disk") == [asked, used, used]
        assert chain_pages(server, "pool") == [asked - used, 0, 0]

        assert main(["stats", server.url, "--once"]) == 0
        shown = capsys.readouterr().out
        assert shown.splitlines()[0] == (
            f"prompt tokens: {100 * from_storage / tokens:.1f} % from storage, 0.0 % from host memory, "
            f"{100 * on_device / tokens:.1f} % on the device, {100 * computed / tokens:.1f} % computed (of {tokens})"
        )

        (row,) = re.findall(r"^ *disk .*$", shown, re.MULTILINE)
        assert row.split()[1] == "yes" and float(row.split()[5]) < 60
        assert "pool: cannot be reached" in shown


def the_series_are_there_before_the_first_request(server: SglangServer) -> None:
    wait_for(lambda: samples(server).total("hicache_ext_capacity_bytes", tier="disk") == 256 << 20, "the capacity")
    # Not before every byte of the weights was read.
    wait_for(lambda: samples(server).total("hicache_ext_serving") == 1, "the identity of the weights")
    now = samples(server)
    assert now.by("version", "hicache_ext_build_info") == {hicache_ext.__version__: 1}
    for tier, kind in (("disk", "file"), ("pool", "redis")):
        for event, reasons in [*OF_EVERY_TIER.items(), *series_of_type(kind).items()]:
            told = now.by("reason", f"hicache_ext_{event}_total", tier=tier)
            assert set(reasons) <= set(told), (tier, event)
            # The pool has already been told of the pages to come, in vain.
            assert not any(told.values()) or (tier, event) == ("pool", "error"), (tier, event)
        for gauge in UNKNOWN:
            assert len(now.each(f"hicache_ext_{gauge}", tier=tier)) == 1, (tier, gauge)
        assert now.each("hicache_ext_call_seconds_count", tier=tier, operation="get") == [0]
    assert now.total("hicache_ext_tier_up", tier="disk") == 1
    assert now.total("hicache_ext_tier_up", tier="pool") == 0
    models = {dict(labels)["model_name"] for name, labels in now.values if name.startswith("hicache_ext_")}
    assert len(models) == 1 and models != {""}
