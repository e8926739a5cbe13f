"""The forms of the pages of each identity, and the forms in which pages were seen. Threads: any."""

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
    """The known forms under one set of keys; replaced as a whole when keys change."""

    def __init__(self, transforms: Transforms, documents: Mapping[bytes, Mapping[str, Any]]) -> None:
        """``documents``: the documents of the identities, by digest; it grows over time."""
        self.transforms = transforms
        self.paying = None if transforms.codec is None else transforms.codec.paying
        self._documents = documents
        self._forms: dict[tuple[bytes, bool], Forms] = {}
        self._seen: dict[bytes, int] = {}

    def forms(self, identity: bytes) -> Forms:
        document = self._documents.get(identity)
        # The forms change once the identity's document is registered.
        known = self._forms.get((identity, document is None))
        if known is None:
            known = self.transforms.forms(identity, document)
            if len(self._forms) >= _MOST_REMEMBERED:
                self._forms.clear()
            self._forms[identity, document is None] = known
        return known

    def encodes_now(self, forms: Forms) -> bool:
        """Return whether pages written in one of these forms are to be encoded now."""
        codec = forms.written[-1].codec
        return codec is not None and (self.paying is None or self.paying.may_pay(codec))

    def remember(self, keys: PageKeys, found: Sequence[int | None]) -> None:
        """Remember the form (an index into ``Forms.all``) in which each page is present."""
        if len(self._seen) + len(keys) > _MOST_REMEMBERED:
            self._seen.clear()
        self._seen.update((key, form) for key, form in zip(keys, found, strict=True) if form is not None)

    def remembered(self, keys: PageKeys) -> list[int | None]:
        """Return and forget the remembered form of each page: used only once, because the page may be gone."""
        return [self._seen.pop(key, None) for key in keys]


def stored_keys(form: Form, keys: PageKeys) -> PageKeys:
    """Return the keys under which these pages are stored in this form."""
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
    """Return the stored key of each page in its form."""
    different = list(dict.fromkeys(forms))
    names = {form: stored_keys(form, keys) for form in different}
    if len(different) == 1:
        return list(names[different[0]])
    return [names[form][page] for page, form in enumerate(forms)]


# -- bad seals ---------------------------------------------------------------------------------------------------------
#
# Pages that arrived whole but do not match their seals: their writer lacks the key, or a machine is faulty.
#
# They are absent for this process, and a write of the same page replaces them: if the copy is still bad when read
# again, that copy is removed, but no other copy written in the meantime (``RemovesCopies``). ``RemovalBudget`` limits
# removals from a shared medium, because a faulty reader sees bad pages everywhere; beyond it, writes of such pages are
# refused. Threads: any.


_MOST_KNOWN = 1 << 16
_MOST_ATTEMPTS = 3
"""Most attempts to replace a bad copy before it is left alone, because a forger can write another."""
_HIDDEN_SECONDS = 30.0
"""Seconds for which such a page is absent; after that another process may have replaced it."""


class BadSeals:
    """The pages with bad seals of one store."""

    def __init__(self, inner: PageStore, memory: LentMemory, *, shared: bool) -> None:
        self._inner = inner
        self._memory = memory
        self._budget = RemovalBudget(inner.name, time.monotonic) if shared else None
        self._seen: dict[bytes, float] = {}
        """Stored key -> time of the last read."""
        self._healing = threading.Lock()
        self._log = LimitedLog(logger, 60.0)

    @property
    def some(self) -> bool:
        return bool(self._seen)

    def note(self, stored_key: bytes, reason: str) -> None:
        """Note that a page was read and refused."""
        self._inner.metrics.add("corrupt", reason)
        words = "tier %s: page %s is refused (%s): made without the key, damaged, or of a missing cipher"
        self._log.log(logging.WARNING, reason, words, self._inner.name, stored_key.hex(), reason)
        if len(self._seen) >= _MOST_KNOWN:
            self._seen.clear()
        self._seen[stored_key] = time.monotonic()

    def hides(self, stored_key: bytes) -> bool:
        seen = self._seen.get(stored_key)
        return seen is not None and time.monotonic() - seen < _HIDDEN_SECONDS

    def forget(self, stored_keys: Iterable[bytes]) -> None:
        """Forget these pages, because they were read whole."""
        for key in stored_keys:
            self._seen.pop(key, None)

    def keep(self, batch: PageBatch, pages: Sequence[tuple[Form, int]]) -> set[int]:
        """Return the positions of pages that cannot be written because bad copies stay in their places; all other
        places are free or hold a good page. ``pages``: the form and the payload bytes of each page."""
        if not self._seen:
            return set()
        suspects = [position for position, key in enumerate(batch.keys) if key in self._seen]
        kept = {at for at in suspects if not self._free_place(batch.keys[at], batch.sizes[at], *pages[at])}
        self._inner.metrics.add("rejected", "suspect", len(kept))
        return kept

    def _free_place(self, stored_key: bytes, length: int, form: Form, payload: int) -> bool:
        with self._healing:
            stored, page = np.empty(length, np.uint8).data, np.empty(payload, np.uint8).data
            for _ in range(_MOST_ATTEMPTS):
                (result,) = self._inner.get(PageBatch([stored_key], [[stored]]))
                if result not in (GetResult.HIT, GetResult.MISS):
                    return False
                reason = None
                if result is GetResult.HIT:
                    reason = body.read(stored, stored_key, form, [page], self._memory.of_thread)
                if reason is None:
                    self._seen.pop(stored_key, None)
                    return True
                # A page whose cipher is missing here may be good for other readers.
                if reason == SEAL_CIPHER or not self._remove(stored_key, stored):
                    return False
            return False

    def _remove(self, stored_key: bytes, stored: memoryview) -> bool:
        """Remove this copy, but not one that another process has since put in its place. Return False if no page may
        be removed now."""
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
# Missing pages of a sealed tier that are present without a seal: counted, and never served.
#
# They date from before the seal, or come from a server without the key. A separate thread looks for them, because a
# lookup has no time to query the medium twice. Threads: any.


_AGAIN = 60.0
"""Seconds before an identity without unsealed pages is searched again."""
_MOST_AT_ONCE = 256
"""Most pages of one call to look for."""
_CLOSE_TIMEOUT = 1.0


class UnsealedPages:
    """The unsealed pages of one store."""

    def __init__(self, inner: PageStore, known: KnownForms) -> None:
        """``known``: the forms of pages without a seal."""
        self._inner = inner
        self.known = known
        self._waiting: dict[bytes, PageKeys] = {}
        """Identity -> the pages that were missing last."""
        self._again: dict[bytes, float] = {}
        """Identity -> the time when it may be searched again."""
        self._loop = BackgroundLoop(f"hicache-{inner.name}-unsealed", self._look)

    def note(self, missing: PageKeys) -> None:
        """Note requested pages of one identity that are missing. Returns immediately."""
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
