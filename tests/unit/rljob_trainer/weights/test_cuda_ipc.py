"""CUDA's calls against the locked torch's own runtime. There is no GPU: what they do was not run."""

from __future__ import annotations

import ctypes
import importlib.util

import pytest
import torch

from rljob_trainer.failures.devices import Remedy, find_remedy
from rljob_trainer.weights import cuda_ipc
from rljob_trainer.weights.cuda_ipc import CudaMemory, MappedCudaMemory

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA")
GPU = torch.device("cuda", 0)


def test_the_runtime_that_torch_has_loaded_has_all_functions() -> None:
    runtime = cuda_ipc.load_runtime()
    for name in cuda_ipc.FUNCTIONS:
        assert getattr(runtime, name), name


def test_the_runtime_is_the_one_of_the_locked_wheel() -> None:
    assert importlib.util.find_spec("nvidia") is not None
    version = ctypes.c_int()
    assert cuda_ipc.load_runtime().cudaRuntimeGetVersion(ctypes.byref(version)) == 0
    major, minor = map(int, str(torch.version.cuda).split("."))
    assert version.value == 1000 * major + 10 * minor, "torch's, not that of another package"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_the_obstacle_has_cudas_own_words() -> None:
    assert "CUDA driver" in cuda_ipc.find_obstacle(GPU) or "no CUDA-capable device" in cuda_ipc.find_obstacle(GPU)
    with pytest.raises(cuda_ipc.CudaIpcError, match=r"CUDA error: .* \(cudaMalloc\)"):
        CudaMemory(1024, GPU)
    with pytest.raises(cuda_ipc.CudaIpcError, match=r"CUDA error: .* \(cudaIpcOpenMemHandle\)"):
        MappedCudaMemory(bytes(cuda_ipc.HANDLE_BYTES), 1024, GPU)


class Runtime:
    """A runtime whose device memory is the process's own. It checks what it is given as CUDA does."""

    def __init__(self) -> None:
        self.memory: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.mapped: set[int] = set()
        self.refuses = ""

    def cudaSetDevice(self, index: int) -> int:  # noqa: N802
        assert index == 0
        return 0

    def cudaMalloc(self, pointer: ctypes._Pointer[ctypes.c_void_p], size: ctypes.c_size_t) -> int:  # noqa: N802
        if self.refuses == "cudaMalloc":
            return 2
        block = ctypes.create_string_buffer(size.value)
        self.memory[ctypes.addressof(block)] = block
        pointer._obj.value = ctypes.addressof(block)  # type: ignore[attr-defined]
        return 0

    def cudaFree(self, address: ctypes.c_void_p) -> int:  # noqa: N802
        del self.memory[address.value or 0]
        return 0

    def cudaIpcGetMemHandle(self, handle: ctypes._Pointer[cuda_ipc._Handle], address: ctypes.c_void_p) -> int:  # noqa: N802
        if self.refuses == "cudaIpcGetMemHandle":
            return 801
        data = (address.value or 0).to_bytes(cuda_ipc.HANDLE_BYTES, "little")
        ctypes.memmove(handle._obj.reserved, data, len(data))  # type: ignore[attr-defined]
        return 0

    def cudaIpcOpenMemHandle(  # noqa: N802
        self, pointer: ctypes._Pointer[ctypes.c_void_p], handle: cuda_ipc._Handle, flags: ctypes.c_uint
    ) -> int:
        assert flags.value == 1, "cudaIpcMemLazyEnablePeerAccess is the only flag"
        pointer._obj.value = int.from_bytes(bytes(handle.reserved), "little")  # type: ignore[attr-defined]
        self.mapped.add(pointer._obj.value)  # type: ignore[attr-defined]
        return 0

    def cudaIpcCloseMemHandle(self, address: ctypes.c_void_p) -> int:  # noqa: N802
        self.mapped.remove(address.value or 0)
        return 0

    def cudaGetErrorString(self, code: int) -> bytes:  # noqa: N802
        return {2: b"out of memory", 801: b"operation not supported"}[code]

    def cudaGetLastError(self) -> int:  # noqa: N802
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(cuda_ipc, "load_runtime", lambda: runtime)

    def view(address: ctypes.c_void_p, num_bytes: int, device: torch.device) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address.value or 0), dtype=torch.uint8)

    monkeypatch.setattr(cuda_ipc, "_as_tensor", view)
    return runtime


def test_what_one_side_writes_the_other_reads_and_both_give_it_back(runtime: Runtime) -> None:
    own = CudaMemory(1024, GPU)
    assert len(own.handle) == cuda_ipc.HANDLE_BYTES
    other = MappedCudaMemory(own.handle, 1024, GPU)
    own.tensor.fill_(7)
    assert bool((other.tensor == 7).all())
    other.close()
    own.close()
    assert (runtime.memory, runtime.mapped) == ({}, set())


def test_memory_that_cannot_be_shared_is_freed_and_the_obstacle_says_why(runtime: Runtime) -> None:
    assert cuda_ipc.find_obstacle(GPU) == ""
    runtime.refuses = "cudaIpcGetMemHandle"  # as under WSL2
    assert cuda_ipc.find_obstacle(GPU) == "CUDA error: operation not supported (cudaIpcGetMemHandle)"
    assert runtime.memory == {}, "nothing is left on the device"


def test_a_full_gpu_is_told_from_a_broken_one(runtime: Runtime) -> None:
    runtime.refuses = "cudaMalloc"
    with pytest.raises(cuda_ipc.CudaIpcError) as raised:
        CudaMemory(1024, GPU)
    assert find_remedy(str(raised.value)) is Remedy.LESS_MEMORY, "as torch's own errors"


def test_torch_reads_the_interface_that_a_pointer_has() -> None:
    """torch.as_tensor(..., device="cuda") takes it from this attribute; numpy has the same under another name."""
    interface = cuda_ipc._Pointer(4096, 10).__cuda_array_interface__
    assert interface == {"shape": (10,), "typestr": "|u1", "data": (4096, False), "version": 2}
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA|driver"):
        torch.as_tensor(cuda_ipc._Pointer(4096, 10), device=GPU)
