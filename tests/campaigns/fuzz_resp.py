"""Throw bytes at the reading side of the Redis tier: replies that were right once and have been damaged.

::

    python -m tests.campaigns.fuzz_resp --minutes 10 --seed 1 --report build/reports/fuzz-resp.md

A thread at the other end of a socket pair answers a pipeline of GETs with right replies in which bytes are flipped, cut
out, repeated, inserted or swapped for pieces of protocol, in pieces of random sizes, and then ends the connection.
After each round: no other error than those the store catches, every page that is called a HIT is the page and was
sent, every byte beside the segments is as it was (guard bytes), and the round ended in time.
"""

from __future__ import annotations

import argparse
import platform
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hicache_ext.errors import ProtocolError, RefusedError, ServerClosedError
from hicache_ext.storage.contract.store import GetResult, PageBatch
from hicache_ext.storage.tiers.redis import connection as connection_module
from hicache_ext.storage.tiers.redis.connection import Connection, Wire
from hicache_ext.storage.tiers.redis.page_calls import PageCall, read_pages
from hicache_ext.storage.tiers.redis.talk_code import Columns, Limits, PageWords, TalkCode, part, talk_code
from hicache_ext.testing.conformance.pages import HostPages, cut, page_keys, payload_of
from hicache_ext.testing.conformance.second_reader import write_page_object
from tests.campaigns.reporting import publish

LONGEST_ROUND = 10.0
"""Seconds; a round that is not hung takes about a millisecond."""

_KEYS = page_keys(8)
_SHAPES = [[1], [13], [40, 30], cut(700, 9), [4096], [20_000, 5], cut(3000, 60)]
_TOKENS = [
    *(b"\r\n", b"\r", b"\n", b"$", b"$-1\r\n", b"$0\r\n\r\n", b"$-2\r\n", b"$99999999999\r\n", b"$536870912\r\n"),
    *(b"*1\r\n", b"*-1\r\n", b":1\r\n", b"+OK\r\n", b"-ERR no\r\n", b"-MOVED 1 127.0.0.1:1\r\n", b"-ASK 99999 :0\r\n"),
    *(b"-WRONGTYPE x\r\n", b"-LOADING x\r\n", b"_\r\n", b"\0" * 200, b"\xff" * 20, b"a" * 5000),
]


@dataclass
class Findings:
    """What was seen; ``problems`` is what must not be."""

    rounds: int = 0
    seconds: float = 0.0
    sent: int = 0
    pages: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    longest: float = 0.0
    problems: Counter[str] = field(default_factory=Counter)


def right_replies(keys: Sequence[bytes], sizes: Sequence[Sequence[int]]) -> list[bytes]:
    replies = []
    for key, page in zip(keys, sizes, strict=True):
        value = write_page_object(key, payload_of(key, sum(page)), header_length=128)
        replies.append(b"$%d\r\n%b\r\n" % (len(value), value))
    return replies


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


def run_round(chance: random.Random, findings: Findings) -> None:
    """By Python or by the compiled code, which takes pages of one size."""
    code = talk_code() if chance.random() < 0.5 else None
    count = chance.randint(1, len(_KEYS))
    keys = chance.sample(_KEYS, count)
    sizes = [chance.choice(_SHAPES)] * count if code else [chance.choice(_SHAPES) for _ in keys]
    sent = damaged(chance, right_replies(keys, sizes))
    cuts = sorted(chance.randrange(len(sent) + 1) for _ in range(chance.choice([0, 0, 1, 5, 30])))
    here, there = socket.socketpair()

    def answer() -> None:
        try:
            for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
                there.sendall(sent[begin:end])
            there.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    server = threading.Thread(target=answer)
    pages = HostPages(sizes, fill=0x77)
    calls = [PageCall(key, key.hex().encode(), pages.buffers[n], sum(sizes[n])) for n, key in enumerate(keys)]
    begun = time.monotonic()
    connection = Connection(Wire(here), (socket.AF_UNIX, ""), begun + LONGEST_ROUND)
    server.start()
    window = chance.choice([1, 5000, 8 << 20])
    try:
        if code is None:
            connection_module.MOST_IN_FLIGHT = window
            read_pages(connection, calls)
        else:
            _read_compiled(code, here, calls, begun + LONGEST_ROUND, window)
        ending = "all answered" if connection.reader.empty else "answered, bytes left"
    except ProtocolError:
        ending = "protocol error"
    except RefusedError:
        ending = "refused"
    except ServerClosedError:
        ending = "cut"
    except TimeoutError:
        ending = "hung"
        findings.problems["hung"] += 1
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the campaign looks for
        ending = "another error"
        findings.problems[f"{type(error).__name__}: {error}"] += 1
    finally:
        here.close()
        server.join()
        there.close()
    findings.longest = max(findings.longest, time.monotonic() - begun)
    findings.rounds += 1
    findings.sent += len(sent)
    findings.endings[ending] += 1
    try:
        pages.assert_guards_intact()
    except AssertionError:
        findings.problems["a byte beside a page was changed"] += 1
    for number, call in enumerate(calls):
        name = (
            call.result.name if isinstance(call.result, GetResult) else "redirected" if call.redirect else "unanswered"
        )
        findings.pages[name] += 1
        if call.result is GetResult.HIT and pages.payload(number) != payload_of(keys[number], sum(sizes[number])):
            findings.problems["a wrong page was called a hit"] += 1
        if call.result is GetResult.HIT and sent.find(payload_of(keys[number], sum(sizes[number]))) < 0:
            findings.problems["a page that was not sent was called a hit"] += 1


def _read_compiled(code: TalkCode, here: socket.socket, calls: list[PageCall], deadline: float, window: int) -> None:
    columns = Columns.of(PageBatch([call.key for call in calls], [call.segments for call in calls]), writable=True)
    assert columns is not None
    words = PageWords.of(b"page:", columns.memory.page_bytes, None)
    try:
        code.read(here.fileno(), columns, np.arange(len(calls)), words, Limits(deadline, window))
    finally:
        for call, result in zip(calls, code.results(columns, GetResult.HIT, GetResult.MISS), strict=True):
            call.result = result


def run_campaign(seconds: float, seed: int) -> Findings:
    """Rounds for so many seconds; the same seed gives the same rounds."""
    findings = Findings()
    part.wait()
    chance = random.Random(seed)
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        run_round(chance, findings)
    findings.seconds = time.monotonic() - begun
    return findings


def report(findings: Findings, seed: int) -> str:
    pages = ", ".join(f"{count} {name.lower()}" for name, count in sorted(findings.pages.items()))
    endings = ", ".join(f"{count} {name}" for name, count in sorted(findings.endings.items()))
    problems = "\n".join(f"- {count} x {name}" for name, count in findings.problems.items()) or "None."
    return (
        "# Fuzzing the replies of Redis\n\n"
        f"`python -m tests.campaigns.fuzz_resp --minutes {findings.seconds / 60:.0f} --seed {seed}`, Python "
        f"{platform.python_version()}. What a round does and checks: tests/campaigns/fuzz_resp.py.\n\n"
        f"- Rounds: {findings.rounds} in {findings.seconds:.0f} s, {findings.sent / 1e6:.0f} MB of damaged replies.\n"
        f"- Pages: {pages}.\n"
        f"- Rounds ended: {endings}.\n"
        f"- Longest round: {findings.longest:.3f} s (allowed: {LONGEST_ROUND:.0f} s).\n\n"
        f"## What must not be\n\n{problems}\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args(arguments)
    findings = run_campaign(options.minutes * 60, options.seed)
    publish(report(findings, options.seed), options.report)
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
