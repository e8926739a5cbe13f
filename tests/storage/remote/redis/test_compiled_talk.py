"""What compiled code does at the edges of its memory, against a server that is healthy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hicache_ext.runtime.vectored import IOV_MAX
from hicache_ext.storage.contract.store import PageBatch, SetResult
from hicache_ext.storage.tiers.redis import talk_code
from hicache_ext.storage.tiers.redis.store import RedisPageStore
from hicache_ext.storage.tiers.redis.talk_code import TalkCode
from hicache_ext.testing.conformance.pages import assert_hits, filled, page_keys
from tests.rigs.redis_servers import RedisServer
from tests.storage.remote.redis.conftest import tier_for

# A real server.
pytestmark = pytest.mark.slow


@pytest.fixture
def code() -> TalkCode:
    code = talk_code.part.wait()
    if code is None:
        pytest.skip("missing: numba, or what it compiles for")
    return code


@pytest.fixture
def store(empty_server: RedisServer, code: TalkCode) -> Iterator[RedisPageStore]:
    store = RedisPageStore("pool", tier_for(empty_server, connections=1))
    yield store
    store.close()


@pytest.mark.parametrize(("pages", "pieces"), [(2, 510), (4, 254), (8, 126)])
def test_pages_whose_pieces_fill_a_system_call_are_stored_beside_no_other_memory(
    store: RedisPageStore, code: TalkCode, monkeypatch: pytest.MonkeyPatch, pages: int, pieces: int
) -> None:
    """Seen: the request behind them became a piece too many, written 16 bytes behind its array."""
    guarded = np.full(2 * IOV_MAX + 16, 7, np.int64)
    monkeypatch.setattr(code._scratch, "vectors", guarded[: 2 * IOV_MAX])
    keys, sizes = page_keys(pages), [1] * pieces
    batch = PageBatch(keys, filled(keys, [sizes] * pages).buffers)
    moved = store._move(batch, store._deadline(), SetResult)
    assert set(guarded[2 * IOV_MAX :].tolist()) == {7}
    assert moved == [SetResult.STORED] * pages
    assert_hits(store, keys, sizes)
