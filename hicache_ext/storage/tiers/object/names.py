"""The names of objects below a tier's prefix.

::

    pages/<identity digest, 32 hex digits>/<first 2 of the page hash>/<page hash, 64 hex digits>.page
    packs/<identity digest>/<first 7 digits of the id>/<name of a pack or a tombstone, as in page/pack.py>
    identities/<identity digest>.json

The two-digit level keeps directories small where the store is a file system (file://), and costs nothing elsewhere. The
first 7 digits of an id are its time in units of 65.5 seconds: what came lately is listed by them where a listing cannot
begin in the middle.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.pack import Pack, Tombstone, parse_pack, parse_tombstone

PAGES = "pages"
PACKS = "packs"
IDENTITIES = "identities"
_PAGE = re.compile(r"pages/([0-9a-f]{32})/([0-9a-f]{2})/(\2[0-9a-f]{62})\.page", re.ASCII)
_PACKED = re.compile(r"packs/([0-9a-f]{32})/([0-9a-f]{7})/(\2.*)", re.ASCII | re.DOTALL)
_UNIT_DIGITS = 7
_UNIT = 1 << 16
"""Milliseconds."""
LONGEST_NAME = 1024
"""Bytes, the tier's prefix included."""
_IDENTITY = re.compile(r"identities/([0-9a-f]{32})\.json", re.ASCII)


def page_name(key: bytes) -> str:
    """The object of the page ``key``."""
    page_hash = key[IDENTITY_LENGTH:].hex()
    return f"{PAGES}/{key[:IDENTITY_LENGTH].hex()}/{page_hash[:2]}/{page_hash}.page"


def page_key(name: str) -> bytes | None:
    """The key of a page object; None for any other object, which is not ours and never touched."""
    found = _PAGE.fullmatch(name)
    return bytes.fromhex(found.group(1) + found.group(3)) if found else None


def pages_of(digest: bytes) -> str:
    """The prefix of all pages of an identity."""
    return f"{PAGES}/{digest.hex()}"


def packed_name(digest: bytes, item: Pack | Tombstone) -> str:
    """The object of a pack or a tombstone."""
    return f"{packs_of(digest)}/{item.id[:_UNIT_DIGITS]}/{item.name}"


def packed(name: str) -> tuple[bytes, Pack | Tombstone] | None:
    """The identity, and what the object ``name`` is; None for any other object."""
    found = _PACKED.fullmatch(name)
    if found is None:
        return None
    item = parse_pack(found[3]) or parse_tombstone(found[3])
    return None if item is None else (bytes.fromhex(found[1]), item)


def packs_of(digest: bytes) -> str:
    """The prefix of all packs of an identity."""
    return f"{PACKS}/{digest.hex()}"


def packs_before(digest: bytes, milliseconds: int) -> str:
    """A name before those of all packs of an identity from this time on, and after those from before."""
    digits = f"{max(0, milliseconds):011x}"
    return f"{packs_of(digest)}/{digits[:_UNIT_DIGITS]}/{digits}"


def packs_between(digest: bytes, first: int, last: int) -> Iterable[str]:
    """The prefixes of the packs of an identity from one time to another, in milliseconds."""
    for unit in range(max(0, first) // _UNIT, last // _UNIT + 1):
        yield f"{packs_of(digest)}/{unit:0{_UNIT_DIGITS}x}"


def identity_name(digest: bytes) -> str:
    """The object with the document of an identity."""
    return f"{IDENTITIES}/{digest.hex()}.json"


def digest_of_identity(name: str) -> bytes | None:
    """The identity that the object ``name`` describes; None for any other object."""
    found = _IDENTITY.fullmatch(name)
    return bytes.fromhex(found.group(1)) if found else None
