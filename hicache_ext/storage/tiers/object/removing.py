"""Removal: of pages by their keys, and of whole identities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from hicache_ext.errors import ClearLaterError, FormatError
from hicache_ext.page import envelope
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.pack import Pack
from hicache_ext.page.page_object import HEADER_LENGTH
from hicache_ext.runtime.threads import Call
from hicache_ext.storage.contract.clearing import Cleared
from hicache_ext.storage.contract.pack_index import Place
from hicache_ext.storage.tiers.object.catalog import PackCatalog
from hicache_ext.storage.tiers.object.client import begins_behind_the_end
from hicache_ext.storage.tiers.object.names import PACKS, PAGES, packed, packed_name, packs_of, page_key, pages_of
from hicache_ext.storage.tiers.object.page_objects import LISTED_AT_ONCE, PageObjects
from hicache_ext.storage.tiers.object.requests import Piece, Requests
from hicache_ext.storage.tiers.object.writing import mark_of


class Removing:
    """Threads: any."""

    def __init__(self, requests: Requests, catalog: PackCatalog, objects: PageObjects) -> None:
        self._requests = requests
        self._catalog = catalog
        self._objects = objects

    # -- some pages ------------------------------------------------------------------------------------------------

    def remove(self, keys: Sequence[bytes], deadline: float) -> int:
        """Remove every copy of these pages, for everybody; how many pages there were."""
        digests = list(dict.fromkeys(key[:IDENTITY_LENGTH] for key in keys))
        looking: list[Piece] = []
        for digest in digests:
            looking.append(self._guarded(partial(self._catalog.refresh, digest, deadline)))
            looking.append(self._guarded(partial(self._catalog.look_for_objects, digest)))
        self._requests.share(looking, deadline)
        removed = self._bury(keys, deadline)
        alone = [key for key in keys if self._catalog.of(key[:IDENTITY_LENGTH]).has_objects]
        answers, _ = self._requests.share([partial(self._remove_object, key) for key in alone], deadline)
        removed |= {key for key, was_there in zip(alone, answers, strict=True) if was_there}
        return len(removed)

    def _bury(self, keys: Sequence[bytes], deadline: float) -> set[bytes]:
        """Those of the pages that a pack had."""
        places = [
            (key, place) for key in keys for place in self._catalog.of(key[:IDENTITY_LENGTH]).index.find_all([key])[0]
        ]
        are_pages, _ = self._requests.share([partial(self._is_page, key, place) for key, place in places], deadline)
        of_packs: dict[tuple[bytes, Pack], list[tuple[bytes, int]]] = {}
        for (key, place), is_page in zip(places, are_pages, strict=True):
            if is_page:
                of_packs.setdefault((key[:IDENTITY_LENGTH], place.pack), []).append((key, place.mask))
        burials: list[Piece] = []
        for (digest, pack), pages in of_packs.items():
            mask = 0
            for _, bit in pages:
                mask |= bit
            burials.append(self._guarded(partial(self._catalog.bury, digest, pack, mask)))
        answers, _ = self._requests.share(burials, deadline)
        return {key for pages, done in zip(of_packs.values(), answers, strict=True) if done for key, _ in pages}

    def _is_page(self, key: bytes, place: Place, call: Call[Any], _: int) -> bool:
        """Whether a place has this page, or what was to be one; not another one with the same short hash."""
        requests = self._requests
        name = packed_name(key[:IDENTITY_LENGTH], place.pack)
        try:
            end = place.offset + HEADER_LENGTH
            return envelope.decode_header(requests.part(name, place.offset, end)).key == key
        except FormatError:
            return True
        except FileNotFoundError as error:
            if requests.is_absent(error):
                self._catalog.of(key[:IDENTITY_LENGTH]).index.forget(place.pack.id)
            return False
        except Exception as error:  # noqa: BLE001 - a client library's errors end here
            if begins_behind_the_end(error):
                return True
            requests.failed(error, call)
            return False

    def _remove_object(self, key: bytes, call: Call[Any], _: int) -> bool:
        return self._objects.remove(key, call)

    def _guarded(self, request: Callable[[], object]) -> Piece:
        def make(call: Call[Any], _: int) -> bool:
            try:
                request()
            except Exception as error:  # noqa: BLE001 - as above
                self._requests.failed(error, call)
                return False
            return True

        return make

    # -- identities ------------------------------------------------------------------------------------------------

    def sweep(self, cleared: Cleared) -> None:
        """Delete until a whole listing shows nothing but pages stored since. Raises ClearLaterError."""
        digests = None if cleared.digests is None else sorted(cleared.digests)
        prefixes = (
            [PAGES, PACKS] if digests is None else [of(digest) for digest in digests for of in (pages_of, packs_of)]
        )
        try:
            for prefix in prefixes:
                while self._delete_listed(prefix, cleared):
                    pass
        except Exception as error:  # noqa: BLE001 - as above
            failure = self._requests.explained(error)
            self._requests.metrics.add("error", failure.reason)
            raise ClearLaterError(str(failure)) from None
        # What a listing under way has seen of what is deleted now is not to be believed.
        self._catalog.reset(digests)

    def _delete_listed(self, prefix: str, cleared: Cleared) -> int:
        """How many objects there were to delete."""
        deleted = 0
        requests = self._requests
        for listed in requests.obstore.list(requests.client, prefix, chunk_size=LISTED_AT_ONCE):
            if cleared.closing:
                return 0
            marks = _marks(entry["path"] for entry in listed)
            with cleared.old_pages(marks.values()) as old:
                names = [name for name, mark in marks.items() if mark in old]
                if names:
                    requests.delete(names)
            requests.metrics.add("cleared", "", sum(map(_pages_in, names)))
            deleted += len(names)
        return deleted


def _marks(names: Iterable[str]) -> dict[str, bytes]:
    """Those names that are ours, with the key of the page, or with what stands for the pack that each belongs to."""
    marks: dict[str, bytes] = {}
    for name in names:
        if (key := page_key(name)) is not None:
            marks[name] = key
        elif (found := packed(name)) is not None:
            digest, item = found
            marks[name] = mark_of(digest, item.id if isinstance(item, Pack) else item.pack)
    return marks


def _pages_in(name: str) -> int:
    found = packed(name)
    if found is None:
        return 1
    return found[1].count if isinstance(found[1], Pack) else 0
