"""A tier that hangs under a real SGLang server: requests go on, and the tier comes back without a restart."""

from __future__ import annotations

import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hicache_ext.cli.main import main
from hicache_ext.cli.server_commands import read_samples
from hicache_ext.testing.server import SglangServer
from tests.e2e.conftest import LENGTH, file_tier_config, random_prompt
from tests.storage.raw_access import stored_keys
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE_SIZE = 16
REUSABLE = LENGTH - PAGE_SIZE
REPOSITORY = Path(__file__).parents[2]

# Imported by every process of the server at its start: its file tier hangs as long as the flag is there.
_HOOK = """
import hicache_ext.storage.contract.registry as registry
registry._OURS["file"] = "hanging_file_tier:HangingFileTier"
"""
_STORE = """
import os, time
from hicache_ext.storage.tiers.file.tier_type import FileTier
from tests.rigs.faults import BeforeEachCall

class Hanging(BeforeEachCall):
    def before_call(self):
        while os.path.exists(os.environ["HANGING_FLAG"]):
            time.sleep(0.01)

class HangingFileTier(FileTier):
    def open(self, name, tier):
        return Hanging(super().open(name, tier))
"""


def test_requests_go_on_while_a_tier_hangs_and_it_comes_back_without_a_restart(
    tiny_model: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(_HOOK)
    (hooks / "hanging_file_tier.py").write_text(_STORE)
    flag = tmp_path / "hang"
    config = file_tier_config(tmp_path / "l3")
    config["hicache_ext"]["tiers"]["disk"] |= {"layout": "pages", "timeout": "1s"}
    file = tmp_path / "hicache.yaml"
    file.write_text(yaml.safe_dump(config))

    with (
        tempfile.TemporaryDirectory(prefix="hce-") as runtime,
        SglangServer(
            tiny_model,
            log_file=tmp_path / "server.log",
            page_size=PAGE_SIZE,
            storage_backend="dynamic",
            extra_config=f"@{file}",
            extra_arguments=("--enable-metrics",),
            environment={
                "PYTHONPATH": os.pathsep.join([str(hooks), str(REPOSITORY)]),
                "HANGING_FLAG": str(flag),
                "HICACHE_EXT_RUNTIME_DIR": runtime,
            },
        ) as server,
    ):
        cold = server.generate(random_prompt(0))
        assert cold.cached_tokens == 0

        def served_from_storage() -> bool:
            server.flush_cache()
            restored = server.generate(random_prompt(0))
            assert restored.output_ids == cold.output_ids
            return restored.cached.storage == REUSABLE

        # A machine that stops for longer than the tier's timeout has it left out for a moment.
        wait_until(served_from_storage)
        wait_until(lambda: breaker_state(server) == 0)
        healthy = [server.generate(random_prompt(number)).time_to_first_token for number in range(1, 9)]
        server.flush_cache()

        flag.touch()
        first = server.generate(random_prompt(0))  # pays the deadline
        assert first.cached.storage == 0 and first.output_ids == cold.output_ids
        assert "tier disk is left out: " in server.log_file.read_text()
        hung = [server.generate(random_prompt(number)).time_to_first_token for number in range(11, 19)]
        again = server.generate(random_prompt(0))
        assert again.output_ids == cold.output_ids
        wait_until(lambda: breaker_state(server) == 2)

        flag.unlink()
        wait_until(lambda: "tier disk answers again after" in server.log_file.read_text())
        wait_until(served_from_storage)
        # The slow start ends with a call, so there must be some.
        wait_until(lambda: served_from_storage() and breaker_state(server) == 0)
        assert main(["stats", server.url, "--once"]) == 0
        shown = capsys.readouterr().out
        assert re.search(r"^disk: .*\d rejected breaker.*[1-9]\d* breaker open", shown, re.MULTILINE), shown
        assert re.search(r"^kernels: .*copy_back_up reference: cpu", shown, re.MULTILINE), shown

        figures = {
            "healthy": statistics.median(healthy),
            "first": first.time_to_first_token,
            "hung": statistics.median(hung),
        }
        record_property("time_to_first_token", figures)
        print("time to first token, s:", {name: round(seconds, 3) for name, seconds in figures.items()})

        # The same server takes over another tier, and refuses to move the one it has.
        config["hicache_ext"]["tiers"]["more"] = {**config["hicache_ext"]["tiers"]["disk"], "path": str(tmp_path / "m")}
        file.write_text(yaml.safe_dump(config))
        taken = reload(file, runtime)
        assert taken.returncode == 0 and "tier more is used" in taken.stdout, taken.stderr
        config["hicache_ext"]["tiers"]["disk"]["path"] = str(tmp_path / "moved")
        file.write_text(yaml.safe_dump(config))
        refused = reload(file, runtime)
        assert refused.returncode == 1 and "tiers.disk.path: cannot change" in refused.stderr
        numbers = itertools.count(99)

        def is_written_and_restored() -> bool:
            number = next(numbers)
            server.generate(random_prompt(number))
            server.flush_cache()
            restored = server.generate(random_prompt(number))
            return restored.cached.storage == REUSABLE and bool(stored_keys(tmp_path / "m"))

        wait_until(is_written_and_restored)
    assert "is answered as a miss" not in server.log_file.read_text()


def breaker_state(server: SglangServer) -> float:
    return read_samples(server.get("/metrics")).total("hicache_ext_breaker_state", tier="disk")


def reload(file: Path, runtime: str) -> subprocess.CompletedProcess[str]:
    main = "import sys; from hicache_ext.cli.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", main, "reload", str(file)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "HICACHE_EXT_RUNTIME_DIR": runtime},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
