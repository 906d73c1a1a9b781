"""A real API server for the tests of this folder: etcd and kube-apiserver, with the CRDs of this repository.

Each pytest process has one, so that a cluster-wide operator of one worker sees no objects of another. No controller
and no kubelet runs; a test that needs one simulates it.
"""

import os
import uuid

import pytest
from kubernetes import client, config, watch

from rljob_cluster.control_plane.control_plane import ControlPlane
from tests.integration.apiserver.admin_client import AdminClient
from tests.integration.apiserver.operator_harness import harness  # noqa: F401 - a fixture
from tests.paths import ROOT
from tests.support import fast_yaml
from tests.support.waiting import DEADLINE_SECONDS


@pytest.fixture(scope="session")
def loopback():
    """The first three numbers of the addresses of this process: unique per worker of pytest-xdist."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return os.environ.get("RLJOB_TEST_LOOPBACK", f"127.34.{worker}")


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory, loopback):
    """etcd and kube-apiserver."""
    folder = tmp_path_factory.mktemp("controlplane")
    with ControlPlane(folder, address=f"{loopback}.1", components=("etcd", "kube-apiserver")) as running:
        yield running


@pytest.fixture(scope="session")
def api_client(control_plane):
    """The administrator's client."""
    with config.new_client_from_config(config_file=str(control_plane.kubeconfig)) as api:
        yield api


@pytest.fixture(scope="session")
def crds(api_client):
    """The CRDs of crds/, served."""
    extensions = client.ApiextensionsV1Api(api_client)
    names = set()
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        manifest = fast_yaml.load(path.read_text())
        names.add(manifest["metadata"]["name"])
        extensions.create_custom_resource_definition(manifest)
    stream = watch.Watch()
    for event in stream.stream(extensions.list_custom_resource_definition, timeout_seconds=DEADLINE_SECONDS):
        conditions = event["object"].status.conditions or []
        if any(c.type == "Established" and c.status == "True" for c in conditions):
            names.discard(event["object"].metadata.name)
        if not names:
            break
    assert not names, f"{sorted(names)} were not served within {DEADLINE_SECONDS} s"


@pytest.fixture
def namespace(api_client, crds):
    """A new namespace in which Pods can be created."""
    name, core = f"test-{uuid.uuid4().hex[:8]}", client.CoreV1Api(api_client)
    core.create_namespace({"metadata": {"name": name}})
    core.create_namespaced_service_account(name, {"metadata": {"name": "default"}})
    return name


@pytest.fixture
def admin(api_client, namespace):
    return AdminClient(api_client, namespace)
