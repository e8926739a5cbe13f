"""A Mooncake cluster in a network of its own, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache_ext.config import MooncakeTierConfig
from hicache_ext.testing.mooncake_servers import MooncakeServers, missing_mooncake
from hicache_ext.testing.own_network import NetworkUnavailable, own_network


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    if missing := missing_mooncake():
        pytest.skip(f"missing: {missing}")
    try:
        with own_network():
            yield
    except NetworkUnavailable as error:
        pytest.skip(f"missing: {error}")


@pytest.fixture(scope="module")
def servers(network, tmp_path_factory) -> Iterator[MooncakeServers]:
    with MooncakeServers(tmp_path_factory.mktemp("mooncake"), lease_ms=2000) as servers:
        yield servers


def tier_for(servers: MooncakeServers, **settings) -> MooncakeTierConfig:
    wanted = {"type": "mooncake", "master": servers.master, "local_hostname": "127.0.0.1", "timeout": 2}
    return MooncakeTierConfig.model_validate({**wanted, "metrics": servers.metrics, **settings})
