"""agent-sandbox of kubernetes-sigs as an add-on: its CRDs, its RBAC and its controller with the extensions.

The manifests are those of its Go module, as its kustomization combines them. The controller is built from the same
module, and runs in a Pod on the node of the pool `system`.
"""

from typing import Any

import yaml

from rljob_cluster.host.commands import ClusterError
from rljob_cluster.host.go_programs import ADDONS
from rljob_cluster.node.node import LABEL_POOL

CONTROLLER = "agent-sandbox-controller"
NAMESPACE = "agent-sandbox-system"
MODULE, _ = ADDONS[CONTROLLER]
IMAGE = f"rljob.dev/{CONTROLLER}:{MODULE.partition('@')[2]}"
"""Contains the program alone."""
Manifest = dict[str, Any]


def build_manifests(rendered: str) -> list[Manifest]:
    """The manifests to apply. `rendered`: output of `kubectl kustomize`, whose Deployment names no image."""
    manifests = [manifest for manifest in yaml.safe_load_all(rendered) if manifest]
    deployments = [manifest for manifest in manifests if manifest["kind"] == "Deployment"]
    if len(deployments) != 1:
        raise ClusterError(f"{MODULE}: expected 1 Deployment in its kustomization, found {len(deployments)}")
    pod = deployments[0]["spec"]["template"]["spec"]
    pod["nodeSelector"] = {LABEL_POOL: "system"}
    (container,) = pod["containers"]
    container["image"] = IMAGE
    # The controller writes the certificate of its webhook there; the image has no other folder.
    container.setdefault("volumeMounts", []).append({"name": "tmp", "mountPath": "/tmp"})
    pod.setdefault("volumes", []).append({"name": "tmp", "emptyDir": {}})
    return manifests
