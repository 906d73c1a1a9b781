"""`rljob plan`: the memory of each role, by part, against what the job or --gpu names. Starts nothing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rljob_api.errors import UserError
from rljob_api.read.load import InvalidManifestError
from rljob_cli.check.jobfile import JobFile, load
from rljob_cli.check.memory import build_question, describe_misfit, describe_remedy, show_bytes
from rljob_cli.check.preflight import find_inputs
from rljob_cli.output import print_json
from rljob_cli.tables import build_table, show
from rljob_inputs.memory.gpus import NAMES, find_gpu_bytes
from rljob_inputs.memory.parts import Need
from rljob_inputs.memory.plan import Question, checkpoint_bytes, max_row_tokens, micro_batch_tokens, plan_memory

_FITS = {True: "fits", False: "DOES NOT FIT", None: ""}


def show_plans(paths: list[Path], overrides: list[str], claims: dict[str, Path], gpu: str | None, output: str) -> bool:
    """Return whether everything fits. Raise UserError if a file, a model or `gpu` cannot be read."""
    gpu_bytes = _read_gpu(gpu)
    plans = [_plan(load(path, overrides), claims, gpu_bytes) for path in paths]
    if output == "json":
        print_json({"files": [_to_json(path, *plan) for path, plan in zip(paths, plans, strict=True)]})
    else:
        for path, plan in zip(paths, plans, strict=True):
            _print(path, *plan)
    return all(need.fits is not False for _, needs in plans for need in needs)


def _read_gpu(gpu: str | None) -> int | None:
    if gpu is None:
        return None
    if (found := find_gpu_bytes(gpu)) is None:
        raise UserError(f"--gpu must be a size such as 80GiB or one of {', '.join(NAMES)}, got {gpu}")
    return found


def _plan(file: JobFile, claims: dict[str, Path], gpu_bytes: int | None) -> tuple[Question, list[Need]]:
    """Raise InvalidManifestError if the trained model's config.json cannot be read."""
    inputs = find_inputs(file, claims, None, set())
    question = build_question(file.job, inputs, gpu_bytes)
    if file.job.spec.model.source not in question.models:
        found = [each for each in inputs.findings if each.path.startswith("spec.model")]
        problems = [file.problem(each.path, each.message) for each in found]
        message = "cannot be read from here; for pvc:// pass --volume CLAIM=DIR"
        raise InvalidManifestError(str(file.path), problems or [file.problem("spec.model.source", message)])
    return question, plan_memory(question)


def _print(path: Path, question: Question, needs: list[Need]) -> None:
    rows: list[list[str]] = []
    for need in needs:
        unit = "GPU" if need.resource == "gpu" else "Pod"
        available = "" if need.available is None else show_bytes(need.available)
        total = [f"{need.count} x {unit}", f"at {need.peak.name}", show_bytes(need.num_bytes), available]
        rows.append([need.role, *total, _FITS[need.fits]])
        for part in need.peak.parts:
            estimate = "~" if part.is_estimate else ""
            rows.append(["", "", f"  {part.name}", f"  {estimate}{show_bytes(part.num_bytes)}", "", ""])
    spec = question.job.spec
    print(f"{path}: RLJob {question.job.metadata.name}, memory of one GPU or Pod of each role at its peak")
    show(build_table(["ROLE", "COUNT", "PART", "NEEDS", "HAS", ""], rows))
    print(
        f"micro-batches of {micro_batch_tokens(question)} tokens (trainer.microBatchTokens "
        f"{spec.trainer.micro_batch_tokens}), rows of up to {max_row_tokens(question)}; "
        f"a checkpoint has {show_bytes(checkpoint_bytes(question))}. ~ marks estimates."
    )
    if any(need.resource == "gpu" and need.available is None for need in needs):
        print("the memory of the GPUs is unknown: pass --gpu h100-80gb, or select nvidia.com/gpu.memory in nodePool")
    for need in needs:
        if need.fits is False:
            print(f"{need.path}: {describe_misfit(need)}; {describe_remedy(question, need)}")


def _to_json(path: Path, question: Question, needs: list[Need]) -> dict[str, Any]:
    return {
        "file": str(path),
        "job": question.job.metadata.name,
        "fits": all(need.fits is not False for need in needs),
        "micro_batch_tokens": micro_batch_tokens(question),
        "row_tokens": max_row_tokens(question),
        "checkpoint_bytes": checkpoint_bytes(question),
        "needs": [
            {
                "role": need.role,
                "path": need.path,
                "resource": need.resource,
                "count": need.count,
                "bytes": need.num_bytes,
                "certain_bytes": need.certain_bytes,
                "available_bytes": need.available,
                "fits": need.fits,
                "remedy": describe_remedy(question, need) if need.fits is False else None,
                "moments": [asdict(moment) | {"bytes": moment.num_bytes} for moment in need.moments],
            }
            for need in needs
        ],
    }
