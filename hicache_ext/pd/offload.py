"""What the decode writer needs of the server: requests, copies from device to host memory, and that host memory.

``sglang/offload.py`` is SGLang's side of it. All of it belongs to the scheduler thread, and nothing waits but ``wait``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from hicache_ext.pd.continuation import Piece
from hicache_ext.pd.page_chain import PageChain


class Request(Protocol):
    """A request on a decode node; it can be weakly referenced and hashed."""

    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]

    def finished(self) -> bool: ...


class Offload(Protocol):
    """See the module docstring. A request that has finished is released once, after the last copy out of it."""

    page_size: int

    def is_on_device(self, request: Any) -> bool:
        """Whether the request's KV has a place in device memory."""

    def was_aborted(self, request: Any) -> bool:
        """Whether a finished request ended because it was aborted."""

    def page_chain(self, request: Any) -> PageChain:
        """An empty chain that hashes the request's pages as a prefill node does."""

    @property
    def host_tokens(self) -> int:
        """Host memory for copies, in tokens."""

    @property
    def free_host_tokens(self) -> int:
        """How much of it is free."""

    def allocate(self, tokens: int) -> torch.Tensor | None:
        """Host indices, one per token; None if there are not so many."""

    def free(self, host_indices: torch.Tensor) -> None:
        """Give host memory back."""

    def queue_copy(self, request: Any, piece: Piece) -> None:
        """Have the piece's pages copied with the next ``start_copies``."""

    def start_copies(self) -> list[Piece]:
        """Start all queued copies as one operation: what it costs the scheduler, it costs once.

        The pieces of copies that were refused: they have ended, and hold nothing.
        """

    def copying(self) -> Iterable[Piece]:
        """Pieces whose copies were queued and have not been taken."""

    def ended_copies(self) -> int:
        """Leading operations whose bytes are in host memory."""

    def take_copies(self, operations: int) -> Iterator[Piece]:
        """The pieces of the first so many operations, which have ended. Releases finished requests."""

    def wait(self) -> int:
        """Wait for every operation under way; how many they are."""
