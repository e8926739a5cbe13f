"""``hicache-ext demo``: ``prove`` of a server of its own, with a stand-in and with the small real model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.cli import prove_command
from hicache_ext.cli.main import main
from hicache_ext.cli.prove_command import DIFFERENT, EQUAL, WITHIN
from hicache_ext.testing import server as real
from tests.cli.test_every_command import documented, fields_of, is_documented
from tests.cli.test_prove_command import Server


class Started(Server):
    """A stand-in that is started and killed as a real server is. Its storage outlives it."""

    wrong_pages = 0.0
    seen: list[str]

    def __init__(self, model: str, **arguments: Any) -> None:
        super().__init__(wrong=self.wrong_pages)
        self.model, self.arguments = model, arguments

    def __enter__(self) -> Started:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def start(self) -> None:
        self.seen.append(f"start {self.model} {' '.join(self.arguments['extra_arguments'])}".strip())

    def kill(self) -> None:
        self.flush_cache()
        self.seen.append("kill")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> type[Started]:
    """The servers that a demo starts; ``seen``: what was done with them."""
    Started.seen, Started.wrong_pages = [], 0.0
    monkeypatch.setattr(prove_command, "need", lambda *_: None)
    monkeypatch.setattr(real, "SglangServer", Started)
    return Started


@pytest.mark.parametrize(("wrong", "code", "verdict"), [(0.0, 0, EQUAL), (0.5, 1, DIFFERENT)])
def test_a_demo_kills_its_server_and_goes_on_from_disk(
    wrong: float, code: int, verdict: str, started: type[Started], capsys: pytest.CaptureFixture[str]
) -> None:
    started.wrong_pages = wrong
    assert main(["demo", "--model", "org/m", "--json", "--", "--tp", "2"]) == code
    document = json.loads(capsys.readouterr().out)
    assert started.seen == ["start org/m --tp 2", "kill", "start org/m --tp 2", "kill"]
    assert document["verdict"] == verdict
    assert {case["restarted"] for case in document["cases"] if case["restored_tokens"]} == {False, True}
    assert [field for field in fields_of(document) if not is_documented(field, documented()["demo"])] == []


def test_a_demo_of_which_nothing_came_back_is_a_problem(
    started: type[Started], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prove_command, "_WAITS", ())
    monkeypatch.setattr(started, "kill", lambda server: server.storage.clear() or server.flush_cache())
    assert main(["demo", "--model", "org/m"]) == 1
    assert "not shown" in capsys.readouterr().out


def test_a_demo_that_is_told_to_end_takes_its_servers_away_first(
    started: type[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    monkeypatch.setattr(started, "generate", told)
    assert main(["demo", "--model", "org/m"]) == 130
    assert started.seen == ["start org/m", "kill"]


def test_a_model_that_is_not_there_is_said_before_a_server_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", "/nonexistent"]) == 2
    assert "--model: '/nonexistent': there is no such directory" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--port", "--host=0.0.0.0"])
def test_the_address_of_a_server_that_is_started_is_no_flag(
    flag: str, started: type[Started], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--model", "org/m", "--", flag, "30000"]) == 2
    assert "--host and --port are chosen" in capsys.readouterr().err
    assert not started.seen


@pytest.mark.e2e
@pytest.mark.slow
def test_the_demo_goes_on_from_disk_with_equal_answers() -> None:
    command = [str(Path(sys.executable).with_name("hicache-ext")), "demo", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["verdict"] in (EQUAL, WITHIN)
    after = [case for case in document["cases"] if case["restarted"]]
    assert after and all(case["restored_tokens"] > case["prompt_tokens"] / 2 for case in after)
