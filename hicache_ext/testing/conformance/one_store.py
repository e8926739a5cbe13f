"""The part of the PageStore suite about one store: what comes back, damage, removal, and what it says of itself."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_ext.errors import ClearLaterError
from hicache_ext.storage.contract import bad_pages
from hicache_ext.storage.contract.abilities import IdentityKeeper, ability
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.tiers.file import path_store
from hicache_ext.testing.conformance.medium import Medium
from hicache_ext.testing.conformance.pages import (
    IDENTITY,
    OTHER_IDENTITY,
    HostPages,
    assert_hits,
    assert_pages,
    assert_whole,
    cut,
    filled,
    in_threads,
    page_key,
    page_keys,
    payload_of,
    read_pages,
    settle,
    store_pages,
)
from hicache_ext.testing.conformance.second_reader import read_page_object, write_page_object

_SIZES = (700, 333)
_SIZE = sum(_SIZES)
_NEIGHBOUR = page_key("neighbour")

Damage = Callable[[bytes, bytes], bytes]
"""(key, page object as the store wrote it) -> what is found in its place."""


def _rewrite(**wrong: object) -> Damage:
    """Return the same page with ``wrong`` header fields under a valid header checksum."""

    def rewrite(key: bytes, stored: bytes) -> bytes:
        page = read_page_object(stored)
        return write_page_object(key, page.payload, header_length=page.header_length, **wrong)  # type: ignore[arg-type]

    return rewrite


def _cut_to(length: int) -> Damage:
    return lambda _, stored: stored[:length]


def _page_of(key: bytes) -> Damage:
    return lambda _, stored: write_page_object(
        key, payload_of(key, _SIZE), header_length=read_page_object(stored).header_length
    )


def _payload_of_another_page(key: bytes, stored: bytes) -> bytes:
    return stored[:-_SIZE] + payload_of(_NEIGHBOUR, _SIZE)


_FORMS: dict[str, Damage] = {
    **{f"cut to {length} bytes": _cut_to(length) for length in (0, 1, 7, 8, 16, 63, 64, 111, 112, 127, 128, 129, 500)},
    "without its last byte": lambda _, stored: stored[:-1],
    "without half of its payload": lambda _, stored: stored[: -_SIZE // 2],
    "one byte longer": lambda _, stored: stored + b"\0",
    "a block longer": lambda _, stored: stored + bytes(4096),
    "twice": lambda _, stored: stored + stored,
    "zeros": lambda _, stored: bytes(len(stored)),
    "zeros behind the header": lambda _, stored: stored[:-_SIZE] + bytes(_SIZE),
    "zeros from the last block on": lambda _, stored: stored[:-100] + bytes(100),
    "the payload alone": lambda _, stored: stored[-_SIZE:],
    "text": lambda _, stored: b"<html>503 Service Unavailable</html>",
    "another page": _page_of(_NEIGHBOUR),
    "the page of another identity": lambda key, stored: _page_of(OTHER_IDENTITY + key[16:])(key, stored),
    "this header before another page's payload": _payload_of_another_page,
    "a wrong payload checksum": _rewrite(payload_checksum=bytes(16)),
    "no payload checksum": _rewrite(flags=0, payload_checksum=bytes(16)),
    "no payload checksum, field filled": _rewrite(flags=0),
    "a future version": _rewrite(version=2),
    "version zero": _rewrite(version=0),
    "a payload length one too small": _rewrite(payload_length=_SIZE - 1),
    "a payload length one too large": _rewrite(payload_length=_SIZE + 1),
    "an absurd payload length": _rewrite(payload_length=2**64 - 1),
    "a payload that begins elsewhere": _rewrite(header_length_field=640),
    "a header length below the fields": _rewrite(header_length_field=0),
    "an absurd header length": _rewrite(header_length_field=2**32 - 1),
}

_UNCOUNTED = "the trouble is not counted"
_TROUBLE = (GetResult.ERROR, GetResult.TIMEOUT, GetResult.REJECTED)
_LARGE = (300_000, 700_000)
_DOCUMENTS: dict[bytes, dict[str, Any]] = {
    IDENTITY: {"model": {"id": "org/model", "revision": "ä"}, "pool": {"name": "kv", "segments": [1024, 512]}},
    OTHER_IDENTITY: {"model": {"id": "org/other"}, "pool": {"name": "kv"}},
}


class PageStoreCases:
    """The cases of one store, and the fixtures of all."""

    patience = 60.0
    """Seconds after which a call that should have ended counts as hanging."""

    @pytest.fixture
    def medium(self) -> Medium:
        """A fresh medium. An override that ends the test's own resources yields it."""
        pytest.fail(
            f"{type(self).__name__} needs a fixture `medium` that answers a hicache_ext.testing.conformance.medium."
            "Medium: the way past the store, without which the suite cannot tell whether the store is right",
            pytrace=False,
        )

    @pytest.fixture
    def store(self, medium: Medium) -> Iterator[PageStore]:
        """A store over the medium; both are closed at the end."""
        store = medium.open()
        yield store
        store.close()
        medium.close()

    @pytest.fixture(autouse=True)
    def any_number_of_bad_pages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A pool removes only a few in a minute, and the file tier looks for more; here every one is bad on purpose."""
        monkeypatch.setattr(bad_pages, "MOST_REMOVED", 1 << 30)
        monkeypatch.setattr(path_store, "SCRUB_AFTER", math.inf)

    def count(self, store: PageStore, event: str, reason: str | None = None) -> int:
        """Return how often ``event`` was counted by the store, or by the stores it consists of."""
        tiers: Sequence[PageStore] = getattr(store, "tiers", [store])
        return sum(tier.metrics.total(event) if reason is None else tier.metrics.value(event, reason) for tier in tiers)

    def in_threads(self, *works: Callable[[], None]) -> None:
        """Run each of ``works`` on a thread of its own, within ``patience``."""
        in_threads(*works, patience=self.patience)

    # -- pages going in and coming out, and the memory that they come from and go to -----------------------------------

    @pytest.mark.parametrize(
        "sizes",
        [
            pytest.param([4096], id="one block"),
            pytest.param([131072], id="128 KiB"),
            pytest.param([1], id="1 byte"),
            pytest.param([4097], id="odd size"),
            pytest.param([1, 2, 3, 4095, 5000], id="unequal segments"),
            pytest.param(cut(20480, 64), id="64 segments"),
            pytest.param(cut(17501, 2500), id="more segments than one system call takes"),
            pytest.param([3_000_001], id="3 MB"),
            pytest.param([10_000_001, 10_000_002], id="20 MB"),
        ],
    )
    def test_a_stored_page_is_read_back(self, store: PageStore, medium: Medium, sizes: list[int]) -> None:
        key = page_key("round trip")
        if sum(sizes) > medium.largest_page:
            assert store_pages(store, [key], sizes) == [SetResult.REJECTED]
            assert store.contains([key]) == [False]
            return
        assert store_pages(store, [key], sizes) == [SetResult.STORED]
        assert_hits(store, [key], sizes)
        # However its bytes are cut into segments.
        assert_hits(store, [key], cut(sum(sizes), min(7, sum(sizes))))

    def test_pages_of_different_sizes_share_a_batch(self, store: PageStore) -> None:
        keys = page_keys(6)
        sizes = [[100], [5000], [1], [300, 300], [4096, 1], [65536]]
        assert store.set(PageBatch(keys, filled(keys, sizes).buffers)) == [SetResult.STORED] * 6
        pages = HostPages(sizes)
        assert store.get(PageBatch(keys, pages.buffers)) == [GetResult.HIT] * 6
        assert [pages.payload(i) for i in range(6)] == [
            payload_of(key, sum(page)) for key, page in zip(keys, sizes, strict=True)
        ]

    def test_a_batch_of_500_pages_is_stored_and_read(self, store: PageStore) -> None:
        keys = page_keys(500)
        assert store_pages(store, keys, [700, 324]) == [SetResult.STORED] * 500
        assert_hits(store, list(reversed(keys)), [700, 324])

    def test_an_empty_batch_answers_nothing(self, store: PageStore) -> None:
        assert store.get(PageBatch([], [])) == []
        assert store.set(PageBatch([], [])) == []
        assert store.contains([]) == []
        assert store.count_leading([]) == 0
        assert store.remove([]) == 0
        assert store.clear([]) == 0

    def test_a_key_twice_in_a_batch_is_stored_and_read_twice(self, store: PageStore) -> None:
        first, second = page_keys(2)
        results = store_pages(store, [first, second, first])
        assert all(result.durable for result in results) and SetResult.STORED in (results[0], results[2])
        assert_hits(store, [first, second, first])

    def test_the_first_writer_wins(self, store: PageStore, medium: Medium) -> None:
        key = page_key("first")
        store_pages(store, [key])
        stored = medium.read(key)
        (result,) = store.set(PageBatch([key], HostPages([[1000]], fill=0xEE).buffers))
        if medium.writes_later:
            # It does not ask before it answers; what is stored is the first writer's all the same.
            settle(store)
        else:
            assert result is SetResult.EXISTS
        assert medium.read(key) == stored
        assert_hits(store, [key])

    def test_keys_that_differ_in_one_byte_are_different_pages(self, store: PageStore) -> None:
        """Whatever bytes they are: a key is no text."""
        name = page_key("alike")
        keys = [name]
        for place in range(48):
            for byte in (0, 0x0A, 0x2F, 0xFF):
                changed = bytearray(name)
                changed[place] = byte
                keys.append(bytes(changed))
        # Also the end and the beginning alone, and nothing but zeros.
        keys += [name[:16] + bytes(32), name[:47] + b"\0", name[:40] + bytes(8), bytes(16) + name[16:], bytes(48)]
        keys = list(dict.fromkeys(keys))
        for key in keys[::2]:
            assert store_pages(store, [key], [70]) == [SetResult.STORED], key.hex()
        assert store.contains(keys) == [number % 2 == 0 for number in range(len(keys))]
        assert_hits(store, keys[::2], [70])
        assert read_pages(store, keys[1::2], [70])[0] == [GetResult.MISS] * (len(keys) // 2)
        assert self.count(store, "corrupt") == 0
        assert store.remove(keys[1::2]) == 0
        assert_hits(store, keys[::2], [70])

    def test_what_is_stored_is_what_the_page_format_says(self, store: PageStore, medium: Medium) -> None:
        keys = page_keys(4)
        before = int(time.time() * 1000)
        store_pages(store, keys, [900, 124])
        assert sorted(medium.keys()) == sorted(keys)
        for key in keys:
            stored = medium.read(key)
            assert stored is not None
            page = read_page_object(stored)
            assert (page.key, page.payload) == (key, payload_of(key, 1024))
            assert before - 1000 <= page.created_ms <= time.time() * 1000 + 1000

    def test_a_page_of_another_writer_is_a_hit(self, store: PageStore, medium: Medium) -> None:
        sample, key = page_keys(2)
        store_pages(store, [sample])
        header_length = read_page_object(medium.read(sample) or b"").header_length
        medium.write(key, write_page_object(key, payload_of(key, 1000), header_length=header_length))
        assert store.contains([key]) == [True]
        stored = medium.read(key)
        assert_hits(store, [key])
        (result,) = store_pages(store, [key])
        # A store that writes later would have to ask and wait.
        assert result is SetResult.EXISTS or (medium.writes_later and result is SetResult.STORED)
        assert medium.read(key) == stored

    @pytest.mark.parametrize(("missing", "leading"), [(0, 0), (1, 1), (4, 4), (None, 5)])
    def test_count_leading_ends_at_the_first_gap(self, store: PageStore, missing: int | None, leading: int) -> None:
        keys = page_keys(5)
        store_pages(store, [key for number, key in enumerate(keys) if number != missing])
        assert store.count_leading(keys) == leading

    def test_ten_thousand_keys_are_answered(self, store: PageStore) -> None:
        keys = page_keys(10_000)
        store_pages(store, keys[:100])
        store_pages(store, keys[101:110])
        assert (count := store.count_leading(keys)) == 100 and type(count) is int
        present = store.contains(keys)
        assert len(present) == 10_000 and all(isinstance(known, bool) for known in present)
        assert [number for number, known in enumerate(present) if known] == [*range(100), *range(101, 110)]

    def test_nothing_beside_the_segments_is_touched(self, store: PageStore) -> None:
        keys = page_keys(20)
        sizes = [cut(4000 + number, 9) for number in range(20)]
        source = filled(keys, sizes)
        before = source.snapshot()
        store.set(PageBatch(keys, source.buffers))
        assert source.snapshot() == before, "set() changed the memory it was to store"
        target = HostPages(sizes)
        store.get(PageBatch(keys, target.buffers))
        assert target.snapshot() == before

    def test_memory_is_left_alone_once_a_call_has_returned(self, store: PageStore) -> None:
        keys = page_keys(40)
        source, target = filled(keys[::2], [[50_000]] * 20), HostPages([[50_000]] * 40)
        store.set(PageBatch(keys[::2], source.buffers))
        for number in range(20):
            source.write(number, b"\x5a" * 50_000)
        time.sleep(0.1)
        assert_hits(store, keys[::2], [50_000])
        store.get(PageBatch(keys, target.buffers))
        for number in range(40):
            target.write(number, b"\x5a" * 50_000)
        returned = target.snapshot()
        time.sleep(0.3)
        assert target.snapshot() == returned

    # -- damage: whatever is wrong with a stored copy, it is never a HIT -----------------------------------------------

    def _assert_refused_and_healed(self, store: PageStore, medium: Medium, key: bytes, stored: bytes) -> None:
        """Put ``stored`` in the page's place: it is refused, counted, gone, and the key works again."""
        medium.write(key, stored)
        corrupt_before = self.count(store, "corrupt")
        results, payloads = read_pages(store, [_NEIGHBOUR, key, _NEIGHBOUR], _SIZES)
        assert results == [GetResult.HIT, GetResult.CORRUPT, GetResult.HIT]
        assert payloads[::2] == [payload_of(_NEIGHBOUR, _SIZE)] * 2
        assert self.count(store, "corrupt") > corrupt_before
        assert store.contains([key]) == [False], "the bad copy is still there"
        assert store_pages(store, [key], _SIZES) == [SetResult.STORED]
        assert_hits(store, [key], _SIZES)
        healed = medium.read(key)
        assert healed is not None and read_page_object(healed).payload == payload_of(key, _SIZE)

    @pytest.mark.parametrize("form", list(_FORMS))
    def test_a_damaged_page_is_refused_and_replaced(self, store: PageStore, medium: Medium, form: str) -> None:
        key = page_key("damaged")
        store_pages(store, [_NEIGHBOUR, key], _SIZES)
        good = medium.read(key)
        assert good is not None
        self._assert_refused_and_healed(store, medium, key, _FORMS[form](key, good))

    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(data=st.data())
    def test_a_flipped_bit_is_refused_wherever_it_is(
        self, store: PageStore, medium: Medium, data: st.DataObject
    ) -> None:
        key = page_key("flipped")
        store_pages(store, [_NEIGHBOUR, key], _SIZES)
        good = medium.read(key)
        assert good is not None
        # Padding between the fields and the payload (block-aligned stores) says nothing and is not looked at.
        places = [*range(128), *range(len(good) - _SIZE, len(good))]
        place = data.draw(st.sampled_from(places), label="byte")
        bit = data.draw(st.integers(0, 7), label="bit")
        damaged = bytearray(good)
        damaged[place] ^= 1 << bit
        self._assert_refused_and_healed(store, medium, key, bytes(damaged))

    def test_a_reader_whose_path_damages_pages_takes_none_from_others(self, store: PageStore, medium: Medium) -> None:
        if not medium.shared:
            pytest.skip("declared: shared = False; another case shows that no other machine reads these pages")
        keys = page_keys(20)
        store_pages(store, keys, [5000])
        damaged = 0
        with closing(medium.open_over_a_damaging_path()) as reader:
            for _ in range(20):
                damaged += assert_whole(reader, keys, [5000]).count(GetResult.CORRUPT)
                if damaged > 10:
                    break
            settle(reader)
            assert damaged
            assert store.contains(keys) == [True] * 20
            assert_hits(store, keys, [5000])

    def test_a_page_asked_for_with_another_size_is_no_hit(self, store: PageStore) -> None:
        for number, sizes in enumerate([(_SIZE - 1,), (_SIZE + 1,), (1,)]):
            key = page_key(f"size {number}")
            store_pages(store, [key], _SIZES)
            assert read_pages(store, [key], sizes)[0] == [GetResult.CORRUPT]

    def test_damage_in_one_page_of_a_batch_leaves_the_others_hits(self, store: PageStore, medium: Medium) -> None:
        keys = [page_key(number) for number in range(20)]
        store_pages(store, keys, _SIZES)
        for number in (3, 11):
            medium.write(keys[number], (medium.read(keys[number]) or b"")[:-5])
        medium.write(keys[19], b"")
        bad = [GetResult.CORRUPT if number in (3, 11, 19) else GetResult.HIT for number in range(20)]
        assert assert_whole(store, keys, _SIZES) == bad

    # -- removal -------------------------------------------------------------------------------------------------------

    def test_removed_pages_are_counted_once_and_gone_and_can_be_stored_again(self, store: PageStore) -> None:
        keys = page_keys(4)
        store_pages(store, keys[:3])
        assert (count := store.remove([keys[0], keys[3], keys[2], keys[0]])) == 2 and type(count) is int
        assert store.contains(keys) == [False, True, False, False]
        assert store.remove(keys[:1]) == 0
        assert read_pages(store, keys[:1])[0] == [GetResult.MISS]
        assert store_pages(store, keys[:1]) == [SetResult.STORED]
        assert_hits(store, keys[:2])
        assert store.remove(keys) == 2
        settle(store)
        assert store.clear(None) == 0, "an identity is counted that has no page any more"

    def test_clear_tells_identities_apart_that_look_alike(self, store: PageStore) -> None:
        """They begin or end with the same bytes, or with what is a pattern or an end of text to somebody."""
        digests = [IDENTITY, IDENTITY[:15] + b"\xff", IDENTITY[:8] + bytes(8), b"\xff" + IDENTITY[1:], bytes(16)]
        digests += [bytes([byte]) * 16 for byte in b"*?%_/\n\xff"] + [b"[!a]" * 4]
        pages = {digest: page_keys(2, digest.hex(), digest) for digest in digests}
        keys = [key for digest in digests for key in pages[digest]]
        assert store_pages(store, keys, [70]) == [SetResult.STORED] * len(keys)
        assert store.clear([OTHER_IDENTITY]) == 0, "it has no pages"
        assert_hits(store, keys, [70])
        for number, digest in enumerate(digests):
            assert store.clear([digest]) == 1, digest.hex()
            expected = [GetResult.MISS] * 2 * (number + 1) + [GetResult.HIT] * 2 * (len(digests) - number - 1)
            assert read_pages(store, keys, [70])[0] == expected, digest.hex()

    def test_clear_of_everything_leaves_no_page(self, store: PageStore) -> None:
        keys = page_keys(5) + page_keys(5, identity=OTHER_IDENTITY)
        store_pages(store, keys)
        assert store.clear(None) == 2
        assert store.contains(keys) == [False] * 10
        assert read_pages(store, keys)[0] == [GetResult.MISS] * 10
        settle(store)
        assert store.clear(None) == 0

    # The one rule of clear(): a write after clear() returned counts, it is visible and stays; a page stored before
    # clear() never comes back.

    def test_a_write_after_clear_counts(self, store: PageStore, medium: Medium) -> None:
        keys = page_keys(60)
        for digests, fill in (([IDENTITY], 0x42), (None, 0x43)):
            store_pages(store, keys)
            store.clear(digests)
            assert store.set(PageBatch(keys, HostPages([[1000]] * 60, fill=fill).buffers)) == [SetResult.STORED] * 60
            for _ in range(2):
                assert store.contains(keys) == [True] * 60
                assert_pages(store, keys, [bytes([fill]) * 1000] * 60)
                settle(store)
        assert_pages(store, keys, [bytes([fill]) * 1000] * 60)
        store.close()
        with closing(medium.open()) as again:
            assert_pages(again, keys, [bytes([fill]) * 1000] * 60)

    def test_a_page_from_before_clear_never_comes_back(self, store: PageStore, medium: Medium) -> None:
        keys, theirs = page_keys(60), page_keys(5, identity=OTHER_IDENTITY)
        store_pages(store, keys + theirs)
        assert store.clear([IDENTITY]) == 1
        assert store.contains(keys) == [False] * 60
        # The first write makes the identity's place again; the old pages must not be found in it.
        store_pages(store, keys[:20])
        assert_hits(store, keys[:20])
        assert store.contains(keys) == [True] * 20 + [False] * 40
        settle(store)
        assert store.contains(keys) == [True] * 20 + [False] * 40
        assert store.count_leading(keys) == 20
        assert read_pages(store, keys[20:])[0] == [GetResult.MISS] * 40
        store.close()
        assert sorted(medium.keys()) == sorted(keys[:20] + theirs)
        with closing(medium.open()) as again:
            assert again.contains(keys + theirs) == [True] * 20 + [False] * 40 + [True] * 5
            assert_hits(again, keys[:20] + theirs)

    def test_writes_of_several_threads_count_once_all_have_cleared(self, store: PageStore) -> None:
        """Each thread clears and writes; whoever clears last, what is written after that stays."""
        keys = [page_keys(10, f"thread-{number}") for number in range(4)]
        all_cleared = threading.Barrier(4)

        def clear_and_write(mine: list[bytes]) -> None:
            for _ in range(3):
                store_pages(store, mine)
                store.clear([IDENTITY])
            all_cleared.wait(self.patience)
            assert store_pages(store, mine) == [SetResult.STORED] * 10

        self.in_threads(*[partial(clear_and_write, mine) for mine in keys])
        settle(store)
        everything = [key for mine in keys for key in mine]
        assert store.contains(everything) == [True] * 40
        assert_hits(store, everything)

    # -- what a store says of itself, and a medium that fails ----------------------------------------------------------

    def test_describe_tells_name_type_and_sharing(self, store: PageStore, medium: Medium) -> None:
        info = store.describe()
        assert (info.name, info.type, info.shared) == (store.name, medium.type, medium.shared)

    def test_another_machine_sees_the_pages_exactly_if_describe_says_shared(
        self, store: PageStore, medium: Medium
    ) -> None:
        keys = page_keys(5)
        store_pages(store, keys)
        settle(store)
        expected = GetResult.HIT if store.describe().shared else GetResult.MISS
        with closing(medium.open_elsewhere()) as elsewhere:
            assert read_pages(elsewhere, keys)[0] == [expected] * 5

    def test_stored_means_on_the_medium_unless_it_is_declared_to_write_later(
        self, store: PageStore, medium: Medium
    ) -> None:
        keys = page_keys(5)
        assert store_pages(store, keys) == [SetResult.STORED] * 5
        if medium.writes_later:
            assert hasattr(store, "wait_until_written")
            settle(store)
        assert all(medium.read(key) for key in keys)

    def test_calls_are_counted_by_result_and_in_bytes(self, store: PageStore, medium: Medium) -> None:
        def counts() -> dict[tuple[str, str], int]:
            events = (("get", "hit"), ("set", "stored"), ("bytes", "get"), ("bytes", "set"), ("get", "miss"))
            return {event: self.count(store, *event) for event in events}

        def growth() -> dict[tuple[str, str], int]:
            return {event: count - before[event] for event, count in counts().items()}

        keys, absent = page_keys(7), page_keys(3, "absent")
        before = counts()
        store_pages(store, keys, [900, 124])
        settle(store)
        written = {("set", "stored"): 7 * medium.copies, ("bytes", "set"): 7 * 1024 * medium.copies}
        assert growth() == dict.fromkeys(before, 0) | written
        before = counts()
        assert_hits(store, keys[:4], [900, 124])
        assert growth() == dict.fromkeys(before, 0) | {("get", "hit"): 4, ("bytes", "get"): 4096}
        before = counts()
        read_pages(store, absent, [1024])
        assert growth()["get", "miss"] >= 3 and growth()["bytes", "get"] == 0

    def test_identities_are_kept_exactly_if_that_is_declared(self, store: PageStore, medium: Medium) -> None:
        keeper = ability(store, IdentityKeeper)
        assert (keeper is not None) == medium.keeps_identities
        for digest, document in [*_DOCUMENTS.items()] * 2:
            store.register_identity(digest, document)
        store_pages(store, page_keys(2) + page_keys(2, identity=OTHER_IDENTITY))
        settle(store)
        if keeper is not None:
            assert keeper.identities() == _DOCUMENTS
            with closing(medium.open()) as other:
                kept = ability(other, IdentityKeeper)
                assert kept is not None and kept.identities() == _DOCUMENTS

    @pytest.mark.parametrize("call", ["get", "set", "contains", "count_leading", "remove", "clear", "identity"])
    def test_a_medium_that_fails_is_a_result_and_no_error(self, store: PageStore, medium: Medium, call: str) -> None:
        keys, new = page_keys(4), page_keys(4, "new")
        assert store_pages(store, keys) == [SetResult.STORED] * 4
        settle(store)
        with medium.failing():
            before = self._troubles(store)
            match call:
                case "get":
                    results, _ = read_pages(store, keys)
                    assert all(result in _TROUBLE for result in results), results
                    assert self._troubles(store) > before, _UNCOUNTED
                case "set":
                    written = store_pages(store, new)
                    assert medium.writes_later or not any(result.durable for result in written), written
                    self._settle_in_trouble(store, medium, before)
                case "contains":
                    present = store.contains(keys + new)
                    assert len(present) == 8 and not any(present[4:])
                    assert all(present[:4]) or self._troubles(store) > before, "absent, and the trouble is not counted"
                case "count_leading":
                    assert store.count_leading(new) == 0
                    before = self._troubles(store)
                    assert store.count_leading(keys) == 4 or self._troubles(store) > before, _UNCOUNTED
                case "remove":
                    removed = store.remove(keys)
                    assert removed == 4 or self._troubles(store) > before, _UNCOUNTED
                case "clear":
                    with suppress(ClearLaterError):
                        before -= store.clear([IDENTITY])  # one that was cleared is no trouble
                    assert self._troubles(store) > before, _UNCOUNTED
                case "identity":
                    store.register_identity(IDENTITY, {"model": {"id": "a/b"}})
            assert store.describe().name == store.name
        self._works_again(store)

    def test_a_medium_that_is_full_refuses_pages_and_keeps_what_it_has(self, store: PageStore, medium: Medium) -> None:
        keys, new = page_keys(4), page_keys(6, "new")
        store_pages(store, keys, _LARGE)
        settle(store)
        with medium.full():
            before = self._troubles(store)
            written = store_pages(store, new, _LARGE)
            assert medium.writes_later or not any(result.durable for result in written), written
            self._settle_in_trouble(store, medium, before)
            kept = [page for page, there in zip(keys, store.contains(keys), strict=True) if there]
            assert medium.makes_room_when_full or kept == keys
            assert_hits(store, kept, _LARGE)
            results, _ = read_pages(store, keys + new, _LARGE)
            # What waits to be written is read from where it waits.
            none = {GetResult.MISS, GetResult.HIT} if medium.writes_later else {GetResult.MISS}
            assert set(results[4:]) <= none, "half a page has the name of a whole one"
        settle(store)
        if medium.writes_later:
            assert set(kept) <= set(medium.keys()) <= {*keys, *new}
            assert_hits(store, [key for key, result in zip(new, written, strict=True) if result.durable], _LARGE)
        else:
            assert sorted(medium.keys()) == sorted(kept)
        self._works_again(store)

    def _settle_in_trouble(self, store: PageStore, medium: Medium, before: int) -> None:
        """After a write that the medium does not take. A store that writes later may wait until it does."""
        deadline = time.monotonic() + self.patience
        while medium.writes_later and self._troubles(store) <= before and time.monotonic() < deadline:
            time.sleep(0.01)
        if not medium.writes_later:
            settle(store)
        assert self._troubles(store) > before, _UNCOUNTED

    def _troubles(self, store: PageStore) -> int:
        """Failed reads by their result, whatever the reason is called."""
        return sum(self.count(store, event) for event in ("error", "timeout", "rejected", "failure"))

    def _works_again(self, store: PageStore) -> None:
        """The store recovers with its medium; guards and paths out of service may take a while."""
        deadline = time.monotonic() + self.patience
        for attempt in range(1_000_000):
            keys = page_keys(3, f"afterwards-{attempt}")
            written = store_pages(store, keys)
            settle(store)
            if all(result is SetResult.STORED for result in written) and all(store.contains(keys)):
                assert_hits(store, keys)
                return
            assert time.monotonic() < deadline, written
            time.sleep(0.05)
