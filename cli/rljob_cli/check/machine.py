"""Whether a job fits this machine: GPUs, packages, disk and memory."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rljob_api.manifest.job import RLJob
from rljob_api.quantity import show_bytes
from rljob_cli.check.jobfile import Finding
from rljob_cli.local.node.gpus import find_gpu_bytes, find_gpus
from rljob_inputs.machine.installation import (
    Extra,
    describe_builds,
    describe_installation,
    describe_tracker,
    find_builds,
    find_missing,
    has_module,
    run_on_cpus,
)
from rljob_inputs.memory.gpus import count_gpus
from rljob_inputs.memory.parts import Need

_EXPORT_BYTES_PER_PARAMETER = 2
_MODEL = "spec.model.source"


@dataclass(frozen=True)
class Machine:
    """The resources of this machine. Tests replace it."""

    num_gpus: int = field(default_factory=lambda: len(find_gpus()))
    free_disk_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free
    available_memory_bytes: int = field(default_factory=lambda: psutil.virtual_memory().available)
    has_package: Callable[[str], bool] = has_module
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    has_netrc: Callable[[], bool] = lambda: any((Path.home() / name).exists() for name in (".netrc", "_netrc"))
    """`wandb login` writes the API key there."""
    vllm_builds: Mapping[str, str] = field(default_factory=find_builds)
    """The installed packages of vLLM, with their versions."""
    gpu_bytes: Callable[[], int | None] = find_gpu_bytes
    """Memory of each GPU. None: unknown."""


def check_machine(
    job: RLJob,
    run_dir: Path,
    machine: Machine,
    num_parameters: Mapping[str, int],
    needs: Iterable[Need],
    not_shared: str = "",
) -> Iterator[Finding]:
    """Yield what this machine lacks. `num_parameters` has the known sizes of models by the path of their source,
    `needs` the memory of each role. `not_shared`: why trainer and rollouts cannot share its GPUs."""
    if job.spec.suspend:
        yield Finding("spec.suspend", "is true, so nothing would run; set it to false")
    yield from _check_sandboxes(job)
    yield from _check_gpus(job, machine, not_shared)
    yield from _check_packages(job, machine)
    yield from _check_trackers(job, machine)
    yield from _check_tracing(job, machine)
    yield from _check_disk(job, run_dir, machine, num_parameters)
    yield from _check_memory(job, machine, needs)


def _check_sandboxes(job: RLJob) -> Iterator[Finding]:
    for index, tool in enumerate(job.spec.agent.tools):
        if tool.sandbox is not None and tool.sandbox.provider == "agentSandbox":
            yield Finding(
                f"spec.agent.tools[{index}].sandbox.provider",
                "is agentSandbox, which needs a cluster; set provider: process to run the job on this machine",
            )


def _check_gpus(job: RLJob, machine: Machine, not_shared: str) -> Iterator[Finding]:
    """Report too many GPUs at the first field that requests some, served models first."""
    wanted = count_gpus(job.spec)
    if (total := sum(wanted.values())) > machine.num_gpus:
        path = next(iter(wanted))
        reason = f"; they cannot be shared: {not_shared}" if not_shared and machine.num_gpus else ""
        remedy = f"set {path.rpartition('.')[2]}: 0 to run on CPUs, or run it on a cluster"
        yield Finding(path, f"the job requests {total} GPUs, this machine has {machine.num_gpus}{reason}; {remedy}")


def _check_packages(job: RLJob, machine: Machine) -> Iterator[Finding]:
    served = _served_gpus(job)
    device: Extra = "gpu" if any(served.values()) or job.spec.trainer.gpus_per_replica else "cpu"
    if missing := find_missing(device, machine.has_package):
        yield Finding("", f"{', '.join(missing)} not installed; {describe_installation(device)}")
    elif machine.vllm_builds:
        yield from _check_build(served, machine)


def _served_gpus(job: RLJob) -> dict[str, int]:
    """Return the GPUs of each replica of what vLLM serves, by the path of the field that requests them."""
    found = {
        f"{service.path}.{service.settings.served_model_field}.gpusPerReplica": model.gpus_per_replica
        for service in job.spec.services
        if (model := service.settings.served_model)
    }
    return found | {"spec.rollout.gpusPerReplica": job.spec.rollout.gpus_per_replica}


def _check_build(gpus: Mapping[str, int], machine: Machine) -> Iterator[Finding]:
    """Compare the build of vLLM with the GPUs of what it serves, by the paths of their fields."""
    builds = machine.vllm_builds
    installed = describe_builds(builds)
    if len(builds) > 1:
        device: Extra = "gpu" if any(gpus.values()) else "cpu"
        yield Finding("", f"{installed} overwrite each other's files; {describe_installation(device, builds)}")
        return
    is_for_cpus = run_on_cpus(builds)
    path = next((path for path, number in gpus.items() if bool(number) is is_for_cpus), None)
    if path is None or (is_for_cpus and not machine.num_gpus):  # too few GPUs are a separate finding
        return
    other = "set it to 0" if is_for_cpus else "set it to 1 or more"
    problem = f"is {gpus[path]}, and {installed} is installed, which runs on {'CPUs' if is_for_cpus else 'GPUs'} alone"
    yield Finding(path, f"{problem}; {describe_installation('gpu' if is_for_cpus else 'cpu', builds)}; or {other}")


def _check_trackers(job: RLJob, machine: Machine) -> Iterator[Finding]:
    tracking = job.spec.tracking
    for package, field_name in tracking.packages.items():
        if not machine.has_package(package):
            yield Finding(f"spec.tracking.{field_name}", describe_tracker(package))
    source = (tracking.custom or "").rpartition(":")[0]
    if source and not source.endswith(".py") and not machine.has_package(source.partition(".")[0]):
        yield Finding("spec.tracking.custom", f"{source} is not here; install it beside RLJob, or correct the name")
    if tracking.mlflow_experiment and not _has_variable(job, machine, "MLFLOW_TRACKING_URI"):
        message = "MLFLOW_TRACKING_URI is not set; set it in spec.head.env to the address of the MLflow server"
        yield Finding("spec.tracking.mlflowExperiment", message)
    has_key = any(_has_variable(job, machine, name) for name in ("WANDB_API_KEY", "WANDB_MODE")) or machine.has_netrc()
    if tracking.wandb_project and not has_key:
        message = "WANDB_API_KEY is not set; set it, or set WANDB_MODE: offline in spec.head.env"
        yield Finding("spec.tracking.wandbProject", message, is_warning=True)


def _check_tracing(job: RLJob, machine: Machine) -> Iterator[Finding]:
    reference = job.spec.tracing.headers_secret_ref if job.spec.tracing else None
    if reference and not machine.environment.get(reference.key):
        problem = f"refers to a cluster's Secret, which ${reference.key} replaces on this machine; set that variable"
        yield Finding("spec.tracing.headersSecretRef.key", problem)


def _has_variable(job: RLJob, machine: Machine, name: str) -> bool:
    """Return whether the head has an environment variable. One in its template counts, wherever it is."""
    return bool(job.spec.head.env.get(name) or machine.environment.get(name)) or name in str(job.spec.head.template)


def _check_disk(job: RLJob, run_dir: Path, machine: Machine, parameters: Mapping[str, int]) -> Iterator[Finding]:
    num_parameters = parameters.get(_MODEL, 0)
    # One more than is kept: the oldest is deleted only when the newest is complete.
    needed = job.spec.checkpoint_bytes(num_parameters) * (job.spec.num_kept_checkpoints + 1)
    needed += num_parameters * _EXPORT_BYTES_PER_PARAMETER * (1 + job.spec.num_exports)
    existing = next(parent for parent in (run_dir, *run_dir.parents) if parent.exists())
    free = machine.free_disk_bytes(existing)
    if needed > free:
        problem = f"checkpoints need about {show_bytes(needed)} in {run_dir}, which has {show_bytes(free)} free"
        remedy = "free disk space, lower checkpoint.keep, or choose another disk with --dir"
        yield Finding("spec.checkpoint.keep", f"{problem}; {remedy}")
    if not os.access(existing, os.W_OK):
        yield Finding("", f"{existing} is not writable; choose another folder with `rljob run --dir`")


def _check_memory(job: RLJob, machine: Machine, needs: Iterable[Need]) -> Iterator[Finding]:
    needed = sum(need.count * need.num_bytes for need in needs if need.resource == "host")
    if needed > machine.available_memory_bytes:
        have = show_bytes(machine.available_memory_bytes)
        message = f"the job needs up to {show_bytes(needed)} of memory, {have} are available; lower"
        message += f" trainer.microBatchTokens ({job.spec.trainer.largest_micro_batch}), replicas, or what `rljob plan`"
        yield Finding("", f"{message} shows as large", is_warning=True)
