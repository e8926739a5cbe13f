"""docs/alerts.yml, docs/runbook.md and the metrics that the package counts name the same things."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from tests.rigs.prometheus import program
from tests.test_metrics import counted_in_the_package
from tests.watching.timeline import ALERTS, metrics_of_rules, rules

ROOT = Path(__file__).parents[2]


def test_every_metric_of_the_alerts_is_one_that_the_package_counts() -> None:
    used = metrics_of_rules()
    assert len(used) >= 10
    assert used <= {name for name, _ in counted_in_the_package()}


def test_every_alert_has_a_severity_and_a_section_of_the_runbook_and_no_section_is_left_over() -> None:
    page = (ROOT / "docs" / "runbook.md").read_text()
    sections = re.findall(r"^## (Hicache\w+)$", page, re.MULTILINE)
    assert [rule["alert"] for rule in rules()] == sections
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
    for section in re.split(r"^## Hicache", page, flags=re.MULTILINE)[1:]:
        for part in ("**Means.**", "**Users feel.**", "**Look.**", "**Do.**", "**Ignore.**"):
            assert part in section, (section.splitlines()[0], part)


def test_an_annotation_uses_labels_that_its_alert_has() -> None:
    for rule in rules():
        kept = [set(re.split(r"[ ,]+", labels)) for labels in re.findall(r"by \(([^)]*)\)", rule["expr"])]
        used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert kept and used, rule["alert"]
        assert used <= kept[0], rule["alert"]
        assert all(labels == kept[0] for labels in kept), f"{rule['alert']}: its sides do not match"


def test_every_alert_is_shown_to_fire() -> None:
    made = ("tests/watching/test_alerts.py", "tests/backend/test_alerts_of_a_backend.py")
    told = " ".join((ROOT / file).read_text() for file in made)
    assert [rule["alert"] for rule in rules() if f'("{rule["alert"]}",' not in told] == []


def test_prometheus_takes_the_documented_configuration_and_the_rules(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    (block,) = re.findall(r"^```yaml\n(scrape_configs:.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "prometheus.yml").write_text(block)
    shutil.copy(ALERTS, tmp_path)
    words = [program("promtool"), "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules())} rules found" in done.stdout
