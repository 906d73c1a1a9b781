"""What `make install` chooses, for machines as they are found."""

from __future__ import annotations

import re

import pytest

from dev.device import MIN_DRIVER, choose
from rljob_inputs.machine.nvidia import Gpu, Nvidia
from tests.paths import ROOT

SMI = "/usr/bin/nvidia-smi"
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"


def gpu(driver="580.65.06", capability=8.9):
    return Gpu("0", "GPU-0", "NVIDIA L4", 2**34, driver, capability)


@pytest.mark.parametrize(
    ("found", "device", "reason"),
    [
        (Nvidia(), "cpu", "/dev has no GPU of NVIDIA, and there is no nvidia-smi; for GPUs: make DEVICE=gpu install"),
        (Nvidia(smi=SMI, problem="No devices were found"), "cpu", "nvidia-smi lists no GPU"),
        (Nvidia(is_wsl=True), "cpu", "there is no nvidia-smi"),
        (Nvidia(("0",), "580.65.06", True, smi=SMI, gpus=(gpu(),)), "gpu", "1 GPU (NVIDIA L4, driver 580.65.06)"),
        (Nvidia(is_wsl=True, smi=SMI, gpus=(gpu(), gpu())), "gpu", "nvidia-smi lists 2 GPUs"),
        (Nvidia(("3",), "580.65.06", True), "gpu", "/dev/nvidia3 exists (driver 580.65.06)"),
        (Nvidia(("0",), smi=SMI, gpus=(gpu(capability=None),)), "gpu", "1 GPU"),
        (Nvidia(("0",), smi=SMI, gpus=(gpu(capability=7.0), gpu())), "gpu", "2 GPUs"),
        (Nvidia(("0",), smi=SMI, gpus=(gpu("535.1"),)), "", "is 535.1, and the locked torch needs 580 or later"),
        (Nvidia(is_wsl=True, smi=SMI, gpus=(gpu("566.03"),)), "", "upgrade it on Windows; to install for CPUs"),
        (Nvidia(("0",), "535.183.01", True), "", "make DEVICE=cpu install"),
        (Nvidia(("0",), smi=SMI, gpus=(gpu(capability=7.0),)), "", "has compute capability 7.0"),
        (Nvidia(("0",), "580.65.06", True, smi=SMI, problem=MISMATCH), "", f"says: {MISMATCH}; repair it, or choose"),
        (Nvidia(has_control=True), "", "neither /dev/nvidia0 nor nvidia-smi"),
        (Nvidia(is_wsl=True, smi=SMI, problem="GPU access blocked"), "", "GPU access blocked"),
    ],
)
def test_device_is_what_the_machine_has_and_never_cpu_next_to_a_gpu(found, device, reason):
    choice = choose(found)
    assert choice.device == device
    assert reason in choice.reason
    assert "\n" not in choice.reason


def test_driver_is_the_one_of_the_locked_cuda():
    version = re.search(r'name = "cuda-toolkit"\nversion = "(\d+)\.', (ROOT / "uv.lock").read_text())[1]
    assert (int(version), MIN_DRIVER) == (13, 580), "NVIDIA's CUDA compatibility table has the driver of each version"
