"""Bytes flipped all over a tier: one recomputation heals a chain, however many pages lie behind the first bad one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache_ext.testing.conformance.storage_backend import PAGE_SIZE, page_keys
from hicache_ext.testing.host_pools import mha_pools, page_indices

pytestmark = pytest.mark.sglang

PAGES = 640
CHAIN = page_keys(PAGES)
BATCH = 128
"""Pages that SGLang moves with one call."""
HEADER = 128


@pytest.fixture
def pool() -> Any:
    return mha_pools(page_size=PAGE_SIZE, pages=PAGES).host


def disk(directory: Path, layout: str) -> dict[str, Any]:
    tier = {"type": "file", "path": str(directory), "capacity": "256MiB", "io": "buffered", "threads": 2}
    return {"tiers": {"disk": {**tier, "layout": layout}}}


def store(backend: Any, first: int, batch: int = BATCH) -> None:
    for begin in range(first, PAGES, batch):
        pages = range(begin, min(begin + batch, PAGES))
        assert all(backend.batch_set_v1([CHAIN[page] for page in pages], page_indices(PAGE_SIZE, list(pages))))


def restore(backend: Any) -> int:
    """The pages of the chain that SGLang gets: it asks for all of them, and reads on until a page is missing."""
    restored, promised = 0, backend.batch_exists(CHAIN)
    for begin in range(0, promised, BATCH):
        pages = range(begin, min(begin + BATCH, promised))
        got = backend.batch_get_v1([CHAIN[page] for page in pages], page_indices(PAGE_SIZE, list(pages)))
        restored += next((number for number, ok in enumerate(got) if not ok), len(got))
        if not all(got):
            break
    return restored


def request(backend: Any, pool: Any, computed: torch.Tensor) -> int:
    """How many pages come from storage; the others are computed and stored."""
    restored = restore(backend)
    pool.kv_buffer.view(torch.uint8).copy_(computed)
    store(backend, restored)
    return restored


def stored_files(directory: Path, pattern: str) -> Iterator[Path]:
    found = [path for path in directory.rglob(pattern) if path.is_file()]
    assert found, f"no {pattern} in {directory}"
    yield from found


def damage_payloads(directory: Path, layout: str, page_bytes: int) -> None:
    """One byte of each page."""
    if layout == "slab":
        for path in stored_files(directory, "*.slab"):
            with path.open("r+b") as file:
                size = path.stat().st_size
                for place in range(0, size, 4096):
                    file.seek(place)
                    (byte,) = file.read(1)
                    file.seek(place)
                    file.write(bytes([byte ^ 0x10]))
        return
    for path in stored_files(directory, "*.pack" if layout == "packs" else "*.page"):
        content = bytearray(path.read_bytes())
        for place in range(HEADER + 7, len(content), HEADER + page_bytes):
            content[place] ^= 0x10
        path.write_bytes(content)


def damage_headers(directory: Path) -> None:
    """Of every third slot, the first included: a restart does not find these pages."""
    for path in stored_files(directory, "*.headers"):
        content = bytearray(path.read_bytes())
        for place in range(20, len(content), 3 * HEADER):
            if any(content[place - 20 : place + HEADER - 20]):
                content[place] ^= 0x10
        path.write_bytes(content)


@pytest.mark.parametrize("headers", [False, True], ids=["payloads", "headers too"])
@pytest.mark.parametrize("layout", ["slab", "packs", "files"])
def test_one_recomputation_heals_a_chain_of_which_every_page_was_damaged(
    open_backend: Callable[..., Any], tmp_path: Path, pool: Any, layout: str, headers: bool
) -> None:
    if headers and layout != "slab":
        pytest.skip("the headers of page files stand in front of their payloads")
    directory = tmp_path / "disk"
    tiers = disk(directory, "slab" if layout == "slab" else "pages")
    computed = pool.kv_buffer.view(torch.uint8).clone()
    backend = open_backend(pool, tiers)
    store(backend, 0, 1 if layout == "files" else BATCH)
    assert restore(backend) == PAGES
    backend.close()
    damage_payloads(directory, layout, backend.served.bound["kv"].pages.page_bytes)
    if headers:
        damage_headers(directory)

    backend = open_backend(pool, tiers)
    assert request(backend, pool, computed) == 0

    pool.kv_buffer.view(torch.uint8).zero_()
    assert restore(backend) == PAGES
    used = PAGES * PAGE_SIZE
    assert torch.equal(pool.kv_buffer.view(torch.uint8)[:, :used], computed[:, :used])
