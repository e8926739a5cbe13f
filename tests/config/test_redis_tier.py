"""``type: redis``: what is accepted, and the exact sentence for what is not."""

from __future__ import annotations

import pytest

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.errors import ConfigError
from hicache_ext.storage.tiers.redis.config import Endpoint, RedisTierConfig

P = "hicache_ext.tiers.pool"
URL = (
    "redis://HOST:PORT, rediss://HOST:PORT (TLS), unix:///PATH, or a list of nodes of one cluster, or of Sentinels: "
    "redis+sentinel://HOST:PORT/SERVICE, rediss+sentinel://HOST:PORT/SERVICE"
)
SENTINEL = "redis+sentinel://one/pages"
PREFIX = "1 to 64 of the characters A-Z a-z 0-9 _ . : / -"
TTL = "a duration of whole seconds from 1s to a year, such as 24h, or none"
TIMEOUT = "a duration from 1ms to 1h, such as 2s"
SECRET = "{env: NAME} or {file: /path}"
KEYS = (
    "type, required, timeout, codec, seal, admission, write_budget, "
    "url, cluster, password, username, sentinel_password, "
    "sentinel_username, database, prefix, connections, ttl, tls_ca, "
    "tls_certificate, tls_key, tls_verify"
)


def load(**settings: object) -> RedisTierConfig:
    tier = {"type": "redis", "url": "redis://pool:6379", **settings}
    loaded = load_config(ExtraConfig.around({"tiers": {"pool": tier}})).tiers["pool"]
    assert isinstance(loaded, RedisTierConfig)
    return loaded


def test_an_address_is_enough():
    tier = load(url="redis://pool")
    assert tier.endpoints == (("pool", 6379),)
    assert (tier.cluster, tier.database, tier.prefix, tier.connections) == (None, 0, "hicache_ext:", 4)
    assert (tier.ttl, tier.timeout, tier.required, tier.tls) == (None, None, True, False)


def test_everything_can_be_said(monkeypatch):
    monkeypatch.setenv("POOL", "10.0.0.1")
    tier = load(
        url=["rediss://{env:POOL}:7000", "rediss://[::1]:7001"],
        cluster=True,
        username="pages",
        password={"env": "POOL_PASSWORD"},
        prefix="team-a/kv:",
        connections=8,
        ttl="24h",
        timeout="250ms",
        tls_ca="/etc/ca.pem",
        tls_certificate="/etc/client.pem",
        tls_key="/etc/client.key",
        tls_verify="ca",
        required=False,
    )
    assert tier.endpoints == (("10.0.0.1", 7000), ("::1", 7001))
    assert (tier.ttl, tier.timeout, tier.tls) == (86400, 0.25, True)


def test_a_unix_socket_is_an_address():
    assert load(url="unix:///run/redis.sock").endpoints == (("/run/redis.sock", 0),)


def test_the_summary_and_the_repr_hold_no_secret(monkeypatch):
    monkeypatch.setenv("POOL_PASSWORD", "hunter2")
    tier = load(password={"env": "POOL_PASSWORD"})
    assert tier.summary() == "redis, redis://pool:6379"
    assert "hunter2" not in repr(tier) + str(tier.model_dump())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"url": []}, f"{P}.url: the list is empty; allowed: {URL}"),
        ({"url": None}, f"{P}.url: an empty value is not accepted; allowed: {URL}"),
        ({"url": "pool:6379"}, f"{P}.url: 'pool:6379' is not an address of redis; allowed: {URL}"),
        ({"url": "http://pool"}, f"{P}.url: 'http://pool' is not an address of redis; allowed: {URL}"),
        ({"url": "redis://"}, f"{P}.url: 'redis://' is not an address; allowed: {URL}"),
        ({"url": "redis://pool:port"}, f"{P}.url: 'redis://pool:port' is not an address; allowed: {URL}"),
        ({"url": "redis://pool:0"}, f"{P}.url: 'redis://pool:0' is not an address; allowed: {URL}"),
        (
            {"url": "redis://u:hunter2@pool"},
            f"{P}.url: an address holds no login: use username and password; allowed: {URL}",
        ),
        (
            {"url": "redis://pool/2"},
            f"{P}.url: 'redis://pool/2' has a path; the database is the key database; allowed: {URL}",
        ),
        (
            {"url": "redis://pool?db=2"},
            f"{P}.url: 'redis://pool?db=2' has options; they are keys of the tier; allowed: {URL}",
        ),
        (
            {"url": "unix://run/redis.sock"},
            f"{P}.url: 'unix://run/redis.sock' does not name the absolute path of a socket; allowed: {URL}",
        ),
        (
            {"url": ["redis://a", "redis://a"]},
            f"{P}.url[1]: 'redis://a' is there twice; allowed: distinct addresses",
        ),
        (
            {"url": "valkeys://pool"},
            f"{P}.url: 'valkeys://pool': Valkey speaks Redis' protocol, and is written redis:// or rediss://; "
            f"allowed: {URL}",
        ),
        (
            {"url": "redis+sentinel://one:26379"},
            f"{P}.url: 'redis+sentinel://one:26379' does not end with the name of a service (mymaster); allowed: {URL}",
        ),
        (
            {"url": [SENTINEL, "redis+sentinel://other/others"]},
            f"{P}.url[1]: the Sentinels of one tier are asked for one service; allowed: {URL}",
        ),
        (
            {"url": [SENTINEL, "redis://other"]},
            f"{P}.url[1]: nodes of one cluster are all redis:// or all rediss://; allowed: {URL}",
        ),
        ({"url": SENTINEL, "cluster": True}, f"{P}.cluster: a cluster has no Sentinels; allowed: auto, false"),
        (
            {"url": SENTINEL, "sentinel_username": "someone"},
            f"{P}.sentinel_username: a user needs the key sentinel_password; allowed: text",
        ),
        (
            {"sentinel_password": {"env": "SOME"}},
            f"{P}.sentinel_password: there are no Sentinels; allowed: an address redis+sentinel:// or rediss+sentinel://",
        ),
        (
            {"client_name": "pages-of-rank-3"},
            f"{P}.client_name: there is no such key any more: CLIENT LIST shows hicache_ext; remove it",
        ),
        (
            {"url": ["redis://a", "rediss://b"]},
            f"{P}.url[1]: nodes of one cluster are all redis:// or all rediss://; allowed: {URL}",
        ),
        (
            {"url": ["redis://a", "redis://b"], "cluster": False},
            f"{P}.cluster: several addresses are nodes of a cluster; allowed: auto, true",
        ),
        ({"cluster": "yes"}, f"{P}.cluster: the text 'yes' is not accepted; allowed: true, false, or auto"),
        (
            {"password": "hunter2"},
            f"{P}.password: a secret is never written here: put it in an environment variable or a file and reference "
            f"it; allowed: {SECRET}",
        ),
        ({"username": "pages"}, f"{P}.username: a user needs the key password; allowed: text"),
        (
            {"database": -1},
            f"{P}.database: the number -1 is not accepted; allowed: a whole number from 0 to 65535",
        ),
        ({"database": 1, "cluster": True}, f"{P}.database: a cluster has only database 0; allowed: 0"),
        ({"prefix": ""}, f"{P}.prefix: the text '' is not accepted; allowed: {PREFIX}"),
        ({"prefix": "{kv}:"}, f"{P}.prefix: the text '{{kv}}:' is not accepted; allowed: {PREFIX}"),
        ({"prefix": "kv*"}, f"{P}.prefix: the text 'kv*' is not accepted; allowed: {PREFIX}"),
        ({"connections": 0}, f"{P}.connections: the number 0 is not accepted; allowed: 1 to 64"),
        ({"connections": True}, f"{P}.connections: the value true is not accepted; allowed: 1 to 64"),
        (
            {"in_flight": "8MiB"},
            f"{P}.in_flight: there is no such key any more: the round trip of a connection decides, up to 8MiB; "
            "remove it",
        ),
        ({"ttl": 0}, f"{P}.ttl: the number 0 is less than 1s; allowed: {TTL}"),
        ({"ttl": "250ms"}, f"{P}.ttl: the text '250ms' is less than 1s; allowed: {TTL}"),
        ({"timeout": 0}, f"{P}.timeout: the number 0 is less than 1ms; allowed: {TIMEOUT}, or auto"),
        (
            {"tls_ca": "/etc/ca.pem"},
            f"{P}.tls_ca: TLS is used only with rediss://; allowed: a rediss:// address",
        ),
        (
            {"url": "rediss://pool", "tls_ca": "ca.pem"},
            f"{P}.tls_ca: 'ca.pem' is not an absolute path; allowed: an absolute path",
        ),
        (
            {"url": "rediss://pool", "tls_key": "/etc/key"},
            f"{P}.tls_key: a key needs the key tls_certificate; allowed: an absolute path",
        ),
        (
            {"url": "rediss://pool", "tls_verify": "fulll"},
            f"{P}.tls_verify: the text 'fulll' is not accepted; did you mean 'full'?; allowed: full, ca, none",
        ),
        ({"conections": 8}, f"{P}.conections: unknown key; did you mean 'connections'?; allowed: {KEYS}"),
    ],
)
def test_a_wrong_setting_is_answered_with_one_exact_sentence(settings, sentence):
    with pytest.raises(ConfigError) as raised:
        load(**settings)
    assert str(raised.value) == sentence
    assert "hunter2" not in str(raised.value)


def test_an_address_is_required():
    with pytest.raises(ConfigError, match=rf"^{P}\.url: required; allowed: "):
        load_config(ExtraConfig.around({"tiers": {"pool": {"type": "redis"}}}))


def test_an_addresss_environment_variable_is_not_repeated(monkeypatch):
    monkeypatch.setenv("POOL", "hunter2 hunter2")
    with pytest.raises(ConfigError) as raised:
        load(url="redis://{env:POOL}")
    assert "hunter2" not in str(raised.value)


def test_sentinels_are_asked_for_a_service() -> None:
    tier = load(url=[SENTINEL, "redis+sentinel://[::1]:7/pages"], sentinel_password={"env": "SOME"})
    assert tier.service == "pages"
    assert tier.endpoints == (Endpoint("one", 26379), Endpoint("::1", 7))
    assert not tier.tls
    assert load(url="rediss+sentinel://one/pages").tls
    assert load(url="redis://one").service is None
