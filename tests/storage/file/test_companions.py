"""Pages of one prefix position go together: a state, an index page or a draft is of no use without the KV."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hicache_ext.page.identity import KV_POOL, ModelIdentity, PageIdentity, PoolIdentity, Shard
from hicache_ext.storage.tiers.file.pages.tree import save_document
from hicache_ext.storage.tiers.file.slab import allocator as companions_module
from hicache_ext.storage.tiers.file.slab.allocator import Companions, Facts
from hicache_ext.storage.tiers.file.slab.index import SlabIndex
from hicache_ext.storage.tiers.file.slab.index_words import PRIORITY
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import store_pages
from tests.storage.file.indexes import (
    LARGE,
    MIDDLE,
    SMALL,
    A,
    B,
    add_slab,
    assert_no_slot_lost,
    hash_words,
    key_of,
    keys_of,
    present,
    remove,
    store,
    take,
)
from tests.storage.file.test_index_eviction import fill_with_heads, gone

MIB = 1 << 20
C = bytes(range(32, 48))


def identity(pool: str = KV_POOL, *, model: str = "m", tp: tuple[int, int] = (0, 1)) -> PageIdentity:
    return PageIdentity(ModelIdentity(model), PoolIdentity(pool, "", "", "", 16, (100,)), Shard(tp=tp))


def needs(one: PageIdentity, other: PageIdentity) -> bool:
    facts = [Facts.of(each.document()) for each in (one, other)]
    assert facts[0] is not None and facts[1] is not None
    return facts[0].needs(facts[1])


# -- which -------------------------------------------------------------------------------------------------------------


def test_pages_beside_the_kv_need_the_kv_of_their_model_and_the_kv_needs_none_of_them() -> None:
    for pool in ("swa", "mamba", "indexer", "draft"):
        assert needs(identity(pool), identity())
        assert not needs(identity(), identity(pool))
        assert not needs(identity(pool), identity("other"))
        assert not needs(identity(pool), identity(model="another"))


def test_pages_need_the_kv_of_servers_with_as_many_ranks() -> None:
    assert needs(identity("mamba", tp=(0, 2)), identity(tp=(1, 2)))
    assert not needs(identity("mamba", tp=(0, 2)), identity(tp=(0, 4)))
    assert not needs(identity(tp=(0, 2)), identity(tp=(1, 2)))


def test_a_latent_kv_that_all_ranks_share_is_needed_by_the_draft_of_each() -> None:
    assert needs(identity("draft", tp=(3, 4)), identity(tp=(0, 1)))


@pytest.mark.parametrize("part", ["model", "pool", "shard"])
def test_an_identity_whose_document_says_too_little_needs_nothing(part: str) -> None:
    document = identity().document()
    assert Facts.of({**document, part: 7}) is None
    assert Facts.of({name: value for name, value in document.items() if name != part}) is None
    assert Facts.of({**document, "shard": {"tp": [0]}}) is None
    assert Facts.of({**document, "shard": {"tp": [0, float("inf")]}}) is None


def test_a_document_that_comes_late_is_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "identities").mkdir()
    kv, state = identity(), identity("mamba")
    save_document(tmp_path, kv.digest(), kv.document())
    companions = Companions(tmp_path)
    known = [kv.digest(), state.digest()]
    before = companions.of(known)
    assert before == {kv.digest(): []}
    save_document(tmp_path, state.digest(), state.document())
    assert companions.of(known) is before
    monkeypatch.setattr(companions_module, "_MISSING_INTERVAL", 0.0)
    assert companions.of(known) == {kv.digest(): [state.digest()]}


def test_documents_that_are_lost_keep_nobody_from_their_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(companions_module, "_MISSING_INTERVAL", 0.0)
    (tmp_path / "identities").mkdir()
    kv, state = identity(), identity("mamba")
    save_document(tmp_path, kv.digest(), kv.document())
    companions = Companions(tmp_path)
    lost = [number.to_bytes(16, "big") for number in range(companions_module._AT_ONCE + 44)]
    known = [*lost, kv.digest(), state.digest()]
    for _ in range(4):
        companions.of(known)
    save_document(tmp_path, state.digest(), state.document())
    for _ in range(4):
        found = companions.of(known)
    assert found == {kv.digest(): [state.digest()]}


# -- in the index ------------------------------------------------------------------------------------------------------


def test_an_evicted_page_takes_its_companions_with_it_and_nothing_else(index: SlabIndex) -> None:
    add_slab(index, LARGE, 20)
    add_slab(index, MIDDLE, 20)
    add_slab(index, SMALL, 20)
    kv = fill_with_heads(index, 20, LARGE)
    states, others = keys_of(range(0, 20, 2), B), keys_of(range(20), C)
    store(index, states, MIDDLE)
    store(index, others, SMALL)
    index.set_dependents({A: [B]})
    assert take(index, 4, LARGE)[2] == 6
    assert gone(index, kv) == [0, 1, 2, 3]
    assert gone(index, list(states)) == [0, 1]
    assert gone(index, list(others)) == []
    assert_no_slot_lost(index)
    # Their slots are free: ten were never used.
    assert len(take(index, 12, MIDDLE, evict=False)[1]) == 12


def test_a_page_that_stays_keeps_its_companions(index: SlabIndex) -> None:
    add_slab(index, LARGE, 4)
    add_slab(index, MIDDLE, 4)
    kv = fill_with_heads(index, 4, LARGE)
    store(index, keys_of(range(4), B), MIDDLE)
    index.set_dependents({A: [B]})
    assert take(index, 1, LARGE, spared=hash_words([key_of(0)]))[2] == 2
    here = present(index, kv)
    assert here == present(index, keys_of(range(4), B)) and len(here) == 3 and 0 in here


def test_what_is_evicted_beside_the_kv_leaves_the_kv(index: SlabIndex) -> None:
    add_slab(index, LARGE, 4)
    add_slab(index, MIDDLE, 4)
    kv = fill_with_heads(index, 4, LARGE)
    store(index, keys_of(range(4), B), MIDDLE)
    index.set_dependents({A: [B]})
    assert take(index, 2, MIDDLE)[2] == 2
    assert gone(index, kv) == []


def test_cleared_pages_take_nothing_with_them(index: SlabIndex) -> None:
    add_slab(index, LARGE, 4)
    add_slab(index, MIDDLE, 4)
    fill_with_heads(index, 4, LARGE)
    store(index, keys_of(range(4), B), MIDDLE)
    index.set_dependents({A: [B]})
    index.clear([A])
    assert take(index, 4, LARGE)[2] == 0
    assert present(index, keys_of(range(4), B)) == [0, 1, 2, 3]


def test_companions_that_are_not_there_or_not_known_change_nothing(index: SlabIndex) -> None:
    add_slab(index, LARGE, 4)
    fill_with_heads(index, 4, LARGE)
    index.set_dependents({A: [B, C], C: [A], bytes(16): [A]})
    assert take(index, 1, LARGE)[2] == 1
    store(index, keys_of(range(4), B), LARGE)
    remove(index, keys_of(range(4), B))
    assert_no_slot_lost(index)


def test_a_slab_that_is_taken_away_takes_the_companions_of_its_pages(index: SlabIndex) -> None:
    slab = add_slab(index, LARGE, 4)
    add_slab(index, LARGE, 4)
    add_slab(index, MIDDLE, 8)
    fill_with_heads(index, 8, LARGE)
    store(index, keys_of(range(8), B), MIDDLE)
    index.set_dependents({A: [B]})
    assert index.drop_slab(slab)
    assert present(index, keys_of(range(8), B)) == [4, 5, 6, 7]
    assert_no_slot_lost(index)


def test_free_slots_cost_a_pool_its_slab_only_when_most_are_free(index: SlabIndex) -> None:
    """Slots of companions that went were taken for the coldest of all, and their slab given to the KV."""
    states = add_slab(index, MIDDLE, 20)
    add_slab(index, LARGE, 20)
    store(index, keys_of(range(20), B), MIDDLE)
    kv = fill_with_heads(index, 20, LARGE, first=100)
    index.memory.rows[index.rows_of(keys_of(range(20), B)), PRIORITY] += 1 << 20
    assert index.colder_slabs(LARGE, 0) == []
    remove(index, keys_of(range(10), B))
    assert index.colder_slabs(LARGE, 0) == []
    remove(index, keys_of(range(10, 17), B))
    assert index.colder_slabs(LARGE, 0) == [states]
    assert gone(index, kv) == []


def test_free_slots_of_its_own_keep_no_size_from_a_slab(index: SlabIndex) -> None:
    """They come and go with every batch: a model that is gone kept its slabs for ever."""
    left = add_slab(index, MIDDLE, 20)
    add_slab(index, LARGE, 20)
    store(index, keys_of(range(20), B), MIDDLE)
    kv = fill_with_heads(index, 20, LARGE, first=100)
    index.memory.rows[index.rows_of(kv), PRIORITY] += 1 << 20
    remove(index, kv[:3])
    assert index.colder_slabs(LARGE, 0) == [left]


def test_a_slab_that_is_needed_is_given_whatever_it_is_worth(index: SlabIndex) -> None:
    """All pages of this size are pinned, say: writes were rejected for ever."""
    others = add_slab(index, MIDDLE, 20)
    add_slab(index, LARGE, 2)
    fill_with_heads(index, 2, LARGE)
    fill_with_heads(index, 20, MIDDLE, first=100)
    assert index.colder_slabs(LARGE, 0) == []
    assert index.colder_slabs(LARGE, 0, needed=True) == [others]


def test_a_companion_stays_while_another_page_of_kv_has_its_place(index: SlabIndex) -> None:
    """Servers with another layout or number of ranks may share the states; their KV is there still."""
    for size in (LARGE, MIDDLE, SMALL):
        add_slab(index, size, 4)
    kv = fill_with_heads(index, 4, LARGE)
    store(index, keys_of(range(4), B), MIDDLE)
    store(index, keys_of(range(2), C), SMALL)
    index.set_dependents({A: [B], C: [B]})
    assert take(index, 4, LARGE)[2] == 4 + 2
    assert gone(index, kv) == [0, 1, 2, 3]
    assert present(index, keys_of(range(4), B)) == [0, 1]
    remove(index, keys_of(range(1), C))
    assert present(index, keys_of(range(4), B)) == [0, 1], "what is removed as damaged is written again"


def test_what_expired_takes_nothing_with_it(index: SlabIndex) -> None:
    """SGLang writes states before the KV, and the expired KV goes for the new one."""
    add_slab(index, LARGE, 4)
    add_slab(index, MIDDLE, 4)
    store(index, keys_of(range(4)), LARGE, now=1000)
    store(index, keys_of(range(4), B), MIDDLE, now=3000, oldest=2000)
    index.set_dependents({A: [B]})
    assert store(index, keys_of(range(4)), LARGE, now=3000, oldest=2000) == [1] * 4
    assert present(index, keys_of(range(4), B), oldest=2000) == [0, 1, 2, 3]


# -- in a tier ---------------------------------------------------------------------------------------------------------


def chain(store: SlabStore, kv: PageIdentity, beside: PageIdentity, hashes: Sequence[bytes]) -> None:
    store_pages(store, [beside.digest() + hashes[-1]], (64 << 10,))
    store_pages(store, [kv.digest() + page for page in hashes], (16 << 10,))


@pytest.mark.parametrize("restarts", [False, True])
def test_no_state_outlives_the_kv_of_its_position(tmp_path: Path, restarts: bool) -> None:
    kv, state = identity(), identity("mamba")
    chance = random.Random(5)

    def opened() -> SlabStore:
        store = SlabStore("disk", tmp_path, capacity=8 * MIB)
        for each in (kv, state):
            store.register_identity(each.digest(), each.document())
        return store

    store, ends = opened(), []
    for number in range(120):
        hashes = [key_of(1000 * number + page)[16:] for page in range(chance.randrange(1, 24))]
        chain(store, kv, state, hashes)
        ends.append(hashes[-1])
        if restarts and number % 40 == 20:
            store.close()
            store = opened()
            assert store.wait_until_rebuilt(30)
    states = store.contains([state.digest() + end for end in ends])
    of_kv = store.contains([kv.digest() + end for end in ends])
    store.close()
    assert 5 < sum(states) < 100
    assert all(np.array(of_kv)[states])
