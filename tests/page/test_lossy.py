"""The lossy codecs: bounded, deterministic, an error on whatever is damaged, and only for pools that stand it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_ext import native
from hicache_ext.errors import FormatError
from hicache_ext.page.transforms import codec, numbers
from hicache_ext.page.transforms.codec import Codec, PageCodec, lossy_fact
from hicache_ext.page.transforms.header import CODEC_NUMBERS, LOSSY_CODECS
from tests.page.damages import damaged_in_one_way
from tests.page.test_lossless import page_of

pytest.importorskip("zstandard")

SIZE = 64 << 10
LOSSLESS = CODEC_NUMBERS["lossless"]


def document(dtype: str = "bfloat16", **geometry: Any) -> dict[str, Any]:
    heads = {"head_dim": "64", "v_head_dim": "64"}
    buffer = {"buffer0": f"head_dim=64,v_head_dim=64,dtype=torch.{dtype},layout=nhd"}
    kind = geometry.pop("kind", "MHATokenToKVPoolHost")
    pool = {"name": "kv", "kind": kind, "dtype": dtype, "geometry": {**heads, **buffer, **geometry}}
    return {"model": {"compute": lossy_fact("", LOSSY_CODECS)}, "pool": pool}


def pages_for(code: str, size: int = SIZE, **given: Any) -> PageCodec:
    pages = Codec(code).for_pages(document(**given), size)
    assert pages is not None and pages.code == CODEC_NUMBERS[code]
    return pages


def encoded_by(pages: PageCodec, content: bytes) -> bytes:
    memory = bytearray(pages.rooms[-1])
    return bytes(memory[: pages.encode(memoryview(content), memoryview(memory))])


def decoded_by(pages: PageCodec, encoded: bytes, size: int = SIZE) -> bytes:
    page = bytearray(size)
    pages.decode(memoryview(encoded), memoryview(page))
    return bytes(page)


def floats(page: bytes) -> np.ndarray:
    return (np.frombuffer(page, np.uint16).astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize(
    ("dtype", "ratio"), [("bfloat16", 1.95), ("float16", 1.95), ("float32", 3.9)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("code", LOSSY_CODECS)
def test_pages_take_half_of_their_bytes_and_less(code: str, dtype: str, ratio: float) -> None:
    content = page_of(dtype, SIZE)
    pages = pages_for(code, dtype=dtype)
    encoded = encoded_by(pages, content)
    assert SIZE / len(encoded) >= ratio
    room = min(room for room in pages.rooms if room >= len(encoded))
    assert decoded_by(pages, encoded.ljust(room, b"\0")) == decoded_by(pages, encoded) != content


@pytest.mark.parametrize(("code", "error"), [("int8", 0.03), ("fp8", 0.16)])
def test_what_comes_back_is_close_to_what_was_computed(code: str, error: float) -> None:
    content = page_of("bfloat16", SIZE)
    pages = pages_for(code)
    before, after = floats(content), floats(decoded_by(pages, encoded_by(pages, content)))
    assert 0 < np.abs(before - after).max() < error


@pytest.mark.parametrize("code", LOSSY_CODECS)
def test_the_core_and_numpy_give_equal_bytes(code: str, monkeypatch) -> None:
    content = page_of("bfloat16", SIZE)
    pages = pages_for(code)
    assert native.core() is not None
    encoded = encoded_by(pages, content)
    monkeypatch.setattr(native, "LIBRARY", Path("/nowhere"))
    assert encoded_by(pages, content) == encoded


@pytest.mark.parametrize("code", LOSSY_CODECS)
def test_every_page_of_finite_numbers_fits_the_last_room(code: str) -> None:
    """Also one whose codes are noise."""
    numbers = np.random.default_rng(0).integers(0, 1 << 15, SIZE // 2, np.uint16) % 0x4000
    numbers |= np.random.default_rng(1).integers(0, 2, SIZE // 2, np.uint16) << 15
    content = numbers.astype(np.uint16).tobytes()
    noise = np.random.default_rng(2).uniform(-1, 1, SIZE // 2).astype(np.float32)
    flat = (noise.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    pages = pages_for(code)
    for page in (content, flat):
        encoded = encoded_by(pages, page)
        assert encoded and len(decoded_by(pages, encoded)) == SIZE


@pytest.mark.parametrize("code", LOSSY_CODECS)
@pytest.mark.parametrize("word", [0x7F80, 0xFF80, 0x7FC1])
def test_a_page_with_an_infinity_or_a_nan_is_not_encoded(code: str, word: int) -> None:
    content = bytearray(page_of("bfloat16", SIZE))
    content[1000:1002] = word.to_bytes(2, "little")
    assert encoded_by(pages_for(code), bytes(content)) == b""


@pytest.mark.parametrize("size", [2048, 32 << 10, 737_280, 4 << 20])
@pytest.mark.parametrize("code", LOSSY_CODECS)
def test_rooms_are_few_and_each_is_less_than_a_page(code: str, size: int) -> None:
    rooms = pages_for(code, size).rooms
    assert 1 <= len(rooms) <= 4 and list(rooms) == sorted(set(rooms)) and rooms[-1] < size


def test_the_page_may_lie_at_any_address() -> None:
    content = page_of("bfloat16", SIZE)
    pages = pages_for("int8")
    behind, target = memoryview(b"x" + content)[1:], memoryview(bytearray(pages.rooms[-1] + 1))[1:]
    length = pages.encode(behind, target)
    decoded = memoryview(bytearray(SIZE + 1))[1:]
    pages.decode(target[:length], decoded)
    assert decoded == decoded_by(pages, encoded_by(pages, content))


@pytest.mark.parametrize("code", LOSSY_CODECS)
def test_damaged_bytes_are_an_error_or_finite_numbers_and_never_touch_what_is_beside(code: str) -> None:
    size = 16 << 10
    pages = pages_for(code, size)
    encoded = encoded_by(pages, page_of("bfloat16", size))
    random_ = random.Random(0)
    memory = bytearray(b"\xa5" * (size + 128))
    page = memoryview(memory)[64:-64]
    reasons = []
    for _ in range(2_000):
        try:
            pages.decode(memoryview(damaged_in_one_way(encoded, random_, lambda: random_.randrange(8))), page)
            assert np.isfinite(floats(bytes(page))).all()
        except FormatError as error:
            reasons.append(error.reason)
    assert memory[:64] == memory[-64:] == b"\xa5" * 64
    assert len(reasons) > 400 and set(reasons) == {"encoding", "encoded_length"}


@pytest.mark.parametrize(("position", "value"), [(0, 2), (0, 255), (1, 2), (2, 1), (3, 1)])
def test_another_method_or_version_is_an_error(position: int, value: int) -> None:
    pages = pages_for("int8")
    encoded = bytearray(encoded_by(pages, page_of("bfloat16", SIZE)))
    encoded[position] = value
    with pytest.raises(FormatError, match="encoding"):
        decoded_by(pages, bytes(encoded))


STATES = [
    {"kind": "MambaPoolHost"},
    {"kind": "MLATokenToKVPoolHost", "kv_lora_rank": "512"},
    {"kind": "MHATokenToKOnlyPoolHost"},
    {"kind": "copied:MHATokenToKVPoolHost"},
    {"buffer1": "head_dim=64,v_head_dim=64,dtype=torch.uint8,layout=nhd"},
    {"buffer0": "head_dim=64,v_head_dim=64,dtype=torch.bfloat16,layout=vectorized_5d"},
    {"buffer0": "head_dim=64,v_head_dim=64,dtype=torch.bfloat16,layout=nhd,scales=per_token"},
    {"buffer0": "head_dim=64,v_head_dim=64,dtype=torch.bfloat16,layout=nhd,packed_fp8=True"},
    {"head_dim": "9"},
    {"dtype": "float8_e4m3fn/uint8"},
    {"dtype": "uint8"},
]


@pytest.mark.parametrize("given", STATES, ids=lambda given: str(next(iter(given.items()))))
@pytest.mark.parametrize("code", LOSSY_CODECS)
def test_what_is_no_plain_pool_of_keys_and_values_is_encoded_without_loss(code: str, given: dict[str, Any]) -> None:
    assert Codec(code).for_pages(document(**given), SIZE).code == LOSSLESS


@pytest.mark.parametrize("codecs", [[], ["fp8"]], ids=str)
@pytest.mark.parametrize("compute", ["", '{"dtype": "bfloat16"}'])
def test_an_identity_that_does_not_name_the_codec_is_encoded_without_loss(codecs: list[str], compute: str) -> None:
    model = {"id": "model", "compute": lossy_fact(compute, codecs)}
    assert Codec("int8").for_pages({**document(), "model": model}, SIZE).code == LOSSLESS


@pytest.mark.parametrize("compute", [None, 7, "{", "[]", '"int8-1"', '{"codecs": "int8-1"}', '{"codecs": null}'])
def test_a_model_that_says_nonsense_of_its_codecs_is_encoded_without_loss(compute: Any) -> None:
    facts = {**document(), "model": {"id": "model", "compute": compute}}
    assert Codec("int8").for_pages(facts, SIZE).code == LOSSLESS


@pytest.mark.parametrize("facts", [{}, {"pool": {}}, {"pool": None}, {"pool": {"kind": "MHATokenToKVPoolHost"}}])
def test_a_document_that_tells_little_is_encoded_without_loss(facts: dict[str, Any]) -> None:
    assert Codec("int8").for_pages(facts, SIZE).code == LOSSLESS


def test_unlike_heads_of_keys_and_values_share_the_longest_row_that_divides_both() -> None:
    made = Codec("int8").for_pages(document(head_dim="192", v_head_dim="128", buffer0="layout=nhd"), SIZE)
    assert made is not None and made._rows.length == 64


def test_packed_drafts_share_the_row_with_the_target() -> None:
    drafts = "head_dim=96,v_head_dim=96,dtype=torch.bfloat16,layout=nhd"
    size = 96 * 512
    assert codec.rows_of(document(buffer1=drafts), "int8") == numbers.Rows("bfloat16", 32, "int8")
    assert Codec("int8").for_pages(document(buffer1=drafts), size).code == CODEC_NUMBERS["int8"]


def test_a_page_that_is_no_whole_number_of_rows_is_encoded_without_loss() -> None:
    assert Codec("int8").for_pages(document(), SIZE - 64).code == LOSSLESS


def test_the_facts_of_a_lossy_server_are_those_of_no_exact_one_and_of_no_other_codec() -> None:
    compute = json.dumps({"dtype": "bfloat16"})
    facts = [lossy_fact(compute, codecs) for codecs in ([], ["int8"], ["fp8"], ["int8", "fp8"])]
    assert facts[0] == compute and len(set(facts)) == 4
    assert lossy_fact(compute, ["fp8", "int8", "fp8"]) == facts[3]
    assert lossy_fact("", []) == "" != lossy_fact("", ["int8"])


def test_labels_differ() -> None:
    assert {Codec(code).label for code in LOSSY_CODECS} == {b"int8-1", b"fp8-1"}
