"""What can be seen without a cluster: a recording client in the library's place."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_ext.errors import StoreClosedError, StoreSetupError
from hicache_ext.page.memory import address_of
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.tiers.mooncake import engine as attachment_module
from hicache_ext.storage.tiers.mooncake import holders as holders_module
from hicache_ext.storage.tiers.mooncake import pages as pages_module
from hicache_ext.storage.tiers.mooncake.config import MooncakeTierConfig
from hicache_ext.storage.tiers.mooncake.engine import (
    HEADER_LENGTH,
    PIECE_BYTES,
    PIECES,
    SCRATCH_BYTES,
    Attachment,
    environment,
    portions,
)
from hicache_ext.storage.tiers.mooncake.pages import MooncakeStore
from hicache_ext.testing.conformance.pages import IDENTITY, HostPages, filled, page_keys, read_pages, store_pages
from tests.waiting import ending_within, wait_until


class RecordingClient:
    """The library's client over a dict; writes down what it is told, and answers ``codes`` where there are some."""

    def __init__(self) -> None:
        self.registered: list[tuple[int, int]] = []
        self.unregistered: list[int] = []
        self.closed = 0
        self.objects: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.codes: dict[str, int] = {}
        self.holder_of: dict[str, str] = {}
        """Where an object lies that is not on the holder "first"."""
        self.out: set[str] = set()
        """Holders from which no bytes can be read."""

    def _note(self, call: str) -> None:
        assert not self.closed, f"{call} after close crashes the process"
        self.calls.append(call)

    def register_buffer(self, address: int, size: int) -> int:
        self._note("register_buffer")
        if size == 0 or any(a < address + size and address < a + s for a, s in self.registered):
            return -600
        self.registered.append((address, size))
        return 0

    def unregister_buffer(self, address: int) -> int:
        self._note("unregister_buffer")
        self.unregistered.append(address)
        return 0

    def batch_is_exist(self, names: list[str]) -> list[int]:
        self._note("batch_is_exist")
        assert names, "an empty batch must not reach the library"
        return [self.codes.get("exist", int(name in self.objects)) for name in names]

    def is_exist(self, name: str) -> int:
        return self.batch_is_exist([name])[0]

    def batch_put_from_multi_buffers(self, names: list[str], addresses: Any, sizes: Any, config: Any) -> list[int]:
        self._note("put")
        answers = []
        for name, places, lengths in zip(names, addresses, sizes, strict=True):
            assert lengths and all(lengths), "the library refuses empty buffers"
            code = self.codes.get("put", 0)
            if code == 0:
                self.objects.setdefault(name, b"".join(map(ctypes.string_at, places, lengths)))
            answers.append(code)
        return answers

    def batch_get_into_multi_buffers(self, names: list[str], addresses: Any, sizes: Any) -> list[int]:
        self._note("get")
        assert len(set(names)) == len(names), "of a key that comes twice the library fills the last one only"
        answers = []
        for name, places, lengths in zip(names, addresses, sizes, strict=True):
            stored = self.objects.get(name)
            if "get" in self.codes:
                answers.append(self.codes["get"])
            elif stored is None:
                answers.append(-704)
            elif len(stored) != sum(lengths):
                answers.append(-600 if len(stored) > sum(lengths) else -800)
            else:
                offset = 0
                for place, length in zip(places, lengths, strict=True):
                    ctypes.memmove(place, stored[offset : offset + length], length)
                    offset += length
                answers.append(len(stored))
        return answers

    def get_size(self, name: str) -> int:
        self._note("get_size")
        return self.codes.get("get_size", len(self.objects[name]) if name in self.objects else -704)

    def batch_get_replica_desc(self, names: list[str]) -> dict[str, list[Any]]:
        self._note("places")
        assert all(name in self.objects for name in names), "the library logs a line for each"
        return {name: [self._copy(name)] for name in names}

    def _copy(self, name: str) -> Any:
        endpoint = self.holder_of.get(name, "first")
        buffer = SimpleNamespace(transport_endpoint=endpoint, size=len(self.objects[name]))
        memory = SimpleNamespace(buffer_descriptor=buffer)
        return SimpleNamespace(is_memory_replica=lambda: True, get_memory_descriptor=lambda: memory)

    def get_into_ranges(self, addresses, names, to, begin, sizes) -> list[list[list[int]]]:
        self._note("probe")
        ((name,),), (((size,),),) = names, sizes
        return [[[-800 if self.holder_of.get(name, "first") in self.out else size]]]

    def batch_remove(self, names: list[str], force: bool) -> list[int]:
        self._note("remove")
        assert force
        return [0 if self.objects.pop(name, None) is not None else -704 for name in names]

    def close(self) -> int:
        self._note("close")
        self.closed += 1
        return 0


class RecordingEngine:
    def __init__(self, tier: MooncakeTierConfig) -> None:
        self.tier = tier
        self.client = RecordingClient()
        self.up = True


class RecordingAttachment(Attachment):
    """Takes its client from a RecordingEngine instead of the library."""

    def __init__(self, name: str, engine: RecordingEngine) -> None:
        self._engine = engine
        super().__init__(name, engine.tier)

    def port_answers(self, seconds: float) -> bool:
        return self._engine.up

    def open_client(self) -> RecordingClient:
        if not self._engine.up:
            raise StoreSetupError("pool", "no master")
        return self._engine.client

    def replicate_config(self) -> None:
        return None


@pytest.fixture
def tier() -> MooncakeTierConfig:
    return MooncakeTierConfig.model_validate({"type": "mooncake", "master": "127.0.0.1:1", "required": False})


@pytest.fixture
def engine(tier) -> RecordingEngine:
    return RecordingEngine(tier)


@pytest.fixture
def store(tier, engine):
    store = MooncakeStore("pool", tier, RecordingAttachment("pool", engine))
    yield store
    store.close()


def regions(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


def test_the_library_is_given_memory_of_the_tier_alone_registered_once_and_unregistered_on_close(engine, store):
    keys = page_keys(3)
    given: list[tuple[int, int]] = []
    put, read = engine.client.batch_put_from_multi_buffers, engine.client.batch_get_into_multi_buffers

    def note(names, addresses, sizes, *more):
        given.extend(zip(itertools.chain(*addresses), itertools.chain(*sizes), strict=True))
        return (put if more else read)(names, addresses, sizes, *more)

    engine.client.batch_put_from_multi_buffers = engine.client.batch_get_into_multi_buffers = note
    for _ in range(2):
        store_pages(store, keys, [5000, 0, 7000])
        assert read_pages(store, keys, [12000])[0] == [GetResult.HIT] * 3
        store.remove(keys)
    probed, (begin, size) = engine.client.registered
    assert size == SCRATCH_BYTES
    assert len(given) == 12
    assert all(begin <= place and place + length <= begin + size for place, length in given)
    store.close()
    assert engine.client.unregistered == [probed[0], begin]
    assert engine.client.calls[-1] == "close"


def test_memory_that_the_library_refuses_is_a_result_of_its_transfers(engine, store):
    engine.client.register_buffer = lambda address, size: -600
    engine.client.codes["put"] = -800
    assert store_pages(store, page_keys(1)) == [SetResult.ERROR]


def test_a_pool_that_cannot_be_reached_is_no_store(tier):
    engine = RecordingEngine(tier)
    engine.up = False
    with pytest.raises(StoreSetupError, match="no master"):
        RecordingAttachment("pool", engine)
    assert engine.client.calls == []


def test_nothing_reaches_the_client_after_close_which_waits_for_calls_under_way(engine, store):
    inside, go_on = threading.Event(), threading.Event()
    ask = engine.client.batch_is_exist

    def slow(names):
        inside.set()
        go_on.wait(60)
        return ask(names)

    engine.client.batch_is_exist = slow
    asking = threading.Thread(target=store.contains, args=(page_keys(1),))
    asking.start()
    assert inside.wait(60)
    closing = threading.Thread(target=store.close)
    closing.start()

    def refused() -> bool:
        try:
            store.get(PageBatch([], []))
        except StoreClosedError:
            return True
        return False

    wait_until(refused)
    assert not engine.client.closed
    go_on.set()
    asking.join()
    closing.join()
    assert engine.client.closed == 1
    store.close()
    assert engine.client.closed == 1


@pytest.mark.parametrize(
    ("code", "result", "reason"),
    [
        (-704, GetResult.MISS, None),
        (-703, GetResult.MISS, None),
        (-707, GetResult.TIMEOUT, "lease_expired"),
        (-900, GetResult.ERROR, "master_unreachable"),
        (-901, GetResult.TIMEOUT, "master_timeout"),
        (-800, GetResult.ERROR, "transfer"),
        (-12345, GetResult.ERROR, "code_12345"),
    ],
)
def test_every_code_of_a_read_is_a_result_and_counted(engine, store, code, result, reason):
    store_pages(store, page_keys(2))
    engine.client.codes["get"] = code
    assert read_pages(store, page_keys(2))[0] == [result] * 2
    assert store.metrics.total("error") == (0 if reason is None else store.metrics.value("error", reason))
    assert (store.metrics.total("error") > 0) == (reason is not None)
    assert store.metrics.total("corrupt") == 0
    assert len(engine.client.objects) == 2, "a page was removed for a reason that was not its own"


@pytest.mark.parametrize(
    ("code", "result"),
    [(0, SetResult.STORED), (-705, SetResult.REJECTED), (-200, SetResult.REJECTED), (-901, SetResult.TIMEOUT)]
    + [(code, SetResult.ERROR) for code in (-800, -900, -600, -12345)],
)
def test_every_code_of_a_write_is_a_result(engine, store, code, result):
    engine.client.codes["put"] = code
    assert store_pages(store, page_keys(2)) == [result] * 2


@pytest.mark.parametrize("change", [-1, 1], ids=["shorter", "longer"])
def test_an_object_of_another_size_is_corrupt_and_removed_and_says_nothing_of_its_holder(engine, store, change):
    engine.client.out = {"first"}
    store_pages(store, page_keys(3))
    name = next(iter(engine.client.objects))
    engine.client.objects[name] = (engine.client.objects[name] + b"x")[: len(engine.client.objects[name]) + change]
    results = read_pages(store, page_keys(3))[0]
    assert sorted(result.value for result in results) == ["corrupt", "hit", "hit"]
    assert store.metrics.value("corrupt", "length") == 1
    assert store.wait_until_examined(60)
    assert name not in engine.client.objects
    assert store.details()["holders_out"] == []


def test_a_page_is_read_again_into_other_memory_and_left_alone_when_it_is_good(engine, store):
    places: list[int] = []
    read = engine.client.batch_get_into_multi_buffers

    def damage_the_first_memory(names, addresses, sizes):
        codes = read(names, addresses, sizes)
        for pieces in addresses:
            places.append(pieces[0])
            if pieces[0] == places[0]:
                ctypes.c_ubyte.from_address(pieces[0] + 200).value ^= 0x10
        return codes

    store_pages(store, page_keys(1))
    engine.client.batch_get_into_multi_buffers = damage_the_first_memory
    # The same cell, again and again.
    for _ in range(3):
        assert read_pages(store, page_keys(1))[0] == [GetResult.CORRUPT]
        assert store.wait_until_examined(60)
    assert store.metrics.value("suspect", "good") == 3
    assert store.contains(page_keys(1)) == [True]
    assert "remove" not in engine.client.calls


def test_a_pool_that_does_not_answer_the_second_look_keeps_the_page_and_takes_no_write_of_it(engine, store):
    store_pages(store, page_keys(1))
    name = next(iter(engine.client.objects))
    engine.client.objects[name] = engine.client.objects[name][:-1] + b"x"
    engine.client.codes["get_size"] = -800
    assert read_pages(store, page_keys(1))[0] == [GetResult.CORRUPT]
    assert store.contains(page_keys(1)) == [False]
    assert store_pages(store, page_keys(1)) == [SetResult.REJECTED]
    assert name in engine.client.objects
    del engine.client.codes["get_size"]
    assert store_pages(store, page_keys(1)) == [SetResult.STORED]
    assert read_pages(store, page_keys(1))[0] == [GetResult.HIT]


def test_the_threads_that_spin_in_the_library_give_way_and_no_others(engine, store):
    seen: list[int] = []
    put = engine.client.batch_put_from_multi_buffers

    def note(*arguments):
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return put(*arguments)

    engine.client.batch_put_from_multi_buffers = note
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    store_pages(store, page_keys(1))
    assert seen == [min(19, before + attachment_module._NICENESS)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_the_master_lost_answers_rejected_at_once_until_it_is_back(engine, store):
    store_pages(store, page_keys(2))
    engine.up = False
    engine.client.codes["exist"] = -900
    assert store.contains(page_keys(2)) == [False, False]
    calls = len(engine.client.calls)
    assert read_pages(store, page_keys(2))[0] == [GetResult.REJECTED] * 2
    assert store_pages(store, page_keys(2)) == [SetResult.REJECTED] * 2
    assert store.metrics.value("rejected", "away") == 4
    assert len(engine.client.calls) == calls
    engine.up = True
    threading.Event().wait(0.6)
    # The port is open, but the master does not answer: as when it is frozen.
    assert not store.attached
    del engine.client.codes["exist"]
    wait_until(lambda: store.attached)
    assert read_pages(store, page_keys(2))[0] == [GetResult.HIT] * 2


def test_a_batch_is_cut_in_calls_of_few_pages_that_fit_and_do_not_overlap():
    scratch = memoryview(bytearray(1 << 20))
    payloads = [300_000] * 20 + [100] * 200 + [(1 << 20) - HEADER_LENGTH, 1]
    seen: list[int] = []
    for portion in portions(payloads, range(len(payloads)), scratch, PIECES):
        assert 0 < sum(map(len, portion.sizes)) <= PIECES
        assert [len(whole) for whole in portion.objects] == [HEADER_LENGTH + payloads[i] for i in portion.positions]
        assert [sum(sizes) for sizes in portion.sizes] == [len(whole) for whole in portion.objects]
        assert [addresses[0] for addresses in portion.addresses] == [address_of(whole) for whole in portion.objects]
        flat = zip(itertools.chain(*portion.addresses), itertools.chain(*portion.sizes), strict=True)
        places = [(place, place + size) for place, size in flat]
        assert all(0 < end - begin <= PIECE_BYTES for begin, end in places)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))
        assert places[-1][1] - places[0][0] <= len(scratch)
        seen += portion.positions
    assert seen == list(range(len(payloads)))


def test_a_page_larger_than_scratch_memory_gets_more_of_it(engine, store):
    (key,) = page_keys(1)
    assert store_pages(store, [key], [SCRATCH_BYTES]) == [SetResult.STORED]
    assert read_pages(store, [key], [SCRATCH_BYTES])[0] == [GetResult.HIT]
    assert [size for _, size in engine.client.registered[1:]] == [SCRATCH_BYTES + HEADER_LENGTH]


def test_read_only_pages_can_be_stored(engine, store):
    (key,) = page_keys(1)
    pages = filled([key], [[5000, 3000]])
    batch = PageBatch([key], [[memoryview(bytes(segment)) for segment in pages.buffers[0]]])
    assert store.set(batch) == [SetResult.STORED]
    assert read_pages(store, [key], [5000, 3000])[0] == [GetResult.HIT]


def test_the_librarys_variables_are_set_before_the_import_and_the_users_kept():
    code = """
import os, sys
os.environ["MC_LOG_LEVEL"] = "INFO"
from hicache_ext.storage.tiers.mooncake.config import MooncakeTierConfig
import hicache_ext.storage.tiers.mooncake.pages
from hicache_ext.storage.contract.registry import open_tier
assert "mooncake" not in sys.modules
class Library:
    def find_spec(self, name, path, target=None):
        if name == "mooncake":
            print(os.environ["MC_LOG_LEVEL"], os.environ["MC_RPC_TIMEOUT_MS"])
            raise ImportError("libcuda.so.1: cannot open shared object file")
sys.meta_path.insert(0, Library())
try:
    open_tier("pool", MooncakeTierConfig(type="mooncake", master="h:1", timeout="3s"))
except Exception as error:
    print(error)
"""
    # Other tests of this process have set them, too.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert run.stdout.splitlines()[0] == "INFO 3000"
    assert "cannot be imported (libcuda.so.1" in run.stdout and "pip install mooncake-transfer-engine" in run.stdout


def test_short_timeouts_are_never_zero():
    assert environment(0.001)["MC_RPC_TIMEOUT_MS"] == "1"


def test_what_is_cleared_while_the_master_is_away_is_hidden_until_it_is_removed_after_its_return(engine, store):
    keys = page_keys(2)
    store_pages(store, keys)
    patterns: list[str] = []
    answers = [-901, 2]

    def remove_by_regex(pattern: str, force: bool) -> int:
        patterns.append(pattern)
        engine.client.objects.clear()
        return answers.pop(0)

    engine.client.remove_by_regex = remove_by_regex
    engine.up = False
    engine.client.codes["exist"] = -900
    store.contains(keys)
    del engine.client.codes["exist"]
    assert store.clear([keys[0][:16]]) == 0
    engine.up = True
    wait_until(lambda: store.attached)
    # Asked again after the first answer was none.
    wait_until(lambda: store.wait_until_cleared(1))
    assert patterns == [f"^hicache_ext/{keys[0][:16].hex()}/[0-9a-f]{{64}}$"] * 2
    assert store.contains(keys) == [False, False]
    assert store_pages(store, keys) == [SetResult.STORED] * 2
    assert read_pages(store, keys)[0] == [GetResult.HIT] * 2


def test_a_call_that_does_not_end_is_left_behind_with_memory_of_the_store_alone(tier, engine):
    store = MooncakeStore("pool", tier, RecordingAttachment("pool", engine))
    keys = page_keys(3)
    store_pages(store, keys, [3000])
    engine.tier = tier.model_copy(update={"timeout": 0.2})
    go_on, ended = threading.Event(), threading.Event()
    read = engine.client.batch_get_into_multi_buffers

    def hang(names, addresses, sizes):
        go_on.wait(60)
        answer = read(names, addresses, sizes)
        ended.set()
        return answer

    engine.client.batch_get_into_multi_buffers = hang
    pages = HostPages([[3000]] * 3, fill=0x5A)
    untouched = pages.snapshot()
    engine.client.out = {"first"}
    assert store.get(PageBatch(keys, pages.buffers)) == [GetResult.TIMEOUT] * 3
    wait_until(lambda: store.details()["holders_out"] == ["first"])
    # The late bytes arrive, and not in the caller's memory.
    go_on.set()
    assert ended.wait(60)
    assert pages.snapshot() == untouched
    engine.client.batch_get_into_multi_buffers = read
    engine.client.out.clear()
    wait_until(lambda: read_pages(store, keys, [3000])[0] == [GetResult.HIT] * 3)
    store.close()


def on_two_holders(engine, store) -> tuple[list[bytes], list[bytes]]:
    """Keys of pages on "first", and of pages on "second"."""
    keys = page_keys(6)
    store_pages(store, keys)
    names = {key: store._object_name(key) for key in keys}
    engine.client.holder_of = {names[key]: "second" for key in keys[3:]}
    return keys[:3], keys[3:]


def waits_for(engine, holder: str):
    """The read of a library that waits for this holder, as long as it is out."""
    client, read = engine.client, engine.client.batch_get_into_multi_buffers

    def wait(names, addresses, sizes):
        codes = read(names, addresses, sizes)
        known = [name for name in names if name in client.objects]
        if any(client.holder_of.get(name, "first") == holder for name in known) and holder in client.out:
            wait_until(lambda: holder not in client.out)
            return [-800 if client.holder_of.get(name, "first") == holder else -707 for name in names]
        return codes

    client.batch_get_into_multi_buffers = wait


def test_while_a_holder_does_not_answer_its_pages_are_misses_and_those_of_others_are_read(engine, store):
    first, second = on_two_holders(engine, store)
    waits_for(engine, "second")
    engine.client.out = {"second"}
    with ending_within(0.1):
        assert read_pages(store, first + second)[0] == [GetResult.TIMEOUT] * 6
    # In doubt at first; the one that answers is back after a probe.
    wait_until(lambda: read_pages(store, first)[0] == [GetResult.HIT] * 3)
    assert store.details()["holders_out"] == ["second"]
    assert read_pages(store, first + second)[0] == [GetResult.HIT] * 3 + [GetResult.MISS] * 3
    assert store.contains(first + second) == [True] * 3 + [False] * 3
    assert store.count_leading(first + second) == 3
    # STORED and EXISTS mean readable.
    assert store_pages(store, first + second) == [SetResult.EXISTS] * 3 + [SetResult.REJECTED] * 3
    assert store.metrics.value("rejected", "holder") > 0
    assert store.metrics.total("corrupt") == 0
    engine.client.out.clear()
    wait_until(lambda: read_pages(store, first + second)[0] == [GetResult.HIT] * 6)


def test_a_holder_that_stays_away_is_a_line_in_the_log_and_leaves_no_thread_when_it_is_back(engine, store, caplog):
    first, second = on_two_holders(engine, store)
    engine.client.out = {"second"}
    read = engine.client.batch_get_into_multi_buffers

    def fail(names, addresses, sizes):
        lost = [engine.client.holder_of.get(name, "first") in engine.client.out for name in names]
        return [-800 if out else code for out, code in zip(lost, read(names, addresses, sizes), strict=True)]

    engine.client.batch_get_into_multi_buffers = fail
    ends = time.monotonic() + 1.5
    while time.monotonic() < ends:
        assert read_pages(store, first + second)[0][:3] == [GetResult.HIT] * 3
    assert engine.client.calls.count("probe") >= 2
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["hicache_ext: tier pool: holder second does not answer; its pages are misses until it does"]
    engine.client.out.clear()
    wait_until(lambda: not any("holder" in thread.name for thread in threading.enumerate()))
    assert read_pages(store, first + second)[0] == [GetResult.HIT] * 6


def test_a_master_that_names_another_holder_for_each_page_does_not_cost_a_thread_each(engine, store, monkeypatch):
    monkeypatch.setattr(holders_module, "_MOST_OUT", 4)
    keys = page_keys(40)
    store_pages(store, keys)
    holders = [f"holder {number}" for number in range(40)]
    engine.client.holder_of = dict(zip(engine.client.objects, holders, strict=True))
    engine.client.out = set(holders)
    engine.client.batch_get_into_multi_buffers = lambda names, addresses, sizes: [-800] * len(names)
    for _ in range(3):
        read_pages(store, keys)
        assert sum("holder" in thread.name for thread in threading.enumerate()) <= 4
    assert len(store.details()["holders_out"]) <= 4


def test_a_pool_in_trouble_logs_each_kind_of_it_once(engine, store, caplog):
    keys = page_keys(2)
    store_pages(store, keys)
    engine.client.batch_is_exist = lambda names: threading.Event().wait(0.05) or [0] * len(names)
    for _ in range(20):
        with ending_within(0.01):
            store.contains(keys)
        wait_until(lambda: store.attached)
    assert len(caplog.records) == 2
    assert "no answer in" in caplog.text and "every look-up fails (timeout)" in caplog.text


def test_while_all_holders_answer_nobody_asks_where_pages_lie(engine, store):
    first, second = on_two_holders(engine, store)
    assert read_pages(store, first + second)[0] == [GetResult.HIT] * 6
    assert store.contains(first + second) == [True] * 6
    assert "places" not in engine.client.calls


def test_of_a_read_that_fails_in_time_the_rest_is_read(engine, store, monkeypatch):
    monkeypatch.setattr(pages_module, "PIECES", 2)
    first, second = on_two_holders(engine, store)
    read = engine.client.batch_get_into_multi_buffers
    engine.client.out = {"second"}

    def fail(names, addresses, sizes):
        lost = [engine.client.holder_of.get(name, "first") in engine.client.out for name in names]
        return [-800 if out else code for out, code in zip(lost, read(names, addresses, sizes), strict=True)]

    engine.client.batch_get_into_multi_buffers = fail
    results = read_pages(store, [second[0], first[0], second[1], first[1], first[2]])[0]
    assert results == [GetResult.ERROR, GetResult.HIT, GetResult.MISS, GetResult.HIT, GetResult.HIT]


def test_a_holder_that_the_master_has_forgotten_is_asked_for_no_more(engine, store):
    first, second = on_two_holders(engine, store)
    waits_for(engine, "second")
    engine.client.out = {"second"}
    with ending_within(0.1):
        read_pages(store, second)
    wait_until(lambda: store.details()["holders_out"] == ["second"])
    for key in second:
        del engine.client.objects[store._object_name(key)]
    wait_until(lambda: store.details()["holders_out"] == [])
    assert read_pages(store, first + second)[0] == [GetResult.HIT] * 3 + [GetResult.MISS] * 3
    engine.client.out.clear()


def test_a_late_answer_of_the_master_keeps_all_calls_out_until_it_is_there(engine, store):
    keys = page_keys(2)
    store_pages(store, keys)
    go_on, ask = threading.Event(), engine.client.batch_is_exist
    engine.client.batch_is_exist = lambda names: go_on.wait(60) and ask(names)
    with ending_within(0.05):
        assert store.contains(keys) == [False] * 2
    assert not store.attached
    assert read_pages(store, keys)[0] == [GetResult.REJECTED] * 2
    go_on.set()
    wait_until(lambda: store.attached)
    assert read_pages(store, keys)[0] == [GetResult.HIT] * 2


def test_a_late_read_keeps_all_calls_out_while_the_master_does_not_tell_where_its_pages_lie(engine, store):
    keys = page_keys(2)
    store_pages(store, keys)
    go_on, read = threading.Event(), engine.client.batch_get_into_multi_buffers
    engine.client.batch_get_into_multi_buffers = lambda *arguments: go_on.wait(60) and read(*arguments)
    engine.client.batch_is_exist = lambda names: go_on.wait(60) and [1] * len(names)
    with ending_within(0.05):
        assert read_pages(store, keys)[0] == [GetResult.TIMEOUT] * 2
    threading.Event().wait(0.2)
    assert not store.attached
    go_on.set()
    wait_until(lambda: read_pages(store, keys)[0] == [GetResult.HIT] * 2)


def test_late_writes_hold_back_writes_alone_and_those_after_them_are_small_and_waited_for_briefly(
    engine, store, monkeypatch
):
    monkeypatch.setattr(pages_module, "_MOST_LATE", 1)
    keys = page_keys(2)
    store_pages(store, keys)
    go_on, put, sizes = threading.Event(), engine.client.batch_put_from_multi_buffers, []

    def hang(names, *more):
        sizes.append(len(names))
        go_on.wait(60)
        return put(names, *more)

    engine.client.batch_put_from_multi_buffers = hang
    with ending_within(0.05):
        assert store_pages(store, page_keys(2, "late")) == [SetResult.TIMEOUT] * 2
    wait_until(lambda: store.attached)
    assert read_pages(store, keys)[0] == [GetResult.HIT] * 2
    assert store_pages(store, page_keys(2, "more")) == [SetResult.REJECTED] * 2
    assert sizes == [2]
    go_on.set()
    wait_until(lambda: read_pages(store, page_keys(2, "late"))[0] == [GetResult.HIT] * 2)
    many = page_keys(pages_module._CAREFUL_PIECES + 1, "many")
    assert store_pages(store, many) == [SetResult.STORED] * len(many)
    assert sizes == [2, pages_module._CAREFUL_PIECES, 1]
    go_on.clear()
    begun = time.monotonic()
    assert store_pages(store, page_keys(2, "careful")) == [SetResult.REJECTED] * 2
    assert time.monotonic() - begun < store._attachment.tier.longest_call / 2
    go_on.set()
    wait_until(lambda: store.contains(page_keys(2, "careful")) == [True] * 2)


def test_a_call_ends_by_the_limit_that_it_was_given(tier, engine):
    store = MooncakeStore("pool", tier, RecordingAttachment("pool", engine))
    keys = page_keys(3)
    store_pages(store, keys)
    engine.tier = tier.model_copy(update={"timeout": 3600.0})
    go_on = threading.Event()
    engine.client.batch_get_into_multi_buffers = lambda names, *_: [go_on.wait(60) and -800 for _ in names]
    with ending_within(0.05):
        assert read_pages(store, keys)[0] == [GetResult.TIMEOUT] * 3
    assert not go_on.is_set()
    go_on.set()
    store.close()


def test_what_is_left_of_a_batch_at_the_deadline_is_not_begun(engine, store):
    keys = page_keys(2)
    store_pages(store, keys)
    store._deadline = lambda: 0.0
    assert read_pages(store, keys)[0] == [GetResult.TIMEOUT] * 2
    assert "get" not in engine.client.calls
    # Nothing was left behind, so nothing keeps the next call waiting.
    del store._deadline
    assert store.attached
    assert read_pages(store, keys)[0] == [GetResult.HIT] * 2


def test_a_client_with_a_call_that_never_ends_is_not_closed_under_it(tier, engine):
    engine.tier = tier.model_copy(update={"timeout": 0.2})
    store = MooncakeStore("pool", tier, RecordingAttachment("pool", engine))
    go_on = threading.Event()
    engine.client.batch_put_from_multi_buffers = lambda names, *_: [go_on.wait(20) and 0 for _ in names]
    assert store_pages(store, page_keys(2)) == [SetResult.TIMEOUT] * 2
    store.close()
    assert not engine.client.closed
    go_on.set()


def test_a_removal_that_never_ends_does_not_hold_close(tier, engine):
    engine.tier = tier.model_copy(update={"timeout": 0.2})
    store = MooncakeStore("pool", tier, RecordingAttachment("pool", engine))
    removing, go_on = threading.Event(), threading.Event()

    def remove(*_):
        removing.set()
        go_on.wait(60)
        return 0

    engine.client.remove_by_regex = remove
    clearing = threading.Thread(target=store.clear, args=([IDENTITY],))
    clearing.start()
    assert removing.wait(60)
    clearing.join()
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(20)
    ended = not closing.is_alive()
    assert not engine.client.closed
    go_on.set()
    closing.join()
    assert ended


@pytest.mark.parametrize(("code", "result"), [(0, SetResult.STORED), (-705, SetResult.EXISTS)])
@pytest.mark.parametrize("looks", [1, 3, 10**9], ids=["at once", "a moment later", "never"])
def test_a_page_that_another_process_is_writing_counts_as_stored_once_it_can_be_read(
    engine, store, code, result, looks
):
    """The library answers success, or that it exists, as soon as anybody has begun to write the page."""
    client, asked = engine.client, itertools.count()
    client.batch_put_from_multi_buffers = lambda names, *_: [code] * len(names)
    client.batch_is_exist = lambda names: [int(next(asked) >= looks)] * len(names)
    if looks == 10**9:
        result = SetResult.REJECTED
    assert store_pages(store, page_keys(1)) == [result]
    assert store.metrics.value("rejected", "unconfirmed") == (result is SetResult.REJECTED)


def test_a_page_that_another_thread_is_writing_is_waited_for(engine, store):
    (key,) = page_keys(1)
    inside, go_on = threading.Event(), threading.Event()
    put = engine.client.batch_put_from_multi_buffers

    def slow(*arguments):
        inside.set()
        go_on.wait(60)
        return put(*arguments)

    engine.client.batch_put_from_multi_buffers = slow
    answers: dict[str, list[SetResult]] = {}
    first = threading.Thread(target=lambda: answers.update(first=store_pages(store, [key])))
    first.start()
    assert inside.wait(60)
    second = threading.Thread(target=lambda: answers.update(second=store_pages(store, [key])))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    go_on.set()
    first.join()
    second.join()
    assert answers == {"first": [SetResult.STORED], "second": [SetResult.EXISTS]}
    assert engine.client.calls.count("put") == 1
