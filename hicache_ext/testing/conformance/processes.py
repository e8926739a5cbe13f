"""The part of the PageStore suite about several processes: what they see of each other, and kill -9."""

from __future__ import annotations

import itertools
import random
import time
from functools import partial
from multiprocessing.connection import Connection

import pytest

from hicache_ext.storage.contract.store import GetResult, PageStore
from hicache_ext.testing.conformance.cases import PageStoreCases
from hicache_ext.testing.conformance.medium import Medium
from hicache_ext.testing.conformance.pages import (
    IDENTITY,
    OTHER_IDENTITY,
    assert_hits,
    page_keys,
    payload_of,
    read_pages,
    settle,
    store_pages,
)
from hicache_ext.testing.conformance.second_process import another_process, in_another_process

_KILLS = 3
_BATCHES = 2
"""Batches that a writer completes before it is killed in the next one."""
_SIZES = (60_000, 70_000)


class ProcessCases(PageStoreCases):
    def test_another_process_sees_the_pages_exactly_if_that_is_declared(self, store: PageStore, medium: Medium) -> None:
        keys = page_keys(20)
        store_pages(store, keys, _SIZES)
        settle(store)
        seen = in_another_process(medium, partial(_look, keys), patience=self.patience)
        assert seen == [medium.between_processes] * 20

    def test_pages_that_another_process_stored_are_read(self, store: PageStore, medium: Medium) -> None:
        if not medium.between_processes:
            pytest.skip("declared: between_processes = False; another case shows it")
        keys = page_keys(20)
        in_another_process(medium, partial(_store, keys), patience=self.patience)
        assert store.contains(keys) == [True] * 20
        assert store.count_leading(keys) == 20
        assert_hits(store, keys, _SIZES)

    def test_pages_are_whole_or_absent_after_their_writer_was_killed(self, store: PageStore, medium: Medium) -> None:
        if not medium.between_processes:
            pytest.skip("declared: between_processes = False; another case shows it")
        chance = random.Random(0)
        for kill in range(_KILLS):
            durable = self._killed_while_it_writes(medium, f"kill {kill}", chance)
            if not medium.writes_later:
                assert store.contains(durable) == [True] * len(durable), "STORED, and gone with its writer"
                assert_hits(store, durable, _SIZES)
            for batch in range(_BATCHES + 1):
                keys = _batch(f"kill {kill}", batch)
                present = store.contains(keys)
                results, payloads = read_pages(store, keys, _SIZES)
                for key, known, result, payload in zip(keys, present, results, payloads, strict=True):
                    assert result is (GetResult.HIT if known else GetResult.MISS)
                    assert not known or payload == payload_of(key, sum(_SIZES))
                self._store_as_soon_as_possible(store, medium, keys)
                assert_hits(store, keys, _SIZES)

    def test_clear_holds_when_its_process_is_killed(self, store: PageStore, medium: Medium) -> None:
        if not medium.between_processes:
            pytest.skip("declared: between_processes = False; another case shows it")
        keys, theirs = page_keys(20), page_keys(5, identity=OTHER_IDENTITY)
        store_pages(store, keys + theirs, _SIZES)
        settle(store)
        with another_process(medium, _clear_and_wait, patience=self.patience) as (process, connection):
            assert connection.poll(self.patience), "the other process has not cleared"
            answer = connection.recv()
            process.kill()
        assert answer == 1, f"in the other process:\n{answer}"
        results, payloads = read_pages(store, keys, _SIZES)
        for key, result, payload in zip(keys, results, payloads, strict=True):
            if medium.clears_at_once or result is not GetResult.HIT:
                assert result is GetResult.MISS, "a page from before clear() is back"
            else:
                assert payload == payload_of(key, sum(_SIZES))
        assert all(result.durable for result in store_pages(store, keys, _SIZES))
        assert_hits(store, keys + theirs, _SIZES)

    def _store_as_soon_as_possible(self, store: PageStore, medium: Medium, keys: list[bytes]) -> None:
        end = time.monotonic() + medium.killed_writes_end_after
        results = store_pages(store, keys, _SIZES)
        while not all(result.durable for result in results):
            assert time.monotonic() < end, f"pages of a killed writer cannot be written: {results}"
            time.sleep(0.1)
            results = store_pages(store, keys, _SIZES)

    def _killed_while_it_writes(self, medium: Medium, name: str, chance: random.Random) -> list[bytes]:
        """The pages that a writer had stored by its own account when it was killed in the middle of a batch."""
        durable: list[bytes] = []
        with another_process(medium, partial(_write_batches, name), patience=self.patience) as (process, connection):
            begun = time.monotonic()
            for batch in range(_BATCHES):
                begun = time.monotonic()
                connection.send(batch)
                assert connection.poll(self.patience), "the other process does not write"
                answer = connection.recv()
                assert isinstance(answer, list), f"in the other process:\n{answer}"
                durable += answer
            took = time.monotonic() - begun
            connection.send(_BATCHES)
            time.sleep(took * chance.uniform(0.1, 0.9))
            process.kill()
        return durable


def _batch(name: str, number: int) -> list[bytes]:
    return page_keys(8, f"{name}-{number}")


def _look(keys: list[bytes], store: PageStore, connection: Connection) -> list[bool]:
    """Which pages are there; those that are have to be whole."""
    results, payloads = read_pages(store, keys, _SIZES)
    present = store.contains(keys)
    for key, known, result, payload in zip(keys, present, results, payloads, strict=True):
        assert (result is GetResult.HIT) == known
        assert not known or payload == payload_of(key, sum(_SIZES))
    return present


def _store(keys: list[bytes], store: PageStore, connection: Connection) -> None:
    assert all(result.durable for result in store_pages(store, keys, _SIZES))
    settle(store)


def _clear_and_wait(store: PageStore, connection: Connection) -> None:
    connection.send(store.clear([IDENTITY]))
    connection.recv()


def _write_batches(name: str, store: PageStore, connection: Connection) -> None:
    """Write a batch whenever the test says so; never ends."""
    for number in itertools.count():
        connection.recv()
        keys = _batch(name, number)
        results = store_pages(store, keys, _SIZES)
        connection.send([key for key, result in zip(keys, results, strict=True) if result.durable])
