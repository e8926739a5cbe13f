"""The examination of bad pages in an object store: one object at a time, with a client of its own.

No client library deletes on a condition (obstore and the object_store crate have no If-Match for DELETE). Where ETags
are the MD5 of the stored bytes, the ETag must be that of the bytes that arrived; and it must be the same right before
the deletion. A copy written by somebody else within that last round trip is lost, which costs a miss.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

from hicache_ext.errors import NotReadError
from hicache_ext.storage.contract.bad_pages import Removal, Stored, cut
from hicache_ext.storage.tiers.object.client import delete_objects, explain
from hicache_ext.storage.tiers.object.names import page_name


class ObjectMedium:
    """``Medium`` of bad_pages.py."""

    def __init__(
        self,
        obstore: Any,
        reopen: Callable[[], Any],
        hides: Callable[[bytes], bool],
        etags_are_md5: Callable[[], bool],
    ) -> None:
        """``reopen``: another client, with connections of its own. ``hides``: the page is being cleared."""
        self._obstore = obstore
        self._reopen = reopen
        self._hides = hides
        self._etags_are_md5 = etags_are_md5

    def read_again(self, key: bytes, most: int) -> Stored | None:
        if self._hides(key):
            return None
        name = page_name(key)
        try:
            client = self._reopen()
            facts = self._obstore.head(client, name)
            length, version = int(facts["size"]), facts.get("e_tag")
            data = memoryview(bytearray(min(length, most)))
            # Cut, so that damage at a fixed place of every answer meets another place of the object.
            for begin, end in cut(len(data), random.random()):
                whole = end - begin == length
                reply = self._obstore.get(client, name, options={} if whole else {"range": (begin, end)})
                piece = memoryview(reply.bytes())
                if piece.nbytes != end - begin or reply.meta.get("e_tag") != version:
                    raise NotReadError("cut")
                data[begin:end] = piece
        except NotReadError:
            raise
        except Exception as error:  # noqa: BLE001 - a client library's errors end here
            reason = explain(error).reason
            if reason == "absent":
                return None
            raise NotReadError(reason) from None
        return Stored(length, data, version)

    def remove(self, key: bytes, bad: Stored) -> Removal:
        if bad.length == len(bad.data) and self._etags_are_md5() and not is_md5_of(bad.data, bad.version):
            return Removal.DENIED
        name = page_name(key)
        try:
            client = self._reopen()
            if self._hides(key) or self._obstore.head(client, name).get("e_tag") != bad.version:
                return Removal.CHANGED
            delete_objects(self._obstore, client, [name])
        except Exception as error:  # noqa: BLE001 - a client library's errors end here
            reason = explain(error).reason
            if reason == "absent":
                return Removal.CHANGED
            raise NotReadError(reason) from None
        return Removal.REMOVED


def is_md5_of(data: bytes | memoryview, etag: str | None) -> bool:
    return etag is not None and etag.strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest()
