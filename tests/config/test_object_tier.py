"""type: object in the configuration: what is taken, and the sentence for what is not."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_ext.config import load_config
from hicache_ext.config.model import ExtraConfig
from hicache_ext.errors import ConfigError, StoreSetupError
from hicache_ext.storage.tiers.object.client import explain, make_client
from hicache_ext.storage.tiers.object.config import ObjectTierConfig

SECRET = "hunter2-is-the-secret"


def load(**keys: Any) -> ObjectTierConfig:
    tier = load_config(ExtraConfig.around({"tiers": {"cold": {"type": "object", **keys}}})).tiers["cold"]
    assert isinstance(tier, ObjectTierConfig)
    return tier


def test_the_address_is_taken_apart() -> None:
    tier = load(url="s3://bucket/some/prefix/")
    assert (tier.scheme, tier.bucket, tier.prefix) == ("s3", "bucket", "some/prefix")
    assert tier.directories() == ()
    assert load(url="file:///var/cache").directories() == ("/var/cache",)
    assert load(url="az://container").prefix == ""


def test_templates_in_the_address_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUCKET", "ours")
    assert load(url="s3://{env:BUCKET}/x").bucket == "ours"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"url": "bucket/prefix"}, "cold.url: 'bucket/prefix' is not the address of an object store"),
        ({"url": "http://host/bucket"}, "is not the address of an object store"),
        ({"url": "s3://"}, "names no bucket"),
        ({"url": "s3://bucket/a/../b"}, "parts that not every store keeps apart"),
        ({"url": "s3://bucket/a//b"}, "parts that not every store keeps apart"),
        ({"url": "file://relative"}, "names no absolute directory"),
        ({"url": "file:///"}, "names no absolute directory"),
        ({"url": f"s3://key:{SECRET}@bucket/x"}, "credentials do not belong in the address"),
        ({"url": "s3://b/p", "endpoint": "http://host:9000"}, "say allow_http: true if that is meant"),
        ({"url": "s3://b/p", "endpoint": "https://host/a?b=c"}, "is not an endpoint"),
        ({"url": "s3://b/p", "endpoint": "https://host/a//b"}, "is not an endpoint"),
        ({"url": "s3://b/p", "endpoint": "https://host/a b"}, "is not an endpoint"),
        ({"url": "s3://b/p", "endpoint": f"https://a:{SECRET}@host"}, "is not an endpoint"),
        ({"url": "s3://b/p", "access_key": {"env": "A"}}, "cold.secret_key: required"),
        ({"url": "s3://b/p", "session_token": {"env": "A"}}, "cold.access_key: required with session_token"),
        ({"url": "s3://b/p", "secret_key": SECRET}, "a secret is never written here"),
        ({"url": "az://c/p", "account_key": {"env": "A"}}, "cold.account: required with account_key"),
        ({"url": "az://c/p", "sas_token": {"env": "A"}}, "cold.account: required with sas_token"),
        (
            {"url": "az://c/p", "account": "a", "sas_token": {"env": "A"}, "account_key": {"env": "A"}},
            "cold.sas_token: account_key is given too",
        ),
        ({"url": "s3://b/p", "sas_token": {"env": "A"}}, "cold.sas_token: has no meaning for s3://"),
        ({"url": "az://b/p", "sse": "s3"}, "cold.sse: has no meaning for az://"),
        ({"url": "s3://b/p", "sse": "aes"}, "allowed: s3, kms, dsse, customer"),
        ({"url": "s3://b/p", "sse": "customer"}, "cold.sse_key: required with sse: customer"),
        ({"url": "s3://b/p", "sse_key": {"env": "A"}}, "cold.sse: required with sse_key"),
        ({"url": "s3://b/p", "sse": "s3", "sse_kms_key": "k"}, "cold.sse: required with sse_kms_key"),
        ({"url": "gs://b/p", "region": "eu"}, "cold.region: has no meaning for gs:// addresses"),
        ({"url": "file:///x", "endpoint": "https://host"}, "cold.endpoint: has no meaning for file://"),
        ({"url": "s3://b/p", "concurrency": 0}, "allowed: 1 to 256, or auto"),
        ({"url": "s3://b/p", "adressing": "path"}, "did you mean 'addressing'"),
        ({"url": "s3://b/p", "ca_file": "ca.pem"}, "is not an absolute path"),
        ({}, "cold.url: required"),
    ],
)
def test_a_wrong_key_is_one_sentence_without_a_secret(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(**keys)
    assert sentence in str(raised.value)
    assert SECRET not in str(raised.value)


def test_two_tiers_cannot_share_a_directory_whatever_their_types() -> None:
    tiers = {
        "near": {"type": "file", "path": "/mnt/a", "capacity": "1GiB"},
        "far": {"type": "object", "url": "file:///mnt/a/b"},
    }
    with pytest.raises(ConfigError, match="a directory of this tier is inside one of tier 'near'"):
        load_config(ExtraConfig.around({"tiers": tiers}))


def test_clients_are_made_without_a_request_and_show_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="missing: the package obstore")
    monkeypatch.setenv("KEY", SECRET)
    monkeypatch.setenv("BASE64_KEY", "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3I=")
    reference = {"env": "KEY"}
    tiers = [
        load(url="s3://bucket/x", region="eu-central-1", access_key=reference, secret_key=reference),
        load(url="s3://bucket/x", endpoint="https://host:1", access_key=reference, secret_key=reference),
        load(url="s3://bucket", endpoint="https://host:1", addressing="virtual"),
        load(url="s3://bucket", endpoint="https://host:1/gateway", addressing="virtual"),
        load(url="s3://bucket", region="x", sse="customer", sse_key={"env": "BASE64_KEY"}),
        load(url="s3://bucket", region="x", sse="kms", sse_kms_key="alias/ours"),
        load(url="az://container/x", account="name"),
    ]
    for tier in tiers:
        assert SECRET not in repr(tier) + tier.summary() + tier.model_dump_json()
        make_client("cold", tier)
    virtual = make_client("cold", tiers[2])
    assert virtual.config["endpoint"] == "https://bucket.host:1"
    assert make_client("cold", tiers[3]).config["endpoint"] == "https://bucket.host:1/gateway"
    assert make_client("cold", tiers[4]).config["server_side_encryption"] == "sse-c"


def test_a_key_that_is_none_is_a_setup_error_that_does_not_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", SECRET)
    with pytest.raises(StoreSetupError) as raised:
        make_client("cold", load(url="gs://bucket/x", service_account={"env": "KEY"}))
    assert "tier 'cold' cannot start" in str(raised.value)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FileNotFoundError("404: <Code>NoSuchKey</Code>"), "absent"),
        (FileNotFoundError("404: <Code>NoSuchBucket</Code>"), "no_bucket"),
        (
            RuntimeError("Server returned non-2xx status code: 503 Service Unavailable: <Code>SlowDown</Code>"),
            "slow_down",
        ),
        (RuntimeError("Server returned non-2xx status code: 500 Internal Server Error: broken"), "http_5xx"),
        (RuntimeError("Server returned non-2xx status code: 400 Bad Request"), "http_4xx"),
        (RuntimeError("HTTP error: operation timed out"), "timeout"),
        (RuntimeError("something else"), "other"),
    ],
)
def test_errors_become_reasons(error: Exception, reason: str) -> None:
    assert explain(error).reason == reason
