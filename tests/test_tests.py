"""The suite itself: every test can fail, no wait runs out unseen, and ``make test`` leaves out what it is meant to."""

from __future__ import annotations

import ast
import functools
import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.thorough import CONFORMANCE, MANY_CASES, REAL_SERVERS, covering_pairs, is_patient

ROOT = Path(__file__).parents[1]

FAIL_BY_THEMSELVES = {"raises", "warns", "fail", "runTest", "assert_close", "wait_until", "validate"}
"""Names of calls that fail a test: of pytest and others, and of tests/waiting.py."""
CLOCKS = {"monotonic", "time", "perf_counter"}


@dataclass(slots=True)
class Sources:
    """The functions of the suite by name, and which of them can fail a test."""

    functions: dict[str, list[ast.FunctionDef]] = field(default_factory=dict)
    tests: list[tuple[str, ast.FunctionDef]] = field(default_factory=list)
    trees: dict[str, ast.Module] = field(default_factory=dict)

    @classmethod
    def read(cls, files: Iterator[tuple[str, str]]) -> Sources:
        sources = cls()
        for name, text in files:
            sources.trees[name] = tree = ast.parse(text)
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    sources.functions.setdefault(node.name, []).append(node)
                    if node.name.startswith("test_"):
                        sources.tests.append((name, node))
        return sources

    def failing(self) -> set[str]:
        """Names of functions that assert or raise, and of those that call one."""
        known = set(FAIL_BY_THEMSELVES)
        while True:
            found = {
                name
                for name, nodes in self.functions.items()
                if name not in known and all(asserts(node) or words_of(node) & known for node in nodes)
            }
            if not found:
                return known
            known |= found


def of_the_suite() -> Iterator[tuple[str, str]]:
    for place in ("tests", "hicache_ext/testing/conformance"):
        for path in sorted((ROOT / place).rglob("*.py")):
            if path.parent.name != "campaigns":  # they report what did not come
                yield str(path.relative_to(ROOT)), path.read_text()


@functools.cache
def asserts(function: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Assert) or (isinstance(node, ast.keyword) and ast.unparse(node) == "check=True")
        for node in ast.walk(function)
    )


@functools.cache
def words_of(function: ast.AST) -> frozenset[str]:
    """The names in it: of what it calls, or gives on to be called."""
    nodes = list(ast.walk(function))
    attributes = (node.attr for node in nodes if isinstance(node, ast.Attribute))
    return frozenset(attributes).union(node.id for node in nodes if isinstance(node, ast.Name))


def without_assertion(sources: Sources) -> list[str]:
    failing = sources.failing()
    return [
        f"{name}:{test.lineno}: {test.name}"
        for name, test in sources.tests
        if not asserts(test) and not words_of(test) & failing
    ]


def never_wrong(sources: Sources) -> list[str]:
    """Assertions that hold whatever happens."""
    return [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, tree in sources.trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert) and always_true(node.test)
    ]


def always_true(test: ast.expr) -> bool:
    match test:
        case ast.Constant():
            return bool(test.value)
        case ast.Tuple() | ast.List() | ast.Set():
            return bool(test.elts)
        case ast.JoinedStr() | ast.GeneratorExp() | ast.Lambda():
            return True
        case ast.UnaryOp(op=ast.Not(), operand=ast.Constant(value=value)):
            return not value
        case ast.BoolOp(op=ast.Or()):
            return any(map(always_true, test.values))
        case ast.BoolOp(op=ast.And()):
            return all(map(always_true, test.values))
        case ast.Compare(left=ast.Call(func=ast.Name(id="len")), ops=[ast.GtE()], comparators=[ast.Constant(value=0)]):
            return True
        case ast.Compare(left=left, ops=[ast.Eq() | ast.Is() | ast.LtE() | ast.GtE()], comparators=[right]):
            same = ast.dump(left) == ast.dump(right)
            return same and not any(isinstance(node, ast.Call) for node in ast.walk(left))
    return False


def waits_unseen(sources: Sources) -> list[str]:
    """Loops that end by a deadline and go on as if what they wait for were there. tests/waiting.py fails instead."""
    found = []
    for name, tree in sources.trees.items():
        if not ("/test_" in name or "/conformance/" in name):
            continue  # rigs wait on purpose
        for block in blocks(tree):
            for place, wait in enumerate(block):
                if isinstance(wait, ast.While) and (awaited := awaited_until_a_deadline(wait.test)):
                    said = " ".join(ast.unparse(one) for one in block[place:] if isinstance(one, ast.Assert))
                    if not asserts(wait) and not any(part in said for part in awaited):
                        found.append(f"{name}:{wait.lineno}: while {ast.unparse(wait.test)}")
    return found


def blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, name, None), list):
                yield block


def awaited_until_a_deadline(test: ast.expr) -> list[str]:
    """What a loop waits for, where a clock ends it, too."""
    if not isinstance(test, ast.BoolOp) or not isinstance(test.op, ast.And):
        return []
    timed = [part for part in test.values if any(is_clock(node) for node in ast.walk(part))]
    if not timed:
        return []
    awaited = []
    for part in test.values:
        if part not in timed:
            inner = part.operand if isinstance(part, ast.UnaryOp) else part
            awaited.append(ast.unparse(inner.left if isinstance(inner, ast.Compare) else inner))
    return awaited


def is_clock(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CLOCKS


@pytest.fixture(scope="module")
def suite() -> Sources:
    return Sources.read(of_the_suite())


def test_every_test_asserts_something(suite: Sources) -> None:
    assert without_assertion(suite) == []


def test_no_assertion_holds_whatever_happens(suite: Sources) -> None:
    assert never_wrong(suite) == []


def test_no_wait_runs_out_unseen(suite: Sources) -> None:
    assert waits_unseen(suite) == []


PLANTED = """
def judge(x):
    assert x

def test_asserts_nothing():
    print(1)

def test_asserts_by_a_helper():
    judge(1)

def test_cannot_be_wrong(x, xs):
    assert x or True
    assert (x, "a message")
    assert x == x
    assert len(xs) >= 0
    assert (x for x in xs)

def test_can_be_wrong(x, f):
    assert x or not f()
    assert f() == f()

def test_waits_for_what_it_does_not_assert(place):
    until = time.monotonic() + 60
    while not list(place.glob("*/pages/*")) and time.monotonic() < until:
        time.sleep(0.02)
    assert list(place.iterdir())

def test_waits_for_what_it_asserts(place):
    while place.used() > 8 and time.monotonic() < 60:
        time.sleep(0.02)
    assert place.used() == 8
"""


def test_planted_faults_are_found() -> None:
    sources = Sources.read(iter([("tests/test_planted.py", PLANTED)]))
    assert without_assertion(sources) == ["tests/test_planted.py:5: test_asserts_nothing"]
    assert [found.partition(": assert ")[2] for found in never_wrong(sources)] == [
        *("x or True", "(x, 'a message')", "x == x", "len(xs) >= 0", "(x for x in xs)")
    ]
    (wait,) = waits_unseen(sources)
    assert "'*/pages/*'" in wait


# -- what make test leaves out -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_tables_of_what_stays_name_tests_that_are_there() -> None:
    """pytest fails where it is told of one that is not."""
    named = [*REAL_SERVERS.values(), *CONFORMANCE]
    words = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-m", "not thorough"]
    done = subprocess.run([*words, *named], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    collected = {line.partition("[")[0] if "::Test" in line else line for line in done.stdout.splitlines()}
    assert [name for name in named if not any(line.startswith(name) for line in collected)] == []


def test_files_with_many_cases_or_with_processes_are_left_out_of_the_fast_tests() -> None:
    assert [name for name in MANY_CASES if not (ROOT / name).is_file()] == []
    assert is_patient(ROOT / "tests/cli/test_as_a_process.py")
    assert is_patient(ROOT / "tests/storage/remote/object/test_object_faults.py")
    assert not is_patient(ROOT / "tests/page/test_rows.py")


def test_every_two_values_of_parameters_meet_in_what_stays_of_their_products() -> None:
    rows = [tuple(map(str, row)) for row in itertools.product(range(6), range(5), range(3), range(2))]
    chosen = [rows[number] for number in covering_pairs(rows)]
    for one, other in itertools.combinations(range(4), 2):
        assert {(row[one], row[other]) for row in chosen} == {(row[one], row[other]) for row in rows}
    assert len(chosen) == 6 * 5


def _defined_in(file: Path) -> set[str]:
    """The names at the top of a module, and the modules beside it where it is a package."""
    names = {path.stem for path in file.parent.iterdir()} if file.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def test_rigs_campaigns_and_benchmarks_import_what_there_is() -> None:
    """Most are imported by a server or a campaign alone: a renamed module was met weeks later."""
    wrong = []
    for file in itertools.chain(*(sorted((ROOT / place).rglob("*.py")) for place in ("tests", "benchmarks"))):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.level or not (node.module or "").startswith("hicache_ext"):
                continue
            place = ROOT / str(node.module).replace(".", "/")
            source = next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)
            defined = set() if source is None else _defined_in(source)
            wrong += [f"{file.name}: {node.module}.{one.name}" for one in node.names if one.name not in defined]
    assert wrong == []
