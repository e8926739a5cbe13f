"""Recorded looks at the metrics, played to the alert rules by promtool."""

from __future__ import annotations

import functools
import math
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from tests.rigs.prometheus import program
from tests.watching.recording import Series

ALERTS = Path(__file__).parents[2] / "docs" / "alerts.yml"

Look: TypeAlias = Mapping[Series, float]
_SERVER = {"job": "sglang", "instance": "node-1:30000"}
_METRIC = re.compile(r"hicache_ext_\w+")


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return list(group["rules"])


@functools.cache
def metrics_of_rules() -> frozenset[str]:
    return frozenset({name for rule in rules() for name in _METRIC.findall(rule["expr"])})


class Timeline:
    """The metrics of one server, minute by minute."""

    def __init__(self) -> None:
        self._minutes = 0
        self._values: dict[Series, list[str]] = {}
        self._counted: dict[Series, float] = {}
        self._expected: list[tuple[int, set[tuple[str, str]]]] = []

    def at_rest(self, minutes: int, look: Look) -> None:
        """Nothing happens; everything is as in ``look``."""
        self.goes_on(minutes, look, look)

    def goes_on(self, minutes: int, before: Look, after: Look) -> None:
        """In each minute counters grow by what they grew between the two looks; levels are those of ``after``."""
        for series, value in after.items():
            if series[0] not in metrics_of_rules():
                continue
            is_new = series not in self._values
            values = self._values.setdefault(series, [f"_x{self._minutes}"] if self._minutes else [])
            if not series[0].endswith("_total"):
                # promtool takes no NaN; to the rules an absent series is the same.
                values.append(f"_x{minutes}" if math.isnan(value) else f"{value}x{minutes - 1}")
                continue
            grown = value - before.get(series, 0.0)
            start = self._counted.get(series, before.get(series, 0.0) if is_new else 0.0)
            values.append(f"{start + grown}+{grown}x{minutes - 1}")
            self._counted[series] = start + grown * minutes
        for series in self._values.keys() - after.keys():
            self._values[series].append(f"_x{minutes}")
        self._minutes += minutes

    def firing(self, *alerts: tuple[str, str]) -> None:
        """Exactly these alerts, each with the tier that it names (or ""), fire in the minute before."""
        self._expected.append((self._minutes - 1, set(alerts)))

    def play(self, directory: Path) -> None:
        """Fails with promtool's words where other alerts fire than were expected."""
        series = [
            # Two ranks in the same trouble: it is told once.
            {"series": name + _labels({**dict(labels), **_SERVER, "tp_rank": rank}), "values": " ".join(values)}
            for (name, labels), values in self._values.items()
            for rank in ("0", "1")
        ]
        questions = [
            {
                "expr": 'count by (alertname, tier) (ALERTS{alertstate="firing"})',
                "eval_time": f"{minute}m",
                "exp_samples": [
                    {"labels": _labels({"alertname": name, **({"tier": tier} if tier else {})}), "value": 1}
                    for name, tier in sorted(alerts)
                ],
            }
            for minute, alerts in self._expected
        ]
        assert questions
        file = directory / "rules.test.yml"
        test = {"interval": "1m", "input_series": series, "promql_expr_test": questions}
        document = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [test]}
        file.write_text(yaml.safe_dump(document, width=1000))
        done = subprocess.run([program("promtool"), "test", "rules", str(file)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ", ".join(f'{name}="{value}"' for name, value in sorted(labels.items())) + "}"
