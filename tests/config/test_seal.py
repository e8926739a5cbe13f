"""``seal`` of a tier: what is accepted, the exact sentence for what is not, and that keys are never shown."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.cli.main import main
from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.config.secrets import SealConfig
from hicache_ext.errors import ConfigError, StoreError
from hicache_ext.page.transforms.sealing import SealMode
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.opening import open_tiers
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, store_pages
from tests.config.test_wrong_files import N, Wrong, tier

KEY = "0123456789abcdef0123456789ABCDEF"
KEYS = "a list of keys such as [{id: a, file: /etc/hicache/seal-a}], each with an id and one of file and env"
REFERENCE = "{env: NAME} or {file: /path}"
ID = "1 to 16 letters, digits, dots, dashes and underscores"
NOT_ONE = "it is not exactly one key: one line of printable ASCII, without blanks or marks around it; allowed: one line"
ONE = "keys: [{id: a, env: SEAL_A}]"


def seal(name: str, settings: str, sentence: str) -> Wrong:
    return tier(name, f"seal: {{{settings}}}", f"{N}.seal{sentence}")


WRONG = [
    tier(
        "a seal that is a switch",
        "seal: true",
        f"{N}.seal: true or false is not accepted; allowed: a mapping with mode, keys",
    ),
    seal("no keys", "mode: encrypt", f".keys: required; allowed: {KEYS}"),
    seal("no mode", ONE, ".mode: required; allowed: authenticate, encrypt"),
    seal(
        "a misspelt mode",
        f"mode: encrypted, {ONE}",
        ".mode: text is not accepted; did you mean 'encrypt'?; allowed: authenticate, encrypt",
    ),
    seal("an empty list of keys", "mode: encrypt, keys: []", f".keys: a list is not accepted; allowed: {KEYS}"),
    seal(
        "a key itself",
        f"mode: encrypt, keys: [{KEY}]",
        f".keys[0]: a key is never written here: reference it; allowed: {KEYS}",
    ),
    seal(
        "a key without an id",
        "mode: encrypt, keys: [{env: A}]",
        f".keys[0].id: required, and no such id is accepted; allowed: {ID}",
    ),
    seal(
        "an id that is too long",
        "mode: encrypt, keys: [{id: abcdefghijklmnopq, env: A}]",
        f".keys[0].id: required, and no such id is accepted; allowed: {ID}",
    ),
    seal(
        "two keys of one id",
        "mode: encrypt, keys: [{id: a, env: A}, {id: a, env: B}]",
        ".keys[1].id: two keys have the id a",
    ),
    seal(
        "a key from nowhere",
        "mode: encrypt, keys: [{id: a}]",
        f".keys[0]: a reference to a secret names exactly one of env and file; allowed: {REFERENCE}",
    ),
    seal(
        "a key in its place",
        f"mode: encrypt, keys: [{{id: a, key: {KEY}}}]",
        f".keys[0]: unknown key in a reference to a secret; allowed: {REFERENCE}",
    ),
    seal("a key in place of keys", f"mode: encrypt, keys: {KEY}", f".keys: text is not accepted; allowed: {KEYS}"),
    seal("a key as the mode", f"mode: {KEY}, {ONE}", ".mode: text is not accepted; allowed: authenticate, encrypt"),
    seal(
        "a key as the one that writes",
        f"mode: encrypt, {ONE}, write_with: {KEY}",
        ".write_with: there is no such key any more: the first of keys writes, so put that one first; remove it",
    ),
    seal("a key as a name", f"mode: encrypt, {ONE}, {KEY}: a", ": unknown key; allowed: mode, keys"),
    seal(
        "a misspelt name",
        f"mode: encrypt, {ONE}, kyes: a",
        ".kyes: unknown key; did you mean 'keys'?; allowed: mode, keys",
    ),
    tier(
        "a key in place of the seal",
        f"seal: {KEY}",
        f"{N}.seal: text is not accepted; allowed: a mapping with mode, keys",
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_a_wrong_seal_is_one_sentence(wrong: Wrong, tmp_path: Path) -> None:
    file = tmp_path / f"hicache.{wrong.suffix}"
    file.write_text(wrong.text)
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    assert str(raised.value) == wrong.sentence
    assert KEY not in str(raised.value)


def document(**seal: Any) -> dict[str, Any]:
    return ExtraConfig.around({"tiers": {"memory": {"type": "memory", "seal": seal}}})


def seal_of(**seal: Any) -> SealConfig:
    found = load_config(document(**seal)).tiers["memory"].seal
    assert found is not None
    return found


def test_the_key_that_writes_comes_first_and_the_others_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SEAL_A", KEY)
    (tmp_path / "b").write_text(KEY[::-1] + "\n")
    keys = [{"id": "a", "env": "SEAL_A"}, {"id": "b", "file": str(tmp_path / "b")}]
    opened = seal_of(mode="authenticate", keys=keys[::-1]).opened("seal")
    assert opened.mode is SealMode.AUTHENTICATE
    assert [key.id for key in opened.keys] == ["b", "a"]


def test_a_configured_seal_is_around_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEAL_A", KEY)
    config = load_config(document(mode="encrypt", keys=[{"id": "a", "env": "SEAL_A"}]))
    store = open_tier("memory", config.tiers["memory"])
    store_pages(store, page_keys(3))
    assert_hits(store, page_keys(3))
    assert store.describe().details["seal"] == {"mode": "encrypt", "keys": ["a"]}
    store.close()


@pytest.mark.parametrize(
    ("value", "problem"),
    [(None, "the environment variable SEAL_A is not set"), (KEY[1:], "the key is too short")],
)
def test_a_key_that_is_not_there_or_too_short_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, value: str | None, problem: str
) -> None:
    monkeypatch.delenv("SEAL_A", raising=False)
    if value is not None:
        monkeypatch.setenv("SEAL_A", value)
    config = load_config(document(mode="encrypt", keys=[{"id": "a", "env": "SEAL_A"}]))
    with pytest.raises(ConfigError) as raised:
        open_tier("memory", config.tiers["memory"])
    assert str(raised.value).startswith(f"hicache_ext.tiers.memory.seal.keys[0]: {problem}")
    assert KEY[1:] not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("\ufeff" + KEY, NOT_ONE),
        (KEY + "\0", NOT_ONE),
        (KEY + "\n\n", NOT_ONE),
        (KEY + "\n" + KEY[::-1] + "\n", NOT_ONE),
        ("\n" + KEY, NOT_ONE),
        (" " + KEY, NOT_ONE),
        (KEY + "\t", NOT_ONE),
        (KEY[:16] + "\u200b" + KEY[16:], NOT_ONE),
        (KEY + "\ufe0f", NOT_ONE),
        (KEY + "e\u0301", NOT_ONE),
        (" " * 32, NOT_ONE),
        ("a" * 64, "the key can be guessed"),
        ("password" * 8, "the key can be guessed"),
        ("1234567890" * 4, "the key can be guessed"),
    ],
)
@pytest.mark.parametrize("kind", ["file", "env"])
def test_what_is_not_exactly_one_key_that_nobody_can_guess_stops_the_start(
    kind: str, content: str, problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each of these was taken, and was another key than the one that was meant."""
    (tmp_path / "key").write_text(content)
    monkeypatch.setattr(os, "environ", {**os.environ, "SEAL_A": content})
    reference = {"file": str(tmp_path / "key")} if kind == "file" else {"env": "SEAL_A"}
    config = load_config(document(mode="encrypt", keys=[{"id": "a", **reference}]))
    with pytest.raises(ConfigError) as raised:
        open_tier("memory", config.tiers["memory"])
    assert str(raised.value).startswith(f"hicache_ext.tiers.memory.seal.keys[0]: {problem}")
    assert KEY not in str(raised.value) and "openssl rand -base64 32" in str(raised.value)


@pytest.mark.parametrize("content", [KEY, KEY + "\n", KEY + "\r\n", "four words of some length, and 1 more"])
def test_one_line_that_nobody_can_guess_is_a_key(content: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(content.encode())
    seal_of(mode="encrypt", keys=[{"id": "a", "file": str(tmp_path / "key")}]).opened("seal")


def test_a_configuration_is_checked_with_the_keys_that_a_server_would_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "blanks").write_text(" " * 32)
    keys = [{"id": "a", "file": str(tmp_path / "none")}, {"id": "b", "file": str(tmp_path / "blanks")}]
    text = json.dumps(document(mode="encrypt", keys=keys))
    assert main(["config", "check", text]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    place = "note: hicache_ext.tiers.memory.seal.keys"
    assert notes[0].startswith(f"{place}[0]: the file '{tmp_path}/none' cannot be read")
    assert notes[1].startswith(f"{place}[1]: it is not exactly one key")
    assert all(note.endswith("a server on this node would not reach that tier") for note in notes)


def test_a_key_that_is_no_text_is_never_shown_by_a_tier_that_opens_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(os.environb, b"SEAL_A", KEY.encode() + b"\xff")
    keys = [{"id": "a", "env": "SEAL_A"}]
    settings = {"type": "memory", "required": False, "seal": {"mode": "encrypt", "keys": keys}}
    config = load_config(ExtraConfig.around({"tiers": {"memory": settings}}))
    with pytest.raises(ConfigError, match="the environment variable SEAL_A is not UTF-8 text") as raised:
        open_tiers(config)
    assert KEY not in f"{raised.value!r} {caplog.text}"


def test_without_the_package_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEAL_A", KEY)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setattr("hicache_ext.packages.importlib.util.find_spec", lambda name: None)
    config = load_config(document(mode="encrypt", keys=[{"id": "a", "env": "SEAL_A"}]))
    with pytest.raises((ConfigError, StoreError)) as raised:
        open_tier("memory", config.tiers["memory"])
    assert "pip install cryptography" in str(raised.value)


def test_a_configuration_shows_references_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEAL_A", KEY)
    config = load_config(document(mode="encrypt", keys=[{"id": "a", "env": "SEAL_A"}]))
    config.tiers["memory"].seal.opened("seal")  # type: ignore[union-attr]
    shown = f"{config!r} {config.model_dump_json()} {json.dumps(config.model_dump(mode='json'))}"
    assert "SEAL_A" in shown and KEY not in shown
