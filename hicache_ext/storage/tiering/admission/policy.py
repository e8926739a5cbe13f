"""Which of the pages that are offered to a tier are written: those that were asked for before, and of the others those
of classes that return within the tier's life.

What a tier has refused is remembered, and written when it is asked for again. Decisions follow from the pages alone,
and from no clock of seconds (but for a write budget): the ranks of a model are asked for the same pages and decide
alike, as a page is of use only where all of them have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hicache_ext.storage.tiering.admission.classes import (
    CLASSES,
    FIRSTS,
    RUNS,
    UNKNOWN,
    Continuations,
    classes_of_run,
    seen_again,
)
from hicache_ext.storage.tiering.admission.experience import Experience
from hicache_ext.storage.tiering.admission.firsts import Firsts
from hicache_ext.storage.tiering.admission.rule import Choice, choose, life_of_everything

Words = npt.NDArray[np.int64]
Chosen = npt.NDArray[np.bool_]

KEEP = 0.97
"""The share of the hits of a tier that stores everything, or of a better choice, that is to be kept."""
_FULL_BATCH = 128
"""Pages of a call of SGLang's that has more to say: the next one goes on with the run."""
_KINDS_OF_CLASSES = (np.arange(FIRSTS), np.arange(FIRSTS, CLASSES))
_STEP = 1 << 12
"""Pages used from one choice to the next."""
_LONGEST_LIFE = 1 << 24
"""Pages used: what returns later is not waited for."""
_SHORTEST_MEMORY = 1 << 16
"""Pages used that are learnt from, at least; one life, where that is longer."""


class AdmissionPolicy:
    """One per tier and process. ``continuations`` is for any thread; the rest is not locked: the caller is."""

    def __init__(
        self,
        capacity: Callable[[], float],
        keep: float | None = KEEP,
        most_writes: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """``capacity`` in pages; infinite where it is not known. ``keep`` and ``most_writes``: as of ``choose``."""
        self.continuations = Continuations()
        self.experience = Experience(CLASSES)
        self.choice: Choice | None = None
        """None: everything is written, until it was seen what becomes of pages in one life of the tier."""
        self._capacity = capacity
        self._keep = keep
        self._most_writes = most_writes
        self._firsts = Firsts()
        self._next_choice = 2 * _STEP
        self._last_chosen = 0
        self._full: int | None = None
        """The identity of a batch that the next one may go on with."""
        self._kind, self._place, self._is_refused = UNKNOWN, 0, False
        """Of the run that was offered last: kind, pages, and whether one of them was refused."""

    def offered(self, words: Words) -> tuple[Chosen, Chosen]:
        """Pages of one request, consecutive and in order, that SGLang wants to store: which are to be written, and
        which were asked for before. ``words``: ``key_words`` of their first parts."""
        known = self._firsts.note(words)
        pages = len(words)
        first_new = int(np.argmin(known)) if not known.all() else pages
        goes_on = self._begin_run(words, first_new)
        if first_new == pages:
            self._kind = UNKNOWN
        elif first_new:
            # What was asked for before has got another continuation.
            self._kind = self.continuations.note(int(words[first_new - 1, 2]), int(words[first_new, 2]))
        elif not goes_on:
            self._kind = self.continuations.kind(int(words[0, 2]))
        place = self._place if goes_on and not first_new else 0
        length = place + pages - first_new
        of_run = classes_of_run(length, place, pages - first_new, self._kind, ends=pages != _FULL_BATCH)
        classes = np.concatenate([np.full(first_new, FIRSTS), of_run])
        classes[known] = FIRSTS
        self._place = length
        wanted = known | (np.ones(pages, np.bool_) if self.choice is None else self.choice.admitted[classes])
        # A page is of use only behind all pages before it.
        wanted = np.logical_and.accumulate(wanted) & (not self._is_refused)
        self._is_refused = not wanted[-1]
        self._learn(words, classes)
        return wanted, known

    def cut(self) -> None:
        """The end of what was offered last is not written after all: nor is what follows it."""
        self._is_refused = True

    def read(self, words: Words) -> None:
        """Pages that were read from the tier."""
        self._learn(words, np.full(len(words), FIRSTS))

    def _begin_run(self, words: Words, first_new: int) -> bool:
        """Whether these pages go on with the run that was offered last."""
        identity = int(words[0, 0])
        is_known = self.continuations.kind(int(words[0, 2])) != UNKNOWN
        goes_on = self._full == identity and not is_known
        if not goes_on:
            self._is_refused = False
        self._full = identity if len(words) == _FULL_BATCH else None
        return goes_on

    def _learn(self, words: Words, classes: Words) -> None:
        experience = self.experience
        sampled = experience.sampled(words)
        of = words[sampled]
        pages = dict(zip(zip((of[:, 0] ^ of[:, 2]).tolist(), of[:, 5].tolist(), strict=True), sampled, strict=True))
        if pages:
            new = classes[list(pages.values())]
            experience.used([*pages], np.where(new < FIRSTS, new, seen_again(experience.classes_of([*pages]))))
        experience.pass_time(len(words))
        if experience.clock >= self._next_choice:
            self._choose()

    def _choose(self) -> None:
        experience, capacity = self.experience, self._capacity()
        curves = experience.curves(_KINDS_OF_CLASSES)
        life = min(life_of_everything(curves, capacity), _LONGEST_LIFE)
        passed = experience.clock - self._last_chosen
        self._last_chosen = experience.clock
        self._next_choice = experience.clock + _STEP
        most_writes = self._most_writes()
        saw_a_life = experience.clock >= life
        if saw_a_life or most_writes < math.inf or self.choice is not None:
            keep = self._keep if saw_a_life else None
            self.choice = choose(curves, FIRSTS, capacity, keep, most_writes, RUNS)
            life = max(life, min(self.choice.life, _LONGEST_LIFE))
        experience.thin_out(4 * life)
        experience.fade(math.exp(-passed / max(_SHORTEST_MEMORY, life)))
