"""The operator as its own process against a real API server: plain days, and the bad ones a user meets.

Each test has an operator of its own for one namespace, so nothing of one shows in another. The tests wait for a
condition of the cluster with a deadline, and show the operator's log when it does not come.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_player import Player
from direct_backend import DirectBackend
from kubernetes import client, dynamic
from manifests import smallest

DEADLINE_SECONDS = 45.0
NAME = "smallest"
ROOT = Path(__file__).resolve().parents[3]


class Operator:
    """`python -m rljob_operator` for one namespace."""

    def __init__(self, kubeconfig: Path, namespace: str, log: Path, *options: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "rljob_operator", f"--kubeconfig={kubeconfig}", f"--namespace={namespace}"]
        command += ["--metrics-port=0", "--health-port=0", *options]
        with log.open("ab") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Stage:
    """One namespace with its operators, and hands to change it."""

    def __init__(self, control_plane: Any, api: client.ApiClient, namespace: str, folder: Path) -> None:
        self.control_plane, self.namespace, self.folder = control_plane, namespace, folder
        self.world = DirectBackend(dynamic.DynamicClient(api))
        self.player = Player(self.world, namespace)
        self.operators: list[Operator] = []

    def start(self, *options: str, kubeconfig: Path | None = None) -> Operator:
        log = self.folder / f"operator-{len(self.operators)}.log"
        operator = Operator(
            kubeconfig or self.control_plane.kubeconfig, self.namespace, log, *(options or ["--no-lease"])
        )
        self.operators.append(operator)
        return operator

    def create_job(self) -> None:
        self.world.resource("RLJob").create(body=smallest(name=NAME), namespace=self.namespace)

    def child(self, kind: str, name: str) -> dict[str, Any] | None:
        return self.world.find(kind, self.namespace, f"{NAME}-{name}")

    def condition(self, type_: str) -> dict[str, Any]:
        job = self.world.find("RLJob", self.namespace, NAME) or {}
        found = (job.get("status") or {}).get("conditions") or []
        return next((c for c in found if c["type"] == type_), {})

    def until(self, what: str, holds: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (value := holds()):
            assert time.monotonic() < deadline, f"never came: {what}\n{self.logs()}"
            time.sleep(0.1)  # between looks at the condition
        return value

    def logs(self) -> str:
        return "\n".join(f"{o.log.name}:\n{o.log.read_text()[-4000:]}" for o in self.operators)


@pytest.fixture
def stage(control_plane, api_client, namespace, tmp_path) -> Iterator[Stage]:
    made = Stage(control_plane, api_client, namespace, tmp_path)
    with contextlib.ExitStack() as stack:
        yield made
        for operator in made.operators:
            stack.callback(operator.kill)


def has_all_workloads(stage: Stage) -> bool:
    wanted = (("Job", "head"), ("StatefulSet", "trainer"), ("Deployment", "rollout"), ("Deployment", "reward-correct"))
    return all(stage.child(kind, name) for kind, name in wanted)


def test_a_job_becomes_its_children_and_a_deleted_or_edited_one_comes_back(stage):
    stage.start()
    stage.create_job()
    stage.until("all workloads", lambda: has_all_workloads(stage))
    deployment = stage.child("Deployment", "rollout")
    body = {"propagationPolicy": "Background"}
    stage.world.resource("Deployment").delete(name=f"{NAME}-rollout", namespace=stage.namespace, body=body)
    stage.until(
        "the deleted Deployment, anew",
        lambda: (
            (found := stage.child("Deployment", "rollout"))
            and found["metadata"]["uid"] != deployment["metadata"]["uid"]
        ),
    )
    edit = {"metadata": {"name": f"{NAME}-trainer"}, "spec": {"replicas": 7}}
    patch = stage.world.resource("StatefulSet").patch
    patch(body=edit, namespace=stage.namespace, content_type="application/merge-patch+json")
    stage.until(
        "the edited StatefulSet as planned", lambda: stage.child("StatefulSet", "trainer")["spec"]["replicas"] == 1
    )


def test_kubectl_wait_sees_the_end_that_the_heads_job_came_to(stage):
    from rljob_cluster import build

    stage.start()
    stage.create_job()
    head = stage.until("the head's Job", lambda: stage.child("Job", "head"))
    stage.player.complete(head)
    command = [build.find_or_build("kubectl") / "kubectl", f"--kubeconfig={stage.control_plane.kubeconfig}"]
    command += ["wait", "rljob", NAME, f"--namespace={stage.namespace}", "--for=condition=Succeeded"]
    done = subprocess.run([*command, f"--timeout={DEADLINE_SECONDS:.0f}s"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + stage.logs()


def test_a_second_operator_takes_over_when_the_first_is_killed(stage):
    lease = [f"--lease-namespace={stage.namespace}"]
    first = stage.start(*lease)
    stage.create_job()
    stage.until("all workloads, by the first", lambda: has_all_workloads(stage))
    stage.start(*lease)
    first.kill()
    body = {"propagationPolicy": "Background"}
    stage.world.resource("Deployment").delete(name=f"{NAME}-rollout", namespace=stage.namespace, body=body)
    stage.until("the Deployment, by the second", lambda: stage.child("Deployment", "rollout"))
