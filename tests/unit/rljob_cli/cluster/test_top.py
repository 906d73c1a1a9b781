from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rljob_api.errors import TransientError
from rljob_cli.cluster import top
from rljob_cli.cluster.client import ClusterError
from rljob_cli.cluster.formatting import format_age, format_table
from rljob_cli.cluster.rewards import fetch_rewards
from rljob_cli.run.reward_rows import RewardRow

NOW = datetime(2026, 1, 2, tzinfo=UTC)
JOB = {"metadata": {"namespace": "ns", "name": "sums", "creationTimestamp": "2026-01-01T23:59:00Z"}, "spec": {}}


def test_cpu_and_memory_are_summed_over_a_pods_containers() -> None:
    pod = {"metadata": {"name": "p"}, "spec": {}}
    usage = [{"usage": {"cpu": "250m", "memory": "1Mi"}}, {"usage": {"cpu": "500000000n", "memory": "1024Ki"}}]
    view = top.view_job(JOB, [pod], [{"metadata": {"name": "p"}, "containers": usage}], NOW)
    assert (view.pods[0].cpu_cores, view.pods[0].memory_bytes) == (0.75, 2 * 2**20)
    assert "MEMORY" in top.format_job(view, None)
    assert "MEMORY" not in top.format_job(top.view_job(JOB, [pod], [], NOW), None)


def test_lines_are_cut_to_the_terminal_and_nowhere_else() -> None:
    rows = [["sums", "x" * 100]]
    assert max(map(len, format_table(["NAME", "WAITS FOR"], rows, 40))) == 40
    assert max(map(len, format_table(["NAME", "WAITS FOR"], rows))) > 100


@pytest.mark.parametrize(("seconds", "age"), [(45, "45s"), (119, "119s"), (120, "2m"), (7200, "2h"), (200000, "2d")])
def test_ages_read_as_kubectls(seconds: int, age: str) -> None:
    assert format_age(NOW - timedelta(seconds=seconds), NOW) == age


def test_watch_keeps_what_it_saw_while_the_cluster_cannot_be_asked(capsys: Any) -> None:
    def draws() -> Any:
        yield "table 1"
        yield TransientError("the API server does not answer")
        yield "table 2"
        yield KeyboardInterrupt()

    looks = draws()

    def draw() -> str:
        look = next(looks)
        if isinstance(look, BaseException):
            raise look
        return str(look)

    with pytest.raises(KeyboardInterrupt):
        top.watch(draw, 0.0)
    said = capsys.readouterr().out
    assert said.count("table 1") == 2, "drawn again while nothing newer is known"
    assert said.index("not up to date: the API server does not answer") < said.index("table 2")


DRIVER = """
rljob_reward_latency_seconds_bucket{lane="train",le="1.0",outcome="valid",reward="correct"} 50.0
rljob_reward_latency_seconds_bucket{lane="train",le="3.0",outcome="valid",reward="correct"} 100.0
rljob_reward_latency_seconds_bucket{lane="train",le="+Inf",outcome="valid",reward="correct"} 100.0
rljob_reward_latency_seconds_count{lane="train",outcome="valid",reward="correct"} 100.0
rljob_reward_invalid_total{lane="train",reason="timeout",reward="correct"} 3.0
"""
SERVER = """
rljob_reward_slots_total{reward="correct"} 16.0
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


PODS = [ready_pod("head", "head"), ready_pod("a", "reward", "correct"), ready_pod("b", "reward", "correct")]


class FakeCluster:
    """The client's four questions, answered from a table of /metrics by Pod."""

    def __init__(self, metrics: dict[str, str], models: list[dict[str, Any]] | None = None) -> None:
        self.metrics, self.models = metrics, models

    def read_pod_metrics(self, pod: str, port: int) -> str:
        if pod not in self.metrics:
            raise ClusterError("pods/proxy is forbidden")
        assert port == (8100 if pod == "head" else 8080)
        return self.metrics[pod]

    def list_reward_models(self) -> list[dict[str, Any]]:
        if self.models is None:
            raise ClusterError("rewardmodels is forbidden")
        return self.models

    def list_pods(self, selector: str) -> list[dict[str, Any]]:
        assert selector == "rljob.dev/reward-model=math"
        return []


def rows_of(cluster: FakeCluster) -> dict[str, RewardRow]:
    return {row.name: row for row in fetch_rewards(cluster, REWARDED, PODS)}  # type: ignore[arg-type]


def test_a_jobs_rewards_show_what_they_have_and_what_they_give() -> None:
    model = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RewardModel", "metadata": {"name": "math"}}
    model |= {"spec": {"replicas": 3, "slots": 4, "function": {"file": "/r.py"}}, "status": {"readyReplicas": 2}}
    rows = rows_of(FakeCluster({"head": DRIVER, "a": SERVER, "b": SERVER}, [model]))
    assert rows["correct"] == RewardRow(
        *("correct", "function", 2, 2, 30, 32, 24, 0, 0.0), pytest.approx(1.0), pytest.approx(2.8), {"timeout": 3}
    )
    assert rows["shared"] == RewardRow("shared", "function", 2, 3, None, 8)
    assert rows["theirs"] == RewardRow("theirs", "http")


def test_what_the_user_may_not_read_is_a_dash_and_in_json_null() -> None:
    rows = rows_of(FakeCluster({"a": SERVER}))
    assert rows["correct"] == RewardRow("correct", "function", 2, 2, 30, 32), "one server's numbers are no sum"
    assert rows["shared"] == RewardRow("shared")
    view = top.view_job(REWARDED, PODS, [], NOW, list(rows.values()))
    assert view.to_json()["rewards"][0]["slots_in_use"] is None
    line = next(line for line in top.format_job(view, 80).splitlines() if line.startswith("correct"))
    assert line.split() == ["correct", "function", "2/2", "30", "32", *["-"] * 6]


def test_a_job_of_a_newer_version_is_shown_without_its_rewards() -> None:
    manifest = REWARDED | {"spec": {**SPEC, "new": {}}}
    assert fetch_rewards(FakeCluster({}), manifest, PODS) == []  # type: ignore[arg-type]
