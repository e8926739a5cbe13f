"""What a request may say about its KV: understood, or as if not said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hicache_ext.sglang.decode_manager import said_of
from hicache_ext.storage.serving.kv_hints import Said


@pytest.mark.parametrize(
    ("custom", "expected"),
    [
        (None, Said()),
        ({"other": 1}, Said()),
        ({"hicache_ext": {"store": False}}, Said(store=False)),
        ({"hicache_ext": {"priority": 3}}, Said(priority=3)),
        ({"hicache_ext": "no"}, Said()),
        ({"hicache_ext": {"store": "false", "priority": "high"}}, Said()),
        ({"hicache_ext": {"store": None, "priority": True}}, Said()),
    ],
)
def test_options_are_read_from_custom_params(custom: Any, expected: Said) -> None:
    assert said_of(SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom))) == expected


def test_a_request_without_sampling_parameters_has_the_defaults() -> None:
    assert said_of(object()) == Said()
