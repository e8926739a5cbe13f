"""Where the time of a restored turn goes: the same prompt on the device and after a flush, step by step.

    python -m benchmarks.restored_turn --json FILE.json

One server of the CPU rig with a file tier, one user. A prompt of whole pages is computed and written; then it is asked
for with a short question behind it, once while it is on the device and once after device and host memory were emptied.
Equal lengths, so both compute as many tokens. Steps are noted in the server (tests/rigs/turn_times.py).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hicache_ext.bench.frame import (
    Quartiles,
    Table,
    add_json_argument,
    fresh_directory,
    machine_facts,
    number,
    positive,
    report,
)
from hicache_ext.cli.main import without_traceback
from hicache_ext.config.model import ExtraConfig
from hicache_ext.errors import CommandError
from hicache_ext.runtime.commands import standard_output_of
from hicache_ext.testing.client import Generation
from hicache_ext.testing.server import SglangServer
from hicache_ext.testing.small_model import NAME, arguments_to_serve, make_small_model
from tests.rigs.server_hooks import rig_environment
from tests.rigs.turn_times import VARIABLE, Step, read_steps

PAGE_SIZE = 64
QUESTION = 60
"""Tokens; less than a page, so that nothing is looked for behind what is on the device."""
DEVICE, RESTORED = "on the device", "restored"

PARTS = (
    "until SGLang's scheduler has the request",
    "SGLang hashes the prompt, its look-up thread",
    "the tier looks up",
    "the tier reads into host memory",
    "SGLang's threads hand it on, and its scheduler polls",
    "SGLang's tree and batch",
    "from host memory to the device",
    "the new tokens are computed",
    "until the client has the first token",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=20, help="after one that does not count")
    parser.add_argument("--pages", type=positive, default=20, help=f"of the prompt, {PAGE_SIZE} tokens each")
    add_json_argument(parser)
    arguments = parser.parse_args()
    with standard_output_of(arguments), fresh_directory(Path(tempfile.gettempdir())) as directory:
        measured = _measure(directory, arguments.rounds, arguments.pages * PAGE_SIZE)
        facts = machine_facts(directory, ("hicache-ext", "sglang", "torch"))
    tokens = arguments.pages * PAGE_SIZE
    rounds = {kind: list(one) for kind, one in measured.items()}
    figures = {"tokens": tokens, "question_tokens": QUESTION, "rounds": rounds}
    report(arguments, "restored_turn", facts, figures, [_table(measured)])
    whole = {kind: Quartiles.of([sum(parts.values()) for parts in one]).median for kind, one in measured.items()}
    print(
        f"A prompt of {tokens:,} tokens and {QUESTION} new ones: the first token after {number(whole[DEVICE] * 1e3)} ms"
        f" on the device, {number(whole[RESTORED] * 1e3)} ms restored from disk,"
        f" {whole[RESTORED] / whole[DEVICE]:.2f} of it (medians)."
    )
    return 0


def _measure(directory: Path, rounds: int, tokens: int) -> dict[str, list[dict[str, float]]]:
    """For both kinds of turn the seconds of each part, round by round."""
    model = make_small_model(directory / NAME)
    steps = directory / "steps"
    steps.touch()
    tier = {"type": "file", "path": str(directory / "pages"), "capacity": "8GiB"}
    server = SglangServer(
        model,
        log_file=directory / "server.log",
        page_size=PAGE_SIZE,
        storage_backend="dynamic",
        extra_config={**ExtraConfig.around({"tiers": {"disk": tier}}), "prefetch_threshold": PAGE_SIZE},
        extra_arguments=arguments_to_serve(),
        environment=rig_environment({VARIABLE: str(steps)}),
    )
    measured: dict[str, list[dict[str, float]]] = {DEVICE: [], RESTORED: []}
    with server:
        for round_number in range(rounds + 1):
            draw = random.Random(round_number)
            prompt, *questions = (
                [draw.randrange(100, 40_000) for _ in range(length)] for length in (tokens, QUESTION, QUESTION)
            )
            server.generate(prompt, 4)
            found = {}
            for kind, question in zip((DEVICE, RESTORED), questions, strict=True):
                if kind is RESTORED:
                    server.flush_cache()
                time.sleep(0.2)
                found[kind] = _asked(server.generate, [*prompt, *question], kind, tokens, steps)
            server.flush_cache()
            if round_number:
                for kind, parts in found.items():
                    measured[kind].append(parts)
    return measured


def _asked(
    generate: Callable[..., Generation], prompt: Sequence[int], kind: str, cached: int, steps: Path
) -> dict[str, float]:
    begun = time.monotonic()
    answer = generate(prompt, 4)
    first = begun + answer.time_to_first_token
    sources = answer.meta_info.get("cached_tokens_details") or {}
    source = "device" if kind is DEVICE else "storage"
    if sources.get(source) != cached:
        raise CommandError(f"of {cached} tokens {sources.get(source)} came from the {source}: {sources}")
    return parts_of([step for step in read_steps(steps) if begun <= step.begin <= first], begun, first)


def parts_of(steps: Sequence[Step], begun: float, first: float) -> dict[str, float]:
    """The seconds of each of ``PARTS``; they add up to the time to the first token."""
    of: dict[str, list[Step]] = {}
    for step in steps:
        of.setdefault(step.name, []).append(step)
    arrival = of["arrives"][0].begin
    computed = of["is computed"][0]
    seen = max((step.end for step in of.get("prefetch is seen", ()) if step.end <= computed.begin), default=arrival)

    def spent(name: str) -> float:
        return sum(step.end - step.begin for step in of.get(name, ()) if step.end <= computed.begin)

    loading, looking, look_up, reading = map(spent, ("is loaded", "is looked for", "tier looks up", "tier reads"))
    seconds = (
        arrival - begun,
        looking - look_up,
        look_up,
        reading,
        seen - arrival - looking - reading,
        computed.begin - seen - loading,
        loading,
        computed.end - computed.begin,
        first - computed.end,
    )
    return dict(zip(PARTS, seconds, strict=True))


def _table(measured: Mapping[str, Sequence[Mapping[str, float]]]) -> Table:
    mean = {
        kind: {part: statistics.fmean(one[part] for one in rounds) for part in PARTS}
        for kind, rounds in measured.items()
    }
    rows = [(part, mean[DEVICE][part], mean[RESTORED][part]) for part in PARTS]
    rows.append(("all of it", *(sum(mean[kind].values()) for kind in (DEVICE, RESTORED))))
    return Table(
        f"where the time to the first token goes, ms, mean of {len(measured[DEVICE])} rounds",
        ("step", DEVICE, RESTORED, "more"),
        tuple(
            (name, *(number(value * 1e3) for value in (one, other)), _signed(other - one)) for name, one, other in rows
        ),
    )


def _signed(seconds: float) -> str:
    return f"{seconds * 1e3:+.1f}"


if __name__ == "__main__":
    sys.exit(without_traceback(main))
