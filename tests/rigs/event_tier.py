"""A file tier that processes write, evict from, clear and are killed in, beside one that publishes what changes."""

from __future__ import annotations

import os
import random
import time
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.page.envelope import IDENTITY_LENGTH
from hicache_ext.storage.tiers.file.inspection import open_editor, open_inspector
from hicache_ext.storage.tiers.file.multipath import SpreadStore
from hicache_ext.storage.tiers.file.opening import open_file_tier
from hicache_ext.testing.conformance.pages import IDENTITY, OTHER_IDENTITY, page_keys, read_pages, store_pages
from tests.rigs.kv_events import block_of

PAGE = 16 << 10
CAPACITY = 4 << 20
KEYS = [*page_keys(400), *page_keys(100, identity=OTHER_IDENTITY)]
"""Twice as many as there is room for: every writer evicts."""


def open_tier(layout: str, place: str | Path) -> SpreadStore:
    disk = {"type": "file", "path": str(place), "capacity": CAPACITY, "layout": layout, "io": "buffered", "threads": 2}
    return open_file_tier("disk", load_config(ExtraConfig.around({"tiers": {"disk": disk}})).tiers["disk"])


def blocks_listed(place: Path) -> set[int]:
    """What ``hicache-ext ls`` counts of one identity."""
    pages = open_inspector(place).pages()
    return {block_of(page.key) for page in pages if page.key[:IDENTITY_LENGTH] == IDENTITY}


def act(store: SpreadStore, place: Path, chance: random.Random) -> str:
    """One random operation; its name."""
    keys = chance.sample(KEYS, chance.randint(1, 24))
    what = chance.choices(["set", "get", "remove", "damage", "clear", "tool"], [60, 20, 10, 6, 3, 1])[0]
    if what == "set":
        store_pages(store, keys, [PAGE])
    elif what == "get":
        read_pages(store, keys, [PAGE])
    elif what == "remove":
        store.remove(keys)
    elif what == "damage":
        # What is found bad is removed.
        _damage(place, chance)
        read_pages(store, KEYS, [PAGE])
    elif what == "clear":
        store.clear([chance.choice([IDENTITY, OTHER_IDENTITY])])
    else:
        with closing(open_editor(place)) as editor:
            editor.clean_up()
            editor.remove(keys)
    return what


def _damage(place: Path, chance: random.Random) -> None:
    """Turn over bytes in a few slots, files of pages or packs, whatever is there."""
    # Not by rglob: directories are being cleared.
    files = [Path(folder, name) for folder, _, names in os.walk(place) for name in names]
    slabs, pages = (
        [file for file in sorted(files) if file.suffix in kinds] for kinds in ({".slab"}, {".page", ".pack"})
    )
    for file in slabs or chance.sample(pages, min(4, len(pages))):
        with suppress(FileNotFoundError), file.open("r+b") as opened:
            for slot in chance.sample(range(CAPACITY // PAGE), 24) if slabs else [0]:
                opened.seek(min(slot * PAGE + 1000, file.stat().st_size - 8))
                opened.write(chance.randbytes(8))


def write_until_killed(channel: Connection, layout: str, place: str, seed: int) -> None:
    """Sets and removes pages all the time."""
    chance = random.Random(seed)
    with closing(open_tier(layout, place)) as store:
        channel.send("open")
        while True:
            store_pages(store, chance.sample(KEYS, 24), [PAGE])
            if chance.random() < 0.2:
                store.remove(chance.sample(KEYS, 8))
            time.sleep(0.002)
