"""``hicache-ext explain`` answers the question that every user asks: why is there no hit?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.cli.main import main
from hicache_ext.page.hashes import page_hashes
from hicache_ext.page.identity import KV_POOL, ModelIdentity, PageIdentity, PoolIdentity, Shard
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import store_pages
from hicache_ext.testing.server import free_port

PAGE, SIZE, MIB = 16, 64 << 10, 1 << 20
TOKENS = list(range(500, 500 + 330))


def identity(pool: str = KV_POOL, fingerprint: str = "aa", page_size: int = PAGE) -> PageIdentity:
    model = ModelIdentity("some/model", fingerprint=fingerprint)
    return PageIdentity(model, PoolIdentity(pool, "mha", "bfloat16", "page_first", page_size, (SIZE,)), Shard())


@pytest.fixture(params=["slab", "pages"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    kind = SlabStore if request.param == "slab" else PageFileStore
    opened = kind("disk", tmp_path / "l3", capacity=16 * MIB)
    yield opened
    opened.close()


def write(store: Any, of: PageIdentity, pages: slice, tokens: list[int] = TOKENS) -> None:
    store.register_identity(of.digest(), of.document())
    hashes = page_hashes(tokens, of.pool.page_size)[pages]
    store_pages(store, [of.digest() + page for page in hashes], (SIZE,))


def configuration(tmp_path: Path, **tiers: Any) -> Path:
    disk = {"type": "file", "path": str(tmp_path / "l3"), "capacity": "16MiB"}
    document = {
        "backend_name": "hicache_ext",
        "module_path": "hicache_ext.storage.backend",
        "class_name": "HiCacheExtBackend",
        "interface_v1": 1,
        "hicache_ext": {"tiers": {"disk": disk, **tiers}},
    }
    file = tmp_path / "hicache.json"
    file.write_text(json.dumps(document))
    return file


def explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str, tokens: list[int] = TOKENS, **tiers: Any
) -> tuple[int, str]:
    prompt = tmp_path / "tokens.json"
    prompt.write_text(json.dumps(tokens))
    code = main(["explain", str(configuration(tmp_path, **tiers)), "--tokens", str(prompt), *arguments])
    return code, capsys.readouterr().out


def test_a_prompt_that_is_all_there(store: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(store, identity(), slice(None))
    code, out = explained(tmp_path, capsys)
    assert code == 0
    assert "disk: 20 of 20 pages" in out
    assert "320 tokens can be restored, of 320 in whole pages" in out
    assert "missing" not in out
    assert "only where its host memory holds all 330 tokens (--hicache-ratio, --hicache-size" in out


def test_what_was_never_written(store: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(store, identity(), slice(0, 5))
    code, out = explained(tmp_path, capsys)
    assert code == 1
    assert "80 tokens can be restored, of 320" in out
    assert "page 6 (tokens 80 to 95) is missing: never written, or evicted, cleared or expired since" in out


def test_a_gap_tells_that_the_page_was_there(store: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(store, identity(), slice(None))
    store.remove([identity().digest() + page_hashes(TOKENS, PAGE)[7]])
    _, out = explained(tmp_path, capsys)
    assert "112 tokens can be restored" in out
    assert "page 8 (tokens 112 to 127) is missing: pages after it are there, so it was there, too" in out


def test_other_weights_are_named_with_both_values(
    store: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(store, identity(fingerprint="old"), slice(None))
    write(store, identity(fingerprint="new"), slice(0, 2))
    code, out = explained(tmp_path, capsys)
    assert code == 0, "a server with the old weights finds all"
    assert "is missing: it is there under another identity: model.fingerprint is 'new' here and 'old' there" in out


def test_pools_beside_the_kv_are_told_of(store: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(store, identity(), slice(None))
    # Kept under the hashes of KV pages, whatever its own size.
    state = identity("mamba", page_size=1)
    store.register_identity(state.digest(), state.document())
    store_pages(store, [state.digest() + page_hashes(TOKENS, PAGE)[15]], (SIZE,))
    code, out = explained(tmp_path, capsys)
    assert code == 0
    assert "pool mamba (bfloat16, page_first, 16 tokens a page)\n  disk: 1 of 20 pages" in out
    assert "the last one ends at token 256" in out


def test_an_evicted_page_is_known_while_a_server_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = SlabStore("disk", tmp_path / "l3", capacity=16 * MIB)
    write(store, identity(), slice(None))
    for first in range(0, 6000, 320):
        write(store, identity(), slice(None), list(range(10_000 + first, 10_320 + first)))
    _, out = explained(tmp_path, capsys)
    assert "is missing: it was evicted: the capacity is too small for what was used since" in out
    store.close()
    _, out = explained(tmp_path, capsys)
    assert "it was evicted" not in out


def test_it_is_json_on_demand(store: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(store, identity(), slice(0, 5))
    _, out = explained(tmp_path, capsys, "--json")
    (document,) = json.loads(out)
    (one,) = document["identities"]
    assert (document["tokens"], one["pool"], one["leading_pages"], one["restorable_tokens"]) == (330, "kv", 5, 80)
    assert [len(page["places"]) for page in one["pages"]] == [1] * 5 + [0] * 15
    assert one["pages"][0]["hash"] == page_hashes(TOKENS, PAGE)[0].hex()
    assert one["reason"].startswith("never written")


def test_a_short_prompt_and_a_salt(store: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(store, identity(), slice(None))
    code, out = explained(tmp_path, capsys, tokens=TOKENS[:100])
    assert code == 0
    assert "SGLang asks storage for 256 tokens or more (prefetch_threshold): this is shorter" in out
    code, out = explained(tmp_path, capsys, "--cache-salt", "tenant")
    assert code == 1
    assert "none of 20 pages in any tier" in out


def test_a_pool_that_is_down_is_named_and_the_rest_is_told(
    store: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(store, identity(), slice(0, 5))
    code, out = explained(tmp_path, capsys, pool={"type": "redis", "url": "redis://127.0.0.1:1"})
    assert code == 1
    assert "disk: 5 of 20 pages" in out
    assert "not asked: pool: " in out
    assert "is missing: no tier that could be asked has it" in out


def test_a_directory_that_nobody_used_is_told_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = tmp_path / "tokens.json"
    prompt.write_text("[1, 2, 3]")
    assert main(["explain", str(configuration(tmp_path)), "--tokens", str(prompt)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("no tier knows an identity; a server with this configuration writes them")
    assert not (tmp_path / "l3").exists()


def test_a_pool_that_servers_can_do_without_is_named_when_it_is_down(
    store: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(store, identity(), slice(0, 12))
    pool = {"type": "redis", "url": f"redis://127.0.0.1:{free_port()}", "required": False, "timeout": "300ms"}
    code, out = explained(tmp_path, capsys, pool=pool)
    assert code == 1
    assert "not asked: pool: " in out
    assert "missing: no tier that could be asked has it" in out


@pytest.mark.parametrize(
    ("threshold", "tokens", "pages", "said"),
    [
        (None, 330, 20, "320 tokens can be restored, of 320 in whole pages\n"),
        (1024, 330, 20, "320 tokens can be restored, of 320 in whole pages; SGLang takes 1024 or more"),
        (None, 320, 12, "192 tokens can be restored, of 320 in whole pages; SGLang takes 256 or more"),
        (64, 192, 12, "176 tokens can be restored, of 192 in whole pages\n"),
        (0, 32, 2, "16 tokens can be restored, of 32 in whole pages\n"),
    ],
)
def test_only_what_sglang_takes_can_be_restored(
    store: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    threshold: int | None,
    tokens: int,
    pages: int,
    said: str,
) -> None:
    write(store, identity(), slice(0, pages))
    file = configuration(tmp_path)
    if threshold is not None:
        file.write_text(json.dumps({**json.loads(file.read_text()), "prefetch_threshold": threshold}))
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS[:tokens]))
    main(["explain", str(file), "--tokens", str(tmp_path / "tokens.json")])
    out = capsys.readouterr().out
    assert said in out
    assert ("this is shorter" in out) is (tokens < (256 if threshold is None else threshold))


def test_for_a_node_that_reads_nothing_the_tiers_are_asked_that_it_writes_to(
    store: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(store, identity(), slice(None))
    file = configuration(tmp_path)
    document = json.loads(file.read_text())
    document["hicache_ext"] |= {"role": "decode", "retrieve_locations": [], "store_locations": ["disk"]}
    file.write_text(json.dumps(document))
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS))
    assert main(["explain", str(file), "--tokens", str(tmp_path / "tokens.json")]) == 0
    assert "disk: 20 of 20 pages" in capsys.readouterr().out
