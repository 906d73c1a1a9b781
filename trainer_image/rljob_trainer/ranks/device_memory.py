"""The device memory of a rank: how it is allocated, how much it holds, and how what is free goes back. On CPUs, the
process' own memory."""

import gc
import os
from collections.abc import MutableMapping

import torch

from rljob_trainer.weights import heap

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_ALLOCATOR_SETTINGS = "expandable_segments:True,pinned_max_round_threshold_mb:1"
"""Segments that grow: micro-batches of other lengths fit where earlier ones were. And pinned memory as large as its
tensor, which torch rounds to the next power of two by default.

Of ranks alone: an engine is a process of its own, whose allocator is vLLM's affair. No other process maps a rank's
memory, which such segments make slow or impossible."""


def configure_allocator(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set up torch's allocators of a rank with a GPU, unless the user did. Call it before torch uses a GPU."""
    if not any(name in environment for name in _ALLOCATOR_VARIABLES):
        environment[_ALLOCATOR_VARIABLES[0]] = _ALLOCATOR_SETTINGS


def held_bytes(device: torch.device) -> int:
    """Return the memory of the device that this process holds; of the CPU, its resident memory."""
    if device.type == "cpu":
        return heap.resident_bytes()
    return int(torch.get_device_module(device).memory_reserved(device))


def release_unused(device: torch.device) -> None:
    """Return to the device, or to the system, what this process does not use."""
    gc.collect()  # autograd's graphs may be cycles
    if device.type == "cpu":
        heap.return_freed_memory()
    else:
        torch.get_device_module(device).empty_cache()
