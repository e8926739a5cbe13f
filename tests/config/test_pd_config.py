"""The section ``pd``: defaults, and one sentence for whatever is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_ext.config import load_config
from hicache_ext.config.model import ExtraConfig, HicacheExtConfig, ServerRole, hints_over
from hicache_ext.errors import ConfigError
from hicache_ext.storage.tiering.tier_use import tier_use


def section(**pd: Any) -> dict[str, Any]:
    tiers = {"pool": {"type": "file", "path": "/srv/pool", "capacity": "1GiB"}}
    return ExtraConfig.around({"tiers": tiers, "pd": pd})


def test_nothing_said_writes_on_decode_and_pulls_always() -> None:
    config = load_config(section())
    assert config.pd.write.enabled
    assert config.pd.pull.mode == "off"


def test_units_and_numbers_are_read() -> None:
    config = load_config(section(write={"min_tokens": 64}, pull={"mode": "adaptive", "min_tokens": 8000}))
    assert config.pd.write.min_tokens == 64
    assert config.pd.pull.min_tokens == 8000


@pytest.mark.parametrize(
    ("pd", "sentence"),
    [
        ({"wriet": {}}, r"pd.wriet: unknown key; did you mean 'write'\?"),
        ({"write": {"min_token": 1}}, "pd.write.min_token: unknown key; did you mean 'min_tokens'"),
        (
            {"write": {"min_tokens": -1}},
            "pd.write.min_tokens: the number -1 is not accepted; allowed: a whole number of tokens",
        ),
        (
            {"write": {"stride": 64}},
            "pd.write.stride: there is no such key any more: a running request is copied",
        ),
        ({"write": {"retries": 5}}, "pd.write.retries: .*: a failed write is tried again three times; remove it"),
        ({"write": {"ttl": "1h"}}, "pd.write.ttl: .*: the writer cannot expire single pages; where the tier has a ttl"),
        ({"pull": {"mode": "auto"}}, "pd.pull.mode: .*; allowed: off, fixed, adaptive"),
        ({"pull": {"hysteresis": 0.3}}, "pd.pull.hysteresis: there is no such key any more: after a tier was too slow"),
        ({"hints": {"enable": True}}, r"pd.hints.enable: unknown key; did you mean 'enabled'\?"),
        ({"hints": {"keep": 100}}, "pd.hints.keep: there is no such key any more: the pool keeps the newest 256 hints"),
        ({"hints": {"over": 3}}, "pd.hints.over: .*; allowed: the name of a tier"),
        ({"pull": {"prefill_rate": 100}}, "pd.pull.prefill_rate: there is no such key any more: what a prefill takes"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(pd: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as raised:
        load_config(section(**pd))
    assert "\n" not in str(raised.value)


def with_hints(
    role: ServerRole, tiers: dict[str, Any], *, hints: dict[str, Any] | None = None, **section: Any
) -> HicacheExtConfig:
    document = {"tiers": tiers, "pd": {"hints": {"enabled": True, **(hints or {})}}, **section}
    return load_config(ExtraConfig.around(document)).for_role(role)


NEAR = {"type": "file", "path": "/srv/near", "capacity": "1GiB"}
POOL = {"type": "redis", "url": "redis://127.0.0.1:1"}
MOONCAKE = {"type": "mooncake", "master": "127.0.0.1:1"}


def test_hints_go_over_the_pool_unless_another_tier_is_named() -> None:
    shared = {"near": NEAR, "pool": POOL}
    roles = {"decode": {"retrieve_locations": [], "store_locations": ["pool"]}}
    prefill = with_hints("prefill", shared, promote_to="near", roles=roles)
    assert hints_over(prefill.pd.hints, prefill.retrieve_locations) == "pool"
    decode = with_hints("decode", shared, promote_to="near", roles=roles)
    assert hints_over(decode.pd.hints, decode.store_locations) == "pool"
    assert with_hints("prefill", shared, roles=roles).pd.hints.enabled  # promoted to near by default
    named = with_hints("prefill", {**shared, "lake": MOONCAKE}, promote_to="near", hints={"over": "pool"})
    assert hints_over(named.pd.hints, named.retrieve_locations) == "pool"
    assert with_hints(
        "both", {"pool": MOONCAKE}
    ).pd.hints.enabled  # a server that is no half of a pair has no use for it


@pytest.mark.parametrize(
    ("role", "tiers", "section", "sentence"),
    [
        ("prefill", {"pool": POOL}, {}, "pd.hints.enabled: a prefill node brings the pages to the tier promote_to"),
        (
            "prefill",
            {"near": NEAR, "pool": POOL},
            {"promote_to": "off"},
            "pd.hints.enabled: a prefill node brings the pages to the tier promote_to",
        ),
        (
            "prefill",
            {"near": NEAR, "pool": POOL},
            {"store_locations": ["pool"]},
            "pd.hints.enabled: a prefill node brings the pages to the tier promote_to",
        ),
        ("decode", {"pool": MOONCAKE}, {}, "pd.hints.over: tier 'pool' is of type mooncake, which carries no hints"),
        ("decode", {"pool": POOL}, {"hints": {"over": "poll"}}, "pd.hints.over: 'poll' is not in store_locations"),
        (
            "prefill",
            {"near": NEAR, "pool": MOONCAKE},
            {"promote_to": "near"},
            "pd.hints.over: .*which carries no hints; allowed: near",
        ),
    ],
)
def test_hints_that_go_nowhere_are_refused(
    role: ServerRole, tiers: dict[str, Any], section: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tier_use(load_config(ExtraConfig.around({"tiers": tiers, "role": role, **with_hints_on(section)})))
    # Where the role comes from the launch it shows when the server looks at its own part of the file.
    with pytest.raises(ConfigError, match=rf"^hicache_ext\.{sentence}"):
        tier_use(with_hints(role, tiers, **section))


def with_hints_on(section: dict[str, Any]) -> dict[str, Any]:
    hints = {"enabled": True, **section.get("hints", {})}
    return {**{key: value for key, value in section.items() if key != "hints"}, "pd": {"hints": hints}}
