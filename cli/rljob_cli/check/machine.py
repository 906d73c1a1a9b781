"""Whether a job fits this machine: GPUs, packages, disk and memory."""

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rljob_api.manifest.job import RLJob
from rljob_cli.check.jobfile import Finding
from rljob_cli.local.node.gpus import find_gpus
from rljob_operator.plan.validate import find_model_sources

_GIB = 2**30
_TRAINER_BYTES_PER_PARAMETER = 12
"""fp32 master weights and AdamW's two moments, as in a checkpoint."""
_GRADIENT_BYTES_PER_PARAMETER = 4
_FROZEN_BYTES_PER_PARAMETER = 2
"""The model's own weights under LoRA, in the compute dtype."""
_EXPORT_BYTES_PER_PARAMETER = 2
_PROCESS_BYTES = 0.7 * _GIB
"""One trainer or head with torch and Ray, without the model."""
_ROLLOUT_BYTES = 2.5 * _GIB
"""A vLLM server on CPU, without model and KV cache."""
_PACKAGES = ("torch", "ray", "vllm")
_MODEL = "spec.model.source"


@dataclass(frozen=True)
class Machine:
    """The resources of this machine. Tests replace it."""

    num_gpus: int = field(default_factory=lambda: len(find_gpus()))
    free_disk_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free
    available_memory_bytes: int = field(default_factory=lambda: psutil.virtual_memory().available)
    has_package: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None


def check_machine(job: RLJob, run_dir: Path, machine: Machine, num_parameters: Mapping[str, int]) -> Iterator[Finding]:
    """Yield what this machine lacks. `num_parameters` has the known sizes of models by the path of their source."""
    if job.spec.suspend:
        yield Finding("spec.suspend", "is true, so nothing would run; set it to false")
    yield from _check_gpus(job, machine)
    yield from _check_packages(job, machine)
    yield from _check_disk(job, run_dir, machine, num_parameters)
    yield from _check_memory(job, machine, num_parameters)


def _check_gpus(job: RLJob, machine: Machine) -> Iterator[Finding]:
    """Report too many GPUs at the first field that requests some, rewards first."""
    spec = job.spec
    wanted = {
        f"spec.rewards[{index}].{'model' if reward.model else 'judge.model'}.gpus": reward.replicas * model.gpus
        for index, reward in enumerate(spec.rewards)
        if (model := reward.served_model)
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


def _check_memory(job: RLJob, machine: Machine, parameters: Mapping[str, int]) -> Iterator[Finding]:
    spec = job.spec
    num_parameters = parameters.get(_MODEL, 0)
    needed = (1.0 + spec.trainer.replicas) * _PROCESS_BYTES
    if not spec.trainer.gpus_per_replica:
        bytes_per_parameter = _TRAINER_BYTES_PER_PARAMETER + _GRADIENT_BYTES_PER_PARAMETER
        needed += spec.num_optimized_models * num_parameters * bytes_per_parameter
        if spec.trainer.lora is not None:
            needed += _FROZEN_BYTES_PER_PARAMETER * num_parameters
    if not spec.rollout.gpus_per_replica:
        kv_cache_bytes = (spec.rollout.kv_cache_gib or 1) * _GIB
        needed += spec.rollout.replicas * (_ROLLOUT_BYTES + 2 * num_parameters + kv_cache_bytes)
    for index, reward in enumerate(spec.rewards):
        model = reward.served_model
        if model and not model.gpus:
            (path,) = find_model_sources(f"spec.rewards[{index}]", reward)
            model_bytes = 2 * parameters.get(path, 0)
            needed += reward.replicas * (_ROLLOUT_BYTES + model_bytes + (model.kv_cache_gib or 1) * _GIB)
    if needed > machine.available_memory_bytes:
        have = _show_bytes(machine.available_memory_bytes)
        message = f"the job needs about {_show_bytes(needed)} of memory, {have} are available; use fewer replicas"
        yield Finding("", message, is_warning=True)


def _show_bytes(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= 0.1 * _GIB else f"{num_bytes / 2**20:.1f} MiB"
