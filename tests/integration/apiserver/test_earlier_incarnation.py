"""A job that is made again by the name of one that is gone, where garbage collection has missed that one's end.

No garbage collector runs here, so nothing but the operator deletes what an earlier job left. The test plays only the
part that a collector does upon a foreground deletion: it lets go what is to be deleted and has no dependents.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from direct_backend import CHILD_KINDS, DirectBackend
from kubernetes import dynamic
from manifests import smallest

from rljob_api import API_VERSION
from rljob_api.wire.contract import LABEL_JOB, LABEL_MANAGED_BY, MANAGED_BY

DEADLINE_SECONDS = 60.0
OWNERS = {"RLJob": "again", "RewardModel": "judge"}
NUM_CHILDREN = {"RLJob": 19, "RewardModel": 6}
NUM_WITHOUT_CONFIG = 14
"""Its name is taken, so neither it nor the workloads are made."""
FOREGROUND = "foregroundDeletion"


class Stage:
    """One namespace, its operator, and hands to change it."""

    def __init__(self, api: dynamic.DynamicClient, namespace: str, log: Path) -> None:
        self.world, self.namespace, self.log = DirectBackend(api), namespace, log
        self.owners = {kind: api.resources.get(api_version=API_VERSION, kind=kind) for kind in OWNERS}

    def create(self, kind: str) -> str:
        made = self.owners[kind].create(body=smallest(kind, OWNERS[kind]), namespace=self.namespace)
        return str(made.metadata.uid)

    def delete(self, kind: str, name: str) -> None:
        resource = self.owners.get(kind) or self.world.resource(kind)
        resource.delete(name=name, namespace=self.namespace, body={"propagationPolicy": "Background"})

    def children(self) -> list[dict[str, Any]]:
        """Of all kinds, but for what every namespace has."""
        found = [child for kind in CHILD_KINDS for child in self.world.list(kind, self.namespace)]
        return [child for child in found if child["metadata"]["name"] != "kube-root-ca.crt"]

    def finish_deletions(self) -> None:
        for child in self.children():
            if FOREGROUND in (child["metadata"].get("finalizers") or []):
                body = {"metadata": {"name": child["metadata"]["name"], "finalizers": None}}
                patch = self.world.resource(child["kind"]).patch
                patch(body=body, namespace=self.namespace, content_type="application/merge-patch+json")

    def has_children_of(self, uid: str, num: int) -> bool:
        self.finish_deletions()
        children = self.children()
        return sum(owner_uid(child) == uid for child in children) == num

    def until(self, what: str, holds: Callable[[], Any]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not holds():
            left = {f"{c['kind']} {c['metadata']['name']}": owner_uid(c) for c in self.children()}
            assert time.monotonic() < deadline, f"never came: {what}; children: {left}\n{self.log.read_text()[-4000:]}"
            time.sleep(0.1)  # between looks at the condition


def owner_uid(child: dict[str, Any]) -> str:
    return next((ref["uid"] for ref in child["metadata"].get("ownerReferences") or []), "")


@pytest.fixture
def stage(control_plane, api_client, namespace, tmp_path) -> Iterator[Stage]:
    log = tmp_path / "operator.log"
    command = [sys.executable, "-m", "rljob_operator", f"--kubeconfig={control_plane.kubeconfig}", "--no-lease"]
    command += [f"--namespace={namespace}", "--metrics-port=0", "--health-port=0"]
    with log.open("wb") as file:
        operator = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield Stage(dynamic.DynamicClient(api_client), namespace, log)
    finally:
        operator.kill()
        operator.wait()


@pytest.mark.parametrize("kind", OWNERS)
def test_an_owner_made_again_gets_its_own_children_though_nothing_collected_the_earlier_ones(stage, kind):
    first = stage.create(kind)
    stage.until("the first one's children", lambda: stage.has_children_of(first, NUM_CHILDREN[kind]))
    stage.delete(kind, OWNERS[kind])
    second = stage.create(kind)
    stage.until("the second one's children", lambda: stage.has_children_of(second, NUM_CHILDREN[kind]))
    assert {owner_uid(child) for child in stage.children()} == {second}, "nothing of the earlier one is left"


def test_someone_elses_object_of_a_childs_name_stays_while_the_earlier_jobs_go(stage):
    labels = {LABEL_MANAGED_BY: MANAGED_BY, LABEL_JOB: OWNERS["RLJob"]}
    metadata = {"name": f"{OWNERS['RLJob']}-config", "labels": labels}
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"whose": "theirs"}}
    stage.world.resource("ConfigMap").create(body=body, namespace=stage.namespace)
    first = stage.create("RLJob")
    stage.until("what needs not that name", lambda: stage.has_children_of(first, NUM_WITHOUT_CONFIG))
    stage.delete("RLJob", OWNERS["RLJob"])
    second = stage.create("RLJob")
    stage.until("the second one's", lambda: stage.has_children_of(second, NUM_WITHOUT_CONFIG))
    uids = {owner_uid(child): child for child in stage.children()}
    assert set(uids) == {second, ""}, "nothing of the earlier one is left"
    assert uids[""]["data"] == {"whose": "theirs"}, "neither deleted nor overwritten"
