"""Measuring a device: bounded, once per boot, without left-overs and without company."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import get_args

import pytest

from hicache_ext.runtime.file_lock import OfdLock
from hicache_ext.storage.tiers.file import devices as device_probe
from hicache_ext.storage.tiers.file.devices import Measured, Mode, measured_device, takes_direct


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A loaded machine must not look like a slow device: what runs out of time is left out."""
    monkeypatch.setattr(device_probe, "_TOTAL_SECONDS", 60.0)
    monkeypatch.setattr(device_probe, "_LOCK_SECONDS", 60.0)


def test_every_mode_that_works_here_has_a_rate_in_both_directions(tmp_path):
    measured = measured_device(tmp_path)
    for rates in (measured.read, measured.write):
        assert "buffered" in rates
        assert set(rates) <= set(get_args(Mode))
        assert all(rate > 0 for by_threads in rates.values() for rate in by_threads.values())
    assert measured.rate("read", "buffered")


def test_only_the_result_and_the_lock_stay(tmp_path):
    measured_device(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"io_probe.json", "io_probe.lock"}


def test_what_is_known_is_not_measured_again(tmp_path, monkeypatch):
    first = measured_device(tmp_path)
    monkeypatch.setattr(device_probe, "_Probe", None)
    assert measured_device(tmp_path) == first


@pytest.mark.parametrize(
    "change",
    [
        lambda document: {**document, "boot": "another"},
        lambda document: {**document, "device": -1},
        lambda document: {**document, "version": 0},
        lambda document: {**document, "read": 3},
        lambda document: [],
    ],
    ids=["another boot", "another device", "another version", "damaged", "not a mapping"],
)
def test_what_was_measured_elsewhere_or_is_damaged_is_measured_anew(tmp_path, monkeypatch, change):
    measured_device(tmp_path)
    kept = tmp_path / "io_probe.json"
    kept.write_text(json.dumps(change(json.loads(kept.read_text()))))
    known = Measured({"buffered": {4: 1.0}}, {"buffered": {4: 2.0}})
    monkeypatch.setattr(device_probe._Probe, "measure", lambda self: known)
    assert measured_device(tmp_path) == known
    assert measured_device(tmp_path) == known


def test_of_several_that_start_together_one_measures(tmp_path, monkeypatch):
    runs = []

    def measure(self):
        runs.append(1)
        time.sleep(0.1)
        return Measured({"buffered": {4: 1.0}}, {"buffered": {4: 2.0}})

    monkeypatch.setattr(device_probe._Probe, "measure", measure)
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(measured_device(tmp_path))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs) == 1
    assert answers == [answers[0]] * 6


def test_a_measurement_that_never_ends_elsewhere_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr(device_probe, "_LOCK_SECONDS", 0.05)
    other = OfdLock(tmp_path / "io_probe.lock")
    assert other.acquire(1.0)
    assert measured_device(tmp_path) == Measured()
    other.close()


def test_a_process_killed_while_it_measures_leaves_nothing_but_the_lock(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from hicache_ext.storage.tiers.file import devices as d\n"
        "d._TOTAL_SECONDS = d._CELL_SECONDS = 60\n"
        "d._Probe._rate = lambda *_: (print('measuring', flush=True), time.sleep(60))\n"
        "d.measured_device(Path(sys.argv[1]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "measuring\n"
    process.kill()
    process.wait()
    process.stdout.close()
    assert {path.name for path in tmp_path.iterdir()} == {"io_probe.lock"}
    assert measured_device(tmp_path).read


def test_a_mode_that_the_file_system_lacks_is_left_out(tmp_path, monkeypatch):
    real = device_probe.os.preadv

    def preadv(fd, buffers, offset, flags=0):
        if flags:
            raise OSError(95, "Operation not supported")
        return real(fd, buffers, offset)

    monkeypatch.setattr(device_probe.os, "preadv", preadv)
    measured = measured_device(tmp_path)
    assert "dontcache" not in measured.read
    assert "buffered" in measured.read


@pytest.mark.parametrize(("error", "possible"), [(None, True), (22, False), (95, False), (28, True)])
def test_direct_is_impossible_only_where_the_file_system_says_so(tmp_path, monkeypatch, error, possible):
    def pwrite(fd, block, offset):
        if error is not None:
            raise OSError(error, os.strerror(error))
        return len(block)

    monkeypatch.setattr(device_probe.os, "pwrite", pwrite)
    assert takes_direct(tmp_path) is possible


def test_this_machine_does_direct(tmp_path):
    assert takes_direct(tmp_path)
    assert list(tmp_path.iterdir()) == []
