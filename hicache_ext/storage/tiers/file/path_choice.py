"""Which of a tier's paths a page lives on: rendezvous hashing.

Every path has a score for every page; the usable path with the highest score has the page. A path that is added takes
an even share from each of the others, and nothing moves between these. A path that is removed, or out of service,
leaves its pages evenly to the others. The order of the list plays no role. Reasons:
docs/decisions/layout-and-io-auto.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from hicache_ext.page.envelope import KEY_LENGTH

_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""From the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""


class PathChoice:
    """Pure; any thread. A path is known by its name as written in the configuration."""

    def __init__(self, names: Sequence[str]) -> None:
        self._seeds = np.array([xxhash.xxh3_64_intdigest(os.fsencode(name)) for name in names], dtype=np.uint64)

    def choose(self, keys: Sequence[bytes], usable: Sequence[int]) -> list[int]:
        """For each 48-byte key one of the path numbers ``usable``, of which there is at least one."""
        if len(usable) == 1 or not keys:
            return [usable[0]] * len(keys)
        # The end of a page hash: page files use its start for the fan-out directory.
        ends = np.frombuffer(b"".join(keys), dtype="<u8").reshape(len(keys), KEY_LENGTH // 8)[:, -1]
        scores = _mixed(ends[:, np.newaxis] ^ self._seeds[list(usable)][np.newaxis, :])
        return [usable[best] for best in scores.argmax(axis=1).tolist()]


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash: every bit of a value changes about half of the bits of the result."""
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIERS[1]
    return values ^ (values >> np.uint64(31))
