"""What is given to others: sdist and wheel are built, looked into, installed, and uninstalled without a trace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import pytest

from hicache_ext import __version__
from scripts.documents import links

ROOT = Path(__file__).parents[1]
_KEPT_BESIDES = {".ci", ".github", ".gitignore"}
"""Of what begins with a dot."""
_MADE = {"build", "dist", "PKG-INFO", "setup.cfg"}

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Built:
    """The project as it was copied, and what was built of it."""

    files: frozenset[str]
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built as a release is, with the tools that are here: the sdist of the project, the wheel of the sdist."""
    pytest.importorskip("build", reason="missing: the package build")
    place = tmp_path_factory.mktemp("distribution")
    source = place / "source"
    files = frozenset(_files_of_the_project())
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    # What a working tree has besides.
    for junk in (
        "hicache_ext/__pycache__/errors.cpython-311.pyc",
        "hicache_ext/core.123",
        "tests/.DS_Store",
        "notes.txt",
    ):
        (source / junk).parent.mkdir(exist_ok=True)
        (source / junk).write_text("junk")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place / "dist"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=place)
    assert not done.returncode, done.stdout + done.stderr
    (sdist,), (wheel,) = (place / "dist").glob("*.tar.gz"), (place / "dist").glob("*.whl")
    return Built(files, sdist, wheel)


def _files_of_the_project() -> list[str]:
    """As git knows them; of a project without git all but what tools make."""
    if (ROOT / ".git").exists():
        done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]
    found = []
    for path in ROOT.rglob("*"):
        first, *rest = path.relative_to(ROOT).parts
        made = {"__pycache__"} & {first, *rest} or first in _MADE or first.endswith(".egg-info")
        hidden = first.startswith(".") and first not in _KEPT_BESIDES
        if path.is_file() and not made and not hidden:
            found.append("/".join((first, *rest)))
    return found


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return BytesParser().parsebytes(archive.read(name))


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout: links would have been packed as files")
def test_the_checkout_holds_no_link() -> None:
    """It would name a place of the machine that it was made on."""
    done = subprocess.run(["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line for line in done.stdout.splitlines() if line.startswith("120000")] == []


def test_the_sdist_is_the_whole_project_and_nothing_else(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        packed = {name.partition("/")[2] for name in (member.name for member in archive if member.isfile())}
    of_the_build = {name for name in packed if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    assert packed - of_the_build == built.files


def test_the_wheel_holds_the_modules_the_licence_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        packed = set(archive.namelist())
    package = {name for name in built.files if name.startswith("hicache_ext/")}
    assert all(name.endswith((".py", "/py.typed", "/texts.toml", ".h", ".c")) for name in package)
    about = f"hicache_ext-{__version__}.dist-info"
    names = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
    assert packed == package | {"hicache_ext/native/core.so"} | {f"{about}/{name}" for name in names}
    assert built.wheel.name.startswith(f"hicache_ext-{__version__}-py3-none-linux_")


def test_the_metadata_say_licence_versions_of_python_and_the_version_of_the_changelog(built: Built) -> None:
    metadata = _metadata(built.wheel)
    assert metadata["Version"] == __version__
    assert (ROOT / "CHANGELOG.md").read_text().partition("\n## ")[2].startswith(f"{__version__} ")
    assert metadata["License-Expression"] == "Apache-2.0"
    classifiers = metadata.get_all("Classifier", [])
    assert not [line for line in classifiers if line.startswith("License")]  # an index refuses both at once
    assert metadata["Requires-Python"] == ">=3.11"
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in classifiers


def test_the_readme_of_the_index_has_no_link_that_is_dead_there(built: Built) -> None:
    metadata = _metadata(built.wheel)
    assert metadata["Description-Content-Type"] == "text/markdown"
    shown = metadata.get_payload()
    assert isinstance(shown, str) and shown.startswith("# hicache_ext")
    assert [link.path for link in links(shown) if link.path and not link.leaves_the_project] == []
    assert any(not link.leaves_the_project for link in links((ROOT / "README.md").read_text()))


def test_the_index_will_take_both(built: Built) -> None:
    pytest.importorskip("twine", reason="missing: the package twine")
    command = [sys.executable, "-m", "twine", "check", "--strict", str(built.sdist), str(built.wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr


def test_an_installation_without_dependencies_runs_and_leaves_nothing_behind(built: Built, tmp_path: Path) -> None:
    environment, home = tmp_path / "venv", tmp_path / "home"
    home.mkdir()
    venv.create(environment, with_pip=False, symlinks=True)
    before = _content(environment)
    # Not the PATH of here: pip asks compilers for their versions, and some of those write into the home directory.
    variables = {"PATH": os.defpath, "HOME": str(home), "HICACHE_EXT_RUNTIME_DIR": str(home / "run")}
    # Of the packages that the command needs; not this checkout, which is installed there by a .pth file.
    with_packages = {**variables, "PYTHONPATH": sysconfig.get_path("purelib")}

    def run(*words: str, variables: dict[str, str] = variables) -> str:
        done = subprocess.run(words, capture_output=True, text=True, cwd=home, env=variables)
        assert not done.returncode, f"{words}\n{done.stdout}{done.stderr}"
        return done.stdout

    def pip(*words: str) -> None:
        run(sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", *words)

    python, command = environment / "bin" / "python", str(environment / "bin" / "hicache-ext")
    pip("install", "--no-deps", "--no-index", str(built.wheel))
    assert run(command, "--version") == f"hicache-ext {__version__}\n"
    where = run(str(python), "-c", "import hicache_ext; print(hicache_ext.__file__)", variables=with_packages)
    assert where.startswith(str(environment))

    why_not = "from hicache_ext import native; print(native.why_not(), native.LIBRARY)"
    loaded = run(str(python), "-c", why_not, variables=with_packages)
    assert loaded.startswith(f"None {environment}")

    pip("uninstall", "--yes", "hicache-ext")
    assert _content(environment) == before
    assert _content(home) == set()


def test_without_a_compiler_it_is_installed_all_the_same_and_says_so(built: Built, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"]
    nothing = {**os.environ, "CC": "/nowhere/cc", "HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, "-w", str(tmp_path), str(built.sdist)], capture_output=True, text=True, cwd=tmp_path, env=nothing
    )
    assert not done.returncode, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "hicache_ext/native/core.so" not in archive.namelist()
        archive.extractall(tmp_path / "installed")
    ask = "from hicache_ext import native; print(native.core(), native.why_not())"
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, cwd=tmp_path, env=variables)
    assert done.stdout == "None core.so was not built with this package\n", done.stderr
    assert "install a C compiler (gcc)" in done.stderr


def _content(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}
