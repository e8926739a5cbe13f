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
            write={"min_tokens": 64},
            pull={"mode": "adaptive", "prefill_rate": 8000},
        )
    )
    assert config.pd.write.min_tokens == 64
    assert config.pd.pull.prefill_rate == 8000.0


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
        ({"hints": {"over": "pool"}}, "pd.hints.over: .*: the last tier of type redis carries hints, or"),
        ({"pull": {"prefill_rate": 100}}, "pd.pull.prefill_rate: only mode adaptive uses it, and the mode is off"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(pd: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as raised:
        load_config(section(**pd))
    assert "\n" not in str(raised.value)


def with_hints(role: ServerRole, tiers: dict[str, Any], **section: Any) -> HicacheExtConfig:
    document = {"tiers": tiers, "pd": {"hints": {"enabled": True}}, **section}
    return load_config(ExtraConfig.around(document)).for_role(role)


NEAR = {"type": "file", "path": "/srv/near", "capacity": "1GiB"}
POOL = {"type": "redis", "url": "redis://127.0.0.1:1"}
MOONCAKE = {"type": "mooncake", "master": "127.0.0.1:1"}


def test_hints_go_over_the_last_tier_that_carries_them() -> None:
    shared = {"near": NEAR, "pool": POOL}
    roles = {"decode": {"retrieve_locations": [], "store_locations": ["pool"]}}
    prefill = with_hints("prefill", shared, promote_to="near", roles=roles)
    assert hints_over(prefill.tiers, prefill.retrieve_locations) == "pool"
    decode = with_hints("decode", shared, promote_to="near", roles=roles)
    assert hints_over(decode.tiers, decode.store_locations) == "pool"
    assert with_hints("prefill", shared, roles=roles).pd.hints.enabled  # promoted to near by default
    third = with_hints("prefill", {**shared, "lake": MOONCAKE}, promote_to="near")
    assert hints_over(third.tiers, third.retrieve_locations) == "pool"
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
        (
            "decode",
            {"pool": MOONCAKE},
            {},
            "pd.hints.enabled: no tier of store_locations of the role decode can carry hints; allowed: a tier of type",
        ),
        (
            "prefill",
            {"near": NEAR, "pool": MOONCAKE},
            {"promote_to": "near"},
            "pd.hints.enabled: .* can carry hints; allowed: .*; a directory carries them as the last one only",
        ),
    ],
)
def test_hints_that_go_nowhere_are_refused(
    role: ServerRole, tiers: dict[str, Any], section: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(ExtraConfig.around({"tiers": tiers, "role": role, "pd": {"hints": {"enabled": True}}, **section}))
    # Where the role comes from the launch it shows when the server looks at its own part of the file.
    with pytest.raises((ConfigError, ValidationError)):
        with_hints(role, tiers, **section)
