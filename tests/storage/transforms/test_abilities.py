"""What a sealed tier can do beside its pages: list them for events, keep identities, change its capacity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import obstore
import obstore.store
import pytest

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.transforms.sealing import SealMode
from hicache_ext.storage.contract.abilities import IdentityKeeper, PageLister, Resizable, ability
from hicache_ext.storage.contract.registry import examine_tier
from hicache_ext.storage.contract.transforming.store import TransformedStore
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.storage.tiers.object.catalog import identity_name
from hicache_ext.storage.tiers.object.config import ObjectTierConfig
from hicache_ext.storage.tiers.object.store import ObjectPageStore
from hicache_ext.testing.conformance.pages import IDENTITY, page_keys, store_pages
from tests.storage.transforms.rig import AUTHENTICATE, ENCRYPT, seal


@pytest.mark.parametrize("mode", [AUTHENTICATE, ENCRYPT])
def test_pages_are_listed_by_their_hashes_where_these_are_not_hidden(mode: SealMode, tmp_path: Path) -> None:
    inner = SlabStore("disk", tmp_path, capacity=64 << 20)
    store, keys = TransformedStore(inner, None, seal(mode, "new", "old"), block=4096), page_keys(5)
    store_pages(TransformedStore(inner, None, seal(mode, "old"), block=4096), keys[:2])
    store_pages(store, keys[2:])
    lister = ability(store, PageLister)
    assert lister is not None
    heads = [int.from_bytes(key[IDENTITY_LENGTH : IDENTITY_LENGTH + 8], "big", signed=True) for key in keys]
    assert sorted(lister.block_hashes(IDENTITY).tolist()) == (sorted(heads) if mode is AUTHENTICATE else [])
    assert lister.block_hashes(bytes(16)).dtype == np.int64
    store.close()


def test_other_abilities_are_those_of_the_store_below(tmp_path: Path) -> None:
    store = TransformedStore(SlabStore("disk", tmp_path, capacity=64 << 20), None, seal(ENCRYPT, "new"))
    resizable = ability(store, Resizable)
    assert resizable is not None and resizable.can_resize(32 << 20)
    assert ability(store, IdentityKeeper) is None
    store.close()


def test_identities_are_those_of_the_pages_and_not_of_their_forms() -> None:
    inner = MemoryPageStore()
    store = TransformedStore(inner, None, seal(ENCRYPT, "new"))
    document = {"model": {"id": "org/model"}, "pool": {"name": "kv"}}
    store.register_identity(IDENTITY, document)
    keeper = ability(store, IdentityKeeper)
    assert keeper is not None and keeper.identities() == {IDENTITY: document}
    stored = {digest: kept["stored_as"] for digest, kept in inner.identities().items() if "stored_as" in kept}
    assert list(stored.values()) == [{"of": IDENTITY.hex(), "seal": "encrypt", "key": "new"}]


@pytest.mark.parametrize("hostile", [[], 7, None, "text", {"stored_as": []}, {"stored_as": {"of": []}}], ids=repr)
def test_a_hostile_document_of_another_keeper_does_not_hinder_a_clear(hostile: Any) -> None:
    inner = MemoryPageStore()
    store, keys = TransformedStore(inner, None, seal(ENCRYPT, "new")), page_keys(3)
    store.register_identity(IDENTITY, {"pool": {"name": "kv"}})
    store_pages(store, keys)
    real = inner.identities
    inner.identities = lambda: {bytes(16): hostile, **real()}  # type: ignore[method-assign]
    keeper = ability(store, IdentityKeeper)
    assert keeper is not None and IDENTITY in keeper.identities()
    assert store.clear([IDENTITY]) == 1
    assert store.contains(keys) == [False] * 3


HOSTILE = [b"[]", b"", b"7", b"\xff", b"{", b"[" * 100_000, b'{"a": "' + b"a" * (1 << 20) + b'"}']


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_document_in_a_bucket_hides_no_other_one(hostile: bytes) -> None:
    client = obstore.store.MemoryStore()
    inner = ObjectPageStore("cold", ObjectTierConfig(url="file:///test"), lambda: client)
    store, keys = TransformedStore(inner, None, seal(ENCRYPT, "new")), page_keys(3)
    store.register_identity(IDENTITY, {"pool": {"name": "kv"}})
    store_pages(TransformedStore(inner, None, seal(ENCRYPT, "old")), keys)
    for digest in (bytes(16), b"\xff" * 16):
        obstore.put(client, identity_name(digest), hostile)
    kept = inner.identities()
    assert IDENTITY in kept and all(isinstance(document, dict) for document in kept.values())
    assert bytes(16) not in kept
    assert store.clear([IDENTITY]) >= 0
    store.close()


def test_a_document_that_may_not_be_read_hides_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    client = obstore.store.MemoryStore()
    inner = ObjectPageStore("cold", ObjectTierConfig(url="file:///test"), lambda: client)
    inner.register_identity(IDENTITY, {"pool": {"name": "kv"}})
    obstore.put(client, identity_name(bytes(16)), b"{}")
    real = obstore.get

    def refuse(client: Any, path: str, **options: Any) -> Any:
        if bytes(16).hex() in path:
            raise PermissionError("not this one")
        return real(client, path, **options)

    monkeypatch.setattr(obstore, "get", refuse)
    assert list(inner.identities()) == [IDENTITY]
    inner.close()


def test_a_tier_tells_of_its_pages_unless_a_seal_hides_them(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(bytes(range(32)).hex())
    told = {}
    for mode in ("none", "authenticate", "encrypt"):
        keys = [{"id": "a", "file": str(tmp_path / "key")}]
        more = {} if mode == "none" else {"seal": {"mode": mode, "keys": keys}}
        disk = {"type": "file", "path": str(tmp_path / "disk"), "capacity": "64MiB", **more}
        tier = load_config(ExtraConfig.around({"tiers": {"disk": disk}})).tiers["disk"]
        told[mode] = tier.tells_pages
        assert not [finding for finding in examine_tier("disk", tier) if finding.level.name == "ERROR"]
    assert told == {"none": True, "authenticate": True, "encrypt": False}
