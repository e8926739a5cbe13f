"""Lossy pages in stores: counted wherever they are restored, and told from exact ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hicache_ext.page.transforms.codec import Codec
from hicache_ext.page.transforms.header import LOSSY_CODECS
from hicache_ext.storage.contract.reports import reported
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.contract.transforming.store import TransformedStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from tests.page.test_lossless import page_of
from tests.page.test_lossy import decoded_by, document, encoded_by, pages_for
from tests.storage.transforms.rig import AUTHENTICATE, ENCRYPT, fresh, seal

SIZE = 64 << 10
KV, STATE = bytes(range(16)), bytes(range(16, 32))
HASHES = [bytes([number]) * 32 for number in range(6)]
CONTENTS = [page_of("bfloat16", SIZE, number) for number in range(6)]
INFINITE = np.full(SIZE // 2, 0x7F80, np.uint16).tobytes()


@pytest.fixture
def inner() -> Iterator[MemoryPageStore]:
    store = MemoryPageStore("memory")
    yield store
    store.close()


def opened(inner: PageStore, codec: Any, mode: Any = None) -> PageStore:
    store = TransformedStore(inner, codec, None if mode is None else seal(mode, "new"))
    for identity, kind in ((KV, "MHATokenToKVPoolHost"), (STATE, "MambaPoolHost")):
        facts = document(kind=kind)
        facts["pool"]["segments"] = [SIZE // 2, SIZE // 2]
        store.register_identity(identity, facts)
    return store


def keys(identity: bytes = KV, count: int = 6) -> list[bytes]:
    return [identity + page_hash for page_hash in HASHES[:count]]


def write(store: PageStore, contents: list[bytes], identity: bytes = KV) -> list[SetResult]:
    halves = [[memoryview(bytearray(one))[: SIZE // 2], memoryview(bytearray(one))[SIZE // 2 :]] for one in contents]
    return store.set(PageBatch(keys(identity, len(contents)), halves))


def read(store: PageStore, identity: bytes = KV) -> list[bytes | None]:
    batch = PageBatch(keys(identity), [[fresh(SIZE // 2), fresh(SIZE // 2)] for _ in HASHES])
    results = store.get(batch)
    return [
        b"".join(map(bytes, segments)) if result is GetResult.HIT else None
        for result, segments in zip(results, batch.buffers, strict=True)
    ]


@pytest.mark.parametrize("mode", [None, AUTHENTICATE, ENCRYPT], ids=str)
@pytest.mark.parametrize("code", LOSSY_CODECS)
def test_pages_come_back_as_their_codes_say_and_are_counted(inner: MemoryPageStore, code: str, mode: Any) -> None:
    store = opened(inner, Codec(code), mode)
    assert write(store, CONTENTS) == [SetResult.STORED] * 6
    pages = pages_for(code)
    assert read(store) == [decoded_by(pages, encoded_by(pages, content)) for content in CONTENTS]
    assert store.metrics.value("lossy", code) == 6


def test_pages_that_are_stored_as_they_are_do_not_count(inner: MemoryPageStore) -> None:
    store = opened(inner, Codec("int8"))
    write(store, [INFINITE, CONTENTS[1]])
    assert read(store)[0] == INFINITE
    assert store.metrics.value("lossy", "int8") == 1


def test_states_beside_the_keys_and_values_stay_exact_and_do_not_count(inner: MemoryPageStore) -> None:
    store = opened(inner, Codec("int8"))
    write(store, CONTENTS, STATE)
    assert read(store, STATE) == CONTENTS
    assert store.metrics.value("lossy", "int8") == 0


@pytest.mark.parametrize("code", LOSSY_CODECS)
def test_pages_of_an_exact_identity_stay_exact_on_their_way_through_a_lossy_tier(
    inner: MemoryPageStore, code: str
) -> None:
    """``warm`` copies pages of every identity that it is told of, into a lossy tier and out of it."""
    lossy_tier, exact_tier = (TransformedStore(inner, codec, None) for codec in (Codec(code), Codec("lossless")))
    exact = {**document(), "model": {"id": "model", "compute": ""}}
    exact["pool"]["segments"] = [SIZE // 2, SIZE // 2]
    for store in (lossy_tier, exact_tier):
        store.register_identity(KV, exact)
    write(lossy_tier, CONTENTS)
    assert read(lossy_tier) == CONTENTS
    assert lossy_tier.metrics.value("lossy", code) == 0


@pytest.mark.parametrize("other", [Codec("fp8"), Codec("lossless")], ids=lambda codec: codec.label.decode())
def test_what_one_codec_wrote_another_one_does_not_find(inner: MemoryPageStore, other: Any) -> None:
    write(opened(inner, Codec("int8")), CONTENTS)
    assert read(opened(inner, other)) == [None] * 6


@pytest.mark.parametrize(("codec", "declared"), [(Codec("fp8"), True), (Codec("lossless"), False)])
def test_the_series_of_a_lossy_tier_begins_with_zero(inner: MemoryPageStore, codec: Any, declared: bool) -> None:
    [report] = reported([opened(inner, codec)])
    assert (("lossy", "fp8") in report.snapshot()) is declared
