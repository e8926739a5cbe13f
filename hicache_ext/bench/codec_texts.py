"""Texts of several kinds for ``hicache-ext codec-check``, written for it: what a codec does to a model depends on what
the model reads."""

from __future__ import annotations

import json

_PROSE = """\
The harbour office stood at the end of the pier, and from its only window one could see every boat that came
in. Marta had kept the books there for eleven years. She knew the skippers by their handwriting before she
knew their faces: the careful columns of old Henrik, the blots of the two brothers from the north shore, the
figures of the widow Dahl, who never once rounded a weight in her own favour. On the morning when the letter
came, fog lay over the water so thickly that the bell on the outer rock seemed to ring from the ceiling of
the room.

The letter was short. The company that owned the ice house would close it before winter, it said, because
the large ships no longer called at small harbours, and what remained did not pay for the machines. Marta
read it twice, folded it along its old folds, and put it under the brass weight where she kept what had to
be answered. Then she did what she did every morning. She lit the stove, wiped the slate, and wrote down the
hour of high water.

By noon the fog had lifted, and so had the news. Nobody had opened the letter but Marta, and she had told no
one, yet the men on the pier spoke of nothing else. Some were for writing to the ministry. Some were for
buying the ice house together, if only each of them would put in what he had saved for a new engine. Henrik
said nothing for a long time. He was mending a net, and he went on until the hole was closed; then he laid
the needle across his knees and asked how many hundredweight of ice a good week needed, how much salt a
barrel cost in the town, and whether anybody had ever counted.

Marta had counted. She fetched the green ledger, in which she had written the ice of every boat since her
first year, and read the figures aloud. It turned out that in most weeks they used far less than they had
always believed. The machines had run day and night for ships that were not there. A smaller house would do,
with a smaller machine, and the stream behind the school had turned a mill wheel in their grandfathers'
time. The brothers from the north shore laughed at that. But the schoolteacher, who had come for her fish,
did not laugh. She borrowed the slate, drew the stream and the fall of the land, and began to calculate, and
while she wrote the men came nearer, one after another, until nobody stood outside in the wind any more.
"""

_DIALOGUE = """\
User: My tomato plants have yellow leaves at the bottom. The ones at the top look fine. What should I do?
Assistant: That pattern usually has one of three causes. Old leaves at the bottom turn yellow when the plant
lacks nitrogen, because it moves what it has to the new growth. They also do so when the soil stays too wet.
And if you see brown spots with rings inside the yellow, it may be early blight. Are there spots on the
leaves, and how often do you water?
User: No spots. I water every evening because it has been so hot.
Assistant: Then I would start with the water. Push a finger into the soil as deep as it goes. If it is moist
down there, skip a day or two. Deep watering twice a week is better for tomatoes than a little every
evening, and mornings are better than evenings, since leaves that stay wet overnight attract fungi.
User: The soil is moist, yes. Should I cut off the yellow leaves?
Assistant: Yes, take off those that are more yellow than green. They will not recover, and without them air
can move under the plant. Never take more than a third of the leaves at once.
User: And fertilizer?
Assistant: Wait a week until the soil has dried a little. If the next leaves turn yellow as well, give a
tomato fertilizer at half of the dose that the package names. Too much nitrogen gives you a beautiful bush
and few fruits.
User: Good. One more question: some of the fruits have a black, sunken patch at the end opposite to the
stem.
Assistant: That is blossom end rot. It looks like a disease, but it is a lack of calcium in the fruit, and
the lack nearly always comes from uneven watering, not from poor soil. So the same remedy helps: water less
often, more deeply, and cover the soil with straw so that it dries more slowly. The fruits that have it will
not heal; pick them, so that the plant spends nothing on them.
User: Can I still eat the good half?
Assistant: You can. Cut away the dark part generously. The rest is safe, though it ripens early and tastes a
little flat.
User: Thanks. Could you summarise all that in three short rules that I can write on a card for my son?
Assistant: Gladly. First: water twice a week, in the morning, until the soil is wet a hand deep. Second:
take off yellow leaves and fruits with black ends. Third: no fertilizer before next Sunday, and then only
half of what the package says.
"""

_GERMAN = """\
Wer am frühen Morgen durch den Wald oberhalb des Dorfes geht, hört zuerst das Wasser und erst viel später
die Straße. Der Bach kommt aus einer Wiese, die im Frühjahr so nass ist, dass man sie nur auf den Steinen
überqueren kann, die jemand vor langer Zeit gelegt hat. Niemand weiß mehr, wer es war. Die Lehrerin sagt, es
seien Mönche gewesen; der Förster meint, es sei sein Großvater gewesen, denn der habe sich ständig nasse
Füße geholt und darüber geklagt.

Unterhalb der Wiese teilt sich der Weg. Links führt er steil hinauf zu der alten Hütte, in der im Sommer die
Schafe Schatten suchen, rechts in vielen Windungen zum See. An der Gabelung steht eine Bank, und auf der
Bank sitzt an den meisten Tagen Herr Brandner mit seinem Hund. Er grüßt jeden, der vorbeikommt, und fragt,
wohin es gehe. Wer zur Hütte will, dem rät er, etwas zu trinken mitzunehmen; wer zum See will, den warnt er
vor den Mücken. Gegen Mittag steht er auf, klopft sich die Hose ab und geht nach Hause, und am nächsten
Morgen sitzt er wieder da, als hätte es dazwischen keine Nacht gegeben.
"""

_FRENCH = """\
La boulangerie ouvrait à six heures, mais la lumière brûlait dans l'atelier depuis minuit. Le vieux Lucien
pétrissait encore à la main le pain de seigle, parce que, disait-il, une machine ne sent pas quand la pâte a
fini de travailler. Sa fille tenait la caisse et connaissait les habitudes de toute la rue : deux baguettes
pas trop cuites pour le notaire, une brioche le jeudi pour l'institutrice, et pour les enfants qui passaient
avant l'école un petit pain coupé en quatre, qu'elle ne comptait jamais. Quand le grand magasin s'installa
au bord de la route, on crut que tout allait changer. Les premiers jours, en effet, il y eut moins de monde.
Puis les gens revinrent, l'un après l'autre, un peu gênés, comme s'ils avaient oublié de dire bonjour.
"""

_MIXED = """\
今天早上下了一场小雨，街上的人都打着伞。小李走进图书馆，把湿透的外套挂在门口，然后坐在靠窗的位置上看
书。
他在写一篇关于城市水系的文章，需要查很多旧地图。管理员告诉他，最早的一张地图画于一百二十年前，上面的
河流现在大多已经不见了。
Вечером они вышли к реке. Лёд уже тронулся, и льдины медленно шли мимо моста, сталкиваясь и кружась. Старик
сказал, что в этом году весна ранняя и что через неделю можно будет спускать лодки. Дети не верили и бросали
в воду камешки.
La abuela guardaba las recetas en una caja de lata. Algunas estaban escritas en papeles de colores, otras en
el reverso de los recibos, y casi ninguna decía cuánto tiempo debía estar el guiso en el fuego: «hasta que
huela bien», ponía, o simplemente «ya sabes». Cuando le preguntábamos, se reía y nos mandaba a buscar
perejil al patio.
朝ごはんのあと、姉は庭の柿の木に登って、まだ青い実を数えていた。全部で四十七個あると言ったが、母は去
年より少ないと言った。
"""

_MANUAL = """\
# Changing the filter of the rain water tank

You need: a bucket, a soft brush, a new filter mat of type C, and about forty minutes. Do it on a dry day,
at the latest when the red mark of the float can be seen.

## Before you begin

1. Switch the pump off at the wall, and pull the plug. Do not rely on the switch of the pump alone.
2. Close the valve between the tank and the house. Its handle then stands across the pipe.
3. Let the pressure out: open the tap in the garden until no more water comes.

> **Caution:** the lid weighs 14 kg. Lift it with two hands, and never lean over the open tank when you are alone.

## Taking the old mat out

Turn the ring to the left until the arrow points to `OPEN`, and lift the basket straight up. If it sticks,
the rubber has dried; pour a little warm water over it and wait for five minutes. Put the basket into the
bucket, so that what drips from it does not run back into the tank. The mat lies between two grids that are
held by four clips. Remember which side was up: the coarse side belongs to the inflow.

## Putting the new one in

Rinse the basket and brush the grids. Lay the mat in with its coarse side up and press the clips until you
hear each of them. Set the basket on its seat, turn the ring to `CLOSED`, and put the lid on. Then, in this
order: open the valve, plug the pump in, switch it on, and let it run for one minute with the tap in the
garden open.

## If something is wrong

| what you see | why | what to do |
|---|---|---|
| the pump hums and does not start | air in the suction pipe | fill the pipe at the screw on top of the pump |
| water is brown after a week | the mat lies upside down | turn it over |
| the lid does not close | the ring is not turned to its end | turn it until the arrow meets the notch |
"""

_CODE = '''\
from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Iterable, Iterator


@dataclass(order=True)
class Task:
    """Something to be done at a time, before what is less urgent."""

    due: float
    priority: int
    name: str = field(compare=False)
    needs: tuple[str, ...] = field(default=(), compare=False)


class Scheduler:
    """Gives out tasks whose needs are met, the earliest first."""

    def __init__(self, tasks: Iterable[Task] = ()) -> None:
        self._ready: list[Task] = []
        self._waiting: dict[str, list[Task]] = defaultdict(list)
        self._missing: dict[str, int] = {}
        self._done: set[str] = set()
        for task in tasks:
            self.add(task)

    def add(self, task: Task) -> None:
        missing = [name for name in task.needs if name not in self._done]
        if not missing:
            heapq.heappush(self._ready, task)
            return
        self._missing[task.name] = len(missing)
        for name in missing:
            self._waiting[name].append(task)

    def finish(self, name: str) -> None:
        """Raises ValueError for a task that was finished before."""
        if name in self._done:
            raise ValueError(f"{name!r} is done already")
        self._done.add(name)
        for task in self._waiting.pop(name, []):
            self._missing[task.name] -= 1
            if self._missing[task.name] == 0:
                del self._missing[task.name]
                heapq.heappush(self._ready, task)

    def take(self, now: float) -> Iterator[Task]:
        while self._ready and self._ready[0].due <= now:
            yield heapq.heappop(self._ready)

    def __len__(self) -> int:
        return len(self._ready) + len(self._missing)


def longest_chain(tasks: Iterable[Task]) -> list[str]:
    """The names of the longest chain of needs; raises ValueError where they go in a circle."""
    known = {task.name: task for task in tasks}
    lengths: dict[str, tuple[int, str | None]] = {}
    visiting: set[str] = set()

    def length(name: str) -> int:
        if name in visiting:
            raise ValueError(f"{name!r} needs itself")
        if name not in lengths:
            visiting.add(name)
            best, before = 0, None
            for need in known[name].needs:
                if length(need) > best:
                    best, before = length(need), need
            visiting.remove(name)
            lengths[name] = (best + 1, before)
        return lengths[name][0]

    last = max(known, key=length, default=None)
    chain: list[str] = []
    while last is not None:
        chain.append(last)
        last = lengths[last][1]
    return chain[::-1]
'''


def _tables() -> str:
    """A table of measurements, then records."""
    days = [
        f"| 2031-04-{day:02} | {('north', 'south', 'west')[day % 3]} | {12 + day * 37 % 11}.{day * 7 % 10} "
        f"| {60 + day * 53 % 31} % | {day * day * 29 % 1000:,} |"
        for day in range(1, 29)
    ]
    records = [
        {"id": 4000 + number, "item": item, "count": number * 17 % 23, "price": round(number * number * 1.37 % 90, 2)}
        for number, item in enumerate(("lamp", "rope", "bucket", "hinge", "valve", "brush", "pump", "filter") * 2)
    ]
    head = "| day | station | degrees | humidity | litres |\n|---|---|---|---|---|"
    return "\n".join([head, *days, "", *map(json.dumps, records)])


def texts() -> dict[str, str]:
    """Each kind and its text."""
    return {
        "prose": _PROSE,
        "dialogue": _DIALOGUE,
        "instructions": _MANUAL,
        "code": _CODE,
        "tables": _tables(),
        "German, French": _GERMAN + _FRENCH,
        "Chinese, Russian, Spanish, Japanese": _MIXED,
    }
