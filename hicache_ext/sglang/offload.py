"""SGLang's side of the decode writer.

Options of a request for its own KV come in ``sampling_params.custom_params``::

    {"sampling_params": {"custom_params": {"hicache_ext": {"store": false, "priority": 2}}}, ...}

This field is the only free mapping that SGLang carries from every entry point (/generate and the OpenAI calls, which
have it at the top level) to the scheduler's Req; otherwise only custom logit processors read it. extra_key and
cache_salt change the page hashes, and ``priority`` changes the scheduling. SGLang's ``kv_hints`` say the same, and more
(storage/serving/kv_hints.py).
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from hicache_ext.pd.decode_writer import PageChain, Piece, RequestOptions
from hicache_ext.storage.serving.kv_hints import said_by

logger = logging.getLogger(__name__)


class ManagerOffload:
    """SGLang's DecodeKVCacheOffloadManager, as the writer needs it. Scheduler thread only; nothing waits but ``wait``.

    A request can be weakly referenced and hashed; what it is, only this class knows. It keeps the manager's promises to
    the scheduler: a finished request's device memory is released once, after the last copy out of it;
    ``ongoing_offload`` names the copies under way.
    """

    def __init__(self, manager: Any) -> None:
        """``manager`` is SGLang's DecodeKVCacheOffloadManager."""
        self.page_size: int = manager.page_size
        self.host_pool = manager.decode_host_mem_pool
        """Host memory for copies: one index per token."""
        self._manager = manager
        self._copies_made = 0

    def is_on_device(self, request: Any) -> bool:
        return request.kv.req_pool_idx not in (None, -1)

    def facts(self, request: Any) -> tuple[Sequence[int], PageChain, RequestOptions]:
        """Return the prompt, an empty chain that hashes the request's pages as a prefill node does, and the options."""
        chain = page_chain(self.page_size, extra_key=request.extra_key, cache_salt=request.cache_salt)
        return request.origin_input_ids, chain, options_of(request)

    def queue_copy(self, request: Any, piece: Piece) -> None:
        """Copy the piece's pages with the next ``start_copies``."""
        from sglang.srt.managers.cache_controller import CacheOperation

        manager = self._manager
        row = manager.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
        tokens = slice(piece.first_page * self.page_size, piece.end_page * self.page_size)
        self._copies_made += 1
        operation = CacheOperation(piece.host_indices, row[tokens].to(torch.int64), self._copies_made)
        manager.cache_controller.write_queue.append(operation)
        manager.ongoing_offload[self._copies_made] = (request, piece)
        manager._mark_offload_started(request)

    def start_copies(self) -> Iterator[Piece]:
        """Start all queued copies as one operation, which costs the scheduler once; nothing happens before the first
        ``next``.

        The pieces of refused copies: these have ended, and their bytes are nowhere. Releases finished requests.
        """
        controller = self._manager.cache_controller
        if not controller.write_queue:
            return
        numbers = [number for operation in controller.write_queue for number in operation.node_ids]
        try:
            controller.start_writing()
        except Exception:
            logger.exception("hicache_ext: copies to host memory were refused, their pages will not be written")
            controller.write_queue.clear()
        else:
            return
        yield from self._take(numbers)

    def copying(self) -> Iterable[Piece]:
        """Return the pieces whose copies were queued and not yet taken."""
        return (piece for _, piece in self._manager.ongoing_offload.values())

    def ended_copies(self) -> int:
        """Count the leading operations whose bytes are in host memory."""
        ended = 0
        for ack in self._manager.cache_controller.ack_write_queue:
            if not ack.finish_event.query():
                break
            ended += 1
        return ended

    def take_copies(self, operations: int) -> Iterator[Piece]:
        """Return the pieces of the first ``operations`` operations, which have ended. Releases finished requests."""
        queue = self._manager.cache_controller.ack_write_queue
        for _ in range(operations):
            yield from self._take(queue.pop(0).node_ids)

    def wait(self) -> int:
        """Wait for all operations under way; return their number."""
        acks = self._manager.cache_controller.ack_write_queue
        for ack in acks:
            ack.finish_event.synchronize()
        return len(acks)

    def _take(self, numbers: Sequence[int]) -> Iterator[Piece]:
        manager = self._manager
        for number in numbers:
            request, piece = manager.ongoing_offload.pop(number)
            manager._mark_offload_finished(request)
            # Before the release, which may raise: the piece holds host memory.
            yield piece
            if request.finished() and not manager._has_inflight_offload(request):
                manager._release_finished_req(request)


def options_of(request: Any) -> RequestOptions:
    """The options of SGLang's ``Req``; absent or invalid ones have their defaults."""
    parameters = getattr(getattr(request, "sampling_params", None), "custom_params", None)
    said = said_by(getattr(request, "kv_hints", None), parameters)
    return RequestOptions() if said is None else RequestOptions(store=said.store, priority=said.priority)


def page_chain(page_size: int, *, extra_key: str | None, cache_salt: str | None) -> PageChain:
    """A chain hashed by SGLang itself."""

    def hash_pages(tokens: Sequence[int], before: str | None) -> list[str]:
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        ids = tokens if isinstance(tokens, array) else array("q", tokens)
        key = RadixKey(ids, extra_key=extra_key, cache_salt=cache_salt)
        hashes: list[str] = get_storage_hash_str(key, before, page_size=page_size)
        return hashes

    return PageChain(page_size, hash_pages)
