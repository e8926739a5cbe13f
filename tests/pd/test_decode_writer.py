"""The decode writer and our manager, against stand-ins for SGLang's host pools and a pool in memory."""

from __future__ import annotations

import functools
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hicache_ext.testing.sglang_cpu import prepare_process

prepare_process()

from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402

from hicache_ext.config.model import WriteConfig  # noqa: E402
from hicache_ext.pd import decode_writer  # noqa: E402
from hicache_ext.pd.decode_writer import DecodeWriter, PoolWriter  # noqa: E402
from hicache_ext.runtime.metrics import TierMetrics  # noqa: E402
from hicache_ext.sglang.decode_manager import DecodeManager, PageChain  # noqa: E402
from hicache_ext.sglang.model_pools import ModelPools  # noqa: E402
from hicache_ext.storage.contract.store import SetResult  # noqa: E402
from hicache_ext.testing.host_pools import mha_pools  # noqa: E402

PAGE_SIZE = 4


class FakePool:
    """The backend: page key -> the device slots whose KV it got."""

    def __init__(self, host: FakeHostPool) -> None:
        self.pages: dict[str, list[int]] = {}
        self.calls: list[int] = []
        self.result = SetResult.STORED
        self.raises = False
        self._host = host

    def stored(self, keys: list[str], name: str = "kv") -> list[bool]:
        if self.raises:
            raise RuntimeError("a bug")
        return [key in self.pages for key in keys]

    def stored_leading(self, keys: list[str], name: str) -> int:
        known = self.stored(keys)
        return known.index(False) if False in known else len(known)

    def store_pages(self, keys: list[str], host_indices: torch.Tensor, name: str) -> list[SetResult]:
        self.calls.append(len(keys))
        if self.result.durable:
            for key, page in zip(keys, host_indices.reshape(len(keys), PAGE_SIZE).tolist(), strict=True):
                self.pages[key] = [self._host.content[slot] for slot in page]
        return [self.result] * len(keys)


class FakeHostPool:
    def __init__(self, size: int) -> None:
        self.size = size
        self.free_slots = list(range(size))
        self.content: dict[int, int] = {}

    def available_size(self) -> int:
        return len(self.free_slots)

    def alloc(self, count: int) -> torch.Tensor | None:
        if count > len(self.free_slots):
            return None
        taken, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        return torch.tensor(taken, dtype=torch.int64)

    def free(self, indices: torch.Tensor) -> None:
        slots = indices.tolist()
        assert not set(slots) & set(self.free_slots), "freed twice"
        self.free_slots += slots


class FakeController:
    """Copies device slot numbers as content; a copy is done when ``copies_end`` is set."""

    def __init__(self, host: FakeHostPool) -> None:
        self._host = host
        self.device = "cpu"
        self.write_queue: list[Any] = []
        self.ack_write_queue: list[Any] = []
        self.copies_end = True
        self.operations: list[int] = []
        """Copies in each operation."""
        self.raises = False

    def start_writing(self) -> None:
        operations = list(self.write_queue)
        self.write_queue.clear()
        if self.raises:
            raise RuntimeError("a bug")
        for operation in operations:
            for slot, device in zip(operation.host_indices.tolist(), operation.device_indices.tolist(), strict=True):
                self._host.content[slot] = device
        event = SimpleNamespace(query=lambda: self.copies_end, synchronize=lambda: None)
        numbers = [number for operation in operations for number in operation.node_ids]
        self.operations.append(len(numbers))
        self.ack_write_queue.append(SimpleNamespace(finish_event=event, node_ids=numbers))


class FakeRequest:
    def __init__(self, prompt: list[int], slot: int, **custom: Any) -> None:
        self.origin_input_ids = array("q", prompt)
        self.output_ids: list[int] = []
        self.extra_key = None
        self.cache_salt = None
        self.kv = SimpleNamespace(req_pool_idx=slot)
        self.sampling_params = SimpleNamespace(custom_params={"hicache_ext": custom} if custom else None)
        self.finished_reason: Any = None

    def finished(self) -> bool:
        return self.finished_reason is not None


class FakeManager(DecodeManager):
    """Ours over pools that hold no bytes; what it releases is noted."""

    def __init__(self, host_slots: int) -> None:
        # Row r holds device slots 1000 r, 1000 r + 1, ...
        rows = torch.arange(100)[:, None] * 1000 + torch.arange(1000)[None, :]
        host = FakeHostPool(host_slots)
        pools = pools_around(host, FakeController(host))
        super().__init__(pools, SimpleNamespace(req_to_token=rows.to(torch.int32)), None, PAGE_SIZE)
        self.released: list[Any] = []

    def _release(self, request: Any) -> None:
        if request.kv.req_pool_idx is not None:
            self.released.append(request)
            request.kv.req_pool_idx = None


def pools_around(host: Any, controller: Any) -> ModelPools:
    """Those of a model with KV alone."""
    pools = object.__new__(ModelPools)
    pools.host_pools, pools.page_sizes, pools.pools_on = {"kv": host}, {"kv": PAGE_SIZE}, {"kv": ["kv"]}
    pools.controller = controller
    pools.group = SimpleNamespace(
        anchor_entry=SimpleNamespace(name="kv", host_pool=host),
        alloc=lambda count, pool: host.alloc(count),
        free=lambda indices, pool: host.free(indices),
    )
    return pools


class Node:
    """A decode node: the writer, and the scheduler's calls in the scheduler's order."""

    def __init__(
        self,
        host_slots: int = 400,
        minimum: Any = list,
        hints: Any = None,
        stride: int = 8,
        prefix_grace: float = 0.0,
        **settings: Any,
    ) -> None:
        self.manager = FakeManager(host_slots)
        self.host = self.manager.pools.host_pools["kv"]
        self.pool = FakePool(self.host)
        self.metrics = TierMetrics("pd_write")
        self._pool_writer = PoolWriter(self.pool, self.metrics, self.manager.pools.pools_on)
        self.writer = self.manager.writer = DecodeWriter(
            self.manager,
            WriteConfig(**settings),
            self._pool_writer,
            self.metrics,
            minimum=minimum,
            hints=hints,
            stride=stride,
            prefix_grace=prefix_grace,
        )

    def prefilled(self, request: FakeRequest) -> FakeRequest:
        """The prefill node has written the prompt."""
        for key in hashes(list(request.origin_input_ids)):
            self.pool.pages[key] = [-1] * PAGE_SIZE
        return request

    def generate(
        self,
        request: FakeRequest,
        tokens: int,
        *,
        finish: bool = False,
        aborted: bool = False,
        nothing_in_flight: bool = False,
    ) -> None:
        """``nothing_in_flight``: each token comes when the writer's thread has nothing, so that all pages may go."""
        for number in range(tokens):
            request.output_ids.append(number % 90 + 5)
            self.writer.step()
            if nothing_in_flight:
                self.settle(lambda: not self.writer._pages_in_flight)
            if finish and number == tokens - 1:
                request.finished_reason = FINISH_ABORT() if aborted else "length"
                if not self.advanced(request):
                    self.manager.finalize_release_on_finish(request)
            else:
                self.advanced(request)

    def advanced(self, request: FakeRequest) -> bool:
        return self.manager.offload_kv_cache(request)

    def settle(self, until: Callable[[], bool] | None = None) -> None:
        deadline = time.monotonic() + 60
        while not (until or (lambda: idle(self.writer)))():
            assert time.monotonic() < deadline, "the writer never got there"
            self.writer.step()
            time.sleep(0.002)

    def generated_pages(self, request: FakeRequest) -> list[str]:
        """Keys of the whole pages after the prompt whose KV exists."""
        tokens = [*request.origin_input_ids, *request.output_ids[:-1]]
        return hashes(tokens)[len(request.origin_input_ids) // PAGE_SIZE :]


def idle(writer: DecodeWriter) -> bool:
    """Nothing is being copied, queued or written."""
    return not (writer._offload.ongoing_offload or writer._waiting or writer._pages_in_flight)


class FINISH_ABORT:
    pass


def hashes(tokens: list[int]) -> list[str]:
    chain = PageChain(PAGE_SIZE, extra_key=None, cache_salt=None)
    chain.extend(tokens[: len(tokens) // PAGE_SIZE * PAGE_SIZE])
    return chain.hashes(0, len(chain))


@pytest.fixture
def node_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(retries: int = 3, **settings: Any) -> Node:
        monkeypatch.setattr(decode_writer, "_RETRIES", retries)
        nodes.append(Node(**settings))
        return nodes[-1]

    yield make
    for node in nodes:
        assert node.writer.stop(60)


def test_every_whole_page_of_a_continuation_reaches_the_pool_with_its_own_kv(node_of: Callable[..., Node]) -> None:
    node = node_of()
    request = node.prefilled(FakeRequest(list(range(10)), slot=3))
    node.generate(request, 30, finish=True)
    node.settle()
    keys = node.generated_pages(request)
    assert len(keys) == 7  # 10 + 29 tokens are 9 whole pages, 2 of them the prompt's
    for number, key in enumerate(keys, start=2):
        assert node.pool.pages[key] == [3000 + number * PAGE_SIZE + place for place in range(PAGE_SIZE)]
    assert node.host.available_size() == node.host.size
    assert node.manager.released == [request]


class FakeHints:
    def __init__(self) -> None:
        self.announced: list[list[str]] = []

    def announce(self, page_hashes: list[str]) -> None:
        self.announced.append(page_hashes)

    def close(self, timeout: float) -> None:
        pass


def test_a_conversation_is_announced_whole_once_its_last_page_is_written(node_of: Callable[..., Node]) -> None:
    hints = FakeHints()
    node = node_of(hints=hints, retries=0)
    request = node.prefilled(FakeRequest(list(range(10)), slot=3))
    node.generate(request, 25)
    node.settle()
    assert node.pool.calls
    assert hints.announced == []
    node.generate(request, 5, finish=True)
    node.settle()
    tokens = [*request.origin_input_ids, *request.output_ids[:-1]]
    assert hints.announced == [hashes(tokens)]
    # What could not be written, or could not be found, is no promise.
    unfound, refused = FakeRequest([9] * 8, 4), node.prefilled(FakeRequest([8] * 8, 5))
    node.generate(unfound, 30, finish=True)
    node.settle()
    node.pool.result = SetResult.REJECTED
    node.generate(refused, 30, finish=True)
    node.settle()
    assert len(hints.announced) == 1


def test_a_conversation_is_announced_though_its_end_adds_no_page(node_of: Callable[..., Node]) -> None:
    hints = FakeHints()
    node = node_of(hints=hints)
    request = node.prefilled(FakeRequest([7] * 8, 1))
    node.generate(request, 9)
    node.settle()
    assert hints.announced == []
    node.generate(request, 1, finish=True)
    assert hints.announced == [hashes([*request.origin_input_ids, *request.output_ids[:8]])]


def test_what_has_finished_is_written_before_what_still_runs(
    node_of: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_writer, "_PAGES_IN_FLIGHT", 0)
    node = node_of(host_slots=4000)
    runs, ends = (node.prefilled(FakeRequest([slot] * 8, slot)) for slot in (1, 2))
    node.generate(runs, 30)
    node.generate(ends, 10, finish=True)
    node.settle(lambda: not node.manager.ongoing_offload)
    before = len(node.pool.pages)
    monkeypatch.setattr(decode_writer, "_PAGES_IN_FLIGHT", 1)
    node.settle(lambda: len(node.pool.pages) > before)
    assert all(page in node.pool.pages for page in node.generated_pages(ends))
    assert not any(page in node.pool.pages for page in node.generated_pages(runs))
    monkeypatch.setattr(decode_writer, "_PAGES_IN_FLIGHT", 256)
    node.settle()


def test_a_repeat_writes_nothing_again(node_of: Callable[..., Node]) -> None:
    node = node_of()
    for slot in (1, 2):
        node.generate(node.prefilled(FakeRequest([7] * 8, slot)), 30, finish=True)
        node.settle()
    assert sum(node.pool.calls) == 7
    assert node.metrics.value("page", "present") == 7


@pytest.mark.parametrize("trouble", ["none", "one is not stored", "one is refused", "one ends in an error"])
def test_what_waits_while_a_call_lasts_goes_in_the_next_one_and_each_request_has_its_own_end(
    node_of: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    node = node_of(retries=0)
    first, *others = requests = [node.prefilled(FakeRequest([7 + slot] * 8, slot)) for slot in range(1, 5)]
    asked, goes_on, bad = threading.Event(), threading.Event(), set[str]()
    stored, store_pages = node.pool.stored, node.pool.store_pages

    def held(keys: list[str], name: str = "kv") -> list[bool]:
        asked.set()
        assert goes_on.wait(60)
        return stored(keys)

    def store(keys: list[str], host_indices: torch.Tensor, name: str) -> list[SetResult]:
        if trouble == "one ends in an error" and bad.intersection(keys):
            raise RuntimeError("a bug")
        results = store_pages(keys, host_indices, name)
        for key in bad.intersection(keys):
            del node.pool.pages[key]
        ended = SetResult.REFUSED if trouble == "one is refused" else SetResult.REJECTED
        return [ended if key in bad else result for key, result in zip(keys, results, strict=True)]

    monkeypatch.setattr(node.pool, "stored", held)
    monkeypatch.setattr(node.pool, "store_pages", store)
    node.generate(first, 10, finish=True)
    node.settle(asked.is_set)
    for request in others:
        node.generate(request, 10, finish=True)
    node.settle(lambda: node.writer._pages_in_flight == 8)
    if trouble != "none":
        bad |= {*node.generated_pages(others[1])}
    goes_on.set()
    node.settle()
    assert node.pool.calls == ([2, 2, 2] if trouble == "one ends in an error" else [2, 6])
    for request in requests:
        is_there = [page in node.pool.pages for page in node.generated_pages(request)]
        assert is_there == [trouble == "none" or request is not others[1]] * 2
    assert node.metrics.value("lost", "refused" if trouble == "one is refused" else "failed") == 2 * bool(bad)
    assert node.host.available_size() == node.host.size


def test_requests_that_are_due_together_are_copied_in_one_operation(node_of: Callable[..., Node]) -> None:
    node = node_of()
    requests = [node.prefilled(FakeRequest([7 + slot] * 8, slot)) for slot in range(1, 5)]
    for number in range(20):
        for request in requests:
            request.output_ids.append(number + 5)
            node.advanced(request)
        node.writer.step()
    node.settle()
    assert set(node.manager.pools.controller.operations) == {4}
    assert all(page in node.pool.pages for request in requests for page in node.generated_pages(request)[:4])


class BytesPool(FakePool):
    """Keeps the bytes that lie in SGLang's own host pool."""

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self.bytes: dict[str, torch.Tensor] = {}

    def store_pages(self, keys: list[str], host_indices: torch.Tensor, name: str) -> list[SetResult]:
        for key, slots in zip(keys, host_indices.reshape(len(keys), PAGE_SIZE), strict=True):
            self.bytes[key] = self._host.kv_buffer[:, slots].clone()  # type: ignore[attr-defined]
            self.pages[key] = []
        return [SetResult.STORED] * len(keys)


def test_sglangs_own_controller_copies_the_requests_of_a_step_each_to_its_pages(
    node_of: Callable[..., Node],
) -> None:
    pools = mha_pools(page_size=PAGE_SIZE, pages=64)
    for buffer in (*pools.device.k_buffer, *pools.device.v_buffer):
        buffer.copy_(torch.randn(buffer.shape))
    allocator = SimpleNamespace(get_kvcache=lambda: pools.device, set_hicache_transfer_done_event=lambda *_: None)
    controller = HiCacheController(allocator, pools.host, PAGE_SIZE, None, threading.Event(), io_backend="kernel")
    node = node_of()
    node.manager.pools = pools_around(pools.host, controller)
    node.pool = BytesPool(pools.host)
    node._pool_writer._pool = node.pool
    rows = torch.arange(5)[:, None] * 48 + torch.arange(48)[None, :]
    node.manager._req_to_token_pool.req_to_token = rows
    free = pools.host.available_size()
    requests = [node.prefilled(FakeRequest([7 + slot] * 8, slot)) for slot in range(1, 5)]
    for number in range(30):
        for request in requests:
            request.output_ids.append(number + 5)
            if number == 29:
                request.finished_reason = "length"
            node.advanced(request)
        node.writer.step()
    node.settle()
    for slot, request in enumerate(requests, start=1):
        keys = node.generated_pages(request)
        assert len(keys) == 7
        for place, key in enumerate(keys, start=2):
            slots = rows[slot][place * PAGE_SIZE : (place + 1) * PAGE_SIZE]
            for half, layers in enumerate((pools.device.k_buffer, pools.device.v_buffer)):
                for layer, buffer in enumerate(layers):
                    assert torch.equal(node.pool.bytes[key][half, :, layer], buffer[slots])
    assert pools.host.available_size() == free


def test_a_copy_that_is_refused_leaks_nothing_and_keeps_no_request(node_of: Callable[..., Node]) -> None:
    node = node_of()
    request = node.prefilled(FakeRequest([7] * 8, 1))
    node.manager.pools.controller.raises = True
    node.generate(request, 30, finish=True)
    node.settle()
    assert node.manager.released == [request]
    assert node.host.available_size() == node.host.size
    assert not node.pool.calls


@pytest.mark.parametrize("refused", [False, True])
def test_a_release_that_raises_costs_no_host_memory(node_of: Callable[..., Node], refused: bool) -> None:
    node = node_of()
    node.manager.pools.controller.copies_end = False
    request = node.prefilled(FakeRequest([7] * 8, 1))
    node.generate(request, 30, finish=True)
    node.manager.pools.controller.copies_end = True
    node.manager.pools.controller.raises = refused

    def fail(req: Any) -> None:
        raise RuntimeError("a bug of the scheduler's")

    node.manager._release = fail  # type: ignore[method-assign]
    node.manager.check_offload_progress()  # the scheduler's call: it raises nothing
    node.settle()
    assert not node.manager.ongoing_offload
    assert node.host.available_size() == node.host.size


def test_pages_are_written_several_at_a_time(node_of: Callable[..., Node]) -> None:
    node = node_of(stride=32)
    node.generate(node.prefilled(FakeRequest([7] * 8, 1)), 33, finish=True)
    node.settle()
    assert node.pool.calls == [8]


def test_what_opted_out_or_is_too_short_is_not_written(node_of: Callable[..., Node]) -> None:
    node = node_of(min_tokens=20)
    node.generate(node.prefilled(FakeRequest([1] * 8, 1, store=False)), 40, finish=True)
    node.generate(node.prefilled(FakeRequest([2] * 8, 2)), 20, finish=True)
    stored_before = len(node.pool.pages)
    node.settle()
    assert len(node.pool.pages) == stored_before
    assert len(node.manager.released) == 2
    assert node.host.available_size() == node.host.size
    assert node.metrics.value("request", "opted_out") == 1
    assert node.metrics.value("request", "too_short") == 1


def test_an_aborted_request_is_written_up_to_its_abort(node_of: Callable[..., Node]) -> None:
    node = node_of()
    request = node.prefilled(FakeRequest([3] * 8, 3))
    node.generate(request, 14, finish=True, aborted=True)
    node.settle()
    assert all(key in node.pool.pages for key in node.generated_pages(request))


def test_a_continuation_without_its_prompt_is_not_written(node_of: Callable[..., Node]) -> None:
    node = node_of()
    node.generate(FakeRequest([3] * 8, 3), 30, finish=True)
    node.settle()
    assert node.pool.pages == {}
    assert 1 <= node.metrics.value("lost", "prefix_missing") <= 7
    assert node.host.available_size() == node.host.size


def test_a_prompt_that_comes_within_the_grace_is_waited_for(node_of: Callable[..., Node]) -> None:
    node = node_of(prefix_grace=60.0)
    request = FakeRequest([3] * 8, 3)
    node.generate(request, 30, finish=True)
    for _ in range(20):
        node.writer.step()
        time.sleep(0.005)
    assert node.pool.pages == {}
    node.prefilled(request)
    node.settle()
    assert all(key in node.pool.pages for key in node.generated_pages(request))


def test_a_failed_write_is_tried_again_and_then_counted(node_of: Callable[..., Node]) -> None:
    node = node_of(retries=2)
    first = node.prefilled(FakeRequest([1] * 8, 1))
    node.pool.result = SetResult.ERROR
    node.generate(first, 12, finish=True)
    node.settle(lambda: bool(node.pool.calls))
    node.pool.result = SetResult.STORED
    node.settle()
    assert all(key in node.pool.pages for key in node.generated_pages(first))

    node.pool.result = SetResult.TIMEOUT
    node.pool.calls.clear()
    node.generate(node.prefilled(FakeRequest([2] * 8, 2)), 12, finish=True)
    node.settle()
    assert node.pool.calls == [2, 2, 2]
    assert node.metrics.value("lost", "failed") == 2
    assert node.host.available_size() == node.host.size


def test_a_write_that_fails_slowly_keeps_no_host_memory_beyond_the_time_for_retries(
    node_of: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_writer, "_RETRY_WITHIN_MS", 300)
    node = node_of()
    node.pool.result = SetResult.TIMEOUT
    node.generate(node.prefilled(FakeRequest([1] * 8, 1)), 12, finish=True)
    node.settle()
    assert node.pool.calls == [2, 2], "the second retry, half a second later, would be too late"
    assert node.metrics.value("lost", "failed") == 2
    assert node.host.available_size() == node.host.size


def test_what_follows_a_page_that_is_refused_is_not_offered(node_of: Callable[..., Node]) -> None:
    node = node_of(retries=2)
    node.pool.result = SetResult.REFUSED
    request = node.prefilled(FakeRequest([1] * 8, 1))
    node.generate(request, 12)
    node.settle(lambda: node.metrics.value("lost", "refused") > 0)
    node.pool.result = SetResult.STORED

    node.generate(request, 24, finish=True)
    node.settle()

    assert len(node.pool.calls) == 1 and not node.metrics.value("write", "retried")
    assert node.host.available_size() == node.host.size


def test_a_pool_that_raises_ends_nothing(node_of: Callable[..., Node]) -> None:
    node = node_of(retries=0)
    node.pool.raises = True
    node.generate(FakeRequest([1] * 8, 1), 12, finish=True)
    node.settle()
    node.pool.raises = False
    request = node.prefilled(FakeRequest([2] * 8, 2))
    node.generate(request, 12, finish=True)
    node.settle()
    assert all(key in node.pool.pages for key in node.generated_pages(request))
    assert node.host.available_size() == node.host.size


def test_a_full_host_pool_drops_the_oldest_and_never_what_has_a_higher_priority(node_of: Callable[..., Node]) -> None:
    # Nothing leaves the room: the prompts are missing and waited for.
    node = node_of(host_slots=48, prefix_grace=60.0)
    requests = {
        1: FakeRequest([1] * 8, 1),
        2: FakeRequest([2] * 8, 2),
        3: FakeRequest([3] * 8, 3, priority=1),
    }
    node.generate(requests[1], 17, finish=True)  # 16 slots
    time.sleep(0.01)
    node.generate(requests[2], 13, finish=True)  # 12
    node.generate(requests[3], 17, finish=True)  # 16
    node.writer.step()
    node.settle(lambda: not node.writer._pages_in_flight)
    newcomer = FakeRequest([4] * 8, 4)
    node.generate(newcomer, 13, finish=True, nothing_in_flight=True)  # 12, and 4 are free
    node.writer.step()
    for request in (*requests.values(), newcomer):
        node.prefilled(request)
    node.settle()
    written = {
        number for number, r in {**requests, 4: newcomer}.items() if node.generated_pages(r)[0] in node.pool.pages
    }
    assert written == {2, 3, 4}
    assert node.host.available_size() == node.host.size


def test_a_running_request_copies_again_what_was_dropped_of_it(node_of: Callable[..., Node]) -> None:
    node = node_of(host_slots=24, prefix_grace=60.0)
    running, other = FakeRequest([1] * 8, 1), FakeRequest([2] * 8, 2)
    node.generate(running, 17, nothing_in_flight=True)
    node.generate(other, 17, finish=True, nothing_in_flight=True)
    assert node.metrics.value("dropped", "oldest") == 4
    node.prefilled(other)
    node.settle()
    node.prefilled(running)
    node.generate(running, 5, finish=True)
    node.settle()
    assert all(key in node.pool.pages for key in node.generated_pages(running))
    assert node.host.available_size() == node.host.size


def test_a_request_with_more_than_the_host_pool_is_released_and_counted(node_of: Callable[..., Node]) -> None:
    node = node_of(host_slots=8, stride=800)
    request = node.prefilled(FakeRequest([1] * 8, 1))
    node.generate(request, 40, finish=True)
    node.settle()
    assert node.manager.released == [request]
    assert node.metrics.value("lost", "no_host_memory") == 9


def test_device_memory_is_released_once_and_only_after_the_last_copy(node_of: Callable[..., Node]) -> None:
    node = node_of()
    node.manager.pools.controller.copies_end = False
    request = node.prefilled(FakeRequest([1] * 8, 1))
    node.generate(request, 20, finish=True)
    node.writer.step()
    assert node.manager.released == []
    assert node.manager.ongoing_offload
    node.writer.finish_copies()  # retraction waits for them
    assert node.manager.released == [request]
    assert not node.manager.ongoing_offload
    node.settle()
    assert node.manager.released == [request]
    assert node.host.available_size() == node.host.size


class Ranks:
    """Two ranks, each a thread: what they agree on is the minimum of what both say, and both must ask equally often."""

    def __init__(self, node_of: Callable[..., Node], **settings: Any) -> None:
        self._barrier = threading.Barrier(2, timeout=30)
        self._said: dict[int, list[int]] = {}
        self.nodes = [node_of(minimum=functools.partial(self._minimum, rank), **settings) for rank in range(2)]

    def _minimum(self, rank: int, numbers: list[int]) -> list[int]:
        self._said[rank] = numbers
        self._barrier.wait()
        agreed = [min(column) for column in zip(*self._said.values(), strict=True)]
        self._barrier.wait()
        return agreed

    def run(self, schedule: Callable[[Node], None]) -> None:
        """Have both do the same, and then go on until nothing is left to do on either."""

        def rank(number: int) -> None:
            node = self.nodes[number]
            schedule(node)
            deadline = time.monotonic() + 30
            while not self._minimum(number, [idle(node.writer)])[0]:
                assert time.monotonic() < deadline
                node.writer.step()
                time.sleep(0.001)  # the threads that write need the interpreter, too

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(rank, range(2)))


def test_ranks_stay_in_step_whatever_their_own_pools_answer(node_of: Callable[..., Node]) -> None:
    """The worse outcome counts on both ranks, and their memory stays equal."""
    ranks = Ranks(node_of, retries=0)
    good, bad = ranks.nodes
    bad.pool.result = SetResult.ERROR
    ranks.run(lambda node: node.generate(node.prefilled(FakeRequest([1] * 8, 1)), 12, finish=True))
    assert good.metrics.value("lost", "failed") == bad.metrics.value("lost", "failed") == 2
    assert good.host.available_size() == bad.host.available_size() == good.host.size


@pytest.mark.parametrize("retracts", [False, True])
@pytest.mark.parametrize("refuses", ["start", "operation"])
def test_a_copy_that_is_refused_on_one_rank_alone_is_none_on_all(
    node_of: Callable[..., Node], refuses: str, retracts: bool
) -> None:
    """All ranks release a request in the same step, since what they give it to next must be the same memory."""
    ranks = Ranks(node_of)
    steps: list[list[tuple[int, ...]]] = [[], []]

    def schedule(node: Node) -> None:
        rank = ranks.nodes.index(node)
        refused, whole = (node.prefilled(FakeRequest([slot] * 8, slot)) for slot in (1, 2))
        operation = node.manager.pools.operation

        def fail(*_: Any) -> Any:
            raise RuntimeError("out of memory")

        node.manager.pools.controller.copies_end = rank == 1  # those of the other rank are slower
        for number in range(40):
            node.writer.step()
            if number == 38:
                node.manager.pools.controller.copies_end = True
            out_of_memory = rank == 1 and number in (8, 9, 20)
            node.manager.pools.controller.raises = out_of_memory and refuses == "start"
            node.manager.pools.operation = fail if out_of_memory and refuses == "operation" else operation  # type: ignore[method-assign]
            for request, since, until in ((refused, 0, 21), (whole, 11, 36)):
                if not since <= number < until:
                    continue
                request.output_ids.append(number)
                request.finished_reason = "length" if number == until - 1 else None
                if not node.advanced(request) and request.finished():
                    node.manager.finalize_release_on_finish(request)
            if retracts and number == 30:
                node.writer.finish_copies()
            released = [request.origin_input_ids[0] for request in node.manager.released]
            steps[rank].append((node.host.available_size(), *released))

    ranks.run(schedule)
    assert steps[0] == steps[1]
    one, other = ranks.nodes
    assert one.pool.pages == other.pool.pages
    assert sorted(request.origin_input_ids[0] for request in one.manager.released) == [1, 2]
    assert one.host.available_size() == other.host.available_size() == one.host.size
    # Nothing of the first behind the refused copy, all of the second.
    tokens = [2] * 8 + list(range(11, 35))
    assert all(page in one.pool.pages for page in hashes(tokens))
    assert other.metrics.value("lost", "copy_failed") == one.metrics.value("lost", "copy_failed") > 0
