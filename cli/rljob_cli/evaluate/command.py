"""`rljob evaluate` on this machine: one job a model, one after the other, and one table.

All jobs are checked before the first one starts. Invariant: evaluation.json has what has ended, whatever happens to the
models that follow.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from rljob_api.run.comparisons import Comparison, ModelResult, list_figures, write_comparison
from rljob_api.run.folder import FILE_METRICS, last_checkpoint
from rljob_api.run.metrics import read_metrics
from rljob_api.run.summaries import format_summary, read_driver_summary
from rljob_cli.check.job_source import FIELD, require_weights
from rljob_cli.check.jobfile import JobFile, load_partial
from rljob_cli.check.preflight import read_trained_config
from rljob_cli.check.verdict import judge
from rljob_cli.commands import parse_claims
from rljob_cli.evaluate.jobs import list_overrides
from rljob_cli.evaluate.models import Candidate, export, find_candidates, name_jobs
from rljob_cli.evaluate.results import print_comparison
from rljob_cli.exits import EXIT_FAILED, EXIT_INTERRUPTED, guard
from rljob_cli.local.network import claim_block
from rljob_cli.local.node.cpus import has_bfloat16, use_float32
from rljob_cli.run import runfolder
from rljob_cli.run.command import Run
from rljob_cli.run.live import PlainOutput
from rljob_cli.run.summary import build_summary
from rljob_cli.tables import make_console, make_error_console
from rljob_inputs.machine.installation import find_device_extra, require


@dataclass(frozen=True)
class Options:
    claims: dict[str, Path]
    block: str | None
    """Loopback block of the Pods."""
    should_call: bool
    output: str

    @property
    def console(self) -> Console:
        return make_error_console() if self.output == "json" else make_console()

    def say(self, line: str) -> None:
        """Report progress: on stdout, unless that is for the result."""
        print(line, file=sys.stdout if self.output == "text" else sys.stderr, flush=True)


@dataclass(frozen=True)
class _Job:
    candidate: Candidate
    file: JobFile
    folder: Path


@guard
def evaluate_command(
    path: Path,
    models: Sequence[str],
    directory: Path,
    overrides: Sequence[str],
    volumes: list[str],
    block: str | None,
    should_call: bool,
    output: str,
) -> int:
    require(find_device_extra(), "rljob evaluate")
    options = Options(parse_claims(volumes), block, should_call, output)
    base = load_partial(path, list(overrides), runs=directory)
    if base.start is not None and not models:
        require_weights(base.start)
        overrides = [*overrides, f"{FIELD}={json.dumps(base.job.spec.model.source)}"]  # jobs of other names have no pin
    candidates = find_candidates(models, base.job.spec.model.source, directory)
    folder = (directory / f"{base.job.metadata.name}-evaluate").resolve()
    with runfolder.lock(folder):
        return _evaluate(base, candidates, list(overrides), folder, options)


def _evaluate(
    base: JobFile, candidates: Sequence[Candidate], overrides: list[str], folder: Path, options: Options
) -> int:
    for candidate in candidates:
        export(candidate, options.say)
    jobs = [
        _prepare(base, candidate, name, overrides, folder, options)
        for candidate, name in zip(candidates, name_jobs(base.job.metadata.name, candidates), strict=True)
    ]
    for index, job in enumerate(jobs):
        _check(job, replace(options, should_call=options.should_call and index == 0))
    if old := runfolder.set_aside(folder):
        options.say(f"the earlier evaluation is now {old}")
    folder.mkdir(parents=True)
    comparison = Comparison(job=base.job.metadata.name, models=[_describe(job, "Pending") for job in jobs])
    for index, job in enumerate(jobs):
        options.say(f"model {index + 1} of {len(jobs)}: {job.candidate.given}")
        comparison.models[index] = _run(job, options)
        file = write_comparison(folder, comparison)
        if comparison.models[index].phase == "Interrupted":
            break
    print_comparison(comparison, options.output, file)
    phases = {model.phase for model in comparison.models}
    return EXIT_INTERRUPTED if "Interrupted" in phases else EXIT_FAILED if phases != {"Succeeded"} else 0


def _prepare(
    base: JobFile, candidate: Candidate, name: str, overrides: list[str], folder: Path, options: Options
) -> _Job:
    changes = list_overrides(base.job, candidate, name, candidate.source)
    file = load_partial(base.path, [*overrides, *changes])
    if not has_bfloat16():
        use_float32(file.job, read_trained_config(file.job, options.claims))
    return _Job(candidate, file, folder / name)


def _check(job: _Job, options: Options) -> None:
    """Raise InvalidManifestError if the job cannot run here."""
    verdict = judge(job.file, job.folder, options.claims, target="local", should_call=options.should_call)
    verdict.raise_problems()
    verdict.print_warnings()


def _describe(job: _Job, phase: str, message: str = "") -> ModelResult:
    return ModelResult(
        model=job.candidate.given,
        source=job.file.job.spec.model.source,
        job=job.file.job.metadata.name,
        run=str(job.folder),
        phase=phase,
        message=message,
    )


def _run(job: _Job, options: Options) -> ModelResult:
    runfolder.prepare(job.folder, job.file.job)
    network = claim_block(str(job.folder), options.block)
    output = PlainOutput(options.console)
    run = Run(job.file.job, job.folder, network, options.claims, output)
    phase = asyncio.run(run.execute())
    metrics = read_metrics(job.folder / FILE_METRICS)
    summary = build_summary(
        name=job.file.job.metadata.name,
        phase=phase,
        total_steps=0,
        driver=read_driver_summary(job.folder),
        metrics=metrics,
        sessions=run.session.sessions,
        checkpoint=last_checkpoint(job.folder),
        template_arguments=job.file.job.spec.data.chat_template_arguments,
    )
    (job.folder / "summary.json").write_text(format_summary(summary))
    result = _describe(job, phase, "" if phase == "Succeeded" else run.message)
    return result.model_copy(update={"figures": list_figures(metrics.evaluations)})
