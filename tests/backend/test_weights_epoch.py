"""An online weight update moves every page to another identity, and nothing of the old weights slips in between."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_ext.sglang import model_weights
from hicache_ext.sglang.used_names import HOOKS
from hicache_ext.testing.conformance.storage_backend import PAGE_SIZE, page_keys
from hicache_ext.testing.host_pools import mha_pools, page_indices

pytestmark = pytest.mark.sglang

KEYS = page_keys(2)
INDICES = page_indices(PAGE_SIZE, [0, 1])


@pytest.fixture(autouse=True)
def _a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_weights, "updated_to", None)
    monkeypatch.setattr(model_weights, "flushed", True)


def update(flushes: bool) -> None:
    """What SGLang does: our BEFORE hook, the new weights, a flush, and our AFTER hook on that."""
    model_weights.before_update(SimpleNamespace(tp_cpu_group=None))
    model_weights.after_flush(flushes)


def test_pages_of_the_old_weights_are_out_of_reach_after_an_update(open_backend: Callable[..., Any]) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    assert backend.batch_set_v1(KEYS, INDICES) == [True, True]
    update(flushes=True)
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_get_v1(KEYS, INDICES) == [False, False]
    assert backend.batch_set_v1(KEYS, INDICES) == [True, True]
    assert backend.batch_exists(KEYS) == 2


def test_until_the_cache_is_flushed_nothing_is_stored_or_served(open_backend: Callable[..., Any]) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    backend.batch_set_v1(KEYS, INDICES)
    update(flushes=False)
    assert backend.served.suspended
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_set_v1(page_keys(2, "more"), INDICES) == [False, False]
    model_weights.after_flush(False)
    assert backend.served.suspended
    model_weights.after_flush(True)
    assert not backend.served.suspended
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_exists(page_keys(2, "more")) == 0


def test_a_flush_without_an_update_changes_nothing(open_backend: Callable[..., Any]) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    backend.batch_set_v1(KEYS, INDICES)
    model_weights.after_flush(True)
    assert backend.batch_exists(KEYS) == 2


AGREE = """
import sys, torch.distributed as ranks
from hicache_ext.sglang.model_weights import _agreed
ranks.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
print(_agreed(ranks.group.WORLD), _agreed(ranks.group.WORLD))
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_ranks_of_one_launch_agree_on_an_epoch_that_is_never_used_again(tmp_path: Path) -> None:
    """It was made of a variable that two engines of one Python process inherited, and of a count."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", AGREE, str(tmp_path / "meeting"), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=120)[0].split() for process in processes]
    assert told[0] == told[1]
    assert len(set(told[0])) == 2


@pytest.mark.parametrize(
    "call", ["begin_weight_update", "end_weight_update", "update_weights_from_distributed", "update_weights_from_ipc"]
)
def test_an_update_that_fails_or_loads_nothing_itself_counts_as_one(
    open_backend: Callable[..., Any], call: str
) -> None:
    """SGLang reports a flush only where a load went well; a session of P2P writes has none, and half an update, too."""
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    assert backend.batch_set_v1(KEYS, INDICES) == [True, True]
    (hook,) = [hook for hook in HOOKS if hook.target.endswith("." + call)]
    assert hook.kind == "before"
    hook.function(SimpleNamespace(tp_cpu_group=None), SimpleNamespace())
    assert backend.batch_exists(KEYS) == 0
    model_weights.after_flush(True)
    assert backend.batch_exists(KEYS) == 0


@pytest.mark.parametrize(
    ("tags", "backed_up", "changes"),
    [
        (None, False, True),
        (["weights"], False, True),
        (["kv_cache"], False, False),
        (["weights"], True, False),
    ],
)
def test_weights_that_were_given_away_are_not_taken_for_the_same(
    open_backend: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tags: list[str] | None,
    backed_up: bool,
    changes: bool,
) -> None:
    monkeypatch.setattr(model_weights, "resolved_or", lambda *_: backed_up)
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    assert backend.batch_set_v1(KEYS, INDICES) == [True, True]
    model_weights.before_release(SimpleNamespace(tp_cpu_group=None), SimpleNamespace(tags=tags))
    model_weights.after_flush(True)
    assert backend.batch_exists(KEYS) == (0 if changes else 2)


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
    model_weights.after_flush(True)
    assert attached.batch_exists(KEYS) == 0
    assert attached.batch_set_v1(KEYS, INDICES) == [True, True]
    attached.close()
    assert open_backend(host).batch_exists(KEYS) == 2


def test_every_update_is_an_epoch_of_its_own(open_backend: Callable[..., Any]) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    seen = {backend.served.model.weights_epoch}
    for _ in range(3):
        update(flushes=True)
        seen.add(backend.served.model.weights_epoch)
    assert len(seen) == 4


def test_a_decode_nodes_offload_stays_off_since_its_queue_is_not_flushed(open_backend: Callable[..., Any]) -> None:
    backend = open_backend()
    backend.register_mem_pool_host(mha_pools(page_size=PAGE_SIZE).host)
    update(flushes=True)
    assert backend.served.suspended
    assert backend.batch_set_v1(KEYS, INDICES) == [False, False]
