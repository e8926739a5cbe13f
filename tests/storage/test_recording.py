"""Recordings: what was asked and found comes back, nothing else is in them, and no request waits for them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.config.model import RecordConfig
from hicache_ext.errors import ConfigError, RecordingError
from hicache_ext.page.recording import MAGIC, SUFFIX, Asked, Encoder, Entry, block, read_file
from hicache_ext.plan.traces import read_trace
from hicache_ext.sglang import scheduler_hooks
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.tiering import observers, recording
from hicache_ext.storage.tiering.recording import Recorder
from hicache_ext.storage.tiering.tiered import TieredStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import store_pages
from tests.rigs.small_memory import run_in_small_memory
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
IDENTITY = bytes(16)


def hashes(count: int, begin: str = "") -> list[str]:
    """Page hashes of a chain."""
    return [hashlib.sha256(f"{begin}{number}".encode()).hexdigest() for number in range(count)]


def keys_of(pages: list[str]) -> list[bytes]:
    return [IDENTITY + bytes.fromhex(page) for page in pages]


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Recorder]]:
    monkeypatch.setattr(recording, "_PAUSE", 0.01)
    made: list[Recorder] = []

    def begin(size: int = 1 << 20) -> Recorder:
        settings = RecordConfig(path=str(tmp_path / "rec"), size=size)
        begun = observers.begin_recording(settings, lambda: {"model": "m", "page_size": 64})
        assert begun is not None
        made.append(begun)
        return begun

    yield begin
    for recorder in made:
        observers.end(recorder)


def files_in(directory: Path) -> list[Path]:
    return sorted(directory.glob(f"*{SUFFIX}"))


def entries_in(directory: Path) -> list[Entry]:
    return [entry for path in files_in(directory) for entry in read_file(path)[1]]


def ask(recorder: Recorder, rid: str, pages: list[str], answered: int = 0, **more: Any) -> None:
    recorder.ask(rid, pages, before=more.pop("before", None), answered=answered, found=more.pop("found", {}), **more)


def wait_until_written(recorder: Recorder, requests: int) -> None:
    wait_until(lambda: recorder.metrics.value("request", "written") == requests)


# -- what is written ---------------------------------------------------------------------------------------------------


class Operation:
    """As SGLang's storage threads have it."""

    def __init__(self, rid: str, pages: list[str], last_hash: str | None = None, **facts: Any) -> None:
        self.request_id, self.all_hash_values, self.last_hash = rid, pages, last_hash
        self.__dict__.update(facts)


class Request:
    """As SGLang's scheduler has it."""

    def __init__(self) -> None:
        self.rid = "one"
        self.origin_input_ids = list(range(400))
        self.storage_prefetch_last_match_len = 64


def test_what_a_request_asked_for_and_which_tier_had_it_comes_back(
    record: Callable[..., Recorder], tmp_path: Path
) -> None:
    near, far = MemoryPageStore("near"), MemoryPageStore("far")
    store = TieredStore([near, far], [near, far])
    pages = hashes(5)
    store_pages(near, keys_of(pages)[:1])
    store_pages(far, keys_of(pages)[1:3])
    recorder, request = record(), Request()
    scheduler_hooks.before_prefetch(None, request)

    def look_up(controller: Any, operation: Any) -> tuple[list[str], int]:
        found = store.count_leading(keys_of(operation.all_hash_values))
        return operation.all_hash_values[:found], found * 64

    operation = Operation("one", pages, last_hash=hashes(1, "before")[0])
    assert scheduler_hooks.around_look_up(look_up, None, operation) == (pages[:3], 192)
    store.close()
    recorder.close()
    (path,) = files_in(tmp_path / "rec")
    header, (entry,), whole = read_file(path)
    assert whole and header["tiers"] == ["near", "far"] and header["model"] == "m"
    assert (entry.asked, entry.answered, entry.found, entry.prompt, entry.matched) == (5, 3, (1, 2), 400, 64)
    assert len(entry.chain) == 6, "the page before them says where the chain goes on"
    assert recorder.metrics.value("request", "written") == 1


def test_a_later_turn_writes_its_new_pages_alone_and_is_read_whole(
    record: Callable[..., Recorder], tmp_path: Path
) -> None:
    recorder, pages = record(), hashes(1000)
    ask(recorder, "a", pages)
    wait_until(lambda: recorder.metrics.value("request", "written") == 1)
    (path,) = files_in(tmp_path / "rec")
    before = path.stat().st_size
    ask(recorder, "b", [*pages, *hashes(2, "turn")])
    recorder.close()
    assert path.stat().st_size - before < 100
    _, (first, second), _ = read_file(path)
    assert second.chain[:1000].tolist() == first.chain.tolist() and len(set(second.chain.tolist())) == 1002


def test_a_request_that_sglang_asks_for_again_counts_once(record: Callable[..., Recorder], tmp_path: Path) -> None:
    recorder = record()
    for rid in ("a", "a", "b"):
        ask(recorder, rid, hashes(3))
    recorder.close()
    assert len(entries_in(tmp_path / "rec")) == 2
    assert recorder.metrics.value("request", "repeated") == 1


def test_what_is_assumed_and_what_cannot_be_read_is_not_recorded(
    record: Callable[..., Recorder], tmp_path: Path
) -> None:
    recorder = record()
    for operation in (
        Operation("a", hashes(2), assume_stored=True),
        Operation("a", [b"bytes"]),  # type: ignore[list-item]
        Operation(["two", "requests"], hashes(2)),  # type: ignore[arg-type]
        object(),
    ):
        assert scheduler_hooks.around_look_up(lambda *_: ([], 0), None, operation) == ([], 0)
    recorder.close()
    assert files_in(tmp_path / "rec") == []


def test_nothing_of_a_user_is_in_a_file_and_nobody_else_may_read_it(
    record: Callable[..., Recorder], tmp_path: Path
) -> None:
    before = os.umask(0)
    try:
        recorder, pages = record(), hashes(3, "hunter2")
        ask(recorder, "rid-hunter2", pages)
        recorder.close()
    finally:
        os.umask(before)
    (path,) = files_in(tmp_path / "rec")
    content = path.read_bytes()
    for secret in (b"hunter2", os.uname().nodename.encode(), (tmp_path / "rec" / "salt").read_bytes()):
        assert secret not in content
    for page in pages:
        assert page.encode()[:12] not in content and bytes.fromhex(page)[:6] not in content
    for file in (path, tmp_path / "rec" / "salt"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "rec").stat().st_mode) == 0o700


def test_two_directories_tell_the_same_page_by_different_names(tmp_path: Path) -> None:
    chains = []
    for name in ("a", "b"):
        recorder = Recorder(RecordConfig(path=str(tmp_path / name)), dict)
        ask(recorder, "r", hashes(2))
        recorder.close()
        chains.append(entries_in(tmp_path / name)[0].chain.tolist())
    assert not set(chains[0]) & set(chains[1])


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_all_files_together_stay_within_their_size_and_the_newest_are_kept(
    record: Callable[..., Recorder], tmp_path: Path
) -> None:
    recorder = record(size=1 << 20)
    for number in range(60):
        ask(recorder, f"{number}", hashes(4000, f"{number}"))
        wait_until_written(recorder, number + 1)  # until then, files come and go while they are added up
        assert sum(path.stat().st_size for path in files_in(tmp_path / "rec")) <= 1 << 20
    recorder.close()
    kept = entries_in(tmp_path / "rec")
    assert 15 <= len(kept) < 60 and kept[-1].moment > kept[0].moment
    assert recorder.metrics.value("request", "dropped_disk") == 0


def test_a_slow_disk_holds_up_no_request_and_not_the_end(
    record: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, released = record(), threading.Event()
    monkeypatch.setattr(recording.os, "write", lambda fd, data: (released.wait(60), len(data))[1])
    try:
        pages = hashes(100)
        slowest = 0.0
        for number in range(6000):
            started = time.perf_counter()
            ask(recorder, f"{number}", pages)
            slowest = max(slowest, time.perf_counter() - started)
        assert slowest < 1.0
        assert recorder.metrics.value("request", "dropped_queue") >= 6000 - 2 * recording._MOST_REQUESTS
        started = time.monotonic()
        observers.end(recorder)
        assert time.monotonic() - started < 5.0
    finally:
        released.set()


def test_a_full_disk_costs_what_was_to_be_written_and_is_over_when_there_is_room(
    record: Callable[..., Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, write, full = record(), os.write, threading.Event()

    def half(fd: int, data: Any) -> int:
        if full.is_set():
            if len(data) > 20:
                return write(fd, bytes(data)[:20])
            raise OSError(28, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(recording.os, "write", half)
    ask(recorder, "a", hashes(5))
    wait_until(lambda: recorder.metrics.value("request", "written") == 1)
    full.set()
    ask(recorder, "b", hashes(6))
    wait_until(lambda: recorder.metrics.value("request", "dropped_disk") == 1)
    full.clear()
    ask(recorder, "c", hashes(7))
    recorder.close()
    assert [entry.asked for entry in entries_in(tmp_path / "rec")] == [5, 7]
    assert all(read_file(path)[2] for path in files_in(tmp_path / "rec"))


def test_a_file_that_somebody_removes_costs_itself(record: Callable[..., Recorder], tmp_path: Path) -> None:
    recorder = record()
    ask(recorder, "a", hashes(2))
    wait_until(lambda: recorder.metrics.value("request", "written") == 1)
    files_in(tmp_path / "rec")[0].unlink()
    ask(recorder, "b", hashes(2))
    recorder.close()
    assert len(entries_in(tmp_path / "rec")) == 1


def test_a_clock_that_is_set_back_puts_no_request_before_an_earlier_one(
    record: Callable[..., Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = record(size=1 << 20)
    monkeypatch.setattr(recording.time, "time", lambda: 0.0)
    for number in range(5):
        ask(recorder, f"{number}", hashes(9000, f"{number}"))
        wait_until_written(recorder, number + 1)
    recorder.close()
    assert len(files_in(tmp_path / "rec")) > 1
    moments = [entry.moment for entry in entries_in(tmp_path / "rec")]
    assert moments == sorted(moments) and moments[0] > 1e9


# -- what dies, and what comes after -----------------------------------------------------------------------------------

_PROCESS = """
import hashlib, sys
from hicache_ext.config.model import RecordConfig
from hicache_ext.storage.tiering import observers, recording
recording._PAUSE = 0.0
recorder = observers.begin_recording(RecordConfig(path=sys.argv[1], size=1 << 20), lambda: {"page_size": 64})
for number in range(int(sys.argv[3])):
    pages = [hashlib.sha256(f"{sys.argv[2]} {number} {page}".encode()).hexdigest() for page in range(50)]
    recorder.ask(f"{number}", pages, before=None, answered=0, found={})
    if number == 20:
        print("going", flush=True)
observers.end(recorder)
"""


def start(directory: Path, name: str, requests: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", _PROCESS, str(directory), name, str(requests)]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_killed_process_leaves_what_it_had_written(tmp_path: Path) -> None:
    process = start(tmp_path, "a", 1_000_000)
    try:
        assert process.stdout is not None and process.stdout.readline() == "going\n"
        wait_until(lambda: sum(path.stat().st_size for path in files_in(tmp_path)) > 50_000)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.stdout is not None
    process.stdout.close()
    entries = entries_in(tmp_path)
    assert len(entries) > 20 and all(len(entry.chain) == 50 for entry in entries)
    assert len(read_trace(tmp_path)) == len(read_trace(str(tmp_path))) == len(entries)


def test_processes_that_share_a_directory_keep_its_size_and_each_others_requests(tmp_path: Path) -> None:
    processes = [start(tmp_path, name, 200) for name in "ab"]
    for process in processes:
        assert process.wait(120) == 0
        assert process.stdout is not None
        process.stdout.close()
    assert len(files_in(tmp_path)) == 2 and len(entries_in(tmp_path)) == 400
    assert read_trace(tmp_path).remarks == ()
    for process in [start(tmp_path, name, 2500) for name in "cd"]:
        assert process.wait(120) == 0
        assert process.stdout is not None
        process.stdout.close()
    # A block of each may be under way while the other looks.
    assert sum(path.stat().st_size for path in files_in(tmp_path)) <= (1 << 20) + 2 * 64 * 1024


def test_whatever_byte_is_damaged_or_cut_off_what_came_before_is_read(
    record: Callable[..., Recorder], tmp_path: Path
) -> None:
    recorder = record()
    for number in range(4):
        ask(recorder, f"{number}", hashes(3, f"{number}"))
        wait_until_written(recorder, number + 1)
    recorder.close()
    (path,) = files_in(tmp_path / "rec")
    content = path.read_bytes()
    names = [entry.chain.tolist() for entry in read_file(path)[1]]
    damaged = tmp_path / f"damaged{SUFFIX}"
    for at in range(len(content)):
        damages = (content[:at], content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :])
        for text in damages if at >= len(MAGIC) else damages[:1]:
            damaged.write_bytes(text)
            _, entries, _ = read_file(damaged)
            assert [entry.chain.tolist() for entry in entries] == names[: len(entries)]
            assert len(entries) < 4
    damaged.write_bytes(b"HXREC\0\0\x09" + content[8:])
    with pytest.raises(RecordingError, match="is of version 9, and this release reads version 1"):
        read_file(damaged)


# -- configuration -----------------------------------------------------------------------------------------------------


def config(**section: Any) -> Any:
    return load_config(ExtraConfig.around({"tiers": {"m": {"type": "memory"}}, **section}))


def test_nothing_is_recorded_where_nothing_is_said() -> None:
    assert config().record is None and observers.begin_recording(config().record, dict) is None
    assert observers.recorder is None


def test_a_reload_says_that_another_recording_begins_with_the_next_start(tmp_path: Path) -> None:
    store = open_tiers(config())
    try:
        assert store.reload(config(record={"path": str(tmp_path)})) == ["new record, in force from the next start on"]
    finally:
        store.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({}, r"record\.path: required; allowed: an absolute path"),
        ({"path": "here"}, r"record\.path: .*'here' is not an absolute path"),
        ({"path": "/a", "size": "10KiB"}, r"record\.size: .*'10KiB' is less than 1MiB"),
        ({"pth": "/a"}, r"record\.pth: unknown key; did you mean 'path'"),
        ("on", r"record: .*a mapping with path"),
    ],
)
def test_a_mistake_is_one_sentence(record: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config(record=record)


def test_a_directory_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"hicache_ext\.record\.path: .*/file/rec cannot be used: Not a directory"):
        observers.begin_recording(RecordConfig(path=str(tmp_path / "file" / "rec")), dict)
    (tmp_path / "salt").write_text("x")
    with pytest.raises(ConfigError, match=r"salt holds no salt; allowed: that file removed"):
        observers.begin_recording(RecordConfig(path=str(tmp_path)), dict)
    assert observers.recorder is None


# -- reading -----------------------------------------------------------------------------------------------------------


def test_mooncakes_traces_are_read_and_what_is_none_is_one_sentence(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 9, 11]},
        {"timestamp": 1000, "input_length": 600, "output_length": 7, "hash_ids": [7, 9]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    trace = read_trace(path)
    assert list(trace.chains()) == [[0, 1], [0, 1, 2]]
    assert (trace.times.tolist(), trace.prompt.tolist()) == ([0, 2], [600, 1100])
    assert (trace.output.tolist(), trace.block_tokens, trace.distinct) == ([7, 5], 512, 3)
    for text in (
        '{"timestamp": 1}',
        "[]",
        "no",
        '{"timestamp": 1, "hash_ids": ["a"]}',
        '{"timestamp": 1, "hash_ids": 4}',
        '{"timestamp": Infinity, "hash_ids": [4]}',
        '{"timestamp": 1e999, "hash_ids": [4]}',
        json.dumps({"timestamp": 1, "hash_ids": [4], "input_length": 2**63}),
        '{"timestamp": 1, "hash_ids": [4], "output_length": -1}',
        "[" * 200_000,
    ):
        path.write_text(json.dumps(lines[0]) + "\n" + text)
        with pytest.raises(
            RecordingError, match=r"trace\.jsonl is no trace: line 2 is not a JSON object with timestamp"
        ):
            read_trace(path)
    path.write_text("")
    with pytest.raises(RecordingError, match="holds no request"):
        read_trace(path)
    with pytest.raises(RecordingError, match="has no recording"):
        read_trace(tmp_path)


def test_a_directory_of_recordings_is_read_as_one_trace(record: Callable[..., Recorder], tmp_path: Path) -> None:
    recorder = record()
    ask(recorder, "a", hashes(3), answered=2, found={"disk": 2}, prompt=200)
    ask(recorder, "b", [*hashes(3), *hashes(1, "turn")])
    recorder.close()
    trace = read_trace(tmp_path / "rec")
    assert trace.block_tokens == 64 and trace.prompt.tolist() == [200, 256]
    first, second = trace.chains()
    assert second[:3] == first and trace.distinct == 4


def test_pages_that_the_writer_has_forgotten_are_written_again_and_stay_the_same(
    record: Callable[..., Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_ext.page.recording._REMEMBERED_PAGES", 10)
    recorder = record()
    for number in range(50):
        ask(recorder, f"{number}", [*hashes(8), *hashes(4, f"turn {number % 7}")])
    recorder.close()
    requests = list(read_trace(tmp_path / "rec").chains())
    assert len(requests) == 50 and all(chain[:8] == requests[0][:8] for chain in requests)
    assert requests[0] == requests[49] and requests[0] != requests[1]


def test_a_recording_of_more_pages_than_the_writer_remembers_is_whole(
    record: Callable[..., Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine writes 200,000 pages in more than the second that a server spends on it.
    monkeypatch.setattr(recording, "_CLOSE_WAIT", 60.0)
    recorder = record(size=64 << 20)
    for number in range(40):
        ask(recorder, f"{number}", hashes(5000, f"{number}"))
    recorder.close()
    assert recorder.metrics.value("request", "written") == len(entries_in(tmp_path / "rec")) == 40


# -- files that somebody made ------------------------------------------------------------------------------------------


def made(path: Path, chains: list[list[str]], **header: Any) -> Path:
    """A recording of these chains; ``header`` in place of what a recorder writes there."""
    encoder = Encoder(bytes(16), ())
    entries = (encoder.entry(Asked(number, chain, 1, 0, {})) for number, chain in enumerate(chains))
    path.write_bytes(encoder.header(0.0, {"page_size": 64, **header}) + block(b"".join(entries)))
    return path


READ = """
import sys
from pathlib import Path
from hicache_ext.plan.traces import read_trace
limit(400)
trace = read_trace(Path(sys.argv[1]))
print(len(trace), trace.distinct, len(trace.blocks), sum(map(len, trace.chains())), trace.prompt.tolist()[:2])
"""


def test_requests_behind_one_long_prefix_take_about_what_their_blocks_take(tmp_path: Path) -> None:
    """Seen: 2.1 GB for a file of 211 KiB, each chain being unrolled."""
    prefix = hashes(20_000)
    path = made(tmp_path / f"a{SUFFIX}", [prefix, *([prefix[-1], *hashes(1, f"{n} ")] for n in range(1000))])
    assert path.stat().st_size < 250_000
    assert run_in_small_memory(READ, path) == "1001 21000 20021000 20021000 [1280000, 1280064]\n"


def test_chains_that_are_more_than_fit_together_are_one_sentence(tmp_path: Path) -> None:
    """Seen: a file of 8 MB, each request a page longer than the one before, was never read to its end."""
    encoder, chain = Encoder(bytes(16), ()), hashes(1)
    entries = [encoder.entry(Asked(0.0, chain, 1, 0, {}))]
    for number in range(30_000):
        chain = [chain[-1], hashes(1, f"{number} ")[0]]
        entries.append(encoder.entry(Asked(float(number), chain, 1, 0, {})))
    path = tmp_path / f"a{SUFFIX}"
    path.write_bytes(encoder.header(0.0, {}) + block(b"".join(entries)))
    with pytest.raises(RecordingError, match=r"asks for 450045001 pages in 30001 requests, and a plan takes 200000000"):
        read_trace(path)


def test_chains_of_several_files_that_branch_are_those_that_were_recorded(tmp_path: Path) -> None:
    chains = [
        hashes(8),
        hashes(3),
        [*hashes(5), *hashes(4, "b")],
        [*hashes(5), *hashes(2, "b")],
        hashes(2, "c"),
        hashes(10),
    ]
    for part, name in ((chains[:4], "a"), (chains[4:], "b")):
        made(tmp_path / f"{name}{SUFFIX}", part)
    found = sorted(read_trace(tmp_path).chains(), key=len)
    names: dict[str, int] = {}
    wanted = sorted(([names.setdefault(page, len(names)) for page in chain] for chain in chains), key=len)
    assert [len(chain) for chain in found] == [len(chain) for chain in wanted]
    # Numbers differ, and which of them are equal does not.
    pairs = {pair for one, other in zip(found, wanted, strict=True) for pair in zip(one, other, strict=True)}
    assert len(pairs) == len({number for number, _ in pairs}) == len(names)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ({"page_size": "abc"}, "has a header whose page_size is no whole number from 1 to 2147483648"),
        ({"page_size": -64}, "has a header whose page_size is no whole number"),
        ({"page_size": 2**63}, "has a header whose page_size is no whole number"),
        ({"page_size": []}, None),
        ({"salt": []}, "has a header whose salt is no text"),
        ({"tiers": "disk"}, "has a header whose tiers are no list of names"),
        ({"tiers": [[]]}, "has a header whose tiers are no list of names"),
        ({"started": float("inf")}, "has a header that says nothing"),
        ({"started": 2**2000}, "has a header that says nothing"),
        ({"started": "nan"}, "has a header that says nothing"),
        ({"page_size": True}, "page_size is no whole number"),
        ({"more": eval("[" * 90 + "]" * 90)}, None),
    ],
)
def test_a_header_with_a_field_that_is_none_is_one_sentence(
    header: dict[str, Any], problem: str | None, tmp_path: Path
) -> None:
    path = made(tmp_path / f"a{SUFFIX}", [hashes(3)], **header)
    if problem is None:
        assert len(read_trace(path)) == 1
        return
    with pytest.raises(RecordingError, match=problem):
        read_trace(path)


def test_a_header_that_is_nested_without_end_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / f"a{SUFFIX}"
    path.write_bytes(MAGIC + block(b"[" * 200_000))
    with pytest.raises(RecordingError, match="has a header that says nothing"):
        read_trace(path)
