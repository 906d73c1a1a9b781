"""Errors of GPUs by the texts of CUDA, NCCL, vLLM and the driver. Each text is from a public report."""

from importlib.metadata import PackageNotFoundError, files

import pytest

from rljob_trainer.failures.devices import GpuFaultError, Remedy, find_line, find_remedy

_CUDA_ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
)
_NCCL_REMOTE = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a "
    "network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote "
    "process exiting prematurely.\nLast error:\nsocketProgressOpt: Call to recv from 172.1.2.3<33759> failed : "
    "Connection reset by peer"
)
_NCCL_CUDA = (
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.29.7\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\nCuda failure "
)
_CASES = [
    ("CUDA error: uncorrectable ECC error encountered" + _CUDA_ADVICE, Remedy.ELSEWHERE),
    ("CUDA error: uncorrectable NVLink error detected during the execution" + _CUDA_ADVICE, Remedy.ELSEWHERE),
    ("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error", Remedy.ELSEWHERE),
    ("CUDA error: hardware stack error", Remedy.ELSEWHERE),
    ("CUDA error: unknown error" + _CUDA_ADVICE, Remedy.ELSEWHERE),
    (
        "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() "
        "that might have already set an error? Error 802: system not yet initialized",
        Remedy.ELSEWHERE,
    ),
    ("CUDA error: no CUDA-capable device is detected", Remedy.ELSEWHERE),
    ("NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus", Remedy.ELSEWHERE),
    ("NVRM: Xid (PCI:0000:10:1c): 48, pid=1896, Double Bit ECC Error", Remedy.ELSEWHERE),
    ("NVRM: Xid (PCI:0000:10:1c): 31, pid=1896, MMU Fault", Remedy.RETRY),
    ("GPU is lost", Remedy.ELSEWHERE),
    ("Unable to determine the device handle for GPU0000:03:00.0: Unknown Error", Remedy.ELSEWHERE),
    (_NCCL_CUDA + "214 'uncorrectable ECC error encountered'", Remedy.ELSEWHERE),
    ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB", Remedy.LESS_MEMORY),
    (_NCCL_CUDA + "2 'out of memory'", Remedy.LESS_MEMORY),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", Remedy.LESS_MEMORY),
    ("CUDA error: device-side assert triggered" + _CUDA_ADVICE, Remedy.FIX_INDEX),
    ("CUDA error: an illegal memory access was encountered" + _CUDA_ADVICE, Remedy.RETRY),
    ("CUDA error: unspecified launch failure" + _CUDA_ADVICE, Remedy.RETRY),
    ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", Remedy.RETRY),
    ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, ...)`", Remedy.RETRY),
    (_NCCL_CUDA + "700 'an illegal memory access was encountered'", Remedy.RETRY),
    # Of other ranks, of the CPU, and of the configuration.
    (_NCCL_REMOTE, None),
    ("[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory", None),
    ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", None),
    ("User-specified max_model_len (99999) is greater than the derived max_model_len", None),
]


@pytest.mark.parametrize(("text", "remedy"), _CASES)
def test_text_of_an_error_has_its_remedy(text, remedy):
    assert find_remedy(text) is remedy


def test_texts_of_cuda_are_those_of_the_runtime_in_the_lock():
    try:
        library = next(file for file in files("nvidia-cuda-runtime") or () if file.name.startswith("libcudart.so."))
    except PackageNotFoundError:
        pytest.skip("torch has no CUDA runtime here")
    strings = library.locate().read_bytes()
    known = [text.splitlines()[0].removeprefix("CUDA error: ") for text, _ in _CASES if text.startswith("CUDA error: ")]
    texts = [text for text in known if "CUBLAS" not in text]
    assert len(texts) > 8
    assert [text for text in texts if text.encode() not in strings] == []


def test_line_of_the_cause_is_found_among_the_lines_of_nccl():
    assert find_line(_NCCL_CUDA + "214 'uncorrectable ECC error encountered'").startswith("Cuda failure 214")


def test_fault_is_marked_for_the_operator_once():
    assert str(GpuFaultError(str(GpuFaultError("CUDA error")))) == "GPU fault: CUDA error"
