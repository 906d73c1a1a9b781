"""Checks of a job before anything starts: its objects, inputs, rewards and agent, and whether it fits this machine.

Joins the checks of the operator, of the inputs (rljob_inputs) and of the rewards, which the cluster and the trainer use
as well. Invariant: a check reads; it starts nothing but its own process, and writes nothing but the Hub's cache.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api.errors import RLJobError, UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.job_sections import Tracking
from rljob_api.manifest.sources import parse_source
from rljob_cli.check import template_file
from rljob_cli.check.jobfile import Finding, JobFile, Target
from rljob_cli.check.machine import Machine, check_machine
from rljob_cli.check.memory import build_question, check_memory, describe_obstacle, describe_sharing, share_machine
from rljob_cli.check.rewards import check_service
from rljob_core.plan.validate import find_model_problems, find_problems
from rljob_inputs.findings import LengthTable
from rljob_inputs.machine.bounded import bounded
from rljob_inputs.machine.installation import find_missing
from rljob_inputs.memory.plan import plan_memory
from rljob_inputs.memory.sharing import Sharing
from rljob_inputs.models.defaults import FromModel
from rljob_inputs.prompts import Prompt

if TYPE_CHECKING:
    from rljob_inputs.check import InputsReport


_GIB = 2**30
_LARGE_BYTES = 20 * _GIB
"""Nodes often have 100 GB for images, logs and the files of all Pods."""
_STORAGE = "ephemeral-storage"


def check_head_disk(job: RLJob, num_parameters: Mapping[str, int]) -> Iterator[Finding]:
    """Warn about large checkpoints without a claim, unless the head requests the disk for them."""
    checkpoint, requested = job.spec.checkpoint, job.spec.head.resources.requests
    checkpoint_bytes = job.spec.checkpoint_bytes(num_parameters.get("spec.model.source", 0))
    needed = checkpoint_bytes * (job.spec.num_kept_checkpoints + 1)
    if checkpoint.persistent_volume_claim is not None or _STORAGE in requested or needed < _LARGE_BYTES:
        return
    problem = f"is not set, so the node of the head needs {needed / _GIB:.0f} GiB of disk for checkpoints"
    remedy = f"set a claim, or head.resources.requests.{_STORAGE}"
    yield Finding("spec.checkpoint.persistentVolumeClaim", f"{problem}; {remedy}", is_warning=True, only="cluster")


@dataclass(frozen=True)
class Preflight:
    findings: list[Finding]
    lengths: list[LengthTable]
    first_prompt: Prompt | None
    """The first training prompt. None if the data cannot be read here."""
    from_model: list[FromModel] = field(default_factory=list)
    """What the job leaves to its model."""
    sharing: str = ""
    """How `rljob run` has trainer and rollouts share this machine's GPUs; empty if it does not."""


@bounded
def run_checks(
    file: JobFile, run_dir: Path, claims: Mapping[str, Path], machine: Machine, target: Target | None = None
) -> Preflight:
    """Check a job for `target`; None: for both. A check of one target has it as the finding's `only`."""
    job = file.job
    no_folder = list(_check_claims(job, claims))
    inputs = find_inputs(file, claims, target, {finding.path for finding in no_folder})
    findings = check_objects(file)
    for service in job.spec.services:
        findings += check_service(service)
    findings += [*_check_weights(job), *_check_tracker_file(job), *no_folder]
    for found in inputs.findings:
        # What cannot be reached from here may be reached from a cluster.
        is_warning = found.is_warning or (found.is_transient and target != "local")
        findings.append(Finding(found.path, found.message, is_warning))
    question = build_question(job, inputs)
    findings += check_memory(question)
    findings += check_head_disk(job, inputs.num_parameters)
    sharing = Sharing()
    if target != "cluster":
        sharing = share_machine(job, partial(locate, claims=claims), machine)
        local = replace(question, job=sharing.apply(question.job))
        not_shared = describe_obstacle(sharing)
        needs = plan_memory(local)
        lacking = check_machine(local.job, run_dir, machine, inputs.num_parameters, needs, not_shared)
        findings += [replace(finding, only="local") for finding in lacking]
    wanted = [finding for finding in findings if target is None or finding.only in (None, target)]
    line = describe_sharing(sharing, machine.num_gpus) if sharing.fields else ""
    return Preflight(wanted, inputs.lengths, inputs.first_prompt, inputs.from_model, line)


def _check_tracker_file(job: RLJob) -> Iterator[Finding]:
    path, source = "spec.tracking.custom", (job.spec.tracking.custom or "").rpartition(":")[0]
    if source.endswith(".py"):
        yield Finding(path, Tracking.CLUSTER_RULES[0].message, only="cluster")
        if not Path(source).is_file():
            yield Finding(path, f"{source} not found; correct the path, which starts at the job file's folder")


def _check_weights(job: RLJob) -> Iterator[Finding]:
    weights = {f"spec.rewards[{index}].weight": reward.weight for index, reward in enumerate(job.spec.rewards)}
    if job.spec.agent.is_hosted:
        weights["spec.agent.rewardWeight"] = job.spec.agent.reward_weight
    if weights and all(weight <= 0 for weight in weights.values()):
        message = "no reward has a positive weight, so the model learns to score low; check the signs"
        path, weight = next(iter(weights.items()))
        yield Finding(path, f"is {weight:g}, and {message}", is_warning=True)


def check_objects(file: JobFile) -> list[Finding]:
    """Check the objects that a cluster would get."""
    found = [*map(read_problem, find_problems(file.job)), *_check_relative_paths(file)]
    inlined = {document.data["metadata"]["name"] for document in file.sources.values()}
    for name, model in file.reward_models.items():
        if name not in inlined:  # `rljob run` does not use it
            problems = find_model_problems(model)
            found += [Finding("", f"RewardModel {name}: {problem}", only="cluster") for problem in problems]
    return found


def read_problem(problem: str) -> Finding:
    """`spec.trainer.env must ...` -> a finding at that field."""
    path, _, message = problem.partition(" ")
    is_field = path.rstrip(":").partition(".")[0] in ("spec", "metadata")
    return Finding(path.rstrip(":"), message) if is_field else Finding("", problem)


def _check_relative_paths(file: JobFile) -> Iterator[Finding]:
    for path, written in file.named.items():
        if path not in file.relative:
            source = file.job.spec.sources.get(path)
            yield Finding(path, f"is a name that only `rljob` reads, got {written}; write {source}", only="cluster")
    for path, relative in file.relative.items():
        written = file.named.get(path, relative)
        others = {"file": "function.inline or configMapKeyRef", "workingDir": "a folder of the runner's image"}
        others |= {"file": "chatTemplate.inline"} if path == template_file.FIELD else {}
        other = others.get(path.rpartition(".")[2], "hf://org/name or pvc://claim/path")
        remedy = f"`rljob submit` takes it along, or use {other}"
        yield Finding(path, f"is a path on this machine, which no cluster has, got {written}; {remedy}", only="cluster")


def _check_claims(job: RLJob, claims: Mapping[str, Path]) -> Iterator[Finding]:
    for path, source in job.spec.sources.items():
        if not source.startswith("pvc://"):
            continue
        claim = source.removeprefix("pvc://").partition("/")[0]
        if claim not in claims:
            message = f"is on the claim {claim}, which has no local folder; add --volume {claim}=DIR"
            yield Finding(path, message, only="local")
        elif not claims[claim].is_dir():
            yield Finding(path, f"is on the claim {claim}, but --volume {claim}={claims[claim]} is not a folder")


def find_inputs(file: JobFile, claims: Mapping[str, Path], target: Target | None, skipped: set[str]) -> InputsReport:
    """Read a job's models and data. `skipped`: fields of sources that are left out."""
    from rljob_inputs.check import check_inputs  # imports the Hub's client

    sources = file.job.spec.sources
    left_out = {
        source
        for path, source in sources.items()
        # On a cluster an absolute path is one of the image.
        if path in skipped or (target == "cluster" and source.startswith("/") and path not in file.relative)
    }
    return check_inputs(
        file.job,
        lambda source: None if source in left_out else locate(source, claims),
        runs_here=target != "cluster",
        reads_rows=can_read_rows(),
    )


def can_read_rows() -> bool:
    """Whether rows of data and rewards can be checked: what they need is an extra."""
    return not find_missing("data")


def read_trained_config(job: RLJob, claims: Mapping[str, Path]) -> dict[str, Any]:
    """Return config.json of the model to train; empty if this machine cannot read it, which other checks report."""
    from rljob_inputs.check import find_access
    from rljob_inputs.models.files import read_config

    location = locate(job.spec.model.source, claims)
    if location is None:
        return {}
    with contextlib.suppress(RLJobError):
        return read_config(location, job.spec.model.revision, find_access(job, os.environ))
    return {}


def locate(source: str, claims: Mapping[str, Path]) -> str | None:
    """Return where this machine finds a source; None for a claim without a folder, for rows of an environment,
    and for a run that is not here."""
    try:
        parsed = parse_source(source)
    except UserError:
        return None
    if parsed.kind in ("env", "job"):
        return None
    if parsed.kind == "pvc":
        return str(claims[parsed.claim] / parsed.path) if parsed.claim in claims else None
    return source if parsed.is_remote else parsed.path
