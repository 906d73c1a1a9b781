"""Assigns this machine's GPUs to Pods. A Pod that requests none sees none, as on a cluster.

The machine has no node pools: each of its GPUs stands for one of whatever resource the roles of the job name.
"""

import os
from collections.abc import Sequence

from rljob_api.manifest.job import RLJobSpec
from rljob_cli.manifests import is_sidecar
from rljob_core.backend import Manifest
from rljob_inputs.machine.nvidia import Gpu, find_devices, list_wsl_gpus, look


def find_gpus() -> list[str]:
    """Return the indices of the GPUs that this user may use, as CUDA numbers them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [index for index in visible.split(",") if index.strip() and index != "-1"]
    # From 0, whatever the files are called: a container that gets one GPU of many may have /dev/nvidia3 alone.
    return [str(index) for index in range(len(find_devices() or list_wsl_gpus()))]


def describe_gpus() -> list[Gpu]:
    """Return what nvidia-smi says about the GPUs that this user may use; empty if it does not know them."""
    return select_gpus(look().gpus, visible) if (visible := find_gpus()) else []


def select_gpus(gpus: Sequence[Gpu], visible: Sequence[str]) -> list[Gpu]:
    """Return those that `visible` names: by index, or by the begin of the UUID. It names slices as MIG-..., which
    nvidia-smi does not list here."""
    return [gpu for gpu in gpus if any(name == gpu.index or gpu.uuid.startswith(name) for name in visible)]


def find_gpu_bytes() -> int | None:
    """Return the memory of the smallest GPU that this user may use. None: nvidia-smi does not say."""
    return find_least_bytes(describe_gpus())


def find_least_bytes(gpus: Sequence[Gpu]) -> int | None:
    return min((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes), default=None)


def find_resources(spec: RLJobSpec) -> frozenset[str]:
    """Return the names by which the Pods of a job request GPUs."""
    roles = [*spec.own_roles.values(), *(service.settings for service in spec.services)]
    return frozenset(role.node_pool.gpu_resource for role in roles)


def count_gpus(pod: Manifest, resources: frozenset[str]) -> int:
    containers = [*pod["spec"]["containers"], *filter(is_sidecar, pod["spec"].get("initContainers", []))]
    limits = ((c.get("resources") or {}).get("limits") or {} for c in containers)
    return sum(int(limit.get(resource, 0)) for limit in limits for resource in resources)


class GpuPool:
    """GPUs and the Pods that hold them. A GPU belongs to at most one Pod."""

    def __init__(self, gpus: list[str], resources: frozenset[str]) -> None:
        """`resources`: names by which Pods request them."""
        self.size = len(gpus)
        self._resources = resources
        self._free = list(gpus)
        self._held: dict[str, list[str]] = {}

    def count(self, pod: Manifest) -> int:
        """Return how many GPUs a Pod requests."""
        return count_gpus(pod, self._resources)

    def acquire(self, pod: str, number: int) -> list[str] | None:
        """Return `number` GPUs for the Pod; None while too few are free."""
        if pod not in self._held:
            if number > len(self._free):
                return None
            self._held[pod] = [self._free.pop(0) for _ in range(number)]
        return self._held[pod]

    def release(self, pod: str) -> None:
        self._free = sorted(self._free + self._held.pop(pod, []))
