"""What a sealed tier can do beside its pages: list them for events, keep identities, change its capacity."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.transforms.sealing import SealMode
from hicache_ext.storage.contract.abilities import IdentityKeeper, PageLister, Resizable, ability
from hicache_ext.storage.contract.registry import examine_tier
from hicache_ext.storage.contract.transforming.layers import transformed
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import IDENTITY, page_keys, store_pages
from tests.storage.transforms.rig import AUTHENTICATE, ENCRYPT, seal


@pytest.mark.parametrize("mode", [AUTHENTICATE, ENCRYPT])
def test_pages_are_listed_by_their_hashes_where_these_are_not_hidden(mode: SealMode, tmp_path: Path) -> None:
    inner = SlabStore("disk", tmp_path, capacity=64 << 20)
    store, keys = transformed(inner, None, seal(mode, "new", "old"), block=4096), page_keys(5)
    store_pages(transformed(inner, None, seal(mode, "old"), block=4096), keys[:2])
    store_pages(store, keys[2:])
    lister = ability(store, PageLister)
    assert lister is not None
    heads = [int.from_bytes(key[IDENTITY_LENGTH : IDENTITY_LENGTH + 8], "big", signed=True) for key in keys]
    assert sorted(lister.block_hashes(IDENTITY).tolist()) == (sorted(heads) if mode is AUTHENTICATE else [])
    assert lister.block_hashes(bytes(16)).dtype == np.int64
    store.close()


def test_other_abilities_are_those_of_the_store_below(tmp_path: Path) -> None:
    store = transformed(SlabStore("disk", tmp_path, capacity=64 << 20), None, seal(ENCRYPT, "new"))
    resizable = ability(store, Resizable)
    assert resizable is not None and resizable.can_resize(32 << 20)
    assert ability(store, IdentityKeeper) is None
    store.close()


def test_identities_are_those_of_the_pages_and_not_of_their_forms() -> None:
    inner = MemoryPageStore()
    store = transformed(inner, None, seal(ENCRYPT, "new"))
    document = {"model": {"id": "org/model"}, "pool": {"name": "kv"}}
    store.register_identity(IDENTITY, document)
    keeper = ability(store, IdentityKeeper)
    assert keeper is not None and keeper.identities() == {IDENTITY: document}
    stored = {digest: kept["stored_as"] for digest, kept in inner.identities().items() if "stored_as" in kept}
    assert list(stored.values()) == [{"of": IDENTITY.hex(), "seal": "encrypt", "key": "new"}]


def test_a_tier_tells_of_its_pages_unless_a_seal_hides_them(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("0" * 64)
    told = {}
    for mode in ("none", "authenticate", "encrypt"):
        keys = [{"id": "a", "file": str(tmp_path / "key")}]
        more = {} if mode == "none" else {"seal": {"mode": mode, "keys": keys}}
        disk = {"type": "file", "path": str(tmp_path / "disk"), "capacity": "64MiB", **more}
        tier = load_config(ExtraConfig.around({"tiers": {"disk": disk}})).tiers["disk"]
        told[mode] = tier.tells_pages
        assert not [finding for finding in examine_tier("disk", tier) if finding.level.name == "ERROR"]
    assert told == {"none": True, "authenticate": True, "encrypt": False}
