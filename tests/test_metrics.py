"""Counters, levels and latencies, and their way to a Prometheus endpoint across processes."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import hicache_ext
from hicache_ext.cli import server_commands
from hicache_ext.cli.main import main
from hicache_ext.cli.server_commands import read_samples, table
from hicache_ext.kernels.engine import Direction
from hicache_ext.runtime.metrics import LATENCY_BOUNDS, TierMetrics
from hicache_ext.storage.contract.reports import UNKNOWN
from hicache_ext.storage.serving.metrics_export import (
    BUILD_INFO,
    CALL_SECONDS,
    HELP,
    _counter,
    _gauge,
    _histogram,
    export_if_possible,
    metric_name,
)
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]

_RANK = """
import sys
from hicache_ext.runtime.metrics import TierMetrics
from hicache_ext.storage.serving.metrics_export import Exporter
for attempt in range(2):  # A detach and a new attach in one process.
    metrics = TierMetrics("pool")
    metrics.add("get", "hit", 5)
    metrics.add_many("chain_pages", {"asked": 8, "found": 7, "used": 5})
    exporter = Exporter(lambda: [metrics], {"model_name": "m", "tp_rank": sys.argv[1]})
    metrics.add("get", "hit", 2)
    metrics.add("get", "miss", 1)
    metrics.set_level("tier_up", "", 1)
    metrics.add("breaker", "opened")
    metrics.set_level("queue_bytes", "async", 100)
    metrics.observe("get", 0.002)
    metrics.observe("get", 20.0)
    exporter.export()
    if attempt == 0:
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


def test_every_sample_names_the_model_and_the_rank(exported):
    ranks = {"tp_rank", "pp_rank", "dp_rank", "attn_cp_rank", "dcp_rank"}
    values = read_samples(exported).values
    assert len(values) > 20
    for name, labels in values:
        assert {"model_name", *ranks} <= set(dict(labels)), name
        assert dict(labels)["model_name"] == "m"
        assert dict(labels)["tp_rank"] in ("0", "1") and dict(labels)["pp_rank"] == "0"


def test_the_build_is_told(exported):
    assert read_samples(exported).by("version", BUILD_INFO, tp_rank="0") == {hicache_ext.__version__: 1}


def test_the_table_tells_hits_latencies_and_why_pages_were_missed(exported):
    text = "\n".join(table(None, read_samples(exported)))
    (row,) = re.findall(r"^ *pool .*$", text, re.MULTILINE)
    assert row.split()[:6] == ["pool", "yes", "32", "28", "20", "62"]
    assert "3 ms" in row and "> 10 s" in row and "200B" in row
    assert "pool: 4 miss, 4 breaker opened" in text


def test_a_table_of_two_looks_has_rates_and_survives_a_restart():
    line = 'hicache_ext_chain_pages_total{{tier="pool",reason="{}",tp_rank="0"}} {}\n'
    before = read_samples(line.format("asked", 100) + line.format("used", 50))
    after = read_samples(line.format("asked", 140) + line.format("used", 10))
    after = server_commands.Samples(after.values, before.when + 4)
    row = table(before, after)[3].split()
    assert row[:6] == ["pool", "-", "10", "0", "0", "0"]


def test_a_tier_with_admission_has_a_line_of_what_it_stored_of_what_was_offered():
    line = 'hicache_ext_admission_total{{tier="pool",reason="{}",tp_rank="0"}} {}\n'
    counts = {"admitted_first": 10, "admitted_again": 20, "refused_first": 65, "refused_behind": 0, "refused_budget": 5}

    lines = table(None, read_samples("".join(line.format(*count) for count in counts.items())))

    assert lines[-2:] == ["stored of what was offered:", "pool: 30 %, 65 refused first, 5 refused budget"]


TOKENS = """
sglang:prompt_tokens_total{is_streaming="false",model_name="m"} %d
sglang:prompt_tokens_total{is_streaming="true",model_name="m"} %d
sglang:cached_tokens_total{cache_source="storage",model_name="m"} %d
sglang:cached_tokens_total{cache_source="device",model_name="m"} %d
sglang:cached_tokens_histogram_bucket{le="1"} 5
hicache_ext_chain_pages_total{tier="pool",reason="asked"} 1
"""


def test_the_first_line_is_the_share_of_prompt_tokens_from_each_source():
    first = table(None, read_samples(TOKENS % (600, 400, 410, 90)))[0]
    assert first == (
        "prompt tokens: 41.0 % from storage, 0.0 % from host memory, 9.0 % on the device, 50.0 % computed (of 1000)"
    )


def test_the_first_line_of_two_looks_is_about_what_came_between_them():
    before, after = read_samples(TOKENS % (600, 400, 410, 90)), read_samples(TOKENS % (800, 400, 610, 90))
    after = server_commands.Samples(after.values, before.when + 2)
    first = table(before, after)[0]
    assert first.startswith("prompt tokens: 100.0 % from storage") and first.endswith("0.0 % computed (of 200)")
    later = server_commands.Samples(after.values, after.when + 2)
    assert table(after, later)[0] == "prompt tokens: no request has ended"


def test_tokens_whose_source_sglang_does_not_know_are_not_called_computed():
    text = TOKENS % (1000, 0, 0, 0) + 'sglang:cached_tokens_total{cache_source="total",model_name="m"} 300\n'
    assert "30.0 % cached somewhere, 70.0 % computed" in table(None, read_samples(text))[0]


@pytest.mark.parametrize(
    ("ups", "breakers", "shown"),
    [
        ([0, 0], [0, 0], "no"),
        ([1, 0], [0, 0], "1 of 2"),
        ([1, 1], [0, 2], "left out"),
        ([1, 1], [0, 0], "yes"),
        (["NaN", "NaN"], [0, 0], "-"),
    ],
)
def test_the_table_tells_whether_a_tier_is_up(ups, breakers, shown):
    text = "".join(f'hicache_ext_tier_up{{tier="pool",tp_rank="{rank}"}} {up}\n' for rank, up in enumerate(ups))
    text += "".join(
        f'hicache_ext_breaker_state{{tier="pool",tp_rank="{rank}"}} {state}\n' for rank, state in enumerate(breakers)
    )
    lines = table(None, read_samples(text))
    assert lines[3].split("  ")[1].strip() == shown
    assert ("pool: cannot be reached" in lines) == (shown == "no")


def test_the_table_tells_how_full_a_tier_is():
    text = """
hicache_ext_used_bytes{tier="disk",tp_rank="0"} 40
hicache_ext_capacity_bytes{tier="disk",tp_rank="0"} 80
hicache_ext_used_bytes{tier="disk",tp_rank="1"} 41
hicache_ext_capacity_bytes{tier="disk",tp_rank="1"} 80
hicache_ext_used_bytes{tier="pool",tp_rank="0"} NaN
hicache_ext_capacity_bytes{tier="pool",tp_rank="0"} NaN
hicache_ext_tier_up{tier="pool",tp_rank="0"} 1
"""
    disk, pool = table(None, read_samples(text))[3:5]
    assert disk.split()[6] == "51"
    assert pool.split()[6] == "-"


def test_the_figures_of_tenants_are_told_and_ranks_that_tell_of_one_directory_count_once():
    text = "".join(
        f'hicache_ext_{name}{{tier="disk",tp_rank="{rank}",reason="team-a"}} {value}\n'
        for rank in (0, 1)
        for name, value in {
            "tenant_pages": 12,
            "tenant_bytes": 3_000_000,
            "tenant_hits_total": 4,
            "tenant_evicted_total": 1,
            "tenant_refused_total": 2,
        }.items()
    )
    refused = 'hicache_ext_kv_hints_tenant_refused_total{tier="kv_hints",reason="team-a"} 3\n'
    samples = read_samples(text + refused + 'hicache_ext_tier_up{tier="disk"} 1\n')
    found = server_commands.figures(None, samples)
    assert found["tiers"][0]["tenants"] == {
        "team-a": {"pages": 12, "bytes": 3_000_000, "read_pages": 8, "evicted_pages": 2, "refused_pages": 4}
    }
    assert found["beside"]["kv_hints"] == {"kv_hints_tenant_refused": {"team-a": 3}}
    assert "disk: team-a: 12 pages, 2.9MiB, 8 read, 2 evicted, 4 refused" in table(None, samples)


def test_what_counts_beside_the_tiers_is_no_tier_unless_a_user_has_one_of_that_name():
    """Recordings, KV events and the linker were shown as tiers."""
    files = (ROOT / "hicache_ext").rglob("*.py")
    sources = {name for file in files for name in re.findall(r'\("(\w+)", prefix="\w+"\)', file.read_text())}
    assert {"record", "events", "linker", "pull", "kernels"} < sources
    counted = "".join(f'hicache_ext_{name}_x_total{{tier="{name}",reason="x"}} 2\n' for name in sources)
    up = 'hicache_ext_tier_up{tier="disk"} 1\n'
    found = server_commands.figures(None, read_samples(counted + up))
    assert [tier["tier"] for tier in found["tiers"]] == ["disk"]
    assert found["beside"].keys() == sources
    found = server_commands.figures(None, read_samples(counted + up + 'hicache_ext_tier_up{tier="record"} 1\n'))
    assert [tier["tier"] for tier in found["tiers"]] == ["disk", "record"]


def test_the_table_tells_of_a_full_disk_and_of_paths_that_are_out():
    text = f"""
hicache_ext_tier_up{{tier="disk",tp_rank="0"}} 1
hicache_ext_no_space_since_seconds{{tier="disk",tp_rank="0"}} {time.time() - 600}
hicache_ext_no_space_since_seconds{{tier="disk",tp_rank="1"}} 0
hicache_ext_no_space_since_seconds{{tier="pool",tp_rank="0"}} NaN
hicache_ext_path_out_of_service_total{{tier="disk",reason="/a",tp_rank="0"}} 3
hicache_ext_path_back_in_service_total{{tier="disk",reason="/a",tp_rank="0"}} 2
hicache_ext_path_out_of_service_total{{tier="disk",reason="/b",tp_rank="0"}} 1
hicache_ext_path_back_in_service_total{{tier="disk",reason="/b",tp_rank="0"}} 1
"""
    assert table(None, read_samples(text))[1:3] == [
        "disk: no space left for new pages, for 10 min: the disk is full before the tier is",
        "disk: path /a is out of service",
    ]


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
        (["http://me:geheim@h:1"], "URL: an address holds no login; allowed: such as http://127.0.0.1:30000"),
        (["http://[::1"], "URL: 'http://[::1' is not an address; allowed: such as http://127.0.0.1:30000"),
        (["http://127.0.0.1:1"], "http://127.0.0.1:1/metrics cannot be read: "),
        (["x", "--interval", "1"], "--interval: the text '1' has no unit"),
        (["x", "--interval", "1us"], "--interval: '1us' is not accepted; allowed: a duration from 100ms"),
    ],
)
def test_a_mistake_of_stats_is_one_sentence(words, sentence, capsys):
    assert main(["stats", *words]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith(sentence) and error.count("\n") == 1


def documented_names():
    page = (ROOT / "docs" / "metrics.md").read_text()
    return set(re.findall(r"`(hicache_ext_\w+)`", page))


def test_every_metric_that_has_a_help_text_is_documented():
    names = documented_names()
    for counted in HELP:
        assert {metric_name(counted), f"{metric_name(counted)}_total"} & names, counted


# What is counted under a name that is made when it is counted: (file, expression) -> the names.
_MADE_NAMES = {
    ("storage/guards/time_limits.py", "event"): ("timeout", "late", "rejected"),
    ("storage/contract/base.py", "call"): ("get", "set"),
    ("kernels/selection.py", "str(direction)"): tuple(Direction),
    ("storage/tiers/file/multipath.py", "level"): ("tenant_pages", "tenant_bytes"),
}
_PREFIXES = {
    "pd/": "pd_write_",
    "sglang/decode_manager": "pd_write_",
    "kernels/": "copy_",
    "sglang/kernel_hooks": "copy_",
    "sglang/link": "linker_",
    "storage/tiering/pulling": "pull_",
    "storage/serving/hints": "hints_",
    "storage/serving/kv_hints": "kv_hints_",
    "storage/serving/events": "events_",
    "storage/tiering/recording": "record_",
}
_OF_THE_WRITER = ("storage/serving/hints.py", "self._metrics")
"""Who sends hints counts them where the writer of the decode node counts."""


def counted_in_the_package():
    """The names of everything that the package counts, as exported."""
    for path in sorted((ROOT / "hicache_ext").rglob("*.py")):
        file = path.relative_to(ROOT / "hicache_ext").as_posix()
        if file.startswith(("testing/", "runtime/metrics", "storage/serving/metrics")):
            continue
        prefix = next((of_room for room, of_room in _PREFIXES.items() if file.startswith(room)), "")
        if file == "storage/contract/reports.py":
            yield from ((metric_name(gauge), gauge) for gauge in UNKNOWN)
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            if call.func.attr not in ("add", "add_many", "set_level"):
                continue
            counter = ast.unparse(call.func.value)
            if not re.search("metrics|failures", counter):
                continue
            own = "pd_write_" if (file, counter) == _OF_THE_WRITER else prefix
            suffix = "" if call.func.attr == "set_level" else "_total"
            name = call.args[0]
            made = (name.value,) if isinstance(name, ast.Constant) else _MADE_NAMES[file, ast.unparse(name)]
            for counted in made:
                yield metric_name(own + counted) + suffix, own + counted


def test_everything_that_is_counted_is_documented_and_has_a_help_text():
    counted = dict(counted_in_the_package())
    assert len(counted) > 30
    assert set(counted) <= documented_names()
    assert set(counted.values()) <= set(HELP)


def test_every_documented_metric_is_counted():
    exported = {name for name, _ in counted_in_the_package()}
    assert documented_names() - exported == {CALL_SECONDS, BUILD_INFO}


def test_every_metric_of_the_dashboard_is_exported_and_every_panel_is_in_its_place():
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    panels = dashboard["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    used = {name for expression in expressions for name in re.findall(r"hicache_ext_\w+", expression)}
    exported = {name for name, _ in counted_in_the_package()} | {BUILD_INFO}
    exported |= {f"{CALL_SECONDS}_{part}" for part in ("bucket", "count")}
    assert len(used) >= 20
    assert used <= exported
    assert len({panel["id"] for panel in panels}) == len(panels)
    squares = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(squares)) == len(squares) and max(squares)[0] < 24


def test_every_metric_of_sglang_that_the_dashboard_uses_is_one_of_its_own():
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        pytest.skip("missing: sglang")
    collector = (Path(found.origin).parent / "srt" / "observability" / "metrics_collector.py").read_text()
    text = (ROOT / "docs" / "grafana.json").read_text() + (ROOT / "docs" / "metrics.md").read_text()
    used = set(re.findall(r"sglang:\w+", text.replace("[:_]", ":"))) | {
        server_commands.PROMPT_TOKENS,
        server_commands.CACHED_TOKENS,
    }
    assert len(used) >= 2
    assert {name for name in used if f'"{name}"' not in collector} == set()
    assert '"cache_source"' in collector


def test_the_first_row_is_where_prompt_tokens_came_from_fill_age_and_up():
    panels = json.loads((ROOT / "docs" / "grafana.json").read_text())["panels"]
    first, *others = [panel for panel in panels if panel["gridPos"]["y"] == 0]
    expressions = " ".join(target["expr"] for target in first["targets"])
    assert "cache_source" in expressions and server_commands.PROMPT_TOKENS.replace(":", "[:_]") in expressions
    (fill,), (age,), (up,) = [[target["expr"] for target in panel["targets"]] for panel in others]
    assert "used_bytes" in fill and "capacity_bytes" in fill and "evicted_age" in age and "tier_up" in up


def test_every_panel_says_what_it_is_in_which_unit_and_what_is_too_much():
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"] and defaults["thresholds"]["steps"], panel["title"]
        for alert in re.findall(r"\bHicache\w+", panel["description"]):
            assert f"## {alert}\n" in runbook, alert
    whole = [panel["title"] for panel in dashboard["panels"] if len(_steps(panel)) > 1]
    assert len(whole) >= 10


def _steps(panel):
    return panel.get("fieldConfig", {}).get("defaults", {}).get("thresholds", {}).get("steps", [])


def test_every_query_of_the_dashboard_goes_by_its_variables():
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert names == {"datasource", "job", "node", "model", "rank"}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            for metric, labels in re.findall(r"(hicache_ext_\w+|)\{([^}]*)\}", target["expr"]):
                wanted = ["job", "node", "model", *(["rank"] if metric else [])]
                assert [name for name in wanted if f'=~"${name}"' not in labels] == [], (metric, labels)
            assert not re.search(r"hicache_ext_\w+(?![\w{])", target["expr"]), target["expr"]
            # By which of both names Prometheus knows SGLang's metrics depends on its release (docs/metrics.md).
            assert not re.search(r"sglang[:_]\w", target["expr"]), target["expr"]


# -- the exporter, in this process -------------------------------------------------------------------------------------


def exported_value(family, **labels):
    """The sum of the samples of a family that have these labels."""
    wanted = labels.items()
    samples = [sample for metric in family.collect() for sample in metric.samples]
    return sum(sample.value for sample in samples if wanted <= sample.labels.items() and "_created" not in sample.name)


@pytest.fixture
def sources():
    pytest.importorskip("prometheus_client", reason="missing: prometheus_client")
    return []


@pytest.fixture
def exporter(sources):
    exporter = export_if_possible(lambda: sources, {"tp_rank": "3"})
    yield exporter
    exporter.close()


def test_counts_go_out_once_however_often_and_by_whomever_they_are_exported(sources, exporter):
    metrics = TierMetrics("once")
    sources.append(metrics)
    metrics.add("get", "hit", 5)
    exporter.export()
    exporter.export()
    metrics.add_many("get", {"hit": 2, "miss": 1})
    # A detach and a new attach, beside counts that live as long as the process.
    exporter.close()
    second = export_if_possible(lambda: sources, {"tp_rank": "3"})
    second.close()
    assert exported_value(_counter("get"), tier="once", reason="hit", tp_rank="3", dp_rank="0") == 7
    assert exported_value(_counter("get"), tier="once", reason="miss") == 1


def test_what_is_no_tier_has_its_prefix_in_front(sources, exporter):
    metrics = TierMetrics("pull", prefix="pull_")
    sources.append(metrics)
    metrics.add("decision", "cheaper")
    metrics.set_level("waiting", "", 4)
    exporter.export()
    assert exported_value(_counter("pull_decision"), tier="pull", reason="cheaper") == 1
    assert exported_value(_gauge("pull_waiting"), tier="pull") == 4


def test_a_tier_that_has_gone_leaves_its_last_counts_and_no_levels(sources, exporter):
    gone, stays = TierMetrics("gone"), TierMetrics("stays")
    sources += [gone, stays]
    for metrics in (gone, stays):
        metrics.set_level("breaker_state", "", 2)
        metrics.set_level("tier_up", "", 1)
    exporter.export()
    gone.add("breaker", "open")
    sources.remove(gone)
    exporter.export()
    gone.observe("get", 1.0)  # a call that was under way: nobody passes it on any more
    assert exported_value(_counter("breaker"), tier="gone", reason="open") == 1
    assert exported_value(_gauge("breaker_state"), tier="gone") == 0
    # Not down: nobody wants it up.
    assert math.isnan(exported_value(_gauge("tier_up"), tier="gone"))
    assert exported_value(_gauge("tier_up"), tier="stays") == 1
    assert exported_value(_gauge("breaker_state"), tier="stays") == 2
    assert exported_value(_histogram(), tier="gone") == 0


def test_a_successor_of_the_same_name_keeps_its_levels(sources, exporter):
    before, after = TierMetrics("same"), TierMetrics("same")
    before.set_level("queue_bytes", "async", 10)
    after.set_level("queue_bytes", "async", 20)
    sources.append(before)
    exporter.export()
    sources[:] = [after]
    exporter.export()
    assert exported_value(_gauge("queue_bytes"), tier="same") == 20


def test_what_was_declared_is_there_before_its_first_event(sources, exporter):
    metrics = TierMetrics("declared")
    metrics.declare({"get": ("hit", "miss")}, ["get"])
    sources.append(metrics)
    exporter.export()
    for family, labels in ((_counter("get"), {"reason": "miss"}), (_histogram(), {"operation": "get"})):
        samples = [sample for metric in family.collect() for sample in metric.samples]
        of_it = [sample for sample in samples if {"tier": "declared", **labels}.items() <= sample.labels.items()]
        assert of_it and all(sample.value == 0 for sample in of_it if "_created" not in sample.name)


def test_after_a_detach_no_tier_is_shown_as_up(sources, exporter):
    metrics = TierMetrics("detached")
    metrics.set_level("tier_up", "", 1)
    metrics.set_level("used_bytes", "", 100)
    sources.append(metrics)
    exporter.export()
    metrics.add("get", "hit", 3)
    exporter.close()
    assert math.isnan(exported_value(_gauge("tier_up"), tier="detached"))
    assert exported_value(_gauge("used_bytes"), tier="detached") == 0
    assert exported_value(_counter("get"), tier="detached", reason="hit") == 3


def test_latencies_go_out_as_they_are_measured_in_the_buckets_of_their_bounds(sources, exporter):
    metrics = TierMetrics("latencies")
    sources.append(metrics)
    exporter.export()
    for seconds in (0.0, LATENCY_BOUNDS[0], 0.002, 99.0):
        metrics.observe("get", seconds)
    histogram, labels = _histogram(), {"tier": "latencies", "operation": "get"}
    shown = [exported_value(histogram, le=bound, **labels) for bound in ("0.0001", "0.001", "0.003", "10.0", "+Inf")]
    assert shown == [2, 2, 3, 3, 4] and metrics.calls() == {"get": 4}


def test_an_exporter_that_fails_goes_on(sources, exporter, monkeypatch, caplog):
    monkeypatch.setattr("hicache_ext.storage.serving.metrics_export._INTERVAL", 0.01)
    trouble = threading.Event()

    def sources_in_trouble():
        if trouble.is_set():
            raise OSError("no room for metrics")
        return sources

    broken = export_if_possible(sources_in_trouble, {})
    trouble.set()
    wait_until(lambda: "exporting metrics" in caplog.text, "the failure")
    metrics = TierMetrics("afterwards")
    metrics.add("get", "hit")
    sources[:] = [metrics]
    trouble.clear()
    wait_until(lambda: exported_value(_counter("get"), tier="afterwards") == 1, "the export")
    broken.close()
    assert all(thread.name != "hicache-metrics" or thread is exporter._loop._thread for thread in threading.enumerate())


def test_metrics_that_cannot_be_exported_do_not_end_the_start(caplog):
    def no_sources():
        raise OSError("no room for metrics")

    assert export_if_possible(no_sources, {}) is None
    assert "no metrics at the Prometheus endpoint: no room for metrics" in caplog.text


def test_the_table_tells_of_what_counts_beside_the_tiers():
    text = """
hicache_ext_get_total{tier="pool",reason="miss"} 1
hicache_ext_breaker_state{tier="pool",reason="",tp_rank="0"} 0
hicache_ext_breaker_state{tier="pool",reason="",tp_rank="1"} 2
hicache_ext_pull_decision_total{tier="pull",reason="cheaper"} 12
hicache_ext_pd_write_page_total{tier="pd_write",reason="stored"} 30
hicache_ext_pd_write_waiting_pages{tier="pd_write",reason=""} 7
hicache_ext_copy_load_total{tier="kernels",reason="triton: calibrated"} 5
"""
    lines = table(None, read_samples(text))
    assert [line.split()[0] for line in lines[3:4]] == ["pool"]
    assert "pool: breaker is open, 1 miss" in lines
    assert lines[-3:] == [
        "pull: 12 pull_decision cheaper",
        "pd_write: 30 pd_write_page stored, 7 pd_write_waiting_pages now",
        "kernels: 5 copy_load triton: calibrated",
    ]
