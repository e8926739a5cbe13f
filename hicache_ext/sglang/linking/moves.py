"""What SGLang hands the linker, as pages of each pool that go together.

SGLang names pages by component (KV, SWA, MAMBA). Pools beside them (an indexer, drafts) lie on the same pages as one of
these. A *move* is some pages of one pool; a *portion* is what passes through staging memory at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hicache_ext.errors import UnsupportedError
from hicache_ext.sglang.lifecycle import name_of
from hicache_ext.sglang.served_pools import KV

PORTION_PAGES = 128
"""Pages of a portion, at most: as many as SGLang gives its storage at once."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of one component: ``page_size`` device indices for each key."""

    source: str
    keys: list[str]
    device_indices: torch.Tensor
    page_size: int

    def portions(self, pages: int) -> Iterator[Pages]:
        for begin in range(0, len(self.keys), pages):
            keys = self.keys[begin : begin + pages]
            tokens = self.device_indices[begin * self.page_size : (begin + len(keys)) * self.page_size]
            yield Pages(self.source, keys, tokens, self.page_size)


def pages_of(transfers: Sequence[Any], page_sizes: Mapping[str, int]) -> list[Pages]:
    """The pages of SGLang's transfers that have both keys and places on the device; KV last.

    KV last: where it is found, what lies beside it was written before. Raises UnsupportedError where the indices are
    not whole pages.
    """
    found = []
    for transfer in transfers:
        name, keys, indices = name_of(transfer.name), transfer.keys, transfer.device_indices
        if name not in page_sizes or not keys or indices is None:
            continue
        if indices.numel() != len(keys) * page_sizes[name]:
            given = f"{indices.numel()} indices for {len(keys)} pages of {page_sizes[name]}"
            raise UnsupportedError(f"a transfer of pool {name!r}", given)
        found.append(Pages(name, list(keys), indices, page_sizes[name]))
    return sorted(found, key=lambda pages: pages.source == KV)
