"""Commands where optional packages are absent: help is always there, and what needs one says how to install it."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hicache_ext.cli.main import COMMANDS, make_parser, without_traceback
from hicache_ext.errors import MissingPackageError
from hicache_ext.packages import FROM_SGLANG, PACKAGES, need

ROOT = Path(__file__).parents[2]
BLOCKED = sorted({*PACKAGES, *FROM_SGLANG})
WHERE_SGLANG_RUNS = "run it with the Python that SGLang is installed in"

PROGRAM = f"""
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout

class Blocker:
    asked = set()
    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        if root in {BLOCKED!r}:
            self.asked.add(root)
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
from hicache_ext.cli.main import main
for line in sys.stdin:
    Blocker.asked = set()
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(json.loads(line))
        except SystemExit as stopped:
            code = stopped.code
    print(json.dumps([code, out.getvalue(), err.getvalue(), sorted(Blocker.asked)]))
"""


def run_without_packages(commands: Sequence[Sequence[str]], directory: Path) -> list[tuple[int, str, str, list[str]]]:
    """(exit code, output, errors, blocked packages asked for) of each command, in one process without any of them."""
    lines = "\n".join(json.dumps(list(words)) for words in commands)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=lines, capture_output=True, text=True, check=False, cwd=directory
    )
    assert not done.returncode, done.stderr
    return [(code, out, err, asked) for code, out, err, asked in map(json.loads, done.stdout.splitlines())]


def all_commands() -> Iterator[list[str]]:
    """The words of every command and sub-command, as the parsers have them."""
    yield []
    for command in COMMANDS:
        top = make_parser(command)
        yield from ([command, *below] for below in _commands_of(_subparsers(top)[command]))


def _commands_of(parser: argparse.ArgumentParser) -> Iterator[list[str]]:
    yield []
    for name, below in _subparsers(parser).items():
        yield from ([name, *words] for words in _commands_of(below))


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def test_every_help_works_without_the_packages_of_any_extra_and_asks_for_none(tmp_path: Path) -> None:
    """``bench --help`` and ``demo --help`` used to import torch, and died where it was absent."""
    commands = list(all_commands())
    assert ["bench", "file"] in commands and ["config", "check"] in commands and ["demo"] in commands
    for words, (code, out, err, asked) in zip(
        commands, run_without_packages([[*words, "--help"] for words in commands], tmp_path), strict=True
    ):
        assert (code, err, asked) == (0, "", []), words
        assert out.startswith("usage: hicache-ext"), words


def test_a_command_that_needs_a_package_says_in_one_sentence_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "hicache.yaml").write_text(
        "{backend_name: hicache_ext, module_path: hicache_ext.storage.backend, class_name: HiCacheExtBackend,"
        f" interface_v1: 1, hicache_ext: {{tiers: {{a: {{type: file, path: {tmp_path}/a, capacity: 1GiB}}}}}}}}"
    )
    (tmp_path / "prompt.txt").write_text("hello")
    wanted = {
        ("demo",): WHERE_SGLANG_RUNS,
        ("bench", "file", "--quick"): WHERE_SGLANG_RUNS,
        ("bench", "kernels", "--quick"): WHERE_SGLANG_RUNS,
        ("warm", "hicache.yaml", "--prompt", "prompt.txt", "--model", "x"): WHERE_SGLANG_RUNS,
    }
    for (words, remedy), (code, _, err, _) in zip(
        wanted.items(), run_without_packages(list(wanted), tmp_path), strict=True
    ):
        assert (code, err.count("\n")) == (2, 1), (words, err)
        assert err.endswith(f": {remedy}\n"), words


def installable() -> set[str]:
    """The names of all packages that an extra brings, and of the demo's model."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    requirements = [requirement for extra in extras.values() for requirement in extra]
    model = (ROOT / "requirements" / "demo-model.txt").read_text().split()
    return {re.split(r"[\[<>=]", requirement)[0] for requirement in [*requirements, *model]}


def test_what_is_to_be_installed_is_what_the_extras_bring_and_nothing_of_sglang() -> None:
    """``hicache-ext[redis]`` was named before: no index has hicache-ext, and anybody could register it."""
    named = {name for names in PACKAGES.values() for name in names.split()}
    assert named <= installable() - {"hicache-ext", *FROM_SGLANG}
    assert not set(PACKAGES) & FROM_SGLANG


def test_every_hint_to_install_names_a_checkout_or_a_package_of_our_list() -> None:
    allowed = installable() - {"hicache-ext", *FROM_SGLANG} | {"mooncake-transfer-engine-non-cuda", "lmcache"}
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*")]
    files += [file for room in ("hicache_ext", "benchmarks", "tests/rigs") for file in (ROOT / room).rglob("*.py")]
    seen = set()
    for file in files:
        # What older versions said stays as it was.
        if not file.is_file() or file.name == "CHANGELOG.md" or file.suffix == ".pyc":
            continue
        text = file.read_text()
        assert "hicache-ext[" not in text, file
        for name in re.findall(r"pip install (?:--[\w-]+ )*'?([\w./][\w./-]*)", text):
            assert name.startswith((".", "/")) or name in allowed, (file, name)
            seen.add(name)
    assert {".", "cryptography"} <= seen


@pytest.mark.thorough
def test_a_benchmark_of_the_checkout_runs_from_any_directory(tmp_path: Path) -> None:
    """It said "this needs the package benchmarks", and advised to install a stranger's."""
    script = [sys.executable, str(ROOT / "benchmarks" / "bench_file.py"), "--help"]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_need_names_the_first_package_that_is_missing() -> None:
    need("json", "hicache_ext")
    with pytest.raises(MissingPackageError, match=r"no_such_package, which is not installed$"):
        need("json", "no_such_package", "other_missing_one")


# -- the safety net ----------------------------------------------------------------------------------------------------


def raising(error: BaseException) -> int:
    def run() -> int:
        raise error

    return without_traceback(run)


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (OSError(28, "No space left on device", "/mnt/x"), 1, "/mnt/x: No space left on device\n"),
        (OSError("a socket broke"), 1, "a socket broke\n"),
        (
            ModuleNotFoundError("No module named 'obstore'", name="obstore"),
            2,
            "this needs the package obstore, which is not installed: pip install obstore\n",
        ),
        (
            ImportError("libcuda.so.1: cannot open shared object file", name="torch._C"),
            2,
            "this needs the package torch, which cannot be imported (libcuda.so.1: cannot open shared object file): "
            f"{WHERE_SGLANG_RUNS}\n",
        ),
        (
            # ``python benchmarks/bench_file.py`` used to be answered with "pip install benchmarks".
            ModuleNotFoundError("No module named 'benchmarks'", name="benchmarks"),
            2,
            "this needs the package benchmarks, which is not installed\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_users_meet_is_a_sentence(
    error: BaseException, code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert raising(error) == code
    assert capsys.readouterr().err == sentence


@pytest.mark.parametrize("error", [ImportError("no name"), ModuleNotFoundError("x", name="hicache_ext.nothing")])
def test_an_import_that_is_wrong_in_our_own_code_stays_a_traceback(error: ImportError) -> None:
    with pytest.raises(ImportError):
        raising(error)


def test_a_reader_of_the_help_who_has_gone_is_not_a_traceback() -> None:
    """argparse ends the process itself after --help, with what it printed still unwritten."""
    program = f"{sys.executable} -c 'import sys; from hicache_ext.cli.main import main; sys.exit(main())'"
    done = subprocess.run(["bash", "-c", f"{program} bench file --help | true"], capture_output=True, text=True)
    assert done.stderr == ""
