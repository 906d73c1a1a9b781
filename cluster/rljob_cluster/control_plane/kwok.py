"""Fake nodes on a ControlPlane, by KWOK: Pods bound to them become Ready, or end, without a container.

It owns KWOK's process and the node objects. Start the scheduler component if Pods must be placed. The invariant: KWOK
manages only the nodes created here, and ends with the thread that started it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml

from rljob_cluster.control_plane.control_plane import ControlPlane
from rljob_cluster.host import go_programs
from rljob_cluster.host.commands import CommandError, run
from rljob_cluster.host.processes import ProcessGroup

READY_TIMEOUT = "--timeout=60s"
ANNOTATION = "kwok.x-k8s.io/node"
# KWOK does nothing without stages; these are part of its module.
STAGE_FOLDERS = ("node/fast", "node/heartbeat-with-lease", "pod/fast")
_MODULE = "sigs.k8s.io/kwok@" + go_programs.INSTALLED_PACKAGES["kwok"].partition("@")[2]


class KwokError(Exception):
    """KWOK did not start, or its nodes did not become ready; the message ends with its last log lines."""


class Kwok:
    """`with Kwok(plane, num_nodes=50):` creates the ready nodes kwok-0 to kwok-49.

    Pods of Jobs succeed as soon as they run, unless jobs_end is false.
    """

    def __init__(
        self,
        plane: ControlPlane,
        *,
        num_nodes: int,
        labels: Mapping[str, str] | None = None,
        jobs_end: bool = True,
    ) -> None:
        if num_nodes < 1:
            raise KwokError(f"num_nodes must be at least 1, got {num_nodes}")
        self._plane = plane
        self._skipped_stages = () if jobs_end else ("pod-complete.yaml",)
        self._nodes = [build_node(f"kwok-{index}", labels or {}) for index in range(num_nodes)]
        self._processes = ProcessGroup(plane.folder / "logs")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        programs = go_programs.find_or_build("kwok", "kubectl")
        kubeconfig = f"--kubeconfig={self._plane.kubeconfig}"
        stages = [path for path in stage_files(module_folder()) if path.name not in self._skipped_stages]
        selector = f"--manage-nodes-with-annotation-selector={ANNOTATION}=fake"
        configs = [f"--config={path}" for path in stages]
        self._processes.start("kwok", [str(programs / "kwok"), kubeconfig, selector, *configs])
        kubectl = (str(programs / "kubectl"), kubeconfig)
        try:
            run(*kubectl, "apply", "-f", "-", input=yaml.safe_dump_all(self._nodes))
            run(*kubectl, "wait", "node", "--selector=type=kwok", "--for=condition=Ready", READY_TIMEOUT)
        except CommandError as error:
            self.stop()
            raise KwokError(f"the nodes are not ready: {error}\n{self._processes.last_lines('kwok')}") from error

    def stop(self) -> None:
        """Stop KWOK; its node objects stay, as in a cluster whose kubelets have stopped."""
        self._processes.stop_all()


def build_node(name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    capacity = {"cpu": "128", "memory": "1Ti", "pods": "1000"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {ANNOTATION: "fake"},
            "labels": {"kubernetes.io/hostname": name, "type": "kwok", **labels},
        },
        "status": {"allocatable": capacity, "capacity": capacity},
    }


def stage_files(module: Path) -> list[Path]:
    return [
        path
        for folder in STAGE_FOLDERS
        for path in sorted((module / "kustomize" / "stage" / folder).glob("*.yaml"))
        if path.name != "kustomization.yaml"
    ]


def module_folder() -> Path:
    """The folder of KWOK's source in Go's module cache; downloads the module if it is missing."""
    command = [*go_programs.go_command(), "mod", "download", "-json", _MODULE]
    done = subprocess.run(command, cwd=go_programs.MODULE, capture_output=True, text=True)
    if done.returncode != 0:
        raise KwokError(f"go cannot download {_MODULE}, which contains KWOK's stages:\n{done.stdout}{done.stderr}")
    return Path(json.loads(done.stdout)["Dir"])
