"""What tools make of sealed pages: names without a key, seals with it, and never a key in what they print."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.cli import directory_commands
from hicache_ext.cli.main import main
from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.page.hashes import page_hashes
from hicache_ext.page.identity import ModelIdentity, PageIdentity, PoolIdentity, Shard
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.serving.prompts import explain, warm_prompts
from hicache_ext.storage.tiers.file.inspection import open_inspector
from hicache_ext.testing.conformance.pages import assert_hits, read_pages, store_pages
from tests.storage.raw_access import RawFiles
from tests.storage.transforms.rig import SECRETS, pages_of, stored_key_of

TOKENS = list(range(64))
SIZES = [700, 324]
IDENTITY = PageIdentity(
    ModelIdentity("org/model"), PoolIdentity("kv", "MHA", "bfloat16", "page_first", 16, tuple(SIZES)), Shard()
)
DIGEST = IDENTITY.digest()
KEYS = [DIGEST + page for page in page_hashes(TOKENS, 16, b"")]


@pytest.fixture(params=["authenticate", "encrypt"])
def document(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "key").write_text(SECRETS["new"])
    seal = {"mode": request.param, "keys": [{"id": "new", "file": str(tmp_path / "key")}]}
    disk = {"type": "file", "path": str(tmp_path / "disk"), "capacity": "64MiB", "layout": "pages", "seal": seal}
    found = ExtraConfig.around({"tiers": {"disk": disk}})
    store = open_tiers(load_config(found))
    store.register_identity(DIGEST, IDENTITY.document())
    store_pages(store, KEYS, SIZES)
    store.close()
    return found


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main([str(word) for word in words])
    printed = capsys.readouterr()
    assert SECRETS["new"] not in printed.out + printed.err
    return code, printed.out


def forge(document: dict[str, Any], change: Callable[[bytes], bytes]) -> bytes:
    """Another page in the place of the second one, with every checksum right; its stored key."""
    from hicache_ext.testing.conformance.second_reader import read_page_object, write_page_object

    tier = load_config(document).tiers["disk"]
    transforms = tier.transforms("disk")
    assert transforms is not None
    key = stored_key_of(transforms.forms(DIGEST, None).all[0], KEYS[1])
    raw = RawFiles(Path(tier.directories()[0]))
    page = read_page_object(raw.read(key) or b"")
    raw.write(key, write_page_object(key, change(page.payload), header_length=page.header_length))
    return key


def test_ls_tells_models_and_seals_without_a_key(
    document: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").unlink()
    code, out = run(capsys, "ls", tmp_path / "disk")
    assert code == 0
    header, line = out.splitlines()
    mode = document["hicache_ext"]["tiers"]["disk"]["seal"]["mode"]
    assert "stored as" in header and "org/model" in line and f"{mode}, new" in line
    file = tmp_path / "hicache.json"
    file.write_text(json.dumps(document))
    assert run(capsys, "ls", file) == (code, out)


def test_verify_checks_seals_with_the_keys_and_checksums_without_them(
    document: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hicache.json"
    file.write_text(json.dumps(document))
    assert run(capsys, "verify", file) == (0, "4 good, 0 bad, 0 evicted meanwhile\n")
    key = forge(document, lambda payload: payload[:200] + bytes([payload[200] ^ 1]) + payload[201:])
    code, out = run(capsys, "verify", tmp_path / "disk")
    assert code == 0 and "4 of the good ones are sealed" in out
    code, out = run(capsys, "verify", file)
    assert code == 1 and f"bad (seal_tag): page {key[16:].hex()} of org/model" in out
    assert run(capsys, "verify", file, "--remove")[1].splitlines()[-1] == "1 removed"
    assert run(capsys, "verify", file) == (0, "3 good, 0 bad, 0 evicted meanwhile\n")


def test_verify_finds_a_page_without_a_seal(
    document: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge(document, lambda payload: bytes(len(payload)))
    code, out = run(capsys, "verify", tmp_path / "disk")
    assert code == 1 and "bad (transform)" in out


def sealed_by(document: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The configuration of a server with another seal over the same directory."""
    (disk,) = document["hicache_ext"]["tiers"].values()
    return ExtraConfig.around({"tiers": {"disk": {**disk, "seal": {**disk["seal"], **changes}}}})


def with_another_key(document: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "theirs").write_text(SECRETS["theirs"])
    return sealed_by(document, keys=[{"id": "theirs", "file": str(tmp_path / "theirs")}])


def in_the_other_mode(document: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    mode = document["hicache_ext"]["tiers"]["disk"]["seal"]["mode"]
    return sealed_by(document, mode="encrypt" if mode == "authenticate" else "authenticate")


def stored_by(document: dict[str, Any], keys: list[bytes]) -> None:
    store = open_tiers(load_config(document))
    store.register_identity(DIGEST, IDENTITY.document())
    store_pages(store, keys, SIZES)
    store.close()


def first_payload(document: dict[str, Any]) -> bytes:
    """What the directory has for the first page, as this configuration names and seals it."""
    from hicache_ext.testing.conformance.second_reader import read_page_object

    tier = load_config(document).tiers["disk"]
    transforms = tier.transforms("disk")
    assert transforms is not None
    key = stored_key_of(transforms.forms(DIGEST, None).all[0], KEYS[0])
    return read_page_object(RawFiles(Path(tier.directories()[0])).read(key) or b"").payload


def said(document: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What ``verify`` says of a configuration."""
    _, out = run(capsys, "verify", json.dumps(document), "--json")
    found: dict[str, Any] = json.loads(out)
    return found


def test_verify_takes_no_page_without_a_seal_for_a_good_one_of_a_sealed_tier(
    document: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (disk,) = document["hicache_ext"]["tiers"].values()
    plain = {name: value for name, value in disk.items() if name != "seal"}
    stored_by(ExtraConfig.around({"tiers": {"disk": plain}}), KEYS[:3])
    code, out = run(capsys, "verify", json.dumps(document))
    assert code == 0
    assert out.splitlines() == [
        "4 good, 0 bad, 0 evicted meanwhile",
        "3 are whole and have no seal: this tier does not serve them",
    ]
    assert said(document, capsys)["unsealed"] == 3


@pytest.mark.parametrize("other", [with_another_key, in_the_other_mode])
def test_verify_tells_pages_that_are_sealed_otherwise(
    document: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    other: Callable[[dict[str, Any], Path], dict[str, Any]],
) -> None:
    stored_by(other(document, tmp_path), KEYS[:3])
    found = said(document, capsys)
    assert (found["good"], found["sealed_otherwise"], found["bad"]) == (4, 3, 0)
    code, out = run(capsys, "verify", json.dumps(document), "--remove")
    assert code == 0 and "3 are whole and sealed with another key or in another mode" in out
    assert said(other(document, tmp_path), capsys)["good"] == 3


@pytest.mark.parametrize(("other", "reason"), [(with_another_key, "seal_key"), (in_the_other_mode, "seal_form")])
def test_verify_does_not_believe_a_page_under_the_name_of_another_seal(
    document: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    other: Callable[[dict[str, Any], Path], dict[str, Any]],
    reason: str,
) -> None:
    theirs = other(document, tmp_path)
    stored_by(theirs, KEYS[:1])
    payload = first_payload(theirs)
    forge(document, lambda _: payload)
    found = said(document, capsys)
    assert (found["good"], [page["reason"] for page in found["bad_pages"]]) == (3, [reason])
    # Without keys by what the directory says of the name.
    assert f"bad ({reason})" in run(capsys, "verify", tmp_path / "disk")[1]


def test_verify_does_not_believe_a_page_that_says_that_it_has_no_seal(
    document: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hicache_ext.page.transforms.header import Header

    def unsealed(payload: bytes) -> bytes:
        return (Header(0, 0, 0, 1024, 1024).encode() + b"x" * 1024).ljust(len(payload), b"\0")

    forge(document, unsealed)
    for target in (json.dumps(document), tmp_path / "disk"):
        code, out = run(capsys, "verify", target)
        assert code == 1 and "3 good, 1 bad" in out and "bad (unsealed)" in out


@pytest.mark.parametrize("spoilt", ["none", "says nothing of seals", "of another page", "hostile"])
def test_what_others_write_into_documents_makes_no_forged_page_good(
    document: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], spoilt: str
) -> None:
    key = forge(document, lambda payload: payload[:200] + bytes([payload[200] ^ 1]) + payload[201:])
    file = tmp_path / "disk" / "identities" / f"{key[:16].hex()}.json"
    told = json.loads(file.read_text())
    if spoilt == "none":
        file.unlink()
    elif spoilt == "says nothing of seals":
        del told["stored_as"]
    elif spoilt == "of another page":
        told["stored_as"]["of"] = "00" * 16
    else:
        told |= {"stored_as": 5, "pool": {"segments": 7}}
    if spoilt != "none":
        file.write_text(json.dumps(told))
    found = said(document, capsys)
    assert (found["good"], [page["reason"] for page in found["bad_pages"]]) == (3, ["seal_tag"])
    # And where nothing at all is known of the name.
    for each in file.parent.iterdir():
        each.unlink()
    found = said(document, capsys)
    assert (found["good"], found["sealed_otherwise"], found["bad"]) == (3, 1, 0)


def test_verify_removes_the_copy_that_it_saw_and_no_other_one(
    document: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forge(document, lambda payload: payload[:200] + bytes([payload[200] ^ 1]) + payload[201:])
    opened = directory_commands.open_editor

    def then_replaced(path: Path) -> Any:
        # Between the look and the removal a server replaces the page, as its next write does.
        store = open_tiers(load_config(document))
        read_pages(store, KEYS, SIZES)
        store_pages(store, KEYS, SIZES)
        assert_hits(store, KEYS, SIZES)
        store.close()
        return opened(path)

    monkeypatch.setattr(directory_commands, "open_editor", then_replaced)
    assert run(capsys, "verify", json.dumps(document), "--remove")[1].splitlines()[-1] == "0 removed"
    monkeypatch.undo()
    assert said(document, capsys)["good"] == 4


def test_explain_and_warm_find_sealed_pages(document: dict[str, Any], tmp_path: Path) -> None:
    config = load_config(document)
    found = explain(config, TOKENS)
    (chain,) = found.chains
    assert chain.leading == 4 and not found.unread
    near = {"type": "file", "path": str(tmp_path / "near"), "capacity": "64MiB", "layout": "pages"}
    section = document["hicache_ext"]
    tiers = {"near": near, **section["tiers"]}
    both = load_config(ExtraConfig.around({"tiers": tiers, "promote_to": "near"}))
    report = warm_prompts(both, [TOKENS])
    assert (report["fetched"], report["failed"]) == (4, 0)
    store = open_tiers(load_config(ExtraConfig.around({"tiers": {"near": near}})))
    assert_hits(store, KEYS, SIZES)
    store.close()


def test_pins_hold_sealed_pages(document: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, tokens = tmp_path / "hicache.json", tmp_path / "tokens.json"
    file.write_text(json.dumps(document))
    tokens.write_text(json.dumps(TOKENS))
    assert run(capsys, "pin", file, "--name", "prompt", "--tokens", tokens)[0] == 0
    code, out = run(capsys, "pins", file, "--json")
    (pin,) = json.loads(out)
    assert code == 0 and pin["bytes_on_disk"] >= 4 * 1024
    assert main(["unpin", str(file), "--name", "prompt"]) == 0
    capsys.readouterr()
    code = main(["pin", str(tmp_path / "disk"), "--name", "prompt", "--tokens", str(tokens)])
    encrypted = document["hicache_ext"]["tiers"]["disk"]["seal"]["mode"] == "encrypt"
    assert (code == 2) == encrypted
    assert ("pages here are encrypted" in capsys.readouterr().err) == encrypted


def test_an_inspector_shows_stored_names_alone(document: dict[str, Any], tmp_path: Path) -> None:
    inspector = open_inspector(tmp_path / "disk")
    names = {page.key for page in inspector.pages()}
    assert len(names) == 4 and not names & set(KEYS)
    store = open_tiers(load_config(document))
    (tier,) = store.tiers
    forms = pages_of(tier).forms(DIGEST)
    store.close()
    assert names == {stored_key_of(forms[0], key) for key in KEYS}
