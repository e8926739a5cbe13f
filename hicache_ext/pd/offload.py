"""What the decode writer needs from the server: requests, copies from device to host memory, host memory.

``sglang/offload.py`` implements it. Scheduler thread only; nothing waits except ``wait``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hicache_ext.pd.continuation import Piece
from hicache_ext.pd.page_chain import PageChain


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request says about its own KV."""

    store: bool = True
    """False: nothing this request generates is written."""
    priority: int = 0
    """When host memory is full, the lowest priority is dropped first."""


class Offload(Protocol):
    """See the module docstring. A request can be weakly referenced and hashed; what it is, only the server knows. A
    finished one is released once, after its last copy."""

    page_size: int

    def prompt(self, request: Any) -> Sequence[int]:
        """The token ids that the request came with; not copied."""

    def options(self, request: Any) -> RequestOptions:
        """What it says about its KV."""

    def is_on_device(self, request: Any) -> bool:
        """Whether the request's KV has a place in device memory."""

    def page_chain(self, request: Any) -> PageChain:
        """An empty chain that hashes the request's pages as a prefill node does."""

    @property
    def host_tokens(self) -> int:
        """Host memory for copies, in tokens."""

    @property
    def free_host_tokens(self) -> int:
        """How much of it is free."""

    def allocate(self, tokens: int) -> torch.Tensor | None:
        """Host indices, one per token; None if too few are free."""

    def free(self, host_indices: torch.Tensor) -> None:
        """Give host memory back."""

    def queue_copy(self, request: Any, piece: Piece) -> None:
        """Copy the piece's pages with the next ``start_copies``."""

    def start_copies(self) -> Iterator[Piece]:
        """Start all queued copies as one operation, which costs the scheduler once; nothing happens before the first
        ``next``.

        The pieces of refused copies: these have ended, and their bytes are nowhere. Releases finished requests.
        """

    def copying(self) -> Iterable[Piece]:
        """Pieces whose copies were queued and not yet taken."""

    def ended_copies(self) -> int:
        """Leading operations whose bytes are in host memory."""

    def take_copies(self, operations: int) -> Iterator[Piece]:
        """The pieces of the first ``operations`` operations, which have ended. Releases finished requests."""

    def wait(self) -> int:
        """Wait for all operations under way; returns their number."""
