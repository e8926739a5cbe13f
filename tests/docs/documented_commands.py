"""The commands that README.md and docs/*.md tell users to type, and how the test runs each of them.

A command is a line of a block labelled ``sh``, or a code span that begins with one of ``PROGRAMS`` and a blank.
``RULES`` says what is done with it: the first rule that matches counts. A command without a rule fails the test: nobody
documents a command that nobody has ever run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hicache_ext.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")))
PROGRAMS = ("hicache-ext", "python", "make", "pip", "curl", "mooncake_master", "mooncake_client")
LANGUAGES = {"sh", "text", "yaml", "json", "python", "hex"}

_FENCE = re.compile(r"^ *```(\S*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`([^`]+)`")
_SUBCOMMANDS = {*COMMANDS} | {*("check", "render", "schema", "file", "pool", "kernels", "multiturn", "compare")}


class How(Enum):
    """What is done with a command."""

    RUN = "run as it is written, placeholders filled in"
    PARSE = "its words are parsed, and no more"
    DRY = "make -n"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Rule:
    """How the commands that ``pattern`` matches (from their beginning on) are run."""

    pattern: str
    how: How = How.RUN
    clean: tuple[int, ...] = (0,)
    """The exit codes that are right in the environment without SGLang."""
    sglang: tuple[int, ...] = (0,)
    """The same in the environment with it."""
    why: str = ""
    """Why the command is not simply run, or may end with another code than 0."""
    in_short: tuple[tuple[str, str], ...] = ()
    """Regular expressions and what they are replaced by, so that it takes seconds."""
    needs: str | None = None
    """A program that may be missing."""
    until_interrupted: bool = False


_NO_SGLANG = "the clean environment has no SGLang, and it says so"
_SECONDS = ("$", " --quick --rounds 1")
_RIVALS = "the clean environment has no rivals; elsewhere one may be missing, and it says so"

RULES = (
    Rule("hicache-ext .*--help$"),
    Rule("hicache-ext config "),
    Rule("docker build ", How.NOT_RUN, why="it wants Docker and SGLang's image"),
    Rule("docker run ", How.NOT_RUN, why="it wants Docker, an image and a GPU"),
    Rule("hicache-ext doctor ", clean=(1,), why=_NO_SGLANG),
    Rule("hicache-ext ls "),
    Rule("hicache-ext stat "),
    Rule("hicache-ext verify "),
    Rule("hicache-ext gc "),
    Rule("hicache-ext clear .*--(yes|dry-run)"),
    Rule(
        "hicache-ext clear ",
        in_short=((r"$", " --yes"),),
        why="at a terminal it asks; the tests have none, where it removes nothing without --yes",
    ),
    Rule("hicache-ext pins? "),
    Rule("hicache-ext hint "),
    Rule("hicache-ext unpin "),
    Rule(
        "hicache-ext prove ",
        How.PARSE,
        why="it asks a server with a model; tests/e2e/test_prove.py does",
        in_short=((r" > \S+", ""),),
    ),
    Rule(r"hicache-ext stats \S+ --once"),
    Rule(
        "hicache-ext stats ",
        clean=(130,),
        sglang=(130,),
        why="it runs until Ctrl-C",
        in_short=(("$", " --interval 100ms"),),
        until_interrupted=True,
    ),
    Rule("hicache-ext curve ", clean=(1,), sglang=(1,), why="no tier of that server was written to, and it says so"),
    Rule("hicache-ext reload ", clean=(1,), sglang=(1,), why="no server runs with that file, and it says so"),
    Rule("hicache-ext (warm|explain) .*--tokens "),
    Rule(
        "hicache-ext (warm|explain) .*--prompt ",
        clean=(2,),
        sglang=(0, 1),
        why=f"{_NO_SGLANG}; the pages of that prompt were never written, and explain says so",
    ),
    Rule("hicache-ext bench file ", clean=(2,), why=_NO_SGLANG, in_short=(_SECONDS,)),
    Rule(
        "hicache-ext bench pool ",
        in_short=(("$", " --quick --tier pool"),),
        why="seconds, and the tiers of the test are of type file",
    ),
    Rule("hicache-ext bench compare ", clean=(1,), sglang=(1,), why="the second file of the test is slower than 0.9"),
    Rule(
        r"hicache-ext plan (\S+\.jsonl|/var/lib/hicache-recordings)",
        How.PARSE,
        why="the traces of others are not here; tests/plan/test_plan_command.py runs it",
    ),
    Rule(
        "hicache-ext plan --workload ",
        in_short=(("think=90s", "think=9s,span=1m"),),
        why="an hour of traffic takes minutes",
    ),
    Rule("hicache-ext bench kernels ", How.PARSE, why="a minute on a GPU, whose calibration it would write"),
    Rule("python -m benchmarks.bench_file ", clean=(2,), why=_RIVALS, in_short=(_SECONDS,)),
    Rule("python -m benchmarks.bench_pool --engine redis", why=_RIVALS, in_short=(("$", " --quick"),)),
    Rule("python -m benchmarks.bench_pool ", clean=(1,), why=_RIVALS, in_short=(("$", " --quick"),)),
    Rule("python -m benchmarks.fleet_on_paper ", why="1,024 nodes take minutes", in_short=((" 64 1024", ""),)),
    Rule("python -m benchmarks.bench_kernels ", How.NOT_RUN, why="20 minutes; tests/bench has a quick run"),
    Rule("python -m benchmarks.bench_codec ", How.NOT_RUN, why="it needs the KV of a model in a file"),
    Rule(
        "python -m benchmarks.agent_",
        How.NOT_RUN,
        why="it needs recorded sessions, which are not in the repository",
    ),
    Rule("python -m benchmarks.trouble ", How.NOT_RUN, why="it wants SGLang; tests/bench has a short run"),
    Rule("curl ", needs="curl", why="a stand-in answers"),
    Rule(
        "python benchmarks/bounce.py ",
        in_short=(("$", " --sizes 32KiB --rounds 1"),),
        why="the whole takes half a minute",
    ),
    Rule("python -m sglang.launch_server ", How.NOT_RUN, why="two servers; tests/e2e/test_pd_roles.py has them"),
    Rule("python -m hicache_ext.testing.sglang_cpu ", How.NOT_RUN, why="a server; every test of tests/e2e starts it"),
    Rule("python -m tests.releases", How.NOT_RUN, why="it fetches wheels; the tests of releases use them"),
    Rule("make ", How.DRY, why="minutes; what the demo and the tests do is tested by themselves"),
    Rule("pip install ", How.NOT_RUN, why="a fixture does it; another test compares the extras with pyproject.toml"),
    Rule("pip uninstall ", How.NOT_RUN, why="tests/test_distribution.py does it"),
    Rule("python -m build", How.NOT_RUN, why="tests/test_distribution.py does it"),
    Rule("python -m twine check ", How.NOT_RUN, why="tests/test_distribution.py does it"),
    Rule("mooncake_master ", How.NOT_RUN, why="a server; tests/rigs/mooncake_servers.py starts it"),
    Rule("mooncake_client ", How.NOT_RUN, why="a part of Mooncake"),
)

PLACEHOLDERS = {
    "/mnt/nvme0/hicache": "kv/nvme",
    "/hicache": "kv/nvme",
    "/models/llama": "{model}",
    "http://127.0.0.1:30000": "{url}",
    "http://server:30000": "{url}",
    "URL": "{url}",
    "COMMAND": "ls",
    "PATH": "kv/pool",
    "FILE": "hicache.yaml",
    "DIR": "scratch",
    "NAME": "example/model",
    "TIER": "nvme",
}
"""What stands for something of the user's -> what the test takes. Relative paths, as people type them."""


@dataclass(frozen=True, slots=True)
class Command:
    """One documented command."""

    text: str
    documents: tuple[str, ...]

    @property
    def rule(self) -> Rule | None:
        return next((rule for rule in RULES if re.match(rule.pattern, self.text)), None)

    def filled_in(self, values: Mapping[str, str]) -> str:
        """The shell command: placeholders replaced, cut short where the rule says how."""
        text = self.text
        for placeholder, value in PLACEHOLDERS.items():
            text = re.sub(rf"(?<![\w./-]){re.escape(placeholder)}(?![\w-])", value.format(**values), text)
        for pattern, replacement in self.rule.in_short if self.rule else ():
            text = re.sub(pattern, replacement, text, count=1)
        return text


def all_commands() -> list[Command]:
    """Every documented command once."""
    places: dict[str, list[str]] = {}
    for document in DOCUMENTS:
        for text in _commands_of((ROOT / document).read_text()):
            places.setdefault(text, []).append(document)
    return [Command(text, tuple(dict.fromkeys(documents))) for text, documents in places.items()]


def block_languages(text: str) -> list[str]:
    return [language for language, _ in _FENCE.findall(text)]


def _commands_of(text: str) -> Iterator[str]:
    for language, body in _FENCE.findall(text):
        if language == "sh":
            for line in body.replace("\\\n", " ").splitlines():
                command = re.sub(r"(^|\s)#.*", "", line).strip()
                if command:
                    yield " ".join(command.split())
    for span in _SPAN.findall(_FENCE.sub("", text)):
        words = span.split()
        if len(words) > 1 and words[0] in PROGRAMS:
            # `hicache-ext bench pool` in a sentence speaks of the command; its help is what can be looked at.
            spoken_of = words[0] == "hicache-ext" and set(words[1:]) <= _SUBCOMMANDS
            yield " ".join(words) + (" --help" if spoken_of else "")


def parsed(command: str) -> str:
    """A shell command that parses the words of ``command`` and does nothing else."""
    words = shlex.split(command)[1:]
    program = (
        "import sys; from hicache_ext.cli.main import make_parser, without_traceback; "
        "sys.exit(without_traceback(lambda: 0 * len(vars(make_parser(sys.argv[1]).parse_args(sys.argv[1:])))))"
    )
    return shlex.join(["python", "-c", program, *words])
