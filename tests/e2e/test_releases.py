"""Real servers of the oldest and the newest tested release on one directory, and one without SGLang's plug-ins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hicache_ext.errors import ServerError
from hicache_ext.sglang.releases import TESTED
from hicache_ext.testing.server import SglangServer
from tests.e2e.conftest import file_tier_config
from tests.releases.wheels import environment_of
from tests.rigs.tiny_adapter import make_tiny_adapter

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE_SIZE = 16
PROMPT = [(7 * position * position + 3 * position) % 250 for position in range(640)]
REUSABLE = len(PROMPT) - PAGE_SIZE


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "hicache.yaml"
    path.write_text(yaml.safe_dump(file_tier_config(tmp_path / "l3", layout="slab")))
    return path


def test_what_the_oldest_release_stored_the_newest_restores_with_equal_answers(
    tiny_model: Path, tmp_path: Path, config_file: Path
) -> None:
    def serve(release: str) -> SglangServer:
        return SglangServer(
            tiny_model,
            log_file=tmp_path / f"{release}.log",
            page_size=PAGE_SIZE,
            storage_backend="dynamic",
            extra_config=f"@{config_file}",
            environment=environment_of(release),
        )

    with serve(TESTED[0]) as server:
        assert json.loads(server.get("/server_info"))["version"] == TESTED[0]
        cold = server.generate(PROMPT)
        assert cold.cached_tokens == 0
        server.flush_cache()
        assert server.generate(PROMPT).cached.storage == REUSABLE
    with serve(TESTED[-1]) as server:
        assert json.loads(server.get("/server_info"))["version"] == TESTED[-1]
        restored = server.generate(PROMPT)
    assert (restored.cached_tokens, restored.cached.storage) == (REUSABLE, REUSABLE)
    assert restored.output_ids == cold.output_ids


def test_storage_works_without_sglangs_plug_ins_and_says_what_is_off(
    tiny_model: Path, tmp_path: Path, config_file: Path
) -> None:
    """SGLANG_PLUGINS names the plug-ins that SGLang loads: here another one. The CPU rig has hooks of its own."""

    def serve(name: str, *arguments: str) -> SglangServer:
        return SglangServer(
            tiny_model,
            log_file=tmp_path / f"{name}.log",
            page_size=PAGE_SIZE,
            storage_backend="dynamic",
            extra_config=f"@{config_file}",
            extra_arguments=arguments,
            environment={"SGLANG_PLUGINS": "another_plugin"},
        )

    with serve("first") as server:
        cold = server.generate(PROMPT)
        server.flush_cache()
        assert server.generate(PROMPT).cached.storage == REUSABLE
    with serve("second") as server:
        restored = server.generate(PROMPT)
    assert restored.cached.storage == REUSABLE
    assert restored.output_ids == cold.output_ids
    log = (tmp_path / "second.log").read_text()
    for sentence in (
        "is not in force (is SGLANG_PLUGINS set?): do not update weights online",
        "is not in force (is SGLANG_PLUGINS set?): weights are identified by their files as they are after the load",
    ):
        assert log.count(sentence) == 1
    # Nobody asked for these.
    assert not [words for words in ("adapters cannot be told apart", "a decode node writes", "pull or") if words in log]

    adapter = make_tiny_adapter(tmp_path / "adapter", seed=1)
    with pytest.raises(ServerError, match=r"--enable-lora cannot be served.*adapters cannot be told apart"):
        serve("lora", "--lora-paths", f"a={adapter}", "--lora-backend", "torch_native").start()
