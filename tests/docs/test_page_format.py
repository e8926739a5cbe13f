"""docs/page-format.md says what the code does: its vectors, and its reader on a page that the file tier wrote."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from hicache_ext.page import envelope
from hicache_ext.page.identity import ModelIdentity, PageIdentity, PoolIdentity, Shard, canonical, page_hash_bytes
from hicache_ext.page.transforms import body
from hicache_ext.page.transforms.forms import Transforms
from hicache_ext.page.transforms.sealing import CipherKind, Seal, SealKey, SealMode
from hicache_ext.storage.contract.store import PageBatch, SetResult
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from tests.storage.transforms.rig import fresh

DOCUMENT = Path(__file__).parents[2] / "docs" / "page-format.md"


def block(language: str, section: str = "# ") -> str:
    """Of a page; what is said of transformed pages and of packs has blocks of its own."""
    _, _, of_section = DOCUMENT.read_text().partition(section)
    of_pages, _, _ = of_section.partition("## Packs" if section != "# " else "## Transformed pages")
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
    assert canonical(identity.document()).decode() == line
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


def test_the_vectors_of_sealed_pages_are_what_the_code_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made again in plain steps, as the document has them."""
    monkeypatch.setattr(body, "fastest_cipher", lambda: CipherKind.AES_256_GCM)
    documented = memoryview(bytes.fromhex("".join(block("hex", "## Transformed pages").split())))
    page = bytes.fromhex("5b11bafe7d4f35cbb8c6e503259a5320") + bytes(31) + b"\xff"
    key = SealKey("2026-11", "0123456789abcdef0123456789abcdef")
    root = _hmac(b"hicache_ext/seal/1", b"2026-11\0" + b"0123456789abcdef0123456789abcdef")
    identity = _hmac(_hmac(root, b"identities"), page[:16] + b"2\0authenticate\0")[:16]
    assert f"`{(identity + page[16:]).hex()}`" in DOCUMENT.read_text()
    cipher = AESGCM(_hmac(_hmac(root, b"pages"), bytes(range(24)) + identity + page[16:]))
    assert documented[80:96] == bytes(range(16))
    assert documented[96:] == cipher.encrypt(bytes(12), b"", documented[:96])
    (form,) = Transforms(None, Seal(SealMode.AUTHENTICATE, (key,)), 1).forms(page[:16], None).all
    payload = bytearray(16)
    assert body.read(documented, identity + page[16:], form, [memoryview(payload)], fresh) is None
    assert payload == bytes(range(16))
    written = memoryview(bytearray(len(documented)))
    body.write(written, identity + page[16:], form, [memoryview(payload)], None, bytes(range(24)), fresh)
    assert written == documented


def test_the_vector_of_a_hidden_page_hash_is_what_the_code_stores() -> None:
    left, right = bytes(16), bytes(15) + b"\xff"
    root = _hmac(b"hicache_ext/seal/1", b"2026-11\0" + b"0123456789abcdef0123456789abcdef")
    for number in range(4):
        mixed = Cipher(algorithms.AES(_hmac(root, b"hashes %d" % number)), modes.ECB()).encryptor().update(right)
        left, right = right, bytes(one ^ other for one, other in zip(left, mixed, strict=True))
    assert f"`{(left + right).hex()}`" in DOCUMENT.read_text()
    key = SealKey("2026-11", "0123456789abcdef0123456789abcdef")
    hashes = np.frombuffer(bytes(31) + b"\xff", np.int64).reshape(1, 4)
    assert key.hidden_hashes(hashes).tobytes() == left + right


def _hmac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, hashlib.sha256)
