"""The PageStore contract: the promises of every tier, and its result types.

A store keeps pages (envelope.py) under 48-byte keys: identity digest + page hash. It moves batches between its medium
and host memory.
"""

from __future__ import annotations

import enum
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

import numpy as np
import numpy.typing as npt

from hicache_ext.page.envelope import IDENTITY_LENGTH, KEY_LENGTH, PAGE_HASH_LENGTH
from hicache_ext.page.identity import joined_page_hashes
from hicache_ext.page.memory import PageMemory
from hicache_ext.runtime.metrics import TierMetrics

_T = TypeVar("_T")

_IDENTITY_WORDS = IDENTITY_LENGTH // 8
_nbytes = operator.attrgetter("nbytes")


class GetResult(enum.Enum):
    """The result of one page of a ``get``. Only HIT means that the page's memory holds the page."""

    HIT = "hit"
    """Identity, page hash, length and checksum agree; the segments hold the page."""
    MISS = "miss"
    """Absent."""
    CORRUPT = "corrupt"
    """An object was found that is not this page; the next write replaces it if the stored copy is bad."""
    TIMEOUT = "timeout"
    """The call did not end within the tier's ``timeout``."""
    ERROR = "error"
    """The medium failed (EIO, connection lost)."""
    REJECTED = "rejected"
    """Not tried: breaker open, tier closed or out of service."""


class SetResult(enum.Enum):
    """The result of one page of a ``set``. STORED and EXISTS mean that the page can be read from now on."""

    STORED = "stored"
    """Written by this call."""
    EXISTS = "exists"
    """It was there; the first writer wins."""
    REFUSED = "refused"
    """Not stored, because it is not worth it: admission (tiering/admission). As good an answer as any."""
    REJECTED = "rejected"
    """Not stored and not an error: no space, larger than the tier takes, breaker open."""
    TIMEOUT = "timeout"
    """The call did not end within the tier's ``timeout``; the page may be there."""
    ERROR = "error"
    """The medium failed (EIO, connection lost); the page may be there."""

    @property
    def durable(self) -> bool:
        """Whether the page can be read from now on."""
        return self in (SetResult.STORED, SetResult.EXISTS)


class PageKeys(Sequence[bytes]):
    """The keys of pages of one identity, as numbers; all are converted to bytes when one is asked for."""

    __slots__ = ("_keys", "identity", "words")

    def __init__(self, identity: bytes, words: npt.NDArray[np.int64]) -> None:
        """``words``: ``key_words``; must not change any more."""
        self.identity = identity
        self.words = words
        self._keys: list[bytes] | None = None

    @classmethod
    def of_hashes(cls, identity: bytes, names: Sequence[str]) -> PageKeys:
        """The keys under which SGLang's keys are stored (``page_hash_bytes``)."""
        return cls.of_joined(identity, joined_page_hashes(names))

    @classmethod
    def of_joined(cls, identity: bytes, hashes: bytes) -> PageKeys:
        """``hashes``: page hashes of 32 bytes, concatenated."""
        words = np.empty((len(hashes) // PAGE_HASH_LENGTH, KEY_LENGTH // 8), np.int64)
        words[:, :_IDENTITY_WORDS] = _words_of(identity)
        words[:, _IDENTITY_WORDS:] = np.frombuffer(hashes, np.int64).reshape(-1, PAGE_HASH_LENGTH // 8)
        return cls(identity, words)

    def __len__(self) -> int:
        return len(self.words)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._all())

    @overload
    def __getitem__(self, which: int) -> bytes: ...

    @overload
    def __getitem__(self, which: slice) -> PageKeys: ...

    def __getitem__(self, which: int | slice) -> bytes | PageKeys:
        if isinstance(which, slice):
            # Contiguous, as native code wants them; no copy where they are.
            return PageKeys(self.identity, np.ascontiguousarray(self.words[which]))
        return (self._keys or self._all())[which]

    def chosen(self, positions: Sequence[int] | npt.NDArray[np.intp]) -> PageKeys:
        """The keys at these positions."""
        return PageKeys(self.identity, self.words[np.asarray(positions, np.intp)])

    def under(self, identity: bytes) -> PageKeys:
        """The keys of the same pages in another identity."""
        if identity == self.identity:
            return self
        words = self.words.copy()
        words[:, :_IDENTITY_WORDS] = _words_of(identity)
        return PageKeys(identity, words)

    def _all(self) -> list[bytes]:
        if self._keys is None:
            joined = self.words.tobytes()
            self._keys = [joined[begin : begin + KEY_LENGTH] for begin in range(0, len(joined), KEY_LENGTH)]
        return self._keys


@functools.lru_cache(maxsize=1024)
def _words_of(identity: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(bytearray(identity), np.int64)


def identity_of(keys: Sequence[bytes]) -> bytes:
    """The identity of the first page, which must exist: SGLang moves pages of one pool at a time."""
    return keys.identity if isinstance(keys, PageKeys) else keys[0][:IDENTITY_LENGTH]


def identities_of(keys: Sequence[bytes]) -> list[bytes]:
    """The identities of these pages, each once."""
    if isinstance(keys, PageKeys):
        return [keys.identity]
    return list(dict.fromkeys([key[:IDENTITY_LENGTH] for key in keys]))


def positions_by_identity(keys: Sequence[bytes]) -> Mapping[bytes, Sequence[int]]:
    """Return the positions of the pages of each identity."""
    if isinstance(keys, PageKeys):
        return {keys.identity: range(len(keys))} if len(keys) else {}
    return grouped([key[:IDENTITY_LENGTH] for key in keys])


def by_identity(keys: Sequence[bytes]) -> Iterator[tuple[Sequence[int], PageKeys]]:
    """Yield the pages of each identity: their positions, and their keys as numbers."""
    for identity, positions in positions_by_identity(keys).items():
        if isinstance(keys, PageKeys):
            yield positions, keys
        else:
            yield positions, PageKeys.of_joined(identity, b"".join([keys[i][IDENTITY_LENGTH:] for i in positions]))


def grouped(names: Iterable[_T]) -> dict[_T, list[int]]:
    """The positions of each name, in order."""
    found: dict[_T, list[int]] = {}
    for position, name in enumerate(names):
        found.setdefault(name, []).append(position)
    return found


def chosen_keys(keys: Sequence[bytes], positions: Sequence[int] | npt.NDArray[np.intp]) -> Sequence[bytes]:
    """The keys at these positions, which rise: numbers stay numbers."""
    if len(positions) == len(keys):
        return keys
    if isinstance(keys, PageKeys):
        return keys.chosen(positions)
    return [keys[i] for i in (positions.tolist() if isinstance(positions, np.ndarray) else positions)]


def key_words(keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """The keys as int64, shape (pages, 6), for native code."""
    if isinstance(keys, PageKeys):
        return keys.words
    # Writable: their address is then had in a third of the time.
    return np.frombuffer(bytearray().join(keys), np.int64).reshape(len(keys), KEY_LENGTH // 8)


_Result = TypeVar("_Result", GetResult, SetResult)


def portions(
    items: Sequence[_T], sizes: Sequence[int], most: float, most_items: float = math.inf
) -> Sequence[Sequence[_T]]:
    """``items`` in order, in portions of at most ``most`` bytes (``sizes``: of each) and ``most_items``, or of one."""
    if sum(sizes) <= most and len(items) <= most_items:
        return [items] if items else []
    found: list[list[_T]] = []
    filled = 0
    for item, size in zip(items, sizes, strict=True):
        if not found or filled + size > most or len(found[-1]) >= most_items:
            found.append([])
            filled = 0
        found[-1].append(item)
        filled += size
    return found


def put_back(results: list[_T], positions: Sequence[int], answers: Iterable[_T]) -> None:
    """Write the answers for the pages at these positions, one for each (or ValueError), into the results of all."""
    for position, answer in zip(positions, answers, strict=True):
        results[position] = answer


def counted(results: Sequence[_Result]) -> dict[str, int]:
    """Value of a result -> how often it occurs, for the metrics of a call."""
    counts: dict[str, int] = {}
    while results:
        first = results[0]
        # Mostly all results are equal, and count() compares by identity first.
        counts[first.value] = count = results.count(first)
        results = [] if count == len(results) else [result for result in results if result is not first]
    return counts


@dataclass(frozen=True, slots=True)
class PageBatch:
    """Pages to read into or write from: ``keys[i]`` belongs to the segments ``buffers[i]``.

    A key has 48 bytes: identity (16), page hash (32). A segment is a C-contiguous memoryview of bytes in host memory;
    the payload is the concatenation of a page's segments. For a ``get`` they must be writable. ``PageMemory`` also has
    their addresses. Raises ValueError where there are not as many keys as pages.
    """

    keys: Sequence[bytes]
    buffers: Sequence[Sequence[memoryview]]
    sizes: Sequence[int] = field(default=(), repr=False)
    """Payload bytes of each page; computed if the caller does not pass them."""
    counted_as: Sequence[int] = field(default=(), repr=False)
    """Bytes that each page counts for in the metrics, where that is not its size: it is encoded or sealed."""

    def __post_init__(self) -> None:
        pages = len(self.buffers)
        if len(self.keys) != pages:
            raise ValueError(f"{len(self.keys)} keys for {pages} pages")
        if len(self.sizes) != pages:
            # Computed once: stores ask several times per page.
            if isinstance(self.buffers, PageMemory):
                sizes = [self.buffers.addresses.page_bytes] * pages
            else:
                sizes = [sum(map(_nbytes, segments)) for segments in self.buffers]
            object.__setattr__(self, "sizes", sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def select(self, positions: Iterable[int]) -> PageBatch:
        """The pages at these positions, in their order, over the same memory."""
        everything = range(len(self.sizes))
        if positions == everything or (chosen := list(positions)) == list(everything):
            return self
        buffers, keys = self.buffers, self.keys
        return PageBatch(
            keys.chosen(chosen) if isinstance(keys, PageKeys) else [keys[i] for i in chosen],
            buffers.select(chosen) if isinstance(buffers, PageMemory) else [buffers[i] for i in chosen],
            [self.sizes[i] for i in chosen],
            [self.counted_as[i] for i in chosen] if self.counted_as else (),
        )

    def move_at(self, positions: Sequence[int], move: Callable[[PageBatch], Sequence[_T]], results: list[_T]) -> None:
        """Have ``move`` read or write the pages at these positions, if there are any: ``put_back`` its answers."""
        if positions:
            put_back(results, positions, move(self.select(positions)))

    def bytes_of(self, wanted: GetResult | SetResult | bool, results: Sequence[GetResult | SetResult | bool]) -> int:
        """Payload bytes of the pages with the result ``wanted``."""
        sizes = self.counted_as or self.sizes
        if results.count(wanted) == len(results):
            return sum(sizes)
        return sum([size for size, result in zip(sizes, results, strict=True) if result is wanted])


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """The answer of ``describe()``; for logs, doctor and tools. No secrets."""

    name: str
    type: str
    shared: bool
    """Other machines can see the same pages."""
    details: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class PageStore(Protocol):
    """One tier, or several as one.

    The caller (backend.py, tiered.py, a guard) guarantees that the memory of a batch stays valid and unshared until the
    call returns, and that keys have 48 bytes; the pages of a batch may have different sizes. The store guarantees that

    - nothing touches the batch's memory after the call has returned, on any path;
    - HIT means identity, page hash, length and checksum of what was read agree;
    - a page is visible whole or not at all, to every process, after kill -9 at any instant; the first writer wins;
    - a copy found bad is replaced by the next write; from a shared medium it is removed only once the stored copy
      itself was shown to be bad (bad_pages.py);
    - no call raises but after ``close()`` (StoreClosedError), or for a programming error: a failure is a result; of
      ``clear()``, which has none, it is a ClearLaterError.

    Threads: any, several at once.
    """

    @property
    def name(self) -> str:
        """That of the tier: its key in ``tiers``."""

    @property
    def metrics(self) -> TierMetrics:
        """What was counted and timed, by event and reason."""

    def describe(self) -> StoreInfo:
        """What this store is; from memory alone, also after ``close()``."""

    def register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        """Called once per identity before its first page, so that tools can name the pages. Never raises."""

    def get(self, batch: PageBatch) -> list[GetResult]:
        """Read each page into its segments: a result for each, in order.

        Without a HIT the page's own segments may be half written."""

    def set(self, batch: PageBatch) -> list[SetResult]:
        """Write each page that is absent: a result for each, in order."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are present, in order. A present key may still turn out CORRUPT when read.

        False also where that is unknown; ``metrics`` has then counted an error, timeout or rejected, and the guards of
        the tier were told (``tell_unanswered``).
        """

    def count_leading(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of present keys."""

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove pages; returns how many were present."""

    def clear(self, digests: Sequence[bytes] | None) -> int:
        """Remove every page of these identities (None: of every identity of this package).

        A write after clear() returned counts: it is visible, and stays. A page stored before clear() never comes back.
        A medium that cannot take an identity out of sight in one step (Redis, Mooncake, object stores) keeps this rule
        in the process that cleared; others see the old pages go one by one, and a process that is killed before the
        end leaves the rest of them (clearing.py). Until the old pages are gone such a medium may answer REJECTED.

        The answer is the number of identities that had pages: counting pages would take as long as removing them.
        Raises ClearLaterError where not all could be cleared; whoever needs it tries again, as several tiers as one do.
        """

    def close(self) -> None:
        """Release everything. Waits for calls under way. Idempotent."""


class DelegatingStore:
    """The base of every wrapper around a PageStore: it is ``inner`` in every respect but what subclasses override.

    Abilities besides the contract are not forwarded: ``ability`` finds them behind wrappers (abilities.py). The
    question that a tier asks its guards is, so that a tier without guards imports none.
    """

    def __init__(self, inner: PageStore) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def metrics(self) -> TierMetrics:
        return self.inner.metrics

    def describe(self) -> StoreInfo:
        return self.inner.describe()

    def register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        self.inner.register_identity(digest, document)

    def get(self, batch: PageBatch) -> list[GetResult]:
        return self.inner.get(batch)

    def set(self, batch: PageBatch) -> list[SetResult]:
        return self.inner.set(batch)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self.inner.contains(keys)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        return self.inner.count_leading(keys)

    def remove(self, keys: Sequence[bytes]) -> int:
        return self.inner.remove(keys)

    def clear(self, digests: Sequence[bytes] | None) -> int:
        return self.inner.clear(digests)

    def close(self) -> None:
        self.inner.close()

    def being_written(self) -> Set[bytes]:
        """Return pages whose write may still reach the store, also after its caller was answered TIMEOUT."""
        return self.inner.being_written() if isinstance(self.inner, DelegatingStore) else frozenset()
