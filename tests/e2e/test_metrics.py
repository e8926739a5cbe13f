"""What operators are shown of a real server is what its answers say."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import hicache_ext
from hicache_ext.cli.main import main
from hicache_ext.cli.server_commands import Samples, read_samples
from hicache_ext.page.recording import SUFFIX, Entry, read_file
from hicache_ext.storage.contract.registry import series_of_type
from hicache_ext.storage.contract.reports import OF_EVERY_TIER, UNKNOWN
from hicache_ext.testing.client import Generation
from hicache_ext.testing.server import SglangServer, free_port
from tests.e2e.conftest import LENGTH, file_tier_config, random_prompt
from tests.rigs.otlp_collector import OtlpCollector, Received
from tests.rigs.prometheus import Prometheus
from tests.waiting import wait_until
from tests.watching.queries import (
    NOT_IN_USE,
    of_the_dashboard,
    of_the_variables,
    selectors_of_alerts,
    without_limit,
)
from tests.watching.timeline import ALERTS, rules

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE_SIZE = 16
REUSABLE = LENGTH - PAGE_SIZE


def samples(server: SglangServer) -> Samples:
    return read_samples(server.get("/metrics"))


def chain_pages(server: SglangServer, tier: str) -> list[float]:
    found = samples(server).by("reason", "hicache_ext_chain_pages_total", tier=tier)
    return [found[stage] for stage in ("asked", "found", "used")]


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as collector:
        yield collector


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, collector: OtlpCollector, recordings: Path
) -> Iterator[SglangServer]:
    place = tmp_path_factory.mktemp("metrics")
    config = file_tier_config(place / "l3")
    tiers = config["hicache_ext"]["tiers"]
    tiers["disk"]["io"] = "buffered"
    # A pool that nobody has ever reached.
    tiers["pool"] = {"type": "redis", "url": f"redis://127.0.0.1:{free_port()}", "required": False, "timeout": "1s"}
    config["hicache_ext"]["tracing"] = {"endpoint": "sglang"}
    config["hicache_ext"]["record"] = {"path": str(recordings), "size": "1MiB"}
    file = place / "hicache.yaml"
    file.write_text(yaml.safe_dump(config))
    with SglangServer(
        tiny_model,
        log_file=place / "server.log",
        page_size=PAGE_SIZE,
        storage_backend="dynamic",
        extra_config=f"@{file}",
        extra_arguments=("--enable-metrics", "--enable-trace", "--otlp-traces-endpoint", collector.endpoint),
        environment={"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
    ) as server:
        yield server


def test_the_figures_of_a_server_are_those_of_its_answers(
    server: SglangServer, capsys: pytest.CaptureFixture[str]
) -> None:
    the_series_are_there_before_the_first_request(server)
    assert main(["stats", server.url, "--once"]) == 0
    assert capsys.readouterr().out.startswith("prompt tokens: no request has ended")

    answers: list[Generation] = []

    def ask(number: int) -> Generation:
        answers.append(server.generate(random_prompt(number)))
        return answers[-1]

    for number in (1, 2, 3):
        assert ask(number).cached_tokens == 0
    assert ask(3).cached.device == REUSABLE
    server.flush_cache()  # waits for the writes
    wait_until(lambda: samples(server).total("hicache_ext_pages", tier="disk") >= 3 * LENGTH / PAGE_SIZE, "pages")
    for number in (1, 2):
        assert ask(number).cached.storage == REUSABLE
    assert ask(4).cached_tokens == 0

    tokens = LENGTH * len(answers)
    assert tokens == sum(answer.prompt_tokens for answer in answers)
    from_storage = sum(answer.cached.storage for answer in answers)
    on_device = sum(answer.cached.device for answer in answers)
    in_host = sum(answer.cached.host for answer in answers)
    assert (from_storage, on_device, in_host) == (2 * REUSABLE, REUSABLE, 0)
    computed = tokens - from_storage - on_device
    wait_until(lambda: samples(server).total("sglang:prompt_tokens_total") == tokens, "all prompts")
    # Before the flush three prompts that nobody had, after it two that storage had and one that it lacked. What was
    # on the device was not asked for.
    asked, used = 6 * REUSABLE / PAGE_SIZE, 2 * REUSABLE / PAGE_SIZE
    wait_until(lambda: chain_pages(server, "all") == [asked, used, used], "the pages asked for")
    assert chain_pages(server, "disk") == [asked, used, used]
    assert chain_pages(server, "pool") == [asked - used, 0, 0]

    assert main(["stats", server.url, "--once"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == (
        f"prompt tokens: {100 * from_storage / tokens:.1f} % from storage, 0.0 % from host memory, "
        f"{100 * on_device / tokens:.1f} % on the device, {100 * computed / tokens:.1f} % computed (of {tokens})"
    )

    (row,) = re.findall(r"^ *disk .*$", shown, re.MULTILINE)
    assert row.split()[1] == "yes" and float(row.split()[5]) < 60
    assert "pool: cannot be reached" in shown


def test_every_query_of_dashboard_and_alerts_is_answered_by_a_prometheus_that_scrapes_a_server(
    server: SglangServer, tmp_path: Path
) -> None:
    target = urllib.parse.urlsplit(server.url).netloc
    with Prometheus(tmp_path / "prometheus", target, ALERTS) as prometheus:
        wait_until(lambda: bool(prometheus.query("hicache_ext_build_info")), "a scrape")
        for number in (10, 11):
            server.generate(random_prompt(number))
        server.flush_cache()
        server.generate(random_prompt(10))
        told = 'increase({__name__=~"sglang[:_]prompt_tokens_total"}[1m])'
        wait_until(
            lambda: any(float(row["value"][1]) > 0 for row in prometheus.query(told)),
            "prompt tokens of a request that has ended",
        )
        empty = []
        for title, query in of_the_dashboard():
            answer = prometheus.query(query)  # raises where it does not parse
            if not answer and not prometheus.query(without_limit(query)):
                empty.append((title, query))
        assert [found for found in empty if not any(name in found[1] for name in NOT_IN_USE)] == []
        first_row = [query for title, query in of_the_dashboard() if title == "Prompt tokens by where they came from"]
        shares = [float(row["value"][1]) for query in first_row for row in prometheus.query(query)]
        assert len(shares) >= 2 and sum(shares) == pytest.approx(1, abs=0.02)
        for name, series, label in of_the_variables():
            assert all(row["metric"][label] for row in prometheus.query(series)), name
            assert prometheus.query(series), name

        missing = [selector for selector in selectors_of_alerts() if not prometheus.query(selector)]
        assert [selector for selector in missing if not selector.startswith(NOT_IN_USE)] == []
        (group,) = prometheus.get("rules")["groups"]
        assert {rule["name"]: rule["health"] for rule in group["rules"]} == {rule["alert"]: "ok" for rule in rules()}
        # The pool that nobody has reached is about to be told; nothing else is wrong.
        (alert,) = prometheus.get("alerts")["alerts"]
        assert alert["labels"]["alertname"] == "HicacheTierNeverUp" and alert["labels"]["tier"] == "pool"
        assert alert["annotations"]["summary"].startswith(f"{target}: storage tier pool was never reached")


def test_what_storage_did_for_a_request_is_in_its_trace(server: SglangServer, collector: OtlpCollector) -> None:
    rid = "restored-from-storage"
    server.generate(random_prompt(20))
    server.flush_cache()
    assert server.generate(random_prompt(20), rid=rid).cached.storage == REUSABLE

    def spans_of_storage() -> list[Received]:
        """Those right below the span that SGLang made of the request."""
        spans = list(collector.spans)
        requests = {(span.trace, span.span) for span in spans if span.attributes.get("rid") == rid and not span.parent}
        return [s for s in spans if "hicache.tier" in s.attributes and (s.trace, s.parent) in requests]

    def pages_read() -> int:
        return sum(span.attributes["hicache.pages_moved"] for span in spans_of_storage() if span.name == "get disk")

    wait_until(lambda: pages_read() == REUSABLE / PAGE_SIZE, "the spans of a request")
    assert {"exists disk", "get disk"} <= {span.name for span in spans_of_storage()}
    assert {span.attributes["hicache.rid"] for span in spans_of_storage()} == {rid}
    read = [span.attributes for span in spans_of_storage() if span.name == "get disk"]
    assert {facts["hicache.outcome"] for facts in read} == {"hit"} and all(facts["hicache.bytes"] for facts in read)


def test_what_a_request_asked_for_and_where_it_was_is_in_the_recording(server: SglangServer, recordings: Path) -> None:
    # Of a length of its own: what was asked before may be written as late as this.
    prompt = random_prompt(30)[:-PAGE_SIZE]
    reusable = len(prompt) - PAGE_SIZE
    server.generate(prompt)
    server.flush_cache()
    assert server.generate(prompt).cached.storage == reusable
    pages = reusable // PAGE_SIZE

    def entries() -> list[Entry]:
        return [entry for path in sorted(recordings.glob(f"*{SUFFIX}")) for entry in read_file(path)[1]]

    def of_this_prompt() -> list[Entry]:
        return [entry for entry in entries() if entry.prompt == len(prompt)]

    wait_until(lambda: len(of_this_prompt()) == 2, "the recording of two requests")
    first, second = of_this_prompt()
    assert (first.asked, first.answered, second.asked, second.answered) == (pages, 0, pages, pages)
    assert second.found[0] == pages
    assert first.chain.tolist() == second.chain.tolist()
    assert second.matched == 0
    counted = "hicache_ext_record_request_total"
    wait_until(lambda: samples(server).total(counted, reason="written") == len(entries()), "the count of requests")
    assert samples(server).total(counted, reason="dropped_disk") == 0
    headers = [read_file(path)[0] for path in recordings.glob(f"*{SUFFIX}")]
    assert {(header["page_size"], header["tp_size"]) for header in headers} == {(PAGE_SIZE, 1)}


def the_series_are_there_before_the_first_request(server: SglangServer) -> None:
    wait_until(lambda: samples(server).total("hicache_ext_capacity_bytes", tier="disk") == 256 << 20, "the capacity")
    # Not before every byte of the weights was read.
    wait_until(lambda: samples(server).total("hicache_ext_serving") == 1, "the identity of the weights")
    text = server.get("/metrics")
    now = read_samples(text)
    assert now.by("version", "hicache_ext_build_info") == {hicache_ext.__version__: 1}
    for tier, kind in (("disk", "file"), ("pool", "redis")):
        for event, reasons in [*OF_EVERY_TIER.items(), *series_of_type(kind).items()]:
            told = now.by("reason", f"hicache_ext_{event}_total", tier=tier)
            assert set(reasons) <= set(told), (tier, event)
            # The pool has already been told of the pages to come, in vain.
            assert not any(told.values()) or (tier, event) == ("pool", "error"), (tier, event)
        for gauge in UNKNOWN:
            # Those that nobody knows are NaN, which is no sample.
            assert len(re.findall(rf'^hicache_ext_{gauge}{{.*tier="{tier}"', text, re.MULTILINE)) == 1, (tier, gauge)
        assert now.each("hicache_ext_call_seconds_count", tier=tier, operation="get") == [0]
    assert now.total("hicache_ext_tier_up", tier="disk") == 1
    assert now.total("hicache_ext_tier_up", tier="pool") == 0
    models = {dict(labels)["model_name"] for name, labels in now.values if name.startswith("hicache_ext_")}
    assert len(models) == 1 and models != {""}
