"""What SGLang may rely on whatever happens inside: no exception, the right shape, honest results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_ext.sglang.process import attached_backends
from hicache_ext.sglang.releases import end_registration
from hicache_ext.testing.conformance.storage_backend import PAGE_SIZE, page_keys
from hicache_ext.testing.host_pools import make_storage_config, mha_pools, page_indices
from tests.backend.test_conformance import extra_config

pytestmark = pytest.mark.sglang

KEYS = page_keys(3)


def indices(*pages: int) -> torch.Tensor:
    return page_indices(PAGE_SIZE, list(pages))


class BrokenStore:
    """Raises from every call, as a store with a bug would."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def broken(*_: Any, **__: Any) -> Any:
            raise self.error

        return broken


def transfer(pool_name: Any, keys: list[Any] | None, host_indices: torch.Tensor | None) -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer

    return PoolTransfer(name=pool_name, keys=keys, host_indices=host_indices)


@pytest.mark.parametrize("error", [RuntimeError("bug"), OSError(5, "EIO"), SystemExit(1), MemoryError()], ids=repr)
def test_a_store_that_raises_is_a_miss_of_the_right_shape(
    open_backend: Callable[..., Any], error: BaseException
) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    working, backend._store = backend._store, BrokenStore(error)
    try:
        assert backend.batch_exists(KEYS) == 0
        assert backend.exists(KEYS[0]) is False
        result = backend.batch_exists_v2(KEYS, [transfer(PoolName.KV, None, None)])
        assert (result.kv_hit_pages, result.restorable_prefix_pages) == (0, [])
        assert backend.batch_get_v1(KEYS, indices(0, 1, 2)) == [False] * 3
        assert backend.batch_set_v1(KEYS, indices(0, 1, 2)) == [False] * 3
        moves = [transfer(PoolName.KV, KEYS, indices(0, 1, 2))]
        assert backend.batch_get_v2(moves) == {PoolName.KV: [False] * 3}
        assert backend.batch_set_v2(moves) == {PoolName.KV: [False] * 3}
        assert backend.get(KEYS[0], torch.zeros(4)) is None
        assert backend.batch_get(KEYS, [torch.zeros(4)] * 3) == [None] * 3
        assert backend.set(KEYS[0], torch.zeros(4)) is False
        assert backend.batch_set(KEYS, [torch.zeros(4)] * 3) is False
        assert backend.clear() is False
        assert backend.get_stats() is None
    finally:
        backend._store = working


@pytest.mark.parametrize("length", [1, 7, 8, 9, 40, 128])
def test_of_a_chain_of_any_length_the_pages_that_are_there_are_counted_once(
    open_backend: Callable[..., Any], length: int
) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    chain = page_keys(128)
    pages = 3
    for begin in range(0, length, pages):
        some = chain[begin : min(begin + pages, length)]
        assert all(backend.batch_set_v1(some, indices(*range(len(some)))))
    for _ in range(2):
        # Once as the first question, once after one whose pages were all there.
        assert backend.batch_exists(chain[:length]) == length
    assert backend.batch_exists(chain) == length
    assert backend.batch_exists(chain[:length]) == length
    assert backend.batch_exists(chain[length:]) == 0


@pytest.mark.parametrize(
    ("keys", "host_indices"),
    [
        (KEYS, indices(0, 1)),
        (KEYS, indices(0, 1, 2, 3)),
        (KEYS, torch.zeros(0, dtype=torch.int64)),
        (KEYS, None),
        (KEYS, indices(0, 1, 2) + 1),
        (KEYS, indices(0, 1, 2) - PAGE_SIZE * 10),
        (KEYS, indices(0, 1, 2) + PAGE_SIZE * 1000),
        (KEYS, indices(0, 1, 2).flip(0)),
        (KEYS, "not a tensor"),
        ([None, 1, b"x"], indices(0, 1, 2)),
    ],
    ids=["few", "many", "empty", "none", "unaligned", "negative", "outside", "reversed", "string", "odd keys"],
)
def test_odd_input_is_refused_page_by_page_without_touching_memory(
    open_backend: Callable[..., Any], keys: Any, host_indices: Any
) -> None:
    pool = mha_pools(page_size=PAGE_SIZE).host
    backend = open_backend(pool)
    before = pool.kv_buffer.view(torch.uint8).clone()
    assert backend.batch_set_v1(keys, host_indices) == [False] * 3
    assert backend.batch_get_v1(keys, host_indices) == [False] * 3
    assert backend.batch_exists(KEYS) == 0
    assert torch.equal(pool.kv_buffer.view(torch.uint8), before)


def test_one_unsound_page_does_not_spoil_its_batch(open_backend: Callable[..., Any]) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    host_indices = indices(0, 1, 2)
    host_indices[PAGE_SIZE + 3] += 1
    assert backend.batch_set_v1(KEYS, host_indices) == [True, False, True]
    assert backend.batch_exists(KEYS) == 1


def test_an_unknown_pool_is_a_miss(open_backend: Callable[..., Any]) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    moves = [transfer("never_registered", KEYS, indices(0, 1, 2))]
    assert backend.batch_get_v2(moves) == {"never_registered": [False] * 3}
    assert backend.batch_exists_v2(KEYS, moves).kv_hit_pages == 0


def test_a_transfer_that_fails_does_not_spoil_those_of_other_pools(open_backend: Callable[..., Any]) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    backend.register_mem_host_pool_v2(mha_pools(page_size=PAGE_SIZE).host, "sidecar")
    moves = [transfer("kv", KEYS, indices(0, 1, 2)), transfer("sidecar", [*KEYS[:2], None], indices(0, 1, 2))]
    assert backend.batch_set_v2(moves) == {"kv": [True] * 3, "sidecar": [False] * 3}
    assert backend.batch_get_v2(moves[::-1]) == {"kv": [True] * 3, "sidecar": [False] * 3}


@pytest.mark.parametrize("step", ["_start_features", "_warn_at_start"])
def test_a_start_that_fails_late_closes_all_that_it_has_opened(
    open_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    from hicache_ext.sglang.backend import HiCacheExtBackend

    def fail(*_: Any) -> None:
        raise RuntimeError("late")

    before = {thread.name for thread in threading.enumerate()}, len(attached_backends())
    with monkeypatch.context() as patched:
        patched.setattr(HiCacheExtBackend, step, fail)
        with pytest.raises(RuntimeError, match="late"):
            open_backend()
    assert ({thread.name for thread in threading.enumerate()}, len(attached_backends())) == before
    open_backend().close()


def test_nothing_works_after_close_and_nothing_raises(open_backend: Callable[..., Any]) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    assert all(backend.batch_set_v1(KEYS, indices(0, 1, 2)))
    backend.close()
    backend.close()
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_get_v1(KEYS, indices(0, 1, 2)) == [False] * 3
    assert backend.batch_set_v1(KEYS, indices(0, 1, 2)) == [False] * 3
    assert backend.get(KEYS[0], torch.zeros(4)) is None
    assert backend.clear() is False


def test_a_read_never_writes_after_it_has_returned(open_backend: Callable[..., Any]) -> None:
    pool = mha_pools(page_size=PAGE_SIZE).host
    backend = open_backend(pool)
    backend.batch_set_v1(KEYS, indices(0, 1, 2))
    for _ in range(20):
        backend.batch_get_v1(KEYS, indices(4, 5, 6))
        pool.kv_buffer.view(torch.uint8).zero_()
        time.sleep(0.002)
        assert not pool.kv_buffer.view(torch.uint8).any()


def test_stats_are_deltas_and_free_when_nothing_happened(open_backend: Callable[..., Any]) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    backend.batch_set_v1(KEYS, indices(0, 1, 2))
    backend.batch_get_v1(KEYS, indices(4, 5, 6))
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [3])
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
    assert backend.get_stats() is None


def test_pages_that_are_not_worth_storing_end_no_backup_and_count_as_no_bytes(
    open_backend: Callable[..., Any], tmp_path: Path
) -> None:
    disk = {"type": "file", "path": str(tmp_path / "l3"), "capacity": "64MiB", "io": "buffered", "threads": 1}
    ours = {"tiers": {"disk": {**disk, "write_budget": "1B/day"}}}
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host, ours=ours)

    assert backend.batch_set_v1(KEYS, indices(0, 1, 2)) == [True] * 3

    assert backend.batch_exists(KEYS) == 0
    assert backend.get_stats().backup_bandwidth == []


def test_clear_returns_while_pages_are_still_being_deleted(
    open_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SGLang calls clear() on the scheduler's thread: it must not wait for millions of unlinks."""
    from hicache_ext.storage.tiers.file.pages.directory import PageDirectory

    disk = {"type": "file", "path": str(tmp_path / "pages"), "capacity": "64MiB", "layout": "pages"}
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host, {"tiers": {"disk": disk}})
    backend.batch_set_v1(KEYS, indices(0, 1, 2))
    delete = PageDirectory.delete_detached
    returned = threading.Event()
    told: list[bool] = []

    def late_delete(self: PageDirectory, tree: Any) -> int:
        told.append(returned.wait(60))
        return delete(self, tree)

    monkeypatch.setattr(PageDirectory, "delete_detached", late_delete)
    assert backend.clear() is True
    assert backend.batch_exists(KEYS) == 0
    returned.set()
    backend.close()
    assert told == [True]


# -- whatever SGLang hands over ----------------------------------------------------------------------------------------


class Trap:
    """Raises whatever is asked of it, and names of attributes most of all."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def _raise(self, *_: Any) -> Any:
        raise RuntimeError("trap")

    __len__ = __bool__ = __iter__ = __getitem__ = __index__ = __int__ = __eq__ = __hash__ = _raise


HOSTILE_TENSORS = [
    torch.zeros(0),
    torch.tensor(2**62),
    torch.full((3 * PAGE_SIZE,), 2**63 - 1),
    torch.full((3 * PAGE_SIZE,), -(2**63)),
    torch.full((3 * PAGE_SIZE,), float("nan")),
    indices(0, 1, 2).to(torch.complex64),
    indices(0, 1, 2).view(3, PAGE_SIZE),
    indices(0, 1, 2).to_sparse(),
    torch.zeros(3 * PAGE_SIZE, device="meta"),
    torch.zeros(4, requires_grad=True),
    torch.zeros(1).expand(5),
]
"""None of them is what a call wants: foreign types, devices and lengths, and numbers beyond every pool."""

hostile_values = st.one_of(
    st.sampled_from([None, True, False, 2**63, 2**200, -1, np.int64(3), np.bool_(True), float("inf"), "", b"x"]),
    st.builds(Trap),
    st.sampled_from([*HOSTILE_TENSORS, *KEYS, "\ud800", {}, set(), range(3), np.zeros(3), object()]),
    st.integers(),
)
_transfers = st.builds(
    transfer,
    st.sampled_from(["kv", "sidecar", "none", None, 7, []]) | st.builds(Trap),
    hostile_values | st.lists(hostile_values),
    hostile_values,
)
_nested = st.lists(hostile_values | _transfers | st.lists(hostile_values, max_size=3), max_size=4)
hostile_arguments = st.lists(hostile_values | _nested, max_size=4)


def is_list_for(kind: type) -> Callable[[Any, Any], bool]:
    def is_answer(answer: Any, keys: Any) -> bool:
        sound = isinstance(answer, list) and all(isinstance(one, kind) for one in answer)
        return sound and (not isinstance(keys, list) or len(answer) == len(keys))

    return is_answer


def is_a(*kinds: type) -> Callable[[Any, Any], bool]:
    return lambda answer, _: isinstance(answer, kinds)


def is_answer_to_transfers(answer: Any, transfers: Any) -> bool:
    """Whatever else is in the list, a transfer with a name and keys is answered for each of its keys."""
    asked = {}
    for one in transfers if isinstance(transfers, list) else ():
        if type(one).__name__ == "PoolTransfer" and isinstance(one.name, str):
            asked[one.name] = one.keys
    return isinstance(answer, dict) and all(
        is_list_for(bool)(answer.get(name), keys) for name, keys in asked.items() if isinstance(keys, list)
    )


SHAPES: dict[str, Callable[[Any, Any], bool]] = {
    "batch_exists": is_a(int),
    "batch_exists_v2": lambda answer, _: type(answer).__name__ == "PoolTransferResult",
    "batch_get": is_list_for(object),
    "batch_get_v1": is_list_for(bool),
    "batch_get_v2": is_answer_to_transfers,
    "batch_set": is_a(bool),
    "batch_set_v1": is_list_for(bool),
    "batch_set_v2": is_answer_to_transfers,
    "exists": is_a(bool),
    "get": is_a(torch.Tensor, int, type(None)),
    "set": is_a(bool),
    "read_whole": is_a(bool),
    "write_whole": is_a(bool),
    "stored": is_list_for(bool),
    "stored_leading": is_a(int),
    "store_pages": is_list_for(object),
}
"""What each call of pages answers, whatever it is given."""

OURS = {"declare_failures", "distrust", "export_also", "report_failure"} | {
    "note_tenant",
    "take_hints",
    "warn_of_sizes",
}
GENERIC = {"batch_get", "batch_set", "exists", "get", "set"}
"""They can have no trouble of their own: what they answer is always the same, or what another call answers."""
AT_START = {"register_mem_pool_host", "register_mem_host_pool_v2", "on_host_pools_registered"}
"""These may raise: SGLang then does not start. Not each release has all of them."""


def public_calls(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}


def test_each_call_of_sglang_is_guarded() -> None:
    from hicache_ext.sglang.backend import HiCacheExtBackend
    from hicache_ext.sglang.lifecycle import guarded_calls

    without_arguments = {"clear", "close", "get_stats"}
    assert set(guarded_calls(HiCacheExtBackend)) - {"_move_transfer"} == (SHAPES.keys() - GENERIC) | without_arguments
    assert public_calls(HiCacheExtBackend) - set(guarded_calls(HiCacheExtBackend)) - AT_START == OURS | GENERIC


@pytest.mark.parametrize("call", SHAPES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(arguments=hostile_arguments)
def test_no_argument_makes_a_call_raise_or_answer_in_another_shape(
    hostile_backend: Any, call: str, arguments: list[Any]
) -> None:
    answer = getattr(hostile_backend, call)(*arguments)
    assert SHAPES[call](answer, arguments[0] if arguments else None), answer


@pytest.fixture(scope="module")
def hostile_backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from hicache_ext.sglang.backend import HiCacheExtBackend

    extra = extra_config(tmp_path_factory.mktemp("hostile") / "l3")
    backend = HiCacheExtBackend(make_storage_config(extra_config=extra), {})
    backend.register_mem_pool_host(mha_pools(page_size=PAGE_SIZE).host)
    backend.register_mem_host_pool_v2(mha_pools(page_size=PAGE_SIZE).host, "sidecar")
    end_registration(backend)
    yield backend
    backend.close()


def test_entries_that_are_no_transfers_do_not_spoil_the_others_and_are_counted(
    open_backend: Callable[..., Any],
) -> None:
    backend = open_backend(mha_pools(page_size=PAGE_SIZE).host)
    sound = transfer("kv", KEYS, indices(0, 1, 2))
    assert backend.batch_set_v2([None, sound, 7]) == {"kv": [True] * 3}
    assert backend.batch_get_v2([sound, None]) == {"kv": [True] * 3}
    assert backend.batch_get_v2([None]) == {}
    assert backend._failures.value("failure", "_move_transfer") == 4
