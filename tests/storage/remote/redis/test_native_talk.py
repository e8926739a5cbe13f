"""The native core's GET and SET (native/talk.c) beside Python's: what it tells, Python tells of the same replies."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hicache_ext import native
from hicache_ext.errors import ProtocolError, ServerClosedError
from hicache_ext.runtime.vectored import IOV_MAX
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.redis import page_calls
from hicache_ext.storage.tiers.redis.page_calls import NativeCall
from hicache_ext.storage.tiers.redis.store import RedisPageStore
from hicache_ext.testing.conformance.pages import HostPages, assert_hits, cut, filled, page_keys, payload_of
from hicache_ext.testing.conformance.second_reader import write_page_object
from tests.rigs.redis_servers import RedisServer
from tests.rigs.redis_talks import GOOD, NAMES, Talked, connected, known_words, talk
from tests.storage.remote.redis.conftest import tier_for
from tests.storage.remote.redis.odd_replies import TO_GET, TO_SET, replies_of

KEYS = page_keys(3)
SIZES = [5, 8]
VALUES = [write_page_object(key, payload_of(key, 13), header_length=128) for key in KEYS]
HEALTHY = {"get": TO_GET[:3], "set": TO_SET[:4]}


@pytest.fixture(autouse=True, scope="module")
def words_are_known() -> Iterator[None]:
    if native.why_not() is not None:
        pytest.skip("missing: the native core")
    with known_words():
        yield


def both(
    word: str, pieces: Sequence[bytes], keys: Sequence[bytes] = KEYS, sizes: Sequence[int] = SIZES
) -> tuple[Talked, Talked]:
    """What the two ways make of the same replies; whatever these are, the core tells nothing that Python does not."""
    talked = []
    for way in ("native", "plain"):
        pages = HostPages([sizes] * len(keys), fill=0x77) if word == "get" else filled(keys, [sizes] * len(keys))
        before = pages.snapshot()
        talked.append(talk(way, keys, pages, pieces, word))
        pages.assert_guards_intact()
        assert word == "get" or pages.snapshot() == before
    ours, plain = talked
    for number, key in enumerate(keys):
        assert ours.results[number] in (None, plain.results[number])
        assert ours.results[number] in GOOD | {None}
        if ours.results[number] is GetResult.HIT:
            assert ours.memory.payload(number) == payload_of(key, sum(sizes)) == plain.memory.payload(number)
    assert ours.sent.startswith(plain.sent) or plain.sent.startswith(ours.sent)
    if ours.ending is None:
        assert None not in ours.results or word == "set"
        assert plain.is_empty
    return ours, plain


def test_pieces_of_the_rig_are_received_one_by_one() -> None:
    with connected([b"ab", b"c", b"def"]) as (connection, _):
        memory = memoryview(bytearray(9))
        lengths = [connection._receive_into(memory) for _ in range(3)]
        assert lengths == [2, 1, 3]


# -- replies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["get", "set"])
def test_what_a_healthy_server_answers_needs_no_second_look(word: str) -> None:
    for template in HEALTHY[word]:
        ours, plain = both(word, [replies_of(template, VALUES)])
        assert ours.ending is None
        if b"K\r\n$-1" in template:
            # One came in between: Python asks whose it is, and here nobody answers.
            assert ours.results == [SetResult.STORED, None, SetResult.STORED]
        else:
            assert ours.results == plain.results
            assert plain.ending is None or word == "set"


@pytest.mark.parametrize("word", ["get", "set"])
def test_healthy_replies_cut_or_ended_at_every_byte_are_as_good_as_in_python(word: str) -> None:
    for template in HEALTHY[word]:
        replies = replies_of(template, VALUES)
        whole = both(word, [replies])[0]
        for place in range(len(replies)):
            ours, _ = both(word, [replies[:place], replies[place:]])
            assert (ours.results, ours.ending, ours.sent) == (whole.results, whole.ending, whole.sent)
            ours, plain = both(word, [replies[:place]])
            assert ours.ending is ServerClosedError
            assert ours.results == plain.results


@pytest.mark.parametrize("word", ["get", "set"])
def test_healthy_replies_byte_by_byte_are_as_good_as_at_once(word: str) -> None:
    for template in HEALTHY[word]:
        replies = replies_of(template, VALUES)
        whole = both(word, [replies])[0]
        ours = both(word, [*(replies[place : place + 1] for place in range(200)), replies[200:]])[0]
        assert (ours.results, ours.ending, ours.sent) == (whole.results, whole.ending, whole.sent)


@pytest.mark.parametrize(("word", "templates"), [("get", TO_GET), ("set", TO_SET)])
def test_odd_replies_are_never_a_page_that_python_would_not_have(word: str, templates: Sequence[bytes]) -> None:
    for template in templates:
        replies = replies_of(template, VALUES)
        ours, _ = both(word, [replies])
        for pieces in (
            [*(replies[place : place + 1] for place in range(150)), replies[150:]],
            [replies[place : place + 7] for place in range(0, min(len(replies), 700), 7)] + [replies[700:]],
            [replies[: len(replies) // 2], replies[len(replies) // 2 :]],
        ):
            again, _ = both(word, pieces)
            # What comes behind the last reply is seen where it comes with it, or by the next user of the connection.
            behind = ours.ending is ProtocolError and again.ending is None and ours.sent == again.sent
            assert behind or (again.results, again.ending) == (ours.results, ours.ending)


@pytest.mark.parametrize("template", TO_SET[4:14])
def test_a_reply_too_many_or_too_few_stores_nothing(template: bytes) -> None:
    ours, _ = both("set", [replies_of(template, VALUES)])
    assert SetResult.STORED not in ours.results
    assert ours.ending is not None


def test_a_bit_that_is_wrong_anywhere_in_a_page_makes_it_no_hit() -> None:
    reply = b"$%d\r\n%b\r\n" % (len(VALUES[0]), VALUES[0])
    for bit in range(8 * len(reply)):
        wrong = bytearray(reply)
        wrong[bit // 8] ^= 1 << bit % 8
        ours, _ = both("get", [bytes(wrong)], KEYS[:1])
        assert ours.results == [None], bit
        assert ours.ending is not None


_PIECES_OF_PROTOCOL = st.sampled_from(
    [b"\r\n", b"\r", b"\n", b"$", b"$-1\r\n", b"$141\r\n", b":0\r\n", b":141\r\n", b"+OK\r\n", b"-ERR\r\n", b"\0"]
)
_EDITS = st.tuples(
    st.integers(0, 600), st.integers(0, 40), st.one_of(st.just(b""), _PIECES_OF_PROTOCOL, st.binary(max_size=40))
)


@settings(max_examples=300, deadline=None)
@example("get", 0, [(0, 0, b"$-1\r\n")], [])
@example("set", 0, [(0, 0, b":0\r\n")], [])
@given(
    st.sampled_from(["get", "set"]),
    st.integers(0, 100),
    st.lists(_EDITS, max_size=3),
    st.lists(st.integers(0, 600), max_size=8),
)
def test_edited_replies_are_never_a_page_that_python_would_not_have(
    word: str, number: int, edits: list[tuple[int, int, bytes]], places: list[int]
) -> None:
    templates = TO_GET if word == "get" else TO_SET
    replies = replies_of(templates[number % len(templates)], VALUES)
    for place, length, put in edits:
        replies = replies[:place] + put + replies[place + length :]
    ends = sorted(min(place, len(replies)) for place in places)
    both(word, [replies[begin:end] for begin, end in itertools.pairwise([0, *ends, len(replies)])])


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["get", "set"]), st.lists(st.one_of(st.binary(max_size=300), _PIECES_OF_PROTOCOL), max_size=12))
def test_random_bytes_are_nothing(word: str, pieces: list[bytes]) -> None:
    both(word, pieces)


# -- memory, windows and deadlines -------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([1, 7, 127, 128, 129, 4096, 20_000, 70_000]), min_size=1, max_size=4),
    st.lists(st.booleans(), min_size=1, max_size=9),
    st.lists(st.integers(0, 1 << 20), max_size=6),
    st.sampled_from([1, 30_000, 1 << 20]),
    st.sampled_from(["get", "set"]),
)
def test_pages_of_any_shape_move_as_in_python_through_any_window(
    sizes: list[int], are_there: list[bool], places: list[int], window: int, word: str
) -> None:
    # So many that the socket pair holds all of them.
    keys = page_keys(max(1, min(len(are_there), 150_000 // sum(sizes))))
    values = [write_page_object(key, payload_of(key, sum(sizes)), header_length=128) for key in keys]
    there = are_there[: len(keys)]
    if word == "get":
        parts = [b"$%d\r\n%b\r\n" % (len(value), value) if is_there else b"$-1\r\n"
                 for value, is_there in zip(values, there, strict=False)]  # fmt: skip
        replies = b"".join([*parts, *[b"$-1\r\n"] * (len(keys) - len(parts))])
        results: list[Any] = [GetResult.HIT if is_there else GetResult.MISS for is_there in there]
        results += [GetResult.MISS] * (len(keys) - len(there))
    else:
        lengths = [b":%d\r\n" % (len(values[0]) if is_there else 0) for is_there in there]
        lengths += [b":0\r\n"] * (len(keys) - len(there))
        results = [SetResult.STORED if length == b":0\r\n" else SetResult.EXISTS for length in lengths]
        stored = [b"+OK\r\n"] * results.count(SetResult.STORED)
        replies = replies_of(b"".join([*lengths, b"<answer>", *stored, b"<answer>" if stored else b""]), values)
    ends = sorted(min(place, len(replies)) for place in places)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_calls.Connection, "window", lambda connection: window)
        pieces = [replies[begin:end] for begin, end in itertools.pairwise([0, *ends, len(replies)])]
        ours, plain = both(word, pieces, keys, sizes)
    assert ours.ending is None
    assert ours.results == plain.results == results
    assert plain.sent.startswith(ours.sent)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        *[("get", said) for said in (b"", b"$14", b"$-1\r\n", b"$141\r\nHICACHEX", b"$-1\r\n$-1\r\n$-1\r")],
        *[("set", said) for said in (b"", b":0\r\n:14", b":0\r\n:0\r\n:0\r\n", replies_of(TO_SET[0], [b""] * 3)[:-1])],
    ],
)
def test_a_server_that_says_no_more_is_left_at_the_deadline(word: str, said: bytes) -> None:
    begun = time.monotonic()
    pages = filled(KEYS, [SIZES] * 3)
    talked = talk("native", KEYS, pages, [said], word, ends=False, patience=0.1)
    assert 0.09 < time.monotonic() - begun < 0.5
    assert talked.ending is TimeoutError
    assert set(talked.results) <= {None, GetResult.MISS}


def test_a_server_that_takes_no_requests_is_left_at_the_deadline() -> None:
    keys = page_keys(40)
    pages = filled(keys, [[100_000]] * 40)
    begun = time.monotonic()
    replies = [b":0\r\n" * 40 + replies_of(b"<answer>", VALUES) + b"+OK\r\n" * 40]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_calls.Connection, "window", lambda connection: 1 << 30)
        talked = talk("native", keys, pages, replies, "set", ends=False, patience=0.1)
    assert 0.09 < time.monotonic() - begun < 0.5
    assert talked.ending is TimeoutError
    assert set(talked.results) == {None}


def test_a_deadline_that_has_passed_asks_for_nothing() -> None:
    talked = talk("native", KEYS, filled(KEYS, [SIZES] * 3), [replies_of(TO_GET[0], VALUES)], "get", patience=-1)
    assert (talked.ending, talked.results, talked.sent) == (TimeoutError, [None] * 3, b"")


def test_an_error_of_the_system_comes_out_as_it_is() -> None:
    pages = filled(KEYS, [SIZES] * 3)
    call = NativeCall.of(PageBatch(KEYS, pages.buffers), NAMES, None, write=False)
    assert call is not None
    with connected([]) as (connection, _):
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, connection._socket.fileno())
        os.close(nothing)
        with pytest.raises(OSError, match=os.strerror(errno.ENOTSOCK)):
            call.talk(connection, np.arange(3))


def test_pages_that_the_core_cannot_move_are_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(sizes: Sequence[Sequence[int]], write: bool = False) -> NativeCall | None:
        keys = page_keys(len(sizes))
        return NativeCall.of(PageBatch(keys, filled(keys, sizes).buffers), NAMES, 60, write=write)

    assert of([[3, 4], [3, 4]]) is not None
    assert of([[3, 4], [4, 3]]) is None
    assert of([[3], [4]]) is None
    assert of([]) is None
    assert of([[1] * IOV_MAX]) is None
    read_only = PageBatch(KEYS[:1], [[memoryview(bytes(3))]])
    assert NativeCall.of(read_only, NAMES, None, write=False) is None
    assert NativeCall.of(read_only, NAMES, None, write=True) is not None
    monkeypatch.setattr(native, "LIBRARY", native.LIBRARY.with_name("nowhere.so"))
    assert of([[3]]) is None


@pytest.mark.parametrize("pieces", [1, 510, 1021])
def test_pages_whose_pieces_fill_a_system_call_are_written_and_read(pieces: int) -> None:
    """Seen: the request behind them became a piece too many, written 16 bytes behind its array."""
    keys, sizes = page_keys(3), cut(3000, pieces)
    values = [write_page_object(key, payload_of(key, 3000), header_length=128) for key in keys]
    assert both("get", [replies_of(b"<0><1><2>", values)], keys, sizes)[0].results == [GetResult.HIT] * 3
    ours, plain = both("set", [replies_of(TO_SET[0], values)], keys, sizes)
    assert ours.results == [SetResult.STORED] * 3
    assert ours.sent == plain.sent


def test_more_requests_than_one_system_call_takes_are_asked_in_turns() -> None:
    keys = page_keys(900)
    values = [write_page_object(key, payload_of(key, 13), header_length=128) for key in keys[:450]]
    replies = b"".join([b"$%d\r\n%b\r\n$-1\r\n" % (len(value), value) for value in values])
    ours, plain = both("get", [replies], [key for pair in zip(keys[:450], keys[450:], strict=True) for key in pair])
    assert ours.results == plain.results == [GetResult.HIT, GetResult.MISS] * 450
    assert ours.sent == plain.sent
    replies = replies_of(b":0\r\n:141\r\n" * 200 + b"<answer>" + b"+OK\r\n" * 200 + b"<answer>", values)
    ours, plain = both("set", [replies], keys[:400])
    assert ours.results == plain.results == [SetResult.STORED, SetResult.EXISTS] * 200
    assert ours.sent == plain.sent


def test_names_longer_than_there_is_room_for_are_asked_for_by_nobody() -> None:
    pages = filled(KEYS, [SIZES] * 3)
    for word in ("get", "set"):
        call = NativeCall.of(PageBatch(KEYS, pages.buffers), b"n" * 70_000, None, write=word == "set")
        assert call is not None
        with connected([b""], patience=0.05) as (connection, _), pytest.raises((OSError, ProtocolError)):
            call.talk(connection, np.arange(3))


def test_words_around_pages_live_as_long_as_they_are_used() -> None:
    page_calls._page_words.cache_clear()
    words, _ = page_calls._page_words(NAMES, 13, 7)
    set_end, expected = words[10:12].tolist(), words[12:14].tolist()
    assert ctypes.string_at(*set_end) == b"\r\n$2\r\nNX\r\n$2\r\nEX\r\n$1\r\n7\r\n"
    assert ctypes.string_at(*expected) == b"$141\r\n"


# -- a real server -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("pages", "pieces"), [(2, 1021), (2, 510), (4, 254), (8, 126)])
def test_pages_of_many_pieces_are_stored_in_a_real_server(empty_server: RedisServer, pages: int, pieces: int) -> None:
    store = RedisPageStore("pool", tier_for(empty_server, connections=1))
    try:
        keys, sizes = page_keys(pages), [1] * pieces
        batch = PageBatch(keys, filled(keys, [sizes] * pages).buffers)
        assert store._move(batch, store._deadline(), SetResult) == [SetResult.STORED] * pages
        assert store._move(batch, store._deadline(), SetResult) == [SetResult.EXISTS] * pages
        assert_hits(store, keys, sizes)
    finally:
        store.close()
