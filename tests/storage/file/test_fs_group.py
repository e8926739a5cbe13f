"""What ``fsGroup`` does to a file tier on a volume that supports it: the kubelet opens every file to a group.

A hostPath is left alone. On a local PersistentVolume or an emptyDir it happens at each start of a pod, also while
another pod uses the volume, and the volume's own directory belongs to root.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_ext.testing.conformance.pages import assert_hits, page_keys, store_pages
from tests.rigs.kubelet import give_to_group
from tests.storage.file.test_access import (
    LAYOUTS,
    PRIVATE,
    SOMEBODY,
    TEAM,
    as_account,
    modes,
    needs_root,
    open_place,
    opened,
)

__all__ = ["open_place"]

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.fixture
def volume(open_place: Path) -> Path:
    """As a pod of fsGroup TEAM finds it."""
    needs_root()
    volume = open_place / "volume"
    volume.mkdir()
    give_to_group(volume, TEAM)
    return volume


def in_the_pod(call: Callable[[], object]) -> None:
    assert as_account(SOMEBODY, [TEAM], call) is None


def write(place: Path, layout: str) -> None:
    store = opened(place, layout)
    store_pages(store, page_keys(8))
    store.close()


def read(place: Path, layout: str) -> None:
    store = opened(place, layout)
    assert_hits(store, page_keys(8))
    store.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_stay_under_a_running_server_and_its_next_start_closes_what_the_kubelet_opened(
    volume: Path, layout: str
) -> None:
    place = volume / "kv"

    def run() -> None:
        store = opened(place, layout)
        store_pages(store, page_keys(8))
        give_to_group(place, TEAM)
        assert modes(place) != PRIVATE
        assert_hits(store, page_keys(8))
        store_pages(store, page_keys(8, "after"))
        assert_hits(store, page_keys(8, "after"))
        store.close()

    in_the_pod(run)
    in_the_pod(lambda: read(place, layout))
    found = modes(place)
    assert found["files"] == PRIVATE["files"]
    assert {int(mode, 8) & 0o777 for mode in found["directories"]} == {0o700}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_on_root_mismatch_no_file_is_touched_if_the_tier_is_a_directory_in_the_volume(
    volume: Path, layout: str
) -> None:
    for _ in range(2):
        in_the_pod(lambda: write(volume / "kv", layout))
        assert give_to_group(volume, TEAM, on_root_mismatch=True) == 0
    in_the_pod(lambda: read(volume / "kv", layout))


@pytest.mark.parametrize(("owner", "opened_again"), [(0, False), (SOMEBODY, True)], ids=["root", "the pod's account"])
def test_a_tier_that_is_the_volume_is_closed_by_its_owner_and_opened_again_by_each_start_of_a_pod(
    volume: Path, owner: int, opened_again: bool
) -> None:
    os.chown(volume, owner, TEAM)
    volume.chmod(0o2770)  # a change of owner drops the bit
    for _ in range(2):
        in_the_pod(lambda: write(volume, "slab"))
        assert (give_to_group(volume, TEAM, on_root_mismatch=True) > 0) is opened_again
    in_the_pod(lambda: read(volume, "slab"))
