"""Launch lines: SGLang takes those of examples/, and all that we show or print have what nobody may leave out."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hicache_ext.cli.main import main

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
MANIFESTS = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.yaml"))]
DOORS = ("--hicache-storage-backend dynamic", "--unified-cache-external-linker-backend dynamic")

_PARSE = """
import argparse, json, sys
from hicache_ext.testing.sglang_cpu import prepare_process
prepare_process()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(exit_on_error=False)
ServerArgs.add_cli_args(parser)
for line in json.load(sys.stdin):
    # A word that no option takes is an error, too.
    arguments = parser.parse_args(line)
    print(arguments.enable_hierarchical_cache, arguments.hicache_storage_backend_extra_config)
"""


def launch_line(example: Path) -> list[str]:
    """The arguments in the comment at the head of a configuration."""
    head = example.read_text().partition("backend_name:")[0].replace("\\\n#", "")
    [line] = re.findall(r"python -m sglang\.launch_server (.*)", head)
    return shlex.split(line)


def arguments_of(manifest: Path) -> list[str]:
    for document in yaml.safe_load_all(manifest.read_text()):
        if document["kind"] in ("DaemonSet", "StatefulSet", "Deployment"):
            [container] = document["spec"]["template"]["spec"]["containers"]
            assert container["command"][1:] == ["-m", "sglang.launch_server"]
            return [str(word) for word in container["args"]]
    raise AssertionError(f"{manifest}: no workload")


def launch_lines_in(text: str) -> list[str]:
    """The lines that open one of our doors, or start a server with arguments; continued ones as one."""
    lines = re.sub(r"\\\n[ #]*", "", text).splitlines()
    return [line for line in lines if any(door in line for door in DOORS) or re.search(r"launch_server +-", line)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_every_launch_line_that_is_shown_says_the_page_size(document: Path) -> None:
    """SGLang's default is pages of one token: a prompt of 1,380 tokens became as many keys instead of 21."""
    assert [line for line in launch_lines_in(document.read_text()) if "--page-size" not in line] == []


def test_launch_lines_are_found_where_they_are_shown() -> None:
    shown = {str(document.relative_to(ROOT)) for document in DOCUMENTS if launch_lines_in(document.read_text())}
    assert shown >= {"README.md", "docs/kubernetes.md", "docs/pd.md", "docs/linker.md", "docs/configuration.md"}
    assert shown >= {str(example.relative_to(ROOT)) for example in EXAMPLES}


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest.name)
def test_every_manifest_says_the_page_size(manifest: Path) -> None:
    assert "--page-size=64" in arguments_of(manifest)


DISK = ["--path", "/mnt/hicache", "--capacity", "1GiB"]


@pytest.mark.parametrize(
    "words", [[], DISK, [*DISK, "--linker"], [*DISK, "--pd", "prefill"], [*DISK, "--pd", "decode"]], ids=" ".join
)
def test_every_launch_line_that_is_printed_says_the_page_size(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "render", *words]) == 0
    lines = launch_lines_in(capsys.readouterr().out)
    assert lines and all("--page-size 64" in line for line in lines)


@pytest.mark.sglang
@pytest.mark.slow
def test_sglang_takes_every_launch_line_and_its_configuration() -> None:
    lines = [*map(launch_line, EXAMPLES), *map(arguments_of, MANIFESTS)]
    done = subprocess.run(
        [sys.executable, "-c", _PARSE],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    files = [f"@{example.relative_to(ROOT)}" for example in EXAMPLES] + ["@/etc/hicache/hicache.yaml"] * len(MANIFESTS)
    assert [line for line in done.stdout.splitlines() if line.startswith("True ")] == [f"True {file}" for file in files]
