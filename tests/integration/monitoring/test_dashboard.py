"""Every query of the dashboard against a real Prometheus that scrapes a running job."""

from __future__ import annotations

import asyncio
import http.server
import math
import re
import threading
import time
from functools import partial

import pytest
from PIL import Image

from tests.integration.monitoring import dashboard, prometheus_tools, running_job
from tests.support.loopback import next_address
from tests.support.waiting import DEADLINE_SECONDS, wait_for

EVENTS = (
    *(f'rljob_reward_calls_total{{reward="helpful",outcome="{status}"}} > 0' for status in (200, 429, 503)),
    'rljob_reward_limit_wait_seconds_total{limit="concurrency"} > 0',
    "sum(rljob_reward_limit_peers == 2) == 4",
    # Tokens are counted once per response, just after the call, so not in each scrape.
    'sum(rljob_reward_tokens_total{kind="prompt"}) / sum(rljob_reward_calls_total{outcome="200"})'
    f" == {running_job.PROMPT_TOKENS}",
    "max_over_time(rljob_reward_waiting[1m]) > 0",
    "max_over_time(rljob_reward_waiting_oldest_seconds[1m]) > 0",
)
"""What happens in the job, so that panels show more than zeros."""


def has_data(result):
    """Return whether some series has a number. Without observations a quantile is NaN, and the panel is empty."""
    return any(math.isfinite(float(series["value"][1])) for series in result)


async def query_until_all_have_data(prometheus, queries):
    """Repeat queries until each has data. Return those without data at the deadline."""
    missing = list(queries)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while missing and time.monotonic() < deadline:
        await asyncio.sleep(1)
        answers = [await asyncio.to_thread(prometheus.query_api, "query", query=query.expression) for query in missing]
        missing = [query for query, answer in zip(missing, answers, strict=True) if not has_data(answer["result"])]
    return missing


@pytest.mark.slow
async def test_every_query_of_the_dashboard_returns_data(tmp_path, monkeypatch):
    prometheus_tools.find("prometheus")
    queries = [q for p in dashboard.list_panels() for q in dashboard.list_queries(p, window="30s", span="2m")]
    assert len(queries) > 35
    queries += [dashboard.Query("the job", "", expression) for expression in EVENTS]
    job = running_job.RunningJob(tmp_path, monkeypatch)
    async with job.running():
        configs = running_job.build_scrape_configs(job.operator_port)
        prometheus = prometheus_tools.Prometheus(tmp_path, running_job.PROMETHEUS, configs)
        try:
            await asyncio.to_thread(prometheus.wait_until_up, running_job.NUM_TARGETS)
            missing = await query_until_all_have_data(prometheus, queries)
            assert not missing, "without data: " + "\n".join(f"{q.panel}: {q.expression}" for q in missing)
            for annotation in dashboard.list_annotations():
                await asyncio.to_thread(prometheus.query_api, "query", query=annotation)
            for name, query in dashboard.list_variables().items():
                await asyncio.to_thread(check_variable, prometheus, name, query)
            await asyncio.to_thread(check_results, prometheus)
        finally:
            await asyncio.to_thread(prometheus.stop)


def check_variable(prometheus, name, query):
    """Check that Grafana's query for a variable finds values."""
    selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", query).groups()
    found = prometheus.query_api(f"label/{label}/values", **{"match[]": re.sub(r"\$\w+", ".*", selector)})
    expected = {"namespace": ["team"], "job": ["sums"], "reward": ["correct", "helpful", "style"]}
    assert found == expected.get(name, ["closeness", "score", "steps"])


def check_results(prometheus):
    """Check the numbers: which reward fails, with which reasons, and never as a score."""
    invalid = prometheus.query_api("query", query="sum by (reward, reason) (rljob_reward_invalid_total) > 0")["result"]
    assert {(s["metric"]["reward"], s["metric"]["reason"]) for s in invalid} <= {
        ("correct", reason) for reason in ("exception", "abstained", "not_finite", "worker_died")
    }
    [scored, valid] = [
        float(prometheus.query_api("query", query=query)["result"][0]["value"][1])
        for query in (
            'sum(rljob_reward_score_count{reward="correct",component="score"})',
            'sum(rljob_reward_latency_seconds_count{reward="correct",outcome="valid"})',
        )
    ]
    assert scored == valid > 0
    slots = prometheus.query_api("query", query="sum by (reward) (rljob_reward_slots)")["result"]
    assert {s["metric"]["reward"]: s["value"][1] for s in slots} == {"correct": "4", "style": "2", "helpful": "8"}
    check_judge(prometheus)


def check_judge(prometheus):
    """Check that the calls equal the endpoint's responses."""
    calls = prometheus.query_api("query", query="sum by (reward, outcome) (rljob_reward_calls_total) > 0")["result"]
    assert {(s["metric"]["reward"], s["metric"]["outcome"]) for s in calls} == {
        ("helpful", outcome) for outcome in ("200", "429", "503")
    }
    cached = prometheus.query_api("query", query="count by (reward) (rljob_reward_cache_total)")["result"]
    assert {s["metric"]["reward"] for s in cached} == {"helpful"}, "no other reward has a cache"


class Pages(http.server.BaseHTTPRequestHandler):
    """What two jobs of one name show, in namespaces of their own: a quick reward and a slow one."""

    num_scrapes = 0

    def do_GET(self) -> None:
        Pages.num_scrapes += 1
        lines = []
        for namespace, reward, step, quick in (("team-a", 0.9, 100, 1), ("team-b", 0.2, 7, 0)):
            job = f'namespace="{namespace}",rljob_dev_job="sums"'
            lines += [f"rljob_step_reward{{{job}}} {reward}", f"rljob_step_number{{{job}}} {step}"]
            for le, count in (("0.1", quick), ("30", 1), ("+Inf", 1)):
                labels = f'{job},reward="correct",lane="train",outcome="valid",le="{le}"'
                lines.append(f"rljob_reward_latency_seconds_bucket{{{labels}}} {count * Pages.num_scrapes}")
        self.send_response(200)
        self.end_headers()
        self.wfile.write("\n".join([*lines, ""]).encode())

    def log_message(self, *_: object) -> None: ...


@pytest.mark.slow
def test_jobs_of_one_name_in_two_namespaces_are_two_lines(tmp_path):
    prometheus_tools.find("prometheus")
    address = next_address()
    server = http.server.ThreadingHTTPServer((address, 9000), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    targets = [{"targets": [f"{address}:9000"]}]
    config = {"job_name": "jobs", "honor_labels": True, "static_configs": targets}
    prometheus = prometheus_tools.Prometheus(tmp_path, address, [config])
    found = {}
    try:
        prometheus.wait_until_up(1)
        panels = {panel["title"]: panel for panel in dashboard.list_panels()}
        for title in ("Reward", "Step", "Latency p50"):
            query = dashboard.list_queries(panels[title], window="30s", span="1m")[0]
            read = partial(prometheus.query_api, "query", query=query.expression)
            wait_for(lambda read=read: has_data(read()["result"]), title)
            found[title] = {each["metric"]["namespace"]: float(each["value"][1]) for each in read()["result"]}
    finally:
        prometheus.stop()
        server.shutdown()
        server.server_close()
    assert found["Reward"] == {"team-a": 0.9, "team-b": 0.2}
    assert found["Step"] == {"team-a": 100, "team-b": 7}
    assert found["Latency p50"]["team-a"] <= 0.1 < 1 < found["Latency p50"]["team-b"]


def test_lines_of_different_jobs_are_never_one():
    rows = dashboard.read()["panels"]
    of_operator = {panel["title"] for row in rows if row["title"] == "Operator" for panel in row["panels"]}
    for panel in dashboard.list_panels():
        if panel["title"] in of_operator or panel["type"] == "heatmap":
            continue
        for query in dashboard.list_queries(panel, window="1m", span="1m"):
            groups = re.findall(r"\b(?:by|on) \(([^)]*)\)", query.expression)
            assert groups, query
            for group in groups:
                assert re.match(r"namespace, (rljob_dev_job|owner|pod)\b", group), query
            assert query.legend.startswith("{{namespace}}/"), query


def test_what_is_wrong_is_seen_at_a_glance():
    panels = dashboard.list_panels()
    assert all(p["options"]["legend"]["calcs"] == ["lastNotNull", "max"] for p in panels if p["type"] == "timeseries")
    warned = {panel["title"] for panel in panels if "thresholds" in panel.get("fieldConfig", {}).get("defaults", {})}
    assert {"Share of invalid results", "Age of the queue", "GPU errors (Xid)"} <= warned
    assert [each["name"] for each in dashboard.read()["annotations"]["list"]] == ["heads that started", "alerts"]


def test_every_panel_has_a_unit_a_unique_id_and_its_own_place():
    panels = dashboard.list_all()
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in dashboard.list_panels():
        unit = (
            panel["options"]["yAxis"]["unit"]
            if panel["type"] == "heatmap"
            else panel["fieldConfig"]["defaults"]["unit"]
        )
        assert unit, panel["title"]
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(set(places)) == len(places), "panels overlap"


def test_training_is_first_and_rows_below_the_rewards_are_folded():
    rows = [panel for panel in dashboard.read()["panels"] if panel["type"] == "row"]
    assert [row["title"] for row in rows[:2]] == ["Training", "Rewards, as the driver sees them"]
    assert [row["collapsed"] for row in rows] == [False, False, *[True] * (len(rows) - 2)]
    for row in rows:
        assert bool(row["panels"]) == row["collapsed"], "Grafana shows the panels of an open row from the list"


def test_picture_of_the_docs_is_of_this_dashboard():
    with Image.open(dashboard.PICTURE) as picture:
        found = picture.info.get(dashboard.DIGEST)
    assert found == dashboard.digest(), "draw it again: python -m tests.integration.monitoring.draw"
