"""The examination of bad pages in an object store: one page at a time, with a client of its own.

A bad page gets a tombstone, or takes its pack with it where nothing else lives there. Where ETags are the MD5 of the
stored bytes, the whole pack is read, with the bad page in it as it arrived before, and compared with its ETag, which
must be the same right before the removal. Nobody writes a pack twice, so no copy is lost.
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
"""Of a part of a pack that arrives damaged."""


def read_object(requests: Requests, client: Any, name: str, offset: int, most: int) -> Stored:
    """At most so many bytes of an object from ``offset`` on. Raises NotReadError, and what obstore raises."""
    obstore = requests.obstore
    facts = obstore.head(client, name)
    size, version = int(facts["size"]), facts.get("e_tag")
    length = max(0, size - offset)
    data = memoryview(bytearray(min(length, most)))
    # Cut, so that damage at a fixed place of every answer meets another place of the object.
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
    """Whether the store says so when it is asked for what is there: who is on the way may be wrong about a size."""
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
    """The pack as the store has it, with the bad page in it as it arrived twice: the ETag is of all of it.

    Every other part is one that verifies itself, or that arrived twice the same, too: over a path that damages what
    passes, a whole pack would never arrive as it is. Raises NotReadError, and what obstore raises.
    """
    size, pages = place.pack.page_bytes, place.pack.count
    length, behind = pack_length(pages, size), place.offset + size
    if pages > 1 and length > 2 * PACK_BYTES:
        # No writer makes such packs: the ETag is not of what is read.
        return memoryview(b"")
    before = read_object(requests, client, name, 0, place.offset).data if place.offset else b""
    after = read_object(requests, client, name, behind, length - behind).data
    whole = memoryview(bytearray().join((before, bad.data, after)))
    edges = [*range(0, (pages + 1) * size, size), len(whole)]
    for number, (begin, end) in enumerate(pairwise(edge for edge in edges if edge <= len(whole))):
        if number != place.position and begin < end:
            is_whole = _is_page if number < pages else _is_footer
            whole[begin:end] = _part(requests, client, name, begin, whole[begin:end], is_whole)
    return whole


def _part(
    requests: Requests, client: Any, name: str, begin: int, part: memoryview, is_whole: Callable[[memoryview], bool]
) -> memoryview:
    """A part of an object that has arrived once already."""
    seen = [bytes(part)]
    for _ in range(_MOST_READS):
        if is_whole(part):
            return part
        part = read_object(requests, client, name, begin, len(part)).data
        if part in seen:
            return part
        seen.append(bytes(part))
    raise NotReadError("damaged")


def _is_page(data: memoryview) -> bool:
    """Whether this is a page, whichever."""
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
"""Seconds; S3 refuses signatures that are 15 minutes off."""


def diagnose(store: PageStore, again: PageStore, tier: ObjectTierConfig, requests: Requests) -> list[Finding]:
    """Versions, clock, eviction, round trip. Bounded by the store's timeout per step.

    ``again``: another store of the tier, that remembers nothing, and was just opened; ``requests``: its own."""
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
    """The proxy through which requests go: obstore takes it from the environment."""
    address = urlsplit(tier.endpoint or "https://of.the.provider")
    proxies = getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    if tier.scheme == "file" or not proxy or proxy_bypass(address.netloc):
        return []
    found = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    seen = f"requests go through {found.scheme}://{found.hostname}:{found.port or 80}, a proxy of the environment"
    remedy = f"no_proxy={address.hostname} in the server's environment, if it is not meant for this store"
    return [Finding("proxy", Level.NOTE, seen, remedy)]
