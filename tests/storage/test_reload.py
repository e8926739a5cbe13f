"""Changing tiers under traffic: what is taken over, what is refused, and that nothing is ever half done."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache_ext.config import ExtraConfig, HicacheExtConfig, load_config
from hicache_ext.errors import ConfigError, ControlError, StoreClosedError, StoreSetupError
from hicache_ext.storage.contract.store import PageBatch, SetResult
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.serving import control
from hicache_ext.storage.serving.config_file import ConfigFile, config_file_of
from hicache_ext.storage.serving.control import ControlSocket
from hicache_ext.storage.tiering.reload import ReloadableStore
from hicache_ext.testing.conformance.pages import IDENTITY, assert_hits, page_keys, store_pages
from tests.storage.guards.hung import KEY
from tests.storage.raw_access import stored_keys
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

Section = dict[str, Any]


@pytest.fixture
def tier(tmp_path: Path) -> Callable[..., Section]:
    return lambda name, **settings: {
        "type": "file",
        "path": str(tmp_path / name),
        "capacity": "64MiB",
        "layout": "pages",
        **settings,
    }


def config(tiers: dict[str, Section], **section: Any) -> HicacheExtConfig:
    return load_config(ExtraConfig.around({"tiers": tiers, **section}))


def pages_of(directory: Path) -> int:
    return len(stored_keys(directory))


# -- what is taken over ------------------------------------------------------------------------------------------------


def test_a_tier_is_added_drained_and_removed(tier: Callable[..., Section], tmp_path: Path) -> None:
    near, far = tier("near"), tier("far")
    store = open_tiers(config({"near": near}))
    store.register_identity(IDENTITY, {"model": {"id": "m"}})
    first, second, third = page_keys(3)
    store_pages(store, [first])

    assert store.reload(config({"near": near, "far": far})) == [
        f"tier far is used: file, capacity 64MiB, {tmp_path / 'far'}",
        "new retrieve_locations",
        "new store_locations",
    ]
    assert (tmp_path / "far" / "identities" / f"{IDENTITY.hex()}.json").exists()
    store_pages(store, [second])
    assert pages_of(tmp_path / "far") == 1

    # Drained: read, no longer written.
    drained = {"retrieve_locations": ["far", "near"], "store_locations": ["far"], "promote_to": "off"}
    store.reload(config({"near": near, "far": far}, **drained))
    store_pages(store, [third])
    assert_hits(store, [first, second, third])
    assert (pages_of(tmp_path / "near"), pages_of(tmp_path / "far")) == (2, 2)

    assert "tier near is no longer used" in store.reload(config({"far": far}))
    assert [tier.name for tier in store.tiers] == ["far"]
    assert store.contains([first, second, third]) == [False, True, True]
    store.close()


def test_limits_and_guards_of_a_live_tier_change_without_opening_it_again(tier: Callable[..., Section]) -> None:
    store = open_tiers(config({"disk": tier("disk")}))
    bare = store._live["disk"].bare
    store_pages(store, [KEY])
    changes = store.reload(config({"disk": tier("disk", capacity="32MiB", timeout="30s", required=False)}))
    assert changes == ["tier disk: new required, timeout, capacity"]
    assert store._live["disk"].bare is bare
    (guarded,) = store.tiers
    assert guarded.describe().details["capacity"] == 32 << 20
    assert guarded.describe().details["breaker"] == "closed"
    assert_hits(store, [KEY])
    assert store.reload(config({"disk": tier("disk")})) == ["tier disk: new required, timeout, capacity"]
    assert_hits(store, [KEY])
    store.close()
    with pytest.raises(StoreClosedError):
        bare.contains([KEY])


def test_a_reload_to_the_same_changes_nothing(tier: Callable[..., Section]) -> None:
    store = open_tiers(config({"disk": tier("disk")}))
    before = store.arrangement
    assert store.reload(config({"disk": tier("disk")})) == []
    assert store.arrangement is before
    store.close()


def test_a_tier_that_is_neither_read_nor_written_is_not_opened(tier: Callable[..., Section], tmp_path: Path) -> None:
    spare = {"disk": tier("disk"), "spare": tier("spare")}
    store = open_tiers(config(spare, retrieve_locations=["disk"], store_locations=["disk"]))
    assert not (tmp_path / "spare").exists()
    store.reload(config(spare))
    assert (tmp_path / "spare").exists()
    store.close()


def test_calls_go_on_while_tiers_come_and_go(tier: Callable[..., Section]) -> None:
    both = {"near": tier("near"), "far": tier("far", timeout="60s")}
    other = {"near": tier("near", timeout="60s"), "far": tier("far")}
    arrangements = [
        config({"near": tier("near")}),
        config(both),
        config(both, retrieve_locations=["far", "near"]),
        config(other, store_locations=["near"]),
    ]
    before = set(threading.enumerate())
    store = open_tiers(arrangements[0])
    store_pages(store, page_keys(20))  # always in near
    stop = threading.Event()
    problems: list[BaseException] = []
    rounds = [0] * 4

    def use(number: int) -> None:
        keys = page_keys(20, prefix=f"of {number}")
        try:
            while not stop.is_set():
                assert_hits(store, page_keys(20))
                assert all(result.durable for result in store_pages(store, keys))
                assert store.count_leading(page_keys(20)) == 20
                rounds[number] += 1
        except BaseException as error:  # noqa: BLE001 - reported by the test's own thread
            problems.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for number in range(40):
        store.reload(arrangements[number % 4])
    wait_until(lambda: min(rounds) >= 2 or problems)
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []
    store.close()
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_a_store_that_closes_during_a_reload_loses_nothing_that_waits_to_be_written(
    tier: Callable[..., Section], tmp_path: Path
) -> None:
    both = {"near": tier("near"), "far": tier("far")}
    store = open_tiers(config(both, store_policies={"far": "async"}))
    bare = store._live["far"].bare
    write, slow = bare.set, threading.Event()

    def set_slowly(batch: PageBatch) -> list[SetResult]:
        slow.wait(60)
        return write(batch)

    bare.set = set_slowly  # type: ignore[method-assign]
    before = store.arrangement
    assert set(store_pages(store, page_keys(100))) == {SetResult.STORED}  # more than the queue writes at once
    reloading = threading.Thread(
        target=store.reload, args=(config(both, store_policies={"far": "async"}, promote_to="off"),)
    )
    reloading.start()
    wait_until(lambda: store.arrangement is not before)
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(0.2)
    slow.set()
    closing.join(60)
    reloading.join(60)
    assert pages_of(tmp_path / "far") == 100
    with pytest.raises(StoreClosedError):
        bare.contains([KEY])


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"role": "prefill"}, "hicache_ext.role: cannot change while the server runs: SGLang was launched for it"),
        (
            {"model": {"weights_epoch": "2"}},
            "hicache_ext.model: cannot change while the server runs: it is part of every page's identity",
        ),
        (
            {"kv_dtype": "fp8_e4m3"},
            "hicache_ext.kv_dtype: cannot change while the server runs: it is part of every page's identity",
        ),
        ({"watch_config": True}, "hicache_ext.watch_config: cannot change while the server runs: it is read at start"),
    ],
)
def test_what_the_pages_or_the_launch_depend_on_cannot_change(
    tier: Callable[..., Section], changed: Section, sentence: str
) -> None:
    store = open_tiers(config({"disk": tier("disk")}))
    with pytest.raises(ConfigError) as refused:
        store.reload(config({"disk": tier("disk")}, **changed))
    assert str(refused.value) == sentence
    store.close()


@pytest.mark.parametrize(("key", "value"), [("path", "elsewhere"), ("threads", 2), ("layout", "auto")])
def test_where_a_live_tier_is_cannot_change(tier: Callable[..., Section], tmp_path: Path, key: str, value: Any) -> None:
    store = open_tiers(config({"disk": tier("disk")}))
    store_pages(store, [KEY])
    wanted = str(tmp_path / value) if key == "path" else value
    with pytest.raises(ConfigError) as refused:
        store.reload(config({"disk": tier("disk", **{key: wanted}), "other": tier("other")}))
    assert str(refused.value) == (
        f"hicache_ext.tiers.disk.{key}: cannot change while the tier is in use; give the tier another name (the old "
        "one is then closed), or restart"
    )
    assert not (tmp_path / "other").exists()
    assert_hits(store, [KEY])
    store.close()


def test_the_capacity_of_slabs_changes_but_not_to_unlimited(tier: Callable[..., Section]) -> None:
    store = open_tiers(config({"disk": tier("disk", layout="auto")}))
    store.reload(config({"disk": tier("disk", layout="auto", capacity="128MiB")}))
    assert store.tiers[0].describe().details["capacity"] == 128 << 20
    with pytest.raises(ConfigError, match=r"disk\.capacity: cannot change in this layout while the tier is in use"):
        store.reload(config({"disk": tier("disk", layout="auto", capacity="unlimited")}))
    store.close()


def test_the_directory_of_a_live_tier_cannot_move_to_another_name(tier: Callable[..., Section]) -> None:
    store = open_tiers(config({"disk": tier("disk")}))
    with pytest.raises(ConfigError, match=r"tiers\.renamed\.path: is in use by tier 'disk'; remove that one first"):
        store.reload(config({"renamed": tier("disk")}))
    store.close()


def test_a_new_tier_that_cannot_start_leaves_everything_as_it_was(tier: Callable[..., Section], tmp_path: Path) -> None:
    before = set(threading.enumerate())
    (tmp_path / "bad").write_text("a file where the directory should be")
    store = open_tiers(config({"disk": tier("disk")}))
    store_pages(store, [KEY])
    arrangement = store.arrangement
    with pytest.raises(StoreSetupError, match="tier 'bad' cannot start"):
        store.reload(config({"good": tier("good"), "bad": tier("bad"), "disk": tier("disk", timeout="60s")}))
    assert store.arrangement is arrangement
    assert store.config == config({"disk": tier("disk")})
    assert_hits(store, [KEY])
    store.close()
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_a_new_tier_that_is_not_required_is_opened_later(tier: Callable[..., Section], tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("a file where the directory should be")
    store = open_tiers(config({"disk": tier("disk")}))
    store.reload(config({"disk": tier("disk"), "bad": tier("bad", required=False)}))
    store_pages(store, [KEY])
    (tmp_path / "bad").unlink()
    wait_until(lambda: store.tiers[1].describe().details.get("layout") == "pages")
    assert store_pages(store, [KEY]) == [SetResult.STORED]  # in the one that came late
    assert pages_of(tmp_path / "bad") == 1
    store.close()


def test_a_closed_store_takes_nothing_over(tier: Callable[..., Section]) -> None:
    store = open_tiers(config({"disk": tier("disk")}))
    store.close()
    before = set(threading.enumerate())
    with pytest.raises(StoreClosedError):
        store.reload(config({"disk": tier("disk"), "more": tier("more")}))
    assert set(threading.enumerate()) <= before


# -- the file, and the command -----------------------------------------------------------------------------------------


class Server:
    """What a backend has of these, without SGLang."""

    def __init__(self, file: Path, *, watch: bool = False) -> None:
        self.file = file
        self.distrusted: list[str] = []
        self.store: ReloadableStore = open_tiers(load_config(file))
        of_server: dict[str, Any] = {"distrust": self.distrusted.append, "port": 30000}
        self.config_file = ConfigFile(str(file), self.store, watch=watch, watch_interval=0.01, **of_server)

    def close(self) -> None:
        self.config_file.close()
        self.store.close()

    @property
    def tiers(self) -> list[str]:
        return [tier.name for tier in self.store.tiers]


def write(file: Path, tiers: dict[str, Section], **top: Any) -> None:
    """As an editor does: whole, under another name, then renamed."""
    temporary = file.with_suffix(".new")
    temporary.write_text(yaml.safe_dump({**ExtraConfig.around({"tiers": tiers}), **top}))
    temporary.rename(file)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hce-") as directory:  # a socket's path must be short
        monkeypatch.setenv("HICACHE_EXT_RUNTIME_DIR", directory)
        yield Path(directory)


@pytest.fixture
def file(tmp_path: Path, tier: Callable[..., Section], runtime: Path) -> Path:
    file = tmp_path / "hicache.yaml"
    write(file, {"disk": tier("disk")})
    return file


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def serve(*args: Any, **kwargs: Any) -> Server:
        servers.append(Server(*args, **kwargs))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


_MAIN = "import sys; from hicache_ext.cli.main import main; sys.exit(main())"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from hicache_ext.cli.main import main; sys.exit(main())",
            "reload",
            *arguments,
        ],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_process_says_whose_it_is_and_is_told_that_its_pages_are_wrong(
    file: Path, serve: Callable[..., Server]
) -> None:
    server = serve(file)
    (path,) = control.servers()
    assert control.ask(path, {"call": "facts"})["port"] == 30000
    assert control.ask(path, {"call": "distrust", "why": "it differs"})["ok"]
    assert server.distrusted == ["it differs"]


def test_the_command_reaches_every_server_of_the_file_and_no_other(
    file: Path, tmp_path: Path, tier: Callable[..., Section], serve: Callable[..., Server]
) -> None:
    other_file = tmp_path / "other.yaml"
    write(other_file, {"disk": tier("elsewhere")})
    ranks, stranger = [serve(file), serve(file)], serve(other_file)
    write(file, {"disk": tier("disk"), "more": tier("more")})
    write(other_file, {"disk": tier("elsewhere"), "more": tier("elsewhere more")})

    done = command(str(file), "--check")
    assert (done.returncode, done.stdout) == (0, "2 processes would take it over\n"), done.stderr
    assert ranks[0].tiers == ["disk"]

    done = command("@" + str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tier more is used") == 2
    assert "taken over by 2 of 2 processes" in done.stdout
    assert [server.tiers for server in (*ranks, stranger)] == [["disk", "more"], ["disk", "more"], ["disk"]]
    assert command(str(file)).stdout.count("nothing to change") == 2


def test_a_refused_reload_is_said_and_changes_no_rank(
    file: Path, tier: Callable[..., Section], serve: Callable[..., Server]
) -> None:
    server = serve(file)
    write(file, {"disk": tier("moved"), "more": tier("more")})
    done = command(str(file))
    assert done.returncode == 1
    assert "hicache_ext.tiers.disk.path: cannot change while the tier is in use" in done.stderr
    assert "refused by 1 of 1 processes; nothing was changed" in done.stderr
    assert server.tiers == ["disk"]


def test_sglangs_own_keys_cannot_change(file: Path, tier: Callable[..., Section], serve: Callable[..., Server]) -> None:
    server = serve(file)
    write(file, {"disk": tier("disk"), "more": tier("more")}, prefetch_threshold=128)
    with pytest.raises(ConfigError, match=r"prefetch_threshold: cannot change while the server runs: SGLang reads it"):
        server.config_file.reload()
    assert server.tiers == ["disk"]


def test_a_file_with_a_mistake_never_reaches_a_server(file: Path, serve: Callable[..., Server]) -> None:
    serve(file)
    file.write_text(file.read_text().replace("64MiB", "64M"))
    done = command(str(file))
    assert done.returncode == 2
    assert "hicache_ext.tiers.disk.capacity: the unit 'M' is ambiguous" in done.stderr


def test_the_command_says_when_there_is_no_server(file: Path) -> None:
    done = command(str(file))
    assert done.returncode == 1
    assert f"no running server of this user was started with @{file}" in done.stderr
    assert "given its configuration inline has to be restarted" in done.stderr


def test_sockets_of_killed_servers_are_cleared_away(file: Path, runtime: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as killed:
        killed.bind(str(runtime / "1-0.sock"))
    assert command(str(file)).returncode == 1
    assert not list(runtime.iterdir())


def test_two_containers_with_equal_process_ids_share_a_directory_of_sockets(
    file: Path, tier: Callable[..., Section], serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 7)
    # The second container's count of sockets begins anew, too.
    monkeypatch.setattr(control, "_numbers", itertools.count(), raising=False)
    first = serve(file)
    monkeypatch.setattr(control, "_numbers", itertools.count(), raising=False)
    second = serve(file)
    write(file, {"disk": tier("disk"), "more": tier("more")})
    assert "taken over by 2 of 2 processes" in command(str(file)).stdout
    assert first.tiers == second.tiers == ["disk", "more"]
    first.close()
    assert "1 processes would take it over" in command(str(file), "--check").stdout


@pytest.mark.parametrize("length", [82, 107, 108, 400])
def test_a_long_path_of_the_directory_is_no_obstacle(
    file: Path, tmp_path: Path, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    place = tmp_path
    while (left := length - len(str(place))) > 1:
        place /= "x" * min(200, left - 1)
    place.mkdir(parents=True, exist_ok=True)
    monkeypatch.delenv("HICACHE_EXT_RUNTIME_DIR")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    serve(file)
    assert "1 processes would take it over" in command(str(file), "--check").stdout


def test_a_server_that_does_not_answer_is_not_left_out(
    file: Path, tier: Callable[..., Section], serve: Callable[..., Server], runtime: Path
) -> None:
    server = serve(file)
    write(file, {"disk": tier("disk"), "more": tier("more")})
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stopped:
        stopped.bind(str(runtime / "stopped.sock"))
        stopped.listen(1)
        done = command(str(file))
    assert done.returncode == 1
    assert "refused by 1 of 2 processes; nothing was changed" in done.stderr
    assert server.tiers == ["disk"]


@pytest.mark.parametrize("gone", ["socket", "directory"])
def test_a_server_whose_socket_was_removed_makes_another(
    file: Path, runtime: Path, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    """Files in a directory for temporary files are removed when they are old."""
    monkeypatch.setattr(control, "_LOOK_EVERY", 0.05)
    serve(file)
    (path,) = runtime.iterdir()
    path.unlink()
    if gone == "directory":
        runtime.rmdir()
    wait_until(lambda: runtime.is_dir() and any(runtime.glob("*.sock")))
    assert "1 processes would take it over" in command(str(file), "--check").stdout


def test_a_directory_that_others_may_enter_is_not_used(
    file: Path, runtime: Path, serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    runtime.chmod(0o755)
    serve(file)
    assert "will not reach this server" in caplog.text and "mode 0700" in caplog.text
    assert command(str(file)).returncode == 1


def test_a_watched_file_is_taken_over_and_a_bad_one_is_not(
    file: Path, tier: Callable[..., Section], serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(file, watch=True)
    file.write_text(file.read_text().replace("64MiB", "64M"))
    # What was read while the file was being written may have been refused for another reason before.
    wait_until(lambda: "the unit 'M' is ambiguous" in caplog.text)
    assert "is not taken over, what was in force stays" in caplog.text
    assert server.tiers == ["disk"]
    write(file, {"disk": tier("disk"), "more": tier("more")})
    wait_until(lambda: server.tiers == ["disk", "more"])


def test_a_file_that_vanishes_and_comes_back_is_no_trouble(
    file: Path, tier: Callable[..., Section], serve: Callable[..., Server]
) -> None:
    server = serve(file, watch=True)
    file.unlink()
    time.sleep(0.05)
    write(file, {"disk": tier("disk"), "more": tier("more")})
    wait_until(lambda: server.tiers == ["disk", "more"])


def test_a_server_that_runs_something_else_than_the_file_says_is_not_reloaded(
    file: Path, tier: Callable[..., Section], caplog: pytest.LogCaptureFixture
) -> None:
    running = config({"attached": tier("attached")})
    store = open_tiers(running)
    assert config_file_of(str(file), store, running) is None
    assert "does not hold the configuration that this server was started with" in caplog.text
    store.close()


def test_a_server_that_goes_by_a_view_of_its_file_reloads_through_the_same_view(
    file: Path, tier: Callable[..., Section]
) -> None:
    def readers(found: HicacheExtConfig) -> HicacheExtConfig:
        return found.model_copy(update={"store_locations": ()})

    store = open_tiers(readers(load_config(file)))
    found = config_file_of(str(file), store, store.config, view=readers)
    assert found is not None
    write(file, {"disk": tier("disk"), "more": tier("more")})
    found.reload()
    assert store.config.retrieve_locations == ("disk", "more")
    assert store.config.store_locations == ()
    found.close()
    store.close()


def test_a_watch_without_a_file_is_said(tier: Callable[..., Section], caplog: pytest.LogCaptureFixture) -> None:
    inline = config({"disk": tier("disk")}, watch_config=True)
    store = open_tiers(inline)
    assert config_file_of(None, store, inline) is None
    assert "given inline, so that no file is watched" in caplog.text
    store.close()


def test_close_leaves_neither_socket_nor_thread(file: Path, runtime: Path) -> None:
    before = set(threading.enumerate())
    server = Server(file, watch=True)
    assert len(list(runtime.iterdir())) == 1
    server.close()
    assert list(runtime.iterdir()) == []
    assert set(threading.enumerate()) <= before


def test_without_a_thread_there_is_no_socket_that_nobody_answers(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(ControlError, match="no thread"):
        ControlSocket(lambda request: request)
    assert list(runtime.iterdir()) == []


@pytest.mark.parametrize("clients", [1, 60])
def test_slow_clients_hold_nobody(clients: int, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_REQUEST_SECONDS", 1000.0)
    socket_of_server = ControlSocket(lambda request: {"ok": True, "words": "x" * request["length"]})
    slow = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(clients)]
    try:
        for number, connection in enumerate(slow):
            connection.connect(str(socket_of_server.path))
            # Some never ask, some stop in the middle, and some never read a long answer.
            connection.sendall([b"", b"{", b'{"length": 4000000}\n'][number % 3 if clients > 1 else 2])
        for _ in range(3):
            assert control.ask(socket_of_server.path, {"length": 2}, seconds=20)["words"] == "xx"
    finally:
        monkeypatch.setattr(control, "_REQUEST_SECONDS", 10.0)
        socket_of_server.close()
        for connection in slow:
            connection.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hicache-control")]


def test_nonsense_on_the_socket_is_answered_or_dropped(file: Path, runtime: Path, serve: Callable[..., Server]) -> None:
    serve(file)
    (path,) = runtime.iterdir()
    for nonsense in (b"", b"\n", b"[1]\n", b"{\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(path))
            connection.sendall(nonsense)
    assert control.ask(path, {"call": "stop"})["messages"] == ["unknown call 'stop'"]
    assert control.ask(path, {"call": "facts"})["file"] == str(file)


@pytest.mark.parametrize("answer", [b"[" * 200_000 + b"\n", b"[1]\n", b"{\n", b"\xff\n", b"x" * (2 << 20)])
def test_nonsense_in_place_of_an_answer_is_one_sentence(answer: bytes, runtime: Path) -> None:
    def nonsense(request: dict[str, Any]) -> dict[str, Any]:
        return {}

    server = ControlSocket(nonsense)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            control, "_send", lambda connection, document: connection.sendall(answer if not document else b"{}\n")
        )
        with pytest.raises(ControlError, match=r"^the server behind .*\.sock does not answer: "):
            control.ask(server.path, {"call": "facts"})
    server.close()


def test_admission_and_a_budget_come_and_go_by_a_reload(tier: Callable[..., Section]) -> None:
    store = open_tiers(config({"near": tier("near")}))
    store.register_identity(IDENTITY, {"model": {"id": "m"}})
    first, second, third = page_keys(3)
    assert store_pages(store, [first]) == [SetResult.STORED]

    assert store.reload(config({"near": tier("near", write_budget="1B/day")})) == ["tier near: new write_budget"]
    assert store_pages(store, [second]) == [SetResult.REFUSED]
    assert store.tiers[0].describe().details["admission"] == "within the budget"

    store.reload(config({"near": tier("near", admission="learned")}))
    assert store_pages(store, [second]) == [SetResult.STORED]
    store.reload(config({"near": tier("near")}))
    assert store_pages(store, [third]) == [SetResult.STORED]
    assert "admission" not in store.tiers[0].describe().details
    assert_hits(store, [first, second, third])
    store.close()
