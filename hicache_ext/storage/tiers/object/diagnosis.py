"""What ``hicache-ext doctor`` says about an object tier."""

from __future__ import annotations

from hicache_ext.storage.contract.diagnosis import Finding, Level
from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.contract.trial import try_store
from hicache_ext.storage.tiers.object.client import Failure, Requests

_CLOCK_SKEW = 60.0
"""Seconds; S3 refuses signatures that are 15 minutes off."""


def diagnose(store: PageStore, url: str, requests: Requests) -> list[Finding]:
    """Reachability, versions, first writer, clock, eviction, round trip. Bounded by the store's timeout per step."""
    findings = [Finding("client", Level.OK, f"obstore {requests.obstore.__version__}")]
    done, failure = requests.within(requests.find_out)
    if not done or failure:
        seen = str(failure or Failure("timeout"))
        remedy = "check url, endpoint, region and credentials, and the network between"
        return [*findings, Finding("reachable", Level.ERROR, f"a small object cannot be written: {seen}", remedy)]
    findings.append(Finding("reachable", Level.OK, f"{url} takes and gives objects"))
    skew = abs(requests.clock_ahead)
    if skew > _CLOCK_SKEW:
        remedy = "set the clock (NTP): beyond 15 minutes S3 refuses every request"
        seen = f"the store's clock is {skew:.0f} s off this machine's"
        findings.append(Finding("clock", Level.WARNING, seen, remedy))
    else:
        findings.append(Finding("clock", Level.OK, "agrees with the store's"))
    if requests.creates:
        findings.append(Finding("first writer", Level.OK, "the store creates an object only if there is none"))
    else:
        findings.append(
            Finding(
                "first writer",
                Level.NOTE,
                "the store ignores If-None-Match: a page is looked for before it is written, one request more",
                "harmless; two writers of one page may both write it, with equal content",
            )
        )
    findings.append(
        Finding(
            "eviction",
            Level.NOTE,
            "this tier evicts nothing; the bucket's lifecycle rules are not visible from here",
            "set a lifecycle rule that expires objects under the prefix by age, and no versioning",
        )
    )
    return findings + try_store(store)
