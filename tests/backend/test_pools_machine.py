"""The pools of a prefix share its fate: the conformance suite's machine over our backend."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from hicache_ext.testing.conformance.pages import settle
from hicache_ext.testing.host_pools import make_storage_config
from tests.backend.test_conformance import extra_config
from tests.rigs.pools_machine import pools_machine
from tests.storage.raw_access import RawFiles

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


class _Tiers:
    """Our backend over file tiers. Pages are damaged where they are files; test_slab_conformance.py damages slots."""

    def __init__(self, **tiers: dict[str, Any]) -> None:
        self._directory = tempfile.TemporaryDirectory()
        root = Path(self._directory.name)
        common = {"type": "file", "io": "buffered", "threads": 1, "capacity": "64MiB", "layout": "pages"}
        self._tiers = {name: {**common, "path": str(root / name), **tier} for name, tier in tiers.items()}
        self._raw = {name: RawFiles(root / name) for name, tier in self._tiers.items() if tier["layout"] == "pages"}
        self._backend: Any = None

    def open(self) -> Any:
        from hicache_ext.sglang.backend import HiCacheExtBackend

        config = extra_config(Path(self._directory.name), tiers=self._tiers)
        self._backend = HiCacheExtBackend(make_storage_config(extra_config=config), {})
        return self._backend

    def lose(self, pool: str, key: str) -> bool:
        return bool(self._backend._store.remove([self._key(pool, key)]))

    def damage(self, pool: str, key: str) -> bool:
        """In every tier: what one of them can still serve is not lost."""
        if len(self._raw) < len(self._tiers):
            return False
        stored = {name: raw.read(self._key(pool, key)) for name, raw in self._raw.items()}
        for name, page in stored.items():
            if page is not None:
                self._raw[name].write(self._key(pool, key), page[:-1] + bytes([page[-1] ^ 0x10]))
        return any(page is not None for page in stored.values())

    def settle(self) -> None:
        settle(self._backend._store)

    def close(self) -> None:
        self._directory.cleanup()

    def _key(self, pool: str, key: str) -> bytes:
        (digest,) = self._backend.served.bound[pool].digests
        return bytes(digest) + bytes.fromhex(key)


def _case(open_medium: Callable[[], Any], **more: Any) -> type:
    case = pools_machine(open_medium, **more).TestCase
    case.settings = settings(
        max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    return case


_NEAR = {"capacity": "1MiB"}
"""Less than the pages of the machine."""

TestPageFiles = pytest.mark.thorough(_case(lambda: _Tiers(disk={})))
TestSlabs = pytest.mark.thorough(_case(lambda: _Tiers(disk={"layout": "slab"})))
TestTwoTiersOfWhichTheNearOneEvicts = _case(lambda: _Tiers(near=_NEAR, disk={}))
TestATierThatEvicts = pytest.mark.thorough(_case(lambda: _Tiers(disk=_NEAR), evicts=True))
