"""Every query of the dashboard against a real Prometheus that scrapes a job under way."""

from __future__ import annotations

import asyncio
import math
import re
import time

import dashboard
import prometheus_tools
import scene

_DEADLINE_SECONDS = 300.0
HAPPENS = (
    *(f'rljob_reward_calls_total{{reward="helpful",outcome="{status}"}} > 0' for status in (200, 429, 503)),
    'rljob_reward_limit_wait_seconds_total{limit="concurrency"} > 0',
    "sum(rljob_reward_limit_peers == 2) == 4",
    # Each answer's tokens are counted once; a moment after the call, so not in each scrape.
    'sum(rljob_reward_tokens_total{kind="prompt"}) / sum(rljob_reward_calls_total{outcome="200"})'
    f" == {scene.PROMPT_TOKENS}",
    "max_over_time(rljob_reward_waiting[1m]) > 0",
    "max_over_time(rljob_reward_waiting_oldest_seconds[1m]) > 0",
)
"""What the scene brings about, so that panels have more to show than zeros."""


def has_data(result):
    """Whether some series has a number. Without observations a quantile is NaN, and a panel empty."""
    return any(math.isfinite(float(series["value"][1])) for series in result)


async def ask_until_all_have_data(prometheus, queries):
    """Ask again and again those that had none yet; what is left at the end."""
    missing = list(queries)
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while missing and time.monotonic() < deadline:
        await asyncio.sleep(1)
        answers = [await asyncio.to_thread(prometheus.ask, "query", query=query.expression) for query in missing]
        missing = [query for query, answer in zip(missing, answers, strict=True) if not has_data(answer["result"])]
    return missing


async def test_every_query_of_the_dashboard_returns_data_of_a_real_run(tmp_path, monkeypatch):
    prometheus_tools.find("prometheus")
    queries = [q for p in dashboard.list_panels() for q in dashboard.list_queries(p, window="30s", span="2m")]
    assert len(queries) > 35
    queries += [dashboard.Query("the scene", "", expression) for expression in HAPPENS]
    watched = scene.Scene(tmp_path, monkeypatch)
    async with watched.running():
        configs = scene.build_scrape_configs(watched.operator_port)
        prometheus = prometheus_tools.Prometheus(tmp_path, scene.PROMETHEUS, configs)
        try:
            await asyncio.to_thread(prometheus.wait_until_up, scene.NUM_TARGETS)
            missing = await ask_until_all_have_data(prometheus, queries)
            assert not missing, "without data: " + "\n".join(f"{q.panel}: {q.expression}" for q in missing)
            for name, query in dashboard.list_variables().items():
                await asyncio.to_thread(check_variable, prometheus, name, query)
            await asyncio.to_thread(check_truth, prometheus)
        finally:
            await asyncio.to_thread(prometheus.stop)


def check_variable(prometheus, name, query):
    """What Grafana asks to fill a variable finds values."""
    selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", query).groups()
    found = prometheus.ask(f"label/{label}/values", **{"match[]": re.sub(r"\$\w+", ".*", selector)})
    expected = {"namespace": ["team"], "job": ["sums"], "reward": ["correct", "helpful", "style"]}
    assert found == expected.get(name, ["closeness", "score", "steps"])


def check_truth(prometheus):
    """The numbers are those of the run: who fails, with which reasons, and never as a score."""
    invalid = prometheus.ask("query", query="sum by (reward, reason) (rljob_reward_invalid_total) > 0")["result"]
    assert {(s["metric"]["reward"], s["metric"]["reason"]) for s in invalid} <= {
        ("correct", reason) for reason in ("exception", "abstained", "not_finite", "worker_died")
    }
    [scored, valid] = [
        float(prometheus.ask("query", query=query)["result"][0]["value"][1])
        for query in (
            'sum(rljob_reward_score_count{reward="correct",component="score"})',
            'sum(rljob_reward_latency_seconds_count{reward="correct",outcome="valid"})',
        )
    ]
    assert scored == valid > 0
    slots = prometheus.ask("query", query="sum by (reward) (rljob_reward_slots_total)")["result"]
    assert {s["metric"]["reward"]: s["value"][1] for s in slots} == {"correct": "4", "style": "2", "helpful": "8"}
    check_judge(prometheus)


def check_judge(prometheus):
    """Its calls are what its endpoint answered."""
    calls = prometheus.ask("query", query="sum by (reward, outcome) (rljob_reward_calls_total) > 0")["result"]
    assert {(s["metric"]["reward"], s["metric"]["outcome"]) for s in calls} == {
        ("helpful", outcome) for outcome in ("200", "429", "503")
    }
    cached = prometheus.ask("query", query="count by (reward) (rljob_reward_cache_total)")["result"]
    assert {s["metric"]["reward"] for s in cached} == {"helpful"}, "no other reward has a cache"


def test_every_panel_says_in_which_unit_it_is_and_ids_are_unique():
    panels = dashboard.read()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in dashboard.list_panels():
        unit = (
            panel["options"]["yAxis"]["unit"]
            if panel["type"] == "heatmap"
            else panel["fieldConfig"]["defaults"]["unit"]
        )
        assert unit, panel["title"]
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(set(places)) == len(places), "no panel lies on another"
