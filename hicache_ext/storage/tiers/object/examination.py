"""The examination of bad pages in an object store: one page at a time, using a separate client.

A bad page gets a tombstone; if no other page of its pack is alive, the pack is deleted. If ETags are the MD5 of the
stored bytes, the whole pack is read, with the bad page as it arrived before, and compared with its ETag, which must be
unchanged right before the removal. A pack is never written twice, so no newer copy is lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from hicache_ext.errors import FormatError, NotReadError
from hicache_ext.page import envelope
from hicache_ext.page.pack import PACK_BYTES, decode_footer, pack_length
from hicache_ext.storage.contract.bad_pages import Stored, cut, reason_to_refuse
from hicache_ext.storage.contract.diagnosis import Finding, Level
from hicache_ext.storage.contract.pack_index import Place
from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.contract.trial import try_store
from hicache_ext.storage.tiers.object.client import Requests, begins_behind_the_end
from hicache_ext.storage.tiers.object.config import ObjectTierConfig

_MOST_READS = 8
"""Maximum reads of a part of a pack that arrives damaged."""


def read_object(requests: Requests, client: Any, name: str, offset: int, most: int) -> Stored:
    """Read at most ``most`` bytes of an object from ``offset`` on. Raises NotReadError, and obstore's errors."""
    obstore = requests.obstore
    facts = obstore.head(client, name)
    size, version = int(facts["size"]), facts.get("e_tag")
    length = max(0, size - offset)
    data = memoryview(bytearray(min(length, most)))
    # Read in random pieces, so that damage at a fixed offset of every reply hits different offsets of the object.
    for begin, end in cut(len(data), random.random()) if data else ():
        options = {} if end - begin == size else {"range": (offset + begin, offset + end)}
        reply = obstore.get(client, name, options=options)
        piece = requests.body(reply, end - begin)
        if piece.nbytes != end - begin or (reply.meta.get("e_tag"), reply.meta["size"]) != (version, size):
            raise NotReadError("cut")
        data[begin:end] = piece
    if not data and not _ends_before(requests, client, name, offset):
        raise NotReadError("cut")
    return Stored(length, data, version)


def _ends_before(requests: Requests, client: Any, name: str, offset: int) -> bool:
    """Return whether the store confirms that the object ends before ``offset``: a proxy may misreport the size."""
    try:
        options = {"range": (offset, offset + envelope.FIELDS_LENGTH)} if offset else {}
        return requests.body(requests.obstore.get(client, name, options=options), 0).nbytes == 0
    except FileNotFoundError:
        raise
    except Exception as error:
        if begins_behind_the_end(error):
            return True
        raise


def whole_pack(requests: Requests, client: Any, name: str, place: Place, bad: Stored) -> memoryview:
    """Return the pack as stored, with the bad page as it arrived twice, to compare the whole with the ETag.

    Every other part either verifies itself or also arrived twice the same: over a network path that damages data, an
    intact pack might never arrive in one read. Raises NotReadError, and obstore's errors.
    """
    size, pages = place.pack.page_bytes, place.pack.count
    length, behind = pack_length(pages, size), place.offset + size
    if pages > 1 and length > 2 * PACK_BYTES:
        # No writer creates such packs: the ETag cannot be that of the data read here.
        return memoryview(b"")
    before = read_object(requests, client, name, 0, place.offset).data if place.offset else b""
    after = read_object(requests, client, name, behind, length - behind).data
    whole = memoryview(bytearray().join((before, bad.data, after)))
    edges = [*range(0, (pages + 1) * size, size), len(whole)]
    for number, (begin, end) in enumerate(pairwise(edge for edge in edges if edge <= len(whole))):
        if number != place.position and begin < end:
            is_intact = _is_page if number < pages else _is_footer
            whole[begin:end] = _part(requests, client, name, begin, whole[begin:end], is_intact)
    return whole


def _part(
    requests: Requests, client: Any, name: str, begin: int, part: memoryview, is_intact: Callable[[memoryview], bool]
) -> memoryview:
    """Reread a ``part`` that has arrived once until it is intact or arrives the same twice, and return it."""
    seen = [bytes(part)]
    for _ in range(_MOST_READS):
        if is_intact(part):
            return part
        part = read_object(requests, client, name, begin, len(part)).data
        if part in seen:
            return part
        seen.append(bytes(part))
    raise NotReadError("damaged")


def _is_page(data: memoryview) -> bool:
    """Return whether this is an intact page, with any key."""
    try:
        key = envelope.decode_header(data[: envelope.FIELDS_LENGTH]).key
    except FormatError:
        return False
    return reason_to_refuse(key, Stored(len(data), data)) is None


def _is_footer(data: memoryview) -> bool:
    try:
        decode_footer(data)
    except FormatError:
        return False
    return True


# -- what the doctor says ----------------------------------------------------------------------------------------------


_CLOCK_SKEW = 60.0
"""Seconds of skew that lead to a warning; S3 refuses signatures that are 15 minutes off."""


def diagnose(store: PageStore, again: PageStore, tier: ObjectTierConfig, requests: Requests) -> list[Finding]:
    """Return findings on version, clock, eviction and round trip. The store's timeout bounds each step.

    ``again`` is another, newly opened store of the tier, with nothing cached; ``requests`` belongs to it."""
    findings = [Finding("client", Level.OK, f"obstore {requests.obstore.__version__}"), *_proxies(tier)]
    if tier.only_read:
        return [*findings, Finding("reachable", Level.OK, f"{tier.url} can be listed, and this server only reads it")]
    findings.append(Finding("reachable", Level.OK, f"{tier.url} takes and gives objects"))
    skew = abs(requests.clock_ahead)
    if skew > _CLOCK_SKEW:
        remedy = "set the clock (NTP): beyond 15 minutes S3 refuses every request"
        seen = f"the store's clock is {skew:.0f} s off this machine's"
        findings.append(Finding("clock", Level.WARNING, seen, remedy))
    else:
        findings.append(Finding("clock", Level.OK, "agrees with the store's"))
    findings.append(
        Finding(
            "eviction",
            Level.NOTE,
            "this tier evicts nothing; the bucket's lifecycle rules are not visible from here",
            "set a lifecycle rule that expires objects under the prefix by age, and no versioning",
        )
    )
    return findings + try_store(store, again=again)


def _proxies(tier: ObjectTierConfig) -> list[Finding]:
    """Return a finding if requests use a proxy, which obstore takes from the environment."""
    address = urlsplit(tier.endpoint or "https://of.the.provider")
    proxies = getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    if tier.scheme == "file" or not proxy or proxy_bypass(address.netloc):
        return []
    found = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    seen = f"requests go through {found.scheme}://{found.hostname}:{found.port or 80}, a proxy of the environment"
    remedy = f"no_proxy={address.hostname} in the server's environment, if it is not meant for this store"
    return [Finding("proxy", Level.NOTE, seen, remedy)]
