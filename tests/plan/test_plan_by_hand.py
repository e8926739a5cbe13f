"""The answers of a plan beside a calculation that uses nothing of it: three models, two traces, as in docs/plan.md; and
who is asked, counted by hand."""

from __future__ import annotations

import functools
import json
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_ext.cli.main import main
from hicache_ext.plan.fleet import routed, sessions
from hicache_ext.plan.traces import Request, Trace, generate, made_of, parse_workload
from tests.plan.test_models import DEEPSEEK_V3, LLAMA_8B, LLAMA_70B

TRACES = Path(__file__).parents[3] / "shared" / "traces"
"""Beside the checkout; they are no part of this project."""
PAGE = Path(__file__).parents[2] / "docs" / "plan.md"
RATE = 20_000
MODELS = {
    # Keys and values x heads x size of a head x layers x bytes of a number
    "Llama-3.1-8B": (LLAMA_8B, 2 * 8 * 128 * 32 * 2),
    "Llama-3.1-70B": (LLAMA_70B, 2 * 8 * 128 * 80 * 2),
    # Latent and rotary numbers x layers x bytes of a number
    "DeepSeek-V3": (DEEPSEEK_V3, (512 + 64) * 61 * 2),
}
CASES = {"conversation_trace": (512, 10**12), "lmcache_agent_miniswe_64tok": (64, 10**10)}
"""Tokens of a block, bytes of the disk."""


def by_hand(requests: list[dict[str, Any]], slots: int) -> tuple[int, int]:
    """Blocks found and blocks written by one LRU cache that frees the tails of chains first."""
    cached: OrderedDict[int, None] = OrderedDict()
    found = written = 0
    for request in requests:
        chain = request["hash_ids"]
        found += next((place for place, block in enumerate(chain) if block not in cached), len(chain))
        written += sum(block not in cached for block in chain)
        for block in reversed(chain):
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > slots:
            cached.popitem(last=False)
    return found, written


@pytest.mark.thorough
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", CASES)
def test_a_plan_says_what_a_calculation_by_hand_says(
    name: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = TRACES / f"{name}.jsonl"
    if not trace.is_file():
        pytest.skip(f"missing: {trace.name}")
    (block, disk), (config, token) = CASES[name], MODELS[model]
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = f"--model {tmp_path} --tp 8 --block-tokens {block} --disk {disk} --dwpd 1 --prefill-rate {RATE} --json"
    assert main(["plan", str(trace), *words.split()]) == 0
    made = json.loads(capsys.readouterr().out)
    requests = sorted(map(json.loads, trace.open()), key=lambda request: request["timestamp"])
    found, written = by_hand(requests, disk // (block * token))
    hours = (requests[-1]["timestamp"] - requests[0]["timestamp"]) / 3_600_000
    share = found / sum(len(request["hash_ids"]) for request in requests)
    of_day = written * block * token * 24 / hours
    saved = found * block / RATE / hours
    # Where a chain is nearly as long as the cache, by hand it is held whole until it is over.
    near = functools.partial(pytest.approx, rel=3e-3)
    assert made["model"]["token_bytes"] == token
    assert made["fleet"]["hit_share"] == near(share)
    assert made["writes"]["disk_bytes_per_day"] == near(of_day)
    assert made["writes"]["years_until_worn_out"] == near(5 * disk / of_day)
    assert made["prefill"]["saved_seconds_per_hour"] == near(saved)
    assert made["prefill"]["break_even_bytes_per_second"] == RATE * token
    cells = f"{share:.4f} | {of_day / 1e12:.2f} | {saved:,.0f}"
    assert any(line.startswith(f"| {model} |") and cells in line for line in PAGE.read_text().splitlines())


def test_a_node_by_prefix_is_the_one_that_had_it_last_until_it_has_had_too_much() -> None:
    chains = [[1, 2], [3, 4], [1, 2, 5], [6], [3, 7], [1, 8, 9, 10], [1, 2, 5, 11], [12]]
    # Blocks that nodes 0 and 1 have had before each: 0 0, 2 0, 2 2, 5 2, 5 3, 5 5, 9 5, 13 5. The seventh may go on at
    # node 0, which has 9, up to 1.25 x 14 / 2 + 4 blocks.
    assert routed(trace_of(chains), 2, "prefix").tolist() == [0, 1, 0, 1, 1, 0, 0, 1]
    # The same prompt again and again: the second node has had 4 at the seventh, more than 1.25 x 6 / 3 + 1.
    assert routed(trace_of([[1]] * 7), 3, "prefix").tolist() == [0, 0, 1, 1, 1, 1, 2]


def test_by_session_a_conversation_stays_and_at_random_it_wanders() -> None:
    chains = [[number, *range(1000 * number, 1000 * number + turn)] for turn in range(1, 9) for number in range(1, 401)]
    trace = trace_of(chains)
    assert sessions(trace).tolist() == [*range(400)] * 8
    by_session, at_random = (routed(trace, 4, router).reshape(8, 400) for router in ("session", "random"))  # type: ignore[arg-type]
    assert (by_session == by_session[0]).all()
    # A request stays with its predecessor by a chance of 1/4: 2,800 x 1/4 = 700, and 23 as a standard deviation.
    assert abs(int((at_random[1:] == at_random[:-1]).sum()) - 700) < 100
    for nodes in (by_session[0], at_random):
        shares = np.bincount(nodes.ravel()) / nodes.size
        assert len(shares) == 4 and abs(shares - 1 / 4).max() < 0.07


def test_a_generated_conversation_is_found_again_by_its_blocks_alone() -> None:
    """What the generator says of who talks to whom is what is in the prompts, and lengths add up."""
    words = "rate=1,turns=4,think=20s,system=2048,systems=3,first=4096,question=2048,answer=1024,span=10m"
    trace = generate(parse_workload(words))
    chains, said = list(trace.chains()), trace.session
    assert said is not None
    before: dict[int, int] = {}
    turns, began = Counter(said.tolist()), dict[int, int]()
    owner: dict[int, int] = {}
    for number, chain in enumerate(chains):
        session = int(said[number])
        began.setdefault(session, number)
        assert len(chain) == trace.prompt[number] // 512
        # Blocks behind the system prompt are of one conversation alone.
        assert all(owner.setdefault(block, session) == session for block in chain[4:])
        if (earlier := before.get(session)) is not None:
            assert chain[: len(chains[earlier])] == chains[earlier]
            assert trace.prompt[number] > trace.prompt[earlier] + trace.output[earlier]
        before[session] = number
    # 600 begin. Those that have time to end have four turns on average: each is the last one by a chance of 1/4.
    assert abs(len(turns) - 600) < 75
    ended = [turns[session] for session, number in began.items() if trace.times[number] < 300]
    assert abs(np.mean(ended) - 4) < 0.6
    heads = Counter(tuple(chains[number][:4]) for number in began.values())
    # In proportion to 1, 1/2, 1/3.
    assert [round(count / len(turns), 1) for _, count in heads.most_common()] == [0.5, 0.3, 0.2]


def trace_of(chains: list[list[int]]) -> Trace:
    return made_of("test", map(Request, range(len(chains)), chains), 512)
