"""What the operator makes of Pods that wait, fail, restart and end."""

import base64
from datetime import UTC, datetime, timedelta

import pytest

from rljob_api.manifest.job import RLJob
from rljob_api.wire.protocol import DriverStatus
from rljob_operator.backend import ChildKey, ObservedState, key_of
from rljob_operator.plan import conditions
from rljob_operator.plan.job import plan_job

START = datetime(2026, 1, 1, tzinfo=UTC)
HEAD = ChildKey("Job", "gsm8k-head")


def make_job(**spec):
    return RLJob.model_validate(
        {
            "metadata": {"name": "gsm8k", "uid": "u1", "generation": 1},
            "spec": {
                "model": {"source": "/models/tiny"},
                "data": {"train": {"source": "/data/train.jsonl"}},
                "rewards": [{"name": "correct", "function": {"inline": "def reward(): ..."}}],
                "rollout": {"replicas": 2},
            }
            | spec,
        }
    )


def pod(role, name, *, ready=True, restarts=0, state=None, last=None, phase="Running", **extra):
    labels = {"rljob.dev/job": "gsm8k", "rljob.dev/role": role}
    if role == "reward":
        labels["rljob.dev/reward"] = "correct"
    container = {"restartCount": restarts, "state": state or {"running": {}}, "lastState": last or {}}
    status = {"phase": phase, "conditions": [{"type": "Ready", "status": str(ready)}], "containerStatuses": [container]}
    return {"kind": "Pod", "metadata": {"name": name, "labels": labels} | extra, "status": status}


def ended(code, message="", reason="Error"):
    return {
        "terminated": {"exitCode": code, "message": message, "reason": reason, "finishedAt": "2026-01-01T00:00:00Z"}
    }


def all_ready():
    return {
        "head": pod("head", "gsm8k-head-1"),
        "trainer": pod("trainer", "gsm8k-trainer-0"),
        "rollout-a": pod("rollout", "gsm8k-rollout-a"),
        "rollout-b": pod("rollout", "gsm8k-rollout-b"),
        "reward": pod("reward", "gsm8k-reward-correct-a"),
    }


class Life:
    """A job that is looked at again and again, as its status is stored and its children exist."""

    def __init__(self, job):
        self.job, self.now, self.children, self.driver = job, START, {}, None
        self.pods, self.events = {}, []

    def look(self, **pods):
        self.pods.update(pods)
        self.now += timedelta(seconds=1)
        present = tuple(p for p in self.pods.values() if p)
        made = plan_job(self.job, ObservedState(self.children, present, self.driver), self.now, new_token=lambda: "t")
        self.children |= {key_of(child): child | self._status(key_of(child)) for child in made.children}
        self.children = {key: child for key, child in self.children.items() if key not in made.delete}
        self.job = self.job.model_copy(update={"status": made.status})
        self.events += made.events
        return made

    def _status(self, key):
        return {"status": self.children[key]["status"]} if "status" in self.children.get(key, {}) else {}

    def head_is(self, type_, **status):
        self.children[HEAD] = self.children[HEAD] | {
            "status": {"conditions": [{"type": type_, "status": "True"}]} | status
        }

    def true(self):
        return {c.type: c for c in self.job.status.conditions if c.status == "True"}


@pytest.fixture
def life():
    return Life(make_job())


def test_a_job_runs_once_head_trainers_one_rollout_and_each_reward_are_ready(life):
    pods = all_ready()
    life.look()
    assert life.job.status.phase == "Pending"
    life.look(**{name: p for name, p in pods.items() if name not in ("rollout-a", "rollout-b")})
    assert life.job.status.phase == "Pending"
    life.look(**{"rollout-a": pods["rollout-a"]})
    assert life.job.status.phase == "Running"
    assert "1 of 2 rollout Pods" in life.true()["Running"].message, "it says that one is still missing"


def test_waiting_names_the_pod_and_its_reason(life):
    stuck = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x"'}}
    pods = all_ready() | {"rollout-a": pod("rollout", "gsm8k-rollout-abc", ready=False, state=stuck)}
    life.look(**pods)
    assert life.true()["Running"].message == (
        'waits for 1 of 2 rollout Pods: gsm8k-rollout-abc: ImagePullBackOff: Back-off pulling image "x"; '
        "rollout: image of the role cannot be pulled; "
        "correct spec.rollout.image, or name a Secret in spec.rollout.template.spec.imagePullSecrets"
    )


def test_a_pod_without_a_node_says_what_the_scheduler_says(life):
    unscheduled = pod("trainer", "gsm8k-trainer-0", phase="Pending")
    unscheduled["status"] = {
        "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/5 nodes"}]
    }
    life.look(**all_ready() | {"trainer": unscheduled})
    message = conditions.find(life.job.status, "Running").message
    assert message == (
        "waits for 1 of 1 trainer Pod: gsm8k-trainer-0: Unschedulable: 0/5 nodes; trainer: 0/5 nodes; "
        "compare spec.trainer.nodePool (nodeSelector, tolerations) and spec.trainer.resources with the nodes"
    )


def test_a_lost_rollout_does_not_stop_the_job_but_a_lost_trainer_restarts_it(life):
    life.look(**all_ready())
    life.look(**{"rollout-a": None})
    assert life.job.status.phase == "Running"
    life.look(trainer=None)
    assert (life.job.status.phase, life.true()["Restarting"].reason) == ("Restarting", "TrainerRestarting")
    life.look(trainer=pod("trainer", "gsm8k-trainer-0"))
    assert life.job.status.phase == "Running"
    assert [event.reason for event in life.events] == ["Running", "TrainerRestarting", "Running"]


def test_the_transition_time_moves_only_with_the_status(life):
    life.look(**all_ready())
    first = life.true()["Running"].last_transition_time
    life.look(**{"rollout-a": None})
    assert life.true()["Running"].last_transition_time == first
    again = life.look()
    assert again.status == life.look().status, "an unchanged world gives an unchanged status"


def test_conditions_speak_of_the_generation_that_was_looked_at(life):
    life.look()
    life.job.metadata.generation = 7
    made = life.look()
    assert {c.observed_generation for c in made.status.conditions} == {7} == {made.status.observed_generation}


def test_success_is_stored_before_the_workloads_go_and_the_ended_head_keeps_its_log(life):
    life.look(**all_ready())
    life.head_is("Complete")
    first = life.look()
    assert (first.status.phase, first.delete, first.requeue_after_seconds) == ("Succeeded", (), 0.0)
    second = life.look()
    assert {kind for kind, _ in second.delete} == {"StatefulSet", "Deployment"}
    assert HEAD in life.children
    third = life.look()
    assert (third.children, third.delete, third.events, third.status) == ((), (), (), second.status)


def test_an_end_is_never_taken_back(life):
    life.look(**all_ready())
    life.head_is("Complete")
    life.look()
    life.children.clear()
    life.job.spec.suspend = True
    life.look()
    assert life.job.status.phase == "Succeeded"
    assert not life.children, "a finished job makes no new head, though its Job is gone"


def test_a_users_mistake_fails_the_job_at_once_in_its_own_words(life):
    message = "INFO loading\nerror: data.train: no column named 'question'\nit has: prompt, answer"
    life.look(**all_ready() | {"head": pod("head", "gsm8k-head-1", ready=False, state=ended(78, message))})
    failed = life.true()["Failed"]
    assert failed.reason == "UserError"
    assert (
        failed.message == "head ended with exit code 78: data.train: no column named 'question'\nit has: prompt, answer"
    )


def test_a_reward_server_that_refuses_its_function_fails_the_job(life):
    crashed = pod(
        "reward", "r", ready=False, restarts=1, state={"waiting": {"reason": "CrashLoopBackOff"}}, last=ended(78)
    )
    life.look(**all_ready() | {"reward": crashed})
    message = life.true()["Failed"].message
    assert message.startswith("reward-correct ended with exit code 78")
    assert message.endswith("; fix spec.rewards[0].function"), "a traceback names no field of the job"


def test_a_failed_head_job_reports_the_last_pods_traceback(life):
    life.look(**all_ready())
    life.head_is("Failed", failed=7)
    trace = 'Traceback (most recent call last):\n  File "x.py"\nConnectionError: ray is gone\n'
    life.look(head=pod("head", "gsm8k-head-7", ready=False, state=ended(1, trace), phase="Failed"))
    failed = life.true()["Failed"]
    assert failed.reason == "HeadFailed"
    assert (
        failed.message == "head ended with exit code 1: ConnectionError: ray is gone (see the log of Pod gsm8k-head-7)"
    )
    assert life.job.status.roles[0].restarts == 6, "the seventh failure was not followed by a restart"


def test_a_role_that_restarts_more_often_than_its_limit_fails_the_job():
    life = Life(make_job(rollout={"replicas": 2, "backoffLimit": 3}))
    life.look(
        **all_ready() | {"rollout-a": pod("rollout", "a", restarts=2), "rollout-b": pod("rollout", "b", restarts=1)}
    )
    assert life.job.status.phase == "Running"
    life.look(**{"rollout-b": pod("rollout", "b", restarts=2, last=ended(137, reason="OOMKilled"))})
    failed = life.true()["Failed"]
    assert failed.reason == "BackoffLimitExceeded"
    assert failed.message == (
        "rollout was restarted 4 times, its backoffLimit is 3; last: rollout ended with exit code 137: OOMKilled "
        "(see the log of Pod b)"
    )


def test_trainers_that_rejoin_a_new_head_count_as_one_restart_of_the_group():
    life = Life(make_job(trainer={"replicas": 8, "backoffLimit": 2}))
    trainers = {f"t{i}": pod("trainer", f"gsm8k-trainer-{i}", restarts=1) for i in range(8)}
    life.look(**all_ready() | {"trainer": None} | trainers)
    assert {role.name: role.restarts for role in life.job.status.roles}["trainer"] == 1
    life.driver = DriverStatus(restarts={"trainer": 2})
    life.look()
    assert {role.name: role.restarts for role in life.job.status.roles}["trainer"] == 2


def test_restarts_do_not_shrink_when_a_pod_is_replaced_but_begin_anew_after_a_suspension(life):
    life.look(**all_ready() | {"rollout-a": pod("rollout", "a", restarts=4)})
    life.look(**{"rollout-a": pod("rollout", "c")})
    assert life.job.status.roles[2].restarts == 4
    life.job.spec.suspend = True
    life.pods.clear()
    life.look()
    assert life.job.status.roles[2].restarts == 4
    life.job.spec.suspend = False
    life.look()
    assert life.job.status.roles[2].restarts == 0


def test_suspending_removes_the_pods_alone_and_resuming_brings_them_back(life):
    life.look(**all_ready())
    token = life.children[ChildKey("Secret", "gsm8k-token")]["data"]
    life.job.spec.suspend = True
    made = life.look()
    assert {kind for kind, _ in made.delete} == {"Job", "StatefulSet", "Deployment"}
    assert (life.job.status.phase, life.job.status.start_time) == ("Suspended", None)
    life.job.spec.suspend = False
    life.pods.clear()
    life.look()
    assert HEAD in life.children
    assert life.children[ChildKey("Secret", "gsm8k-token")]["data"] == token
    assert life.job.status.phase == "Pending", "a resumed job starts; it does not restart"


def test_a_job_past_its_deadline_fails_and_a_suspension_stops_the_clock():
    life = Life(make_job(activeDeadlineSeconds=60))
    made = life.look(**all_ready())
    assert made.requeue_after_seconds == 10.0
    life.job.spec.suspend = True
    life.look()
    life.now += timedelta(hours=1)
    life.job.spec.suspend = False
    assert life.look().requeue_after_seconds == 10.0
    life.now += timedelta(seconds=55)
    assert life.look().requeue_after_seconds == 4.0
    life.now += timedelta(seconds=4)
    life.look()
    assert life.true()["Failed"].reason == "DeadlineExceeded"


def test_a_finished_job_is_deleted_when_its_time_is_over():
    life = Life(make_job(ttlSecondsAfterFinished=100))
    life.look(**all_ready())
    life.head_is("Complete")
    life.look()
    made = life.look()
    assert (made.delete_job, made.requeue_after_seconds) == (False, 99.0)
    life.now += timedelta(seconds=99)
    assert life.look().delete_job


def test_a_driver_that_does_not_answer_leaves_its_last_words(life):
    life.driver = DriverStatus(
        step=4, total_steps=10, phase="score", waits_for="12 rewards", weight_version=4, reward=0.5
    )
    life.look(**all_ready())
    life.driver = None
    life.look()
    progress = life.job.status.progress
    assert (progress.step, progress.phase, progress.waits_for, progress.reward) == (4, "score", "12 rewards", 0.5)


def test_a_head_that_has_ended_well_is_no_restart_while_its_job_is_not_yet_complete(life):
    life.look(**all_ready())
    life.look(head=pod("head", "gsm8k-head-1", ready=False, phase="Succeeded", state=ended(0)), trainer=None)
    assert life.job.status.phase == "Running"


def test_pods_of_an_earlier_job_or_under_deletion_say_nothing(life):
    earlier = pod("head", "old", state=ended(78), annotations={"rljob.dev/job-uid": "another"})
    leaving = pod("rollout", "leaving", state=ended(78), deletionTimestamp="2026-01-01T00:00:00Z")
    life.look(**all_ready(), old=earlier, leaving=leaving)
    assert life.job.status.phase == "Running"


def test_an_invalid_change_fails_loudly_touches_nothing_and_is_undone_by_its_repair(life):
    life.look(**all_ready())
    life.job.spec.rollout.template = {"containers": []}
    made = life.look()
    assert (made.children, made.delete) == ((), ())
    assert set(life.true()) == {"Failed", "Running"}, "its Pods do run on"
    life.job.spec.rollout.template = {}
    life.look()
    assert set(life.true()) == {"Running"}


def test_a_secret_that_was_deleted_comes_back_with_another_token_and_everything_restarts(life):
    life.look(**all_ready())
    del life.children[ChildKey("Secret", "gsm8k-token")]
    observed = ObservedState(life.children, tuple(life.pods.values()))
    made = plan_job(life.job, observed, life.now, new_token=lambda: "other")
    secret = next(child for child in made.children if child["kind"] == "Secret")
    assert base64.b64decode(secret["data"]["token"]) == b"other"
    assert made.delete == (HEAD,), "the driver must not go on with a token that nobody else has"


def test_a_failed_job_that_is_retried_begins_anew_once(life):
    life.look(**all_ready() | {"head": pod("head", "gsm8k-head-1", ready=False, state=ended(78, "error: x"))})
    assert life.job.status.phase == "Failed"
    life.job.metadata.annotations["rljob.dev/retry"] = "1"
    life.look()
    assert HEAD not in life.children
    assert life.job.status.phase == "Failed", "what failed is still there and would fail it again"
    life.pods.clear()
    life.look()
    assert (life.job.status.retried, life.job.status.phase, life.job.status.roles) == ("1", "Pending", [])
    assert life.events[-1].reason == "Retried"
    life.look(**all_ready())
    assert HEAD in life.children
    assert life.job.status.phase == "Running"
    life.head_is("Failed")
    life.look()
    life.look()
    assert life.job.status.phase == "Failed", "one value of the annotation is one retry"


def fail(life, code):
    life.look(**all_ready() | {"head": pod("head", "gsm8k-head-1", ready=False, state=ended(code, "error: x"))})
    if code != 78:
        life.head_is("Failed")
        life.look()
    life.look()
    assert life.job.status.phase == "Failed"
    life.pods.clear()


def change_spec(life):
    life.job.spec.rewards[0].function.inline = "def reward(): return 1.0"
    life.job.metadata.generation += 1


def test_a_users_mistake_is_undone_by_the_changed_spec_alone(life):
    fail(life, 78)
    life.look()
    assert life.job.status.phase == "Failed", "time alone mends nothing"
    change_spec(life)
    life.look()
    life.look()
    assert life.job.status.phase == "Pending"
    assert [event.message for event in life.events if event.reason == "Retried"] == [
        "its spec was changed: starts again from its last checkpoint; restarts count from zero"
    ]
    life.look(**all_ready())
    assert life.job.status.phase == "Running"


def test_a_job_that_failed_otherwise_is_no_users_mistake_and_waits_to_be_retried(life):
    fail(life, 1)
    change_spec(life)
    life.look()
    life.look()
    assert life.job.status.phase == "Failed"


def make_unbuildable(life):
    life.look(**all_ready())
    life.look()
    life.job.spec.head.template = {"spec": {"containers": "x"}}
    life.look()
    assert life.true()["Failed"].reason == "InvalidSpec"


def test_what_runs_of_an_earlier_spec_ends_as_any_job_though_the_new_one_cannot_be_built(life):
    make_unbuildable(life)
    assert "Running" in life.true(), "it is left alone"
    life.head_is("Complete")
    life.look()
    assert (life.job.status.phase, "Failed" in life.true()) == ("Succeeded", False)
    life.look()
    assert {key.kind for key in life.children} & {"StatefulSet", "Deployment"} == set(), "its nodes are free"


def test_a_job_that_cannot_be_built_gives_its_nodes_back_when_it_is_suspended(life):
    make_unbuildable(life)
    life.job.spec.suspend = True
    life.look()
    assert not any(key.kind in ("Job", "StatefulSet", "Deployment") for key in life.children)
    assert set(life.true()) == {"Failed"}
    before = life.job.status
    assert (life.look().delete, life.job.status) == ((), before), "a second look does nothing"


def test_another_mistake_in_a_spec_is_told_again(life):
    make_unbuildable(life)
    life.look()
    life.job.spec.head.template = {"spec": None}
    life.look()
    life.look()
    told = [event.message.split(" must")[0] for event in life.events if event.reason == "InvalidSpec"]
    assert told == ["spec.head.template.spec.containers", "spec.head.template.spec"]


def test_a_retry_that_is_asked_of_a_job_that_runs_is_not_kept_for_its_failure(life):
    life.look(**all_ready())
    life.job.metadata.annotations["rljob.dev/retry"] = "1"
    life.look()
    life.head_is("Failed")
    for _ in range(3):
        life.look()
    assert life.job.status.phase == "Failed"
    life.job.metadata.annotations["rljob.dev/retry"] = "2"
    life.look()
    life.pods.clear()
    life.look()
    assert life.job.status.phase == "Pending"
