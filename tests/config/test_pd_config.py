"""The section ``pd``: defaults, and one sentence for whatever is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_ext.config import load_config
from hicache_ext.config.model import ExtraConfig
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
        ({"pull": {"prefill_rate": 100}}, "pd.pull.prefill_rate: only mode adaptive uses it, and the mode is off"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(pd: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as raised:
        load_config(section(**pd))
    assert "\n" not in str(raised.value)
