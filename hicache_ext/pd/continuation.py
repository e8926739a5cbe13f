"""One request on a decode node as pages: which were copied to host memory, and which of them reached the pool.

Everything belongs to the scheduler thread, except ``chain``: the storage thread has it while a write is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hicache_ext.pd.page_chain import PageChain


@dataclass(slots=True, eq=False)
class Piece:
    """A run of pages in host memory: being copied, waiting, or being written."""

    continuation: Continuation
    first_page: int
    pages: int
    host_indices: Any
    """CPU int64 tensor, one index per token."""
    tokens: Sequence[int]
    """The tokens ``PageChain.tokens_for`` of these pages."""
    epoch: int
    """The continuation's epoch when the copy began; a piece of an older epoch is dropped on arrival."""

    @property
    def end_page(self) -> int:
        return self.first_page + self.pages


@dataclass(slots=True, eq=False)
class Continuation:
    """See the module docstring. ``number`` is equal on all ranks."""

    number: int
    chain: PageChain
    prompt: Sequence[int]
    """SGLang's own token ids of the prompt; not copied."""
    prompt_pages: int
    """Whole pages of the prompt: what the prefill node writes."""
    priority: int
    copied_pages: int
    """Leading pages of the whole sequence that were copied or need no copy."""
    next_copy_at: int
    """Length of the output at which the next copy is due."""
    born: int
    """Milliseconds on the ranks' common clock."""
    prefix_known: bool = False
    """The prompt's pages are in the pool, or it has none."""
    finished: bool = False
    closed: bool = False
    """Nothing more of this request will be written."""
    epoch: int = 0
    generated: int = 0
    attempts: int = 0
    first_failure: int = 0
    waiting: deque[Piece] = field(default_factory=deque)
    in_flight: bool = False
    not_before: int = 0

    @property
    def waiting_pages(self) -> int:
        return sum(piece.pages for piece in self.waiting)
