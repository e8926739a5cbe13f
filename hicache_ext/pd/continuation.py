"""One request on a decode node as pages: their hashes, which were copied to host memory, and which wait to be written.

Everything belongs to the scheduler thread, except ``chain``: the storage thread has it while a write is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

# -- page hashes -------------------------------------------------------------------------------------------------------
# As a prefill node computes them: sha256(hash before || token ids of the page), the first one seeded from extra_key and
# cache_salt.

HashPages = Callable[[Sequence[int], str | None], list[str]]
"""Hashes of the whole pages of some tokens of a request; the second argument is the hash of the page before them."""


class PageChain:
    """Hashes of the pages 0, 1, 2, ... of a growing sequence of tokens. For one thread at a time."""

    def __init__(self, page_size: int, hash_pages: HashPages) -> None:
        """``hash_pages`` knows what the request's hashes are seeded from."""
        self.page_size = page_size
        self._hash_pages = hash_pages
        self._hashes: list[str] = []

    def __len__(self) -> int:
        """Pages hashed so far."""
        return len(self._hashes)

    def tokens_for(self, first_page: int, end_page: int) -> slice:
        """The tokens that the pages from ``first_page`` up to ``end_page`` are hashed from."""
        return slice(first_page * self.page_size, end_page * self.page_size)

    def pages_in(self, tokens: int) -> int:
        """Whole pages of a prompt of ``tokens`` tokens, as a prefill node stores it."""
        return tokens // self.page_size

    def extend(self, tokens: Sequence[int]) -> None:
        """Hash the next pages from exactly their tokens: ``tokens_for(len(self), ...)``."""
        pages = self.pages_in(len(tokens))
        if pages:
            whole = tokens[self.tokens_for(0, pages)]
            self._hashes += self._hash_pages(whole, self._hashes[-1] if self._hashes else None)

    def hashes(self, first_page: int, end_page: int) -> list[str]:
        """Hashes of pages already hashed."""
        if end_page > len(self._hashes):
            raise IndexError(f"{end_page} pages asked for, {len(self._hashes)} hashed")
        return self._hashes[first_page:end_page]


# -- one request -------------------------------------------------------------------------------------------------------


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


# -- what waits --------------------------------------------------------------------------------------------------------
# Pages in host memory that wait to be written, and which of them are dropped when host memory is full.
#
# Used by the scheduler thread only. Every choice depends only on facts that are equal on all ranks, so that ranks drop
# the same pages without communication.


class WriteQueue:
    """Continuations with pieces to write, in order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[int, Continuation] = {}
        self.pages = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, piece: Piece) -> None:
        """Append a piece to those of its continuation."""
        piece.continuation.waiting.append(piece)
        self._waiting.setdefault(piece.continuation.number, piece.continuation)
        self.pages += piece.pages

    def put_back(self, pieces: list[Piece]) -> None:
        """Return pieces whose write failed: first of their continuation, which goes to the end of the queue."""
        continuation = pieces[0].continuation
        continuation.waiting.extendleft(reversed(pieces))
        self._waiting.pop(continuation.number, None)
        self._waiting[continuation.number] = continuation
        self.pages += sum(piece.pages for piece in pieces)

    def take_run(self, now: int, most_pages: int) -> list[Piece]:
        """The next consecutive pieces of one continuation, at most ``most_pages`` together (or one piece); [] if none.

        A continuation has one run under way at a time: its pages must reach the pool in the order of the chain.
        """
        for continuation in self._waiting.values():
            if continuation.in_flight or continuation.not_before > now:
                continue
            run = [continuation.waiting.popleft()]
            pages = run[0].pages
            while continuation.waiting and pages + continuation.waiting[0].pages <= most_pages:
                run.append(continuation.waiting.popleft())
                pages += run[-1].pages
            self.pages -= pages
            if not continuation.waiting:
                del self._waiting[continuation.number]
            return run
        return []

    def empty(self, continuation: Continuation) -> list[Piece]:
        """Take all waiting pieces of one continuation."""
        if self._waiting.pop(continuation.number, None) is None:
            return []
        pieces = list(continuation.waiting)
        continuation.waiting.clear()
        self.pages -= sum(piece.pages for piece in pieces)
        return pieces

    def victims(self, spare: Continuation) -> Iterator[Continuation]:
        """Continuations that lose their waiting pieces, first to go first: by priority, then by age.

        Never ``spare``, for which memory is freed, nor one of a higher priority than ``spare``.
        """
        candidates = [
            (order, continuation)
            for order, continuation in enumerate(self._waiting.values())
            if continuation is not spare and continuation.priority <= spare.priority
        ]
        candidates.sort(key=lambda item: (item[1].priority, item[1].born, item[0]))
        return (continuation for _, continuation in candidates)
