"""Commands as processes: readers who go, Ctrl-C, locales, and what is imported."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def _command(*words: str, **more: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **more.pop("env", {})}
    return subprocess.Popen(
        ["env", "--default-signal=INT,PIPE", sys.executable, "-m", "hicache_ext", *words],
        env=environment,
        stdout=more.pop("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


@pytest.mark.parametrize("words", [["config", "schema"], ["ls", "pool"], ["ls", "pool", "--json"]])
def test_a_reader_who_has_gone_ends_a_command_without_a_word(words: list[str], workplace: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    process = _command(*words, stdout=writes)
    os.close(writes)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 1


def test_ctrl_c_ends_a_command_with_130_and_without_a_word(url: str) -> None:
    process = _command("stats", url, "--interval", "100ms", "--json")
    assert process.stdout is not None
    lines = [process.stdout.readline(), process.stdout.readline()]
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")
    looks = [json.loads(line) for line in [*lines, *rest.splitlines()] if line]
    assert all(look["seconds"] > 0 for look in looks)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_locale_that_cannot_print_a_name_gets_an_escape(encoding: str, workplace: Path) -> None:
    place = workplace / "中文"
    shutil.copytree(workplace / "pool", place)
    (workplace / "中文.yaml").write_text(
        (workplace / "hicache.yaml").read_text().replace(str(workplace / "pool"), str(place)), encoding="utf-8"
    )
    process = _command("stat", "中文.yaml", env={"PYTHONIOENCODING": encoding})
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert "\\u4e2d\\u6587" in out


def test_input_is_utf_8_whatever_the_locale_says(workplace: Path) -> None:
    text = (workplace / "hicache.yaml").read_text().replace(str(workplace / "pool"), str(workplace / "中文"))
    process = _command("config", "check", "-", "--json", env={"PYTHONIOENCODING": "latin-1"}, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.buffer.write(text.encode())
    out, errors = process.communicate(timeout=60)
    assert errors == "" and "中文" in json.loads(out)["tiers"][1]["summary"]


@pytest.mark.thorough
@pytest.mark.parametrize("closed", [">&-", "2>&- >/dev/null", "<&- >/dev/null", ">&- 2>&- <&-"])
@pytest.mark.parametrize("words", ["config schema", "ls pool", "--help"])
def test_closed_streams_are_no_trouble(words: str, closed: str, workplace: Path) -> None:
    """As some schedulers start commands."""
    line = f"{shlex.quote(sys.executable)} -m hicache_ext {words} {closed}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_a_full_disk_is_a_sentence(workplace: Path) -> None:
    with open("/dev/full", "w") as full:
        process = _command("config", "schema", stdout=full)
        assert process.communicate(timeout=60)[1] == "No space left on device\n"
    assert process.returncode == 1


CHEAP: Sequence[str] = (
    "--help",
    "ls pool",
    "stat hicache.yaml",
    "verify pool",
    "gc pool --dry-run",
    "clear pool --all --dry-run",
    "pins pool",
    "unpin pool --name prompt",
    "config check hicache.yaml",
    "config render --path /a --capacity 1GiB",
    "explain hicache.yaml --tokens tokens.json",
    "reload hicache.yaml",
    "bench compare a.json b.json",
    "bench --help",
    "demo --help",
)


def test_cheap_commands_import_nothing_that_is_slow(workplace: Path) -> None:
    program = (
        "import sys\nfrom contextlib import redirect_stdout\nfrom hicache_ext.cli.main import main\n"
        "slow = ('torch', 'sglang', 'numba', 'transformers', 'matplotlib', 'redis', 'obstore', 'mooncake')\n"
        "for line in sys.stdin.read().splitlines():\n"
        "    with redirect_stdout(sys.stderr):\n"
        "        try: main(line.split())\n"
        "        except SystemExit: pass\n"
        "    print(line, [name for name in slow if name in sys.modules])\n"
    )
    lines = "\n".join(CHEAP)
    done = subprocess.run([sys.executable, "-c", program], input=lines, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{words} []" for words in CHEAP]
