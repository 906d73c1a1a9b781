"""`rljob top` for all jobs and for a single job, or `top JOB --watch`, with a job of 15 Pods in place of an API server:
python -m tests.support.top_program [--watch]"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from rljob_cli.cluster import commands
from rljob_cli.cluster.client import ClusterError
from rljob_cli.options import Target

NOW = datetime(2026, 1, 2, tzinfo=UTC)
_NAME = "qwen3-gsm8k"
START = "2026-01-01T21:00:00Z"
SCHEDULE = {"type": "bounded", "staleness": 1, "groupsInFlight": 9, "groupsScored": 3, "groupsDue": 0}
PROGRESS = {
    "step": 412,
    "totalSteps": 1000,
    "reward": 0.7312,
    "phase": "generating",
    "lastStepTime": "2026-01-01T23:58:30Z",
    "waitsFor": "rollouts that have the new weights: 10 of 12",
    "schedule": SCHEDULE | {"busy": "rollouts 97%, trainer 31%"},
}
JOB = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"namespace": "team-a", "name": _NAME, "creationTimestamp": START},
    "spec": {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/d"}},
        "rewards": [{"name": "correct", "http": {"url": "http://rewards"}}],
    },
    "status": {
        "phase": "Running",
        "conditions": [{"type": "Running", "status": "True", "reason": "R", "lastTransitionTime": START}],
        "rollouts": "10/12",
        "rewards": "1/1",
        "progress": PROGRESS,
        "roles": [
            {"name": "head", "desired": 1, "ready": 1},
            {"name": "trainer", "desired": 2, "ready": 2},
            {"name": "rollout", "desired": 12, "ready": 10, "restarts": 7},
        ],
    },
}


def pod(name: str, role: str, node: str = "gpu-node-1", **status: Any) -> dict[str, Any]:
    metadata = {"name": f"{_NAME}-{name}", "labels": {"rljob.dev/role": role}, "creationTimestamp": START}
    return {"metadata": metadata, "spec": {"nodeName": node}, "status": status}


READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
ENDED = {"reason": "Error", "exitCode": 1, "message": "ValueError: no module named rewards_of_the_team"}
CRASHING = {
    "phase": "Running",
    "containerStatuses": [
        {
            "name": "rollout",
            "restartCount": 7,
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
            "lastState": {"terminated": ENDED},
        }
    ],
}
UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/8 nodes are available: 8 Insufficient nvidia.com/gpu.",
        }
    ],
}
PODS = [
    pod("head", "head", **READY),
    *(pod(f"trainer-{rank}", "trainer", **READY) for rank in range(2)),
    *(pod(f"rollout-7f9c8d7b5-{index:05}", "rollout", **READY) for index in range(10)),
    pod("rollout-7f9c8d7b5-crash", "rollout", **CRASHING),
    pod("rollout-7f9c8d7b5-unsch", "rollout", "", **UNSCHEDULABLE),
]


class OneJobCluster:
    namespace = "team-a"

    async def list_jobs(self, everywhere: bool) -> list[dict[str, Any]]:
        return [JOB]

    async def get_job(self, name: str) -> dict[str, Any]:
        return JOB

    async def list_pods(self, selector: str) -> list[dict[str, Any]]:
        return PODS

    async def list_pod_metrics(self, selector: str) -> list[dict[str, Any]]:
        raise ClusterError("the cluster has no metrics.k8s.io")

    async def read_pod_metrics(self, pod: str, port: int) -> str:
        raise ClusterError("pods/proxy is forbidden")


@contextlib.asynccontextmanager
async def connect(target: Target) -> AsyncIterator[OneJobCluster]:
    yield OneJobCluster()


def main(arguments: list[str]) -> int:
    commands.connect = connect  # type: ignore[assignment]
    commands.utc_now = lambda: NOW
    for name in [_NAME] if "--watch" in arguments else [None, _NAME]:
        options = {"everywhere": False, "watch": "--watch" in arguments, "output": "text"}
        code = commands.top_command(Target(), name, **options)
        print(flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
