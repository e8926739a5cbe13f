"""What tools make of sealed pages: names without a key, seals with it, and never a key in what they print."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.cli.main import main
from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.page.hashes import page_hashes
from hicache_ext.page.identity import ModelIdentity, PageIdentity, PoolIdentity, Shard
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.serving.explaining import explain
from hicache_ext.storage.serving.warming import warm_prompts
from hicache_ext.storage.tiers.file.inspection import open_inspector
from hicache_ext.testing.conformance.pages import assert_hits, store_pages
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
    assert (report.fetched, report.failed) == (4, 0)
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
    inspector.close()
    assert len(names) == 4 and not names & set(KEYS)
    store = open_tiers(load_config(document))
    (tier,) = store.tiers
    forms = pages_of(tier).forms(DIGEST)
    store.close()
    assert names == {stored_key_of(forms[0], key) for key in KEYS}
