"""The lossless codec: exact, bounded, and an error on whatever is damaged."""

from __future__ import annotations

import random
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_ext import native
from hicache_ext.errors import FormatError, MissingPackageError
from hicache_ext.page.transforms import codec
from hicache_ext.page.transforms.codec import Codec, PageCodec
from tests.page.damages import damaged_in_one_way

zstandard = pytest.importorskip("zstandard")

DTYPES = {
    "bfloat16": 1.42,
    "float16": 1.13,
    "float32": 1.18,
    "float8_e4m3fn/uint8": 1.14,
    "float8_e5m2": 1.3,
    "int8": 1.0,
    "float4_e2m1fn_x2": 1.0,
    "uint8": 1.0,
}
"""With the ratio that pages of normally distributed numbers must reach."""
SIZE = 1 << 20


def _document(dtype: str) -> dict[str, object]:
    return {"pool": {"dtype": dtype, "name": "kv"}}


def page_of(dtype: str, size: int = SIZE, seed: int = 0) -> bytes:
    """Normally distributed numbers, as those of a head are."""
    random_ = np.random.default_rng(seed)
    numbers = random_.standard_normal(size).astype(np.float32)
    if dtype == "float32":
        return numbers.tobytes()[:size]
    if dtype == "float16":
        return numbers.astype(np.float16).tobytes()[:size]
    if dtype == "bfloat16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()[:size]
    if dtype.startswith("float8_e5m2"):
        return (numbers.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8).tobytes()
    if dtype.startswith("float8_e4m3"):
        exponents = (numbers.view(np.uint32) >> 23 & 0xFF).astype(np.int32)
        kept = np.clip(exponents - 120, 0, 15).astype(np.uint32)
        words = numbers.view(np.uint32)
        return (words >> 24 & 0x80 | kept << 3 | words >> 20 & 7).astype(np.uint8).tobytes()
    if dtype == "float4_e2m1fn_x2":
        codes = np.clip(np.abs(numbers) * 3, 0, 7).astype(np.uint8) | (numbers < 0).astype(np.uint8) << 3
        return (codes[::2] | codes[1::2] << 4).tobytes()
    return np.clip(numbers * 30, -127, 127).astype(np.int8).tobytes()


def _encoded(pages: PageCodec, content: bytes) -> bytes | None:
    memory = bytearray(pages.rooms[-1])
    length = pages.encode(memoryview(content), memoryview(memory))
    return bytes(memory[:length]) or None


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_come_back_to_the_bit_and_take_fewer_bytes(dtype: str) -> None:
    content = page_of(dtype)
    pages = Codec("lossless").for_pages(_document(dtype), len(content))
    encoded = _encoded(pages, content)
    assert encoded is not None and len(content) / len(encoded) >= DTYPES[dtype]
    room = min(room for room in pages.rooms if room >= len(encoded))
    decoded = bytearray(len(content))
    pages.decode(memoryview(encoded.ljust(room, b"\0")), memoryview(decoded))
    assert decoded == content


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_core_and_numpy_give_equal_bytes(dtype: str, monkeypatch) -> None:
    content = page_of(dtype, 64 << 10)
    pages = Codec("lossless").for_pages(_document(dtype), len(content))
    assert native.core() is not None
    encoded = _encoded(pages, content)
    monkeypatch.setattr(native, "LIBRARY", Path("/nowhere"))
    assert native.core() is None and _encoded(pages, content) == encoded
    decoded = bytearray(len(content))
    room = min(room for room in pages.rooms if room >= len(encoded))
    pages.decode(memoryview(encoded.ljust(room, b"\0")), memoryview(decoded))
    assert decoded == content


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_page_that_does_not_shrink_is_not_encoded(dtype: str) -> None:
    content = random.Random(1).randbytes(SIZE)
    assert _encoded(Codec("lossless").for_pages(_document(dtype), SIZE), content) is None


@pytest.mark.parametrize("size", [0, 1, 7, 512, 1024])
def test_pages_that_are_too_small_are_stored_as_they_are(size: int) -> None:
    assert Codec("lossless").for_pages(_document("bfloat16"), size) is None


def test_a_page_that_is_no_whole_number_of_its_numbers_is_encoded_as_bytes() -> None:
    content = page_of("bfloat16", 65_536)[:-1]
    pages = Codec("lossless").for_pages(_document("bfloat16"), len(content))
    content = bytes(len(content))
    encoded, decoded = _encoded(pages, content), bytearray(b"x" * len(content))
    pages.decode(memoryview(encoded), memoryview(decoded))
    assert decoded == content


@pytest.mark.parametrize("size", [2048, 32 << 10, 737_280, 4 << 20])
@pytest.mark.parametrize("dtype", codec._ROOMS)
def test_rooms_are_few_and_each_is_less_than_a_page(size: int, dtype: str) -> None:
    rooms = Codec("lossless").for_pages(_document(dtype), size).rooms
    assert 1 <= len(rooms) <= 4 and list(rooms) == sorted(set(rooms)) and rooms[-1] < size


def test_the_page_may_lie_at_any_address() -> None:
    content = page_of("bfloat16", 64 << 10)
    pages = Codec("lossless").for_pages(_document("bfloat16"), len(content))
    behind, target = memoryview(b"x" + content)[1:], memoryview(bytearray(pages.rooms[-1] + 1))[1:]
    length = pages.encode(behind, target)
    decoded = memoryview(bytearray(len(content) + 1))[1:]
    pages.decode(target[:length], decoded)
    assert decoded == content


def _damages(encoded: bytes, random_: random.Random) -> bytes:
    """One of the ways in which bytes go wrong."""
    frame = len(encoded) - int.from_bytes(encoded[4:8], "little")

    def in_head() -> int:
        """In its own, or in that of its frame."""
        return random_.choice([random_.randrange(8), frame + random_.randrange(18)])

    return damaged_in_one_way(encoded, random_, in_head)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "uint8"])
def test_damaged_bytes_are_an_error_or_some_page_and_never_touch_what_is_beside(dtype: str) -> None:
    content = page_of(dtype, 16 << 10)
    pages = Codec("lossless").for_pages(_document(dtype), len(content))
    encoded = _encoded(pages, content)
    random_ = random.Random(0)
    memory = bytearray(b"\xa5" * (len(content) + 128))
    page = memoryview(memory)[64:-64]
    reasons = []
    for _ in range(2_000):
        try:
            pages.decode(memoryview(_damages(encoded, random_)), page)
        except FormatError as error:
            reasons.append(error.reason)
    assert memory[:64] == memory[-64:] == b"\xa5" * 64
    assert len(reasons) > 400 and set(reasons) == {"encoding", "encoded_length"}


def _with_frame(pages: PageCodec, frame: bytes) -> bytes:
    head = codec._HEAD.pack(pages._method, 1, 0, len(frame))
    return head + bytes(pages._rest) + frame


@pytest.mark.parametrize("said", [None, 1 << 40, 1 << 29, 8192 + 1, 8192 - 1, 0])
def test_a_frame_that_says_another_size_costs_no_memory(said: int | None) -> None:
    pages = Codec("lossless").for_pages(_document("bfloat16"), 16 << 10)
    if said is None:
        frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(8192))
    else:
        # Magic number, a descriptor with a content size of 8 bytes and one segment, the size, one empty last block.
        frame = b"\x28\xb5\x2f\xfd\xe0" + said.to_bytes(8, "little") + b"\x01\0\0"
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            pages.decode(memoryview(_with_frame(pages, frame)), memoryview(bytearray(16 << 10)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_of_a_bomb_is_an_error() -> None:
    """Zeros become next to nothing: a frame of a few bytes may hold gigabytes."""
    pages = Codec("lossless").for_pages(_document("bfloat16"), 16 << 10)
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    with pytest.raises(FormatError):
        pages.decode(memoryview(_with_frame(pages, bomb)), memoryview(bytearray(16 << 10)))


@pytest.mark.parametrize("other", ["a second frame", "a skippable frame", "bytes behind"])
def test_more_than_one_frame_is_an_error(other: str) -> None:
    pages = Codec("lossless").for_pages(_document("bfloat16"), 16 << 10)
    frame = zstandard.ZstdCompressor().compress(bytes(8192))
    pages.decode(memoryview(_with_frame(pages, frame)), memoryview(bytearray(16 << 10)))
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    more = {"a second frame": frame + frame, "a skippable frame": skippable + frame, "bytes behind": frame + b"x"}
    with pytest.raises(FormatError):
        pages.decode(memoryview(_with_frame(pages, more[other])), memoryview(bytearray(16 << 10)))


@pytest.mark.parametrize(("position", "value"), [(0, 8), (0, 1), (1, 2), (2, 1), (3, 1)])
def test_another_method_or_version_is_an_error(position: int, value: int) -> None:
    content = page_of("bfloat16", 16 << 10)
    pages = Codec("lossless").for_pages(_document("bfloat16"), len(content))
    encoded = bytearray(_encoded(pages, content))
    encoded[position] = value
    with pytest.raises(FormatError, match="encoding"):
        pages.decode(memoryview(encoded), memoryview(bytearray(len(content))))


def test_without_its_package_it_says_which_extra_brings_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingPackageError, match="pip install zstandard"):
        Codec("lossless")


@pytest.mark.parametrize("document", [{}, {"pool": {}}, {"pool": None}, {"pool": {"dtype": None}}], ids=repr)
def test_pages_of_an_unknown_dtype_are_coded_as_bytes(document: dict[str, Any]) -> None:
    pages = Codec("lossless").for_pages(document, 1 << 16)
    assert pages is not None and pages.rooms == (40_960, 49_152, 57_344, 61_440)
