"""The code that numba compiles: the index (slot_code.py), and the work on a batch before the tier (page/batch_code.py).
loading.py gives it.

It is tried on samples and compared with Python first. Reasons: docs/decisions/compiled-code.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from hicache_ext.page import batch_code
from hicache_ext.page.envelope import (
    IDENTITY_LENGTH,
    KEY_LENGTH,
    PAGE_HASH_LENGTH,
)
from hicache_ext.runtime.jit import Function, compiled_kernels
from hicache_ext.storage.tiers.file.slab import miniature_code, slot_code
from hicache_ext.storage.tiers.file.slab.slot_code import ROW_WORDS, WAYS


class CompiledCode:
    """The kernels of slot_code.py and batch_code.py."""

    def __init__(self) -> None:
        """Raises ImportError with what is missing."""
        self.plain_kernels: Mapping[str, Function] = {}
        """The Python functions that the kernels replaced."""
        self.kernels = compiled_kernels(slot_code)
        self.small_kernels = compiled_kernels(miniature_code)
        _check_kernels({**self.kernels, **self.small_kernels})
        self.batch_kernels = compiled_kernels(batch_code)
        _check_batch_kernels(self.batch_kernels)


def _check_kernels(kernels: Mapping[str, Function]) -> None:
    """Raises ImportError when these kernels change a small index differently from slot_code.py."""
    plain = {name: getattr(slot_code, name, None) or getattr(miniature_code, name) for name in kernels}
    if _after_some_changes(kernels) != _after_some_changes(plain):
        raise ImportError("its index is not that of this version: remove the files hicache_ext-*.compiled")


def _check_batch_kernels(kernels: Mapping[str, Function]) -> None:
    """Raises ImportError when these kernels answer differently from batch_code.py."""
    hashes, identity = [os.urandom(PAGE_HASH_LENGTH), os.urandom(PAGE_HASH_LENGTH)], os.urandom(IDENTITY_LENGTH)
    keys, numbers = np.zeros((2, KEY_LENGTH // 8), np.int64), np.zeros(2, np.int64)

    def are_hashes(text: str) -> bool:
        encoded, of_identity = (np.frombuffer(bytearray(some), np.int64) for some in (text.encode(), identity))
        return bool(kernels["decode_hashes"](encoded, of_identity, keys))

    text = batch_code.SEPARATOR.join([page_hash.hex() for page_hash in hashes])
    sound = are_hashes(text) and keys.tobytes() == b"".join([identity + page_hash for page_hash in hashes])
    sound = sound and not any(are_hashes(text[:at] + "G" + text[at + 1 :]) for at in range(len(text)))
    indices = np.arange(64, 80)
    sound = sound and kernels["number_pages"](indices, 8, 10, numbers) == 2 and numbers.tolist() == [8, 9]
    kernels["address_pages"](numbers, np.array([100, 7]), np.array([10, 1]), addresses := np.zeros((2, 2), np.int64))
    sound = sound and addresses.tolist() == [[180, 15], [190, 16]]
    if (
        not sound
        or kernels["number_pages"](indices + 1, 8, 100, numbers)
        or kernels["number_pages"](indices, 8, 8, numbers)
    ):
        raise ImportError("its keys are not those of this version: remove the files hicache_ext-*.compiled")


def _after_some_changes(kernels: Mapping[str, Function]) -> bytes:
    """All words of an index after pages were written, used, evicted, written again, removed and found by a rebuild."""
    slots, size, dead, none = 96, 1 << 20, np.array([77]), np.empty(0, np.int64)
    rows, sets = np.zeros((2 * slots, ROW_WORDS), np.int64), np.zeros((80, WAYS), np.int64)
    header, identities = np.zeros(slot_code.HEADER_WORDS, np.int64), np.zeros((4, slot_code.IDENTITY_WORDS), np.int64)
    header[slot_code.SETS] = header[slot_code.LEVEL] = slot_code.LEAST_SETS
    table = (rows, sets, header, identities)
    slabs = np.array([[3, size, slots, 0, slot_code.READY, slots, 0, 0]])
    slabs_of_size, ghosts = np.zeros(1, np.int64), np.zeros((3, 8, WAYS), np.int64)
    beside, freed = np.array([[-1, -1], [-1, -1], [0, -1]]), np.zeros(8, np.int64)
    needed = np.array([[2, -1], [-1, -1], [-1, -1]])
    keys = np.arange(6 * 200).reshape(200, 6) * 0x123456789ABCDE7
    numbers, answers, pending = np.zeros(1, np.int64), [], slot_code.PENDING | 55 << 8
    rows[:slots, slot_code.STATE] = slot_code.FREE
    events, small = np.zeros((16, 2), np.int64), np.zeros(miniature_code.SMALL_WORDS, np.int64)
    entries = np.zeros((miniature_code.ENTRY_WORDS, 4, WAYS), np.int64)
    located, facts, looked_up = np.zeros((5, 200), np.int64), np.zeros(3, np.int64), np.zeros(200, np.int64)
    for ticket, (first, many) in enumerate(((0, 60), (50, 60), (10, 80))):
        ranks, victims = np.zeros(slots, np.int64), np.zeros(slots + 1, np.int64)
        answers.append(kernels["sample"](rows, identities, slabs, ticket, 2, 5, dead, ranks))
        cold, cool = np.sort(ranks[: answers[-1]])[[3, 12]].tolist()
        answers.append(kernels["coldest"](rows, identities, 0, slots, 16, cold, cool, 5, dead, victims))
        answers.append(kernels["evict"](*table, victims, none, slots, 5, dead, ghosts))
        slabs[0, slot_code.FREE_SLOTS] = slots
        taken = np.full(many, -1)
        done = kernels["take_free"](rows, slabs, slabs, slabs_of_size, pending, ticket, 4096, taken)
        taken, published, at = taken[:done].copy(), np.zeros(done, np.int64), np.arange(first, first + done)
        parts = keys, numbers, at, taken, at + 4096, pending, ticket, 10 + ticket, 5
        answers.append(kernels["publish"](*table, *parts, slots, ghosts, 1000, published, events, 1 << 18))
        answers.append(kernels["give_back"](rows, taken, pending, ticket))
        answers.append(kernels["grow_sets"](rows, sets, header, 66 + 5 * ticket))
        answers.append(kernels["locate"](*table, keys, numbers, 11, slabs, located, facts))
        answers.append(kernels["find"](*table, keys, numbers, 0, looked_up, 0))
        answers.append(kernels["touch"](rows, header, slots, looked_up[first:].copy(), events, 1 << 18))
        answers.append(kernels["learn"](header, small, entries, events, 20, 1 << 18, slots, 11))
        header[slot_code.POLICY], header[slot_code.TO_RANK] = ticket, slots
        answers.append(kernels["rank_again"](rows, header, slots, slots // 2))
        gone = rows[looked_up[::7], slot_code.HASH], np.full(29, slot_code.PAGE | 2 << slot_code.NUMBER_SHIFT)
        answers.append(kernels["evict_beside"](*table, *gone, beside, needed, 5, ghosts, freed))
        answers.append(kernels["seize"](*table, looked_up[::9].copy(), pending, 99))
    seals = np.arange(2 * slots).reshape(slots, 2)
    found = keys[80 : 80 + slots].copy(), np.zeros(slots, np.int64), np.arange(slots), np.full(slots, 12), seals
    answers.append(kernels["adopt"](*table, *found, slots, size, 20))
    counts = np.zeros(4, np.int64)
    answers.append(kernels["count"](rows, identities, 0, 2 * slots, 11, counts))
    words = [
        *table,
        slabs,
        ghosts,
        events,
        small,
        entries,
        freed,
        located,
        facts,
        looked_up,
        counts,
        np.array(answers, np.int64),
    ]
    return b"".join(part.tobytes() for part in words)
