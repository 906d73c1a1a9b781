"""Whether vLLM computes on what the spec asks for. vLLM takes the device that its build and the node happen to have."""

from typing import Any

from rljob_api.errors import UserError
from rljob_trainer.devices.choose import explain_missing_gpu, read_cuda_facts

_FIELD = "spec.rollout.gpusPerReplica"


def check_platform(num_gpus: int, platform: Any) -> None:
    """Raise UserError if vLLM would compute on another kind of device than the spec says; GpuFaultError if the node's
    GPU does not start. Starts CUDA only if vLLM cannot use it, since vLLM's child processes must be forked before."""
    if num_gpus and platform.is_cpu():
        raise UserError(
            f"{_FIELD} is {num_gpus}, and vLLM of this image is for CPUs only; set spec.rollout.image to one built "
            "with EXTRA=gpu"
        )
    if num_gpus and not platform.is_cuda_alike():
        raise explain_missing_gpu(num_gpus, _FIELD, read_cuda_facts())
    if not num_gpus and not platform.is_cpu():
        raise UserError(
            f"{_FIELD} is 0, and vLLM of this image needs a GPU; set {_FIELD}, or spec.rollout.image to one built with "
            "EXTRA=cpu"
        )
