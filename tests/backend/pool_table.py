"""What becomes of each host pool of each kind of model in each layout, found out by moving pages.

Run as a module (``python -m``) this file writes the table into docs/pools.md; test_pool_kinds.py compares the two.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hicache_ext.testing.conformance.storage_backend import page_keys
from hicache_ext.testing.host_pools import make_storage_config, page_indices
from hicache_ext.testing.sglang_cpu import prepare_process
from tests.rigs.host_pool_kinds import LAYOUTS, MODELS, HostPoolsByName, buffers_of, fill_pools_with_noise, page_content

DOCUMENT = Path(__file__).parents[2] / "docs" / "pools.md"
BEGIN, END = "<!-- made by tests/backend/pool_table.py -->", "<!-- end of what was made -->"

WRITTEN, READ = [5, 1, 9], [2, 3, 7]
"""Pages of a host pool: written from, and read into."""

NO_LAYOUT = "–"
IN_PLACE, COPIED, ANCHOR = "in place", "copied", "no bytes"

_outcomes: dict[tuple[str, str], dict[str, str]] = {}


def outcomes_of(model: str, layout: str) -> dict[str, str]:
    """Pool -> outcome; nothing where SGLang has no such layout. Pages went out and came back, or AssertionError."""
    if (model, layout) not in _outcomes:
        try:
            pools = MODELS[model](layout)
        except (ValueError, AssertionError) as error:
            if "layout" not in str(error):
                raise
            pools = {}
        with tempfile.TemporaryDirectory() as directory:
            _outcomes[model, layout] = _moved(Path(directory), pools) if pools else {}
    return _outcomes[model, layout]


def _moved(directory: Path, pools: HostPoolsByName) -> dict[str, str]:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    from hicache_ext.sglang.backend import HiCacheExtBackend
    from hicache_ext.sglang.host_pool import CopiedPages
    from tests.backend.test_conformance import extra_config

    def transfers(pages: list[int]) -> list[Any]:
        beside = [(name, host) for name, host in pools.items() if name != "kv"]
        return [
            PoolTransfer(PoolName(name), host_indices=page_indices(host.page_size, pages), keys=keys)
            for name, host in beside
        ]

    def well(answers: dict[Any, list[bool]]) -> bool:
        return answers == {PoolName(name): [True] * len(keys) for name in pools if name != "kv"}

    fill_pools_with_noise(pools)
    keys, anchor = page_keys(len(WRITTEN)), pools["kv"]
    config = make_storage_config(extra_config=extra_config(directory / "l3", kv_dtype="fp8_e4m3"))
    backend = HiCacheExtBackend(config, {})
    try:
        backend.register_mem_pool_host(anchor)
        for name, host in pools.items():
            backend.register_mem_host_pool_v2(host, PoolName(name))
        backend.on_host_pools_registered()
        before = {name: [page_content(host, page) for page in WRITTEN] for name, host in pools.items()}
        # As SGLang's backup thread: the pools beside the first come before it.
        assert well(backend.batch_set_v2(transfers(WRITTEN)))
        assert backend.batch_set_v1(keys, page_indices(anchor.page_size, WRITTEN)) == [True] * len(keys)
        found = backend.batch_exists_v2(keys, transfers(WRITTEN))
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [1, 2, 3])
        for host in pools.values():
            for buffer in buffers_of(host):
                buffer.zero_()
        assert backend.batch_get_v1(keys, page_indices(anchor.page_size, READ)) == [True] * len(keys)
        assert well(backend.batch_get_v2(transfers(READ)))
        for name, host in pools.items():
            assert [page_content(host, page) for page in READ] == before[name], name
            for page in range(host.size // host.page_size):
                assert page in READ or not any(page_content(host, page)), f"page {page} of {name} was touched"
        bound = backend.served.bound
        kinds = {name: bound[name].pages for name in pools}
        return {
            name: ANCHOR if pages is None else COPIED if isinstance(pages, CopiedPages) else IN_PLACE
            for name, pages in kinds.items()
        }
    finally:
        backend.close()


def table() -> str:
    """The table, in Markdown."""
    lines = [f"| model | pool | {' | '.join(LAYOUTS)} |", f"|---|---|{'---|' * len(LAYOUTS)}"]
    for model in MODELS:
        by_layout = {layout: outcomes_of(model, layout) for layout in LAYOUTS}
        alike: dict[tuple[str, ...], list[str]] = {}
        for name in next(outcomes for outcomes in by_layout.values() if outcomes):
            alike.setdefault(tuple(by_layout[layout].get(name, NO_LAYOUT) for layout in LAYOUTS), []).append(name)
        for cells, names in alike.items():
            lines.append(f"| {model} | {', '.join(names)} | {' | '.join(cells)} |")
            model = ""
    return "\n".join(lines)


def in_document() -> str:
    return DOCUMENT.read_text().split(BEGIN)[1].split(END)[0].strip()


if __name__ == "__main__":
    prepare_process()
    head, rest = DOCUMENT.read_text().split(BEGIN)
    DOCUMENT.write_text(f"{head}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}")
