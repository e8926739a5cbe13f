"""How much of a chain is there: asked of groups of neighbours, so that one record answers for many pages.

Pages written together lie in neighbouring slots, in the order of their chain, and the record of a group names the page
of each of its slots (records.py). So where the first page of a chain is tells where to look for the others: their
records are read one after the other and compared with the chain as a whole. A look-up of its own costs a page 0.38 us,
this 0.06. Where the pages of a chain are scattered it gains nothing, and is left for a while.

A page is in the record of a group exactly when it is in ``pages``; both are seen as of one moment.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import numpy as np

from hicache_ext.envelope import IDENTITY_LENGTH, KEY_LENGTH, PAGE_HASH_LENGTH
from hicache_ext.storage.file.slab.records import GENERATION, HELD, HELD_KEY, PAGE, PLACE, Slab, slots_in_group
from hicache_ext.storage.store import PageKeys

_PORTION = 512
"""Keys prepared at once: a chain that ends early costs no more than that."""
_WORTH_IT = 32
"""Pages that the records of groups must answer for at once to be cheaper than a look-up each."""
_SCATTERED = 4096
"""Pages looked up one by one after a chain whose pages were not neighbours."""

_START = GENERATION.size + IDENTITY_LENGTH
_NAMED = np.dtype([("place", f"V{HELD_KEY.start}"), ("start", f"V{_START}"), ("hash", f"V{PAGE_HASH_LENGTH}")])
"""``HELD``, and in it the key: generation and identity, page hash."""
assert _NAMED.itemsize == HELD.size


class ChainLookups:
    """The look-ups of one index. Thread-safe: what is remembered only chooses between two ways to the same answer."""

    def __init__(self) -> None:
        self._one_by_one = 0

    def count_leading(
        self,
        transaction: Any,
        pages_db: Any,
        groups_db: Any,
        slabs: Mapping[int, Slab],
        generation: bytes,
        keys: PageKeys,
    ) -> int:
        """The leading pages of a chain that are there, as ``transaction`` sees it."""
        start = generation + keys.identity
        count, hashes = len(keys), keys.hashes
        with transaction.cursor(pages_db) as pages, transaction.cursor(groups_db) as groups:
            # Most chains that end do so at once.
            if not count or not pages.set_key(start + hashes[:PAGE_HASH_LENGTH]):
                return 0
            done = 1
            while done < count:
                portion = min(_PORTION, count - done)
                of_portion = hashes[done * PAGE_HASH_LENGTH : (done + portion) * PAGE_HASH_LENGTH]
                found = self._leading_of_portion(pages, groups, slabs, start, of_portion)
                done += found
                if found < portion:
                    break
        return done

    def _leading_of_portion(
        self, pages: Any, groups: Any, slabs: Mapping[int, Slab], start: bytes, hashes: bytes
    ) -> int:
        """``pages`` is at the page before the portion, and at its last one afterwards if all of it is there."""
        count = len(hashes) // PAGE_HASH_LENGTH
        done = 0
        if self._one_by_one <= 0:
            while count - done >= _WORTH_IT:
                following = _following(groups, slabs, pages, start, hashes[done * PAGE_HASH_LENGTH :])
                done += following
                # Behind the last neighbour, or where the next portion begins.
                behind = min(done, count - 1) * PAGE_HASH_LENGTH
                if not pages.set_key(start + hashes[behind : behind + PAGE_HASH_LENGTH]):
                    return done
                if done == count:
                    return count
                done += 1
                if following < _WORTH_IT:
                    self._one_by_one = _SCATTERED
                    break
        self._one_by_one -= count - done
        # Ends at the first key that is not there, and is no step of Python up to it.
        rest = [
            start + hashes[begin : begin + PAGE_HASH_LENGTH]
            for begin in range(done * PAGE_HASH_LENGTH, len(hashes), PAGE_HASH_LENGTH)
        ]
        return done + len(list(takewhile(operator.truth, map(pages.set_key, rest))))


def _following(groups: Any, slabs: Mapping[int, Slab], pages: Any, start: bytes, hashes: bytes) -> int:
    """How many of the pages with ``hashes`` are, in this order, the neighbours behind the page where ``pages`` is."""
    _, number, slot, _, _ = PAGE.unpack(pages.value())
    first = slot - slot % slots_in_group(slabs[number].slot_size)
    if not groups.set_key(PLACE.pack(number, first)):
        return 0
    records = [groups.value()]
    begin = records[0].find(pages.key()) + KEY_LENGTH + GENERATION.size
    if begin % HELD.size:
        return 0
    missing = len(hashes) // PAGE_HASH_LENGTH - (len(records[0]) - begin) // HELD.size
    while missing > 0 and groups.next():
        records.append(groups.value())
        missing -= len(records[-1]) // HELD.size
    neighbours = np.frombuffer(b"".join(records), _NAMED, offset=begin)[: len(hashes) // PAGE_HASH_LENGTH]
    same_start = _common_length(neighbours["start"].tobytes(), start * len(neighbours)) // _START
    return min(same_start, _common_length(neighbours["hash"].tobytes(), hashes) // PAGE_HASH_LENGTH)


def _common_length(some: bytes, others: bytes) -> int:
    """How many bytes are the same, from the first one on; ``some`` are not more."""
    if others.startswith(some):
        return len(some)
    differs = np.frombuffer(some, np.uint8) != np.frombuffer(others, np.uint8, len(some))
    return int(differs.argmax())
