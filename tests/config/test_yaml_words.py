"""What YAML 1.1 reads otherwise than it is written: the word off, and numbers in octal and base 60."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from hicache_ext.cli.main import main
from hicache_ext.config import TierConfig, load_config, load_document, tier_types
from hicache_ext.config.load import read_text
from hicache_ext.config.model import ExtraConfig, HicacheExtConfig, PullConfig, RoleConfig
from hicache_ext.config.schema import Allowed, allowed_for
from hicache_ext.errors import ConfigError

FILE = {"type": "file", "path": "/tmp/hicache-words", "capacity": "1GiB"}


def written(tmp_path: Path, text: str, *, before: str = "") -> Path:
    """A configuration file of one tier, in YAML; ``text`` follows its section, ``before`` stands at its beginning."""
    whole = yaml.safe_dump(ExtraConfig.around({"tiers": {"a": FILE}}), sort_keys=False)
    file = tmp_path / "hicache.yaml"
    file.write_text(before + whole + text)
    return file


# -- off ---------------------------------------------------------------------------------------------------------------


def models_below(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from models_below(kind)


EVERY_MODEL = {below for top in (ExtraConfig, RoleConfig, *tier_types().values()) for below in models_below(top)}
TAKES_OFF = sorted(
    (f"{model.__name__}.{name}", model, name)
    for model in EVERY_MODEL
    for name in model.model_fields
    if re.search(r"\boff\b", allowed_for(model, name))
)


def wrong_with(model: type[BaseModel], name: str, value: object) -> list[str]:
    """What is said of the field; whatever else the model needs is not of interest."""
    try:
        model.model_validate({name: value})
    except ValidationError as error:
        return [str(one["ctx"]["error"]) for one in error.errors() if one["loc"][:1] == (name,)]
    return []


@pytest.mark.parametrize(("model", "name"), [entry[1:] for entry in TAKES_OFF], ids=[entry[0] for entry in TAKES_OFF])
def test_every_key_that_takes_the_word_off_takes_it_bare(model: type[BaseModel], name: str) -> None:
    assert wrong_with(model, name, "off") == []
    assert wrong_with(model, name, False) == []
    assert wrong_with(model, name, True)


def test_keys_of_every_kind_take_off() -> None:
    found = {name for _, _, name in TAKES_OFF}
    assert found >= {"codec", "mode", "timeout", "fingerprint", "promote_to"}


def test_a_switch_and_a_key_without_the_word_do_not_take_it_for_off() -> None:
    assert wrong_with(HicacheExtConfig, "role", False) == [
        "the value false is not accepted; allowed: auto, prefill, decode, both"
    ]


def test_off_as_documents_write_it(tmp_path: Path) -> None:
    text = "  pd: {pull: {mode: off}}\n  model: {fingerprint: off, weights_epoch: 7}\n  promote_to: off\n"
    file = written(tmp_path, text)
    file.write_text(
        file.read_text().replace("      type: file", "      type: file\n      codec: off\n      timeout: Off")
    )
    config = load_config(file)
    assert (config.pd.pull.mode, config.promote_to, config.model.fingerprint) == ("off", "off", "off")
    assert (config.tiers["a"].codec, config.tiers["a"].timeout) == ("off", float("inf"))


def test_off_reaches_the_configuration_also_as_sglang_parses_the_file(tmp_path: Path) -> None:
    parsed = yaml.safe_load(written(tmp_path, "  pd: {pull: {mode: off}}\n").read_text())
    assert parsed["hicache_ext"]["pd"]["pull"]["mode"] is False
    assert load_config(parsed).pd.pull.mode == "off"


def test_a_tier_of_another_package_takes_its_own_off() -> None:
    class OutsideTier(TierConfig):
        journal: Literal["off", "wal"] = "wal"
        pause: Annotated[str, Allowed("off, or text")] = ""

    checked = OutsideTier.model_validate({"type": "outside", "journal": False, "pause": False})
    assert (checked.journal, checked.pause) == ("off", "off")


def test_off_in_one_value_leaves_the_others() -> None:
    with pytest.raises(ValidationError, match="the value false is not accepted"):
        PullConfig.model_validate({"mode": False, "min_tokens": False})


# -- numbers -----------------------------------------------------------------------------------------------------------

ALLOWED = "a decimal number without a leading 0, one with a unit such as 90s, or text in quotes"


def refused(file: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_document(file)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "key", "base"),
    [
        ("      ttl: 010\n", "tiers.a.ttl", "octal"),
        ("      ttl: 1:30\n", "tiers.a.ttl", "base 60"),
        ("      ttl: 1:30.5\n", "tiers.a.ttl", "base 60"),
        ("      group: 0100\n", "tiers.a.group", "octal"),
        ("      threads: 010\n", "tiers.a.threads", "octal"),
        ("      threads: +010\n", "tiers.a.threads", "octal"),
        ("  background: {store_buffer: 01_000_000_000}\n", "background.store_buffer", "octal"),
        ("  pd:\n    pull: {mode: fixed, min_tokens: 0512}\n", "pd.pull.min_tokens", "octal"),
        ("  model: {weights_epoch: 0012}\n", "model.weights_epoch", "octal"),
        ("  model: {weights_epoch: 12:30:45}\n", "model.weights_epoch", "base 60"),
        ("  retrieve_locations: [a, 010]\n", "retrieve_locations[1]", "octal"),
    ],
)
def test_numbers_that_mean_something_else_to_yaml_are_refused_by_key(
    tmp_path: Path, text: str, key: str, base: str
) -> None:
    sentence = refused(written(tmp_path, text))
    assert sentence == f"hicache_ext.{key}: YAML reads this number in {base}; allowed: {ALLOWED}"


def test_of_sglangs_own_keys_as_well(tmp_path: Path) -> None:
    sentence = refused(written(tmp_path, "prefetch_threshold: 0256\n"))
    assert sentence == f"prefetch_threshold: YAML reads this number in octal; allowed: {ALLOWED}"


def test_each_of_several_is_named_in_the_order_of_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "      ttl: 010\n  model: {weights_epoch: 0_7}\nprefetch_timeout_base: 1:00\n")
    with pytest.raises(ConfigError) as caught:
        load_document(file)
    assert [one.key for one in caught.value.errors] == [
        "hicache_ext.tiers.a.ttl",
        "hicache_ext.model.weights_epoch",
        "prefetch_timeout_base",
    ]


def test_also_behind_an_anchor_and_a_merge(tmp_path: Path) -> None:
    file = written(tmp_path, "      <<: *shared\n", before="x-shared: &shared {threads: 010}\n")
    assert "hicache_ext.tiers.a.threads: YAML reads this number in octal" in refused(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("010: x\n", "the number 8 is used as a key"),
        ("0600", "holds a number, not a mapping"),
        ("a: !!pairs [b: 010]\n", "a[0][1]: YAML reads this number in octal"),
        ("a: !!int [1]\n", "not valid YAML in line 1: expected a scalar node, but found sequence"),
        ("a: !!int ''\n", "not valid YAML"),
    ],
)
def test_wherever_it_stands_there_is_a_sentence_and_no_word_of_the_parser(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_text(text, "file")


def test_a_password_is_not_shown(tmp_path: Path) -> None:
    assert "0123" not in refused(written(tmp_path, "      password: 0123\n"))


@pytest.mark.parametrize(
    ("text", "epoch"),
    [("'010'", "010"), ('"1:30"', "1:30"), ("0", "0"), ("10", "10"), ("0x10", "16"), ("1_000", "1000"), ("08", "08")],
)
def test_text_in_quotes_and_plain_numbers_are_taken(tmp_path: Path, text: str, epoch: str) -> None:
    assert load_config(written(tmp_path, f"  model: {{weights_epoch: {text}}}\n")).model.weights_epoch == epoch


@pytest.mark.parametrize("text", ["10", "1.5", "0.5", "10.0", "00.5"])
def test_seconds_with_a_fraction_are_decimal(tmp_path: Path, text: str) -> None:
    assert load_document(written(tmp_path, f"prefetch_timeout_base: {text}\n")).prefetch_timeout_base == float(text)


def test_the_command_says_it_for_editors_and_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, "      ttl: 1:30\n")
    assert main(["config", "check", str(file), "--json"]) == 2
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    assert problem == {
        "key": "hicache_ext.tiers.a.ttl",
        "problem": "YAML reads this number in base 60",
        "allowed": ALLOWED,
    }


def test_a_number_in_octal_in_json_or_toml_was_never_a_number(tmp_path: Path) -> None:
    document: dict[str, Any] = ExtraConfig.around({"tiers": {"a": FILE}})
    file = tmp_path / "hicache.json"
    file.write_text(json.dumps(document).replace('"interface_v1": 1', '"interface_v1": 01'))
    assert "not valid JSON" in refused(file)
