"""docs/page-format.md says what the code does: its vectors, and its reader on a page that the file tier wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.page import envelope
from hicache_ext.page.identity import ModelIdentity, PageIdentity, PoolIdentity, Shard, page_hash_bytes
from hicache_ext.storage.contract.store import PageBatch, SetResult
from hicache_ext.storage.tiers.file.pages.store import PageFileStore

DOCUMENT = Path(__file__).parents[2] / "docs" / "page-format.md"


def block(language: str) -> str:
    """Of a page; what is said of packs has blocks of its own."""
    of_pages, _, _ = DOCUMENT.read_text().partition("## Packs")
    found = re.findall(rf"```{language}\n(.*?)```", of_pages, re.DOTALL)
    assert len(found) == 1
    return str(found[0])


@pytest.fixture
def documented_reader() -> Any:
    namespace: dict[str, Any] = {}
    exec(block("python"), namespace)
    return namespace["read_page"]


def test_the_identity_vector_is_what_the_code_digests() -> None:
    line = block("json").strip()
    facts = json.loads(line)
    pool = facts["pool"]
    identity = PageIdentity(
        ModelIdentity(**facts["model"]),
        PoolIdentity(
            **{**pool, "segments": tuple(pool["segments"]), "geometry": tuple(pool["geometry"].items())},
        ),
        Shard(**{axis: tuple(place) for axis, place in facts["shard"].items()}),
    )
    assert identity.canonical().decode() == line
    assert f"`{identity.digest().hex()}`" in DOCUMENT.read_text()


def test_the_page_vector_is_what_the_code_writes() -> None:
    documented = bytes.fromhex("".join(block("hex").split()))
    key = bytes.fromhex("5b11bafe7d4f35cbb8c6e503259a5320") + bytes(31) + b"\xff"
    segments = [memoryview(bytes(range(8))), memoryview(bytes(range(8, 16)))]
    header = envelope.encode_header(key, segments, created_ms=1700000000000)
    assert header + bytes(range(16)) == documented


def test_the_text_key_vector_is_what_the_code_hashes() -> None:
    assert f"`{page_hash_bytes('hello').hex()}`" in DOCUMENT.read_text()


def test_the_documented_reader_decodes_a_stored_page_and_refuses_a_damaged_one(
    tmp_path: Path, documented_reader: Any
) -> None:
    store = PageFileStore("disk", tmp_path, capacity=None)
    key = bytes(range(48))
    assert store.set(PageBatch([key], [[memoryview(b"some"), memoryview(b"KV")]])) == [SetResult.STORED]
    store.close()
    (file,) = tmp_path.rglob("*.page")
    data = file.read_bytes()
    assert documented_reader(data) == (key[:16], key[16:], b"someKV")
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(ValueError, match="damaged"):
            documented_reader(bytes(damaged))
