"""Fake nodes on a ControlPlane, by KWOK: Pods bound to them become Ready (or end) with no container behind them.

It owns KWOK's process and the node objects. Scheduling is the scheduler's: ask for that component where Pods
must be placed. Invariant: KWOK manages only the nodes made here, and ends with the thread that started it.
"""

import json
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from rljob_cluster.control_plane.control_plane import STOP_SECONDS, ControlPlane
from rljob_cluster.host import go_programs
from rljob_cluster.host.commands import die_with_parent

READY_SECONDS = 60.0
ANNOTATION = "kwok.x-k8s.io/node"
# KWOK does nothing without stages; these are the module's own.
STAGE_FOLDERS = ("node/fast", "node/heartbeat-with-lease", "pod/fast")
_MODULE = "sigs.k8s.io/kwok@" + go_programs.INSTALLED_PACKAGES["kwok"].partition("@")[2]


class KwokError(Exception):
    """KWOK did not start, or its nodes did not become ready; the message ends with its last log lines."""


class Kwok:
    """`with Kwok(plane, num_nodes=50):` gives ready nodes kwok-0 to kwok-49.

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
        self._left_out = () if jobs_end else ("pod-complete.yaml",)
        self._nodes = [build_node(f"kwok-{index}", labels or {}) for index in range(num_nodes)]
        self._log = plane.folder / "logs" / "kwok.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        programs = go_programs.find_or_build("kwok", "kubectl")
        self._kubectl = [str(programs / "kubectl"), f"--kubeconfig={self._plane.kubeconfig}"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(programs / "kwok"),
                    f"--kubeconfig={self._plane.kubeconfig}",
                    f"--manage-nodes-with-annotation-selector={ANNOTATION}=fake",
                    *(f"--config={path}" for path in stage_files(module_folder()) if path.name not in self._left_out),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        try:
            self._run("apply", "-f", "-", text=yaml.safe_dump_all(self._nodes))
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End KWOK; its nodes stay as objects, as those of a cluster whose kubelets are gone."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        wanted = {node["metadata"]["name"] for node in self._nodes}
        while missing := wanted - ready_nodes(json.loads(self._run("get", "nodes", "-o", "json"))):
            if self._process is None or self._process.poll() is not None:
                raise KwokError(f"kwok ended while it started:\n{self._last_lines()}")
            if time.monotonic() > deadline:
                raise KwokError(
                    f"{len(missing)} of {len(wanted)} nodes were not ready within {READY_SECONDS:.0f} s:\n"
                    f"{self._last_lines()}"
                )
            time.sleep(0.2)

    def _run(self, *arguments: str, text: str | None = None) -> str:
        done = subprocess.run([*self._kubectl, *arguments], input=text, capture_output=True, text=True)
        if done.returncode != 0:
            raise KwokError(f"kubectl {arguments[0]} failed:\n{done.stderr[-1000:]}\n{self._last_lines()}")
        return done.stdout

    def _last_lines(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])


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


def ready_nodes(nodes: Mapping[str, Any]) -> set[str]:
    """Names of those whose Ready condition is True."""
    return {
        node["metadata"]["name"]
        for node in nodes["items"]
        for condition in node.get("status", {}).get("conditions", [])
        if condition["type"] == "Ready" and condition["status"] == "True"
    }


def stage_files(module: Path) -> list[Path]:
    return [
        path
        for folder in STAGE_FOLDERS
        for path in sorted((module / "kustomize" / "stage" / folder).glob("*.yaml"))
        if path.name != "kustomization.yaml"
    ]


def module_folder() -> Path:
    """Where Go keeps KWOK's source, downloaded where it is not there."""
    command = [*go_programs.go_command(), "mod", "download", "-json", _MODULE]
    done = subprocess.run(command, cwd=go_programs.MODULE, capture_output=True, text=True)
    if done.returncode != 0:
        raise KwokError(f"go could not download {_MODULE}, whose stages KWOK needs:\n{done.stdout}{done.stderr}")
    return Path(json.loads(done.stdout)["Dir"])
