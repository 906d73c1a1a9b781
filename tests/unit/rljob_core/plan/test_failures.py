"""Which failures count against backoffLimit, for how long, and against whose."""

from datetime import timedelta

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.status import MAX_FAILING_PODS, MAX_FAILURE_TIMES, RoleStatus
from rljob_api.wire.driver_status import DriverStatus, RankFailures
from rljob_core.backend import ChildKey, ObservedState
from rljob_core.plan.failures import count_charged, count_failures
from rljob_core.plan.lifecycle import decide_lifecycle
from rljob_core.plan.observed_job import RoleView, observe_job
from tests.support.job_simulation import START, JobSimulation, make_job

WINDOW = timedelta(seconds=21600)


def timestamp(moment):
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


class Cluster(JobSimulation):
    """A job whose Pods fail and are replaced. Each has one container, as far as its test does not add others."""

    def __init__(self, **spec):
        super().__init__(make_job(**spec))
        for role, name in (("head", "h-0"), ("trainer", "t-0"), ("rollout", "r-0"), ("reward", "w-0")):
            self.start(role, name)
        self.reconcile()

    def start(self, role, name, created=None, **status):
        """Create a Pod, or replace the one of this name."""
        labels = {"rljob.dev/job": "gsm8k", "rljob.dev/role": role}
        if role == "reward":
            labels["rljob.dev/reward"] = "correct"
        container = {"name": role, "restartCount": 0, "state": {"running": {}}, "lastState": {}}
        status = {"conditions": [{"type": "Ready", "status": "True"}], "containerStatuses": [container]} | status
        metadata = {"name": name, "labels": labels, "creationTimestamp": timestamp(created or self.now)}
        self.pods[name] = {"kind": "Pod", "metadata": metadata, "status": {"phase": "Running"} | status}

    def container(self, name, container=0):
        return self.pods[name]["status"]["containerStatuses"][container]

    def crash(self, name, times=1, code=137, reason="OOMKilled", at=None, container=0, after=1):
        """The kubelet has restarted the container so many times. The operator sees it `after` seconds."""
        self.now += timedelta(seconds=after)
        end = {"exitCode": code, "reason": reason, "message": "", "finishedAt": timestamp(at or self.now)}
        status = self.container(name, container)
        status["restartCount"] += times
        status["lastState"] = {"terminated": end}
        return self.reconcile(0)

    def end_head(self, code=1, container_reason="Error", after=20, **status):
        """The head's Pod fails, and its Job starts another."""
        self.now += timedelta(seconds=after)
        self.driver = None
        old = next(name for name, pod in self.pods.items() if pod["status"].get("phase") == "Running" and "h-" in name)
        end = {"exitCode": code, "reason": container_reason, "message": "error: ray", "finishedAt": timestamp(self.now)}
        state = {"name": "head", "restartCount": 0, "state": {"terminated": end}, "lastState": {}}
        self.pods[old]["status"] |= {"phase": "Failed", "containerStatuses": [state]} | status
        self.start("head", f"h-{len(self.pods)}-{self.now:%H%M%S}")
        return self.reconcile(1)

    def record(self, role):
        return next(r.failures for r in self.job.status.roles if r.name == role)

    def charged(self, role):
        index = ("head", "trainer", "rollout", "reward-correct").index(role)
        spec = (self.job.spec.head, self.job.spec.trainer, self.job.spec.rollout, self.job.spec.rewards[0])[index]
        view = RoleView(role, role.partition("-")[0], f"spec.{role}", spec, 1, ())
        return count_charged(view, self.record(role), self.now)[0]

    @property
    def failed(self):
        return next((c for c in self.job.status.conditions if c.type == "Failed" and c.status == "True"), None)


class Counts(Cluster):
    """The same without the rest of the plan, for long histories."""

    decision = None

    def reconcile(self, seconds=1, **pods):
        self.now += timedelta(seconds=seconds)
        observed = observe_job(self.job, ObservedState(pods=tuple(self.pods.values()), driver=self.driver))
        failures = count_failures(observed, self.now)
        if not self.failed:  # a job that has failed stays so
            self.decision = decide_lifecycle(observed, failures, self.now)
        roles = [RoleStatus(name=name, failures=found) for name, found in failures.items()]
        status = self.job.status.model_copy(update={"roles": roles})
        self.job = self.job.model_copy(update={"status": status})

    @property
    def failed(self):
        return self.decision if self.decision and self.decision.state == "failed" else None


@pytest.fixture
def cluster():
    return Cluster()


def test_seventh_failure_of_one_pod_within_the_window_fails_the_job(cluster):
    for _ in range(6):
        cluster.crash("r-0")
    assert cluster.failed is None
    cluster.crash("r-0")
    assert cluster.failed.reason == "BackoffLimitExceeded"
    assert cluster.failed.message == (
        "Pod r-0 of rollout failed 7 times within 21600 s, and spec.rollout.backoffLimit is 6; "
        "last: exit code 137: OOMKilled (see the log of Pod r-0)"
    )
    assert {key.kind for key in cluster.reconcile().delete} == {"Job", "StatefulSet", "Deployment"}


def test_single_restarts_in_a_large_fleet_are_not_added_up():
    cluster = Counts(rollout={"replicas": 64})
    for number in range(64):
        cluster.start("rollout", f"r-{number}", START - timedelta(days=1))
    for number in range(64):
        cluster.crash(f"r-{number}")
    assert cluster.failed is None
    assert cluster.charged("rollout") == 1
    assert len(cluster.record("rollout")) == MAX_FAILING_PODS, "the record is bounded"
    for _ in range(6):
        cluster.crash("r-63")
    assert cluster.failed, "the one that fails most is recorded, also if its name sorts last"


def test_restarts_spread_over_weeks_are_not_added_up(cluster):
    for _ in range(50):
        cluster.crash("r-0", after=WINDOW.total_seconds() / 6)
        assert len(cluster.record("rollout")[0].times) <= 7, "what is older is dropped"
    assert cluster.failed is None
    assert {role.name: role.restarts for role in cluster.job.status.roles}["rollout"] == 50


def test_time_alone_writes_nothing(cluster):
    cluster.crash("r-0")
    cluster.reconcile()
    for hours in (1, 5, 1, 200):
        cluster.reconcile(hours * 3600)
        assert cluster.writes == 0


def test_pod_with_old_restarts_is_not_charged_by_a_new_operator_and_status(cluster):
    """The status of an earlier version has no record, and a record may have been dropped."""
    cluster.start("rollout", "r-0", START - timedelta(days=30))
    cluster.crash("r-0", times=40, at=START - timedelta(days=1))
    assert cluster.charged("rollout") == 0
    cluster.crash("r-0")
    assert cluster.charged("rollout") == 1, "all that is known of this Pod is its last restart"


def test_crash_loop_is_counted_completely_if_the_operator_was_away(cluster):
    cluster.start("rollout", "r-0")
    cluster.crash("r-0", times=7, after=900)
    assert cluster.failed


def test_restarted_operator_neither_loses_nor_repeats_a_count(cluster):
    cluster.crash("r-0", times=3)
    cluster.job = RLJob.model_validate(cluster.job.to_manifest())
    cluster.reconcile()
    assert cluster.charged("rollout") == 3
    assert cluster.writes == 0


@pytest.mark.parametrize("is_init", [False, True])
@pytest.mark.parametrize("code", [1, 78])
def test_containers_of_others_are_neither_charged_nor_a_user_error(cluster, is_init, code):
    for name in ("t-0", "r-0", "w-0"):
        foreign = {"name": "istio-proxy", "restartCount": 0, "state": {"running": {}}, "lastState": {}}
        status = cluster.pods[name]["status"]
        if is_init:
            status["initContainerStatuses"] = [foreign]
        else:
            status["containerStatuses"].append(foreign)
        foreign["restartCount"] = 40
        foreign["lastState"] = {
            "terminated": {"exitCode": code, "reason": "Error", "finishedAt": timestamp(cluster.now)}
        }
        cluster.reconcile()
    assert cluster.failed is None
    assert [role.restarts for role in cluster.job.status.roles] == [0, 0, 0, 0]
    assert [event.reason for event in cluster.events] == ["Running"]


@pytest.mark.parametrize("code", [0, 1])
def test_vllm_sidecar_of_a_reward_is_charged(cluster, code):
    """vLLM's own server ends with 0 when its engine has died."""
    sidecar = {"name": "vllm", "restartCount": 0, "state": {"running": {}}, "lastState": {}}
    cluster.pods["w-0"]["status"]["initContainerStatuses"] = [sidecar]
    sidecar["restartCount"] = 7
    sidecar["lastState"] = {"terminated": {"exitCode": code, "reason": "Error", "finishedAt": timestamp(cluster.now)}}
    cluster.reconcile()
    assert "Pod w-0 of reward-correct failed 7 times" in cluster.failed.message


def test_user_error_of_an_own_container_fails_the_job_at_once(cluster):
    cluster.crash("r-0", code=78, reason="Error")
    assert cluster.failed.reason == "UserError"


@pytest.mark.parametrize(("reason", "code"), [("Unknown", 255), ("ContainerStatusUnknown", 137)])
def test_container_whose_node_rebooted_is_not_charged(cluster, reason, code):
    for _ in range(20):
        cluster.crash("r-0", code=code, reason=reason)
    assert (cluster.charged("rollout"), cluster.failed) == (0, None)
    for _ in range(6):
        cluster.crash("r-0")
    assert (cluster.charged("rollout"), cluster.failed) == (6, None), "a reboot does not hide failures, nor add to them"
    cluster.crash("r-0")
    assert cluster.failed


@pytest.mark.parametrize("code", [0, 143])
def test_server_that_was_told_to_end_is_not_charged(cluster, code):
    """By an administrator, a node that shuts down, a probe. A hanging one does not hear it and ends as SIGKILL."""
    cluster.events.clear()
    for _ in range(20):
        cluster.crash("r-0", code=code, reason="Completed" if code == 0 else "Error")
        cluster.crash("w-0", code=code, reason="Completed" if code == 0 else "Error")
    assert cluster.failed is None
    assert (cluster.charged("rollout"), cluster.charged("reward-correct")) == (0, 0)
    assert f"rollout restarted: ended on SIGTERM (exit code {code}); does not count" in cluster.events[0].message
    cluster.crash("r-0", code=137)
    assert cluster.charged("rollout") == 1


@pytest.mark.parametrize("type_", ["DisruptionTarget", "TerminationTarget"])
def test_restart_of_a_pod_that_is_about_to_be_evicted_is_not_charged(cluster, type_):
    cluster.pods["r-0"]["status"]["conditions"].append({"type": type_, "status": "True", "reason": "Who"})
    cluster.crash("r-0")
    assert cluster.charged("rollout") == 0


def test_pods_that_are_deleted_and_replaced_are_not_charged(cluster):
    """What a drain, `rljob restart`, a changed template and a lost node have in common."""
    for _ in range(20):
        cluster.crash("r-0")
        cluster.pods["r-0"]["metadata"]["deletionTimestamp"] = timestamp(cluster.now)
        cluster.container("r-0")["restartCount"] += 5
        cluster.reconcile()
        cluster.start("rollout", "r-0")
        cluster.reconcile()
    assert cluster.failed is None, "each of these Pods has failed once"


def test_suspension_and_retry_reset_the_counts(cluster):
    cluster.crash("r-0", times=6)
    cluster.job.spec.suspend = True
    del cluster.pods["r-0"]
    cluster.reconcile()
    cluster.job.spec.suspend = False
    cluster.reconcile()
    assert cluster.record("rollout") == []
    cluster.start("rollout", "r-0")
    cluster.crash("r-0", times=6)
    assert cluster.failed is None
    cluster.crash("r-0")
    cluster.job.metadata.annotations["rljob.dev/retry"] = "1"
    cluster.reconcile()
    cluster.pods.clear()
    cluster.reconcile()
    assert (cluster.failed, cluster.job.status.roles) == (None, [])


def test_trainers_that_fail_together_are_one_failure_of_the_group():
    cluster = Cluster(trainer={"replicas": 8})
    for number in range(8):
        cluster.start("trainer", f"t-{number}")
    for _ in range(3):
        for number in range(8):
            cluster.crash(f"t-{number}", after=5)
        cluster.reconcile(600)
    assert cluster.charged("trainer") == 3


def test_trainers_that_fail_in_turn_are_failures_of_the_group():
    cluster = Cluster(trainer={"replicas": 4})
    for number in range(4):
        cluster.start("trainer", f"t-{number}")
    for number in range(7):
        cluster.crash(f"t-{number % 4}", after=120)
    assert cluster.failed.message == (
        "the trainers failed 7 times within 21600 s, and spec.trainer.backoffLimit is 6; "
        "last: exit code 137: OOMKilled (see the log of Pod t-2)"
    )


def report(cluster, count, restarts=None, after=120):
    ranks = RankFailures(count=count, last="a trainer rank died (update): killed")
    cluster.driver = DriverStatus(restarts={"trainer": restarts or count}, rank_failures=ranks)
    cluster.reconcile(after)


def test_failed_ranks_are_charged_to_the_trainers(cluster):
    for count in range(1, 7):
        report(cluster, count)
    assert cluster.failed is None
    report(cluster, 7)
    assert cluster.failed.reason == "BackoffLimitExceeded"
    assert "the trainers failed 7 times" in cluster.failed.message
    assert "last: a trainer rank died (update): killed (see the log of Pod h-0)" in cluster.failed.message


def test_trainer_groups_that_lost_a_node_are_not_charged(cluster):
    for restarts in range(1, 50):
        report(cluster, 0, restarts)
    assert (cluster.failed, cluster.charged("trainer")) == (None, 0)
    assert cluster.job.status.roles[1].restarts == 49, "the total includes all"


def test_container_and_rank_that_fail_together_are_charged_once(cluster):
    cluster.crash("t-0")
    report(cluster, 1, after=10)
    assert cluster.charged("trainer") == 1


def test_count_of_a_driver_is_not_charged_again_after_the_window(cluster):
    report(cluster, 3)
    cluster.reconcile(2 * WINDOW.total_seconds())
    assert cluster.charged("trainer") == 0
    report(cluster, 4)
    cluster.crash("t-0", after=2 * WINDOW.total_seconds())
    cluster.crash("t-0", after=120)
    assert cluster.charged("trainer") == 2
    cluster.end_head()
    report(cluster, 1)
    assert cluster.charged("trainer") == 3, "a new driver counts from zero"


def test_seventh_failure_of_the_head_fails_the_job_and_keeps_its_job_suspended(cluster):
    for _ in range(6):
        cluster.end_head()
    assert cluster.failed is None
    made = cluster.end_head()
    assert cluster.failed.reason == "HeadFailed"
    assert cluster.failed.message == (
        "the head failed 7 times within 21600 s, and spec.head.backoffLimit is 6; "
        f"last: exit code 1: ray (see the log of Pod {cluster.record('head')[0].pod})"
    )
    assert made.delete == ()
    made = cluster.reconcile()
    assert {key.kind for key in made.delete} == {"StatefulSet", "Deployment"}
    (head,) = made.children
    assert (head["kind"], head["spec"]["suspend"]) == ("Job", True), "it starts no Pod, and its Pods keep their logs"
    cluster.reconcile()
    assert cluster.writes == 0
    cluster.job.metadata.annotations["rljob.dev/retry"] = "1"
    cluster.reconcile()
    assert ChildKey("Job", "gsm8k-head") not in cluster.children, "a retry starts a new one"


def test_failures_of_the_head_are_kept_when_its_pods_are_deleted(cluster):
    for _ in range(6):
        cluster.end_head()
        for name in [name for name, pod in cluster.pods.items() if pod["status"]["phase"] == "Failed"]:
            del cluster.pods[name]
        cluster.reconcile()
    assert cluster.charged("head") == 6


@pytest.mark.parametrize(
    "end",
    [
        {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]},
        {"conditions": [{"type": "TerminationTarget", "status": "True", "reason": "WorkloadEvictedDueToPreempted"}]},
        {"reason": "OutOfcpu", "containerStatuses": []},
        {"reason": "Terminated"},
        {"code": 255, "container_reason": "Unknown"},
        {"code": 0, "container_reason": "Completed"},  # another container of the Pod failed
    ],
    ids=str,
)
def test_head_that_is_evicted_refused_or_lost_is_not_charged(cluster, end):
    for _ in range(20):
        cluster.end_head(**end)
    assert (cluster.failed, cluster.charged("head")) == (None, 0)


def test_head_that_failed_before_its_container_ran_is_charged(cluster):
    for _ in range(7):
        cluster.end_head(containerStatuses=[{"name": "head", "state": {"waiting": {"reason": "PodInitializing"}}}])
    assert "last: ended before its container ran" in cluster.failed.message


@pytest.mark.parametrize("step", [timedelta(days=-1), timedelta(days=1)])
def test_clock_that_steps_neither_repeats_nor_keeps_failures_forever(cluster, step):
    cluster.crash("r-0", times=3)
    cluster.now += step
    cluster.reconcile()
    assert cluster.charged("rollout") <= 3
    for _ in range(20):
        cluster.crash("r-0", after=WINDOW.total_seconds())
    assert (cluster.charged("rollout"), cluster.failed) == (1, None)


def test_clock_of_a_node_that_is_ahead_does_not_extend_the_window(cluster):
    cluster.crash("r-0", at=cluster.now + timedelta(days=3))
    cluster.now += WINDOW
    assert cluster.charged("rollout") == 0


def test_clock_of_a_node_that_is_behind_hides_no_failure(cluster):
    for _ in range(7):
        cluster.crash("r-0", at=cluster.now - timedelta(days=3))
    assert cluster.failed


def test_longest_delays_of_kubernetes_fit_into_the_window():
    """Else a container that always fails might never exceed the limit."""
    for limit, given, seconds in ((6, 4200, 4200), (6, None, 21600), (100, None, 60_600), (100, 70_000, 70_000)):
        role = make_job(rollout={"backoffLimit": limit, "backoffWindowSeconds": given}).spec.rollout
        assert role.backoff_window.total_seconds() == seconds >= 600 * (limit + 1)


def test_high_limit_is_counted_with_a_bounded_record():
    cluster = Counts(rollout={"replicas": 1, "backoffLimit": 500})
    for number in range(501):
        assert cluster.failed is None, number
        cluster.crash("r-0", after=300)
        assert len(cluster.record("rollout")[0].times) <= MAX_FAILURE_TIMES
    assert cluster.failed


def test_each_restart_is_an_event_that_names_its_cause(cluster):
    cluster.events.clear()
    cluster.crash("r-0")
    cluster.crash("r-0", code=255, reason="Unknown")
    report(cluster, 0, restarts=1)
    cluster.end_head()
    head = ChildKey("Job", "gsm8k-head")
    cluster.children[head] = cluster.children[head] | {"status": {"failed": 1}}
    cluster.reconcile()
    assert cluster.job.status.roles[0].restarts == 1, "its Job counts later"
    assert [(e.type, e.reason, e.message) for e in cluster.events if e.reason == "RoleRestarted"] == [
        (
            "Warning",
            "RoleRestarted",
            "rollout restarted: exit code 137: OOMKilled; counts against backoffLimit (Pods: r-0)",
        ),
        ("Normal", "RoleRestarted", "rollout restarted: Unknown; does not count against backoffLimit (Pods: r-0)"),
        (
            "Normal",
            "RoleRestarted",
            "trainer restarted, but its containers did not fail; does not count against backoffLimit",
        ),
        ("Warning", "RoleRestarted", "head restarted: exit code 1: ray; counts against backoffLimit (Pods: h-0)"),
    ]


def test_failure_that_ends_the_job_is_not_a_restart(cluster):
    cluster.events.clear()
    cluster.end_head(code=78)
    cluster.reconcile()
    assert cluster.failed
    assert [event.reason for event in cluster.events] == ["UserError"]


def test_many_pods_that_restart_at_once_are_one_event():
    cluster = Cluster(rollout={"replicas": 64})
    for number in range(64):
        cluster.start("rollout", f"r-{number:02}")
        cluster.container(f"r-{number:02}")["restartCount"] = 1
        end = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": timestamp(cluster.now)}
        cluster.container(f"r-{number:02}")["lastState"] = {"terminated": end}
    cluster.events.clear()
    cluster.reconcile()
    cluster.reconcile()
    (event,) = [event for event in cluster.events if event.reason == "RoleRestarted"]
    assert event.message.endswith("(Pods: r-00, r-01, r-02 and 29 more)")


class Machine(RuleBasedStateMachine):
    """Rollouts that fail, are evicted, lose their nodes and are replaced, while time passes."""

    NAMES = ("r-0", "r-1", "r-2")

    @initialize(limit=st.integers(0, 5))
    def start(self, limit):
        self.limit = limit
        self.cluster = Counts(rollout={"replicas": 3, "backoffLimit": limit, "backoffWindowSeconds": 21600})
        self.window = self.cluster.job.spec.rollout.backoff_window
        for name in self.NAMES:
            self.cluster.start("rollout", name)
        self.ends = {name: [] for name in self.NAMES}
        self.must_fail = False

    def _end(self, name, **how):
        if self.cluster.failed is None:
            self.cluster.crash(name, **how)

    @rule(name=st.sampled_from(NAMES), times=st.integers(1, 3), after=st.sampled_from([1, 40, 3000, 20000]))
    def crash(self, name, times, after):
        if self.cluster.failed is None:
            if not self.ends[name]:
                times = 1  # of more between two reconciles, only the last is known to be recent
            self.cluster.crash(name, times=times, after=after)
            self.ends[name] += [self.cluster.now] * times
            recent = [end for end in self.ends[name] if self.cluster.now - end < self.window]
            self.must_fail |= len(recent) > self.limit

    @rule(name=st.sampled_from(NAMES))
    def reboot_the_node(self, name):
        self._end(name, code=255, reason="Unknown")

    @rule(name=st.sampled_from(NAMES), restarts=st.integers(0, 9))
    def evict(self, name, restarts):
        """The Pod's containers end while it is deleted. It is seen, or not, before it is replaced."""
        if self.cluster.failed is None:
            self.cluster.container(name)["restartCount"] += restarts
            self.cluster.pods[name]["metadata"]["deletionTimestamp"] = timestamp(self.cluster.now)
            if restarts % 2:
                self.cluster.reconcile()
            self.cluster.now += timedelta(seconds=1)
            self.cluster.start("rollout", name)
            self.ends[name] = []

    @rule(seconds=st.sampled_from([1, 600, 7200, 30000]))
    def wait(self, seconds):
        self.cluster.reconcile(seconds)

    @rule()
    def restart_the_operator(self):
        self.cluster.job = RLJob.model_validate(self.cluster.job.to_manifest())
        self.cluster.reconcile()

    @invariant()
    def fails_exactly_if_one_pod_exceeds_the_limit_within_a_window(self):
        if hasattr(self, "cluster"):
            assert bool(self.cluster.failed) == self.must_fail


TestMachine = Machine.TestCase
