"""Names of other products and habits of a shell: the sentence says what was meant."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_ext.cli.main import main
from hicache_ext.config import check_document
from hicache_ext.config.model import ExtraConfig
from hicache_ext.config.render import as_yaml
from hicache_ext.errors import ConfigError

FILE = {"type": "file", "path": "/tmp/hicache-names", "capacity": "1GiB"}
REDIS = {"type": "redis", "url": "redis://pool:6379"}


def refused(tier: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_document(ExtraConfig.around({"tiers": {"a": tier}}))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "ours"), [("s3", "object"), ("minio", "object"), ("nvme", "file"), ("nfs", "file"), ("valkey", "redis")]
)
def test_types_by_other_names(name: str, ours: str) -> None:
    assert f"unknown tier type {name!r}; did you mean {ours!r}?" in refused({**FILE, "type": name})


@pytest.mark.parametrize(
    ("tier", "key", "ours"),
    [
        ({"type": "object", "url": "s3://bucket"}, "path_style", "addressing"),
        ({"type": "object", "url": "s3://bucket"}, "endpoint_url", "endpoint"),
        ({"type": "mooncake"}, "master_server_address", "master"),
        (REDIS, "password_env", "password"),
        (REDIS, "host", "url"),
        (FILE, "max_size", "capacity"),
        (FILE, "directory", "path"),
    ],
)
def test_keys_by_other_names(tier: dict[str, Any], key: str, ours: str) -> None:
    assert f"{key}: unknown key; did you mean {ours!r}?" in refused({**tier, key: "x"})


def test_other_names_are_suggested_only_where_ours_is_a_key() -> None:
    assert "did you mean" not in refused({**FILE, "path_style": True})


def test_a_week_is_seven_days() -> None:
    assert "unknown unit 'w'; did you mean days? A week is 7d" in refused({**FILE, "ttl": "1w"})


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("$HOME/cache", "'$HOME' is no template; did you mean '{env:HOME}'?"),
        ("/mnt/${NODE_NAME}/cache", "'${NODE_NAME}' is no template; did you mean '{env:NODE_NAME}'?"),
    ],
)
def test_a_shell_expands_nothing_here(path: str, problem: str) -> None:
    assert problem in refused({**FILE, "path": path})


def test_a_dollar_that_begins_no_name_is_part_of_a_path() -> None:
    checked = check_document(ExtraConfig.around({"tiers": {"a": {**FILE, "path": "/mnt/a$/$1"}}}))
    assert checked.hicache_ext.tiers["a"].directories() == ("/mnt/a$/$1",)


# -- what is allowed and hardly meant ----------------------------------------------------------------------------------


def notes(document: dict[str, Any], tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> str:
    file = tmp_path / "hicache.yaml"
    file.write_text(as_yaml(ExtraConfig.around(document)))
    assert main(["config", "check", str(file)]) == 0
    return capsys.readouterr().out


def test_a_timeout_of_minutes_is_remarked_on(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert "milliseconds are written 200ms" in notes({"tiers": {"a": {**FILE, "timeout": 200}}}, tmp_path, capsys)
    for timeout in ("200ms", 5, "off", "auto"):
        assert "200ms" not in notes({"tiers": {"a": {**FILE, "timeout": timeout}}}, tmp_path, capsys)


def test_a_secret_that_is_not_there_is_remarked_on(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {"tiers": {"a": {**REDIS, "password": {"env": "HICACHE_TEST_SECRET"}}}}
    monkeypatch.delenv("HICACHE_TEST_SECRET", raising=False)
    said = notes(document, tmp_path, capsys)
    assert "hicache_ext.tiers.a.password: the environment variable HICACHE_TEST_SECRET is not set" in said
    monkeypatch.setenv("HICACHE_TEST_SECRET", "do-not-print-this")
    said = notes(document, tmp_path, capsys)
    assert "note" not in said
    assert "do-not-print-this" not in said


def test_a_decode_node_that_nobody_can_read_from_is_remarked_on(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    remark = "writes what no prefill node can read"
    assert remark in notes({"role": "decode", "tiers": {"a": FILE}}, tmp_path, capsys)
    assert remark not in notes({"role": "decode", "tiers": {"a": FILE, "b": REDIS}}, tmp_path, capsys)
    assert remark not in notes({"tiers": {"a": FILE}}, tmp_path, capsys)


def test_hints_that_a_role_could_not_send_are_remarked_on(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pool = {"type": "mooncake", "master": "10.0.0.1:50051"}
    said = notes({"pd": {"hints": {"enabled": True}}, "tiers": {"near": FILE, "pool": pool}}, tmp_path, capsys)
    for role in ("prefill", "decode"):
        assert (
            f"role {role}: a server of it is refused at its start: hicache_ext.pd.hints.over: tier 'pool' is of type"
            in said
        )


def test_learning_admission_where_it_learns_too_little_gets_a_remark(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "it is shared" in notes({"tiers": {"a": {**REDIS, "admission": "learned"}}}, tmp_path, capsys)
    unlimited = {**FILE, "admission": "learned", "capacity": "unlimited", "layout": "pages"}
    assert "capacity is unlimited" in notes({"tiers": {"a": unlimited}}, tmp_path, capsys)
    assert "'admission: learned'" not in notes({"tiers": {"a": {**FILE, "admission": "learned"}}}, tmp_path, capsys)
