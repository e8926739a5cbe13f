"""The names of objects below a tier's prefix.

::

    pages/<identity digest, 32 hex digits>/<first 2 of the page hash>/<page hash, 64 hex digits>.page
    identities/<identity digest>.json

As in a directory of page files: a bucket copied to a disk is one. The two-digit level keeps directories small where the
store is a file system (file://), and costs nothing elsewhere.
"""

from __future__ import annotations

import re

from hicache_ext.page.envelope import IDENTITY_LENGTH

PAGES = "pages"
IDENTITIES = "identities"
_PAGE = re.compile(r"pages/([0-9a-f]{32})/([0-9a-f]{2})/(\2[0-9a-f]{62})\.page", re.ASCII)
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


def identity_name(digest: bytes) -> str:
    """The object with the document of an identity."""
    return f"{IDENTITIES}/{digest.hex()}.json"


def digest_of_identity(name: str) -> bytes | None:
    """The identity that the object ``name`` describes; None for any other object."""
    found = _IDENTITY.fullmatch(name)
    return bytes.fromhex(found.group(1)) if found else None
