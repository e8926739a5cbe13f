"""What holds for every command: ``--json`` with the documented fields, examples that parse, exit codes, errors."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.cli.main import main, make_parser
from hicache_ext.storage.serving.control import ControlSocket
from tests.cli.commands import EVERY_COMMAND

ROOT = Path(__file__).parents[2]


# -- help --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_every_command_has_json_an_example_that_parses_and_its_exit_codes(command: str) -> None:
    parser = EVERY_COMMAND[command]
    assert "--json" in parser._option_string_actions
    assert parser.description or parser.epilog
    text = parser.epilog or ""
    examples = re.findall(r"^  (hicache-ext .*)$", text, re.MULTILINE)
    assert examples, text
    for example in examples:
        words = shlex.split(re.sub(r" >.*|  +#.*", "", example))
        assert " ".join(words[1:]).startswith(command), example
        chosen = make_parser(words[1])
        assert callable(chosen.parse_args(words[1:]).run)
    assert re.search(r"^exit codes:\n  0 \w", text, re.MULTILINE) and re.search(r"^  2 wrong", text, re.MULTILINE)


@pytest.mark.parametrize("columns", ["30", "80"])
def test_help_bears_a_narrow_terminal(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for parser in EVERY_COMMAND.values():
        parser.print_help()
    assert capsys.readouterr().out


# -- JSON --------------------------------------------------------------------------------------------------------------


def documented() -> dict[str, set[str]]:
    """The fields of each command, as docs/command-line.md has them."""
    page = (ROOT / "docs" / "command-line.md").read_text().partition("## JSON of each command")[2]
    fields = {}
    for section in page.split("\n### ")[1:]:
        title, _, body = section.partition("\n")
        found = {
            field for row in re.findall(r"^\| (`.*?) \|", body, re.MULTILINE) for field in re.findall(r"`([^`]+)`", row)
        }
        fields |= dict.fromkeys(title.split(", "), found)
    return fields


def fields_of(value: Any, place: str = "") -> Iterator[str]:
    """The places of everything in a document: ``tiers[].name``."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from fields_of(item, f"{place}.{key}" if place else key)
    elif isinstance(value, list) and value:
        for item in value:
            yield from fields_of(item, f"{place}[]")
    else:
        yield place + ("[]" if value == [] else ".*" if value == {} else "")


def is_documented(field: str, fields: set[str]) -> bool:
    if field in fields:
        return True
    # Below a place with names that depend on what is there; or an empty list of what has fields.
    return any(known.endswith("*") and field.startswith(known[:-1]) for known in fields) or any(
        known.startswith(f"{field.removesuffix('.*')}.") for known in fields
    )


RUNS: dict[str, list[tuple[str, int]]] = {
    "ls": [("pool", 0), ("hicache.yaml", 0)],
    "stat": [("hicache.yaml", 0), ("pool", 0)],
    "verify": [("pool", 1), ("hicache.yaml", 1)],
    "gc": [("pool", 0), ("hicache.yaml --dry-run", 0)],
    "clear": [("pool --all --dry-run", 0), ("pool --all --yes", 0)],
    "hint": [(f"{action} hicache.yaml --tokens tokens.json", 0) for action in ("retain", "release", "demote")],
    "pin": [("pool --name two --tokens tokens.json --for 1d", 0)],
    "unpin": [("pool --name prompt", 0)],
    "pins": [("pool", 0)],
    "config check": [("hicache.yaml", 0), ("wrong.yaml", 2)],
    "config render": [("--path /a --capacity 1GiB", 0), ("", 0), ("hicache.yaml --inline", 0)],
    "config schema": [("", 0)],
    "doctor": [("hicache.yaml", 0), ("wrong.yaml", 2)],
    "stats": [("{url} --once", 0)],
    "curve": [("{url}", 0)],
    "explain": [("hicache.yaml --tokens tokens.json", 1)],
    "warm": [("hicache.yaml --tokens tokens.json", 1)],
    "reload": [("hicache.yaml", 0), ("--check hicache.yaml", 0)],
    "plan": [
        (
            "--workload rate=1,span=10m --token-bytes 1KiB --nodes 2 --disk 1GB --pool 1GB --dwpd 1 --prefill-rate 100"
            " --price-disk 1",
            0,
        ),
        ("--workload rate=1,span=10m --token-bytes 1KiB", 0),
    ],
    "bench compare": [("a.json b.json", 0), ("a.json b.json --fail-below 0.9", 1)],
}
"""Arguments and exit codes. ``doctor`` may end with 1, as the machine is."""
ELSEWHERE = {"prove", "demo", "bench file", "bench pool", "bench kernels", "bench multiturn"}
"""Commands that start servers or measure for long: below, with stand-ins, and in tests/bench."""


def test_every_command_is_run_for_its_json_here_or_elsewhere_and_documented() -> None:
    assert set(RUNS) | ELSEWHERE == set(EVERY_COMMAND) == set(documented())


@pytest.mark.parametrize("command", RUNS)
def test_json_has_the_documented_fields_and_no_other_and_is_alone_on_standard_output(
    command: str, workplace: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fields, seen = documented()[command], set()
    file = str(workplace / "hicache.yaml")
    control = ControlSocket(lambda request: {"ok": True, "file": file, "messages": ["nothing new"]})
    try:
        for words, expected in RUNS[command]:
            code = main([*command.split(), *words.format(url=url).split(), "--json"])
            printed = capsys.readouterr()
            assert code == expected or command == "doctor", printed.err
            assert printed.out.isascii()
            seen |= set(fields_of(json.loads(printed.out)))
    finally:
        control.close()
    assert [field for field in sorted(seen) if not is_documented(field, fields)] == []
    plain = {field for field in fields if not field.endswith("*")}
    assert sorted(plain - seen) == []


def test_a_benchmark_prints_its_json_alone(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pool", "hicache.yaml", "--tier", "pool", "--quick", "--json"]) == 0
    printed = capsys.readouterr()
    fields = documented()["bench pool"]
    document = json.loads(printed.out)
    assert [field for field in fields_of(document) if not is_documented(field, fields)] == []
    assert document["results"] and "round 1 of" in printed.err and not (workplace / "-").exists()


def test_what_libraries_print_does_not_get_between(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def talks(path: Path) -> Any:
        print("a library says hello")
        return opened(path)

    from hicache_ext.cli import directory_commands
    from hicache_ext.cli.directory_commands import opened

    monkeypatch.setattr(directory_commands, "opened", talks)
    assert main(["stat", "pool", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)[0]["pages"] == 6 and "hello" in printed.err


ERRORS: tuple[tuple[str, int], ...] = (
    ("ls nowhere", 1),
    ("stat nowhere", 1),
    ("verify nowhere", 1),
    ("gc nowhere", 1),
    ("clear nowhere --all", 1),
    ("clear hicache.yaml --all", 1),
    ("clear pool --model none", 1),
    ("clear pool --identity xyz", 2),
    ("pin pool --name two --tokens nowhere", 2),
    ("hint retain pool --tokens tokens.json", 2),
    ("unpin pool --name none", 1),
    ("pins nowhere", 1),
    ("config render --path /a", 2),
    ("stats http://127.0.0.1:1 --once", 1),
    ("explain wrong.yaml --tokens tokens.json", 2),
    ("explain hicache.yaml --tokens nowhere", 2),
    ("warm wrong.yaml --tokens tokens.json", 2),
    ("reload hicache.yaml", 1),
    ("bench compare a.json tokens.json", 2),
    ("bench pool hicache.yaml --tier none", 2),
    ("bench multiturn", 1),
)


@pytest.mark.parametrize(("words", "expected"), ERRORS, ids=[words for words, _ in ERRORS])
def test_an_error_is_a_sentence_on_standard_error_with_json_as_without_it(
    words: str, expected: int, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == expected
    plain = capsys.readouterr()
    assert main([*words.split(), "--json"]) == expected
    printed = capsys.readouterr()
    assert plain.out == printed.out == "" and plain.err == printed.err != ""
    assert "Traceback" not in printed.err


def test_wrong_usage_prints_nothing_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    for command in EVERY_COMMAND:
        with pytest.raises(SystemExit) as stopped:
            main([*command.split(), "--json", "--no-such-option"])
        assert stopped.value.code == 2
    assert capsys.readouterr().out == ""
