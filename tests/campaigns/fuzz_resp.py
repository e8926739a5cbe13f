"""Throw bytes at the talks of the Redis tier, the native core's and Python's: replies that were right once, damaged.

::

    python -m tests.campaigns.fuzz_resp --inputs 1000000 --seed 1 --report build/reports/fuzz-resp.md

A server at the other end of a socket pair answers the GETs or SETs of some pages with right replies, or one of the
corpus (odd_replies.py), in which bytes are flipped, cut out, repeated, inserted or swapped for pieces of protocol, in
pieces of random sizes, and then ends the connection. Both ways get the same bytes. After each talk: no other error than
those the store catches, every page that is called a HIT is the page and was sent, every byte beside the segments is as
it was (guard bytes), the talk ended in time, and the core has told nothing that Python does not tell.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from hicache_ext.errors import ProtocolError, RefusedError, ServerClosedError
from hicache_ext.storage.contract.store import GetResult, SetResult
from hicache_ext.storage.tiers.redis.connection import Connection
from hicache_ext.testing.conformance.pages import HostPages, cut, filled, page_keys, payload_of
from hicache_ext.testing.conformance.second_reader import write_page_object
from tests.campaigns.reporting import Found, arguments_of, command_of, conduct, report_of
from tests.native.sanitized import use_the_core_that_is_to_be_tested
from tests.rigs.redis_talks import ANSWER, GOOD, LONGEST_TALK, Talked, known_words, talk
from tests.storage.remote.redis.odd_replies import TO_GET, TO_SET, replies_of

_KEYS = page_keys(8)
_SHAPES = [[1], [13], [40, 30], cut(700, 9), [4096], [9000, 5], cut(3000, 60)]
_TOKENS = [
    *(b"\r\n", b"\r", b"\n", b"$", b"$-1\r\n", b"$0\r\n\r\n", b"$-2\r\n", b"$99999999999\r\n", b"$536870912\r\n"),
    *(b"*1\r\n", b"*-1\r\n", b":1\r\n", b":0\r\n", b"+OK\r\n", b"-ERR no\r\n", b"-MOVED 1 127.0.0.1:1\r\n", ANSWER),
    *(b"-ASK 99999 :0\r\n", b"-WRONGTYPE x\r\n", b"-LOADING x\r\n", b"-OOM x\r\n", b"_\r\n"),
    *(b"\0" * 200, b"\xff" * 20, b"a" * 5000),
]
_ENDINGS = {
    ProtocolError: "protocol error",
    RefusedError: "refused",
    ServerClosedError: "cut",
    TimeoutError: "hung",
}


@dataclass
class Findings(Found):
    inputs: int = 0
    sent: int = 0
    pages: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    longest: float = 0.0


def right_replies(chance: random.Random, word: str, values: Sequence[bytes]) -> list[bytes]:
    """Of a healthy server that has, or takes, these values."""
    if word == "get":
        return [b"$%d\r\n%b\r\n" % (len(value), value) for value in values]
    absent = [chance.random() < 0.7 for _ in values]
    lengths = [b":0\r\n" if is_absent else b":%d\r\n" % len(values[0]) for is_absent in absent]
    stored = [b"+OK\r\n" if chance.random() < 0.95 else b"$-1\r\n" for is_absent in absent if is_absent]
    return [*lengths, ANSWER, *stored, *([ANSWER] if stored else [])]


def damaged(chance: random.Random, replies: list[bytes]) -> bytes:
    """The replies, damaged in up to four places; one time in ten not at all."""
    if chance.random() < 0.1:
        return b"".join(replies)
    if chance.random() < 0.2:
        chance.shuffle(replies)
    if chance.random() < 0.2:
        replies[chance.randrange(len(replies))] = chance.choice(_TOKENS)
    sent = bytearray(b"".join(replies))
    for _ in range(chance.randint(0, 4)):
        # Near the beginning as often as anywhere: there are the lines, which are few among the payloads.
        place = chance.randrange(min(len(sent), chance.choice([20, 200, 1 << 30])) or 1) if sent else 0
        length = chance.choice([1, 1, 2, 8, 100, 3000])
        kind = chance.randrange(6)
        if kind == 0 and sent:
            sent[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del sent[place : place + length]
        elif kind == 2:
            sent[place:place] = sent[place : place + length]
        elif kind == 3:
            sent[place:place] = chance.choice(_TOKENS)
        elif kind == 4:
            sent[place : place + length] = chance.randbytes(length)
        else:
            del sent[place:]
    return bytes(sent)


def run_input(chance: random.Random, findings: Findings) -> None:
    """One stream of replies, by both ways. Needs ``known_words``."""
    word = chance.choice(["get", "get", "set"])
    keys = chance.sample(_KEYS, chance.randint(1, len(_KEYS)))
    shape = chance.choice(_SHAPES)
    values = [write_page_object(key, payload_of(key, sum(shape)), header_length=128) for key in keys]
    replies = right_replies(chance, word, values)
    if len(keys) > 2 and chance.random() < 0.2:
        replies = [replies_of(chance.choice(TO_GET if word == "get" else TO_SET), values)]
    sent = damaged(chance, replies)
    ends = sorted(chance.randrange(len(sent) + 1) for _ in range(chance.choice([0, 0, 1, 5, 30])))
    pieces = [sent[begin:end] for begin, end in itertools.pairwise([0, *ends, len(sent)])]
    window = chance.choice([1, 5000, 8 << 20])
    findings.inputs += 1
    findings.sent += len(sent)
    talked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "window", lambda connection: window)
        for way in ("native", "plain"):
            pages = HostPages([shape] * len(keys), fill=0x77) if word == "get" else filled(keys, [shape] * len(keys))
            begun = time.monotonic()
            try:
                talked.append(talk(way, keys, pages, pieces, word))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is what the campaign looks for
                findings.problems[f"{way}: {type(error).__name__}: {error}"] += 1
                return
            findings.longest = max(findings.longest, time.monotonic() - begun)
            _judge(findings, way, word, keys, shape, sent, talked[-1])
    ours, plain = talked
    if any(one not in (None, other) for one, other in zip(ours.results, plain.results, strict=True)):
        findings.problems["the core told what Python does not"] += 1
    if not ours.sent.startswith(plain.sent) and not plain.sent.startswith(ours.sent):
        findings.problems["the core asked what Python does not"] += 1


def _judge(
    findings: Findings, way: str, word: str, keys: Sequence[bytes], shape: Sequence[int], sent: bytes, talked: Talked
) -> None:
    ending = next((name for kind, name in _ENDINGS.items() if talked.ending and issubclass(talked.ending, kind)), None)
    if ending == "hung" or (talked.ending and ending is None):
        findings.problems[f"{way}: {talked.ending}"] += 1
    findings.endings[f"{way}, {ending or ('all answered' if talked.is_empty else 'bytes left')}"] += 1
    try:
        talked.memory.assert_guards_intact()
    except AssertionError:
        findings.problems[f"{way}: a byte beside a page was changed"] += 1
    for number, (key, result) in enumerate(zip(keys, talked.results, strict=True)):
        findings.pages[f"{way} {word}, {'unanswered' if result is None else result.value}"] += 1
        if way == "native" and result not in GOOD | {None}:
            findings.problems[f"the core told {result}"] += 1
        payload = payload_of(key, sum(shape))
        if (result is GetResult.HIT or word == "set") and talked.memory.payload(number) != payload:
            findings.problems[f"{way}: a wrong page was called a hit, or written"] += 1
        if result is GetResult.HIT and payload not in sent:
            findings.problems[f"{way}: a page that was not sent was called a hit"] += 1
    if talked.results.count(SetResult.STORED) > sent.count(b"+OK\r\n"):
        findings.problems[f"{way}: more pages were called stored than were"] += 1


def run_campaign(inputs: int, seed: int) -> Findings:
    """The same seed gives the same inputs."""
    findings = Findings()
    chance = random.Random(seed)
    with known_words():
        for _ in range(inputs):
            run_input(chance, findings)
    return findings


def report(findings: Findings, options: argparse.Namespace, took: str) -> str:
    return report_of(
        "Fuzzing the replies of Redis",
        f"{command_of('fuzz_resp', options)}, {took}. What is done and checked: tests/campaigns/fuzz_resp.py.",
        [
            ("megabytes of replies, both ways", f"{findings.sent / 1e6:.0f}"),
            (f"longest talk, s (allowed: {LONGEST_TALK:.0f})", f"{findings.longest:.3f}"),
            *((f"pages: {name}", count) for name, count in sorted(findings.pages.items())),
            *((f"talks ended: {name}", count) for name, count in sorted(findings.endings.items())),
        ],
        problems=findings.problems,
    )


def main() -> int:
    parser = arguments_of(__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    options = parser.parse_args()
    use_the_core_that_is_to_be_tested()
    return conduct(options, lambda: run_campaign(options.inputs, options.seed), report)


if __name__ == "__main__":
    sys.exit(main())
