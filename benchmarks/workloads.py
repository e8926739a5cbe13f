"""Generated workloads: chains of blocks as a prefix cache is asked for them, in the order of the requests.

Eight families, each with its own reason to return: a conversation returns after its user has thought, the step of an
agent at once and its tools' prompt with every task, a document of a retrieval system by its popularity, a batch scan
hardly ever; mixtures put them in each other's way, drift changes what is popular over hours, and a loop goes over all
its texts again and again, alone or beside conversations. A family draws its own
parameters from the seed, so that two seeds differ in more than their dice.

``REPORTED`` are seeds that took no part when constants of policies were chosen: 1 to 3, 22, 23 and 31 to 34 did.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

Requests = Sequence[Sequence[int]]
REPORTED = (41, 42)


class _Source:
    """Dice, blocks never seen before, and requests that are due later."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Iterator[tuple[float, list[int]]]]] = []

    def fresh(self, least: int, most: int) -> list[int]:
        """A piece of text that nobody has sent before."""
        return list(itertools.islice(self._numbers, self.chance.randint(least, most)))

    def begin(self, moment: float, client: Iterator[tuple[float, list[int]]]) -> None:
        """A client begins: it yields how long it waits, and then asks for, again and again."""
        for wait, chain in client:
            heapq.heappush(self._due, (moment + wait, next(self._numbers), _after(chain, client)))
            return

    def next_due(self, moment: float) -> list[int] | None:
        """The request that is due by now."""
        if not self._due or self._due[0][0] > moment:
            return None
        due, _, client = heapq.heappop(self._due)
        _, chain = next(client)
        self.begin(due, client)
        return chain


def _after(chain: list[int], client: Iterator[tuple[float, list[int]]]) -> Iterator[tuple[float, list[int]]]:
    yield 0.0, chain
    yield from client


def zipf(count: int, skew: float) -> list[float]:
    """Cumulative weights of a popularity."""
    return list(itertools.accumulate((place + 1) ** -skew for place in range(count)))


def _arriving(
    source: _Source, count: int, every: float, new_client: Callable[[float], Iterator[tuple[float, list[int]]]]
) -> list[list[int]]:
    """``count`` requests of clients that begin every so many moments."""
    requests: list[list[int]] = []
    moment = 0.0
    while len(requests) < count:
        moment += source.chance.expovariate(1 / every)
        source.begin(moment, new_client(moment))
        while len(requests) < count and (chain := source.next_due(moment)) is not None:
            requests.append(chain)
    return requests


# -- families ------------------------------------------------------------------------------------------------------


def conversations(count: int, seed: int) -> list[list[int]]:
    """Multi-turn with think time: a chain grows by what was said, behind one of few system prompts."""
    source = _Source(seed)
    chance = source.chance
    systems = [source.fresh(1, 8) for _ in range(chance.randint(1, 12))]
    turns, think, spread = chance.uniform(2, 8), chance.uniform(20, 400), chance.uniform(0.5, 1.5)
    weights = zipf(len(systems), 1.0)

    def client(_: float) -> Iterator[tuple[float, list[int]]]:
        chain = chance.choices(systems, cum_weights=weights)[0] + source.fresh(1, 40)
        wait = 0.0
        for _ in range(1 + int(chance.expovariate(1 / turns))):
            yield wait, chain
            chain = chain + source.fresh(1, 8)
            wait = think * chance.lognormvariate(0.0, spread)

    return _arriving(source, count, turns, client)


def agents(count: int, seed: int) -> list[list[int]]:
    """Agents with shared tool prompts: long prompts of few kinds, many quick steps, each of which adds a result."""
    source = _Source(seed)
    chance = source.chance
    tools = [source.fresh(5, 60) for _ in range(chance.randint(2, 30))]
    weights = zipf(len(tools), chance.uniform(0.6, 1.4))
    steps, pause = chance.uniform(4, 25), chance.uniform(2, 40)

    def client(_: float) -> Iterator[tuple[float, list[int]]]:
        chain, wait = chance.choices(tools, cum_weights=weights)[0] + source.fresh(1, 6), 0.0
        for _ in range(1 + int(chance.expovariate(1 / steps))):
            yield wait, chain
            chain = chain + source.fresh(1, 4)
            # A tool that runs for long, now and then.
            wait = pause * (chance.expovariate(1.0) if chance.random() < 0.95 else 20.0)

    return _arriving(source, count, steps, client)


def documents(count: int, seed: int) -> list[list[int]]:
    """Retrieval: a prompt, one to three documents by their popularity, a question."""
    source = _Source(seed)
    chance = source.chance
    prompt = source.fresh(1, 6)
    texts = [source.fresh(3, 30) for _ in range(chance.randint(500, 6000))]
    weights, most = zipf(len(texts), chance.uniform(0.6, 1.2)), chance.randint(1, 3)
    after: dict[tuple[int, ...], list[int]] = {}

    def asked() -> list[int]:
        chosen = chance.choices(range(len(texts)), cum_weights=weights, k=chance.randint(1, most))
        chain, path = list(prompt), tuple[int, ...]()
        for text in dict.fromkeys(chosen):
            path = (*path, text)
            # A document behind another one is other blocks: keys are of prefixes.
            chain += after.setdefault(path, texts[text] if len(path) == 1 else source.fresh(3, 30))
        return chain + source.fresh(1, 3)

    return [asked() for _ in range(count)]


def scans(count: int, seed: int) -> list[list[int]]:
    """Batch jobs: each sends its prompt with texts that come once, some jobs go over their texts again."""
    source = _Source(seed)
    chance = source.chance
    again, length = chance.uniform(0.0, 0.5), chance.randint(10, 60)
    requests: list[list[int]] = []
    while len(requests) < count:
        prompt = source.fresh(1, 20)
        texts = [source.fresh(length // 4, length) for _ in range(chance.randint(20, 800))]
        for _ in range(2 if chance.random() < again else 1):
            requests += [[*prompt, *text] for text in texts]
    return requests[:count]


def mixture(count: int, seed: int) -> list[list[int]]:
    """Two to four of the others at once, in shares of their own."""
    chance = random.Random(-seed)
    families = chance.sample([conversations, agents, documents, scans], chance.randint(2, 4))
    shares = [chance.uniform(0.2, 1.0) for _ in families]
    return mixed([family(count, 1000 * seed + place) for place, family in enumerate(families)], shares, count, chance)


def drift(count: int, seed: int) -> list[list[int]]:
    """Hours: what is popular goes out of use bit by bit, and the share of each family changes from hour to hour."""
    chance = random.Random(-seed - 1)
    hours = chance.randint(4, 8)
    parts: list[list[int]] = []
    families = (conversations, agents, documents, scans)
    for hour in range(hours):
        shares = [chance.uniform(0.0, 1.0) ** 2 for _ in families]
        # Half of an hour's clients are those of the hour before.
        streams = [
            family(2 * count // hours, 1000 * seed + 10 * place + hour // 2) for place, family in enumerate(families)
        ]
        begin = count // hours * (hour % 2)
        streams = [stream[begin : begin + count // hours] for stream in streams]
        parts += mixed(streams, shares, count // hours, chance, name=hour // 2)
    return parts


def mixed(
    streams: Sequence[Requests], shares: Sequence[float], count: int, chance: random.Random, name: int = 0
) -> list[list[int]]:
    """Requests of several streams in their order, drawn by their shares; no two streams have blocks in common."""
    left = [iter(stream) for stream in streams]
    requests: list[list[int]] = []
    for of in chance.choices(range(len(streams)), shares, k=count):
        chain = next(left[of], None)
        if chain is not None:
            requests.append([(block * len(streams) + of) * 64 + name for block in chain])
    return requests


def loops(count: int, seed: int) -> list[list[int]]:
    """Nightly evaluations, crawlers: the same texts in the same order, again and again."""
    source = _Source(seed)
    prompt, many = source.fresh(1, 10), source.chance.randint(300, 1200)
    texts = [prompt + source.fresh(3, 30) for _ in range(many)]
    return [texts[number % many] for number in range(count)]


def evaluations(count: int, seed: int) -> list[list[int]]:
    """A loop beside conversations."""
    chance = random.Random(seed)
    return mixed([loops(count, seed), conversations(count, seed)], [chance.uniform(0.3, 0.7), 0.5], count, chance)


FAMILIES: dict[str, Callable[[int, int], list[list[int]]]] = {
    "conversations": conversations,
    "agents": agents,
    "documents": documents,
    "scans": scans,
    "mixture": mixture,
    "drift": drift,
    "loops": loops,
    "evaluations": evaluations,
}
