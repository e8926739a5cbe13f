"""Follows the KV events of one server and keeps an index that equals what its tiers hold. See docs/pd.md.

::

    python kv_events_subscriber.py tcp://server:5657 tcp://server:5658

Needs pyzmq and msgspec. To be copied: a router has one ``Subscriber`` per server and DP replica, and asks ``index``.
"""

from __future__ import annotations

import sys
from collections import defaultdict

import msgspec
import zmq

SILENCE = 15.0
"""Seconds without a batch after which the connection is not to be trusted: one comes every 5 seconds at least."""
END = (-1).to_bytes(8, "big", signed=True)


class Subscriber:
    """For one thread."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "") -> None:
        self.index: dict[str, set[int]] = defaultdict(set)
        """Medium ("DISK": of that machine, "EXTERNAL": shared) -> block hashes."""
        self._next: int | None = None
        """The number of the batch that is to come."""
        self._context = zmq.Context.instance()
        self._replay_endpoint = replay_endpoint
        self._live = self._context.socket(zmq.SUB)
        self._live.subscribe(topic)
        self._live.connect(endpoint)

    def follow(self, seconds: float) -> bool:
        """Take over one batch, or what was missed before it. False when none came in that time."""
        if not self._live.poll(seconds * 1000):
            return False
        _, number, batch = self._live.recv_multipart()
        if int.from_bytes(number, "big") == self._next:
            self._apply(number, batch)
        else:
            # Missed some, or heard of twice, or the server was restarted.
            self.catch_up()
        return True

    def catch_up(self, seconds: float = 30.0) -> None:
        """Ask for everything from the next batch on. The answer is that, or the whole state: cleared, then stored."""
        with self._context.socket(zmq.DEALER) as replay:
            replay.linger = 0
            replay.connect(self._replay_endpoint)
            replay.send_multipart((b"", (self._next or 0).to_bytes(8, "big")))
            while True:
                if not replay.poll(seconds * 1000):
                    raise TimeoutError(f"{self._replay_endpoint} does not answer")
                _, _, number, batch = replay.recv_multipart()
                if number == END:
                    return
                self._apply(number, batch)

    def forget(self) -> None:
        """The server is gone, or the connection is: what it tells next is taken from the beginning."""
        self.index.clear()
        self._next = None

    def close(self) -> None:
        self._live.close(0)

    def _apply(self, number: bytes, batch: bytes) -> None:
        for event in msgspec.msgpack.decode(batch)[1]:
            if event["type"] == "AllBlocksCleared":
                self.index.clear()
            elif event["type"] == "BlockStored":
                self.index[event["medium"]].update(event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                self.index[event["medium"]].difference_update(event["block_hashes"])
        self._next = int.from_bytes(number, "big") + 1


def main(endpoint: str, replay_endpoint: str) -> None:
    subscriber = Subscriber(endpoint, replay_endpoint)
    while True:
        if not subscriber.follow(SILENCE):
            subscriber.forget()
        print({medium: len(blocks) for medium, blocks in subscriber.index.items()})


if __name__ == "__main__":
    main(*sys.argv[1:3])
