"""Pages in host memory that are not being written yet, and which of them go when there is no room.

Only the scheduler thread is here, and every choice depends on nothing but what all ranks agree on: the ranks of a
deployment keep equal waiting rooms without talking about them.
"""

from __future__ import annotations

from collections.abc import Iterator

from hicache_ext.config.pd import DropPolicy
from hicache_ext.pd.continuation import Continuation, Piece


class WaitingRoom:
    """Continuations with pieces to write, in the order in which they came."""

    def __init__(self, policy: DropPolicy) -> None:
        self._policy = policy
        self._waiting: dict[int, Continuation] = {}
        self.pages = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, piece: Piece) -> None:
        """A piece that follows the ones of its continuation that wait already."""
        piece.continuation.waiting.append(piece)
        self._waiting.setdefault(piece.continuation.number, piece.continuation)
        self.pages += piece.pages

    def put_back(self, pieces: list[Piece]) -> None:
        """Pieces whose write failed, to the front of their continuation and the end of the room."""
        continuation = pieces[0].continuation
        continuation.waiting.extendleft(reversed(pieces))
        self._waiting.pop(continuation.number, None)
        self._waiting[continuation.number] = continuation
        self.pages += sum(piece.pages for piece in pieces)

    def take_run(self, now: int, most_pages: int) -> list[Piece]:
        """The next consecutive pieces of one continuation, together at most ``most_pages`` (or one piece); [] if none.

        Of one continuation one run is under way at a time: its pages must reach the pool in the order of the chain.
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
        """Take out all that waits of one continuation."""
        if self._waiting.pop(continuation.number, None) is None:
            return []
        pieces = list(continuation.waiting)
        continuation.waiting.clear()
        self.pages -= sum(piece.pages for piece in pieces)
        return pieces

    def victims(self, spare: Continuation) -> Iterator[Continuation]:
        """Who loses its waiting pieces, worst first: lowest priority, then the policy; ``spare`` is not among them.

        Nobody goes who has a higher priority than the one for whom room is made.
        """
        candidates = [
            (order, continuation)
            for order, continuation in enumerate(self._waiting.values())
            if continuation is not spare and continuation.priority <= spare.priority
        ]
        if self._policy == "oldest":
            candidates.sort(key=lambda item: (item[1].priority, item[1].born, item[0]))
        else:
            candidates.sort(key=lambda item: (item[1].priority, item[1].generated, item[0]))
        return (continuation for _, continuation in candidates)
