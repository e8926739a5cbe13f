"""The RESP parser: what servers say, however it is cut, and what no server may say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_ext.errors import OversizedValueError, ProtocolError, ServerClosedError
from hicache_ext.storage.tiers.redis.connection import (
    LARGEST_VALUE,
    LONGEST_DRAINED,
    LONGEST_LINE,
    MOST_RECEIVED,
    ErrorReply,
    ReplyReader,
    command,
)
from hicache_ext.testing.conformance.pages import HostPages, cut

HEADER = 128


class Feed:
    """Bytes handed out in pieces of the given sizes, over and over; then the end of the connection."""

    def __init__(self, sent: bytes, pieces: list[int] | None = None) -> None:
        self._left = memoryview(sent)
        self._pieces = pieces or [1 << 30]
        self._turn = 0

    def receive_into(self, buffer: memoryview) -> int:
        if not self._left.nbytes:
            raise ServerClosedError
        received = min(buffer.nbytes, self._left.nbytes, self._pieces[self._turn % len(self._pieces)])
        self._turn += 1
        buffer[:received] = self._left[:received]
        self._left = self._left[received:]
        assert received > 0
        return received


def reader_of(sent: bytes, pieces: list[int] | None = None) -> ReplyReader:
    return ReplyReader(Feed(sent, pieces).receive_into)


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def test_a_request_is_an_array_of_bulk_strings():
    assert command(b"SET", b"k", b"") == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$0\r\n\r\n"


_lines = st.binary(max_size=60).filter(lambda line: b"\r" not in line and b"\n" not in line)
_replies = st.one_of(
    st.integers(-(10**18), 10**18).map(lambda number: (b":%d\r\n" % number, number)),
    _lines.map(lambda line: (b"+%b\r\n" % line, line.decode("utf-8", "replace"))),
    _lines.map(lambda line: (b"-%b\r\n" % line, ErrorReply(line.decode("utf-8", "replace")))),
    st.binary(max_size=300).map(lambda value: (bulk(value), value)),
    st.just((b"$-1\r\n", None)),
    st.just((b"*2\r\n$1\r\na\r\n*1\r\n:7\r\n", [b"a", [7]])),
)
_pieces = st.lists(st.integers(1, 400), min_size=1, max_size=8)


@given(replies=st.lists(_replies, max_size=20), pieces=_pieces)
def test_replies_are_understood_however_they_arrive(replies, pieces):
    reader = reader_of(b"".join(sent for sent, _ in replies), pieces)
    assert [reader.answer(lists=True) for _ in replies] == [meant for _, meant in replies]
    assert reader.empty


@settings(deadline=None)
@given(data=st.data(), pieces=_pieces)
def test_pages_land_in_their_memory_and_nowhere_else(data, pieces):
    """Pages, nils, errors and values of other lengths, pipelined; guard bytes around every segment."""
    size = data.draw(st.integers(1, 3000))
    segments = cut(size, data.draw(st.integers(1, min(size, 12))))
    lengths = st.one_of(st.just(HEADER + size), st.integers(0, HEADER + size + 2000))
    values = data.draw(st.lists(st.one_of(lengths, st.none(), st.just("error")), max_size=6))
    sent = b""
    for number, value in enumerate(values):
        filler = bytes([number + 1])
        sent += b"$-1\r\n" if value is None else b"-ERR no\r\n" if value == "error" else bulk(filler * value)
    reader = reader_of(sent + b":7\r\n", pieces)
    for number, value in enumerate(values):
        pages = HostPages([segments], fill=0x77)
        header = bytearray(HEADER)
        answer = reader.page_into(memoryview(header), pages.buffers[0])
        pages.assert_guards_intact()
        filler = bytes([number + 1])
        if value is None or value == "error":
            assert answer == (None if value is None else ErrorReply("ERR no"))
        else:
            assert answer == value
            assert header[: min(value, HEADER)] == filler * min(value, HEADER)
        expected = filler if value == HEADER + size else b"\x77"
        assert pages.payload(0) == expected * size
    assert reader.answer() == 7
    assert reader.empty


@settings(deadline=None)
@given(sent=st.binary(max_size=400), pieces=_pieces, page=st.booleans())
def test_nonsense_ends_in_one_of_three_ways_and_touches_nothing_else(sent, pieces, page):
    """A reply, a ProtocolError or the end of the connection: never another error, never a byte beside the page."""
    pages = HostPages([[10, 30]], fill=0x77)
    reader = reader_of(sent, pieces)
    for _ in range(len(sent) + 1):
        try:
            if page:
                reader.page_into(memoryview(bytearray(HEADER)), pages.buffers[0])
            else:
                reader.answer()
        except (ProtocolError, ServerClosedError):
            break
    else:
        pytest.fail("more replies than bytes")
    pages.assert_guards_intact()


@pytest.mark.parametrize(
    "sent",
    [
        b"_\r\n",
        b"#t\r\n",
        b",1.5\r\n",
        b"%0\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\r\n",
        b":\r\n",
        b":1 \r\n",
        b":1_000\r\n",
        b":\xd9\xa1\r\n",
        b":12345678901234567890\r\n",
        b"$\r\n",
        b"$-2\r\n",
        b"$+3\r\nabc\r\n",
        b"$ 3\r\nabc\r\n",
        b"$0x3\r\nabc\r\n",
        b"$3\r\nabcd\r\n",
        b"$3\r\nabc\n\r",
        b"$%d\r\n" % (LARGEST_VALUE + 1),
        b"$99999999999\r\n",
        b"+a\nb\r\n",
        b"+a\rb\r\n",
        b"+" + b"a" * (LONGEST_LINE + 1) + b"\r\n",
        b"+" + b"a" * 100_000,
        b"$%d\r\n" % (MOST_RECEIVED + 4097),
    ],
)
@pytest.mark.parametrize("pieces", [[1 << 30], [1]])
def test_what_is_no_reply_is_a_protocol_error(sent, pieces):
    with pytest.raises(ProtocolError):
        reader_of(sent, pieces).answer(lists=True)


@pytest.mark.parametrize("sent", [b"$70000\r\n" + b"a" * 70_000 + b"\r\n", b"*1\r\n:7\r\n", b"*0\r\n"])
def test_where_no_list_is_awaited_an_answer_is_short(sent):
    """A thousand of them may be collected before anybody looks at one."""
    assert reader_of(sent, [1 << 30]).answer(lists=True) is not None
    with pytest.raises(ProtocolError):
        reader_of(sent, [1 << 30]).answer()


@pytest.mark.parametrize("sent", [b":5\r\n", b"+OK\r\n", b"*0\r\n", b"$141\r\n" + bytes(141) + b"xx"])
def test_what_is_no_value_is_no_page(sent):
    with pytest.raises(ProtocolError):
        reader_of(sent).page_into(memoryview(bytearray(HEADER)), [memoryview(bytearray(13))])


def test_a_value_too_long_to_throw_away_is_not_read():
    feed = Feed(b"$%d\r\n" % (LONGEST_DRAINED + 1) + bytes(50_000))
    with pytest.raises(OversizedValueError) as raised:
        ReplyReader(feed.receive_into).page_into(memoryview(bytearray(HEADER)), [memoryview(bytearray(13))])
    assert raised.value.length == LONGEST_DRAINED + 1
    assert feed._left.nbytes > 30_000


def test_the_code_of_an_error_repeats_nothing_of_ours():
    assert ErrorReply("OOM command not allowed").code == "OOM"
    assert ErrorReply("hunter2 is wrong").code == "ERR"
    assert ErrorReply("").code == "ERR"
