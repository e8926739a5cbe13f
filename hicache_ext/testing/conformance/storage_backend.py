"""Tests of what SGLang relies on in a storage backend. For any HiCacheStorage, ours or another.

A backend's test file:

    class TestMyBackend(StorageBackendTests):
        def open_backend(self, directory, storage_config):
            return MyBackend(storage_config, directory)

The suite drives the backend as SGLang's controller does, over SGLang's real host pools: zero-copy calls
(``batch_get_v1``/``batch_set_v1``), or, with ``zero_copy = False``, pages copied to flat tensors and the generic calls.
Tests of damage need ``stored_files``; without it they are skipped with that reason.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache_ext.sglang.releases import end_registration
from hicache_ext.storage.contract.base import leading
from hicache_ext.testing.conformance.pages import in_threads
from hicache_ext.testing.host_pools import Pools, make_storage_config, mha_pools, page_indices
from hicache_ext.testing.sglang_cpu import prepare_process

PAGE_SIZE = 16
"""Tokens."""
PAGES = 16
"""Pages of the host pool, besides the one that SGLang adds."""


def page_keys(count: int, chain: str = "a") -> list[str]:
    """Keys as SGLang makes them: a chain of SHA-256 in hex."""
    keys: list[str] = []
    previous = chain.encode()
    for _ in range(count):
        previous = hashlib.sha256(previous).digest()
        keys.append(previous.hex())
    return keys


class Driver:
    """One backend with one host pool, driven as SGLang's controller drives it."""

    def __init__(self, backend: Any, pools: Pools, zero_copy: bool) -> None:
        self.backend = backend
        self.pools = pools
        self.zero_copy = zero_copy
        from sglang.srt.mem_cache.hicache_storage import PoolName

        backend.register_mem_pool_host(pools.host)
        backend.register_mem_host_pool_v2(pools.host, PoolName.KV)
        end_registration(backend)

    def write(self, keys: Sequence[str], pages: Sequence[int]) -> bool:
        """Back up host pages under keys; what SGLang takes for success."""
        if self.zero_copy:
            return all(self.backend.batch_set_v1(list(keys), page_indices(PAGE_SIZE, list(pages)), None))
        data = [self.pools.host.get_data_page(page * PAGE_SIZE) for page in pages]
        return bool(self.backend.batch_set(list(keys), data))

    def read(self, keys: Sequence[str], pages: Sequence[int]) -> int:
        """Fetch keys into host pages; the leading pages SGLang would count."""
        if self.zero_copy:
            results = self.backend.batch_get_v1(list(keys), page_indices(PAGE_SIZE, list(pages)), None)
            assert len(results) == len(keys)
            return leading([bool(result) for result in results])
        targets = [self.pools.host.get_dummy_flat_data_page() for _ in keys]
        found = self.backend.batch_get(list(keys), targets)
        assert len(found) == len(keys)
        count = leading([data is not None for data in found])
        for page, data in zip(pages[:count], found[:count], strict=True):
            self.pools.host.set_from_flat_data_page(page * PAGE_SIZE, data)
        return count

    def content(self, page: int) -> bytes:
        """The bytes of a host page."""
        data = self.pools.host.get_data_page(page * PAGE_SIZE).contiguous().view(torch.uint8)
        return bytes(data.numpy().tobytes())

    def wipe(self) -> None:
        """Zeros in every host page."""
        self.pools.host.kv_buffer.view(torch.uint8).zero_()


class StorageBackendTests:
    """Inherit and fill in ``open_backend``; the rest has defaults."""

    zero_copy = True
    """False: pages are copied to flat tensors and given to the generic calls."""

    kv_dtype: str | None = None
    """The server's ``--kv-cache-dtype`` when a test uses fp8 pools, which SGLang keeps as uint8."""

    def open_backend(self, directory: Path, storage_config: Any) -> Any:
        """A backend that keeps its pages under ``directory`` (or a namespace derived from it)."""
        raise NotImplementedError

    def stored_files(self, directory: Path) -> list[Path]:
        """The files that hold stored pages, for the tests of damage."""
        pytest.skip("this backend's stored pages cannot be reached: stored_files() is not given")

    @pytest.fixture
    def drive(self, tmp_path: Path) -> Iterator[Callable[..., Driver]]:
        """Opens backends over one directory, and closes them at the end."""
        prepare_process()
        opened: list[Any] = []

        def drive(pools: Pools | None = None, **storage_config: Any) -> Driver:
            backend = self.open_backend(tmp_path / "store", make_storage_config(**storage_config))
            opened.append(backend)
            return Driver(backend, pools or mha_pools(page_size=PAGE_SIZE, pages=PAGES), self.zero_copy)

        yield drive
        for backend in opened:
            if hasattr(backend, "close"):
                backend.close()

    # -- pages come back ------------------------------------------------------------------------------------------

    def test_written_pages_are_read_back_into_other_host_pages(self, drive: Callable[..., Driver]) -> None:
        driver = drive()
        keys, before = page_keys(4), [driver.content(page) for page in (3, 9, 1, 7)]
        assert driver.write(keys, (3, 9, 1, 7))
        driver.wipe()
        assert driver.read(keys, (0, 2, 4, 6)) == 4
        assert [driver.content(page) for page in (0, 2, 4, 6)] == before

    def test_pages_survive_a_new_backend(self, drive: Callable[..., Driver]) -> None:
        first = drive()
        keys, before = page_keys(2), [first.content(0), first.content(1)]
        assert first.write(keys, (0, 1))
        second = drive()
        second.wipe()
        assert second.backend.batch_exists(keys) == 2
        assert second.read(keys, (5, 6)) == 2
        assert [second.content(5), second.content(6)] == before

    def test_reading_touches_no_other_page(self, drive: Callable[..., Driver]) -> None:
        driver = drive()
        keys = page_keys(2)
        driver.write(keys, (0, 1))
        untouched = {page: driver.content(page) for page in range(PAGES) if page not in (4, 5)}
        driver.read(keys, (4, 5))
        assert {page: driver.content(page) for page in untouched} == untouched

    def test_the_first_writer_wins(self, drive: Callable[..., Driver]) -> None:
        driver = drive()
        keys, first = page_keys(1), driver.content(0)
        assert driver.write(keys, (0,))
        assert driver.write(keys, (1,))
        driver.wipe()
        assert driver.read(keys, (2,)) == 1
        assert driver.content(2) == first

    # -- answers have the shape SGLang counts on --------------------------------------------------------------------

    def test_only_the_leading_run_counts_and_is_read(self, drive: Callable[..., Driver]) -> None:
        driver = drive()
        keys = page_keys(6)
        assert driver.read(keys[:3], (0, 1, 2)) == 0
        driver.write(keys[:2], (0, 1))
        driver.write(keys[3:5], (3, 4))
        for first, run in ((0, 2), (3, 2), (2, 0), (6, 0)):
            assert driver.backend.batch_exists(keys[first:]) == run
        assert driver.backend.batch_exists(keys[:1]) == 1
        assert driver.read(keys[:4], (4, 5, 6, 7)) == 2

    def test_too_few_indices_store_nothing(self, drive: Callable[..., Driver]) -> None:
        if not self.zero_copy:
            pytest.skip("only the zero-copy calls take indices")
        driver = drive()
        keys = page_keys(2)
        assert driver.backend.batch_set_v1(keys, page_indices(PAGE_SIZE, [0]), None) == [False, False]
        assert driver.backend.batch_exists(keys) == 0

    def test_stats_are_nothing_or_storage_metrics(self, drive: Callable[..., Driver]) -> None:
        from sglang.srt.observability.metrics_collector import StorageMetrics

        driver = drive(enable_storage_metrics=True)
        driver.write(page_keys(2), (0, 1))
        driver.read(page_keys(2), (2, 3))
        for _ in range(3):
            stats = driver.backend.get_stats()
            assert stats is None or isinstance(stats, StorageMetrics)

    def test_a_prefix_with_its_sidecar_missing_is_not_restorable(self, drive: Callable[..., Driver]) -> None:
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

        driver = drive()
        sidecar = mha_pools(page_size=PAGE_SIZE, pages=PAGES, layers=1)
        driver.backend.register_mem_host_pool_v2(sidecar.host, PoolName.INDEXER)
        keys = page_keys(4)
        driver.write(keys, (0, 1, 2, 3))
        written = PoolTransfer(name=PoolName.INDEXER, keys=keys[:2], host_indices=page_indices(PAGE_SIZE, [0, 1]))
        assert driver.backend.batch_set_v2([written])[PoolName.INDEXER] == [True, True]
        asked = PoolTransfer(name=PoolName.INDEXER)
        result = driver.backend.batch_exists_v2(keys, [asked])
        assert result.kv_hit_pages == 2
        assert result.restorable_prefix_pages == [1, 2]
        assert result.extra_pool_hit_pages[PoolName.KV] == 4

    def test_a_trailing_pool_is_restorable_only_where_its_window_is_whole(self, drive: Callable[..., Driver]) -> None:
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

        driver = drive()
        sidecar = mha_pools(page_size=PAGE_SIZE, pages=PAGES, layers=1)
        driver.backend.register_mem_host_pool_v2(sidecar.host, PoolName.SWA)
        keys = page_keys(6)
        driver.write(keys, range(6))
        for window in ((1, 2), (4,)):
            driver.backend.batch_set_v2(
                [
                    PoolTransfer(
                        name=PoolName.SWA,
                        keys=[keys[page] for page in window],
                        host_indices=page_indices(PAGE_SIZE, list(window)),
                    )
                ]
            )
        asked = PoolTransfer(name=PoolName.SWA, keys=keys[-2:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        result = driver.backend.batch_exists_v2(keys, [asked])
        # Pages 1 and 2 are there, so a prefix of three pages has its window; page 4 alone is half a window.
        assert result.restorable_prefix_pages == [3]
        assert result.kv_hit_pages == 3

    # -- other deployments ------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("mine", "theirs"),
        [
            ({"tp_rank": 0, "tp_size": 2}, {"tp_rank": 1, "tp_size": 2}),
            ({"tp_rank": 0, "tp_size": 2}, {"tp_rank": 0, "tp_size": 4}),
            ({"pp_rank": 0, "pp_size": 2}, {"pp_rank": 1, "pp_size": 2}),
            ({"attn_cp_rank": 0, "attn_cp_size": 2}, {"attn_cp_rank": 1, "attn_cp_size": 2}),
            ({"model_name": "a"}, {"model_name": "b"}),
        ],
        ids=["tp ranks", "tp sizes", "pp ranks", "cp ranks", "models"],
    )
    def test_shards_and_models_never_meet(
        self, drive: Callable[..., Driver], mine: dict[str, Any], theirs: dict[str, Any]
    ) -> None:
        keys = page_keys(2)
        assert drive(**mine).write(keys, (0, 1))
        other = drive(**theirs)
        assert other.backend.batch_exists(keys) == 0
        assert other.read(keys, (0, 1)) == 0

    @pytest.mark.parametrize(
        "other",
        [
            {"dtype": torch.float16},
            {"dtype": torch.float8_e4m3fn, "head_dim": 64, "kv_dtype": "fp8_e4m3"},
            {"layout": "page_first_direct"},
            {"layout": "layer_first"},
            {"heads": 4, "head_dim": 16},
        ],
        ids=["float16", "fp8", "page_first_direct", "layer_first", "other heads"],
    )
    def test_pools_of_equal_size_and_other_meaning_never_meet(
        self, drive: Callable[..., Driver], other: dict[str, Any]
    ) -> None:
        keys = page_keys(2)
        assert drive().write(keys, (0, 1))
        geometry = dict(other)
        self.kv_dtype = geometry.pop("kv_dtype", None)
        stranger = drive(pools=mha_pools(page_size=PAGE_SIZE, pages=PAGES, **geometry))
        assert stranger.backend.batch_exists(keys) == 0
        assert stranger.read(keys, (0, 1)) == 0

    def test_clear_leaves_other_models_and_strangers_files_alone(
        self, drive: Callable[..., Driver], tmp_path: Path
    ) -> None:
        keys = page_keys(2)
        mine, theirs = drive(model_name="a"), drive(model_name="b")
        assert mine.write(keys, (0, 1)) and theirs.write(keys, (0, 1))
        strangers = tmp_path / "store" / "precious.txt"
        strangers.write_text("keep me")
        mine.backend.clear()
        assert mine.backend.batch_exists(keys) == 0
        assert theirs.backend.batch_exists(keys) == 2
        assert strangers.read_text() == "keep me"

    def test_ranks_may_start_at_the_same_moment(self, drive: Callable[..., Driver], tmp_path: Path) -> None:
        barrier = threading.Barrier(4)

        def start(rank: int) -> None:
            barrier.wait()
            backend = self.open_backend(tmp_path / "together", make_storage_config(tp_rank=rank, tp_size=4))
            if hasattr(backend, "close"):
                backend.close()

        in_threads(*[partial(start, rank) for rank in range(4)])

    # -- damage -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: data[:-1],
            lambda data: data[: len(data) // 2],
            lambda data: b"",
            lambda data: data + b"\0",
            lambda data: _flip(data, len(data) // 2),
            lambda data: _flip(data, len(data) - 1),
            lambda data: bytes(len(data)),
        ],
        ids=["one byte short", "half", "empty", "longer", "bit flipped", "last bit flipped", "zeros"],
    )
    def test_a_damaged_page_is_a_miss_and_its_key_works_again(
        self, drive: Callable[..., Driver], tmp_path: Path, damage: Callable[[bytes], bytes]
    ) -> None:
        driver = drive()
        keys, content = page_keys(1), driver.content(0)
        driver.write(keys, (0,))
        files = self.stored_files(tmp_path / "store")
        assert files
        for file in files:
            file.write_bytes(damage(file.read_bytes()))
        assert driver.read(keys, (1,)) == 0
        assert driver.write(keys, (0,))
        driver.wipe()
        assert driver.read(keys, (2,)) == 1
        assert driver.content(2) == content

    def test_a_page_under_another_key_is_a_miss(self, drive: Callable[..., Driver], tmp_path: Path) -> None:
        driver = drive()
        keys = page_keys(2)
        driver.write(keys[:1], (0,))
        (first,) = self.stored_files(tmp_path / "store")
        original = first.read_bytes()
        driver.write(keys[1:], (1,))
        (second,) = [file for file in self.stored_files(tmp_path / "store") if file != first]
        second.write_bytes(original)
        assert driver.read(keys[1:], (2,)) == 0

    # -- threads ----------------------------------------------------------------------------------------------------

    def test_threads_may_call_at_the_same_time(self, drive: Callable[..., Driver]) -> None:
        driver = drive()
        expected = {page: driver.content(page) for page in range(8)}
        keys = {page: page_keys(1, chain=f"thread {page}") for page in range(8)}

        def work(page: int) -> None:
            for _ in range(20):
                assert driver.write(keys[page], (page,))
                assert driver.read(keys[page], (8 + page,)) == 1
                assert driver.content(8 + page) == expected[page]
                driver.backend.batch_exists(keys[page])
                driver.backend.get_stats()

        in_threads(*[partial(work, page) for page in range(8)])


def _flip(data: bytes, position: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 1
    return bytes(changed)
