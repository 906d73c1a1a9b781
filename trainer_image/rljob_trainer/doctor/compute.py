"""Whether the devices compute: versions, the GPUs that the Pod sees, a product with its gradient, and an all-reduce."""

import socket
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from rljob_api.errors import RLJobError
from rljob_inputs.machine.installation import PACKAGES, Extra, describe_builds, describe_installation, run_on_cpus
from rljob_inputs.machine.nvidia import read_driver_version
from rljob_trainer.devices import explain_missing_gpu, read_cuda_facts
from rljob_trainer.doctor.report import Check
from rljob_trainer.failures.devices import find_line
from rljob_trainer.history.versions import find_versions

_SIZES = {"cpu": 512, "cuda": 8192}
"""Sizes of the square matrices."""
_REPETITIONS = 5
_TOLERANCE = 0.02
"""Tolerance of a mean in bf16, which has 8 bits."""
_TIMEOUT = timedelta(seconds=60)
_GIB = 1 << 30


def check_compute(num_gpus: int | None, field: str, num_ranks: int | None) -> Iterator[Check]:
    """`num_gpus`: how many the Pod was asked for, by `field`. None: those that it sees. `num_ranks`: of the all-reduce;
    None: one per GPU."""
    versions = find_versions()
    yield describe_versions(versions)
    num_found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = num_found if num_gpus is None else num_gpus
    yield check_devices(wanted, num_found, field)
    yield check_vllm(wanted, versions)
    num_used = min(wanted, num_found)
    for device in [torch.device("cuda", index) for index in range(num_used)] or [torch.device("cpu")]:
        yield check_product(device)
    yield check_all_reduce(num_ranks or max(1, num_used), "cuda" if num_used else "cpu")


def describe_versions(versions: Mapping[str, str]) -> Check:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None
    found = dict(versions) | {
        "CUDA of torch": torch.version.cuda or "none",
        "NCCL": nccl or "none",
        "driver": read_driver_version() or "none",
    }
    return Check("versions", "ok", ", ".join(f"{name} {version}" for name, version in found.items()))


def check_devices(wanted: int, found: int, field: str) -> Check:
    text = f"{found} GPUs, asked for {wanted}"
    if wanted and not found:
        return Check("devices", "failed", text, str(explain_missing_gpu(wanted, field, read_cuda_facts())))
    if found < wanted:
        remedy = f"{field} is {wanted}: see the Pod's limits and NVIDIA_VISIBLE_DEVICES, which the device plugin sets"
        return Check("devices", "failed", text, remedy)
    if found > wanted:
        remedy = "the Pod sees GPUs that it did not ask for: the image or the Pod sets NVIDIA_VISIBLE_DEVICES"
        return Check("devices", "warning", text, remedy)
    return Check("devices", "ok", text)


def check_vllm(wanted: int, versions: Mapping[str, str]) -> Check:
    builds = {name: versions[name] for name in PACKAGES if name in versions}
    if not builds:
        return Check("vLLM", "warning", "not installed", "rollouts need an image with vLLM")
    device: Extra = "gpu" if wanted else "cpu"
    installed = describe_builds(builds)
    remedy = f"the image built with EXTRA={device}; without images, {describe_installation(device, builds)}"
    if len(builds) > 1:
        return Check("vLLM", "failed", installed, f"they overwrite each other's files: {remedy}")
    if wanted and run_on_cpus(builds):
        return Check("vLLM", "failed", f"{installed}, for CPUs alone", f"a rollout with {wanted} GPUs needs {remedy}")
    if not wanted and not run_on_cpus(builds):
        return Check("vLLM", "warning", f"{installed}, for GPUs alone", f"a rollout on CPUs needs {remedy}")
    return Check("vLLM", "ok", installed)


def check_product(device: torch.device) -> Check:
    """Multiply in bf16 and differentiate, and compare with the known result."""
    name = f"bf16 on {device}"
    size = _SIZES[device.type]
    try:
        with torch.device(device):
            left = torch.full((size, size), 0.5, dtype=torch.bfloat16, requires_grad=True)
            right = torch.full((size, size), 1.0, dtype=torch.bfloat16, requires_grad=True)
            (left @ right).sum().backward()  # the first call loads kernels
            _synchronize(device)
            started = time.monotonic()
            for _ in range(_REPETITIONS):
                result = left @ right
                left.grad = right.grad = None
                result.mean().backward()
            _synchronize(device)
        seconds = (time.monotonic() - started) / _REPETITIONS
        assert left.grad is not None
        expected = {"product": (result, size * 0.5), "gradient": (left.grad * size, 1.0)}
        wrong = [what for what, (value, is_) in expected.items() if not _is_close(value, is_)]
    except RuntimeError as error:
        return Check(name, "failed", find_line(str(error)), "the GPU or its driver does not work: use another node")
    rate = 3 * 2 * size**3 / seconds / 1e12
    found = f"{_describe(device)}: {rate:.2g} TFLOP/s forward and backward"
    if wrong:
        return Check(
            name, "failed", f"{found}; wrong {' and '.join(wrong)}", "the device computes wrongly: do not use it"
        )
    return Check(name, "ok", found)


def _is_close(value: torch.Tensor, expected: float) -> bool:
    # Not allclose with a reference on the same device: that could be wrong likewise.
    values = value.detach().float()
    return bool(((values - expected).abs() <= _TOLERANCE * expected).all())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / _GIB:.1f} GiB"


def check_all_reduce(num_ranks: int, device_type: str) -> Check:
    """Sum over local ranks. More than one are processes."""
    backend = "nccl" if device_type == "cuda" else "gloo"
    name = f"all-reduce of {num_ranks}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (num_ranks, port, device_type)
    try:
        if num_ranks == 1:
            _reduce(0, *arguments)
        else:
            spawn(_reduce, arguments, nprocs=num_ranks)
    except (RLJobError, RuntimeError, ProcessException) as error:
        remedy = (
            "NCCL_DEBUG=INFO shows where it fails: shared memory, peer access or the network" if num_ranks > 1 else ""
        )
        return Check(name, "failed", f"{backend}: {find_line(str(error))}", remedy)
    return Check(name, "ok", backend)


def _reduce(rank: int, num_ranks: int, port: int, device_type: str) -> None:
    """Raise RuntimeError if the sum is wrong."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=num_ranks,
        timeout=_TIMEOUT,
        device_id=device if device_type == "cuda" else None,
    )
    try:
        value = torch.full((1 << 20,), float(rank + 1), device=device)
        dist.all_reduce(value)
        expected = num_ranks * (num_ranks + 1) / 2
        if not bool((value == expected).all()):
            raise RuntimeError(f"the sum of {num_ranks} ranks is {value[0].item()}, not {expected}")
    finally:
        dist.destroy_process_group()
