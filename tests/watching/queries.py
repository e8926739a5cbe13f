"""What the dashboard and the alerts ask Prometheus, as Grafana would ask it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.watching.timeline import rules

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
NOT_IN_USE = ("hicache_ext_pull_", "hicache_ext_pd_write_", "hicache_ext_copy_")
"""Metrics of features that a plain server does not use: the only queries that may find nothing."""
_INTERVAL = "30s"


def panels() -> list[dict[str, Any]]:
    """Those of the dashboard, rows included."""
    return list(json.loads(DASHBOARD.read_text())["panels"])


def with_everything_chosen(expression: str, interval: str = _INTERVAL) -> str:
    """A query with every variable at "All"."""
    return re.sub(r"\$(job|node|model|rank)\b", ".*", expression.replace("$__rate_interval", interval))


def of_the_dashboard() -> Iterator[tuple[str, str]]:
    """Title of a panel, and a query with every variable at "All"."""
    for panel in panels():
        for target in panel.get("targets", ()):
            yield panel["title"], with_everything_chosen(target["expr"])


def of_the_variables() -> Iterator[tuple[str, str, str]]:
    """Name, query of the series and label of each variable that is asked of Prometheus."""
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if match := re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]):
            yield variable["name"], re.sub(r"\$\w+", ".*", match[1]), match[2]


def selectors_of_alerts() -> set[str]:
    return {found for rule in rules() for found in re.findall(r"hicache_ext_\w+(?:\{[^}]*\})?", rule["expr"])}


def without_limit(expression: str) -> str:
    """The query without the ``> 0`` that hides what has not happened."""
    return re.sub(r"\) > 0$", ")", expression)
