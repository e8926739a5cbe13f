"""An index of pages without files, and what its tests do with it again and again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from hicache_ext.storage.contract.store import PageKeys
from hicache_ext.storage.tiers.file.slab import index_words
from hicache_ext.storage.tiers.file.slab.index import SlabIndex
from hicache_ext.storage.tiers.file.slab.index_words import Words
from hicache_ext.storage.tiers.file.slab.shapes import Slab, SlotReferences
from tests.rigs.bare_index import counts

A, B = bytes(range(16)), bytes(range(16, 32))
SMALL, MIDDLE, LARGE = 4096, 1 << 20, 3 << 20
"""Of 32, 2 and 1 slots in a group."""
CAPACITY = 1 << 20
"""An index for so many bytes has 65536 rows, the least there are."""
NOTHING = np.empty(0, np.int64)


def key_of(number: int, identity: bytes = A) -> bytes:
    return identity + hashlib.sha256(b"%d" % number).digest()


def keys_of(numbers: Sequence[int], identity: bytes = A) -> PageKeys:
    return PageKeys.of_joined(identity, b"".join(key_of(number)[16:] for number in numbers))


def add_slab(index: SlabIndex, slot_size: int = SMALL, slots: int = 40) -> Slab:
    slab = index.begin_slab(slot_size, lambda _: slots)
    assert slab is not None
    index.finish_slab(slab)
    return slab


def take(
    index: SlabIndex,
    count: int,
    slot_size: int = SMALL,
    *,
    spared: Words = NOTHING,
    oldest: int = 0,
    evict: bool = True,
    tenancy: Words | None = None,
) -> tuple[int, Words, int]:
    """The ticket, the rows and the number of pages evicted."""
    ticket = index.next_ticket()
    rows, _, evicted, beside = index.take(slot_size, count, ticket, oldest, spared, evicting=evict, tenancy=tenancy)
    return ticket, rows, len(evicted) + beside


def references(rows: Words, positions: Words, lengths: Words | int = 1000) -> SlotReferences:
    unknown = np.zeros(len(rows), np.int64)
    return SlotReferences(unknown, unknown, np.broadcast_to(lengths, len(rows)).copy(), positions, rows)


def publish(
    index: SlabIndex,
    ticket: int,
    keys: Sequence[bytes],
    rows: Words,
    *,
    now: int = 1000,
    oldest: int = 0,
    tenant: int = 0,
) -> list[int]:
    """The first of these pages into these rows."""
    written = references(rows, np.arange(len(rows)))
    return index.publish(ticket, keys, written, written, oldest, now, tenant)


def store(
    index: SlabIndex,
    keys: Sequence[bytes],
    slot_size: int = SMALL,
    *,
    now: int = 1000,
    oldest: int = 0,
    spared: Words = NOTHING,
    evict: bool = True,
    tenancy: Words | None = None,
) -> list[int]:
    index.register([key[:16] for key in keys])
    ticket, rows, _ = take(index, len(keys), slot_size, spared=spared, oldest=oldest, evict=evict, tenancy=tenancy)
    tenant = 0 if tenancy is None else int(tenancy[index_words.WRITER])
    return publish(index, ticket, keys, rows, now=now, oldest=oldest, tenant=tenant)


def remove(index: SlabIndex, keys: Sequence[bytes]) -> int:
    """As the store does: until the header is gone, the slot stays this process'."""
    ticket = index.next_ticket()
    seized = index.seize(keys, ticket)
    index.give_back(seized.rows, ticket)
    return len(seized)


def present(index: SlabIndex, keys: Sequence[bytes], oldest: int = 0) -> list[int]:
    return [position for position, there in enumerate(index.contains(keys, oldest)) if there]


def hash_words(keys: Sequence[bytes]) -> Words:
    return np.unique(index_words.hashes_of(PageKeys.of_joined(A, b"".join(key[16:] for key in keys)).words))


def states(index: SlabIndex, slab: Slab) -> Words:
    rows: Words = index.memory.rows[slab.first_row : slab.first_row + slab.slots, index_words.STATE]
    return rows & index_words.STATES


def assert_no_slot_lost(index: SlabIndex) -> None:
    of_kinds = counts(index)
    total = sum(slab.slots for slab in index.view().slabs.values())
    assert of_kinds["pages"] + of_kinds["free"] + of_kinds["pending"] + of_kinds["unknown"] == total


class Members:
    """Stands for the processes on a directory: any number of them in one."""

    def __init__(self) -> None:
        self.id = 1
        self.dead: set[int] = set()

    def is_alive(self, member: int) -> bool:
        return member not in self.dead


def members_of(index: SlabIndex) -> Members:
    """From now on the index has these, and its own process is number 1."""
    members: Any = Members()
    index._members = members
    join(index, 1)
    return members


def join(index: SlabIndex, member: int) -> None:
    """This process is another one from now on."""
    index._members.id = member  # type: ignore[misc]
    index.join()
