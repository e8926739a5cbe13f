"""The short form of tests/campaigns/fuzz_resp.py."""

from __future__ import annotations

import pytest

from hicache_ext import native
from tests.campaigns.fuzz_resp import run_campaign


def test_damaged_replies_are_never_a_wrong_page_and_never_touch_other_memory() -> None:
    if native.why_not() is not None:
        pytest.skip("missing: the native core")
    findings = run_campaign(1500, 7)
    assert not findings.problems
    assert {"all answered", "protocol error", "cut"} <= {one.partition(", ")[2] for one in findings.endings}
    assert {f"native get, {result}" for result in ("hit", "miss", "unanswered")} <= set(findings.pages)
    assert {f"native set, {result}" for result in ("stored", "exists", "unanswered")} <= set(findings.pages)
    assert {f"plain get, {result}" for result in ("hit", "corrupt", "error")} <= set(findings.pages)
