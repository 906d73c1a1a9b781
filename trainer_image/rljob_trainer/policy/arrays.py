"""Arrays of micro-batches on the device.

A copy from ordinary memory makes the host wait for all work that the device has, and the device then waits for the
host. A micro-batch has a dozen such arrays. Some are needed only after its forward pass.
"""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy of `values`, which may be read-only, as what comes from Ray is. Does not wait for a GPU:
    torch keeps the pinned memory until the copy has ended."""
    host = torch.tensor(values, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def integers(values: NDArray[Any], device: torch.device) -> Tensor:
    return to_device(values, device, torch.int64)
