"""Right configurations: what they mean, in every format and from SGLang's own hands."""

from __future__ import annotations

import copy
import json
import pickle
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from pydantic import ValidationError

from hicache_ext.config import (
    ExtraConfig,
    HicacheExtConfig,
    RoleConfig,
    load_config,
    load_document,
    tier_types,
)
from hicache_ext.config.model import BackgroundConfig, PrefetchConfig
from hicache_ext.config.render import example_config, json_schema
from hicache_ext.config.schema import ConfigModel, as_config_error
from hicache_ext.errors import ConfigError
from hicache_ext.storage.tiers.file.config import FileTierConfig
from hicache_ext.storage.tiers.mooncake.config import MooncakeTierConfig
from hicache_ext.storage.tiers.object.config import ObjectTierConfig
from hicache_ext.storage.tiers.redis.config import RedisTierConfig

TWO_TIERS = {
    "nvme": {"type": "file", "path": ["/mnt/a", "/mnt/b"], "capacity": "2TiB", "threads": 8, "io": "direct"},
    "nfs": {"type": "file", "path": "/nfs/pool", "capacity": "unlimited", "layout": "pages", "required": False},
}


def document(**section: Any) -> dict[str, Any]:
    return ExtraConfig.around({"tiers": copy.deepcopy(TWO_TIERS), **section})


def one_path(path: object) -> FileTierConfig:
    tiers = {"nvme": {"type": "file", "path": path, "capacity": "1GiB"}}
    tier = load_config(ExtraConfig.around({"tiers": tiers})).tiers["nvme"]
    assert isinstance(tier, FileTierConfig)
    return tier


def test_everything_that_is_left_out_has_its_documented_default() -> None:
    config = load_config(ExtraConfig.around({"tiers": {"disk": {"type": "file", "path": "/a", "capacity": "1GiB"}}}))
    assert config.role == "auto"
    assert config.retrieve_locations == config.store_locations == ("disk",)
    assert config.promote_to is None
    assert config.kv_dtype is None
    assert config.watch_config is False
    assert config.model.model_dump() == {"id": None, "revision": None, "fingerprint": "auto", "weights_epoch": "0"}
    assert config.tiers["disk"].model_dump() == {
        "type": "file",
        "required": True,
        "timeout": None,
        "codec": "off",
        "seal": None,
        "admission": "all",
        "write_budget": None,
        "path": ("/a",),
        "capacity": 2**30,
        "layout": "auto",
        "io": "auto",
        "threads": None,
        "ttl": None,
        "shared": None,
        "mode": "private",
        "group": None,
        "require_mount": False,
    }


def test_locations_that_are_left_out_are_all_tiers_in_written_order() -> None:
    config = load_config(document(promote_to="nvme"))
    assert config.retrieve_locations == ("nvme", "nfs")
    assert config.store_locations == ("nvme", "nfs")
    assert config.promote_to == "nvme"


def test_a_budget_is_bytes_a_second_of_all_ranks_together() -> None:
    budgets: dict[str, dict[str, Any]] = {
        "a": {"write_budget": "864TB/day"},
        "b": {"write_budget": "8.64TB/d"},
        "c": {},
    }
    tiers = {name: {"type": "file", "path": f"/{name}", "capacity": "1GiB", **given} for name, given in budgets.items()}
    found = load_config(ExtraConfig.around({"tiers": tiers})).tiers

    assert [found[name].write_budget for name in "abc"] == [10**10, 10**8, None]


def test_an_unlimited_tier_has_no_capacity() -> None:
    tier = load_config(document()).tiers["nfs"]
    assert isinstance(tier, FileTierConfig)
    assert tier.capacity is None
    assert tier.required is False


def test_a_decode_node_may_store_and_never_read() -> None:
    config = load_config(document(role="decode", retrieve_locations=[], store_locations=["nfs"]))
    assert config.retrieve_locations == ()
    assert config.store_locations == ("nfs",)


def test_a_prefill_node_may_read_and_never_store() -> None:
    assert load_config(document(role="prefill", store_locations=[])).store_locations == ()


@pytest.mark.parametrize("suffix", ["json", "yaml", "yml", "YAML", "toml"])
def test_every_format_means_the_same(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"hicache.{suffix}"
    if suffix == "toml":
        file.write_text(
            "backend_name = 'hicache_ext'\nmodule_path = 'hicache_ext.storage.backend'\n"
            "class_name = 'HiCacheExtBackend'\ninterface_v1 = 1\n"
            "[hicache_ext.tiers.nvme]\ntype = 'file'\npath = ['/mnt/a', '/mnt/b']\ncapacity = '2TiB'\nthreads = 8\n"
            "io = 'direct'\n[hicache_ext.tiers.nfs]\ntype = 'file'\npath = '/nfs/pool'\ncapacity = 'unlimited'\n"
            "layout = 'pages'\nrequired = false\n"
        )
    else:
        dump = json.dumps if suffix == "json" else yaml.safe_dump
        file.write_text(dump(document(), sort_keys=False))
    assert load_config(file) == load_config(str(file)) == load_config(f"@{file}") == load_config(document())


def test_inline_json_is_read_as_sglang_reads_it_on_a_decode_node() -> None:
    assert load_config(json.dumps(document())) == load_config(document())


def test_a_broken_inline_json_is_not_echoed() -> None:
    with pytest.raises(ConfigError) as raised:
        load_config('{"password": "hunter2"')
    assert str(raised.value) == "inline JSON: not valid JSON in line 1: Expecting ',' delimiter"


def test_sglangs_own_keys_are_kept_where_it_leaves_them_in() -> None:
    given = document() | {
        "prefetch_threshold": 128,
        "prefetch_timeout_base": 2,
        "prefetch_timeout_per_ki_token": 0.5,
        "hicache_storage_pass_prefix_keys": True,
        "tp_lcm_size": 4,
        "allocator": "shm",
        "interface_v1": True,
    }
    loaded = load_document(given)
    assert loaded.prefetch_threshold == 128
    assert loaded.prefetch_timeout_base == 2.0
    assert loaded.prefetch_timeout_per_ki_token == 0.5
    assert loaded.hicache_storage_pass_prefix_keys is True
    assert loaded.tp_lcm_size == 4
    assert loaded.allocator == "shm"
    assert loaded.interface_v1 == 1
    assert loaded.hicache_ext == load_config(document())


def test_loading_leaves_the_given_mapping_as_it_was() -> None:
    given = document()
    before = copy.deepcopy(given)
    load_config(given)
    assert given == before


def test_yaml_anchors_and_merges_are_not_taken_for_keys_written_twice(tmp_path: Path) -> None:
    file = tmp_path / "hicache.yaml"
    file.write_text(
        "backend_name: hicache_ext\nmodule_path: hicache_ext.storage.backend\nclass_name: HiCacheExtBackend\n"
        "interface_v1: 1\nhicache_ext:\n  tiers:\n    one: &one {type: file, path: /a, capacity: 1GiB}\n"
        "    two: &two {<<: *one, path: /b}\n    three: {<<: *two, path: /c}\n"
    )
    assert [tier.summary() for tier in load_config(file).tiers.values()] == [
        "file, capacity 1GiB, /a",
        "file, capacity 1GiB, /b",
        "file, capacity 1GiB, /c",
    ]


def test_the_bare_yaml_word_off_turns_the_fingerprint_off(tmp_path: Path) -> None:
    text = yaml.safe_dump(document(), sort_keys=False) + "  model: {fingerprint: off, weights_epoch: 7}\n"
    file = tmp_path / "hicache.yaml"
    file.write_text(text)
    model = load_config(file).model
    assert (model.fingerprint, model.weights_epoch) == ("off", "7")


def test_model_facts_are_taken_as_written() -> None:
    config = load_config(
        document(model={"id": "org/model", "revision": "abc", "fingerprint": "f00"}, kv_dtype="fp8_e4m3")
    )
    assert (config.model.id, config.model.revision, config.model.fingerprint) == ("org/model", "abc", "f00")
    assert config.kv_dtype == "fp8_e4m3"


def test_a_path_is_normalised() -> None:
    assert one_path("//mnt/./a//b/").path == ("/mnt/a/b",)


def test_sibling_directories_with_a_common_prefix_are_not_nested() -> None:
    assert one_path(["/mnt/a", "/mnt/ab"]).path == ("/mnt/a", "/mnt/ab")


def test_templates_are_replaced_on_the_node_that_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_DISK", "/mnt/disk7")
    assert one_path("{env:CACHE_DISK}/{hostname}/{{x}}").path == (f"/mnt/disk7/{socket.gethostname()}/{{x}}",)


def test_what_comes_out_of_an_environment_variable_is_not_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_DISK", "hunter2")
    with pytest.raises(ConfigError) as raised:
        one_path("{env:CACHE_DISK}/x")
    expected = "hicache_ext.tiers.nvme.path: '{env:CACHE_DISK}/x' is not an absolute path"
    assert str(raised.value).startswith(expected)
    assert "hunter2" not in str(raised.value)


def test_an_empty_environment_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_DISK", "")
    with pytest.raises(ConfigError, match="the environment variable CACHE_DISK is empty"):
        one_path("/mnt/{env:CACHE_DISK}")


def test_the_password_of_an_address_is_masked_wherever_it_is_written() -> None:
    with pytest.raises(ConfigError) as raised:
        one_path("redis://user:hunter2@pool:6379")
    assert "hunter2" not in str(raised.value)
    assert "redis://***@pool:6379" in str(raised.value)


def test_a_configuration_is_frozen() -> None:
    config = load_config(document())
    with pytest.raises(ValidationError):
        config.role = "decode"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        config.tiers["nvme"].required = False  # type: ignore[misc]


def test_a_configuration_survives_pickling() -> None:
    config = load_config(document())
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_dump_keeps_the_fields_of_the_tiers_own_type() -> None:
    assert load_config(document()).model_dump()["tiers"]["nvme"]["path"] == ("/mnt/a", "/mnt/b")


def test_models_built_without_load_config_make_the_same_checks_and_never_repeat_their_input() -> None:
    with pytest.raises(ValidationError) as raised:
        HicacheExtConfig.model_validate({"tiers": TWO_TIERS, "store_locations": ["nvm"]})
    assert "no tier is named 'nvm'; did you mean 'nvme'?" in str(raised.value)
    with pytest.raises(ValidationError) as raised:
        HicacheExtConfig.model_validate({"tiers": TWO_TIERS, "password": "hunter2"})
    assert "hunter2" not in str(raised.value) + repr(raised.value.errors())


def test_the_example_is_a_valid_configuration(tmp_path: Path) -> None:
    file = tmp_path / "hicache.yaml"
    file.write_text(example_config())
    assert list(load_config(file).tiers) == ["nvme"]


def test_every_type_of_tier_has_its_class() -> None:
    types = tier_types()
    assert types["file"] is FileTierConfig
    assert types["mooncake"] is MooncakeTierConfig
    assert types["redis"] is RedisTierConfig
    assert types["object"] is ObjectTierConfig


def test_the_schema_accepts_what_the_loader_accepts_and_knows_every_key() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json_schema())
    validator.check_schema(json_schema())
    addresses = {"endpoint": "tcp://*:5657", "replay_endpoint": "tcp://*:5658"}
    assert not list(validator.iter_errors(document(events=addresses | {"topic": "kv"}) | {"interface_v1": True}))
    assert list(validator.iter_errors(document(events=addresses | {"topic": "k\nv"})))
    assert not list(validator.iter_errors(document(promote_to="nvme", model={"weights_epoch": 3})))
    assert not list(validator.iter_errors(yaml.safe_load(example_config())))
    assert list(validator.iter_errors(document(retreive_locations=["nvme"])))
    broken = document()
    broken["hicache_ext"]["tiers"]["nvme"]["capcity"] = "1GiB"
    assert list(validator.iter_errors(broken))


def test_every_key_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    for model in (
        ExtraConfig,
        HicacheExtConfig,
        RoleConfig,
        PrefetchConfig,
        BackgroundConfig,
        *tier_types().values(),
    ):
        for key in model.model_fields:
            assert f"`{key}`" in page, key


def test_every_example_in_the_documentation_is_valid() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    examples = [block.split("```")[0] for block in page.split("```yaml\n")[1:]]
    assert [load_config(yaml.safe_load(text)).role for text in examples] == ["auto"]


def test_a_key_that_is_gone_says_what_decides_instead() -> None:
    class Section(ConfigModel):
        removed: ClassVar[Mapping[str, str]] = {"slow_call": "a call is slow when it outlasts the tier's timeout"}
        kept: bool = True

    with pytest.raises(ValidationError) as raised:
        Section.model_validate({"slow_call": "1s", "kept": False})
    assert str(as_config_error(raised.value)) == (
        "slow_call: there is no such key any more: a call is slow when it outlasts the tier's timeout; remove it"
    )
