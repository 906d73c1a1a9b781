"""Whatever the programs of Pods, kubelets and webhooks say: conditions and events stay printable and bounded."""

from datetime import UTC, datetime

import pytest

from rljob_core.backend import Event, ObservedState
from rljob_core.plan.job import plan_job
from tests.support.job_simulation import make_job

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\0\u202e" + "A" * 200_000


def build_pod(**status):
    labels = {"rljob.dev/job": "gsm8k", "rljob.dev/role": "rollout"}
    return {"kind": "Pod", "metadata": {"name": "gsm8k-rollout-x", "labels": labels}, "spec": {}, "status": status}


def container(**state):
    return build_pod(containerStatuses=[{"name": "rollout", "image": HOSTILE, "restartCount": 1, "state": state}])


PODS = {
    "waiting": container(waiting={"reason": "CreateContainerConfigError", "message": HOSTILE}),
    "image": container(waiting={"reason": "ImagePullBackOff", "message": HOSTILE}),
    "ended": container(terminated={"exitCode": 1, "message": HOSTILE}),
    "user error": container(terminated={"exitCode": 78, "message": f"error: {HOSTILE}"}),
    "unschedulable": build_pod(
        conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": HOSTILE}]
    ),
}
REJECTION = {
    "kind": "Event",
    "metadata": {"name": "e"},
    "reason": "FailedCreate",
    "message": "exceeded quota: " * 5000 + HOSTILE,
    "involvedObject": {"name": "gsm8k-rollout"},
}
TRACEBACK = "Traceback (most recent call last):\n" + "  File x\n" * 50_000 + f"ValueError: {HOSTILE}"


def assert_clean(text, max_length):
    assert all(char.isprintable() or char == "\n" for char in text)
    assert len(text) <= max_length


@pytest.mark.parametrize("observed", [*({"pods": (pod,)} for pod in PODS.values()), {"warnings": (REJECTION,)}])
def test_texts_of_pods_reach_conditions_and_events_printable_bounded_and_once(observed):
    job, events = make_job(), []
    for _ in range(3):
        plan = plan_job(job, ObservedState(**observed), NOW, new_token=lambda: "t")
        job = job.model_copy(update={"status": plan.status})
        events.append(plan.events)
    assert events[2] == (), "each event is emitted once"
    named = ("A" * 20, "exceeded quota")
    assert any(part in condition.message for condition in job.status.conditions for part in named)
    for condition in job.status.conditions:
        assert_clean(condition.message, 2000)
    for event in (event for emitted in events for event in emitted):
        assert_clean(event.message, 1024)


def test_event_is_printable_and_bounded():
    assert_clean(Event("Warning", "R", HOSTILE).message, 1024)


def test_long_traceback_is_read_in_part():
    pod = container(terminated={"exitCode": 1, "message": TRACEBACK})
    plan = plan_job(make_job(), ObservedState(pods=(pod,)), NOW, new_token=lambda: "t")
    assert all(len(condition.message) <= 2000 for condition in plan.status.conditions)
