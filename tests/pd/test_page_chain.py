"""Page hashes of a decode node equal those of SGLang's own prefill hashing, in every namespace."""

from __future__ import annotations

import itertools
import random
from array import array

import pytest

from hicache_ext.testing.sglang_cpu import prepare_process

prepare_process()

from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402

from hicache_ext.sglang.decode_manager import PageChain  # noqa: E402
from tests.releases.needs import needs_release  # noqa: E402

PAGE_SIZE = 16


def prefill_hashes(
    tokens: list[int], *, extra_key: str | None, cache_salt: str | None, eagle: bool = False
) -> list[str]:
    """What the prefill node stores: its radix key, cut to whole pages as its tree cuts it, hashed by SGLang."""
    key, _ = RadixKey(array("q", tokens), extra_key=extra_key, cache_salt=cache_salt).maybe_to_bigram_view(eagle)
    whole = key[: len(key) // PAGE_SIZE * PAGE_SIZE]
    hashes = get_storage_hash_str(whole, None, page_size=PAGE_SIZE)
    assert isinstance(hashes, list)
    return hashes


@pytest.mark.parametrize("extra_key", [None, "lora-7"])
@pytest.mark.parametrize("cache_salt", [None, "tenant"])
@pytest.mark.parametrize("prompt_length", [5, 16, 17, 640, 641])
@pytest.mark.parametrize("eagle", [False, True], ids=["tokens", "eagle"])
def test_a_chain_grown_piece_by_piece_equals_the_next_turns_prefill(
    eagle: bool, extra_key: str | None, cache_salt: str | None, prompt_length: int
) -> None:
    generator = random.Random(prompt_length)
    conversation = [generator.randrange(150_000) for _ in range(prompt_length + 200)]
    chain = PageChain(PAGE_SIZE, extra_key, cache_salt, bigrams=eagle)
    prompt_pages = chain.pages_in(prompt_length)
    if prompt_pages:
        chain.extend(conversation[chain.tokens_for(0, prompt_pages)])
    while len(chain) < prompt_pages + 11:
        end = min(len(chain) + generator.randint(1, 4), prompt_pages + 11)
        chain.extend(conversation[chain.tokens_for(len(chain), end)])

    expected = prefill_hashes(conversation, extra_key=extra_key, cache_salt=cache_salt, eagle=eagle)
    assert chain.hashes(0, len(chain)) == expected[: len(chain)]
    # The prompt alone, as the prefill node of this turn stores it.
    alone = prefill_hashes(conversation[:prompt_length], extra_key=extra_key, cache_salt=cache_salt, eagle=eagle)
    assert chain.hashes(0, prompt_pages) == alone


def test_eagle_and_plain_hashes_never_meet_and_neither_do_namespaces() -> None:
    tokens = list(range(100, 100 + 4 * PAGE_SIZE + 1))
    seen = set()
    for eagle, extra_key, salt in itertools.product((False, True), (None, "", "a"), (None, "a", "b")):
        chain = PageChain(PAGE_SIZE, extra_key, salt, bigrams=eagle)
        chain.extend(tokens[chain.tokens_for(0, 4)])
        seen.update(chain.hashes(0, 4))
    assert len(seen) == 2 * 3 * 3 * 4


def test_hashes_that_are_not_there_yet_are_refused() -> None:
    chain = PageChain(PAGE_SIZE, extra_key=None, cache_salt=None)
    chain.extend(list(range(PAGE_SIZE)))
    with pytest.raises(IndexError):
        chain.hashes(0, 2)


@needs_release("0.5.23", "identities of images")
def test_pages_of_other_images_have_other_hashes_and_a_decode_node_finds_the_same() -> None:
    """SGLang puts 62-bit numbers, made of what an image shows, in the places of its tokens."""

    def prompt(shown: bytes) -> list[int]:
        image = MultimodalDataItem(modality=Modality.IMAGE)
        image.set_identity(shown * 32)
        return [*range(100, 120), *image.padding_sequence(3 * PAGE_SIZE), *range(200, 240)]

    hashes = [prefill_hashes(prompt(shown), extra_key=None, cache_salt=None) for shown in (b"a", b"b")]
    # The pages before the image are of both.
    alike = [one == other for one, other in zip(*hashes, strict=True)]
    assert alike == sorted(alike, reverse=True) and sum(alike) == 1
    chain = PageChain(PAGE_SIZE, extra_key=None, cache_salt=None)
    pages = chain.pages_in(len(prompt(b"a")))
    chain.extend(prompt(b"a")[chain.tokens_for(0, pages)])
    assert chain.hashes(0, pages) == hashes[0]
