"""Counters, levels and latencies, and their way to a Prometheus endpoint across processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hicache_ext.cli import stats_command
from hicache_ext.cli.main import main
from hicache_ext.cli.stats_command import read_samples, table
from hicache_ext.metrics import LATENCY_BOUNDS, TierMetrics
from hicache_ext.metrics_export import HELP, metric_name

ROOT = Path(__file__).parents[1]

_RANK = """
import sys
from hicache_ext.metrics import TierMetrics
from hicache_ext.metrics_export import Exporter
for attempt in range(2):  # A detach and a new attach in one process.
    metrics = TierMetrics("pool")
    metrics.add("get", "hit", 5)
    exporter = Exporter(lambda: [metrics], {"tp_rank": sys.argv[1]})
    metrics.add("get", "hit", 2)
    metrics.add("breaker", "opened")
    metrics.set_level("queue_bytes", "async", 100)
    metrics.observe("get", 0.002)
    metrics.observe("get", 20.0)
    exporter.close()
    exporter.close()
    metrics.observe("get", 1.0)
"""

_ENDPOINT = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """What an endpoint answers after two ranks have exported, each after a detach and a new attach."""
    pytest.importorskip("prometheus_client", reason="missing: prometheus_client")
    directory = tmp_path_factory.mktemp("prometheus")
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(directory), "PYTHONPATH": str(ROOT)}

    def run(*words):
        return subprocess.run(
            [sys.executable, "-c", *words], env=environment, capture_output=True, text=True, check=True
        ).stdout

    run(_RANK, "0")
    run(_RANK, "1")
    return run(_ENDPOINT)


def test_what_every_rank_counts_arrives_at_the_endpoint(exported):
    samples = read_samples(exported)
    assert samples.by("tp_rank", "hicache_ext_get_total", tier="pool", reason="hit") == {"0": 14, "1": 14}
    assert samples.total("hicache_ext_breaker_total", reason="opened") == 4
    assert samples.by("tp_rank", "hicache_ext_queue_bytes", reason="async") == {"0": 100, "1": 100}
    assert samples.total("hicache_ext_call_seconds_count", operation="get") == 8
    assert samples.total("hicache_ext_call_seconds_bucket", le="0.003", tp_rank="0") == 2


def test_the_table_tells_hits_latencies_and_why_pages_were_missed(exported):
    text = "\n".join(table(None, read_samples(exported)))
    (row,) = re.findall(r"^ *pool .*$", text, re.MULTILINE)
    assert row.split()[:4] == ["pool", "28", "0", "100"]
    assert "3 ms" in row and "> 10 s" in row and "200 B" in row
    assert "pool: 4 breaker opened" in text


def test_a_table_of_two_looks_has_rates_and_survives_a_restart():
    line = 'hicache_ext_get_total{{tier="pool",reason="{}",tp_rank="0"}} {}\n'
    before = read_samples(line.format("hit", 100) + line.format("timeout", 50))
    after = read_samples(line.format("hit", 140) + line.format("timeout", 10))
    after = stats_command.Samples(after.values, before.when + 4)
    row = table(before, after)[1].split()
    assert row[:4] == ["pool", "10", "0", "100"]


def test_labels_are_unescaped():
    samples = read_samples(
        'hicache_ext_get_total{tier="a\\"b\\\\n",reason="x,y}"} 3\nother{} 4\n# HELP hicache_ext_x y\n'
    )
    assert samples.by("tier", "hicache_ext_get_total") == {'a"b\\n': 3.0}
    assert samples.total("hicache_ext_get_total", reason="x,y}") == 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["ftp://x"], "URL: 'ftp://x' is not an address; allowed: such as http://127.0.0.1:30000"),
        (["http://127.0.0.1:1"], "http://127.0.0.1:1/metrics cannot be read: "),
        (["x", "--interval", "1"], "--interval: the text '1' has no unit"),
        (["x", "--interval", "1us"], "--interval: '1us' is not accepted; allowed: a duration from 100ms"),
    ],
)
def test_a_mistake_of_stats_is_one_sentence(words, sentence, capsys):
    assert main(["stats", *words]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith(sentence) and error.count("\n") == 1


def test_latencies_fall_into_the_buckets_of_their_bounds():
    metrics = TierMetrics("t")
    for seconds in (0.0, LATENCY_BOUNDS[0], 0.002, 99.0):
        metrics.observe("get", seconds)
    latencies = metrics.latencies()["get"]
    assert latencies.buckets == (2, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1)
    assert latencies.calls == 4 and latencies.seconds == pytest.approx(99.0021)


def documented_names():
    page = (ROOT / "docs" / "metrics.md").read_text()
    return set(re.findall(r"`(hicache_ext_\w+)`", page))


def test_every_metric_that_has_a_help_text_is_documented():
    names = documented_names()
    for counted in HELP:
        assert {metric_name(counted), f"{metric_name(counted)}_total"} & names, counted


def test_every_metric_of_the_dashboard_exists():
    """Documented, and counted under that name somewhere in the package."""
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    used = {name for expression in expressions for name in re.findall(r"hicache_ext_\w+", expression)}
    source = "\n".join(path.read_text() for path in (ROOT / "hicache_ext").rglob("*.py"))
    assert len(used) >= 10
    for name in used:
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        assert base in documented_names(), name
        if base == "hicache_ext_call_seconds":
            assert ".observe(operation" in source
            continue
        counted = base.removeprefix("hicache_ext_").removesuffix("_total")
        if counted == "breaker" and not (ROOT / "hicache_ext" / "storage" / "guards").exists():
            continue
        way = "add|add_many" if base.endswith("_total") else "set_level"
        assert re.search(rf'\.({way})\(\s*"{counted}"', source), name
