"""The chart's dashboard and alerts agree with what the driver exports."""

from __future__ import annotations

import asyncio
import json
import re

from rljob_api.wire.calls import CallResult
from rljob_trainer.episodes.types import ContextBreak, Episode, EpisodeEnd, EpisodeFailure, ToolCall, Turn
from rljob_trainer.history.prometheus import LATENCY_BUCKETS_SECONDS, PrometheusMetrics
from tests.integration.monitoring import dashboard
from tests.integration.monitoring.running_job import AgentService
from tests.paths import ROOT

CHART = ROOT / "charts" / "rljob"


def test_latency_of_an_alert_is_a_bucket_of_the_drivers_histogram():
    schema = json.loads((CHART / "values.schema.json").read_text())
    allowed = schema["properties"]["prometheusRules"]["properties"]["latency"]["properties"]["seconds"]["enum"]
    assert set(allowed) - {None} <= set(LATENCY_BUCKETS_SECONDS)


def test_alert_selects_the_bucket_of_each_allowed_latency(render):
    for seconds in (0.1, 0.3, 1, 3, 10, 30, 100, 300):
        objects = render("--set-json", f'prometheusRules={{"enabled":true,"latency":{{"seconds":{seconds}}}}}')
        [rules] = [o for o in objects if o["kind"] == "PrometheusRule"]
        pattern = re.search(r'le=~"(.+?)"', rules["spec"]["groups"][0]["rules"][0]["expr"])[1].replace("\\\\", "\\")
        found = [bucket for bucket in LATENCY_BUCKETS_SECONDS if re.fullmatch(pattern, f"{float(bucket)}")]
        assert found == [seconds], "as prometheus_client writes a bucket's bound"


def test_config_map_contains_the_unchanged_dashboard(render):
    [config] = [
        o for o in render("--set", "dashboards.enabled=true") if o["metadata"]["name"] == "rljob-operator-dashboard"
    ]
    assert json.loads(config["data"]["rljob.json"]) == json.loads((CHART / "dashboards" / "rljob.json").read_text())


def test_dashboard_links_the_runbook_where_it_has_an_address(render):
    url = "https://wiki.example.org/rljob?a=1&b=2"
    objects = render("--set", "dashboards.enabled=true", "--set", f"prometheusRules.runbookUrl={url}")
    [config] = [o for o in objects if o["metadata"]["name"] == "rljob-operator-dashboard"]
    [link] = json.loads(config["data"]["rljob.json"])["links"]
    assert (link["title"], link["url"]) == ("Runbook", url)


def test_operators_of_one_prometheus_do_not_add_up():
    texts = re.findall(
        r'"expr": "([^\n]*rljob_operator_[^\n]*)", "legendFormat": "(.*?)"',
        (CHART / "dashboards" / "rljob.json").read_text(),
    )
    assert len(texts) == 6
    for expression, legend in texts:
        assert "by (namespace, service" in expression
        assert legend.startswith("{{namespace}}/{{service}}")


def test_driver_exports_what_the_panels_of_agents_query():
    metrics = PrometheusMetrics()
    metrics.register_agent({"user": AgentService()})
    metrics.record_call("user", "train", CallResult(id="0", valid=True), 0.1)
    failed = Episode(
        0, 0, 0,
        turns=[Turn("", tool_calls=[ToolCall("0", "add", {}, error="no such function")])],
        messages=[{"role": "user", "content": ""}],
        end=EpisodeEnd.FAILED,
        failure=EpisodeFailure("user", "spec.agent.user", "timeout", "killed"),
        breaks=[ContextBreak("history")],
    )  # fmt: skip
    metrics.record_scored("train", failed)
    metrics.register_gateway(lambda: {"episodes": 1.0, "in_flight": 1.0, "oldest_seconds": 0.1})
    metrics.register_service(lambda: {"clients": 1, "adapters": 1})
    asyncio.run(metrics.measure("ann", "optim_step", asyncio.sleep(0)))
    metrics.record_response("chat/completions", "policy", 200)
    metrics.record_overhead(to_engine=0.002, to_client=0.001)
    exported = set(re.findall(r"^(\w+)(?=[ {])", metrics.render().decode(), re.M))
    queries = [q for p in dashboard.list_panels() for q in dashboard.list_queries(p, window="30s", span="2m")]
    queried = {
        name for query in queries for name in re.findall(r"rljob_(?:agent|gateway|service)_\w+", query.expression)
    }
    assert len(queried) == 18
    assert queried <= exported
