"""The main job: a real SGLang server restores a conversation from our file tier, and never a wrong byte."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from hicache_ext.errors import ServerError
from hicache_ext.testing.client import Generation, SglangClient
from tests.e2e.conftest import FIRST_PROMPT, file_tier_config
from tests.e2e.modes import saw
from tests.rigs.rig_server import RigServer
from tests.storage.raw_access import RawFiles, stored_keys

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE_SIZE = 16
PROMPT = FIRST_PROMPT
REUSABLE = len(PROMPT) - PAGE_SIZE
"""The last token of a prompt is always computed, so a hit ends one page before a prompt of whole pages does."""


@pytest.fixture(scope="module")
def cold(cold_answer: Callable[[Sequence[int]], Generation]) -> Generation:
    return cold_answer(PROMPT)


@pytest.fixture
def layout() -> str:
    """Of the file tier; parametrized where it matters."""
    return "auto"


@pytest.fixture
def config_file(tmp_path: Path, layout: str) -> Path:
    path = tmp_path / "hicache.yaml"
    path.write_text(yaml.safe_dump(file_tier_config(tmp_path / "l3", layout=layout)))
    return path


def damage(directory: Path, identity: bytes | None = None) -> int:
    """One flipped bit somewhere in each page, or in those of one identity; how many those were."""
    generator = random.Random(1)
    raw = RawFiles(directory)
    keys = [key for key in sorted(stored_keys(directory)) if identity in (None, key[:16])]
    for key in keys:
        data = bytearray(raw.read(key) or b"")
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        raw.write(key, bytes(data))
    return len(keys)


def damage_slots(directory: Path) -> int:
    """Every slot damaged in its last block; how many those were."""
    damaged = 0
    for slab in (directory / "v3" / "slabs").glob("*.slab"):
        slot_size = int(slab.stem.split("-")[1])
        with slab.open("r+b") as file:
            for offset in range(slot_size - 100, slab.stat().st_size, slot_size):
                file.seek(offset)
                file.write(b"\xa5")
                damaged += 1
    return damaged


@pytest.mark.parametrize("layout", ["pages", "slab"])
def test_a_prompt_is_restored_after_a_flush_a_restart_and_damage(
    tiny_model: Path, tmp_path: Path, config_file: Path, cold: Generation, layout: str
) -> None:
    """Of slabs the first server is killed; test_releases.py has one over slabs that ends in order."""

    def serve(name: str) -> RigServer:
        return RigServer(
            tiny_model,
            log_file=tmp_path / f"{name}.log",
            page_size=PAGE_SIZE,
            storage_backend="dynamic",
            extra_config=f"@{config_file}",
        )

    with serve("first") as server:
        assert server.generate(PROMPT).cached_tokens == 0
        server.flush_cache()
        after_flush = server.generate(PROMPT)
        if layout == "slab":
            server.kill()
    assert after_flush.cached.storage == REUSABLE
    assert after_flush.meta_info["cached_tokens_details"]["storage_backend"] == "HiCacheExtBackend"
    assert after_flush.output_ids == cold.output_ids

    with serve("second") as server:
        after_restart = server.generate(PROMPT)
        assert after_restart.cached.storage == REUSABLE
        assert after_restart.output_ids == cold.output_ids

        # The cold result, not a wrong one.
        if layout == "pages":
            assert damage(tmp_path / "l3") >= REUSABLE // PAGE_SIZE
        else:
            assert damage_slots(tmp_path / "l3") >= REUSABLE // PAGE_SIZE
        server.flush_cache()
        after_damage = server.generate(PROMPT)
        assert after_damage.cached_tokens == 0
        assert after_damage.output_ids == cold.output_ids

        server.flush_cache()
        healed = server.generate(PROMPT)
        assert healed.cached.storage == REUSABLE
        assert healed.output_ids == cold.output_ids


def test_a_prompt_is_restored_where_host_memory_is_a_mere_buffer(
    tiny_model: Path, tmp_path: Path, config_file: Path, cold: Generation
) -> None:
    """docs/operations.md says so: SGLang keeps no L2, and whatever has left the GPU comes from the tier."""
    with RigServer(
        tiny_model,
        log_file=tmp_path / "server.log",
        page_size=PAGE_SIZE,
        storage_backend="dynamic",
        extra_config=f"@{config_file}",
        extra_arguments=("--hicache-host-memory-mode", "buffer_only"),
    ) as server:
        assert server.generate(PROMPT).cached_tokens == 0
        # SGLang believes after the first round that the pages are stored, and writes them no second time.
        for _ in range(2):
            server.flush_cache()
            restored = server.generate(PROMPT)
            assert (restored.cached.storage, restored.cached.host) == (REUSABLE, 0)
            assert restored.output_ids == cold.output_ids
    saw("`--hicache-host-memory-mode buffer_only`", restored)


@pytest.mark.parametrize("layout", ["pages"])
def test_two_ranks_restore_together_and_never_meet_one_rank(
    tiny_model: Path, tmp_path: Path, config_file: Path, cold: Generation
) -> None:
    def serve(name: str, tp: int) -> RigServer:
        return RigServer(
            tiny_model,
            log_file=tmp_path / f"{name}.log",
            tp=tp,
            page_size=PAGE_SIZE,
            storage_backend="dynamic",
            extra_config=f"@{config_file}",
        )

    with serve("tp1", 1) as server:
        server.generate(PROMPT)
        server.flush_cache()
    with serve("tp2", 2) as server:
        first = server.generate(PROMPT)
        assert first.cached_tokens == 0
        server.flush_cache()
        again = server.generate(PROMPT)
        assert again.cached.storage == REUSABLE
        assert again.output_ids == first.output_ids
        saw("`--tp 2`", again)
        # One rank's pages damaged: both ranks agree on a miss, and the next run hits again.
        identities = sorted({key[:16] for key in stored_keys(tmp_path / "l3")})
        assert len(identities) == 3
        damage(tmp_path / "l3", identities[0])
        damage(tmp_path / "l3", identities[1])
        server.flush_cache()
        assert server.generate(PROMPT).output_ids == first.output_ids
        server.flush_cache()
        healed = server.generate(PROMPT)
        assert healed.cached.storage == REUSABLE
        assert healed.output_ids == first.output_ids


def test_sglangs_fault_injector_costs_hits_and_nothing_else(
    tiny_model: Path, tmp_path: Path, config_file: Path, cold: Generation
) -> None:
    with RigServer(
        tiny_model,
        log_file=tmp_path / "server.log",
        page_size=PAGE_SIZE,
        storage_backend="dynamic",
        extra_config=f"@{config_file}",
        environment={
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.4",
        },
    ) as server:
        for _ in range(12):
            answer = server.generate(PROMPT)
            assert answer.output_ids == cold.output_ids
            server.flush_cache()


def test_an_impossible_configuration_stops_the_server_at_start_with_its_sentence(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A mistyped one is refused in the same place: see the storage that is attached below."""
    config = file_tier_config(Path("/proc/nowhere"))
    server = RigServer(
        tiny_model,
        log_file=tmp_path / "server.log",
        page_size=PAGE_SIZE,
        storage_backend="dynamic",
        extra_config=config,
    )
    with pytest.raises(ServerError), server:
        pass
    assert "tier 'disk' cannot start" in (tmp_path / "server.log").read_text()


def test_storage_can_be_attached_cleared_and_detached_while_the_server_runs(
    tiny_model: Path, tmp_path: Path, cold: Generation
) -> None:
    config = file_tier_config(tmp_path / "l3")
    typo = file_tier_config(tmp_path / "l3", modle={"id": "x"})

    def body(extra_config: dict[str, object]) -> dict[str, str]:
        return {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config_json": json.dumps(extra_config),
            "hicache_storage_prefetch_policy": "wait_complete",
        }

    with RigServer(
        tiny_model, log_file=tmp_path / "server.log", page_size=PAGE_SIZE, extra_arguments=("--admin-api-key", "key")
    ) as server:
        admin = SglangClient(server.url, {"Authorization": "Bearer key"})

        def flush() -> None:
            admin.request("POST", "/flush_cache?timeout=60")

        with pytest.raises(ServerError, match="did you mean 'model'"):
            admin.request("PUT", "/hicache/storage-backend", body(typo))
        admin.request("PUT", "/hicache/storage-backend", body(config))
        assert server.generate(PROMPT).cached_tokens == 0
        flush()
        assert server.generate(PROMPT).cached.storage == REUSABLE
        flush()
        admin.request("POST", "/hicache/storage-backend/clear")
        assert server.generate(PROMPT).cached_tokens == 0
        flush()
        admin.request("DELETE", "/hicache/storage-backend")
        assert server.generate(PROMPT).cached_tokens == 0
        flush()
        admin.request("PUT", "/hicache/storage-backend", body(config))
        again = server.generate(PROMPT)
    assert again.cached.storage == REUSABLE
    assert again.output_ids == cold.output_ids
    saw("storage attached, detached and attached again while the server runs", again)


def test_two_servers_share_a_directory_and_one_of_them_is_killed(
    tiny_model: Path, tmp_path: Path, cold: Generation
) -> None:
    """kill -9 in the middle of writing: the other server goes on, the killed one comes back, nothing wrong is read."""
    config = file_tier_config(tmp_path / "l3", capacity="8MiB", layout="pages")
    prompts = {number: [(number * 37 + 11 * p * p + 5 * p) % 250 for p in range(640)] for number in range(12)}

    def serve(name: str) -> RigServer:
        return RigServer(
            tiny_model,
            log_file=tmp_path / f"{name}.log",
            page_size=PAGE_SIZE,
            storage_backend="dynamic",
            extra_config=config,
        )

    def occupied_kib() -> int:
        usage = subprocess.run(["du", "-sk", str(tmp_path / "l3")], check=True, capture_output=True, text=True)
        return int(usage.stdout.split()[0])

    with serve("survivor") as survivor, serve("victim") as victim:
        expected = {number: survivor.generate(prompt).output_ids for number, prompt in prompts.items()}
        assert survivor.generate(PROMPT).output_ids == cold.output_ids

        def load() -> None:
            for number in itertools.cycle(prompts):
                try:
                    victim.generate(prompts[number])
                    victim.flush_cache()
                except (ServerError, OSError):
                    return

        writer = threading.Thread(target=load)
        writer.start()
        time.sleep(1.5)
        victim.kill()
        writer.join()
        from_storage = 0
        for number, prompt in prompts.items():
            survivor.flush_cache()
            answer = survivor.generate(prompt)
            assert answer.output_ids == expected[number]
            from_storage += answer.cached.storage
        assert from_storage > 0
        victim.start()
        for number, prompt in prompts.items():
            assert victim.generate(prompt).output_ids == expected[number]
    assert occupied_kib() <= 8 * 1024
    assert not list((tmp_path / "l3" / "tmp").iterdir())
