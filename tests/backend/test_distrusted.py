"""A server that stores wrong pages is stopped, and its pages are gone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_ext.errors import UnsupportedError
from hicache_ext.sglang import process
from hicache_ext.sglang.process import LoadedModel
from hicache_ext.sglang.releases import left_out_of_host_memory
from hicache_ext.testing.conformance.storage_backend import PAGE_SIZE, page_keys
from hicache_ext.testing.host_pools import mha_pools, page_indices

pytestmark = pytest.mark.sglang

KEYS = page_keys(2)
INDICES = page_indices(PAGE_SIZE, [0, 1])
POOLS = "hicache_ext.sglang.served_pools"
STORED, NOTHING = [True, True], [False, False]


@pytest.fixture
def start(open_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """``start(release)``: a server over the one directory, which was closed before."""
    running: list[Any] = []

    def start_(release: str) -> Any:
        if running:
            running.pop().close()
        monkeypatch.setattr(f"{POOLS}.installed_release", lambda: release)
        running.append(open_backend(mha_pools(page_size=PAGE_SIZE).host))
        return running[0]

    return start_


def serves(backend: Any) -> bool:
    """Whether it stores and restores; its pages stay."""
    stored = backend.batch_set_v1(KEYS, INDICES)
    return bool(stored == backend.batch_get_v1(KEYS, INDICES) == STORED)


def test_nothing_is_stored_or_served_any_more_and_the_pages_are_gone(start: Callable[[str], Any]) -> None:
    backend = start("1.0")
    assert serves(backend)
    own = backend.served.bound["kv"].digests
    backend.distrust("a test")
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_get_v1(KEYS, INDICES) == backend.batch_set_v1(KEYS, INDICES) == NOTHING
    assert backend._store.count_leading([own[0] + bytes.fromhex(KEYS[0])]) == 0


def test_a_flush_and_new_weights_bring_nothing_back(start: Callable[[str], Any]) -> None:
    backend = start("1.0")
    backend.distrust("a test")
    backend.served.suspended = True
    backend.served.advance_weights_epoch("other")
    backend.served.suspended = False
    assert not serves(backend)


@pytest.mark.parametrize(
    ("runner", "lost"),
    [
        ({"req_to_token_pool": {"mamba_pool": {"_slot_siblings": ["ngram"]}}}, "beside its Mamba slots"),
        ({"token_to_kv_pool": {"use_dsa": True, "full_attention_layer_id_mapping": {3: 0}}}, "DSA"),
    ],
    ids=["side states", "DSA index"],
)
def test_what_an_old_release_loses_in_host_memory_is_not_stored(
    runner: dict[str, Any], lost: str, open_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(facts: Any) -> Any:
        if not isinstance(facts, dict) or 3 in facts:
            return facts
        return SimpleNamespace(**{name: made(value) for name, value in facts.items()})

    target = made(runner)
    assert lost in str(left_out_of_host_memory(target, "0.5.21"))
    assert [left_out_of_host_memory(target, release) for release in ("0.5.22", "0.5.23")] == [None, None]
    fingerprint: Any = None
    monkeypatch.setattr(process, "loaded", [LoadedModel(target, False, fingerprint)])
    monkeypatch.setattr(f"{POOLS}.left_out_of_host_memory", lambda of: left_out_of_host_memory(of, "0.5.21"))
    with pytest.raises(UnsupportedError, match="restored prompts get wrong answers"):
        open_backend(mha_pools(page_size=PAGE_SIZE).host)


def test_layouts_of_v4_whose_pages_have_equal_sizes_share_nothing(
    open_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint: Any = None
    digests = set()
    for layout, compressed in ((None, None), ("v41", None), ("v41_new", None), ("v41", "fp4"), ("v41", "fp8")):
        pool = SimpleNamespace(
            kv_layout=layout and SimpleNamespace(value=layout), compressed_kv_layout_option=compressed
        )
        target = LoadedModel(SimpleNamespace(token_to_kv_pool=pool), False, fingerprint)
        monkeypatch.setattr(process, "loaded", [target])
        digests.add(open_backend(mha_pools(page_size=PAGE_SIZE).host).served.bound["kv"].digests)
    assert len(digests) == 5


def test_a_model_with_plain_attention_loses_nothing() -> None:
    plain = SimpleNamespace(token_to_kv_pool=object(), req_to_token_pool=SimpleNamespace())
    assert left_out_of_host_memory(plain, "0.5.21") is None
    assert left_out_of_host_memory(SimpleNamespace(token_to_kv_pool=SimpleNamespace(use_dsa=True)), "0.5.21") is None
