"""Pages of a prompt brought to a near tier before anybody asks."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

from hicache_ext.cli.inputs import parse_tokens
from hicache_ext.cli.main import main
from hicache_ext.config import load_config
from hicache_ext.config.model import ExtraConfig
from hicache_ext.errors import CommandError, ConfigError
from hicache_ext.page.hashes import page_hashes
from hicache_ext.page.identity import ModelIdentity, PageIdentity, PoolIdentity, Shard, canonical
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.serving.prompts import warm_prompts
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.testing.conformance.pages import assert_hits, store_pages
from hicache_ext.testing.server import free_port
from tests.rigs.redis_servers import RedisServer, redis_program
from tests.storage.raw_access import RawFiles

TOKENS = [(7 * position) % 250 for position in range(167)]
PAGE_SIZE = 16
SEGMENTS = (700, 324)


def identity(model="m", rank=0, pool="kv", segments=SEGMENTS):
    described = PoolIdentity(pool, "MHATokenToKVPoolHost", "bfloat16", "page_first", PAGE_SIZE, segments)
    return PageIdentity(ModelIdentity(model), described, Shard(tp=(rank, 2)))


def keys_of(an_identity, tokens=TOKENS):
    return [an_identity.digest() + page for page in page_hashes(tokens, PAGE_SIZE)]


@pytest.fixture
def document(tmp_path):
    tiers = {
        name: {"type": "file", "path": str(tmp_path / name), "capacity": "64MiB", "layout": "pages"}
        for name in ("nvme", "pool")
    }
    return ExtraConfig.around({"tiers": tiers, "promote_to": "nvme"})


@pytest.fixture
def config(document):
    return load_config(document).for_role("prefill")


@pytest.fixture
def config_file(document, tmp_path):
    file = tmp_path / "hicache.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


@pytest.fixture
def pool(tmp_path):
    store = PageFileStore("pool", tmp_path / "pool", capacity=None)
    yield store
    store.close()


def fill(pool, *identities, skip=()):
    for an_identity in identities:
        pool.register_identity(an_identity.digest(), an_identity.document())
        keys = [key for number, key in enumerate(keys_of(an_identity)) if number not in skip]
        store_pages(pool, keys, an_identity.pool.segments)


def read_near(tmp_path):
    return PageFileStore("nvme", tmp_path / "nvme", capacity=None)


def test_every_rank_and_pool_of_a_prompt_is_brought(config, pool, tmp_path):
    identities = [identity(rank=0), identity(rank=1), identity(pool="indexer", segments=(64,))]
    fill(pool, *identities)
    seen = []
    report = warm_prompts(config, [TOKENS], progress=lambda done, pages: seen.append((done, pages)))
    assert (report["fetched"], report["present"], report["absent"], report["failed"]) == (30, 0, 0, 0)
    assert report["payload_bytes"] == 10 * (1024 + 1024 + 64)
    assert seen[-1] == (30, 30)
    near = read_near(tmp_path)
    for an_identity in identities:
        assert_hits(near, keys_of(an_identity), an_identity.pool.segments)
    near.close()
    # Its own documents are there, too, so that tools can name what is stored.
    assert {file.stem for file in (tmp_path / "nvme" / "identities").iterdir()} == {
        an_identity.digest().hex() for an_identity in identities
    }
    again = warm_prompts(config, [TOKENS])
    assert (again["fetched"], again["present"]) == (0, 30)


def test_a_state_is_brought_under_the_hash_of_its_kv_page(config, pool, tmp_path):
    """SGLang says that a Mamba state has a page of one token; its key is that of a KV page."""
    described = PoolIdentity("mamba", "MambaPoolHost", "bfloat16", "page_first", 1, (64,))
    state = PageIdentity(ModelIdentity("m"), described, Shard(tp=(0, 2)))
    fill(pool, identity())
    fill(pool, state, skip=[0, 1, 2, 3, 4, 5, 6, 8])
    assert warm_prompts(config, [TOKENS])["fetched"] == 12
    near = read_near(tmp_path)
    assert_hits(near, [keys_of(state)[position] for position in (7, 9)], (64,))
    near.close()


def test_kv_behind_a_gap_is_left_where_it_is(config, pool, tmp_path, monkeypatch):
    monkeypatch.setattr("hicache_ext.storage.serving.prompts._PAGES_AT_ONCE", 4)
    fill(pool, identity(), skip=(5,))
    report = warm_prompts(config, [TOKENS])
    # The portion with the gap is the last one that is read.
    assert (report["fetched"], report["absent"]) == (7, 3)
    assert set(RawFiles(tmp_path / "nvme").keys()) == {keys_of(identity())[n] for n in (0, 1, 2, 3, 4, 6, 7)}


def test_a_bad_page_of_the_pool_is_never_brought(config, pool, tmp_path):
    fill(pool, identity())
    raw = RawFiles(tmp_path / "pool")
    key = keys_of(identity())[0]
    raw.write(key, (raw.read(key) or b"")[:-1] + b"\0")
    report = warm_prompts(config, [TOKENS])
    assert report["failed"] == 1 and RawFiles(tmp_path / "nvme").read(key) is None


def test_of_several_models_one_has_to_be_named(config, pool):
    fill(pool, identity("a"), identity("b"))
    with pytest.raises(CommandError, match="pages of several models; say which with --served-name: a, b"):
        warm_prompts(config, [TOKENS])
    with pytest.raises(CommandError, match="no tier knows the model 'c'; known: a, b"):
        warm_prompts(config, [TOKENS], model="c")
    assert warm_prompts(config, [TOKENS], model="b")["fetched"] == 10


def test_documents_that_are_none_are_passed_over(config, pool, tmp_path):
    fill(pool, identity())
    for name, text in (("ff" * 16, "[]"), ("zz", "{}"), ("ee" * 16, '{"pool": {"name": "kv"}, "model": {"id": "x"}}')):
        (tmp_path / "pool" / "identities" / f"{name}.json").write_text(text)
    assert warm_prompts(config, [TOKENS])["fetched"] == 10


def test_a_document_that_is_not_what_its_name_says_is_passed_over(config, pool, tmp_path):
    fill(pool, identity())
    document = {**identity("another").document(), "schema": 1}
    (tmp_path / "pool" / "identities" / f"{'ab' * 16}.json").write_text(json.dumps(document))
    assert warm_prompts(config, [TOKENS])["fetched"] == 10


def test_a_node_without_documents_takes_those_of_another_node(config_file, pool, tmp_path, capsys):
    fill(pool, identity())
    (tmp_path / "tokens").write_text(json.dumps(TOKENS))
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "pool" / "identities").rename(elsewhere)
    arguments = ["warm", str(config_file), "--tokens", str(tmp_path / "tokens")]
    assert main(arguments) == 1
    assert "no tier knows an identity" in capsys.readouterr().err
    (tmp_path / "nvme").mkdir(exist_ok=True)
    shutil.copytree(elsewhere, tmp_path / "nvme" / "identities", dirs_exist_ok=True)
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("10 pages fetched")


@pytest.fixture(params=["redis", "object"])
def shared_pool(request, tmp_path):
    """The configuration of a pool that no node has in a directory of its own file tiers."""
    if request.param == "object":
        yield {"type": "object", "url": f"file://{tmp_path / 'bucket'}"}
        return
    if redis_program() is None:
        pytest.skip("missing: redis-server")
    with RedisServer(tmp_path / "redis") as server:
        yield {"type": "redis", "url": server.url}


def test_a_new_node_learns_from_the_pool_alone_what_its_pages_are(shared_pool, document, tmp_path, capsys):
    document["hicache_ext"]["tiers"]["pool"] = shared_pool
    config = load_config(document).for_role("prefill")
    pool = open_tier("pool", config.tiers["pool"])
    fill(pool, identity(rank=0), identity(rank=1))
    assert pool.identities() == {
        one.digest(): json.loads(canonical(one.document())) for one in (identity(), identity(rank=1))
    }
    pool.close()
    assert warm_prompts(config, [TOKENS])["fetched"] == 20
    near = read_near(tmp_path)
    assert_hits(near, keys_of(identity()), SEGMENTS)
    near.close()


def test_a_pool_that_is_not_there_is_one_sentence(document, tmp_path, capsys):
    document["hicache_ext"]["tiers"]["pool"] = {"type": "redis", "url": f"redis://127.0.0.1:{free_port()}"}
    (tmp_path / "hicache.yaml").write_text(yaml.safe_dump(document))
    (tmp_path / "tokens").write_text("1 2 3")
    assert main(["warm", str(tmp_path / "hicache.yaml"), "--tokens", str(tmp_path / "tokens")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tier 'pool'") and error.count("\n") == 1


def test_the_command_warms_and_says_what_it_did(config_file, pool, tmp_path, capsys):
    fill(pool, identity())
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS))
    assert main(["warm", str(config_file), "--tokens", str(tmp_path / "tokens.json")]) == 0
    assert capsys.readouterr().out.startswith("10 pages fetched (10KiB in ")
    (tmp_path / "tokens.txt").write_text(" ".join(map(str, TOKENS)))
    assert main(["warm", str(config_file), "--tokens", str(tmp_path / "tokens.txt")]) == 0
    assert ", 10 were there, 0 are nowhere, 0 failed" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_tokenizes_a_prompt(config_file, pool, tmp_path, capsys):
    from hicache_ext.testing.sglang_cpu import prepare_process
    from tests.rigs.tiny_model import make_tiny_model

    prepare_process()  # transformers imports torchvision, whose extension a machine without a GPU lacks
    model = make_tiny_model(tmp_path / "model")
    text = "warm me up, please. " * 20
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(model).encode(text)
    pool.register_identity(identity().digest(), identity().document())
    store_pages(pool, keys_of(identity(), tokens), SEGMENTS)
    (tmp_path / "prompt.txt").write_text(text)
    arguments = ["warm", str(config_file), "--prompt", str(tmp_path / "prompt.txt"), "--model", str(model)]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith(f"{len(tokens) // PAGE_SIZE} pages fetched")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tokens", "nowhere.json"], "--tokens: 'nowhere.json' cannot be read: No such file or directory"),
        (["--prompt", "nowhere.txt"], "--prompt: 'nowhere.txt' cannot be read"),
        (["--tokens", "words"], "--tokens: not a list of token ids; allowed: token ids: numbers"),
        (["--prompt", "words"], "--model: --prompt needs a tokenizer; allowed: "),
        (
            ["--prompt", "words", "--model", "no/such/model"],
            "--model: no tokenizer could be loaded from 'no/such/model'",
        ),
        (
            ["--tokens", "tokens"],
            "no tier knows an identity; a server with this configuration writes them when it starts, or copy ",
        ),
        (["--tokens", "tokens", "--to", "pool"], "no tier stands behind 'pool' in retrieve_locations"),
        (["--tokens", "tokens", "--to", "nvm"], "tier 'nvm' is not in retrieve_locations"),
    ],
)
def test_a_mistake_is_one_sentence(config_file, tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words").write_text("not numbers")
    (tmp_path / "tokens").write_text("1, 2, 3")
    assert main(["warm", str(config_file), *arguments]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith(sentence) and error.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    ["", "  ", "[]", "[1, true]", '["a"]', "[[1], []]", "[1, [2]]", "{}", "1.5", "[1", "[" * 200_000, "[Infinity]"],
)
def test_what_is_no_list_of_tokens_is_refused(text):
    with pytest.raises(ConfigError):
        parse_tokens(text, "--tokens")


def test_tokens_may_be_written_in_three_ways():
    assert parse_tokens("1 2,3\n4", "t") == parse_tokens("[1, 2, 3, 4]", "t") == [[1, 2, 3, 4]]
    assert parse_tokens("[[1], [2, 3]]", "t") == [[1], [2, 3]]


@pytest.mark.parametrize(
    ("page_size", "segment"),
    [(64, 2**63), (64, []), (2**63, 64), (-64, 64), ("abc", 64), (float("inf"), 64), (64, None)],
)
def test_a_document_that_anybody_wrote_is_passed_over(page_size, segment, config, pool, tmp_path):
    fill(pool, identity())
    document = {"model": {"id": "m"}, "pool": {"name": "kv", "page_size": page_size, "segments": [segment]}}
    text = "[" * 200_000 if segment is None else json.dumps(document)
    (tmp_path / "pool" / "identities" / f"{'ab' * 16}.json").write_text(text)
    assert warm_prompts(config, [TOKENS])["fetched"] == 10
