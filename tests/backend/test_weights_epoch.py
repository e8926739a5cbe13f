"""An online weight update moves every page to another identity, and nothing of the old weights slips in between."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_ext.storage import weights_hooks
from hicache_ext.testing.conformance.storage_backend import PAGE_SIZE, page_keys
from hicache_ext.testing.host_pools import mha_pools, page_indices

pytestmark = pytest.mark.sglang

KEYS = page_keys(2)
INDICES = page_indices(PAGE_SIZE, [0, 1])


@pytest.fixture(autouse=True)
def _a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(weights_hooks.LAUNCH_ID_VARIABLE, "one launch")
    monkeypatch.setattr(weights_hooks, "_updates", 0)
    monkeypatch.setattr(weights_hooks, "_nonce", None)
    monkeypatch.setattr(weights_hooks, "_flushed", True)


def update(flushes: bool) -> Any:
    """What SGLang does after it has loaded new weights: our AROUND hook around its flush, our AFTER hook on it."""

    def flush_after_update(_manager: object, _request: object) -> str:
        weights_hooks.after_flush(flushes)
        return "SGLang's answer"

    request = SimpleNamespace(weight_version="7", model_path=None)
    return weights_hooks.around_flush_after_update(flush_after_update, None, request)


def test_pages_of_the_old_weights_are_out_of_reach_after_an_update(open_backend: Callable[..., Any]) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    assert backend.batch_set_v1(KEYS, INDICES) == [True, True]
    assert update(flushes=True) == "SGLang's answer"
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_get_v1(KEYS, INDICES) == [False, False]
    assert backend.batch_set_v1(KEYS, INDICES) == [True, True]
    assert backend.batch_exists(KEYS) == 2


def test_until_the_cache_is_flushed_nothing_is_stored_or_served(open_backend: Callable[..., Any]) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    backend.batch_set_v1(KEYS, INDICES)
    update(flushes=False)
    assert backend.suspended_because is not None
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_set_v1(page_keys(2, "more"), INDICES) == [False, False]
    weights_hooks.after_flush(False)
    assert backend.suspended_because is not None
    weights_hooks.after_flush(True)
    assert backend.suspended_because is None
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_exists(page_keys(2, "more")) == 0


def test_a_flush_without_an_update_changes_nothing(open_backend: Callable[..., Any]) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    backend.batch_set_v1(KEYS, INDICES)
    weights_hooks.after_flush(True)
    assert backend.batch_exists(KEYS) == 2


def test_ranks_of_one_launch_agree_and_launches_do_not(
    open_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = mha_pools(page_size=PAGE_SIZE).host
    epochs = []
    for launch in ("one launch", "one launch", "another launch"):
        monkeypatch.setenv(weights_hooks.LAUNCH_ID_VARIABLE, launch)
        monkeypatch.setattr(weights_hooks, "_updates", 0)
        backend = open_backend(host)
        update(flushes=True)
        epochs.append(backend._model.weights_epoch)
        backend.close()
    assert epochs[0] == epochs[1] != epochs[2]


def test_a_backend_that_is_attached_after_an_update_serves_nothing_of_the_old_weights(
    open_backend: Callable[..., Any],
) -> None:
    """SGLang makes a new backend when storage is attached to a running server; the model's files are the old ones."""
    host = mha_pools(page_size=PAGE_SIZE).host
    before = open_backend(host)
    assert before.batch_set_v1(KEYS, INDICES) == [True, True]
    before.close()
    update(flushes=False)
    attached = open_backend(host)
    assert attached.batch_exists(KEYS) == 0
    assert attached.batch_set_v1(KEYS, INDICES) == [False, False]
    weights_hooks.after_flush(True)
    assert attached.batch_exists(KEYS) == 0
    assert attached.batch_set_v1(KEYS, INDICES) == [True, True]
    attached.close()
    assert open_backend(host).batch_exists(KEYS) == 2


def test_every_update_is_an_epoch_of_its_own(open_backend: Callable[..., Any]) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    seen = {backend._model.weights_epoch}
    for _ in range(3):
        update(flushes=True)
        seen.add(backend._model.weights_epoch)
    assert len(seen) == 4


def test_a_decode_nodes_offload_stays_off_since_its_queue_is_not_flushed(open_backend: Callable[..., Any]) -> None:
    backend = open_backend()
    backend.register_mem_pool_host(mha_pools(page_size=PAGE_SIZE).host)
    update(flushes=True)
    assert backend.suspended_because is not None
    assert backend.batch_set_v1(KEYS, INDICES) == [False, False]
