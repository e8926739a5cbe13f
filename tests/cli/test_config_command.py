"""``hicache-ext config`` as an operator uses it."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hicache_ext import __version__
from hicache_ext.cli.main import COMMANDS, main
from hicache_ext.config import ExtraConfig
from hicache_ext.config.render import example_config
from hicache_ext.runtime import file_systems
from hicache_ext.runtime.file_systems import Mount


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "hicache.yaml"
    path.write_text(example_config())
    return path


@pytest.fixture(autouse=True)
def _local_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests run on, in the eyes of the command all paths are on one local disk."""
    table = [Mount("/", "ext4", "/dev/root")]
    monkeypatch.setattr(file_systems, "read_mounts", lambda _: table)


def test_check_says_ok_and_what_the_file_means(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"OK: {file}",
        "  role: both",
        "  tier nvme: file, capacity 512GiB, /mnt/nvme0/hicache, private (ext4 is local)",
        "  retrieve from: nvme",
        "  store to: nvme (sync, default)",
        "  promote to: nothing (default: nothing lies further out)",
    ]


def test_check_says_for_every_tier_how_it_is_written_what_is_promoted_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = {
        "nvme": {"type": "file", "path": "/mnt/nvme", "capacity": "1GiB"},
        "pool": {"type": "redis", "url": "redis://pool:6379"},
        "cold": {"type": "object", "url": "s3://bucket/prefix"},
    }
    roles = {"decode": {"retrieve_locations": [], "store_locations": ["nvme", "pool"]}, "prefill": {"promote_to": None}}
    file = tmp_path / "hicache.yaml"
    section = {"tiers": tiers, "store_policies": {"cold": "sync"}, "roles": roles}
    file.write_text(yaml.safe_dump(ExtraConfig.around(section), sort_keys=False))
    assert main(["config", "check", str(file)]) == 0
    printed = capsys.readouterr().out.splitlines()
    written = "nvme (sync, default), pool (async, default: shared, behind nvme), cold (sync, configured)"
    assert f"  store to: {written}" in printed
    assert "  promote to: nvme (default: the nearest private tier)" in printed
    assert printed[printed.index("  as decode: retrieve from: nowhere") :][1:3] == [
        "  as decode: store to: nvme (sync, default), pool (sync, default)",
        "  as decode: promote to: nothing (default on decode nodes)",
    ]
    assert printed[printed.index("  as prefill: retrieve from: nvme, pool, cold") :][1:3] == [
        f"  as prefill: store to: {written}",
        "  as prefill: promote to: nothing (configured)",
    ]
    assert "  tier pool: redis, redis://pool:6379, shared (reached over the network)" in printed


def test_check_prints_one_sentence_per_mistake_and_exits_with_2(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(example_config().replace("capacity:", "capcity:").replace("role: both", "role: prefil"))
    assert main(["config", "check", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [line.split(": ")[0] for line in printed.err.splitlines()] == [
        "hicache_ext.role",
        "hicache_ext.tiers.nvme.capacity",
        "hicache_ext.tiers.nvme.capcity",
    ]


@pytest.mark.parametrize(("role", "notes"), [("both", 1), ("decode", 0)])
def test_check_notes_that_an_allocator_in_a_file_is_ignored_but_on_a_decode_node(
    role: str, notes: int, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A decode node reads @FILE through this package's hook, which hands SGLang all of it (tests/e2e/test_pd_roles.py).

    ``config check`` used to say that a decode node cannot read a file, and configuration.md that it can.
    """
    file.write_text(example_config().replace("role: both", f"role: {role}") + "  promote_to: null\nallocator: shm\n")
    assert main(["config", "check", str(file)]) == 0
    output = capsys.readouterr().out
    assert output.count("note: allocator: SGLang ignores it in a file") == notes


@pytest.mark.parametrize(("drain", "remarked"), [("13s", False), ("30s", True)])
def test_check_notes_a_drain_that_sglang_does_not_wait_for(
    drain: str, remarked: bool, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(example_config() + f"  background: {{drain: {drain}}}\n")
    assert main(["config", "check", str(file)]) == 0
    assert ("SGLang kills its processes 15 s after" in capsys.readouterr().out) is remarked


def test_check_mentions_a_tier_that_is_never_used(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = "    spare: {type: file, path: /mnt/spare, capacity: 1GiB}\n  retrieve_locations"
    file.write_text(example_config().replace("  retrieve_locations", more))
    assert main(["config", "check", str(file)]) == 0
    assert "note: tier spare: it is neither read nor written" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["standard input", "inline JSON", "at file"])
def test_check_takes_whatever_the_launch_flag_takes(
    kind: str, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(example_config()))
    given = {"standard input": "-", "inline JSON": json.dumps(yaml.safe_load(example_config())), "at file": f"@{file}"}
    assert main(["config", "check", given[kind]]) == 0
    assert capsys.readouterr().out.startswith("OK")


def test_schema_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert "FileTierConfig" in json.loads(capsys.readouterr().out)["$defs"]


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"hicache-ext {__version__}\n"


def test_the_package_runs_as_the_command() -> None:
    words = [sys.executable, "-m", "hicache_ext", "--version"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == f"hicache-ext {__version__}\n"


@pytest.mark.parametrize("words", [[], ["no-such-command"], ["config"], ["config", "check"]])
def test_wrong_usage_exits_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2


def test_every_command_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)


def test_starting_the_command_imports_neither_torch_nor_sglang_nor_another_command() -> None:
    program = (
        "import sys\nfrom hicache_ext.cli.main import main\n"
        "try: main(['--version'])\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'sglang', 'pydantic', 'yaml') if name in sys.modules])\n"
        "main(['config', 'render', '--inline'])\n"
        "print([name for name in ('torch', 'sglang') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[1] == lines[3] == "[]"


def test_a_reader_who_has_gone_is_not_a_traceback() -> None:
    command = f"{shlex.quote(sys.executable)} -m hicache_ext.cli.main config schema | true"
    program = command.replace(
        "-m hicache_ext.cli.main", "-c 'import sys; from hicache_ext.cli.main import main; sys.exit(main())'"
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


def test_check_says_what_each_role_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiers = {name: {"type": "file", "path": f"/mnt/{name}", "capacity": "1GiB"} for name in ("nvme", "pool")}
    decode = {"retrieve_locations": [], "store_locations": ["pool"]}
    section = {"tiers": tiers, "promote_to": "nvme", "roles": {"decode": decode, "prefill": {}}}
    file = tmp_path / "hicache.yaml"
    file.write_text(yaml.safe_dump(ExtraConfig.around(section)))
    assert main(["config", "check", str(file)]) == 0
    output = capsys.readouterr().out
    assert "  as decode: retrieve from: nowhere\n  as decode: store to: pool (sync, default)\n" in output
    assert "  as prefill: retrieve from: nvme, pool\n" in output
    assert "  as prefill: store to: nvme (sync, default), pool (sync, default)\n" in output
    assert "  as prefill: promote to: nvme (configured)\n" in output
