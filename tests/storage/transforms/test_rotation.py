"""Keys of a tier change while a server runs: what a reload takes over, what it refuses, and what is found then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.config import ExtraConfig, HicacheExtConfig, load_config
from hicache_ext.errors import ConfigError
from hicache_ext.storage.contract.store import GetResult
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.tiering.reload import ReloadableStore
from hicache_ext.testing.conformance.pages import IDENTITY, assert_hits, page_keys, read_pages, store_pages
from tests.storage.transforms.rig import SECRETS
from tests.waiting import count_fetched

SIZES = [700, 324]


@pytest.fixture(params=["slab", "pages"])
def configured(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    for name, secret in SECRETS.items():
        (tmp_path / name).write_text(secret)

    def config(*ids: str, mode: str = "encrypt", behind: Any = None, **settings: Any) -> HicacheExtConfig:
        """``behind``: a tier that stands before it."""
        keys = [{"id": id, "file": str(tmp_path / id)} for id in ids]
        seal = {"seal": {"mode": mode, "keys": keys}} if ids else {}
        disk = {"type": "file", "path": str(tmp_path / "disk"), "capacity": "64MiB", "layout": request.param}
        return load_config(
            ExtraConfig.around(
                {"tiers": {**({"near": behind} if behind else {}), "disk": {**disk, **seal, **settings}}}
            )
        )

    return config


@pytest.fixture
def store(configured: Any) -> Iterator[ReloadableStore]:
    store = open_tiers(configured("old"))
    store.register_identity(IDENTITY, {"model": {"id": "org/model"}, "pool": {"name": "kv", "segments": SIZES}})
    yield store
    store.close()


def test_keys_rotate_under_a_running_server(store: ReloadableStore, configured: Any) -> None:
    before, during, after = page_keys(3, "before"), page_keys(3, "during"), page_keys(3, "after")
    store_pages(store, before, SIZES)
    assert store.reload(configured("new", "old")) == ["tier disk: new seal"]
    store_pages(store, during, SIZES)
    assert_hits(store, before + during, SIZES)
    assert store.count_leading(before + during) == 6
    assert store.reload(configured("new")) == ["tier disk: new seal"]
    store_pages(store, after, SIZES)
    assert store.contains(before + during + after) == [False] * 3 + [True] * 6
    assert read_pages(store, before, SIZES)[0] == [GetResult.MISS] * 3
    assert_hits(store, during + after, SIZES)
    (tier,) = store.tiers
    assert tier.metrics.total("corrupt") == 0
    store.reload(configured("new", "old"))
    assert_hits(store, before + during + after, SIZES)


def test_pages_of_a_removed_key_are_not_served_from_host_memory(configured: Any, tmp_path: Path) -> None:
    """They were read ahead with the key: somebody who has it may have made them."""
    keys = page_keys(3)
    near = {"type": "file", "path": str(tmp_path / "near"), "capacity": "64MiB"}
    alone = open_tiers(configured("old"))
    store_pages(alone, keys, SIZES)
    alone.close()
    store = open_tiers(configured("old", "new", behind=near))
    store.register_identity(IDENTITY, {"model": {"id": "org/model"}, "pool": {"name": "kv", "segments": SIZES}})
    try:
        assert store.count_leading(keys) == 3
        deadline = time.monotonic() + 10
        while count_fetched(store.prefetcher, keys) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert count_fetched(store.prefetcher, keys) == 3
        store.reload(configured("new", behind=near))
        assert count_fetched(store.prefetcher, keys) == 0
        assert read_pages(store, keys, SIZES)[0] == [GetResult.MISS] * 3
    finally:
        store.close()


@pytest.mark.parametrize("change", ["another mode", "no seal"])
def test_the_way_of_sealing_stays_while_the_tier_is_in_use(
    store: ReloadableStore, configured: Any, change: str
) -> None:
    store_pages(store, page_keys(3), SIZES)
    with pytest.raises(ConfigError, match=r"^hicache_ext.tiers.disk.seal: pages cannot be sealed in another way"):
        store.reload(configured("old", mode="authenticate") if change == "another mode" else configured())
    assert_hits(store, page_keys(3), SIZES)


def test_a_reload_with_a_key_that_is_not_there_changes_nothing(
    store: ReloadableStore, configured: Any, tmp_path: Path
) -> None:
    store_pages(store, page_keys(3), SIZES)
    (tmp_path / "new").unlink()
    with pytest.raises(ConfigError, match=r"^hicache_ext.tiers.disk.seal.keys\[0\]: the file .* cannot be read"):
        store.reload(configured("new", "old"))
    assert_hits(store, page_keys(3), SIZES)
    store_pages(store, page_keys(3, "more"), SIZES)
    assert_hits(store, page_keys(3, "more"), SIZES)


@pytest.mark.parametrize("ids", [("old",), ("new", "old")], ids=["the same seal", "a new seal"])
def test_new_content_under_the_same_id_is_refused_by_a_reload(
    store: ReloadableStore, configured: Any, tmp_path: Path, ids: tuple[str, ...]
) -> None:
    store_pages(store, page_keys(3), SIZES)
    (tmp_path / "old").write_text(SECRETS["theirs"])
    place = ids.index("old")
    with pytest.raises(ConfigError) as raised:
        store.reload(configured(*ids))
    assert str(raised.value) == (
        f"hicache_ext.tiers.disk.seal.keys[{place}]: the id old has another secret than the one in use; "
        "give it another id"
    )
    assert SECRETS["old"] not in str(raised.value) and SECRETS["theirs"] not in str(raised.value)
    assert_hits(store, page_keys(3), SIZES)
    (tmp_path / "old").write_text(SECRETS["old"] + "\n")
    store.reload(configured(*ids))
    assert_hits(store, page_keys(3), SIZES)


def test_a_key_file_that_is_gone_hinders_no_reload_of_something_else(
    store: ReloadableStore, configured: Any, tmp_path: Path
) -> None:
    store_pages(store, page_keys(3), SIZES)
    (tmp_path / "old").unlink()
    assert store.reload(configured("old", timeout="7s")) == ["tier disk: new timeout"]
    assert_hits(store, page_keys(3), SIZES)


def test_pages_outlive_the_server_and_a_seal_that_is_switched_off_and_on(
    store: ReloadableStore, configured: Any
) -> None:
    keys = page_keys(5)
    store_pages(store, keys, SIZES)
    store.close()
    plain = open_tiers(configured())
    assert read_pages(plain, keys, SIZES)[0] == [GetResult.MISS] * 5
    store_pages(plain, keys[:2], SIZES)
    assert_hits(plain, keys[:2], SIZES)
    plain.close()
    again = open_tiers(configured("old"))
    assert_hits(again, keys, SIZES)
    again.close()


def test_no_file_of_the_tier_holds_a_key_or_an_encrypted_page(store: ReloadableStore, tmp_path: Path) -> None:
    from hicache_ext.testing.conformance.pages import payload_of

    keys = page_keys(3)
    store_pages(store, keys, SIZES)
    store.close()
    content = b"".join(path.read_bytes() for path in (tmp_path / "disk").rglob("*") if path.is_file())
    assert SECRETS["old"].encode() not in content and bytes.fromhex(SECRETS["old"]) not in content
    for key in keys:
        assert payload_of(key, 1024)[:24] not in content and key[16:] not in content
