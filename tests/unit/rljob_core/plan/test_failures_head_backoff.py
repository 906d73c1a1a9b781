"""The delay before the head's next Pod follows the failures within the window, not those of the run's whole life."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from rljob_api.wire.driver_status import DriverStatus
from rljob_core.backend import ChildKey
from rljob_core.children import keep
from tests.unit.rljob_core.plan.test_failures import WINDOW, Cluster, timestamp

JOB = ChildKey("Job", "gsm8k-head")


class HeadCluster(Cluster):
    """Its head's Job counts failed Pods, as Kubernetes' controller does, and starts the next one when told."""

    num_failed = 0
    message = "error: ray"

    def fail(self, after=20):
        """The running Pod of the head fails. Return the plan."""
        self.now += timedelta(seconds=after)
        pod = next(pod for pod in self.heads() if pod["status"]["phase"] == "Running")
        end = {"exitCode": 1, "reason": "Error", "message": self.message, "finishedAt": timestamp(self.now)}
        end["startedAt"] = pod["metadata"]["creationTimestamp"]
        status = {"name": "head", "restartCount": 0, "state": {"terminated": end}, "lastState": {}}
        pod["status"] |= {"phase": "Failed", "containerStatuses": [status]}
        self.num_failed += 1
        return self.count()

    def train(self, step, after=20):
        """The driver reports a step that has just ended, and then answers no more."""
        self.now += timedelta(seconds=after)
        self.driver = DriverStatus(run_id="r", step=step, total_steps=100, phase="update", since_step_seconds=0.0)
        self.reconcile(0)
        self.driver = None

    def heads(self):
        return [pod for name, pod in self.pods.items() if name.startswith("h-")]

    def count(self):
        self.children[JOB] = self.children[JOB] | {"status": {"failed": self.num_failed}}
        return self.reconcile(0)

    def settle(self):
        """Reconcile until a new Pod of the head runs. Return whether its Job was replaced."""
        before = self.job.status
        plan = self.reconcile(0)
        is_replaced = JOB in plan.delete
        if is_replaced:
            assert self.job.status.roles[0].failures == before.roles[0].failures, "they were stored before"
            self.num_failed, self.pods = 0, {n: p for n, p in self.pods.items() if not n.startswith("h-")}
            assert JOB not in self.children
            self.reconcile(0)
            assert JOB in self.children
        self.start("head", f"h-{len(self.pods)}-{self.now.timestamp():.0f}")
        self.count()
        return is_replaced


def test_failure_after_good_hours_restarts_the_head_without_earlier_delays():
    cluster = HeadCluster()
    for _ in range(3):
        cluster.fail()
        assert not cluster.settle(), "the delays of a crash loop grow"
    plan = cluster.fail(after=WINDOW.total_seconds() + 1)
    assert JOB not in plan.delete, "the status does not have the failure yet"
    assert plan.requeue_after_seconds == 0
    trainer = cluster.children[ChildKey("StatefulSet", "gsm8k-trainer")]
    assert cluster.settle()
    assert cluster.children[ChildKey("StatefulSet", "gsm8k-trainer")] == trainer
    assert [event.reason for event in cluster.events].count("HeadBackoffReset") == 1
    assert (cluster.charged("head"), cluster.job.status.roles[0].restarts) == (1, 4)
    cluster.fail()
    assert not cluster.settle()
    assert cluster.job.status.roles[0].restarts == 5, "the new Job counts from zero"


def test_head_that_made_a_step_starts_again_without_delay():
    cluster = HeadCluster()
    for step in (3, 4, 5):
        cluster.train(step)
        plan = cluster.fail()
        assert JOB not in plan.delete, "the status does not have the failure yet"
        assert plan.requeue_after_seconds == 0
        assert cluster.settle()
    assert cluster.charged("head") == 3, "head.backoffLimit still ends it"
    cluster.fail()
    assert not cluster.settle(), "this one made no step"
    cluster.train(5)
    cluster.fail()
    assert not cluster.settle(), "this one repeated a step, and failed at the same place"
    cluster.train(6)
    cluster.fail()
    assert cluster.settle()
    cluster.train(7)
    cluster.fail()
    assert cluster.failed, "7 failures within the window end the job, whatever they trained"


def test_event_has_the_last_lines_of_the_log_that_is_deleted():
    cluster = HeadCluster()
    cluster.message = "\n".join(f"line {index}" for index in range(80))
    cluster.train(1)
    cluster.fail()
    cluster.settle()
    [event] = [event for event in cluster.events if event.reason == "HeadBackoffReset"]
    assert "has finished a step since its start" in event.message
    assert "h-0, ended with exit code 1: " in event.message
    assert event.message.endswith("line 79")


def test_head_that_the_node_refuses_is_not_started_again_at_once():
    """Else it would be refused again at once, without an end."""
    cluster = HeadCluster()
    for pod in cluster.heads():
        pod["status"] |= {"phase": "Failed", "reason": "OutOfcpu", "containerStatuses": []}
    cluster.num_failed = 1
    for _ in range(3):
        assert JOB not in cluster.count().delete


def test_job_of_an_earlier_operator_stays():
    cluster = HeadCluster()
    cluster.fail()
    cluster.settle()
    metadata = cluster.children[JOB]["metadata"]
    annotations = metadata["annotations"] | {keep.ANNOTATION_BUILT: "by another operator"}
    cluster.children[JOB] = cluster.children[JOB] | {"metadata": metadata | {"annotations": annotations}}
    cluster.fail(after=WINDOW.total_seconds() + 1)
    assert JOB not in cluster.reconcile(0).delete


@given(st.lists(st.floats(1, WINDOW.total_seconds() * 1.5), max_size=12))
def test_job_never_counts_more_failures_than_the_window(gaps):
    cluster = HeadCluster()
    for gap in gaps:
        cluster.fail(after=gap)
        if cluster.failed:
            return
        cluster.settle()
        assert cluster.num_failed <= cluster.charged("head")
