"""Our page hashes beside SGLang's own."""

from __future__ import annotations

import array
import random

import pytest

from hicache_ext.errors import HicacheExtError
from hicache_ext.page.hashes import namespace_seed, page_hashes

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def sglang_utils():
    from hicache_ext.testing.sglang_cpu import prepare_process

    prepare_process()
    from sglang.srt.mem_cache import utils

    return utils


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 640, 1000])
def test_a_chain_is_the_one_sglang_computes(sglang_utils, page_size, length):
    generator = random.Random(length)
    tokens = [generator.randrange(2**31) for _ in range(length)]
    whole = tokens[: length // page_size * page_size]
    expected = sglang_utils.get_hash_str(array.array("q", whole), None, page_size=page_size) if whole else []
    assert [page.hex() for page in page_hashes(tokens, page_size)] == list(expected)


@pytest.mark.parametrize(("extra_key", "salt"), [(None, None), ("lora", None), (None, "salt"), ("", ""), ("ü", "x")])
def test_a_namespace_seeds_the_chain_as_sglang_does(sglang_utils, extra_key, salt):
    seed = sglang_utils.storage_namespace_seed(extra_key, salt)
    assert namespace_seed(extra_key, salt).hex() == (seed or "")
    tokens = list(range(64))
    expected = sglang_utils.get_hash_str(array.array("q", tokens), seed, page_size=16)
    assert [page.hex() for page in page_hashes(tokens, 16, namespace_seed(extra_key, salt))] == list(expected)


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1, True], ["1"], [1.5]])
def test_what_is_no_token_id_is_refused_in_a_sentence(tokens):
    with pytest.raises(HicacheExtError, match=r"number \d of the tokens is .*, not a token id"):
        page_hashes(tokens, 1)
