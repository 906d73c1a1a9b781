"""`rljob plan`: the memory of each role, by part, against what the job or --gpu names. Starts nothing."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rljob_api.errors import UserError
from rljob_api.quantity import show_bytes
from rljob_api.read.load import InvalidManifestError
from rljob_cli.check.from_model import describe_from_model, describe_unread
from rljob_cli.check.jobfile import JobFile, load
from rljob_cli.check.memory import build_question, describe_fields, describe_misfit, describe_obstacle, describe_remedy
from rljob_cli.check.preflight import can_read_rows, find_inputs
from rljob_cli.output import print_json
from rljob_cli.tables import build_table, show
from rljob_inputs.machine.bounded import bounded
from rljob_inputs.machine.installation import describe_installation
from rljob_inputs.memory.gpus import NAMES, count_gpus, find_gpu_bytes
from rljob_inputs.memory.parts import Moment, Need
from rljob_inputs.memory.plan import (
    Question,
    checkpoint_bytes,
    find_recomputation,
    max_row_tokens,
    micro_batch_tokens,
    plan_memory,
    plan_update,
)
from rljob_inputs.memory.sharing import share_gpus
from rljob_inputs.models.architectures import find_obstacles
from rljob_inputs.models.defaults import FromModel

_LENGTHS = ("spec.rollout.maxModelLen", "spec.rollout.sampling.maxTokens")
"""What the memory depends on, of the settings that the model decides."""
_FITS = {True: "fits", False: "DOES NOT FIT", None: ""}


def show_plans(
    paths: list[Path],
    overrides: list[str],
    claims: dict[str, Path],
    gpu: str | None,
    num_gpus: int | None,
    output: str,
) -> bool:
    """Return whether everything fits, with `num_gpus` in all. Raise UserError if a file, a model or `gpu`
    cannot be read."""
    gpu_bytes = _read_gpu(gpu)
    plans = [_plan(load(path, overrides), claims, gpu_bytes, num_gpus) for path in paths]
    if output == "json":
        print_json({"files": [_to_json(path, plan) for path, plan in zip(paths, plans, strict=True)]})
    else:
        for path, plan in zip(paths, plans, strict=True):
            _print(path, plan)
    return all(plan.fits for plan in plans)


def _read_gpu(gpu: str | None) -> int | None:
    if gpu is None:
        return None
    if (found := find_gpu_bytes(gpu)) is None:
        raise UserError(f"--gpu must be a size such as 80GiB or one of {', '.join(NAMES)}, got {gpu}")
    return found


class _Plan(NamedTuple):
    question: Question
    needs: list[Need]
    from_model: list[FromModel]
    gpus: dict[str, int]
    """By the field that requests them."""
    too_many: str
    """What to do about more GPUs than there are; empty if there are enough."""

    @property
    def fits(self) -> bool:
        return not self.too_many and all(need.fits is not False for need in self.needs)


@bounded
def _plan(file: JobFile, claims: dict[str, Path], gpu_bytes: int | None, num_gpus: int | None) -> _Plan:
    """Raise InvalidManifestError if the trained model's config.json cannot be read, or the model cannot be trained."""
    inputs = find_inputs(file, claims, None, set())
    question = build_question(file.job, inputs, gpu_bytes, num_gpus)
    if file.job.spec.model.source not in question.models:
        found = [each for each in inputs.findings if each.path.startswith("spec.model")]
        problems = [file.problem(each.path, each.message) for each in found]
        message = "cannot be read from here; for pvc:// pass --volume CLAIM=DIR"
        raise InvalidManifestError(str(file.path), problems or [file.problem("spec.model.source", message)])
    model = file.job.spec.model
    if not model.trust_remote_code and (obstacles := list(find_obstacles(question.models[model.source].config))):
        problems = [file.problem("spec.model.source", f"{model.source} {obstacle}") for obstacle in obstacles]
        raise InvalidManifestError(str(file.path), problems)
    gpus = count_gpus(question.job.spec)
    return _Plan(question, plan_memory(question), inputs.from_model, gpus, _find_excess(question, gpus))


def _find_excess(question: Question, gpus: dict[str, int]) -> str:
    total = sum(gpus.values())
    if question.num_gpus is None or total <= question.num_gpus:
        return ""
    sharing = share_gpus(question)
    remedy = f"what fits: {describe_fields(sharing)}" if sharing.fields else describe_obstacle(sharing)
    return f"{next(iter(gpus))}: the job takes {total} GPUs, --gpus is {question.num_gpus}; {remedy}"


def _print(path: Path, plan: _Plan) -> None:
    question, needs = plan.question, plan.needs
    rows: list[list[str]] = []
    for need in needs:
        unit = "GPU" if need.resource == "gpu" else "Pod"
        count = f"the same {unit}" if need.is_shared else f"{need.count} x {unit}"
        available = "" if need.available is None else show_bytes(need.available)
        peak, *others = _shown_moments(question, need)
        rows.append([need.role, count, f"at {peak.name}", show_bytes(peak.num_bytes), available, _FITS[need.fits]])
        if not need.is_shared:  # the trainer's rows have its parts
            rows += _part_rows(peak)
        for moment in others:
            rows.append(["", "", f"at {moment.name}", show_bytes(moment.num_bytes), "", ""])
            rows += _part_rows(moment)
    spec, update = question.job.spec, plan_update(question)
    print(f"{path}: RLJob {question.job.metadata.name}, memory of one GPU or Pod of each role at its peak")
    show(build_table(["ROLE", "COUNT", "PART", "NEEDS", "HAS", ""], rows))
    if plan.gpus:
        print(_describe_gpus(question, plan.gpus))
    for line in describe_from_model([value for value in plan.from_model if value.field in _LENGTHS]):
        print(line)
    chosen = f"{'auto is ' * (spec.trainer.micro_batch_tokens is None)}{update.micro_batch_tokens}"
    print(
        f"micro-batches of {micro_batch_tokens(question)} tokens (trainer.microBatchTokens {chosen}), "
        f"rows of up to {max_row_tokens(question)}; "
        f"a checkpoint has {show_bytes(checkpoint_bytes(question))}. ~ marks estimates."
    )
    if spec.trainer.gpus_per_replica:
        is_automatic = spec.trainer.gradient_checkpointing == "auto"
        print(f"trainer.gradientCheckpointing: {'auto is ' * is_automatic}{update.recomputation}")
    if not can_read_rows():
        print(f"no row was read, so that the longest prompt is unknown; {describe_installation('data')}")
    if any(need.resource == "gpu" and need.available is None for need in needs):
        print("the memory of the GPUs is unknown: pass --gpu h100-80gb, or select nvidia.com/gpu.memory in nodePool")
    for need in needs:
        if need.fits is False:
            print(f"{need.path}: {describe_misfit(need)}; {describe_remedy(need)}")
    if plan.too_many:
        print(plan.too_many)
    for line in describe_unread(question.job):
        print(line)


def _shown_moments(question: Question, need: Need) -> list[Moment]:
    """Return the peak, and then the other phases of a GPU that trainer and rollouts share: each may have parts that
    others have not."""
    is_shared = question.job.spec.shares_trainer and (need.role, need.resource) == ("trainer", "gpu")
    return [need.peak, *(moment for moment in need.moments if is_shared and moment != need.peak)]


def _part_rows(moment: Moment) -> list[list[str]]:
    parts = [(part, "~" if part.is_estimate else "") for part in moment.parts]
    return [["", "", f"  {part.name}", f"  {mark}{show_bytes(part.num_bytes)}", "", ""] for part, mark in parts]


def _describe_gpus(question: Question, gpus: dict[str, int]) -> str:
    total = sum(gpus.values())
    counts = ", ".join(f"{count} by {path.removesuffix('.gpusPerReplica')}" for path, count in gpus.items())
    models = ", and models of services," if question.job.spec.models_in_trainer else ""
    shared = f"; trainer and rollouts{models} share theirs, in turns" if question.job.spec.shares_trainer else ""
    return f"takes {total} GPU{'s' * (total > 1)} in all: {counts}{shared}"


def _to_json(path: Path, plan: _Plan) -> dict[str, Any]:
    question = plan.question
    return {
        "file": str(path),
        "job": question.job.metadata.name,
        "fits": plan.fits,
        "gpus": sum(plan.gpus.values()),
        "gpus_by_field": plan.gpus,
        "too_many_gpus": plan.too_many or None,
        "micro_batch_tokens": micro_batch_tokens(question),
        "row_tokens": max_row_tokens(question),
        "checkpoint_bytes": checkpoint_bytes(question),
        "recomputation": find_recomputation(question),
        "from_model": [asdict(value) for value in plan.from_model],
        "needs": [
            {
                "role": need.role,
                "path": need.path,
                "resource": need.resource,
                "count": need.count,
                "is_shared": need.is_shared,
                "peak": need.peak.name,
                "bytes": need.num_bytes,
                "certain_bytes": need.certain_bytes,
                "available_bytes": need.available,
                "fits": need.fits,
                "remedy": describe_remedy(need) if need.fits is False else None,
                "moments": [asdict(moment) | {"bytes": moment.num_bytes} for moment in need.moments],
            }
            for need in plan.needs
        ],
    }
