"""The publisher over real sockets: gaps, restarts, subscribers that are late, slow or gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from hicache_ext.errors import ConfigError
from hicache_ext.storage.serving import events as publisher_module
from hicache_ext.storage.serving.events import END, Blocks, EventPublisher
from tests.rigs.kv_events import LONG, encode, events_config, follow_until, publisher, subscriber

zmq = pytest.importorskip("zmq", reason="missing: pyzmq")
pytest.importorskip("msgspec", reason="missing: msgspec")


class Tier:
    """What a look finds; a test changes it."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.many: np.ndarray | None = None
        """In place of ``blocks``."""
        self.looks = 0
        self.error: Exception | None = None

    def look(self) -> Blocks:
        self.looks += 1
        if self.many is not None:
            return {"DISK": self.many}
        if self.error is not None:
            raise self.error
        return {"DISK": np.array(sorted(self.blocks), np.int64)}

    def wait_for_a_look(self) -> None:
        """One that began after this call."""
        wanted = self.looks + 2
        _wait(lambda: self.looks >= wanted)

    @property
    def index(self) -> dict[str, set[int]]:
        return {"DISK": set(self.blocks)} if self.blocks else {}


def _wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def _short_heartbeat(monkeypatch) -> None:
    """A subscription is there some time after it was asked for, and learns by the next batch what it missed."""
    monkeypatch.setattr(publisher_module, "HEARTBEAT", 0.2)


@pytest.fixture
def tier() -> Tier:
    return Tier()


@pytest.fixture
def config():
    return events_config()


@pytest.fixture
def published(tier, config) -> Iterator[EventPublisher]:
    opened = publisher(config, tier.look)
    yield opened
    opened.close()


@pytest.fixture
def following(config) -> Iterator[object]:
    opened = subscriber(config)
    yield opened
    opened.close()


def test_what_is_stored_and_removed_is_told(tier, published, following):
    tier.blocks = {1, -2, 3}
    assert follow_until(following, tier.index) == tier.index
    tier.blocks = {3, 4}
    assert follow_until(following, tier.index) == tier.index


def test_who_comes_late_is_told_everything(tier, config, published):
    tier.blocks = set(range(5000))
    tier.wait_for_a_look()
    tier.blocks -= set(range(100))
    tier.wait_for_a_look()
    late = subscriber(config)
    late.catch_up()
    assert late.index == tier.index
    late.close()


def test_who_missed_some_batches_is_told_those_alone(tier, config, published, following, monkeypatch):
    tier.blocks = {1}
    assert follow_until(following, tier.index) == tier.index
    numbers = []
    monkeypatch.setattr(following, "_live", _Deaf(following._live))
    for block in range(2, 6):
        tier.blocks = {*tier.blocks, block}
        tier.wait_for_a_look()
    monkeypatch.undo()
    apply = following._apply
    monkeypatch.setattr(following, "_apply", lambda number, batch: (numbers.append(number), apply(number, batch)))
    expected = following._next
    following.catch_up()
    assert following.index == tier.index
    assert int.from_bytes(numbers[0], "big") == expected
    assert published.metrics.value("replay", "history") >= 1


class _Deaf:
    """A subscription that nothing comes from."""

    def __init__(self, socket) -> None:
        self._socket = socket

    def poll(self, _timeout) -> int:
        return 0

    def close(self, linger) -> None:
        self._socket.close(linger)


def test_who_missed_more_than_is_kept_is_told_the_whole_state(tier, published, following, monkeypatch):
    monkeypatch.setattr(publisher_module, "KEPT", 4)
    tier.blocks = {1, 2}
    assert follow_until(following, tier.index) == tier.index
    # More than is kept passes it by, and takes away what it knows of.
    for block in range(10, 20):
        tier.blocks = {block}
        tier.wait_for_a_look()
    before = published.metrics.value("replay", "state")
    following.catch_up()
    assert following.index == tier.index
    assert published.metrics.value("replay", "state") == before + 1


def test_a_gap_is_known_although_nothing_changes_any_more(tier, published, following, monkeypatch):
    monkeypatch.setattr(publisher_module, "HEARTBEAT", LONG)
    following.catch_up()
    tier.blocks = {1}
    assert follow_until(following, tier.index) == tier.index
    while following.follow(0.3):
        pass
    # The last batch is lost on the way.
    following.index["DISK"] = set()
    following._next -= 1
    assert follow_until(following, tier.index, 0.5) == {}
    monkeypatch.setattr(publisher_module, "HEARTBEAT", 0.2)
    assert follow_until(following, tier.index) == tier.index


def end_as_kill_does(publisher):
    """It says nothing."""
    publisher._loop.stop()
    publisher._publish.close(0)
    publisher._replay.close(0)


def test_a_restarted_server_is_a_gap_and_what_it_does_not_have_is_forgotten(tier, config, following):
    first = publisher(config, tier.look)
    tier.blocks = {1, 2, 3}
    assert follow_until(following, tier.index) == tier.index
    end_as_kill_does(first)
    tier.blocks = {3, 4}
    second = publisher(config, tier.look)
    # Its first batches come before the subscription is there again.
    tier.wait_for_a_look()
    assert follow_until(following, tier.index) == tier.index
    second.close()


def test_who_knows_a_former_life_is_told_the_state_however_many_batches_there_were_since(tier, config, following):
    """Numbers of two lives never mean two things: or it would be told what came after its last one, and no more."""
    first = publisher(config, tier.look)
    tier.blocks = {1, 2, 3}
    assert follow_until(following, tier.index) == tier.index
    end_as_kill_does(first)
    known, batches = following._next, first.metrics.value("batch", "sent")
    second = publisher(config, tier.look)
    for block in range(10, 12 + batches):
        tier.blocks = {block}
        tier.wait_for_a_look()
    assert second.metrics.value("batch", "sent") > batches
    following._next = known
    following.catch_up()
    assert dict(following.index) == tier.index
    second.close()


def test_a_server_that_ends_says_that_nothing_is_stored(tier, config, following):
    opened = publisher(config, tier.look)
    tier.blocks = {1, 2}
    assert follow_until(following, tier.index) == tier.index
    # A state that comes as an answer to a question comes again by itself later, and the follower asks once more: of a
    # server that has ended nobody can. So the end waits for a batch (a heartbeat) that is the next one.
    asked: list[int] = []
    catch_up = following.catch_up
    following.catch_up = lambda: asked.append(1) or catch_up()
    for _ in range(200):
        asked.clear()
        if following.follow(LONG) and not asked:
            break
    assert not asked
    opened.close()
    assert follow_until(following, {}) == {}
    assert opened.metrics.levels()["blocks", "DISK"] == 0
    opened.close()
    assert opened.metrics.value("batch", "failed") == 0


def test_a_look_that_fails_costs_nothing_but_time(tier, published, following):
    tier.blocks = {1}
    assert follow_until(following, tier.index) == tier.index
    tier.error = OSError(5, "EIO")
    tier.blocks = {2}
    _wait(lambda: published.metrics.value("look", "failed") > 0)
    assert follow_until(following, tier.index, 0.3) == {"DISK": {1}}
    tier.error = None
    assert follow_until(following, tier.index) == tier.index


def test_a_batch_that_cannot_be_made_is_made_up_for(tier, config, following):
    broken = threading.Event()

    def encode_sometimes(changes):
        if broken.is_set():
            raise ValueError("broken")
        return encode(changes)

    opened = EventPublisher(config, 0, tier.look, encode_sometimes)
    tier.blocks = {1}
    assert follow_until(following, tier.index) == tier.index
    broken.set()
    tier.blocks = {2}
    _wait(lambda: opened.metrics.value("batch", "failed") > 0)
    broken.clear()
    assert follow_until(following, tier.index) == tier.index
    opened.close()


def test_a_subscriber_that_reads_nothing_holds_nobody_and_gets_what_fits_a_bounded_queue(
    tier, config, following, monkeypatch
):
    """What is beyond its queue is dropped; it knows of the gap by the number, and is right again."""
    monkeypatch.setattr(publisher_module, "KEPT", 8)
    monkeypatch.setattr(publisher_module, "_MOST_BATCHES", 1)
    monkeypatch.setattr(publisher_module, "_LOOK_SHARE", 0)
    opened = publisher(config, tier.look)
    tier.blocks = {-1}
    assert follow_until(following, tier.index) == tier.index
    stuck = subscriber(config)
    stuck._live.close(0)
    stuck._live = zmq.Context.instance().socket(zmq.SUB)
    stuck._live.rcvhwm = 1
    stuck._live.subscribe("")
    stuck._live.connect(config.endpoint)
    assert follow_until(stuck, tier.index) == tier.index
    before, taken = opened.metrics.value("replay", "state"), 0
    for number in range(40):
        # Far more bytes than the sockets of the kernel take.
        tier.many = np.arange(100_000) + (number % 2) * 100_000
        tier.wait_for_a_look()
        taken += following.follow(LONG)
    assert taken == 40
    tier.many, tier.blocks = None, {-2}
    assert follow_until(following, tier.index) == tier.index
    assert opened.metrics.value("replay", "state") == before
    assert follow_until(stuck, tier.index) == tier.index
    assert opened.metrics.value("replay", "state") > before, "it took everything: nothing was dropped"
    assert len(opened._kept) <= 8
    opened.close()
    stuck.close()


def test_a_request_that_is_none_is_refused_and_the_next_one_is_answered(tier, config, published):
    tier.blocks = {1}
    tier.wait_for_a_look()
    with zmq.Context.instance().socket(zmq.DEALER) as rude:
        rude.linger = 0
        rude.connect(config.replay_endpoint)
        for frames in ((b"",), (b"", b"12"), (b"", b"12345678", b"more"), (b"x" * 100,)):
            rude.send_multipart(frames)
        rude.send_multipart((b"", bytes(8)))
        answers = []
        while not answers or answers[-1][2] != END:
            assert rude.poll(LONG * 1000)
            answers.append(rude.recv_multipart())
    assert len(answers) == 3
    assert published.metrics.value("replay", "refused") == 4


def test_an_address_in_use_is_one_sentence_with_its_key(tier, config, published, monkeypatch):
    monkeypatch.setattr(publisher_module, "_BIND_WAIT", 0.1)
    with pytest.raises(
        ConfigError, match=r"^hicache_ext\.events\.endpoint: .* cannot be bound: Address already in use"
    ):
        publisher(config, tier.look)
    other = config.model_copy(update={"endpoint": events_config().endpoint})
    with pytest.raises(ConfigError, match=r"^hicache_ext\.events\.replay_endpoint: "):
        publisher(other, tier.look)
    # What was bound before the mistake was found is free again.
    with zmq.Context.instance().socket(zmq.PUB) as socket:
        _wait(lambda: _bound(socket, other.endpoint))


def _bound(socket, endpoint: str) -> bool:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError:
        return False
    return True


def test_a_look_that_takes_long_is_made_so_much_rarer(config):
    looked = threading.Event()

    def look() -> Blocks:
        time.sleep(0.2)
        looked.set()
        return {}

    opened = publisher(config, look)
    _wait(looked.is_set)
    _wait(lambda: opened._next_look > 0)
    assert opened._next_look - time.monotonic() > 5
    opened.close()


def test_a_look_that_hangs_holds_neither_the_close_nor_anybody(config, monkeypatch):
    monkeypatch.setattr(publisher_module, "_CLOSE_TIMEOUT", 0.05)
    release = threading.Event()
    opened = publisher(config, lambda: release.wait(LONG) and {})
    begun = time.monotonic()
    opened.close()
    assert time.monotonic() - begun < LONG / 2
    release.set()
