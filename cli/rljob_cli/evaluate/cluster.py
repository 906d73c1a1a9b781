"""`rljob evaluate --submit`: one job a model in the cluster, all at once, and one table when they have ended.

The jobs are submitted as `rljob submit` does it. The results are those of their statuses.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rljob_api.manifest.evaluation import HeldOutSet
from rljob_api.manifest.job import RLJob
from rljob_api.run.comparisons import Comparison, Figure, ModelResult, list_names
from rljob_cli.check.jobfile import load_partial
from rljob_cli.cluster.client import Cluster
from rljob_cli.cluster.commands import on_cluster
from rljob_cli.cluster.other_versions import parse_status
from rljob_cli.cluster.top import view_row
from rljob_cli.evaluate.models import Candidate, export, find_candidates, list_overrides, name_jobs
from rljob_cli.evaluate.results import print_comparison
from rljob_cli.exits import EXIT_FAILED
from rljob_cli.options import ClaimOptions, EvaluateOptions, SubmitOptions
from rljob_cli.output import print_json
from rljob_cli.run.snapshot import FINAL_PHASES, message_of
from rljob_cli.submit.command import choose_namespace, plan_objects, print_objects, submit_command
from rljob_core.backend import Manifest, utc_now

_POLL_SECONDS = 2.0


def submit_evaluation(given: EvaluateOptions) -> int:
    """Submit a job for each model. With --wait, print the table of their results."""
    path, overrides = given.files.path, given.overrides or []
    base = load_partial(path, overrides, keep_references=True)
    options = SubmitOptions(
        files=given.files,
        claim=ClaimOptions(claim=given.claim),
        dry_run=given.dry_run,
        no_call=given.no_call,
        target=choose_namespace(given.target, base),
        output=given.output,
    )
    candidates = find_candidates(given.models or [], base.job.spec.model.source, given.directory, in_cluster=True)
    names = name_jobs(base.job.metadata.name, candidates)
    changes = [
        [*overrides, *list_overrides(base.job, candidate, name, _locate(candidate, path))]
        for candidate, name in zip(candidates, names, strict=True)
    ]
    if options.dry_run:
        objects = [each for one in changes for each in plan_objects(replace(options, overrides=one))]
        print_objects(objects, options.output)
        return 0
    for candidate, one in zip(candidates, changes, strict=True):
        export(candidate, options.say)
        if code := submit_command(replace(options, overrides=one), prints_result=False):
            return code
    if given.wait:
        return _compare(options.target, base.job, candidates, names, options)
    if options.output == "json":
        print_json({"job": base.job.metadata.name, "jobs": names})
    return 0


def _locate(candidate: Candidate, path: Path) -> str:
    """Return the source as a job's file names it: a folder of this machine is relative to the file, and goes along."""
    if candidate.is_local:
        return os.path.relpath(candidate.source, path.resolve().parent)
    return candidate.source


@on_cluster
async def _compare(
    cluster: Cluster, job: RLJob, candidates: Sequence[Candidate], names: Sequence[str], options: SubmitOptions
) -> int:
    ended = await _wait_for_all(cluster, names, options)
    sets = job.spec.held_out_sets
    results = [read_result(candidate, manifest, sets) for candidate, manifest in zip(candidates, ended, strict=True)]
    print_comparison(Comparison(job=job.metadata.name, models=results), options.output)
    return 0 if all(result.phase == "Succeeded" for result in results) else EXIT_FAILED


async def _wait_for_all(cluster: Cluster, names: Sequence[str], options: SubmitOptions) -> list[Manifest]:
    start, lines = time.monotonic(), dict[str, str]()
    while True:
        jobs = [await cluster.get_job(name) for name in names]
        for job in jobs:
            row = view_row(job, utc_now())
            line = ": ".join(filter(None, [row.name, row.phase, row.waits_for]))
            if lines.get(row.name) != line:
                options.say(f"[{time.monotonic() - start:4.0f}s] {line}")
                lines[row.name] = line
        if all(_has_ended(job) for job in jobs):
            return jobs
        await asyncio.sleep(_POLL_SECONDS)


def _has_ended(job: Manifest) -> bool:
    """An earlier submission of the job may have ended; the operator may not have seen this one yet."""
    status = parse_status(job)
    return status.phase in FINAL_PHASES and status.observed_generation >= job["metadata"].get("generation", 1)


def read_result(candidate: Candidate, job: Manifest, sets: Sequence[HeldOutSet]) -> ModelResult:
    """Return the result that the status of a job has. `sets`: those of the job."""
    status = parse_status(job)
    figures = [Figure.model_validate(figure.model_dump()) for figure in status.evaluation]
    return ModelResult(
        model=candidate.given,
        source=str(job["spec"]["model"]["source"]),
        job=job["metadata"]["name"],
        phase=status.phase or "Pending",
        message=_describe_missing(figures, sets) if status.phase == "Succeeded" else message_of(status),
        figures=figures,
    )


def _describe_missing(figures: Sequence[Figure], sets: Sequence[HeldOutSet]) -> str:
    """Return which figures the status lacks, for which a termination message has no room; empty if it has all."""
    found = {(figure.set, figure.name) for figure in figures}
    names = ((each.name, name) for each in sets for name in list_names(each.samples_per_prompt, each.pass_at))
    missing = [" ".join(pair) for pair in names if pair not in found]
    return f"not in its status: {', '.join(missing)}; the metrics.jsonl of its run has all" if missing else ""
