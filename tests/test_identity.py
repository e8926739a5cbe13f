"""Identity: every fact that shapes bytes changes the digest, and the digest never changes by itself."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json

import pytest

from hicache_ext.page.identity import (
    ModelIdentity,
    PageIdentity,
    PoolIdentity,
    Shard,
    canonical,
    digest_of_document,
    joined_page_hashes,
    page_hash_bytes,
)
from hicache_ext.storage.contract.store import PageKeys

IDENTITY = PageIdentity(
    model=ModelIdentity("org/model", "main", "f00d", "0", "quantization=none"),
    pool=PoolIdentity("kv", "MHATokenToKVPoolHost", "bfloat16", "page_first", 64, (4096, 4096), (("layers", "32"),)),
    shard=Shard(tp=(1, 4), pp=(0, 2), cp=(0, 1), dcp=(0, 1)),
)

GOLDEN_CANONICAL = (
    '{"model":{"compute":"quantization=none","draft":"","fingerprint":"f00d","id":"org/model","revision":"main",'
    '"weights_epoch":"0"},"pool":{"dtype":"bfloat16","geometry":{"layers":"32"},"kind":"MHATokenToKVPoolHost",'
    '"layout":"page_first","name":"kv","page_size":64,"segments":[4096,4096]},"schema":2,'
    '"shard":{"cp":[0,1],"dcp":[0,1],"pp":[0,2],"tp":[1,4]}}'
)
GOLDEN_DIGEST = "afe2bded0e41bdd8d5e67701234090ae"

_CHANGES = [
    ("model", "id", "org/other"),
    ("model", "revision", "v2"),
    ("model", "fingerprint", "beef"),
    ("model", "draft", "beef"),
    ("model", "weights_epoch", "1"),
    ("model", "compute", "quantization=fp8"),
    ("pool", "name", "indexer"),
    ("pool", "kind", "MLATokenToKVPoolHost"),
    ("pool", "dtype", "float8_e4m3fn"),
    ("pool", "dtype", "float8_e5m2"),
    ("pool", "layout", "layer_first"),
    ("pool", "page_size", 32),
    ("pool", "segments", (8192,)),
    ("pool", "segments", (4096,)),
    ("pool", "geometry", (("layers", "31"),)),
    ("pool", "geometry", ()),
    ("shard", "tp", (1, 2)),
    ("shard", "tp", (0, 4)),
    ("shard", "pp", (1, 2)),
    ("shard", "pp", (0, 1)),
    ("shard", "cp", (0, 2)),
    ("shard", "dcp", (1, 2)),
]


def _changed(part: str, field: str, value: object) -> PageIdentity:
    return dataclasses.replace(IDENTITY, **{part: dataclasses.replace(getattr(IDENTITY, part), **{field: value})})


def test_the_golden_identity_has_the_golden_digest():
    assert canonical(IDENTITY.document()).decode() == GOLDEN_CANONICAL
    assert IDENTITY.digest().hex() == GOLDEN_DIGEST
    assert hashlib.sha256(b"hicache_ext/identity\0" + GOLDEN_CANONICAL.encode()).hexdigest()[:32] == GOLDEN_DIGEST


@pytest.mark.parametrize(("part", "field", "value"), _CHANGES)
def test_every_fact_changes_the_digest(part, field, value):
    assert _changed(part, field, value).digest() != IDENTITY.digest()


def test_no_two_changes_meet():
    digests = {_changed(*change).digest() for change in _CHANGES}
    assert len(digests) == len(_CHANGES)


def test_no_field_is_forgotten():
    """A field added to an identity must be added to the changes above."""
    fields = {
        (part.name, field.name)
        for part in dataclasses.fields(PageIdentity)
        for field in dataclasses.fields(getattr(IDENTITY, part.name))
    }
    assert fields == {(part, field) for part, field, _ in _CHANGES}


def test_values_that_read_alike_do_not_meet():
    shifted = dataclasses.replace(IDENTITY, model=dataclasses.replace(IDENTITY.model, id="org/modelmain", revision=""))
    assert shifted.digest() != IDENTITY.digest()
    quoted = dataclasses.replace(IDENTITY, model=dataclasses.replace(IDENTITY.model, id='org/model","revision":"x'))
    assert quoted.digest() != IDENTITY.digest()


def test_the_order_of_geometry_facts_does_not_matter():
    first, second = (("head_dim", "128"), ("layers", "32")), (("layers", "32"), ("head_dim", "128"))
    assert _changed("pool", "geometry", first).digest() == _changed("pool", "geometry", second).digest()


def test_the_document_is_json():
    assert json.loads(json.dumps(IDENTITY.document()))["pool"]["geometry"] == {"layers": "32"}


def test_a_document_of_somebody_else_with_half_a_surrogate_has_a_digest():
    document = {**IDENTITY.document(), "schema": "\ud800"}
    assert digest_of_document(document) == digest_of_document(json.loads(json.dumps(document)))
    assert digest_of_document(document) != digest_of_document({**document, "schema": "\ud801"})


def test_a_page_hash_of_sglang_is_taken_as_it_is():
    page_hash = hashlib.sha256(b"tokens").hexdigest()
    assert page_hash_bytes(page_hash).hex() == page_hash


@pytest.mark.parametrize(
    "key",
    ["", "a", "A" * 64, "ab" * 31, "ab" * 33, "0x" + "ab" * 31, "ab " * 21 + "a", "g" * 64, "é" * 64, "\ud800", "a\0b"],
)
def test_any_other_text_is_hashed_in_a_domain_of_its_own(key):
    stored = page_hash_bytes(key)
    assert len(stored) == 32
    assert stored.hex() != key
    assert stored == hashlib.sha256(b"hicache_ext/text-key\0" + key.encode("utf-8", "surrogatepass")).digest()


@pytest.mark.parametrize(
    "odd", ["", "a", "A" * 64, "ab" * 31 + "a ", "ab" * 31, "é" * 64, "g" * 64, "\0" * 64, "\ud800"]
)
def test_keys_converted_together_are_those_converted_one_by_one(odd):
    hexes = [hashlib.sha256(bytes([number])).hexdigest() for number in range(5)]
    one, other = hexes[:2]
    # Nor must two keys of other lengths pass for two of 64 digits, or one with a blank in it.
    odd_lengths = [
        [one[:-1], other + one[-1]],
        [one[:-2], other + one[-2:]],
        [f"{one} {other}"],
        [f"{one} {other}", ""],
        ["", f"{one} {other}"],
    ]
    for keys in ([], hexes, [*hexes, odd], [odd, odd], *odd_lengths):
        assert joined_page_hashes(keys) == b"".join(page_hash_bytes(key) for key in keys)
        together = PageKeys.of_hashes(b"i" * 16, keys)
        assert list(together) == [b"i" * 16 + page_hash_bytes(key) for key in keys]
        assert list(together) == list(PageKeys.of_joined(b"i" * 16, joined_page_hashes(keys)))
        assert together.words.tobytes() == b"".join(together)


def test_any_character_in_any_place_is_taken_for_what_it_is():
    hexes = [hashlib.sha256(bytes([number])).hexdigest() for number in range(3)]
    for number, place in itertools.product(range(128), range(0, 64, 7)):
        changed = [hexes[0], hexes[1][:place] + chr(number) + hexes[1][place + 1 :], hexes[2]]
        assert list(PageKeys.of_hashes(b"i" * 16, changed)) == [b"i" * 16 + page_hash_bytes(key) for key in changed]


def test_upper_case_hex_does_not_meet_its_lower_case_page():
    page_hash = hashlib.sha256(b"tokens").hexdigest()
    assert page_hash_bytes(page_hash.upper()) != page_hash_bytes(page_hash)
