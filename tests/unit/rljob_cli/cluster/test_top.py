from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rljob_api.errors import TransientError
from rljob_cli.cluster import top, top_tables
from rljob_cli.cluster.client import ClusterError
from rljob_cli.cluster.commands import fetch_rewards
from rljob_cli.cluster.formatting import format_age
from rljob_cli.cluster.watch import watch
from rljob_cli.run.reward_rows import RewardRow
from rljob_cli.tables import to_text

NOW = datetime(2026, 1, 2, tzinfo=UTC)
JOB = {"metadata": {"namespace": "ns", "name": "sums", "creationTimestamp": "2026-01-01T23:59:00Z"}, "spec": {}}


def test_cpu_and_memory_are_summed_over_containers() -> None:
    pod = {"metadata": {"name": "p"}, "spec": {}}
    usage = [{"usage": {"cpu": "250m", "memory": "1Mi"}}, {"usage": {"cpu": "500000000n", "memory": "1024Ki"}}]
    view = top.view_job(JOB, [pod], [{"metadata": {"name": "p"}, "containers": usage}], NOW)
    assert (view.pods[0].cpu_cores, view.pods[0].memory_bytes) == (0.75, 2 * 2**20)
    assert "MEMORY" in to_text(top_tables.draw_job(view))
    assert "MEMORY" not in to_text(top_tables.draw_job(top.view_job(JOB, [pod], [], NOW)))


@pytest.mark.parametrize(("seconds", "age"), [(45, "45s"), (119, "119s"), (120, "2m"), (7200, "2h"), (200000, "2d")])
def test_ages_have_the_format_of_kubectl(seconds: int, age: str) -> None:
    assert format_age(NOW - timedelta(seconds=seconds), NOW) == age


async def test_watch_keeps_the_last_view_while_the_cluster_does_not_answer(capsys: Any) -> None:
    views = iter(["table 1", TransientError("the API server did not answer"), "table 2", KeyboardInterrupt()])

    async def draw() -> str:
        view = next(views)
        if isinstance(view, BaseException):
            raise view
        return view

    with pytest.raises(KeyboardInterrupt):
        await watch(draw, 0.0)
    printed = capsys.readouterr().out
    assert printed.count("table 1") == 2
    assert printed.index("not up to date: the API server did not answer") < printed.index("table 2")


def test_job_without_conditions_is_not_reconciled_yet() -> None:
    [row] = top.view_jobs([JOB], NOW)
    assert row.waits_for == "not reconciled yet; is the operator running?"
    assert row.driver_phase == ""
    assert "DRIVER" in to_text(top_tables.draw_jobs([row], "ns", False))
    assert to_text(top_tables.draw_jobs([], "ns", False)) == "no RLJobs in namespace ns (-A: all namespaces)"


DRIVER = """
rljob_reward_latency_seconds_bucket{lane="train",le="1.0",outcome="valid",reward="correct"} 50.0
rljob_reward_latency_seconds_bucket{lane="train",le="3.0",outcome="valid",reward="correct"} 100.0
rljob_reward_latency_seconds_bucket{lane="train",le="+Inf",outcome="valid",reward="correct"} 100.0
rljob_reward_latency_seconds_count{lane="train",outcome="valid",reward="correct"} 100.0
rljob_reward_invalid_total{lane="train",reason="timeout",reward="correct"} 3.0
"""
SERVER = """
rljob_reward_slots{reward="correct"} 16.0
rljob_reward_slots_in_use{lane="train",reward="correct"} 12.0
rljob_reward_queue_length{lane="train",reward="correct"} 0.0
rljob_reward_queue_oldest_seconds{lane="train",reward="correct"} 0.0
"""
SPEC = {
    "model": {"source": "/m"},
    "data": {"train": {"source": "/d"}},
    "rewards": [
        {"name": "correct", "autoscaling": {"maxReplicas": 4}, "function": {"file": "/r.py"}},
        {"name": "shared", "rewardModelRef": {"name": "math"}},
        {"name": "theirs", "http": {"url": "http://r"}},
    ],
}
STATUS = {
    "roles": [{"name": "reward-correct", "desired": 2, "ready": 2}],
    "scaling": [{"name": "correct", "replicas": 2, "slots": 30}],
}
REWARDED = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", **JOB, "spec": SPEC, "status": STATUS}


def ready_pod(name: str, role: str, reward: str | None = None) -> dict[str, Any]:
    labels = {"rljob.dev/role": role} | ({"rljob.dev/reward": reward} if reward else {})
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": status}


AGENT_LABELS = {"rljob.dev/role": "agent", "rljob.dev/agent": "calc"}
PODS = [ready_pod("head", "head"), ready_pod("a", "reward", "correct"), ready_pod("b", "reward", "correct")]


class FakeCluster:
    """Serves /metrics from a table by Pod."""

    def __init__(self, metrics: dict[str, str], models: list[dict[str, Any]] | None = None) -> None:
        self.metrics, self.models = metrics, models

    async def read_pod_metrics(self, pod: str, port: int) -> str:
        if pod not in self.metrics:
            raise ClusterError("pods/proxy is forbidden")
        assert port == (8100 if pod == "head" else 8080)
        return self.metrics[pod]

    async def list_reward_models(self) -> list[dict[str, Any]]:
        if self.models is None:
            raise ClusterError("rewardmodels is forbidden")
        return self.models

    async def list_pods(self, selector: str) -> list[dict[str, Any]]:
        assert selector == "rljob.dev/reward-model=math"
        return []


async def rows_of(cluster: FakeCluster) -> dict[str, RewardRow]:
    return {row.name: row for row in await fetch_rewards(cluster, REWARDED, PODS)}  # type: ignore[arg-type]


async def test_rewards_show_their_slots_latency_and_invalid_results() -> None:
    model = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RewardModel", "metadata": {"name": "math"}}
    model |= {"spec": {"replicas": 3, "slots": 4, "function": {"file": "/r.py"}}, "status": {"readyReplicas": 2}}
    rows = await rows_of(FakeCluster({"head": DRIVER, "a": SERVER, "b": SERVER}, [model]))
    assert rows["correct"] == RewardRow(
        *("correct", "function", 2, 2, 30, 32, 24, 0, 0.0), pytest.approx(1.0), pytest.approx(2.8), {"timeout": 3}
    )
    assert rows["shared"] == RewardRow("shared", "function", 2, 3, None, 8)
    assert rows["theirs"] == RewardRow("theirs", "http")


async def test_services_of_an_agent_are_rows_after_the_rewards() -> None:
    source = {"inline": "def f(): pass"}
    tool = {"name": "calc", "function": source, "slots": 4, "autoscaling": {"maxReplicas": 4}}
    agent = {"type": "loop", "user": {"function": source}, "tools": [tool]}
    spec = SPEC | {"agent": agent, "data": SPEC["data"] | {"format": "chat"}, "rewards": SPEC["rewards"][:1]}
    status = {"roles": [{"name": "agent-calc", "desired": 3, "ready": 2}], "scaling": [{"name": "calc", "slots": 9}]}
    pods = [ready_pod("c", "agent") | {"metadata": {"name": "c", "labels": AGENT_LABELS}}]
    found = await fetch_rewards(FakeCluster({"c": SERVER}), REWARDED | {"spec": spec, "status": status}, pods)  # type: ignore[arg-type]
    assert [row.name for row in found] == ["correct", "user", "calc"]
    assert (found[1].kind, found[1].ready) == ("user", None)
    assert found[2] == RewardRow("calc", "tool", 2, 3, 9, 16, 12, 0, 0.0)


async def test_unreadable_number_is_a_dash_and_null_in_json() -> None:
    rows = await rows_of(FakeCluster({"a": SERVER}))
    assert rows["correct"] == RewardRow("correct", "function", 2, 2, 30, 32), "the numbers of one server are not a sum"
    assert rows["shared"] == RewardRow("shared")
    view = top.view_job(REWARDED, PODS, [], NOW, list(rows.values()))
    assert asdict(view)["rewards"][0]["slots_in_use"] is None
    line = next(line for line in to_text(top_tables.draw_job(view), 80).splitlines() if line.startswith("correct"))
    assert line.split() == ["correct", "function", "2/2", "30", "32", *["-"] * 6]


async def test_unknown_fields_of_a_newer_version_hide_no_rewards() -> None:
    newer = [{**SPEC["rewards"][0], "novelty": 1}]  # type: ignore[index]
    manifest = REWARDED | {"spec": {**SPEC, "rewards": newer}, "status": {**STATUS, "novelty": {}}}
    [row] = await fetch_rewards(FakeCluster({}), manifest, PODS)  # type: ignore[arg-type]
    assert (row.ready, row.replicas) == (2, 2)
    unreadable = REWARDED | {"spec": {**SPEC, "agent": {"type": "novelty"}}}
    assert await fetch_rewards(FakeCluster({}), unreadable, PODS) == []  # type: ignore[arg-type]


SCHEDULE = {"type": "bounded", "staleness": 1, "groupsInFlight": 9, "groupsScored": 3, "groupsDue": 0}


def with_schedule(phase: str, **schedule: Any) -> dict[str, Any]:
    status = {"phase": phase, "progress": {"schedule": SCHEDULE | schedule}, "conditions": []}
    return JOB | {"status": status}


def test_schedule_shows_staleness_groups_and_busy_roles() -> None:
    view = top.view_job(with_schedule("Running", busy="rollouts 97%, trainer 31%", prefixHits=0.98), [], [], NOW)
    lines = to_text(top_tables.draw_job(view)).splitlines()
    header = next(index for index, line in enumerate(lines) if line.startswith("SCHEDULE"))
    assert lines[header + 1].split() == ["bounded", "1", "9", "3", "0", "0.98", "rollouts", "97%,", "trainer", "31%"]
    assert asdict(view)["job"]["schedule"]["groups_due"] == 0


def test_schedule_of_a_job_that_does_not_run_is_not_shown() -> None:
    for manifest in (with_schedule("Suspended"), JOB):
        view = top.view_job(manifest, [], [], NOW)
        assert view.job.schedule is None
        assert "SCHEDULE" not in to_text(top_tables.draw_job(view))


STALLED = {
    "lastStepTime": "2026-01-01T23:45:00Z",
    "waitsFor": "episodes",
    "hung": [{"role": "trainer", "name": "rank 3", "since": "2026-01-01T23:48:00Z", "limitSeconds": 60}],
    "outages": [{"what": "spec.rewards[0].http (http://judge)", "since": "2026-01-01T23:55:00Z", "limitSeconds": 7200}],
}


def test_last_step_what_hangs_and_the_time_left_of_an_outage_are_shown() -> None:
    running = [{"type": "Running", "status": "True", "reason": "Running", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
    status = {"phase": "Running", "progress": STALLED, "conditions": running}
    [row] = top.view_jobs([JOB | {"status": status}], NOW)
    assert row.last_step_age == "15m"
    assert row.waits_for == (
        "trainer: rank 3 hangs for 12m (limit 60 s); "
        "waits for spec.rewards[0].http (http://judge), which fails for 5m; 115m left; episodes"
    )
    assert "LAST STEP" in to_text(top_tables.draw_jobs([row], "ns", False))
    [ended] = top.view_jobs([JOB | {"status": status | {"phase": "Succeeded"}}], NOW)
    assert (ended.last_step_age, "hangs" in ended.waits_for) == ("-", False), "it is over"
