"""The owners of requests and pages, in a process that has tenants (tenants.py).

A request belongs to the tenant that it names, or whose name equals or begins its ``extra_key`` or ``cache_salt``. The
owners of pages are recorded by the first 8 bytes of the page hash, off the scheduler's thread; pages written behind a
tenant's pages (``follow``) belong to it, too. Nothing else of a request is kept.

Threads: any. Nothing raises, whatever a request contains.
"""

from __future__ import annotations

import math
import re
import threading
from collections import deque
from collections.abc import Mapping, Sequence

from hicache_ext.errors import HicacheExtError
from hicache_ext.page.hashes import namespace_seed, page_hashes, without_adapter
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.storage.contract import tenants
from hicache_ext.storage.contract.tenants import DEFAULT, LONGEST_NAME, Tenant

_SEPARATOR = re.compile(r"[/:]")
_MOST_KNOWN = 1 << 18
"""Most pages with a known tenant: about 40 MB."""
_MOST_WAITING = 256
_MOST_TOKENS = 1 << 20
_MOST_WAITING_TOKENS = 1 << 22


class Tenants:
    """The configured tenants and the owners of the pages seen last."""

    def __init__(self, limits: Mapping[str, Tenant]) -> None:
        """``limits``: those of up to MOST_TENANTS tenants by name, and of the default tenant if it has any."""
        self.limits = {DEFAULT: Tenant(), **limits}
        self._owners: dict[bytes, str] = {}
        self._older: dict[bytes, str] = {}
        """The previous generation of owners, dropped as a whole when there are too many."""
        self._waiting: deque[tuple[str, Sequence[int], str | None, str | None, int]] = deque()
        self._waiting_tokens = 0
        self._lock = threading.Lock()
        self._loop = BackgroundLoop("hicache-ext-tenants", self._note_waiting)

    def tenant_of(self, named: object, extra_key: object, cache_salt: object) -> str:
        """Return the owner of a request: ``named``, if the front end named a tenant, or the one that its keys name."""
        if isinstance(named, str) and named in self.limits:
            return named
        for key in (extra_key, cache_salt):
            first = key[0] if isinstance(key, list | tuple) and key else key
            if not isinstance(first, str):
                continue
            for words in (first, without_adapter(first)) if key is extra_key else (first,):
                if (begin := _SEPARATOR.split(words[: LONGEST_NAME + 1], 1)[0]) in self.limits:
                    return begin
        return DEFAULT

    def offer(
        self, tenant: str, tokens: Sequence[int], extra_key: str | None, cache_salt: str | None, page_size: int
    ) -> bool:
        """Record in the background that the pages of a prompt are a tenant's; False if too many wait. Never blocks."""
        if not page_size:
            return True
        tokens = tokens[:_MOST_TOKENS]
        with self._lock:
            if len(self._waiting) >= _MOST_WAITING or self._waiting_tokens + len(tokens) > _MOST_WAITING_TOKENS:
                return False
            self._waiting_tokens += len(tokens)
            self._waiting.append((tenant, tokens, extra_key, cache_salt, page_size))
        self._loop.wake()
        return True

    def _note_waiting(self) -> float:
        while self._waiting and not self._loop.stopping:
            with self._lock:
                tenant, tokens, extra_key, cache_salt, page_size = self._waiting.popleft()
                self._waiting_tokens -= len(tokens)
            try:
                self.note(page_hashes(tokens, page_size, namespace_seed(extra_key, cache_salt)), tenant)
            except (HicacheExtError, ValueError, TypeError, AttributeError):
                continue  # invalid tokens, or a key that is not a string: its pages are the default tenant's
        return math.inf

    def note(self, hashes: Sequence[bytes], tenant: str) -> None:
        """Record this tenant as the owner of these pages, except of pages known to be another tenant's."""
        for page_hash in hashes:
            self._note(page_hash[:8], tenant)

    def _note(self, page: bytes, tenant: str) -> None:
        known = self._known(page)
        if known is not None and page in self._owners:
            return
        if len(self._owners) >= _MOST_KNOWN // 2:
            self._older, self._owners = self._owners, {}
        self._owners[page] = known or tenant

    def _known(self, page: bytes) -> str | None:
        """Return the page's owner; None if unknown, or if that tenant is no longer configured."""
        owner = self._owners.get(page) or self._older.get(page)
        return owner if owner in self.limits else None

    def owner(self, page_hash: bytes) -> str:
        """Return the page's owner."""
        return self._known(page_hash[:8]) or DEFAULT

    def follow(self, before: Sequence[str] | None, hashes: Sequence[str]) -> None:
        """Record the owners of a chain written behind ``before``: pages that follow a tenant's page are its own."""
        owner = None if not before else self._known(_begin(before[-1]))
        for page in map(_begin, hashes):
            known = self._known(page)
            if known is not None:
                owner = known
            elif owner is not None:
                self._note(page, owner)

    def rename(self, hashes: Sequence[bytes], names: Sequence[bytes]) -> None:
        """Record the owners of pages that are stored under ``names`` instead of their hashes."""
        for page_hash, name in zip(hashes, names, strict=True):
            if (owner := self._known(page_hash[:8])) is not None:
                self._note(name[:8], owner)


def _begin(page_hash: str) -> bytes:
    try:
        return bytes.fromhex(page_hash[:16])
    except (ValueError, TypeError):
        return b""  # not a hash: reading or writing it will be refused


def put_in_force(limits: Mapping[str, Tenant] | None) -> None:
    """Make these the tenants of the process from now on; known owners of pages stay."""
    if limits is None:
        tenants.current = None
    elif tenants.current is None:
        tenants.current = Tenants(limits)
    else:
        tenants.current.limits = {DEFAULT: Tenant(), **limits}
