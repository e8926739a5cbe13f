"""The page format: golden vectors (the same as in docs/page-format.md), and that nothing damaged passes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_ext.errors import FormatError
from hicache_ext.page import envelope
from hicache_ext.testing.conformance.second_reader import read_page_object, write_page_object

KEY = bytes(range(48))
PAYLOAD = b"hicache_ext page payload"
CREATED_MS = 1_700_000_000_000

GOLDEN_HEADER = bytes.fromhex(
    "48494341434845580100010080000000000102030405060708090a0b0c0d0e0f"
    "101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f"
    "1800000000000000e2bb62b84189a05a16bb80e6501289940068e5cf8b010000"
    "00000000000000000000000000000000390f19e5cd7f9cf85602f0b8c212be84"
)
"""Key 00 01 .. 2f, payload ``PAYLOAD``, created at ``CREATED_MS``, header length 128."""

GOLDEN_HEADER_OF_4096 = bytes.fromhex(
    "48494341434845580100000000100000000102030405060708090a0b0c0d0e0f"
    "101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f"
    "1800000000000000000000000000000000000000000000000068e5cf8b010000"
    "0000000000000000000000000000000010ae646e4f2c9f59fd77a7576b782a1f"
)
"""The same with header length 4096 (its first 128 bytes; zeros follow) and without the payload checksum."""

GOLDEN_HEADER_WITHOUT_CHECKSUM = bytes.fromhex(
    "48494341434845580100000080000000000102030405060708090a0b0c0d0e0f"
    "101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f"
    "1800000000000000000000000000000000000000000000000068e5cf8b010000"
    "0000000000000000000000000000000036b7c41e30f2a3a9d715583a65ed76d9"
)
"""The same with header length 128."""

segment_lists = st.lists(st.binary(max_size=200), max_size=12)
keys = st.binary(min_size=48, max_size=48)


def _segments(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def test_the_golden_header_is_written_byte_for_byte():
    assert envelope.encode_header(KEY, _segments(PAYLOAD), created_ms=CREATED_MS) == GOLDEN_HEADER
    assert len(GOLDEN_HEADER) == 128


def test_the_golden_header_does_not_depend_on_how_the_payload_is_cut():
    assert envelope.encode_header(KEY, _segments(PAYLOAD[:7], b"", PAYLOAD[7:]), created_ms=CREATED_MS) == GOLDEN_HEADER


def test_the_golden_header_without_a_payload_checksum_is_read():
    found = envelope.decode_header(GOLDEN_HEADER_WITHOUT_CHECKSUM)
    assert (found.key, found.header_length, found.payload_checksum) == (KEY, 128, None)


def test_the_golden_header_that_is_longer_is_read():
    found = envelope.decode_header(GOLDEN_HEADER_OF_4096.ljust(4096, b"\0"))
    assert (found.key, found.header_length, found.payload_checksum) == (KEY, 4096, None)


def test_the_golden_header_is_read():
    assert envelope.decode_header(GOLDEN_HEADER) == envelope.Envelope(
        identity=KEY[:16],
        page_hash=KEY[16:],
        header_length=128,
        payload_length=24,
        payload_checksum=bytes.fromhex("e2bb62b84189a05a16bb80e650128994"),
        created_ms=CREATED_MS,
    )
    assert envelope.decode_header(GOLDEN_HEADER).key == KEY


def test_the_second_writer_writes_the_golden_header():
    assert write_page_object(KEY, PAYLOAD, created_ms=CREATED_MS) == GOLDEN_HEADER + PAYLOAD


@given(key=keys, parts=segment_lists, header_length=st.sampled_from([128, 129, 512, 4096, 65536]))
def test_a_written_page_is_accepted_and_read_by_a_second_reader(key, parts, header_length):
    payload = b"".join(parts)
    written = envelope.encode_header(key, _segments(*parts), created_ms=CREATED_MS)
    assert written == write_page_object(key, payload, created_ms=CREATED_MS)[:128]
    header = write_page_object(key, payload, header_length=header_length)[:header_length]
    decoded = envelope.decode_header(header)
    assert (decoded.key, decoded.payload_length, decoded.header_length) == (key, len(payload), header_length)
    assert envelope.reason_to_refuse(header, key, _segments(*parts)) is None
    page = read_page_object(header + payload)
    assert (page.key, page.payload, page.header_length) == (key, payload, header_length)


@pytest.mark.parametrize("position", range(128))
def test_every_change_of_a_header_byte_is_refused(position):
    for change in (1, 0x80, 0xFF, GOLDEN_HEADER[position]):
        if change:
            damaged = bytearray(GOLDEN_HEADER)
            damaged[position] ^= change
            with pytest.raises(FormatError):
                envelope.decode_header(damaged)


@given(stored=st.binary(max_size=300))
def test_random_bytes_raise_nothing_but_format_errors(stored):
    with pytest.raises(FormatError):
        envelope.decode_header(stored)


@given(field=st.binary(min_size=104, max_size=104))
def test_random_fields_under_a_right_checksum_raise_nothing_but_format_errors(field):
    fields = envelope.MAGIC + field
    header = fields + envelope.xxhash.xxh3_128_digest(fields)
    reason = envelope.reason_to_refuse(header, KEY, [])
    assert reason in ("version", "header_length", "identity")


@settings(max_examples=200)
@given(parts=st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=5), data=st.data())
def test_every_flipped_payload_bit_is_refused(parts, data):
    header = envelope.encode_header(KEY, _segments(*parts))
    part = data.draw(st.integers(0, len(parts) - 1))
    place = data.draw(st.integers(0, 8 * len(parts[part]) - 1))
    damaged = bytearray(parts[part])
    damaged[place // 8] ^= 1 << place % 8
    segments = _segments(*parts[:part], bytes(damaged), *parts[part + 1 :])
    assert envelope.reason_to_refuse(header, KEY, segments) == "checksum"


def test_each_reason_to_refuse_has_its_name():
    segments = _segments(PAYLOAD)

    def reason(header, key=KEY, segments=segments):
        return envelope.reason_to_refuse(header, key, segments)

    longer = write_page_object(KEY, PAYLOAD, header_length=256)[:256]
    assert reason(GOLDEN_HEADER) is None
    assert reason(GOLDEN_HEADER[:127]) == "short_header"
    assert reason(b"") == "short_header"
    assert reason(bytes(128)) == "magic"
    assert reason(GOLDEN_HEADER[:100] + b"\1" + GOLDEN_HEADER[101:]) == "header_checksum"
    assert reason(write_page_object(KEY, b"", version=2)) == "version"
    assert reason(write_page_object(KEY, b"", header_length_field=127)) == "header_length"
    assert reason(write_page_object(KEY, b"", header_length_field=65537)) == "header_length"
    assert reason(longer) is None
    assert reason(longer[:128]) == "header_length"
    assert reason(GOLDEN_HEADER, key=b"\xff" + KEY[1:]) == "identity"
    assert reason(GOLDEN_HEADER, key=KEY[:-1] + b"\xff") == "page_hash"
    assert reason(GOLDEN_HEADER, segments=_segments(PAYLOAD[:-1])) == "payload_length"
    assert reason(GOLDEN_HEADER_WITHOUT_CHECKSUM) == "no_checksum"
    assert reason(GOLDEN_HEADER, segments=_segments(PAYLOAD[::-1])) == "checksum"


def test_a_flipped_version_bit_is_damage_and_not_a_newer_format():
    damaged = bytearray(GOLDEN_HEADER)
    damaged[8] ^= 2
    assert envelope.reason_to_refuse(damaged, KEY, _segments(PAYLOAD)) == "header_checksum"


@pytest.mark.parametrize("key", [KEY[:-1], KEY + b"x"])
def test_what_the_format_does_not_allow_is_not_written(key):
    with pytest.raises(ValueError, match="has 48 bytes"):
        envelope.encode_header(key, [])


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_headers_of_every_buffer_type_are_read(kind):
    assert envelope.decode_header(kind(GOLDEN_HEADER)).key == KEY
