"""One file for the servers of all roles."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_ext.config import ExtraConfig, HicacheExtConfig, load_config
from hicache_ext.errors import ConfigError

TIERS = {
    "nvme": {"type": "file", "path": "/mnt/nvme", "capacity": "1GiB"},
    "pool": {"type": "file", "path": "/mnt/pool", "capacity": "1GiB"},
}
DECODE = {"retrieve_locations": [], "store_locations": ["pool"], "store_policies": {"pool": "async"}}


def load(**section: Any) -> HicacheExtConfig:
    return load_config(ExtraConfig.around({"tiers": TIERS, **section}))


def test_each_role_has_its_own_locations_and_only_the_tiers_that_it_uses():
    config = load(promote_to="nvme", roles={"decode": DECODE})
    prefill, decode = config.for_role("prefill"), config.for_role("decode")
    assert (prefill.role, prefill.retrieve_locations, prefill.store_locations) == (
        "prefill",
        ("nvme", "pool"),
        ("nvme", "pool"),
    )
    assert (prefill.promote_to, prefill.store_policies) == ("nvme", {})
    assert (decode.role, decode.retrieve_locations, decode.store_locations) == ("decode", (), ("pool",))
    assert (decode.promote_to, decode.store_policies) == (None, {"pool": "async"})
    assert list(prefill.tiers) == ["nvme", "pool"] and list(decode.tiers) == ["pool"]


def test_a_role_in_the_file_wins_over_what_sglang_was_launched_as():
    assert load(role="decode", roles={"decode": DECODE}).for_role("prefill").retrieve_locations == ()


def test_what_a_role_leaves_out_is_as_for_all():
    config = load(prefetch={"buffer": "8MiB"}, roles={"prefill": {"promote_to": "nvme"}}).for_role("prefill")
    assert config.prefetch.buffer == 8 << 20
    assert config.store_locations == ("nvme", "pool")
    assert config.promote_to == "nvme"


def test_a_view_is_its_own_view():
    view = load(promote_to="nvme", roles={"decode": DECODE}).for_role("decode")
    assert view.for_role("decode") == view


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        (
            {"roles": {"decod": {}}},
            "hicache_ext.roles.decod: the text 'decod' is not accepted; did you mean 'decode'?; allowed: ",
        ),
        (
            {"roles": {"auto": {}}},
            "hicache_ext.roles.auto: the text 'auto' is not accepted; allowed: a mapping",
        ),
        ({"roles": {"decode": {"retrieve": []}}}, "hicache_ext.roles.decode.retrieve: unknown key; did you mean "),
        (
            {"roles": {"decode": {"store_locations": ["nvm"]}}},
            "hicache_ext.roles.decode.store_locations[0]: no tier is named 'nvm'; did you mean 'nvme'?; allowed: ",
        ),
        (
            {"roles": {"prefill": {"retrieve_locations": []}}},
            "hicache_ext.roles.prefill.retrieve_locations: must not be empty with role prefill",
        ),
        (
            {"roles": {"decode": {"retrieve_locations": [], "store_locations": []}}},
            "hicache_ext.roles.decode.store_locations: retrieve_locations and store_locations are both empty",
        ),
        ({"roles": {"prefill": {"promote_to": "pool"}}}, "hicache_ext.roles.prefill.promote_to: 'pool' is the last of"),
        ({"roles": ["decode"]}, "hicache_ext.roles: a list is not accepted"),
        ({"roles": {"decode": None}}, "hicache_ext.roles.decode: an empty value is not accepted"),
        (
            {"store_policies": {"pol": "async"}},
            "hicache_ext.store_policies: no tier is named 'pol'; did you mean 'pool'",
        ),
        (
            {"store_policies": {"pool": "asinc"}},
            "hicache_ext.store_policies.pool: the text 'asinc' is not accepted; did",
        ),
        ({"store_policies": ["pool"]}, "hicache_ext.store_policies: a list is not accepted"),
        ({"prefetch": {"buffer": "1KiB"}}, "hicache_ext.prefetch.buffer: the text '1KiB' is less than 1MiB"),
        ({"prefetch": {"buffer": True}}, "hicache_ext.prefetch.buffer: the value true is not accepted"),
        (
            {"prefetch": {"streams": 4}},
            "hicache_ext.prefetch.streams: there is no such key any more: four calls on each outer tier go on",
        ),
        (
            {"prefetch": {"lifetime": "2m"}},
            "hicache_ext.prefetch.lifetime: there is no such key any more: a page that nobody reads",
        ),
        (
            {"background": {"promotion_buffer": "1GiB"}},
            "hicache_ext.background.promotion_buffer: there is no such key any more: 128MiB may wait to be promoted; ",
        ),
        (
            {"kernels": {"calibration": "/x.json"}},
            "hicache_ext.kernels.calibration: there is no such key any more: it lies where hicache-ext bench kernels",
        ),
        ({"background": {"drain": "1ms"}}, "hicache_ext.background.drain: the text '1ms' is less than 10ms; allowed: "),
    ],
)
def test_a_mistake_is_one_sentence(section, sentence):
    with pytest.raises(ConfigError) as error:
        load(**section)
    assert str(error.value).startswith(sentence)
