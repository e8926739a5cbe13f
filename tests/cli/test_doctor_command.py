"""hicache-ext doctor: findings, remedies, exit codes, and never a secret."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache_ext import native
from hicache_ext.cli import doctor_command
from hicache_ext.cli.main import main
from hicache_ext.config.model import ExtraConfig
from hicache_ext.sglang import used_names
from hicache_ext.storage.contract.store import GetResult, PageBatch
from hicache_ext.storage.contract.trial import try_store
from hicache_ext.storage.tiers.file import examination as users
from hicache_ext.storage.tiers.memory import MemoryPageStore
from hicache_ext.testing.server import free_port
from tests.rigs.container import Program
from tests.rigs.faults import DroppingStore, FailingStore, PageStoreWrapper
from tests.rigs.otlp_collector import OtlpCollector

SECRET = "hunter2-is-the-secret"


def write(directory: Path, tiers: dict[str, Any], **more: Any) -> str:
    file = directory / "hicache.yaml"
    file.write_text(yaml.safe_dump({**ExtraConfig.around({"tiers": tiers}), **more}))
    return str(file)


def findings(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and by section title and subject what was found."""
    code = main(["doctor", "--json", *arguments])
    sections = json.loads(capsys.readouterr().out)["sections"]
    found = {s["title"].partition(":")[0]: {f["subject"]: f for f in s["findings"]} for s in sections}
    return code, found


@pytest.mark.parametrize("layout", ["pages", "slab"])
def test_a_sound_file_tier_has_a_round_trip_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    tier = {"type": "file", "path": str(tmp_path / "l3"), "capacity": "64MiB", "layout": layout}
    code, found = findings(capsys, [write(tmp_path, {"disk": tier})])
    assert code == 0
    assert {s: f["level"] for s, f in found["tier disk"].items() if s != "file system"} == {
        "open": "ok",
        "layout": "ok",
        "capacity": "ok",
        "round trip": "ok",
        "latency": "ok",
        "bandwidth": "ok",
        **({"pages": "ok"} if layout == "slab" else {}),
    }
    assert layout in found["tier disk"]["layout"]["seen"]
    assert not list(tmp_path.rglob("*.page"))
    assert found["installation"]["sglang"]["level"] == "ok"
    assert found["configuration"]["prefetch_threshold"]["level"] == "note"
    assert found["configuration"]["host memory"]["level"] == "note"
    assert "--hicache-ratio" in found["configuration"]["host memory"]["remedy"]
    assert found["page hashes"]["extension"]["level"] == "ok"


def test_slabs_without_the_native_core_are_an_error_that_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = {"type": "file", "path": str(tmp_path / "l3"), "capacity": "64MiB", "layout": "slab"}
    _, found = findings(capsys, [write(tmp_path, {"disk": tier})])
    assert found["tier disk"]["pages"]["seen"] == "move in native code"
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "core.so")
    code, found = findings(capsys, [write(tmp_path, {"disk": tier})])
    (refused,) = found["tier disk"].values()
    assert (code, refused["level"]) == (1, "error")
    why = "is slab, which needs the native core, and that is not there: core.so was not built with this package"
    assert f"layout of {str(tmp_path / 'l3')!r} {why}; {native.REMEDY}" in f"{refused['seen']}; {refused['remedy']}"


def test_page_files_for_want_of_the_native_core_are_a_warning_that_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "core.so")
    tier = {"type": "file", "path": str(tmp_path / "l3"), "capacity": "64MiB"}
    code, found = findings(capsys, [write(tmp_path, {"disk": tier})])
    assert code == 0 and not (tmp_path / "l3").exists()
    assert (
        "slabs need the native core, which is not there: core.so was not built" in found["tier disk"]["layout"]["seen"]
    )
    assert found["tier disk"]["pages"]["level"] == "warning"
    assert native.REMEDY in found["tier disk"]["pages"]["remedy"]


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["pages", "slab"])
def test_a_process_that_is_stopped_is_named_and_what_that_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    tier = {"type": "file", "path": str(tmp_path / "l3"), "capacity": "64MiB", "layout": layout}
    file = write(tmp_path, {"disk": tier})
    with Program(_HOLDER, file) as holder:
        assert holder.line() == "open"
        assert "processes" not in findings(capsys, [file])[1]["tier disk"]
        with holder.stopped():
            code, found = findings(capsys, [file])
        told = found["tier disk"]["processes"]
        assert (code, told["level"]) == (0, "warning")
        assert f"stopped processes have it open ({holder.pid})" in told["seen"]
        assert f"kill -CONT {holder.pid}" in told["remedy"]


_HOLDER = """
import sys
from hicache_ext.config import load_document
from hicache_ext.storage.opening import open_tiers

store = open_tiers(load_document(sys.argv[1]).hicache_ext)
print("open", flush=True)
sys.stdin.readline()
"""


@pytest.mark.thorough
def test_processes_that_cannot_be_seen_and_give_no_index_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = {"type": "file", "path": str(tmp_path / "l3"), "capacity": "64MiB", "layout": "slab"}
    file = write(tmp_path, {"disk": tier})
    with Program(_HOLDER, file) as holder:
        assert holder.line() == "open"
        with holder.stopped():
            # As for a process of another container.
            monkeypatch.setattr(users, "stopped_processes", lambda path: iter(()))
            _, found = findings(capsys, [file])
    assert "none of them gives its index: stopped, perhaps" in found["tier disk"]["processes"]["seen"]
    assert found["tier disk"]["processes"]["remedy"].startswith(f"fuser {tmp_path}/l3/v3/lock")


def test_the_doctor_says_why_a_directory_has_its_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tier = {"type": "file", "path": str(tmp_path / "l3"), "capacity": "unlimited"}
    _, found = findings(capsys, [write(tmp_path, {"disk": tier})])
    assert found["tier disk"]["layout"]["seen"].endswith("; capacity is unlimited, and slabs are preallocated")


def test_a_capacity_that_the_disk_has_not_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tier = {"type": "file", "path": str(tmp_path / "l3"), "capacity": "900TiB"}
    code, found = findings(capsys, [write(tmp_path, {"disk": tier})])
    assert (code, found["tier disk"]["capacity"]["level"]) == (0, "warning")
    assert "lower capacity" in found["tier disk"]["capacity"]["remedy"]


def test_a_tier_that_cannot_open_is_a_finding_and_the_others_are_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POOL_KEY", SECRET)
    reference = {"env": "POOL_KEY"}
    dead = {
        "type": "object",
        "url": "s3://bucket/prefix",
        "endpoint": f"http://127.0.0.1:{free_port()}",
        "allow_http": True,
        "access_key": reference,
        "secret_key": reference,
        "timeout": "2s",
    }
    tiers = {
        "nowhere": {"type": "file", "path": "/proc/nowhere", "capacity": "1GiB"},
        "dead": dead,
        "optional": {**dead, "required": False},
        "disk": {"type": "file", "path": str(tmp_path / "l3"), "capacity": "64MiB"},
    }
    file = write(tmp_path, tiers)
    code, found = findings(capsys, [file])
    assert code == 1
    assert "tier 'nowhere' cannot start" in found["tier nowhere"]["open"]["seen"]
    assert "the server cannot be reached" in found["tier dead"]["open"]["seen"]
    assert found["tier optional"]["open"]["level"] == "error"
    assert found["tier disk"]["round trip"]["level"] == "ok"
    assert main(["doctor", file]) == 1
    out, err = capsys.readouterr()
    assert "ERROR   open: tier 'dead' cannot start" in out and "Something is wrong" in out
    assert SECRET not in out + err


def test_a_missing_secret_names_its_variable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POOL_KEY", raising=False)
    reference = {"env": "POOL_KEY"}
    tier = {"type": "object", "url": "s3://bucket/x", "access_key": reference, "secret_key": reference}
    code, found = findings(capsys, [write(tmp_path, {"cold": tier})])
    assert code == 1
    assert "POOL_KEY is not set" in found["tier cold"]["open"]["seen"]


def test_one_tier_alone_can_be_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiers = {
        "nowhere": {"type": "file", "path": "/proc/nowhere", "capacity": "1GiB"},
        "cold": {"type": "object", "url": f"file://{tmp_path}/objects"},
    }
    file = write(tmp_path, tiers)
    code, found = findings(capsys, [file, "--tier", "cold"])
    assert code == 0
    assert "tier nowhere" not in found
    assert found["tier cold"]["reachable"]["level"] == "ok"
    assert not list(tmp_path.rglob("*.pack"))
    assert main(["doctor", file, "--tier", "warm"]) == 2
    assert "no tier is named 'warm'" in capsys.readouterr().err


def test_a_wrong_configuration_is_two_and_its_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, {"disk": {"type": "file", "path": "/x", "capcity": "1GiB"}})
    assert main(["doctor", file]) == 2
    assert "did you mean 'capacity'" in capsys.readouterr().err
    assert main(["doctor", file, "--json"]) == 2
    assert any("did you mean" in sentence for sentence in json.loads(capsys.readouterr().out)["configuration"])


def test_what_sglang_ignores_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiers = {"disk": {"type": "file", "path": str(tmp_path / "l3"), "capacity": "64MiB"}}
    _, found = findings(capsys, [write(tmp_path, tiers, allocator="shm", prefetch_threshold=64)])
    assert found["configuration"]["allocator"]["level"] == "warning"
    assert found["configuration"]["prefetch_threshold"]["seen"].startswith("64 tokens")
    inline = json.dumps({**ExtraConfig.around({"tiers": tiers}), "allocator": "shm"})
    _, found = findings(capsys, [inline])
    assert found["configuration"]["allocator"]["level"] == "ok"


@pytest.mark.parametrize(
    ("version", "level"),
    [("0.5.23", "ok"), ("0.5.21", "ok"), ("0.5.20", "error"), ("0.5.24", "warning"), (None, "error")],
)
def test_sglang_must_not_be_too_old(monkeypatch: pytest.MonkeyPatch, version: str | None, level: str) -> None:
    monkeypatch.setattr(doctor_command, "installed_version", lambda package: version)
    assert doctor_command.release_finding().level.value == level


def test_what_sglang_lacks_is_an_error_or_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = [
        used_names.Use("sglang.srt.managers.scheduler.Scheduler", ("no_such",), (used_names.PREFILL_COST,)),
        used_names.Use("sglang.srt.mem_cache.hicache_storage.PoolTransfer", ("keys", "gone"), (used_names.STORAGE,)),
    ]
    checked = tuple(used_names.check(used_names.Sources.installed(), "0.5.99", gone))
    monkeypatch.setattr(doctor_command, "check_installed", lambda: checked)
    found = {one.subject: one for one in doctor_command.feature_findings()}
    assert found["storage"].level.value == "error" and "PoolTransfer.gone" in found["storage"].seen
    assert (
        found["cost of prefill"].level.value == "warning" and "off, since SGLang lacks" in found["cost of prefill"].seen
    )
    assert "PoolTransfer.keys" not in found["storage"].seen


def test_a_plugin_that_sglang_is_told_not_to_run_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    found = {finding.subject: finding for finding in doctor_command.installation_findings()}
    assert found["plugin"].level.value == "warning"


# -- SGLang's page hashes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lacking", "built", "level"),
    [
        ((), "", "ok"),
        (("c++",), "", "error"),
        (("c++",), "py311_cpu", "warning"),
        (("ninja", "c++"), "py311_cpu", "error"),
    ],
)
def test_what_sglang_lacks_to_build_its_page_hashes_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: Sequence[str], built: str, level: str
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    if built:
        (tmp_path / "extensions" / built / "hicache_hash_cpp").mkdir(parents=True)
        (tmp_path / "extensions" / built / "hicache_hash_cpp" / "hicache_hash_cpp.so").touch()
    for tool in {"ninja", "c++"} - {*lacking}:
        (tmp_path / tool).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    # As torch takes it: a command with its options.
    monkeypatch.setenv("CXX", "c++ -pipe")
    finding = doctor_command.page_hash_finding()
    assert finding.level.value == level
    if lacking:
        assert f"without {' and '.join(lacking)}, and HiCache ends the server at the first prompt" in finding.seen
        assert "apt-get install ninja-build g++ libssl-dev python3-dev" in finding.remedy


class _Forging(PageStoreWrapper):
    """Says HIT over other bytes."""

    def get(self, batch: PageBatch) -> list[GetResult]:
        results = super().get(batch)
        batch.buffers[3][0][:1] = bytes([batch.buffers[3][0][0] ^ 1])
        return results


@pytest.mark.parametrize(
    ("store", "words"),
    [
        (DroppingStore(MemoryPageStore()), "0 read back"),
        (FailingStore(MemoryPageStore()), "0 were written"),
        (_Forging(MemoryPageStore()), "other bytes"),
    ],
    ids=["dropping", "failing", "forging"],
)
def test_a_round_trip_that_fails_is_an_error(store: PageStoreWrapper, words: str) -> None:
    (found,) = try_store(store)
    assert found.level.value == "error"
    assert words in found.seen


def test_a_trial_removes_what_it_wrote() -> None:
    store = MemoryPageStore()
    assert [finding.level.value for finding in try_store(store)] == ["ok", "ok", "ok"]
    assert store.objects == {}


def test_the_doctor_says_what_routers_learn_of_the_tiers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = {"type": "file", "path": str(tmp_path / "l3"), "capacity": "64MiB"}
    _, found = findings(capsys, [write(tmp_path, {"disk": disk}), "--tier", "disk"])
    assert found["configuration"]["events"]["level"] == "ok"
    assert "/get_hicache_l3_cache_layout answers disabled" in found["configuration"]["events"]["seen"]
    events = {"endpoint": "tcp://*:5657", "replay_endpoint": "tcp://*:5757"}
    file = tmp_path / "hicache.yaml"
    tiers = {"disk": disk, "pool": {"type": "memory"}}
    file.write_text(yaml.safe_dump(ExtraConfig.around({"tiers": tiers, "events": events})))
    _, found = findings(capsys, [str(file), "--tier", "disk"])
    assert found["configuration"]["events"]["level"] == "note"
    assert "nothing is told of pool:" in found["configuration"]["events"]["seen"]


def test_the_doctor_says_whether_spans_go_anywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="missing: opentelemetry-sdk")
    file = tmp_path / "hicache.yaml"

    def tracing(endpoint: str | None) -> tuple[str, str]:
        section = {} if endpoint is None else {"tracing": {"endpoint": endpoint}}
        file.write_text(yaml.safe_dump(ExtraConfig.around({"tiers": {"pool": {"type": "memory"}}, **section})))
        _, found = findings(capsys, [str(file), "--tier", "pool"])
        told = found["configuration"]["tracing"]
        return told["level"], told["seen"]

    assert tracing(None) == ("ok", "off (docs/plan.md)")
    assert tracing("sglang")[0] == "note"
    level, seen = tracing(f"http://127.0.0.1:{free_port()}/v1/traces")
    assert level == "warning" and "refused" in seen
    with OtlpCollector() as collector:
        assert tracing(collector.endpoint) == ("ok", f"to {collector.endpoint}, where somebody listens")
        monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
        level, seen = tracing(collector.endpoint)
    assert level == "error" and "pip install opentelemetry-sdk" in seen


def test_what_recordings_need_is_looked_at_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = {"disk": {"type": "file", "path": str(tmp_path / "l3"), "capacity": "64MiB"}}
    file, place = tmp_path / "hicache.yaml", tmp_path / "rec"

    def found(path: Path, size: str = "1MiB") -> dict[str, Any]:
        record = {"path": str(path), "size": size}
        file.write_text(yaml.safe_dump(ExtraConfig.around({"tiers": tiers, "record": record})))
        seen: dict[str, Any] = findings(capsys, [str(file)])[1]["configuration"]["record"]
        return seen

    assert found(place)["level"] == "ok" and not place.exists()
    assert "may grow by" in found(place, "100PB")["seen"]
    assert found(file)["level"] == "error" and "may not write" in found(file)["seen"]
    place.mkdir()
    (place / "salt").write_text("0" * 32)
    (place / "salt").chmod(0o644)
    assert found(place)["remedy"] == f"chmod 600 {place / 'salt'}"
    file.write_text(yaml.safe_dump(ExtraConfig.around({"tiers": tiers})))
    assert "off" in findings(capsys, [str(file)])[1]["configuration"]["record"]["seen"]
