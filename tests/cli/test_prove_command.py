"""``hicache-ext prove`` against a stand-in whose restored answers are right, or wrong in a way that is known."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.cli import prove_command
from hicache_ext.cli.main import main
from hicache_ext.cli.prove_command import ANSWER, DIFFERENT, EQUAL, LOSSY, NOT_SHOWN, WITHIN, Proof, as_lines, prove
from hicache_ext.errors import ConfigError, ServerError
from hicache_ext.testing.client import CachedTokens, Generation, SglangClient
from tests.cli.test_every_command import documented, fields_of, is_documented

PAGE = 16
INFO = {
    "version": "0.5.23",
    "model_path": "/models/m",
    "page_size": PAGE,
    "hicache_storage_backend": "dynamic",
    "max_total_num_tokens": 5000,
}

TIERS = ("disk", "all")


class Server:
    """Answers as SGLang does: what it computed it has, on its device until it is flushed and then in storage.

    Args:
        noise: how far the log-probabilities of an answer lie from the true ones when it was computed, in nats.
        wrong: the same of an answer made from pages that were restored.
        info: what ``/server_info`` says differently.
        stores: whether storage keeps anything.
        mixed: whether adapters are left out of what pages are called.
        lossy: whether it counts what is restored as pages of a lossy codec.
        most: tokens of a prompt that come from storage at most.
        forgets: ends of names of which storage keeps nothing.
    """

    def __init__(
        self,
        *,
        noise: float = 0.0,
        wrong: float = 0.0,
        other_token: int | None = None,
        stores: bool = True,
        mixed: bool = False,
        lossy: bool = False,
        most: int = 1 << 20,
        forgets: tuple[str, ...] = (),
        **info: Any,
    ) -> None:
        self.noise, self.wrong, self.other_token, self.stores = noise, wrong, other_token, stores
        self.mixed, self.lossy, self.most, self.forgets = mixed, lossy, most, forgets
        self.info = {**INFO, **info}
        self.device: set[tuple[Any, ...]] = set()
        self.storage: set[tuple[Any, ...]] = set()
        self.restored: set[tuple[Any, ...]] = set()
        self.asked: list[dict[str, Any]] = []
        self.restarts = self.reads = 0
        self.url = "http://127.0.0.1:1"
        self.waiting: list[int] = []
        """Requests of others, at each look to come, the last one first."""
        self._chance = random.Random(1)

    def get(self, path: str, timeout: float = 30) -> str:
        if path == "/metrics":
            values = [f'hicache_ext_bytes_total{{tier="{tier}",reason="get"}} {3e6 * self.reads}' for tier in TIERS]
            values.append(f'hicache_ext_call_seconds_sum{{tier="disk",operation="get"}} {self.reads}')
            values.append(f'hicache_ext_lossy_total{{tier="disk",reason="int8"}} {self.reads * self.lossy}')
            return "\n".join(values)
        if path.startswith("/v1/loads"):
            waiting = self.waiting.pop() if self.waiting else 0
            return json.dumps({"loads": [{"num_running_reqs": 0, "num_waiting_reqs": waiting}]})
        return json.dumps(self.info if path == "/server_info" else {"architectures": ["LlamaForCausalLM"]})

    def request(self, method: str, path: str, body: Any = None, **_: Any) -> str:
        assert (method, path) == ("POST", "/tokenize")
        return json.dumps({"tokens": [ord(character) for character in body["prompt"]]})

    def flush_cache(self, timeout: float = 60) -> None:
        self.device.clear()
        self.restored.clear()

    def generate(self, prompt: Sequence[int], max_new_tokens: int = 16, **body: Any) -> Generation:
        self.asked.append(body)
        name = (tuple(prompt), body.get("extra_key"), None if self.mixed else body.get("lora_path"))
        start = body.get("logprob_start_len", len(prompt) - 1)
        reusable = start // PAGE * PAGE
        from_device, from_storage = name in self.device, name not in self.device and name in self.storage
        if from_storage:
            self.restored.add(name)
            self.reads += 1
        self.device.add(name)
        if self.stores and not str(name[1]).endswith(self.forgets or ("\0",)):
            self.storage.add(name)
        # Restored pages stay what they are when they are asked for once more.
        shift = self.wrong if name in self.restored else self._chance.uniform(-self.noise, self.noise)
        truth = random.Random(str(prompt))
        tokens = [*prompt[start:], *(truth.randrange(1000) for _ in range(max_new_tokens))]
        scores = [[-truth.random() + shift, token, None] for token in tokens]
        if self.other_token is not None and name in self.restored:
            scores[-max_new_tokens + self.other_token][1] = -1
        return Generation(
            text="",
            output_ids=tuple(entry[1] for entry in scores[-max_new_tokens:]),
            prompt_tokens=len(prompt),
            cached_tokens=reusable if from_device or from_storage else 0,
            cached=CachedTokens(device=reusable * from_device, storage=min(self.most, reusable) * from_storage),
            time_to_first_token=0.1 if from_device or from_storage else 1.0,
            total_time=1.0,
            meta_info={
                "input_token_logprobs": scores[:-max_new_tokens],
                "output_token_logprobs": scores[-max_new_tokens:],
            },
        )

    def wait_until_ready(self, timeout: float) -> None:
        pass

    def restart(self) -> None:
        self.restarts += 1
        self.reads = 0
        self.flush_cache()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove_command, "_WAITS", (0.0, 0.0))


def proven(server: Server, **arguments: Any) -> Proof:
    stand_in: Any = server
    return prove(stand_in, quick=True, say=lambda line: None, **arguments)


def test_answers_that_are_equal_to_the_bit() -> None:
    server = Server()
    proof = proven(server)
    assert proof.verdict == EQUAL and proof.pays_from() == 600
    assert [(case.name, case.restored_tokens) for case in proof.cases] == [
        ("600 tokens", 528),
        ("2,000 tokens", 1936),
        ("2 at once", 1936),
    ]
    assert all(case.restored.none and case.spread.none for case in proof.cases)


@pytest.mark.parametrize(
    ("wrong", "verdict"), [(0.0, WITHIN), (0.008, WITHIN), (0.05, DIFFERENT), (float("nan"), DIFFERENT)]
)
def test_a_server_that_rounds_otherwise_each_time_sets_the_measure(wrong: float, verdict: str) -> None:
    assert proven(Server(noise=0.01, wrong=wrong)).verdict == verdict


@pytest.mark.parametrize(("wrong", "verdict"), [(1e-5, WITHIN), (1e-3, DIFFERENT)])
def test_a_small_difference_counts_where_computing_twice_makes_none(wrong: float, verdict: str) -> None:
    """Seen: four at once differed by 8e-6 from what was computed in other batches, twice without a difference."""
    proof = proven(Server(wrong=wrong))
    assert proof.verdict == verdict
    assert all(case.restored.first is None for case in proof.cases)


def test_another_token_is_named_by_its_place() -> None:
    proof = proven(Server(other_token=3, wrong=0.5))
    assert proof.verdict == DIFFERENT and proof.cases[0].restored.first == 3
    assert "600 tokens: the first that differs is token 3 of the answer." in prove_command.as_lines(proof.document())


def test_another_token_is_different_where_computing_twice_makes_no_difference_at_all() -> None:
    assert proven(Server(other_token=0)).verdict == DIFFERENT
    noisy = proven(Server(other_token=0, noise=0.01))
    assert noisy.verdict == WITHIN
    assert any("token 0 of the answer" in line for line in as_lines(noisy.document()))


def test_a_difference_counts_although_another_prompt_was_not_stored() -> None:
    """Several at once may need more host memory than there is."""
    proof = proven(Server(wrong=5.0, forgets=("at-once-1",)))
    assert proof.cases[-1].restored_tokens == 0 and proof.cases[-1].verdict == DIFFERENT


def test_what_did_not_come_from_storage_is_not_called_equal() -> None:
    proof = proven(Server(most=512))
    verdicts = [case.verdict for case in proof.cases]
    assert proof.verdict == EQUAL and EQUAL in verdicts and NOT_SHOWN in verdicts
    assert any("not shown, 512 of " in line for line in as_lines(proof.document()))
    nothing = proven(Server(most=PAGE))
    assert nothing.verdict == NOT_SHOWN and nothing.pays_from() is None


def test_what_the_device_has_taken_from_storage_is_no_measure_of_it() -> None:
    """Asked once more, wrong pages answer as they did before."""
    server = Server(wrong=0.5)
    assert proven(server, restart=server.restart).verdict == DIFFERENT


def test_after_a_restart_all_is_compared_once_more() -> None:
    server = Server()
    proof = proven(server, restart=server.restart)
    assert server.restarts == 1
    assert [case.name for case in proof.cases[3:]] == [f"{case.name}, restarted" for case in proof.cases[:3]]
    assert {case.verdict for case in proof.cases} == {EQUAL}


def test_what_no_restart_has_left_is_not_called_equal() -> None:
    server = Server()

    def restart() -> None:
        server.restart()
        server.storage.clear()

    proof = proven(server, restart=restart)
    assert [case.verdict for case in proof.cases] == [EQUAL] * 3 + [NOT_SHOWN] * 3
    assert proof.verdict == NOT_SHOWN


def test_a_lossy_codec_that_is_seen_after_the_restart_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove_command, "_EXPORTED_WITHIN", 0.0)
    server = Server(enable_metrics=True)

    def restart() -> None:
        server.restart()
        server.lossy = True

    assert {case.verdict for case in proven(server, restart=restart).cases} == {LOSSY}


@pytest.mark.parametrize(("wrong", "code"), [(5.0, 1), (0.0, 2)])
def test_what_was_found_is_told_although_the_server_dies_then(
    wrong: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(wrong=wrong)
    generate = server.generate

    def dies(prompt: Sequence[int], *rest: Any, **body: Any) -> Generation:
        if "at-once" in str(body.get("extra_key")):
            raise ServerError("the server died")
        return generate(prompt, *rest, **body)

    monkeypatch.setattr(server, "generate", dies)
    assert command(server, monkeypatch) == code
    printed = capsys.readouterr()
    told = printed.out if wrong else printed.err
    assert "the server died" in told and ("DIFFERENT" in printed.out) == bool(wrong)


def test_an_adapter_is_asked_besides() -> None:
    server = Server(lora_paths=[{"lora_name": "style", "lora_path": "/adapters/style"}])
    assert proven(server).cases[-1].name == "adapter style"
    assert {"lora_path": "style"}.items() <= server.asked[-1].items()


def test_adapters_that_are_mixed_up_are_found_although_computing_twice_differs_as_much() -> None:
    style = [{"lora_name": "style", "lora_path": "/adapters/style"}]
    proof = proven(Server(lora_paths=style, mixed=True))
    assert [(case.verdict, case.strange_tokens) for case in proof.cases[2:]] == [(EQUAL, 0), (DIFFERENT, 2 * 1936)]
    said = "adapter style: 3,872 tokens of another prompt or adapter were taken."
    assert said in prove_command.as_lines(proof.document())
    assert {case.verdict for case in proven(Server(lora_paths=style)).cases} == {EQUAL}


class Rounding(Server):
    """Every answer rounds otherwise, each token by itself and some of them by far (Student's t of 3 degrees)."""

    def __init__(self, seed: int, wrong: float = 0.0) -> None:
        super().__init__(wrong=wrong)
        self.rounding = random.Random(seed)

    def generate(self, prompt: Sequence[int], max_new_tokens: int = 16, **body: Any) -> Generation:
        answer = super().generate(prompt, max_new_tokens, **body)
        for part in ("input", "output"):
            for score in answer.meta_info[f"{part}_token_logprobs"]:
                spread = math.sqrt(sum(self.rounding.gauss(0, 1) ** 2 for _ in range(3)) / 3)
                score[0] += 0.01 * self.rounding.gauss(0, 1) / spread
        return answer


def test_200_runs_without_a_false_alarm_and_200_in_which_the_fault_is_found() -> None:
    assert {proven(Rounding(seed)).verdict for seed in range(200)} == {WITHIN}
    assert {proven(Rounding(seed, wrong=0.2)).verdict for seed in range(200)} == {DIFFERENT}


def test_the_speed_of_the_tiers_is_their_own_and_that_of_a_server_with_metrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prove_command, "_EXPORTED_WITHIN", 0.0)
    assert proven(Server()).document()["read_bytes_per_second"] is None
    proof = proven(Server(enable_metrics=True))
    assert [case.read_seconds for case in proof.cases] == [1, 1, 2]
    assert [case.read_bytes for case in proof.cases] == [3e6, 3e6, 6e6]
    document = proof.document()
    assert document["read_bytes_per_second"] == 3e6
    said = "Tiers were read at 2.9MiB", "Of the 100 ms to the first token of 2,000 tokens, restored, they are 1000 ms;"
    assert any(line.startswith(said[0]) and said[1] in line for line in prove_command.as_lines(document))


@pytest.mark.parametrize(
    ("faults", "verdict"),
    [
        ({"wrong": 0.0}, LOSSY),
        ({"wrong": 0.05}, LOSSY),
        ({"wrong": 0.05, "noise": 0.01}, LOSSY),
        ({"wrong": 0.05, "other_token": 16}, LOSSY),
        ({"wrong": 0.7}, DIFFERENT),
        ({"wrong": float("nan")}, DIFFERENT),
    ],
)
def test_pages_of_a_lossy_codec_are_never_equal_and_what_no_codec_does_is_different(
    faults: dict[str, Any], verdict: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prove_command, "_EXPORTED_WITHIN", 0.0)
    server = Server(lossy=True, enable_metrics=True, **faults)
    assert command(server, monkeypatch, "--json") == (1 if verdict == DIFFERENT else 2)
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == verdict
    assert [field for field in fields_of(document) if not is_documented(field, documented()["prove"])] == []
    lossy, first = document["lossy"], faults.get("other_token", ANSWER)
    assert lossy["equal_tokens"] == first / ANSWER and lossy["equal_tokens_twice"] == 1.0
    if math.isfinite(faults["wrong"]):
        assert lossy["mean"] == pytest.approx(faults["wrong"], abs=0.02)
    assert any("lossy codec" in line for line in prove_command.as_lines(document))


def test_a_lossy_codec_that_no_server_tells_of_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove_command, "_EXPORTED_WITHIN", 0.0)
    assert proven(Server(lossy=True, wrong=0.05)).verdict == DIFFERENT
    exact = proven(Server(enable_metrics=True, wrong=0.05))
    assert exact.verdict == DIFFERENT and exact.lossy() is None


@pytest.mark.parametrize("refused", [None, ServerError("no\ntemplate"), TimeoutError("too slow")])
def test_an_image_is_tried_where_the_model_sees_any(refused: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(wrong=0.1)
    get = server.get
    answers = {"/model_info": '{"architectures": ["Qwen"], "has_image_understanding": true}'}
    monkeypatch.setattr(server, "get", lambda path, timeout=30: answers.get(path) or get(path))

    def chat(messages: Any, max_new_tokens: int, **body: Any) -> Generation:
        if refused is not None:
            raise refused
        text, image, _ = messages[0]["content"]
        assert image["image_url"]["url"].startswith("data:image/x-portable-pixmap;base64,UDYg")
        return server.generate([ord(letter) for letter in text["text"]][:600], max_new_tokens, **body)

    monkeypatch.setattr(server, "chat", chat, raising=False)
    proof = proven(server)
    if refused is None:
        assert proof.facts["not_tried"] is None
        case = proof.cases[-1]
        assert (case.name, case.prompt_tokens, case.verdict) == ("an image", 600, DIFFERENT)
    else:
        why = str(refused).partition("\n")[0]
        assert proof.facts["not_tried"] == f"prompts with images ({why})"


@pytest.mark.parametrize(
    "answer", ["no JSON", "{}", '{"choices": []}', '{"choices": [{"message": {}, "meta_info": null}]}']
)
def test_a_chat_that_says_nothing_of_its_tokens_is_refused(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = SglangClient("http://127.0.0.1:1")
    monkeypatch.setattr(client, "request", lambda *_, **__: answer)
    with pytest.raises(ServerError, match="return_meta_info"):
        client.chat([], 4)


def test_no_name_is_asked_before_or_shared_by_two_runs() -> None:
    servers = [Server(), Server()]
    for server in servers:
        proven(server)
    names = [{body["extra_key"] for body in server.asked} for server in servers]
    assert all(len(some) > 4 for some in names) and not names[0] & names[1]


# -- the canary --------------------------------------------------------------------------------------------------------


class Ended(Exception):
    """The last pause of a canary."""


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Proof | None, list[str]]]:
    """``watched(server, turns)``: the canary over two prompts, the server being restarted after each turn of both; what
    it found, and what it said. ``told`` of the server is what its processes were asked."""
    monkeypatch.setattr(prove_command, "_CANARIES", 2)

    def watch(server: Any, turns: int = 3) -> tuple[Proof | None, list[str]]:
        pauses, said = itertools.count(1), []

        def sleep(seconds: float) -> None:
            number = next(pauses)
            if number == 2 * turns:
                raise Ended
            if number % 2 == 0:
                server.flush_cache()

        server.told = []
        answer = getattr(server, "answer", {"ok": True})
        monkeypatch.setattr(prove_command.time, "sleep", sleep)
        monkeypatch.setattr(prove_command, "_processes", lambda server: [tmp_path / "rank"])
        monkeypatch.setattr(prove_command, "ask", lambda path, request: server.told.append((path, request)) or answer)
        try:
            return prove_command.watch(server, 0.5, say=said.append), said
        except Ended:
            return None, said

    return watch


@pytest.mark.parametrize(("noise", "wrong"), [(0.0, 0.0), (0.01, 0.008)])
def test_a_canary_compares_what_comes_from_storage_and_raises_no_false_alarm(
    noise: float, wrong: float, watched: Callable[..., Any]
) -> None:
    server = Server(noise=noise, wrong=wrong)
    found, said = watched(server)
    assert found is None and not server.told
    verdict = WITHIN if noise else EQUAL
    both = [f"600 tokens: 528 of 600 tokens from storage: {verdict}"]
    both.append(f"2,000 tokens: 1,936 of 2,000 tokens from storage: {verdict}")
    # The first turn computes and stores them.
    assert said == 2 * both


def test_a_canary_that_finds_a_difference_ends_storage_once_and_flushes(watched: Callable[..., Any]) -> None:
    server = Server(wrong=0.05)
    found, said = watched(server)
    assert found is not None and found.verdict == DIFFERENT and len(found.cases) == 1
    assert [request["call"] for _, request in server.told] == ["distrust"]
    assert "differs by 0.05, computing again by 0" in server.told[0][1]["why"]
    assert not server.device and said[-1].startswith("storage has ended")


def test_a_canary_whose_word_is_not_taken_says_so_and_tells_what_it_found(
    watched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server: Any = Server(wrong=0.05)
    server.answer = {"ok": False, "messages": ["unknown call"]}

    def busy(timeout: float) -> None:
        raise ServerError("it is busy")

    flush = server.flush_cache
    monkeypatch.setattr(server, "flush_cache", lambda timeout=None: flush() if timeout is None else busy(timeout))
    found, said = watched(server)
    assert found is not None and found.verdict == DIFFERENT
    assert [line.partition(":")[0] for line in said[-2:]] == ["STOP THIS SERVER"] * 2


def test_a_canary_goes_on_after_a_restart_of_the_server(
    watched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    answers, looks = server.generate, itertools.count()

    def generate(prompt: Sequence[int], max_new_tokens: int = 16, **body: Any) -> Generation:
        if next(looks) == 3:
            raise ServerError("connection refused")
        return answers(prompt, max_new_tokens, **body)

    monkeypatch.setattr(server, "generate", generate)
    monkeypatch.setattr(server, "wait_until_ready", lambda timeout: server.restart())
    _, said = watched(server, turns=6)
    assert server.restarts == 1 and sum("does not answer" in line for line in said) == 1
    assert said[-1].endswith(EQUAL)


def test_a_canary_waits_while_others_ask(watched: Callable[..., Any]) -> None:
    server = Server()
    server.waiting = [1]
    assert watched(server, turns=1) == (None, [])
    # One pause for the others, one behind the first prompt: the second prompt was not asked.
    assert len(server.asked) == 1


def test_a_canary_that_could_not_end_storage_does_not_begin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server = Server()
    facts: dict[Path, dict[str, Any]] = {tmp_path / "other": {"port": 2}, tmp_path / "older": {}}
    monkeypatch.setattr(prove_command, "servers", lambda: iter(facts))
    monkeypatch.setattr(prove_command, "facts_of", facts.get)
    assert command(server, monkeypatch, "--canary", "0.1%") == 2
    assert "no process of http://127.0.0.1:1 can be told to end storage" in capsys.readouterr().err
    assert not server.asked
    facts[tmp_path / "rank"] = {"port": 1, "file": "/a.yaml", "exact": True}
    stand_in: Any = server
    assert prove_command._processes(stand_in) == [tmp_path / "rank"]
    facts[tmp_path / "namespace"] = {"port": 1, "file": "/b.yaml", "exact": True}
    with pytest.raises(ConfigError, match="several configurations"):
        prove_command._processes(stand_in)
    facts[tmp_path / "namespace"] = {"port": 1, "file": "/a.yaml", "exact": False}
    with pytest.raises(ConfigError, match="lossy codec"):
        prove_command._processes(stand_in)


@pytest.mark.parametrize("share", ["0", "2", "-1%", "much"])
def test_a_share_of_the_time_is_more_than_nothing_and_no_more_than_all(share: str) -> None:
    with pytest.raises(SystemExit):
        main(["prove", "--url", "http://127.0.0.1:1", "--canary", share])
    assert prove_command.share_of_time("0.1%") == 0.001 and prove_command.share_of_time("0.5") == 0.5


def command(server: Server, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(prove_command, "SglangClient", lambda url, headers: server)
    return main(["prove", "--url", "http://127.0.0.1:1", "--quick", *words])


@pytest.mark.parametrize(
    ("server", "code", "words"),
    [
        (Server(), 0, EQUAL),
        (Server(noise=0.01), 0, WITHIN),
        (Server(wrong=0.5), 1, "Stop using this storage"),
        (Server(stores=False), 2, NOT_SHOWN),
    ],
    ids=["equal", "within", "different", "nothing restored"],
)
def test_the_exit_code_and_the_words(
    server: Server, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(server, monkeypatch) == code
    assert words in capsys.readouterr().out


def test_json_and_reports(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(Server(), monkeypatch, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == EQUAL and document["server"]["sglang"] == "0.5.23"
    assert document["cases"][0]["restored_seconds"] == 0.1
    assert [field for field in fields_of(document) if not is_documented(field, documented()["prove"])] == []
    assert command(Server(), monkeypatch) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"# Restored answers: {EQUAL}\n\n| prompt ")
    assert "2 at once: 1,936 of 2,000 tokens from storage" in printed.err


def test_a_key_that_cannot_be_read_gets_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(Server(), monkeypatch, "--api-key-file", "/no/such/file") == 2
    assert "--api-key-file" in capsys.readouterr().err


def test_a_server_without_storage_or_that_dies_is_no_proof(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(Server(hicache_storage_backend=None), monkeypatch) == 2
    assert "without --hicache-storage-backend" in capsys.readouterr().err

    def dies(*_: Any, **__: Any) -> Generation:
        raise ServerError("the server died")

    server = Server()
    monkeypatch.setattr(server, "generate", dies)
    assert command(server, monkeypatch) == 2
    assert "It could not be tried: the server died" in capsys.readouterr().err


@pytest.mark.parametrize(("shell", "code"), [("true", 0), ("exit 3", 2)])
def test_a_restart_is_a_command_that_has_to_end_well(
    shell: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(Server(), monkeypatch, "--restart", shell) == code
    printed = capsys.readouterr()
    assert ("600 tokens, restarted" in printed.out) == (code == 0)
    assert ("--restart ended with 3" in printed.err) == (code == 2)


def test_the_key_of_a_server_is_sent_and_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("a-secret\n")
    given = []

    def client(url: str, headers: dict[str, str]) -> Server:
        given.append(headers)
        return Server(stores=False)

    monkeypatch.setattr(prove_command, "SglangClient", client)
    arguments = ["prove", "--url", "http://127.0.0.1:1", "--quick", "--api-key-file", str(tmp_path / "key")]
    assert main(arguments) == 2
    assert given == [{"Authorization": "Bearer a-secret"}]
    assert "a-secret" not in "".join(capsys.readouterr())
