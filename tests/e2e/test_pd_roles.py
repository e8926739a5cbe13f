"""One configuration file for both nodes of a pair: what each does by its role, and what both say at /metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hicache_ext.cli.server_commands import Samples, read_samples, table
from hicache_ext.config.model import ExtraConfig
from hicache_ext.page.hashes import page_hashes
from hicache_ext.testing.server import SglangServer
from tests.e2e.test_pd_pair import PAGE_SIZE, PROMPT, error_lines, restored, whole_pages
from tests.e2e.test_tiers import payloads
from tests.rigs.network_namespace import missing_for_namespaces
from tests.rigs.pd_pair import PdPair
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_GENERATED = 80


def test_the_decode_node_stores_to_the_pool_and_the_prefill_node_retrieves_from_disk_and_pool(
    tiny_model: Path, tmp_path: Path
) -> None:
    if missing := missing_for_namespaces():
        pytest.skip(f"missing: {missing}")
    tiers = {
        name: {"type": "file", "path": str(tmp_path / name), "capacity": "256MiB", "layout": "pages"}
        for name in ("nvme", "pool")
    }
    ours = {
        "tiers": tiers,
        "retrieve_locations": ["nvme", "pool"],
        "promote_to": "nvme",
        "pd": {"pull": {"mode": "fixed", "min_tokens": 64}},
        "roles": {"decode": {"retrieve_locations": [], "store_locations": ["pool"]}},
    }
    file = tmp_path / "hicache.yaml"
    file.write_text(yaml.safe_dump(ExtraConfig.around(ours)))
    metrics = ("--enable-metrics",)
    with PdPair(
        tiny_model,
        directory=tmp_path,
        prefill_config=f"@{file}",
        decode_config=f"@{file}",
        prefill_arguments=metrics,
        decode_arguments=metrics,
    ) as pair:
        first = pair.generate(PROMPT, _GENERATED)
        assert first.cached_tokens == 0
        next_turn = [*PROMPT, *first.output_ids, *range(24)]
        cold = pair.generate(next_turn, 16, cache_salt="cold")
        assert cold.cached_tokens == 0

        # Pages 40 to 43 are the decode node's: they are in the pool, and nobody's disk has them.
        written = [page.hex() for page in page_hashes(next_turn, PAGE_SIZE)][len(PROMPT) // PAGE_SIZE : 44]
        _wait_for(tmp_path / "pool", written)
        assert not set(written) & set(payloads(tmp_path / "nvme"))

        warm = restored(pair, next_turn, 704)
        assert warm.cached.storage in (704, whole_pages(next_turn))
        assert warm.output_ids == cold.output_ids
        # Read once from the pool, and from then on the prefill node's own.
        _wait_for(tmp_path / "nvme", written)
        near, far = payloads(tmp_path / "nvme"), payloads(tmp_path / "pool")
        assert [near[page] for page in written] == [far[page] for page in written]

        _assert_the_prefill_node_says_what_it_did(pair.prefill, len(written))
        _assert_the_decode_node_says_what_it_did(pair.decode, len(written))
    for name, role, used in (
        ("prefill", "prefill", "'retrieve': ['nvme', 'pool'], 'store': ['nvme', 'pool']"),
        ("decode", "decode", "'retrieve': [], 'store': ['pool']"),
    ):
        log = tmp_path / f"{name}.log"
        assert any(f"role {role}," in line and used in line for line in log.read_text().splitlines())
        assert not error_lines(log)


def _assert_the_prefill_node_says_what_it_did(server: SglangServer, from_pool: int) -> None:
    # Metrics are exported once a second.
    wait_until(lambda: _samples(server).total("hicache_ext_chain_pages_total", tier="pool", reason="used") >= from_pool)
    wait_until(lambda: _samples(server).total("hicache_ext_pull_tokens_total", reason="pulled") >= 704)
    samples = _samples(server)
    assert samples.total("hicache_ext_pull_decision_total", reason="long_enough") >= 1
    copies = samples.by("reason", "hicache_ext_copy_load_total", tier="kernels")
    assert sum(copies.values()) >= 1 and all(": " in reason for reason in copies)
    assert any(line.startswith("pull: ") and "pull_tokens pulled" in line for line in table(None, samples))


def _assert_the_decode_node_says_what_it_did(server: SglangServer, written: int) -> None:
    wait_until(lambda: _samples(server).total("hicache_ext_pd_write_page_total", reason="stored") >= written)
    # The last answer's page waits for its prompt's pages to be in the pool.
    wait_until(lambda: _samples(server).by("tier", "hicache_ext_pd_write_waiting_pages") == {"pd_write": 0})
    samples = _samples(server)
    assert samples.total("hicache_ext_set_total", tier="pool", reason="stored") >= written
    assert samples.total("hicache_ext_pd_write_request_total", reason="seen") >= 2
    # It reads nothing from anywhere.
    assert samples.total("hicache_ext_get_total", tier="all") == 0
    assert any(line.startswith("pd_write: ") for line in table(None, samples))


def _samples(server: SglangServer) -> Samples:
    return read_samples(server.get("/metrics"))


def _wait_for(directory: Path, pages: list[str]) -> None:
    wait_until(lambda: set(pages) <= set(payloads(directory)))
