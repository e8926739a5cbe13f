"""Page hashes equal SGLang's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hicache_ext.page_hashes import page_hashes
from hicache_ext.testing.sglang_cpu import prepare_process

TOKENS = [(11 * position * position + 5 * position) % 128_000 for position in range(333)]


@pytest.fixture(scope="module")
def sglang_hash():
    prepare_process()
    from sglang.srt.mem_cache import utils

    return utils


@pytest.mark.parametrize("page_size", [1, 16, 64, 333, 400])
def test_the_pages_of_a_prompt_have_the_hashes_that_sglang_gives_them(sglang_hash, page_size):
    whole = TOKENS[: len(TOKENS) // page_size * page_size]
    expected = sglang_hash.get_hash_str(whole, None, page_size) if whole else []
    assert [digest.hex() for digest in page_hashes(TOKENS, page_size)] == list(expected)


@pytest.mark.parametrize(("extra_key", "cache_salt"), [("a", None), (None, "b"), ("", ""), ("ab", "c"), ("a", "bc")])
def test_a_namespace_seeds_the_chain_as_in_sglang(sglang_hash, extra_key, cache_salt):
    key = SimpleNamespace(extra_key=extra_key, cache_salt=cache_salt)
    seed = sglang_hash.storage_namespace_seed(key.extra_key, key.cache_salt)
    expected = sglang_hash.get_hash_str(TOKENS[:320], seed, 16)
    ours = page_hashes(TOKENS, 16, extra_key=extra_key, cache_salt=cache_salt)
    assert [digest.hex() for digest in ours] == list(expected)
    assert ours != page_hashes(TOKENS, 16)


@pytest.mark.parametrize("tokens", [[-1], [1 << 32]])
def test_what_is_no_token_is_refused(tokens):
    with pytest.raises(ValueError, match="a token id is a whole number"):
        page_hashes(tokens, 1)


def test_a_page_has_at_least_one_token():
    with pytest.raises(ValueError, match="page size 0"):
        page_hashes([1], 0)
