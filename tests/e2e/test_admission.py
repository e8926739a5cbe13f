"""A real SGLang server over a tier with admission: what is refused costs a hit once, and SGLang hears of nothing."""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path

import pytest
import yaml

from hicache_ext.cli.main import main
from hicache_ext.cli.server_commands import read_samples
from hicache_ext.testing.client import Generation
from tests.e2e.conftest import LENGTH, file_tier_config, random_prompt
from tests.rigs.rig_server import RigServer
from tests.rigs.server_hooks import rig_environment

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE_SIZE = 16
PAGES = LENGTH // PAGE_SIZE
REUSABLE = LENGTH - PAGE_SIZE
RANKS = 2


def decisions(server: RigServer) -> dict[str, float]:
    """Pages of all ranks by decision, once nothing is added any more: metrics are exported once a second."""
    before: dict[str, float] = {}
    while True:
        time.sleep(1.5)
        now = read_samples(server.get("/metrics")).by("reason", "hicache_ext_admission_total", tier="disk")
        if now == before:
            return now
        before = now


def test_a_first_request_is_refused_a_second_one_written_and_a_third_one_restored_by_both_ranks(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = file_tier_config(tmp_path / "l3", capacity="1MiB", layout="pages")
    disk = config["hicache_ext"]["tiers"]["disk"]
    disk |= {"admission": "learned", "write_budget": "1TiB/day"}
    file = tmp_path / "hicache.yaml"
    file.write_text(yaml.safe_dump(config))

    with (
        tempfile.TemporaryDirectory(prefix="hce-") as runtime,
        RigServer(
            tiny_model,
            log_file=tmp_path / "server.log",
            tp=2,
            page_size=PAGE_SIZE,
            storage_backend="dynamic",
            extra_config=f"@{file}",
            extra_arguments=("--enable-metrics",),
            environment={
                **rig_environment(modules=["tests.rigs.quick_admission"]),
                "HICACHE_EXT_RUNTIME_DIR": runtime,
            },
        ) as server,
    ):

        def asked_anew(number: int) -> Generation:
            """The answer of a server that has nothing but its storage; what it stores of it is stored on return."""
            answer = server.generate(random_prompt(number), max_new_tokens=4)
            server.flush_cache()
            return answer

        for number in range(1, 12):
            asked_anew(number)
        learnt, logged = decisions(server), len(server.log_file.read_text())
        cold, again, restored = (asked_anew(0) for _ in range(3))
        found = decisions(server)

        assert [answer.cached.storage for answer in (cold, again, restored)] == [0, 0, REUSABLE]
        assert cold.output_ids == again.output_ids == restored.output_ids
        # Refused and then written, by each rank. The last page is computed each time, and offered a third time, too.
        grown = {reason: pages - learnt[reason] for reason, pages in found.items() if pages > learnt[reason]}
        assert grown == {"refused_first": RANKS * PAGES, "admitted_again": RANKS * (PAGES + 1)}
        assert main(["stats", server.url, "--once"]) == 0
        assert re.search(r"^disk: \d+ %, [\d.]+ refused first$", capsys.readouterr().out, re.MULTILINE)

        # A budget for some twenty pages of each rank: the head of a prompt is stored, and its tail is not.
        disk |= {"admission": "all", "write_budget": "60B/s"}
        file.write_text(yaml.safe_dump(config))
        monkeypatch.setenv("HICACHE_EXT_RUNTIME_DIR", runtime)
        assert main(["reload", str(file)]) == 0
        cold, part = (asked_anew(50) for _ in range(2))
        assert cold.cached.storage == 0 < part.cached.storage < REUSABLE
        assert cold.output_ids == part.output_ids
        assert decisions(server)["refused_budget"] > 0
        log = server.log_file.read_text()[logged:]
        assert not re.search("warning|error|traceback|refused|fail", log, re.IGNORECASE), log
