"""Checks of a job before anything starts: its files, its rewards, and whether it fits this machine.

Invariant: a check reads; it starts and writes nothing.
"""

import difflib
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rljob_api.errors import UserError
from rljob_api.functions.static_check import check_function
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.job_sections import DataSource
from rljob_api.manifest.reward import FunctionReward, Reward, Scope
from rljob_api.manifest.scorers import JudgeReward, find_judge_problems
from rljob_api.manifest.sources import parse_source
from rljob_cli.check.inspect_files import count_parameters, find_data_files, find_model_problem, read_columns
from rljob_cli.check.jobfile import Finding
from rljob_cli.local.node.gpus import find_gpus
from rljob_cli.local.secrets import find_reference
from rljob_operator.plan.validate import find_model_sources
from rljob_operator.plan.validate import find_problems as find_operator_problems

_GIB = 2**30
_TRAINER_BYTES_PER_PARAMETER = 12
"""fp32 master weights and AdamW's two moments, as in a checkpoint."""
_GRADIENT_BYTES_PER_PARAMETER = 4
_EXPORT_BYTES_PER_PARAMETER = 2
_PROCESS_BYTES = 0.7 * _GIB
"""One trainer or head with torch and Ray, without the model."""
_ROLLOUT_BYTES = 2.5 * _GIB
"""A vLLM server on CPU, without model and KV cache."""
_TEMPLATE_FIELD = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")
_PACKAGES = ("torch", "ray", "vllm")


@dataclass(frozen=True)
class Machine:
    """The resources of this machine. Tests replace it."""

    num_gpus: int = field(default_factory=lambda: len(find_gpus()))
    free_disk_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free
    available_memory_bytes: int = field(default_factory=lambda: psutil.virtual_memory().available)
    has_package: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None


def run_checks(job: RLJob, run_dir: Path, claims: Mapping[str, Path], machine: Machine) -> list[Finding]:
    findings = [*_check_operator(job), *_check_claims(job, claims), *_check_model(job, claims)]
    for path, data in _data_sources(job).items():
        findings += _check_source(data, path, job.spec.data.template, claims)
    for index, reward in enumerate(job.spec.rewards):
        findings += check_reward(reward, f"spec.rewards[{index}]")
    findings += [*_check_gpus(job, machine), *_check_packages(job, machine)]
    return [*findings, *_check_disk(job, run_dir, claims, machine), *_check_memory(job, claims, machine)]


def local_path(source: str, claims: Mapping[str, Path]) -> Path | None:
    """Return the path of a source on this machine; None for hf:// and for claims without a folder."""
    try:
        parsed = parse_source(source)
    except UserError:
        return None
    if parsed.kind == "pvc":
        return claims[parsed.claim] / parsed.path if parsed.claim in claims else None
    return None if parsed.kind == "hf" else Path(parsed.path)


def _check_operator(job: RLJob) -> Iterator[Finding]:
    for problem in find_operator_problems(job):
        path, _, message = problem.partition(" ")
        yield Finding(path.rstrip(":"), message) if path.startswith(("spec.", "metadata.")) else Finding("", problem)
    if job.spec.suspend:
        yield Finding("spec.suspend", "is true, so nothing would run; set it to false")


def _data_sources(job: RLJob) -> dict[str, DataSource]:
    data = job.spec.data
    return {"spec.data.train": data.train} | ({"spec.data.eval": data.eval} if data.eval else {})


def _model_sources(job: RLJob) -> dict[str, str]:
    sources = {"spec.model.source": job.spec.model.source}
    for index, reward in enumerate(job.spec.rewards):
        sources |= find_model_sources(f"spec.rewards[{index}]", reward)
    return sources


def _check_claims(job: RLJob, claims: Mapping[str, Path]) -> Iterator[Finding]:
    data = {f"{path}.source": data.source for path, data in _data_sources(job).items()}
    for path, source in {**_model_sources(job), **data}.items():
        if not source.startswith("pvc://"):
            continue
        claim = source.removeprefix("pvc://").partition("/")[0]
        if claim not in claims:
            yield Finding(path, f"is on the claim {claim}, which has no local folder; add --volume {claim}=DIR")
        elif not claims[claim].is_dir():
            yield Finding(path, f"is on the claim {claim}, but --volume {claim}={claims[claim]} is not a folder")


def _check_model(job: RLJob, claims: Mapping[str, Path]) -> Iterator[Finding]:
    for path, source in _model_sources(job).items():
        folder = local_path(source, claims)
        problem = find_model_problem(folder) if folder else ""
        if problem:
            remedy = "set a Hugging Face folder, as save_pretrained writes it, or hf://org/name"
            yield Finding(path, f"{problem}; {remedy}")


def _check_source(data: DataSource, path: str, template: str, claims: Mapping[str, Path]) -> Iterator[Finding]:
    location = local_path(data.source, claims)
    if location is None:
        return
    if not location.exists():
        yield Finding(f"{path}.source", f"file {location} not found{_near_file(location)}")
        return
    files = find_data_files(location)
    if not files:
        yield Finding(f"{path}.source", f"the folder {location} has neither .jsonl nor .parquet files")
    for file in files:
        try:
            columns = read_columns(file)
        except UserError as error:
            yield Finding(f"{path}.source", str(error))
        else:
            yield from _check_columns(data, path, template, file, columns)


def _check_columns(data: DataSource, path: str, template: str, file: Path, columns: list[str]) -> Iterator[Finding]:
    for field_path, column in ((f"{path}.prompt", data.prompt), (f"{path}.answer", data.answer)):
        if column is not None and column not in columns:
            near = difflib.get_close_matches(column, columns, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield Finding(field_path, f"{file} has no column {column}; it has {', '.join(columns)}{hint}")
    if unknown := sorted({*_TEMPLATE_FIELD.findall(template)} - {"", "prompt", *columns}):
        message = f"refers to {', '.join(unknown)}, which {file} does not have; it has {', '.join(columns)}"
        yield Finding("spec.data.template", message)


def _near_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (folder {path.parent} not found either)"
    near = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def check_reward(reward: Reward, path: str) -> Iterator[Finding]:
    """Check a function's source, or a judge's parser, without executing it."""
    if reward.judge is not None:
        yield from _check_judge(reward, reward.judge, f"{path}.judge")
    if reward.function is not None:
        yield from _check_function(reward.function, reward.scope, f"{path}.function")


def _check_judge(reward: Reward, judge: JudgeReward, path: str) -> Iterator[Finding]:
    for name, problem in find_judge_problems(judge):
        yield Finding(f"{path}.{name}", problem)
    reference = find_reference(reward)
    if reference and not os.environ.get(reference.key):
        problem = f"refers to a cluster's Secret, which ${reference.key} replaces on this machine; set that variable"
        yield Finding(f"{path}.endpoint.apiKeySecretRef.key", problem)


def _check_function(function: FunctionReward, scope: Scope, path: str) -> Iterator[Finding]:
    if function.inline is not None:
        name = f"{path}.inline"
        for problem in check_function(function.inline, name, function, scope):
            line, _, message = problem.removeprefix(f"{name}:").partition(": ")
            yield Finding(name, f"line {line}: {message}", line_within=int(line) if line.isdigit() else 0)
    elif function.file is None:
        remedy = "use function.file or function.inline for `rljob run`"
        yield Finding(f"{path}.configMapKeyRef", f"needs a cluster; {remedy}")
    elif not (file := Path(function.file)).is_file():
        yield Finding(f"{path}.file", f"file {file} not found{_near_file(file)}")
    else:
        try:
            problems = check_function(file.read_text(encoding="utf-8"), str(file), function, scope)
        except (OSError, UnicodeDecodeError) as error:
            problems = [f"{file} cannot be read: {error}"]
        yield from (Finding(f"{path}.file", problem) for problem in problems)


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


def _check_disk(job: RLJob, run_dir: Path, claims: Mapping[str, Path], machine: Machine) -> Iterator[Finding]:
    num_parameters = _count_parameters(job.spec.model.source, claims)
    checkpoint = job.spec.checkpoint
    # One more than is kept: the oldest is deleted only when the newest is complete.
    needed = num_parameters * _TRAINER_BYTES_PER_PARAMETER * (checkpoint.keep + 1)
    needed += num_parameters * _EXPORT_BYTES_PER_PARAMETER * (1 + checkpoint.export)
    existing = next(parent for parent in (run_dir, *run_dir.parents) if parent.exists())
    free = machine.free_disk_bytes(existing)
    if needed > free:
        problem = f"checkpoints need about {_show_bytes(needed)} in {run_dir}, which has {_show_bytes(free)} free"
        remedy = "free disk space, lower checkpoint.keep, or choose another disk with --dir"
        yield Finding("spec.checkpoint.keep", f"{problem}; {remedy}")
    if not os.access(existing, os.W_OK):
        yield Finding("", f"{existing} is not writable; choose another folder with --dir")


def _check_memory(job: RLJob, claims: Mapping[str, Path], machine: Machine) -> Iterator[Finding]:
    spec = job.spec
    num_parameters = _count_parameters(spec.model.source, claims)
    needed = (1.0 + spec.trainer.replicas) * _PROCESS_BYTES
    if not spec.trainer.gpus_per_replica:
        needed += num_parameters * (_TRAINER_BYTES_PER_PARAMETER + _GRADIENT_BYTES_PER_PARAMETER)
    if not spec.rollout.gpus_per_replica:
        kv_cache_bytes = (spec.rollout.kv_cache_gib or 1) * _GIB
        needed += spec.rollout.replicas * (_ROLLOUT_BYTES + 2 * num_parameters + kv_cache_bytes)
    for reward in spec.rewards:
        model = reward.served_model
        if model and not model.gpus:
            model_bytes = 2 * _count_parameters(model.source, claims)
            needed += reward.replicas * (_ROLLOUT_BYTES + model_bytes + (model.kv_cache_gib or 1) * _GIB)
    if needed > machine.available_memory_bytes:
        have = _show_bytes(machine.available_memory_bytes)
        message = f"the job needs about {_show_bytes(needed)} of memory, {have} are available; use fewer replicas"
        yield Finding("", message, is_warning=True)


def _count_parameters(source: str, claims: Mapping[str, Path]) -> int:
    folder = local_path(source, claims)
    return count_parameters(folder) if folder else 0


def _show_bytes(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= 0.1 * _GIB else f"{num_bytes / 2**20:.1f} MiB"
