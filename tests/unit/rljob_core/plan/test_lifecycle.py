"""The status of a job whose Pods wait, fail, restart and end."""

import base64
from datetime import timedelta

import pytest

from rljob_api.wire.driver_status import DriverProblem, DriverStatus, Learning
from rljob_core.backend import ChildKey, ObservedState
from rljob_core.plan import conditions
from rljob_core.plan.job import plan_job
from tests.support.job_simulation import START, JobSimulation, make_agent_job, make_job, make_program_job

HEAD = ChildKey("Job", "gsm8k-head")


def pod(
    role, name, *, ready=True, restarts=0, state=None, last=None, phase="Running", created=START, service="", **extra
):
    labels = {"rljob.dev/job": "gsm8k", "rljob.dev/role": role}
    if role in ("reward", "agent"):
        labels[f"rljob.dev/{role}"] = service or "correct"
    container = {"name": role, "restartCount": restarts, "state": state or {"running": {}}, "lastState": last or {}}
    status = {"phase": phase, "conditions": [{"type": "Ready", "status": str(ready)}], "containerStatuses": [container]}
    metadata = {"name": name, "labels": labels, "creationTimestamp": created.isoformat()}
    return {"kind": "Pod", "metadata": metadata | extra, "status": status}


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


def agent_ready():
    return all_ready() | {name: pod("agent", f"gsm8k-agent-{name}-a", service=name) for name in ("user", "calculator")}


class JobHistory(JobSimulation):
    """A simulation with two rollouts."""

    def __init__(self, make=make_job, **spec):
        super().__init__(make(**{"rollout": {"replicas": 2}} | spec))

    def head_is(self, type_, **status):
        self.children[HEAD] = self.children[HEAD] | {
            "status": {"conditions": [{"type": type_, "status": "True"}]} | status
        }

    def true(self):
        """Those that hold, but for those that follow from the phase."""
        follow = (conditions.READY, *conditions.ABNORMAL)
        return {c.type: c for c in self.job.status.conditions if c.status == "True" and c.type not in follow}


@pytest.fixture
def simulation():
    return JobHistory()


def test_job_whose_rollouts_share_the_trainer_runs_without_pods_of_theirs():
    simulation = JobHistory(rollout={"placement": "trainer"})
    pods = {name: found for name, found in all_ready().items() if "rollout" not in name}
    simulation.reconcile()
    simulation.reconcile(**pods)
    status = simulation.job.status
    assert (status.phase, status.rollouts, status.rollout_replicas, status.rollout_selector) == ("Running", "", 0, "")
    assert [role.name for role in status.roles] == ["head", "trainer", "reward-correct"]
    assert simulation.true()["Running"].message == "all Pods are ready"


def test_job_runs_when_the_needed_pods_of_each_role_are_ready(simulation):
    pods = all_ready()
    simulation.reconcile()
    assert simulation.job.status.phase == "Pending"
    simulation.reconcile(**{name: p for name, p in pods.items() if name not in ("rollout-a", "rollout-b")})
    assert simulation.job.status.phase == "Pending"
    simulation.reconcile(**{"rollout-a": pods["rollout-a"]})
    assert simulation.job.status.phase == "Running"
    assert "1 of 2 rollout Pods" in simulation.true()["Running"].message, "it says that one is still missing"


def test_waiting_job_names_the_pod_and_its_reason(simulation):
    stuck = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x"'}}
    pods = all_ready() | {"rollout-a": pod("rollout", "gsm8k-rollout-abc", ready=False, state=stuck)}
    simulation.reconcile(**pods)
    assert simulation.true()["Running"].message == (
        'waits for 1 of 2 rollout Pods: gsm8k-rollout-abc: ImagePullBackOff: Back-off pulling image "x"; '
        "rollout: image of the role cannot be pulled; "
        "correct spec.rollout.image, or name a Secret in spec.imagePullSecrets"
    )


def test_unscheduled_pod_reports_the_schedulers_message(simulation):
    unscheduled = pod("trainer", "gsm8k-trainer-0", phase="Pending")
    unscheduled["status"] = {
        "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/5 nodes"}]
    }
    simulation.reconcile(**all_ready() | {"trainer": unscheduled})
    message = conditions.find(simulation.job.status, "Running").message
    assert message == (
        "waits for 1 of 1 trainer Pod: gsm8k-trainer-0: Unschedulable: 0/5 nodes; trainer: 0/5 nodes; "
        "compare spec.trainer.nodePool (nodeSelector, tolerations) and spec.trainer.resources with the nodes"
    )


def test_lost_trainer_restarts_the_job_but_lost_rollout_does_not(simulation):
    simulation.reconcile(**all_ready())
    simulation.reconcile(**{"rollout-a": None})
    assert simulation.job.status.phase == "Running"
    simulation.reconcile(trainer=None)
    assert (simulation.job.status.phase, simulation.true()["Restarting"].reason) == ("Restarting", "TrainerRestarting")
    simulation.reconcile(trainer=pod("trainer", "gsm8k-trainer-0"))
    assert simulation.job.status.phase == "Running"
    reasons = [event.reason for event in simulation.events]
    assert reasons == ["Running", "TrainerRestarting", "Running"]


def test_transition_time_changes_only_with_the_status(simulation):
    simulation.reconcile(**all_ready())
    first = simulation.true()["Running"].last_transition_time
    simulation.reconcile(**{"rollout-a": None})
    assert simulation.true()["Running"].last_transition_time == first
    again = simulation.reconcile()
    assert again.status == simulation.reconcile().status, "unchanged observations give an unchanged status"


def test_conditions_have_the_observed_generation(simulation):
    simulation.reconcile()
    simulation.job.metadata.generation = 7
    made = simulation.reconcile()
    assert {c.observed_generation for c in made.status.conditions} == {7} == {made.status.observed_generation}


def test_success_is_stored_before_workloads_are_deleted_and_head_job_stays(simulation):
    simulation.reconcile(**all_ready())
    simulation.head_is("Complete")
    first = simulation.reconcile()
    assert (first.status.phase, first.delete, first.requeue_after_seconds) == ("Succeeded", (), 0.0)
    second = simulation.reconcile()
    assert {kind for kind, _ in second.delete} == {"StatefulSet", "Deployment"}
    assert HEAD in simulation.children
    third = simulation.reconcile()
    assert (third.children, third.delete, third.events, third.status) == ((), (), (), second.status)


def test_finished_job_stays_finished(simulation):
    simulation.reconcile(**all_ready())
    simulation.head_is("Complete")
    simulation.reconcile()
    simulation.children.clear()
    simulation.job.spec.suspend = True
    simulation.reconcile()
    assert simulation.job.status.phase == "Succeeded"
    assert not simulation.children, "a finished job creates no new head, even if its Job was deleted"


def test_user_error_fails_the_job_with_its_message(simulation):
    message = "INFO loading\nerror: data.train: no column named 'question'\nit has: prompt, answer"
    simulation.reconcile(**all_ready() | {"head": pod("head", "gsm8k-head-1", ready=False, state=ended(78, message))})
    failed = simulation.true()["Failed"]
    assert failed.reason == "UserError"
    assert failed.message == "head: data.train: no column named 'question'\nit has: prompt, answer"


def learning(is_learning, reason="NoAdvantages", message="since step 2 ..."):
    return DriverStatus(learning=Learning(is_learning=is_learning, reason=reason, message=message))


def test_job_reports_that_it_does_not_learn_until_it_does(simulation):
    simulation.driver = learning(None)
    simulation.reconcile(**all_ready())
    simulation.driver = learning(True)
    simulation.reconcile()
    assert conditions.find(simulation.job.status, "Learning") is None, "absent until it is False"
    simulation.driver = learning(False)
    simulation.reconcile()
    condition = conditions.find(simulation.job.status, "Learning")
    assert (condition.status, condition.reason, condition.message) == ("False", "NoAdvantages", "since step 2 ...")
    assert [e.type for e in simulation.events if e.reason == "NoAdvantages"] == ["Warning"]
    assert simulation.job.status.phase == "Running"
    for unknown in (None, learning(None), learning(False)):  # a driver that restarts
        simulation.driver = unknown
        simulation.reconcile()
        assert conditions.find(simulation.job.status, "Learning") == condition
    simulation.driver = learning(True, "AdvantagesFound", "")
    simulation.reconcile()
    assert conditions.find(simulation.job.status, "Learning").status == "True"
    assert [(e.type, e.reason) for e in simulation.events[-1:]] == [("Normal", "AdvantagesFound")]


@pytest.mark.parametrize("end", ["Complete", "Failed"])
def test_end_keeps_the_condition_learning(simulation, end):
    simulation.driver = learning(False)
    simulation.reconcile(**all_ready())
    simulation.driver = None
    simulation.head_is(end)
    simulation.reconcile()
    simulation.reconcile()
    assert simulation.job.status.phase in ("Succeeded", "Failed")
    assert conditions.find(simulation.job.status, "Learning").status == "False"


def test_damaged_checkpoint_is_one_event(simulation):
    problem = DriverProblem(
        reward="spec.checkpoint", reason="damaged", message="step-000004/driver.json has ...", step=2
    )
    simulation.driver = DriverStatus(problems=[problem])
    for _ in range(2):
        simulation.reconcile(**all_ready())
    assert [(event.type, event.message) for event in simulation.events if event.reason == "CheckpointDamaged"] == [
        ("Warning", "spec.checkpoint: damaged: step-000004/driver.json has ...")
    ]
    assert not [event for event in simulation.events if event.reason == "InvalidSamples"]


def test_each_kind_of_problem_of_a_reward_is_one_event(simulation):
    problem = DriverProblem(reward="correct", reason="exception", message="f.py:3: KeyError: 'a'", step=1)
    for count in (1, 40, 41):
        simulation.driver = DriverStatus(problems=[problem.model_copy(update={"count": count})])
        simulation.reconcile(**all_ready())
    other = DriverProblem(reward="style", reason="timeout", message="took 9 s", step=2)
    simulation.driver = DriverStatus(problems=[problem, other])
    simulation.reconcile()
    assert [event.message for event in simulation.events if event.reason == "InvalidSamples"] == [
        "reward correct: no valid score (exception): f.py:3: KeyError: 'a'",
        "reward style: no valid score (timeout): took 9 s",
    ]
    assert [p.reward for p in simulation.job.status.progress.problems] == ["correct", "style"]
    simulation.reconcile(1)
    assert simulation.writes == 0, "the count of a problem is not part of the status"


def test_invalid_reward_function_fails_the_job(simulation):
    crashed = pod(
        "reward", "r", ready=False, restarts=1, state={"waiting": {"reason": "CrashLoopBackOff"}}, last=ended(78)
    )
    simulation.reconcile(**all_ready() | {"reward": crashed})
    message = simulation.true()["Failed"].message
    assert message.startswith("reward-correct ended with exit code 78")
    assert message.endswith("; fix spec.rewards[0].function"), "a traceback does not name a field of the job"


def test_failed_head_job_reports_the_last_traceback(simulation):
    simulation.reconcile(**all_ready())
    simulation.head_is("Failed", failed=7)
    trace = 'Traceback (most recent call last):\n  File "x.py"\nConnectionError: ray has stopped\n'
    simulation.reconcile(head=pod("head", "gsm8k-head-7", ready=False, state=ended(1, trace), phase="Failed"))
    failed = simulation.true()["Failed"]
    assert failed.reason == "HeadFailed"
    assert (
        failed.message
        == "head ended with exit code 1: ConnectionError: ray has stopped (see the log of Pod gsm8k-head-7)"
    )
    assert simulation.job.status.roles[0].restarts == 6, "the seventh failure was not followed by a restart"


def test_exceeded_backoff_limit_fails_the_job():
    """test_failures.py has the failures that count."""
    simulation = JobHistory(rollout={"replicas": 2, "backoffLimit": 3})
    crashed = {"created": simulation.now, "last": ended(137, reason="OOMKilled")}
    pods = {"rollout-a": pod("rollout", "a", restarts=3, **crashed), "rollout-b": pod("rollout", "b", restarts=1)}
    simulation.reconcile(**all_ready() | pods)
    assert simulation.job.status.phase == "Running"
    simulation.reconcile(**{"rollout-b": pod("rollout", "b", restarts=4, **crashed)})
    failed = simulation.true()["Failed"]
    assert failed.reason == "BackoffLimitExceeded"
    assert failed.message == (
        "Pod b of rollout failed 4 times within 21600 s, and spec.rollout.backoffLimit is 3; "
        "last: exit code 137: OOMKilled (see the log of Pod b)"
    )


def test_trainers_that_rejoin_count_as_one_restart():
    simulation = JobHistory(trainer={"replicas": 8, "backoffLimit": 2})
    trainers = {f"t{i}": pod("trainer", f"gsm8k-trainer-{i}", restarts=1) for i in range(8)}
    simulation.reconcile(**all_ready() | {"trainer": None} | trainers)
    assert {role.name: role.restarts for role in simulation.job.status.roles}["trainer"] == 1
    simulation.driver = DriverStatus(restarts={"trainer": 2})
    simulation.reconcile()
    assert {role.name: role.restarts for role in simulation.job.status.roles}["trainer"] == 2


def test_restarts_never_decrease_except_after_a_suspension(simulation):
    simulation.reconcile(**all_ready() | {"rollout-a": pod("rollout", "a", restarts=4)})
    simulation.reconcile(**{"rollout-a": pod("rollout", "c")})
    assert simulation.job.status.roles[2].restarts == 4
    simulation.job.spec.suspend = True
    simulation.pods.clear()
    simulation.reconcile()
    assert simulation.job.status.roles[2].restarts == 4
    simulation.job.spec.suspend = False
    simulation.reconcile()
    assert simulation.job.status.roles[2].restarts == 0


def test_suspending_deletes_only_workloads_and_resuming_recreates_them(simulation):
    simulation.reconcile(**all_ready())
    token = simulation.children[ChildKey("Secret", "gsm8k-token")]["data"]
    simulation.job.spec.suspend = True
    made = simulation.reconcile()
    assert {kind for kind, _ in made.delete} == {"Job", "StatefulSet", "Deployment"}
    assert (simulation.job.status.phase, simulation.job.status.start_time) == ("Suspended", None)
    simulation.job.spec.suspend = False
    simulation.pods.clear()
    simulation.reconcile()
    assert HEAD in simulation.children
    assert simulation.children[ChildKey("Secret", "gsm8k-token")]["data"] == token
    assert simulation.job.status.phase == "Pending", "a resumed job starts; it does not restart"


def test_deadline_fails_a_running_job_and_suspension_resets_it():
    simulation = JobHistory(activeDeadlineSeconds=60)
    simulation.reconcile()
    simulation.reconcile(3600)
    assert simulation.job.status.phase == "Pending", "the deadline does not pass before it runs"
    made = simulation.reconcile(**all_ready())
    assert made.requeue_after_seconds == 10.0
    simulation.reconcile(50, trainer=None)
    assert simulation.job.status.phase == "Restarting"
    simulation.job.spec.suspend = True
    simulation.reconcile()
    simulation.now += timedelta(hours=1)
    simulation.job.spec.suspend = False
    assert simulation.reconcile(**all_ready()).requeue_after_seconds == 10.0
    made = simulation.reconcile(55)
    assert made.requeue_after_seconds == 5.0
    simulation.reconcile()
    assert made.valid_until == simulation.now + timedelta(seconds=4)
    simulation.reconcile(4, trainer=None)
    assert simulation.true()["Failed"].reason == "DeadlineExceeded"
    assert simulation.job.status.active_seconds == 60


def test_finished_job_is_deleted_after_its_ttl():
    simulation = JobHistory(ttlSecondsAfterFinished=100)
    simulation.reconcile(**all_ready())
    simulation.head_is("Complete")
    simulation.reconcile()
    made = simulation.reconcile()
    assert (made.delete_job, made.requeue_after_seconds) == (False, 99.0)
    simulation.now += timedelta(seconds=99)
    assert simulation.reconcile().delete_job


def test_progress_stays_when_the_driver_does_not_answer(simulation):
    simulation.driver = DriverStatus(
        step=4, total_steps=10, phase="score", waits_for="12 rewards", weight_version=4, reward=0.5
    )
    simulation.reconcile(**all_ready())
    simulation.driver = None
    simulation.reconcile()
    progress = simulation.job.status.progress
    assert (progress.step, progress.phase, progress.waits_for, progress.reward) == (4, "score", "12 rewards", 0.5)


def test_successful_head_is_not_a_restart_before_its_job_completes(simulation):
    simulation.reconcile(**all_ready())
    simulation.reconcile(head=pod("head", "gsm8k-head-1", ready=False, phase="Succeeded", state=ended(0)), trainer=None)
    assert simulation.job.status.phase == "Running"


def test_pods_of_an_earlier_job_or_being_deleted_are_ignored(simulation):
    earlier = pod("head", "old", state=ended(78), annotations={"rljob.dev/job-uid": "another"})
    leaving = pod("rollout", "leaving", state=ended(78), deletionTimestamp="2026-01-01T00:00:00Z")
    simulation.reconcile(**all_ready(), old=earlier, leaving=leaving)
    assert simulation.job.status.phase == "Running"


def test_invalid_change_fails_without_writes_and_recovers_when_fixed(simulation):
    simulation.reconcile(**all_ready())
    simulation.job.spec.rollout.template = {"containers": []}
    made = simulation.reconcile()
    assert (made.children, made.delete) == ((), ())
    assert set(simulation.true()) == {"Failed", "Running"}, "its Pods keep running"
    simulation.job.spec.rollout.template = {}
    simulation.reconcile()
    assert set(simulation.true()) == {"Running"}


def test_deleted_secret_gets_a_new_token_and_restarts_head_and_trainers(simulation):
    simulation.reconcile(**all_ready())
    del simulation.children[ChildKey("Secret", "gsm8k-token")]
    observed = ObservedState(simulation.children, tuple(simulation.pods.values()))
    made = plan_job(simulation.job, observed, simulation.now, new_token=lambda: "other")
    secret = next(child for child in made.children if child["kind"] == "Secret")
    assert base64.b64decode(secret["data"]["token"]) == b"other"
    expected = {HEAD, ChildKey("StatefulSet", "gsm8k-trainer")}
    assert set(made.delete) == expected, "neither must continue with an outdated token"


def test_retry_restarts_a_failed_job_once(simulation):
    simulation.reconcile(
        **all_ready() | {"head": pod("head", "gsm8k-head-1", ready=False, state=ended(78, "error: x"))}
    )
    assert simulation.job.status.phase == "Failed"
    simulation.job.metadata.annotations["rljob.dev/retry"] = "1"
    simulation.reconcile()
    assert HEAD not in simulation.children
    assert simulation.job.status.phase == "Failed", "what failed is still there and would fail it again"
    simulation.pods.clear()
    simulation.reconcile()
    assert (simulation.job.status.retried, simulation.job.status.phase, simulation.job.status.roles) == (
        "1",
        "Pending",
        [],
    )
    assert simulation.events[-1].reason == "Retried"
    simulation.reconcile(**all_ready())
    assert HEAD in simulation.children
    assert simulation.job.status.phase == "Running"
    simulation.head_is("Failed")
    simulation.reconcile()
    simulation.reconcile()
    assert simulation.job.status.phase == "Failed", "one value of the annotation is one retry"


def fail(simulation, code):
    simulation.reconcile(
        **all_ready() | {"head": pod("head", "gsm8k-head-1", ready=False, state=ended(code, "error: x"))}
    )
    if code != 78:
        simulation.head_is("Failed")
        simulation.reconcile()
    simulation.reconcile()
    assert simulation.job.status.phase == "Failed"
    simulation.pods.clear()


def change_spec(simulation):
    simulation.job.spec.rewards[0].function.inline = "def reward(): return 1.0"
    simulation.job.metadata.generation += 1


def test_user_error_recovers_when_the_spec_changes(simulation):
    fail(simulation, 78)
    simulation.reconcile()
    assert simulation.job.status.phase == "Failed", "time alone fixes nothing"
    change_spec(simulation)
    simulation.reconcile()
    simulation.reconcile()
    assert simulation.job.status.phase == "Pending"
    assert [event.message for event in simulation.events if event.reason == "Retried"] == [
        "its spec was changed: starts again from its last checkpoint; restarts count from zero"
    ]
    simulation.reconcile(**all_ready())
    assert simulation.job.status.phase == "Running"


def test_other_failure_needs_a_retry_after_the_spec_changes(simulation):
    fail(simulation, 1)
    change_spec(simulation)
    simulation.reconcile()
    simulation.reconcile()
    assert simulation.job.status.phase == "Failed"


def make_unbuildable(simulation):
    simulation.reconcile(**all_ready())
    simulation.reconcile()
    simulation.job.spec.head.template = {"spec": {"containers": "x"}}
    simulation.reconcile()
    assert simulation.true()["Failed"].reason == "InvalidSpec"


def test_workloads_of_an_earlier_spec_may_succeed_while_the_spec_is_invalid(simulation):
    make_unbuildable(simulation)
    assert "Running" in simulation.true(), "its Pods keep running"
    simulation.head_is("Complete")
    simulation.reconcile()
    assert (simulation.job.status.phase, "Failed" in simulation.true()) == ("Succeeded", False)
    simulation.reconcile()
    assert {key.kind for key in simulation.children} & {"StatefulSet", "Deployment"} == set(), "its nodes are released"


def test_suspended_invalid_job_deletes_its_workloads(simulation):
    make_unbuildable(simulation)
    simulation.job.spec.suspend = True
    simulation.reconcile()
    assert not any(key.kind in ("Job", "StatefulSet", "Deployment") for key in simulation.children)
    assert set(simulation.true()) == {"Failed"}
    before = simulation.job.status
    assert (simulation.reconcile().delete, simulation.job.status) == ((), before), "a second reconcile does nothing"


def test_new_spec_error_emits_a_new_event(simulation):
    make_unbuildable(simulation)
    simulation.reconcile()
    simulation.job.spec.head.template = {"spec": None}
    simulation.reconcile()
    simulation.reconcile()
    reported = [event.message.split(" must")[0] for event in simulation.events if event.reason == "InvalidSpec"]
    assert reported == ["spec.head.template.spec.containers", "spec.head.template.spec"]


def test_retry_of_a_running_job_has_no_effect_after_it_fails(simulation):
    simulation.reconcile(**all_ready())
    simulation.job.metadata.annotations["rljob.dev/retry"] = "1"
    simulation.reconcile()
    simulation.head_is("Failed")
    for _ in range(3):
        simulation.reconcile()
    assert simulation.job.status.phase == "Failed"
    simulation.job.metadata.annotations["rljob.dev/retry"] = "2"
    simulation.reconcile()
    simulation.pods.clear()
    simulation.reconcile()
    assert simulation.job.status.phase == "Pending"


@pytest.fixture
def agent_job():
    return JobHistory(make_agent_job)


@pytest.mark.parametrize("service", ["user", "calculator"])
def test_job_waits_for_its_user_and_its_tools(agent_job, service):
    pods = agent_ready()
    agent_job.reconcile(**{name: p for name, p in pods.items() if name != service})
    assert agent_job.job.status.phase == "Pending"
    running = next(c for c in agent_job.job.status.conditions if c.type == "Running")
    assert f"waits for 1 of 1 agent-{service} Pod" in running.message
    agent_job.reconcile(**{service: pods[service]})
    assert agent_job.job.status.phase == "Running"
    assert [role.name for role in agent_job.job.status.roles][-2:] == ["agent-user", "agent-calculator"]
    assert agent_job.job.status.rewards == "1/1", "an agent's Pods do not count as rewards"
    agent_job.reconcile(**{service: pods[service] | {"status": {"phase": "Running"}}})
    assert agent_job.true()["Restarting"].reason == "AgentRestarting"


def test_job_without_rewards_waits_for_its_runner_and_shows_no_rewards():
    job = JobHistory(make_program_job)
    pods = {name: each for name, each in all_ready().items() if name != "reward"}
    job.reconcile(**pods)
    running = next(c for c in job.job.status.conditions if c.type == "Running")
    assert "waits for 1 of 1 agent-runner Pod" in running.message
    job.reconcile(runner=pod("agent", "gsm8k-agent-runner-a", service="runner"))
    assert (job.job.status.phase, job.job.status.rewards) == ("Running", "")
    assert [role.name for role in job.job.status.roles] == ["head", "trainer", "rollout", "agent-runner"]


@pytest.mark.parametrize(
    ("agent", "field"),
    [
        ({"type": "program", "runner": {"function": {"inline": "x"}}}, "spec.agent.runner.function"),
        ({"type": "program", "runner": {"command": ["agent"]}}, "spec.agent.runner.command"),
        ({"type": "environment", "environment": {"framework": "trl", "id": "a:B"}}, "spec.agent.environment"),
    ],
)
def test_runner_that_cannot_start_fails_the_job_with_its_field(agent, field):
    job = JobHistory(make_program_job, agent=agent)
    broken = pod("agent", "gsm8k-agent-runner-a", service="runner", ready=False, state=ended(78, "error: not found"))
    job.reconcile(**all_ready() | {"runner": broken})
    assert job.true()["Failed"].message.endswith(f"not found; fix {field}")


def test_failures_of_an_agents_pods_count_per_pod(agent_job):
    for number in range(8):
        last = ended(1, "boom", reason="Error")
        last["terminated"]["finishedAt"] = f"2026-01-01T00:00:{number:02}Z"
        user = pod("agent", "gsm8k-agent-user-a", service="user", restarts=number, last=last if number else None)
        agent_job.reconcile(**agent_ready() | {"user": user})
    failed = agent_job.true()["Failed"]
    assert failed.reason == "BackoffLimitExceeded"
    assert "Pod gsm8k-agent-user-a of agent-user failed 7 times" in failed.message
    assert "spec.agent.user.backoffLimit is 6" in failed.message
    restarts = {role.name: role.restarts for role in agent_job.job.status.roles}
    assert (restarts["agent-user"], restarts["agent-calculator"]) == (7, 0)


def test_tool_that_cannot_start_fails_the_job_with_its_field(agent_job):
    state = ended(78, "error: calculator.py:1: add(a): the parameter a has no type")
    tool = pod("agent", "gsm8k-agent-calculator-a", service="calculator", ready=False, state=state)
    agent_job.reconcile(**agent_ready() | {"calculator": tool})
    failed = agent_job.true()["Failed"]
    assert failed.reason == "UserError"
    assert failed.message.startswith("agent-calculator: calculator.py:1:")
    assert "fix spec.agent.tools[0].function" in failed.message


def test_end_of_the_job_deletes_the_agents_workloads(agent_job):
    agent_job.reconcile(**agent_ready())
    assert ChildKey("Deployment", "gsm8k-agent-user") in agent_job.children
    agent_job.head_is("Complete")
    agent_job.reconcile()
    agent_job.reconcile()
    assert agent_job.job.status.phase == "Succeeded"
    assert {key.kind for key in agent_job.children} & {"StatefulSet", "Deployment"} == set()
