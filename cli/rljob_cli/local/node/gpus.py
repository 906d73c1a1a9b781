"""Assigns this machine's GPUs to Pods. A Pod that requests none sees none, as on a cluster.

The machine has no node pools: each of its GPUs stands for one of whatever resource the roles of the job name.
"""

import os
import re
from pathlib import Path

from rljob_api.manifest.job import RLJobSpec
from rljob_cli.manifests import is_sidecar
from rljob_operator.backend import Manifest


def find_gpus() -> list[str]:
    """Return the indices of the GPUs that this user may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [index for index in visible.split(",") if index.strip() and index != "-1"]
    names = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*"))
    return sorted((match[1] for match in names if match), key=int)


def find_resources(spec: RLJobSpec) -> frozenset[str]:
    """Return the names by which the Pods of a job request GPUs."""
    roles = [spec.trainer, spec.rollout, *(service.reward for service in spec.services)]
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
