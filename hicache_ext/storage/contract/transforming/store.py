"""A tier whose pages are encoded or sealed: a wrapper around any store.

The store below keeps opaque pages of another length under other keys (page/transforms) and need not know about it: it
checks, evicts, packs and lists them like any others. This wrapper translates keys, and moves pages through its own
memory. Without a codec and a seal there is no wrapper and no cost.

A page that arrives whole but does not match its seal is CORRUPT: it was made by somebody without the key. It is absent
for this process from then on, and the next write replaces it once a second read has shown it to be still bad.
Reasons: docs/decisions/seals.md.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hicache_ext.errors import StoreClosedError
from hicache_ext.page.transforms import body
from hicache_ext.page.transforms.codec import Codec
from hicache_ext.page.transforms.forms import STORED_AS, Form, Forms, Transforms, stored_as
from hicache_ext.page.transforms.header import CODEC_NUMBERS, LOSSY_CODECS, SALT_LENGTH
from hicache_ext.page.transforms.sealing import Seal, new_salts
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.storage.contract.abilities import IdentityKeeper, PageLister, ability
from hicache_ext.storage.contract.base import error_reason, leading_in_portions, one_for_each
from hicache_ext.storage.contract.store import (
    DelegatingStore,
    GetResult,
    PageBatch,
    PageKeys,
    PageStore,
    SetResult,
    StoreInfo,
    by_identity,
    put_back,
)
from hicache_ext.storage.contract.transforming.known_forms import (
    BadSeals,
    KnownForms,
    UnsealedPages,
    stored_keys,
    stored_keys_of,
)
from hicache_ext.storage.contract.transforming.page_memory import LentMemory, Portions

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result", GetResult, SetResult)

_LEADING_AT_ONCE = 256
_MOVED = {"get": GetResult.HIT, "set": SetResult.STORED}
_LOSSY = {CODEC_NUMBERS[name]: name for name in LOSSY_CODECS}


class TransformedStore(DelegatingStore):
    """``inner`` with every page encoded, sealed or both. Threads: any."""

    def __init__(self, inner: PageStore, codec: Codec | None, seal: Seal | None, *, block: int = 1) -> None:
        """``block``: the block size, in bytes, to which ``inner`` rounds up stored pages anyway."""
        super().__init__(inner)
        # Set only if the store below has the ability: ``ability`` looks for these names.
        if (keeper := ability(inner, IdentityKeeper)) is not None:
            self.identities = functools.partial(self._identities_of, keeper)
        if (lister := ability(inner, PageLister)) is not None:
            self.block_hashes = functools.partial(self._block_hashes_of, lister)
        self._portions = Portions(inner.describe())
        self._memory = LentMemory()
        self._documents: dict[bytes, Mapping[str, Any]] = {}
        self._known = KnownForms(Transforms(codec, seal, block), self._documents)
        self._bad = BadSeals(inner, self._memory, shared=inner.describe().shared)
        self._unsealed: UnsealedPages | None = None
        if seal is not None:
            self._unsealed = UnsealedPages(inner, KnownForms(Transforms(codec, None, block), self._documents))
        self._log = LimitedLog(logger, 60.0)

    @property
    def seal(self) -> Seal | None:
        """Return the seal in force."""
        return self._known.transforms.seal

    def put_seal(self, seal: Seal) -> None:
        """Use the keys of ``seal`` from the next call on; the mode stays the same."""
        before = self._known.transforms
        self._known = KnownForms(Transforms(before.codec, seal, before.block), self._documents)
        for digest, document in list(self._documents.items()):
            self._register_forms(self._known, digest, document)

    def forms(self, digest: bytes) -> Sequence[Form]:
        """Return the forms in which pages of this identity are looked up."""
        return self._known.forms(digest).all

    def describe(self) -> StoreInfo:
        info, transforms = self.inner.describe(), self._known.transforms
        details = dict(info.details)
        if transforms.seal is not None:
            details["seal"] = {"mode": transforms.seal.mode.name.lower(), "keys": [k.id for k in transforms.seal.keys]}
        if transforms.codec is not None:
            details["codec"] = transforms.codec.label.decode("ascii", "replace")
        return StoreInfo(info.name, info.type, info.shared, details)

    # -- identities ------------------------------------------------------------------------------------------------

    def register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        self._documents[digest] = document
        # Unchanged, because tools look for the identity of a model under its own digest.
        self.inner.register_identity(digest, document)
        self._register_forms(self._known, digest, document)

    def _register_forms(self, known: KnownForms, digest: bytes, document: Mapping[str, Any]) -> None:
        for form in known.forms(digest).written:
            if form.plain:
                continue
            self.inner.register_identity(form.identity, known.transforms.document(form, digest, document))

    def _identities_of(self, keeper: IdentityKeeper) -> dict[bytes, dict[str, Any]]:
        """Implement ``IdentityKeeper``."""
        documents = keeper.identities().items()
        return {digest: kept for digest, kept in documents if isinstance(kept, dict) and STORED_AS not in kept}

    def _block_hashes_of(self, lister: PageLister, digest: bytes) -> npt.NDArray[np.int64]:
        """Implement ``PageLister``, without pages whose names are hidden: their names do not reveal their hashes."""
        found = [lister.block_hashes(form.identity) for form in self.forms(digest) if not form.hides]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def clear(self, digests: Sequence[bytes] | None) -> int:
        """Clear all forms, including pages stored before the tier had a seal and, if the tier keeps documents, forms of
        keys that are no longer configured."""
        if digests is not None and not digests:
            return self.inner.clear(digests)
        documents = self._documents_of_inner()
        # The identities whose forms ``inner`` sees as several identities.
        several = [digest for digest in list(self._documents) if len(self._known.forms(digest).all) > 1]
        wanted = several if digests is None else list(dict.fromkeys(digests))
        had_pages = 0
        for digest in wanted:
            stored = [form.identity for form in self._known.forms(digest).all]
            stored += [other for other, document in documents.items() if stored_as(document, digest)]
            had_pages += self.inner.clear(list(dict.fromkeys([*stored, digest]))) > 0
        return had_pages if digests is not None else had_pages + self.inner.clear(None)

    def _documents_of_inner(self) -> Mapping[bytes, Mapping[str, Any]]:
        keeper = ability(self.inner, IdentityKeeper)
        try:
            documents = {} if keeper is None else keeper.identities()
            return {digest: document for digest, document in documents.items() if isinstance(document, dict)}
        except StoreClosedError:
            raise
        except Exception as error:  # noqa: BLE001 - the medium is unreachable: clear the forms that are known
            self._log.log(logging.WARNING, "identities", "tier %s: its identities: %r", self.name, error)
            return {}

    def names_of(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Return the page hashes under which ``inner`` may have these pages; they differ if the seal hides names."""
        seal = self.seal
        return hashes if seal is None else seal.names_of(hashes)

    # -- presence --------------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        known, found = self._known, [False] * len(keys)
        for positions, some in by_identity(keys):
            forms = self._forms_found(known, some)
            put_back(found, positions, [form is not None for form in forms])
            if self._unsealed is not None and None in forms:
                missing = [page for page, form in enumerate(forms) if form is None]
                self._unsealed.note(some.chosen(missing))
        return found

    def _forms_found(self, known: KnownForms, keys: PageKeys) -> list[int | None]:
        """Return the index (in ``Forms.all``) of the first form present, for each page; all are of one identity."""
        forms = known.forms(keys.identity).all
        names = [stored_keys(form, keys) for form in forms]
        requested = names[0] if len(forms) == 1 else [key for of_form in names for key in of_form]
        present = one_for_each(self.inner.contains(requested), len(requested))
        if self._bad.some:
            present = [there and not self._bad.hides(key) for key, there in zip(requested, present, strict=True)]
        count = len(keys)
        found = [
            next((form for form in range(len(forms)) if present[form * count + page]), None) for page in range(count)
        ]
        if len(forms) > 1:
            known.remember(keys, found)
        return found

    def count_leading(self, keys: Sequence[bytes]) -> int:
        known = self._known
        groups = list(by_identity(keys))
        if len(groups) == 1 and len(forms := known.forms(groups[0][1].identity).all) == 1 and not self._bad.some:
            count = self.inner.count_leading(stored_keys(forms[0], groups[0][1]))
            if self._unsealed is not None and count < len(keys):
                self._unsealed.note(groups[0][1][count:])
            return count
        return leading_in_portions(keys, self.contains, _LEADING_AT_ONCE, 4)

    def remove(self, keys: Sequence[bytes]) -> int:
        known, removed = self._known, 0
        for _, some in by_identity(list(dict.fromkeys(keys))):
            forms = known.forms(some.identity).all
            if len(forms) == 1:
                removed += self.inner.remove(stored_keys(forms[0], some))
                continue
            removed += sum(form is not None for form in self._forms_found(known, some))
            self.inner.remove([key for form in forms for key in stored_keys(form, some)])
        return removed

    # -- reading ---------------------------------------------------------------------------------------------------

    def get(self, batch: PageBatch) -> list[GetResult]:
        return self._moved("get", batch, self._get_of_identity, GetResult.ERROR)

    def _get_of_identity(self, known: KnownForms, keys: PageKeys, batch: PageBatch) -> list[GetResult]:
        forms = known.forms(keys.identity)
        chosen = self._chosen_forms(known, forms, keys)
        stored = stored_keys_of(keys, chosen)
        results: list[GetResult] = [GetResult.ERROR] * len(batch)
        plain = [page for page, form in enumerate(chosen) if form.plain]
        batch.move_at(plain, functools.partial(self._move, known, "get"), results)
        coded = [page for page, form in enumerate(chosen) if not form.plain]
        portions = self._portions.of(coded, [chosen[page].stored_length(batch.sizes[page]) for page in coded])

        def read(number: int) -> None:
            positions = portions[number]
            answers = self._read_portion(known, batch, positions, [stored[i] for i in positions], chosen)
            put_back(results, positions, answers)

        self._portions.run(len(portions), read)
        if self._bad.some:
            self._bad.forget([key for key, result in zip(stored, results, strict=True) if result is GetResult.HIT])
        if self._unsealed is not None and GetResult.MISS in results:
            missing = [page for page, result in enumerate(results) if result is GetResult.MISS]
            self._unsealed.note(keys.chosen(missing))
        return results

    def _read_portion(
        self,
        known: KnownForms,
        batch: PageBatch,
        positions: Sequence[int],
        names: Sequence[bytes],
        forms: Sequence[Form],
    ) -> list[GetResult]:
        """Read the pages at these positions, which are stored under ``names``; ``forms`` has those of all pages."""
        lengths = [forms[i].stored_length(batch.sizes[i]) for i in positions]
        with self._memory.lent_to_call(lengths) as rooms:
            requested = PageBatch(names, [[room] for room in rooms], lengths, [batch.sizes[i] for i in positions])
            answers: list[GetResult] = self._move(known, "get", requested)
            hits = [page for page, answer in enumerate(answers) if answer is GetResult.HIT]

            def unpack(number: int) -> None:
                page = hits[number]
                form, segments = forms[positions[page]], batch.buffers[positions[page]]
                try:
                    reason = body.read(rooms[page], names[page], form, segments, self._memory.of_thread)
                except Exception as error:  # noqa: BLE001 - fails this page alone
                    answers[page] = GetResult.ERROR
                    self.metrics.add("error", error_reason(error))
                    self._log.log(logging.WARNING, "read", "tier %s: a page: %r", self.name, error, exc_info=error)
                    return
                if reason is not None:
                    answers[page] = GetResult.CORRUPT
                    self._bad.note(names[page], reason)

            self._portions.each(len(hits), unpack)
        codecs = [forms[positions[page]].codec for page in hits if answers[page] is GetResult.HIT]
        if lossy := [_LOSSY[codec.code] for codec in codecs if codec is not None and codec.code in _LOSSY]:
            self.metrics.add_many("lossy", Counter(lossy))
        return answers

    def _chosen_forms(self, known: KnownForms, forms: Forms, keys: PageKeys) -> list[Form]:
        """Return the form in which to request each page: the one seen last, or else the one present now."""
        if len(forms.all) == 1:
            return [forms.all[0]] * len(keys)
        places = known.remembered(keys)
        unknown = [page for page, place in enumerate(places) if place is None]
        if unknown:
            put_back(places, unknown, self._forms_found(known, keys.chosen(unknown)))
        return [forms.all[place or 0] for place in places]

    # -- writing ---------------------------------------------------------------------------------------------------

    def set(self, batch: PageBatch) -> list[SetResult]:
        return self._moved("set", batch, self._set_of_identity, SetResult.ERROR)

    def _set_of_identity(self, known: KnownForms, keys: PageKeys, batch: PageBatch) -> list[SetResult]:
        forms = known.forms(keys.identity)
        left = list(range(len(batch)))
        if len(forms.written) > 1:
            # Encoding a page costs more than a lookup, and the page may be present in another form.
            found = self._forms_found(known, keys)
            left = [page for page, place in enumerate(found) if place is None or place >= len(forms.written)]
        # None: to be stored unencoded.
        results: list[Any] = [SetResult.EXISTS] * len(batch)
        put_back(results, left, [None] * len(left))
        raw = forms.written[0]
        if raw.plain and not known.encodes_now(forms):
            left = []
        portions = self._portions.of(left, [raw.stored_length(batch.sizes[page]) for page in left])

        def write(number: int) -> None:
            positions = portions[number]
            written = self._write_portion(known, forms, batch.select(positions), keys.chosen(positions))
            put_back(results, positions, written)

        self._portions.run(len(portions), write)
        plain = [page for page, result in enumerate(results) if result is None]
        batch.move_at(plain, functools.partial(self._move, known, "set"), results)
        return results

    def _write_portion(
        self, known: KnownForms, forms: Forms, batch: PageBatch, keys: PageKeys
    ) -> Sequence[SetResult | None]:
        """Write pages of one identity; the result is None for pages to be stored unencoded and unsealed."""
        coded, raw = self._encoded(known, forms, batch), forms.written[0]
        results: list[SetResult | None] = [None] * len(batch)
        some = [page for page, piece in enumerate(coded) if piece is not None or not raw.plain]
        if not some:
            return results
        if len(some) < len(batch):
            batch, keys, coded = batch.select(some), keys.chosen(some), [coded[page] for page in some]
        chosen = [
            raw if piece is None else next(form for form in forms.written[1:] if piece.nbytes <= form.room)
            for piece in coded
        ]
        stored = stored_keys_of(keys, chosen)
        lengths = [form.stored_length(size) for form, size in zip(chosen, batch.sizes, strict=True)]
        salts = new_salts(len(batch))
        with self._memory.lent_to_call(lengths) as rooms:

            def pack(page: int) -> None:
                salt = salts[page * SALT_LENGTH : (page + 1) * SALT_LENGTH]
                pages = chosen[page], batch.buffers[page], coded[page]
                body.write(rooms[page], stored[page], *pages, salt, self._memory.of_thread)

            self._portions.each(len(batch), pack)
            given = PageBatch(stored, [[room] for room in rooms], lengths, batch.sizes)
            kept = self._bad.keep(given, list(zip(chosen, batch.sizes, strict=True)))
            written = [SetResult.REJECTED] * len(batch)
            free = [page for page in range(len(batch)) if page not in kept]
            given.move_at(free, functools.partial(self._move, known, "set"), written)
        put_back(results, some, written)
        return results

    def _encoded(self, known: KnownForms, forms: Forms, batch: PageBatch) -> list[memoryview | None]:
        """Return each page encoded, or None for a page to be stored unencoded."""
        codec, paying = forms.written[-1].codec, known.paying
        if codec is None or not known.encodes_now(forms):
            return [None] * len(batch)

        def encode(page: int) -> memoryview | None:
            if batch.sizes[page] != codec.payload:
                return None
            return body.encoded(codec, paying, batch.buffers[page], self._memory.of_thread)

        return self._portions.each(len(batch), encode)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _move(self, known: KnownForms, call: str, batch: PageBatch) -> list[Any]:
        """Call ``get`` or ``set`` of ``inner`` and record its duration, from which ``paying`` judges the encoding."""
        began = time.monotonic()
        answers = one_for_each(getattr(self.inner, call)(batch), len(batch))
        if known.paying is not None and (moved := answers.count(_MOVED[call])):
            known.paying.moved(call, sum(batch.sizes) * moved // len(batch), time.monotonic() - began)
        return answers

    def _moved(
        self,
        call: str,
        batch: PageBatch,
        move: Callable[[KnownForms, PageKeys, PageBatch], list[_Result]],
        error: _Result,
    ) -> list[_Result]:
        """Apply ``move`` to the pages of each identity and return all results in order."""
        results, known = [error] * len(batch), self._known
        for positions, keys in by_identity(batch.keys):
            some = batch.select(positions)
            try:
                of_identity = move(known, keys, some)
            except StoreClosedError:
                raise
            except Exception as raised:  # noqa: BLE001 - no memory, no thread: the pages are not moved
                self.metrics.add("error", error_reason(raised), len(positions))
                self._log.log(logging.WARNING, call, "tier %s: %s: %r", self.name, call, raised, exc_info=raised)
                continue
            put_back(results, positions, of_identity)
        return results

    def close(self) -> None:
        if self._unsealed is not None:
            self._unsealed.close()
        self.inner.close()
        self._portions.close()
