"""The external linker over stores that fail, hang and lie dead: a request is computed, and nobody waits twice."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_ext.sglang.releases import comes_with, installed_release
from tests.backend import linker_rig as rig
from tests.backend.test_contracts import hostile_arguments, hostile_values, public_calls
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not comes_with(installed_release(), "0.5.23"), reason="SGLang has no linker of others"),
]

SLACK = 5.0
"""Seconds that a call may take beyond its deadline on a busy machine."""

ONE_OF_TWO = {"tp_rank": 1, "tp_size": 2, "attn_tp_rank": 1, "attn_tp_size": 2, "moe_tp_size": 2}
"""The second rank of two."""

Open = Callable[..., Any]


@pytest.fixture
def stores() -> Iterator[list[rig.TroubledStore]]:
    with rig.troubled_stores() as opened:
        yield opened


@pytest.fixture
def open_linker(tmp_path: Path, stores: list[rig.TroubledStore]) -> Iterator[Open]:
    opened: list[Any] = []
    with rig.server_context():

        def open_(device: rig.Device, **linker: Any) -> Any:
            ours = {"linker": {"staging": "1MiB", "load_timeout": 0.3, **linker}}
            opened.append(rig.linker_of(device, rig.extra_config(tmp_path / "l3", **ours)))
            return opened[-1]

        yield open_
        for store in stores:
            store.mode = "well"
        for linker in opened:
            linker.close()


def prepared(open_linker: Open, count: int = 4, **linker: Any) -> tuple[rig.Device, Any, list[str]]:
    """A device whose pages 1 to ``count`` are stored."""
    device = rig.mha_device()
    device.fill()
    opened, keys = open_linker(device, **linker), rig.hashes(count)
    assert opened.offload([rig.pages(device, "kv", keys, list(range(1, count + 1)))])
    assert rig.stored(opened)
    return device, opened, keys


@pytest.mark.parametrize("mode", ["fail", "raise"])
def test_what_cannot_be_read_is_computed_and_writes_nothing(
    mode: str, open_linker: Open, stores: list[rig.TroubledStore]
) -> None:
    device, linker, keys = prepared(open_linker)
    before = device.content("kv", list(range(rig.PAGES)))
    stores[0].mode = mode
    assert rig.waited(linker, "r", [rig.transfer("kv", keys)]) == []
    assert not linker.load("r", [rig.pages(device, "kv", keys, [20, 21, 22, 23])])
    assert linker.start_layer_wise_loading() == -1
    assert device.content("kv", list(range(rig.PAGES))) == before
    assert rig.staging_in_use(linker) == 0


def test_a_read_that_comes_back_too_late_writes_nothing(open_linker: Open, stores: list[rig.TroubledStore]) -> None:
    device, linker, keys = prepared(open_linker)
    before = device.content("kv", list(range(rig.PAGES)))
    stores[0].mode = "hang"
    assert rig.waited(linker, "late", [rig.transfer("kv", keys)]) == []
    assert not linker.load("late", [rig.pages(device, "kv", keys, [20, 21, 22, 23])])
    assert rig.staging_in_use(linker) == len(keys), "the read still has its memory"
    stores[0].mode = "well"
    wait_until(lambda: rig.staging_in_use(linker) == 0)
    assert device.content("kv", list(range(rig.PAGES))) == before
    wait_until(lambda: not linker._threads.left_behind)
    assert rig.waited(linker, "again", [rig.transfer("kv", keys)]) == [1, 2, 3, 4]
    assert rig.loaded(linker, "again", [rig.pages(device, "kv", keys, [20, 21, 22, 23])])
    assert device.content("kv", [20, 21, 22, 23]) == device.content("kv", [1, 2, 3, 4])


def test_a_batch_goes_on_beside_a_read_that_hangs(open_linker: Open, stores: list[rig.TroubledStore]) -> None:
    device, linker, keys = prepared(open_linker, load_timeout="60s")
    assert rig.waited(linker, "good", [rig.transfer("kv", keys)])
    assert linker.load("good", [rig.pages(device, "kv", keys, [20, 21, 22, 23])])
    stores[0].mode = "hang"
    hangs = rig.Waiting(linker, "hangs", rig.transfer("kv", keys))
    reads = stores[0].reads
    assert linker.requests_to_hold([hangs], None) == {"hangs"}
    wait_until(lambda: stores[0].reads > reads)
    assert rig.forward(linker, linker.start_layer_wise_loading())
    assert device.content("kv", [20, 21, 22, 23]) == device.content("kv", [1, 2, 3, 4])


def test_offloads_are_answered_in_order_and_whole_or_not_at_all(
    open_linker: Open, stores: list[rig.TroubledStore]
) -> None:
    device = rig.swa_device()
    device.fill()
    linker, keys = open_linker(device), rig.hashes(8)
    written = []
    original = linker._backend.write_whole

    def one_pool_fails(pool: Any, names: list[str], indices: Any) -> bool:
        written.append(pool.name)
        return pool.name != "swa" and original(pool, names, indices)

    linker._backend.write_whole = one_pool_fails
    assert linker.offload([rig.pages(device, "kv", keys[:4], [1, 2, 3, 4])])
    assert linker.offload([rig.pages(device, "kv", keys, list(range(1, 9))), rig.pages(device, "swa", keys[7:], [9])])
    assert [rig.stored(linker), rig.stored(linker)] == [True, False]
    # The pools beside come first: where KV is found, they are there.
    assert written == ["kv", "swa"]


def test_a_hanging_store_makes_offloads_refused_at_once(open_linker: Open, stores: list[rig.TroubledStore]) -> None:
    device = rig.mha_device()
    device.fill()
    linker, keys = open_linker(device), rig.hashes(80)
    stores[0].mode = "hang"
    begun = time.monotonic()
    taken = [
        linker.offload([rig.pages(device, "kv", keys[first : first + 8], list(range(first, first + 8)))])
        for first in range(0, 80, 8)
    ]
    assert time.monotonic() - begun < SLACK
    assert taken == sorted(taken, reverse=True)
    assert taken[0]
    assert not taken[-1]
    assert linker._metrics.value("offload", "full") == taken.count(False)
    stores[0].mode = "well"
    assert all(rig.stored(linker) for _ in range(taken.count(True)))
    assert linker.offload([rig.pages(device, "kv", keys[:8], list(range(8)))])
    assert rig.stored(linker)


def test_a_flush_does_not_wait_for_a_hanging_store(open_linker: Open, stores: list[rig.TroubledStore]) -> None:
    device = rig.mha_device()
    linker = open_linker(device)
    stores[0].mode = "hang"
    assert linker.offload([rig.pages(device, "kv", rig.hashes(40), list(range(40)))])
    begun = time.monotonic()
    linker.reset()
    assert time.monotonic() - begun < SLACK
    assert linker.num_completed_offloads() == 0
    stores[0].mode = "well"
    wait_until(lambda: rig.staging_in_use(linker) == 0)
    assert linker.num_completed_offloads() == 0
    # What was handed over before answers nothing any more.
    assert linker.offload([rig.pages(device, "kv", rig.hashes(3, 50), [1, 2, 3])])
    assert rig.stored(linker)
    assert linker.num_completed_offloads() == 0


def test_from_the_end_of_a_flush_on_the_device_is_not_read(open_linker: Open) -> None:
    device = rig.mha_device()
    linker = open_linker(device)
    begun, ended, original = threading.Event(), [], linker._staging.gather

    def slow_gather(portion: Any) -> None:
        begun.set()
        time.sleep(0.2)
        original(portion)
        ended.append(time.monotonic())

    linker._staging.gather = slow_gather
    assert linker.offload([rig.pages(device, "kv", rig.hashes(40), list(range(40)))])
    assert begun.wait(20)
    linker.reset()
    flushed, copies = time.monotonic(), len(ended)
    assert copies
    assert max(ended) <= flushed
    time.sleep(0.5)
    # The other portions of the call stay where they are.
    assert len(ended) == copies
    assert rig.staging_in_use(linker) == 0


def test_a_close_ends_although_the_store_hangs(
    open_linker: Open, stores: list[rig.TroubledStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_ext.sglang.linker._CLOSE_WAIT", 0.2)
    device = rig.mha_device()
    linker = open_linker(device)
    stores[0].mode = "hang"
    assert linker.offload([rig.pages(device, "kv", rig.hashes(4), [1, 2, 3, 4])])
    wait_until(lambda: rig.staging_in_use(linker) > 0)
    # The backend waits for its tiers as it does behind HiCache.
    closing = threading.Thread(target=linker.close)
    closing.start()
    closing.join(0.2 * 2 + SLACK)
    stores[0].mode = "well"
    closing.join(30)
    assert not closing.is_alive()


def test_a_rank_that_writes_nothing_of_a_replicated_model_is_done_at_once(tmp_path: Path) -> None:
    device = rig.mla_device()
    with rig.server_context(**ONE_OF_TWO), rig.troubled_stores() as stores:
        linker = rig.linker_of(device, rig.extra_config(tmp_path / "l3"))
        try:
            stores[0].mode = "hang"
            assert linker.offload([rig.pages(device, "kv", rig.hashes(4), [1, 2, 3, 4])])
            assert linker.num_completed_offloads() == 1
            assert linker.pop_completed_offload()
        finally:
            stores[0].mode = "well"
            linker.close()
        assert not [file for file in (tmp_path / "l3").rglob("*") if file.suffix in (".page", ".pack")]


def test_nothing_is_stored_or_served_while_the_weights_are_of_another_epoch(open_linker: Open) -> None:
    device, linker, keys = prepared(open_linker)
    linker._backend.served.suspended = True
    assert rig.waited(linker, "r", [rig.transfer("kv", keys)]) == []
    assert not linker.load("r", [rig.pages(device, "kv", keys, [20, 21, 22, 23])])
    # Taken and answered as failed: the ranks of a deployment learn of an update one after the other.
    assert linker.offload([rig.pages(device, "kv", keys, [1, 2, 3, 4])])
    assert not rig.stored(linker)
    linker._backend.served.suspended = False
    assert rig.waited(linker, "other", [rig.transfer("kv", keys)]) == [1, 2, 3, 4]


def test_pages_handed_over_before_an_update_never_get_the_identity_after_it(
    open_linker: Open, stores: list[rig.TroubledStore]
) -> None:
    device = rig.mha_device()
    linker, keys = open_linker(device), rig.hashes(4)
    stores[0].mode = "hang"
    assert linker.offload([rig.pages(device, "kv", keys, [1, 2, 3, 4])])
    linker._backend.served.advance_weights_epoch("next")
    stores[0].mode = "well"
    assert rig.stored(linker)
    assert rig.waited(linker, "r", [rig.transfer("kv", keys)]) == []


_RANK = """
import sys
from types import SimpleNamespace
import torch.distributed as ranks
from hicache_ext.testing.sglang_cpu import prepare_process
prepare_process()
from hicache_ext.sglang.linker import agreed
rank, path = int(sys.argv[1]), sys.argv[2]
ranks.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
params = SimpleNamespace(tp_cache_group=ranks.group.WORLD, attn_tp_cache_group=None, attn_cp_cache_group=None)
print(agreed(params, [True, rank == 0, False]))
"""


@pytest.mark.slow
def test_a_load_that_one_rank_cannot_read_is_computed_on_all(tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), str(tmp_path / "meeting")], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    assert [one.communicate(timeout=120)[0].strip() for one in started] == ["[True, False, False]"] * 2


SHAPES = {
    "lookup": list,
    "load": bool,
    "start_layer_wise_loading": int,
    "finish_layer_wise_loading": bool,
    "cancel_queued_load": bool,
    "offload": bool,
    "num_completed_offloads": int,
    "pop_completed_offload": bool,
    "requests_to_hold": set,
    "nap": type(None),
}
"""What each call of SGLang's scheduler answers, whatever it is given."""


def _device_transfer(pool: Any, keys: Any, indices: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer

    return PoolTransfer(pool, keys=keys, device_indices=indices)


_odd_indices = st.sampled_from([rig.indices_of(rig.PAGE, [number]) for number in (1, rig.PAGES * 9, -9)])
_odd_transfers = st.lists(
    st.builds(_device_transfer, st.just("kv") | hostile_values, st.lists(hostile_values, max_size=2), _odd_indices)
    | hostile_values,
    max_size=3,
)
_calls = st.lists(
    st.tuples(
        st.sampled_from(sorted(SHAPES)),
        hostile_arguments
        | st.tuples(_odd_transfers)
        | st.tuples(st.just("r") | hostile_values, _odd_transfers)
        | st.tuples(st.integers(), hostile_values),
    ),
    min_size=5,
    max_size=20,
)


def test_each_call_of_sglang_is_guarded() -> None:
    from hicache_ext.sglang.lifecycle import guarded_calls
    from hicache_ext.sglang.linker import HiCacheExtLinker

    unguarded = public_calls(HiCacheExtLinker) - set(guarded_calls(HiCacheExtLinker))
    assert unguarded == {"record_offload_ready", "report_failure"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
@given(calls=_calls)
def test_no_argument_makes_a_call_raise_or_answer_in_another_shape(
    linker_of_many_examples: Any, calls: list[tuple[str, Any]]
) -> None:
    linker = linker_of_many_examples
    for name, arguments in calls:
        answer = getattr(linker, name)(*arguments)
        assert isinstance(answer, SHAPES[name]), (name, answer)
    linker.reset()
    assert linker._staging.pages_in_use("load") == 0


@pytest.fixture
def linker_of_many_examples(open_linker: Open) -> Any:
    return open_linker(rig.mha_device())


def test_a_request_whose_id_is_none_of_sglangs_is_computed(open_linker: Open) -> None:
    device, linker, keys = prepared(open_linker)
    for rid in (["r"], None, {}):
        assert linker.load(rid, [None, rig.pages(device, "kv", keys, [20, 21, 22, 23])]) is False
    assert rig.staging_in_use(linker) == 0
