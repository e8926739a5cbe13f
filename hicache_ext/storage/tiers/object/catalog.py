"""The catalog of packs in an object store, learnt from listings of each identity.

An identity is listed completely when its first page is requested, and every few minutes after that in the background:
this detects packs expired by a lifecycle rule, and packs whose writers' clocks are wrong. Listings in between start
somewhat before the last one (``refresh``): ids of packs and tombstones rise with time, by the store's clock if known.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hicache_ext.page.pack import Pack, Tombstone, milliseconds_of, new_id, parse_pack, parse_tombstone
from hicache_ext.runtime.background import RETRY, BackgroundLoop, Retry
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.storage.contract.pack_index import PackIndex, Place
from hicache_ext.storage.contract.store import by_identity, put_back
from hicache_ext.storage.tiers.object.client import Requests

logger = logging.getLogger(__name__)

# -- names -------------------------------------------------------------------------------------------------------------
#
# The names of objects below a tier's prefix:
#
#     packs/<identity digest, in hex>/<first 7 digits of the id>/<name of a pack or a tombstone, as in page/pack.py>
#     identities/<identity digest>.json
#
# The first 7 digits of an id are its time in units of 65.5 seconds: if a listing cannot start at an offset, recent
# objects are listed by these digits.


PACKS = "packs"
IDENTITIES = "identities"
_PACKED = re.compile(r"packs/([0-9a-f]{32})/([0-9a-f]{7})/(\2.*)", re.ASCII | re.DOTALL)
_UNIT_DIGITS = 7
_UNIT = 1 << 16
"""Milliseconds."""
LONGEST_NAME = 1024
"""Bytes, the tier's prefix included."""
_IDENTITY = re.compile(r"identities/([0-9a-f]{32})\.json", re.ASCII)


def packed_name(digest: bytes, item: Pack | Tombstone) -> str:
    """Return the object name of a pack or a tombstone."""
    return f"{packs_of(digest)}/{item.id[:_UNIT_DIGITS]}/{item.name}"


def packed(name: str) -> tuple[bytes, Pack | Tombstone] | None:
    """Return the identity and the pack or tombstone that ``name`` denotes; None for any other object."""
    found = _PACKED.fullmatch(name)
    if found is None:
        return None
    item = parse_pack(found[3]) or parse_tombstone(found[3])
    return None if item is None else (bytes.fromhex(found[1]), item)


def packs_of(digest: bytes) -> str:
    """Return the prefix of all packs of an identity."""
    return f"{PACKS}/{digest.hex()}"


def identity_name(digest: bytes) -> str:
    """Return the object name of an identity's document."""
    return f"{IDENTITIES}/{digest.hex()}.json"


def digest_of_identity(name: str) -> bytes | None:
    """Return the identity that the object ``name`` describes; None for any other object."""
    found = _IDENTITY.fullmatch(name)
    return bytes.fromhex(found.group(1)) if found else None


LISTED_AT_ONCE = 1000
MOST_LISTED = 10_000_000
"""Maximum names in one listing: a faulty store may list endlessly."""
_CLOCKS_APART = 10.0
"""Seconds by which writers' clocks may differ if the store's clock is unknown. A listing goes back by these and by the
time that a write may take."""
_WHOLE_EVERY = 300.0
"""Seconds between complete listings of an identity."""
_IN_USE = 1800.0
"""Seconds after the last request for an identity during which it is still listed."""
_MOST_UNITS = 4
"""Maximum listings by unit of time if a listing cannot start at an offset; for a longer time everything is listed."""

_Listed = tuple[Pack | Tombstone, int]
"""A pack or tombstone and the size of its object in bytes."""


@dataclass(eq=False, slots=True)
class KnownPacks:
    """The known packs of one identity."""

    index: PackIndex = field(default_factory=PackIndex)
    """Replaced by ``reset``: results of a listing that began before then go to the old index and are lost with it."""
    whole: bool = False
    """Whether the identity has been listed completely."""
    listed_at: float = 0.0
    """Start of the last successful listing, by the store's clock."""
    whole_at: float = 0.0
    """Start of the last complete listing, by time.monotonic()."""
    used_at: float = 0.0
    listing: threading.Lock = field(default_factory=threading.Lock)
    """Held during a complete listing."""


class PackCatalog:
    """The known packs of all identities. Threads: any. Methods that make requests raise obstore's errors."""

    def __init__(self, requests: Requests, *, lists_from: bool) -> None:
        """``lists_from``: whether the store can start a listing at an offset."""
        self._requests = requests
        self._lists_from = lists_from
        self._known: dict[bytes, KnownPacks] = {}
        self._lock = threading.Lock()
        self._log = LimitedLog(logger)
        self._loop = BackgroundLoop(f"hicache-{requests.name}-packs", self._list_again)

    def new_id(self, after: str | None = None) -> str:
        return new_id(int(self._requests.now() * 1000), after)

    @property
    def _margin(self) -> float:
        return self._requests.timeout + _CLOCKS_APART

    # -- known packs -----------------------------------------------------------------------------------------------

    def of(self, digest: bytes) -> KnownPacks:
        """Return the known packs of an identity and mark it as in use."""
        with self._lock:
            known = self._known.get(digest)
            if known is None:
                known = self._known[digest] = KnownPacks()
            known.used_at = time.monotonic()
            if known.whole and known.used_at > known.whole_at + _WHOLE_EVERY:
                self._loop.wake()
            return known

    def find(self, keys: Sequence[bytes]) -> list[Place | None]:
        """Return where each page should be according to known names; the store may have changed since."""
        found: list[Place | None] = [None] * len(keys)
        for positions, some in by_identity(keys):
            put_back(found, positions, self.of(some.identity).index.find(some))
        return found

    def expect(self, digest: bytes) -> None:
        """Start listing an identity in the background because its pages will be requested."""
        self.of(digest)
        self._loop.wake()

    def reset(self, digests: Iterable[bytes] | None) -> None:
        """Forget the packs of these identities (None: of all); they are listed again when they are next requested."""
        with self._lock:
            for digest in list(self._known) if digests is None else digests:
                known = self._known.get(digest)
                if known is not None:
                    known.index, known.whole = PackIndex(), False

    def page_count(self) -> int:
        return sum(known.index.page_count for known in list(self._known.values()))

    # -- listings --------------------------------------------------------------------------------------------------

    def refresh(self, digest: bytes, deadline: float) -> dict[str, int]:
        """List objects added since the last listing; return id -> bytes of the packs seen. Waits for another call's
        complete listing until ``deadline`` (time.monotonic()), then raises TimeoutError."""
        known = self.of(digest)
        with self._lock:
            index, since, is_whole = known.index, known.listed_at - self._margin, known.whole
        if not is_whole:
            if not known.listing.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise TimeoutError("the identity is being listed")
            try:
                if not known.whole:
                    return self._list_whole(digest, known)
            finally:
                known.listing.release()
            return self.refresh(digest, deadline)
        begun = self._requests.now()
        seen: dict[str, int] = {}
        for items in self._listed_since(digest, since):
            seen |= _learn(index, items)
        with self._lock:
            if known.index is index:
                known.listed_at = max(known.listed_at, begun)
        return seen

    def _list_whole(self, digest: bytes, known: KnownPacks) -> dict[str, int]:
        """List an identity completely; ``known.listing`` must be held. Returns id -> bytes of the packs seen."""
        index, begun, began = known.index, self._requests.now(), time.monotonic()
        before, seen = index.ids(), dict[str, int]()
        for items in self._listed(packs_of(digest)):
            seen |= _learn(index, items)
        with self._lock:
            if known.index is not index:
                return seen
            for pack_id in before - seen.keys():
                index.forget(pack_id)
            known.whole, known.listed_at, known.whole_at = True, begun, began
        self._tidy(digest, known)
        return seen

    def _listed_since(self, digest: bytes, since: float) -> Iterator[list[_Listed]]:
        first, last = max(0, int(since * 1000)), int((self._requests.now() + _CLOCKS_APART) * 1000)
        packs, units = packs_of(digest), range(first // _UNIT, last // _UNIT + 1)
        if self._lists_from:
            # The offset sorts before the names of all packs written since then.
            digits = f"{first:011x}"
            yield from self._listed(packs, f"{packs}/{digits[:_UNIT_DIGITS]}/{digits}")
        elif len(units) > _MOST_UNITS:
            yield from self._listed(packs)
        else:
            for unit in units:
                yield from self._listed(f"{packs}/{unit:0{_UNIT_DIGITS}x}")

    def _listed(self, prefix: str, offset: str | None = None) -> Iterator[list[_Listed]]:
        requests, names = self._requests, 0
        for listed in requests.listed(prefix, offset=offset, chunk_size=LISTED_AT_ONCE):
            yield [(found[1], entry["size"]) for entry in listed if (found := packed(entry["path"])) is not None]
            if (names := names + len(listed)) >= MOST_LISTED:
                words = "tier %s: the store lists more names than are read"
                self._log.log(logging.WARNING, "endless", words, requests.name)
                break
        requests.reached = True

    # -- in the background -----------------------------------------------------------------------------------------

    def _list_again(self) -> float | Retry | None:
        now = time.monotonic()
        with self._lock:
            in_use = [(digest, known) for digest, known in self._known.items() if now < known.used_at + _IN_USE]
        failed = False
        for digest, known in in_use:
            if self._loop.stopping:
                return None
            if (known.whole and now < known.whole_at + _WHOLE_EVERY) or not known.listing.acquire(blocking=False):
                continue
            try:
                self._list_whole(digest, known)
            except Exception as error:  # noqa: BLE001 - a client library's errors end here
                failure = self._requests.explained(error)
                self._requests.count(failure)
                name = self._requests.name
                self._log.log(logging.WARNING, failure.reason, "tier %s: packs cannot be listed: %s", name, failure)
                failed = True
            finally:
                known.listing.release()
        if failed:
            return RETRY
        return _WHOLE_EVERY if in_use else None

    def _tidy(self, digest: bytes, known: KnownPacks) -> None:
        """Remove leftovers of processes that ended between two requests: packs without a living page, and tombstones of
        deleted packs."""
        old = int((self._requests.now() - 2 * self._margin) * 1000)
        try:
            for pack in known.index.packs:
                if known.index.dead_mask(pack.id) & pack.all_dead == pack.all_dead:
                    self.bury(digest, pack, 0)
            for tombstones in known.index.without_packs():
                if all(milliseconds_of(tombstone.id) < old for tombstone in tombstones):
                    self._requests.delete([packed_name(digest, tombstone) for tombstone in tombstones])
                    known.index.forget(tombstones[0].pack)
        except Exception as error:  # noqa: BLE001 - as above; tidying is optional without the permission to delete
            self._requests.explained(error)

    def close(self) -> None:
        """Stop listing. Waits for the listing in progress, which the timeout of its requests bounds."""
        self._loop.stop()

    # -- changes ---------------------------------------------------------------------------------------------------

    def bury(self, digest: bytes, pack: Pack, mask: int) -> None:
        """Remove pages of a pack for all readers; delete the pack if no other page in it is alive."""
        known = self.of(digest)
        if (known.index.dead_mask(pack.id) | mask) & pack.all_dead == pack.all_dead:
            tombstones = known.index.tombstones_of(pack.id)
            self._requests.delete([packed_name(digest, pack)])
            # A listing in progress may still show the pack; a request for it then finds that it is gone.
            known.index.forget(pack.id)
            # In this order: a tombstone without its pack is harmless, but a pack without tombstones would come back.
            if tombstones:
                self._requests.delete([packed_name(digest, tombstone) for tombstone in tombstones])
            return
        tombstone = Tombstone(self.new_id(after=pack.id), pack.id, mask)
        self._requests.put(packed_name(digest, tombstone), b"")
        full = known.index.add_tombstone(tombstone)
        if full is not None:
            # Another process removed the remaining pages meanwhile.
            self.bury(digest, full, 0)


def _learn(index: PackIndex, items: Iterable[_Listed]) -> dict[str, int]:
    """Add listed items to the index; return id -> bytes of the packs among them."""
    seen: dict[str, int] = {}
    for item, size in items:
        if isinstance(item, Tombstone):
            index.add_tombstone(item)
        else:
            index.add(item)
            seen[item.id] = size
    return seen
