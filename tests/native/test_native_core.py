"""The library in C: loaded only if it is this package's, and called with the structs that it was built with."""

from __future__ import annotations

import importlib
import logging
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hicache_ext
from hicache_ext import native
from hicache_ext.native import Struct

SOURCES = Path(native.__file__).parent
_STRUCT = re.compile(r"^struct (\w+) \{$", re.MULTILINE)


@pytest.fixture
def compiler() -> str:
    found = shutil.which("gcc")
    if found is None:
        pytest.skip("missing: gcc")
    return found


def test_it_is_there() -> None:
    """All that the tests say of it would be said of Python otherwise."""
    assert native.why_not() is None


def _structs() -> list[Struct]:
    """Every struct that the package makes."""
    found: list[Struct] = []
    for module in pkgutil.walk_packages(hicache_ext.__path__, "hicache_ext."):
        source = Path(module.module_finder.find_spec(module.name).origin)  # type: ignore[union-attr, call-arg, arg-type]
        if source.suffix == ".py" and "native.Struct(" in source.read_text():
            held = vars(importlib.import_module(module.name))
            found += [one for one in held.values() if isinstance(one, Struct)]
            found += held.get("STRUCTS", [])
    assert len({one.name for one in found}) == len(found) > 15
    return found


def test_structs_lie_as_the_compiler_lays_them(compiler: str, tmp_path: Path) -> None:
    structs_of_package = _structs()
    files = {file: set(_STRUCT.findall(file.read_text())) for file in sorted(SOURCES.glob("*.c"))}
    in_headers = {name for file in SOURCES.glob("*.h") for name in _STRUCT.findall(file.read_text())}
    expected: dict[str, list[str]] = {}
    found: dict[str, list[str]] = {}
    for file, structs in files.items():
        here = [one for one in structs_of_package if one.name in structs | in_headers]
        lines = []
        for one in here:
            name, ends = one.name, [0]
            for field in one.fields:
                ends.append(ends[-1] + (16 if field.endswith("[]") else 8))
            offsets = ", ".join(f"offsetof(struct {name}, {field.removesuffix('[]')})" for field in one.fields)
            form = " ".join(["%zu"] * len(ends))
            lines.append(f'    printf("{name} {form}\\n", {offsets}, sizeof(struct {name}));')
            expected[name] = list(map(str, ends))
            assert len(one.packed(*[None] * len(one.fields))) == ends[-1]
        program = tmp_path / f"{file.stem}.c"
        text = f'#define _GNU_SOURCE\n#define HICACHE_VERSION 1\n#include <stdio.h>\n#include "{file}"\n'
        program.write_text("\n".join([f"{text}int main(void) {{", *lines, "    return 0;", "}", ""]))
        others = [str(other) for other in files if other != file]
        command = [
            compiler,
            "-std=gnu11",
            "-w",
            "-DHICACHE_VERSION=1",
            str(program),
            *others,
            "-o",
            str(tmp_path / "a"),
        ]
        subprocess.run(command, check=True)
        shown = subprocess.run([str(tmp_path / "a")], check=True, capture_output=True, text=True).stdout
        found.update({name: offsets for name, *offsets in map(str.split, shown.splitlines())})
    assert found == expected
    assert {one.name for one in structs_of_package} == set(expected)


def test_every_function_has_a_struct() -> None:
    functions = set()
    for file in SOURCES.glob("*.c"):
        text = file.read_text()
        for match in re.finditer(r"^(?:WIDE )?PUBLIC int64_t (hicache_\w+)\(", text, re.MULTILINE):
            functions.add(match[1])
    assert functions - {"hicache_bind"} == {f"hicache_{one.name}" for one in _structs()} - {"hicache_table"}


@pytest.mark.parametrize("trouble", ["other sources", "no library", "damaged", "another library"])
def test_another_library_is_never_called(trouble: str, compiler: str, tmp_path: Path, monkeypatch, caplog) -> None:
    library = tmp_path / "core.so"
    if trouble == "other sources":
        files = [str(file) for file in SOURCES.glob("*.c")]
        command = [compiler, "-std=gnu11", "-w", "-shared", "-fPIC", "-DHICACHE_VERSION=1", *files, "-o", str(library)]
        subprocess.run(command, check=True)
    elif trouble == "damaged":
        library.write_bytes(b"not a library")
    elif trouble == "another library":
        subprocess.run([compiler, "-shared", "-x", "c", "/dev/null", "-o", str(library)], check=True)
    monkeypatch.setattr(native, "LIBRARY", library)
    native._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert native.core() is None and native.core() is None
    reason = {
        "other sources": "was built of other sources",
        "no library": "core.so was not built with this package",
        "damaged": "file too short",
        "another library": "hicache_version",
    }[trouble]
    assert reason in str(native.why_not())
    (said,) = caplog.messages
    assert reason in said and native.REMEDY in said


def test_an_edited_source_makes_another_version(tmp_path: Path) -> None:
    for file in [*SOURCES.glob("*.c"), *SOURCES.glob("*.h")]:
        shutil.copy(file, tmp_path / file.name)
    assert native.sources_version(tmp_path) == native.sources_version()
    (tmp_path / "core.h").write_text((SOURCES / "core.h").read_text() + "\n")
    assert native.sources_version(tmp_path) != native.sources_version()


def test_it_is_c11_without_a_warning(compiler: str, tmp_path: Path) -> None:
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-fPIC", "-fwrapv", "-DHICACHE_VERSION=1"]
    for more in ([], ["-DWIDE="]):
        for file in SOURCES.glob("*.c"):
            subprocess.run([compiler, *flags, *more, "-c", str(file), "-o", str(tmp_path / "object")], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="the library is for Linux")
def test_it_asks_nothing_but_the_c_library_of_the_system() -> None:
    needed = subprocess.run(["readelf", "-d", str(native.LIBRARY)], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"NEEDED.*\[(.+)\]", needed)) <= {"libc.so.6"}


def test_an_upgrade_under_a_running_process_is_not_loaded_into_it(compiler: str, tmp_path: Path) -> None:
    """Its structs would have other fields than the classes that are there already: SIGSEGV."""
    package = tmp_path / "hicache_ext"
    (package / "native").mkdir(parents=True)
    (package / "__init__.py").touch()
    for file in [*SOURCES.glob("*.[ch]"), SOURCES / "__init__.py"]:
        shutil.copy(file, package / "native" / file.name)
    program = """
import shutil, subprocess, sys
from hicache_ext import native
with open(native._HERE / "core.h", "a") as header:
    header.write("/* another release */\\n")
define, files = f"-DHICACHE_VERSION={native.sources_version()}", [str(file) for file in native._HERE.glob("*.c")]
command = [sys.argv[1], "-std=gnu11", "-w", "-shared", "-fPIC", define, *files, "-o", str(native.LIBRARY)]
subprocess.run(command, check=True)
print(native.core(), native.why_not())
"""
    command = [sys.executable, "-c", program, compiler]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.startswith("None ") and "was built of other sources" in done.stdout


def test_a_shortage_that_passes_is_not_remembered() -> None:
    program = """
import os, resource
from hicache_ext import native
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
opened = [os.dup(0) for _ in range(3)]
resource.setrlimit(resource.RLIMIT_NOFILE, (max(opened) + 1, limits[1]))
print(native.core() is None, native.why_not())
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
print(native.core() is not None)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.startswith("True ") and first.endswith("Too many open files") and second == "True"


def test_an_array_in_pieces_has_no_address() -> None:
    with pytest.raises(ValueError, match="in pieces"):
        native.address(np.zeros((4, 4), np.int64)[:, 0])
    fixed = np.zeros(4, np.int64)
    fixed.flags.writeable = False
    assert native.address(fixed) == fixed.ctypes.data


def test_functions_that_make_other_checksums_are_not_used(monkeypatch) -> None:
    core = native.core()
    assert core is not None
    monkeypatch.setattr(native.xxhash, "xxh3_128_digest", lambda data: bytes(16))
    with pytest.raises(ImportError, match="other checksums in C"):
        core.bind()
