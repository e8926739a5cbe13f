"""What ``io: auto`` makes of a measurement."""

from __future__ import annotations

import pytest

from hicache_ext.storage.tiers.file.devices import DEFAULT_THREADS, Measured, choose_io, memory_free

GB = 10**9


def measured(**rates: float) -> Measured:
    """Rates of both directions with four threads, in GB/s."""
    by_mode = {mode: {4: rate * GB} for mode, rate in rates.items()}
    return Measured(dict(by_mode), dict(by_mode))


def plan(known, setting="auto", capacity=1000 * GB, threads=None, direct_possible=True, free_memory=100 * GB):
    return choose_io(setting, capacity, threads, known, direct_possible=direct_possible, free_memory=free_memory)


def test_a_tier_that_fits_into_free_memory_goes_through_the_page_cache():
    chosen = plan(measured(buffered=1, dontcache=5, direct=5), capacity=25 * GB)
    assert (chosen.read, chosen.write) == ("buffered", "buffered")
    assert "fits" in chosen.reason


@pytest.mark.parametrize("capacity", [26 * GB, None])
def test_a_larger_tier_leaves_the_page_cache_alone(capacity):
    chosen = plan(measured(buffered=3, dontcache=2.9, direct=3.1), capacity=capacity)
    assert (chosen.read, chosen.write) == ("direct", "direct")
    assert "direct 3.10 GB/s, buffered 3.00" in chosen.reason


def test_a_mode_that_is_clearly_slower_is_never_chosen():
    chosen = plan(measured(buffered=5.8, dontcache=0.6, direct=3.5))
    assert (chosen.read, chosen.write) == ("buffered", "buffered")


def test_reads_and_writes_are_chosen_apart():
    known = Measured({"buffered": {4: 1.0}, "direct": {4: 2.0}}, {"buffered": {4: 9.0}, "direct": {4: 2.0}})
    chosen = plan(known)
    assert (chosen.read, chosen.write) == ("direct", "buffered")
    assert str(chosen) == "direct reads, buffered writes, 4 threads"


def test_without_alignment_there_is_no_direct():
    known = measured(buffered=3, dontcache=2.5, direct=9)
    assert plan(known, direct_possible=False).read == "dontcache"
    assert plan(measured(buffered=3, direct=9), direct_possible=False).read == "buffered"


def test_what_is_configured_is_done():
    known = measured(buffered=9, direct=1)
    assert plan(known, setting="direct").write == "direct"
    assert plan(measured(buffered=1, direct=9), setting="buffered").read == "buffered"


def test_direct_where_there_is_none_cannot_start():
    assert plan(Measured(), setting="direct").read == "direct", "a device too slow to be measured in time"


def test_the_fewest_threads_that_are_about_as_fast_are_used():
    rates = {1: 1.0, 2: 1.9, 4: 3.0, 8: 5.0, 16: 5.1}
    known = Measured({"buffered": rates}, {"buffered": {1: 3.0, 4: 3.0, 8: 3.1}})
    assert plan(known, setting="buffered").threads == 8
    assert plan(known, setting="buffered", threads=3).threads == 3


def test_without_a_measurement_there_is_a_default():
    chosen = plan(Measured())
    assert (chosen.read, chosen.write, chosen.threads) == ("buffered", "buffered", DEFAULT_THREADS)


def test_there_is_some_free_memory_here():
    assert memory_free() > 1 << 20
