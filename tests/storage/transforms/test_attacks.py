"""What somebody tries who has not the key and knows all else: encoded pages of a sealed tier, lengths that lie, keys
that change while calls are under way."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator

import pytest

from hicache_ext.page.transforms import body
from hicache_ext.page.transforms.codec import Codec
from hicache_ext.page.transforms.forms import Form, Transforms
from hicache_ext.page.transforms.header import CODEC_NUMBERS, HEADER_LENGTH, RAW, Header
from hicache_ext.page.transforms.sealing import SealMode
from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult
from hicache_ext.storage.contract.transforming.store import TransformedStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import IDENTITY, page_keys, payload_of, read_pages, store_pages
from hicache_ext.testing.conformance.second_reader import read_page_object, write_page_object
from tests.page.test_lossless import page_of
from tests.storage.transforms.rig import AUTHENTICATE, ENCRYPT, SIZES, fresh, pages_of, seal, stored_key_of

pytest.importorskip("zstandard")

SIZE = 64 << 10
CONTENT = page_of("bfloat16", SIZE, 1)
KEY = page_keys(1)[0]
BOTH = pytest.mark.parametrize("mode", [AUTHENTICATE, ENCRYPT], ids=["authenticate", "encrypt"])


class Encoded:
    """A sealed tier with a codec that holds one page, and who may write into its medium."""

    def __init__(self, mode: SealMode) -> None:
        self.objects: dict[bytes, bytes] = {}
        self.store: PageStore = TransformedStore(
            MemoryPageStore(objects=self.objects), Codec("lossless"), seal(mode, "new")
        )
        self.store.register_identity(IDENTITY, {"pool": {"name": "kv", "dtype": "bfloat16", "segments": [SIZE]}})
        assert self.store.set(PageBatch([KEY], [[memoryview(CONTENT)]])) == [SetResult.STORED]
        [self.name] = self.objects
        self.forms = pages_of(self.store).forms(IDENTITY)

    @property
    def stored(self) -> bytes:
        return read_page_object(self.objects[self.name]).payload

    def put(self, name: bytes, content: bytes) -> None:
        self.objects[name] = write_page_object(name, content, header_length=128)

    def length(self, form: Form) -> int:
        return form.stored_length(SIZE)

    def read(self) -> GetResult:
        page = memoryview(bytearray(SIZE))
        [result] = self.store.get(PageBatch([KEY], [[page]]))
        assert result is not GetResult.HIT or bytes(page) == CONTENT
        return result


@pytest.fixture(params=[AUTHENTICATE, ENCRYPT], ids=["authenticate", "encrypt"])
def encoded(request: pytest.FixtureRequest) -> Iterator[Encoded]:
    made = Encoded(request.param)
    yield made
    made.store.close()


@pytest.mark.parametrize("codec", [RAW, 2, 3, 7, 255])
def test_an_encoded_page_that_says_another_codec_is_refused(encoded: Encoded, codec: int) -> None:
    content = bytearray(encoded.stored)
    assert content[10] == CODEC_NUMBERS["lossless"]
    content[10] = codec
    encoded.put(encoded.name, bytes(content))
    assert encoded.read() is GetResult.CORRUPT


def test_a_raw_page_without_a_seal_in_the_room_of_an_encoded_one_is_refused(encoded: Encoded) -> None:
    form = next(form for form in encoded.forms if stored_key_of(form, KEY) == encoded.name)
    forged = Header(RAW, 0, 0, form.room, form.room).encode() + bytes(form.room)
    encoded.put(encoded.name, forged.ljust(encoded.length(form), b"\0"))
    assert encoded.read() is GetResult.CORRUPT


def test_a_sealed_page_in_the_room_of_another_length_is_refused(encoded: Encoded) -> None:
    """The seal is right, and of a page of this name: of another room."""
    content = encoded.stored
    del encoded.objects[encoded.name]
    for form in encoded.forms:
        name = stored_key_of(form, KEY)
        if name == encoded.name or encoded.length(form) < len(content.rstrip(b"\0")):
            continue
        encoded.put(name, content.rstrip(b"\0").ljust(encoded.length(form), b"\0"))
        assert encoded.store.contains([KEY]) == [True]
        assert encoded.read() is GetResult.CORRUPT
        del encoded.objects[name]


@pytest.mark.parametrize("length", [1 << 40, (1 << 64) - 1, (1 << 64) - HEADER_LENGTH])
@pytest.mark.parametrize("seal_of_it", [None, AUTHENTICATE, ENCRYPT], ids=str)
def test_lengths_that_lie_cost_no_memory(length: int, seal_of_it: SealMode | None) -> None:
    """Of a page without a seal, too, which anybody can make; ``verify`` looks at it as a server does."""
    seal_of_tier = None if seal_of_it is None else seal(seal_of_it, "new")
    document = {"pool": {"name": "kv", "dtype": "bfloat16", "segments": [SIZE]}}
    page = memoryview(bytearray(SIZE))
    for form in Transforms(Codec("lossless"), seal_of_tier, 1).forms(IDENTITY, document).all:
        if form.plain:
            continue
        code = RAW if form.codec is None else CODEC_NUMBERS["lossless"]
        mode, id = (0, b"") if form.key is None else (int(seal_of_it or 0), b"new")
        for head in (Header(code, mode, int(bool(mode)), length, 100, id), Header(code, mode, 0, SIZE, length, id)):
            stored = memoryview(bytearray(head.encode().ljust(form.stored_length(SIZE), b"\1")))
            tracemalloc.start()
            try:
                assert body.read(stored, KEY, form, [page], fresh) is not None
                body.reason_it_is_not_sealed(stored, KEY, form)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert peak < 8 * SIZE


@BOTH
def test_keys_that_rotate_under_calls_cost_misses_and_never_a_wrong_page(mode: SealMode) -> None:
    store = TransformedStore(MemoryPageStore(objects={}), None, seal(mode, "old"))
    keys = page_keys(8)
    ended, wrong = threading.Event(), []

    def serve() -> None:
        while not ended.is_set():
            written = store_pages(store, keys, SIZES)
            results, pages = read_pages(store, keys, SIZES)
            if not set(written) <= {SetResult.STORED, SetResult.EXISTS}:
                wrong.append(written)
            for key, result, page in zip(keys, results, pages, strict=True):
                if result is GetResult.HIT and page != payload_of(key, sum(SIZES)):
                    wrong.append(key)
                elif result not in (GetResult.HIT, GetResult.MISS):
                    wrong.append(result)

    threads = [threading.Thread(target=serve) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        for ids in (("old", "new"), ("new", "old"), ("new",), ("old",)):
            pages_of(store).put_seal(seal(mode, *ids))
            store.contains(keys)
    ended.set()
    for thread in threads:
        thread.join()
    assert wrong == [] and store.metrics.total("corrupt") == 0 and store.metrics.total("error") == 0
    store.close()
