"""docs/troubleshooting.md, which command answers: each state is made, the command is run, its answer has the words."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache_ext.cli.main import main
from hicache_ext.config.model import ExtraConfig
from hicache_ext.page.hashes import page_hashes
from hicache_ext.page.identity import KV_POOL, ModelIdentity, PageIdentity, PoolIdentity, Shard
from hicache_ext.storage.serving.control import DIRECTORY_VARIABLE
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.pins import add_pin
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import store_pages
from hicache_ext.testing.server import free_port
from tests.docs.documented_commands import ROOT
from tests.rigs.container import Program
from tests.rigs.metrics_page import metrics_page
from tests.storage.raw_access import RawSlots

PAGE, SIZE, CAPACITY = 16, 64 << 10, 16 << 20
TOKENS = list(range(500, 500 + 330))
HASHES = page_hashes(TOKENS, PAGE)
_TEXT = (ROOT / "docs" / "troubleshooting.md").read_text().partition("\n## The answers in full\n")[0]
ROWS = re.findall(r"^\| (.*?) \| `hicache-ext (.*?)` \| `(.*?)` \|(?: .* \|)?$", _TEXT, re.MULTILINE)
"""What is seen, the command, words of its answer."""


@dataclass
class Place:
    """Where a state is made."""

    path: Path
    stack: ExitStack
    monkeypatch: pytest.MonkeyPatch
    url: str = ""

    def configure(self, **changes: Any) -> None:
        """A file tier at ``kv``; with a ``type`` another one in its place."""
        disk = {"type": "file", "path": str(self.path / "kv"), "capacity": CAPACITY, "layout": "slab"}
        tier = changes if "type" in changes else {**disk, **changes}
        (self.path / "hicache.yaml").write_text(yaml.safe_dump(ExtraConfig.around({"tiers": {"pool": tier}})))

    def write(self, *identities: PageIdentity, kind: Any = SlabStore, pages: int = 20) -> None:
        """All pages of the prompt under each identity, ``pages`` of them under the last."""
        store = kind("pool", self.path / "kv", capacity=CAPACITY)
        for number, one in enumerate(identities):
            store.register_identity(one.digest(), one.document())
            hashes = HASHES[:pages] if number == len(identities) - 1 else HASHES
            store_pages(store, [one.digest() + page for page in hashes], (SIZE,))
        store.close()

    def metrics(self, *lines: str) -> None:
        first = 'hicache_ext_get_total{tier="pool",tp_rank="0",reason="hit"} 1'
        self.url = self.stack.enter_context(metrics_page("\n".join([first, *lines, ""])))


def identity(model: str = "some/model", dtype: str = "bfloat16") -> PageIdentity:
    pool = PoolIdentity(KV_POOL, "mha", dtype, "page_first", PAGE, (SIZE,))
    return PageIdentity(ModelIdentity(model), pool, Shard())


def _counted(event: str, reason: str, count: int) -> Callable[[Place], None]:
    line = f'hicache_ext_{event}_total{{tier="pool",tp_rank="0",reason="{reason}"}} {count}'
    return lambda place: place.metrics(line)


def _two_models(place: Place) -> None:
    place.configure()
    place.write(identity("/models/a"), identity("/srv/a"))


def _two_dtypes(place: Place) -> None:
    place.configure()
    place.write(identity(), identity(dtype="float16"), pages=2)


def _broken_path(place: Place) -> None:
    (place.path / "a file").write_text("")
    place.configure(path=[str(place.path / "kv"), str(place.path / "a file" / "kv")])


def _stopped(place: Place) -> None:
    place.configure()
    code = """
import sys
from pathlib import Path
from hicache_ext.storage.tiers.file.slab.store import SlabStore
store = SlabStore("pool", Path(sys.argv[1]), capacity=16 << 20)
print("open", flush=True)
sys.stdin.readline()
"""
    holder = place.stack.enter_context(Program(code, place.path / "kv"))
    assert holder.line() == "open"
    place.stack.enter_context(holder.stopped())


def _dead_pool(place: Place) -> None:
    place.configure(type="redis", url=f"redis://127.0.0.1:{free_port()}", required=False)


def _direct_page_files(place: Place) -> None:
    place.configure(layout="auto", io="direct")
    place.write(identity(), kind=PageFileStore)


def _pin(place: Place, *, written: bool) -> None:
    place.configure()
    place.write(identity()) if written else place.write()
    add_pin(place.path / "kv", "prompt", HASHES, None)


def _other_plugins(place: Place) -> None:
    place.monkeypatch.setenv("SGLANG_PLUGINS", "another_plugin")
    place.configure()


def _pages(place: Place) -> None:
    place.configure()
    place.write(identity())


def _five_pages(place: Place) -> None:
    place.configure()
    place.write(identity(), pages=5)


def _evicted(place: Place) -> None:
    place.configure()
    store = place.stack.enter_context(closing(SlabStore("pool", place.path / "kv", capacity=CAPACITY)))
    one = identity()
    store.register_identity(one.digest(), one.document())
    for first in (500, *range(10_000, 16_000, 320)):
        hashes = page_hashes(range(first, first + 320), PAGE)
        store_pages(store, [one.digest() + page for page in hashes], (SIZE,))


def _no_secret(place: Place) -> None:
    place.monkeypatch.delenv("POOL_KEY", raising=False)
    place.configure(type="redis", url="redis://pool:6379", password={"env": "POOL_KEY"})


def _open_to_others(place: Place) -> None:
    _pages(place)
    (place.path / "kv").chmod(0o755)


def _damaged(place: Place) -> None:
    place.configure()
    with closing(SlabStore("pool", place.path / "kv", capacity=CAPACITY)) as store:
        keys = [identity().digest() + page for page in HASHES]
        store_pages(store, keys, (SIZE,))
        raw = RawSlots(store)
        stored = raw.read(keys[3])
        assert stored is not None
        raw.write(keys[3], stored[:-1] + bytes([stored[-1] ^ 1]))


def _moved(place: Place) -> None:
    _pages(place)
    (place.path / "kv").rename(place.path / "before")
    shutil.copytree(place.path / "before", place.path / "kv", symlinks=True)


STATES: dict[str, Callable[[Place], None]] = {
    "Why is there no hit": _five_pages,
    "It was there an hour ago": _evicted,
    "It writes but never reads": _two_dtypes,
    "Why do nodes with the same weights": _two_models,
    "Half of the prompt is there": _five_pages,
    "All of a long prompt is there": _pages,
    "Has any server ever stored": lambda place: place.configure(),
    "Is this key read": lambda place: place.configure(capcity="1GiB"),
    "Has the server the secret": _no_secret,
    "What does a tier that hangs": lambda place: place.configure(type="redis", url="redis://pool:6379", timeout=200),
    "Does the pool answer": _dead_pool,
    "Is the disk mounted": lambda place: place.configure(path="/hicache", require_mount=True),
    "Does the capacity fit": lambda place: place.configure(capacity="4000TiB"),
    "Why page files": lambda place: place.configure(layout="auto", capacity="unlimited"),
    "May others read": _open_to_others,
    "How fast is the tier": lambda place: place.configure(),
    "How full is the tier": _pages,
    "Are stored pages damaged": _damaged,
    "Was a tier moved": _moved,
    "A pinned prompt is recomputed": lambda place: _pin(place, written=False),
    "What is there of a model": _pages,
    "Why does `hicache-ext reload`": lambda place: place.configure(),
    "nothing is stored": lambda place: place.metrics('hicache_ext_serving{tp_rank="0"} 0'),
    '"was bad (checksum)': _counted("corrupt", "checksum", 3),
    '"pages arrived damaged': _counted("suspect", "good", 2),
    '"no space left"': lambda place: place.metrics(
        f'hicache_ext_no_space_since_seconds{{tier="disk",tp_rank="0"}} {time.time() - 90}'
    ),
    '"tier ... is left out"': lambda place: place.metrics('hicache_ext_breaker_state{tier="pool",tp_rank="0"} 2'),
    '"path ... is out of service"': _broken_path,
    '"does not go on: stopped': _stopped,
    "\"io is 'direct'": _direct_page_files,
    '"pinned pages would take': lambda place: _pin(place, written=True),
    "the plug-in is not in force": _other_plugins,
    '"going on without it': _dead_pool,
}
"""The beginning of a row -> what makes it so."""


def test_every_row_has_its_state_here_and_every_state_its_row() -> None:
    assert [next((state for state in STATES if seen.startswith(state)), seen) for seen, _, _ in ROWS] == list(STATES)


@pytest.mark.parametrize(("seen", "command", "words"), ROWS, ids=[seen[:40] for seen, _, _ in ROWS])
def test_the_command_says_it(
    seen: str,
    command: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "run"))
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS))
    with ExitStack() as stack:
        place = Place(tmp_path, stack, monkeypatch)
        next(make for state, make in STATES.items() if seen.startswith(state))(place)
        main([{"URL": place.url, "PATH": "kv"}.get(word, word) for word in shlex.split(command)])
    printed = capsys.readouterr()
    assert words in " ".join((printed.out + printed.err).split())


def test_what_a_real_server_alone_shows_names_tests_that_exist() -> None:
    named = re.findall(r"^\| .* \| `(tests/\S+\.py)` \|$", _TEXT, re.MULTILINE)
    assert named and all((ROOT / one).is_file() for one in named)
