"""A user's place for commands: a configuration, pages, a pin, prompts, figures; a stand-in for a server's metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache_ext.config import ExtraConfig
from hicache_ext.page.hashes import page_hashes
from hicache_ext.page.identity import ModelIdentity, PageIdentity, PoolIdentity, Shard
from hicache_ext.storage.serving.control import DIRECTORY_VARIABLE
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.pins import add_pin
from hicache_ext.testing.conformance.pages import store_pages
from tests.rigs.metrics_page import metrics_page
from tests.storage.raw_access import RawFiles

TOKENS = [(7 * position) % 250 for position in range(100)]
PAGE_SIZE = 16
METRICS = """\
hicache_ext_get_total{tier="nvme",tp_rank="0",reason="hit"} 12
hicache_ext_get_total{tier="nvme",tp_rank="0",reason="miss"} 3
hicache_ext_capacity_bytes{tier="nvme",tp_rank="0"} 1073741824
hicache_ext_hit_share_at_capacity{tier="nvme",tp_rank="0"} 0.25
hicache_ext_serving{tp_rank="0"} 1
hicache_ext_pull_total{tier="pull",reason="pulled"} 3
sglang:prompt_tokens_total{model_name="m"} 100
sglang:cached_tokens_total{cache_source="storage",model_name="m"} 40
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration, pages with a bad one among them, a pin, prompts; nothing of the machine's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiers = {
        name: {"type": "file", "path": str(tmp_path / name), "capacity": "64MiB", "layout": "pages"}
        for name in ("nvme", "pool")
    }
    section = {"role": "auto", "tiers": tiers, "promote_to": "nvme", "roles": {"prefill": {}}}
    (tmp_path / "hicache.yaml").write_text(yaml.safe_dump(ExtraConfig.around(section), sort_keys=False))
    (tmp_path / "wrong.yaml").write_text("backend_name: hicache_ext\nhicache_ext: {rolle: both}\n")
    pool = PoolIdentity("kv", "MHATokenToKVPoolHost", "bfloat16", "page_first", PAGE_SIZE, (700, 324))
    identity = PageIdentity(ModelIdentity("example/model"), pool, Shard())
    PageFileStore("nvme", tmp_path / "nvme", capacity=None).close()
    store = PageFileStore("pool", tmp_path / "pool", capacity=None)
    store.register_identity(identity.digest(), identity.document())
    keys = [identity.digest() + page for page in page_hashes(TOKENS, PAGE_SIZE)]
    store_pages(store, keys, pool.segments)
    store.close()
    raw = RawFiles(tmp_path / "pool")
    raw.write(keys[-1], raw.read(keys[-1])[:-1] + b"\xff")
    add_pin(tmp_path / "pool", "prompt", page_hashes(TOKENS, PAGE_SIZE)[:2], None)
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS + TOKENS))
    for name, rate, contender in (("a", 100.0, "x"), ("b", 80.0, "y")):
        entries = [_entry("slab", rate), _entry(contender, rate)]
        facts = {"benchmark": "file", "date": name, "machine": {"cpus": 2}, "results": entries}
        (tmp_path / f"{name}.json").write_text(json.dumps(facts))
    return tmp_path


def _entry(contender: str, rate: float) -> dict[str, Any]:
    rates = {"median": rate, "lower": rate - 1, "upper": rate + 1}
    return {"mode": "write", "contender": contender, "unit": "bytes", "summary": {"rate": rates}}


@pytest.fixture
def url() -> Iterator[str]:
    with metrics_page(METRICS) as address:
        yield address
