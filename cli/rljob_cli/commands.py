"""The commands run, validate and render, from arguments to exit code."""

import functools
import sys
from pathlib import Path

import yaml
from rich.console import Console

from rljob_api.errors import UserError
from rljob_api.read.documents import Problem
from rljob_cli.check.jobfile import JobFile, check_file, load, load_partial
from rljob_cli.check.preflight import Machine, run_checks
from rljob_cli.exits import EXIT_FAILED, EXIT_INTERRUPTED, guard
from rljob_cli.local.network import claim_block
from rljob_cli.run import runfolder

_OUTPUTS = ("live", "plain", "json")
_RENDERED_TOKEN = "RENDERED-WITHOUT-A-TOKEN"


def parse_claims(volumes: list[str]) -> dict[str, Path]:
    claims = {}
    for volume in volumes:
        claim, separator, folder = volume.partition("=")
        if not separator or not claim or not folder:
            raise UserError(f"--volume must be CLAIM=DIR, got {volume}")
        claims[claim] = Path(folder).resolve()
    return claims


@guard
def run_command(
    path: Path, directory: Path, overrides: list[str], volumes: list[str], fresh: bool, output: str, block: str | None
) -> int:
    if output not in _OUTPUTS:
        raise UserError(f"--output must be one of {', '.join(_OUTPUTS)}, got {output}")
    claims = parse_claims(volumes)
    file = load_partial(path, overrides)
    folder = (directory / file.job.metadata.name).resolve()
    with runfolder.lock(folder):
        return _run_locked(file, folder, claims, fresh, output, block)


def _run_locked(
    file: JobFile, folder: Path, claims: dict[str, Path], fresh: bool, output: str, block: str | None
) -> int:
    problems: list[Problem] = []
    try:
        network = claim_block(str(folder), block)
    except UserError as error:
        problems.append(Problem("", file.document.line_of(()), str(error)))
    if not fresh:
        message = f"differs from the run in {folder}; restore the value, or start over with --fresh"
        problems += [file.problem(changed, message) for changed in runfolder.changed_fields(folder, file.job)]
    check_file(file, run_checks(file.job, folder, claims, Machine()), problems)
    from rljob_cli.run.command import run_job
    from rljob_cli.run.live import make_output

    console = Console(stderr=output == "json")
    say = functools.partial(console.print, soft_wrap=True, highlight=False, markup=False)
    if fresh and (old := runfolder.set_aside(folder)):
        say(f"the earlier run is now {old}")
    elif runfolder.has_checkpoint(folder):
        say(f"resuming from the last checkpoint in {folder}")
    runfolder.prepare(folder, file.job)
    phase = run_job(file.job, folder, network, claims, make_output(output, console), console)
    if phase == "Interrupted":
        again = f"rljob run {file.path} --dir {folder.parent}"
        say(f"to resume: {again} (with your --set and --volume, without --fresh)")
    print(folder / runfolder.FILE_SUMMARY, flush=True)
    return {"Succeeded": 0, "Interrupted": EXIT_INTERRUPTED}.get(phase, EXIT_FAILED)


@guard
def validate_command(path: Path, overrides: list[str], volumes: list[str]) -> int:
    claims = parse_claims(volumes)
    file = load_partial(path, overrides)
    folder = Path("runs").resolve() / file.job.metadata.name
    check_file(file, run_checks(file.job, folder, claims, Machine()))
    print(f"{path}: RLJob {file.job.metadata.name} is valid")
    return 0


@guard
def render_command(path: Path, overrides: list[str]) -> int:
    from rljob_operator.plan.job import render_children

    file = load(path, overrides, keep_references=True)
    children = render_children(file.job, _RENDERED_TOKEN, file.reward_models)
    yaml.safe_dump_all(children, sys.stdout, sort_keys=False, allow_unicode=True, width=120)
    return 0
