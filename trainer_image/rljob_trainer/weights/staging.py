"""The memory through which a rank hands tensors over: on the device, or, without one, shared memory of the host.

Both sides have it mapped for one hand-over. What is written is there for the other side after `synchronize`.
"""

import mmap
import os
from pathlib import Path

import torch

from rljob_trainer.weights.cuda_ipc import CudaMemory, MappedCudaMemory


class HostMemory:
    def __init__(self, num_bytes: int, descriptor: int | None = None) -> None:
        """`descriptor`: of another process's memory, to map it. Without one, create it."""
        self.handle = b""
        self._file = os.memfd_create("rljob-weights") if descriptor is None else descriptor
        self.descriptor: int | None = self._file
        if descriptor is None:
            os.ftruncate(self._file, num_bytes)
        # Its pages live until the last view, here and there, is gone.
        self.tensor = torch.frombuffer(mmap.mmap(self._file, num_bytes), dtype=torch.uint8)

    def close(self) -> None:
        os.close(self._file)
        del self.tensor


class DeviceMemory(CudaMemory):
    descriptor: int | None = None


Staging = HostMemory | DeviceMemory
"""A rank's. `tensor`: [bytes] uint8; `handle`: with which a process of the same machine can map it; `descriptor`: a
file that the other process needs, too. Close it after every receiver has unmapped it, or is lost."""
MappedStaging = HostMemory | MappedCudaMemory
"""A receiver's."""


def create_staging(num_bytes: int, device: torch.device) -> Staging:
    return HostMemory(num_bytes) if device.type == "cpu" else DeviceMemory(num_bytes, device)


def map_staging(handle: bytes, descriptor: int | None, num_bytes: int, device: torch.device) -> MappedStaging:
    if device.type != "cpu":
        return MappedCudaMemory(handle, num_bytes, device)
    assert descriptor is not None
    return HostMemory(num_bytes, descriptor)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it in this thread."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()


def socket_path(folder: Path, device: torch.device) -> Path:
    """Return where the rank of this device listens: a GPU has the same UUID for all processes of the machine."""
    name = "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
    return folder / f"{name}.sock"
