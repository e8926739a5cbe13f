"""Writing a batch in packs; removal of pages by their keys, and of whole identities."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any

from hicache_ext.errors import ClearLaterError
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.pack import LARGEST_PAGE, MOST_PAGES, SMALL, Pack, gather_pages, portions, seal_pack
from hicache_ext.page.page_object import HEADER_LENGTH
from hicache_ext.runtime.threads import Call
from hicache_ext.storage.contract.bad_pages import Sighting, Verdict
from hicache_ext.storage.contract.clearing import Cleared
from hicache_ext.storage.contract.pack_index import Place
from hicache_ext.storage.contract.store import PageBatch, SetResult, identities_of
from hicache_ext.storage.tiers.object.catalog import (
    LISTED_AT_ONCE,
    LONGEST_NAME,
    PACKS,
    packed,
    packed_name,
    packs_of,
)
from hicache_ext.storage.tiers.object.client import Piece, begins_behind_the_end, is_md5_of
from hicache_ext.storage.tiers.object.reading import Pages, look_up, shares_its_name

_PACK_BYTES = 2 << 20
"""About so many of a pack: eight requests at once move 16 MiB in less time than four of twice the size."""
_OF_ANOTHER_LENGTH = object()
"""Not written, because an object of another length is there."""


def most_in_a_pack(prefix: str) -> int:
    """How many pages the name of a pack has room for behind what stands before every name."""
    longest = packed_name(bytes(16), Pack("0" * 11 + "-" + "0" * 10, SMALL - 1, bytes(6 * MOST_PAGES)))
    room = LONGEST_NAME - len(prefix.encode()) - 1 - len(longest)
    return MOST_PAGES if room >= 0 else max(1, MOST_PAGES + room // 9)


def write(pages: Pages, batch: PageBatch, deadline: float) -> list[SetResult]:
    """One result for each page, in order."""
    # On the caller's thread: those of the requests are for everybody. Half of the time is left for writing.
    verdicts = pages.bad.settle(batch.keys, (time.monotonic() + deadline) / 2)
    results = _write_pages(pages, batch, range(len(batch)), verdicts, deadline)
    wrong = [position for position, result in enumerate(results) if result is _OF_ANOTHER_LENGTH]
    if wrong:
        verdicts = pages.bad.settle([batch.keys[position] for position in wrong], deadline)
        again = _write_pages(pages, batch, wrong, verdicts, deadline)
        for position, result in zip(wrong, again, strict=True):
            results[position] = SetResult.REJECTED if result is _OF_ANOTHER_LENGTH else result
    pages.requests.metrics.add("rejected", "suspect", results.count(SetResult.REJECTED))
    return results


def _write_pages(
    pages: Pages, batch: PageBatch, positions: Sequence[int], verdicts: Mapping[bytes, Verdict], deadline: float
) -> list[Any]:
    first: dict[bytes, int] = {}
    for position in positions:
        first.setdefault(batch.keys[position], position)
    results: dict[int, Any] = {}
    found = look_up(pages, list(first), pages.clearing.hides, deadline)
    new: dict[bytes, list[int]] = {}
    for key, position in first.items():
        size = HEADER_LENGTH + batch.sizes[position]
        result = _answer(pages, key, size, found.places.get(key), verdicts.get(key))
        if result is None and found.failed and key not in found.places:
            # It may be there: a store that does not list would get one more copy of it from every server.
            results[position] = SetResult(found.failed)
        elif result is None:
            new.setdefault(key[:IDENTITY_LENGTH], []).append(position)
        else:
            results[position] = result
    packs = [
        [mine[number] for number in portion]
        for mine in new.values()
        for portion in portions([HEADER_LENGTH + batch.sizes[p] for p in mine], pages.most_in_a_pack, _PACK_BYTES)
    ]
    pieces: list[Piece] = [partial(_write_pack, pages, batch, pack, verdicts, deadline) for pack in packs]
    answers, in_time = pages.requests.share(pieces, deadline)
    missing = SetResult.ERROR if in_time else SetResult.TIMEOUT
    for pack, answer in zip(packs, answers, strict=True):
        results.update((position, missing if answer is None else answer) for position in pack)
    # One that comes twice in a batch was there the second time.
    return [
        SetResult.EXISTS if first[key] != position and results[first[key]] is SetResult.STORED else results[first[key]]
        for position, key in ((position, batch.keys[position]) for position in positions)
    ]


def _answer(pages: Pages, key: bytes, size: int, found: Place | None, verdict: Verdict | None) -> Any:
    """What a page is without being written, where ``found`` is there; None where it is to be written."""
    if verdict is Verdict.DENIED:
        return None
    if size > LARGEST_PAGE or verdict in (Verdict.WITHHELD, Verdict.UNCLEAR):
        return SetResult.REJECTED
    if found is None:
        return None
    if found.pack.page_bytes == size:
        return SetResult.EXISTS
    if verdict is Verdict.GOOD:
        # A whole page of its own: whoever expects another length is wrong, or this process is.
        return SetResult.REJECTED
    pages.suspect(key, size, Sighting(found.pack.page_bytes), "length")
    return _OF_ANOTHER_LENGTH


# -- requests of writes ------------------------------------------------------------------------------------------------


def _write_pack(
    pages: Pages,
    batch: PageBatch,
    positions: Sequence[int],
    verdicts: Mapping[bytes, Verdict],
    deadline: float,
    call: Call[Any],
) -> SetResult | None:
    """Write pages of one identity and of one size."""
    keys = [batch.keys[position] for position in positions]
    digest, requests = keys[0][:IDENTITY_LENGTH], pages.requests
    # Greater than the id of a pack whose pages these are to replace.
    after = max((place.pack.id for place in pages.catalog.find(keys) if place is not None), default=None)
    pack = Pack.of_keys(pages.catalog.new_id(after), HEADER_LENGTH + batch.sizes[positions[0]], keys)
    mark = _mark_of(digest, pack.id)
    try:
        with pages.clearing.writing([*keys, mark], deadline) as writing:
            with call.memory() as mine:
                if not mine:
                    return None
                body = gather_pages([batch.buffers[position] for position in positions])
            # The checksums are of the copy: should a page change meanwhile, its copy can be trusted.
            body = seal_pack(body, keys)
            put = requests.put(packed_name(digest, pack), body)
            # One of them arrived damaged here while the store said that it has others.
            denied = any(verdicts.get(key) is Verdict.DENIED for key in keys)
            if denied and requests.etags_are_md5 and not is_md5_of(body, put["e_tag"]):
                requests.metrics.add("error", "not_as_sent")
                return SetResult.ERROR
            pages.catalog.of(digest).index.add(pack)
            writing.stored.update(keys, [mark])
            pages.bad.clear(keys)
            return SetResult.STORED
    except TimeoutError:
        return SetResult.TIMEOUT
    except Exception as error:  # noqa: BLE001 - a client library's errors end here
        result: SetResult = requests.failed(error, call, SetResult)
        return result


# -- removal of pages --------------------------------------------------------------------------------------------------


def remove(pages: Pages, keys: Sequence[bytes], deadline: float) -> int:
    """Remove every copy of these pages, for everybody; how many pages there were."""
    requests, catalog = pages.requests, pages.catalog
    looks = [requests.trying(partial(catalog.refresh, digest, deadline)) for digest in identities_of(keys)]
    requests.share(looks, deadline)
    places = [(key, place) for key in keys for place in catalog.of(key[:IDENTITY_LENGTH]).index.find_all([key])[0]]
    are_pages, _ = requests.share([partial(_is_page, pages, key, place) for key, place in places], deadline)
    of_packs: dict[tuple[bytes, Pack], dict[bytes, int]] = {}
    for (key, place), is_page in zip(places, are_pages, strict=True):
        if is_page:
            masks = of_packs.setdefault((key[:IDENTITY_LENGTH], place.pack), {})
            masks[key] = masks.get(key, 0) | place.mask
    burials = [
        requests.trying(partial(catalog.bury, digest, pack, reduce(or_, masks.values())))
        for (digest, pack), masks in of_packs.items()
    ]
    answers, _ = requests.share(burials, deadline)
    return len({key for masks, done in zip(of_packs.values(), answers, strict=True) if done for key in masks})


def _is_page(pages: Pages, key: bytes, place: Place, call: Call[Any]) -> bool:
    """Whether a place has this page, or what was to be one; not another one with the same short hash."""
    requests = pages.requests
    name = packed_name(key[:IDENTITY_LENGTH], place.pack)
    try:
        return not shares_its_name(requests.part(name, place.offset, place.offset + HEADER_LENGTH), key)
    except FileNotFoundError as error:
        if requests.is_absent(error):
            pages.catalog.of(key[:IDENTITY_LENGTH]).index.forget(place.pack.id)
        return False
    except Exception as error:  # noqa: BLE001 - as above
        if begins_behind_the_end(error):
            return True
        requests.failed(error, call, SetResult)
        return False


# -- removal of identities ---------------------------------------------------------------------------------------------


def sweep(pages: Pages, cleared: Cleared) -> None:
    """Delete until a whole listing shows nothing but pages stored since. Raises ClearLaterError."""
    digests = None if cleared.digests is None else sorted(cleared.digests)
    prefixes = [PACKS] if digests is None else [packs_of(digest) for digest in digests]
    try:
        for prefix in prefixes:
            while _delete_listed(pages, prefix, cleared):
                pass
    except Exception as error:  # noqa: BLE001 - as above
        failure = pages.requests.explained(error)
        pages.requests.count(failure)
        raise ClearLaterError(str(failure)) from None
    # What a listing under way has seen of what is deleted now is not to be believed.
    pages.catalog.reset(digests)


def _delete_listed(pages: Pages, prefix: str, cleared: Cleared) -> int:
    """How many objects there were to delete."""
    deleted = 0
    for listed in pages.requests.listed(prefix, chunk_size=LISTED_AT_ONCE):
        if cleared.closing:
            return 0
        marks = _marks(entry["path"] for entry in listed)
        with cleared.old_pages(mark for mark, _ in marks.values()) as old:
            names = [name for name, (mark, _) in marks.items() if mark in old]
            if names:
                pages.requests.delete(names)
        pages.requests.metrics.add("cleared", "", sum(marks[name][1] for name in names))
        deleted += len(names)
    return deleted


def _marks(names: Iterable[str]) -> dict[str, tuple[bytes, int]]:
    """Those names that are ours: what stands for the pack that each belongs to, and how many pages it has."""
    marks: dict[str, tuple[bytes, int]] = {}
    for name in names:
        if (found := packed(name)) is not None:
            digest, item = found
            pack_id, count = (item.id, item.count) if isinstance(item, Pack) else (item.pack, 0)
            marks[name] = _mark_of(digest, pack_id), count
    return marks


def _mark_of(digest: bytes, pack_id: str) -> bytes:
    """What stands for a pack where pages are cleared: a key that no page has."""
    return digest + pack_id.encode().ljust(32, b"\0")
