"""The chart's alerts in promtool: each fires when it should, and only then."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from rljob_cluster.host.go_programs import find_or_build
from tests.integration.monitoring import prometheus_tools
from tests.paths import ROOT

CASES = Path(__file__).with_name("alerts.test.yaml")


@pytest.fixture(scope="module")
def rules(tmp_path_factory):
    """rules.yaml: the chart's PrometheusRule with default limits, as Prometheus reads it."""
    command = [find_or_build("helm") / "helm", "template", "rljob", ROOT / "charts" / "rljob", "-n", "ops"]
    done = subprocess.run(
        [*command, "--set", "prometheusRules.enabled=true", "-s", "templates/prometheusrule.yaml"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(done.stdout)["spec"], sort_keys=False))
    return path


def promtool(*arguments):
    done = subprocess.run([prometheus_tools.find("promtool"), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def alerts_of(rules):
    groups = yaml.safe_load(rules.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def test_prometheus_accepts_the_rules(rules):
    promtool("check", "rules", str(rules))


def test_alerts_fire_exactly_when_they_should(rules):
    cases = rules.with_name(CASES.name)
    shutil.copy(CASES, cases)
    promtool("test", "rules", str(cases))


def test_every_alert_fires_in_some_case(rules):
    fired = set(re.findall(r'alertname="(\w+)"', CASES.read_text())) | set(
        re.findall(r"alertname: (\w+)", CASES.read_text())
    )
    assert fired == set(alerts_of(rules))


def test_every_alert_has_a_runbook(rules):
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / "monitoring.md").read_text(), re.M)
    anchors = {f"docs/monitoring.md#{heading.lower()}" for heading in headings}
    missing = {name for name, rule in alerts_of(rules).items() if rule["annotations"]["runbook"] not in anchors}
    assert not missing
