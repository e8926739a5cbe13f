"""The forms of the pages of each identity, and in which of them pages were seen. Threads: any."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hicache_ext.errors import StoreClosedError
from hicache_ext.page import envelope
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.transforms import body
from hicache_ext.page.transforms.forms import Form, Forms, Transforms
from hicache_ext.page.transforms.sealing import SEAL_CIPHER
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.storage.contract import tenants
from hicache_ext.storage.contract.abilities import RemovesCopies, ability
from hicache_ext.storage.contract.bad_pages import RemovalBudget
from hicache_ext.storage.contract.base import one_for_each
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageKeys, PageStore
from hicache_ext.storage.contract.transforming.page_memory import LentMemory

logger = logging.getLogger(__name__)

_MOST_REMEMBERED = 1 << 16
_IDENTITY_WORDS = IDENTITY_LENGTH // 8


class KnownForms:
    """Replaced as a whole where keys change."""

    def __init__(self, transforms: Transforms, documents: Mapping[bytes, Mapping[str, Any]]) -> None:
        """``documents``: of the identities, by digest; grows."""
        self.transforms = transforms
        self.paying = None if transforms.codec is None else transforms.codec.paying
        self._documents = documents
        self._forms: dict[tuple[bytes, bool], Forms] = {}
        self._seen: dict[bytes, int] = {}

    def forms(self, identity: bytes) -> Forms:
        document = self._documents.get(identity)
        # Another one when its document has come.
        known = self._forms.get((identity, document is None))
        if known is None:
            known = self.transforms.forms(identity, document)
            if len(self._forms) >= _MOST_REMEMBERED:
                self._forms.clear()
            self._forms[identity, document is None] = known
        return known

    def encodes_now(self, forms: Forms) -> bool:
        """Whether pages are to be encoded that are written in one of these."""
        codec = forms.written[-1].codec
        return codec is not None and (self.paying is None or self.paying.may_pay(codec))

    def remember(self, keys: PageKeys, found: Sequence[int | None]) -> None:
        """In which form, a place among all, each page is there."""
        if len(self._seen) + len(keys) > _MOST_REMEMBERED:
            self._seen.clear()
        self._seen.update((key, form) for key, form in zip(keys, found, strict=True) if form is not None)

    def remembered(self, keys: PageKeys) -> list[int | None]:
        """Each is told once: what was seen may be gone."""
        return [self._seen.pop(key, None) for key in keys]


def stored_keys(form: Form, keys: PageKeys) -> PageKeys:
    """The keys under which these pages are stored in this form."""
    stored = keys.under(form.identity)
    if not form.hides:
        return stored
    assert form.key is not None
    words = stored.words.copy()
    words[:, _IDENTITY_WORDS:] = form.key.hidden_hashes(keys.words[:, _IDENTITY_WORDS:])
    hidden = PageKeys(form.identity, words)
    if (owners := tenants.in_force()) is not None:
        owners.rename([key[IDENTITY_LENGTH:] for key in keys], [key[IDENTITY_LENGTH:] for key in hidden])
    return hidden


def stored_keys_of(keys: PageKeys, forms: Sequence[Form]) -> list[bytes]:
    """The stored key of each page in its form."""
    different = list(dict.fromkeys(forms))
    names = {form: stored_keys(form, keys) for form in different}
    if len(different) == 1:
        return list(names[different[0]])
    return [names[form][page] for page, form in enumerate(forms)]


# -- bad seals ---------------------------------------------------------------------------------------------------------
#
# Pages that arrived whole and do not fit their seals: who wrote them has not the key, or a machine has a fault.
#
# They are absent for this process, and a write of the same page takes their place: once the copy was read again and is
# still bad, that copy is removed, and no other one that came meanwhile (``RemovesCopies``). From a shared medium so
# many at most as ``RemovalBudget`` has it, since a reader with a fault sees bad pages everywhere; then writes of such
# pages are refused. Threads: any.


_MOST_KNOWN = 1 << 16
_LOOKS = 3
"""At a copy before it is left alone: who forges can do it again."""
_KEPT_IN_MIND = 30.0
"""Seconds for which such a page is absent: by then another process may have replaced it."""


class BadSeals:
    """Those of one store."""

    def __init__(self, inner: PageStore, memory: LentMemory, *, shared: bool) -> None:
        self._inner = inner
        self._memory = memory
        self._budget = RemovalBudget(inner.name, time.monotonic) if shared else None
        self._seen: dict[bytes, float] = {}
        """Stored key -> when it was read last."""
        self._healing = threading.Lock()
        self._log = LimitedLog(logger, 60.0)

    @property
    def some(self) -> bool:
        return bool(self._seen)

    def note(self, stored_key: bytes, reason: str) -> None:
        """A page was read and refused."""
        self._inner.metrics.add("corrupt", reason)
        words = "tier %s: page %s is refused (%s): made without the key, damaged, or of a missing cipher"
        self._log.log(logging.WARNING, reason, words, self._inner.name, stored_key.hex(), reason)
        if len(self._seen) >= _MOST_KNOWN:
            self._seen.clear()
        self._seen[stored_key] = time.monotonic()

    def hides(self, stored_key: bytes) -> bool:
        seen = self._seen.get(stored_key)
        return seen is not None and time.monotonic() - seen < _KEPT_IN_MIND

    def forget(self, stored_keys: Iterable[bytes]) -> None:
        """These were read whole."""
        for key in stored_keys:
            self._seen.pop(key, None)

    def keep(self, batch: PageBatch, pages: Sequence[tuple[Form, int]]) -> set[int]:
        """The positions of pages that cannot be written, since bad ones keep their places; those of all others are free
        or hold a page. ``pages``: the form of each, and the bytes of its payload."""
        if not self._seen:
            return set()
        suspects = [position for position, key in enumerate(batch.keys) if key in self._seen]
        kept = {at for at in suspects if not self._make_way(batch.keys[at], batch.sizes[at], *pages[at])}
        self._inner.metrics.add("rejected", "suspect", len(kept))
        return kept

    def _make_way(self, stored_key: bytes, length: int, form: Form, payload: int) -> bool:
        with self._healing:
            stored, page = np.empty(length, np.uint8).data, np.empty(payload, np.uint8).data
            for _ in range(_LOOKS):
                (result,) = self._inner.get(PageBatch([stored_key], [[stored]]))
                if result not in (GetResult.HIT, GetResult.MISS):
                    return False
                reason = None
                if result is GetResult.HIT:
                    reason = body.read(stored, stored_key, form, [page], self._memory.of_thread)
                if reason is None:
                    self._seen.pop(stored_key, None)
                    return True
                # One of a missing cipher may be good for others.
                if reason == SEAL_CIPHER or not self._remove(stored_key, stored):
                    return False
            return False

    def _remove(self, stored_key: bytes, stored: memoryview) -> bool:
        """Remove this copy, and none that another process has put in its place meanwhile; False where none may be
        removed now."""
        if self._budget is not None and not self._budget.take():
            return False
        copy = envelope.page_seal(stored_key, stored.nbytes, [stored])
        remover = ability(self._inner, RemovesCopies)
        removed = self._inner.remove([stored_key]) if remover is None else remover.remove_copies({stored_key: copy})
        if not removed and self._budget is not None:
            self._budget.give_back()
        return True


# -- unsealed ----------------------------------------------------------------------------------------------------------
#
# Pages of a sealed tier that were asked for, are missing, and are there without a seal: counted, and never served.
#
# They are of the time before the seal, or of a server without the key. They are looked for on a thread of their own: a
# look-up has not the time to ask the medium twice. Threads: any.


_AGAIN = 60.0
"""Seconds between two looks for pages of an identity that had none."""
_MOST_AT_ONCE = 256
"""Pages of one call that are looked for."""
_CLOSE_TIMEOUT = 1.0


class UnsealedPages:
    """Those of one store."""

    def __init__(self, inner: PageStore, known: KnownForms) -> None:
        """``known``: the forms of pages that have no seal."""
        self._inner = inner
        self.known = known
        self._waiting: dict[bytes, PageKeys] = {}
        """By identity, those that were missing last."""
        self._again: dict[bytes, float] = {}
        """Identity -> when it may be looked at again."""
        self._loop = BackgroundLoop(f"hicache-{inner.name}-unsealed", self._look)

    def note(self, missing: PageKeys) -> None:
        """These, of one identity, were asked for and are missing. Returns immediately."""
        if len(missing) and time.monotonic() >= self._again.get(missing.identity, 0.0):
            self._waiting[missing.identity] = missing[:_MOST_AT_ONCE]
            self._loop.wake()

    def _look(self) -> float:
        while self._waiting and not self._loop.stopping:
            identity, keys = self._waiting.popitem()
            if time.monotonic() < self._again.get(identity, 0.0):
                continue
            there = np.zeros(len(keys), np.bool_)
            try:
                for form in self.known.forms(identity).all:
                    there |= one_for_each(self._inner.contains(stored_keys(form, keys)), len(keys))
            except StoreClosedError:
                break
            self._inner.metrics.add("unsealed", "", int(there.sum()))
            if not there.any():
                if len(self._again) >= _MOST_REMEMBERED:
                    self._again.clear()
                self._again[identity] = time.monotonic() + _AGAIN
        return math.inf

    def close(self) -> None:
        self._loop.stop(_CLOSE_TIMEOUT)
