"""A Hypothesis state machine that runs a PageStore beside a dict: any order of calls, never a wrong byte.

A store's test file:

    TestMyStore = page_store_machine(open_my_medium).TestCase

where ``open_my_medium()`` answers a fresh, empty ``Medium``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache_ext.storage.contract import bad_pages
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.file import path_store
from hicache_ext.testing.conformance.medium import Medium
from hicache_ext.testing.conformance.pages import IDENTITY, OTHER_IDENTITY, HostPages, page_key, settle

_SEGMENTS = {IDENTITY: (40, 1, 300), OTHER_IDENTITY: (64,)}
_KEYS = [page_key(number, identity) for identity in _SEGMENTS for number in range(6)]

_keys = st.sampled_from(_KEYS)
_key_lists = st.lists(_keys, max_size=8)


def page_store_machine(open_medium: Callable[[], Medium], *, evicts: bool = False) -> type[RuleBasedStateMachine]:
    """The machine for the stores over the media that ``open_medium`` makes; its ``TestCase`` is what pytest collects.

    ``evicts``: the store may drop pages to stay within its capacity, and refuse some.
    """
    return type("PageStoreMachine", (_PageStoreMachine,), {"open_medium": staticmethod(open_medium), "evicts": evicts})


class _PageStoreMachine(RuleBasedStateMachine):
    open_medium: Callable[[], Medium]
    evicts: bool

    def __init__(self) -> None:
        super().__init__()
        self.medium = type(self).open_medium()
        self.store = self.medium.open()
        self.model: dict[bytes, bytes] = {}
        self.damaged: set[bytes] = set()
        self._unlimited = pytest.MonkeyPatch()
        # Every bad page is one on purpose.
        self._unlimited.setattr(bad_pages, "MOST_REMOVED", 1 << 30)
        self._unlimited.setattr(path_store, "SCRUB_AFTER", math.inf)

    def teardown(self) -> None:
        self._unlimited.undo()
        self.store.close()
        self.medium.close()

    @rule(keys=_key_lists, fill=st.integers(0, 255))
    def set_pages(self, keys: list[bytes], fill: int) -> None:
        """Pages that differ from writer to writer (``fill``): the first one's bytes have to stay."""
        pages = HostPages([_SEGMENTS[key[:16]] for key in keys], fill=fill)
        results = self.store.set(PageBatch(keys, pages.buffers))
        assert len(results) == len(keys)
        before = set(self.model)
        for number, (key, result) in enumerate(zip(keys, results, strict=True)):
            if result is SetResult.STORED:
                assert key not in before or key in self.damaged or self.evicts, "a page was written again"
                self.model[key] = pages.payload(number)
            elif result is SetResult.EXISTS:
                # There already, or a page further on in this batch was the first under its key.
                assert key in before or key in keys[:number] + keys[number + 1 :]
            else:
                assert self.evicts and result is SetResult.REJECTED, result
        self.damaged -= {key for key, result in zip(keys, results, strict=True) if result is SetResult.STORED}
        pages.assert_guards_intact()

    @rule(keys=_key_lists)
    def get_pages(self, keys: list[bytes]) -> None:
        pages = HostPages([_SEGMENTS[key[:16]] for key in keys], fill=0x33)
        results = self.store.get(PageBatch(keys, pages.buffers))
        pages.assert_guards_intact()
        assert len(results) == len(keys)
        settle(self.store)
        # A damaged page that is asked for twice in one batch is CORRUPT at least once, and gone afterwards.
        bad = set(keys) & self.damaged
        for key in bad:
            answers = {result for other, result in zip(keys, results, strict=True) if other == key}
            assert answers <= {GetResult.CORRUPT, GetResult.MISS}, answers
            assert GetResult.CORRUPT in answers or self.evicts
            self._forget(key)
        for number, (key, result) in enumerate(zip(keys, results, strict=True)):
            if result is GetResult.HIT:
                assert pages.payload(number) == self.model[key]
            elif key in self.model:
                assert self.evicts and result is GetResult.MISS, result
                del self.model[key]
            else:
                assert result is GetResult.MISS or key in bad, result

    @rule(keys=_key_lists)
    def contains(self, keys: list[bytes]) -> None:
        present = self.store.contains(keys)
        assert len(present) == len(keys)
        for key, known in zip(keys, present, strict=True):
            if known or not self.evicts:
                assert known == (key in self.model) or key in self.damaged

    @rule(keys=_key_lists)
    def count_leading(self, keys: list[bytes]) -> None:
        count = self.store.count_leading(keys)
        assert all(key in self.model for key in keys[:count])
        if count < len(keys) and not self.evicts:
            assert keys[count] not in self.model or keys[count] in self.damaged

    @rule(keys=st.lists(_keys, max_size=4))
    def remove(self, keys: list[bytes]) -> None:
        removed = self.store.remove(keys)
        if not self.evicts:
            assert removed == len(set(keys) & set(self.model))
        for key in keys:
            self._forget(key)

    @rule(identity=st.sampled_from([None, *_SEGMENTS]))
    def clear(self, identity: bytes | None) -> None:
        self.store.clear(None if identity is None else [identity])
        for key in _KEYS:
            if identity is None or key.startswith(identity):
                self._forget(key)

    @rule(key=_keys, form=st.sampled_from(["cut", "flip", "grow"]), place=st.integers(0, 1 << 20))
    def damage(self, key: bytes, form: str, place: int) -> None:
        stored = self.medium.read(key)
        if stored is None or key in self.damaged:
            return
        position = place % len(stored)
        if form == "cut":
            damaged = stored[:position]
        elif form == "grow":
            damaged = stored + b"\0"
        else:
            damaged = stored[:position] + bytes([stored[position] ^ 0x10]) + stored[position + 1 :]
        self.medium.write(key, damaged)
        self.damaged.add(key)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.medium.open()

    @precondition(lambda self: not self.evicts)
    @invariant()
    def holds_as_many_pages_as_the_dict(self) -> None:
        assert set(self.medium.keys()) <= set(self.model)

    def _forget(self, key: bytes) -> None:
        self.model.pop(key, None)
        self.damaged.discard(key)
