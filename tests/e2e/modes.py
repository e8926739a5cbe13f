"""The table of docs/pools.md: what came from where in which mode of SGLang, with answers that were equal."""

from __future__ import annotations

from hicache_ext.testing.client import Generation
from tests.rigs.outcome_tables import DOCUMENTS, OutcomeTable

_TABLE = OutcomeTable(DOCUMENTS / "pools.md", "the real-server tests")


def saw(mode: str, *answers: Generation) -> None:
    """The second answers to a prompt, which the caller has compared with the first."""
    seen = {f"{one.cached.storage} storage, {one.cached.host} host, {one.cached.device} device" for one in answers}
    _TABLE.saw(mode, " / ".join(sorted(seen)), "equal")
