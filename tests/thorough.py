"""What ``make test`` leaves to ``make test-all``: the tests that are marked ``thorough``.

A test of which another one in ``make test`` says as much is marked where it stands. Here are the kinds of which
there are many: of servers and of conformance suites what stays is listed, and of products of parameters it is worked
out. docs/decisions/tests-and-tools.md says why. What ``make test-fast`` leaves out is marked ``patient``: all of a
file that starts other processes, and files whose cases are many.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import pytest

REAL_SERVERS = {
    "a prompt comes back after a flush, a kill and a restart, and damage costs a computation": (
        "tests/e2e/test_file_tier.py::test_a_prompt_is_restored_after_a_flush_a_restart_and_damage[slab]"
    ),
    "the linker and HiCache serve each other's pages, those of sliding windows too": (
        "tests/e2e/test_linker.py::test_all_pools_of_a_hybrid_model_pass_through_either_door[gemma4]"
    ),
    "a tier that hangs costs its deadline once, and comes back; a configuration is exchanged under load": (
        "tests/e2e/test_guards.py::test_requests_go_on_while_a_tier_hangs_and_it_comes_back_without_a_restart"
    ),
    "a decode node stores to Redis what the next turn's prefill node restores": (
        "tests/e2e/test_pd_pair.py::test_the_second_turn_restores_what_the_decode_node_wrote"
    ),
    "pages of other weights are never served": (
        "tests/e2e/test_weights_identity.py::"
        "test_pages_of_different_adapter_weights_never_meet_and_those_of_equal_ones_do"
    ),
    "encoded and sealed pages are restored through a rotation of keys, and no key is shown": (
        "tests/e2e/test_sealed_tier.py::test_a_prompt_is_restored_from_an_encrypted_tier_through_a_rotation_of_its_keys"
    ),
    "metrics say what the answers say": (
        "tests/e2e/test_metrics.py::test_the_figures_of_a_server_are_those_of_its_answers"
    ),
}
"""Promise -> the test of it that starts real SGLang servers in ``make test``."""

CONFORMANCE = (
    "tests/storage/test_conformance.py::TestMemoryPageStore",
    "tests/storage/test_conformance.py::TestPageFileStore",
    "tests/storage/test_conformance.py::TestTieredStoreThatWritesTheFarTierInTheBackground",
    "tests/storage/test_slab_conformance.py::TestSlabStore",
    "tests/storage/test_slab_conformance.py::TestSlabStoreByAddress",
    "tests/storage/test_spread_conformance.py::TestSpreadSlabsDirect",
    "tests/storage/test_outside_tier.py::TestSqlitePageStore",
    "tests/storage/admission/test_gate.py::TestAdmission",
    "tests/storage/guards/test_conformance.py::TestGuardedSlabs",
    "tests/storage/transforms/test_conformance.py::TestEncodedAndEncryptedSlabs",
    "tests/storage/remote/redis/test_redis_conformance.py::TestRedisServer",
    "tests/storage/remote/redis/test_redis_conformance.py::TestRedisCluster",
    "tests/storage/remote/object/test_object_conformance.py::TestEncodedObjectStore",
    "tests/storage/remote/object/test_object_conformance.py::TestObjectStoreOnS3",
    "tests/storage/mooncake/test_conformance.py::TestMooncakeStore",
)
"""Stores that the PageStore suite meets in ``make test``: each medium, and each wrapper at least once."""

QUICK_CONFORMANCE = CONFORMANCE[0], CONFORMANCE[3]
"""Stores that the PageStore suite meets in ``make test-fast``."""

_OTHER_PROCESSES = re.compile(
    r"^\s*(?:import|from) .*\b"
    r"(?:subprocess|multiprocessing|runtime\.commands|container|pods|ranks|own_network|\w*servers?)\b",
    re.MULTILINE,
)
MANY_CASES = (
    "tests/backend/test_lossy_tier.py",
    "tests/backend/test_pool_kinds.py",
    "tests/backend/test_releases.py",
    "tests/cli/test_every_command.py",
    "tests/cli/test_prove_command.py",
    "tests/docs/test_commands.py",
    "tests/pd/test_decode_pools.py",
    "tests/storage/admission/test_policy.py",
    "tests/storage/events/test_publisher.py",
    "tests/storage/file/test_index.py",
    "tests/storage/file/test_miniatures.py",
    "tests/storage/file/test_open_file_tier.py",
    "tests/storage/file/test_power_loss.py",
    "tests/storage/file/test_tenants.py",
    "tests/storage/file/test_ttl_and_pins.py",
    "tests/storage/test_state_machine.py",
    "tests/storage/transforms/test_rotation.py",
    "tests/storage/transforms/test_tools.py",
)
"""Files with more cases than ``make test-fast`` has time for."""


@cache
def is_patient(file: Path) -> bool | None:
    """True for a file of tests that ``make test-fast`` leaves out as a whole, None for any other."""
    if not file.match("test_*.py"):
        return None
    return str(file).endswith(MANY_CASES) or bool(_OTHER_PROCESSES.search(file.read_text())) or None


def mark_what_is_left_out(items: Sequence[pytest.Item]) -> None:
    """Adds the marks ``thorough`` and ``patient`` to those of ``items`` that this module decides about."""
    from hicache_ext.testing.conformance.page_store import PageStoreTests

    alike: dict[str, list[pytest.Function]] = defaultdict(list)
    servers = set(REAL_SERVERS.values())
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        function = item.nodeid.partition("[")[0]
        of_a_suite = item.cls is not None and issubclass(item.cls, PageStoreTests)
        suite = function.rpartition("::")[0] if of_a_suite else None
        if suite not in (None, *QUICK_CONFORMANCE) or is_patient(item.path):
            item.add_marker("patient")
        if suite not in (None, *CONFORMANCE) or (item.get_closest_marker("e2e") and item.nodeid not in servers):
            item.add_marker("thorough")
        elif item.get_closest_marker("pairs") and hasattr(item, "callspec"):
            alike[function].append(item)
    for products in alike.values():
        rows = [tuple(map(repr, item.callspec.params.values())) for item in products]
        for number in set(range(len(rows))) - covering_pairs(rows):
            products[number].add_marker("thorough")


def covering_pairs(rows: Sequence[tuple[str, ...]]) -> set[int]:
    """Numbers of rows in which every two values that stand together in any row, in their columns, stand together."""
    left = set(_pairs(rows))
    chosen: set[int] = set()
    while left:
        best = max(range(len(rows)), key=lambda number: len(left.intersection(_pairs([rows[number]]))))
        chosen.add(best)
        left.difference_update(_pairs([rows[best]]))
    return chosen


def _pairs(rows: Iterable[tuple[str, ...]]) -> list[tuple[tuple[int, str], ...]]:
    return [pair for row in rows for pair in itertools.combinations(enumerate(row), min(2, len(row)))]
