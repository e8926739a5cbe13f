"""The rows: one trouble each, over any contender that it can befall. Each returns the cells that it measured.

Pages are random bytes, so that a page served is right or wrong beyond doubt, and are found on the medium by content.
They are written, the writer is closed, the trouble comes, and another process reads, in batches of ``BATCH``.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.trouble.clients import LIMIT, Answer, Client
from benchmarks.trouble.contenders import PAGE_BYTES, Contender, Facts, Place
from benchmarks.trouble.media import Medium, Spot
from tests.rigs.loop_file_systems import Flush, LoopFileSystem
from tests.rigs.trouble_proxy import Trouble

BATCH = 8


@dataclass(slots=True)
class Cells:
    """What became of the pages of one row; None: not measured there."""

    wrong: int | None = None
    """Pages served with other bytes than were written for them;"""
    asked: int = 0
    """of so many that were asked for."""
    lost: int | None = None
    """Good pages that were not served;"""
    good: int = 0
    """of so many."""
    raised: int | None = None
    """Calls that raised into the caller."""
    waited: float | None = None
    """Seconds that a caller waited, the longest."""
    beyond: int | None = None
    """Bytes on the medium beyond the configured bound."""
    note: str = ""

    def entry(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


@dataclass(slots=True)
class Rig:
    """One contender before one row."""

    contender: type[Contender]
    medium: Medium
    number: int
    quick: bool
    random: random.Random
    place: Place
    cells: Cells = field(default_factory=lambda: Cells(wrong=0, raised=0))

    def client(self, facts: Facts | None = None, place: Place | None = None, *, container: bool = False) -> Client:
        return Client(self.contender.name, place or self.place, facts, container=container)

    def new_pages(self, count: int) -> dict[str, bytes]:
        return {self.random.randbytes(32).hex(): self.random.randbytes(PAGE_BYTES) for _ in range(count)}

    def written(self, count: int, place: Place | None = None) -> dict[str, bytes]:
        """New pages, written by a client that is closed, and its answers believed."""
        pages = self.new_pages(count)
        with self.client(place=place) as client:
            return self.write(client, pages)

    def write(self, client: Client, pages: dict[str, bytes]) -> dict[str, bytes]:
        """Those of the pages whose write was answered well."""
        stored: dict[str, bytes] = {}
        for keys in _batches(list(pages)):
            answer = self._counted(client.call("write", keys, [pages[key] for key in keys]))
            stored |= {key: pages[key] for key, went in zip(keys, answer.value or (), strict=False) if went}
        return stored

    def read(self, client: Client, pages: dict[str, bytes], good: Sequence[str] | None = None) -> None:
        """Ask for pages and count; ``good``: those that nothing befell (left out: none is counted as lost)."""
        served: dict[str, bytes] = {}
        for keys in _batches(list(pages)):
            answer = self._counted(client.call("read", keys))
            served |= {key: page for key, page in zip(keys, answer.value or (), strict=False) if page is not None}
            if answer.hung:
                break
        self.cells.asked += len(pages)
        self.cells.wrong = (self.cells.wrong or 0) + sum(page != pages[key] for key, page in served.items())
        if good is not None:
            self.cells.good += len(good)
            self.cells.lost = (self.cells.lost or 0) + sum(key not in served for key in good)

    def _counted(self, answer: Answer) -> Answer:
        self.cells.raised = (self.cells.raised or 0) + (answer.raised is not None)
        if self.cells.waited is not None or answer.hung:
            self.cells.waited = max(self.cells.waited or 0, LIMIT if answer.hung else answer.seconds)
        if answer.raised and not self.cells.note:
            self.cells.note = answer.raised.partition(":")[0]
        return answer


def _batches(keys: list[str]) -> Iterator[list[str]]:
    return (keys[begin : begin + BATCH] for begin in range(0, len(keys), BATCH))


def _bytes_on(place: Place) -> int:
    total = 0
    for path in Path(place.directory).rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512 if path.is_file() else 0
    return total


# -- bytes that change on the medium -----------------------------------------------------------------------------------


def _damaged(rig: Rig, share: int, damage: Callable[[Spot, bytes, Spot, bytes], None]) -> None:
    """One page in ``share`` is damaged: by where it lies and what it is, and the same of one that stays good."""
    pages = rig.written(16 if rig.quick else 64)
    spots = rig.medium.find(pages, rig.place)
    hit = rig.random.sample(sorted(spots), min(len(spots), len(pages) // share))
    other = next(key for key in spots if key not in hit)
    for key in hit:
        damage(spots[key], pages[key], spots[other], pages[other])
    rig.cells.note = "" if len(hit) == len(pages) // share else f"{len(hit)} of {len(pages)} damaged"
    with rig.client() as client:
        rig.read(client, pages, [key for key in pages if key not in hit])


def bit_flipped(rig: Rig) -> None:
    def flip(spot: Spot, page: bytes, *_: Any) -> None:
        at = rig.random.randrange(PAGE_BYTES // 4)
        spot.replace(at, bytes([page[at] ^ 1 << rig.random.randrange(8)]))

    _damaged(rig, 2, flip)


def block_of_zeros(rig: Rig) -> None:
    _damaged(rig, 2, lambda spot, *_: spot.replace(0, bytes(4096)))


def file_cut(rig: Rig) -> None:
    _damaged(rig, 8, lambda spot, *_: spot.cut(PAGE_BYTES // 4))


def other_prompts_page(rig: Rig) -> None:
    _damaged(rig, 4, lambda spot, _, other, page: spot.become(other, page))


# -- processes and disks -----------------------------------------------------------------------------------------------


def killed_while_writing(rig: Rig) -> None:
    trials = 3 if rig.quick else 30
    for _ in range(trials):
        pages = rig.new_pages(256)
        keys = list(pages)
        with rig.client() as writer:
            writer.start_writing(keys, list(pages.values()), BATCH)
            time.sleep(rig.random.uniform(0.005, 0.15))
            writer.kill()
            stored = [keys[number] for number in writer.acknowledged()]
        with rig.client() as reader:
            begun = keys[: len(stored) + 2 * BATCH]
            rig.read(reader, {key: pages[key] for key in begun}, stored)
    rig.cells.note = f"{trials} kills"


@contextmanager
def _small_disk(rig: Rig) -> Iterator[tuple[LoopFileSystem, Place]]:
    with LoopFileSystem("ext4", rig.medium.root) as disk:
        directory = disk.path / "pages"
        directory.mkdir()
        yield disk, replace(rig.place, directory=str(directory))


def disk_full(rig: Rig) -> None:
    """A disk of 128 MiB of which 24 MiB are free, and 32 MiB of pages; the contender's bound lies above both."""
    with _small_disk(rig) as (disk, place):
        free = os.statvfs(disk.path).f_bavail * os.statvfs(disk.path).f_frsize
        with open(disk.path / "filler", "wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, free - (24 << 20))
        stored = rig.written(512, place)
        rig.cells.note = rig.cells.note or f"{len(stored)} of 512 said to be stored"
        with rig.client(place=place) as client:
            rig.read(client, stored, list(stored))


def dead_device(rig: Rig) -> None:
    """The file system answers every call with EIO while a client is open; mounted again, another reads."""
    rig.cells.waited = 0.0
    with _small_disk(rig) as (disk, place):
        stored = rig.written(64, place)
        with rig.client(place=place) as client:
            disk.shut_down(Flush.EVERYTHING)
            rig.read(client, stored)
            rig.write(client, rig.new_pages(16))
        disk.remount()
        with rig.client(place=place) as client:
            rig.read(client, stored, list(stored))


def power_cut(rig: Rig) -> None:
    """The file system loses what is not on the disk while a client writes; good pages are those that a sync of it had
    brought there before."""
    trials = 2 if rig.quick else 20
    for _ in range(trials):
        with _small_disk(rig) as (disk, place):
            synced = rig.written(64, place)
            disk.sync()
            pages = rig.new_pages(256)
            with rig.client(place=place) as writer:
                writer.start_writing(list(pages), list(pages.values()), BATCH)
                time.sleep(rig.random.uniform(0.005, 0.15))
                disk.shut_down(Flush.NOTHING)
                writer.kill()
            disk.remount()
            with rig.client(place=place) as reader:
                rig.read(reader, synced | pages, list(synced))
    rig.cells.note = f"{trials} cuts"


def growth(rig: Rig) -> None:
    """32 MiB of pages under a bound of 8 MiB."""
    place = replace(rig.place, capacity=8 << 20)
    rig.written(512, place)
    rig.cells = Cells(raised=rig.cells.raised, beyond=max(0, _bytes_on(place) - place.capacity))
    rig.cells.note = "" if rig.contender.bounded else "has no bound in bytes"


def two_at_capacity(rig: Rig) -> None:
    """Two processes write 24 MiB each under the same bound of 8 MiB, and read what they wrote last."""
    place = replace(rig.place, capacity=8 << 20)
    pages = [rig.new_pages(384) for _ in range(2)]
    with rig.client(place=place) as first, rig.client(place=place) as second:
        clients = (first, second)
        stored: list[dict[str, bytes]] = [{}, {}]

        def write(which: int) -> None:
            stored[which] = rig.write(clients[which], pages[which])

        threads = [threading.Thread(target=write, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for client, mine in zip(clients, stored, strict=True):
            rig.read(client, mine)
    rig.cells.beyond = max(0, _bytes_on(place) - place.capacity)
    rig.cells.note = rig.cells.note or ("" if rig.contender.bounded else "has no bound in bytes")


def second_container(rig: Rig) -> None:
    """Two containers that see nothing of each other but the directory write 24 MiB each under the same bound of 8 MiB;
    one of them is killed meanwhile, and a third one reads."""
    place = replace(rig.place, capacity=8 << 20)
    mine, others = rig.new_pages(384), rig.new_pages(384)
    with rig.client(place=place, container=True) as first, rig.client(place=place, container=True) as second:
        second.start_writing(list(others), list(others.values()), BATCH)
        killed = threading.Timer(rig.random.uniform(0.02, 0.1), second.kill)
        killed.start()
        rig.write(first, mine)
        killed.join()
        with rig.client(place=place, container=True) as third:
            rig.write(third, rig.new_pages(128))
            rig.read(third, mine | others)
    rig.cells.beyond = max(0, _bytes_on(place) - place.capacity)
    rig.cells.note = rig.cells.note or ("" if rig.contender.bounded else "has no bound in bytes")


def clear_while_read(rig: Rig) -> None:
    stored = rig.written(64)
    with rig.client() as reader, rig.client() as other:
        cleared = threading.Timer(0.02, lambda: other.call("clear", list(stored)))
        cleared.start()
        for _ in range(2 if rig.quick else 10):
            rig.read(reader, stored)
        cleared.join()


def strange_key(rig: Rig) -> None:
    """A key with ``../`` in it."""
    outside = Path(rig.place.directory).parent / "outside"
    outside.mkdir()
    with rig.client() as client:
        client.call("write", ["../outside/page"], [rig.random.randbytes(PAGE_BYTES)])
    escaped = [path for path in outside.rglob("*") if path.is_file()]
    rig.cells = Cells(note="wrote outside its directory" if escaped else "stays inside its directory")


# -- whose pages are they ----------------------------------------------------------------------------------------------


def _before_and_after(rig: Rig, before: Facts, after: Facts, change: Callable[[], object] = lambda: None) -> None:
    """Pages under the facts of before, which another process finds; then the same prompt under those of after, whose
    right bytes are others."""
    with rig.client(before) as client:
        old = {key: rig.random.randbytes(PAGE_BYTES) for key in client.call("page_keys", 32, rig.number).value}
        stored = rig.write(client, old)
    with rig.client(before) as client:
        rig.read(client, old, list(stored))
    rig.cells.asked = 0
    change()
    with rig.client(after) as client:
        keys = client.call("page_keys", 32, rig.number).value
        # None of the old bytes is right now.
        rig.read(client, dict.fromkeys(keys, b""))


def _model(rig: Rig, seed: int = 1) -> Path:
    from tests.rigs.tiny_model import make_tiny_model

    return make_tiny_model(rig.medium.root / f"model-{rig.number}-{seed}", seed=seed)


def model_retrained(rig: Rig) -> None:
    weights, other = _model(rig), _model(rig, seed=2)

    def retrain() -> None:
        """Same name, path, size and time."""
        file = weights / "model.safetensors"
        before = file.stat()
        file.write_bytes((other / file.name).read_bytes())
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    facts = Facts(weights=str(weights))
    _before_and_after(rig, facts, facts, retrain)


def adapter_retrained(rig: Rig) -> None:
    from tests.rigs.tiny_adapter import make_tiny_adapter

    adapter = make_tiny_adapter(rig.medium.root / f"adapter-{rig.number}", seed=1)
    facts = Facts(adapter=str(adapter))
    _before_and_after(rig, facts, facts, lambda: make_tiny_adapter(adapter, seed=2))


def tensor_parallel_changed(rig: Rig) -> None:
    """TP 2 becomes TP 4 with two KV heads, each of which two ranks hold: rank 1 had the second head, now the first."""
    before = Facts(weights=str(_model(rig)), tp_rank=1, tp_size=2)
    _before_and_after(rig, before, replace(before, tp_size=4))


def other_dtype(rig: Rig) -> None:
    """``--kv-cache-dtype auto`` follows ``--dtype``: bfloat16, then float16."""
    before = Facts(weights=str(_model(rig)))
    _before_and_after(rig, before, replace(before, dtype="float16"))


# -- pools and links ---------------------------------------------------------------------------------------------------


def frozen_pool(rig: Rig) -> None:
    rig.cells.waited = 0.0
    stored = rig.written(16)
    with rig.client() as client:
        rig.medium.server.freeze()
        try:
            rig.read(client, stored)
        finally:
            rig.medium.server.thaw()


def killed_pool(rig: Rig) -> None:
    rig.cells.waited = 0.0
    stored = rig.written(16)
    with rig.client() as client:
        rig.medium.server.kill()
        try:
            rig.read(client, stored)
            rig.write(client, rig.new_pages(16))
        finally:
            rig.medium.server.start()


def slow_pool(rig: Rig) -> None:
    """Every reply a second late."""
    rig.cells.waited = 0.0
    stored = rig.written(64)
    with rig.medium.proxy() as proxy, rig.client(place=_through(rig, proxy)) as client:
        proxy.trouble = Trouble.SLOW
        rig.read(client, stored, list(stored))


def damaging_link(rig: Rig) -> None:
    """At least one bit in 2 KiB of what a reader is sent; the stored pages are good, and are read again without it."""
    stored = rig.written(64)
    with rig.medium.proxy() as proxy, rig.client(place=_through(rig, proxy)) as client:
        proxy.trouble = Trouble.FLIPPED
        rig.read(client, stored)
    with rig.client() as client:
        rig.read(client, stored, list(stored))


def _through(rig: Rig, proxy: Any) -> Place:
    return replace(rig.place, address=f"127.0.0.1:{proxy.port}")


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    run: Callable[[Rig], None]
    needs: Callable[[type[Contender], type[Medium]], str | None] = lambda contender, medium: None
    """Why it does not befall a contender."""
    quick: bool = False


def _of_directories(contender: type[Contender], medium: type[Medium]) -> str | None:
    return None if contender.medium == "directory" else "keeps no files"


def _of_pools(contender: type[Contender], medium: type[Medium]) -> str | None:
    return "has no server" if contender.medium == "directory" else None


def _of_proxies(contender: type[Contender], medium: type[Medium]) -> str | None:
    return (
        None if medium.proxied else _of_pools(contender, medium) or "not tried: pages come from ports that nobody chose"
    )


ROWS = {
    row.title: row
    for row in (
        Row("one bit flipped", bit_flipped, quick=True),
        Row("a block of zeros", block_of_zeros),
        Row("file cut", file_cut, lambda _, medium: None if medium.cuts else "keeps memory, no files", quick=True),
        Row("another prompt's page in its place", other_prompts_page, quick=True),
        Row("kill -9 while writing", killed_while_writing),
        Row("disk full", disk_full, _of_directories),
        Row("device dies (EIO)", dead_device, _of_directories),
        Row("power cut", power_cut, _of_directories),
        Row("growth beyond the bound", growth, _of_directories),
        Row("two processes at capacity", two_at_capacity, _of_directories),
        Row("a second container", second_container, _of_directories),
        Row("clear while others read", clear_while_read, lambda one, _: None if one.clears else "has no clear"),
        Row(
            "a key that a stranger chose",
            strange_key,
            lambda one, medium: _of_directories(one, medium) or (None if one.open_keys else "keys are bytes"),
        ),
        Row("model retrained in place", model_retrained),
        Row(
            "adapter retrained in place",
            adapter_retrained,
            lambda one, _: None if one.open_keys else "not tried: the engine above it makes the keys",
        ),
        Row("TP 2 to 4", tensor_parallel_changed),
        Row("other dtype under auto", other_dtype),
        Row("pool frozen", frozen_pool, _of_pools),
        Row("pool killed", killed_pool, _of_pools),
        Row("pool slow", slow_pool, _of_proxies),
        Row("link that damages", damaging_link, _of_proxies),
    )
}
