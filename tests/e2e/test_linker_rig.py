"""The rig of the other door: a real server on a CPU, with a linker of the rig that lets each layer come late.

If a forward on the CPU did not wait layer by layer, no test of the door could see a layer that is missing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import FIRST_PROMPT
from tests.rigs.rig_server import RigServer
from tests.rigs.server_hooks import hybrid_environment
from tests.rigs.tiny_hybrid import ARGUMENTS, make_tiny_hybrid

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE_SIZE = 16
PROMPT = FIRST_PROMPT
REUSABLE = len(PROMPT) - PAGE_SIZE


def rig_linker(directory: Path) -> dict[str, Any]:
    directory.mkdir(exist_ok=True)
    return {
        "linker": "DictLinker",
        "linker_module_path": "tests.rigs.dict_linker",
        "linker_extra_config": {"directory": str(directory)},
    }


def journal(directory: Path) -> list[tuple[str, int, int | None]]:
    """The events that the linker noted so far."""
    return [tuple(json.loads(line)) for line in (directory / "journal").read_text().splitlines()]


@pytest.mark.parametrize(("kind", "layers"), [("llama", 2), ("gemma4", 4)])
def test_a_forward_waits_for_each_layer_before_it_reads_it(
    tiny_model: Path, tmp_path: Path, kind: str, layers: int
) -> None:
    model = tiny_model if kind == "llama" else make_tiny_hybrid(tmp_path / "gemma4", "gemma4")
    place = tmp_path / "linker"
    with RigServer(
        model,
        log_file=tmp_path / "server.log",
        page_size=PAGE_SIZE,
        linker_config=rig_linker(place),
        extra_arguments=ARGUMENTS.get(kind, ()),
        environment=hybrid_environment(),
    ) as server:
        cold = server.generate(PROMPT)
        assert cold.cached_tokens == 0
        server.flush_cache()
        restored = server.generate(PROMPT)
        assert restored.cached_tokens == REUSABLE
        assert restored.output_ids == cold.output_ids

        events = journal(place)
        batch = [event for event in events if event[1] == 0]
        assert batch[0][0] == "starts" and batch[-1][0] == "finishes"
        # Each layer lands after the forward began to wait for it, and the next one is not waited for before that.
        order = [(name, layer) for name, _, layer in batch if name in ("waits", "lands")]
        firsts = sorted(set(order), key=order.index)
        assert firsts == [(name, layer) for layer in range(layers) for name in ("waits", "lands")]

        # And a counter that does not hold the forward back is seen.
        server.flush_cache()
        (place / "no-wait").touch()
        assert server.generate(PROMPT).output_ids != cold.output_ids
