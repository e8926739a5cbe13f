"""The part of the PageStore suite about damage: whatever is wrong with a stored copy, it is never a HIT."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_ext.storage.contract.store import GetResult, PageStore, SetResult
from hicache_ext.testing.conformance.cases import PageStoreCases
from hicache_ext.testing.conformance.medium import Medium
from hicache_ext.testing.conformance.pages import (
    OTHER_IDENTITY,
    assert_hits,
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
    """The same page with ``wrong`` header fields under a header checksum that holds."""

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


class DamageCases(PageStoreCases):
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
        reader, damaged = medium.open_over_a_damaging_path(), 0
        try:
            for _ in range(20):
                results, payloads = read_pages(reader, keys, [5000])
                damaged += results.count(GetResult.CORRUPT)
                for key, result, payload in zip(keys, results, payloads, strict=True):
                    assert result is not GetResult.HIT or payload == payload_of(key, 5000)
                if damaged > 10:
                    break
            settle(reader)
            assert damaged
            assert store.contains(keys) == [True] * 20
            assert_hits(store, keys, [5000])
        finally:
            reader.close()

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
        results, payloads = read_pages(store, keys, _SIZES)
        for number, (key, result) in enumerate(zip(keys, results, strict=True)):
            assert result is (GetResult.CORRUPT if number in (3, 11, 19) else GetResult.HIT)
            assert result is GetResult.CORRUPT or payloads[number] == payload_of(key, _SIZE)
