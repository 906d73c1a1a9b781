"""GPUs of a machine: device files and a program nvidia-smi, as Linux, WSL2 and containers have them."""

from __future__ import annotations

import pytest

from rljob_cli.local.node import gpus
from rljob_inputs.machine.nvidia import Gpu, Nvidia, find_devices, list_wsl_gpus, look, read_driver_version
from tests.support.nvidia import write_files, write_smi

L4 = "0, GPU-0, 580.65.06, 23034, NVIDIA L4, 8.9"
SECOND = "1, GPU-1, 580.65.06, 23034, NVIDIA L4, 8.9"
GIB = 2**30


def test_gpus_are_listed_with_memory_driver_and_capability(tmp_path):
    write_files(tmp_path, "nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", driver="580.65.06")
    smi = write_smi(tmp_path / "bin/nvidia-smi", L4, SECOND)
    found = look(tmp_path, str(tmp_path / "bin"))
    first = Gpu("0", "GPU-0", "NVIDIA L4", 23034 * 2**20, "580.65.06", 8.9)
    assert found.gpus[0] == first
    assert found == Nvidia(("0", "1"), "580.65.06", True, False, str(smi), found.gpus)


def test_driver_that_does_not_know_the_capability_lists_its_gpus_without(tmp_path):
    write_smi(tmp_path / "bin/nvidia-smi", "0, GPU-0, 470.82, 16160, Tesla V100, 7.0", knows_capability=False)
    assert look(tmp_path, str(tmp_path / "bin")).gpus == (
        Gpu("0", "GPU-0", "Tesla V100", 16160 * 2**20, "470.82", None),
    )


def test_memory_that_is_shared_with_the_host_is_unknown(tmp_path):
    write_smi(tmp_path / "bin/nvidia-smi", "0, GPU-0, 580.95.05, [N/A], NVIDIA GB10, 12.1")
    assert look(tmp_path, str(tmp_path / "bin")).gpus[0].memory_bytes == 0


def test_problem_of_nvidia_smi_is_what_it_says(tmp_path):
    write_smi(tmp_path / "bin/nvidia-smi", problem="Failed to initialize NVML: Driver/library version mismatch")
    found = look(tmp_path, str(tmp_path / "bin"))
    assert (found.gpus, found.problem) == ((), "Failed to initialize NVML: Driver/library version mismatch")


def test_wsl_has_no_device_files_and_its_own_nvidia_smi(tmp_path):
    write_files(tmp_path, "dxg")
    assert list_wsl_gpus(tmp_path) == [], "a GPU of another vendor"
    write_smi(tmp_path / "usr/lib/wsl/lib/nvidia-smi", L4)
    found = look(tmp_path, path=str(tmp_path))
    assert (found.is_wsl, found.devices, len(found.gpus)) == (True, (), 1)
    assert list_wsl_gpus(tmp_path) == ["0"]


@pytest.mark.parametrize(
    ("visible", "files", "wsl", "indices"),
    [
        (None, [], [], []),
        (None, ["nvidia0", "nvidia1", "nvidiactl", "nvidia-caps"], [], ["0", "1"]),
        (None, ["nvidia3", "nvidiactl"], [], ["0"]),  # a container with one GPU of several
        (None, [], ["0"], ["0"]),
        ("2,3", ["nvidia0"], [], ["2", "3"]),
        ("", ["nvidia0"], ["0"], []),
        ("-1", ["nvidia0"], [], []),
    ],
)
def test_gpus_of_rljob_run_are_those_that_cuda_sees(tmp_path, monkeypatch, visible, files, wsl, indices):
    write_files(tmp_path, *files)
    monkeypatch.setattr(gpus, "find_devices", lambda: find_devices(tmp_path))
    monkeypatch.setattr(gpus, "list_wsl_gpus", lambda: wsl)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.find_gpus() == indices


@pytest.mark.parametrize(("smi", "version"), [({}, "581.15"), ({"problem": "no driver"}, None)])
def test_wsl_has_the_driver_of_windows(tmp_path, monkeypatch, smi, version):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    write_files(tmp_path, "dxg")
    write_smi(tmp_path / "usr/lib/wsl/lib/nvidia-smi", "0, GPU-0, 581.15, 24576, NVIDIA RTX 4090, 8.9", **smi)
    assert read_driver_version(tmp_path) == version
