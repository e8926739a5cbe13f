"""Which guards a tier gets, and in what order they stand around it.

From SGLang inwards: exists budget, negative cache, time limit, circuit breaker, concurrency limit, deadline, retry,
store. So: answers that need no store come before the breaker; a call that the breaker refuses takes no place of the
concurrency limit; waiting for that place and retries share the time of their call; the breaker's probes begin behind
the time limit and have the whole timeout, not the learnt one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hicache_ext.config.tier import READ_TIMEOUT, WRITE_TIMEOUT, TierConfig
from hicache_ext.runtime.mounts import is_on_network
from hicache_ext.storage.contract.abilities import ability
from hicache_ext.storage.contract.store import PageStore
from hicache_ext.storage.guards.breaker_store import BreakerStore
from hicache_ext.storage.guards.concurrency import ConcurrencyLimitStore
from hicache_ext.storage.guards.deadline import DeadlineStore
from hicache_ext.storage.guards.exists_budget import ExistsBudgetStore
from hicache_ext.storage.guards.negative_cache import NegativeCacheStore
from hicache_ext.storage.guards.retry import RetryStore
from hicache_ext.storage.guards.tier_breaker import BreakerSettings
from hicache_ext.storage.guards.time_limit import TimeLimitStore

REMOTE_RETRIES = 1
NEGATIVE_LIFE = 1.0
CONCURRENCY = 16
EXISTS_BUDGET = 0.005


@dataclass(frozen=True, slots=True)
class GuardPlan:
    """The guards of one tier, every "auto" resolved. None, 0 and 0.0 leave a guard out. Seconds and bytes."""

    timeout: float | None = None
    """Of a read or a look-up."""
    write_timeout: float | None = None
    """None: as ``timeout``."""
    store_keeps_timeout: bool = False
    bounce_memory: int = 0
    retries: int = 0
    breaker: BreakerSettings | None = None
    negative_cache: float = 0.0
    concurrency: int | None = None
    exists_budget: float | None = None


def plan_guards(tier: TierConfig) -> GuardPlan:
    """The guards for a tier as configured, on this node.

    A tier on local disks has none unless they are asked for: its reads go straight into host pages, and a copy through
    bounce memory would cost more than it protects from (docs/guards.md).
    """
    guards = tier.guards
    remote = tier.remote or any(is_on_network(path) for path in tier.directories())
    timeout = tier.timeout if tier.timeout is not None else READ_TIMEOUT if remote else math.inf
    limited = timeout != math.inf
    guarded = remote or limited
    breaker = guards.breaker if guards.breaker is not None else guarded
    budget = guards.exists_budget if guards.exists_budget is not None else EXISTS_BUDGET if guarded else math.inf
    return GuardPlan(
        timeout=timeout if limited else None,
        write_timeout=WRITE_TIMEOUT if remote and tier.timeout is None else None,
        store_keeps_timeout=tier.keeps_timeout,
        bounce_memory=guards.bounce_memory,
        retries=guards.retries if guards.retries is not None else REMOTE_RETRIES if remote else 0,
        breaker=BreakerSettings(guards.slow_call, guards.probe_interval, guards.slow_start) if breaker else None,
        negative_cache=guards.negative_cache if guards.negative_cache is not None else NEGATIVE_LIFE if remote else 0.0,
        concurrency=guards.concurrency if guards.concurrency is not None else CONCURRENCY if guarded else None,
        exists_budget=budget if budget != math.inf else None,
    )


def guarded(store: PageStore, plan: GuardPlan, before: PageStore | None = None) -> PageStore:
    """``store`` with its guards around it; closing that closes ``store``.

    ``before``: what it was with other guards. A tier that is down is not up because its limits have changed.
    """
    timeout = plan.timeout
    write_timeout = plan.write_timeout if plan.write_timeout is not None else timeout
    if plan.retries:
        store = RetryStore(store, plan.retries, write_timeout if write_timeout is not None else math.inf)
    if write_timeout is not None and not plan.store_keeps_timeout:
        store = DeadlineStore(store, write_timeout, plan.bounce_memory)
    if plan.concurrency is not None:
        store = ConcurrencyLimitStore(store, plan.concurrency, timeout / 2 if timeout is not None else None)
    if plan.breaker is not None:
        store = BreakerStore(store, plan.breaker, timeout)
        if before is not None and (breaker := ability(before, BreakerStore)) is not None:
            store.take_over(breaker)
    if timeout is not None and write_timeout is not None:
        store = TimeLimitStore(store, timeout, write_timeout, plan.breaker.slow_call if plan.breaker else None)
    if plan.negative_cache:
        store = NegativeCacheStore(store, plan.negative_cache)
    if plan.exists_budget is not None:
        store = ExistsBudgetStore(store, plan.exists_budget)
    return store
