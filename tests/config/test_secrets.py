"""A secret is a reference: its value is read when needed and appears nowhere else."""

from __future__ import annotations

import copy
import json
import os
import pickle
import traceback
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import TypeAdapter

from hicache_ext.config import ExtraConfig, Secret, TierConfig, load_config
from hicache_ext.config.problems import looks_secret, shown
from hicache_ext.config.render import json_schema
from hicache_ext.config.schema import Allowed
from hicache_ext.errors import ConfigError
from hicache_ext.storage.contract import registry
from hicache_ext.storage.contract.registry import TierType
from hicache_ext.storage.contract.store import PageStore

VALUE = "hunter2"


class PoolTierConfig(TierConfig):
    """What a later tier with a password will look like."""

    type: Annotated[Literal["pool"], Allowed("pool")] = "pool"
    password: Annotated[Secret, Allowed("{env: NAME} or {file: /path}")]


class PoolTier(TierType):
    config = PoolTierConfig

    def open(self, name: str, tier: PoolTierConfig) -> PageStore:
        raise NotImplementedError


@pytest.fixture
def _pool_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._OURS, "pool", f"{__name__}:PoolTier")


def document(password: object) -> dict[str, Any]:
    return ExtraConfig.around({"tiers": {"far": {"type": "pool", "password": password}}})


def password_of(given: object) -> Secret:
    tier = load_config(document(given)).tiers["far"]
    assert isinstance(tier, PoolTierConfig)
    return tier.password


@pytest.mark.usefixtures("_pool_tiers")
def test_a_secret_from_the_environment_is_read_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = password_of({"env": "POOL_PASSWORD"})
    monkeypatch.setenv("POOL_PASSWORD", VALUE)
    assert secret.reveal() == VALUE
    monkeypatch.setenv("POOL_PASSWORD", "rotated")
    assert secret.reveal() == "rotated"


@pytest.mark.usefixtures("_pool_tiers")
@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_a_secret_from_a_file_loses_one_newline_at_its_end(ending: str, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_bytes(f" {VALUE} {ending}".encode())
    assert password_of({"file": str(file)}).reveal() == f" {VALUE} "


@pytest.mark.usefixtures("_pool_tiers")
def test_the_path_of_a_secret_file_may_hold_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRETS", str(tmp_path))
    (tmp_path / "password").write_text(VALUE)
    assert password_of({"file": "{env:SECRETS}/password"}).reveal() == VALUE


@pytest.mark.usefixtures("_pool_tiers")
def test_the_value_is_in_no_representation_dump_or_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOL_PASSWORD", VALUE)
    config = load_config(document({"env": "POOL_PASSWORD"}))
    secret = password_of({"env": "POOL_PASSWORD"})
    assert secret.reveal() == VALUE
    everything = [
        repr(secret),
        str(secret),
        f"{secret}",
        repr(config),
        str(config.model_dump()),
        config.model_dump_json(),
        repr(pickle.dumps(secret)),
        repr(pickle.dumps(config)),
        json.dumps(json_schema()),
        config.tiers["far"].summary(),
    ]
    assert not [text for text in everything if VALUE in text]
    assert config.model_dump()["tiers"]["far"]["password"]["name"] == "POOL_PASSWORD"
    for twin in (pickle.loads(pickle.dumps(secret)), copy.deepcopy(secret)):
        assert twin == secret
        assert twin.key == "hicache_ext.tiers.far.password"


@pytest.mark.usefixtures("_pool_tiers")
def test_an_unset_variable_is_an_error_that_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POOL_PASSWORD", raising=False)
    with pytest.raises(ConfigError) as raised:
        password_of({"env": "POOL_PASSWORD"}).reveal()
    assert str(raised.value) == ("hicache_ext.tiers.far.password: the environment variable POOL_PASSWORD is not set")


@pytest.mark.usefixtures("_pool_tiers")
def test_an_empty_secret_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POOL_PASSWORD", "")
    with pytest.raises(ConfigError, match="the environment variable POOL_PASSWORD is empty"):
        password_of({"env": "POOL_PASSWORD"}).reveal()
    (tmp_path / "password").write_text("\n")
    with pytest.raises(ConfigError, match="/password' is empty"):
        password_of({"file": str(tmp_path / "password")}).reveal()


@pytest.mark.usefixtures("_pool_tiers")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "password")
    (tmp_path / "directory").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for name in ("password", "directory") * 3:
        with pytest.raises(ConfigError, match=r"cannot be read \(it is no plain file\)$"):
            password_of({"file": str(tmp_path / name)}).reveal()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("_pool_tiers")
def test_a_file_that_is_not_there_is_an_error_that_names_the_key() -> None:
    with pytest.raises(ConfigError) as raised:
        password_of({"file": "/nowhere/password"}).reveal()
    assert str(raised.value) == (
        "hicache_ext.tiers.far.password: the file '/nowhere/password' cannot be read (No such file or directory)"
    )


def test_a_variable_that_is_not_text_is_an_error_without_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environb, b"POOL_PASSWORD", b"hunter2\xff")
    with pytest.raises(ConfigError) as raised:
        Secret.parse({"env": "POOL_PASSWORD"}, "tiers.redis.password").reveal()
    assert str(raised.value) == "tiers.redis.password: the environment variable POOL_PASSWORD is not UTF-8 text"
    assert raised.value.__cause__ is None and raised.value.__suppress_context__


@pytest.mark.usefixtures("_pool_tiers")
def test_a_file_that_is_not_text_is_an_error_without_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_bytes(VALUE.encode() + b"\xff")
    with pytest.raises(ConfigError, match="is not UTF-8 text") as raised:
        password_of({"file": str(file)}).reveal()
    assert VALUE not in "".join(traceback.format_exception(raised.value))


@pytest.mark.usefixtures("_pool_tiers")
@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (VALUE, "a secret is never written here: put it in an environment variable or a file and reference it"),
        (1234567, "a secret is never written here: put it in an environment variable or a file and reference it"),
        (None, "a secret is never written here: put it in an environment variable or a file and reference it"),
        ({}, "a reference to a secret names exactly one of env and file"),
        ({"env": "A", "file": "/b"}, "a reference to a secret names exactly one of env and file"),
        ({"enw": VALUE}, "unknown key in a reference to a secret; did you mean 'env'?"),
        ({"value": VALUE}, "unknown key in a reference to a secret"),
        ({"env": f"{VALUE}!"}, "env does not hold the name of an environment variable"),
        ({"env": 5}, "env does not hold the name of an environment variable"),
        ({"file": VALUE}, "file does not hold an absolute path"),
    ],
)
def test_a_secret_written_into_the_file_is_refused_and_not_repeated(written: object, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(document(written))
    allowed = "{env: NAME} or {file: /path}"
    assert str(raised.value) == f"hicache_ext.tiers.far.password: {problem}; allowed: {allowed}"
    report = "".join(traceback.format_exception(raised.value))
    assert VALUE not in report
    assert "1234567" not in report


def test_a_secret_works_as_the_type_of_any_pydantic_field() -> None:
    adapter = TypeAdapter(Secret)
    assert adapter.validate_python({"env": "A"}) == Secret("env", "A")
    assert Secret("env", "A") != Secret("file", "A")
    assert len({Secret("env", "A"), Secret("env", "A", "another.key")}) == 1


@pytest.mark.parametrize(
    "key", ["password", "redis_password", "secret", "token", "access_key", "auth-token", "API_KEY"]
)
def test_the_value_of_a_key_that_is_named_like_a_secret_is_not_shown(key: str) -> None:
    assert looks_secret(key)
    assert VALUE not in shown(VALUE, key)


@pytest.mark.parametrize("key", ["path", "capacity", "tokenizer", "author", "keys"])
def test_other_keys_are_not_taken_for_secrets(key: str) -> None:
    assert not looks_secret(key)
    assert shown("x", key) == "the text 'x'"


def test_a_configuration_read_twice_is_equal_to_itself() -> None:
    """A reload compares configurations: two references to one secret are the same setting."""
    one, other = Secret.parse({"env": "POOL_PASSWORD"}), Secret.parse({"env": "POOL_PASSWORD"}, "elsewhere")
    assert one == other and hash(one) == hash(other)
    assert one != Secret.parse({"env": "OTHER"}) and one != Secret.parse({"file": "/POOL_PASSWORD"})
    assert one != "POOL_PASSWORD"
