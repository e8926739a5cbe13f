"""Pins: recorded in the directory, seen by every process, bounded."""

from __future__ import annotations

import hashlib

import pytest

from hicache_ext.errors import StoreError
from hicache_ext.storage.tiers.file import pins
from hicache_ext.storage.tiers.file.pins import PinnedPages, add_pin, pins_that_are_over, read_pins, remove_pin

HASHES = [hashlib.sha256(bytes([number])).digest() for number in range(10)]


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """Every look is a real one."""
    monkeypatch.setattr(pins, "_LOOK_INTERVAL", 0.0)
    monkeypatch.setattr(pins, "_PAUSE", 0)
    monkeypatch.setattr(pins, "_COUNT_INTERVAL", 0.0)

    def watch(limit=None, size=100) -> PinnedPages:
        return PinnedPages("disk", tmp_path, limit, lambda hashes: [size] * len(hashes))

    return watch


def test_a_pin_is_read_back(tmp_path):
    add_pin(tmp_path, "system-prompt", HASHES[:3], None)
    (pin,) = read_pins(tmp_path)
    assert (pin.name, pin.hashes, pin.until) == ("system-prompt", tuple(HASHES[:3]), None)


def test_a_pin_of_the_same_name_is_replaced(tmp_path):
    add_pin(tmp_path, "prompt", HASHES[:3], None)
    add_pin(tmp_path, "prompt", HASHES[5:], 60.0)
    (pin,) = read_pins(tmp_path)
    assert pin.hashes == tuple(HASHES[5:])


def test_a_pin_whose_time_is_up_does_not_count_and_can_be_cleaned_up(tmp_path):
    add_pin(tmp_path, "over", HASHES, 0.0)
    add_pin(tmp_path, "kept", HASHES, 60.0)
    assert [pin.name for pin in read_pins(tmp_path)] == ["kept"]
    assert [remove_pin(tmp_path, name) for name in pins_that_are_over(tmp_path)] == [True]
    assert {path.name for path in (tmp_path / "pins").iterdir()} == {"kept.json"}


def test_unpinning_says_whether_there_was_a_pin(tmp_path):
    add_pin(tmp_path, "prompt", HASHES, None)
    assert remove_pin(tmp_path, "prompt")
    assert not remove_pin(tmp_path, "prompt")
    assert not remove_pin(tmp_path, "../hicache_ext")
    assert read_pins(tmp_path) == []


@pytest.mark.parametrize("name", ["", "../x", ".hidden", "a/b", "a" * 65, "a b"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path, name):
    with pytest.raises(StoreError, match="cannot name a pin"):
        add_pin(tmp_path, name, HASHES, None)


@pytest.mark.parametrize("hashes", [[], [b"short"]])
def test_a_pin_without_pages_is_refused(tmp_path, hashes):
    with pytest.raises(ValueError, match="hashes: 1 to"):
        add_pin(tmp_path, "prompt", hashes, None)


@pytest.mark.parametrize("text", ["", "[]", '{"created": 1}', '{"created": 1, "until": null, "hashes": ["zz"]}'])
def test_a_damaged_pin_is_left_out_and_said(tmp_path, text, caplog):
    add_pin(tmp_path, "good", HASHES, None)
    (tmp_path / "pins" / "bad.json").write_text(text)
    assert [pin.name for pin in read_pins(tmp_path)] == ["good"]
    assert "cannot be read and does not count" in caplog.text


def test_pins_that_come_and_go_are_seen(tmp_path, watched):
    pages = watched()
    assert pages.spared() == frozenset()
    add_pin(tmp_path, "prompt", HASHES[:2], None)
    assert pages.spared() == frozenset(HASHES[:2])
    add_pin(tmp_path, "another", HASHES[1:4], None)
    assert pages.spared() == frozenset(HASHES[:4])
    remove_pin(tmp_path, "prompt")
    assert pages.spared() == frozenset(HASHES[1:4])


def test_a_pin_whose_time_is_up_stops_to_count_by_itself(tmp_path, watched, monkeypatch):
    pages = watched()
    add_pin(tmp_path, "prompt", HASHES, 100.0)
    assert pages.spared()
    real = pins.time.time
    monkeypatch.setattr(pins.time, "time", lambda: real() + 101)
    assert pages.spared() == frozenset()


def test_beyond_the_limit_the_first_pins_and_the_heads_of_chains_count(tmp_path, watched, caplog):
    pages = watched(limit=450)
    add_pin(tmp_path, "z-first", HASHES[:3], None)
    add_pin(tmp_path, "a-second", HASHES[3:], None)
    assert pages.spared() == frozenset(HASHES[:4])
    pages.spared()
    assert caplog.text.count("would take more than half") == 1


def test_a_limit_that_is_changed_holds_from_the_next_eviction_on(tmp_path, watched, monkeypatch):
    add_pin(tmp_path, "prompt", HASHES, None)
    pages = watched(limit=300)
    monkeypatch.setattr(pins, "_LOOK_INTERVAL", 60.0)
    monkeypatch.setattr(pins, "_COUNT_INTERVAL", 60.0)
    for limit, spared in ((300, HASHES[:3]), (500, HASHES[:5]), (200, HASHES[:2]), (None, HASHES)):
        pages.set_limit(limit)
        assert pages.spared() == frozenset(spared)


def test_pages_that_are_not_there_take_no_room(tmp_path, watched):
    add_pin(tmp_path, "prompt", HASHES, None)
    assert watched(limit=1, size=0).spared() == frozenset(HASHES)


def test_a_directory_that_cannot_be_read_keeps_what_was_known(tmp_path, watched):
    broken = []

    def resident(hashes):
        if broken:
            raise OSError(5, "Input/output error")
        return [0] * len(hashes)

    pages = watched()
    pages._resident = resident
    add_pin(tmp_path, "prompt", HASHES, None)
    assert pages.spared() == frozenset(HASHES)
    broken.append(True)
    assert pages.spared() == frozenset(HASHES)


def test_the_largest_pin_is_read_back(tmp_path):
    hashes = [number.to_bytes(32) for number in range(pins.LARGEST_PIN)]
    add_pin(tmp_path, "everything", hashes, None)
    (pin,) = read_pins(tmp_path)
    assert len(pin.hashes) == pins.LARGEST_PIN
