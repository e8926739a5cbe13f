"""A tier that does not give back what was computed: no exact server meets what its server stores, in any tier."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache_ext.config import ExtraConfig, HicacheExtConfig, load_config
from hicache_ext.errors import ConfigError
from hicache_ext.sglang.launch_arguments import LaunchFacts
from hicache_ext.storage.tiering.reload import ReloadableStore
from hicache_ext.testing.conformance.storage_backend import PAGE_SIZE, page_keys
from hicache_ext.testing.host_pools import mha_pools, page_indices

pytestmark = pytest.mark.sglang

KEYS = page_keys(2)
INDICES = page_indices(PAGE_SIZE, [0, 1])


def tiers(path: Path, *codecs: str) -> dict[str, Any]:
    """Tiers of which each has a directory and a codec."""
    return {
        "tiers": {
            f"tier{number}": {
                "type": "file",
                "path": str(path / f"l3-{number}"),
                "capacity": "64MiB",
                "codec": codec,
                "layout": "pages",
            }
            for number, codec in enumerate(codecs)
        }
    }


@pytest.fixture
def serve(open_backend: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """``serve("off", "int8")``: a backend whose tiers have these codecs, over the directories that all share."""

    def serve_(*codecs: str, **more: Any) -> Any:
        pools = mha_pools(page_size=PAGE_SIZE, dtype=torch.bfloat16)
        return open_backend(pools.host, ours={**tiers(tmp_path, *codecs), **more})

    return serve_


@pytest.mark.thorough
@pytest.mark.parametrize("lossy", ["int8", "fp8"])
@pytest.mark.parametrize("exact", ["off", "lossless", "auto"])
def test_an_exact_server_reads_nothing_of_a_lossy_one_and_the_other_way_round(
    serve: Callable[..., Any], lossy: str, exact: str
) -> None:
    """Not from the exact tier of a lossy server either: promotion puts there what the other one gave back."""
    serve(exact, lossy).batch_set_v1(KEYS, INDICES)
    assert serve(exact, lossy).batch_exists(KEYS) == 2
    assert serve(exact, exact).batch_exists(KEYS) == 0
    other = page_keys(4)[2:]
    serve(exact, exact).batch_set_v1(other, INDICES)
    assert serve(exact, lossy).batch_exists(other) == 0


def test_servers_with_other_lossy_codecs_do_not_meet(serve: Callable[..., Any]) -> None:
    serve("off", "int8").batch_set_v1(KEYS, INDICES)
    assert serve("off", "fp8").batch_exists(KEYS) == 0


def test_the_nodes_of_a_pair_agree_although_only_one_uses_the_lossy_tier(serve: Callable[..., Any]) -> None:
    roles = {"both": {"retrieve_locations": ["tier0"], "store_locations": ["tier0"]}}
    serve("off", "int8", roles=roles).batch_set_v1(KEYS, INDICES)
    assert serve("off").batch_exists(KEYS) == 0
    assert serve("off", "int8").batch_exists(KEYS) == 2


def test_what_comes_back_is_close_and_not_equal(serve: Callable[..., Any], tmp_path: Path) -> None:
    backend = serve("int8")
    pool = backend.mem_pool_host
    pool.kv_buffer.copy_(torch.randn_like(pool.kv_buffer.float()).to(torch.bfloat16))
    before = pool.kv_buffer.clone()
    backend.batch_set_v1(KEYS, INDICES)
    reader = serve("int8")
    assert reader.batch_get_v1(KEYS, INDICES) == [True, True]
    # page_first: [K and V, tokens, layers, heads, numbers].
    computed, restored = (kv[:, : 2 * PAGE_SIZE].float() for kv in (before, reader.mem_pool_host.kv_buffer))
    error = (computed - restored).abs().amax().item()
    assert 0 < error < 0.05


def test_the_log_names_what_is_lossy(serve: Callable[..., Any], caplog: Any, monkeypatch: Any) -> None:
    from hicache_ext.sglang import lifecycle

    monkeypatch.setattr(lifecycle, "read_launch_facts", lambda: LaunchFacts(model_path="/model"))
    with caplog.at_level(logging.INFO):
        serve("off", "int8", model={"fingerprint": "some"})
    assert "what is restored from tier tier1 (int8) is not what was computed" in caplog.text
    assert "pool kv with codec int8: in codes of 8 bits, a scale for" in caplog.text


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., HicacheExtConfig]:
    return lambda *codecs: load_config(ExtraConfig.around(tiers(tmp_path, *codecs)))


def test_a_lossy_codec_cannot_begin_in_a_reload_but_end(configured: Callable[..., HicacheExtConfig]) -> None:
    store = ReloadableStore(configured("off"))
    try:
        with pytest.raises(ConfigError, match=r"tiers\.tier1\.codec: int8 cannot begin while the server runs"):
            store.reload(configured("off", "int8"))
    finally:
        store.close()
    store = ReloadableStore(configured("off", "int8"))
    try:
        store.reload(configured("off"))
        store.reload(configured("off", "int8"))
    finally:
        store.close()
