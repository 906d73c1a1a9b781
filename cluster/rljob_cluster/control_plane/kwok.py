"""Fake nodes on a ControlPlane, by KWOK: Pods bound to them become Ready, or end, without a container.

Start the scheduler component if Pods must be placed, and pass CONTROLLER_ARGUMENTS. The invariant: KWOK manages only
the nodes created here, and ends with the thread that started it.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rljob_cluster.control_plane.control_plane import ControlPlane
from rljob_cluster.host import go_programs
from rljob_cluster.host.processes import ProcessGroup

CONTROLLER_ARGUMENTS = ("--node-monitor-grace-period=12h",)
"""For a plane whose kube-controller-manager runs: KWOK renews no Lease, so that after 50 s it would count the nodes as
lost and their Pods as not ready."""
_ANNOTATION = "kwok.x-k8s.io/node"
# KWOK does nothing without stages; these are part of its module.
_STAGE_FOLDERS = ("node/fast", "node/heartbeat-with-lease", "pod/fast")
_MODULE = "sigs.k8s.io/kwok@" + go_programs.INSTALLED_PACKAGES["kwok"].partition("@")[2]


@contextlib.contextmanager
def run_kwok(
    plane: ControlPlane, *, num_nodes: int, labels: Mapping[str, str] | None = None, jobs_end: bool = True
) -> Iterator[None]:
    """Create the ready nodes kwok-0, kwok-1 and so on. Their objects stay, as in a cluster whose kubelets have stopped.

    Pods of Jobs succeed as soon as they run, unless jobs_end is false.
    """
    program = str(go_programs.find_or_build("kwok") / "kwok")
    configs = [f"--config={path}" for path in _find_stages() if jobs_end or path.name != "pod-complete.yaml"]
    selector = f"--manage-nodes-with-annotation-selector={_ANNOTATION}=fake"
    nodes = yaml.safe_dump_all(build_node(f"kwok-{index}", labels or {}) for index in range(num_nodes))
    processes = ProcessGroup(plane.folder / "logs")
    processes.start("kwok", [program, f"--kubeconfig={plane.kubeconfig}", selector, *configs])
    try:
        plane.kubectl("apply", "-f", "-", input=nodes)
        plane.kubectl("wait", "node", "--selector=type=kwok", "--for=condition=Ready", "--timeout=60s")
        yield
    finally:
        processes.stop_all()


def build_node(name: str, labels: Mapping[str, str], devices: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return a node that a running KWOK takes over once it is applied. `devices`: number by resource name; nodes with
    some have a taint of the same name, as device plugins' nodes usually do."""
    devices = devices or {}
    capacity = {"cpu": "128", "memory": "1Ti", "ephemeral-storage": "1Ti", "pods": "1000"}
    capacity |= {name: str(n) for name, n in devices.items()}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {_ANNOTATION: "fake"},
            "labels": {"kubernetes.io/hostname": name, "type": "kwok", **labels},
        },
        "spec": {"taints": [{"key": name, "effect": "NoSchedule"} for name in devices]},
        "status": {"allocatable": capacity, "capacity": capacity},
    }


def _find_stages() -> Iterator[Path]:
    """KWOK's stages in Go's module cache; downloads the module if it is missing."""
    module = go_programs.download_module(_MODULE)
    for folder in _STAGE_FOLDERS:
        stages = (module / "kustomize/stage" / folder).glob("*.yaml")
        yield from sorted(path for path in stages if path.name != "kustomization.yaml")
