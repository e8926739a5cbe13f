"""Host pools as addresses: which page SGLang's token indices name, and where its bytes are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="missing: torch")

from hicache_ext import native  # noqa: E402
from hicache_ext.native import address  # noqa: E402
from hicache_ext.sglang import host_pool  # noqa: E402
from hicache_ext.sglang.host_pool import HostPages  # noqa: E402

pytestmark = pytest.mark.usefixtures("way")

PAGES = 8


class Pool:
    """Each page has three runs, in buffers of their own, with a gap behind each."""

    SIZES = (3, 64, 17)

    def __init__(self, page_size: int, pages: int = PAGES) -> None:
        self.page_size, self.size = page_size, page_size * pages
        self.memory = [torch.zeros(pages * (size + 8), dtype=torch.uint8) for size in self.SIZES]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        page = int(indices[0]) // self.page_size
        pairs = zip(self.memory, self.SIZES, strict=True)
        return [memory.data_ptr() + page * (size + 8) for memory, size in pairs], list(self.SIZES)


def indices_of(page_size: int, *pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in pages])


@pytest.mark.parametrize("page_size", [1, 2, 64])
def test_pages_are_numbered_by_their_token_indices(page_size: int) -> None:
    pages = HostPages(Pool(page_size), "kv")
    numbers, sound = pages.page_numbers(indices_of(page_size, 7, 0, 3, 3), 4)
    assert (numbers.tolist(), sound) == ([7, 0, 3, 3], None)
    numbers, sound = pages.page_numbers(torch.empty(0, dtype=torch.int64), 0)
    assert (len(numbers), sound) == (0, None)


@pytest.mark.parametrize("page_size", [1, 2, 64])
@pytest.mark.parametrize("wrong", [-1, PAGES, PAGES + 1, -(1 << 40), 1 << 40])
def test_a_page_outside_the_pool_is_not_sound(page_size: int, wrong: int) -> None:
    _, sound = HostPages(Pool(page_size), "kv").page_numbers(indices_of(page_size, 1, wrong, 2), 3)
    assert sound.tolist() == [True, False, True]


@pytest.mark.parametrize("page_size", [2, 64])
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda page: page + 1, id="shifted"),
        pytest.param(lambda page: page - 1, id="shifted back"),
        pytest.param(lambda page: page.flip(0), id="backwards"),
        pytest.param(lambda page: page[:1].expand(len(page)), id="the same token again"),
        pytest.param(lambda page: torch.cat([page[:-1], page[-1:] + 1]), id="another last token"),
        pytest.param(lambda page: torch.cat([page[:-1], page[-1:] - (1 << 62)]), id="a last token far away"),
    ],
)
def test_a_page_that_is_no_aligned_run_is_not_sound(
    page_size: int, spoil: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    indices = torch.cat([indices_of(page_size, 1), spoil(indices_of(page_size, 4)), indices_of(page_size, 2)])
    _, sound = HostPages(Pool(page_size), "kv").page_numbers(indices, 3)
    assert sound.tolist() == [True, False, True]


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("given", [None, "none", "one less", "one more"])
def test_no_page_is_sound_where_the_count_of_indices_does_not_fit(page_size: int, given: str | None) -> None:
    fitting = indices_of(page_size, 0, 1, 2)
    tensors = {"none": fitting[:0], "one less": fitting[:-1], "one more": torch.cat([fitting, fitting[-1:]])}
    numbers, sound = HostPages(Pool(page_size), "kv").page_numbers(None if given is None else tensors[given], 3)
    assert (len(numbers), sound.tolist()) == (3, [False] * 3)


@pytest.mark.parametrize(
    "form", [lambda i: i.to(torch.int32), lambda i: i.repeat_interleave(2)[::2], lambda i: i[None]]
)
def test_indices_of_any_integer_type_and_stride_are_understood(form: Callable[[Any], Any]) -> None:
    numbers, sound = HostPages(Pool(4), "kv").page_numbers(form(indices_of(4, 5, 1)), 2)
    assert (numbers.tolist(), sound) == ([5, 1], None)


@pytest.mark.parametrize("numbers", [[], [3], [7, 0, 3, 3], list(range(PAGES))])
def test_addresses_and_views_of_pages_are_the_same_memory(numbers: list[int]) -> None:
    pool = Pool(4)
    memory = HostPages(pool, "kv").memory_of(np.array(numbers, np.int64))
    assert memory.addresses.pages.flags.c_contiguous and memory.addresses.pages.flags.writeable
    assert (memory.addresses.pages.dtype, memory.addresses.segment_sizes.tolist()) == (np.int64, list(pool.SIZES))
    for addresses, segments, number in zip(memory.addresses.pages.tolist(), memory, numbers, strict=True):
        assert addresses == pool.get_page_buffer_meta(indices_of(4, number))[0]
        found = [np.frombuffer(segment, np.uint8).ctypes.data for segment in segments]
        assert (found, [segment.nbytes for segment in segments]) == (addresses, list(pool.SIZES))


def test_the_core_finds_the_pages_that_numpy_finds(way: str) -> None:
    """Whatever words the caller's indices are."""
    core = native.core()
    if core is None:
        pytest.skip("this is about the core")
    word = st.integers(-(1 << 63), (1 << 63) - 1)

    @given(st.integers(1, 5), st.integers(1, 1 << 40), st.lists(word | st.integers(-3, 30), max_size=8), st.data())
    def check(page_size: int, page_count: int, begins: list[int], data: st.DataObject) -> None:
        with np.errstate(over="ignore"):
            indices = (np.array(begins, np.int64)[:, None] + np.arange(page_size)).reshape(-1)
            for at, other in data.draw(st.dictionaries(st.integers(0, 40), word, max_size=2)).items():
                indices[at : at + 1] = other
            numbers = np.empty(len(begins), np.int64)
            sound = core(
                host_pool._NumberPages(address(indices), page_size, page_count, address(numbers), len(numbers))
            )
            pages = indices.reshape(-1, page_size)
            expected = pages[:, 0] // page_size
            aligned = pages == (expected * page_size)[:, None] + np.arange(page_size)
            are_sound = aligned.all(axis=1) & (expected >= 0) & (expected < page_count)
            assert sound == are_sound.sum()
            assert numbers[numbers >= 0].tolist() == expected[expected >= 0].tolist()
            assert ((numbers < 0) == (expected < 0)).all()

    check()
