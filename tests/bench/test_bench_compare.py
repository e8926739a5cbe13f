"""``hicache-ext bench compare``: ratios of what benchmarks wrote, and what makes two files not comparable."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.bench.compare import READERS
from hicache_ext.bench.frame import Point, Results, Sample
from hicache_ext.bench.multiturn import ArmResult
from hicache_ext.cli.main import main
from hicache_ext.testing.client import CachedTokens, Generation

ROOT = Path(__file__).parents[2]
MACHINE = {"cpus": 2, "cpu_model": "a", "packages": {"sglang": "0.5.23"}}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def written(name: str, document: object) -> str:
        file = tmp_path / name
        file.write_text(json.dumps(document))
        return str(file)

    return written


def of_contenders(seconds: float, *, contenders: tuple[str, ...] = ("slab", "pages"), **more: Any) -> dict[str, Any]:
    """As ``bench file`` writes it, by its own code: reads of 1 MB in so many seconds, and writes of 10 bytes."""
    results = Results(contenders)
    read = Point("read-warm", (("engine", "x"), ("payload_bytes", 32768)))
    written = Point("write", (("engine", "x"), ("payload_bytes", 4096)))
    for contender in contenders:
        for scatter in (0.9, 1.0, 1.1):
            took = seconds * scatter
            results.add(read, contender, Sample(1_000_000, took, took, (took,)))
            results.add(written, contender, Sample(10, took, took, (took,)))
    facts = {"benchmark": "file", "date": "2026-11-22", "machine": MACHINE, **more}
    figures = [entry for point in (read, written) for entry in results.entries(point)]
    return json.loads(json.dumps({**facts, "results": figures}))


def of_conversations(first_token: float, **workload: Any) -> dict[str, Any]:
    """As ``bench multiturn`` writes it, by its own code."""
    answers = [
        Generation("x", (1,), 10, 5, CachedTokens(storage=5), first_token * scatter, 1.0, {})
        for scatter in (0.9, 1, 1.1)
    ]
    facts = {"benchmark": "multiturn", "date": "d", "machine": MACHINE, "workload": {"users": 3, **workload}}
    results = [ArmResult("ours", [[answers]], 10.0 * first_token).entry()]
    return json.loads(json.dumps({**facts, "flush": True, "results": results}))


def compared(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["bench", "compare", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_twice_the_rate_is_a_ratio_of_two_with_its_spread(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = compared(capsys, write("a", of_contenders(2.0)), write("b", of_contenders(1.0)))
    assert code == 0
    assert [row["row"] for row in found["rows"]] == [
        f"{mode}, x, {size}, {contender}"
        for mode, size in (("read-warm", "32KiB"), ("write", "4KiB"))
        for contender in ("slab", "pages")
    ]
    for row in found["rows"]:
        assert row["ratio"] == pytest.approx(2)
        assert row["least"] < 2 < row["most"] and not row["within_spread"]
    assert {row["unit"] for row in found["rows"]} == {"bytes/s"}


def test_a_first_token_that_comes_sooner_is_better_and_chance_is_named(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = compared(capsys, write("a", of_conversations(1.0)), write("b", of_conversations(0.5)))
    assert {row["row"]: pytest.approx(row["ratio"]) for row in found["rows"]} == {
        "ours, first token of turn 1": 2.0,
        "ours, output": 2.0,
    }
    _, found = compared(capsys, write("a", of_conversations(1.0)), write("c", of_conversations(1.01)))
    assert found["rows"][0]["within_spread"] and found["rows"][0]["ratio"] < 1


def test_what_differs_besides_the_figures_is_told(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    other = {**MACHINE, "packages": {"sglang": "0.5.24"}}
    _, found = compared(
        capsys, write("a", of_contenders(1.0)), write("b", of_contenders(1.0, machine=other, date="later"))
    )
    assert found["differs"] == [
        {"what": "date", "first": "2026-11-22", "second": "later"},
        {"what": "machine.packages.sglang", "first": "0.5.23", "second": "0.5.24"},
    ]


def test_ci_can_fail_on_a_row_that_is_slower_or_gone(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = write("a", of_contenders(1.0)), write("b", of_contenders(1.25))
    assert compared(capsys, before, after, "--fail-below", "0.7")[0] == 0
    code, found = compared(capsys, before, after, "--fail-below", "0.9")
    assert code == 1 and found["failed"] and len(found["below"]) == 4
    gone = write("c", of_contenders(1.0, contenders=("slab",)))
    assert compared(capsys, before, gone)[0] == 0
    code, found = compared(capsys, before, gone, "--fail-below", "0.9")
    assert code == 1 and found["below"] == [] and len(found["only_first"]) == 2
    assert compared(capsys, gone, before, "--fail-below", "0.9")[0] == 0
    assert main(["bench", "compare", before, after, "--fail-below", "0.9"]) == 1
    assert capsys.readouterr().out.count("BELOW 0.9: ") == 4


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        ({"benchmark": "pool", "results": []}, "is of the benchmark 'pool', and "),
        ({"benchmark": "nonsense"}, "is of the benchmark 'nonsense'; allowed: "),
        ({"results": []}, "is no figures of a benchmark"),
        ([1, 2], "is no figures of a benchmark"),
        ({"benchmark": "file"}, "its figures are not those of the benchmark 'file'"),
        ({"benchmark": "file", "results": [{"summary": 3, "contender": "x"}]}, "its figures are not those"),
        ({"benchmark": "file", "results": []}, "has no row in common"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(
    second: object, sentence: str, write: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "compare", write("a", of_contenders(1.0)), write("b", second)]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_conversations_of_another_load_are_refused(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = write("a", of_conversations(1.0)), write("b", of_conversations(1.0, users=8))
    assert main(["bench", "compare", first, second]) == 2
    assert "was measured with another load: workload.users is 8, and 3 in " in capsys.readouterr().err


@pytest.mark.parametrize("share", ["abc", "0", "-1", "nan", "inf"])
def test_a_limit_that_is_no_share_is_wrong_usage(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "compare", "a", "b", f"--fail-below={share}"])
    assert stopped.value.code == 2
    assert f"{share} is not a number above 0, such as 0.9" in capsys.readouterr().err


def test_figures_that_are_no_numbers_are_left_out(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    broken = of_contenders(1.0)
    broken["results"][0]["summary"]["rate"]["median"] = 0
    broken["results"][1]["summary"]["rate"]["median"] = float("nan")
    _, found = compared(capsys, write("a", of_contenders(1.0)), write("b", broken))
    assert len(found["rows"]) == len(found["only_first"]) == 2


@pytest.mark.parametrize("file", ["file", "pool-redis", "multiturn", "multiturn-pd"])
def test_the_committed_figures_of_each_benchmark_can_be_compared(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ROOT / "docs" / "benchmarks" / f"{file}.json")
    code, found = compared(capsys, path, path, "--fail-below", "1")
    assert code == 0 and found["rows"]
    assert {row["ratio"] for row in found["rows"]} == {1.0}


def test_every_benchmark_has_a_reader_that_is_tested(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(READERS) == {"file", "pool", "multiturn", "kernels"}
    measured = [{"direction": "load", "layout": "page_first", "seconds": {"sglang": 2e-4}}]
    file = write("x", {"benchmark": "kernels", "measurements": measured})
    code, found = compared(capsys, file, file)
    assert code == 0 and {row["ratio"] for row in found["rows"]} == {1.0}
