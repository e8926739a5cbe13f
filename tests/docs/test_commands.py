"""Every command of README.md and docs/*.md, run from another directory: with SGLang, and where there is none.

The environment without it is made as a user makes it: a new virtual environment and ``pip install .``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from hicache_ext.config import load_config, tier_types
from hicache_ext.config.model import ExtraConfig
from hicache_ext.packages import PACKAGES
from hicache_ext.page.hashes import page_hashes
from hicache_ext.page.identity import ModelIdentity, PageIdentity, PoolIdentity, Shard
from hicache_ext.storage.contract.registry import open_tier
from hicache_ext.storage.tiers.file.pages.store import PageFileStore
from hicache_ext.storage.tiers.file.pins import add_pin
from hicache_ext.testing.conformance.pages import store_pages
from tests.docs.documented_commands import (
    DOCUMENTS,
    LANGUAGES,
    ROOT,
    RULES,
    Command,
    How,
    Rule,
    all_commands,
    block_languages,
    parsed,
)

TOKENS = [(7 * position) % 250 for position in range(167)]
PAGE_SIZE = 16
LIMIT = 480.0
"""Seconds for one command: it only ends one that would hang."""
_OFFLINE = ("new connection", "name resolution", "timed out", "No matching distribution", "Could not find a version")
"""What pip says where no package index can be reached."""
_LEFT_OUT = [pytest.mark.thorough]
METRICS = """\
# TYPE hicache_ext_get_total counter
hicache_ext_get_total{tier="nvme",tp_rank="0",pp_rank="0",dp_rank="0",reason="hit"} 12
hicache_ext_get_total{tier="nvme",tp_rank="0",pp_rank="0",dp_rank="0",reason="miss"} 3
"""


# -- the documents -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_says_what_it_is_so_that_no_command_hides_in_one_without_a_language(document: str) -> None:
    others = set(block_languages((ROOT / document).read_text())) - LANGUAGES
    assert not others, (
        f"{document}: blocks are labelled {others}; use {LANGUAGES}: sh for commands, text for what is none"
    )


def test_every_documented_command_has_a_rule_that_says_how_it_is_run() -> None:
    unknown = [f"{', '.join(command.documents)}: {command.text}" for command in all_commands() if command.rule is None]
    assert not unknown, (
        "nobody has run these commands; say how in RULES of tests/docs/documented_commands.py: " + "; ".join(unknown)
    )


def test_a_command_that_nobody_has_thought_of_has_no_rule() -> None:
    assert Command("hicache-ext frobnicate PATH", ("README.md",)).rule is None
    assert Command("hicache-ext frobnicate --help", ("README.md",)).rule is not None  # which ends with 2, not 0


def test_what_is_not_simply_run_has_a_reason() -> None:
    plain = Rule("")
    for rule in RULES:
        simply_run = (rule.how, rule.clean, rule.sglang, rule.in_short) == (plain.how, plain.clean, plain.sglang, ())
        assert simply_run or rule.why, rule.pattern


def test_no_rule_is_left_over() -> None:
    used = {command.rule.pattern for command in all_commands() if command.rule}
    assert {rule.pattern for rule in RULES} == used


def test_documented_installations_are_of_a_checkout_and_its_extras_or_what_hints_name() -> None:
    """No index has hicache-ext: whoever registers it there would be installed."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for command in all_commands():
        if command.text.startswith("pip install") and command.text.split(" ", 2)[2] not in PACKAGES.values():
            assert re.fullmatch(r"pip install ('?)\.(\[[\w,]+\])?\1", command.text), command
            named = re.findall(r"\[([\w,]+)\]", command.text)
            assert {extra for names in named for extra in names.split(",")} <= set(extras) - {"sglang"}, command


def sglang_directory() -> Path:
    spec = find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


@pytest.mark.sglang
def test_every_storage_backend_of_sglang_is_named_in_the_comparison() -> None:
    """The comparison named 3 of 13."""
    factory = sglang_directory() / "srt" / "mem_cache" / "storage" / "backend_factory.py"
    registered = re.findall(r'register_backend\(\s*"(\w+)"', factory.read_text())
    comparison = (ROOT / "README.md").read_text().partition("## Why this one")[2].partition("\n## ")[0]
    assert len(registered) > 10 and f"brings {len(registered)} storage backends" in comparison
    assert [name for name in registered if f"`{name}`" not in comparison] == []


@pytest.mark.sglang
def test_the_request_that_shows_tokens_from_storage_asks_openais_route_for_them() -> None:
    """A user of the chat route saw nothing."""
    requests = [command.text for command in all_commands() if command.text.startswith("curl -s ")]
    [chat] = [text for text in requests if "/v1/chat/completions" in text]
    assert any("/generate" in text for text in requests)
    body = json.loads(chat.partition('-d "')[2].rpartition('"')[0].replace('\\"', '"'))
    protocol = (sglang_directory() / "srt" / "entrypoints" / "openai" / "protocol.py").read_text()
    request = protocol.partition("class ChatCompletionRequest(")[2].partition("\nclass ")[0]
    assert body["return_cached_tokens_details"] is True
    assert [field for field in body if not re.search(rf"^    {field}: ", request, re.MULTILINE)] == []
    assert re.search("class SglExt.*cached_tokens_details: ", protocol, re.DOTALL)


_FIGURES = (ROOT / "docs" / "benchmarks" / "README.md").read_text()


@pytest.mark.parametrize(("part", "engine"), [("File tier", "bench_file"), ("Redis", "bench_pool")])
def test_a_table_with_rivals_is_of_a_command_that_has_them(part: str, engine: str) -> None:
    """``hicache-ext bench`` has ours and SGLang's; a page named it over rows of aiofiles."""
    section = _FIGURES.partition(f"\n## {part}\n")[2].partition("\n## ")[0]
    assert f"`python -m benchmarks.{engine} " in section
    assert "`hicache-ext bench" not in section


def test_figures_of_an_index_that_is_gone_say_so_and_are_not_in_the_readme() -> None:
    old = [part for part in re.split(r"\n(?=\*\*|## )", _FIGURES) if "whose index was LMDB" in part]
    assert old
    for part in old:
        assert "nothing of them is claimed of the present code" in " ".join(part.split()), part
    readme = (ROOT / "README.md").read_text()
    assert "of raw `preadv`" not in readme and "of raw `pwritev`" not in readme


def test_the_picture_of_the_tiers_has_every_type_of_tier() -> None:
    picture = (ROOT / "docs" / "tiers.svg").read_text()
    assert [name for name in set(tier_types()) - {"memory"} if f">{name} tier<" not in picture] == []


# -- the environments --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Environment:
    """Where commands are run: the programs of one Python, and the variables."""

    name: str
    programs: Path
    variables: dict[str, str]


@pytest.fixture(scope="module")
def clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A new virtual environment with this package and what it depends on: no SGLang, no torch, no extra."""
    place = tmp_path_factory.mktemp("clean")
    source = place / "source"
    source.mkdir()
    (source / "scripts").mkdir()
    for name in ("pyproject.toml", "setup.py", "scripts/documents.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "hicache_ext", source / "hicache_ext", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
    programs = place / "venv" / "bin"
    words = [programs / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", str(source)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=place, env=_variables())
    if done.returncode and any(sign in done.stderr for sign in _OFFLINE):
        pytest.skip("missing: a package index that pip can reach")
    assert not done.returncode, done.stderr
    for package in ("torch", "sglang", "redis"):
        assert subprocess.run([programs / "python", "-c", f"import {package}"], capture_output=True).returncode
    return Environment("clean", programs, _variables())


@pytest.fixture(scope="module")
def sglang_environment() -> Environment:
    """The one that the tests run in."""
    if find_spec("sglang") is None:
        pytest.skip("missing: the package sglang")
    return Environment("sglang", Path(sys.executable).parent, {**_variables(), "PYTHONPATH": str(ROOT)})


def _variables() -> dict[str, str]:
    of_the_tests = ("PYTHONPATH", "PYTHONHOME", "SGLANG_PLUGINS")
    return {name: value for name, value in os.environ.items() if name not in of_the_tests}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A stand-in for a server: its metrics, and an answer to everything that is posted."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(METRICS if self.path == "/metrics" else "OK")

        def do_POST(self) -> None:
            self._answer("Cache flushed.")

        def _answer(self, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer can be loaded; an empty directory where torch, which makes it, is missing."""
    place = tmp_path_factory.mktemp("models") / "tiny"
    if find_spec("torch") is None:
        return place
    from tests.rigs.tiny_model import make_tiny_model

    return make_tiny_model(place)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A directory as a user's is: a configuration of two tiers, pages in the outer one, a pin, prompts."""
    section = {
        "tiers": {
            name: {"type": "file", "path": str(tmp_path / "kv" / name), "capacity": "64MiB", "layout": "pages"}
            for name in ("nvme", "pool")
        },
        "promote_to": "nvme",
    }
    file = tmp_path / "hicache.yaml"
    file.write_text(yaml.safe_dump(ExtraConfig.around(section)))
    described = PoolIdentity("kv", "MHATokenToKVPoolHost", "bfloat16", "page_first", PAGE_SIZE, (700, 324))
    identity = PageIdentity(ModelIdentity("example/model"), described, Shard())
    open_tier("nvme", load_config(file).tiers["nvme"]).close()
    store = PageFileStore("pool", tmp_path / "kv" / "pool", capacity=None)
    store.register_identity(identity.digest(), identity.document())
    hashes = page_hashes(TOKENS, PAGE_SIZE)
    store_pages(store, [identity.digest() + page for page in hashes], described.segments)
    store.close()
    add_pin(tmp_path / "kv" / "pool", "system-prompt", hashes, None)
    for name in ("tokens.json", "prompt.json"):
        (tmp_path / name).write_text(json.dumps(TOKENS))
    (tmp_path / "prompt.txt").write_text("What is a page? " * 20)
    (tmp_path / "scratch").mkdir()
    for name, rate in (("before", 100.0), ("after", 80.0)):
        rates = {"median": rate, "lower": rate, "upper": rate}
        entry = {"mode": "write", "contender": "slab", "unit": "bytes", "summary": {"rate": rates}}
        (tmp_path / f"{name}.json").write_text(json.dumps({"benchmark": "file", "date": name, "results": [entry]}))
    return tmp_path


# -- running them ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        # The help of all is in tests/cli/test_every_command.py, and benchmarks and plans take their time.
        pytest.param(
            command, id=command.text, marks=_LEFT_OUT if re.search("bench|plan --workload|--help", command.text) else ()
        )
        for command in all_commands()
        if command.rule and command.rule.how in (How.RUN, How.PARSE)
    ],
)
@pytest.mark.parametrize("environment", [pytest.param("clean", marks=pytest.mark.thorough), "sglang"])
def test_a_documented_command_ends_as_it_should_and_never_in_a_traceback(
    environment: str, command: Command, workplace: Path, url: str, model: Path, request: pytest.FixtureRequest
) -> None:
    rule = command.rule
    assert rule is not None
    where: Environment = request.getfixturevalue(f"{environment}_environment")
    if rule.needs and shutil.which(rule.needs) is None:
        pytest.skip(f"missing: {rule.needs}")
    text = command.filled_in({"url": url, "model": str(model)})
    left = re.findall(r"(?<![\w./$-])[A-Z]{3,}(?![\w=/])", text.replace("POST", ""))
    assert not left, f"say what stands for {left} in PLACEHOLDERS of tests/docs/documented_commands.py"
    if rule.how is How.PARSE:
        text = parsed(text)
    text = text.replace("python benchmarks/", f"python {ROOT}/benchmarks/")
    text = text.replace("python -m benchmarks.", f"env PYTHONPATH={ROOT} python -m benchmarks.")
    code, output = _run(text, where, workplace, until_interrupted=rule.until_interrupted)
    assert "Traceback (most recent call last)" not in output, f"{text}\n{output}"
    if environment == "sglang" and (without := re.search(r"^not measured: \w+: (missing: .*)", output, re.MULTILINE)):
        pytest.skip(without[1])
    assert code in (rule.clean if environment == "clean" else rule.sglang), f"{text}\n{output}"


def _run(text: str, where: Environment, workplace: Path, *, until_interrupted: bool) -> tuple[int, str]:
    """Exit code and everything printed. With ``until_interrupted``, Ctrl-C as soon as something was."""
    variables = {
        **where.variables,
        "PATH": f"{where.programs}:{os.environ['PATH']}",
        # So that no command meets servers, calibrations or tiers of whoever runs the tests.
        "HICACHE_EXT_RUNTIME_DIR": str(workplace / "run"),
        "XDG_CACHE_HOME": str(workplace / "cache"),
    }
    with (workplace / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            # Whoever runs the tests in the background has Ctrl-C ignored, in every process from there on.
            ["env", "--default-signal=INT", "bash", "-c", f"exec {text}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=workplace,
            env=variables,
            start_new_session=True,
        )
        try:
            if until_interrupted:
                deadline = time.monotonic() + LIMIT
                while not (workplace / "output.txt").stat().st_size and process.poll() is None:
                    assert time.monotonic() < deadline, f"{text}: prints nothing"
                    time.sleep(0.05)
                process.send_signal(signal.SIGINT)
            code = process.wait(LIMIT)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return code, output.read()


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, id=c.text) for c in all_commands() if c.rule and c.rule.how is How.DRY],
)
def test_a_documented_target_of_make_exists(command: Command) -> None:
    if shutil.which("make") is None:
        pytest.skip("missing: make")
    program, *words = command.text.split()
    done = subprocess.run([program, "-n", *words], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
