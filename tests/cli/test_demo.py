"""``hicache-ext demo``: what it says, and the whole of it with the small real model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.cli import demo_command
from hicache_ext.cli.demo_command import QUESTIONS, Story, _ask
from hicache_ext.cli.main import main
from hicache_ext.testing.client import CachedTokens, Generation


class Letters:
    """A tokenizer of letters, with a chat template or without."""

    eos_token_id = 0

    def __init__(self, template: bool) -> None:
        self.chat_template = "yes" if template else None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any:
        assert not tokenize and add_generation_prompt
        return "".join(f"<{m['role']}>{m['content'].strip()}</>" for m in messages) + "<assistant>"


@pytest.mark.parametrize("template", [True, False])
def test_each_prompt_of_the_story_begins_with_the_last_prompt_and_its_answer(template: bool) -> None:
    story = Story(Letters(template))
    first = story.ask(QUESTIONS[0])
    said = [1000, 1001, 1002]  # what was generated, however it reads as text
    story.answered(" Once upon a time.\n", [*said, Letters.eos_token_id])
    second = story.ask(QUESTIONS[1])
    assert second[: len(first) + 3] == first + said
    rest = "".join(map(chr, second[len(first) + 3 :]))
    assert rest == (f"</><user>{QUESTIONS[1]}</><assistant>" if template else f"\nuser: {QUESTIONS[1]}\nassistant: ")


def test_an_answer_that_the_template_leaves_out_begins_the_prompt_anew() -> None:
    story = Story(Letters(True))
    first = story.ask(QUESTIONS[0])
    story.answered("", [])
    assert "".join(map(chr, story.ask(QUESTIONS[1]))).startswith("".join(map(chr, first)) + "</><user>")


class Answering:
    """A server that says one thing."""

    def generate(self, prompt: list[int], **_: Any) -> Generation:
        return Generation(
            "Once upon a \x1b[31mtime" + " and again" * 20, (1,), 10, 4, CachedTokens(1, 2, 1), 0.1, 0.2, {}
        )


def test_an_answer_is_printed_in_lines_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    _ask(Answering(), "What then?", [1, 2])  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert "You: What then?" in printed and "Model: Once upon a  [31mtime and again" in printed
    assert "\x1b" not in printed and max(map(len, printed.splitlines())) <= 110


def test_a_directory_that_holds_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hicache.yaml").write_text("mine")
    assert main(["demo", "--directory", str(tmp_path)]) == 2
    assert "holds what no demo has put there" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hicache.yaml"]


def test_a_demo_that_is_told_to_end_takes_its_servers_away_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def demonstrate(_: object) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            ended.append("server")
        return 0

    monkeypatch.setattr(demo_command, "need", lambda *_: None)
    monkeypatch.setattr(demo_command, "_demonstrate", demonstrate)
    assert main(["demo"]) == 130
    assert ended == ["server"]


@pytest.mark.e2e
@pytest.mark.slow
def test_the_demo_goes_on_from_disk_with_equal_answers(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("hicache-ext")), "demo", "--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every answer equals the one computed without any cache." in done.stdout
    assert "from storage" in done.stdout and "random weights" not in done.stdout
    assert done.stdout.count("You: ") == 2 * len(QUESTIONS)
