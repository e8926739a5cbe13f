"""What each release of SGLang was seen to do: results of the tests, and the table of README.md made of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.releases.wheels import ROOT

RESULTS = ROOT / "docs" / "reports" / "sglang-releases.json"
README = ROOT / "README.md"
_BEGIN = "<!-- made by python -m tests.releases.run; do not edit -->"
_END = "<!-- end of what was made -->"
_OFF = "off in SGLang"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: what a user wants to know, and the tests (``file::test``, as regular expressions) that show
    it. ``tests_of``: the part of run.py's TESTS in which they are."""

    title: str
    tests: tuple[str, ...]
    tests_of: str = "storage"


ROWS = (
    Row("loads as `dynamic` backend; never raises, answers in the right shape", (r"backend/test_contracts.py::.*",)),
    Row(
        "storage: round trips, identity, damage, threads (conformance suite)",
        (r"backend/test_conformance.py::TestHiCacheExtBackend.*", r"storage/test_host_pool.py::.*"),
    ),
    Row(
        "MHA: layouts layer_first, page_first, page_first_direct, page_head",
        (r"backend/test_pools.py::.*\[mha .*", r"backend/test_releases.py::.*\[mha_pools .*"),
    ),
    Row(
        "MLA: layouts layer_first, page_first, page_first_direct",
        (r"backend/test_pools.py::.*\[mla .*", r"backend/test_releases.py::.*\[mla_pools .*", r".*::test_mla_ranks.*"),
    ),
    Row(
        "sidecar pools with page buffers; a logical anchor",
        (r"backend/test_pools.py::test_a_logical_anchor.*", r".*::TestHiCacheExtBackend::test_a_(prefix|trailing).*"),
    ),
    Row("tp_lcm_size with page_head", (r"backend/test_pools.py::test_split_heads.*",)),
    Row("fp8 and other dtypes never meet", (r"backend/test_pools.py::test_(fp8|no_combination).*",)),
    Row("identity by every byte of the weights; LoRA", (r"backend/test_identity_of_weights.py::.*",)),
    Row("online weight updates begin a new epoch", (r"backend/test_weights_epoch.py::.*",)),
    Row("all hooks take, or their feature is off", (r"backend/test_hook_table.py::.*",)),
    Row("decode writer", (r"pd/test_sglang_hooks.py::.*", r"pd/test_decode_writer.py::.*")),
    Row("copy engines", (r"backend/test_copies.py::.*",)),
    Row(
        "real server: file tier, restored after flush, restart and damage",
        (r"e2e/test_file_tier.py::test_a_prompt_is_restored_after_a_flush.*",),
        tests_of="servers",
    ),
    Row(
        "real prefill and decode node: the second turn restores what the decode writer wrote",
        (r"e2e/test_pd_pair.py::.*",),
        tests_of="pairs",
    ),
    Row(
        "real server without SGLang's plug-ins",
        (r"e2e/test_releases.py::test_storage_works_without.*",),
        tests_of="servers",
    ),
)


def outcomes(report: Path) -> dict[str, str]:
    """Of a JUnit file: test -> "passed", "failed", or the reason of a skip."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        module, _, suite = str(case.get("classname")).removeprefix("tests.").partition(".Test")
        name = f"{module.replace('.', '/')}.py::" + (f"Test{suite}::" if suite else "") + str(case.get("name"))
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            found[name] = "failed"
        elif skipped is not None and skipped.get("type") != "pytest.xfail":
            found[name] = str(skipped.get("message"))
        else:
            found[name] = "passed"
    return found


def summarize(found: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Row -> its outcome and the number of tests behind it."""
    summary = {}
    for row in ROWS:
        of_row = {n: o for n, o in found.items() if any(re.fullmatch(pattern, n) for pattern in row.tests)}
        failed = sorted(name for name, outcome in of_row.items() if outcome == "failed")
        off = [outcome for outcome in of_row.values() if outcome.startswith(_OFF)]
        passed = sum(outcome == "passed" for outcome in of_row.values())
        outcome = "fails" if failed else "off" if off else "yes" if passed else "not run"
        summary[row.title] = {"outcome": outcome, "passed": passed, "failed": failed, "reason": off[0] if off else ""}
    return summary


def table(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The Markdown table over all releases, the newest first."""
    releases = sorted(results, key=lambda text: [int(part) for part in text.split(".")], reverse=True)
    lines = ["| SGLang | " + " | ".join(releases) + " |", "|---" * (len(releases) + 1) + "|"]
    for row in ROWS:
        cells = [_cell(results[release].get(row.title)) for release in releases]
        lines.append(f"| {row.title} | " + " | ".join(cells) + " |")
    reasons = dict.fromkeys(one["reason"] for release in releases for one in results[release].values() if one["reason"])
    return "\n".join([*lines, *(["", *(f"{reason[0].upper()}{reason[1:]}." for reason in reasons)] if reasons else [])])


def _cell(one: Mapping[str, Any] | None) -> str:
    if one is None or one["outcome"] == "not run":
        return "not run"
    return f"{one['outcome']} ({one['passed']})" if one["outcome"] == "yes" else str(one["outcome"])


def read_results() -> dict[str, dict[str, dict[str, Any]]]:
    results: dict[str, dict[str, dict[str, Any]]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return results


def write_results(release: str, summary: Mapping[str, Mapping[str, Any]], rows: Iterable[str]) -> None:
    """Put the outcomes of ``rows`` on record; those of the others stay."""
    results = read_results()
    of_release = results.setdefault(release, {})
    of_release.update({title: dict(summary[title]) for title in rows})
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def made_part(readme: str) -> str:
    """What stands between the marks in README.md."""
    return readme.split(_BEGIN)[1].split(_END)[0].strip()


def write_readme() -> None:
    before, _, rest = README.read_text().partition(_BEGIN)
    after = rest.partition(_END)[2]
    README.write_text(f"{before}{_BEGIN}\n{table(read_results())}\n{_END}{after}")
