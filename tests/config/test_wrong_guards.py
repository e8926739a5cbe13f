"""Wrong guards and timeouts, and the exact sentence that answers each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import ValidationError

from hicache_ext.config import ExtraConfig, RemoteTierConfig, load_config
from hicache_ext.config.schema import Allowed, as_config_error
from hicache_ext.errors import ConfigError
from tests.config.test_wrong_files import N, Wrong, section, tier

TIMEOUT = "a duration from 1ms to 1h, such as 2s"


WRONG = [
    *(
        tier(
            name,
            setting,
            f"{N}.guards: there is no such key any more: a tier on the network and one with a timeout have all guards, "
            "another one has none (docs/guards.md); remove it",
        )
        for name, setting in {"guards that are a switch": "guards: true", "a guard": "guards: {retries: 3}"}.items()
    ),
    tier(
        "no timeout", "timeout: 0", f"{N}.timeout: the number 0 is less than 1ms; allowed: {TIMEOUT}, or off, or auto"
    ),
    tier(
        "a timeout in words",
        "timeout: soon",
        f"{N}.timeout: the text 'soon' is not accepted; allowed: {TIMEOUT}, or off, or auto",
    ),
    section(
        "watching in words",
        "tiers: {nvme: {type: file, path: /a, capacity: 1GiB}}\nwatch_config: always",
        "hicache_ext.watch_config: the text 'always' is not accepted; allowed: true or false",
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_a_wrong_file_is_answered_with_one_exact_sentence(wrong: Wrong, tmp_path: Path) -> None:
    file = tmp_path / f"hicache.{wrong.suffix}"
    file.write_text(wrong.text)
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    assert str(raised.value) == wrong.sentence


class _PoolConfig(RemoteTierConfig):
    type: Annotated[Literal["pool"], Allowed("pool")] = "pool"


@pytest.mark.parametrize("value", ["off", False, 0, "2h", True])
def test_a_remote_tier_always_has_a_timeout(value: Any) -> None:
    with pytest.raises(ValidationError) as raised:
        _PoolConfig(timeout=value)
    assert str(as_config_error(raised.value)).endswith(f"; allowed: {TIMEOUT}, or auto")


@pytest.mark.parametrize("value", ["auto", None])
def test_a_remote_tier_without_a_timeout_of_its_own_has_the_default_one(value: Any) -> None:
    assert (_PoolConfig(timeout=value).timeout, _PoolConfig(timeout=value).longest_call) == (None, 5.0)
    assert _PoolConfig(timeout="2s").longest_call == 2.0


@pytest.mark.parametrize("off", ["off", False])
def test_off_is_taken_as_a_word_and_as_yaml_reads_it(off: Any) -> None:
    disk = {"type": "file", "path": "/a", "capacity": "1GiB", "timeout": off}
    assert load_config(ExtraConfig.around({"tiers": {"disk": disk}})).tiers["disk"].timeout == math.inf
