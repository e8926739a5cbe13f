"""Compiled code is loaded from where it is kept, and compiled by another process where it is not: never by this one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import hicache_ext
from hicache_ext.page import batch_code
from hicache_ext.runtime import compiled_part, jit
from hicache_ext.storage.tiers.file.slab import loading
from hicache_ext.storage.tiers.file.slab.compiled_code import CompiledCode
from hicache_ext.storage.tiers.file.slab.loading import wait_for_compiled_code

pytestmark = pytest.mark.skipif(wait_for_compiled_code() is None, reason="numba, or what it compiles for, is not there")

PLACE = f"{loading.__name__}:part"
PACKAGE = Path(hicache_ext.__file__).parent
STRANGER = 54321
NOTHING_IN_THE_PACKAGE = """
from hicache_ext.runtime import code_cache
code_cache._PACKAGE = Path("/proc/nowhere")
"""

USE_TWO_STORES = """
import json, logging, sys
from pathlib import Path

said = []
handler = logging.Handler()
handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
logging.getLogger("hicache_ext").addHandler(handler)
logging.getLogger("hicache_ext").setLevel(logging.INFO)
{first}
compilations = []
try:
    from numba.core import event
except ImportError:
    pass
else:
    class Compilations(event.Listener):
        def on_start(self, event):
            compilations.append(str(event))

        def on_end(self, event):
            pass

    event.register("numba:compile", Compilations())

from hicache_ext.storage.tiers.file.slab.loading import compiled_code, wait_for_compiled_code, why_not_compiled
from hicache_ext.storage.tiers.file.slab.store import SlabStore
from hicache_ext.testing.conformance.pages import assert_hits, page_keys, store_pages

at_once = None
for name in ("one", "other"):
    store = SlabStore("disk", Path(sys.argv[1]) / name, capacity=64 << 20)
    if at_once is None:
        at_once = "compiled" if compiled_code() else why_not_compiled().reason
    assert all(result.durable for result in store_pages(store, page_keys(30), [1000, 7192]))
    assert_hits(store, page_keys(30), [1000, 7192])
    store.close()
way = "compiled" if wait_for_compiled_code() else "python"
print(json.dumps(dict(at_once=at_once, way=way, said=said, compilations=compilations)))
"""


class Used:
    """What a process said that used two stores."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.at_once: str = report["at_once"]
        self.way: str = report["way"]
        self.said: list[tuple[str, str]] = [(level, line) for level, line in report["said"]]
        self.compilations: list[str] = report["compilations"]

    def lines(self, words: str) -> list[tuple[str, str]]:
        return [(level, line) for level, line in self.said if words in line]

    @property
    def warnings(self) -> list[str]:
        return [line for level, line in self.said if level == "WARNING"]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every account may write."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o777)
    yield directory
    shutil.rmtree(directory)


def use_two_stores(place: Path, first: str = "", before: Sequence[str] = (), **environment: str) -> Used:
    """In a process of its own, behind the command ``before``, that finds no compiled code in the package."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA")}
    nowhere = "/proc/nowhere"
    done = subprocess.run(
        [*before, sys.executable, "-c", USE_TWO_STORES.format(first=NOTHING_IN_THE_PACKAGE + first), str(place)],
        env={
            **known,
            "PYTHONPATH": str(PACKAGE.parent),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": nowhere,
            "XDG_CACHE_HOME": nowhere,
            **environment,
        },
        cwd=place,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return Used(json.loads(done.stdout.splitlines()[-1]))


def as_a_stranger() -> list[str]:
    """What to put before a command, so that it runs in an account of its own, which can read as root does (the tests'
    Python may be root's) and write only what is everybody's."""
    reading = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    words = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups", *reading]
    if os.geteuid() or shutil.which("setpriv") is None:
        pytest.skip("missing: root and setpriv")
    return words


def mounted(*options: str) -> list[str]:
    """What to put before a command, so that it has its own mount."""
    words = ["unshare", "--mount", "--propagation", "private"]
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("missing: the right to make mount namespaces")
    return [*words, "sh", "-c", f'{"; ".join(options)}; exec "$@"', "sh"]


def kept_in(directory: Path) -> Path:
    """Put the compiled code of this version there."""
    functions, _ = loading.part.cache().find()
    assert functions is not None
    directory.mkdir(exist_ok=True)
    loading.part.cache().keep(functions, directory)
    (file,) = directory.iterdir()
    return file


# -- no place to keep it -----------------------------------------------------------------------------------------------


def below_a_file(place: Path) -> dict[str, Any]:
    # Nobody can make a directory below a file, not even root.
    (place / "file").touch()
    return {"NUMBA_CACHE_DIR": str(place / "file" / "cache")}


def without_a_home(place: Path) -> dict[str, Any]:
    return {}


def of_a_stranger(place: Path) -> dict[str, Any]:
    (place / "cache").mkdir(mode=0o755)
    return {"NUMBA_CACHE_DIR": str(place / "cache"), "before": as_a_stranger()}


def on_a_read_only_mount(place: Path) -> dict[str, Any]:
    cache = place / "cache"
    cache.mkdir()
    before = mounted(f"mount --bind {cache} {cache}", f"mount -o remount,bind,ro {cache}")
    return {"NUMBA_CACHE_DIR": str(cache), "before": before}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arrange", "reason"),
    [
        (below_a_file, "/file/cache: Not a directory"),
        (without_a_home, "/proc/nowhere/hicache_ext: No such file or directory"),
        (of_a_stranger, "/cache: Permission denied"),
        (on_a_read_only_mount, "/cache: Read-only file system"),
    ],
)
def test_where_compiled_code_cannot_be_kept_python_works_at_once_and_one_warning_names_the_setting(
    place: Path, arrange: Callable[[Path], dict[str, Any]], reason: str
) -> None:
    no_process = "import subprocess; subprocess.run = None"
    used = use_two_stores(place, first=no_process, **arrange(place))
    (warning,) = used.warnings
    assert "moves its pages in Python" in warning
    assert reason in warning
    assert "set NUMBA_CACHE_DIR to a writable directory that lasts" in warning
    assert used.at_once.startswith("there is no place to keep compiled code")
    assert (used.way, used.compilations) == ("python", [])


@pytest.mark.thorough
def test_a_stored_result_is_loaded_where_nothing_can_be_written(place: Path) -> None:
    """As from an image: filled when it was built, by root."""
    cache = place / "cache"
    kept_in(cache)
    before = mounted(f"mount --bind {cache} {cache}", f"mount -o remount,bind,ro {cache}")
    used = use_two_stores(place, before=before, NUMBA_CACHE_DIR=str(cache))
    assert (used.way, used.at_once, used.warnings, used.compilations) == ("compiled", "compiled", [], [])


@pytest.mark.thorough
def test_what_root_compiled_is_loaded_by_another_account(place: Path) -> None:
    kept_in(place / "cache")
    used = use_two_stores(place, before=as_a_stranger(), NUMBA_CACHE_DIR=str(place / "cache"))
    assert (used.way, used.warnings, used.compilations) == ("compiled", [], [])


def test_what_another_account_wrote_is_not_loaded_and_a_warning_says_so(place: Path) -> None:
    if os.geteuid():
        pytest.skip("missing: root, who gives files away")
    file = kept_in(place / "cache")
    os.chown(file, STRANGER, -1)
    cache = place / "cache"
    before = mounted(f"mount --bind {cache} {cache}", f"mount -o remount,bind,ro {cache}")
    used = use_two_stores(place, before=before, NUMBA_CACHE_DIR=str(cache))
    assert used.way == "python"
    refused, in_python = used.warnings
    assert f"compiled code is not used from {file}: it belongs to account {STRANGER}" in refused
    assert "moves its pages in Python" in in_python


# -- no compiler -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "environment", "why"),
    [
        pytest.param("sys.modules['numba'] = None", {}, "numba", id="no numba"),
        pytest.param("sys.modules['llvmlite'] = None", {}, "llvmlite", id="numba that does not work"),
        pytest.param("", {"NUMBA_DISABLE_JIT": "1"}, "NUMBA_DISABLE_JIT", id="a compiler that is switched off"),
        pytest.param("import xxhash; xxhash._xxhash.__file__ = 'no.so'", {}, "no.so", id="an xxhash without code"),
    ],
)
def test_a_store_without_compiled_code_works_and_says_once_why(
    place: Path, first: str, environment: dict[str, str], why: str
) -> None:
    kept_in(place / "cache")
    used = use_two_stores(place, first, NUMBA_CACHE_DIR=str(place / "cache"), **environment)
    assert used.way == "python"
    ((level, line),) = used.lines("moves its pages in Python")
    assert level == "INFO"
    assert why in line
    assert "pip install" in line


# -- compiling ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.slow
def test_a_store_is_there_at_once_while_its_code_is_compiled_by_another_process(place: Path) -> None:
    """SGLang's scheduler opens tiers."""
    cache = str(place / "cache")
    first = use_two_stores(place, NUMBA_CACHE_DIR=cache)
    assert first.at_once == "it is being compiled, once per version and processor"
    assert (first.way, first.compilations, first.warnings) == ("compiled", [], [])
    (_, before), (_, after) = first.lines("the file tier's code")
    assert f"is compiled, once per version and processor: 10 to 20 s, at most 300; kept in {cache}" in before
    assert "was compiled in " in after
    second = use_two_stores(place, NUMBA_CACHE_DIR=cache)
    assert (second.at_once, second.compilations, second.lines("the file tier's code")) == ("compiled", [], [])


@pytest.mark.thorough
@pytest.mark.slow
def test_code_that_was_damaged_is_compiled_anew(place: Path) -> None:
    file = kept_in(place / "cache")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    used = use_two_stores(place, NUMBA_CACHE_DIR=str(place / "cache"))
    assert used.way == "compiled"
    assert used.warnings == [f"compiled code is not used from {file}: it is damaged"]
    assert used.compilations == []
    assert len(file.read_bytes()) > len(whole) // 2


@pytest.mark.thorough
@pytest.mark.slow
def test_a_disk_that_is_full_when_the_code_was_compiled_leaves_python_and_a_warning(place: Path) -> None:
    cache = place / "cache"
    cache.mkdir()
    before = mounted(f"mount -t tmpfs -o size=64k none {cache}")
    used = use_two_stores(place, before=before, NUMBA_CACHE_DIR=str(cache))
    (warning,) = used.warnings
    assert "No space left on device" in warning
    assert "set NUMBA_CACHE_DIR" in warning
    assert (used.way, used.compilations) == ("python", [])


@pytest.mark.thorough
@pytest.mark.slow
def test_a_module_beside_the_servers_script_is_not_taken_for_one_of_pythons_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "encodings.py").write_text("raise ImportError('not that of Python')")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "cache").mkdir()
    assert compiled_part._compile_in_another_process(PLACE, tmp_path / "cache") is None
    assert len(list((tmp_path / "cache").iterdir())) == 1


def _answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    """Have the compiling process be this script of the shell."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(compiler))


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exit 0", None),
        ("echo first >&2; echo 'OSError: no room' >&2; exit 1", "OSError: no room"),
        ("kill -KILL $$", f"the compiler ended with {-signal.SIGKILL}"),
    ],
)
def test_how_the_compiler_ended_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, problem: str | None
) -> None:
    _answer(monkeypatch, tmp_path, script)
    assert compiled_part._compile_in_another_process(PLACE, tmp_path) == problem


def test_a_compiler_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _answer(monkeypatch, tmp_path, "exec sleep 600")
    monkeypatch.setattr(compiled_part, "LONGEST_COMPILATION", 0.2)
    assert compiled_part._compile_in_another_process(PLACE, tmp_path) == "it was not done after 0 s"


def test_of_processes_that_start_at_the_same_time_one_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[dict[str, bytes]] = []
    compilers: list[str] = []

    class Cache:
        def find(self) -> tuple[dict[str, bytes] | None, tuple[str, ...]]:
            return (kept[0] if kept else None), ()

    def compile_it(part: str, place: Path, lock: int | None) -> None:
        assert lock is not None
        compilers.append(part)
        time.sleep(0.3)
        kept.append({})

    monkeypatch.setattr(compiled_part, "_compile_in_another_process", compile_it)
    used: list[object] = []
    parts = [compiled_part.CompiledPart("file", PLACE, object, used.append) for _ in range(4)]
    cache: Any = Cache()
    threads = [threading.Thread(target=part._compile, args=(cache, tmp_path)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(compilers), len(used)) == (1, 4)


def test_a_compiler_whose_server_was_killed_still_compiles_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_part, "LONGEST_COMPILATION", 0.3)
    with compiled_part._alone(tmp_path) as lock:
        assert lock is not None
        compiler = subprocess.Popen(["sleep", "60"], pass_fds=(lock,))
    try:
        # It is waited for, and not for ever.
        with compiled_part._alone(tmp_path) as other:
            assert other is None
    finally:
        compiler.kill()
        compiler.wait()
    with compiled_part._alone(tmp_path) as other:
        assert other is not None


# -- in this process ---------------------------------------------------------------------------------------------------


@pytest.fixture
def not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not loaded anything yet."""
    fresh = compiled_part.CompiledPart("file", PLACE, CompiledCode, lambda code: None)
    monkeypatch.setattr(loading, "part", fresh)


@pytest.mark.usefixtures("not_begun")
def test_threads_that_need_it_at_the_same_time_have_one_code() -> None:
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(wait_for_compiled_code())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in found
    assert len(set(found)) == 1


def test_what_is_missing_is_not_compiled() -> None:
    functions, _ = loading.part.cache().find()
    assert functions is not None
    missing = f"{batch_code.__name__}.number_pages"
    without = {name: content for name, content in functions.items() if name != missing}
    with jit.loading_from(without), pytest.raises(KeyError, match=missing):
        CompiledCode()


def test_outside_of_loading_nothing_is_compiled() -> None:
    with pytest.raises(ImportError, match="is to be loaded"):
        CompiledCode()
