"""Who may use the files of a tier."""

from __future__ import annotations

import contextlib
import errno
import grp
import multiprocessing
import os
import pwd
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.cli.main import main
from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.errors import ConfigError
from hicache_ext.runtime.access import Access
from hicache_ext.storage.contract.store import SetResult
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.tiers.file import hints
from hicache_ext.storage.tiers.file.inspection import open_inspector
from hicache_ext.storage.tiers.file.inspector import reason_it_is_bad
from hicache_ext.storage.tiers.file.layouts import prepare_directory, slab_home
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.pins import add_pin
from hicache_ext.storage.tiers.file.slab.listing import SlabListing
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.storage.tiers.file.usage import occupied_bytes
from hicache_ext.testing.conformance.pages import IDENTITY, assert_hits, page_keys, store_pages

LAYOUTS = ("pages", "slab")
SOMEBODY, SOMEBODY_ELSE, TEAM = 54321, 54322, 54323
"""An account, another one, and a group."""
_FORK = multiprocessing.get_context("fork")


def opened(paths: Path | list[Path], layout: str, **tier: Any) -> Any:
    path = [str(one) for one in paths] if isinstance(paths, list) else str(paths)
    disk = {"type": "file", "path": path, "capacity": "64MiB", "layout": layout, "threads": 2, "io": "buffered", **tier}
    return open_tiers(load_config(ExtraConfig.around({"tiers": {"disk": disk}})))


def used(paths: Path | list[Path], layout: str, **tier: Any) -> None:
    """A server makes everything that a directory can have."""
    store = opened(paths, layout, ttl="1d", **tier)
    store.register_identity(IDENTITY, {"model": {"id": "example"}})
    store_pages(store, page_keys(40))
    for path in paths if isinstance(paths, list) else [paths]:
        add_pin(path, "prompt", [bytes(32)], None)
        hints.post_hint(path, b"hint")
    store.clear([page_keys(1, identity=bytes(16))[0][:16]])
    store.close()
    opened(paths, layout, ttl="1d", **tier).close()


def modes(path: Path) -> dict[str, set[str]]:
    """The modes of all directories and of all files at ``path`` and below."""
    found: dict[str, set[str]] = {"directories": set(), "files": set()}
    for entry in [path, *path.rglob("*")]:
        status = entry.lstat()
        found["directories" if entry.is_dir() else "files"].add(f"{stat.S_IMODE(status.st_mode):04o}")
    return found


PRIVATE = {"directories": {"0700"}, "files": {"0600"}}
SHARED = {"directories": {"2770"}, "files": {"0660"}}


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=["000", "022", "077"])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that other accounts reach, unlike pytest's."""
    place = Path(tempfile.mkdtemp(prefix="hicache-open-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("missing: root, to become another account")


def as_account(uid: int, groups: list[int], call: Callable[[], Any]) -> Any:
    """What ``call`` answers in a process of another account; the text of the exception that it raises."""
    needs_root()
    answers: Any = _FORK.Queue()

    def run() -> None:
        os.setgroups(groups)
        os.setgid(uid)
        os.setuid(uid)
        try:
            answers.put(call())
        except BaseException as error:  # noqa: BLE001 - the test says which
            answers.put(f"{type(error).__name__}: {error}")

    process = _FORK.Process(target=run)
    process.start()
    try:
        return answers.get(timeout=60)
    finally:
        process.join(10)
        process.kill()


@contextlib.contextmanager
def served_by(uid: int, groups: list[int], path: Path, **tier: Any) -> Iterator[None]:
    """While a server of another account has the slabs of ``path`` open."""
    ready, go_on = _FORK.Event(), _FORK.Event()

    def serve() -> None:
        with closing(opened(path, "slab", **tier)):
            ready.set()
            go_on.wait(60)

    server = threading.Thread(target=as_account, args=(uid, groups, serve))
    server.start()
    try:
        assert ready.wait(60)
        yield
    finally:
        go_on.set()
        server.join()


def slabs_of_this_version(path: Path) -> dict[str, Path]:
    """The files of a directory in which a server of slabs is at work, by name."""
    used(path, "slab")
    home = slab_home(path)
    files = {name: home / name for name in ("lock", "members", "0123456789.sock")}
    files |= {name: home / "slabs" / name for name in ("00000000-4096.slab", "00000000-4096.headers")}
    for file in files.values():
        if file.suffix == ".sock":
            with contextlib.chdir(home), socket.socket(socket.AF_UNIX) as listener:
                listener.bind(file.name)
        else:
            file.touch()
    return files


def loosened(path: Path) -> Path:
    """As an older release left a directory."""
    for entry in [path, *path.rglob("*")]:
        entry.chmod(0o755 if entry.is_dir() else 0o644)
    return path


# -- what is made ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_is_private_whatever_the_umask(tmp_path: Path, umask: None, layout: str) -> None:
    used(tmp_path / "new" / "l3", layout)
    assert modes(tmp_path / "new") == PRIVATE


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_mode_group_everything_is_for_the_group_whatever_the_umask(tmp_path: Path, umask: None, layout: str) -> None:
    needs_root()
    used([tmp_path / "new" / "a", tmp_path / "b"], layout, mode="group", group=TEAM)
    for path in (tmp_path / "new", tmp_path / "b"):
        assert modes(path) == SHARED
        assert {entry.stat().st_gid for entry in [path, *path.rglob("*")]} == {TEAM}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tools_keep_to_the_mode_that_the_server_chose(
    tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for mode, wanted in (("private", PRIVATE), ("group", SHARED)):
        path = tmp_path / mode
        used(path, layout, mode=mode)
        (tmp_path / "keys").write_text("00" * 32)
        assert main(["pin", str(path), "--name", "tool", "--keys", str(tmp_path / "keys")]) == 0
        assert main(["gc", str(path)]) == 0
        assert main(["clear", str(path), "--all", "--yes"]) == 0
        assert modes(path) == wanted


# -- what is there already ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_start_closes_what_an_older_release_left_open_and_says_so_once(
    tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    used(tmp_path / "l3", layout)
    loosened(tmp_path / "l3")
    store = opened(tmp_path / "l3", layout)
    assert modes(tmp_path / "l3") == PRIVATE
    assert_hits(store, page_keys(40))
    store.close()
    opened(tmp_path / "l3", layout).close()
    (line,) = [record.getMessage() for record in caplog.records if "have modes" in record.getMessage()]
    assert line.startswith(f"tier disk: {tmp_path / 'l3'} had mode 0755: ") and line.endswith("0700 and 0600 now")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_change_between_private_and_group_reaches_every_page(tmp_path: Path, layout: str) -> None:
    used(tmp_path / "l3", layout)
    for mode, wanted in (("group", SHARED), ("private", PRIVATE)):
        opened(tmp_path / "l3", layout, mode=mode).close()
        assert {kind: {mode[-3:] for mode in found} for kind, found in modes(tmp_path / "l3").items()} == {
            kind: {mode[-3:] for mode in found} for kind, found in wanted.items()
        }


def test_a_strangers_file_and_the_directory_it_is_in_keep_their_modes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    used(tmp_path, "pages")
    loosened(tmp_path)
    (tmp_path / "models").mkdir(mode=0o755)
    strangers = (
        "models/weights",
        "pages/README",
        "identities/notes.txt",
        "package.json",
        ".profile",
        "yarn.lock",
    )
    for stranger in strangers:
        (tmp_path / stranger).write_text("theirs")
        (tmp_path / stranger).chmod(0o644)
    opened(tmp_path, "pages").close()
    for place in (tmp_path, tmp_path / "models", tmp_path / "pages", tmp_path / "identities"):
        assert stat.S_IMODE(place.stat().st_mode) == 0o755
    for stranger in strangers:
        assert stat.S_IMODE((tmp_path / stranger).stat().st_mode) == 0o644
    for ours in ("tmp", "pins", f"pages/{IDENTITY.hex()}"):
        assert stat.S_IMODE((tmp_path / ours).stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "identities" / f"{IDENTITY.hex()}.json").stat().st_mode) == 0o600
    for place in (tmp_path, tmp_path / "pages", tmp_path / "identities"):
        assert f"{place} holds other things than this tier ('" in caplog.text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_directory_held_before_it_became_a_tiers_is_nobody_s_but_its_owner_s(
    tmp_path: Path, layout: str
) -> None:
    """``index``, ``tmp`` and ``weights`` are names that others give, too: the first start deleted and closed them."""
    theirs = {
        "tmp": 0o1777,
        "tmp/backup.2.tmp": 0o644,
        "tmp/of.somebody.else.clear": 0o644,
        "weights": 0o755,
        "weights/model.safetensors": 0o644,
        "pages": 0o755,
        "pages/index.html": 0o644,
        "index": 0o755,
        "index/vectors.db": 0o644,
        "v3": 0o755,
        "v3/index.html": 0o644,
        "pins": 0o775,
        "pins/board.txt": 0o664,
    }
    for name, mode in theirs.items():
        if mode & 0o100:
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).write_text("precious")
        (tmp_path / name).chmod(mode)
    (tmp_path / "lock").touch()
    (tmp_path / "lock").chmod(0o666)
    tmp_path.chmod(0o755)
    opened(tmp_path, layout).close()
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o666
    for _ in range(2):
        used(tmp_path, layout)
    assert {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in theirs} == theirs
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert {(tmp_path / name).read_text() for name, mode in theirs.items() if not mode & 0o100} == {"precious"}


@pytest.mark.parametrize("group", [False, True], ids=["private", "group"])
def test_a_start_corrects_all_that_slabs_of_this_version_have_sockets_too(tmp_path: Path, group: bool) -> None:
    files = slabs_of_this_version(tmp_path / "l3")
    loosened(tmp_path / "l3")
    prepare_directory(tmp_path / "l3", Access(group), "disk")
    assert modes(tmp_path / "l3") == (SHARED if group else PRIVATE)
    assert stat.S_ISSOCK(files["0123456789.sock"].stat().st_mode)


def test_files_of_others_among_slabs_of_this_version_keep_their_modes_with_the_directories_around_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = slabs_of_this_version(tmp_path)
    theirs = [tmp_path / "v3" / "notes.txt", tmp_path / "v3" / "00000001-4096.sock"]
    for stranger in theirs:
        stranger.write_text("theirs")
    loosened(tmp_path)
    prepare_directory(tmp_path, Access(), "disk")
    for kept in (tmp_path, tmp_path / "v3"):
        assert stat.S_IMODE(kept.stat().st_mode) == 0o755
        assert f"{kept} holds other things than this tier ('" in caplog.text
    assert {stat.S_IMODE(file.stat().st_mode) for file in theirs} == {0o644}
    assert stat.S_IMODE((tmp_path / "v3" / "slabs").stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in files.values()} == {0o600}


def test_the_directory_of_a_newer_release_is_no_strangers_and_keeps_its_modes(tmp_path: Path) -> None:
    slabs_of_this_version(tmp_path)
    (tmp_path / "v4").mkdir()
    for name in ("members", "lock"):
        (tmp_path / "v4" / name).write_text("{}")
    loosened(tmp_path)
    prepare_directory(tmp_path, Access(), "disk")
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    assert modes(tmp_path / "v4") == {"directories": {"0755"}, "files": {"0644"}}


@pytest.mark.parametrize("name", ["v3", "v4"])
def test_a_directory_of_somebody_else_that_is_named_as_a_version_keeps_its_modes(tmp_path: Path, name: str) -> None:
    used(tmp_path, "pages")
    (tmp_path / name).mkdir()
    (tmp_path / name / "lock").write_text("theirs")
    loosened(tmp_path)
    prepare_directory(tmp_path, Access(), "disk")
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert modes(tmp_path / name) == {"directories": {"0755"}, "files": {"0644"}}


def test_an_index_of_somebody_else_is_left_alone_beside_slabs(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir(mode=0o755)
    (tmp_path / "index" / "notes.db").write_text("precious")
    for layout in ("slab", "pages"):
        path = tmp_path / layout
        shutil.copytree(tmp_path / "index", path / "index")
        for _ in range(2):
            used(path, layout)
        assert (path / "index" / "notes.db").read_text() == "precious"
        assert stat.S_IMODE((path / "index").stat().st_mode) == 0o755


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_directory_with_the_sticky_bit_is_shared_by_accounts_and_stays_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, layout: str
) -> None:
    """/dev/shm and scratch mounts may happen to be empty."""
    tmp_path.chmod(0o1777)
    used(tmp_path, layout)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o1777
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} <= {0o700, 0o600}
    assert caplog.text.count("has the sticky bit of a place that accounts share and keeps its mode 1777") == 2


def test_a_disk_of_its_own_is_closed_although_its_file_system_has_put_something_there(tmp_path: Path) -> None:
    used(tmp_path, "slab")
    loosened(tmp_path)
    (tmp_path / "lost+found").mkdir(mode=0o700)
    opened(tmp_path, "slab").close()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_a_link_under_one_of_our_names_is_not_followed(tmp_path: Path) -> None:
    used(tmp_path / "l3", "pages")
    loosened(tmp_path / "l3")
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    victim.chmod(0o644)
    (tmp_path / "l3" / "pins" / "link.json").symlink_to(victim)
    opened(tmp_path / "l3", "pages").close()
    assert stat.S_IMODE(victim.stat().st_mode) == 0o644


def test_a_file_that_somebody_has_linked_elsewhere_is_not_opened(tmp_path: Path) -> None:
    """Where others may write into PATH, a link could lead to any file of the server's account."""
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    victim.chmod(0o644)
    for name in ("v3/lock", "v3/members", "v3/slabs/*.headers", "v3/slabs/*.slab"):
        path = tmp_path / name.replace("/", "-")
        used(path, "slab")
        (file,) = path.glob(name)
        file.unlink()
        file.symlink_to(victim)
        store = opened(path, "slab")
        store_pages(store, page_keys(40))
        store.close()
        assert (victim.read_text(), stat.S_IMODE(victim.stat().st_mode)) == ("theirs", 0o644)


def test_a_directory_above_that_cannot_be_read_is_no_obstacle(open_place: Path) -> None:
    needs_root()
    closed = open_place / "closed"
    closed.mkdir()
    os.chown(closed, SOMEBODY, SOMEBODY)
    closed.chmod(0o300)
    assert as_account(SOMEBODY, [], lambda: used(closed / "l3", "pages")) is None
    assert (closed / "l3" / "members").exists()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_links_and_without_synced_directories_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    link, fsync = os.link, os.fsync

    def no_link(source: Any, target: Any, **options: Any) -> None:
        if options:
            return link(source, target, **options)
        raise OSError(number, os.strerror(number))

    def files_only(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(fd)

    monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(os, "fsync", files_only)
    for layout in LAYOUTS:
        used(tmp_path / layout, layout)
        home = slab_home(tmp_path / layout) if layout == "slab" else tmp_path / layout
        assert (home / "members").exists()
    with closing(opened(tmp_path / "pages", "pages")) as store:
        alone = page_keys(1, "alone")
        assert store_pages(store, alone, [5 << 20]) == [SetResult.STORED]
        assert_hits(store, alone, [5 << 20])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_directory_of_another_account_is_a_warning_and_what_is_made_in_it_is_closed(
    open_place: Path, layout: str
) -> None:
    path = open_place / "l3"
    path.mkdir()
    path.chmod(0o2777)

    def start() -> list[str]:
        import logging

        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("hicache_ext").addHandler(handler)
        used(path, layout)
        return [line for line in lines if "belong to another account" in line]

    lines = as_account(SOMEBODY, [], start)
    assert isinstance(lines, list) and len(lines) == 2, lines
    assert str(path) in lines[0]
    inside = list(path.rglob("*"))
    assert {stat.S_IMODE(entry.stat().st_mode) & 0o777 for entry in inside} == {0o700, 0o600}


# -- who gets at it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_account_reads_nothing_and_holds_no_lock(open_place: Path, layout: str) -> None:
    used(open_place / "l3", layout)

    def pry() -> list[str]:
        got = []
        names = ["", "v3", "v3/slabs", "v3/members", "v3/lock"]
        for name in (*names, "usage", "members", "pages", "pins/prompt.json"):
            try:
                os.close(os.open(open_place / "l3" / name, os.O_RDONLY))
                got.append(name)
            except OSError:
                continue
        return got

    assert as_account(SOMEBODY, [], pry) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_accounts_of_one_group_share_a_directory(open_place: Path, layout: str) -> None:
    path = open_place / "l3"
    open_place.chmod(0o777)
    keys = page_keys(60)

    def serve(mine: slice) -> Any:
        def call() -> Any:
            store = opened(path, layout, mode="group", group=TEAM)
            results = store_pages(store, keys[mine])
            found = sum(store.contains(keys))
            store.close()
            return [result is SetResult.STORED for result in results].count(True), found

        return call

    assert as_account(SOMEBODY, [TEAM], serve(slice(0, 20))) == (20, 20)
    assert as_account(SOMEBODY_ELSE, [TEAM], serve(slice(20, 40))) == (20, 40)
    assert as_account(SOMEBODY, [TEAM], serve(slice(40, 60))) == (20, 60)
    assert modes(path) == SHARED
    assert "Permission denied" in as_account(SOMEBODY_ELSE, [], serve(slice(0, 20)))


def test_an_index_is_taken_from_members_of_the_group_by_members_alone(open_place: Path) -> None:
    """Root's tools looked at whatever any account gave them that could make a socket there."""
    path, group = open_place / "l3", {"mode": "group", "group": TEAM}
    open_place.chmod(0o777)
    as_account(SOMEBODY, [TEAM], lambda: opened(path, "slab", **group).close())

    def is_out_of_reach() -> bool:
        return SlabListing(path).servers_out_of_reach

    with served_by(SOMEBODY_ELSE, [TEAM], path, **group):
        assert [as_account(uid, [TEAM], is_out_of_reach) for uid in (SOMEBODY, SOMEBODY_ELSE, 0)] == [False] * 3
        assert as_account(0, [], is_out_of_reach) is True
    with served_by(SOMEBODY, [TEAM], path, **group):
        assert as_account(0, [], is_out_of_reach) is False


def test_a_group_that_the_account_is_not_in_is_a_sentence(open_place: Path) -> None:
    open_place.chmod(0o777)

    def start() -> None:
        opened(open_place / "l3", "pages", mode="group", group=TEAM).close()

    said = as_account(SOMEBODY, [], start)
    assert said.startswith("StoreSetupError: ") and f"this account (uid {SOMEBODY}) is not a member" in said


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whoever_may_read_may_look(open_place: Path, layout: str) -> None:
    """A directory that somebody opened for reading, or that is mounted read-only: no tool needs to write there."""
    path = open_place / "l3"
    used(path, layout)
    loosened(path)

    def look() -> Any:
        inspector = open_inspector(path)
        pages = list(inspector.pages())
        reasons = [reason_it_is_bad(page, stored) for page in pages if (stored := inspector.read(page))]
        assert occupied_bytes(path) > 0
        return len(pages), reasons == [None] * 40, [main([command, str(path)]) for command in ("ls", "stat", "verify")]

    before = sorted((str(entry), entry.stat().st_mtime_ns) for entry in path.rglob("*"))
    assert as_account(SOMEBODY, [], look) == (40, True, [0, 0, 0])
    assert sorted((str(entry), entry.stat().st_mtime_ns) for entry in path.rglob("*")) == before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_may_only_read_and_wants_to_change_something_gets_a_sentence(
    open_place: Path, layout: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = open_place / "l3"
    used(path, layout)
    loosened(path)
    keys = open_place / "keys"
    keys.write_text("00" * 32)
    before = sorted((str(entry), entry.stat().st_mtime_ns) for entry in path.rglob("*"))
    for command in ("gc", "clear --all --yes", f"pin --name x --keys {keys}", "unpin --name prompt"):
        name, *options = command.split()
        assert as_account(SOMEBODY, [], lambda: main([name, str(path), *options])) == 1  # noqa: B023
        assert "Permission denied" in capfd.readouterr().err, command
    assert sorted((str(entry), entry.stat().st_mtime_ns) for entry in path.rglob("*")) == before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_root_makes_with_a_tool_is_the_servers(open_place: Path, layout: str) -> None:
    """Else the server could not read its own index or pins afterwards."""
    open_place.chmod(0o777)
    path = open_place / "l3"
    as_account(SOMEBODY, [], lambda: used(path, layout))
    (open_place / "keys").write_text("00" * 32)
    assert main(["pin", str(path), "--name", "roots", "--keys", str(open_place / "keys")]) == 0
    assert main(["gc", str(path)]) == 0
    assert main(["clear", str(path), "--all", "--yes"]) == 0
    assert {entry.stat().st_uid for entry in [path, *path.rglob("*")]} == {SOMEBODY}


@pytest.mark.parametrize("umask_of_root", [0o022, 0o077])
def test_an_index_that_a_tool_of_root_makes_anew_is_the_servers(open_place: Path, umask_of_root: int) -> None:
    open_place.chmod(0o777)
    path = open_place / "l3"
    as_account(SOMEBODY, [], lambda: used(path, "slab"))
    before = os.umask(umask_of_root)
    try:
        assert main(["gc", str(path)]) == 0
    finally:
        os.umask(before)
    assert {entry.stat().st_uid for entry in [path, *path.rglob("*")]} == {SOMEBODY}
    assert modes(path) == PRIVATE
    assert as_account(SOMEBODY, [], lambda: used(path, "slab")) is None


def test_a_directory_mounted_for_reading_can_be_looked_at(
    open_place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even a directory for temporary files is needed."""
    for layout in LAYOUTS:
        path = open_place / layout
        used(path, layout)
        if subprocess.run(["mount", "--bind", str(path), str(path)], capture_output=True).returncode:
            pytest.skip("missing: root, to mount a file system")
        try:
            subprocess.run(["mount", "-o", "remount,ro,bind", str(path)], check=True)
            monkeypatch.setattr(tempfile, "gettempdir", lambda: 1 / 0)
            for command in ("ls", "stat", "verify", "pins", "gc --dry-run"):
                name, *options = command.split()
                assert main([name, str(path), *options]) == 0
            assert "the index is not in order" not in capsys.readouterr().err
        finally:
            monkeypatch.undo()
            subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_may_not_read_is_told_so(open_place: Path, layout: str) -> None:
    used(open_place / "l3", layout)
    said = as_account(SOMEBODY, [], lambda: open_inspector(open_place / "l3").layout)
    assert said == f"StoreError: '{open_place / 'l3'}' cannot be read: Permission denied"


# -- the configuration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"mode": "0755"}, "tiers.disk.mode: the text '0755' is not accepted; allowed: private, group"),
        ({"mode": "grop"}, "did you mean 'group'"),
        ({"mode": 448}, "tiers.disk.mode: the number 448 is not accepted; allowed: private, group"),
        ({"group": "team"}, "tiers.disk.group: files of mode private have no group; allowed: with mode: group"),
        ({"mode": "group", "group": "no such name"}, "tiers.disk.group: the text 'no such name' is no name of a group"),
        ({"mode": "group", "group": -1}, "tiers.disk.group: -1 is no number of a group"),
        ({"mode": "group", "group": True}, "tiers.disk.group: the value true is not accepted"),
        ({"require_mount": "yes"}, "tiers.disk.require_mount: the text 'yes' is not accepted; allowed: true or false"),
    ],
)
def test_wrong_values_are_refused_with_what_is_allowed(keys: dict[str, Any], sentence: str) -> None:
    disk = {"type": "file", "path": "/x", "capacity": "1GiB", **keys}
    with pytest.raises(ConfigError) as refused:
        load_config(ExtraConfig.around({"tiers": {"disk": disk}}))
    assert sentence in str(refused.value)


def test_a_group_that_the_machine_does_not_have_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hicache_ext\.tiers\.disk\.group: this machine has no group 'nobody-s-own'"):
        opened(tmp_path / "l3", "pages", mode="group", group="nobody-s-own")
    assert not (tmp_path / "l3").exists()


def test_a_group_may_be_named_or_numbered(tmp_path: Path) -> None:
    mine = grp.getgrgid(pwd.getpwuid(os.geteuid()).pw_gid)
    for number, group in enumerate((mine.gr_name, mine.gr_gid, str(mine.gr_gid))):
        path = tmp_path / str(number)
        opened(path, "slab", mode="group", group=group).close()
        assert path.stat().st_gid == mine.gr_gid


@pytest.mark.parametrize("kind", [PageFileStore, SlabStore])
def test_a_store_opened_without_a_configuration_is_private(tmp_path: Path, kind: Any) -> None:
    kind("disk", tmp_path / "a" / "b", capacity=64 << 20).close()
    assert modes(tmp_path / "a" / "b") == PRIVATE
