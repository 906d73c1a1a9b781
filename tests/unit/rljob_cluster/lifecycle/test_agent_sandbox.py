"""What is changed in agent-sandbox's manifests: the controller runs from an image that has its program alone."""

from typing import Any

import pytest
import yaml

from rljob_cluster.host.commands import ClusterError
from rljob_cluster.lifecycle import agent_sandbox
from rljob_cluster.node.node import LABEL_POOL

NAMESPACE = {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": "agent-sandbox-system"}}


def build_deployment(**spec: Any) -> dict[str, Any]:
    container = {"name": "controller", "image": "ko://placeholder", "args": ["--extensions"]}
    return {"kind": "Deployment", "spec": {"template": {"spec": {"containers": [container | spec]}}}}


def test_controller_gets_the_image_the_node_and_a_folder_for_its_certificate() -> None:
    mounted = build_deployment(volumeMounts=[{"name": "config", "mountPath": "/etc/config"}])
    namespace, deployment = agent_sandbox.build_manifests(yaml.safe_dump_all([NAMESPACE, mounted]))
    assert namespace == NAMESPACE
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == agent_sandbox.IMAGE
    assert container["args"] == ["--extensions"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/etc/config", "/tmp"]
    assert pod["volumes"] == [{"name": "tmp", "emptyDir": {}}]
    assert pod["nodeSelector"] == {LABEL_POOL: "system"}


def test_another_kustomization_is_refused() -> None:
    with pytest.raises(ClusterError, match="found 0"):
        agent_sandbox.build_manifests(yaml.safe_dump(NAMESPACE))


def test_names_follow_the_pinned_version() -> None:
    path, _, version = agent_sandbox.MODULE.partition("@")
    assert path == "sigs.k8s.io/agent-sandbox"
    assert agent_sandbox.IMAGE.endswith(f":{version}")
