"""`kubectl scale` and a HorizontalPodAutoscaler change the rollouts of a job through its scale subresource."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client, config

from rljob_cluster.control_plane.control_plane import ControlPlane
from tests.integration.apiserver.manifests import smallest
from tests.paths import ROOT
from tests.support import fast_yaml
from tests.support.waiting import wait_for

JOB = ("rljob.dev", "v1alpha1", "default", "rljobs", "smallest")
SELECTOR = "rljob.dev/job=smallest,rljob.dev/role=rollout"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory, loopback: str) -> Iterator[client.ApiClient]:
    """An API server with the controllers of Kubernetes, which look at autoscalers once per second."""
    components = ("etcd", "kube-apiserver", "kube-controller-manager")
    extra = {"kube-controller-manager": ["--horizontal-pod-autoscaler-sync-period=1s"]}
    folder = tmp_path_factory.mktemp("scale")
    with ControlPlane(folder, address=f"{loopback}.2", components=components, extra_arguments=extra) as plane:
        yield config.new_client_from_config(config_file=str(plane.kubeconfig))


@pytest.fixture(scope="module")
def jobs(api: client.ApiClient) -> client.CustomObjectsApi:
    """The API of a cluster with one job, whose operator has reported a ready rollout."""
    objects, crds = client.CustomObjectsApi(api), client.ApiextensionsV1Api(api)
    crds.create_custom_resource_definition(fast_yaml.load((ROOT / "crds/rljobs.rljob.dev.yaml").read_text()))

    def is_created() -> bool:
        try:
            objects.create_namespaced_custom_object(*JOB[:-1], smallest())
        except client.ApiException as error:
            if error.status != 404:
                raise
            return False  # the CRD is not served yet
        return True

    wait_for(is_created, "the CRD is served")
    status = {"status": {"rolloutReplicas": 1, "rolloutSelector": SELECTOR}}
    objects.patch_namespaced_custom_object_status(*JOB, status)
    return objects


def read_replicas(jobs: client.CustomObjectsApi) -> Any:
    return jobs.get_namespaced_custom_object(*JOB)["spec"]["rollout"]["replicas"]


def test_scale_reads_and_writes_the_rollouts(jobs: client.CustomObjectsApi) -> None:
    scale = jobs.get_namespaced_custom_object_scale(*JOB)
    assert scale["spec"] == {"replicas": 1}
    assert scale["status"] == {"replicas": 1, "selector": SELECTOR}
    scale["spec"]["replicas"] = 3
    jobs.replace_namespaced_custom_object_scale(*JOB, scale)
    assert read_replicas(jobs) == 3
    scale = jobs.get_namespaced_custom_object_scale(*JOB)
    scale["spec"]["replicas"] = 0
    with pytest.raises(client.ApiException) as caught:
        jobs.replace_namespaced_custom_object_scale(*JOB, scale)
    assert "rollout.replicas must be at least 1 unless the job is suspended" in str(caught.value.body)


def test_horizontal_pod_autoscaler_scales_the_rollouts(jobs: client.CustomObjectsApi, api: client.ApiClient) -> None:
    jobs.patch_namespaced_custom_object_scale(*JOB, {"spec": {"replicas": 1}})
    autoscalers = client.AutoscalingV2Api(api)
    metric = {
        "type": "Resource",
        "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 50}},
    }
    spec = {
        "scaleTargetRef": {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "name": JOB[-1]},
        "minReplicas": 2,  # below it, an autoscaler needs no metric to scale
        "maxReplicas": 4,
        "metrics": [metric],
    }
    autoscalers.create_namespaced_horizontal_pod_autoscaler("default", {"metadata": {"name": "rollouts"}, "spec": spec})
    wait_for(lambda: read_replicas(jobs) == 2, "the autoscaler sets spec.rollout.replicas to 2")

    def conditions() -> dict[str, Any]:
        status = autoscalers.read_namespaced_horizontal_pod_autoscaler("rollouts", "default").status
        return {condition.type: condition for condition in status.conditions or []}

    wait_for(lambda: "ScalingActive" in conditions(), "the autoscaler reads its metric")
    # Without a metrics server it fails there, after it has found the selector of the Pods.
    assert conditions()["ScalingActive"].reason == "FailedGetResourceMetric"
