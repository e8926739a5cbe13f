"""``hicache-ext bench file``: that it measures everything it says, computes right, and leaves nothing behind."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.bench.file import Settings, _results, _Run, configure, exists_point, transfer_point
from hicache_ext.bench.file_contenders import EXISTS_CASES, HICACHE_FILE, TRANSFER_MODES, Contender
from hicache_ext.bench.frame import (
    Clock,
    Measured,
    Point,
    Quartiles,
    Results,
    Sample,
    Stopwatch,
    Summary,
    Table,
    command_line,
    fresh_directory,
    interleaved,
)
from hicache_ext.cli.main import main
from hicache_ext.errors import BenchmarkError

POINT = transfer_point("read-warm", "mha", 32768)


def results_of(*names: str, raw: frozenset[str] = frozenset()) -> Results:
    return _results([Contender(name, lambda place: None, raw=name in raw) for name in names])  # type: ignore[arg-type, return-value]


def entries(results: Results) -> list[dict[str, Any]]:
    return list(results.figures()["results"])


def sample(rate: float, *, work: int = 1000, cpu_share: float = 0.5, calls: tuple[float, ...] = (0.1,)) -> Sample:
    seconds = work / rate
    return Sample(work=work, seconds=seconds, cpu_seconds=seconds * cpu_share, calls=calls)


def column(table: Table, header: str) -> list[str]:
    return [row[table.headers.index(header)] for row in table.rows]


def settings_of(*arguments: str) -> Settings:
    parser = argparse.ArgumentParser()
    configure(parser)
    return Settings.of(parser.parse_args(arguments))


def test_a_run_of_some_minutes_has_every_size_geometry_and_round_and_fewer_bytes() -> None:
    short, whole = settings_of("--minutes", "14"), settings_of()
    assert (short.cells(), short.rounds) == (whole.cells(), whole.rounds)
    assert short.modes == ("overwrite", "read-warm", "read-cold", "exists")
    assert [short.total_of(payload) >> 20 for payload in (32 << 10, 128 << 10, 1 << 20, 4 << 20)] == [32, 128, 256, 256]
    assert settings_of("--minutes", "1", "--mode", "mixed").modes == ("mixed",)


class TestTime:
    """Contenders that take ten seconds of a clock that only they move.

    Reports used to say "5 measured" above figures of three rounds.
    """

    def run(self, seconds: float, points: int = 1) -> Results:
        now = [1000.0]

        def measure(contender: Contender) -> Measured:
            now[0] += 10
            return Measured({"read-warm": sample(5)})

        contenders = [Contender(name, lambda place: None) for name in ("ours", "theirs")]  # type: ignore[arg-type, return-value]
        results = results_of("ours", "theirs")
        run = _Run(settings_of("--minutes", "1"), contenders, Path(), results)
        clock = Clock(seconds, points, lambda: now[0])
        for number in range(points):
            run.take_turns(f"size {number}, batches", {"read-warm": self.point(number)}, measure, clock)
        return results

    def point(self, number: int) -> Point:
        return replace(POINT, facts=(("payload_bytes", number),), place=(number,))

    def rounds(self, results: Results, number: int = 0) -> dict[str, int]:
        return {name: len(taken) for name, taken in results.samples.get(self.point(number), {}).items()}

    def test_a_run_with_time_makes_all_rounds(self) -> None:
        results = self.run(1000)
        assert self.rounds(results) == {"ours": 5, "theirs": 5}
        assert results.notes == []

    def test_a_point_has_the_rounds_that_its_share_has_time_for(self) -> None:
        results = self.run(150, points=2)
        # A warm-up of 20 seconds, then 20 a round; the share is 75 seconds.
        assert self.rounds(results) == {"ours": 3, "theirs": 3}
        assert "size 0: 3 of 5 rounds for want of time" in results.notes
        assert column(next(results.tables()), "rounds") == ["3", "3"]

    def test_every_point_has_one_round_while_the_run_has_time(self) -> None:
        results = self.run(85, points=2)
        assert self.rounds(results) == {"ours": 2, "theirs": 2}
        results = self.run(42, points=2)
        assert self.rounds(results) == {"ours": 1, "theirs": 1}
        assert self.rounds(results, 1) == {}

    def test_what_there_was_no_time_for_is_named(self) -> None:
        results = self.run(25, points=2)
        # The warm-up and one turn of the first round, whose order is rotated.
        assert self.rounds(results) == {"theirs": 1}
        assert column(next(results.tables()), "rounds") == ["1"]
        assert "size 0: not measured for want of time: ours" in results.notes
        assert "size 1: not measured: no time left" in results.notes
        missing = {(e["payload_bytes"], e["contender"]) for e in entries(results) if "not_measured" in e}
        assert missing == {(0, "ours"), (1, "ours"), (1, "theirs")}


# -- statistics, on samples made up ------------------------------------------------------------------------------------


def test_the_order_is_rotated_and_the_warm_up_does_not_count() -> None:
    turns = list(interleaved(["a", "b", "c"], rounds=2, warm_up_rounds=1))
    assert "".join(name for _, name, _ in turns) == "abc" + "bca" + "cab"
    assert [counts for _, _, counts in turns] == [False] * 3 + [True] * 6


def test_a_summary_has_medians_and_quartiles_over_rounds_and_percentiles_over_all_calls() -> None:
    calls = tuple(float(n) for n in range(51)), tuple(float(n) for n in range(51, 101))
    summary = Summary.of([sample(10, calls=calls[0]), sample(20, calls=calls[1]), sample(60)])
    assert summary.rounds == 3
    assert summary.rate == Quartiles(median=20, lower=15, upper=40)
    assert summary.cpu_per_work.median == pytest.approx(0.5 / 20)
    percentiles = Summary.of([sample(10, calls=calls[0] + calls[1])])
    assert (percentiles.call_p50, percentiles.call_p99) == (50, 99)


def test_ratios_are_those_of_the_medians_and_the_raw_limit_is_the_best_attempt() -> None:
    results = results_of("ours", HICACHE_FILE, "raw 1", "raw 2", raw=frozenset({"raw 1", "raw 2"}))
    rates = {"ours": (30, 60, 90), HICACHE_FILE: (19, 20, 500), "raw 1": (80, 80, 80), "raw 2": (1, 120, 121)}
    for name, values in rates.items():
        for rate in values:
            results.add(POINT, name, sample(rate))
    rows = {row.contender: row.ratios for row in results.rows(POINT)}
    assert rows["ours"] == (pytest.approx(3.0), pytest.approx(0.5))
    assert rows["raw 2"] == (pytest.approx(6.0), pytest.approx(1.0))
    assert rows[HICACHE_FILE][0] == 1


def test_without_sglang_or_a_raw_limit_there_is_no_ratio() -> None:
    results = results_of("ours")
    results.add(POINT, "ours", sample(5))
    (row,) = results.rows(POINT)
    assert row.ratios == (None, None)
    assert next(results.tables()).rows[0][-2:] == ("-", "-")


def test_a_contender_left_out_has_a_reason_and_no_figures() -> None:
    results = results_of("ours", "theirs")
    for name in results.contenders:
        results.add(POINT, name, sample(5))
    results.leave_out(POINT, "theirs", "failed: it lied")
    assert [(e["contender"], e.get("not_measured")) for e in entries(results)] == [
        ("ours", None),
        ("theirs", "failed: it lied"),
    ]


def test_exists_is_told_in_milliseconds_for_the_chain() -> None:
    results = results_of("ours")
    point = exists_point(EXISTS_CASES[0], chain=1000)
    # Three calls for a chain of 1,000 pages each, 20 ms a call.
    results.add(point, "ours", Sample(work=3000, seconds=0.06, cpu_seconds=0.03, calls=(0.02, 0.02, 0.02)))
    cells = next(results.tables()).rows[0]
    assert cells[2] == "20.0"
    assert cells[4] == "10.0"  # 30 ms of CPU for 3,000 keys


def test_a_stopwatch_leaves_out_what_happens_between_the_calls() -> None:
    watch = Stopwatch()
    for _ in range(3):
        with watch.call():
            pass
    taken = watch.sample(7)
    assert len(taken.calls) == 3
    assert taken.seconds == pytest.approx(sum(taken.calls))


def test_a_published_command_line_has_no_paths() -> None:
    words = [
        "/opt/x/bin/hicache-ext",
        "bench",
        "file",
        "--directory",
        "/mnt/disk/",
        "--json=/home/me/o.json",
        "--quick",
    ]
    hidden = {Path("/mnt/disk"): "DIRECTORY", Path("/home/me/o.json"): "FILE.json"}
    assert command_line(words, hidden) == "hicache-ext bench file --directory DIRECTORY --json=FILE.json --quick"


def test_a_published_command_line_names_no_relative_directory_either() -> None:
    words = ["hicache-ext", "bench", "file", "--directory", "scratch/disk"]
    assert command_line(words, {Path("scratch/disk"): "DIRECTORY"}).endswith("--directory DIRECTORY")


def test_the_directory_of_a_run_is_absolute_because_the_path_of_a_tier_has_to_be(tmp_path: Path) -> None:
    with chdir(tmp_path), fresh_directory(Path(".")) as directory:
        assert directory.is_absolute() and directory.parent.samefile(tmp_path)


@pytest.mark.parametrize("option", ["--json", "--markdown", "--plot"])
def test_a_file_that_could_not_be_written_is_refused_before_anything_is_measured(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "file", "--quick", option, str(tmp_path / "none" / "file")])
    assert stopped.value.code == 2
    assert f"there is no directory {tmp_path / 'none'}" in capsys.readouterr().err


def test_the_directory_of_a_run_is_deleted_also_after_a_failure(tmp_path: Path) -> None:
    def fail() -> None:
        with fresh_directory(tmp_path) as directory:
            (directory / "page").write_bytes(b"x")
            raise BenchmarkError("lost")

    with pytest.raises(BenchmarkError):
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
        options = ["--directory", "disk", "--json", "o.json", "--markdown", "o.md"]
        with chdir(directory):
            assert main(["bench", "file", "--quick", *options]) == 0
        return directory

    @pytest.fixture
    def document(self, place: Path) -> dict[str, Any]:
        return dict(json.loads((place / "o.json").read_text()))

    def test_every_contender_and_mode_is_measured_or_has_a_reason(self, document: dict[str, Any]) -> None:
        found = {(e["geometry"], e["mode"], e["contender"]): e for e in document["results"]}
        contenders = {contender for _, _, contender in found}
        assert {
            "hicache_ext pages",
            "hicache_ext slab",
            HICACHE_FILE,
            "raw, 4 threads",
            "os.stat",
        } <= contenders
        for contender in contenders:
            for geometry in ("mha", "mla"):
                assert all((geometry, mode, contender) in found for mode in TRANSFER_MODES)
            assert all(("mha", case, contender) in found for case in EXISTS_CASES)
        for (_, mode, contender), entry in found.items():
            assert ("summary" in entry) != ("not_measured" in entry)
            if contender in ("hicache_ext pages", "hicache_ext slab", HICACHE_FILE):
                assert "summary" in entry, (mode, entry)

    def test_the_file_says_where_when_and_how_it_was_measured(self, document: dict[str, Any]) -> None:
        assert document["date"] and document["command"]
        assert {"cpus", "kernel", "file_system", "python", "packages"} <= set(document["machine"])
        rounds = document["settings"]["rounds"]
        assert {len(e["samples"]) for e in document["results"] if "samples" in e} == {rounds}

    def test_ratios_agree_with_the_medians_next_to_them(self, document: dict[str, Any]) -> None:
        points: dict[tuple[str, str, int], dict[str, Any]] = {}
        for entry in document["results"]:
            if "summary" in entry:
                point = (entry["mode"], entry["geometry"], entry["payload_bytes"])
                points.setdefault(point, {})[entry["contender"]] = entry
        for measured in points.values():
            base = measured[HICACHE_FILE]["summary"]["rate"]["median"]
            for entry in measured.values():
                assert entry["ratio_to_hicachefile"] == pytest.approx(entry["summary"]["rate"]["median"] / base)

    def test_nothing_is_left_in_the_directory(self, place: Path) -> None:
        assert list((place / "disk").iterdir()) == []

    def test_what_is_published_names_no_path_of_the_machine(self, place: Path) -> None:
        text = (place / "o.md").read_text()
        assert "x raw limit" in text
        assert str(place) not in text


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.thorough
def test_a_contender_that_returns_other_bytes_fails_the_run_and_gets_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hicache_ext.bench.file_contenders import RawContender

    honest = RawContender.read

    def lying(self: Any, keys: Any, batch: Any) -> int:
        found = honest(self, keys, batch)
        self._pages.buffers_of([batch.pages[-1]])[0][-1][-1] ^= 1
        return found

    monkeypatch.setattr(RawContender, "read", lying)
    options = ["--geometry", "mha", "--mode", "read-warm", "--contender", "raw, 1", "--contender", "HiCacheFile"]
    output = tmp_path / "o.json"
    assert main(["bench", "file", "--quick", "--directory", str(tmp_path), "--json", str(output), *options]) == 1
    assert "came back with other bytes" in capsys.readouterr().err
    entries_of = {entry["contender"]: entry for entry in json.loads(output.read_text())["results"]}
    assert "not_measured" in entries_of["raw, 1 thread"]
    assert "summary" in entries_of[HICACHE_FILE]
    assert [path.name for path in tmp_path.iterdir()] == ["o.json"]


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_that_is_terminated_deletes_what_it_wrote(tmp_path: Path) -> None:
    """SIGTERM used to be swallowed: deleting met a thread that was still writing, and the run went on."""
    options = ["--directory", str(tmp_path), "--geometry", "mha", "--mode", "mixed", "--contender", "HiCacheFile"]
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
