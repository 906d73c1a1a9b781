"""agent-sandbox for tests: its CRDs and its controller, from its Go module."""

from __future__ import annotations

from pathlib import Path

from rljob_cluster.control_plane.control_plane import ControlPlane
from rljob_cluster.host.go_programs import download_module
from rljob_cluster.lifecycle.agent_sandbox import MODULE
from rljob_service.worker.code.agent_sandbox import InClusterApi


def find_crds() -> list[Path]:
    return sorted((download_module(MODULE) / "k8s/crds").glob("*.yaml"))


def open_api(plane: ControlPlane, namespace: str, account: str, folder: Path) -> InClusterApi:
    """Return the API as a Pod with this service account has it: with its token and the cluster's certificate."""
    (folder / "token").write_text(plane.kubectl("create", "token", account, "-n", namespace))
    (folder / "ca.crt").write_bytes(plane.pki.ca.read_bytes())
    (folder / "namespace").write_text(namespace)
    return InClusterApi(account=folder, server=plane.server.removeprefix("https://"))
