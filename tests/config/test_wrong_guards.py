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

GUARD_KEYS = "retries, breaker, concurrency, exists_budget"
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
    guard(
        "a slow call of one's own",
        "slow_call: 500ms",
        "slow_call: there is no such key any more: a call is slow after half of the tier's timeout, and after 500ms at "
        "the earliest; remove it",
    ),
    guard(
        "bounce memory of one's own",
        "bounce_memory: 1GiB",
        "bounce_memory: there is no such key any more: calls with a timeout have up to 256MiB of memory for pages; "
        "remove it",
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
    guards = {"exists_budget": off}
    disk = {"type": "file", "path": "/a", "capacity": "1GiB", "timeout": off, "guards": guards}
    found = load_config(ExtraConfig.around({"tiers": {"disk": disk}})).tiers["disk"]
    assert (found.timeout, found.guards.exists_budget) == (math.inf, math.inf)


def test_auto_is_what_is_left_out() -> None:
    words = dict.fromkeys(("retries", "breaker", "concurrency", "exists_budget"), "auto")
    assert GuardsConfig.model_validate(words) == GuardsConfig()
