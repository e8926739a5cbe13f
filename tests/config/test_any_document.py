"""Whatever is written where: a configuration or a ConfigError, and never a word of it where a secret may stand."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hicache_ext.config import ExtraConfig, HicacheExtConfig, ModelConfig, load_config
from hicache_ext.errors import ConfigError
from hicache_ext.storage.tiers.file.config import FileTierConfig
from hicache_ext.storage.tiers.redis.config import RedisTierConfig

PASSWORD = "hunter2"

anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


def mostly(right: object) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(right), st.just(right), anything)


def some_of(model: type[Any], right: dict[str, Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {key: value if isinstance(value, st.SearchStrategy) else mostly(value) for key, value in right.items()},
        optional={key: anything for key in model.model_fields if key not in right},
    )


tiers = st.dictionaries(
    st.sampled_from(["nvme", "pool", "Bad name", "password"]),
    st.one_of(
        some_of(FileTierConfig, {"type": "file", "path": "/a", "capacity": "1GiB"}),
        some_of(RedisTierConfig, {"type": "redis", "url": "redis://pool"}),
        anything,
    ),
    min_size=1,
    max_size=2,
)
sections = st.one_of(
    some_of(HicacheExtConfig, {"tiers": tiers, "model": some_of(ModelConfig, {"id": "m"}), "role": "both"}), anything
)
documents = some_of(ExtraConfig, ExtraConfig.around({}) | {"hicache_ext": sections})


@given(documents)
def test_any_document_is_a_configuration_or_a_config_error_of_single_lines(document: dict[str, Any]) -> None:
    said = ""
    try:
        config = load_config(document)
        assert set(config.retrieve_locations) | set(config.store_locations) <= set(config.tiers)
    except ConfigError as error:
        said = str(error)
        assert all(line.strip() for line in said.split("\n"))
    assert "pydantic" not in said.lower()


@given(
    st.sampled_from(["", "hicache_ext", "hicache_ext.tiers", "hicache_ext.tiers.nvme", "hicache_ext.model"]),
    st.sampled_from(["password", "token", "secret", "access_key", "auth_token"]),
    st.sampled_from([PASSWORD, [PASSWORD], {"value": PASSWORD}, {"env": PASSWORD + "!"}]),
)
def test_a_password_written_anywhere_is_refused_and_never_repeated(place: str, key: str, value: object) -> None:
    document = ExtraConfig.around(
        {"tiers": {"nvme": {"type": "file", "path": "/a", "capacity": "1GiB"}}, "model": {"id": "m"}}
    )
    mapping: dict[str, Any] = document
    for step in filter(None, place.split(".")):
        mapping = mapping[step]
    mapping[key] = value
    for source in (document, json.dumps(document)):
        said = ""
        try:
            load_config(source)
        except ConfigError as error:
            said = str(error)
        assert said.startswith(f"{place}.{key}".lstrip("."))
        assert PASSWORD not in said
