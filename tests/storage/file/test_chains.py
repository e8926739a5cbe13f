"""Chains looked up by groups of neighbours answer what a look-up of every page answers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hicache_ext.storage.file.slab import chains
from hicache_ext.storage.file.slab.index import SlabIndex
from hicache_ext.storage.file.slab.store import SlabStore
from hicache_ext.storage.store import PageKeys
from hicache_ext.testing.conformance.pages import IDENTITY, page_keys, store_pages

MIB = 1 << 20
SIZES = (4096,)


def leading_one_by_one(store: SlabStore, keys: list[bytes]) -> int:
    present = store.contains(keys)
    return present.index(False) if False in present else len(present)


def chain_of(keys: list[bytes]) -> PageKeys:
    return PageKeys(IDENTITY, b"".join(key[len(IDENTITY) :] for key in keys))


def store_chain(store: SlabStore, keys: list[bytes]) -> None:
    for first in range(0, len(keys), 128):
        store_pages(store, keys[first : first + 128], SIZES)


@pytest.fixture
def store(tmp_path: Path):  # type: ignore[no-untyped-def]
    store = SlabStore("disk", tmp_path, capacity=64 * MIB)
    yield store
    store.close()


@pytest.mark.parametrize("length", [0, 1, 2, 31, 32, 33, 34, 127, 128, 129, 512, 513, 514, 545, 1024, 1500])
def test_a_chain_of_which_so_many_pages_are_there_has_that_many(store: SlabStore, length: int) -> None:
    keys = page_keys(1500, "chain")
    store_chain(store, keys[:length])
    assert store.count_leading(chain_of(keys)) == length
    assert store.count_leading(chain_of(keys[:length])) == length


@pytest.mark.parametrize("gone", [0, 1, 5, 40, 300, 511, 512, 513, 1499])
def test_a_chain_with_a_gap_ends_there(store: SlabStore, gone: int) -> None:
    keys = page_keys(1500, "chain")
    store_chain(store, keys)
    store.remove([keys[gone]])
    assert store.count_leading(chain_of(keys)) == gone
    # The slot goes to a page of another chain, which is then the neighbour.
    store_pages(store, page_keys(1, "stranger"), SIZES)
    assert store.count_leading(chain_of(keys)) == gone
    store_pages(store, [keys[gone]], SIZES)
    assert store.count_leading(chain_of(keys)) == len(keys)


def test_neighbours_of_another_identity_or_generation_are_no_pages_of_the_chain(store: SlabStore) -> None:
    hashes = [key[len(IDENTITY) :] for key in page_keys(200, "chain")]
    other = bytes(reversed(IDENTITY))
    store_pages(store, [IDENTITY + page_hash for page_hash in hashes[:100]], SIZES)
    store_pages(store, [other + page_hash for page_hash in hashes[100:]], SIZES)
    assert store.count_leading(PageKeys(IDENTITY, b"".join(hashes))) == 100
    store.clear([IDENTITY])
    assert store.count_leading(PageKeys(IDENTITY, b"".join(hashes))) == 0
    store_pages(store, [IDENTITY + page_hash for page_hash in hashes[:1]], SIZES)
    assert store.count_leading(PageKeys(IDENTITY, b"".join(hashes))) == 1


def test_a_chain_of_neighbours_is_answered_by_their_groups_alone(
    store: SlabStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would notice that the short way is never taken."""
    followed: list[int] = []
    real = chains._following

    def counting(*arguments):  # type: ignore[no-untyped-def]
        followed.append(real(*arguments))
        return followed[-1]

    monkeypatch.setattr(chains, "_following", counting)
    keys = page_keys(512, "chain")
    store_chain(store, keys)
    assert store.count_leading(chain_of(keys)) == 512
    assert followed == [511]


def test_in_a_full_directory_the_answer_is_the_same_as_page_by_page(tmp_path: Path) -> None:
    """Slots are taken, evicted and removed in any order; some chains are whole, some scattered, some have gaps."""
    random.seed(7)
    store = SlabStore("disk", tmp_path, capacity=12 * MIB)
    written: list[list[bytes]] = []
    for number in range(60):
        keys = page_keys(random.choice([3, 40, 150, 400]), f"chain {number}")
        store_chain(store, keys[: random.randint(0, len(keys))])
        written.append(keys)
        store.remove(random.sample(random.choice(written), 2))
        for chain in random.sample(written, min(8, len(written))):
            # Half of the time as if nothing had been found to be scattered before.
            if random.random() < 0.5:
                index: SlabIndex = store._directory.index
                index._chains = chains.ChainLookups()
            assert store.count_leading(chain_of(chain)) == leading_one_by_one(store, chain)
    assert store._directory.index.check() == []
    store.close()
