"""The examination of bad pages in a Mooncake pool: one object at a time, into memory that no read uses.

The library opens its connections itself and cannot remove on a condition. So a page counts as bad when two reads, into
different memory and in different pieces, gave the same bad bytes. A copy written by somebody else in the milliseconds
before the removal is lost, which costs a miss.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from hicache_ext.errors import NotReadError, StoreClosedError
from hicache_ext.storage.contract.bad_pages import Removal, Stored, cut
from hicache_ext.storage.tiers.mooncake import engine
from hicache_ext.storage.tiers.mooncake.attachment import Attachment, address_of
from hicache_ext.storage.tiers.mooncake.holders import Holders
from hicache_ext.storage.tiers.mooncake.transfers import HEADER_LENGTH, PIECE_BYTES, ScratchPool


class MooncakeMedium:
    """``Medium`` of bad_pages.py."""

    def __init__(
        self,
        attachment: Attachment,
        holders: Holders,
        object_name: Callable[[bytes], str],
        hides: Callable[[bytes], bool],
    ) -> None:
        """``hides``: the page is being cleared."""
        self._attachment = attachment
        self._holders = holders
        self._object_name = object_name
        self._hides = hides
        self._scratch = ScratchPool(attachment)

    def read_again(self, key: bytes, most: int) -> Stored | None:
        if self._hides(key):
            return None
        name = self._object_name(key)
        size = self._ask(lambda client: client.get_size(name))
        if size == engine.NOT_FOUND:
            return None
        if not 0 < size <= most:
            # The library cannot read a part of an object.
            raise NotReadError(engine.reason_of(size) if size < 0 else "length")
        with self._scratch.lent(max(0, size - HEADER_LENGTH)) as scratch:
            memory = scratch.memory[:size]
            base = address_of(memory)
            pieces = [
                (place, min(place + PIECE_BYTES, end))
                for begin, end in cut(size, random.random())
                for place in range(begin, end, PIECE_BYTES)
            ]
            places = [base + begin for begin, _ in pieces]
            sizes = [end - begin for begin, end in pieces]
            # Set before the call, reset if it ends in time: it may be left behind with the memory.
            scratch.left_behind = True
            code = self._ask(
                lambda client: client.batch_get_into_multi_buffers([name], [places], [sizes])[0],
                at_last=lambda: self._scratch.give_back(scratch),
                explain=lambda: self._holders.look_into([name]),
            )
            scratch.left_behind = False
            if code == engine.NOT_FOUND:
                return None
            if code != size:
                raise NotReadError(engine.reason_of(code) if code < 0 else "length")
            return Stored(size, memoryview(bytes(memory)))

    def remove(self, key: bytes, bad: Stored) -> Removal:
        name = self._object_name(key)
        if self._hides(key) or self._ask(lambda client: client.get_size(name)) != bad.length:
            return Removal.CHANGED
        # Forced: the read has just taken a lease.
        code = self._ask(lambda client: client.batch_remove([name], True)[0])
        if code not in (engine.OK, engine.NOT_FOUND):
            raise NotReadError(engine.reason_of(code))
        return Removal.REMOVED

    def _ask(
        self,
        call: Callable[[Any], int],
        at_last: Callable[[], None] = lambda: None,
        explain: Callable[[], bool] | None = None,
    ) -> int:
        """The code of one call of the library, with the rest as in ``call_bounded``. Raises NotReadError."""
        try:
            with self._attachment.client() as client:
                if client is None:
                    at_last()
                    raise NotReadError("away")
                deadline = time.monotonic() + self._attachment.engine.tier.longest_call
                code = self._attachment.call_bounded(lambda: call(client), deadline, at_last, explain=explain)
        except StoreClosedError:
            at_last()
            raise NotReadError("closed") from None
        if code is None:
            raise NotReadError("timeout")
        self._attachment.report(code)
        return code
