"""`rljob evaluate` on this machine: one job a model, one after the other, and one table.

All jobs are checked before the first one starts. Invariant: evaluation.json has what has ended, whatever happens to the
models that follow.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.run.comparisons import Comparison, ModelResult, list_figures, write_comparison
from rljob_api.run.folder import FILE_METRICS
from rljob_api.run.metrics import read_metrics
from rljob_cli.check.job_source import FIELD, require_weights
from rljob_cli.check.jobfile import JobFile, load_partial
from rljob_cli.check.verdict import judge
from rljob_cli.commands import parse_claims, use_fast_types
from rljob_cli.evaluate.models import Candidate, export, find_candidates, list_overrides, name_jobs
from rljob_cli.evaluate.results import print_comparison
from rljob_cli.exits import EXIT_FAILED, EXIT_INTERRUPTED
from rljob_cli.local.network import claim_block
from rljob_cli.options import EvaluateOptions
from rljob_cli.run import runfolder
from rljob_cli.run.command import Run
from rljob_cli.run.live import PlainOutput
from rljob_cli.tables import choose_console
from rljob_inputs.machine.installation import require


@dataclass(frozen=True)
class _Job:
    candidate: Candidate
    file: JobFile
    folder: Path


def evaluate_command(options: EvaluateOptions) -> int:
    require("rljob evaluate")
    directory, overrides = options.directory, options.overrides or []
    base = load_partial(options.files.path, overrides, runs=directory)
    if base.start is not None and not options.models:
        require_weights(base.start)
        overrides = [*overrides, f"{FIELD}={json.dumps(base.job.spec.model.source)}"]  # jobs of other names have no pin
    if not base.job.spec.held_out_sets:
        raise UserError(f"{options.files.path}: has no prompts to evaluate on; set data.eval or evaluation.sets")
    candidates = find_candidates(options.models or [], base.job.spec.model.source, directory)
    folder = (directory / f"{base.job.metadata.name}-evaluate").resolve()
    with runfolder.lock(folder):
        return _evaluate(base, candidates, overrides, folder, options)


def _evaluate(
    base: JobFile, candidates: Sequence[Candidate], overrides: list[str], folder: Path, options: EvaluateOptions
) -> int:
    # Progress is on stdout, unless that is for the result.
    say = partial(print, file=sys.stdout if options.output == "text" else sys.stderr, flush=True)
    claims = parse_claims(options.volumes)
    for candidate in candidates:
        export(candidate, say)
    jobs = [
        _prepare(base, candidate, name, overrides, folder, claims)
        for candidate, name in zip(candidates, name_jobs(base.job.metadata.name, candidates), strict=True)
    ]
    for index, job in enumerate(jobs):
        should_call = index == 0 and not options.no_call
        verdict = judge(job.file, job.folder, claims, target="local", should_call=should_call)
        verdict.raise_problems()
        verdict.print_warnings()
    if old := runfolder.set_aside(folder):
        say(f"the earlier evaluation is now {old}")
    folder.mkdir(parents=True)
    comparison = Comparison(job=base.job.metadata.name, models=[_describe(job, "Pending") for job in jobs])
    for index, job in enumerate(jobs):
        say(f"model {index + 1} of {len(jobs)}: {job.candidate.given}")
        comparison.models[index] = _run(job, claims, options)
        file = write_comparison(folder, comparison)
        if comparison.models[index].phase == "Interrupted":
            break
    print_comparison(comparison, options.output, file)
    phases = {model.phase for model in comparison.models}
    return EXIT_INTERRUPTED if "Interrupted" in phases else EXIT_FAILED if phases != {"Succeeded"} else 0


def _prepare(
    base: JobFile, candidate: Candidate, name: str, overrides: list[str], folder: Path, claims: dict[str, Path]
) -> _Job:
    changes = list_overrides(base.job, candidate, name)
    file = load_partial(base.path, [*overrides, *changes])
    use_fast_types(file.job, claims)
    return _Job(candidate, file, folder / name)


def _describe(job: _Job, phase: str, message: str = "") -> ModelResult:
    return ModelResult(
        model=job.candidate.given,
        source=job.file.job.spec.model.source,
        job=job.file.job.metadata.name,
        run=str(job.folder),
        phase=phase,
        message=message,
    )


def _run(job: _Job, claims: dict[str, Path], options: EvaluateOptions) -> ModelResult:
    runfolder.prepare(job.folder, job.file.job)
    network = claim_block(str(job.folder), options.network)
    output = PlainOutput(choose_console(options.output))
    run = Run(job.file.job, job.folder, network, claims, output)
    phase = asyncio.run(run.execute())
    metrics = read_metrics(job.folder / FILE_METRICS)
    run.write_summary(metrics)
    result = _describe(job, phase, "" if phase == "Succeeded" else run.message)
    return result.model_copy(update={"figures": list_figures(metrics.evaluations)})
