"""The alert rules that the packages ship, by Prometheus' own tool: each fires when it should."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import yaml

REPO = Path(__file__).parents[1]
RULES = REPO / "packaging/prometheus/forestage.rules.yml"
DASHBOARD = REPO / "packaging/grafana/forestage.json"
BOOKS = "file:///usr/share/doc/forestage/"
TRIED = Path(__file__).parent / "alerts.yml"


def test_each_alert_rule_passes_promtools_check_and_its_test_cases(promtool: str) -> None:
    for command in (["check", "rules", str(RULES)], ["test", "rules", str(TRIED)]):
        done = subprocess.run([promtool, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_test_case_that_fires_and_a_case_that_does_not() -> None:
    for name in re.findall(r"alert: (\w+)", RULES.read_text()):
        cases = re.findall(rf"alertname: {name}\n\s+exp_alerts:(.*)", TRIED.read_text())
        assert {case.strip() == "[]" for case in cases} == {True, False}, name


def test_runbook_url_of_each_alert_leads_to_an_existing_heading() -> None:
    for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]:
        url = rule["annotations"]["runbook_url"]
        page, _, anchor = url.removeprefix(BOOKS).partition("#")
        headings = re.findall(r"(?m)^#+ (.*)$", (REPO / page).read_text())
        anchors = [re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings]
        assert anchor in anchors, url


def test_each_fired_alert_keeps_the_cluster_label_of_its_node() -> None:
    """Two clusters on one Prometheus would else be one, and route to one team."""
    tried = yaml.safe_load(TRIED.read_text())["tests"]
    fired = [
        (rule["alertname"], alert["exp_labels"])
        for test in tried
        for rule in test["alert_rule_test"]
        for alert in rule["exp_alerts"]
    ]
    without = {name for name, labels in fired if labels.get("cluster") != "a"}
    assert without == {"ForestageMetricsNowhere"}, "which no node has"


def test_each_dashboard_panel_filters_by_cluster_and_instance() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert [one["name"] for one in dashboard["templating"]["list"]][1:] == ["cluster", "instance"]
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            series = re.findall(r"forestage_\w+(.{0,45})", target["expr"])
            chosen = '{cluster=~"$cluster",instance=~"$instance"'
            assert all(one.startswith(chosen) for one in series), panel["title"]
        ends = panel["gridPos"]["x"] + panel["gridPos"]["w"]
        assert ends <= 24, panel["title"]
