"""Packs: what a name says, what a footer says, and that nothing else is taken for either."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_ext.errors import FormatError
from hicache_ext.page.pack import (
    HASH_BYTES,
    LARGEST_PAGE,
    MOST_PAGES,
    PACK_BYTES,
    SMALL,
    Pack,
    Tombstone,
    decode_footer,
    encode_footer,
    gather_pages,
    milliseconds_of,
    new_id,
    pack_length,
    parse_pack,
    parse_tombstone,
    portions,
    seal_pack,
    short_hash,
    short_numbers,
)
from hicache_ext.page.page_object import decode_object

LONGEST_COMPONENT = 232
"""255 is what a file system takes; S3 servers and writers of temporary files add to it."""

_IDS = st.integers(0, 2**44 - 1).map(new_id)
_HASHES = st.integers(1, MOST_PAGES).flatmap(lambda count: st.binary(min_size=6 * count, max_size=6 * count))
_PACKS = st.builds(Pack, _IDS, st.integers(128, SMALL - 1), _HASHES) | st.builds(
    Pack, _IDS, st.integers(SMALL, LARGEST_PAGE), st.binary(min_size=6, max_size=6)
)
_TOMBSTONES = st.builds(Tombstone, _IDS, _IDS, st.integers(0, 2**64 - 1))


def keys_of(count: int, first: int = 0) -> list[bytes]:
    return [bytes(range(16)) + (first + number).to_bytes(32, "little") for number in range(count)]


@given(_PACKS)
def test_a_name_says_what_the_pack_has_and_fits_everywhere(pack: Pack) -> None:
    assert parse_pack(pack.name) == pack
    assert parse_tombstone(pack.name) is None
    assert max(map(len, pack.name.split("/"))) <= LONGEST_COMPONENT
    assert len(pack.name) <= 600


@given(_TOMBSTONES)
def test_the_name_of_a_tombstone_says_which_pages_are_dead(tombstone: Tombstone) -> None:
    assert parse_tombstone(tombstone.name) == tombstone
    assert parse_pack(tombstone.name) is None


@given(_PACKS, st.data())
def test_a_changed_name_is_another_pack_or_none(pack: Pack, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(pack.name) - 1))
    letter = data.draw(st.sampled_from(string.printable))
    name = pack.name[:at] + letter + pack.name[at + 1 :]
    found = parse_pack(name)
    assert found is None or found.name == name


@given(st.text())
def test_a_foreign_name_is_none(name: str) -> None:
    assert parse_pack(name) is None and parse_tombstone(name) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("-1x", "-01x"),
        ("-1x", "-2x"),
        ("-1x", "-0x"),
        ("x1128-", "x127-"),
        ("x1128-", f"x{LARGEST_PAGE + 1}-"),
        (".pack", ".pack\n"),
        (".pack", ".part"),
        ("-AAAAAAAA", "-AAAA/AAAA"),
    ],
)
def test_a_name_with_a_wrong_part_is_none(old: str, new: str) -> None:
    name = Pack(new_id(5), 1128, bytes(6)).name
    assert parse_pack(name) is not None
    assert old in name
    assert parse_pack(name.replace(old, new)) is None


@pytest.mark.parametrize("count", [2, MOST_PAGES])
def test_a_name_of_several_large_pages_is_none(count: int) -> None:
    """Seen: whoever may write names had a reader take memory for 32 GiB."""
    assert parse_pack(Pack(new_id(5), SMALL - 1, bytes(6 * count)).name) is not None
    assert parse_pack(Pack(new_id(5), SMALL, bytes(6 * count)).name) is None
    assert parse_pack(Pack(new_id(5), LARGEST_PAGE, bytes(6 * count)).name) is None


def test_ids_rise_with_time_and_after_another_one() -> None:
    early, late = new_id(1_700_000_000_000), new_id(1_700_000_000_001)
    assert early < late
    assert new_id(1_600_000_000_000, after=late) > late
    assert milliseconds_of(late) == 1_700_000_000_001
    assert len({new_id(7) for _ in range(100)}) == 100


@given(st.integers(1, MOST_PAGES), st.integers(128, SMALL - 1))
def test_a_footer_has_the_whole_keys(count: int, page_bytes: int) -> None:
    keys = keys_of(count)
    footer = encode_footer(keys, page_bytes)
    assert decode_footer(footer) == (keys, page_bytes)
    assert pack_length(count, page_bytes) == count * page_bytes + len(footer)


@given(st.data())
def test_a_damaged_or_cut_footer_is_none(data: st.DataObject) -> None:
    footer = bytearray(encode_footer(keys_of(data.draw(st.integers(1, 4))), 4096))
    place = data.draw(st.integers(0, len(footer) - 1))
    if data.draw(st.booleans()):
        footer[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del footer[place:]
    with pytest.raises(FormatError):
        decode_footer(footer)


@given(st.lists(st.sampled_from([1128, 131_200, 1_000_128, SMALL - 1])), st.integers(1, MOST_PAGES))
def test_portions_are_alike_in_order_and_not_too_large(sizes: list[int], most: int) -> None:
    found = portions(sizes, most)
    assert sorted(position for portion in found for position in portion) == list(range(len(sizes)))
    for portion in found:
        assert portion == sorted(portion)
        (size,) = {sizes[position] for position in portion}
        assert len(portion) <= most
        assert len(portion) * size <= PACK_BYTES * 1.5


def test_a_batch_of_128_pages_of_128_kib_makes_four_packs() -> None:
    assert [len(portion) for portion in portions([131_200] * 128)] == [32] * 4
    assert [len(portion) for portion in portions([131_200] * 10, 4)] == [3, 3, 4]


def test_every_page_of_a_pack_verifies_itself_at_its_place() -> None:
    keys = keys_of(5)
    pages = [[memoryview(bytes([number]) * 700), memoryview(bytes([number + 9]) * 333)] for number in range(5)]
    whole = seal_pack(gather_pages(pages), keys)
    assert whole.nbytes == pack_length(5, 1161)
    for number, key in enumerate(keys):
        target = bytearray(1033)
        assert decode_object(whole[number * 1161 : (number + 1) * 1161], key, [memoryview(target)]) is None
        assert target == bytes([number]) * 700 + bytes([number + 9]) * 333
    assert decode_footer(whole[5 * 1161 :]) == (keys, 1161)
    assert Pack.of_keys(new_id(0), 1161, keys).hashes == b"".join(map(short_hash, keys))


def test_keys_that_differ_anywhere_in_their_hash_have_different_names() -> None:
    key = bytes(48)
    others = [key[:place] + b"\1" + key[place + 1 :] for place in range(16, 48)]
    assert len({short_hash(one) for one in [key, *others]}) == 33
    assert {len(short_hash(one)) for one in others} == {HASH_BYTES}
    assert short_numbers(others).tolist() == [int.from_bytes(short_hash(one), "big") for one in others]


def test_the_documented_pack_is_what_the_code_writes() -> None:
    text = (Path(__file__).parents[1] / "docs" / "page-format.md").read_text()
    section = text[text.index("## Packs") :]
    (name,) = re.findall(r"`([0-9a-f]{11}-\S+\.pack)`", section)
    footer = bytes.fromhex("".join(re.findall(r"```hex\n(.*?)```", section, re.DOTALL)[0].split()))
    keys, page_bytes = decode_footer(footer)
    pack = parse_pack(name)
    assert pack is not None
    assert (pack.page_bytes, pack.hashes) == (page_bytes, b"".join(map(short_hash, keys)))
    assert encode_footer(keys, page_bytes) == footer
