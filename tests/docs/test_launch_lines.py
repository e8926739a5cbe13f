"""SGLang takes every launch line of examples/: those in the heads of configurations, those of manifests."""

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

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
MANIFESTS = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

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
