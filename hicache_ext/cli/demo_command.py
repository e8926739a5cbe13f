"""``hicache-ext demo``: a conversation continues from disk after a restart.

A real SGLang server without any cache holds a conversation. Another one with the file tier holds the same one, is
killed in the middle, and a new one goes on from disk: its own caches are emptied before each turn. All answers are
compared."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hicache_ext.cli.inputs import our_texts, tokenizer_of
from hicache_ext.cli.output import describe
from hicache_ext.config import load_config
from hicache_ext.config.model import ExtraConfig
from hicache_ext.config.render import as_yaml, launch_lines
from hicache_ext.errors import ConfigError, ServerError
from hicache_ext.packages import need
from hicache_ext.runtime.commands import aligned, print_json, terminated_in_order
from hicache_ext.storage.tiers.file.inspection import open_inspector
from hicache_ext.testing.client import Generation
from hicache_ext.testing.server import SglangServer

RESTART_AFTER = 3
ANSWER_TOKENS = 32
PAGE_SIZE = 16
_ROUNDING = """In 16 bits that can be rounding alone: a prefix computed in other batch shapes rounds differently, with
SGLang's own cache as well. Compare again with --dtype float32 or --enable-deterministic-inference after `--`."""

_SAMPLING = {"ignore_eos": True, "frequency_penalty": 0.8}
"""Greedy, so that answers can be compared; without the penalty a small model soon says one sentence again and again."""

_MARKER = "made-by-hicache-ext-demo"
"""In a directory that a demo may overwrite."""

_WIDTH = 110

_START_TIMEOUT = 1800
"""Seconds, for the load of a large model."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="a model directory or name that SGLang can load (default: a small one that comes as a package)"
    )
    parser.add_argument("--directory", type=Path, default=Path(".demo"), help="where the demo keeps its files")
    parser.add_argument("--capacity", default="2GiB", help="capacity of the file tier (default: %(default)s)")
    parser.add_argument(
        "server_arguments", nargs="*", metavar="-- SERVER ARGUMENT", help="passed to sglang.launch_server, after --"
    )
    describe(
        parser,
        run=run,
        examples=["hicache-ext demo", "hicache-ext demo --model /models/llama --capacity 20GiB -- --tp 2"],
        success="every answer is the one that was computed without a cache",
        problem="an answer differs, nothing came from storage after the restart, or a server failed",
    )


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the conversation: the question, the whole prompt and the answer."""

    question: str
    prompt: tuple[int, ...]
    answer: Generation


def run(arguments: argparse.Namespace) -> int:
    """Hold the conversation twice and print the comparison; 0 when every answer is the same."""
    need("sglang", "torch")
    try:
        with terminated_in_order():
            return _demonstrate(arguments)
    except ServerError as error:
        print(f"The demo's server failed: {error}", file=sys.stderr)
        return 1


def _demonstrate(arguments: argparse.Namespace) -> int:
    directory: Path = arguments.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    marker = directory / _MARKER
    if not marker.exists() and not (directory / "no-cache.log").exists() and any(directory.iterdir()):
        raise ConfigError("--directory", f"{directory} holds what no demo has put there", "a new or empty directory")
    marker.touch()
    storage = directory / "l3"
    shutil.rmtree(storage, ignore_errors=True)
    config_file = _write_config(directory, storage, arguments.capacity)

    with _step("the model"):
        model, model_arguments = _model(arguments.model, directory)
        story = Story(tokenizer_of(model))
    server_arguments = (*model_arguments, *arguments.server_arguments)

    def server_of(name: str, *without_cache: str) -> SglangServer:
        """A server with the user's own arguments last; with the file tier, or else with these arguments."""
        return SglangServer(
            model,
            log_file=directory / f"{name}.log",
            page_size=PAGE_SIZE,
            hierarchical_cache=not without_cache,
            storage_backend=None if without_cache else "dynamic",
            extra_config=None if without_cache else f"@{config_file}",
            extra_arguments=(*without_cache, *server_arguments),
            start_timeout=_START_TIMEOUT,
        )

    plain: list[Turn] = []
    with _step("a server without any cache tells a story"), server_of("no-cache", "--disable-radix-cache") as server:
        _warm_up(server)
        for question in QUESTIONS:
            plain.append(_ask(server, question, story.ask(question)))
            story.answered(plain[-1].answer.text, plain[-1].answer.output_ids)
        server.kill()
    cached: list[Turn] = []
    with _step("a server with the file tier is asked the same"), server_of("first-half") as server:
        _warm_up(server)
        cached += [_ask(server, turn.question, turn.prompt) for turn in plain[:RESTART_AFTER]]
        server.flush_cache()
        server.kill()
    with _step("it is killed, and a new one goes on from disk"), server_of("second-half") as server:
        _warm_up(server)
        for turn in plain[RESTART_AFTER:]:
            cached.append(_ask(server, turn.question, turn.prompt, computed=turn.answer))
            server.flush_cache()
        server.kill()

    turns = [_turn(*both) for both in zip(plain, cached, strict=True)]
    print(_table(turns))
    with closing(open_inspector(storage)) as inspector:
        pages = sum(1 for _ in inspector.pages())
    if arguments.json:
        print_json({"turns": turns, "pages": pages})
    print(f"\n{pages} pages of {PAGE_SIZE} tokens are stored in {storage}; the servers' logs are in {directory}.")
    different = [number for number, turn in enumerate(turns, 1) if not turn["same_answer"]]
    if different:
        print(f"The answers of turns {different} differ from those computed without a cache.")
        if "float32" in server_arguments:
            return 1
        print(_ROUNDING)
    if not cached[RESTART_AFTER].answer.cached.storage:
        print("Nothing came back from storage after the restart; `hicache-ext config check` and the logs may tell why.")
        return 1
    if not different:
        print("Every answer equals the one computed without any cache.")
    _print_what_to_paste(config_file)
    return 0


def _model(given: str | None, directory: Path) -> tuple[str, tuple[str, ...]]:
    """The model to serve and the server arguments it needs."""
    if given is not None:
        return given, ()
    from hicache_ext.testing.small_model import NAME, arguments_to_serve, make_small_model  # torch

    made = make_small_model(directory / NAME)
    print(f"      {NAME}")
    # Less memory than the default is sooner allocated.
    return str(made), (*arguments_to_serve(), "--max-total-tokens", "8192")


def _warm_up(server: SglangServer) -> None:
    """A first request, which pays for what is compiled and loaded once."""
    server.generate(list(range(10, 250)) * 2, max_new_tokens=2, sampling=_SAMPLING, timeout=600)


def _ask(server: SglangServer, question: str, prompt: Sequence[int], computed: Generation | None = None) -> Turn:
    """Ask, and print question and answer; ``computed`` is the same answer without a cache."""
    answer = server.generate(prompt, max_new_tokens=ANSWER_TOKENS, sampling=_SAMPLING, timeout=600)
    for who, said in (("You", question), ("Model", answer.text)):
        # What a model with random weights says could hold anything.
        shown = "".join(c if c.isprintable() else " " for c in f"{who}: {said}")
        print(textwrap.fill(shown, _WIDTH, initial_indent="      ", subsequent_indent="      "))
    tokens = answer.cached
    reused = tokens.device + tokens.host
    parts = [f"{tokens.storage:,} from storage"] * bool(tokens.storage) + [f"{reused:,} from memory"] * bool(reused)
    first = f"first token after {answer.time_to_first_token:.2f} s"
    if computed is not None:
        first += f" (without a cache: {computed.time_to_first_token:.2f} s)"
    print(f"      [{first}; {len(prompt):,} tokens, {' and '.join(parts) if parts else 'all computed'}]", flush=True)
    return Turn(question, tuple(prompt), answer)


def _turn(reference: Turn, turn: Turn) -> dict[str, Any]:
    """For ``--json``; times in seconds."""
    return {
        "prompt_tokens": len(turn.prompt),
        "from_device": turn.answer.cached.device,
        "from_host": turn.answer.cached.host,
        "from_storage": turn.answer.cached.storage,
        "first_token": turn.answer.time_to_first_token,
        "first_token_without_cache": reference.answer.time_to_first_token,
        "same_answer": turn.answer.output_ids == reference.answer.output_ids,
    }


@contextmanager
def _step(title: str) -> Iterator[None]:
    """Print a step and how long it took."""
    print(f"{title} ...", flush=True)
    started = time.monotonic()
    yield
    print(f"      {time.monotonic() - started:.0f} s", flush=True)


def _table(turns: Sequence[dict[str, Any]]) -> str:
    heading = ("turn", "prompt tokens", "from device", "from host", "from storage", "first token", "without cache")
    rows: list[tuple[str, ...]] = [(*heading, "same answer")]
    for number, turn in enumerate(turns, 1):
        tokens = (str(turn[key]) for key in ("prompt_tokens", "from_device", "from_host", "from_storage"))
        times = (f"{1e3 * turn[key]:.0f} ms" for key in ("first_token", "first_token_without_cache"))
        rows.append((str(number), *tokens, *times, "yes" if turn["same_answer"] else "NO"))
    lines = aligned(rows, str.rjust)
    return "\n".join(["", *lines[: RESTART_AFTER + 1], "----- the server was killed", *lines[RESTART_AFTER + 1 :]])


def _write_config(directory: Path, storage: Path, capacity: str) -> Path:
    document = ExtraConfig.around({"tiers": {"disk": {"type": "file", "path": str(storage), "capacity": capacity}}})
    path = directory / "hicache.yaml"
    path.write_text(as_yaml(document))
    load_config(path)
    return path


def _print_what_to_paste(config_file: Path) -> None:
    print("\nFor your own server, put this into a file, with your path and capacity:\n")
    print("".join(f"    {line}\n" for line in config_file.read_text().splitlines()), end="")
    print("\nand launch SGLang with it:\n")
    print("    " + " \\\n      ".join(launch_lines(config_file.name, "both")))


# -- the conversation --------------------------------------------------------------------------------------------------

QUESTIONS = (
    "Tell me a story about Marta, who keeps the books of the harbour.",
    "One night there was a storm. What did Marta see from her window?",
    "A sailor came into the harbour in a broken boat. Who was he, and what did he want?",
    "What did old Henrik do then?",
    "In the morning the sea was calm. What did they find on the beach?",
    "How does the story end?",
)


@dataclass(slots=True)
class Story:
    """The conversation so far, as a model's own tokenizer and chat template write it; ``tokens`` is the next prompt.

    What was answered stays as the tokens that were generated: a tokenizer may make others of the same text, and nothing
    after them would be found in any cache.
    """

    tokenizer: Any
    tokens: list[int] = field(default_factory=list)
    _messages: list[dict[str, str]] = field(default_factory=lambda: [{"role": "system", "content": _system()}])

    def ask(self, question: str) -> list[int]:
        """Add a question; returns a copy of the whole prompt."""
        self._messages.append({"role": "user", "content": question})
        whole = self._write()
        answer = self._messages[-2]["content"]
        if not self.tokens or not answer or answer not in whole:
            self.tokens, written = [], whole
        else:
            written = whole[whole.rindex(answer) + len(answer) :]
        self.tokens += self.tokenizer.encode(written, add_special_tokens=False)
        return list(self.tokens)

    def answered(self, text: str, output_ids: Sequence[int]) -> None:
        """What the model said to the last question."""
        ids = list(output_ids)
        if ids and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()  # the template writes it again
        self.tokens += ids
        self._messages.append({"role": "assistant", "content": text.strip()})

    def _write(self) -> str:
        if getattr(self.tokenizer, "chat_template", None):
            return str(self.tokenizer.apply_chat_template(self._messages, tokenize=False, add_generation_prompt=True))
        return "".join(f"{message['role']}: {message['content']}\n" for message in self._messages) + "assistant: "


def _system() -> str:
    return "You are a friendly storyteller. Your stories go on from this one:\n\n" + our_texts()["prose"].strip()
