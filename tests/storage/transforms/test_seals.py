"""Pages that somebody without the key made, moved, cut or changed: never a HIT, always counted, and the tier goes on.

The attacker here knows the page format, reads and writes the medium at will, and makes every checksum right.
"""

from __future__ import annotations

import copy
import pickle
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from cryptography.exceptions import UnsupportedAlgorithm

from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.page.transforms import body, forms
from hicache_ext.page.transforms.codec import Codec
from hicache_ext.page.transforms.forms import Transforms
from hicache_ext.page.transforms.header import HEADER_LENGTH, Header
from hicache_ext.page.transforms.sealing import CipherKind, Seal, SealKey, SealMode
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.contract.transforming.store import TransformedStore
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.conformance.pages import IDENTITY, assert_hits, page_keys, payload_of, read_pages, store_pages
from hicache_ext.testing.conformance.second_reader import read_page_object
from tests.storage.transforms.rig import AUTHENTICATE, ENCRYPT, SECRETS, SIZES, Attacked, fresh, pages_of, seal

BOTH = pytest.mark.parametrize("mode", [AUTHENTICATE, ENCRYPT], ids=["authenticate", "encrypt"])


@pytest.fixture(params=[AUTHENTICATE, ENCRYPT], ids=["authenticate", "encrypt"])
def attacked(request: pytest.FixtureRequest) -> Iterator[Attacked]:
    made = Attacked(request.param)
    yield made
    made.store.close()


def test_an_encrypted_page_shows_neither_its_bytes_nor_its_name() -> None:
    attacked, (key,) = Attacked(ENCRYPT), page_keys(1)
    store_pages(attacked.store, [key], SIZES)
    stored = b"".join([name + content for name, content in attacked.objects.items()])
    payload = payload_of(key, 1024)
    assert payload[:16] not in stored and payload[-16:] not in stored
    assert key[IDENTITY_LENGTH:] not in stored and key[IDENTITY_LENGTH : IDENTITY_LENGTH + 8] not in stored
    attacked.store.close()


def test_an_authenticated_page_can_be_read_by_who_has_no_key() -> None:
    attacked, (key,) = Attacked(AUTHENTICATE), page_keys(1)
    store_pages(attacked.store, [key], SIZES)
    assert attacked.payload(key)[HEADER_LENGTH : HEADER_LENGTH + 1024] == payload_of(key, 1024)
    assert attacked.stored_key(key)[IDENTITY_LENGTH:] == key[IDENTITY_LENGTH:]
    attacked.store.close()


def test_an_unsealed_page_under_the_name_of_a_sealed_one_is_refused(attacked: Attacked) -> None:
    (key,) = page_keys(1)
    store_pages(attacked.store, [key], SIZES)
    length = len(attacked.payload(key))
    attacked.put(key, payload_of(key, 1024).ljust(length, b"\0"))
    attacked.assert_refused(key, "unsealed")


def test_a_page_that_says_that_it_has_no_seal_is_refused(attacked: Attacked) -> None:
    (key,) = page_keys(1)
    store_pages(attacked.store, [key], SIZES)
    content = Header(0, 0, 0, 1024, 1024).encode() + payload_of(key, 1024)
    attacked.put(key, content.ljust(len(attacked.payload(key)), b"\0"))
    attacked.assert_refused(key, "unsealed")


def test_a_page_under_the_name_of_another_one_is_refused(attacked: Attacked) -> None:
    one, other = page_keys(2)
    store_pages(attacked.store, [one, other], SIZES)
    taken = attacked.payload(one)
    attacked.put(other, taken)
    attacked.assert_refused(other, "seal_tag")
    assert_hits(attacked.store, [one], SIZES)


def test_the_header_of_one_page_before_the_body_of_another_one_is_refused(attacked: Attacked) -> None:
    one, other = page_keys(2)
    store_pages(attacked.store, [one, other], SIZES)
    attacked.put(one, attacked.payload(one)[:HEADER_LENGTH] + attacked.payload(other)[HEADER_LENGTH:])
    attacked.assert_refused(one, "seal_tag")


def test_a_page_of_another_identity_is_refused(attacked: Attacked) -> None:
    (key,) = page_keys(1)
    theirs = bytes(16) + key[IDENTITY_LENGTH:]
    store_pages(attacked.store, [key, theirs], SIZES)
    attacked.put(key, attacked.payload(theirs))
    attacked.assert_refused(key, "seal_tag")


def test_a_page_that_was_cut_is_refused_whatever_its_header_says(attacked: Attacked) -> None:
    (key,) = page_keys(1)
    store_pages(attacked.store, [key], SIZES)
    whole = attacked.payload(key)
    head = Header(0, attacked.mode, 1, 1024, 1000, b"new", whole[48:72])
    cut = head.encode() + whole[HEADER_LENGTH : HEADER_LENGTH + 1000] + whole[-16:]
    for content in (cut.ljust(len(whole), b"\0"), whole[:-30].ljust(len(whole), b"\0"), bytes(len(whole))):
        attacked.put(key, content)
        attacked.assert_refused(key)


def test_a_page_sealed_with_the_attackers_own_key_is_refused(attacked: Attacked) -> None:
    (key,) = page_keys(1)
    store_pages(attacked.store, [key], SIZES)
    for id in ("theirs", "new"):
        theirs = Attacked(attacked.mode, "new")
        theirs.store = TransformedStore(
            MemoryPageStore(objects=theirs.objects),
            None,
            type(seal(attacked.mode, "new"))(attacked.mode, (SealKey(id, SECRETS["theirs"]),)),
        )
        store_pages(theirs.store, [key], SIZES)
        (content,) = (read_page_object(stored).payload for stored in theirs.objects.values())
        attacked.put(key, content)
        attacked.assert_refused(key, "seal_key" if id == "theirs" else "seal_tag")


def test_a_page_sealed_in_the_other_mode_with_the_same_key_is_refused(attacked: Attacked) -> None:
    (key,) = page_keys(1)
    store_pages(attacked.store, [key], SIZES)
    other = Attacked(ENCRYPT if attacked.mode is AUTHENTICATE else AUTHENTICATE)
    store_pages(other.store, [key], SIZES)
    attacked.put(key, other.payload(key))
    attacked.assert_refused(key, "seal_form")


def test_ten_thousand_mutations_are_never_served(attacked: Attacked) -> None:
    keys = page_keys(4)
    store_pages(attacked.store, keys, SIZES)
    good = {key: attacked.payload(key) for key in keys}
    chance = random.Random(20261124)
    for number in range(10_000):
        key = keys[number % 4]
        content = bytearray(good[key])
        for _ in range(chance.choice((1, 1, 2, 5))):
            match chance.randrange(5):
                case 0:
                    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
                case 1:
                    content[chance.randrange(HEADER_LENGTH)] = chance.randrange(256)
                case 2:
                    at, length = chance.randrange(len(content)), chance.randrange(1, 64)
                    content[at : at + length] = chance.randbytes(len(content[at : at + length]))
                case 3:
                    at = chance.randrange(len(content))
                    other = good[chance.choice(keys)]
                    content[at : at + 64] = other[at : at + 64]
                case _:
                    at = chance.randrange(len(content))
                    content[at:] = bytes(len(content) - at)
        attacked.put(key, bytes(content))
        results, _ = read_pages(attacked.store, [key], SIZES)
        if bytes(content) == good[key]:
            assert results == [GetResult.HIT]
        else:
            assert results == [GetResult.CORRUPT], content.hex()
    for key in keys:
        attacked.put(key, good[key])
    assert_hits(attacked.store, keys, SIZES)


@BOTH
def test_who_has_no_key_another_key_or_no_longer_the_key_finds_nothing(mode: SealMode) -> None:
    attacked, keys = Attacked(mode, "old"), page_keys(5)
    store_pages(attacked.store, keys, SIZES)
    before = dict(attacked.objects)
    for others in (
        MemoryPageStore(objects=attacked.objects),
        Attacked(mode, "new", objects=attacked.objects).store,
        Attacked(ENCRYPT if mode is AUTHENTICATE else AUTHENTICATE, "old", objects=attacked.objects).store,
    ):
        assert read_pages(others, keys, SIZES)[0] == [GetResult.MISS] * 5
        assert others.contains(keys) == [False] * 5 and others.count_leading(keys) == 0
        assert store_pages(others, keys, SIZES) == [SetResult.STORED] * 5
        assert_hits(others, keys, SIZES)
        assert others.metrics.total("corrupt") == 0
    assert {name: attacked.objects[name] for name in before} == before, "pages of others were touched"
    assert_hits(attacked.store, keys, SIZES)


@BOTH
def test_one_secret_under_two_ids_is_two_keys(mode: SealMode) -> None:
    objects: dict[bytes, bytes] = {}
    keys, stores = page_keys(4), []
    for id in ("one", "other"):
        of_id = Seal(mode, (SealKey(id, SECRETS["new"]),))
        stores.append(TransformedStore(MemoryPageStore(objects=objects), None, of_id))
    one, other = stores
    store_pages(one, keys, SIZES)
    before = dict(objects)
    assert read_pages(other, keys, SIZES)[0] == [GetResult.MISS] * 4
    assert store_pages(other, keys, SIZES) == [SetResult.STORED] * 4
    for store in stores:
        assert_hits(store, keys, SIZES)
        assert store.metrics.total("corrupt") == 0
    assert {name: objects[name] for name in before} == before, "pages of others were touched"


@pytest.mark.parametrize("sealed", [True, False])
def test_pages_of_another_version_of_the_format_are_never_met(sealed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = None if sealed else Codec("lossless")
    document = {"pool": {"dtype": "bfloat16", "segments": [1 << 16]}}
    made = Transforms(codec, seal(ENCRYPT, "new") if sealed else None, 1)
    ours = {form.identity for form in made.forms(IDENTITY, document).all if not form.plain}
    monkeypatch.setattr(forms, "_VERSION", b"3\0")
    theirs = {form.identity for form in made.forms(IDENTITY, document).all if not form.plain}
    assert ours and not ours & theirs


@BOTH
def test_a_fleet_in_the_middle_of_a_rotation_reads_each_others_pages(mode: SealMode) -> None:
    objects: dict[bytes, bytes] = {}
    keys = page_keys(6)
    first, both, last = (Attacked(mode, *ids, objects=objects).store for ids in (("old",), ("new", "old"), ("new",)))
    store_pages(first, keys[:3], SIZES)
    store_pages(both, keys[3:], SIZES)
    assert_hits(both, keys, SIZES)
    assert both.contains(keys) == [True] * 6 and both.count_leading(keys) == 6
    assert read_pages(first, keys, SIZES)[0] == [GetResult.HIT] * 3 + [GetResult.MISS] * 3
    assert read_pages(last, keys, SIZES)[0] == [GetResult.MISS] * 3 + [GetResult.HIT] * 3
    assert sum(store.metrics.total("corrupt") for store in (first, both, last)) == 0
    assert store_pages(last, keys, SIZES) == [SetResult.STORED] * 3 + [SetResult.EXISTS] * 3
    assert_hits(first, keys[:3], SIZES)
    assert both.remove(keys) == 6
    assert not objects, "a removed page is there under another key"


@BOTH
def test_a_removed_key_makes_its_pages_misses_at_once(mode: SealMode) -> None:
    attacked, keys = Attacked(mode, "new", "old"), page_keys(4)
    written_before = Attacked(mode, "old", objects=attacked.objects)
    store_pages(written_before.store, keys[:2], SIZES)
    store_pages(attacked.store, keys[2:], SIZES)
    assert_hits(attacked.store, keys, SIZES)
    pages_of(attacked.store).put_seal(seal(mode, "new"))
    assert attacked.store.contains(keys) == [False, False, True, True]
    assert read_pages(attacked.store, keys, SIZES)[0] == [GetResult.MISS] * 2 + [GetResult.HIT] * 2


@BOTH
def test_clear_takes_every_form_of_an_identity_and_no_other_one(mode: SealMode) -> None:
    attacked, keys = Attacked(mode, "new", "old"), page_keys(3)
    store_pages(Attacked(mode, "old", objects=attacked.objects).store, keys, SIZES)
    store_pages(MemoryPageStore(objects=attacked.objects), keys, SIZES)
    store_pages(attacked.store, keys, SIZES)
    other = bytes(16) + bytes(32)
    store_pages(attacked.store, [other], SIZES)
    assert attacked.store.clear([keys[0][:IDENTITY_LENGTH]]) == 1
    assert len(attacked.objects) == 1
    assert_hits(attacked.store, [other], SIZES)


@BOTH
def test_a_page_of_a_key_that_is_gone_does_not_come_back_after_a_clear(mode: SealMode) -> None:
    objects, document = {}, {"model": {"id": "org/model"}, "pool": {"name": "kv", "segments": SIZES}}
    keys = page_keys(3)
    digest = keys[0][:IDENTITY_LENGTH]
    inner = MemoryPageStore(objects=objects)
    before = TransformedStore(inner, None, seal(mode, "old"))
    before.register_identity(digest, document)
    store_pages(before, keys, SIZES)
    after = TransformedStore(inner, None, seal(mode, "new"))
    assert after.clear([digest]) == 1
    assert read_pages(before, keys, SIZES)[0] == [GetResult.MISS] * 3


@BOTH
def test_a_processor_without_aes_and_one_with_it_read_each_others_pages(
    mode: SealMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacked, keys = Attacked(mode), page_keys(4)
    for number, kind in enumerate(CipherKind):
        monkeypatch.setattr("hicache_ext.page.transforms.body.fastest_cipher", lambda kind=kind: kind)
        store_pages(attacked.store, keys[2 * number : 2 * number + 2], SIZES)
        assert attacked.payload(keys[2 * number])[12] == kind
    assert_hits(attacked.store, keys, SIZES)
    attacked.put(keys[0], attacked.payload(keys[0])[:12] + b"\2" + attacked.payload(keys[0])[13:])
    attacked.assert_refused(keys[0], "seal_tag")


def test_names_are_hidden_by_a_permutation_that_depends_on_the_key() -> None:
    from hicache_ext.storage.contract.store import PageKeys

    keys = page_keys(1000)
    joined = PageKeys.of_joined(keys[0][:IDENTITY_LENGTH], b"".join([key[IDENTITY_LENGTH:] for key in keys]))
    hidden = [SealKey("a", SECRETS[name]).hidden_hashes(joined.words[:, 2:]) for name in ("old", "new")]
    assert len({row.tobytes() for one in hidden for row in one}) == 2000


def test_a_forged_page_is_refused_again_once_it_is_no_longer_remembered(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = page_keys(2)
    store_pages(attacked.store, [one, other], SIZES)
    attacked.put(other, attacked.payload(one))
    assert read_pages(attacked.store, [other], SIZES)[0] == [GetResult.CORRUPT]
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    assert attacked.store.contains([other]) == [True]
    attacked.assert_refused(other, "seal_tag")


def test_a_good_page_that_replaced_a_forged_one_meanwhile_stays(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes have met the forged page, and both write it: the one that comes second must not take what the
    first one has stored."""
    one, other = page_keys(2)
    store_pages(attacked.store, [one, other], SIZES)
    attacked.put(other, attacked.payload(one))
    first = Attacked(attacked.mode, objects=attacked.objects)
    for each in (attacked, first):
        assert read_pages(each.store, [other], SIZES)[0] == [GetResult.CORRUPT]
    real, met = body.read, []

    def then_replaced(*arguments: Any) -> str | None:
        reason = real(*arguments)
        if not met:
            met.append(reason)
            assert store_pages(first.store, [other], SIZES) == [SetResult.STORED]
        return reason

    monkeypatch.setattr(body, "read", then_replaced)
    assert store_pages(attacked.store, [other], SIZES) == [SetResult.EXISTS]
    monkeypatch.undo()
    assert met == ["seal_tag"]
    stored = attacked.objects[attacked.stored_key(other)]
    assert_hits(first.store, [other], SIZES)
    assert_hits(attacked.store, [other], SIZES)
    assert attacked.objects[attacked.stored_key(other)] is stored


@BOTH
def test_a_cipher_that_cannot_be_had_costs_its_own_page_alone_and_destroys_nothing(
    mode: SealMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacked, keys = Attacked(mode), page_keys(4)
    monkeypatch.setattr("hicache_ext.page.transforms.body.fastest_cipher", lambda: CipherKind.CHACHA20_POLY1305)
    store_pages(attacked.store, keys[:1], SIZES)
    monkeypatch.setattr("hicache_ext.page.transforms.body.fastest_cipher", lambda: CipherKind.AES_256_GCM)
    store_pages(attacked.store, keys[1:], SIZES)
    before = dict(attacked.objects)

    def refuse(key: bytes) -> None:
        raise UnsupportedAlgorithm("not in this mode")

    (of_tier,) = pages_of(attacked.store)._known.transforms.seal.keys  # type: ignore[union-attr]
    there = of_tier._kinds[CipherKind.CHACHA20_POLY1305]
    of_tier._kinds[CipherKind.CHACHA20_POLY1305] = refuse
    assert read_pages(attacked.store, keys, SIZES)[0] == [GetResult.CORRUPT] + [GetResult.HIT] * 3
    assert attacked.corrupt("seal_cipher") == 1
    assert store_pages(attacked.store, keys[:1], SIZES) == [SetResult.REJECTED]
    assert attacked.objects == before
    of_tier._kinds[CipherKind.CHACHA20_POLY1305] = there
    assert_hits(attacked.store, keys, SIZES)


def test_a_page_that_cannot_be_opened_for_any_reason_costs_no_other_one(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = page_keys(4)
    store_pages(attacked.store, keys, SIZES)
    real, bad = body.read, attacked.stored_key(keys[1])

    def read(stored: memoryview, stored_key: bytes, *others: Any) -> str | None:
        if stored_key == bad:
            raise MemoryError
        return real(stored, stored_key, *others)

    monkeypatch.setattr(body, "read", read)
    assert read_pages(attacked.store, keys, SIZES)[0] == [
        *(GetResult.HIT, GetResult.ERROR),
        *(GetResult.HIT, GetResult.HIT),
    ]


def test_a_page_whose_seal_is_wrong_leaves_no_plaintext_in_the_host_page() -> None:
    size = 1 << 16
    (form,) = Transforms(None, seal(ENCRYPT, "new"), 1).forms(IDENTITY, None).all
    name, content = page_keys(1)[0], memoryview(b"\x55" * size)
    stored = memoryview(bytearray(form.stored_length(size)))
    body.write(stored, name, form, [content], None, bytes(24), fresh)
    stored[-1] ^= 1
    page = memoryview(bytearray(b"\xee" * size))
    assert body.read(stored, name, form, [page], fresh) == "seal_tag"
    assert bytes(page) in (b"\xee" * size, bytes(size))


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_key_cannot_be_copied_out_of_the_process(copied: Any) -> None:
    with pytest.raises(TypeError, match="never written"):
        copied(SealKey("new", SECRETS["new"]))


def test_no_secret_is_shown_by_a_key_a_seal_or_a_store(attacked: Attacked) -> None:
    made = pages_of(attacked.store)
    shown = f"{seal(ENCRYPT, 'new', 'old')!r} {made.describe()!r} {made._known.transforms.seal!r}"
    assert "new" in shown
    for secret in SECRETS.values():
        assert secret not in shown
