"""The decode node's writer: copies generated pages to host memory and has them written to the pool.

Requests are opaque handles here; ``offload`` (sglang/decode_manager.py) owns them, the copies and the host memory.

A page is generated, copied to host memory at the next stride or when its request finishes, queued, given to the
PoolWriter, and then written, retried or counted as lost. Its host memory is freed in every case.

A prefill node can continue only from a page boundary at which it finds all pools of the model: every page of the KV,
and the tail of each other pool (the last pages of a sliding window, or one recurrent state). A piece therefore ends at
a boundary at which all pools can be copied; its pools are copied, dropped and written together, the KV last.

Everything but the PoolWriter runs on the scheduler thread and never waits for a store or a copy; the PoolWriter owns a
request's ``chain`` while a write is in flight. Ranks decide alike because decisions depend only on numbers agreed on
in ``step``: with several ranks, one small reduction per step, as in SGLang's own manager, and a second one
when writes have ended. Reasons: docs/decisions/pull-rule.md.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hicache_ext.config.model import WriteConfig
from hicache_ext.page.identity import KV_POOL as KV
from hicache_ext.runtime.background import BackgroundLoop
from hicache_ext.runtime.log_limit import LimitedLog
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract import tenants
from hicache_ext.storage.contract.store import SetResult, put_back
from hicache_ext.storage.serving.hints import HintSender

logger = logging.getLogger(__name__)


# -- one request -------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Piece:
    """A run of pages in host memory, with the tails at its end. It is being copied, waiting, or being written."""

    continuation: Continuation
    first_page: int
    pages_of: dict[str, int]
    """Pool -> number of its pages, which end at ``end_page``. The KV is the first key; it begins at ``first_page``."""
    host_indices: dict[str, torch.Tensor]
    """Pool -> host indices of those pages, in the same order: one per token, or one per recurrent state."""
    tokens: Sequence[int]
    """The tokens that these pages are hashed from (``PageChain.tokens_for``)."""
    epoch: int
    """The continuation's epoch when the copy began; a piece of an older epoch is dropped on arrival."""

    torn: bool = False
    """Whether the device memory of a tail was reused before its copy had ended."""

    @property
    def pages(self) -> int:
        return self.pages_of[KV]

    @property
    def end_page(self) -> int:
        return self.first_page + self.pages


@dataclass(slots=True, eq=False)
class Continuation:
    """The pages of one request: which were copied to host memory, and which wait to be written."""

    chain: Any
    """The chain of page hashes (``PageChain`` in sglang/decode_manager.py)."""
    prompt: Sequence[int]
    """SGLang's own token ids of the prompt; not copied."""
    prompt_pages: int
    """Whole pages of the prompt, which the prefill node writes."""
    priority: int
    copied_pages: int
    """Leading pages of prompt plus output that were copied or need no copy."""
    next_copy_at: int
    """Length of the output at which the next copy is due."""
    created: int
    """Time of creation, in milliseconds on the ranks' common clock."""
    prefix_known: bool = False
    """Whether the prompt's pages are known to be in the pool, or there are none."""
    finished: bool = False
    closed: bool = False
    """Whether nothing more of this request will be written."""
    written_pages: int = 0
    """Leading pages of prompt plus output that are in the pool; 0 until the first write."""
    epoch: int = 0
    attempts: int = 0
    first_failure: int = 0
    """Time of the first of ``attempts``, in milliseconds on the ranks' common clock."""
    waiting: deque[Piece] = field(default_factory=deque)
    in_flight: bool = False
    not_before: int = 0


def _pages(pieces: Iterable[Piece]) -> int:
    return sum(piece.pages for piece in pieces)


# -- the thread that writes to the pool --------------------------------------------------------------------------------
# It hashes, looks up and writes, so that no other thread waits on a store. Jobs are done and reported in order of
# arrival, because ranks compare only how many each has finished.


class Outcome(enum.IntEnum):
    """How a job ended; among several ranks the smallest value counts."""

    FAILED = 0
    PREFIX_MISSING = 1
    REFUSED = 2
    """Admission refused a page, so the pages behind it would be of no use, either."""
    WRITTEN = 3


class PoolWriter:
    """Writes pieces on its own thread. The scheduler thread calls ``submit``, pops from ``finished``, and never
    waits."""

    def __init__(self, pool: Any, metrics: TierMetrics, pools_on: Mapping[str, Sequence[str]]) -> None:
        """``pool`` is the backend (sglang/backend.py). ``pools_on`` maps a pool that has host indices to the pools that
        share them and that this rank writes, possibly none; the last one under KV tells whether a prompt is stored."""
        self._pool = pool
        self._metrics = metrics
        self._pools_on = pools_on
        self._jobs: deque[list[Piece]] = deque()
        self.finished: deque[tuple[list[Piece], Outcome]] = deque()
        """Jobs that ended and that the scheduler has not collected yet."""
        self._log = LimitedLog(logger, 1.0)
        self._loop = BackgroundLoop("hicache-ext-pd-writer", self._work)
        # Start immediately: a machine out of threads then fails at startup, not when jobs already hold host memory.
        self._loop.wake()

    def submit(self, job: list[Piece]) -> None:
        """Queue consecutive pieces of one continuation, which must have no other job in flight."""
        self._jobs.append(job)
        self._loop.wake()

    def stop(self, timeout: float) -> bool:
        """End the thread after the current job. Return False if it did not end: host memory must not be freed then."""
        return self._loop.stop(timeout)

    def _work(self) -> float:
        while self._jobs and not self._loop.stopping:
            # Requests of a batch reach their strides together, so jobs that arrived meanwhile share the same calls.
            # Not with recurrent states: a single one may be as large as all pages of a job.
            jobs = [self._jobs.popleft()]
            pages = _pages(jobs[0])
            while self._jobs and [*jobs[0][0].host_indices] == [KV]:
                pages += _pages(self._jobs[0])
                if pages > _PAGES_PER_WRITE:
                    break
                jobs.append(self._jobs.popleft())
            self.finished.extend(zip(jobs, self._outcomes(jobs), strict=True))
        return math.inf

    def _outcomes(self, jobs: list[list[Piece]]) -> list[Outcome]:
        try:
            return self._write(jobs)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - without this thread nothing is ever written again
            if len(jobs) > 1:
                # Retry one by one: a single job may be to blame.
                return [outcome for job in jobs for outcome in self._outcomes([job])]
            self._metrics.add("failure", type(error).__name__)
            self._log.log(logging.ERROR, "write", "hicache_ext: a decode node's write failed", exc_info=error)
            return [Outcome.FAILED]

    def _write(self, jobs: list[list[Piece]]) -> list[Outcome]:
        if not any(self._pools_on.values()):
            return [Outcome.WRITTEN] * len(jobs)
        outcomes = [self._prepare(job) for job in jobs]
        # Write the KV last: whoever finds it can then rely on the other pools having been written.
        for source in reversed(jobs[0][0].host_indices):
            keys: list[str] = []
            job_of: list[int] = []
            indices: list[torch.Tensor] = []
            for number, job in enumerate(jobs):
                for piece in job if outcomes[number] is Outcome.WRITTEN else ():
                    keys += piece.continuation.chain.hashes(piece.end_page - piece.pages_of[source], piece.end_page)
                    job_of += [number] * piece.pages_of[source]
                    indices.append(piece.host_indices[source])
            if not keys:
                break
            host_indices = torch.cat(indices).reshape(len(keys), -1)
            for first in range(0, len(keys), _PAGES_PER_WRITE):
                for name in self._pools_on[source]:
                    batch = range(first, min(first + _PAGES_PER_WRITE, len(keys)))
                    pages = [page for page in batch if outcomes[job_of[page]] is Outcome.WRITTEN]
                    results = self._write_pages(name, [keys[page] for page in pages], host_indices[pages])
                    for page, result in zip(pages, results, strict=True):
                        if not result.durable:
                            ended = Outcome.REFUSED if result is SetResult.REFUSED else Outcome.FAILED
                            outcomes[job_of[page]] = min(outcomes[job_of[page]], ended)
        return outcomes

    def _prepare(self, pieces: list[Piece]) -> Outcome:
        """Hash the pages of a job. Return WRITTEN if they may be written."""
        continuation = pieces[0].continuation
        chain = continuation.chain
        if pieces[0].first_page and len(chain) < continuation.prompt_pages:
            chain.extend(continuation.prompt[chain.tokens_for(len(chain), continuation.prompt_pages)])
        prompt = [] if continuation.prefix_known else chain.hashes(0, continuation.prompt_pages)
        if prompt and self._pool.stored_leading(prompt, *self._pools_on[KV][-1:]) < len(prompt):
            return Outcome.PREFIX_MISSING
        for piece in pieces:
            if len(chain) < piece.first_page:
                raise RuntimeError(f"pages {len(chain)} to {piece.first_page} of a request were never copied")
            if len(chain) < piece.end_page:
                chain.extend(piece.tokens[(len(chain) - piece.first_page) * chain.page_size :])
        if (owners := tenants.in_force()) is not None:
            owners.follow(None, chain.hashes(0, pieces[-1].end_page))
        return Outcome.WRITTEN

    def _write_pages(self, name: str, keys: list[str], host_indices: torch.Tensor) -> list[SetResult]:
        """Write the pages that the pool lacks."""
        results = [SetResult.EXISTS] * len(keys)
        absent = [page for page, known in enumerate(self._pool.stored(keys, name)) if not known]
        self._metrics.add("page", "present", len(keys) - len(absent))
        if absent:
            stored = self._pool.store_pages([keys[page] for page in absent], host_indices[absent].flatten(), name)
            self._metrics.add("write", "calls")
            ends = Counter("present" if result is SetResult.EXISTS else result.value for result in stored)
            self._metrics.add_many("page", ends)
            put_back(results, absent, stored)
        return results


# -- the writer --------------------------------------------------------------------------------------------------------

_PAGES_PER_WRITE = 128
_COPIES_PER_STEP = 8
"""Most copies of running requests per step: a batch that reaches its stride together is spread over several steps."""
_RETRIES = 3
_FIRST_BACKOFF_MS = 250
_RETRY_WITHIN_MS = 30_000
"""A write is not retried later than this after its first failure, since it occupies host memory."""
_PAGES_IN_FLIGHT = 2 * _PAGES_PER_WRITE
"""Pages handed to the storage thread. The others wait where they can be dropped or overtaken by finished requests."""

Minimum = Callable[[list[int]], list[int]]
"""Returns, for each number, the minimum over all ranks."""


class DecodeWriter:
    """See the module docstring. Scheduler thread only; any thread may read the counters."""

    def __init__(
        self,
        offload: Any,
        config: WriteConfig,
        writer: PoolWriter,
        metrics: TierMetrics,
        *,
        minimum: Minimum = list,
        hints: HintSender | None = None,
        stride: int = 256,
        prefix_grace: float = 5.0,
    ) -> None:
        """``offload`` gives access to the server's requests, device-to-host copies and host memory (``DecodeManager``
        in sglang/decode_manager.py). ``stride`` is the number of generated tokens between two copies of a running
        request, at least a page. ``prefix_grace`` is how many seconds the prefill node may take to write the prompt
        before it counts as missing."""
        self._offload = offload
        self._config = config
        self._writer = writer
        self.metrics = metrics
        self._agreed = minimum
        self._hints = hints
        self._page_size: int = offload.page_size
        self._stride: int = max(1, stride // self._page_size) * self._page_size
        self._prefix_grace = prefix_grace
        self._waiting: dict[Continuation, None] = {}
        """Continuations with pieces to write, in order of arrival. A choice among them depends only on facts that
        are equal on all ranks, so that ranks drop the same pages without communication."""
        self._continuations: WeakKeyDictionary[Any, Continuation] = WeakKeyDictionary()
        self._copies_this_step = 0
        self._pages_in_flight = 0
        self._started = time.monotonic()
        self._now = 0

    # -- called by the scheduler for each request after each step -------------------------------------------------

    def request_advanced(self, request: Any, output: Sequence[int], finished: bool) -> bool:
        """Take note that a request has a new token at the end of its ``output``, or has ``finished``.

        Return True if a copy began, which releases the request when it is done. For a running request that is not due
        this costs a lookup and two comparisons.
        """
        continuation = self._continuations.get(request)
        if continuation is None:
            if not self._offload.is_on_device(request) or not output:
                return False
            continuation = self._begin(request)
        if not finished and (continuation.closed or len(output) < continuation.next_copy_at):
            return False
        continuation.finished = finished
        if continuation.closed or not self._offload.is_on_device(request):
            return False
        if len(output) - 1 < self._config.min_tokens:
            if finished:
                self.metrics.add("request", "too_short")
            return False
        if not finished and self._copies_this_step >= _COPIES_PER_STEP:
            return False
        copy_began = self._copy(request, output, continuation)
        if finished:
            self._announce(continuation)
        return copy_began

    def _begin(self, request: Any) -> Continuation:
        prompt, chain, said = self._offload.facts(request)
        prompt_pages = chain.pages_in(len(prompt))
        continuation = Continuation(
            chain=chain,
            prompt=prompt,
            prompt_pages=prompt_pages,
            priority=said.priority,
            copied_pages=prompt_pages,
            next_copy_at=max(self._copy_due_at(len(prompt), prompt_pages), self._config.min_tokens + 1),
            created=self._now,
            prefix_known=prompt_pages == 0,
            closed=not said.store,
        )
        self.metrics.add("request", "seen" if said.store else "opted_out")
        self._continuations[request] = continuation
        return continuation

    def _copy_due_at(self, prompt_length: int, copied_pages: int) -> int:
        """Return the output length that completes the next stride of whole pages; the last token has no KV yet."""
        return copied_pages * self._page_size + self._stride - prompt_length + 1

    def _copy(self, request: Any, output: Sequence[int], continuation: Continuation) -> bool:
        """Start copying the whole pages that are due; return whether a copy began."""
        prompt_length, finished = len(continuation.prompt), continuation.finished
        whole_pages = (prompt_length + len(output) - 1) // self._page_size  # the last token has no KV yet
        first_page = continuation.copied_pages
        # Never copy a window's page twice: those before ``first_page`` were copied, unless a prefill node wrote them.
        since = first_page if first_page > continuation.prompt_pages else 0
        end_page = self._offload.boundary(request, whole_pages, since)
        if finished and whole_pages > max(end_page, first_page):
            self.metrics.add("lost", "boundary", whole_pages - max(end_page, first_page))
        if end_page <= first_page:
            return False
        continuation.next_copy_at = len(output) + self._stride
        tokens = _tokens_between(continuation.prompt, output, continuation.chain.tokens_for(first_page, end_page))
        pages_of = {KV: end_page - first_page}
        pages_of |= {tail: min(pages, end_page - since) for tail, pages in self._offload.tails.items()}
        host_indices = self._host_memory(pages_of, continuation)
        if host_indices is None:
            self.metrics.add("copy", "no_host_memory" if finished else "deferred")
            if finished:
                self._close(continuation, "no_host_memory", lost_pages=pages_of[KV])
            return False
        self._copies_this_step += 1
        piece = Piece(continuation, first_page, pages_of, host_indices, tokens, continuation.epoch)
        self._offload.queue_copy(request, piece)
        continuation.copied_pages = end_page
        continuation.next_copy_at = self._copy_due_at(prompt_length, end_page)
        return True

    def _host_memory(self, pages_of: Mapping[str, int], spare: Continuation) -> dict[str, torch.Tensor] | None:
        """Allocate host memory of each pool, dropping queued pages if need be; None where that would not suffice.

        Victims are chosen by priority, then by age; never ``spare``, which needs the memory, nor a higher priority.
        """
        pools = self._offload.pools
        lacking = {name: pages - pools.free_pages(name) for name, pages in pages_of.items()}
        if max(lacking.values()) > 0:
            victims = [other for other in self._waiting if other is not spare and other.priority <= spare.priority]
            queued = [piece for victim in victims for piece in victim.waiting]
            if any(sum(piece.pages_of[name] for piece in queued) < pages for name, pages in lacking.items()):
                return None
            for victim in sorted(victims, key=lambda victim: (victim.priority, victim.created)):
                if all(pools.free_pages(name) >= pages for name, pages in pages_of.items()):
                    break
                self.metrics.add("dropped", "oldest", _pages(victim.waiting))
                self._forget_waiting(victim)
                if victim.finished:
                    self._close(victim, "dropped")
        taken: dict[str, torch.Tensor] = {}
        for name, pages in pages_of.items():
            indices = pools.alloc(name, pages)
            if indices is None:
                self._free_memory(taken)
                return None
            taken[name] = indices
        return taken

    # -- called by the scheduler once a step -----------------------------------------------------------------------

    def step(self) -> None:
        """Start copies, collect ended copies and writes, submit the next writes. Never waits."""
        self._copies_this_step = 0
        self._offload.start_copies()
        milliseconds = int((time.monotonic() - self._started) * 1000)
        copied, refused, written, self._now = self._agreed(
            [*self._offload.copies_ended(), len(self._writer.finished), milliseconds]
        )
        # Handle writes first: they need a second reduction, which an error on one rank must not skip.
        if written:
            self._writes_ended(written)
        self._copies_ended(copied, refused)
        if self._waiting:
            self._submit_runs()

    def finish_copies(self) -> None:
        """Wait for every copy in flight: retraction is about to free the device memory they read [scheduler]."""
        self._offload.start_copies()
        while self._offload.ongoing_offload:
            self._copies_ended(*self._agreed([*self._offload.copies_ended(wait=True)]))

    def _copies_ended(self, operations: int, refused: int) -> None:
        for operation in range(operations):
            for piece in self._offload.take_copies():
                if operation == refused:
                    self._close(piece.continuation, "copy_failed", lost_pages=piece.pages)
                self._copy_ended(piece)

    def _copy_ended(self, piece: Piece) -> None:
        continuation = piece.continuation
        if piece.epoch != continuation.epoch or continuation.closed:
            self._free([piece])
        elif not piece.torn:
            continuation.waiting.append(piece)
            self._waiting.setdefault(continuation)
        else:
            self.metrics.add("copy", "torn")
            self._free([piece])
            # Later pages would be behind a gap; a running request copies again from here.
            continuation.epoch += 1
            continuation.copied_pages = piece.first_page
            if continuation.finished:
                self.metrics.add("lost", "torn", piece.pages)
                self._announce(continuation)

    def _submit_runs(self) -> None:
        while self._pages_in_flight < _PAGES_IN_FLIGHT:
            run = self._next_run()
            if not run:
                return
            run[0].continuation.in_flight = True
            self._pages_in_flight += _pages(run)
            self._writer.submit(run)

    def _next_run(self) -> list[Piece]:
        """Take the next consecutive pieces of one continuation, up to ``_PAGES_PER_WRITE`` or one piece; [] if none.

        A continuation has one run in flight at a time: its pages must reach the pool in the order of the chain.
        Finished requests come first, since the next turn of their conversation may arrive at any moment.
        """
        for continuation in sorted(self._waiting, key=lambda continuation: not continuation.finished):
            if continuation.in_flight or continuation.not_before > self._now:
                continue
            run = [continuation.waiting.popleft()]
            while continuation.waiting and _pages(run) + continuation.waiting[0].pages <= _PAGES_PER_WRITE:
                run.append(continuation.waiting.popleft())
            if not continuation.waiting:
                del self._waiting[continuation]
            return run
        return []

    def _writes_ended(self, count: int) -> None:
        finished = [self._writer.finished.popleft() for _ in range(count)]
        outcomes = self._agreed([outcome for _, outcome in finished])
        for (run, _), outcome in zip(finished, outcomes, strict=True):
            continuation = run[0].continuation
            continuation.in_flight = False
            self._pages_in_flight -= _pages(run)
            if outcome == Outcome.WRITTEN:
                continuation.prefix_known = True
                continuation.attempts = 0
                self._free(run)
                continuation.written_pages = run[-1].end_page
                self._announce(continuation)
            elif continuation.closed:
                self._free(run)
            elif (pause := self._retry_delay(continuation, outcome)) is not None:
                continuation.not_before = self._now + pause
                # They go back to the front of their continuation, which goes to the end of the queue.
                continuation.waiting.extendleft(reversed(run))
                self._waiting.pop(continuation, None)
                self._waiting[continuation] = None
            else:
                self._free(run)
                self._close(continuation, Outcome(outcome).name.lower(), lost_pages=_pages(run))

    def _announce(self, continuation: Continuation) -> None:
        """Send a hint to prefill nodes once the last page of a finished request is in the pool; the storage thread no
        longer uses its chain then."""
        written = continuation.written_pages
        if self._hints is not None and continuation.finished and 0 < written == continuation.copied_pages:
            self._hints.announce(continuation.chain.hashes(0, written))

    def _retry_delay(self, continuation: Continuation, outcome: int) -> int | None:
        """Return the milliseconds after which to retry a write; None if it is not to be retried."""
        if outcome == Outcome.PREFIX_MISSING and self._now - continuation.created < self._prefix_grace * 1000:
            # The prefill node may still be writing the prompt.
            return _FIRST_BACKOFF_MS
        if continuation.attempts == 0:
            continuation.first_failure = self._now
        pause = int(_FIRST_BACKOFF_MS * 2**continuation.attempts)
        in_time = self._now + pause <= continuation.first_failure + _RETRY_WITHIN_MS
        if outcome != Outcome.FAILED or continuation.attempts >= _RETRIES or not in_time:
            return None
        continuation.attempts += 1
        self.metrics.add("write", "retried")
        return pause

    def stop(self, timeout: float) -> bool:
        """End the storage thread. Return True if it ended: host memory may be freed then."""
        return self._writer.stop(timeout)

    # -- host memory -----------------------------------------------------------------------------------------------

    def _take_waiting(self, continuation: Continuation) -> list[Piece]:
        self._waiting.pop(continuation, None)
        pieces = list(continuation.waiting)
        continuation.waiting.clear()
        return pieces

    def _forget_waiting(self, continuation: Continuation) -> None:
        """Free queued pages and drop copies in flight; a running request copies them again later."""
        waiting = self._take_waiting(continuation)
        continuation.epoch += 1
        self._free(waiting)
        dropped_from = [piece.first_page for piece in waiting]
        copied = (piece for _, piece in self._offload.ongoing_offload)
        dropped_from += [piece.first_page for piece in copied if piece.continuation is continuation]
        if dropped_from:
            continuation.copied_pages = min(dropped_from)

    def _close(self, continuation: Continuation, reason: str, lost_pages: int = 0) -> None:
        """Write nothing more of this request, since pages behind a gap could never be found."""
        waiting = self._take_waiting(continuation)
        lost_pages += _pages(waiting)
        self._free(waiting)
        continuation.closed = True
        if lost_pages:
            self.metrics.add("lost", reason, lost_pages)

    def _free(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._free_memory(piece.host_indices)

    def _free_memory(self, host_indices: Mapping[str, torch.Tensor]) -> None:
        for name, indices in host_indices.items():
            self._offload.pools.free(name, indices)

    # -- reporting -------------------------------------------------------------------------------------------------

    def set_levels(self) -> None:
        """Set the gauges to the current levels [exporter]."""
        waiting = sum(_pages(list(continuation.waiting)) for continuation in list(self._waiting))
        self.metrics.set_level("waiting_pages", "", waiting + self._pages_in_flight)
        self.metrics.set_level("host_used_tokens", "", self._offload.pools.used_tokens())

    def log_summary(self) -> None:
        """Log one line with all counters; called at exit."""
        self.set_levels()
        counters = sorted({**self.metrics.snapshot(), **self.metrics.levels()}.items())
        logger.info("hicache_ext: decode writer: %s", {".".join(filter(None, key)): amount for key, amount in counters})


def _tokens_between(prompt: Sequence[int], output: Sequence[int], wanted: slice) -> Sequence[int]:
    """Return a slice of prompt plus output, without concatenating the two."""
    length = len(prompt)
    if wanted.start >= length:
        tokens: Sequence[int] = output[wanted.start - length : wanted.stop - length]
        return tokens
    return list(prompt[wanted.start : wanted.stop]) + list(output[: max(0, wanted.stop - length)])
