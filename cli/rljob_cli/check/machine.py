"""Whether a job fits this machine: GPUs, packages, disk and memory."""

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rljob_api.manifest.job import RLJob
from rljob_cli.check.jobfile import Finding
from rljob_cli.local.node.gpus import find_gpus
from rljob_inputs.memory.parts import Need

_GIB = 2**30
_TRAINER_BYTES_PER_PARAMETER = 12
"""fp32 master weights and AdamW's two moments, as in a checkpoint."""
_EXPORT_BYTES_PER_PARAMETER = 2
_PACKAGES = ("torch", "ray", "vllm")
_MODEL = "spec.model.source"


@dataclass(frozen=True)
class Machine:
    """The resources of this machine. Tests replace it."""

    num_gpus: int = field(default_factory=lambda: len(find_gpus()))
    free_disk_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free
    available_memory_bytes: int = field(default_factory=lambda: psutil.virtual_memory().available)
    has_package: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None


def check_machine(
    job: RLJob, run_dir: Path, machine: Machine, num_parameters: Mapping[str, int], needs: Iterable[Need]
) -> Iterator[Finding]:
    """Yield what this machine lacks. `num_parameters` has the known sizes of models by the path of their source,
    `needs` the memory of each role."""
    if job.spec.suspend:
        yield Finding("spec.suspend", "is true, so nothing would run; set it to false")
    yield from _check_sandboxes(job)
    yield from _check_gpus(job, machine)
    yield from _check_packages(job, machine)
    yield from _check_disk(job, run_dir, machine, num_parameters)
    yield from _check_memory(machine, needs)


def _check_sandboxes(job: RLJob) -> Iterator[Finding]:
    for index, tool in enumerate(job.spec.agent.tools):
        if tool.sandbox is not None and tool.sandbox.provider == "agentSandbox":
            yield Finding(
                f"spec.agent.tools[{index}].sandbox.provider",
                "is agentSandbox, which needs a cluster; set provider: process to run the job on this machine",
            )


def _check_gpus(job: RLJob, machine: Machine) -> Iterator[Finding]:
    """Report too many GPUs at the first field that requests some, served models first."""
    spec = job.spec
    wanted = {
        f"{service.path}.{service.reward.served_model_field}.gpus": service.reward.replicas * model.gpus
        for service in spec.services
        if (model := service.reward.served_model)
    }
    for name, role in (("trainer", spec.trainer), ("rollout", spec.rollout)):
        wanted[f"spec.{name}.gpusPerReplica"] = role.replicas * role.gpus_per_replica
    if (total := sum(wanted.values())) > machine.num_gpus:
        path = next(path for path, gpus in wanted.items() if gpus)
        remedy = f"set {path.rpartition('.')[2]}: 0 to run on CPUs, or run it on a cluster"
        yield Finding(path, f"the job requests {total} GPUs, this machine has {machine.num_gpus}; {remedy}")


def _check_packages(job: RLJob, machine: Machine) -> Iterator[Finding]:
    missing = [name for name in _PACKAGES if not machine.has_package(name)]
    if missing:
        extra = "gpu" if job.spec.trainer.gpus_per_replica or job.spec.rollout.gpus_per_replica else "cpu"
        yield Finding("", f"{', '.join(missing)} not installed; run `uv sync --extra {extra}`")


def _check_disk(job: RLJob, run_dir: Path, machine: Machine, parameters: Mapping[str, int]) -> Iterator[Finding]:
    num_parameters = parameters.get(_MODEL, 0)
    checkpoint = job.spec.checkpoint
    # One more than is kept: the oldest is deleted only when the newest is complete.
    num_trained = job.spec.num_optimized_models * num_parameters
    needed = num_trained * _TRAINER_BYTES_PER_PARAMETER * (checkpoint.keep + 1)
    needed += num_parameters * _EXPORT_BYTES_PER_PARAMETER * (1 + checkpoint.export)
    existing = next(parent for parent in (run_dir, *run_dir.parents) if parent.exists())
    free = machine.free_disk_bytes(existing)
    if needed > free:
        problem = f"checkpoints need about {_show_bytes(needed)} in {run_dir}, which has {_show_bytes(free)} free"
        remedy = "free disk space, lower checkpoint.keep, or choose another disk with --dir"
        yield Finding("spec.checkpoint.keep", f"{problem}; {remedy}")
    if not os.access(existing, os.W_OK):
        yield Finding("", f"{existing} is not writable; choose another folder with --dir")


def _check_memory(machine: Machine, needs: Iterable[Need]) -> Iterator[Finding]:
    needed = sum(need.count * need.num_bytes for need in needs if need.resource == "host")
    if needed > machine.available_memory_bytes:
        have = _show_bytes(machine.available_memory_bytes)
        message = f"the job needs up to {_show_bytes(needed)} of memory, {have} are available; use fewer replicas"
        yield Finding("", f"{message}, or what `rljob plan` shows as large", is_warning=True)


def _show_bytes(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= 0.1 * _GIB else f"{num_bytes / 2**20:.1f} MiB"
