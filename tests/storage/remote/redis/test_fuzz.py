"""The short form of tests/campaigns/fuzz_resp.py."""

from __future__ import annotations

import random

from hicache_ext.storage.tiers.redis.talk_code import part
from tests.campaigns.fuzz_resp import Findings, run_round


def test_damaged_replies_are_never_a_wrong_page_and_never_touch_other_memory():
    part.wait()
    findings, chance = Findings(), random.Random(7)
    for _ in range(1500):
        run_round(chance, findings)
    assert not findings.problems
    assert {"HIT", "CORRUPT", "ERROR", "MISS", "redirected", "unanswered"} <= set(findings.pages)
    assert {"all answered", "protocol error", "cut", "refused"} <= set(findings.endings)
