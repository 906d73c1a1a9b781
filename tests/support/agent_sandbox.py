"""agent-sandbox for tests: its CRDs and its controller, from its Go module."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from rljob_cluster.control_plane.control_plane import ControlPlane
from rljob_cluster.host import go_programs
from rljob_cluster.host.commands import run
from rljob_reward.worker.sandbox_claims import InClusterApi

VERSION = "v0.5.6"
_MODULE = f"sigs.k8s.io/agent-sandbox@{VERSION}"


@cache
def find_module() -> Path:
    """Its folder in Go's module cache; downloads the module if it is missing."""
    go = go_programs.go_command()
    downloaded = run(*go, "-C", str(go_programs.MODULE), "mod", "download", "-json", _MODULE)
    return Path(json.loads(downloaded)["Dir"])


def find_crds() -> list[Path]:
    return sorted((find_module() / "k8s/crds").glob("*.yaml"))


def open_api(plane: ControlPlane, namespace: str, account: str, folder: Path) -> InClusterApi:
    """Return the API as a Pod with this service account has it: with its token and the cluster's certificate."""
    (folder / "token").write_text(plane.kubectl("create", "token", account, "-n", namespace))
    (folder / "ca.crt").write_bytes(plane.pki.ca.read_bytes())
    (folder / "namespace").write_text(namespace)
    return InClusterApi(30, folder, plane.server.removeprefix("https://"))
