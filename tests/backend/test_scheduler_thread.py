"""Which of SGLang's calls the guards answer at once: those of the scheduler's thread, and no others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from hicache_ext.runtime.call_deadline import must_answer_at_once
from hicache_ext.testing.conformance.storage_backend import PAGE_SIZE, page_keys
from hicache_ext.testing.host_pools import mha_pools, page_indices
from hicache_ext.testing.sglang_cpu import prepare_process

pytestmark = pytest.mark.sglang

KEYS = page_keys(3)


class Listening:
    """The store of a backend, noting for each call whether it was to be answered at once."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.heard: dict[str, bool] = {}

    def __getattr__(self, name: str) -> Any:
        self.heard[name] = must_answer_at_once()
        return getattr(self.store, name)


@pytest.fixture
def listening(open_backend: Callable[..., Any]) -> Any:
    prepare_process()
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    backend._store = Listening(backend._store)
    return backend


def use(backend: Any) -> dict[str, bool]:
    backend._store.heard.clear()
    backend.batch_set_v1(KEYS, page_indices(PAGE_SIZE, [0, 1, 2]))
    backend.batch_get_v1(KEYS, page_indices(PAGE_SIZE, [0, 1, 2]))
    assert backend.batch_exists(KEYS) == 3
    assert backend.clear() is True
    heard: dict[str, bool] = backend._store.heard
    return heard


def test_the_schedulers_look_ups_are_answered_at_once(listening: Any) -> None:
    listening._scheduler = threading.get_ident()
    assert use(listening) == {"set": False, "get": False, "count_leading": True, "clear": True}


def test_other_threads_and_tools_wait_for_their_answer(listening: Any) -> None:
    assert listening._scheduler is None  # outside a server
    listening._scheduler = threading.get_ident() + 1
    assert use(listening) == {"set": False, "get": False, "count_leading": False, "clear": False}
