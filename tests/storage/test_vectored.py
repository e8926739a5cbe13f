"""preadv and pwritev of any list of buffers."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_ext.runtime import vectored
from tests.rigs.disk_faults import DiskFaults


def _cut(content: bytes, sizes: list[int]) -> list[memoryview]:
    views, offset = [], 0
    for size in sizes:
        views.append(memoryview(bytearray(content[offset : offset + size])))
        offset += size
    return views


@pytest.fixture
def fd(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 50), max_size=30), offset=st.integers(0, 100), seed=st.integers(0, 1000))
def test_short_transfers_are_continued(fd, tmp_path, sizes, offset, seed):
    content = os.urandom(sum(sizes))
    os.ftruncate(fd, 0)
    target = [memoryview(bytearray(size)) for size in sizes]
    with DiskFaults(tmp_path, seed=seed, rate=0.7, errors=(), calls=("preadv", "pwritev")):
        assert vectored.write_from(fd, _cut(content, sizes), offset) == len(content)
        assert vectored.read_into(fd, target, offset) == len(content)
    assert b"".join(target) == content
    assert os.pread(fd, 1000, offset) == content[:1000]


@pytest.mark.parametrize("count", [1023, 1024, 1025, 5000])
def test_more_buffers_than_one_call_takes_are_moved(fd, count):
    content = os.urandom(3 * count)
    assert vectored.write_from(fd, _cut(content, [3] * count), 0) == len(content)
    target = [memoryview(bytearray(3)) for _ in range(count)]
    assert vectored.read_into(fd, target, 0) == len(content)
    assert b"".join(target) == content


def test_more_empty_buffers_than_one_call_takes_are_not_the_end_of_the_file(fd):
    sizes = [0] * 2000 + [5]
    assert vectored.write_from(fd, _cut(b"hello", sizes), 0) == 5
    target = [memoryview(bytearray(size)) for size in sizes]
    assert vectored.read_into(fd, target, 0) == 5
    assert bytes(target[-1]) == b"hello"


def test_a_file_that_ends_early_gives_a_short_count_and_leaves_the_rest(fd):
    os.write(fd, b"abc")
    target = [memoryview(bytearray(b"....")), memoryview(bytearray(b"...."))]
    assert vectored.read_into(fd, target, 1) == 2
    assert b"".join(target) == b"bc......"


def test_errors_come_out_as_they_are(fd, tmp_path):
    with (
        DiskFaults(tmp_path, rate=1, errors=(errno.EIO,), short=False, calls=("preadv",)),
        pytest.raises(OSError, match="Input/output") as raised,
    ):
        vectored.read_into(fd, [memoryview(bytearray(4))], 0)
    assert raised.value.errno == errno.EIO
