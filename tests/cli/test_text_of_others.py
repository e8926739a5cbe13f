"""Whatever others wrote into a shared directory is shown as text: it moves no cursor and forges no line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hicache_ext.cli.main import main
from hicache_ext.config import ExtraConfig
from hicache_ext.page.hashes import page_hashes
from hicache_ext.page.identity import ModelIdentity, PageIdentity, PoolIdentity, Shard
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.pages.tree import save_document
from hicache_ext.storage.tiers.file.pins import add_pin
from hicache_ext.testing.conformance.pages import store_pages
from tests.cli.conftest import METRICS
from tests.rigs.metrics_page import metrics_page
from tests.storage.raw_access import RawFiles

HOSTILE = "m\x1b[2J\x1b]0;pwned\x07\nFORGED line\r\u202e\x9b31m"
TOKENS = list(range(100))


def hostile(model: str, dtype: str = f"bf16{HOSTILE}", revision: str = HOSTILE) -> PageIdentity:
    pool = PoolIdentity("kv", "MHATokenToKVPoolHost", dtype, f"page_first{HOSTILE}", 16, (500, 500))
    return PageIdentity(ModelIdentity(model, revision=revision), pool, Shard())


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory that somebody else may write to as well, with a bad page, and a configuration of it."""
    path = tmp_path / "pool"
    store = PageFileStore("pool", path, capacity=None)
    for one in (hostile(HOSTILE), hostile(HOSTILE, "fp8"), hostile("y" * 5000)):
        store.register_identity(one.digest(), one.document())
        keys = [one.digest() + page for page in page_hashes(TOKENS, 16)]
        store_pages(store, keys[:-1] if one.pool.dtype == "fp8" else keys, one.pool.segments)
    store.close()
    raw = RawFiles(path)
    bad = hostile(HOSTILE).digest() + page_hashes(TOKENS, 16)[0]
    raw.write(bad, raw.read(bad)[:-1] + b"\xff")
    odd = {"model": {"id": 7, "revision": [HOSTILE]}, "pool": {"name": HOSTILE, "dtype": 3}, "shard": {HOSTILE: [0, 2]}}
    save_document(path, bytes(16), odd)
    add_pin(path, "prompt", page_hashes(TOKENS, 16)[:2], None)
    (path / "pins" / "prompt.json").rename(path / "pins" / f"{HOSTILE}.json")
    (path / "pins" / f"{HOSTILE}2.json").write_text("no pin")
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS))
    near = {"type": "file", "path": str(tmp_path / "near"), "capacity": "1GiB", "layout": "pages"}
    pool = {"type": "file", "path": str(path), "capacity": "1GiB", "layout": "pages"}
    (tmp_path / "hicache.yaml").write_text(yaml.safe_dump(ExtraConfig.around({"tiers": {"near": near, "pool": pool}})))
    return tmp_path


COMMANDS = (
    "ls pool",
    "stat pool",
    "verify pool",
    "gc pool --dry-run",
    "clear pool --all --dry-run",
    "clear pool --model nobody",
    "clear pool --identity 00000000",
    "clear pool --all",
    "pins pool",
    "unpin pool --name nobody",
    "explain hicache.yaml --tokens tokens.json",
    "explain hicache.yaml --tokens tokens.json --served-name nobody",
    "warm hicache.yaml --tokens tokens.json",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_prints_what_a_terminal_obeys(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(shared)
    main(command.split())
    printed = capsys.readouterr()
    for line in (printed.out + printed.err).split("\n"):
        assert line.isprintable(), line
        assert not line.startswith("FORGED")
        assert len(line) < 3000


def test_explain_shows_the_chosen_model_escaped(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(shared)
    main(["explain", "hicache.yaml", "--tokens", "tokens.json", "--served-name", HOSTILE])
    out = capsys.readouterr().out
    assert "m\\x1b[2J" in out and "it is there under another identity" in out
    assert all(line.isprintable() for line in out.split("\n"))


def test_ls_shows_names_escaped_and_cut_and_json_has_them_whole(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(shared)
    assert main(["ls", "pool"]) == 0
    out = capsys.readouterr().out
    assert "m\\x1b[2J\\x1b]0;pwned\\x07\\nFORGED line\\r\\u202e\\x9b31m" in out
    assert "y" * 197 + "..." in out and "y" * 200 not in out
    assert main(["ls", "pool", "--json"]) == 0
    names = {group["facts"]["model"]["id"] for group in json.loads(capsys.readouterr().out)}
    assert names == {HOSTILE, "y" * 5000}


def test_a_model_is_cleared_by_the_name_that_ls_prints(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(shared)
    assert main(["clear", "pool", "--yes", "--model", "y" * 197 + "..."]) == 0
    assert "6 pages" in capsys.readouterr().out


def test_a_pin_that_cannot_be_read_is_logged_in_one_printable_line(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    main(["pins", str(shared / "pool")])
    said = [record.getMessage() for record in caplog.records if "does not count" in record.getMessage()]
    assert len(said) == 1 and said[0].isprintable() and "\\x1b[2J" in said[0]


def test_labels_of_a_server_are_shown_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    text = METRICS + 'hicache_ext_get_total{tier="nvme",tp_rank="0",reason="a\x1b[2J\\nFORGED"} 5\n'
    with metrics_page(text) as url:
        assert main(["stats", url, "--once"]) == 0
    out = capsys.readouterr().out
    assert "5 a\\x1b[2J\\nFORGED" in out
    assert all(line.isprintable() for line in out.split("\n"))
