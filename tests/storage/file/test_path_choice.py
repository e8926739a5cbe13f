"""Pages are spread evenly, and stay where they are when paths come and go."""

from __future__ import annotations

from collections import Counter

import pytest

from hicache_ext.storage.tiers.file.multipath import choose_paths, path_seeds
from hicache_ext.testing.conformance.pages import page_keys

KEYS = page_keys(6000)
NAMES = ["/mnt/a", "/mnt/b", "/mnt/c", "/mnt/d"]


def homes(names, usable=None):
    numbers = choose_paths(KEYS, path_seeds(names), range(len(names)) if usable is None else usable)
    return [names[number] for number in numbers]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_pages_are_spread_evenly(count):
    shares = Counter(homes(NAMES[:count]))
    assert len(shares) == count
    assert max(shares.values()) < 1.15 * len(KEYS) / count


def test_a_path_more_takes_an_even_share_from_each_and_moves_nothing_else():
    before, after = homes(NAMES[:3]), homes(NAMES)
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {new for _, new in moved} == {NAMES[3]}
    assert 0.8 < len(moved) / (len(KEYS) / 4) < 1.2
    assert max(Counter(old for old, _ in moved).values()) < 1.3 * len(moved) / 3


def test_a_path_less_leaves_its_pages_to_the_others_and_moves_nothing_else():
    before, after = homes(NAMES), homes(NAMES[:3])
    assert {old for old, new in zip(before, after, strict=True) if old != new} == {NAMES[3]}


def test_out_of_service_is_like_removed():
    assert homes(NAMES, usable=[0, 2, 3]) == homes([NAMES[0], NAMES[2], NAMES[3]])


def test_the_order_of_the_list_plays_no_role():
    assert homes(NAMES) == homes(NAMES[::-1])


def test_one_usable_path_has_everything_and_no_keys_are_no_error():
    assert set(homes(NAMES, usable=[2])) == {NAMES[2]}
    assert choose_paths([], path_seeds(NAMES), [0, 1]) == []
