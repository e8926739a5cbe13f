"""What ``hicache-ext doctor`` says about an object tier."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Callable
from typing import Any, Protocol

from hicache_ext.storage.contract.diagnosis import Finding, Level
from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.contract.trial import try_store
from hicache_ext.storage.tiers.object.client import Failure

_CLOCK_SKEW = 60.0
"""Seconds; S3 refuses signatures that are 15 minutes off."""


class Examined(PageStore, Protocol):
    """The store of an object tier, as far as it is looked at."""

    @property
    def client(self) -> Any: ...

    def delete(self, name: str) -> None: ...

    def within(self, request: Callable[[], Any]) -> tuple[bool, Failure | None]:
        """Whether ``request`` ended in time, and what went wrong if it did."""


def diagnose(store: Examined, obstore: Any) -> list[Finding]:
    """Reachability, versions, first writer, clock, eviction, round trip. Bounded by the store's timeout per step."""
    findings = [Finding("client", Level.OK, f"obstore {obstore.__version__}")]
    clock: list[Finding] = []
    done, failure = store.within(lambda: clock.append(_clock(store, obstore)))
    if not done or failure:
        seen = str(failure or Failure("timeout"))
        remedy = "check url, endpoint, region and credentials, and the network between"
        return [*findings, Finding("reachable", Level.ERROR, f"a small object cannot be written: {seen}", remedy)]
    details = store.describe().details
    findings.append(Finding("reachable", Level.OK, f"{details['url']} takes and gives objects"))
    findings += clock
    if details["conditional_create"]:
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


def _clock(store: Examined, obstore: Any) -> Finding:
    """How far this machine's clock is from the store's. Raises what obstore raises."""
    name = f"probe/{secrets.token_hex(16)}"
    before = datetime.datetime.now(datetime.UTC)
    obstore.put(store.client, name, b"hicache_ext", use_multipart=False)
    after = datetime.datetime.now(datetime.UTC)
    try:
        stamped = obstore.head(store.client, name)["last_modified"]
    finally:
        store.delete(name)
    # The store's stamp has whole seconds.
    early, late = (before - stamped).total_seconds() - 1, (stamped - after).total_seconds()
    skew = max(early, late, 0.0)
    if skew > _CLOCK_SKEW:
        remedy = "set the clock (NTP): beyond 15 minutes S3 refuses every request"
        return Finding("clock", Level.WARNING, f"the store's clock is {skew:.0f} s off this machine's", remedy)
    return Finding("clock", Level.OK, "agrees with the store's")
