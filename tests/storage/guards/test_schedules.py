"""A short form of the campaign (``make guards-campaign``): any order of calls and faults over guarded tiers."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.storage.guards.schedules import TiersMachine

TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
