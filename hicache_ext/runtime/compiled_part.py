"""Loads code that numba compiles (jit.py), or has it compiled: a part of it for each tier that has some.

Compiling takes 10 to 20 seconds, once per version and processor; a file keeps the result (runtime/code_cache.py), from
which it loads in half a second. No server compiles: the thread that opens a tier may be SGLang's scheduler, and a
compiler takes the GIL, memory and a core. A process of its own does, and Python moves the pages meanwhile; where there
is no place for the file, for good. Reasons: docs/decisions/compiled-code.md.
"""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from hicache_ext.packages import how_to_install
from hicache_ext.runtime import jit
from hicache_ext.runtime.background import once_in_background
from hicache_ext.runtime.code_cache import CodeCache, code_cache
from hicache_ext.runtime.file_lock import try_lock
from hicache_ext.runtime.progress import progress

logger = logging.getLogger(__name__)

LONGEST_COMPILATION = 300.0
"""Seconds."""
_LOOK_AGAIN = 0.2
"""Seconds between two looks whether another process has compiled it."""

_INSTALL = how_to_install("numba")
_SET_DIRECTORY = "set NUMBA_CACHE_DIR to a writable directory that lasts, such as a volume (docs/kubernetes.md)"


@dataclass(frozen=True, slots=True)
class NotCompiled:
    """Why Python moves the pages, and what to do."""

    reason: str
    remedy: str


_BEING_COMPILED = NotCompiled("it is being compiled, once per version and processor", "wait")


Code = TypeVar("Code")


class CompiledPart(Generic[Code]):
    """One part of the compiled code, and the state of loading it in this process. Threads: any."""

    def __init__(self, tier: str, place: str, make: Callable[[], Code], use: Callable[[Code], None]) -> None:
        """``place``: module and name of this object, where the compiling process finds it. ``make`` compiles or loads
        everything (``jit.compiled``), and raises ImportError where what it made is not what it should be; ``use`` is
        called once with what it made."""
        self._tier = tier
        self._place = place
        self._make = make
        self._use = use
        self._begun = False
        self._code: Code | None = None
        self._why_not: NotCompiled | None = _BEING_COMPILED
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def code(self) -> Code | None:
        """The compiled code; None where it is not available, and while it is compiled for the first time."""
        if not self._begun:
            with self._lock:
                if not self._begun:
                    self._begin()
                self._begun = True
        return self._code

    def wait(self) -> Code | None:
        """Waits for the compiled code, ``LONGEST_COMPILATION`` at most; None where it is not available."""
        self.code()
        self._ended.wait()
        return self._code

    def why_not(self) -> NotCompiled | None:
        """Why Python moves the pages; None where compiled code does."""
        self.code()
        return self._why_not

    def cache(self) -> CodeCache:
        """Where it is kept. Raises as ``code_cache`` does."""
        return code_cache(self._place)

    def compile_for_others(self, place: Path) -> None:
        """What the compiling process does: keep compiled code in the directory ``place``."""
        os.nice(10)
        functions: dict[str, bytes] = {}
        with jit.compiling_into(functions):
            self._make()
        self.cache().keep(functions, place)

    def _begin(self) -> None:
        try:
            cache = self.cache()
        except Exception as error:  # noqa: BLE001 - numba may fail in many ways, and pages move without it
            self._give_up(logging.INFO, _words(error), _INSTALL)
            return
        functions, refused = cache.find()
        for sentence in refused:
            logger.warning("compiled code is not used from %s", sentence)
        if functions is not None:
            self._load(functions)
            return
        place, reason = cache.place()
        if place is None:
            self._give_up(logging.WARNING, f"there is no place to keep compiled code ({reason})", _SET_DIRECTORY)
        elif not once_in_background("hicache-compile", lambda: self._compile(cache, place)):
            self._give_up(logging.WARNING, "there is no thread to compile on", "raise the limit of processes")

    def _compile(self, cache: CodeCache, place: Path) -> None:
        """Have another process compile, then load."""
        progress.info(
            "the %s tier's code is compiled, once per version and processor: 10 to 20 s, at most %.0f; kept in %s",
            self._tier,
            LONGEST_COMPILATION,
            place,
        )
        begun = time.monotonic()
        problem = None
        with _alone(place) as lock:
            # Another process may have compiled it meanwhile: many start at once.
            functions = cache.find()[0]
            if functions is None:
                problem = _compile_in_another_process(self._place, place, lock)
                functions = None if problem else cache.find()[0]
        if functions is not None:
            progress.info("the %s tier's code was compiled in %.0f s", self._tier, time.monotonic() - begun)
            self._load(functions)
        else:
            problem = problem or "what was compiled is not for this process, or may be written by other accounts"
            self._give_up(logging.WARNING, f"it could not be compiled into {place}: {problem}", _SET_DIRECTORY)

    def _load(self, functions: Mapping[str, bytes]) -> None:
        try:
            with jit.loading_from(functions):
                code = self._make()
        except Exception as error:  # noqa: BLE001 - see above
            self._give_up(logging.INFO, _words(error), _INSTALL)
            return
        self._use(code)
        self._code, self._why_not = code, None
        self._ended.set()

    def _give_up(self, level: int, reason: str, remedy: str) -> None:
        self._why_not = NotCompiled(reason, remedy)
        self._ended.set()
        logger.log(
            level,
            "the %s tier moves its pages in Python, which is slower and holds the GIL: %s; %s",
            self._tier,
            reason,
            remedy,
        )


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"


@contextmanager
def _alone(place: Path) -> Iterator[int | None]:
    """While nobody else compiles for the directory ``place``, whose lock this is; None where nothing can be locked,
    or the wait for it was too long."""
    try:
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield fd if _locked(fd) else None
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    deadline = time.monotonic() + LONGEST_COMPILATION
    while time.monotonic() < deadline:
        try:
            if try_lock(fd, fcntl.LOCK_EX):
                return True
        except OSError:  # some network file systems lock no directory
            return False
        time.sleep(_LOOK_AGAIN)
    return False


def _compile_in_another_process(part: str, place: Path, lock: int | None = None) -> str | None:
    """What went wrong; None where there is compiled code in ``place`` now.

    The compiler has ``lock``, too: it goes on compiling when this process is killed.
    """
    module, _, name = part.partition(":")
    # The path of this process, set late: in PYTHONPATH a module beside the server's script would be taken for one of
    # Python's own of that name.
    program = (
        "import sys; from pathlib import Path; sys.path[:] = sys.argv[2:]; "
        f"from {module} import {name}; {name}.compile_for_others(Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", program, str(place), *map(os.path.abspath, sys.path)]
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=LONGEST_COMPILATION,
            check=False,
            pass_fds=() if lock is None else (lock,),
        )
    except subprocess.TimeoutExpired:
        return f"it was not done after {LONGEST_COMPILATION:.0f} s"
    except OSError as error:
        return str(error)
    if not ended.returncode:
        return None
    said = ended.stderr.decode(errors="replace").strip()
    return said.rpartition("\n")[2] or f"the compiler ended with {ended.returncode}"
