"""The Pod that reads the claim of a job that has ended, on a real API server."""

from __future__ import annotations

import asyncio

import yaml
from kubernetes import client

from rljob_cli.cluster import pod_start
from rljob_cli.cluster.client import connect
from rljob_cli.cluster.head_files import LABEL_READER, reader_pod
from rljob_cli.options import Target

JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: sums}
spec:
  model: {source: "hf://org/model"}
  data: {train: {source: "hf://org/data"}}
  rewards: [{name: r, function: {inline: "x"}}]
  checkpoint: {persistentVolumeClaim: {claimName: runs}}
"""
RESTRICTED = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
READY = {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}


async def test_pod_is_admitted_in_a_restricted_namespace_and_deleted(
    api_client, control_plane, namespace, monkeypatch
) -> None:
    monkeypatch.setattr(pod_start, "_POLL_SECONDS", 0.05)
    core = client.CoreV1Api(api_client)
    core.patch_namespace(namespace, RESTRICTED)
    jobs = client.CustomObjectsApi(api_client)
    jobs.create_namespaced_custom_object("rljob.dev", "v1alpha1", namespace, "rljobs", yaml.safe_load(JOB))

    def list_readers():
        return core.list_namespaced_pod(namespace, label_selector=f"{LABEL_READER}=sums").items

    async def make_ready():
        while not (found := await asyncio.to_thread(list_readers)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.to_thread(core.patch_namespaced_pod_status, found[0].metadata.name, namespace, READY)

    async with (
        connect(Target(kubeconfig=str(control_plane.kubeconfig), namespace=namespace)) as cluster,
        asyncio.timeout(60),
    ):
        job, ready = await cluster.get_job("sums"), asyncio.create_task(make_ready())
        async with reader_pod(cluster, job) as name:
            [pod] = await asyncio.to_thread(list_readers)
            assert pod.metadata.name == name
            assert pod.metadata.owner_references[0].uid == job["metadata"]["uid"]
            await ready
    assert list_readers() == []
