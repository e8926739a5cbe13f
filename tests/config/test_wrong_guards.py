"""Wrong guards and timeouts, and the exact sentence that answers each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import ValidationError

from hicache_ext.config import ExtraConfig, GuardsConfig, RemoteTierConfig, load_config
from hicache_ext.config.schema import Allowed, as_config_error
from hicache_ext.errors import ConfigError
from tests.config.test_wrong_files import N, Wrong, section, tier

GUARD_KEYS = (
    "retries, breaker, slow_call, probe_interval, slow_start, negative_cache, concurrency, exists_budget, bounce_memory"
)
SLOW = "a duration from 1ms to 1h, such as 500ms"
TIMEOUT = "a duration from 1ms to 1h, such as 2s"


def guard(name: str, setting: str, sentence: str) -> Wrong:
    return tier(name, f"guards: {{{setting}}}", f"{N}.guards.{sentence}")


WRONG = [
    tier(
        "guards that are a switch",
        "guards: true",
        f"{N}.guards: true or false is not accepted; allowed: a mapping with {GUARD_KEYS}",
    ),
    guard("a misspelt guard", "retry: 1", f"retry: unknown key; did you mean 'retries'?; allowed: {GUARD_KEYS}"),
    guard("negative retries", "retries: -1", "retries: the number -1 is not accepted; allowed: 0 to 10, or auto"),
    guard("retries without end", "retries: 11", "retries: the number 11 is not accepted; allowed: 0 to 10, or auto"),
    guard("retries in words", "retries: twice", "retries: the text 'twice' is not accepted; allowed: 0 to 10, or auto"),
    guard(
        "a breaker in words", "breaker: 'yes'", "breaker: the text 'yes' is not accepted; allowed: true, false, or auto"
    ),
    guard(
        "a breaker that is a number",
        "breaker: 1",
        "breaker: the number 1 is not accepted; allowed: true, false, or auto",
    ),
    guard("a slow call without a unit", "slow_call: '500'", f"slow_call: the text '500' has no unit; allowed: {SLOW}"),
    guard("a slow call that is off", "slow_call: off", f"slow_call: the value false is not accepted; allowed: {SLOW}"),
    guard("a slow call of no time", "slow_call: 0s", f"slow_call: the text '0s' is less than 1ms; allowed: {SLOW}"),
    guard(
        "probes without a pause",
        "probe_interval: 1ms",
        "probe_interval: the text '1ms' is less than 10ms; allowed: a duration from 10ms to 1h, such as 1s",
    ),
    guard(
        "a negative slow start",
        "slow_start: -1",
        "slow_start: the number -1 is negative; allowed: a duration up to 1h, such as 5s",
    ),
    guard(
        "a negative cache of an hour",
        "negative_cache: 1h",
        "negative_cache: the text '1h' is more than 1m; allowed: "
        "a duration from 1ms to 1m, such as 1s, or off, or auto",
    ),
    guard(
        "a negative cache that is on",
        "negative_cache: true",
        "negative_cache: the value true is not accepted; "
        "allowed: a duration from 1ms to 1m, such as 1s, or off, or auto",
    ),
    guard(
        "no calls at all", "concurrency: 0", "concurrency: the number 0 is not accepted; allowed: 1 to 1024, or auto"
    ),
    guard(
        "concurrency that is true",
        "concurrency: true",
        "concurrency: the value true is not accepted; allowed: 1 to 1024, or auto",
    ),
    guard(
        "a budget of a minute",
        "exists_budget: 1m",
        "exists_budget: the text '1m' is more than 1s; allowed: a "
        "duration from 1ms to 1s, such as 5ms, or off, or auto",
    ),
    guard(
        "too little bounce memory",
        "bounce_memory: 4KiB",
        "bounce_memory: the text '4KiB' is less than 1MiB; allowed: a size of at least 1MiB, such as 256MiB",
    ),
    guard(
        "ambiguous bounce memory",
        "bounce_memory: 1G",
        "bounce_memory: the unit 'G' is ambiguous; write GB or GiB; allowed: a size of at least 1MiB, such as 256MiB",
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
    guards = {"negative_cache": off, "exists_budget": off}
    disk = {"type": "file", "path": "/a", "capacity": "1GiB", "timeout": off, "guards": guards}
    found = load_config(ExtraConfig.around({"tiers": {"disk": disk}})).tiers["disk"]
    assert (found.timeout, found.guards.negative_cache, found.guards.exists_budget) == (math.inf, 0.0, math.inf)


def test_auto_is_what_is_left_out() -> None:
    words = dict.fromkeys(("retries", "breaker", "negative_cache", "concurrency", "exists_budget"), "auto")
    assert GuardsConfig.model_validate(words) == GuardsConfig()
