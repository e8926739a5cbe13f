"""A process that has a tier open and does what a campaign tells it: what crashes, hangs or raises is seen from outside.

::

    with TierProcess(log) as process:
        process.call(open_tier, {"path": ..., "capacity": ...})
        process.call(store_and_read, keys)

A call is a function of a module and its arguments; in the process it gets the :class:`Tier` in front of them. Only the
public surface of the package is used. The bytes of a page follow from its key, and so does its size: every process can
tell a wrong page.
"""

from __future__ import annotations

import faulthandler
import functools
import logging
import multiprocessing
import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from hicache_ext.config import ExtraConfig, load_config
from hicache_ext.storage.contract.store import GetResult, PageBatch, SetResult
from hicache_ext.storage.opening import open_tiers
from hicache_ext.storage.tiering.reload import ReloadableStore
from hicache_ext.storage.tiers.file.layouts import PACK_NAME, PAGE_NAME, SLAB_FILE
from hicache_ext.testing.conformance.pages import IDENTITY, OTHER_IDENTITY, HostPages, cut, page_key
from tests.rigs.both_transforms import document_of, numbers_of

SIZES = (16_384, 32_768, 65_536, 20_000)
"""Bytes of a page: three that fill their slots to the brim, one that does not."""
ENCODED = 32_768
"""Bytes of the pages that a codec encodes, where there is one."""
SLACK = 1 << 20
"""What the files of a tier may take beyond its capacity: what a write that is under way takes before it makes room."""
PATIENCE = 45.0
"""Seconds after which a call counts as hanging: far more than a busy machine needs."""

_PROCESSES = multiprocessing.get_context("forkserver")
"""Forked from a process that has all modules already: loading them takes longer than most live."""
_PROCESSES.set_forkserver_preload(
    ["tests.campaigns.imported_beforehand", "tests.campaigns.tier_process", "hicache_ext.cli.main"]
)

_Answer = TypeVar("_Answer")


class ProcessFailedError(Exception):
    """The process died, hung, or its call raised; the message is for a report: what it was, then lines about it."""


# -- in the process ----------------------------------------------------------------------------------------------------


@dataclass
class Tier:
    """What the functions that run in the process work on."""

    store: ReloadableStore | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Whatever a campaign keeps between its calls."""

    @property
    def opened(self) -> ReloadableStore:
        assert self.store is not None
        return self.store


def open_tier(tier: Tier, disk: Mapping[str, Any]) -> None:
    """``disk``: the keys of a file tier."""
    keys = {"type": "file", "threads": 2, **disk}
    tier.store = open_tiers(load_config(ExtraConfig.around({"tiers": {"disk": keys}})))
    for identity in (IDENTITY, OTHER_IDENTITY):
        tier.store.register_identity(identity, document_of(identity, ENCODED))


def close_tier(tier: Tier) -> None:
    tier.opened.close()
    tier.store = None


def describe(tier: Tier) -> dict[str, Any]:
    return tier.opened.tiers[0].describe().details


@functools.cache
def keys_of(identity: bytes, count: int) -> list[bytes]:
    return [page_key(number, identity) for number in range(count)]


@functools.cache
def size_of(key: bytes) -> int:
    return random.Random(key).choice(SIZES)


@functools.cache
def payload(key: bytes) -> bytes:
    return numbers_of(key, size_of(key))


def store_keys(tier: Tier, keys: Sequence[bytes]) -> list[SetResult]:
    pages = HostPages([cut(size_of(key), 3) for key in keys])
    for position, key in enumerate(keys):
        pages.write(position, payload(key))
    return tier.opened.set(PageBatch(keys, pages.buffers))


def read_keys(tier: Tier, keys: Sequence[bytes]) -> tuple[list[GetResult], int]:
    """The results, and how many hits had wrong bytes."""
    pages = HostPages([cut(size_of(key), 3) for key in keys])
    results = tier.opened.get(PageBatch(keys, pages.buffers))
    pages.assert_guards_intact()
    hits = [position for position, result in enumerate(results) if result is GetResult.HIT]
    return results, sum(pages.payload(position) != payload(keys[position]) for position in hits)


def wait_for_pages(tier: Tier, keys: Sequence[bytes], seconds: float) -> float:
    """Wait until all of ``keys`` are found (an index may be made anew in the background); how long that took."""
    begun = time.monotonic()
    while not all(tier.opened.contains(keys)) and time.monotonic() < begun + seconds:
        time.sleep(0.02)
    return time.monotonic() - begun


def problems_of_keys(tier: Tier, keys: Sequence[bytes], seconds: float = 30.0) -> Counter[str]:
    """Store and read each key, which has to work within ``seconds`` for all.

    REJECTED is an answer for a while. A page that is there from before may be refused when it is read, and then be
    written again; one that was just written is read.
    """
    problems: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    for key in keys:
        while True:
            (stored,), (read,), wrong = store_keys(tier, [key]), *read_keys(tier, [key])
            if wrong:
                problems["a wrong page"] += 1
            if read is GetResult.HIT and stored in (SetResult.STORED, SetResult.EXISTS):
                break
            if stored is SetResult.STORED:
                problems[f"a poisoned key: STORED, then {read.name}"] += 1
                break
            if time.monotonic() > deadline:
                problems[f"a key that does not come to work: {stored.name}, then {read.name}"] += 1
                break
            time.sleep(0.002)
    return problems


def _serve(channel: Connection, log: str) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    faulthandler.enable()
    # Where a call hangs, the parent asks where.
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(levelname)s %(message)s", force=True)
    tier = Tier()
    while True:
        try:
            function, arguments = channel.recv()
        except EOFError:
            return
        try:
            answer = (True, function(tier, *arguments))
        except BaseException as error:  # noqa: BLE001 -- the parent reports it
            answer = (False, f"{type(error).__name__}\n{traceback.format_exc()}")
        try:
            channel.send(answer)
        except BrokenPipeError:
            return


# -- outside -----------------------------------------------------------------------------------------------------------


class TierProcess:
    """One process. Threads: one."""

    def __init__(self, log: Path) -> None:
        """``log``: a file that its log and its last words are added to."""
        self._log = log
        self._from = log.stat().st_size if log.exists() else 0
        self._channel, theirs = _PROCESSES.Pipe()
        # A daemon: nobody is left behind where the campaign ends.
        self._process = _PROCESSES.Process(target=_serve, args=(theirs, str(log)), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> TierProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def post(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have it done; ``answer`` waits for it."""
        try:
            self._channel.send((function, arguments))
        except OSError as error:
            raise self._dead() from error

    def answer(self, within: float = PATIENCE) -> Any:
        """What the call that was posted returned. Raises ProcessFailedError."""
        try:
            if not self._channel.poll(within):
                raise self._hanging(within)
            worked, answer = self._channel.recv()
        except (EOFError, OSError) as error:
            raise self._dead() from error
        if not worked:
            raise ProcessFailedError(f"a call that raises {answer}")
        return answer

    def call(self, function: Callable[..., _Answer], *arguments: Any, within: float = PATIENCE) -> _Answer:
        self.post(function, *arguments)
        answer: _Answer = self.answer(within)
        return answer

    def end(self, within: float = PATIENCE) -> None:
        """Let it end by itself, once what it does has ended. Raises ProcessFailedError."""
        self._channel.close()
        self._process.join(within)
        if self._process.exitcode is None:
            raise self._hanging(within)
        if self._process.exitcode != 0:
            raise self._dead()

    def kill(self) -> None:
        """With SIGKILL, in whatever it does."""
        self._channel.close()
        self._process.kill()
        self._process.join()

    def has_died(self) -> bool:
        return self._process.exitcode is not None

    def has_answered(self) -> bool:
        """``answer`` would not wait."""
        return self._channel.poll(0)

    def said(self, lines: int = 12) -> str:
        """The end of its log."""
        if not self._log.exists():
            return ""
        with open(self._log, "rb") as log:
            log.seek(self._from)
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])

    def _dead(self) -> ProcessFailedError:
        self._process.join(10)
        code = self._process.exitcode
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with {code}"
        return ProcessFailedError(f"a process that ended {how}\n{self.said(40)}")

    def _hanging(self, within: float) -> ProcessFailedError:
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return ProcessFailedError(f"a call that hangs\nfor {within:.0f} s\n{self.said(40)}")


def bytes_on_disk(directory: Path) -> int:
    """What the pages in ``directory`` take: the files of our names that the capacity is for, each counted once."""
    files = {}
    for root, _, names in os.walk(directory):
        for name in names:
            ours = any(kind.fullmatch(name) for kind in (PACK_NAME, PAGE_NAME, SLAB_FILE))
            if ours or Path(root).name == "tmp":
                status = os.lstat(os.path.join(root, name))
                files[status.st_ino] = status.st_blocks * 512
    return sum(files.values())


def packs_in(directory: Path) -> Counter[str]:
    """By the names that the documents give: how many "packs" a tier's directory has, and "pages" written in them."""
    found: Counter[str] = Counter()
    for file in directory.glob("pages/*/*/*.pack"):
        count, _, _ = file.name.split("-", 3)[2].partition("x")
        if count.isdecimal():
            found.update(packs=1, pages=int(count))
    return found


def pack_row(seen: Counter[str]) -> tuple[str, str]:
    """A row of a report's table."""
    return "packs seen, pages in them", f"{seen['packs']}, {seen['pages']}"


def problems_of_packs(seen: Counter[str]) -> Counter[str]:
    """A campaign whose pages are all files of their own says nothing of packs."""
    few = seen["pages"] < 2 * seen["packs"] or not seen["packs"]
    return Counter({"pages: too few packs were seen": 1} if few else {})
