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

from hicache_ext.cli.inputs import tokenizer_of
from hicache_ext.cli.output import describe
from hicache_ext.config import load_config
from hicache_ext.config.model import ExtraConfig
from hicache_ext.config.render import as_yaml, launch_lines
from hicache_ext.errors import ConfigError, MissingPackageError, ServerError
from hicache_ext.packages import need
from hicache_ext.runtime.results import print_json
from hicache_ext.runtime.signals import terminated_in_order
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
    parser.add_argument("--keep", action="store_true", help="start from the pages an earlier demo has stored")
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
    if not arguments.keep:
        shutil.rmtree(storage, ignore_errors=True)
    config_file = _write_config(directory, storage, arguments.capacity)

    steps = _Steps(4)
    with steps.step("the model"):
        model, model_arguments = _model(arguments.model, directory)
        story = Story(tokenizer_of(model))
    rig = _Rig(model, directory, config_file, (*model_arguments, *arguments.server_arguments))

    plain: list[Turn] = []
    with steps.step("a server without any cache tells a story"), rig.server_without_cache() as server:
        _warm_up(server)
        for question in QUESTIONS:
            plain.append(_ask(server, question, story.ask(question)))
            story.answered(plain[-1].answer.text, plain[-1].answer.output_ids)
        server.kill()
    cached: list[Turn] = []
    with steps.step("a server with the file tier is asked the same"), rig.server("first-half") as server:
        _warm_up(server)
        cached += [_ask(server, turn.question, turn.prompt) for turn in plain[:RESTART_AFTER]]
        server.flush_cache()
        server.kill()
    with steps.step("it is killed, and a new one goes on from disk"), rig.server("second-half") as server:
        _warm_up(server)
        for turn in plain[RESTART_AFTER:]:
            cached.append(_ask(server, turn.question, turn.prompt, computed=turn.answer))
            server.flush_cache()
        server.kill()

    _print_table(plain, cached)
    with closing(open_inspector(storage)) as inspector:
        pages = sum(1 for _ in inspector.pages())
    if arguments.json:
        print_json({"turns": [_turn(*both) for both in zip(plain, cached, strict=True)], "pages": pages})
    print(f"\n{pages} pages of {PAGE_SIZE} tokens are stored in {storage}; the servers' logs are in {directory}.")
    pairs = enumerate(zip(plain, cached, strict=True), 1)
    different = [number for number, (a, b) in pairs if a.answer.output_ids != b.answer.output_ids]
    if different:
        print(f"The answers of turns {different} differ from those computed without a cache.")
        if "float32" in rig.server_arguments:
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
    from hicache_ext.testing.tiny_model import make_tiny_model

    try:
        made = make_small_model(directory / NAME)
        print(f"      {NAME}")
    except MissingPackageError as error:
        print(f"      {error}\n      A tiny model with random weights takes its place: what it says means nothing.")
        made = make_tiny_model(directory / "model-8x512", layers=8, hidden_size=512, heads=8, kv_heads=4, head_dim=64)
    # Less memory than the default is sooner allocated.
    return str(made), (*arguments_to_serve(), "--max-total-tokens", "8192")


@dataclass(frozen=True, slots=True)
class _Rig:
    """The servers of the demo: one model, one configuration file, the user's own arguments last."""

    model: str
    directory: Path
    config_file: Path
    server_arguments: tuple[str, ...]

    def server(self, name: str) -> SglangServer:
        return SglangServer(
            self.model,
            log_file=self.directory / f"{name}.log",
            page_size=PAGE_SIZE,
            storage_backend="dynamic",
            extra_config=f"@{self.config_file}",
            extra_arguments=self.server_arguments,
            start_timeout=_START_TIMEOUT,
        )

    def server_without_cache(self) -> SglangServer:
        return SglangServer(
            self.model,
            log_file=self.directory / "no-cache.log",
            page_size=PAGE_SIZE,
            hierarchical_cache=False,
            extra_arguments=("--disable-radix-cache", *self.server_arguments),
            start_timeout=_START_TIMEOUT,
        )


def _warm_up(server: SglangServer) -> None:
    """A first request, which pays for what is compiled and loaded once."""
    server.generate(list(range(10, 250)) * 2, max_new_tokens=2, sampling=_SAMPLING, timeout=600)


def _ask(server: SglangServer, question: str, prompt: Sequence[int], computed: Generation | None = None) -> Turn:
    """Ask, and print the answer while it comes; ``computed`` is the same answer without a cache."""
    print(textwrap.fill(f"You: {question}", _WIDTH, initial_indent="      ", subsequent_indent="           "))
    words = _Words("      Model: ")
    answer = server.generate(prompt, max_new_tokens=ANSWER_TOKENS, sampling=_SAMPLING, timeout=600, show=words.show)
    words.end()
    tokens = answer.cached
    reused = tokens.device + tokens.host
    parts = [f"{tokens.storage:,} from storage"] * bool(tokens.storage) + [f"{reused:,} from memory"] * bool(reused)
    first = f"first token after {answer.time_to_first_token:.2f} s"
    if computed is not None:
        first += f" (without a cache: {computed.time_to_first_token:.2f} s)"
    print(f"      [{first}; {len(prompt):,} tokens, {' and '.join(parts) if parts else 'all computed'}]", flush=True)
    return Turn(question, tuple(prompt), answer)


class _Words:
    """Prints a text as it grows, in lines."""

    def __init__(self, start: str) -> None:
        self._printed = 0
        self._indent = len(start)
        self._column = self._indent
        print(start, end="", flush=True)

    def show(self, text: str, *, whole: bool = False) -> None:
        """``text`` is all of it so far; its last word is kept back until it is ``whole``."""
        end = len(text) if whole else max(text.rfind(" "), self._printed)
        for word in text[self._printed : end].split():
            # What a model with random weights says could hold anything.
            shown = "".join(c if c.isprintable() else "?" for c in word)
            if self._column + len(shown) >= _WIDTH:
                print("\n" + " " * self._indent, end="")
                self._column = self._indent
            print(shown + " ", end="", flush=True)
            self._column += len(shown) + 1
        self._printed = end
        self._text = text

    def end(self) -> None:
        self.show(self._text, whole=True)
        print()


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


class _Steps:
    """Prints each step and how long it took."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._number = 0

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        self._number += 1
        print(f"[{self._number}/{self._total}] {title} ...", flush=True)
        started = time.monotonic()
        yield
        print(f"      {time.monotonic() - started:.0f} s", flush=True)


def _print_table(plain: Sequence[Turn], cached: Sequence[Turn]) -> None:
    print()
    print("turn  prompt tokens  from device  from host  from storage   first token   without cache  same answer")
    for number, (turn, reference) in enumerate(zip(cached, plain, strict=True), 1):
        if number == RESTART_AFTER + 1:
            print("----- the server was killed " + "-" * 70)
        answer, without_cache = turn.answer, reference.answer
        tokens = answer.cached
        print(
            f"{number:4}  {len(turn.prompt):13}  {tokens.device:11}  {tokens.host:9}  {tokens.storage:12}"
            f"  {answer.time_to_first_token * 1e3:9.0f} ms  {without_cache.time_to_first_token * 1e3:11.0f} ms"
            f"  {'yes' if answer.output_ids == without_cache.output_ids else 'NO'}"
        )


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
    "Tell me a story about a lighthouse keeper called Marta, who lives on a small island with a white horse.",
    "One night there was a storm. What did Marta see from the top of the tower?",
    "A sailor came to the island in a broken boat. Who was he, and what did he want?",
    "What did the white horse do then?",
    "In the morning the sea was calm. What did they find on the beach?",
    "How does the story end?",
)

_SYSTEM = """You are a friendly storyteller. Your stories play on this island:

The lighthouse of Skarholm stands on a small island in the north, four kilometres from the harbour of Vik. It was \
built in 1874 by the engineer Ida Lund, who had built two bridges before. The work took three summers, because in \
winter no boat could land. Forty men carried the stones up from the beach, and a white horse called Bruno pulled the \
heaviest of them. The tower is thirty-one metres high and has one hundred and forty-eight steps. Its walls are two \
metres thick at the bottom and half a metre thick at the top.

The lamp burned oil until 1926, then gas until 1951. Since then it is electric. The lens was made in Paris; it \
weighs two tons and turns on a bath of mercury, so lightly that a child can move it with one finger. On a clear \
night the light can be seen from forty kilometres. It shows two flashes, then it is dark for ten seconds. Sailors \
call it the Winking Eye.

The first keeper was Jonas Berg. He lived on the island for twenty-nine years with his wife Marta and their five \
children. Marta kept a diary. She wrote about storms, about seals on the beach, and about the ships that passed. In \
the winter of 1891 the sea froze, and the family walked to Vik over the ice to buy flour. The youngest daughter, \
Elsa, became keeper after her father, and she was the first woman in the country who held that post. She stayed \
until 1938.

In the night of 12 November 1903 the steamer Aurora lost her way in the snow and struck the rocks south of the \
island. Elsa and Jonas rowed out four times and saved twenty-three people. The ship's bell was found by divers in \
1978. It hangs beside the door of the house, and each visitor may ring it once. The captain of the Aurora sent the \
family a clock, which still goes and is wound each Sunday.

The last keeper left in 1984, when the light became automatic. The house stood empty for eight years. Then the \
people of Vik bought it for one crown and made a museum of it. They repaired the roof, painted the doors blue, and \
planted a garden with rhubarb, mint and potatoes, as Marta had described it. It has six rooms: the kitchen, the \
bedroom, the school room, the workshop, the oil cellar and the lamp room at the top.

In the kitchen there is a small cafe. It is run by Nils Aker, who bakes waffles after Marta's recipe and serves them \
with cloudberry jam. Coffee is free for those who carry a bucket of water from the well. In the school room children \
can write with ink and a feather. In the workshop a blacksmith shows on Saturdays how the hinges of the doors were \
made.

Puffins nest on the west side from April to August, about two hundred pairs. Grey seals rest on the north beach at \
low tide. There is one old apple tree on the island, which Elsa planted in 1910; its apples are red and sour. The \
highest point is called the Chair, because Marta used to sit there and look for the boat of her husband."""


@dataclass(slots=True)
class Story:
    """The conversation so far, as a model's own tokenizer and chat template write it; ``tokens`` is the next prompt.

    What was answered stays as the tokens that were generated: a tokenizer may make others of the same text, and nothing
    after them would be found in any cache.
    """

    tokenizer: Any
    tokens: list[int] = field(default_factory=list)
    _messages: list[dict[str, str]] = field(default_factory=lambda: [{"role": "system", "content": _SYSTEM}])

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
