"""``hicache-ext bench file``: that it measures everything it says, computes right, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.bench.file import HICACHE_FILE, MODES
from hicache_ext.bench.frame import Point, Quartiles, Results, Sample, Table, fresh_directory, interleaved, summarized
from hicache_ext.cli.main import main
from hicache_ext.errors import CommandError

POINT = Point("read-warm", (("payload_bytes", 32768),))


def results_of(*names: str, raw: tuple[str, ...] = ()) -> Results:
    return Results(names, {"HiCacheFile": (HICACHE_FILE,), "raw limit": raw})


def sample(rate: float, *, work: int = 1000, cpu_share: float = 0.5, calls: tuple[float, ...] = (0.1,)) -> Sample:
    seconds = work / rate
    return Sample(work=work, seconds=seconds, cpu_seconds=seconds * cpu_share, calls=calls)


def column(table: Table, header: str) -> list[str]:
    return [row[table.headers.index(header)] for row in table.rows]


# -- statistics, on samples made up ------------------------------------------------------------------------------------


def test_the_order_is_rotated_and_the_warm_up_does_not_count() -> None:
    turns = list(interleaved(["a", "b", "c"], rounds=2))
    assert "".join(name for _, name, _ in turns) == "abc" + "bca" + "cab"
    assert [counts for _, _, counts in turns] == [False] * 3 + [True] * 6


def test_one_that_fails_drops_out_and_the_others_have_all_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []

    def measured(name: str, fails: int) -> Callable[[], dict[str, Sample]]:
        def measure() -> dict[str, Sample]:
            calls.append(name)
            if calls.count(name) == fails:
                raise CommandError("it lied")
            return {"read-warm": sample(5)}

        return measure

    results = results_of("ours", "theirs")
    results.take_turns("pages", {"read-warm": POINT}, {"ours": measured("ours", 0), "theirs": measured("theirs", 3)}, 5)
    assert (calls.count("ours"), calls.count("theirs")) == (6, 3)
    assert column(next(results.tables()), "rounds") == ["5"]
    assert [(e["contender"], e.get("not_measured")) for e in results.entries(POINT)] == [
        ("ours", None),
        ("theirs", "failed: it lied"),
    ]
    assert results.failures == ["pages: theirs: it lied"]
    assert "pages: round 1 of 6 (warm-up)" in capsys.readouterr().out


def test_a_summary_has_medians_and_quartiles_over_rounds_and_percentiles_over_all_calls() -> None:
    calls = tuple(float(n) for n in range(51)), tuple(float(n) for n in range(51, 101))
    summary = summarized([sample(10, calls=calls[0]), sample(20, calls=calls[1]), sample(60)])
    assert summary["rounds"] == 3
    assert Quartiles(**summary["rate"]) == Quartiles(median=20, lower=15, upper=40)
    assert summary["cpu_per_work"]["median"] == pytest.approx(0.5 / 20)
    percentiles = summarized([sample(10, calls=calls[0] + calls[1])])
    assert (percentiles["call_p50"], percentiles["call_p99"]) == (50, 99)


def test_ratios_are_those_of_the_medians_and_the_raw_limit_is_the_best_attempt() -> None:
    results = results_of("ours", HICACHE_FILE, "raw 1", "raw 2", raw=("raw 1", "raw 2"))
    rates = {"ours": (30, 60, 90), HICACHE_FILE: (19, 20, 500), "raw 1": (80, 80, 80), "raw 2": (1, 120, 121)}
    for name, values in rates.items():
        for rate in values:
            results.add(POINT, name, sample(rate))
    found = {e["contender"]: (e["ratio_to_hicachefile"], e["ratio_to_raw_limit"]) for e in results.entries(POINT)}
    assert found["ours"] == (pytest.approx(3.0), pytest.approx(0.5))
    assert found["raw 2"] == (pytest.approx(6.0), pytest.approx(1.0))
    assert found[HICACHE_FILE][0] == 1
    assert column(next(results.tables()), "x raw limit") == ["0.50", "0.17", "0.67", "1.00"]


def test_without_sglang_or_a_raw_limit_there_is_no_ratio() -> None:
    results = results_of("ours")
    results.add(POINT, "ours", sample(5))
    (entry,) = results.entries(POINT)
    assert entry["ratio_to_hicachefile"] is None and entry["ratio_to_raw_limit"] is None
    assert next(results.tables()).rows[0][-2:] == ("-", "-")


def test_a_contender_left_out_has_a_reason_and_no_figures() -> None:
    results = results_of("ours", "theirs")
    for name in results.contenders:
        results.add(POINT, name, sample(5))
    results.leave_out(POINT, "theirs", "failed: it lied")
    assert [(e["contender"], e.get("not_measured")) for e in results.entries(POINT)] == [
        ("ours", None),
        ("theirs", "failed: it lied"),
    ]


def test_the_directory_of_a_run_is_absolute_because_the_path_of_a_tier_has_to_be(tmp_path: Path) -> None:
    with chdir(tmp_path), fresh_directory(Path(".")) as directory:
        assert directory.is_absolute() and directory.parent.samefile(tmp_path)


def test_a_file_that_could_not_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "file", "--quick", "--json", str(tmp_path / "none" / "file")])
    assert stopped.value.code == 2
    assert f"there is no directory {tmp_path / 'none'}" in capsys.readouterr().err


def test_the_directory_of_a_run_is_deleted_also_after_a_failure(tmp_path: Path) -> None:
    def fail() -> None:
        with fresh_directory(tmp_path) as directory:
            (directory / "page").write_bytes(b"x")
            raise CommandError("lost")

    with pytest.raises(CommandError):
        fail()
    assert list(tmp_path.iterdir()) == []


# -- the benchmark itself ----------------------------------------------------------------------------------------------


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.thorough
class TestQuickRun:
    @pytest.fixture(scope="class")
    def place(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The directory that a quick run was started in; the exit code has been checked."""
        directory = tmp_path_factory.mktemp("bench")
        (directory / "disk").mkdir()
        # Relative, as a user types them: the default directory, too, used to end in a traceback.
        options = ["--directory", "disk", "--json", "o.json"]
        with chdir(directory):
            assert main(["bench", "file", "--quick", *options]) == 0
        return directory

    @pytest.fixture
    def document(self, place: Path) -> dict[str, Any]:
        return dict(json.loads((place / "o.json").read_text()))

    def test_every_contender_and_mode_is_measured_or_has_a_reason(self, document: dict[str, Any]) -> None:
        found = {(e["mode"], e["contender"]): e for e in document["results"]}
        contenders = {contender for _, contender in found}
        ours = {"hicache_ext pages", "hicache_ext slab"}
        assert contenders == {*ours, "hicache_ext slab-direct", HICACHE_FILE, "raw, 1 thread", "raw, 4 threads"}
        assert set(found) == {(mode, contender) for mode in MODES for contender in contenders}
        for (mode, contender), entry in found.items():
            assert ("summary" in entry) != ("not_measured" in entry)
            if contender in {*ours, HICACHE_FILE}:
                assert "summary" in entry, (mode, entry)

    def test_the_file_says_where_when_and_how_it_was_measured(self, document: dict[str, Any]) -> None:
        assert document["date"] and document["command"]
        assert {"cpus", "kernel", "file_system", "python", "packages"} <= set(document["machine"])
        rounds = document["settings"]["rounds"]
        assert {len(e["samples"]) for e in document["results"] if "samples" in e} == {rounds}

    def test_ratios_agree_with_the_medians_next_to_them(self, document: dict[str, Any]) -> None:
        points: dict[tuple[str, int], dict[str, Any]] = {}
        for entry in document["results"]:
            if "summary" in entry:
                points.setdefault((entry["mode"], entry["payload_bytes"]), {})[entry["contender"]] = entry
        for measured in points.values():
            base = measured[HICACHE_FILE]["summary"]["rate"]["median"]
            for entry in measured.values():
                assert entry["ratio_to_hicachefile"] == pytest.approx(entry["summary"]["rate"]["median"] / base)

    def test_nothing_is_left_in_the_directory(self, place: Path) -> None:
        assert list((place / "disk").iterdir()) == []


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.thorough
def test_a_contender_that_returns_other_bytes_fails_the_run_and_gets_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hicache_ext.bench.file import RawContender

    honest = RawContender.read

    def lying(self: Any, keys: Any, pages: Any) -> int:
        found = honest(self, keys, pages)
        pages.targets[-1, -1] ^= 1
        return found

    monkeypatch.setattr(RawContender, "read", lying)
    output = tmp_path / "o.json"
    assert main(["bench", "file", "--quick", "--directory", str(tmp_path), "--json", str(output)]) == 1
    assert "came back with other bytes" in capsys.readouterr().err
    entries = json.loads(output.read_text())["results"]
    assert all("not_measured" in entry for entry in entries if entry["contender"] == "raw, 1 thread")
    assert all("summary" in entry for entry in entries if entry["contender"] == HICACHE_FILE)
    assert [path.name for path in tmp_path.iterdir()] == ["o.json"]


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_that_is_terminated_deletes_what_it_wrote(tmp_path: Path) -> None:
    """SIGTERM used to be swallowed: deleting met a thread that was still writing, and the run went on."""
    options = ["--directory", str(tmp_path)]
    program = "import sys; from hicache_ext.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", program, "bench", "file", "--payload", "1MiB", *options]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not any(tmp_path.glob("hicache-bench-*/*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert any(tmp_path.glob("hicache-bench-*/*"))
        time.sleep(1)
        process.terminate()
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()) == []
