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
    """The page is absent."""
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
    """It was already there; the first writer wins."""
    REFUSED = "refused"
    """Not stored because admission (tiering/admission) judged it not worth storing. Not a failure."""
    REJECTED = "rejected"
    """Not stored, but not an error: no space, page larger than the tier accepts, breaker open."""
    TIMEOUT = "timeout"
    """The call did not end within the tier's ``timeout``; the page may be there."""
    ERROR = "error"
    """The medium failed (EIO, connection lost); the page may be there."""

    @property
    def durable(self) -> bool:
        """Return whether the page can be read from now on."""
        return self in (SetResult.STORED, SetResult.EXISTS)


class PageKeys(Sequence[bytes]):
    """The keys of pages of one identity, held as numbers; the first access to a key converts all of them to bytes."""

    __slots__ = ("_keys", "identity", "words")

    def __init__(self, identity: bytes, words: npt.NDArray[np.int64]) -> None:
        """Keep ``words`` (see ``key_words``), which the caller must not modify afterwards."""
        self.identity = identity
        self.words = words
        self._keys: list[bytes] | None = None

    @classmethod
    def of_hashes(cls, identity: bytes, names: Sequence[str]) -> PageKeys:
        """Return the keys under which pages with these SGLang keys are stored (``page_hash_bytes``)."""
        return cls.of_joined(identity, joined_page_hashes(names))

    @classmethod
    def of_joined(cls, identity: bytes, hashes: bytes) -> PageKeys:
        """Return the keys of ``hashes``, the concatenated 32-byte page hashes."""
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
            # Native code needs contiguous words; no copy is made when they already are.
            return PageKeys(self.identity, np.ascontiguousarray(self.words[which]))
        return (self._keys or self._all())[which]

    def chosen(self, positions: Sequence[int] | npt.NDArray[np.intp]) -> PageKeys:
        """Return the keys at these positions."""
        return PageKeys(self.identity, self.words[np.asarray(positions, np.intp)])

    def under(self, identity: bytes) -> PageKeys:
        """Return the keys of the same pages under another identity."""
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
    """Return the identity of the first page, which must exist: SGLang moves pages of one pool at a time."""
    return keys.identity if isinstance(keys, PageKeys) else keys[0][:IDENTITY_LENGTH]


def identities_of(keys: Sequence[bytes]) -> list[bytes]:
    """Return the distinct identities of these pages."""
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
    """Return the positions of each name, in order."""
    found: dict[_T, list[int]] = {}
    for position, name in enumerate(names):
        found.setdefault(name, []).append(position)
    return found


def chosen_keys(keys: Sequence[bytes], positions: Sequence[int] | npt.NDArray[np.intp]) -> Sequence[bytes]:
    """Return the keys at these positions, which must be ascending; ``PageKeys`` stay ``PageKeys``."""
    if len(positions) == len(keys):
        return keys
    if isinstance(keys, PageKeys):
        return keys.chosen(positions)
    return [keys[i] for i in (positions.tolist() if isinstance(positions, np.ndarray) else positions)]


def key_words(keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """Return the keys as int64, shape (pages, 6), for native code."""
    if isinstance(keys, PageKeys):
        return keys.words
    # A writable buffer, because numpy then returns its address in a third of the time.
    return np.frombuffer(bytearray().join(keys), np.int64).reshape(len(keys), KEY_LENGTH // 8)


_Result = TypeVar("_Result", GetResult, SetResult)


def portions(
    items: Sequence[_T], sizes: Sequence[int], most: float, most_items: float = math.inf
) -> Sequence[Sequence[_T]]:
    """Split ``items`` in order into portions of at most ``most`` bytes (by ``sizes``) and ``most_items``, or of one."""
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
    """Write the answers for the pages at these positions into ``results``. Raises ValueError if the counts differ."""
    for position, answer in zip(positions, answers, strict=True):
        results[position] = answer


def counted(results: Sequence[_Result]) -> dict[str, int]:
    """Return how often each result occurs, by its value, for the metrics of a call."""
    counts: dict[str, int] = {}
    while results:
        first = results[0]
        # Usually all results are equal, and count() compares by identity first.
        counts[first.value] = count = results.count(first)
        results = [] if count == len(results) else [result for result in results if result is not first]
    return counts


@dataclass(frozen=True, slots=True)
class PageBatch:
    """Pages to read into or write from: ``keys[i]`` belongs to the segments ``buffers[i]``.

    A key has 48 bytes: identity (16), page hash (32). A segment is a C-contiguous memoryview of bytes in host memory;
    the payload is the concatenation of a page's segments. A ``get`` needs writable segments. ``PageMemory`` also holds
    their addresses. Raises ValueError if the number of keys differs from the number of pages.
    """

    keys: Sequence[bytes]
    buffers: Sequence[Sequence[memoryview]]
    sizes: Sequence[int] = field(default=(), repr=False)
    """Payload bytes of each page; computed if the caller does not pass them."""
    counted_as: Sequence[int] = field(default=(), repr=False)
    """Bytes that each page counts for in the metrics where they differ from its size: for encoded or sealed pages."""

    def __post_init__(self) -> None:
        pages = len(self.buffers)
        if len(self.keys) != pages:
            raise ValueError(f"{len(self.keys)} keys for {pages} pages")
        if len(self.sizes) != pages:
            # Computed once, because stores use the sizes several times per page.
            if isinstance(self.buffers, PageMemory):
                sizes = [self.buffers.addresses.page_bytes] * pages
            else:
                sizes = [sum(map(_nbytes, segments)) for segments in self.buffers]
            object.__setattr__(self, "sizes", sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def select(self, positions: Iterable[int]) -> PageBatch:
        """Return the pages at these positions, in the order given, over the same memory."""
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
        """Read or write the pages at these positions, if any, with ``move``, and ``put_back`` its answers."""
        if positions:
            put_back(results, positions, move(self.select(positions)))

    def bytes_of(self, wanted: GetResult | SetResult | bool, results: Sequence[GetResult | SetResult | bool]) -> int:
        """Return the payload bytes of the pages whose result is ``wanted``."""
        sizes = self.counted_as or self.sizes
        if results.count(wanted) == len(results):
            return sum(sizes)
        return sum([size for size, result in zip(sizes, results, strict=True) if result is wanted])


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """The answer of ``describe()``, for logs, doctor and tools. Contains no secrets."""

    name: str
    type: str
    shared: bool
    """Other machines can see the same pages."""
    details: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class PageStore(Protocol):
    """One tier, or several tiers acting as one.

    The caller (backend.py, tiered.py, a guard) guarantees that the memory of a batch stays valid and unshared until the
    call returns, and that keys have 48 bytes; the pages of a batch may have different sizes. The store guarantees that

    - nothing touches the batch's memory after the call has returned, on any path;
    - HIT means that the identity, page hash, length and checksum of the data read agree;
    - every process sees a page whole or not at all, even after kill -9 at any instant; the first writer wins;
    - the next write replaces a copy found bad; a shared medium removes it only once the stored copy itself was shown
      to be bad (bad_pages.py);
    - calls raise only after ``close()`` (StoreClosedError) or for a programming error: a failure is a result. Only
      ``clear()``, which has no result per page, raises ClearLaterError on failure.

    Threads: any, several at the same time.
    """

    @property
    def name(self) -> str:
        """Return the name of the tier: its key in ``tiers``."""

    @property
    def metrics(self) -> TierMetrics:
        """Return the counts and timings, by event and reason."""

    def describe(self) -> StoreInfo:
        """Describe this store, from memory alone; also works after ``close()``."""

    def register_identity(self, digest: bytes, document: dict[str, Any]) -> None:
        """Record an identity, so that tools can name its pages; called once before its first page. Never raises."""

    def get(self, batch: PageBatch) -> list[GetResult]:
        """Read each page into its segments and return one result per page, in order.

        If the result is not HIT, the page's own segments may be partly written."""

    def set(self, batch: PageBatch) -> list[SetResult]:
        """Write each page that is absent and return one result per page, in order."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether each key is present, in order. A present key may still turn out CORRUPT when read.

        Also False where presence is unknown; ``metrics`` has then counted an error, timeout or rejected, and the
        guards of the tier were told (``tell_unanswered``).
        """

    def count_leading(self, keys: Sequence[bytes]) -> int:
        """Return the length of the leading run of present keys."""

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove pages and return how many were present."""

    def clear(self, digests: Sequence[bytes] | None) -> int:
        """Remove every page of these identities (None: of every identity of this package).

        A page written after clear() returned is visible and stays. A page stored before clear() never comes back. A
        medium that cannot hide an identity in one step (Redis, Mooncake, object stores) keeps this rule in the process
        that called clear(); other processes see the old pages disappear one by one, and a process that is killed before
        the end leaves the rest (clearing.py). Until the old pages are gone such a medium may answer REJECTED.

        Returns the number of identities that had pages: counting pages would take as long as removing them. Raises
        ClearLaterError if not all could be cleared; the caller may try again, as the store over several tiers does.
        """

    def close(self) -> None:
        """Release everything after waiting for the calls in flight. Idempotent."""


class DelegatingStore:
    """The base of every wrapper around a PageStore: it behaves as ``inner`` except where subclasses override it.

    Abilities outside the contract are not forwarded: ``ability`` finds them behind wrappers (abilities.py). Only
    ``being_written``, which a tier asks its guards, is forwarded, so that a tier without guards imports none.
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
        """Return the pages whose write may still reach the store, even after its caller was answered TIMEOUT."""
        return self.inner.being_written() if isinstance(self.inner, DelegatingStore) else frozenset()
