"""A Mooncake cluster in a network of its own, shared by the tests of a module."""

from __future__ import annotations

import ctypes
import importlib
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.tiers.mooncake.config import MooncakeTierConfig
from hicache_ext.storage.tiers.mooncake.engine import MASTER_LOST, NO_SPACE, Attachment
from hicache_ext.storage.tiers.mooncake.pages import MooncakeStore
from tests.rigs.mooncake_servers import MooncakeServers, missing_mooncake
from tests.rigs.own_network import NetworkUnavailable, own_network
from tests.storage.media import RawMedium
from tests.storage.mooncake.raw_client import RawClient

TIMEOUT = 2
"""Seconds, of tiers whose servers are meant to fail."""
PATIENCE = 20
"""Seconds, of all others: a loaded machine must not look like a fault."""


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    if missing := missing_mooncake():
        pytest.skip(f"missing: {missing}")
    # The library takes it over from the first tier of the process, which another file may have opened.
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(1000 * TIMEOUT))
    try:
        with own_network():
            yield
    except NetworkUnavailable as error:
        pytest.skip(f"missing: {error}")


@pytest.fixture(scope="module")
def servers(network, tmp_path_factory) -> Iterator[MooncakeServers]:
    with MooncakeServers(
        tmp_path_factory.mktemp("mooncake"), lease_ms=2000, master_arguments=["--put_start_discard_timeout_sec=2"]
    ) as servers:
        yield servers


def tier_for(servers: MooncakeServers, **settings) -> MooncakeTierConfig:
    wanted = {"type": "mooncake", "master": servers.master, "local_hostname": "127.0.0.1", "timeout": TIMEOUT}
    return MooncakeTierConfig.model_validate({**wanted, "metrics": servers.metrics, **settings})


class _KeptClient:
    """A client of the library that outlives the stores it is lent to: to close one takes the library a second."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def close(self) -> int:
        return 0


class _OfOneClient(Attachment):
    def __init__(self, tier: MooncakeTierConfig, client: Any) -> None:
        self._library: Any = importlib.import_module("mooncake.store")
        self._kept = _KeptClient(client)
        super().__init__("pool", tier)

    def open_client(self) -> Any:
        return self._kept


class DamagingClient:
    """The library's client on a machine that damages what arrives: one byte of the share ``flipped`` of all objects."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._random = random.Random(0)
        self.flipped = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def batch_get_into_multi_buffers(self, names: list[str], addresses: Any, sizes: Any) -> list[int]:
        codes: list[int] = self._client.batch_get_into_multi_buffers(names, addresses, sizes)
        for code, places, lengths in zip(codes, addresses, sizes, strict=True):
            if code > 0 and self._random.random() < self.flipped:
                piece = self._random.randrange(len(places))
                byte = ctypes.c_ubyte.from_address(places[piece] + self._random.randrange(lengths[piece]))
                byte.value ^= self._random.randrange(1, 256)  # two reads that agree are a bad page in the pool
        return codes

    def close(self) -> int:
        return 0


def open_with(client: Any, tier: MooncakeTierConfig) -> MooncakeStore:
    """A store that uses this client of the library."""
    return MooncakeStore("pool", tier, _OfOneClient(tier, client))


@pytest.fixture(scope="module")
def open_quickly(servers, library_client) -> Callable[..., MooncakeStore]:
    """Opens stores (settings of the tier as keywords) that all use one client of the library."""

    def open_store(**settings) -> MooncakeStore:
        tier = tier_for(servers, **{"timeout": PATIENCE, **settings})
        return open_with(library_client, tier)

    return open_store


class FailingClient:
    """The library's client, which while ``broken`` finds no master, and no space while ``full``."""

    _ANSWERS = ("batch_get_into_multi_buffers", "batch_put_from_multi_buffers", "batch_is_exist", "batch_remove")
    _ANSWER = ("remove_by_regex", "is_exist", "get_size")

    def __init__(self, client: Any) -> None:
        self._client = client
        self.broken = False
        self.full = False

    def __getattr__(self, name: str) -> Any:
        if self.broken and name in self._ANSWERS:
            return lambda names, *others: [MASTER_LOST[0]] * len(names)
        if self.full and name == "batch_put_from_multi_buffers":
            return lambda names, *others: [NO_SPACE] * len(names)
        if self.broken and name in self._ANSWER:
            return lambda *others: MASTER_LOST[0]
        return getattr(self._client, name)


class Pool(RawMedium):
    """A Mooncake cluster with its pages removed. Stores of this process use one client of the library."""

    type = "mooncake"
    shared = True
    clears_at_once = False
    counts_all_identities = False
    killed_writes_end_after = PATIENCE
    # The servers are in the network of this thread.
    start_method = "spawn"

    def __init__(self, servers: MooncakeServers, client: Any, raw: RawClient) -> None:
        self._tier = tier_for(servers, timeout=PATIENCE)
        self._client = FailingClient(client)
        self.raw = raw
        raw.empty()

    def __getstate__(self) -> dict[str, Any]:
        return {"_tier": self._tier, "_client": None}

    def open(self) -> MooncakeStore:
        if self._client is None:
            return open_tier("pool", self._tier)
        return open_with(self._client, self._tier)

    def open_elsewhere(self) -> MooncakeStore:
        return self.open()

    def open_over_a_damaging_path(self) -> MooncakeStore:
        damaging = DamagingClient(self._client)
        damaging.flipped = 0.5
        return open_with(damaging, self._tier)

    @contextmanager
    def failing(self) -> Iterator[None]:
        self._client.broken = True
        yield
        self._client.broken = False

    @contextmanager
    def full(self) -> Iterator[None]:
        self._client.full = True
        yield
        self._client.full = False

    def close(self) -> None:
        self.raw.empty()


@pytest.fixture(scope="module")
def library_client(servers) -> Iterator[Any]:
    attachment = Attachment("pool", tier_for(servers, timeout=PATIENCE))
    yield attachment._client
    attachment.close()


@pytest.fixture(scope="module")
def raw_client(servers) -> Iterator[RawClient]:
    client = RawClient(servers)
    yield client
    client.close()


@pytest.fixture
def pool(servers, library_client, raw_client) -> Pool:
    return Pool(servers, library_client, raw_client)
