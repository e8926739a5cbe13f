"""Two pages of one name never have one salt: with a nonce that is constant that would undo the cipher for both."""

from __future__ import annotations

import itertools
import os
import time

import pytest

from hicache_ext.page.transforms import sealing
from hicache_ext.page.transforms.header import SALT_LENGTH
from hicache_ext.testing.conformance.pages import page_keys, store_pages
from hicache_ext.testing.conformance.second_reader import read_page_object
from tests.storage.transforms.rig import AUTHENTICATE, ENCRYPT, SIZES, Attacked


def salt_of(attacked: Attacked, key: bytes) -> bytes:
    return attacked.payload(key)[48:72]


def each(salts: bytes) -> set[bytes]:
    return {salts[at : at + SALT_LENGTH] for at in range(0, len(salts), SALT_LENGTH)}


def test_a_salt_is_never_used_twice() -> None:
    attacked = Attacked(AUTHENTICATE)
    salts = set()
    for _ in range(50):
        keys = page_keys(20)
        store_pages(attacked.store, keys, SIZES)
        salts |= {read_page_object(stored).payload[48:72] for stored in attacked.objects.values()}
        attacked.store.remove(keys)
    assert len(salts) == 1000


def test_processes_that_were_forked_after_the_first_seal_seal_the_same_page_with_other_salts() -> None:
    attacked, (first, page) = Attacked(ENCRYPT), page_keys(2)
    store_pages(attacked.store, [first], SIZES)
    told: list[bytes] = []
    for _ in range(3):
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                # Its own store: threads do not come along. The key and all that salts are made of do.
                forked = Attacked(ENCRYPT)
                store_pages(forked.store, [page], SIZES)
                os.write(theirs, salt_of(forked, page))
            finally:
                os._exit(0)
        os.close(theirs)
        told.append(os.read(ours, 100))
        os.close(ours)
        os.waitpid(child, 0)
    store_pages(attacked.store, [page], SIZES)
    salts = [*told, salt_of(attacked, page)]
    assert [len(salt) for salt in salts] == [SALT_LENGTH] * 4
    assert len(set(salts)) == 4


def test_a_machine_that_was_restored_and_has_the_random_bits_of_before_makes_other_salts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "urandom", lambda count: b"\x07" * count)
    salts: set[bytes] = set()
    for _ in range(20):
        # All that the process has is that of the snapshot; only time has gone on.
        monkeypatch.setattr(sealing, "_sealed_before", itertools.count(1))
        salts |= each(sealing.new_salts(50))
        time.sleep(0.001)
    assert len(salts) == 20 * 50


def test_processes_that_begin_in_the_same_moment_with_the_same_random_bits_make_other_salts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "urandom", lambda count: b"\x07" * count)
    monkeypatch.setattr(time, "time_ns", lambda: 5)
    monkeypatch.setattr(time, "monotonic_ns", lambda: 5)
    made = []
    for process in (100, 101):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        monkeypatch.setattr(sealing, "_sealed_before", itertools.count(1))
        made.append(each(sealing.new_salts(50)))
    assert not made[0] & made[1]
