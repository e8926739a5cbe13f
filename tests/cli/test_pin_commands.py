"""``hicache-ext pin``, ``unpin``, ``pins``."""

from __future__ import annotations

import json

import pytest
import yaml

from hicache_ext.cli.main import main
from hicache_ext.config import ExtraConfig
from hicache_ext.page.hashes import page_hashes
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.pins import read_pins
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import IDENTITY, store_pages

TOKENS = list(range(100))
HASHES = page_hashes(TOKENS, 16)


@pytest.fixture(params=[SlabStore, PageFileStore], ids=["slab", "pages"])
def directories(request, tmp_path):
    """Two paths of a tier that hold some pages of the prompt, and the configuration that names them."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        store = request.param("disk", path, capacity=64 << 20)
        store.register_identity(IDENTITY, {"pool": {"page_size": 16}})
        store_pages(store, [IDENTITY + page_hash for page_hash in HASHES[:4]], (12_300,))
        store.close()
    tier = {"type": "file", "path": [str(path) for path in paths], "capacity": "128MiB"}
    (tmp_path / "hicache.yaml").write_text(yaml.safe_dump(ExtraConfig.around({"tiers": {"disk": tier}})))
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS))
    return paths


def test_the_pages_of_a_prompt_are_pinned_in_every_path_of_the_configuration(directories, tmp_path, capsys):
    tokens = str(tmp_path / "tokens.json")
    assert main(["pin", str(tmp_path / "hicache.yaml"), "--name", "system", "--tokens", tokens, "--for", "7d"]) == 0
    assert "system: 6 pages pinned" in capsys.readouterr().out
    for path in directories:
        (pin,) = read_pins(path)
        assert pin.hashes == tuple(HASHES)
        assert pin.until == pytest.approx(pin.created + 7 * 86400)


def test_pins_are_listed_with_what_they_take_and_can_be_removed(directories, tmp_path, capsys):
    config, keys = str(tmp_path / "hicache.yaml"), tmp_path / "keys"
    keys.write_text("\n".join(page_hash.hex() for page_hash in HASHES))
    assert main(["pin", config, "--name", "system", "--keys", str(keys)]) == 0
    capsys.readouterr()
    assert main(["pins", config]) == 0
    _, line = capsys.readouterr().out.splitlines()
    # A slot is rounded up for each page, a pack once for all of them.
    packed = any(directories[0].rglob("*.pack"))
    assert line.split()[:3] == ["system", "6", "104KiB" if packed else "128KiB"]
    assert line.endswith("for good")
    assert main(["stat", str(directories[0])]) == 0
    assert f"pinned      {'52KiB' if packed else '64KiB'}, 1 pins" in capsys.readouterr().out
    assert main(["unpin", config, "--name", "system"]) == 0
    assert [read_pins(path) for path in directories] == [[], []]
    assert main(["unpin", config, "--name", "system"]) == 1
    assert "no pin is named 'system'; pins here: none" in capsys.readouterr().err


def test_one_directory_can_be_named_instead(directories, tmp_path):
    tokens = str(tmp_path / "tokens.json")
    assert main(["pin", str(directories[0]), "--name", "x", "--tokens", tokens, "--page-size", "50"]) == 0
    assert read_pins(directories[0])[0].hashes == tuple(page_hashes(TOKENS, 50))
    assert read_pins(directories[1]) == []


def test_gc_removes_pins_whose_time_is_up(directories, tmp_path, capsys):
    path = str(directories[0])
    main(["pin", path, "--name", "over", "--tokens", str(tmp_path / "tokens.json"), "--for", "0s"])
    assert main(["gc", path]) == 0
    assert "1 pins removed whose time was up" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "option", "sentence"),
    [
        ("[1, 2", "--tokens", "--tokens: not a list of token ids"),
        ('{"tokens": [1]}', "--tokens", "--tokens: not a list of token ids; allowed: token ids: numbers"),
        ("[1.5]", "--tokens", "--tokens: not a list of token ids"),
        ("[[1], [2]]", "--tokens", "--tokens: 2 prompts, and a pin is of one"),
        ("[-1]", "--tokens", "--tokens: number 1 of the tokens is -1, not a token id from 0 to 2^32-1"),
        ("[1, 2]", "--tokens", "--tokens: 2 tokens are no whole page of 16"),
        ("a text", "--prompt", "--model: --prompt needs a tokenizer"),
        ("abc", "--keys", "--keys: number 1 is no page hash; allowed: 64 hex digits each"),
        ("", "--keys", "--keys: 0 hashes"),
    ],
)
def test_what_cannot_be_pinned_is_said_in_one_sentence(directories, tmp_path, capsys, text, option, sentence):
    file = tmp_path / "input"
    file.write_text(text)
    assert main(["pin", str(directories[0]), "--name", "x", option, str(file)]) == 2
    assert sentence in capsys.readouterr().err
    assert read_pins(directories[0]) == []


def test_a_wrong_name_a_wrong_duration_and_a_wrong_place_are_said(directories, tmp_path, capsys):
    tokens = str(tmp_path / "tokens.json")
    path = str(directories[0])
    assert main(["pin", path, "--name", "../x", "--tokens", tokens]) == 1
    assert "'../x' cannot name a pin" in capsys.readouterr().err
    assert main(["pin", path, "--name", "x", "--tokens", tokens, "--for", "week"]) == 2
    assert "--for: " in capsys.readouterr().err
    assert main(["pin", str(tmp_path), "--name", "x", "--tokens", tokens]) == 1
    assert "is no directory of a file tier" in capsys.readouterr().err


def test_a_stranger_s_document_does_not_keep_the_page_size_from_being_found(directories, tmp_path, capsys):
    for name, text in (("foo", "{}"), ("ab" * 16, '{"pool": []}')):
        (directories[0] / "identities" / f"{name}.json").write_text(text)
    tokens = str(tmp_path / "tokens.json")
    assert main(["pin", str(directories[0]), "--name", "x", "--tokens", tokens]) == 0


@pytest.mark.parametrize("time", ["1e999", "1e30", "-1e30", "NaN", "9" * 400, '"1"', "null"])
def test_a_pin_of_a_time_that_is_none_is_no_pin(directories, tmp_path, time):
    (tmp_path / "keys").write_text(HASHES[0].hex())
    assert main(["pin", str(directories[0]), "--name", "good", "--keys", str(tmp_path / "keys")]) == 0
    bad = {"created": "@", "until": None, "hashes": [HASHES[0].hex()]}
    (directories[0] / "pins" / "bad.json").write_text(json.dumps(bad).replace('"@"', time))
    assert [main([command, str(directories[0])]) for command in ("pins", "stat", "gc")] == [0, 0, 0]
    assert [pin.name for pin in read_pins(directories[0])] == ["good"]


def test_without_a_page_size_to_go_by_one_is_asked_for(tmp_path, capsys):
    SlabStore("disk", tmp_path / "empty", capacity=64 << 20).close()
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS))
    assert main(["pin", str(tmp_path / "empty"), "--name", "x", "--tokens", str(tmp_path / "tokens.json")]) == 2
    assert "--page-size: required" in capsys.readouterr().err
