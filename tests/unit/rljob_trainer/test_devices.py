"""CPU or GPU by the spec alone, and what each missing part is called."""

import pytest
import torch

from rljob_api.errors import UserError
from rljob_trainer import devices
from rljob_trainer.devices import CudaFacts, choose_device, explain_missing_gpu
from rljob_trainer.failures.devices import GpuFaultError

_FIELD = "spec.trainer.gpusPerReplica"
_NO_LIBRARY = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver"
_TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver"


def facts(cuda="13.0", driver="580.65.06", reason=_NO_LIBRARY):
    return CudaFacts("2.13.0", cuda, driver, reason)


def test_spec_without_gpus_is_the_cpu_on_a_node_with_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device(0, _FIELD) == torch.device("cpu")
    assert choose_device(2, _FIELD) == torch.device("cuda", 0)


def test_spec_with_gpus_is_never_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "read_driver_version", lambda: None)
    with pytest.raises(UserError, match=r"^spec\.trainer\.gpusPerReplica is 2, and torch finds no GPU"):
        choose_device(2, _FIELD)


@pytest.mark.parametrize(
    ("found", "parts"),
    [
        (facts(driver=None), ("torch 2.13.0 is for CUDA 13.0", "no driver is visible", "spec.runtimeClassName")),
        (facts(), ("driver 580.65.06", "not in the container", "spec.runtimeClassName")),
        (
            facts(driver="550.54.15", reason=_TOO_OLD),
            ("CUDA 13.0", "driver 550.54.15 supports CUDA 12.4 at most", "upgrade the driver", "spec.trainer.image"),
        ),
        (facts(cuda=None), ("torch 2.13.0 of this image is for CPUs only", "spec.trainer.image", "EXTRA=gpu")),
    ],
)
def test_missing_gpu_names_versions_and_the_remedy(found, parts):
    error = explain_missing_gpu(4, _FIELD, found)
    assert isinstance(error, UserError)
    assert str(error).startswith(f"{_FIELD} is 4"), "the field comes first"
    for part in parts:
        assert part in str(error)


def test_gpu_that_does_not_start_under_a_working_driver_is_a_fault_of_the_node():
    error = explain_missing_gpu(4, _FIELD, facts(reason="Error 802: system not yet initialized\nmore"))
    assert isinstance(error, GpuFaultError)
    assert "Error 802: system not yet initialized (torch" in str(error)
    assert "580.65.06" in str(error)
