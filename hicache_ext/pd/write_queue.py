"""Pages in host memory that wait to be written, and which of them are dropped when host memory is full.

Used by the scheduler thread only. Every choice depends only on facts that are equal on all ranks, so that ranks drop
the same pages without communication.
"""

from __future__ import annotations

from collections.abc import Iterator

from hicache_ext.pd.continuation import Continuation, Piece


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
