"""A call that has no time left says nothing about the nodes it has not asked."""

from __future__ import annotations

import time
from functools import partial

import pytest

from hicache_ext.storage.contract.store import GetResult
from hicache_ext.storage.tiers.redis import page_calls
from hicache_ext.testing.conformance.pages import page_key

# -- nodes that are not to blame -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_call_without_time_takes_no_node_down(server, open_store) -> None:
    """Seen: another node's, or another caller's, hang had used up the time, and this node was said to be down."""
    store = open_store(server, connections=1)
    (node,) = store._topology.nodes
    call = page_calls.PageCall(page_key("one"), b"name")
    talk = partial(page_calls.ask_integers, word=b"EXISTS")
    for idle in (True, False):
        if not idle:
            node._close_idle()
        call.finish(None)
        store._run([call], talk, time.monotonic() - 0.01, GetResult)
        assert call.result is GetResult.TIMEOUT and call.reason == "timeout"
        store._documents[page_key("one")[:16]] = b"{}"
        store._documents_saved.clear()
        store._save_identities([page_key("one")[:16]], time.monotonic() - 0.01)
        assert node.up
