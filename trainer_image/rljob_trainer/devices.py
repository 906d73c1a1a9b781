"""The device of a process: as the job's spec says, or an error that names what is missing.

The one place that chooses between CPU and GPU: by the spec alone, never by what the node happens to have.

Invariant: a process that was asked for GPUs never computes on a CPU, and the reverse.
"""

import re
from dataclasses import dataclass

import torch

from rljob_api.errors import RLJobError, UserError
from rljob_inputs.machine.nvidia import read_driver_version
from rljob_trainer.failures.devices import GpuFaultError

_TOO_OLD = re.compile(r"driver on your system is too old \(found version (\d+)\)")
"""In torch's error. The number is the newest CUDA version that the driver supports: 12040 is 12.4."""
_NO_LIBRARY = "Found no NVIDIA driver"
"""torch finds no libcuda, which NVIDIA's container runtime mounts."""


@dataclass(frozen=True)
class CudaFacts:
    """Why torch finds no GPU."""

    torch: str
    """Version of torch."""
    cuda: str | None
    """Version of CUDA that torch was built for. None: for CPUs only."""
    driver: str | None
    """Version of the node's driver. None: there is none."""
    reason: str
    """torch's error."""


def choose_device(num_gpus: int, field: str) -> torch.device:
    """Return the device of a process. `num_gpus`: as `field` of the spec says, per Pod.

    Raises UserError if the cluster or the image gives the Pod no GPU, and GpuFaultError if the GPU does not start."""
    if num_gpus == 0:
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    raise explain_missing_gpu(num_gpus, field, read_cuda_facts())


def read_cuda_facts() -> CudaFacts:
    try:
        torch.cuda.init()
        reason = "torch.cuda.is_available() is false"
    except (RuntimeError, AssertionError) as error:
        reason = str(error)
    return CudaFacts(torch.__version__, torch.version.cuda, read_driver_version(), reason)


def explain_missing_gpu(num_gpus: int, field: str, facts: CudaFacts) -> RLJobError:
    """Return the error for a process that was asked for GPUs and has none."""
    image = f"{field.rpartition('.')[0] or 'spec'}.image"
    asked = f"{field} is {num_gpus}, and torch finds no GPU"
    if facts.cuda is None:
        return UserError(
            f"{asked}: torch {facts.torch} of this image is for CPUs only; set {image} to one built with EXTRA=gpu"
        )
    built = f"torch {facts.torch} is for CUDA {facts.cuda}"
    if facts.driver is None:
        return UserError(
            f"{asked}: {built}, and no driver is visible; the node needs NVIDIA's driver and device plugin, and "
            "spec.runtimeClassName names NVIDIA's runtime unless that is the default"
        )
    if found := _TOO_OLD.search(facts.reason):
        newest = f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}"
        return UserError(
            f"{asked}: {built}, and the node's driver {facts.driver} supports CUDA {newest} at most; upgrade the "
            f"driver (CUDA 13 needs 580 or later), or set {image} to one whose torch is for CUDA {newest}"
        )
    if _NO_LIBRARY in facts.reason:
        return UserError(
            f"{asked}: {built}, and the node has driver {facts.driver}, but its libraries are not in the container; "
            "set spec.runtimeClassName to NVIDIA's runtime"
        )
    first = facts.reason.splitlines()[0]
    return GpuFaultError(f"{asked}: {first} ({built}, the node's driver is {facts.driver})")
