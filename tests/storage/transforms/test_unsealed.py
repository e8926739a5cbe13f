"""Pages without a seal in a sealed tier: never served, and counted in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from hicache_ext.page.transforms.sealing import SealMode
from hicache_ext.storage.contract.store import GetResult
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import page_keys, read_pages, store_pages
from tests.storage.transforms.rig import AUTHENTICATE, ENCRYPT, SIZES, Attacked
from tests.waiting import wait_until

BOTH = pytest.mark.parametrize("mode", [AUTHENTICATE, ENCRYPT], ids=["authenticate", "encrypt"])


@BOTH
@pytest.mark.parametrize("asks", ["get", "contains", "count_leading"])
@pytest.mark.parametrize("ids", [("new",), ("new", "old")], ids=["one key", "two keys"])
def test_unsealed_pages_are_misses_and_counted_by_reads_and_look_ups(
    mode: SealMode, asks: str, ids: tuple[str, ...]
) -> None:
    """SGLang reads no page of which a look-up says that it is missing."""
    attacked, keys = Attacked(mode, *ids), page_keys(5)
    store_pages(MemoryPageStore(objects=attacked.objects), keys[:3], SIZES)
    if asks == "get":
        assert read_pages(attacked.store, keys, SIZES)[0] == [GetResult.MISS] * 5
    elif asks == "contains":
        assert attacked.store.contains(keys) == [False] * 5
    else:
        assert attacked.store.count_leading(keys) == 0
    wait_until(lambda: attacked.store.metrics.total("unsealed") == 3)


def test_a_look_up_does_not_wait_for_a_look_for_unsealed_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    attacked, keys = Attacked(AUTHENTICATE), page_keys(5)
    asked, go_on = threading.Event(), threading.Event()
    real = MemoryPageStore.contains

    def contains(store: MemoryPageStore, names: Sequence[bytes]) -> list[bool]:
        if keys[0] in names:
            asked.set()
            assert go_on.wait(30)
        return real(store, names)

    monkeypatch.setattr(MemoryPageStore, "contains", contains)
    assert attacked.store.contains(keys) == [False] * 5
    assert asked.wait(30)
    assert attacked.store.contains(keys) == [False] * 5
    go_on.set()
    attacked.store.close()


def test_where_no_unsealed_pages_are_they_are_not_looked_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    attacked, keys, asked = Attacked(AUTHENTICATE), page_keys(5), []
    real = MemoryPageStore.contains

    def contains(store: MemoryPageStore, names: Sequence[bytes]) -> list[bool]:
        asked.append(keys[0] in names)
        return real(store, names)

    monkeypatch.setattr(MemoryPageStore, "contains", contains)
    attacked.store.contains(keys)
    wait_until(lambda: True in asked)
    for _ in range(20):
        attacked.store.contains(keys)
    time.sleep(0.05)
    assert asked.count(True) == 1
