"""``hicache-ext prove`` against a real server: wrong pages that pass every check are found; there is no false alarm."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_ext.cli import prove_command
from hicache_ext.cli.prove_command import DIFFERENT, EQUAL, WITHIN, prove
from hicache_ext.testing.server import SglangServer
from hicache_ext.testing.small_model import arguments_to_serve
from tests.e2e.conftest import file_tier_config
from tests.rigs import hybrid_on_cpu, tier_faults
from tests.rigs.server_hooks import rig_environment
from tests.rigs.tiny_adapter import make_tiny_adapter
from tests.rigs.tiny_hybrid import make_tiny_hybrid
from tests.rigs.tiny_vision import make_tiny_vision

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SHAPE = "2:2:32"
"""Layers, heads and dimension of the tiny model."""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove_command, "QUICK_LENGTHS", (400,))
    monkeypatch.setattr(prove_command, "AT_ONCE", 2)
    # Faults shorten no answer: what is read is all there, and only wrong.
    monkeypatch.setattr(prove_command, "_WAITS", (1.0,))


def serve(
    model: Path,
    tmp_path: Path,
    *,
    environment: Mapping[str, str],
    arguments: Sequence[str] | None = None,
    config: str | None = None,
) -> SglangServer:
    return SglangServer(
        model,
        log_file=tmp_path / "server.log",
        page_size=16,
        storage_backend="dynamic",
        extra_config=config or file_tier_config(tmp_path / "l3"),
        extra_arguments=arguments_to_serve() if arguments is None else arguments,
        environment=environment,
    )


def verdicts(server: SglangServer) -> dict[str, str]:
    return {case.name: case.verdict for case in prove(server, quick=True, say=lambda line: None).cases}


def test_each_planted_fault_is_found_and_none_where_none_was_planted(tiny_model: Path, tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    with serve(tiny_model, tmp_path, environment=rig_environment({tier_faults.VARIABLE: f"file:{faults}"})) as server:
        found: dict[str, list[list[str]]] = {}
        for fault in ("", "head", "layers", "page", "unscaled", ""):
            tier_faults.direct(faults, f"wrong:{fault}:{SHAPE}" if fault else "")
            proof = prove(server, quick=True, say=lambda line: None)
            assert all(case.restored_tokens >= 320 for case in proof.cases), proof.cases
            found.setdefault(fault, []).append([case.verdict for case in proof.cases])
    # Several at once are computed in batches of other sizes, which round otherwise.
    assert all(one[0] == EQUAL and one[1] in (EQUAL, WITHIN) for one in found.pop(""))
    assert found == {fault: [[DIFFERENT, DIFFERENT]] for fault in found}


@pytest.mark.parametrize("fault", ["", "adapters"])
def test_an_adapter_that_is_mixed_up_is_found(fault: str, tiny_model: Path, tmp_path: Path) -> None:
    adapter = make_tiny_adapter(tmp_path / "adapter", seed=1)
    lora = ["--lora-paths", f"style={adapter}", "--lora-backend", "torch_native", "--max-loras-per-batch", "2"]
    arguments = [*arguments_to_serve(), *lora]
    environment = rig_environment({tier_faults.VARIABLE: fault})
    with serve(tiny_model, tmp_path, environment=environment, arguments=arguments) as server:
        found = verdicts(server)
    of_adapter = found.pop("adapter style")
    assert of_adapter == DIFFERENT if fault else of_adapter in (EQUAL, WITHIN)
    assert set(found.values()) <= {EQUAL, WITHIN}


@pytest.mark.parametrize("fault", ["", f"wrong:page:{SHAPE}"])
def test_a_prompt_with_an_image_is_compared(fault: str, tmp_path: Path) -> None:
    arguments = [*arguments_to_serve(), "--mm-attention-backend", "sdpa"]
    environment = rig_environment({tier_faults.VARIABLE: fault})
    model = make_tiny_vision(tmp_path / "model")
    with serve(model, tmp_path, environment=environment, arguments=arguments) as server:
        found = verdicts(server)
    of_image = found.pop("an image")
    assert of_image == DIFFERENT if fault else of_image in (EQUAL, WITHIN)


@pytest.mark.parametrize("fault", ["", "late"])
def test_states_of_a_hybrid_that_are_one_boundary_late_are_found(fault: str, tmp_path: Path) -> None:
    environment = rig_environment({tier_faults.VARIABLE: fault}, [tier_faults.__name__, hybrid_on_cpu.__name__])
    model = make_tiny_hybrid(tmp_path / "model", "qwen3_next")
    with serve(model, tmp_path, environment=environment, arguments=()) as server:
        found = set(verdicts(server).values())
    assert found == {DIFFERENT} if fault else found <= {EQUAL, WITHIN}


# -- the canary --------------------------------------------------------------------------------------------------------


class Ended(Exception):
    """The canary has asked each prompt once."""


@pytest.fixture
def canary(monkeypatch: pytest.MonkeyPatch) -> Callable[[SglangServer], tuple[Any, list[str]]]:
    """``canary(server)``: one turn; what it found (None: nothing), and what it said."""
    monkeypatch.setattr(prove_command, "_CANARIES", 2)

    def watch(server: SglangServer) -> tuple[Any, list[str]]:
        said: list[str] = []
        pauses: list[float] = []

        def sleep(seconds: float) -> None:
            if seconds == prove_command._IDLE_EVERY:
                time.sleep(seconds)
                return
            pauses.append(seconds)
            if len(pauses) == 2:
                raise Ended

        monkeypatch.setattr(prove_command, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
        try:
            return prove_command.watch(server, 0.5, say=said.append), said
        except Ended:
            return None, said
        finally:
            monkeypatch.setattr(prove_command, "time", time)

    return watch


def test_a_canary_ends_storage_only_where_pages_are_wrong(tiny_model: Path, tmp_path: Path, canary: Any) -> None:
    faults, file = tmp_path / "faults", tmp_path / "hicache.json"
    file.write_text(json.dumps(file_tier_config(tmp_path / "l3")))
    environment = rig_environment({tier_faults.VARIABLE: f"file:{faults}"})
    prompt = [(7 * at * at + at) % 250 for at in range(400)]
    tier_faults.direct(faults, "")
    server = serve(tiny_model, tmp_path, environment=environment, config=f"@{file}")
    with server:
        assert canary(server) == (None, [])  # computed, and stored
        assert canary(server) == (None, [])  # on the device
    with server:
        assert canary(server) == (None, [f"400 tokens: 336 of 400 tokens from storage: {EQUAL}"] * 2)
        server.generate(prompt)
        server.flush_cache()
        assert server.generate(prompt).cached.storage
        server.flush_cache()
    with server:
        tier_faults.direct(faults, f"wrong:head:{SHAPE}")
        found, said = canary(server)
        assert found.verdict == DIFFERENT and said[-1].startswith("storage has ended")
        tier_faults.direct(faults, "")
        for _ in range(2):
            assert server.generate(prompt).cached.storage == 0
            server.flush_cache()
        assert server.log_file.read_text().count("STORES WRONG PAGES") == 1
