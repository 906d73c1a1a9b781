"""The Pod that reads the claim of a job that has ended."""

from __future__ import annotations

import asyncio

import pytest
import yaml

from rljob_cli.cluster import pod_start
from rljob_cli.cluster.client import ClusterError
from rljob_cli.cluster.head_files import build_reader, reader_pod

JOB = yaml.safe_load(
    """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: sums, namespace: team, uid: u1}
spec:
  model: {source: "hf://org/model"}
  data: {train: {source: "hf://org/data"}}
  rewards: [{name: r, function: {inline: "x"}}]
  head:
    nodePool: {nodeSelector: {pool: cpu}, tolerations: [{key: pool, value: cpu, effect: NoSchedule}]}
    template: {spec: {imagePullSecrets: [{name: registry}]}}
  checkpoint: {persistentVolumeClaim: {claimName: runs, mountedBy: head}}
status: {roles: [{name: head, image: "registry/trainer@sha256:1"}]}
"""
)
NO_TEMPLATE = """\
{apiVersion: rljob.dev/v1alpha1, kind: RLJob, metadata: {name: sums, namespace: team, uid: u1}, spec: {
  model: {source: "hf://org/model"}, data: {train: {source: "hf://org/data"}},
  rewards: [{name: r, function: {inline: "x"}}]}}
"""
READY = {"metadata": {}, "spec": {}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
FAILED = {
    "metadata": {},
    "spec": {},
    "status": {
        "phase": "Failed",
        "containerStatuses": [
            {"name": "reader", "state": {"terminated": {"exitCode": 78, "message": "error: /var/lib/rljob has no run"}}}
        ],
    },
}


class FakeCluster:
    """Has one Pod, whose states are given."""

    def __init__(self, *states):
        self.states, self.pods, self.deleted = list(states), [], []

    async def apply(self, resource, manifest):
        self.pods.append(manifest)

    async def find(self, resource, name):
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    async def delete(self, resource, name):
        self.deleted.append(name)


def test_pod_reads_the_run_with_the_image_and_on_the_nodes_of_the_head():
    pod = build_reader(JOB)
    spec, [container] = pod["spec"], pod["spec"]["containers"]
    assert container["image"] == "registry/trainer@sha256:1"
    assert (spec["nodeSelector"], spec["imagePullSecrets"]) == ({"pool": "cpu"}, [{"name": "registry"}])
    assert spec["tolerations"][0]["key"] == "pool"
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["run"]["persistentVolumeClaim"] == {"claimName": "runs", "readOnly": True}
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert mounts["run"] == {"name": "run", "mountPath": "/var/lib/rljob", "subPath": "sums", "readOnly": True}
    assert mounts.keys() == volumes.keys() == {"run", "config"}
    assert {each["name"] for each in container["env"]} == {"RLJOB_TOKEN", "RLJOB_JOB_FILE", "RLJOB_RUN_DIR"}


def test_pod_has_what_an_installation_or_a_namespace_gave_to_the_head():
    given = {
        "nodeSelector": {"pool": "cpu", "team": "a"},
        "imagePullSecrets": [{"name": "of-the-namespace"}],
        "tolerations": [{"key": "team", "operator": "Exists"}],
    }
    head = {"metadata": {"name": "sums-head-1"}, "spec": given | {"nodeName": "n1", "containers": []}}
    spec = build_reader(JOB, head)["spec"]
    assert {name: spec[name] for name in given} == given
    assert "nodeName" not in spec
    assert [container["name"] for container in spec["containers"]] == ["reader"]


def test_pod_of_a_suspended_job_has_the_pull_secrets_of_its_head():
    secrets = ["registry", "of-the-installation"]
    job = JOB | {"status": JOB["status"] | {"imagePullSecrets": secrets}}
    assert build_reader(job)["spec"]["imagePullSecrets"] == [{"name": name} for name in secrets]
    assert "imagePullSecrets" not in build_reader(yaml.safe_load(NO_TEMPLATE))["spec"]


def test_pod_has_no_rights_and_no_end_without_the_job():
    pod = build_reader(JOB)
    spec, [container] = pod["spec"], pod["spec"]["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert spec["automountServiceAccountToken"] is False
    assert spec["activeDeadlineSeconds"] > 0
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "u1"
    assert "rljob.dev/job" not in pod["metadata"]["labels"], "or the operator would take it for one of its Pods"


async def test_pod_is_deleted_at_the_end_and_on_a_cancellation(monkeypatch):
    monkeypatch.setattr(pod_start, "_POLL_SECONDS", 0)
    cluster = FakeCluster(None, READY)
    cluster.states[0] = {"metadata": {}, "spec": {}, "status": {"phase": "Pending"}}

    async def read():
        async with reader_pod(cluster, JOB) as name:
            assert (name, cluster.deleted) == (cluster.pods[0]["metadata"]["name"], [])
            await asyncio.Event().wait()

    task = asyncio.create_task(read())
    while not cluster.pods or len(cluster.states) > 1:  # noqa: ASYNC110
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cluster.deleted == [cluster.pods[0]["metadata"]["name"]]


@pytest.mark.parametrize(("state", "reason"), [(FAILED, "has no run"), (None, "it was deleted")])
async def test_pod_that_ends_or_is_deleted_says_why(state, reason):
    cluster = FakeCluster(state)
    with pytest.raises(ClusterError, match=rf"did not start: .*{reason}.*; check the claim of spec.checkpoint"):
        async with reader_pod(cluster, JOB):
            raise AssertionError
    assert len(cluster.deleted) == 1


async def test_user_who_may_not_create_the_pod_is_told_so():
    class Refusing(FakeCluster):
        async def apply(self, resource, manifest):
            raise ClusterError("forbidden: you may not apply pods")

        async def delete(self, resource, name):
            raise ClusterError("forbidden: you may not delete pods")

    with pytest.raises(ClusterError, match="may not apply pods"):
        async with reader_pod(Refusing(None), JOB):
            raise AssertionError


def test_job_with_a_newer_field_is_refused_with_the_remedy():
    job = JOB | {"spec": JOB["spec"] | {"later": 1}}
    with pytest.raises(ClusterError, match=r"RLJob sums: this version of rljob cannot read its spec.* use that of the"):
        build_reader(job)
