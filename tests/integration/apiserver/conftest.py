"""A real API server for every test of this folder: etcd and kube-apiserver, with the CRDs of this repository.

Owns the control plane and the clients. No controller and no kubelet runs: a test that needs one plays it.
"""

import os
import sys
import uuid
from pathlib import Path

import pytest
import yaml
from kubernetes import client, config, watch

from tests.paths import ROOT

sys.path.insert(0, str(Path(__file__).parent))  # --import-mode=importlib does not, and the tests share helpers
CRDS = ROOT / "crds"
ESTABLISHED_SECONDS = 30


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory):
    """etcd and kube-apiserver, for the whole session."""
    from rljob_cluster.control_plane.control_plane import ControlPlane

    address = os.environ.get("RLJOB_TEST_ADDRESS", "127.34.0.1")
    folder = tmp_path_factory.mktemp("controlplane")
    with ControlPlane(folder, address=address, components=("etcd", "kube-apiserver")) as running:
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
    for path in sorted(CRDS.glob("*.yaml")):
        manifest = yaml.safe_load(path.read_text())
        names.add(manifest["metadata"]["name"])
        extensions.create_custom_resource_definition(manifest)
    stream = watch.Watch()
    for event in stream.stream(extensions.list_custom_resource_definition, timeout_seconds=ESTABLISHED_SECONDS):
        conditions = event["object"].status.conditions or []
        if any(c.type == "Established" and c.status == "True" for c in conditions):
            names.discard(event["object"].metadata.name)
        if not names:
            break
    assert not names, f"{sorted(names)} were not served within {ESTABLISHED_SECONDS} s"


@pytest.fixture
def namespace(api_client, crds):
    """A namespace of the test's own."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    client.CoreV1Api(api_client).create_namespace({"metadata": {"name": name}})
    return name
