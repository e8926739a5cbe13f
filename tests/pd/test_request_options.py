"""What a request may say about its KV: understood, or as if not said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hicache_ext.pd.decode_writer import RequestOptions


@pytest.mark.parametrize(
    ("custom", "expected"),
    [
        (None, RequestOptions()),
        ({"other": 1}, RequestOptions()),
        ({"hicache_ext": {"store": False}}, RequestOptions(store=False)),
        ({"hicache_ext": {"priority": 3}}, RequestOptions(priority=3)),
        ({"hicache_ext": "no"}, RequestOptions()),
        ({"hicache_ext": {"store": "false", "priority": "high"}}, RequestOptions()),
        ({"hicache_ext": {"store": None, "priority": True}}, RequestOptions()),
    ],
)
def test_options_are_read_from_custom_params(custom: Any, expected: RequestOptions) -> None:
    assert RequestOptions.of(SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom))) == expected


def test_a_request_without_sampling_parameters_has_the_defaults() -> None:
    assert RequestOptions.of(object()) == RequestOptions()
