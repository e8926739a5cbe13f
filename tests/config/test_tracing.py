"""The section ``tracing``: off where it is left out, one sentence for each mistake."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_ext.errors import ConfigError
from tests.config.test_events import load


def test_nothing_is_traced_where_nothing_is_said() -> None:
    assert load().tracing is None


@pytest.mark.parametrize("endpoint", ["sglang", "http://127.0.0.1:4318/v1/traces", "https://otlp.example/api/v2/otlp"])
def test_sglangs_collector_or_the_address_of_one_is_taken(endpoint: str) -> None:
    tracing = load(tracing={"endpoint": endpoint}).tracing
    assert tracing is not None and tracing.endpoint == endpoint


@pytest.mark.parametrize(
    ("tracing", "key", "problem"),
    [
        ({}, "endpoint", "required; allowed: sglang"),
        ({"endpoint": "SGLang"}, "endpoint", "'SGLang' is not accepted"),
        ({"endpoint": "127.0.0.1:4317"}, "endpoint", "is not accepted"),
        ({"endpoint": "grpc://127.0.0.1:4317"}, "endpoint", "is not accepted"),
        ({"endpoint": "http://127.0.0.1:99999/v1/traces"}, "endpoint", "is not accepted"),
        (
            {"endpoint": "http://127.0.0.1:4318"},
            "endpoint",
            "has no path; allowed: such as http://127.0.0.1:4318/v1/traces",
        ),
        ({"endpoint": 4318}, "endpoint", "is not accepted"),
        ({"endpont": "sglang"}, "endpont", "unknown key; did you mean 'endpoint'"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_key(tracing: dict[str, Any], key: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?m)^hicache_ext\.tracing\.{key}: .*{problem}"):
        load(tracing=tracing)


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://user:hunter2@collector/v1/traces",
        "http://user:hunter2@collector:99999/v1/traces",
        "grpc://hunter2@collector",
        "http://collector/v1/traces?key=hunter2",
        "user:hunter2 @collector",
    ],
)
def test_a_secret_in_the_address_is_refused_and_not_shown(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        load(tracing={"endpoint": endpoint})
    assert "hunter2" not in str(refused.value)


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^hicache_ext\.tracing: .* allowed: a mapping with endpoint"):
        load(tracing="on")
