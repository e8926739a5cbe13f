"""The plan of an operation against a naive one that walks over every byte range."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hicache_ext.kernels.geometry import CopyPlan, CopyShape, Strides, make_plan, split_at_borders

Run = tuple[int, int, int]


def address(shape: CopyShape, side: Strides, token: int, segment: int) -> int:
    page, slot = divmod(token, shape.page_size)
    return page * side.page + slot * side.token + segment * side.segment


def naive_plan(shape: CopyShape, host: list[int], device: list[int]) -> list[Run]:
    """Every segment of every token by the definition, in host order, neighbours on both sides joined."""
    pieces = sorted(
        (address(shape, shape.host, h, segment), address(shape, shape.device, d, segment), shape.segment_bytes)
        for h, d in zip(host, device, strict=True)
        for segment in range(shape.segments)
    )
    joined: list[Run] = []
    for piece in pieces:
        if joined:
            at_host, at_device, size = joined[-1]
            if (at_host + size, at_device + size) == piece[:2]:
                joined[-1] = (at_host, at_device, size + piece[2])
                continue
        joined.append(piece)
    return joined


def runs(plan: CopyPlan) -> list[Run]:
    return list(zip(plan.host.tolist(), plan.device.tolist(), plan.sizes.tolist(), strict=True))


def moved_bytes(pieces: list[Run]) -> set[tuple[int, int]]:
    return {(host + offset, device + offset) for host, device, size in pieces for offset in range(size)}


@st.composite
def shapes(draw: st.DrawFn) -> CopyShape:
    """The shapes of SGLang's layouts, and device rows packed or strided."""
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    segments = draw(st.sampled_from([1, 1, 2, 3]))
    segment = draw(st.sampled_from([1, 6, 16]))
    layers = draw(st.integers(1, 4))
    row = segments * segment
    host = draw(
        st.sampled_from(
            [
                Strides(page_size * row, row, segment),  # layer_first
                Strides(page_size * layers * row, layers * row, segment),  # page_first
                Strides(page_size * layers * row, row, segment),  # page_first_direct
                Strides(page_size * layers * row, layers * segment, page_size * layers * segment),  # page_head
            ]
        )
    )
    pitch = row * draw(st.sampled_from([1, 1, 3]))
    return CopyShape(page_size, segments, segment, host, Strides(page_size * pitch, pitch, segment))


@st.composite
def operations(draw: st.DrawFn) -> tuple[CopyShape, list[int], list[int]]:
    """A shape, and tokens of both sides: whole pages with neighbours among them, or single tokens."""
    shape = draw(shapes())
    if draw(st.booleans()):
        count = draw(st.integers(0, 6))
        host_pages, device_pages = (
            draw(st.lists(st.integers(0, 8), min_size=count, max_size=count, unique=True)) for _ in range(2)
        )
        if draw(st.booleans()):
            device_pages = [page + 1 for page in host_pages]  # neighbours on one side are neighbours on the other
        within = range(shape.page_size)
        return (
            shape,
            [page * shape.page_size + slot for page in host_pages for slot in within],
            [page * shape.page_size + slot for page in device_pages for slot in within],
        )
    count = draw(st.integers(0, 12))
    tokens = st.lists(st.integers(0, 40), min_size=count, max_size=count, unique=True)
    return shape, draw(tokens), draw(tokens)


def arrays(*lists: list[int]) -> list[NDArray[np.int64]]:
    return [np.array(values, dtype=np.int64) for values in lists]


@given(operations())
def test_the_plan_has_the_longest_runs_of_the_naive_plan(operation: tuple[CopyShape, list[int], list[int]]) -> None:
    shape, host, device = operation
    plan = make_plan(shape, *arrays(host, device))
    assert moved_bytes(runs(plan)) == moved_bytes(naive_plan(shape, host, device))
    assert plan.sizes.sum() == len(host) * shape.row_bytes
    if shape.segments == 1 or shape.host.segment == shape.segment_bytes:
        assert runs(plan) == naive_plan(shape, host, device)


@given(operations(), st.integers(0, 1000), st.lists(st.integers(1, 900), max_size=4, unique=True))
def test_no_piece_crosses_a_border_and_no_byte_is_lost(
    operation: tuple[CopyShape, list[int], list[int]], base: int, cuts: list[int]
) -> None:
    shape, host, device = operation
    borders = [0, *sorted(cuts)]
    registrations = tuple((start, 1) for start in borders)
    plan = make_plan(shape, *arrays(host, device))
    pieces = split_at_borders(plan.host + base, plan.device, plan.sizes, registrations)
    split = list(zip(*(array.tolist() for array in pieces), strict=True))

    assert all(size > 0 for *_, size in split)
    assert not [piece for piece in split for cut in cuts if piece[0] < cut < piece[0] + piece[2]]
    assert moved_bytes(split) == moved_bytes([(h + base, d, size) for h, d, size in runs(plan)])


@pytest.mark.parametrize("layer", [0, 3, 31])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_registrations_that_meet_between_pages_never_cost_a_split(layout: str, layer: int) -> None:
    # SGLang registers page-major pools in multiples of a page.
    row, page_size, layers = 2048, 16, 32
    page = page_size * layers * row
    token = row if layout == "page_first_direct" else layers * row
    shape = CopyShape(page_size, 1, row, Strides(page, token, row), Strides(page_size * row, row, row))
    tokens = np.arange(8 * page_size)
    plan = make_plan(shape, tokens, tokens)
    base = 4096 + layer * (page_size * row if layout == "page_first_direct" else row)
    registrations = ((4096, 3 * page), (4096 + 3 * page, 5 * page))
    at_host = plan.host + base
    assert split_at_borders(at_host, plan.device, plan.sizes, registrations)[0] is at_host
    inside_a_run = base + 3 * page + 1
    split = split_at_borders(at_host, plan.device, plan.sizes, ((4096, 3 * page), (inside_a_run, 5 * page)))
    assert len(split[0]) == len(plan) + 1


def test_neighbouring_pages_become_one_run_whatever_order_they_come_in() -> None:
    shape = CopyShape(16, 1, 128, Strides(2048, 128, 128), Strides(2048, 128, 128))
    host = np.concatenate([np.arange(page * 16, page * 16 + 16) for page in (7, 5, 6)])
    device = np.concatenate([np.arange(page * 16, page * 16 + 16) for page in (3, 1, 2)])
    assert runs(make_plan(shape, host, device)) == [(5 * 2048, 1 * 2048, 3 * 2048)]
