"""A picture of the first rows of docs/grafana.json, over a real server whose pool is killed for a while.

    python -m tests.campaigns.dashboard_picture docs/dashboard.png

Grafana is not needed: the panels' own queries are asked of a real Prometheus that scrapes a real SGLang server, and
drawn where the dashboard has them, with their titles, units, thresholds and words. States are drawn over time. Two
minutes. Needs redis-server, Prometheus and matplotlib.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hicache_ext.bench.frame import machine_facts
from hicache_ext.config.model import ExtraConfig
from hicache_ext.runtime.commands import terminated_in_order
from hicache_ext.testing.server import SglangServer
from tests.campaigns.reporting import where_and_when
from tests.rigs.prometheus import Prometheus
from tests.rigs.redis_servers import RedisServer
from tests.rigs.tiny_model import make_tiny_model
from tests.watching.queries import panels, with_everything_chosen
from tests.watching.timeline import ALERTS

PAGE_SIZE = 16
TOKENS = 640
LAST_ROW = 42
"""Panels that begin above this line of the dashboard's grid are drawn."""
_INTERVAL = "8s"
_COLUMNS = 24
_INCHES = 0.3
"""Of one unit of the dashboard's grid, downwards; _HEAD: above all panels."""
_HEAD = 0.4
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_COLOURS = {"red": "#d44a3a", "yellow": "#e0a030", "green": "#4a9f5b"}


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a panel: its legend, and (seconds, value)."""

    name: str
    points: Sequence[tuple[float, float]]


def record(directory: Path, seconds: float) -> dict[str, list[Series]]:
    """What the panels show of ``seconds`` of load; in the middle third the pool is dead."""
    with RedisServer(directory / "redis") as redis:
        tiers = {
            "nvme": {"type": "file", "path": str(directory / "l3"), "capacity": "16MiB", "io": "buffered"},
            "pool": {"type": "redis", "url": f"redis://127.0.0.1:{redis.port}"},
        }
        config = directory / "hicache.yaml"
        config.write_text(yaml.safe_dump(ExtraConfig.around({"tiers": tiers})))
        with (
            SglangServer(
                make_tiny_model(directory / "model"),
                log_file=directory / "server.log",
                page_size=PAGE_SIZE,
                storage_backend="dynamic",
                extra_config=f"@{config}",
                extra_arguments=("--enable-metrics", "--served-model-name", "tiny"),
            ) as server,
            Prometheus(directory / "prometheus", urllib.parse.urlsplit(server.url).netloc, ALERTS) as prometheus,
        ):
            begin = time.time()
            _load(server, redis, seconds)
            return {panel["title"]: _answers(prometheus, panel, begin, time.time()) for panel in _drawn()}


def _load(server: SglangServer, redis: RedisServer, seconds: float) -> None:
    tokens = random.Random(1)
    asked: list[list[int]] = []
    begun = time.monotonic()
    killed = restarted = False
    while (passed := time.monotonic() - begun) < seconds:
        if passed > seconds / 3 and not killed:
            redis.command("SAVE")
            redis.kill()
            killed = True
        if passed > 2 * seconds / 3 and not restarted:
            redis.start()
            restarted = True
        asked.append([tokens.randrange(250) for _ in range(TOKENS)])
        server.generate(asked[-1])
        if len(asked) % 4 == 0:
            server.flush_cache()
        server.generate(tokens.choice(asked[-40:]))
        time.sleep(0.2)


def _answers(prometheus: Prometheus, panel: Mapping[str, Any], begin: float, end: float) -> list[Series]:
    found = []
    for target in panel["targets"]:
        answer = prometheus.get(
            "query_range",
            query=with_everything_chosen(target["expr"], _INTERVAL),
            start=str(begin),
            end=str(end),
            step="1",
        )
        for row in answer["result"]:
            name = target["legendFormat"].replace("{{instance}}", "")  # there is one
            for label, value in row["metric"].items():
                name = name.replace(f"{{{{{label}}}}}", value)
            found.append(Series(name.strip(), [(at - begin, float(value)) for at, value in row["values"]]))
    return found


def _drawn() -> list[dict[str, Any]]:
    return [panel for panel in panels() if panel["type"] != "row" and panel["gridPos"]["y"] < LAST_ROW]


def draw(file: Path, shown: Mapping[str, Sequence[Series]], caption: str) -> None:
    """The panels in the dashboard's own places."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [panel for panel in panels() if panel["type"] == "row" and panel["gridPos"]["y"] < LAST_ROW]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in _drawn())
    inches = height * _INCHES + _HEAD
    figure = pyplot.figure(figsize=(17, inches), facecolor="#f4f5f5")
    top, unit = 1 - _HEAD / inches, _INCHES / inches
    for panel in _drawn():
        place = panel["gridPos"]
        left, width = place["x"] / _COLUMNS, place["w"] / _COLUMNS
        bottom = top - (place["y"] + place["h"]) * unit
        axis = figure.add_axes((left + 0.045, bottom + 2 * unit, width - 0.06, (place["h"] - 3) * unit))
        axis.set_title(panel["title"], fontsize=9, loc="left", fontweight="bold")
        axis.set_prop_cycle(color=_LINES)
        if panel["type"] == "stat":
            _states(axis, panel, shown[panel["title"]])
        else:
            _lines(axis, panel, shown[panel["title"]])
    for row in rows:
        figure.text(0.01, top - (row["gridPos"]["y"] + 0.7) * unit, row["title"], fontsize=11, fontweight="bold")
    figure.text(0.01, 1 - _HEAD / 2 / inches, caption, fontsize=9, color="0.35", va="center")
    figure.savefig(file, dpi=75, metadata={"Software": None})
    pyplot.close(figure)


def _lines(axis: Any, panel: Mapping[str, Any], series: Sequence[Series]) -> None:
    settings = panel["fieldConfig"]["defaults"]
    stacked = "stacking" in settings["custom"]
    lines = [one for one in series if any(value == value for _, value in one.points)]
    if stacked and lines:
        times = sorted({at for one in lines for at, _ in one.points})
        values = [[dict(one.points).get(at, 0.0) for at in times] for one in lines]
        numbers = [[0.0 if value != value else value for value in row] for row in values]
        handles = axis.stackplot(times, numbers, alpha=0.7, colors=_LINES)
    else:
        handles = [axis.plot(*zip(*one.points, strict=True), linewidth=1.3)[0] for one in lines]
    limits = [step for step in settings["thresholds"]["steps"] if step["value"] is not None]
    highest = max((value for one in lines for _, value in one.points if value == value), default=0.0)
    for step in limits:
        if settings["custom"]["thresholdsStyle"]["mode"] != "off" and step["value"] <= 1.3 * highest:
            axis.axhline(step["value"], color=_COLOURS[step["color"]], linestyle="--", linewidth=0.8)
    axis.set_ylim(0, settings.get("max") or (1.1 * highest or 1))
    axis.yaxis.set_major_formatter(lambda value, _: _in_words(value, settings["unit"]))
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.3)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    if lines:
        names = [one.name or panel["title"] for one in lines]
        axis.legend(handles, names, fontsize=6.5, ncol=6, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.12))
    else:
        axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center", va="center", color="0.5")


def _states(axis: Any, panel: Mapping[str, Any], series: Sequence[Series]) -> None:
    """Over time, as Grafana's own panel has the last one alone: what it was is the point of the picture."""
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    words = {float(value): option for value, option in mapping["options"].items()}
    for number, one in enumerate(series):
        for (at, value), (until, _) in zip(one.points, [*one.points[1:], one.points[-1]], strict=True):
            axis.barh(number, until - at, left=at, color=_COLOURS[words[value]["color"]], height=0.8)
        said = f"{one.name}: {words[one.points[-1][1]]['text']}"
        place = axis.get_yaxis_transform()
        axis.text(0.03, number, said, transform=place, va="center", fontsize=10, color="white", fontweight="bold")
    axis.set_yticks([])
    axis.tick_params(labelsize=7)


def _in_words(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.0f}%"
    if unit == "Bps":
        return f"{value / 1e6:.1f} MB/s"
    if unit == "s":
        return f"{value:g} s" if value >= 1 or not value else f"{1000 * value:.3g} ms"
    return f"{value:g} {unit.removeprefix('suffix:').strip()}".removesuffix(" none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--seconds", type=float, default=90)
    arguments = parser.parse_args()
    with terminated_in_order(), tempfile.TemporaryDirectory(prefix="hce-dashboard-") as directory:
        shown = record(Path(directory), arguments.seconds)
    caption = (
        f"The first rows of docs/grafana.json over {arguments.seconds:.0f} s of a real server (tiny model); "
        f"the pool is dead in the middle third. {where_and_when(machine_facts(arguments.picture.parent))}"
    )
    draw(arguments.picture, shown, caption)


if __name__ == "__main__":
    main()
