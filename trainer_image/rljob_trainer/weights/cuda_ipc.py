"""Device memory that another process can map: CUDA's own calls, for a rank and the engine on its GPU.

Not torch's reductions, on which vLLM's ipc engine is built. Memory of torch's allocator can be passed on only as long
as its segments do not expand, which a rank's do: the receiver would have to copy a file descriptor out of the rank,
which containers forbid. Its counter of references is never settled by a receiver that was killed, so that the rank
could not free the memory. And what it sends are Python objects, which a receiver would have to unpickle.

Invariant: memory comes from cudaMalloc and goes back with cudaFree; torch's allocator does not know it. A handle has 64
bytes and no rights of its own: it works for processes of the same user on the same machine.
"""

import ctypes
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

HANDLE_BYTES: Final = 64
_LAZY_PEER_ACCESS = 1
FUNCTIONS: Final = (
    "cudaSetDevice", "cudaMalloc", "cudaFree", "cudaIpcGetMemHandle", "cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle",
    "cudaGetErrorString", "cudaGetLastError",
)  # fmt: skip
"""The functions of CUDA's runtime that are called."""


class CudaIpcError(RuntimeError):
    """A call of CUDA failed. The message has its own words, after those of torch's errors (failures.devices)."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * HANDLE_BYTES)]


class _Pointer:
    """Memory of a device, as torch reads it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 2
        }  # fmt: skip


class CudaMemory:
    """Memory of this process's `device`, which others map by its handle."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._address = ctypes.c_void_p()
        _call(device, "cudaMalloc", ctypes.byref(self._address), ctypes.c_size_t(num_bytes))
        handle = _Handle()
        try:
            _call(device, "cudaIpcGetMemHandle", ctypes.byref(handle), self._address)
            self.tensor = _as_tensor(self._address, num_bytes, device)
        except BaseException:
            _call(device, "cudaFree", self._address)
            raise
        self._device, self.handle = device, bytes(handle.reserved)

    def close(self) -> None:
        """Free it. No view of `tensor` may be used after that, and no other process may have it mapped."""
        _call(self._device, "cudaFree", self._address)


class MappedCudaMemory:
    """Another process's memory."""

    def __init__(self, handle: bytes, num_bytes: int, device: torch.device) -> None:
        assert len(handle) == HANDLE_BYTES
        self._address, self._device = ctypes.c_void_p(), device
        value = _Handle.from_buffer_copy(handle)
        _call(device, "cudaIpcOpenMemHandle", ctypes.byref(self._address), value, ctypes.c_uint(_LAZY_PEER_ACCESS))
        self.tensor = _as_tensor(self._address, num_bytes, device)

    def close(self) -> None:
        """No view of `tensor` may be used after that."""
        _call(self._device, "cudaIpcCloseMemHandle", self._address)


def find_obstacle(device: torch.device) -> str:
    """Return why memory of this device cannot be shared, such as under WSL2; empty if it can."""
    try:
        CudaMemory(HANDLE_BYTES, device).close()
    except (CudaIpcError, OSError) as error:
        return str(error)
    return ""


@cache
def load_runtime() -> Any:
    """Raise OSError if torch is built without CUDA."""
    runtime = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime


def _call(device: torch.device, name: str, *arguments: Any) -> None:
    runtime = load_runtime()
    for code in (runtime.cudaSetDevice(device.index or 0), getattr(runtime, name)(*arguments)):
        if code:
            runtime.cudaGetLastError()  # else the next call of torch would report it
            raise CudaIpcError(f"CUDA error: {runtime.cudaGetErrorString(code).decode()} ({name})")


def _as_tensor(address: ctypes.c_void_p, num_bytes: int, device: torch.device) -> Tensor:
    return torch.as_tensor(_Pointer(address.value or 0, num_bytes), device=device)
