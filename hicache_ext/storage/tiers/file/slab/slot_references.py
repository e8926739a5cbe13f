"""Pages of a batch and the slots they are in: column by column, because a step of Python per page is what a small page
costs most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


class SlotReference(NamedTuple):
    """One page. A tuple, and in this order, because those that are moved one by one are sorted by place."""

    slab: int
    slot: int
    length: int
    """Bytes of the payload."""
    position: int
    """In the batch."""
    row: int = -1
    """In the index."""


class Known(NamedTuple):
    """What is known of many pages without looking at each."""

    in_order: bool
    """Of their places."""
    length: int
    """Of each payload; negative where that is not known."""
    slab: int
    """The one that all are in; negative where that is not known."""


_NOTHING_KNOWN = Known(False, -1, -1)


@dataclass(frozen=True, slots=True)
class SlotReferences:
    """``SlotReference`` of many pages: arrays of the same length."""

    slabs: Numbers
    slots: Numbers
    lengths: Numbers
    positions: Numbers
    rows: Numbers
    known: Known = _NOTHING_KNOWN

    def __len__(self) -> int:
        return len(self.positions)

    def select(self, which: Any) -> SlotReferences:
        """Those that a numpy index chooses."""
        return self._of_columns(column[which] for column in self._columns())

    def by_place(self) -> SlotReferences:
        """Neighbours one behind the other."""
        if self.known.in_order:
            return self
        places = self.slabs << 32 | self.slots
        return self if (places[1:] > places[:-1]).all() else self.select(places.argsort())

    def by_position(self) -> SlotReferences:
        if (self.positions[1:] > self.positions[:-1]).all():
            return self
        return self.select(self.positions.argsort())

    def slab_numbers(self) -> set[int]:
        return {self.known.slab} if self.known.slab >= 0 else set(self.slabs.tolist())

    def pages(self) -> list[SlotReference]:
        return list(map(SlotReference._make, zip(*[column.tolist() for column in self._columns()], strict=True)))

    @classmethod
    def of(cls, pages: Iterable[SlotReference]) -> SlotReferences:
        columns = np.array(list(pages), np.int64).reshape(-1, 5).T
        return cls._of_columns(np.ascontiguousarray(column) for column in columns)

    @classmethod
    def joined(cls, several: Sequence[SlotReferences]) -> SlotReferences:
        return cls._of_columns(
            np.concatenate(columns) for columns in zip(*[one._columns() for one in several], strict=True)
        )

    @classmethod
    def _of_columns(cls, columns: Iterable[Numbers]) -> SlotReferences:
        slabs, slots, lengths, positions, rows = columns
        return cls(slabs, slots, lengths, positions, rows)

    def _columns(self) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
        return self.slabs, self.slots, self.lengths, self.positions, self.rows


NO_SLOTS = SlotReferences.of(())
