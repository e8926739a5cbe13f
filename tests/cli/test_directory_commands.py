"""hicache-ext ls, stat, verify, gc, clear over directories of both layouts."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from hicache_ext.cli.main import main
from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.page.identity import ModelIdentity, PageIdentity, PoolIdentity, Shard
from hicache_ext.storage.contract import tenancy, tenants
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.tiers.file.inspection import open_inspector
from hicache_ext.storage.tiers.file.inspector import reason_it_is_bad
from hicache_ext.storage.tiers.file.pages import tree as page_tree
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, store_pages
from tests.storage.raw_access import RawFiles, RawSlots

MIB = 1 << 20


def identity(model: str, tp: tuple[int, int] = (0, 1)) -> PageIdentity:
    return PageIdentity(
        ModelIdentity(model, revision="main"),
        PoolIdentity("kv", "MHATokenToKVPoolHost", "bfloat16", "page_first", 16, (500, 500)),
        Shard(tp=tp),
    )


@pytest.fixture(params=["pages", "slab"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[[bytes], None]]:
    """A directory with 5 pages of model a (two shards) and 3 of model b, and a way to damage a page."""
    store: Any
    if request.param == "pages":
        store = PageFileStore("disk", tmp_path, capacity=64 * MIB)
    else:
        store = SlabStore("disk", tmp_path, capacity=64 * MIB)
    for facts, count in ((identity("a", (0, 2)), 2), (identity("a", (1, 2)), 3), (identity("b"), 3)):
        store.register_identity(facts.digest(), facts.document())
        store_pages(store, page_keys(count, "page", facts.digest()), (500, 500))

    def damage(key: bytes) -> None:
        opened = SlabStore("disk", tmp_path, capacity=64 * MIB) if request.param == "slab" else None
        raw: Any = RawFiles(tmp_path) if opened is None else RawSlots(opened)
        raw.write(key, raw.read(key)[:-1] + b"\xff")
        if opened is not None:
            opened.close()

    store.close()
    return tmp_path, damage


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main([str(argument) for argument in arguments])
    return code, capsys.readouterr().out


def test_ls_speaks_of_models_shards_and_bytes(directory: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "ls", directory[0])
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert [(words[1], words[2], words[4]) for words in lines[1:]] == [("a", "main", "bfloat16")] * 2 + [
        ("b", "main", "bfloat16")
    ]
    assert "tp 0/2" in out and "tp 1/2" in out and "whole" in out


def test_ls_counts_hits_and_knows_ages_in_slabs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = identity("a")
    keys = page_keys(3, "page", facts.digest())
    server = SlabStore("disk", tmp_path, capacity=64 * MIB)
    for _ in range(2):
        store = SlabStore("disk", tmp_path, capacity=64 * MIB)
        store.register_identity(facts.digest(), facts.document())
        store_pages(store, keys, (500, 500))
        assert_hits(store, keys, (500, 500))
        store.close()
    _, out = run(capsys, "ls", tmp_path)
    header, line = out.splitlines()
    for column in ("hits", "last written", "last used"):
        assert column in header
    assert line[header.index("hits") :].split()[0] == "6"
    assert line.count("s ago") == 2
    run(capsys, "clear", tmp_path, "--all", "--yes")
    store_pages(server, keys, (500, 500))
    _, out = run(capsys, "ls", tmp_path)
    header, line = out.splitlines()
    assert line[header.index("hits") :].split()[0] == "-"
    assert_hits(server, keys, (500, 500))
    server.close()
    # With the last server what it had counted goes.
    _, out = run(capsys, "ls", tmp_path)
    header, line = out.splitlines()
    assert line[header.index("hits") :].split()[0] == "-"


def test_stat_counts(directory: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "stat", directory[0])
    assert code == 0
    facts = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert (facts["models"], facts["identities"], facts["pages"]) == ("2", "3", "8")


def test_stat_of_a_configuration_knows_the_capacity(
    directory: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = {"type": "file", "path": str(directory[0]), "capacity": "64MiB"}
    file = tmp_path / "hicache.json"
    file.write_text(json.dumps(ExtraConfig.around({"tiers": {"disk": disk}})))
    code, out = run(capsys, "stat", file)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == f"tier        disk: {directory[0]}"
    (line,) = [line for line in lines if line.startswith("on disk")]
    assert " of 64MiB, " in line
    assert line.endswith(" %")


def test_stat_tells_the_pages_of_tenants_while_a_server_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = {"type": "file", "path": str(tmp_path / "disk"), "capacity": "64MiB", "layout": "slab"}
    disk |= {"io": "buffered", "threads": 2}
    file = tmp_path / "hicache.json"
    file.write_text(json.dumps(ExtraConfig.around({"tiers": {"disk": disk}, "tenants": {"team-a": {"share": "20%"}}})))
    server = open_tiers(load_config(str(file)))
    try:
        keys, owners = page_keys(5), tenants.in_force()
        owners.note([key[16:] for key in keys[:3]], "team-a")
        store_pages(server, keys, (1000,))
        _, out = run(capsys, "stat", file)
        assert {"tenant      team-a: 3 pages", "tenant      default: 2 pages"} < set(out.splitlines())
        assert json.loads(run(capsys, "stat", file, "--json")[1])[0]["tenants"] == {"team-a": 3, "default": 2}
    finally:
        server.close()
        tenancy.put_in_force(None)
    assert json.loads(run(capsys, "stat", file, "--json")[1])[0]["tenants"] == {}


def test_of_a_configuration_all_paths_are_looked_at_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    disk = {"type": "file", "path": [str(path) for path in paths], "capacity": "64MiB", "layout": "pages"}
    file = tmp_path / "hicache.json"
    file.write_text(json.dumps(ExtraConfig.around({"tiers": {"disk": disk}})))
    facts = identity("a")
    store = open_tiers(load_config(file))
    store.register_identity(facts.digest(), facts.document())
    keys = page_keys(40, "page", facts.digest())
    store_pages(store, keys, (500, 500))
    store.close()
    apart = [json.loads(run(capsys, "ls", path, "--json")[1]) for path in paths]
    assert all(0 < groups[0]["pages"] < 40 for groups in apart)
    (together,) = json.loads(run(capsys, "ls", file, "--json")[1])
    assert together["pages"] == 40 == sum(groups[0]["pages"] for groups in apart)
    one, two = (next(key for key in keys if RawFiles(path).read(key)) for path in paths)
    for path, key in zip(paths, (one, two), strict=True):
        raw = RawFiles(path)
        raw.write(key, raw.read(key)[:-1] + b"\xff")
    code, out = run(capsys, "verify", file, "--remove", "--json")
    found = json.loads(out)
    assert (code, found["good"], found["bad"], found["removed"]) == (0, 38, 2, 2)
    assert {page["hash"] for page in found["bad_pages"]} == {key[16:].hex() for key in (one, two)}
    assert run(capsys, "verify", file)[1] == "38 good, 0 bad, 0 evicted meanwhile\n"


def test_ls_and_stat_print_json(directory: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "ls", directory[0], "--json")
    groups = json.loads(out)
    assert code == 0
    assert sorted((group["facts"]["model"]["id"], group["pages"]) for group in groups) == [("a", 2), ("a", 3), ("b", 3)]
    assert {group["identity"] for group in groups} == {
        facts.digest().hex() for facts in (identity("a", (0, 2)), identity("a", (1, 2)), identity("b"))
    }
    code, out = run(capsys, "stat", directory[0], "--json")
    (stat,) = json.loads(out)
    assert code == 0
    assert (stat["models"], stat["identities"], stat["pages"], stat["capacity_bytes"]) == (2, 3, 8, None)
    assert stat["directories"] == [str(directory[0])]


def test_stat_says_the_ttl_of_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for ttl, words in (("90m", "ttl         90m"), ("none", None)):
        disk = {"type": "file", "path": str(tmp_path / "l3"), "capacity": "64MiB", "ttl": ttl}
        document = ExtraConfig.around({"tiers": {"disk": disk}})
        open_tiers(load_config(document)).close()
        (tmp_path / "hicache.json").write_text(json.dumps(document))
        code, out = run(capsys, "stat", tmp_path / "hicache.json")
        assert code == 0
        assert [line for line in out.splitlines() if line.startswith("ttl")] == [words][: words is not None]
        assert "ttl" not in run(capsys, "stat", tmp_path / "l3")[1]


def test_verify_finds_bad_pages_and_removes_them_only_when_asked(
    directory: tuple[Path, Callable[[bytes], None]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, damage = directory
    key = page_keys(3, "page", identity("b").digest())[1]
    assert run(capsys, "verify", path) == (0, "8 good, 0 bad, 0 evicted meanwhile\n")
    damage(key)
    code, out = run(capsys, "verify", path)
    assert code == 1
    assert f"bad (checksum): page {key[16:].hex()} of b" in out
    assert "7 good, 1 bad" in out
    assert run(capsys, "verify", path)[0] == 1
    code, out = run(capsys, "verify", path, "--remove")
    assert (code, out.splitlines()[-1]) == (0, "1 removed")
    assert run(capsys, "verify", path) == (0, "7 good, 0 bad, 0 evicted meanwhile\n")


def test_clear_removes_one_model_and_no_other(directory: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = directory
    code, out = run(capsys, "clear", path, "--model", "a", "--yes")
    assert (code, out.split()[:2]) == (0, ["5", "pages,"])
    assert run(capsys, "verify", path) == (0, "3 good, 0 bad, 0 evicted meanwhile\n")
    assert run(capsys, "clear", path, "--all", "--yes")[0] == 0
    assert run(capsys, "verify", path) == (0, "0 good, 0 bad, 0 evicted meanwhile\n")


def on_disk(path: Path) -> int:
    """Bytes of disk of pages."""
    parts = [path / part for part in ("v3/slabs", "pages", "tmp")]
    return sum(file.lstat().st_blocks * 512 for part in parts for file in part.rglob("*") if file.is_file())


def cleared(capsys: pytest.CaptureFixture[str], path: Path, *what: str) -> dict[str, Any]:
    code, out = run(capsys, "clear", path, *what, "--yes", "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_clear_of_everything_frees_the_disk_and_says_how_much(
    directory: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """ "493 MB removed" it said of slabs, and du saw no change."""
    path, _ = directory
    before = on_disk(path)
    found = cleared(capsys, path, "--all")
    assert on_disk(path) == 0
    assert before > 0 and abs(found["freed_bytes"] - before) < 1 << 20


@pytest.mark.parametrize("kind", [PageFileStore, SlabStore])
def test_clear_of_one_model_beside_a_server_frees_its_part_of_the_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: Any
) -> None:
    one, other = bytes(15) + b"1", bytes(15) + b"2"
    server = kind("disk", tmp_path, capacity=64 * MIB)
    keys, others = page_keys(50, "page", one), page_keys(50, "page", other)
    store_pages(server, keys, (100_000,))
    before = on_disk(tmp_path)
    store_pages(server, others, (8_000,))
    all_together = on_disk(tmp_path)
    found = cleared(capsys, tmp_path, "--identity", one.hex())
    assert on_disk(tmp_path) == all_together - before
    assert found["freed_bytes"] == pytest.approx(before, abs=1 << 18)
    assert server.contains(keys) == [False] * 50
    assert_hits(server, others, (8_000,))
    store_pages(server, keys, (100_000,))
    assert_hits(server, keys, (100_000,))
    server.close()


def test_what_shares_a_slab_with_pages_of_others_is_room_for_new_ones_and_clear_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = bytes(15) + b"1", bytes(15) + b"2"
    server = SlabStore("disk", tmp_path, capacity=64 * MIB)
    keys, others = page_keys(20, "page", one), page_keys(20, "page", other)
    for mine, its in zip(keys, others, strict=True):
        store_pages(server, [mine, its], (8_000,))
    code, out = run(capsys, "clear", tmp_path, "--identity", one.hex(), "--yes")
    assert (code, out.splitlines()) == (
        0,
        [
            "20 pages, 158.8KiB removed, 0B of disk freed",
            "the rest of their room is in slabs that hold other pages, too: new pages take it",
        ],
    )
    assert_hits(server, others, (8_000,))
    server.close()


def test_what_a_killed_clear_did_not_free_the_next_one_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SlabStore("disk", tmp_path, capacity=64 * MIB)
    store_pages(store, page_keys(20), (100_000,))
    with monkeypatch.context() as killed:
        killed.setattr(SlabStore, "_free_disk", lambda self: None)
        store.clear(None)
        store.close()
    assert on_disk(tmp_path) > 0
    assert cleared(capsys, tmp_path, "--all")["pages"] == 0
    assert on_disk(tmp_path) == 0


def test_clear_of_an_unknown_model_says_which_there_are(
    directory: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["clear", str(directory[0]), "--model", "c"]) == 1
    assert "no pages of the model 'c'; there are: a, b" in capsys.readouterr().err


def test_gc_keeps_every_page(directory: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = directory
    code, out = run(capsys, "gc", path)
    assert code == 0
    assert out.startswith("0 left-overs")
    assert run(capsys, "verify", path) == (0, "8 good, 0 bad, 0 evicted meanwhile\n")


def test_verify_finds_slots_that_do_not_hold_what_their_headers_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = SlabStore("disk", tmp_path, capacity=64 * MIB)
    keys = page_keys(8)
    store_pages(store, keys, (500, 500))
    (slab,) = (tmp_path / "v3" / "slabs").glob("*.slab")
    with slab.open("r+b") as file:
        for slot in (2, 5):
            file.seek(slot * 4096 + 30)
            file.write(b"\xff")
    code, out = run(capsys, "verify", tmp_path)
    assert (code, out.splitlines()[-2:]) == (
        1,
        ["6 good, 2 bad, 0 evicted meanwhile", "  2 x checksum"],
    )
    assert run(capsys, "verify", tmp_path, "--remove")[0] == 0
    assert store.contains(keys) == [number not in (2, 5) for number in range(8)]
    store.close()


@contextmanager
def cannot_open(code: int, words: str) -> Iterator[None]:
    """Neither pages alone nor those in packs."""
    refuse = {"side_effect": OSError(code, words)}
    with patch.object(Path, "open", **refuse), patch.object(page_tree.os, "open", **refuse):
        yield


def test_verify_does_not_call_bad_what_it_could_not_look_at(
    directory: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = directory[0]
    inspector = open_inspector(path)
    pages = list(inspector.pages())
    with cannot_open(errno.EMFILE, "Too many open files"):
        for page in pages:
            with pytest.raises(OSError, match="Too many open files"):
                inspector.read(page)
    with cannot_open(errno.EIO, "Input/output error"):
        assert [reason_it_is_bad(page, inspector.read(page)) for page in pages] == ["short_header"] * 8
    assert [reason_it_is_bad(page, inspector.read(page)) for page in pages] == [None] * 8
    kind = type(inspector)
    with patch.object(kind, "read", side_effect=OSError(errno.EMFILE, "Too many open files")):
        code, out = run(capsys, "verify", path, "--remove")
    assert (code, out) == (1, "0 good, 0 bad, 0 evicted meanwhile, 8 not looked at\n0 removed\n")
    assert run(capsys, "verify", path) == (0, "8 good, 0 bad, 0 evicted meanwhile\n")


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc"])
def test_a_directory_that_is_none_of_ours_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"'{tmp_path}' is no directory of a file tier: it has neither pages nor slabs\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc"])
def test_before_the_first_start_a_server_is_said_to_make_the_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    file = tmp_path / "hicache.json"
    tier = {"type": "file", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    file.write_text(json.dumps(ExtraConfig.around({"tiers": {"disk": tier}})))
    assert main([command, str(file)]) == 1
    assert capsys.readouterr().err == f"'{tmp_path}/kv' does not exist; a server makes it at its start\n"


# -- clear asks before it removes --------------------------------------------------------------------------------------

DIGITS = identity("a", (0, 2)).digest().hex()


@pytest.mark.parametrize("digits", ["", "d7", DIGITS[:7], "not-hex-digits", DIGITS + "00", "*"])
def test_clear_of_too_few_digits_is_refused(
    directory: tuple[Path, Any], capsys: pytest.CaptureFixture[str], digits: str
) -> None:
    path, _ = directory
    assert main(["clear", str(path), "--identity", digits]) == 2
    assert "allowed: 8 to 32 of its hex digits" in capsys.readouterr().err
    assert run(capsys, "verify", path)[1].startswith("8 good")


@pytest.mark.parametrize("digits", [DIGITS[:8], DIGITS[:12].upper(), DIGITS])
def test_clear_of_enough_digits_removes_that_identity(
    directory: tuple[Path, Any], capsys: pytest.CaptureFixture[str], digits: str
) -> None:
    path, _ = directory
    assert run(capsys, "clear", path, "--identity", digits, "--yes")[1].startswith("2 pages, ")
    assert run(capsys, "verify", path)[1].startswith("6 good")


def test_clear_of_digits_that_fit_nothing_says_what_there_is(
    directory: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["clear", str(directory[0]), "--identity", "0" * 8]) == 1
    assert DIGITS in capsys.readouterr().err


@pytest.mark.parametrize("kind", [PageFileStore, SlabStore])
def test_clear_of_digits_that_fit_several_identities_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: Any
) -> None:
    digests = [bytes.fromhex("d7d7d7d7" + end * 12) for end in ("aa", "ab")]
    store = kind("disk", tmp_path, capacity=64 * MIB)
    for digest in digests:
        store_pages(store, page_keys(3, "page", digest), (500,))
    store.close()
    assert main(["clear", str(tmp_path), "--identity", "d7d7d7d7"]) == 2
    said = capsys.readouterr().err
    assert "fits several identities" in said and all(digest.hex() in said for digest in digests)
    assert run(capsys, "clear", tmp_path, "--identity", "d7d7d7d7ab" + "ab" * 3, "--yes")[1].startswith("3 pages, ")
    assert run(capsys, "verify", tmp_path)[1].startswith("3 good")


@pytest.mark.parametrize(
    "document",
    ['{"model": "x", "pool": []}', '{"model": {}, "pool": null}', '{"shard": {"tp": 5, "pp": [1, "2", 3]}}', "[]"],
)
def test_a_document_of_another_shape_tells_nothing_and_stops_no_tool(
    directory: tuple[Path, Any], capsys: pytest.CaptureFixture[str], document: str
) -> None:
    for file in (directory[0] / "identities").glob("*.json"):
        file.write_text(document)
    for command in ("ls", "stat", "verify", "gc --dry-run", "clear --all --dry-run"):
        name, *options = command.split()
        code, out = run(capsys, name, directory[0], *options)
        assert code == 0
        assert "unknown" in out or name in ("stat", "verify", "gc")


def test_a_dry_run_says_what_would_be_removed(directory: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = directory
    for options, pages in ((("--model", "a"), 5), (("--all",), 8), (("--identity", DIGITS), 2)):
        code, out = run(capsys, "clear", path, *options, "--dry-run")
        assert (code, out.splitlines()[-1].split()[0]) == (0, str(pages))
        assert out.rstrip().endswith("would be removed")
    assert run(capsys, "verify", path)[1].startswith("8 good")


@pytest.mark.parametrize(
    ("answer", "removes"), [("y", True), ("yes", True), ("Y", True), ("", False), ("n", False), ("yesterday", False)]
)
def test_at_a_terminal_clear_asks(
    directory: tuple[Path, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    removes: bool,
) -> None:
    path, _ = directory
    terminal = io.StringIO(f"{answer}\n" if answer else "")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(["clear", str(path), "--model", "a"]) == (0 if removes else 1)
    said = capsys.readouterr().err
    assert "Remove 5 pages, " in said and f"of a from {path}? [y/N]" in said
    assert ("nothing was removed" in said) is not removes
    assert run(capsys, "verify", path)[1].startswith("3 good" if removes else "8 good")


@pytest.mark.parametrize("what", [("--all",), ("--model", "a")])
def test_without_a_terminal_clear_wants_yes(
    directory: tuple[Path, Any], capsys: pytest.CaptureFixture[str], what: tuple[str, ...]
) -> None:
    """It removed unasked; the pages said that --yes is needed."""
    assert main(["clear", str(directory[0]), *what]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "--yes" in said.err
    assert run(capsys, "verify", directory[0])[1].startswith("8 good")


def test_yes_is_not_asked(
    directory: tuple[Path, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(["clear", str(directory[0]), "--all", "--yes"]) == 0
    assert "?" not in capsys.readouterr().err


def test_gc_removes_and_counts_what_a_dry_run_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PageFileStore("disk", tmp_path, capacity=64 * MIB).close()
    # Of a member that nobody is.
    left = tmp_path / "tmp" / "4711.7.tmp"
    left.write_text("half a page")
    assert run(capsys, "gc", tmp_path, "--dry-run") == (0, "1 left-overs of killed processes would be removed\n")
    assert left.exists()
    assert run(capsys, "gc", tmp_path)[1].startswith("1 left-overs of killed processes removed")
    assert not left.exists()


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc --dry-run"])
def test_a_directory_that_is_gone_does_not_hide_the_others(
    command: str, directory: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = {
        "gone": {"type": "file", "path": f"{tmp_path}-gone", "capacity": "64MiB"},
        "disk": {"type": "file", "path": [str(tmp_path), f"{tmp_path}-also-gone"], "capacity": "64MiB"},
    }
    file = tmp_path.with_suffix(".json")
    file.write_text(json.dumps(ExtraConfig.around({"tiers": tiers})))
    code = main([*command.split(), str(file), "--json"])
    printed = capsys.readouterr()
    assert code == 1
    assert printed.err.count("left out: ") == 2 and "gone" in printed.err
    found = json.loads(printed.out)
    pages = {
        "ls": lambda: sum(group["pages"] for group in found),
        "stat": lambda: sum(tier["pages"] for tier in found),
        "verify": lambda: found["good"],
        "gc": lambda: 8,
    }
    assert pages[command.split()[0]]() == 8
