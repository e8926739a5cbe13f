"""The section ``events``: off where it is left out, one sentence for each mistake."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_ext.config import HicacheExtConfig, load_config
from hicache_ext.config.model import ExtraConfig
from hicache_ext.errors import ConfigError

TIERS = {"nvme": {"type": "file", "path": "/mnt/nvme0", "capacity": "1GiB"}}
SOUND = {"endpoint": "tcp://*:5657", "replay_endpoint": "tcp://10.0.0.1:5757"}


def load(**section: Any) -> HicacheExtConfig:
    return load_config(ExtraConfig.around({"tiers": TIERS, **section}))


def test_events_are_off_where_nothing_is_said() -> None:
    assert load().events is None


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5657", "tcp://10.0.0.1:1", "tcp://node-1.local:65535", "tcp://[::1]:5657"]
)
def test_an_address_of_this_machine_is_taken(endpoint: str) -> None:
    events = load(events={**SOUND, "endpoint": endpoint, "topic": "kv"}).events
    assert events is not None
    assert (events.endpoint, events.topic) == (endpoint, "kv")


def test_every_role_of_a_file_has_it() -> None:
    for role in ("prefill", "decode", "both"):
        assert load(events=SOUND).for_role(role).events == load(events=SOUND).events  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("events", "key", "problem"),
    [
        ({}, "endpoint", "required"),
        ({"endpoint": "tcp://*:5657"}, "replay_endpoint", "required; allowed: tcp://"),
        ({**SOUND, "endpoint": "*:5657"}, "endpoint", "'\\*:5657' is not accepted"),
        ({**SOUND, "endpoint": "tcp://*:0"}, "endpoint", "is not accepted"),
        ({**SOUND, "endpoint": "tcp://*:65536"}, "endpoint", "is not accepted"),
        ({**SOUND, "endpoint": "ipc:///tmp/x"}, "endpoint", "is not accepted"),
        ({**SOUND, "endpoint": 5657}, "endpoint", "is not accepted"),
        ({**SOUND, "replay_endpoint": "tcp://*:5657"}, "replay_endpoint", "has the port of endpoint"),
        (
            {**SOUND, "interval": "10ms"},
            "interval",
            "there is no such key any more: the tiers are looked at every second",
        ),
        ({**SOUND, "topic": "a\nb"}, "topic", "is not accepted"),
        ({**SOUND, "replay_endpont": "x"}, "replay_endpont", "unknown key; did you mean 'replay_endpoint'"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_key(events: dict[str, Any], key: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?m)^hicache_ext\.events\.{key}: .*{problem}"):
        load(events=events)


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^hicache_ext\.events: .* allowed: a mapping with endpoint"):
        load(events="on")
