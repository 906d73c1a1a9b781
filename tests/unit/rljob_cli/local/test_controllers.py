"""Deployment, StatefulSet and Job as pure functions: what is created, deleted and said."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta

from rljob_cli.local.controllers import build_pod, plan_pods
from rljob_operator.plan.observed_job import name_of
from rljob_cli.manifests import timestamp

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def workload(kind, name="w", template=None, **spec):
    container = {"name": "c", "command": ["true"]} | (template or {})
    pod_spec = {"containers": [container], "restartPolicy": "Never" if kind == "Job" else "Always"}
    spec = {"template": {"metadata": {"labels": {"app": name}}, "spec": pod_spec}, **spec}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


class World:
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
        """Steps until nothing is created or deleted; every Pod becomes ready at once."""
        for _ in range(20):
            for name in self.pods:
                self.set_ready(name)
            plan = self.step()
            if not plan.create and not plan.delete:
                return
        raise AssertionError("the controllers do not come to rest")

    def set_ready(self, name):
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        self.pods[name] = {**self.pods[name], "status": status}

    def end(self, name, code):
        ended = {"exitCode": code, "finishedAt": timestamp(self.now), "message": "boom"}
        statuses = [{"name": "c", "restartCount": 0, "state": {"terminated": ended}}]
        phase = "Failed" if code else "Succeeded"
        self.pods[name] = {**self.pods[name], "status": {"phase": phase, "containerStatuses": statuses}}


def test_a_deployment_gets_its_replicas_and_counts_the_ready_ones():
    world = World(workload("Deployment", replicas=3))
    world.step()
    assert len(world.pods) == 3
    world.set_ready(min(world.pods))
    world.step()
    status = world.workloads[0]["status"]
    assert (status["replicas"], status["readyReplicas"], status["unavailableReplicas"]) == (3, 1, 2)


def test_scaling_a_deployment_down_takes_those_that_are_not_ready_first():
    world = World(workload("Deployment", replicas=3))
    world.step()
    ready = sorted(world.pods)[2]
    world.set_ready(ready)
    world.workloads[0]["spec"]["replicas"] = 1
    world.step()
    assert list(world.pods) == [ready]


def test_a_rolling_update_never_goes_below_max_unavailable():
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    world = World(workload("Deployment", replicas=3, strategy=strategy))
    world.settle()
    before = set(world.pods)
    world.workloads[0]["spec"]["template"]["spec"]["containers"][0]["command"] = ["false"]
    plan = world.step()
    assert len(plan.delete) == 1, "one at a time"
    world.settle()
    assert len(world.pods) == 3
    assert not before & set(world.pods)


def test_surge_creates_before_it_deletes():
    strategy = {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    world = World(workload("Deployment", replicas=2, strategy=strategy))
    world.settle()
    world.workloads[0]["spec"]["template"]["spec"]["containers"][0]["command"] = ["false"]
    plan = world.step()
    assert (len(plan.create), plan.delete) == (1, [])
    world.settle()
    assert len(world.pods) == 2


def test_a_stateful_set_has_stable_names_and_replaces_a_failed_pod_under_its_own():
    world = World(workload("StatefulSet", replicas=2, podManagementPolicy="Parallel"))
    world.step()
    assert sorted(world.pods) == ["w-0", "w-1"]
    world.end("w-1", 1)
    assert world.step().delete == ["w-1"]
    assert [name_of(pod) for pod in world.step().create] == ["w-1"]


def test_an_ordered_stateful_set_waits_for_the_pod_before():
    world = World(workload("StatefulSet", replicas=2))
    world.step()
    assert list(world.pods) == ["w-0"]
    world.settle()
    assert sorted(world.pods) == ["w-0", "w-1"]


def test_a_stateful_set_rolls_from_its_highest_ordinal():
    world = World(workload("StatefulSet", replicas=2, podManagementPolicy="Parallel"))
    world.settle()
    world.workloads[0]["spec"]["template"]["spec"]["containers"][0]["command"] = ["false"]
    assert world.step().delete == ["w-1"]


def test_a_job_that_exits_with_0_is_complete_and_starts_nothing_more():
    world = World(workload("Job", backoffLimit=2))
    world.step()
    world.end("w-0", 0)
    plan = world.step()
    assert not plan.create
    assert [c["type"] for c in world.workloads[0]["status"]["conditions"]] == ["Complete"]


def test_a_failed_job_is_retried_after_a_pause_until_its_backoff_limit():
    world = World(workload("Job", backoffLimit=1))
    world.step()
    world.end("w-0", 1)
    plan = world.step()
    assert not plan.create
    assert plan.wake_at == NOW + timedelta(seconds=1)
    world.now = plan.wake_at
    assert [name_of(pod) for pod in world.step().create] == ["w-1"]
    world.end("w-1", 1)
    world.step()
    condition = world.workloads[0]["status"]["conditions"][0]
    assert (condition["type"], condition["reason"]) == ("Failed", "BackoffLimitExceeded")


def test_an_exit_code_of_the_failure_policy_fails_the_job_at_once():
    rule = {"action": "FailJob", "onExitCodes": {"containerName": "c", "operator": "In", "values": [78]}}
    world = World(workload("Job", backoffLimit=6, podFailurePolicy={"rules": [rule]}))
    world.step()
    world.end("w-0", 78)
    plan = world.step()
    assert not plan.create
    condition = world.workloads[0]["status"]["conditions"][0]
    assert (condition["type"], condition["reason"]) == ("Failed", "PodFailurePolicy")


def test_a_retried_job_keeps_its_identity_and_so_its_address():
    job = workload("Job")
    first, second = (build_pod(job, f"w-{i}", "w", NOW) for i in range(2))
    assert first["metadata"]["annotations"] == second["metadata"]["annotations"]


def test_pods_of_a_deleted_workload_go():
    world = World(workload("Deployment", replicas=1))
    world.step()
    world.workloads.clear()
    world.step()
    assert not world.pods


def test_the_controllers_ask_for_nothing_more_once_all_is_there():
    world = World(
        workload("Deployment", "d", replicas=2), workload("StatefulSet", "s", replicas=2), workload("Job", "j")
    )
    world.settle()
    before = copy.deepcopy(world.workloads)
    plan = world.step()
    assert (plan.create, plan.delete) == ([], [])
    assert world.workloads == before, "an unchanged world gives an unchanged status"
