"""The section ``pd``: defaults, and one sentence for whatever is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from hicache_ext.config import load_config
from hicache_ext.config.model import ExtraConfig, HicacheExtConfig, ServerRole, hints_over
from hicache_ext.errors import ConfigError


def section(**pd: Any) -> dict[str, Any]:
    tiers = {"pool": {"type": "file", "path": "/srv/pool", "capacity": "1GiB"}}
    return ExtraConfig.around({"tiers": tiers, "pd": pd})


def test_nothing_said_writes_on_decode_and_pulls_always() -> None:
    config = load_config(section())
    assert config.pd.write.enabled
    assert config.pd.pull.mode == "off"


def test_units_and_numbers_are_read() -> None:
    config = load_config(
        section(
            write={"stride": 64, "prefix_grace": "500ms", "retry_within": "1m", "drop": "shortest"},
            pull={"mode": "adaptive", "prefill_rate": 8000, "probe_interval": "2s"},
        )
    )
    assert (config.pd.write.prefix_grace, config.pd.write.retry_within) == (0.5, 60.0)
    assert config.pd.pull.prefill_rate == 8000.0


@pytest.mark.parametrize(
    ("pd", "sentence"),
    [
        ({"wriet": {}}, r"pd.wriet: unknown key; did you mean 'write'\?"),
        ({"write": {"strides": 1}}, "pd.write.strides: unknown key; did you mean 'stride'"),
        (
            {"write": {"stride": 0}},
            "pd.write.stride: the number 0 is not accepted; allowed: a whole number of tokens from 1",
        ),
        (
            {"write": {"drop": "newest"}},
            "pd.write.drop: the text 'newest' is not accepted.*; allowed: oldest, shortest",
        ),
        ({"write": {"missing_prefix": "yes"}}, "pd.write.missing_prefix: .*; allowed: skip, complete, write"),
        ({"write": {"ttl": "1h"}}, "pd.write.ttl: the writer cannot expire single pages; where the tier has a ttl"),
        ({"pull": {"mode": "auto"}}, "pd.pull.mode: .*; allowed: off, fixed, adaptive"),
        (
            {"pull": {"hysteresis": 1.5}},
            "pd.pull.hysteresis: the number 1.5 is not accepted; allowed: a number from 0 to 0.9",
        ),
        ({"hints": {"enable": True}}, r"pd.hints.enable: unknown key; did you mean 'enabled'\?"),
        ({"hints": {"interval": "0s"}}, "pd.hints.interval: .*, more than 0"),
        ({"hints": {"max_pages": 0}}, "pd.hints.max_pages: .*; allowed: a whole number of pages from 1 to 65536"),
        ({"hints": {"keep": 10**6}}, "pd.hints.keep: .*; allowed: a whole number from 1 to 10000"),
        ({"hints": {"over": 3}}, "pd.hints.over: .*; allowed: the name of a tier"),
        ({"pull": {"prefill_rate": 100}}, "pd.pull.prefill_rate: only mode adaptive uses it, and the mode is off"),
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
        load_config(ExtraConfig.around({"tiers": tiers, "role": role, **with_hints_on(section)}))
    # Where the role comes from the launch it shows when the server looks at its own part of the file.
    with pytest.raises((ConfigError, ValidationError)):
        with_hints(role, tiers, **section)


def with_hints_on(section: dict[str, Any]) -> dict[str, Any]:
    hints = {"enabled": True, **section.get("hints", {})}
    return {**{key: value for key, value in section.items() if key != "hints"}, "pd": {"hints": hints}}
