"""``hicache-ext prove``: whether restored answers are the computed ones on your server, and what restoring saves.

Every prompt is computed twice, under two names (``extra_key``) that share no cache: how far the two answers lie apart
is the *spread* that rounding alone makes on this server. It is asked a third time, from device memory. Then device and
host memory are flushed, and what storage brings back is compared: tokens at temperature 0, and the log-probabilities of
the end of the prompt and of the answer, token by token. They all attend to the restored pages.

Where a tier has a lossy codec (a server with ``--enable-metrics`` counts such pages), answers differ by as much as a
small fault makes them: how far is said, and only what no codec does is DIFFERENT. docs/codecs.md.

``hicache-ext demo`` is the same with servers of its own, which serve a small model that comes as a package.

``--canary`` flushes nothing: it asks the same prompts again and again while the server is idle, and compares those that
storage has restored meanwhile. Why it is a process of its own: docs/decisions/canary.md.
"""

from __future__ import annotations

import argparse
import base64
import functools
import http.client
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hicache_ext.cli.inputs import read_input, unusable_model
from hicache_ext.cli.output import argument, command, show
from hicache_ext.cli.server_commands import facts_of, read_samples
from hicache_ext.config import rounded_size
from hicache_ext.config.model import ExtraConfig
from hicache_ext.errors import ConfigError, ControlError, ServerError
from hicache_ext.packages import need
from hicache_ext.runtime.commands import aligned, terminated_in_order
from hicache_ext.runtime.shown import shown_address, shown_text
from hicache_ext.runtime.threads import ThreadPool
from hicache_ext.storage.serving.control import ask, servers
from hicache_ext.storage.serving.metrics_export import CALL_SECONDS, PREFIX
from hicache_ext.testing.client import Generation, SglangClient

LENGTHS = (600, 1500, 4000, 8000, 16000, 32000)
QUICK_LENGTHS = (600, 2000)
"""Tokens of the prompts, as far as the server takes them."""
AT_ONCE = 8
TAIL = 64
"""Tokens at the end of a prompt that every run computes, with their log-probabilities."""
ANSWER = 32
_SIDE = 168
"""Pixels of an image."""
_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds after which what was not yet stored is looked for again."""
_START_TIMEOUT = 1800.0
_EXPORTED_WITHIN = 2.0
"""Seconds after which a server's metrics have what was counted before."""
_ROUNDING = 1e-4
"""Nats that are rounding by any measure, where computing twice happened to make no difference: in float32, batches of
other sizes differ by about 1e-5."""
_NO_NUMBER = 1e9
"""The distance assigned between NaN and any log-probability, in nats."""
EQUAL, WITHIN, DIFFERENT, NOT_SHOWN = "equal to the bit", "equal within the spread", "DIFFERENT", "not shown"
LOSSY = "lossy, not judged"
_WORST, _MEAN = 4.0, 2.0
"""A restored answer lies within the spread when its largest and its mean difference are at most so many times those of
computing twice. In 300 runs of the stand-in whose rounding has long tails the largest was up to 2.9 times that, and the
mean up to 1.4."""
_LOSSY = 0.5
"""Nats: by the mean, no codec is so far away. SmolLM2 in float32: int8 0.01, fp8 0.04, codes of 4 bits 0.22, a page of
zeros 0.30, layers exchanged 4.2, codes without their scales 14; but a head of zeros in one layer 0.06 to 0.08."""


def share_of_time(text: str) -> float:
    share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 < share <= 1:
        raise ValueError
    return share


@command(
    argument(
        "--url",
        required=True,
        help="a server that runs, such as http://127.0.0.1:30000: it is flushed, and its storage keeps the prompts",
    ),
    argument("--quick", action="store_true", help="two short prompts and no more than a minute on a GPU"),
    argument("--restart", metavar="COMMAND", help="restarts the server; what it restores then is compared too"),
    argument(
        "--canary",
        type=share_of_time,
        metavar="SHARE",
        help="until it is ended, for at most this share of the time (0.1%%) and while the server is idle, "
        "compare what is restored, and flush nothing; a difference ends storing and restoring there",
    ),
    argument("--api-key-file", metavar="FILE", help="holds the key of a server with --api-key"),
    examples=("--url http://127.0.0.1:30000 > proof.md", "--url http://127.0.0.1:30000 --canary 0.1%"),
    problem="a restored answer is DIFFERENT",
    nothing="nothing could be shown",
)
def prove_command(arguments: argparse.Namespace) -> int:
    headers = {}
    if arguments.api_key_file is not None:
        key = read_input(arguments.api_key_file, "--api-key-file").strip()
        if not (key.isascii() and key.isprintable()):
            raise ConfigError("--api-key-file", "it holds no key", "a file with the key in one line of ASCII")
        headers["Authorization"] = f"Bearer {key}"
    server = SglangClient(arguments.url, headers)

    def restart() -> None:
        code = subprocess.run(arguments.restart, shell=True, check=False, stdout=2).returncode
        if code != 0:
            raise ServerError(f"--restart ended with {code}")
        server.wait_until_ready(_START_TIMEOUT)

    def proof() -> Proof:
        if arguments.canary is not None:
            return watch(server, arguments.canary, say=_say)
        return prove(server, quick=arguments.quick, restart=restart if arguments.restart else None, say=_say)

    return _tell(arguments, proof)


@command(
    argument(
        "--model", help="a model directory or name that SGLang can load (default: a small one that comes as a package)"
    ),
    argument(
        "server_arguments", nargs="*", metavar="-- SERVER ARGUMENT", help="passed to sglang.launch_server, after --"
    ),
    examples=("", "--model /models/llama -- --tp 2"),
    problem="an answer differs, nothing came from storage after the restart, or a server failed",
)
def demo_command(arguments: argparse.Namespace) -> int:
    """Prove it of a server that is started for it; 1 also where nothing could be shown."""
    need("sglang", "torch")
    from hicache_ext.testing.server import SglangServer

    flags = arguments.server_arguments
    if any(flag.partition("=")[0] in ("--host", "--port") for flag in flags):
        raise ConfigError("--", "--host and --port are chosen", "neither, or hicache-ext prove of a server that runs")
    with terminated_in_order(), tempfile.TemporaryDirectory(prefix="hicache-demo-") as directory:
        if (model := arguments.model) is None:
            from hicache_ext.testing.small_model import NAME, arguments_to_serve, make_small_model  # torch

            model = str(make_small_model(Path(directory) / NAME))
            # Less memory than the default is sooner allocated.
            flags = [*arguments_to_serve(), "--max-total-tokens", "8192", *flags]
        elif problem := unusable_model(model):
            raise ConfigError("--model", problem, "the directory or name of a model")
        tier = {"type": "file", "path": f"{directory}/pages", "capacity": "16GiB"}
        ours = not any(flag.startswith("--hicache-storage-backend") for flag in flags)
        server = SglangServer(
            model,
            log_file=Path(directory) / "server.log",
            page_size=64,
            storage_backend="dynamic" if ours else None,
            extra_config=ExtraConfig.around({"tiers": {"disk": tier}}) if ours else None,
            extra_arguments=flags,
            start_timeout=_START_TIMEOUT,
        )

        def restart() -> None:
            server.kill()
            server.start()

        def proof() -> Proof:
            _say("A server computes prompts, is flushed, is killed, and a new one goes on from disk.")
            with server:
                return prove(server, quick=True, restart=restart, say=_say)

        code = _tell(arguments, proof)
    _say("For your own server: hicache-ext config render --path DIRECTORY --capacity SIZE > hicache.yaml")
    return min(code, 1)


def _tell(arguments: argparse.Namespace, find: Callable[[], Proof]) -> int:
    """Print what is found; 0 for equal, 1 for different, 2 where it could not be shown."""
    try:
        with terminated_in_order():
            proof = find()
    except (ServerError, OSError, http.client.HTTPException) as error:
        print(shown_address(f"It could not be tried: {error}"), file=sys.stderr)
        return 2
    document = proof.document()
    show(arguments, document, as_lines(document))
    return {EQUAL: 0, WITHIN: 0, DIFFERENT: 1}.get(proof.verdict, 2)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- what is compared --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """The distance between two answers to one prompt over ``tokens`` log-probabilities, in nats."""

    tokens: int = 0
    first: int | None = None
    """The first token that differs: below 0 in the end of the prompt, from 0 on in the answer."""
    worst: float = 0.0
    mean: float = 0.0
    answer_tokens: int = 0
    equal_tokens: int = 0
    """Tokens of the answer before the first one that differs."""

    @property
    def none(self) -> bool:
        return self.tokens > 0 and self.first is None and self.worst == 0

    def joined(self, other: Difference) -> Difference:
        """Return the larger of each, and sums of what is counted."""
        first = self.first if other.first is None else other.first
        worst, mean = max(self.worst, other.worst), max(self.mean, other.mean)
        counts = self.answer_tokens + other.answer_tokens, self.equal_tokens + other.equal_tokens
        return Difference(self.tokens + other.tokens, first, worst, mean, *counts)

    @property
    def equal_share(self) -> float:
        return self.equal_tokens / max(1, self.answer_tokens)

    def within(self, spread: Difference) -> bool:
        if self.first is not None and spread.none:
            return False  # computing twice made no difference at all, so no two tokens were equally likely by chance
        return self.worst <= max(_ROUNDING, _WORST * spread.worst) and self.mean <= max(_ROUNDING, _MEAN * spread.mean)


def difference(one: Generation, other: Generation) -> Difference:
    """Compare two answers, up to the first token that they do not share. Raises ServerError."""
    pairs = list(zip(_scores(one), _scores(other), strict=False))
    answer = min(len(one.output_ids), len(other.output_ids))
    prompt = len(pairs) - answer
    apart: list[float] = []
    first = None
    for at, ((token, score), (other_token, other_score)) in enumerate(pairs):
        apart.append(abs(score - other_score) if math.isfinite(score - other_score) else _NO_NUMBER)
        if token != other_token:
            first = at - prompt
            break
    if not apart:
        raise ServerError("the server gives no log-probabilities (return_logprob)")
    equal = answer if first is None else max(0, first)
    return Difference(len(apart), first, max(apart), sum(apart) / len(apart), answer, equal)


def _scores(answer: Generation) -> list[tuple[int, float]]:
    """The tokens of the end of the prompt and of the answer, with their log-probabilities."""
    entries = [entry for part in ("input", "output") for entry in answer.meta_info.get(f"{part}_token_logprobs") or ()]
    return [(int(entry[1]), float(entry[0])) for entry in entries if entry[0] is not None]


Prompt = tuple[tuple[int, ...], Mapping[str, Any]]
"""One that is asked, and what its request says besides; one with ``messages`` has no tokens here: the chat route makes
them."""


@dataclass(slots=True)
class Case:
    """Prompts that were asked at the same time, and what came of it; seconds are medians of the first tokens."""

    name: str
    prompt_tokens: int
    spread: Difference = Difference()
    restored: Difference = Difference()
    restored_tokens: int = 0
    """Tokens from storage: the minimum over all prompts."""
    lossy: bool = False
    """The server has counted pages of a lossy codec, in this case or another one."""
    restarted: bool = False
    read_bytes: float = 0.0
    read_seconds: float = 0.0
    """Both of all tiers' own calls for the restored pages, in all processes; 0 without ``--enable-metrics``."""
    strange_tokens: int = 0
    """Tokens of prompts that nobody had asked under these names, and that were not computed: names are mixed up."""
    computed_seconds: float = 0.0
    restored_seconds: float = 0.0

    @property
    def verdict(self) -> str:
        if self.lossy:
            apart = self.restored.mean > max(_LOSSY, _MEAN * self.spread.mean)
        else:
            apart = not self.restored.within(self.spread)
        if self.strange_tokens or apart:
            return DIFFERENT
        if not self.is_shown:
            return NOT_SHOWN
        if self.lossy:
            return LOSSY
        return EQUAL if self.restored.none else WITHIN

    @property
    def is_shown(self) -> bool:
        """Whether most of every prompt, but for its end, came from storage; nothing is proven of the rest."""
        return self.restored_tokens > 0 and 2 * self.restored_tokens >= self.prompt_tokens - TAIL


@dataclass(slots=True)
class Proof:
    """The findings about one server."""

    facts: dict[str, Any]
    cases: list[Case] = field(default_factory=list)

    def lossy(self) -> dict[str, float] | None:
        """Return how far all restored answers and those computed twice lie apart, where a codec is lossy: mean absolute
        differences (of the prompt where it is most) in nats, and shares of answer tokens before the first other one."""
        if not any(case.lossy for case in self.cases):
            return None
        restored, twice = (
            functools.reduce(Difference.joined, (getattr(case, name) for case in self.cases))
            for name in ("restored", "spread")
        )
        found = {"mean": restored.mean, "mean_twice": twice.mean}
        return {**found, "equal_tokens": restored.equal_share, "equal_tokens_twice": twice.equal_share}

    @property
    def verdict(self) -> str:
        before, after = ({case.verdict for case in self.cases if case.restarted is it} for it in (False, True))
        verdicts = before | after
        if DIFFERENT not in verdicts and after == {NOT_SHOWN}:
            return NOT_SHOWN  # what a restart leaves was asked for
        return next((worst for worst in (DIFFERENT, LOSSY, WITHIN, EQUAL) if worst in verdicts), NOT_SHOWN)

    def pays_from(self) -> int | None:
        """Return the prompt length from which on restoring was faster, in tokens."""
        found = None
        for case in sorted((c for c in self.cases if c.name.endswith(" tokens")), key=lambda c: c.prompt_tokens):
            faster = case.is_shown and case.restored_seconds < case.computed_seconds
            found = (found or case.prompt_tokens) if faster else None
        return found

    def document(self) -> dict[str, Any]:
        cases = [{**asdict(case), "verdict": case.verdict} for case in self.cases]
        read, seconds = (sum(getattr(case, f"read_{name}") for case in self.cases) for name in ("bytes", "seconds"))
        rate = read / seconds if read > 0 and seconds > 0 else None
        speed = {"pays_from_tokens": self.pays_from(), "read_bytes_per_second": rate}
        return {"verdict": self.verdict, "lossy": self.lossy(), "server": self.facts, **speed, "cases": cases}


# -- asking ------------------------------------------------------------------------------------------------------------


def prove(
    server: SglangClient,
    *,
    quick: bool = False,
    restart: Callable[[], None] | None = None,
    say: Callable[[str], None] = print,
) -> Proof:
    """Ask prompts, and compare. Flushes the server's caches, and writes to its storage. Raises ServerError, OSError."""
    salt = f"hicache-ext-prove-{random.SystemRandom().getrandbits(64):x}"
    asked = _Asked(server, salt)
    info = asked.info
    proof = Proof(_facts(server, info))
    if not any(proof.facts[name] for name in ("storage", "linker")):
        raise ServerError("this server has no storage: it was started without --hicache-storage-backend")
    longest = asked.longest()
    lengths = [length for length in (QUICK_LENGTHS if quick else LENGTHS) if length <= longest] or [longest]
    # Each prompt has a name of its own, so that they do not share what is restored; the adapter's is that of the same
    # prompt without it.
    prompts: list[Prompt] = [(asked.prompt(length), {"extra_key": f"{salt}-{length}"}) for length in lengths]
    groups = [(f"{len(prompt[0]):,} tokens", [prompt]) for prompt in prompts]
    middle, named = min(prompts, key=lambda prompt: abs(len(prompt[0]) - 2000))
    fit = max(1, min(AT_ONCE, asked.longest(1) // (len(middle) + ANSWER)))
    alone: list[Prompt] = [(asked.prompt(len(middle)), {"extra_key": f"{salt}-at-once-{at}"}) for at in range(fit)]
    groups.append((f"{fit} at once", alone))
    for adapter in (info.get("lora_paths") or ())[:1]:
        name = adapter.get("lora_name") if isinstance(adapter, dict) else adapter
        groups.append((f"adapter {name}", [(middle, {**named, "lora_path": str(name)})]))
    if json.loads(server.get("/model_info")).get("has_image_understanding"):
        about = asked.about_an_image()
        try:
            server.chat(about, ANSWER, extra_key=f"{salt}-warm", timeout=_START_TIMEOUT)
            groups.append(("an image", [((), {"messages": about, "extra_key": f"{salt}-image"})]))
        except (ServerError, OSError, http.client.HTTPException) as error:
            proof.facts["not_tried"] = f"prompts with images ({shown_text(str(error).partition(chr(10))[0])})"
    server.generate(asked.prompt(min(lengths)), 2, extra_key=f"{salt}-warm")
    answers = []
    failed: Exception | None = None
    try:
        asked.reads()
        for name, group in groups:
            case = Case(name, len(group[0][0]))
            answers.append((case, group, asked.compute(case, group)))
            proof.cases.append(case)
            asked.restore(*answers[-1])
            say(_line(case))
        if restart is not None:
            restart()
            asked.reads()
            for before, group, known in answers:
                case = Case(f"{before.name}, restarted", before.prompt_tokens, before.spread, restarted=True)
                case.computed_seconds = before.computed_seconds
                proof.cases.append(case)
                asked.restore(case, group, known)
                say(_line(case))
    except (ServerError, OSError, http.client.HTTPException) as error:
        failed = error
    if proof.cases:
        # What happens seldom is seen in few of the cases.
        spread = functools.reduce(Difference.joined, (case.spread for case in proof.cases))
        lossy = any(case.lossy for case in proof.cases)
        for case in proof.cases:
            case.spread, case.lossy = spread, lossy
    if failed is not None:
        if proof.verdict != DIFFERENT:
            raise failed
        proof.facts["not_tried"] = f"the rest ({shown_text(str(failed).partition(chr(10))[0])})"
    return proof


def _facts(server: SglangClient, info: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "version": "sglang",
        "model_path": "model",
        "dtype": "dtype",
        "kv_cache_dtype": "kv_cache_dtype",
        "tp_size": "tp",
        "page_size": "page_size",
        "hicache_mem_layout": "layout",
        "hicache_io_backend": "io",
        "hicache_storage_backend": "storage",
        "unified_cache_external_linker_backend": "linker",
        "attention_backend": "attention",
        "speculative_algorithm": "drafts",
    }
    model = json.loads(server.get("/model_info"))
    facts = {ours: info.get(theirs) for theirs, ours in names.items()}
    if not info.get("enable_unified_cache_external_linker"):
        facts["linker"] = None
    return {**facts, "kind": " ".join(model.get("architectures") or ()), "not_tried": None}


class _Asked:
    """Makes prompts of the lengths that are wanted, out of our own texts, sentences in a random order, and asks them of
    a server, at the same time, under names that start with ``salt``. An equal salt makes equal prompts."""

    def __init__(self, server: SglangClient, salt: str) -> None:
        self._server, self._salt, self._chance = server, salt, random.Random(salt)
        self._read: Sequence[float] = (0.0, 0.0, 0.0)
        """The baseline that ``reads`` subtracts."""
        self.info: Mapping[str, Any] = json.loads(server.get("/server_info"))
        texts = tomllib.loads(Path(__file__).with_name("texts.toml").read_text("utf-8"))
        lines = [line for text in texts.values() for line in text.splitlines() if line.strip()]
        self._texts = self._chance.sample(lines, min(len(lines), 60))
        try:
            self._lines = [self._tokens_of(line) for line in self._texts]
        except ServerError:
            # A server without a tokenizer; every model has these tokens.
            self._lines = [tuple(self._chance.randrange(250) for _ in range(20)) for _ in range(60)]

    @property
    def page(self) -> int:
        return int(self.info["page_size"])

    def _tokens_of(self, text: str) -> tuple[int, ...]:
        body = {"model": str(self.info.get("served_model_name") or self.info["model_path"]), "prompt": text}
        tokens = json.loads(self._server.request("POST", "/tokenize", body))["tokens"]
        return tuple(int(token) for token in tokens)

    def prompt(self, length: int) -> tuple[int, ...]:
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += self._chance.choice(self._lines)
        return tuple(tokens[:length])

    def about_an_image(self) -> list[dict[str, Any]]:
        """Return a message with noise for an image between two texts."""
        pixels = self._chance.randbytes(3 * _SIDE * _SIDE)
        image = base64.b64encode(b"P6 %d %d 255\n" % (_SIDE, _SIDE) + pixels).decode()
        texts = ["\n".join(self._chance.sample(self._texts, 20)) for _ in range(2)]
        first, last = ({"type": "text", "text": text} for text in texts)
        url = {"url": f"data:image/x-portable-pixmap;base64,{image}"}
        return [{"role": "user", "content": [first, {"type": "image_url", "image_url": url}, last]}]

    def longest(self, margin: int = ANSWER + 8) -> int:
        """Return how many tokens of prompts the server has room for."""
        states = [self.info, *self.info.get("internal_states", ())]
        limits = [
            state[name] for state in states for name in ("max_total_num_tokens", "max_req_input_len", "context_length")
            if isinstance(state.get(name), int)
        ]  # fmt: skip
        return max(TAIL, min(limits, default=QUICK_LENGTHS[0]) - margin)

    def reads(self) -> Sequence[float]:
        """Return bytes that all tiers have read since the last call, seconds of their calls, and pages that a lossy
        codec gave back; 0 without ``--enable-metrics``."""
        if not self.info.get("enable_metrics"):
            return self._read
        time.sleep(_EXPORTED_WITHIN)
        samples = read_samples(self._server.get("/metrics"))
        of_all = [samples.by("tier", f"{PREFIX}bytes_total", reason="get")]
        of_all.append(samples.by("tier", f"{CALL_SECONDS}_sum", operation="get"))
        of_all.append(samples.by("tier", f"{PREFIX}lossy_total"))
        before = self._read
        self._read = [sum(count for tier, count in counts.items() if tier != "all") for counts in of_all]
        return [now - then for now, then in zip(self._read, before, strict=True)]

    def compute(self, case: Case, prompts: Sequence[Prompt]) -> list[list[Generation]]:
        """Return what was computed, and what was answered from device memory: the latter in the shapes in which a
        restored prompt is computed."""
        computed, again, cached = (self.ask(prompts, suffix) for suffix in ("", "-again", ""))
        case.prompt_tokens = computed[0].prompt_tokens
        case.strange_tokens += sum(answer.cached_tokens for answer in (*computed, *again))
        # Other batches round otherwise, and which ones form is a matter of moments: alone, or two at once.
        in_another_batch = [self.ask([prompt] * (1 + (len(prompts) == 1)), "")[0] for prompt in prompts]
        for others in (again, cached, in_another_batch):
            for one, other in zip(computed, others, strict=True):
                case.spread = case.spread.joined(difference(one, other))
        case.computed_seconds = statistics.median_high(answer.time_to_first_token for answer in computed)
        return [computed, cached]

    def restore(self, case: Case, prompts: Sequence[Prompt], known: Sequence[Sequence[Generation]]) -> None:
        """Ask for what was computed until storage has all of it; every answer that used any of it is compared."""
        for wait in (0.0, *_WAITS):
            time.sleep(wait)
            self._server.flush_cache()
            answers = self.ask(prompts, "")
            read, seconds, lossy = self.reads()
            case.lossy |= lossy > 0
            for answer, *others in zip(answers, *known, strict=True):
                if answer.cached.storage:
                    nearest = min((difference(other, answer) for other in others), key=lambda apart: apart.worst)
                    case.restored = case.restored.joined(nearest)
            least = min(answer.cached.storage for answer in answers)
            if least > case.restored_tokens:
                case.restored_tokens, case.read_bytes, case.read_seconds = least, read, seconds
                case.restored_seconds = statistics.median_high(answer.time_to_first_token for answer in answers)
            if least >= (case.prompt_tokens - TAIL) // self.page * self.page or (case.restarted and not least):
                return  # what a restart has lost is computed, and stored, by now

    def ask(self, prompts: Sequence[Prompt], suffix: str) -> list[Generation]:
        def ask(prompt: Prompt) -> Generation:
            tokens, body = prompt[0], dict(prompt[1])
            key = f"{body.pop('extra_key', self._salt)}{suffix}"
            if "messages" in body:
                return self._server.chat(max_new_tokens=ANSWER, extra_key=key, timeout=900, **body)
            return self._server.generate(
                tokens,
                ANSWER,
                sampling={"ignore_eos": True},
                return_logprob=True,
                logprob_start_len=len(tokens) - TAIL,
                extra_key=key,
                timeout=900,
                **body,
            )

        threads = ThreadPool("prove")
        try:
            return threads.run(len(prompts), lambda at: ask(prompts[at]), len(prompts))
        finally:
            threads.close()


# -- the canary --------------------------------------------------------------------------------------------------------

_CANARIES = 64
"""Prompts that are asked in turn: by the time that one's turn comes again, a busy server has evicted it."""
_IDLE_EVERY = 2.0


def watch(server: SglangClient, share: float, *, say: Callable[[str], None]) -> Proof:
    """Ask in turn prompts that are the same on every server of a model, and compare each that comes from storage, until
    one is DIFFERENT, also from what is computed twice more: then storage ends. Return it. Raises ServerError, OSError.
    """
    asked = _Asked(server, "hicache-ext-canary")
    proof = Proof(_facts(server, asked.info))
    lengths = [min(length, asked.longest()) for length in QUICK_LENGTHS]
    prompts = [asked.prompt(lengths[at % len(lengths)]) for at in range(_CANARIES)]
    for number in itertools.count():
        try:
            _wait_until_idle(server)
            started = time.monotonic()
            processes = _processes(server)  # others after a restart
            case = _looked_at(asked, server, prompts[number % len(prompts)])
        except (ServerError, OSError, http.client.HTTPException) as error:
            say(shown_address(f"the server does not answer, which it has half an hour to do again: {error}"))
            time.sleep(_IDLE_EVERY)
            server.wait_until_ready(_START_TIMEOUT)
            asked.info = json.loads(server.get("/server_info"))
            continue
        if case is not None:
            say(f"{_line(case)}: {case.verdict}")
            if case.verdict == DIFFERENT:
                proof.cases.append(case)
                _end_storage(server, processes, case, say)
                return proof
        time.sleep((time.monotonic() - started) * (1 / share - 1))
    return proof


def _looked_at(asked: _Asked, server: SglangClient, tokens: tuple[int, ...]) -> Case | None:
    """Return the comparison of one prompt; None where it did not come from storage."""
    answers = asked.ask([(tokens, {})], "")
    if answers[0].cached.storage < (len(tokens) - TAIL) // asked.page * asked.page:
        return None
    case = Case(f"{len(tokens):,} tokens", len(tokens), restored_tokens=answers[0].cached.storage)
    case.restored_seconds = answers[0].time_to_first_token
    known: list[Generation] = []
    for _ in range(3):
        _wait_until_idle(server)
        fresh = tokens, {"extra_key": f"hicache-ext-canary-{random.SystemRandom().getrandbits(64):x}"}
        known += [answer for (answer,) in asked.compute(case, [fresh])]
        pairs = itertools.product(known, answers)
        case.restored = min((difference(one, other) for one, other in pairs), key=lambda apart: apart.worst)
        if case.verdict != DIFFERENT:
            break
        # Others may have asked meanwhile, in one batch with these. What was restored is in device memory now.
        answers += asked.ask([(tokens, {})], "")
    return case


def _wait_until_idle(server: SglangClient) -> None:
    while True:
        loads = json.loads(server.get("/v1/loads?include=core"))["loads"]
        if not any(load[f"num_{state}_reqs"] for load in loads for state in ("running", "waiting")):
            return
        time.sleep(_IDLE_EVERY)


def _processes(server: SglangClient) -> list[Path]:
    """Return the sockets of the processes behind a server on this machine. Raises ConfigError where none can be told to
    end storage: a canary that can only die is not begun."""
    parts = urllib.parse.urlsplit(server.url)
    found: dict[Path, Any] = {}
    if parts.hostname in ("127.0.0.1", "localhost", "::1"):
        told = {path: facts_of(path) or {} for path in servers()}
        found = {path: facts["file"] for path, facts in told.items() if facts.get("port") == parts.port}
        if any(not facts.get("exact") for path, facts in told.items() if path in found):
            raise ConfigError(
                "--canary", "the server has tiers with a lossy codec: what they restore differs", "no codec"
            )
    if len(set(found.values())) != 1:
        problem = f"no process of {shown_address(server.url)} can be told to end storage"
        if found:
            problem = f"servers of several configurations have the port of {shown_address(server.url)}"
        where = "beside the server, as its user, with http://127.0.0.1:PORT and its configuration in a file (@FILE)"
        raise ConfigError("--canary", problem, where)
    return list(found)


def _end_storage(server: SglangClient, processes: Sequence[Path], case: Case, say: Callable[[str], None]) -> None:
    """Have every process end it, then drop from device and host memory what was restored before. Raises nothing: what
    was found is to be told."""
    apart, spread = case.restored, case.spread
    why = f"a log-probability restored differs by {apart.worst:.2g}, computing again by {spread.worst:.2g}"
    for path in processes:
        try:
            answer = ask(path, {"call": "distrust", "why": why})
            failed = None if answer.get("ok") is True else f"it answered {str(answer.get('messages'))[:200]}"
        except ControlError as error:
            failed = str(error)
        say(f"storage has ended in the process behind {path}" if failed is None else f"STOP THIS SERVER: {failed}")
    try:
        server.flush_cache(timeout=600)
    except (ServerError, OSError) as error:
        say(f"STOP THIS SERVER: its device and host memory may hold what was restored: {error}")


# -- what is said of it ------------------------------------------------------------------------------------------------


def _line(case: Case) -> str:
    return f"{case.name}: {case.restored_tokens:,} of {case.prompt_tokens:,} tokens from storage"


def _words(document: Mapping[str, Any]) -> list[str]:
    """The verdict, what it means, and what to do."""
    verdict, pays = document["verdict"], document["pays_from_tokens"]
    means = {
        EQUAL: "Every token of the answers is the one that was computed, and so is every log-probability of them and "
        f"of the last {TAIL} tokens of the prompts.",
        WITHIN: "Restored answers lie no further from the computed ones than computing twice does on this server.",
        DIFFERENT: "Restored answers are not the computed ones. Stop using this storage with this model, and send this "
        "page, your launch command and your configuration with a report. (Of a server with a lossy codec this is said, "
        "too, unless it has --enable-metrics.)",
        LOSSY: "Restored answers are not the computed ones; what a codec does and what a small fault does look alike. "
        "The same server with `codec: off` shows whether pages are right: then these figures are the codec's.",
        NOT_SHOWN: "Of no prompt (or of none after the restart) more than half came back from storage: `hicache-ext "
        "doctor` and the server's log may tell why. Prompts that are shorter than prefetch_threshold (256 tokens) or "
        "longer than host memory's pool are never restored.",
    }
    words = [f"Restored answers: {verdict}", means[verdict]]
    for case in document["cases"]:
        if case["strange_tokens"]:
            words.append(f"{case['name']}: {case['strange_tokens']:,} tokens of another prompt or adapter were taken.")
        elif case["verdict"] == NOT_SHOWN and verdict != NOT_SHOWN:
            words.append(
                f"{case['name']}: not shown, {case['restored_tokens']:,} of {case['prompt_tokens']:,} tokens came from "
                "storage."
            )
        elif case["verdict"] == DIFFERENT or (case["verdict"] == WITHIN and case["restored"]["first"] is not None):
            first = case["restored"]["first"]
            where = "no token, only log-probabilities"
            if first is not None:
                where = f"token {first} of the answer" if first >= 0 else f"a token {-first} before the answer"
            words.append(f"{case['name']}: the first that differs is {where}.")
    if lossy := document["lossy"]:
        words.append(
            f"A tier has a lossy codec. Log-probabilities differ by {lossy['mean']:.2g} nats on average, computing "
            f"twice by {lossy['mean_twice']:.2g}; {lossy['equal_tokens']:.0%} of the answers' tokens stand before the "
            f"first that differs, computing twice {lossy['equal_tokens_twice']:.0%}."
        )
    if pays is not None:
        words.append(f"Restoring was faster from {pays:,} tokens on.")
    if speed := document["read_bytes_per_second"]:
        of_prompt = [case for case in document["cases"] if case["name"].endswith(" tokens") and case["read_seconds"]]
        longest = max(of_prompt or document["cases"], key=lambda case: case["prompt_tokens"])
        reading = longest["read_seconds"] / (document["server"].get("tp") or 1)
        words.append(
            f"Tiers were read at {rounded_size(int(speed))} a second in their own calls; `hicache-ext bench` says what "
            f"they can do. Of the {1e3 * longest['restored_seconds']:.0f} ms to the first token of {longest['name']}, "
            f"restored, they are {1e3 * reading:.0f} ms; the rest is SGLang's: the end of the prompt, copies to the "
            "device, waiting. `tracing` shows more of a single request."
        )
    facts = ", ".join(f"{name} {value}" for name, value in document["server"].items() if value is not None)
    return [*words, f"Server: {facts}"]


def as_lines(document: Mapping[str, Any]) -> list[str]:
    """Return a page of Markdown."""
    heading = ("prompt", "from storage", "restored differs by", "computing twice", "computed", "restored", "verdict")
    rows: list[tuple[str, ...]] = [heading, ("---",) * len(heading)]
    for case in document["cases"]:
        apart = [f"{case[name]['worst']:.2g}" for name in ("restored", "spread")]
        times = [f"{1e3 * case[name]:.0f} ms" for name in ("computed_seconds", "restored_seconds")]
        if not case["restored_tokens"]:
            apart[0] = times[1] = "-"
        rows.append((case["name"], f"{case['restored_tokens']:,}", *apart, *times, case["verdict"]))
    table = [f"| {line} |" for line in aligned(rows, str.ljust, " | ")]
    first, *words = _words(document)
    what = "Differences are the largest of a log-probability, in nats; times are to the first token (images: the last)."
    words.insert(1, what)
    return [f"# {first}", "", *table, "", *(line for word in words for line in (word, ""))][:-1]
