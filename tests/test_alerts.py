"""The alert rules that the packages ship, by Prometheus' own tool: each fires when it should."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

RULES = Path(__file__).parents[1] / "packaging/prometheus/forestage.rules.yml"
TRIED = Path(__file__).parent / "alerts.yml"


def test_each_alert_fires_when_it_should_and_not_before(promtool: str) -> None:
    for command in (["check", "rules", str(RULES)], ["test", "rules", str(TRIED)]):
        done = subprocess.run([promtool, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_tried_both_ways() -> None:
    for name in re.findall(r"alert: (\w+)", RULES.read_text()):
        cases = re.findall(rf"alertname: {name}\n\s+exp_alerts:(.*)", TRIED.read_text())
        assert {case.strip() == "[]" for case in cases} == {True, False}, name
