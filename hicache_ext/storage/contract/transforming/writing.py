"""Pages on their way to a medium: encoded, sealed, and written in portions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from hicache_ext.page.transforms import body
from hicache_ext.page.transforms.forms import Forms
from hicache_ext.page.transforms.header import SALT_LENGTH
from hicache_ext.page.transforms.sealing import new_salts
from hicache_ext.storage.contract.base import one_for_each
from hicache_ext.storage.contract.store import PageBatch, PageKeys, PageStore, SetResult
from hicache_ext.storage.contract.transforming.bad_seals import BadSeals
from hicache_ext.storage.contract.transforming.known_forms import KnownForms, chosen_of, stored_keys_of
from hicache_ext.storage.contract.transforming.page_memory import PageMemory
from hicache_ext.storage.contract.transforming.portions import Portions


class Writing:
    """That of one store. Threads: any."""

    def __init__(
        self,
        inner: PageStore,
        memory: PageMemory,
        portions: Portions,
        bad: BadSeals,
        forms_found: Callable[[KnownForms, PageKeys], list[int | None]],
    ) -> None:
        """``forms_found``: of each page, the first form that is there, as its place among all."""
        self._inner = inner
        self._memory = memory
        self._portions = portions
        self._bad = bad
        self._forms_found = forms_found

    def write(self, known: KnownForms, keys: PageKeys, batch: PageBatch) -> list[SetResult]:
        """Pages of one identity."""
        forms = known.forms(keys.identity)
        results = [SetResult.ERROR] * len(batch)
        left = list(range(len(batch)))
        if len(forms.written) > 1:
            # To encode a page costs more than to ask whether it is there; and it may be there in another form.
            found = self._forms_found(known, keys)
            for page in left:
                if (place := found[page]) is not None and place < len(forms.written):
                    results[page] = SetResult.EXISTS
            left = [page for page in left if results[page] is not SetResult.EXISTS]
        raw = forms.written[0]
        plain: list[int] = []
        if raw.plain and not forms.encodes_now():
            plain, left = left, []
        portions = self._portions.of(left, [known.length(raw, batch.sizes[page]) for page in left])

        def write(number: int) -> None:
            positions = portions[number]
            names = keys.chosen(np.array(positions))
            for position, answer in zip(
                positions, self._write_portion(known, forms, batch.select(positions), names), strict=True
            ):
                if answer is None:
                    plain.append(position)
                else:
                    results[position] = answer

        self._portions.run(len(portions), write)
        plain.sort()
        for position, stored in zip(plain, self._set_plain(known, chosen_of(batch, plain)), strict=True):
            results[position] = stored
        return results

    def _set_plain(self, known: KnownForms, batch: PageBatch) -> list[SetResult]:
        """Pages that are stored as they are, from their places."""
        if not len(batch):
            return []
        began = time.monotonic()
        answers = one_for_each(self._inner.set(batch), len(batch))
        known.note_moved("set", batch, began, answers.count(SetResult.STORED))
        return answers

    def _write_portion(
        self, known: KnownForms, forms: Forms, batch: PageBatch, keys: PageKeys
    ) -> Sequence[SetResult | None]:
        """Write pages of one identity; None of those that are to be stored as they are, without a seal."""
        coded = self._encoded(forms, batch)
        if forms.written[0].plain:
            results: list[SetResult | None] = [None] * len(batch)
            some = [page for page, piece in enumerate(coded) if piece is not None]
            written = self._write_transformed(
                known,
                forms,
                chosen_of(batch, some),
                keys.chosen(np.array(some, np.int64)),
                [coded[page] for page in some],
            )
            for page, answer in zip(some, written, strict=True):
                results[page] = answer
            return results
        return self._write_transformed(known, forms, batch, keys, coded)

    def _write_transformed(
        self,
        known: KnownForms,
        forms: Forms,
        batch: PageBatch,
        keys: PageKeys,
        coded: Sequence[memoryview | None],
    ) -> list[SetResult]:
        if not len(batch):
            return []
        chosen = [
            forms.written[0] if piece is None else next(form for form in forms.written[1:] if piece.nbytes <= form.room)
            for piece in coded
        ]
        stored = stored_keys_of(keys, chosen)
        lengths = [known.length(form, size) for form, size in zip(chosen, batch.sizes, strict=True)]
        salts = new_salts(len(batch))
        with self._memory.lent(lengths) as rooms:
            of_thread = self._memory.of_thread
            finish = [
                body.writing(
                    rooms[page],
                    stored[page],
                    chosen[page],
                    batch.buffers[page],
                    coded[page],
                    salts[page * SALT_LENGTH : (page + 1) * SALT_LENGTH],
                    of_thread,
                )
                for page in range(len(batch))
            ]
            self._portions.each(len(batch), lambda page: finish[page]())
            given = PageBatch(stored, [[room] for room in rooms], lengths, batch.sizes)
            kept = self._bad.keep(given, list(zip(chosen, batch.sizes, strict=True)))
            if kept:
                given = given.select([page for page in range(len(batch)) if page not in kept])
            began = time.monotonic()
            answers = iter(one_for_each(self._inner.set(given), len(given)))
            results = [SetResult.REJECTED if page in kept else next(answers) for page in range(len(batch))]
            known.note_moved("set", given, began, results.count(SetResult.STORED))
        return results

    def _encoded(self, forms: Forms, batch: PageBatch) -> list[memoryview | None]:
        """Each page encoded, None where it is stored as it is."""
        codec = forms.written[-1].codec
        if codec is None or not forms.encodes_now():
            return [None] * len(batch)

        def encode(page: int) -> memoryview | None:
            if batch.sizes[page] != forms.payload:
                return None
            return body.encoded(codec, batch.buffers[page], self._memory.of_thread)

        return self._portions.each(len(batch), encode)
