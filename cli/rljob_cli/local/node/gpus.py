"""Assigns this machine's GPUs to Pods. A Pod that requests none sees none, as on a cluster."""

import os
import re
from pathlib import Path

from rljob_cli.manifests import is_sidecar
from rljob_operator.backend import Manifest

RESOURCE = "nvidia.com/gpu"


def find_gpus() -> list[str]:
    """Return the indices of the GPUs that this user may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [index for index in visible.split(",") if index.strip() and index != "-1"]
    names = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*"))
    return sorted((match[1] for match in names if match), key=int)


def count_gpus(pod: Manifest) -> int:
    containers = [*pod["spec"]["containers"], *filter(is_sidecar, pod["spec"].get("initContainers", []))]
    limits = ((c.get("resources") or {}).get("limits") or {} for c in containers)
    return sum(int(limit.get(RESOURCE, 0)) for limit in limits)


class GpuPool:
    """GPUs and the Pods that hold them. A GPU belongs to at most one Pod."""

    def __init__(self, gpus: list[str]) -> None:
        self.size = len(gpus)
        self._free = list(gpus)
        self._held: dict[str, list[str]] = {}

    def acquire(self, pod: str, number: int) -> list[str] | None:
        """Return `number` GPUs for the Pod; None while too few are free."""
        if pod not in self._held:
            if number > len(self._free):
                return None
            self._held[pod] = [self._free.pop(0) for _ in range(number)]
        return self._held[pod]

    def release(self, pod: str) -> None:
        self._free = sorted(self._free + self._held.pop(pod, []))
