"""The commands run, try, validate and plan, from arguments to exit code.

Without instructions for bfloat16, torch and vLLM convert each value before they multiply it, which takes several times
as long as float32: jobs that leave the type open use that.
"""

import functools
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rljob_api.errors import RLJobError, UserError
from rljob_api.manifest.algorithm import DynamicSampling
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.job_sections import Checkpoint, Tracking
from rljob_api.read.documents import Problem
from rljob_api.run.folder import FILE_SUMMARY, TRAJECTORIES, last_checkpoint
from rljob_api.run.origin import FILE_ORIGIN, Change
from rljob_cli.check.device_fields import DEFAULT_MODEL
from rljob_cli.check.job_source import find_copy, set_model
from rljob_cli.check.jobfile import RUNS, Finding, JobFile, Target, check_file, load, load_partial
from rljob_cli.check.machine import Machine
from rljob_cli.check.memory import describe_sharing, share_machine
from rljob_cli.check.preflight import check_objects, locate, read_trained_config
from rljob_cli.check.tenant_policy import load_policy
from rljob_cli.check.verdict import describe_unused, find_policy_problems, judge, print_verdict, to_json
from rljob_cli.exits import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED
from rljob_cli.export.steps import provide_model
from rljob_cli.local.network import claim_block
from rljob_cli.options import PlanOptions, RunOptions, ValidateOptions
from rljob_cli.output import print_error, print_json, say
from rljob_cli.run import runfolder
from rljob_cli.tables import choose_console, print_lines_on, show
from rljob_cli.trajectories.conversation import LEGEND, build_conversation
from rljob_cli.trajectories.index import Query, read_rows
from rljob_core.children.start_model import FIELD, locate_model, parse_start, with_any_claim
from rljob_inputs.machine.installation import require
from rljob_inputs.models.config import find_dtype_problem

_CPUINFO = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags of x86 and of Arm."""


def has_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether the CPUs have instructions for bfloat16. True where /proc/cpuinfo does not list them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return True
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), None)
    return flags is None or not _BFLOAT16_FLAGS.isdisjoint(flags)


def use_float32(job: RLJob, trained: Mapping[str, Any]) -> list[str]:
    """Let CPUs compute in float32 wherever the job leaves the type open, and the model allows it. Return the paths of
    the changed fields. `trained`: config.json of the model to train; empty if it is unknown."""
    spec, changed = job.spec, []
    trainer, rollout = spec.trainer, spec.rollout
    is_open = "dtype" not in trainer.model_fields_set and not trainer.gpus_per_replica and not rollout.gpus_per_replica
    if is_open and not find_dtype_problem(trained, "float32", on_cpus=True):
        trainer.dtype = "float32"
        changed.append("spec.trainer.dtype")
    for path, model in spec.served_models.items():
        if model.dtype == "auto" and not model.gpus_per_replica:
            model.dtype = "float32"
            changed.append(f"{path}.dtype")
    return changed


_RENDERED_TOKEN = "RENDERED-WITHOUT-A-TOKEN"


def parse_claims(volumes: list[str] | None) -> dict[str, Path]:
    claims = {}
    for volume in volumes or []:
        claim, separator, folder = volume.partition("=")
        if not separator or not claim or not folder:
            raise UserError(f"--volume must be CLAIM=DIR, got {volume}")
        claims[claim] = Path(folder).resolve()
    return claims


def use_fast_types(job: RLJob, claims: dict[str, Path]) -> list[str]:
    """Let CPUs without instructions for bfloat16 compute in float32. Return the changed fields."""
    return [] if has_bfloat16() else use_float32(job, read_trained_config(job, claims))


def run_command(options: RunOptions) -> int:
    require("rljob run")
    claims, directory = parse_claims(options.volumes), options.directory
    file = load_partial(options.files.path, options.overrides or [], runs=directory, resumes=not options.fresh)
    folder = (directory / file.job.metadata.name).resolve()
    with runfolder.lock(folder):
        return run_file(file, folder, claims, options)


def shorten(job: RLJob, **evaluation: Any) -> RLJob:
    """Return the job with one step of as few samples as there can be, and no result to keep. `evaluation`: fields."""
    spec = job.spec
    schedule = {"type": "synchronous", "max_staleness": None, "steps": 1, "mini_batches": 1}
    schedule |= {"prompts_per_step": spec.trainer.num_ranks}
    return job.with_spec(
        evaluation=spec.evaluation.model_copy(update=evaluation | {"every_steps": 0, "sets": [], "best": None}),
        schedule=spec.schedule.model_copy(update=schedule),
        algorithm=spec.algorithm.model_copy(
            update={"group_size": 2, "dynamic_sampling": DynamicSampling(enabled="never")}
        ),
        checkpoint=Checkpoint(export="never"),
        tracking=Tracking(tensorboard=False),
        suspend=False,
    )


def run_file(file: JobFile, folder: Path, claims: dict[str, Path], options: RunOptions, *, is_kept: bool = True) -> int:
    """Run a job in a folder that nothing else uses."""
    problems: list[Problem] = []
    fresh, output = options.fresh, options.output
    machine = Machine()
    sharing = share_machine(file.job, functools.partial(locate, claims=claims), machine)
    file = replace(file, job=sharing.apply(file.job))
    changed = use_fast_types(file.job, claims)
    allowed: list[Change] = []
    if not fresh:
        refused, allowed = _find_changed(file, folder)
        problems += refused
        if not (problems or file.problems) and runfolder.is_finished(folder, file.job):
            steps = file.job.spec.schedule.steps
            remedy = "to train longer, raise spec.schedule.steps; to start over, pass --fresh"
            print(f"{folder} has finished all {steps} steps; {remedy}", file=sys.stderr)
            _print_result(folder, "Succeeded", output)
            return 0
    problems += [file.problem("spec.checkpoint.storage", each) for each in _find_old_copy(file.job, fresh)]
    try:
        network = claim_block(str(folder), options.network)
    except UserError as error:
        problems.append(Problem("", file.document.line_of(()), str(error)))
    verdict = judge(file, folder, claims, target="local", extra=problems, should_call=not options.no_call)
    verdict.raise_problems()
    verdict.print_warnings()
    from rljob_cli.export.command import write_card
    from rljob_cli.report.command import write_report
    from rljob_cli.run.command import run_job, serve_job
    from rljob_cli.run.live import make_output

    if file.unused:
        print(describe_unused(file), file=sys.stderr)
    console = choose_console(output)
    say = print_lines_on(console)
    if fresh and (old := runfolder.set_aside(folder)):
        say(f"the earlier run is now {old}")
    elif step := last_checkpoint(folder):
        say(f"resumes after step {step}, the last checkpoint in {folder}")
        for each in allowed:
            say(f"changed after step {step}: {each.path} is {each.text_now}; it was {each.text_before}")
    if url := file.job.copy_url:
        say(f"copies the run's files to {url}, and resumes from there if {folder} has no newer checkpoint")
    if sharing.fields:
        say(describe_sharing(sharing, machine.num_gpus))
    if changed:
        say(f"{', '.join(changed)}: float32, since these CPUs have no instructions for bfloat16")
    for line in verdict.describe():
        say(line)
    if file.start is not None:
        file = replace(file, job=set_model(file.job, provide_model(file.start, folder, say)))
    runfolder.prepare(folder, file.job)
    if file.job.spec.service:
        return serve_job(file.job, folder, network, claims, make_output(output, console))
    summary = run_job(file.job, folder, network, claims, make_output(output, console), console)
    phase = summary.phase
    if is_kept:
        if summary.export and summary.export_step is not None:
            try:
                write_card(folder, summary.export_step, Path(summary.export))
            except OSError as error:  # the run has succeeded without it
                say(f"no card: {error}")
        console.print(f"logs: {folder / 'logs'}", soft_wrap=True, highlight=False)
        try:
            say(f"report: {write_report(folder)}")
        except RLJobError as error:  # the run itself has its result
            say(f"no report: {error}")
        if phase == "Interrupted":
            again = shlex.join(["rljob", "run", str(file.path), "--dir", str(folder.parent)])
            console.print(f"to resume: {again}", soft_wrap=True, highlight=False, markup=False)
            say("  (with your --set and --volume, without --fresh)")
        _print_result(folder, phase, output)
    return {"Succeeded": 0, "Interrupted": EXIT_INTERRUPTED}.get(phase, EXIT_FAILED)


def _find_changed(file: JobFile, folder: Path) -> tuple[list[Problem], list[Change]]:
    """Return why the job may not resume from the checkpoint in the folder, and what it changes if it does."""
    remedy = (
        "restore the value, give the job another metadata.name, or start over with --fresh; "
        f"to go on with its checkpoints anyway, remove {FILE_ORIGIN} there"
    )
    try:
        refused, allowed = runfolder.find_changed(folder, file.job)
    except ValueError as error:
        raise UserError(f"{folder / FILE_ORIGIN} is damaged; {remedy}") from error
    problems = [
        file.problem(each.path, f"is {each.text_now}, and {each.text_before} in the run in {folder}; {remedy}")
        for each in refused
    ]
    return problems, allowed


def _find_old_copy(job: RLJob, fresh: bool) -> list[str]:
    """Return why a run cannot start over: from the copy in object storage it would resume."""
    if not fresh or (url := job.copy_url) is None:
        return []
    from rljob_inputs.check import find_access
    from rljob_inputs.objects.listing import has_objects

    if not has_objects(url, find_access(job, os.environ).objects):
        return []
    return [f"{url} has an earlier run, from which this one would resume; remove it, or choose another prefix"]


def _print_result(folder: Path, phase: str, output: str) -> None:
    summary = folder / FILE_SUMMARY
    if output == "json":
        paths = {"folder": str(folder), "summary_file": str(summary)}
        print_json({"type": "result", "phase": phase, **paths, "summary": json.loads(summary.read_text())})
    else:
        print(summary, flush=True)


def try_command(options: RunOptions) -> int:
    """Run one step of as few samples as there can be, and show them. The folder stays only if that failed."""
    require("rljob try")
    path, claims = options.files.path, parse_claims(options.volumes)
    model = [f"spec.model.source={json.dumps(str(small))}"] if (small := find_copy(DEFAULT_MODEL, path.parent)) else []
    file = load_partial(path, [*model, *(options.overrides or [])])
    if file.job.spec.data.given_train is None:
        raise UserError(f"{path} has no spec.data.train, from which samples come; `rljob run` runs it")
    say(f"tries {path} with {file.job.spec.model.source}")
    data = file.job.spec.data.model_copy(update={"eval": None})
    file = replace(file, job=shorten(file.job.with_spec(given_data=data)))
    scratch, code = Path(tempfile.mkdtemp(prefix="rljob-try-")).resolve(), 0
    folder = scratch / file.job.metadata.name
    try:
        code = run_file(file, folder, claims, options, is_kept=False)
        rows = list(read_rows(folder / TRAJECTORIES, Query(lane="train")))
        for row in rows:
            show(build_conversation(row, full=False, tokens=True))
        if rows:
            show(LEGEND)
        if code == 0 and rows and all(row.score is None for row in rows):
            say(
                "all samples are invalid: the reward, or the agent, works for none of them"
                if any(row.rewards or row.failure for row in rows)
                else "no reward scores this row (teacher.when); set spec.data.train.offset to another one"
            )
            code = EXIT_FAILED
    finally:
        if code == EXIT_FAILED:
            say(f"kept: {folder}, with its logs")
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    return code


def validate_command(options: ValidateOptions) -> int:
    if options.render:
        return _render(options.files.paths, options.overrides or [], options.output)
    claims, output, found = parse_claims(options.volumes), options.output, []
    target: Target | None = "cluster" if options.cluster else "local" if options.local else None
    policy = load_policy(options.policy) if options.policy else None
    for path in options.files.paths:
        verdict, error = None, None
        try:
            file = load_partial(path, options.overrides or [])
            folder = RUNS.resolve() / file.job.metadata.name
            extra, doubts = find_policy_problems(file, policy)
            verdict = judge(file, folder, claims, target=target, extra=extra, should_call=not options.no_call)
            verdict = replace(verdict, warnings=[*verdict.warnings, *doubts])
            verdict.raise_problems()
        except UserError as caught:
            error = caught
        if output != "json" and error:
            print_error(error, EXIT_BAD_INPUT)
        if verdict:
            verdict.print_warnings()
        if output != "json" and verdict and not error:
            print_verdict(verdict, target)
        found.append(to_json(path, verdict, error))
    is_valid = all(one["valid"] for one in found)
    if output == "json":
        print_json({"valid": is_valid, "files": found})
    return 0 if is_valid else EXIT_BAD_INPUT


def plan_command(options: PlanOptions) -> int:
    from rljob_cli.check.memory_command import show_plans

    claims, overrides = parse_claims(options.volumes), options.overrides or []
    fits = show_plans(options.files.paths, overrides, claims, options.gpu, options.gpus, options.output)
    return 0 if fits else EXIT_BAD_INPUT


def _find_unknown_claim(file: JobFile) -> list[Finding]:
    """Return that job:// is rendered with a claim that only the cluster knows."""
    if (start := parse_start(file.job)) is None:
        return []
    source = locate_model(with_any_claim(file.job))
    message = f"is rendered as {source}; the operator mounts the claim of spec.checkpoint of RLJob {start.path}"
    return [Finding(FIELD, message, only="cluster")]


def _render(paths: list[Path], overrides: list[str], output: str) -> int:
    from rljob_cli.submit.command import print_objects
    from rljob_core.plan.job import render_children

    files = [load(path, overrides, keep_references=True) for path in paths]
    for file in files:
        # Paths of this machine are rendered as they are here: the objects are complete, but only this machine has them.
        findings = [*check_objects(file), *_find_unknown_claim(file)]
        check_file(file, [replace(found, is_warning=found.only == "cluster") for found in findings])
    children = [c for file in files for c in render_children(file.job, _RENDERED_TOKEN, file.reward_models)]
    print_objects(children, output)
    return 0
