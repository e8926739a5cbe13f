"""Real SGLang servers over two tiers: a near disk and a pool."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache_ext.cli.server_commands import read_samples
from hicache_ext.config.model import ExtraConfig
from hicache_ext.page.hashes import page_hashes
from hicache_ext.testing.client import Generation
from hicache_ext.testing.conformance.second_reader import read_page_object
from hicache_ext.testing.server import SglangServer
from tests.e2e.test_file_tier import PAGE_SIZE, PROMPT, REUSABLE
from tests.storage.raw_access import RawFiles, stored_keys
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HASHES = [page.hex() for page in page_hashes(PROMPT, PAGE_SIZE)]


@pytest.fixture(scope="module")
def cold(cold_answer: Callable[[Sequence[int]], Generation]) -> Generation:
    return cold_answer(PROMPT)


def write_config(directory: Path, **section: Any) -> Path:
    tiers = {
        name: {"type": "file", "path": str(directory / name), "capacity": "256MiB", "layout": "pages"}
        for name in ("nvme", "pool")
    }
    path = directory / "hicache.yaml"
    path.write_text(yaml.safe_dump(ExtraConfig.around({"tiers": tiers, **section})))
    return path


def serve(model: Path, directory: Path, name: str, config: Path, *extra: str) -> SglangServer:
    return SglangServer(
        model,
        log_file=directory / f"{name}.log",
        page_size=PAGE_SIZE,
        storage_backend="dynamic",
        extra_config=f"@{config}",
        extra_arguments=extra,
    )


def payloads(directory: Path) -> dict[str, bytes]:
    """Page hash -> payload of every page in a directory of the file tier, past the package's own reader."""
    raw = RawFiles(directory)
    return {key[16:].hex(): read_page_object(raw.read(key) or b"").payload for key in stored_keys(directory)}


def test_after_the_disk_was_lost_the_first_request_comes_from_the_pool_and_the_second_from_the_disk(
    tiny_model: Path, tmp_path: Path, cold: Generation
) -> None:
    config = write_config(tmp_path, promote_to="nvme", store_policies={"pool": "async"})
    with serve(tiny_model, tmp_path, "first", config) as server:
        assert server.generate(PROMPT).output_ids == cold.output_ids
        server.flush_cache()
    stored = payloads(tmp_path / "pool")
    # Written in the background, and drained when the server ended.
    assert payloads(tmp_path / "nvme") == stored and set(HASHES[: REUSABLE // PAGE_SIZE]) <= set(stored)

    shutil.rmtree(tmp_path / "nvme")
    with serve(tiny_model, tmp_path, "second", config, "--enable-metrics") as server:
        from_pool = server.generate(PROMPT)
        assert from_pool.cached.storage == REUSABLE
        assert from_pool.output_ids == cold.output_ids
        server.flush_cache()
        wait_for_pages(tmp_path / "nvme", REUSABLE // PAGE_SIZE)
        promoted = payloads(tmp_path / "nvme")
        assert {page: stored[page] for page in HASHES[: REUSABLE // PAGE_SIZE]}.items() <= promoted.items()

        # The pool is emptied under the server: what comes now comes from the disk.
        pool = RawFiles(tmp_path / "pool")
        for key in stored_keys(tmp_path / "pool"):
            pool.remove(key)
        from_disk = server.generate(PROMPT)
        assert from_disk.cached.storage == REUSABLE
        assert from_disk.output_ids == cold.output_ids
        assert_metrics_tell_the_story(server)


def assert_metrics_tell_the_story(server: SglangServer) -> None:
    pages = REUSABLE // PAGE_SIZE

    def hits_are_told() -> bool:
        """Exported once a second."""
        samples = read_samples(server.get("/metrics"))
        return [
            samples.total("hicache_ext_chain_pages_total", tier=tier, reason="used") for tier in ("pool", "nvme")
        ] == [pages] * 2

    wait_until(hits_are_told, "the hits in the metrics")
    samples = read_samples(server.get("/metrics"))
    assert samples.total("hicache_ext_promotion_total", tier="nvme", reason="stored") >= 1
    assert samples.total("hicache_ext_call_seconds_count", tier="pool", operation="get") >= 1


def wait_for_pages(directory: Path, count: int) -> None:
    wait_until(lambda: len(stored_keys(directory)) >= count, f"{count} pages in {directory}")


def test_nothing_past_a_gap_is_promoted(tiny_model: Path, tmp_path: Path, cold: Generation) -> None:
    # Stored to the pool alone, so that the disk gets what is promoted and nothing else.
    config = write_config(tmp_path, promote_to="nvme", store_locations=["pool"])
    gap = 20
    with serve(tiny_model, tmp_path, "server", config) as server:
        server.generate(PROMPT)
        server.flush_cache()
        assert not payloads(tmp_path / "nvme")
        stored = payloads(tmp_path / "pool")
        pool = RawFiles(tmp_path / "pool")
        for key in stored_keys(tmp_path / "pool"):
            if key[16:].hex() == HASHES[gap]:
                pool.remove(key)
        before_the_gap = server.generate(PROMPT)
        assert before_the_gap.cached.storage == gap * PAGE_SIZE
        assert before_the_gap.output_ids == cold.output_ids
        wait_for_pages(tmp_path / "nvme", gap)
        server.flush_cache()
    assert payloads(tmp_path / "nvme") == {page: stored[page] for page in HASHES[:gap]}
