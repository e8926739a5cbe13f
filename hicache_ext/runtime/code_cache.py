"""The file in which compiled code (jit.py) is kept for later processes: one per part, version, processor and account.

numba has a cache of its own, which is not used: it passes over a directory that it cannot write, so that what was
compiled into an image is compiled again, and it runs what it finds, whoever wrote it. Here a file is

- read from wherever it is, also where nothing can be written;
- used only if this account or root owns it, and nobody else may write it;
- whole or absent, and checked before it is unpickled.

Reasons: docs/decisions/compiled-code.md.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import stat
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hicache_ext.runtime.jit import sources_digest
from hicache_ext.runtime.user_cache import user_cache

_BEGINNING = b"hicache_ext compiled 1\n"
_DIGEST = hashlib.sha256().digest_size
_BEGINNING_OF_NAME = "hicache_ext-"
_BEGINNING_OF_TEMPORARY = ".hicache_ext-"
_END_OF_NAME = ".compiled"
_PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class CodeCache:
    """Where compiled code is looked for and kept. Threads: any."""

    version: str
    """Of whatever the compiled code depends on: other versions have other files."""
    written: tuple[Path, ...]
    """Directories; the first that can be written takes what is compiled."""
    read: tuple[Path, ...]
    """Directories that may have it."""

    def find(self) -> tuple[Mapping[str, bytes] | None, tuple[str, ...]]:
        """The functions by name, and a sentence for each file that must not be used. Raises no OSError."""
        refused: list[str] = []
        for directory in self.read:
            # Root's: what was compiled when an image was built.
            for owner in sorted({os.geteuid(), 0}, reverse=True):
                path = directory / self._name(owner)
                try:
                    return _read(path), tuple(refused)
                except FileNotFoundError:
                    continue
                except (OSError, ValueError) as error:
                    if not isinstance(error, NotADirectoryError | PermissionError):
                        refused.append(f"{path}: {error}")
        return None, tuple(refused)

    def place(self) -> tuple[Path | None, str]:
        """The directory to keep compiled code in; else None and why there is none."""
        reasons: list[str] = []
        for directory in self.written:
            try:
                directory.mkdir(mode=0o755, parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=directory).close()
            except OSError as error:
                reasons.append(f"{directory}: {error.strerror or error}")
            else:
                return directory, ""
        return None, "; ".join(reasons) or "this account has no home directory"

    def keep(self, functions: Mapping[str, bytes], directory: Path) -> None:
        """Write the file, whole or not at all. Raises OSError."""
        content = pickle.dumps(dict(functions))
        fd, temporary = tempfile.mkstemp(prefix=_BEGINNING_OF_TEMPORARY, dir=directory)
        try:
            with open(fd, "wb") as file:
                file.write(_BEGINNING + hashlib.sha256(content).digest() + content)
                # Nothing of it is secret, and servers of other accounts may use what root compiled into an image.
                os.fchmod(file.fileno(), 0o644)
            os.replace(temporary, directory / self._name(os.geteuid()))
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _name(self, owner: int) -> str:
        return f"{_BEGINNING_OF_NAME}{self.version}.{owner}{_END_OF_NAME}"


def code_cache(part: str) -> CodeCache:
    """That of a part of the code (compiled_part.py), for this version, processor and account. Imports numba; raises
    whatever that does, ImportError without it."""
    import llvmlite
    import numba
    from numba.core.registry import cpu_target

    if numba.config.DISABLE_JIT:
        raise ImportError("NUMBA_DISABLE_JIT is set")
    # Of the processor: with NUMBA_CPU_NAME and NUMBA_CPU_FEATURES where they are set.
    processor = cpu_target.target_context.codegen().magic_tuple()
    facts = (numba.__version__, llvmlite.__version__, sys.version, processor, sources_digest(), part)
    version = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    own = [_PACKAGE / "__pycache__", *_of_account()]
    configured = [Path(numba.config.CACHE_DIR).absolute()] if numba.config.CACHE_DIR else []
    # Who names a directory does not want another one to be written.
    return CodeCache(version, tuple(configured or own), (*configured, *own))


def compiled_files() -> list[Path]:
    """Every file of compiled code where ``code_cache`` looks, of any version and account. Works without numba."""
    configured = os.environ.get("NUMBA_CACHE_DIR")
    places = [_PACKAGE / "__pycache__", *_of_account(), *([Path(configured).absolute()] if configured else [])]
    patterns = (f"{_BEGINNING_OF_NAME}*{_END_OF_NAME}", f"{_BEGINNING_OF_TEMPORARY}*")
    return sorted({path for place in places for pattern in patterns for path in place.glob(pattern)})


def _of_account() -> list[Path]:
    directory = user_cache()
    return [] if directory is None else [directory]


def _read(path: Path) -> Mapping[str, bytes]:
    """Raises OSError, and ValueError with why the file must not be used."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        # Of the open file, which nobody can exchange any more: others may be able to write into its directory.
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a file")
        if status.st_uid not in (os.geteuid(), 0):
            raise ValueError(f"it belongs to account {status.st_uid}, which could run any code here with it")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError("other accounts may write it, and could run any code here with it")
        written = file.read()
    content = written[len(_BEGINNING) + _DIGEST :]
    if written[: len(_BEGINNING) + _DIGEST] != _BEGINNING + hashlib.sha256(content).digest():
        raise ValueError("it is damaged")
    functions: Mapping[str, bytes] = pickle.loads(content)
    return functions
