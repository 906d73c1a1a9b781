"""What to do after an error of a GPU: run elsewhere, try again, use less memory, or fix an index.

CUDA, NCCL and vLLM have no types for this, so the table reads the texts of CUDA's runtime (cudaGetErrorString), which
torch, NCCL and vLLM repeat in theirs. Pure. Invariant: an error of no GPU has no remedy here.
"""

import re
from enum import Enum

from rljob_api.errors import RLJobError, TransientError
from rljob_api.wire.termination import GPU_FAULT_PREFIX


class Remedy(Enum):
    """What helps against an error of a GPU."""

    ELSEWHERE = "elsewhere"
    """The GPU, its links or its node's driver are broken: another node."""
    LESS_MEMORY = "less memory"
    FIX_INDEX = "fix index"
    """A kernel's own check failed, which is the same on every GPU: an index out of range."""
    RETRY = "retry"
    """A new process: either the program or the hardware failed."""


_TABLE = (
    (
        Remedy.ELSEWHERE,
        # CUDA's runtime: errors 214, 220, 226, 714, 802, 100, 999.
        r"uncorrectable ECC error|uncorrectable NVLink error|peer GPU memory over nvlink or a hardware error"
        r"|hardware stack error|system not yet initialized|no CUDA-capable device is detected|CUDA error: unknown error"
        r"|CUDA unknown error"
        # The driver and NVML.
        r"|fallen off (of )?the bus|GPU is lost|Unable to determine the device handle"
        # Xids of ECC, NVLink, the bus and the GPU's system processor: NVIDIA says to reset the GPU.
        r"|\bXid \([^)]*\): (48|64|74|79|95|119|120)\b",
    ),
    (
        Remedy.LESS_MEMORY,
        r"CUDA out of memory|CUDA error: out of memory|Cuda failure (2 )?'out of memory'|CUBLAS_STATUS_ALLOC_FAILED",
    ),
    (Remedy.FIX_INDEX, r"device-side assert triggered"),
    (
        Remedy.RETRY,
        r"CUDA error|CUDA driver error|Cuda failure|CUBLAS_STATUS_|CUDNN_STATUS_|unhandled cuda error|\bXid\b",
    ),
)
"""The first that matches counts: NCCL's and vLLM's errors contain the one of CUDA."""
_PATTERNS = tuple((remedy, re.compile(pattern, re.IGNORECASE)) for remedy, pattern in _TABLE)


def find_remedy(text: str) -> Remedy | None:
    """Return what helps against an error with this text; None if it is not known to come from a GPU."""
    return next((remedy for remedy, pattern in _PATTERNS if pattern.search(text)), None)


def find_line(text: str) -> str:
    """Return the line of a GPU's error that has its cause. Advice about debugging follows in other lines."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for _, pattern in _PATTERNS for line in lines if pattern.search(line)), text.strip())


class GpuFaultError(TransientError):
    """A GPU of this node does not work. A retry on the same node would meet it again."""

    address: str = ""
    """Address of the Pod whose GPU it is, if another Pod reports it."""

    def __init__(self, message: str) -> None:
        super().__init__(message if message.startswith(GPU_FAULT_PREFIX) else GPU_FAULT_PREFIX + message)


class GpuError(TransientError):
    """A GPU failed in a way that a new process may not meet again."""


class DeviceMemoryError(RLJobError):
    """A rank ran out of device memory in an update. Whether the user must act depends on what succeeded before."""
