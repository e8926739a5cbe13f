"""The key ``tenants``: what it takes, and the sentences about what it does not."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_ext.cli.config_command import notes_on
from hicache_ext.config import HicacheExtConfig, load_config
from hicache_ext.config.model import ExtraConfig
from hicache_ext.errors import ConfigError
from hicache_ext.storage.contract.tenants import Tenant

NAMES = (
    "a mapping of up to 62 names (up to 64 letters, digits, '.', '_' and '-') and default, such as {a: {share: 20%}}"
)
DISK = {"type": "file", "path": "/mnt/a", "capacity": "1GiB"}


def configured(tenants: Any, **more: Any) -> HicacheExtConfig:
    return load_config(ExtraConfig.around({"tiers": {"disk": DISK}, "tenants": tenants, **more}))


def test_shares_and_leases_are_read_and_a_lease_left_out_is_the_longest() -> None:
    config = configured({"a": {"share": "20%", "lease": "10m"}, "default": {}, "b": {"lease": 0}})
    assert config.tenant_limits == {"a": Tenant(0.2, 600.0), "default": Tenant(0.0, 3600.0), "b": Tenant(0.0, 0.0)}
    assert config.for_role("decode").tenant_limits == config.tenant_limits
    assert configured(None).tenant_limits is None
    thirds = {name: {"share": f"{share}%"} for name, share in (("a", 33.3), ("b", 33.3), ("c", 33.4))}
    assert configured(thirds).tenant_limits is not None
    assert configured({**{f"t{number}": {} for number in range(62)}, "default": {}}).tenant_limits is not None


@pytest.mark.parametrize(
    ("tenants", "sentence"),
    [
        (
            {"a": {"share": "60%"}, "b": {"share": "50%"}},
            "hicache_ext.tenants: the shares are 110% together; allowed: at most 100%",
        ),
        (
            {"a": {"share": 0.2}},
            "hicache_ext.tenants.a.share: the number 0.2 is not accepted; allowed: a percentage, such as 20%",
        ),
        (
            {"a": {"share": "120%"}},
            "hicache_ext.tenants.a.share: the text '120%' is not accepted; allowed: a percentage, such as 20%",
        ),
        (
            {"a": {"lease": "2h"}},
            "hicache_ext.tenants.a.lease: is more than longest_lease, 1h; allowed: at most longest_lease",
        ),
        (
            {"a/b": {}},
            f"hicache_ext.tenants.'a/b': the text 'a/b' is not accepted; allowed: {NAMES}",
        ),
        (
            {"a": {"shares": "1%"}},
            "hicache_ext.tenants.a.shares: unknown key; did you mean 'share'?; allowed: share, lease",
        ),
        (
            {f"t{number}": {} for number in range(63)},
            "hicache_ext.tenants: 63 tenants are more than an index has numbers for; allowed: up to 62, and default",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tenants: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        configured(tenants)
    assert str(wrong.value) == sentence


def test_what_a_check_says_of_page_files_and_of_generated_pages() -> None:
    section = {"tiers": {"disk": {**DISK, "layout": "pages"}}, "tenants": {"a": {"share": "20%"}}}
    document = ExtraConfig.around(section)
    notes = dict(notes_on(ExtraConfig.model_validate(document), inline=True))
    assert notes["tier disk"] == "tenants have no shares in page files; use 'layout: slab'"
    assert "hicache_storage_pass_prefix_keys: true" in notes["tenants"]
    document["hicache_storage_pass_prefix_keys"] = True
    assert "tenants" not in dict(notes_on(ExtraConfig.model_validate(document), inline=True))
