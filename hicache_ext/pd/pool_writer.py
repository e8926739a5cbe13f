"""The thread that writes a decode node's pages to the pool: hash, look up, write. No other thread waits on a store.

Jobs are done and reported in the order of arrival: ranks compare how many each has finished.
"""

from __future__ import annotations

import enum
import logging
import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import torch

from hicache_ext.pd.continuation import Continuation, Piece
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.store import SetResult

logger = logging.getLogger(__name__)

_PAGES_PER_CALL = 128


class Outcome(enum.IntEnum):
    """How a job ended; of several ranks the smallest counts."""

    FAILED = 0
    PREFIX_MISSING = 1
    REFUSED = 2
    """A page is not worth storing, by admission: what follows it is of no use, either."""
    WRITTEN = 3


@dataclass(frozen=True, slots=True)
class WriteJob:
    """Consecutive pieces of one continuation, written together."""

    continuation: Continuation
    pieces: list[Piece]
    look_for_prefix: bool
    """Write only if the prompt's pages are in the pool."""

    @property
    def pages(self) -> int:
        return sum(piece.pages for piece in self.pieces)


class PoolWriter:
    """``submit`` and ``finished`` run on the scheduler thread and never wait; everything else on a thread of its
    own."""

    def __init__(self, pool: Any, metrics: TierMetrics, *, writes: bool = True) -> None:
        """``pool``: the backend (sglang/backend.py). ``writes=False``: a rank whose pages another rank writes; its jobs
        end at once."""
        self._pool = pool
        self._metrics = metrics
        self._writes = writes
        self._jobs: deque[WriteJob] = deque()
        self._finished: deque[tuple[WriteJob, Outcome]] = deque()
        self._log = LimitedLog(logger, 1.0)
        self._loop = BackgroundLoop("hicache-ext-pd-writer", self._work)
        # At once: a machine without threads shows at the start, and not when jobs keep host memory.
        self._loop.wake()

    def submit(self, job: WriteJob) -> None:
        self._jobs.append(job)
        self._loop.wake()

    @property
    def finished_jobs(self) -> int:
        """Jobs that ended and were not taken."""
        return len(self._finished)

    def take_finished(self, count: int) -> list[tuple[WriteJob, Outcome]]:
        return [self._finished.popleft() for _ in range(count)]

    def stop(self, timeout: float) -> bool:
        """End the thread after the job under way. False: it did not end, and host memory must not be freed."""
        return self._loop.stop(timeout)

    def _work(self) -> float:
        while self._jobs and not self._loop.stopping:
            job = self._jobs.popleft()
            try:
                outcome = self._write(job)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - without this thread nothing is ever written again
                self._metrics.add("failure", type(error).__name__)
                self._log.log(logging.ERROR, "write", "hicache_ext: a decode node's write failed", exc_info=error)
                outcome = Outcome.FAILED
            self._finished.append((job, outcome))
        return math.inf

    def _write(self, job: WriteJob) -> Outcome:
        if not self._writes:
            return Outcome.WRITTEN
        continuation, pieces = job.continuation, job.pieces
        chain = continuation.chain
        first_page = pieces[0].first_page
        if first_page and len(chain) < continuation.prompt_pages:
            chain.extend(continuation.prompt[chain.tokens_for(len(chain), continuation.prompt_pages)])
        prompt = chain.hashes(0, continuation.prompt_pages) if job.look_for_prefix else []
        if prompt and self._pool.stored_leading(prompt) < len(prompt):
            return Outcome.PREFIX_MISSING
        keys: list[str] = []
        for piece in pieces:
            if len(chain) < piece.first_page:
                raise RuntimeError(f"pages {len(chain)} to {piece.first_page} of a request were never copied")
            if len(chain) < piece.end_page:
                chain.extend(piece.tokens[(len(chain) - piece.first_page) * chain.page_size :])
            keys += chain.hashes(piece.first_page, piece.end_page)
        host_indices = torch.cat([piece.host_indices for piece in pieces]).reshape(len(keys), chain.page_size)
        for first in range(0, len(keys), _PAGES_PER_CALL):
            end = first + _PAGES_PER_CALL
            outcome = self._write_pages(keys[first:end], host_indices[first:end])
            if outcome is not Outcome.WRITTEN:
                return outcome
        return Outcome.WRITTEN

    def _write_pages(self, keys: list[str], host_indices: torch.Tensor) -> Outcome:
        """Write the pages that the pool lacks: WRITTEN where it has all of them now."""
        absent = [page for page, known in enumerate(self._pool.stored(keys)) if not known]
        self._metrics.add("page", "present", len(keys) - len(absent))
        if not absent:
            return Outcome.WRITTEN
        results = self._pool.store_pages([keys[page] for page in absent], host_indices[absent].flatten())
        self._metrics.add("write", "calls")
        ends = Counter("present" if result is SetResult.EXISTS else result.value for result in results)
        self._metrics.add_many("page", ends)
        if all(result.durable for result in results):
            return Outcome.WRITTEN
        refused = all(result.durable or result is SetResult.REFUSED for result in results)
        return Outcome.REFUSED if refused else Outcome.FAILED
