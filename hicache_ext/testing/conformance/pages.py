"""Pages for tests of stores: keys, contents that follow from the key, and host memory with guard bytes around it."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult

IDENTITY = bytes(range(16))
"""The first 16 bytes of most keys of the suite."""
OTHER_IDENTITY = bytes(range(16, 32))
"""An identity whose pages must never be taken for those of ``IDENTITY``."""

_GUARD = b"\xa5" * 64


def page_key(name: int | str, identity: bytes = IDENTITY) -> bytes:
    """The 48-byte key of a page called ``name``."""
    return identity + hashlib.sha256(str(name).encode()).digest()


def page_keys(count: int, prefix: str = "page", identity: bytes = IDENTITY) -> list[bytes]:
    """``count`` keys; equal arguments give equal keys, in every process."""
    return [page_key(f"{prefix}-{number}", identity) for number in range(count)]


def payload_of(key: bytes, size: int) -> bytes:
    """The content of a page: ``size`` bytes that follow from the key, so that any process can check any page."""
    return hashlib.shake_128(key).digest(size)


def cut(size: int, pieces: int) -> list[int]:
    """``size`` bytes as ``pieces`` segments of unequal sizes, none of them empty."""
    return [size // pieces + (1 if piece < size % pieces else 0) for piece in range(pieces)]


class HostPages:
    """Host memory of a batch: page ``i`` has the segments ``sizes[i]``, each between guard bytes."""

    def __init__(self, sizes: Sequence[Sequence[int]], fill: int = 0) -> None:
        self._arenas: list[bytearray] = []
        self.buffers: list[list[memoryview]] = []
        for page in sizes:
            arena = bytearray(_GUARD)
            places: list[tuple[int, int]] = []
            for size in page:
                places.append((len(arena), len(arena) + size))
                arena += bytes([fill]) * size + _GUARD
            memory = memoryview(arena)
            self._arenas.append(arena)
            self.buffers.append([memory[begin:end] for begin, end in places])

    def write(self, page: int, payload: bytes) -> None:
        """Put ``payload`` into the segments of a page, which have its size."""
        offset = 0
        for segment in self.buffers[page]:
            segment[:] = payload[offset : offset + segment.nbytes]
            offset += segment.nbytes
        assert offset == len(payload), "the page and its payload differ in size"

    def payload(self, page: int) -> bytes:
        """Return the concatenated contents of a page's segments."""
        return b"".join(self.buffers[page])

    def snapshot(self) -> list[bytes]:
        """Everything, guard bytes included."""
        return [bytes(arena) for arena in self._arenas]

    def assert_guards_intact(self) -> None:
        """Fail if a byte outside the segments was changed."""
        for arena, segments in zip(self._arenas, self.buffers, strict=True):
            position = 0
            for segment in [*segments, None]:
                assert arena[position : position + len(_GUARD)] == _GUARD, "bytes beside a segment were changed"
                position += len(_GUARD) + (0 if segment is None else segment.nbytes)


def filled(keys: Sequence[bytes], sizes: Sequence[Sequence[int]]) -> HostPages:
    """Host memory that holds the content of ``keys``."""
    pages = HostPages(sizes)
    for number, key in enumerate(keys):
        pages.write(number, payload_of(key, sum(sizes[number])))
    return pages


def store_pages(store: PageStore, keys: Iterable[bytes], sizes: Sequence[int] = (1000,)) -> list[SetResult]:
    """Set the pages ``keys``, each with segments of ``sizes``."""
    wanted = list(keys)
    return store.set(PageBatch(wanted, filled(wanted, [sizes] * len(wanted)).buffers))


def read_pages(
    store: PageStore, keys: Iterable[bytes], sizes: Sequence[int] = (1000,)
) -> tuple[list[GetResult], list[bytes]]:
    """Get the pages ``keys``: results, and what the memory holds afterwards."""
    wanted = list(keys)
    pages = HostPages([sizes] * len(wanted), fill=0x77)
    results = store.get(PageBatch(wanted, pages.buffers))
    pages.assert_guards_intact()
    return results, [pages.payload(number) for number in range(len(wanted))]


def assert_whole(store: PageStore, keys: Sequence[bytes], sizes: Sequence[int] = (1000,)) -> list[GetResult]:
    """Get the pages: results, of which each HIT has the page's own content."""
    results, payloads = read_pages(store, keys, sizes)
    wrong = [
        number
        for number, (key, result, payload) in enumerate(zip(keys, results, payloads, strict=True))
        if result is GetResult.HIT and payload != payload_of(key, sum(sizes))
    ]
    assert not wrong, f"pages with other bytes: {wrong}"
    return results


def assert_hits(store: PageStore, keys: Iterable[bytes], sizes: Sequence[int] = (1000,)) -> None:
    """Every page is a HIT with its own content."""
    wanted = list(keys)
    assert_pages(store, wanted, [payload_of(key, sum(sizes)) for key in wanted], sizes)


def assert_pages(
    store: PageStore, keys: Sequence[bytes], payloads: Sequence[bytes], sizes: Sequence[int] = (1000,)
) -> None:
    """Every page is a HIT with this content."""
    results, read = read_pages(store, keys, sizes)
    assert results == [GetResult.HIT] * len(keys)
    # Not the bytes themselves: pytest would look for their differences for minutes.
    others = [number for number, (one, due) in enumerate(zip(read, payloads, strict=True)) if one != due]
    assert not others, f"pages with other bytes: {others}"


def settle(store: PageStore) -> None:
    """Wait for what ``store`` still writes, examines and takes away in the background, if it does such things."""
    deadline = time.monotonic() + 30
    for name in ("wait_until_written", "wait_until_examined", "wait_until_cleared"):
        wait = getattr(store, name, None)
        # A medium that failed is tried again after a pause.
        while wait is not None and not wait(max(0.0, deadline - time.monotonic())):
            assert time.monotonic() < deadline, name
            time.sleep(0.05)


def in_threads(*works: Callable[[], None], patience: float = 60.0) -> None:
    """Run each of ``works`` on a thread of its own. Fails for what one of them raises, and when one hangs."""
    problems: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - reported by the test's own thread
            problems.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    for problem in problems:
        raise problem
    assert not any(thread.is_alive() for thread in threads), "calls of several threads hang"
