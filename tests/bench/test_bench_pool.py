"""The pool benchmark: ratios on samples made up, wrong answers, missing engines, a configuration, a real quick run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bench_pool
from benchmarks.rivals.object import object_stores
from hicache_ext.bench.frame import Point, Results, Sample
from hicache_ext.bench.pool import MODES, Case, Open, OurClient, Pages, measure
from hicache_ext.cli.main import main, without_traceback
from hicache_ext.config.model import ExtraConfig
from hicache_ext.errors import CommandError, MissingPackageError
from hicache_ext.storage.tiers.memory import MemoryPageStore
from tests.rigs.s3_server import missing_s3_server

POINT = Point("read", (("engine", "redis"), ("payload", 1 << 20), ("threads", 4)))
CASE = Case(payload=4096, threads=2, batch=3, batches=2)


def sample(rate: float) -> Sample:
    return Sample(work=1000, seconds=1000 / rate, cpu_seconds=0.1, calls=(0.1,))


def results_of(*names: str) -> Results:
    return Results(names, {"own client": names[1:]})


def test_the_ratio_is_to_the_best_of_the_engines_own_clients() -> None:
    results = results_of("ours", "slow", "fast")
    for name, rates in {"ours": (30, 60, 90), "slow": (19, 20, 500), "fast": (39, 40, 41)}.items():
        for rate in rates:
            results.add(POINT, name, sample(rate))
    assert {entry["contender"]: entry["ratio_to_own_client"] for entry in results.entries(POINT)} == {
        "ours": pytest.approx(1.5),
        "slow": pytest.approx(0.5),
        "fast": pytest.approx(1.0),
    }


def test_without_an_own_client_there_is_no_ratio() -> None:
    results = results_of("ours", "theirs")
    results.add(POINT, "ours", sample(5))
    assert next(results.tables()).rows[0][-1] == "-"


def test_who_is_left_out_has_a_reason_and_no_figures() -> None:
    results = results_of("ours", "theirs")
    results.add(POINT, "ours", sample(5))
    results.add(POINT, "theirs", sample(5))
    results.leave_out(POINT, "theirs", "failed: it lied")
    found = results.entries(POINT)
    assert [(e["contender"], e.get("not_measured")) for e in found] == [("ours", None), ("theirs", "failed: it lied")]


class _Spy(OurClient):
    def __init__(self) -> None:
        self.store = MemoryPageStore()
        super().__init__(self.store)
        self.calls: list[tuple[str, int]] = []

    def write(self, keys: Sequence[bytes], pages: Pages) -> int:
        self.calls.append(("write", len(keys)))
        return super().write(keys, pages)

    def read(self, keys: Sequence[bytes], pages: Pages) -> int:
        self.calls.append(("read", len(keys)))
        return super().read(keys, pages)


class _Lying(_Spy):
    def read(self, keys: Sequence[bytes], pages: Pages) -> int:
        found = super().read(keys, pages)
        pages.targets[1, 100] ^= 1
        return found


class _Losing(_Spy):
    def read(self, keys: Sequence[bytes], pages: Pages) -> int:
        return super().read(keys, pages) - 1


def memory() -> list[Pages]:
    return [Pages(CASE.payload, CASE.batch, seed) for seed in range(CASE.threads)]


def test_every_thread_moves_all_its_batches_and_nothing_is_left() -> None:
    client = _Spy()
    samples = measure("spy", client, CASE, memory())
    assert sorted(client.calls) == [("read", 3)] * 4 + [("write", 3)] * 4
    assert {mode: taken.work for mode, taken in samples.items()} == {"write": 49152, "read": 49152}
    assert all(len(taken.calls) == 4 and taken.seconds > 0 for taken in samples.values())
    assert client.store.objects == {}


@pytest.mark.parametrize(("kind", "words"), [(_Lying, "other bytes"), (_Losing, "2 pages of 3 were moved")])
def test_a_wrong_answer_is_no_figure(kind: type[_Spy], words: str) -> None:
    client = kind()
    with pytest.raises(CommandError, match=words):
        measure("spy", client, CASE, memory())
    assert client.store.objects == {}


def test_batches_of_different_numbers_and_threads_differ() -> None:
    first, second = Pages(4096, 3, 0), Pages(4096, 3, 1)
    first.stamp(0)
    before = first.sources.copy()
    first.stamp(1)
    assert not np.array_equal(first.sources[:, :8], before[:, :8])
    assert not np.array_equal(first.sources, second.sources)


def compared(monkeypatch: pytest.MonkeyPatch, contenders: Mapping[str, Open], *words: str) -> int:
    @contextmanager
    def engine(directory: Path) -> Iterator[tuple[dict[str, Open], tuple[str, ...]]]:
        yield dict(contenders), ()

    monkeypatch.setitem(bench_pool.ENGINES, "redis", engine)
    return without_traceback(lambda: bench_pool.main(["--engine", "redis", "--quick", *words]))


@pytest.mark.parametrize("engine", bench_pool.ENGINES)
def test_a_missing_engine_is_a_sentence(
    engine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, name in (("redis", "redis_program"), ("object", "missing_s3_server"), ("mooncake", "missing_mooncake")):
        missing = None if module == "redis" else "that program"
        monkeypatch.setattr(f"benchmarks.rivals.{module}.{name}", lambda missing=missing: missing)
    assert without_traceback(lambda: bench_pool.main(["--engine", engine, "--quick"])) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("missing: ") and printed.out == ""


def test_a_contender_whose_package_is_missing_is_named_and_a_run_that_measured_nothing_does_not_end_with_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def missing(memory: Sequence[Pages]) -> OurClient:
        raise MissingPackageError("redis", "pip install redis")

    report = tmp_path / "pool.json"
    assert compared(monkeypatch, {"theirs": missing}, "--json", str(report)) == 1
    assert "not measured: theirs: " in capsys.readouterr().out
    assert "redis" in json.loads(report.read_text())["results"][0]["not_measured"]
    assert compared(monkeypatch, {"theirs": missing, "ours": lambda memory: _Spy()}) == 0


def test_a_contender_that_cannot_be_opened_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(memory: Sequence[Pages]) -> OurClient:
        raise ConnectionRefusedError("no port")

    assert compared(monkeypatch, {"theirs": refused, "ours": lambda memory: _Spy()}) == 1
    assert "threads: theirs: no port" in capsys.readouterr().err


def a_configuration(directory: Path) -> Path:
    """Two tiers; both are of type file, so that no server is needed."""
    tiers = {
        name: {"type": "file", "path": str(directory / name), "capacity": "64MiB", "layout": "pages"}
        for name in ("near", "pool")
    }
    file = directory / "hicache.json"
    file.write_text(json.dumps(ExtraConfig.around({"tiers": tiers})))
    return file


def test_the_tiers_of_a_configuration_are_measured_and_left_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, figures = a_configuration(tmp_path), tmp_path / "pool.json"
    words = ["bench", "pool", str(file), "--tier", "pool", "--quick", "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", ["/opt/bin/hicache-ext", *words, "--hf-token", "secret"])
    assert main(words) == 0
    document = json.loads(figures.read_text())
    assert document["command"].startswith("hicache-ext bench pool ") and "secret" not in document["command"]
    found = document["results"]
    assert {(entry["contender"], entry["mode"]) for entry in found} == {
        ("pool (file)", "write"),
        ("pool (file)", "read"),
    }
    assert not (tmp_path / "near").exists() and not [*(tmp_path / "pool").glob("**/*.page*")]


@pytest.mark.parametrize(("words", "sentence"), [((), "every tier"), (("--tier", "none"), "no tier is named 'none'")])
def test_a_configuration_without_the_tier_is_a_sentence(
    words: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "pool", str(a_configuration(tmp_path)), *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.slow
def test_a_quick_run_measures_object_stores_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if missing := missing_s3_server():
        pytest.skip(f"missing: {missing}")
    report = tmp_path / "pool.json"
    words = ["--engine", "object", "--quick", "--json", str(report)]
    assert without_traceback(lambda: bench_pool.main(words)) == 0
    document = json.loads(report.read_text())
    names = ("hicache_ext", "obstore, threads", "obstore, asyncio")
    assert {(e["contender"], e["mode"]) for e in document["results"]} == {(n, m) for n in names for m in MODES}
    assert all(entry["ratio_to_own_client"] > 0 for entry in document["results"])
    assert "read, object, 128KiB, 1 thread\n" in capsys.readouterr().out


def test_the_environment_of_the_s3_server_ends_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if missing := missing_s3_server():
        pytest.skip(f"missing: {missing}")
    import os

    monkeypatch.delenv("HICACHE_TEST_S3_KEY", raising=False)
    with object_stores(tmp_path):
        assert "HICACHE_TEST_S3_KEY" in os.environ
    assert "HICACHE_TEST_S3_KEY" not in os.environ
