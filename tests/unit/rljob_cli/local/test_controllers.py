"""Deployment, StatefulSet and Job as pure functions: Pods to create and delete, and statuses."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta

import pytest

from rljob_cli.local.controllers import build_pod, plan_pods
from rljob_cli.manifests import timestamp
from rljob_core.plan.observed_job import name_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def workload(kind, name="w", **spec):
    container = {"name": "c", "command": ["true"]}
    pod_spec = {"containers": [container], "restartPolicy": "Never" if kind == "Job" else "Always"}
    spec = {"template": {"metadata": {"labels": {"app": name}}, "spec": pod_spec}, **spec}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


class Simulation:
    """Applies plans to a set of Pods, as the local cluster does."""

    def __init__(self, *workloads):
        self.workloads = list(workloads)
        self.pods = {}
        self.now = NOW

    def step(self):
        plan = plan_pods(self.workloads, self.pods.values(), self.now)
        for name in plan.delete:
            del self.pods[name]
        for pod in plan.create:
            self.pods[name_of(pod)] = copy.deepcopy(pod)
        for w in self.workloads:
            w["status"] = plan.statuses[(w["kind"], name_of(w))]
        return plan

    def settle(self):
        """Step until nothing is created or deleted; all Pods become ready at once."""
        for _ in range(20):
            for name in self.pods:
                self.set_ready(name)
            plan = self.step()
            if not plan.create and not plan.delete:
                return
        raise AssertionError("the controllers do not become idle")

    def set_ready(self, name):
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        self.pods[name] = {**self.pods[name], "status": status}

    def end(self, name, code):
        ended = {"exitCode": code, "finishedAt": timestamp(self.now), "message": "boom"}
        statuses = [{"name": "c", "restartCount": 0, "state": {"terminated": ended}}]
        phase = "Failed" if code else "Succeeded"
        self.pods[name] = {**self.pods[name], "status": {"phase": phase, "containerStatuses": statuses}}


def test_deployment_creates_its_replicas_and_counts_ready_ones():
    simulation = Simulation(workload("Deployment", replicas=3))
    simulation.step()
    assert len(simulation.pods) == 3
    simulation.set_ready(min(simulation.pods))
    simulation.step()
    assert simulation.workloads[0]["status"] == {"replicas": 3, "readyReplicas": 1}


def test_deployment_deletes_unready_pods_first_when_it_scales_down():
    simulation = Simulation(workload("Deployment", replicas=3))
    simulation.step()
    ready = sorted(simulation.pods)[2]
    simulation.set_ready(ready)
    simulation.workloads[0]["spec"]["replicas"] = 1
    simulation.step()
    assert list(simulation.pods) == [ready]


def test_deployment_replaces_a_failed_pod():
    simulation = Simulation(workload("Deployment", replicas=2))
    simulation.settle()
    failed = min(simulation.pods)
    simulation.end(failed, 1)
    plan = simulation.step()
    assert plan.delete == [failed]
    assert len(plan.create) == 1
    assert len(simulation.pods) == 2


def test_stateful_set_replaces_a_failed_pod_under_the_same_name():
    simulation = Simulation(workload("StatefulSet", replicas=2, podManagementPolicy="Parallel"))
    simulation.step()
    assert sorted(simulation.pods) == ["w-0", "w-1"]
    simulation.end("w-1", 1)
    assert simulation.step().delete == ["w-1"]
    assert [name_of(pod) for pod in simulation.step().create] == ["w-1"]


def test_stateful_set_deletes_its_highest_ordinals_when_it_scales_down():
    simulation = Simulation(workload("StatefulSet", replicas=3))
    simulation.settle()
    simulation.workloads[0]["spec"]["replicas"] = 1
    assert simulation.step().delete == ["w-1", "w-2"]


def test_job_completes_and_creates_no_pod_when_its_pod_exits_with_0():
    simulation = Simulation(workload("Job", backoffLimit=2))
    simulation.step()
    simulation.end("w-0", 0)
    plan = simulation.step()
    assert not plan.create
    assert [c["type"] for c in simulation.workloads[0]["status"]["conditions"]] == ["Complete"]


def test_failed_job_is_retried_with_backoff_until_its_limit():
    simulation = Simulation(workload("Job", backoffLimit=1))
    simulation.step()
    simulation.end("w-0", 1)
    plan = simulation.step()
    assert not plan.create
    assert plan.wake_at == NOW + timedelta(seconds=1)
    simulation.now = plan.wake_at
    assert [name_of(pod) for pod in simulation.step().create] == ["w-1"]
    simulation.end("w-1", 1)
    simulation.step()
    condition = simulation.workloads[0]["status"]["conditions"][0]
    assert (condition["type"], condition["reason"]) == ("Failed", "BackoffLimitExceeded")


@pytest.mark.parametrize("action", ["FailJob", "Ignore"])
def test_job_applies_its_failure_policy_to_an_exit_code(action):
    rule = {"action": action, "onExitCodes": {"containerName": "c", "operator": "In", "values": [78]}}
    simulation = Simulation(workload("Job", backoffLimit=0, podFailurePolicy={"rules": [rule]}))
    simulation.step()
    simulation.end("w-0", 78)
    plan = simulation.step()
    assert not plan.create
    conditions = simulation.workloads[0]["status"].get("conditions", [])
    expected = [("Failed", "PodFailurePolicy")] if action == "FailJob" else []
    assert [(condition["type"], condition["reason"]) for condition in conditions] == expected


def test_suspended_job_has_no_pods():
    simulation = Simulation(workload("Job"))
    simulation.step()
    simulation.workloads[0]["spec"]["suspend"] = True
    assert simulation.step().delete == ["w-0"]
    assert not simulation.step().create


def test_pods_of_a_retried_job_share_their_identity_and_so_their_address():
    job = workload("Job")
    first, second = (build_pod(job, f"w-{i}", "w", NOW) for i in range(2))
    assert first["metadata"]["annotations"] == second["metadata"]["annotations"]


def test_pods_of_a_deleted_workload_are_deleted():
    simulation = Simulation(workload("Deployment", replicas=1))
    simulation.step()
    simulation.workloads.clear()
    simulation.step()
    assert not simulation.pods


def test_settled_controllers_plan_nothing_and_keep_their_statuses():
    simulation = Simulation(
        workload("Deployment", "d", replicas=2), workload("StatefulSet", "s", replicas=2), workload("Job", "j")
    )
    simulation.settle()
    before = copy.deepcopy(simulation.workloads)
    plan = simulation.step()
    assert (plan.create, plan.delete) == ([], [])
    assert simulation.workloads == before
