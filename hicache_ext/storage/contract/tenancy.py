"""Whose requests and pages are, in a process that has tenants (tenants.py).

A request is the tenant's that it names, or whose name its ``extra_key`` or ``cache_salt`` is or begins with. Pages are
noted by the first 8 bytes of their page hash, off the scheduler's thread, and those that are written behind pages of a
tenant (``follow``) are its, too. Nothing else of a request is kept.

Any thread; nothing raises whatever a request holds.
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
"""Pages whose tenants are known: some 40 MB."""
_MOST_WAITING = 256
_MOST_TOKENS = 1 << 20
_MOST_WAITING_TOKENS = 1 << 22


class Tenants:
    """What is configured, and whose the pages are that were seen last."""

    def __init__(self, limits: Mapping[str, Tenant]) -> None:
        """``limits``: up to MOST_TENANTS by name, and the default one if it has any."""
        self.limits = {DEFAULT: Tenant(), **limits}
        self._owners: dict[bytes, str] = {}
        self._older: dict[bytes, str] = {}
        """Those before, which go together when there are too many."""
        self._waiting: deque[tuple[str, Sequence[int], str | None, str | None, int]] = deque()
        self._waiting_tokens = 0
        self._lock = threading.Lock()
        self._loop = BackgroundLoop("hicache-ext-tenants", self._note_waiting)

    def tenant_of(self, said: object, extra_key: object, cache_salt: object) -> str:
        """Whose a request is: ``said`` by its front end, or by its keys."""
        if isinstance(said, str) and said in self.limits:
            return said
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
        """Note soon that the pages of a prompt are a tenant's; False where too many wait. Never waits."""
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
                continue  # no tokens, or a key that is no text: its pages are the default tenant's
        return math.inf

    def note(self, hashes: Sequence[bytes], tenant: str) -> None:
        """These pages are this tenant's, but for those that are known to be another one's."""
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
        """Whose page this is; None where nobody said, or of a tenant that is none any more."""
        owner = self._owners.get(page) or self._older.get(page)
        return owner if owner in self.limits else None

    def owner(self, page_hash: bytes) -> str:
        """Whose page this is."""
        return self._known(page_hash[:8]) or DEFAULT

    def follow(self, before: Sequence[str] | None, hashes: Sequence[str]) -> None:
        """A chain of pages is written, behind those ``before``: what follows a tenant's page is its."""
        owner = None if not before else self._known(_begin(before[-1]))
        for page in map(_begin, hashes):
            known = self._known(page)
            if known is not None:
                owner = known
            elif owner is not None:
                self._note(page, owner)

    def rename(self, hashes: Sequence[bytes], names: Sequence[bytes]) -> None:
        """Pages are stored under other names than their hashes."""
        for page_hash, name in zip(hashes, names, strict=True):
            if (owner := self._known(page_hash[:8])) is not None:
                self._note(name[:8], owner)


def _begin(page_hash: str) -> bytes:
    try:
        return bytes.fromhex(page_hash[:16])
    except (ValueError, TypeError):
        return b""  # no hash: it is refused where it is read or written


def put_in_force(limits: Mapping[str, Tenant] | None) -> None:
    """From now on these are the tenants of the process; what is known of pages stays."""
    if limits is None:
        tenants.current = None
    elif tenants.current is None:
        tenants.current = Tenants(limits)
    else:
        tenants.current.limits = {DEFAULT: Tenant(), **limits}
