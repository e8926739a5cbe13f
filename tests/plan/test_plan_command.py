"""``hicache-ext plan``: figures that follow from a small trace by hand, one page, one sentence for each mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hicache_ext import native
from hicache_ext.cli import plan_command
from hicache_ext.cli.main import main
from hicache_ext.config import load_config
from hicache_ext.plan.traces import Chat, generate, parse_workload
from tests.plan.test_models import LLAMA_8B

TB = 10**12
CLUSTER = ["redis://pool-0:6379", "redis://pool-1:6379", "redis://pool-2:6379"]
"""Some of its nodes: the others are found."""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two conversations of two turns within an hour: the second turns find what the first ones wrote."""
    lines = [
        {"timestamp": 0, "input_length": 1024, "output_length": 10, "hash_ids": [1, 2]},
        {"timestamp": 1000, "input_length": 1024, "output_length": 10, "hash_ids": [3, 4]},
        {"timestamp": 1_800_000, "input_length": 2048, "output_length": 10, "hash_ids": [1, 2, 5, 6]},
        {"timestamp": 3_600_000, "input_length": 2048, "output_length": 10, "hash_ids": [3, 4, 7, 8]},
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    assert main(["plan", *words.split(), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


BLOCK = 512 * 131_072


@pytest.mark.thorough
def test_figures_of_a_disk_are_those_of_a_calculation_by_hand(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(
        capsys,
        f"trace.jsonl --model . --disk {8 * BLOCK} --dwpd 1 --prefill-rate 1024 --disk-speed {BLOCK}"
        " --price-node-hour 3600 --price-disk 1000000 --years 1",
    )
    assert made["model"]["page_bytes"] == 64 * 131_072
    assert made["fleet"]["tokens"] == {"disk": 2048, "pool": 0, "computed": 4096}
    assert made["fleet"]["hit_share"] == pytest.approx(1 / 3) == made["fleet"]["infinite_share"]
    assert made["curve"][-1] == {"bytes": 8 * BLOCK, "blocks": 8, "hit_share": pytest.approx(1 / 3)}
    writes = made["writes"]
    assert writes["disk_bytes_per_day"] == pytest.approx(8 * BLOCK * 24) == writes["disk_bytes_per_day_worst_node"]
    assert writes["disk_writes_per_day"] == pytest.approx(24)
    assert writes["years_until_worn_out"] == pytest.approx(5 / 24)
    prefill = made["prefill"]
    assert prefill["saved_seconds_per_hour"] == pytest.approx(2) and prefill["source"] == "as given"
    assert prefill["reading_seconds_per_hour"] == pytest.approx(4)
    assert prefill["break_even_bytes_per_second"] == pytest.approx(1024 * 131_072)
    money = made["money"]
    assert money["saved_per_year"] == 0, "reading takes longer than computing"
    assert money["disks_per_year"] == pytest.approx(8 * BLOCK / TB * 1_000_000 * 24 / 5), "bought again when worn out"


def test_a_pool_takes_what_nodes_write_and_its_network_is_counted(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = plan(capsys, f"trace.jsonl --model . --nodes 2 --pool {8 * BLOCK} --prefill-rate 1024 --price-node-hour 1")
    network = made["pool_network"]
    assert network["read_bytes_per_second"] == pytest.approx(4 * BLOCK / 3600)
    assert network["written_bytes_per_second_peak_minute"] == pytest.approx(4 * BLOCK / 60)
    assert made["writes"]["pool_bytes_per_day"] == pytest.approx(8 * BLOCK * 24)
    assert made["money"]["saved_per_year"] == pytest.approx(2 / 3600 * 24 * 365.25)


def test_the_configuration_that_follows_is_one_that_loads(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(capsys, "trace.jsonl --model . --disk 1TB --pool 2TB")
    tiers = load_config(made["configuration"]).tiers
    assert tiers["nvme"].capacity == 10**12 and set(tiers) == {"nvme", "pool"}  # type: ignore[attr-defined]
    assert any("@hicache.yaml" in line for line in made["launch"])
    assert plan(capsys, "trace.jsonl --model .")["configuration"] is None


@pytest.mark.parametrize(
    ("pool", "nodes", "urls", "maxmemory"),
    [
        ("400GB", 1, ["redis://pool:6379"], 400 * 10**9),
        ("600GB", 3, CLUSTER, 200 * 10**9),
        ("20TB", 40, CLUSTER, 500 * 10**9),
        ("20TiB", 44, CLUSTER, -(-20 * 2**40 // 44)),
    ],
)
def test_a_pool_that_one_server_cannot_hold_is_a_cluster_of_as_many_as_its_size_wants(
    pool: str, nodes: int, urls: list[str], maxmemory: int, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"trace.jsonl --model . --pool {pool}"
    made = plan(capsys, words)
    assert made["fleet"]["pool_nodes"] == nodes and nodes * maxmemory >= made["fleet"]["pool_bytes"]
    assert list(load_config(made["configuration"]).tiers["pool"].url) == urls  # type: ignore[attr-defined]
    assert main(["plan", *words.split()]) == 0
    told = next(line for line in capsys.readouterr().out.splitlines() if "# the pool:" in line)
    assert f"maxmemory {maxmemory}," in told and (f"{nodes} servers of a cluster" in told) == (nodes > 1)


def test_the_launch_line_has_the_page_size_that_was_planned_for(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, stand_in in {"plan_of": lambda *_: {}, "page_of": lambda *_: []}.items():
        monkeypatch.setattr(plan_command, name, stand_in)
    launch = plan(capsys, "trace.jsonl --model . --disk 1TB --page-size 32")["launch"]
    assert [part for part in launch if part.startswith("--page-size")] == ["--page-size 32"]


def test_the_launch_line_has_the_ranks_and_the_dtype_that_were_planned_for(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = plan(capsys, "trace.jsonl --model . --disk 1TB --tp 2 --dtype fp8_e4m3")["launch"]
    assert {"--tp-size 2", "--kv-cache-dtype fp8_e4m3"} <= set(launch)
    assert "--dtype float16" in plan(capsys, "trace.jsonl --model . --disk 1TB --dtype float16")["launch"]


def test_what_does_not_fit_is_said(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(capsys, "trace.jsonl --model . --prefill-rate 1024")["does_not_fit"] == []
    assert plan(capsys, "trace.jsonl --model . --prefill-rate 0.5")["does_not_fit"][0].endswith(
        "s of prefill in an hour, and 1 nodes have 3,600"
    )


def test_disks_that_wear_out_before_they_are_written_off_are_paid_again(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"trace.jsonl --model . --disk {8 * BLOCK} --price-disk 1000000 --years 3"
    once = plan(capsys, words)["money"]["disks_per_year"]
    made = plan(capsys, words + " --dwpd 0.001")
    life = made["writes"]["years_until_worn_out"]
    assert life < 3
    assert made["money"]["disks_per_year"] == pytest.approx(once * 3 / life)


def test_a_plan_is_made_without_the_native_core(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = plan(capsys, "trace.jsonl --model .")
    monkeypatch.setattr(native, "LIBRARY", Path("/nowhere/core.so"))
    assert plan(capsys, "trace.jsonl --model .") == known


def test_the_page_has_everything_and_fits(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "trace.jsonl --model . --disk 1TB --pool 2TB --gpu h100 --dwpd 1 --price-node-hour 2 --price-disk 90"
    assert main(["plan", *words.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 70 and max(map(len, lines)) <= 130
    text = "\n".join(lines)
    for word in (
        "bytes a token",
        "Found in one cache",
        "█",
        "worn out after",
        "/s read",
        "saved in an hour",
        "A year:",
    ):
        assert word in text
    assert "data sheet" in text and "capacity: 1TB" in text
    # One kind of units: those in which disks are sold.
    assert "TB" in text and not re.search(r"[KMGT]iB|bit/s", text)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "TRACE: one of TRACE and --workload is needed"),
        ("trace.jsonl --workload rate=1", "TRACE: one of TRACE and --workload is needed"),
        ("absent.jsonl", "absent.jsonl: No such file or directory"),
        ("config.json", "config.json is no trace: line 1 is not a JSON object with timestamp"),
        ("trace.jsonl --tp 0", "--tp: '0' is not accepted; allowed: a whole number from 1"),
        ("trace.jsonl --nodes x", "--nodes: 'x' is not accepted"),
        ("trace.jsonl --disk 4T", "--disk: the unit 'T' is ambiguous; write TB or TiB"),
        ("trace.jsonl --disk 1MB", "--disk: 1000000 bytes hold no block of 512 tokens; allowed: 67108864 or more"),
        ("trace.jsonl --prefill-rate nan", "--prefill-rate: 'nan' is not accepted"),
        ("trace.jsonl --prefill-rate 0", "--prefill-rate: is 0; allowed: tokens per second"),
        ("trace.jsonl --gpu abacus", "--gpu: 'abacus' is not in the table; allowed: a100"),
        ("trace.jsonl --gpu h100 --prefill-rate 1", "--gpu: cannot be combined with --prefill-rate"),
        ("trace.jsonl --hints", "--hints: they tell of what decode nodes write; allowed: with --decode-writes"),
        ("trace.jsonl --decode-writes", "--decode-writes: decode nodes write to a pool, and there is none"),
        ("trace.jsonl --token-bytes 1KiB", "--model: one of --model and --token-bytes is needed"),
        ("--workload rate=0", "--workload: rate, span and systems must be above 0"),
        ("--workload speed=1", "--workload: 'speed=1' is not accepted; allowed: rate=1.0, turns=5.0"),
        ("--workload rate=x", "--workload: rate is 'x', which is no number"),
        ("--workload turns=0.5", "--workload: turns cannot be 0.5"),
        ("--workload rate=100000,span=1d", "--workload: some 43200000000 requests are more than fit here"),
        ("--workload think=5w", "--workload: think is '5w', which is no number"),
    ],
)
def test_a_mistake_is_one_sentence(words: str, sentence: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", "."]
    assert main(["plan", *given, *words.split()]) in (1, 2)
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(sentence) and printed.err.count("\n") == 1


def test_a_described_workload_has_its_rate_turns_and_shared_prompts() -> None:
    chat = parse_workload("rate=2,turns=4,think=10s,system=1024,systems=2,first=1024,question=600,answer=600,span=1h")
    assert chat == Chat(2, 4, 10, 2, 1024, 1024, 600, 600, 3600)
    trace = generate(chat)
    assert list(trace.chains()) == list(generate(chat).chains())
    assert len(trace) == pytest.approx(2 * 3600 * 4, rel=0.1)
    heads = {tuple(chain[:2]) for chain in trace.chains()}
    assert len(heads) == 2 and trace.seconds <= 3600
    assert trace.times.tolist() == sorted(trace.times.tolist())
