"""The condition PoolsIsolated."""

from rljob_core.backend import ObservedState
from rljob_core.plan.job_status import evaluate_isolation
from rljob_core.plan.observed_job import observe_job
from tests.support.job_simulation import make_job


def make_pod(role, node):
    labels = {"rljob.dev/job": "gsm8k", "rljob.dev/role": role}
    return {"metadata": {"name": f"gsm8k-{role}-x", "labels": labels}, "spec": {"nodeName": node}, "status": {}}


def test_shared_node_breaks_required_isolation():
    def evaluate(job, *pods):
        return evaluate_isolation(observe_job(job, ObservedState(pods=pods)).roles)

    job = make_job(rollout={"nodePool": {"exclusive": True}})
    trainer, rollout = make_pod("trainer", "n1"), make_pod("rollout", "n1")
    holds, _, message = evaluate(job, trainer, rollout)
    assert (holds, "node n1" in message) == (False, True)
    assert evaluate(job, trainer, make_pod("rollout", "n2"))[0] is True
    assert evaluate(job) is None, "no Pod has a node"
    assert evaluate(make_job(), trainer, rollout) is None, "no role requires it"
