"""Stores that each break one promise of the contract, and the case of the suite that has to find it.

Not collected by itself: test_planted_faults.py runs it. The docstring of a store says what its fault is.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fnmatch
import os
import threading
import time
from collections.abc import Callable
from typing import ClassVar

import pytest

from hicache_ext.errors import ClearLaterError
from hicache_ext.page.envelope import IDENTITY_LENGTH, encode_header
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.medium import Medium
from hicache_ext.testing.conformance.page_store import PageStoreTests
from tests.rigs.faults import DroppingStore, LyingStore, PageStoreWrapper
from tests.storage.media import Memory, Over, PageFiles
from tests.storage.raw_access import RawFiles

HEADER = 128
FAULTS: dict[str, str] = {}
"""Name of a faulty store -> the case that finds it."""


def _over_memory(fault, tmp_path):
    return Over(Memory(), fault)


def caught_by(case: str, medium: Callable[..., object] = _over_memory, *, seconds: float = 60.0):
    """Plant the store: ``case`` has to fail over the medium that ``medium`` makes of it, which may hang that long."""

    def plant(fault: type) -> type:
        class Tests(PageStoreTests):
            patience = seconds

            @pytest.fixture
            def medium(self, tmp_path):
                return medium(fault, tmp_path)

        FAULTS[fault.__name__] = case
        globals()[f"Test{fault.__name__}"] = type(f"Test{fault.__name__}", (Tests,), {})
        return fault

    return plant


def _over_files(fault, tmp_path):
    return Over(PageFiles(tmp_path), fault)


class _InPlaceOfMemory(Memory):
    def __init__(self, fault):
        super().__init__()
        self._fault = fault

    def __reduce__(self):
        return Memory, ()

    def open(self):
        return self._fault(objects=self.objects)


def _in_place_of_memory(fault, tmp_path):
    return _InPlaceOfMemory(fault)


class TestWithoutAMedium(PageStoreTests):
    """The author forgot it."""


class _WithoutWrite(Medium):
    type, shared = "memory", False
    open = open_elsewhere = read = keys = failing = full = None


class TestMediumWithoutWrite(PageStoreTests):
    @pytest.fixture
    def medium(self):
        return _WithoutWrite()


# -- reading -----------------------------------------------------------------------------------------------------------


@caught_by("test_a_stored_page_is_read_back[unequal segments]")
class FlipsABit(LyingStore):
    """HIT with one wrong bit in every page"""


@caught_by("test_a_stored_page_is_read_back[unequal segments]")
class FillsHalf(PageStoreWrapper):
    """HIT with the second half of the memory not written"""

    def get(self, batch):
        before = [[bytes(segment) for segment in segments] for segments in batch.buffers]
        results = super().get(batch)
        for segments, old in zip(batch.buffers, before, strict=True):
            half = segments[-1].nbytes // 2
            segments[-1][half:] = old[-1][half:]
        return results


@caught_by("test_a_stored_page_is_read_back[unequal segments]")
class MixesSegments(PageStoreWrapper):
    """the segments of a page filled in the wrong order"""

    def get(self, batch):
        return super().get(PageBatch(batch.keys, [list(reversed(segments)) for segments in batch.buffers]))


@caught_by("test_a_batch_of_500_pages_is_stored_and_read")
class SwapsPages(PageStoreWrapper):
    """pages of a batch in each other's memory"""

    def get(self, batch):
        order = list(range(len(batch)))
        if len(order) > 1:
            order[:2] = [1, 0]
        results = super().get(batch)
        held = [b"".join(segments) for segments in batch.buffers]
        for position, other in enumerate(order):
            offset = 0
            for segment in batch.buffers[position]:
                segment[:] = held[other][offset : offset + segment.nbytes].ljust(segment.nbytes, b"\0")
                offset += segment.nbytes
        return results


@caught_by("test_a_batch_of_500_pages_is_stored_and_read")
class ReadsAtMost256(PageStoreWrapper):
    """MISS for all pages of a batch behind the 256th"""

    def get(self, batch):
        return super().get(batch.select(range(min(256, len(batch))))) + [GetResult.MISS] * (len(batch) - 256)


@caught_by("test_keys_that_differ_in_one_byte_are_different_pages")
class LeavesOutMisses(PageStoreWrapper):
    """a list of results that is shorter than the batch"""

    def get(self, batch):
        return [result for result in super().get(batch) if result is not GetResult.MISS]


@caught_by("test_a_key_twice_in_a_batch_is_stored_and_read_twice")
class ReadsAKeyOnce(PageStoreWrapper):
    """a key twice in a batch: HIT twice, and the memory of the first one alone is filled"""

    def get(self, batch):
        first = {key: position for position, key in reversed(list(enumerate(batch.keys)))}
        positions = sorted(first.values())
        results = dict(zip(positions, super().get(batch.select(positions)), strict=True))
        return [results[first[key]] for key in batch.keys]


@caught_by("test_an_empty_batch_answers_nothing")
class NeedsAPage(PageStoreWrapper):
    """an empty batch raises"""

    def get(self, batch):
        batch.keys[0]
        return super().get(batch)


@caught_by("test_a_batch_of_500_pages_is_stored_and_read")
class AnswersStrings(PageStoreWrapper):
    """results that are words and no GetResult"""

    def get(self, batch):
        return [result.value for result in super().get(batch)]


@caught_by("test_keys_that_differ_in_one_byte_are_different_pages")
class IgnoresTheIdentity(PageStoreWrapper):
    """HIT with the page of another model that has the same page hash"""

    def get(self, batch):
        known = {key[IDENTITY_LENGTH:]: key for key in self.inner.objects}
        return super().get(PageBatch([known.get(key[IDENTITY_LENGTH:], key) for key in batch.keys], batch.buffers))


@caught_by("test_a_page_asked_for_with_another_size_is_no_hit")
class FitsAnySize(PageStoreWrapper):
    """HIT with a page of another size, cut or filled up with zeros"""

    def get(self, batch):
        results = super().get(batch)
        for position, result in enumerate(results):
            if result is GetResult.CORRUPT:
                results[position] = GetResult.HIT
        return results


@caught_by("test_a_damaged_page_is_refused_and_replaced[zeros behind the header]")
class TrustsTheMedium(PageStoreWrapper):
    """HIT with whatever object of the right length is found: neither key nor checksum is looked at"""

    def get(self, batch):
        results = super().get(PageBatch([], []))
        for key, segments in zip(batch.keys, batch.buffers, strict=True):
            stored = self.inner.objects.get(key, b"")[HEADER:]
            if len(stored) != sum(segment.nbytes for segment in segments):
                results.append(GetResult.MISS)
                continue
            for segment in segments:
                segment[:], stored = stored[: segment.nbytes], stored[segment.nbytes :]
            results.append(GetResult.HIT)
        return results


@caught_by("test_a_damaged_page_is_refused_and_replaced[zeros behind the header]")
class PoisonsAKey(PageStoreWrapper):
    """a bad copy that stays in its place: the key can never be written again"""

    def get(self, batch):
        kept = {key: self.inner.objects[key] for key in batch.keys if key in self.inner.objects}
        results = super().get(batch)
        self.inner.objects.update(kept)
        return results


@caught_by("test_a_damaged_page_is_refused_and_replaced[zeros behind the header]")
class HidesDamage(PageStoreWrapper):
    """MISS for a damaged page: nobody hears of it"""

    def get(self, batch):
        return [GetResult.MISS if result is GetResult.CORRUPT else result for result in super().get(batch)]


@caught_by("test_a_damaged_page_is_refused_and_replaced[zeros behind the header]")
class DoesNotCountDamage(PageStoreWrapper):
    """CORRUPT that is not counted"""

    def get(self, batch):
        counts = self.metrics.snapshot()
        results = super().get(batch)
        for (event, reason), count in self.metrics.snapshot().items():
            if event == "corrupt":
                self.metrics.add(event, reason, counts.get((event, reason), 0) - count)
        return results


@caught_by("test_a_page_of_another_writer_is_a_hit")
class ReadsItsOwnPagesAlone(PageStoreWrapper):
    """MISS for pages that another writer stored"""

    def __init__(self, inner):
        super().__init__(inner)
        self._own = set()

    def set(self, batch):
        self._own.update(batch.keys)
        return super().set(batch)

    def get(self, batch):
        results = super().get(batch)
        return [result if key in self._own else GetResult.MISS for key, result in zip(batch.keys, results, strict=True)]


# -- memory ------------------------------------------------------------------------------------------------------------


@caught_by("test_memory_is_left_alone_once_a_call_has_returned")
class GoesOnReading(PageStoreWrapper):
    """get() goes on writing into the caller's memory after it has returned"""

    def get(self, batch):
        def go_on():
            for _ in range(300):
                time.sleep(0.01)
                with contextlib.suppress(Exception):
                    self.inner.get(batch)

        threading.Thread(target=go_on, daemon=True).start()
        return super().get(batch)


@caught_by("test_memory_is_left_alone_once_a_call_has_returned")
class CopiesLater(PageStoreWrapper):
    """set() reads the caller's memory after it has returned"""

    def set(self, batch):
        last, deadline = bytes(batch.buffers[-1][-1]), time.monotonic() + 5

        def store():
            while bytes(batch.buffers[-1][-1]) == last and time.monotonic() < deadline:
                time.sleep(0.005)
            self.inner.set(batch)

        threading.Thread(target=store, daemon=True).start()
        return [SetResult.STORED] * len(batch)


@caught_by("test_nothing_beside_the_segments_is_touched")
class WritesBeside(PageStoreWrapper):
    """one byte behind every segment is overwritten"""

    def get(self, batch):
        for segments in batch.buffers:
            for segment in segments:
                ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(segment)) + segment.nbytes, 0, 1)
        return super().get(batch)


@caught_by("test_nothing_beside_the_segments_is_touched")
class ChangesWhatItStores(PageStoreWrapper):
    """set() leaves the caller's pages changed"""

    def set(self, batch):
        results = super().set(batch)
        for segments in batch.buffers:
            segments[0][0] ^= 1
        return results


# -- writing -----------------------------------------------------------------------------------------------------------


@caught_by("test_a_stored_page_is_read_back[unequal segments]")
class StoresNothing(DroppingStore):
    """STORED for a page that cannot be read"""


@caught_by("test_stored_means_on_the_medium_unless_it_is_declared_to_write_later")
class WritesBehind(PageStoreWrapper):
    """STORED for pages that wait until somebody asks for them"""

    def __init__(self, inner):
        super().__init__(inner)
        self._waiting = []

    def set(self, batch):
        self._waiting.append(PageBatch(batch.keys, [[memoryview(b"".join(page))] for page in batch.buffers]))
        return [SetResult.STORED] * len(batch)

    def get(self, batch):
        while self._waiting:
            self.inner.set(self._waiting.pop(0))
        return super().get(batch)


@caught_by("test_the_first_writer_wins")
class Overwrites(PageStoreWrapper):
    """the last writer wins"""

    def set(self, batch):
        self.inner.remove(batch.keys)
        return super().set(batch)


@caught_by("test_what_is_stored_is_what_the_page_format_says")
class HasAFormatOfItsOwn(PageStoreWrapper):
    """another page format: reading and writing agree with each other and with nobody else"""

    def _turned(self, keys):
        for key in keys:
            if (stored := self.inner.objects.get(key)) is not None:
                self.inner.objects[key] = stored[::-1]

    def get(self, batch):
        self._turned(set(batch.keys))
        results = super().get(batch)
        self._turned(set(batch.keys))
        return results

    def set(self, batch):
        results = super().set(batch)
        self._turned({key for key, result in zip(batch.keys, results, strict=True) if result is SetResult.STORED})
        return results


@caught_by("test_batches_written_at_once_lose_no_page")
class LosesRaces(PageStoreWrapper):
    """of two batches written at once, one replaces the index that the other has just made"""

    def __init__(self, inner):
        super().__init__(inner)
        # As many as the case has writers: nobody sees what another has written before all have written.
        self._all = threading.Barrier(4)
        self._one_by_one = threading.Lock()

    def set(self, batch):
        before = dict(self.inner.objects)
        self._all.wait(30)
        results = super().set(batch)
        written = {key: self.inner.objects[key] for key in batch.keys if key in self.inner.objects}
        self._all.wait(30)
        with self._one_by_one:
            self.inner.objects.clear()
            self.inner.objects.update(before | written)
        return results


@caught_by("test_pages_are_whole_while_they_are_removed_and_written_again")
class FailsWhenCleared(PageStoreWrapper):
    """ERROR for a write whose place another call clears away meanwhile"""

    def __init__(self, inner):
        super().__init__(inner)
        self._cleared = 0

    def clear(self, digests):
        self._cleared += 1
        return super().clear(digests)

    def set(self, batch):
        before = self._cleared
        time.sleep(0.002)
        results = super().set(batch)
        return results if self._cleared == before else [SetResult.ERROR] * len(batch)

    def get(self, batch):
        # The case ends after so many reads: they leave time for a hundred writes.
        time.sleep(0.005)
        return super().get(batch)


@caught_by("test_eight_threads_use_one_store", seconds=2.0)
class LeaksSlots(PageStoreWrapper):
    """a limit of calls at once that keeps the slot of a call with a MISS: in the end all calls hang"""

    def __init__(self, inner):
        super().__init__(inner)
        self._slots = threading.Semaphore(4)

    def get(self, batch):
        self._slots.acquire()
        results = super().get(batch)
        if GetResult.MISS not in results:
            self._slots.release()
        return results


# -- keys --------------------------------------------------------------------------------------------------------------


@caught_by("test_keys_that_differ_in_one_byte_are_different_pages")
class TakesKeysForText(PageStoreWrapper):
    """a key that ends at its first zero byte"""

    def _cut(self, keys):
        return [key[:16] + key[16:].split(b"\0")[0].ljust(32, b"\0") for key in keys]

    def get(self, batch):
        return super().get(PageBatch(self._cut(batch.keys), batch.buffers))

    def set(self, batch):
        return super().set(PageBatch(self._cut(batch.keys), batch.buffers))

    def contains(self, keys):
        return super().contains(self._cut(keys))


@caught_by("test_clear_tells_identities_apart_that_look_alike")
class ClearsByPrefix(PageStoreWrapper):
    """clear() of every identity that begins with the same 8 bytes"""

    def clear(self, digests):
        known = {key[:IDENTITY_LENGTH] for key in self.inner.objects}
        if digests is not None:
            known = [each for each in known for digest in digests if each[:8] == digest[:8]]
            return min(super().clear(known), len(digests))
        return super().clear(digests)


@caught_by("test_clear_tells_identities_apart_that_look_alike")
class ClearsByPattern(PageStoreWrapper):
    """clear() of every identity that matches the digest as a pattern"""

    def clear(self, digests):
        if digests is None:
            return super().clear(None)
        known = {key[:IDENTITY_LENGTH].decode("latin-1") for key in self.inner.objects}
        for digest in digests:
            matching = [name.encode("latin-1") for name in fnmatch.filter(known, digest.decode("latin-1"))]
            super().clear(matching)
        return len(digests)


@caught_by("test_a_stored_page_is_read_back[20 MB]", _in_place_of_memory)
class CutsLargePages(MemoryPageStore):
    """pages that are cut at 16 MiB"""

    def _write_page(self, key, segments):
        result = super()._write_page(key, segments)
        self.objects[key] = self.objects[key][: 16 << 20]
        return result


# -- presence, remove(), clear() ---------------------------------------------------------------------------------------


@caught_by("test_ten_thousand_keys_are_answered")
class HasEverything(PageStoreWrapper):
    """contains() is true for pages that were never stored"""

    def contains(self, keys):
        return [True] * len(keys)


@caught_by("test_count_leading_ends_at_the_first_gap[1-1]")
class CountsPastGaps(PageStoreWrapper):
    """count_leading() counts pages behind a gap"""

    def count_leading(self, keys):
        return sum(self.contains(keys))


@caught_by("test_removed_pages_are_counted_once_and_gone_and_can_be_stored_again")
class RemembersRemovedPages(PageStoreWrapper):
    """contains() stays true after remove()"""

    def __init__(self, inner):
        super().__init__(inner)
        self._seen = set()

    def set(self, batch):
        self._seen.update(batch.keys)
        return super().set(batch)

    def contains(self, keys):
        return [key in self._seen for key in keys]


@caught_by("test_removed_pages_are_counted_once_and_gone_and_can_be_stored_again")
class RemovesNothing(PageStoreWrapper):
    """remove() counts and does nothing"""

    def remove(self, keys):
        return sum(self.contains(list(dict.fromkeys(keys))))


@caught_by("test_removed_pages_are_counted_once_and_gone_and_can_be_stored_again")
class CountsWhatWasAsked(PageStoreWrapper):
    """remove() answers how many keys it was given"""

    def remove(self, keys):
        super().remove(keys)
        return len(keys)


@caught_by("test_clear_tells_identities_apart_that_look_alike")
class ClearsEverything(PageStoreWrapper):
    """clear() of one identity takes the pages of another one, too"""

    def clear(self, digests):
        return min(super().clear(None), 1)


@caught_by("test_clear_of_everything_leaves_no_page")
class LeavesAnIdentity(PageStoreWrapper):
    """clear(None) leaves an identity"""

    def clear(self, digests):
        known = sorted({key[:IDENTITY_LENGTH] for key in self.inner.objects})
        super().clear(known[1:] if digests is None else digests)
        return len(known)


@caught_by("test_a_page_from_before_clear_never_comes_back")
class BringsClearedPagesBack(PageStoreWrapper):
    """clear() that hides pages until the first write to the identity"""

    def __init__(self, inner):
        super().__init__(inner)
        self._hidden = {}

    def clear(self, digests):
        hidden = dict(self.inner.objects)
        cleared = super().clear(digests)
        self._hidden = {key: page for key, page in hidden.items() if key not in self.inner.objects}
        return cleared

    def set(self, batch):
        results = super().set(batch)
        self.inner.objects.update(self._hidden)
        self._hidden = {}
        return results


@caught_by("test_a_write_after_clear_counts")
class ClearsLaterWrites(PageStoreWrapper):
    """clear() that goes on in the background and takes what was written since"""

    _waiting = ()

    def clear(self, digests):
        self._waiting = [digests]
        return super().clear(digests)

    def wait_until_cleared(self, timeout):
        while self._waiting:
            self.inner.clear(self._waiting.pop())
        return True


@caught_by("test_a_write_after_clear_counts")
class RefusesWritesAfterClear(PageStoreWrapper):
    """writes that are rejected while clear() goes on in the background"""

    _clearing = False

    def clear(self, digests):
        self._clearing = True
        return super().clear(digests)

    def wait_until_cleared(self, timeout):
        self._clearing = False
        return True

    def set(self, batch):
        return [SetResult.REJECTED] * len(batch) if self._clearing else super().set(batch)


# -- several stores over one medium ------------------------------------------------------------------------------------


class _Remembers(PageStoreWrapper):
    def __init__(self, inner):
        super().__init__(inner)
        self._seen = {}

    def remove(self, keys):
        for key in keys:
            self._seen.pop(key, None)
        return super().remove(keys)

    def clear(self, digests):
        self._seen.clear()
        return super().clear(digests)


@caught_by("test_what_another_store_takes_away_is_gone[remove]")
class RemembersWhatItWrote(_Remembers):
    """contains() stays true for pages that another process removed"""

    def set(self, batch):
        results = super().set(batch)
        self._seen.update(dict.fromkeys(batch.keys))
        return results

    def contains(self, keys):
        return [known or key in self._seen for key, known in zip(keys, super().contains(keys), strict=True)]


@caught_by("test_what_another_store_takes_away_is_gone[clear]")
class ServesWhatItRead(_Remembers):
    """HIT from a cache of the process, after another process has cleared the page"""

    def get(self, batch):
        results = super().get(batch)
        for position, (key, segments) in enumerate(zip(batch.keys, batch.buffers, strict=True)):
            if results[position] is GetResult.HIT:
                self._seen[key] = [bytes(segment) for segment in segments]
            elif key in self._seen:
                for segment, kept in zip(segments, self._seen[key], strict=True):
                    segment[:] = kept
                results[position] = GetResult.HIT
        return results


@caught_by("test_clear_of_everything_takes_identities_that_another_store_brought")
class ClearsWhatItKnows(PageStoreWrapper):
    """clear(None) of those identities alone that were there when the store was opened, or that it wrote"""

    def __init__(self, inner):
        super().__init__(inner)
        self._known = {key[:IDENTITY_LENGTH] for key in inner.objects}

    def set(self, batch):
        self._known.update(key[:IDENTITY_LENGTH] for key in batch.keys)
        return super().set(batch)

    def clear(self, digests):
        return super().clear(sorted(self._known) if digests is None else digests)


@caught_by("test_a_page_is_absent_until_it_is_whole", _over_files)
class ShowsHalfPages(PageStoreWrapper):
    """a page that has its name before it has its bytes"""

    def set(self, batch):
        raw, results = RawFiles(self.inner._directory.path), super().contains(batch.keys)
        for key, segments, known in zip(batch.keys, batch.buffers, results, strict=True):
            if not known:
                whole = b"".join((encode_header(key, segments), *segments))
                raw.write(key, whole[: len(whole) // 2])
                time.sleep(0.05)  # so that a reader sees it on any machine
                raw.write(key, whole)
        return [SetResult.EXISTS if known else SetResult.STORED for known in results]


@caught_by("test_a_good_copy_that_replaced_a_bad_one_stays[of the same length]", _in_place_of_memory)
class RemovesByName(MemoryPageStore):
    """a bad copy is removed by its name, although another process has replaced it by a good one"""

    def _read_page(self, key, segments):
        result = super()._read_page(key, segments)
        if result is GetResult.CORRUPT:
            self.objects.pop(key, None)
        return result


@caught_by("test_of_a_page_that_another_store_has_replaced_the_new_copy_stays", _in_place_of_memory)
class RemovesCopiesByName(MemoryPageStore):
    """a page that was to be removed as long as it is the copy that was seen is removed whatever copy it is"""

    def _remove_copies(self, copies):
        return self._remove(list(copies))


# -- what a store says of itself ---------------------------------------------------------------------------------------


@caught_by("test_describe_tells_name_type_and_sharing")
class LiesAboutItsType(PageStoreWrapper):
    """describe() names another type"""

    def describe(self):
        return dataclasses.replace(super().describe(), type="redis")


@caught_by("test_describe_tells_name_type_and_sharing")
class LiesAboutSharing(PageStoreWrapper):
    """describe() says shared, and no other machine sees the pages"""

    def describe(self):
        return dataclasses.replace(super().describe(), shared=True)


@caught_by(
    "test_another_machine_sees_the_pages_exactly_if_describe_says_shared",
    lambda fault, tmp_path: Over(Memory(), fault, shared=True),
)
class IsDeclaredShared(LiesAboutSharing):
    """the same, and the author of the tests believes it"""


@caught_by("test_calls_are_counted_by_result_and_in_bytes")
class CountsNothing(PageStoreWrapper):
    """metrics that stay empty"""

    def __init__(self, inner):
        super().__init__(inner)
        self._empty = TierMetrics("memory")

    @property
    def metrics(self):
        return self._empty


@caught_by("test_calls_are_counted_by_result_and_in_bytes")
class CountsHeaders(PageStoreWrapper):
    """bytes counted with headers, and not those of the payload"""

    def set(self, batch):
        results = super().set(batch)
        self.metrics.add("bytes", "set", HEADER * results.count(SetResult.STORED))
        return results


@caught_by("test_calls_are_counted_by_result_and_in_bytes")
class CountsCallsForPages(PageStoreWrapper):
    """a batch counted as one page"""

    def get(self, batch):
        results = super().get(batch)
        self.metrics.add("get", "hit", min(1, results.count(GetResult.HIT)) - results.count(GetResult.HIT))
        return results


@caught_by("test_identities_are_kept_exactly_if_that_is_declared", _in_place_of_memory)
class ForgetsIdentities(MemoryPageStore):
    """identities() answers {}"""

    def identities(self):
        return {}


@caught_by("test_identities_are_kept_exactly_if_that_is_declared")
class RegistersOnce(PageStoreWrapper):
    """register_identity() raises for an identity that is known"""

    def __init__(self, inner):
        super().__init__(inner)
        self._known = set()

    def register_identity(self, digest, document):
        if digest in self._known:
            raise KeyError(digest)
        self._known.add(digest)


# -- a medium that fails -----------------------------------------------------------------------------------------------


@caught_by("test_a_medium_that_fails_is_a_result_and_no_error[get]")
class RaisesOnAMediumError(PageStoreWrapper):
    """get() raises when the medium fails"""

    def get(self, batch):
        for key in batch.keys:
            self.inner.objects.get(key)
        return super().get(batch)


@caught_by("test_a_medium_that_fails_is_a_result_and_no_error[get]")
class CallsAnErrorAMiss(PageStoreWrapper):
    """MISS when the medium fails: the page is computed anew, and nobody looks for the reason"""

    def get(self, batch):
        return [GetResult.MISS if result is GetResult.ERROR else result for result in super().get(batch)]


@caught_by("test_a_medium_that_fails_is_a_result_and_no_error[set]")
class StoresOnNoMedium(PageStoreWrapper):
    """STORED when the medium fails"""

    def set(self, batch):
        return [SetResult.STORED if result is SetResult.ERROR else result for result in super().set(batch)]


@caught_by("test_a_medium_that_is_full_refuses_pages_and_keeps_what_it_has")
class StoresInNoSpace(PageStoreWrapper):
    """STORED when the medium is full"""

    def set(self, batch):
        return [SetResult.STORED if result is SetResult.REJECTED else result for result in super().set(batch)]


@caught_by("test_a_medium_that_is_full_refuses_pages_and_keeps_what_it_has", _in_place_of_memory)
class StoresWhatFits(MemoryPageStore):
    """half a page under its name when the medium is full"""

    def _write_page(self, key, segments):
        try:
            return super()._write_page(key, segments)
        except OSError:
            dict.__setitem__(self.objects, key, bytes(200))
            raise


class _PassesErrorsOver(PageStoreWrapper):
    """The trouble that the inner store has counted is taken back."""

    def _uncounted(self, call, *arguments):
        before = self.metrics.snapshot()
        answer = call(*arguments)
        for (event, reason), count in self.metrics.snapshot().items():
            if event == "error":
                self.metrics.add(event, reason, before.get((event, reason), 0) - count)
        return answer


@caught_by("test_a_medium_that_fails_is_a_result_and_no_error[set]")
class CountsNoFailedWrites(_PassesErrorsOver):
    """a failed write that is not counted"""

    def set(self, batch):
        return self._uncounted(super().set, batch)


@caught_by("test_a_medium_that_fails_is_a_result_and_no_error[contains]")
class TakesErrorsForAbsence(_PassesErrorsOver):
    """contains() is false when the medium fails, and nothing is counted"""

    def contains(self, keys):
        return self._uncounted(super().contains, keys)


@caught_by("test_a_medium_that_fails_is_a_result_and_no_error[remove]")
class PassesOverWhatItCannotRemove(_PassesErrorsOver):
    """remove() is 0 when the medium fails, and nothing is counted"""

    def remove(self, keys):
        return self._uncounted(super().remove, keys)


@caught_by("test_a_medium_that_fails_is_a_result_and_no_error[clear]")
class PassesOverWhatItCannotClear(_PassesErrorsOver):
    """clear() is 0 when the medium fails, nothing is counted, and the pages are still there"""

    def clear(self, digests):
        return self._uncounted(self._passed_over, digests)

    def _passed_over(self, digests):
        try:
            return super().clear(digests)
        except ClearLaterError:
            return 0


@caught_by("test_a_medium_that_fails_is_a_result_and_no_error[get]", seconds=2.0)
class StaysDown(PageStoreWrapper):
    """a store that does not come back when its medium does"""

    _down = False

    def get(self, batch):
        results = super().get(batch)
        self._down = self._down or GetResult.ERROR in results
        return [GetResult.ERROR] * len(batch) if self._down else results

    def set(self, batch):
        return [SetResult.REJECTED] * len(batch) if self._down else super().set(batch)


# -- other processes and machines --------------------------------------------------------------------------------------


@caught_by("test_processes_see_each_others_pages_exactly_if_declared", _over_files)
class IsSeenHereAlone(PageStoreWrapper):
    """pages that no other process sees"""

    def __init__(self, inner):
        inner.close()
        super().__init__(MemoryPageStore("disk"))

    def describe(self):
        return dataclasses.replace(super().describe(), type="file")


@caught_by("test_pages_are_whole_or_absent_after_their_writer_was_killed", _over_files)
class TearsPages(PageStoreWrapper):
    """pages written in their place: kill -9 leaves half a page under its name"""

    def set(self, batch):
        raw, results = RawFiles(self.inner._directory.path), super().contains(batch.keys)
        for key, segments, known in zip(batch.keys, batch.buffers, results, strict=True):
            if not known:
                stored = b"".join((encode_header(key, segments), *segments))
                raw.write(key, stored[: len(stored) // 2])
                time.sleep(0.01)
                raw.write(key, stored)
        return [SetResult.EXISTS if known else SetResult.STORED for known in results]


@caught_by("test_pages_are_whole_or_absent_after_their_writer_was_killed", _over_files)
class StoresLater(PageStoreWrapper):
    """STORED before the page is written: kill -9 takes it away"""

    def __init__(self, inner):
        super().__init__(inner)
        self._waiting = []

    def set(self, batch):
        self._waiting.append(PageBatch(batch.keys, [[memoryview(b"".join(page))] for page in batch.buffers]))
        return [SetResult.STORED] * len(batch)

    def close(self):
        for batch in self._waiting:
            self.inner.set(batch)
        super().close()


@caught_by("test_clear_holds_when_its_process_is_killed", _over_files)
class ClearsInItsOwnSight(PageStoreWrapper):
    """clear() that hides pages from its own process and removes them when it ends: kill -9 brings them back"""

    def __init__(self, inner):
        super().__init__(inner)
        self._cleared = []

    def clear(self, digests):
        self._cleared.append(digests)
        return 1

    def close(self):
        for digests in self._cleared:
            self.inner.clear(digests)
        super().close()


class _SharedMemory(Memory):
    shared = True

    def __init__(self, fault):
        super().__init__()
        self._fault = fault

    def open_elsewhere(self):
        return self.open()

    def open_over_a_damaging_path(self):
        return self._fault(self)


@caught_by(
    "test_a_reader_whose_path_damages_pages_takes_none_from_others", lambda fault, tmp_path: _SharedMemory(fault)
)
class RemovesPagesOfOthers(MemoryPageStore):
    """a page of a shared medium removed because it arrived damaged"""

    def __init__(self, medium):
        super().__init__(objects=medium.objects)

    def _read_page(self, key, segments):
        stored = self.objects[key]
        self.objects[key] = stored[:-1] + bytes([stored[-1] ^ 1])
        result = super()._read_page(key, segments)
        if key in self.objects:
            self.objects[key] = stored
        return result


@caught_by("test_pages_outlive_the_store")
class ForgetsAtTheEnd(PageStoreWrapper):
    """pages that end with the store"""

    def close(self):
        self.inner.objects.clear()
        super().close()


# -- the end -----------------------------------------------------------------------------------------------------------


@caught_by("test_a_closed_store_refuses_calls_and_may_be_closed_again")
class AnswersWhenClosed(PageStoreWrapper):
    """a closed store that still answers"""

    def close(self):
        pass


@caught_by("test_a_closed_store_refuses_calls_and_may_be_closed_again")
class ClosesOnce(PageStoreWrapper):
    """a second close() that raises"""

    _closed = False

    def close(self):
        if self._closed:
            raise RuntimeError("closed already")
        self._closed = True
        super().close()


@caught_by("test_close_waits_for_calls_under_way")
class ClosesUnderACall(PageStoreWrapper):
    """close() takes the medium from under calls, which then raise"""

    def close(self):
        super().close()
        self._gone = True

    def get(self, batch):
        results = super().get(batch)
        time.sleep(0.05)
        if hasattr(self, "_gone"):
            raise ValueError("I/O operation on closed file")
        return results


@caught_by("test_a_closed_store_refuses_calls_and_may_be_closed_again")
class CannotDescribeItselfAnyMore(PageStoreWrapper):
    """describe() raises after close()"""

    _closed = False

    def close(self):
        self._closed = True
        super().close()

    def describe(self):
        if self._closed:
            raise ValueError("I/O operation on closed file")
        return super().describe()


@caught_by("test_close_leaves_no_open_file_behind")
class LeavesAFileOpen(PageStoreWrapper):
    """close() leaves a file or connection open"""

    _left: ClassVar[list] = []

    def __init__(self, inner):
        super().__init__(inner)
        self._left.append(open(os.devnull, "rb"))  # noqa: SIM115 - the fault


@caught_by("test_calls_leave_no_file_open")
class LeavesFilesOpen(PageStoreWrapper):
    """a read leaves a file or connection open"""

    def __init__(self, inner):
        super().__init__(inner)
        self._left = []

    def get(self, batch):
        self._left += [open(os.devnull, "rb") for _ in batch.keys]  # noqa: SIM115 - the fault
        return super().get(batch)


@caught_by("test_close_leaves_no_thread_behind")
class LeavesAThread(PageStoreWrapper):
    """close() leaves a thread behind"""

    def __init__(self, inner):
        super().__init__(inner)
        threading.Thread(target=time.sleep, args=(2,), name="left behind", daemon=True).start()
