"""Tools look: what they look at is afterwards as it was, byte for byte."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache_ext.cli.main import main
from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.storage.contract import trial
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.tiers.file.inspection import open_inspector
from hicache_ext.storage.tiers.file.inspector import reason_it_is_bad
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.pins import add_pin
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import IDENTITY, assert_hits, page_keys, store_pages

pytestmark = pytest.mark.slow  # many starts of tiers and tools, a second each

LAYOUTS = ("pages", "slab")


def seen(path: Path, *, times: bool = True) -> dict[str, Any]:
    """All that can be seen of a tree; without ``times`` only when files changed, not directories."""
    found: dict[str, Any] = {}
    for entry in [path, *path.rglob("*")]:
        status = entry.lstat()
        content = hashlib.sha256(entry.read_bytes()).hexdigest() if entry.is_file() else ""
        changed = status.st_mtime_ns if times or entry.is_file() else 0
        found[str(entry)] = (status.st_mode, status.st_uid, status.st_gid, status.st_size, changed, content)
    return found


def configuration(directory: Path, path: Path | list[Path], **keys: Any) -> str:
    paths = [str(one) for one in path] if isinstance(path, list) else str(path)
    disk = {"type": "file", "path": paths, "capacity": "64MiB", **keys}
    file = directory / "hicache.yaml"
    file.write_text(yaml.safe_dump(ExtraConfig.around({"tiers": {"disk": disk}})))
    return str(file)


def filled(path: Path, layout: str) -> Path:
    """A directory with everything in it that a server and tools make."""
    disk = {"type": "file", "path": str(path), "capacity": "64MiB", "layout": layout, "ttl": "1d"}
    store = open_tiers(load_config(ExtraConfig.around({"tiers": {"disk": disk}})))
    store.register_identity(IDENTITY, {"model": {"id": "example"}})
    store_pages(store, page_keys(40))
    add_pin(path, "prompt", [key[16:] for key in page_keys(3)], None)
    store.close()
    return path


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *arguments])
    sections = json.loads(capsys.readouterr().out)["sections"]
    return code, {f["subject"]: f for s in sections if s["title"].startswith("tier ") for f in s["findings"]}


# -- a directory of ours -----------------------------------------------------------------------------------------------

SPOILT: dict[str, Callable[[Path], object]] = {
    "sound": lambda _: None,
    "no members and no locks": lambda path: [file.unlink() for file in path.glob("v3/[lm]*")],
    "what a killed writer left": lambda path: (
        (path / "tmp").mkdir(exist_ok=True),
        (path / "tmp" / "7.3.tmp").write_text("half a page"),
        (path / "v3" / "slabs").exists()
        and (
            (path / "v3" / "0123456789.sock").write_bytes(b""),
            (path / "v3" / "slabs" / "000000ff-4096.slab").write_bytes(bytes(4096)),
            (path / "v3" / "slabs" / "000000fe-4096.headers").write_bytes(bytes(4096)),
        ),
    ),
}


LOOKING = (
    *("ls", "stat", "verify", "pins", "gc --dry-run"),
    *("clear --all --dry-run", "clear --model example --dry-run", f"clear --identity {IDENTITY.hex()[:8]} --dry-run"),
)


@pytest.mark.parametrize("state", SPOILT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tools_that_look_leave_everything_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str, state: str
) -> None:
    path = filled(tmp_path / "l3", layout)
    SPOILT[state](path)
    before = seen(path)
    for command in LOOKING:
        name, *options = command.split()
        assert main([name, str(path), *options]) == 0
        assert seen(path) == before, command
        told = capsys.readouterr().out
        assert "40" in told.split() or name in ("pins", "gc"), command


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_doctor_leaves_a_full_tier_as_it_was_whatever_the_configuration_says_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    """Its trial is no reason to evict pages; nor is a smaller capacity or a ttl that no server has taken over yet."""
    path = filled(tmp_path / "l3", layout)
    before = seen(path, times=False)
    for keys in ({}, {"capacity": "4MiB"}, {"ttl": "1s"}, {"layout": layout}, {"mode": "group"}):
        code, found = doctor(capsys, configuration(tmp_path, path, **keys))
        assert (code, found["open"]["level"], found["round trip"]["level"]) == (0, "ok", "ok"), found
        assert seen(path, times=False) == before


def test_the_doctor_on_a_tier_in_use_leaves_its_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = {"type": "file", "path": str(tmp_path / "l3"), "capacity": "4MiB"}
    store = open_tiers(load_config(ExtraConfig.around({"tiers": {"disk": disk}})))
    store_pages(store, page_keys(2000))
    kept = [key for key, there in zip(page_keys(2000), store.contains(page_keys(2000)), strict=True) if there]
    assert len(kept) < 2000, "it is full"
    assert doctor(capsys, configuration(tmp_path, tmp_path / "l3", capacity="4MiB"))[0] == 0
    assert_hits(store, kept)
    store.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_newer_release_beside_ours_is_reported_and_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    path = filled(tmp_path / "l3", layout)
    (path / "v4").mkdir()
    (path / "v4" / "members").touch()
    before = seen(path, times=False)
    code, found = doctor(capsys, configuration(tmp_path, path))
    assert (code, found["newer release"]["level"]) == (0, "warning")
    assert found["newer release"]["seen"].startswith(f"{path}/v4 is of a newer release; it stays as it is")
    assert main(["ls", str(path)]) == 0
    assert "40" in capsys.readouterr().out.split()
    assert seen(path, times=False) == before


def test_another_layout_is_reported_and_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = filled(tmp_path / "l3", "pages")
    before = seen(path)
    code, found = doctor(capsys, configuration(tmp_path, path, layout="slab"))
    assert code == 1
    assert "holds format 2, layout 'pages'" in found["open"]["seen"]
    assert seen(path) == before


# -- a directory that is not there, or empty ---------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [*LAYOUTS, "auto"])
def test_the_doctor_makes_no_path_that_does_not_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    (tmp_path / "mnt").mkdir()
    before = seen(tmp_path / "mnt", times=False)
    paths = [tmp_path / "mnt" / "a" / "b", tmp_path / "mnt" / "c"]
    code, found = doctor(capsys, configuration(tmp_path, paths, layout=layout))
    assert (code, found["round trip"]["level"]) == (0, "ok")
    assert "does not exist; a server makes it at its start" in found["file system"]["seen"]
    assert seen(tmp_path / "mnt", times=False) == before


@pytest.mark.parametrize("layout", [*LAYOUTS, "auto"])
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_the_doctor_leaves_an_empty_directory_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str, mode: int
) -> None:
    path = tmp_path / "l3"
    path.mkdir()
    path.chmod(mode)
    code, found = doctor(capsys, configuration(tmp_path, path, layout=layout))
    assert (code, found["round trip"]["level"]) == (0, "ok")
    assert (list(path.iterdir()), stat.S_IMODE(path.stat().st_mode)) == ([], mode)
    assert ("mode" in found) is (mode == 0o755)


def test_the_doctor_makes_no_directory_of_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hicache.yaml"
    for there in (False, True):
        place = tmp_path / "bucket"
        if there:
            place.mkdir()
        before = seen(tmp_path, times=False)
        tiers = {"cold": {"type": "object", "url": f"file://{place}"}}
        file.write_text(yaml.safe_dump(ExtraConfig.around({"tiers": tiers})))
        before = seen(tmp_path, times=False)
        code, found = doctor(capsys, str(file))
        assert (code, found["round trip"]["level"], "path" in found) == (0, "ok", not there)
        assert str(place) in found["reachable"]["seen"]
        assert seen(tmp_path, times=False) == before


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError, OSError])
def test_a_trial_that_is_cut_off_is_taken_away_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]
) -> None:
    (tmp_path / "l3").mkdir()
    file = configuration(tmp_path, tmp_path / "l3")

    def fail(*_: object) -> None:
        assert list((tmp_path / "l3").iterdir())
        raise failure

    monkeypatch.setattr("hicache_ext.storage.contract.trial._errors_of", fail)
    assert main(["doctor", file]) == (130 if failure is KeyboardInterrupt else 1)
    assert list((tmp_path / "l3").iterdir()) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGKILL,
    ],
)
def test_what_a_doctor_that_was_ended_has_made_is_gone(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once where it can, with the next one after a day where it was killed."""
    (tmp_path / "l3").mkdir()
    file = configuration(tmp_path, tmp_path / "l3", layout="pages")
    hold = "import hicache_ext.storage.contract.trial as t, time, sys; from hicache_ext.cli.main import main\n"
    hold += "t._errors_of = lambda *_: (print('in the middle', flush=True), time.sleep(600))\n"
    hold += "sys.exit(main(['doctor', sys.argv[1]]))"
    # Whoever runs the tests in the background has Ctrl-C ignored, in every process from there on.
    command = ["env", "--default-signal=INT", sys.executable, "-c", hold, file]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None and "in the middle\n" in process.stdout
        assert list((tmp_path / "l3").iterdir())
        process.send_signal(number)
        assert process.wait(60) == (-number if number == signal.SIGKILL else 130)
    if number == signal.SIGKILL:
        assert list((tmp_path / "l3").iterdir())
        monkeypatch.setattr(trial, "_LONGEST_TRIAL", -1.0)
        with trial.trial_directory(tmp_path / "l3"):
            pass
    assert list((tmp_path / "l3").iterdir()) == []


@pytest.mark.parametrize("hours", [0, 3])
def test_the_trial_of_a_doctor_at_work_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """However slow its store is."""
    with trial.trial_directory(tmp_path) as first:
        now = time.time() + hours * 3600
        monkeypatch.setattr(time, "time", lambda: now)
        with trial.trial_directory(tmp_path) as second:
            assert first.exists() and first != second
        assert first.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_trial_that_nobody_is_known_to_be_at_is_removed_when_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an earlier version, say, whose doctor is known by its pid."""
    left = tmp_path / ".hicache-ext-trial-host:17:4711-abcdef"
    left.mkdir()
    with trial.trial_directory(tmp_path):
        assert left.exists()
    monkeypatch.setattr(trial, "_LONGEST_TRIAL", -1.0)
    with trial.trial_directory(tmp_path):
        assert not left.exists()


def test_a_path_that_cannot_be_written_is_an_error_and_another_one_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    paths = [tmp_path / "file" / "l3", tmp_path / "good"]
    code, found = doctor(capsys, configuration(tmp_path, paths))
    assert code == 1
    assert (found["path"]["level"], found["round trip"]["level"]) == ("error", "ok")
    assert "Not a directory" in found["path"]["seen"]


# -- tools that change -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc", "clear", "pins"])
def test_no_tool_makes_a_directory(tmp_path: Path, command: str) -> None:
    options = ["--all", "--yes"] if command == "clear" else []
    with suppress(SystemExit):
        assert main([command, str(tmp_path / "missing"), *options]) != 0
    (tmp_path / "empty").mkdir()
    assert main([command, str(tmp_path / "empty"), *options]) != 0
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]
    assert os.listdir(tmp_path / "empty") == []


# -- beside a server at work -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tools_show_what_a_running_server_has_stored_so_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    disk = {"type": "file", "path": str(tmp_path / "l3"), "capacity": "64MiB", "layout": layout}
    store = open_tiers(load_config(ExtraConfig.around({"tiers": {"disk": disk}})))
    for stored in (10, 30):
        store_pages(store, page_keys(stored))
        assert main(["verify", str(tmp_path / "l3")]) == 0
        assert capsys.readouterr() == (f"{stored} good, 0 bad, 0 evicted meanwhile\n", "")
    store.clear([IDENTITY])
    assert main(["verify", str(tmp_path / "l3")]) == 0
    assert capsys.readouterr().out == "0 good, 0 bad, 0 evicted meanwhile\n"
    store.close()


def _write_without_end(kind: Any, path: str, stop: Any) -> None:
    store = kind("disk", Path(path), capacity=8 << 20)
    for number in itertools.count():
        if stop.is_set():
            break
        store_pages(store, page_keys(64, f"{os.getpid()} {number}"), ((20_000, 50_000)[number % 2],))
    store.close()


@pytest.mark.parametrize("kind", [PageFileStore, SlabStore])
def test_pages_that_are_written_over_while_they_are_looked_at_are_not_called_bad(tmp_path: Path, kind: Any) -> None:
    """A full tier of two slot sizes: pages, slots and slabs come and go all the time."""
    kind("disk", tmp_path, capacity=8 << 20).close()
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    writers = [spawn.Process(target=_write_without_end, args=(kind, str(tmp_path), stop)) for _ in range(2)]
    for writer in writers:
        writer.start()
    told: Counter[str] = Counter()
    while set(told) <= {"good", "gone"} and (told["good"] < 1000 or told["gone"] < 20):
        inspector = open_inspector(tmp_path)
        assert not inspector.remark
        for page in list(inspector.pages()):
            reasons = []
            for _ in range(2):
                stored = inspector.read(page)
                reasons.append("gone" if stored is None else reason_it_is_bad(page, stored) or "good")
            told[reasons[0] if reasons[0] == "good" else reasons[1]] += 1
    stop.set()
    for writer in writers:
        writer.join(60)
    assert set(told) == {"good", "gone"}, told
