"""What run, validate and render do, from arguments to exit code. A user's mistake is a message on stderr and code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import yaml
from rich.console import Console

from rljob_api.errors import RLJobError, UserError
from rljob_api.read.load import InvalidManifestError, Problem
from rljob_cli.check.jobfile import JobFile, load, load_partly
from rljob_cli.check.preflight import Machine, find_findings
from rljob_cli.local import network as local_network
from rljob_cli.local.network import Network
from rljob_cli.main import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED
from rljob_cli.run import runfolder

_OUTPUTS = ("live", "plain", "json")
_RENDERED_TOKEN = "RENDERED-WITHOUT-A-TOKEN"


def guard(command: Callable[[], int]) -> int:
    """Run a command; one of our own errors, or a file that cannot be read or written, becomes its message."""
    try:
        return command()
    except RLJobError as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT
    except OSError as error:
        if error.filename is None:  # no file of the user's: a pipe that nobody reads any more, or a defect
            raise
        print(f"{error.filename}: {error.strerror}; name another path, or mend this one", file=sys.stderr)
        return EXIT_BAD_INPUT


def parse_claims(volumes: list[str]) -> dict[str, Path]:
    claims = {}
    for volume in volumes:
        claim, separator, folder = volume.partition("=")
        if not separator or not claim or not folder:
            raise UserError(f"--volume wants CLAIM=DIR, got {volume}")
        claims[claim] = Path(folder).resolve()
    return claims


def check(file: JobFile, folder: Path, claims: dict[str, Path], extra: list[Problem]) -> None:
    """Raise all errors at once; print warnings."""
    problems = [*file.problems, *extra]
    for finding in find_findings(file.job, folder, claims, Machine()):
        if file.is_known(finding.path):
            continue
        problem = file.problem(finding.path, finding.message, finding.line_within)
        if finding.is_warning:
            print(f"warning: {file.path}:{problem.line}: {problem}", file=sys.stderr)
        else:
            problems.append(problem)
    if problems:
        raise InvalidManifestError(str(file.path), problems)


def run_command(
    path: Path, directory: Path, overrides: list[str], volumes: list[str], fresh: bool, output: str, block: str | None
) -> int:
    def command() -> int:
        if output not in _OUTPUTS:
            raise UserError(f"--output must be one of {', '.join(_OUTPUTS)}, got {output}")
        claims = parse_claims(volumes)
        file = load_partly(path, overrides)
        folder = (directory / file.job.metadata.name).resolve()
        with runfolder.lock(folder):
            return _run_locked(file, folder, claims, fresh, output, block)

    return guard(command)


def _run_locked(
    file: JobFile, folder: Path, claims: dict[str, Path], fresh: bool, output: str, block: str | None
) -> int:
    problems, network = _claim_network(file, folder, block)
    if not fresh:
        for changed in runfolder.changed_fields(folder, file.job):
            message = f"differs from the run in {folder}; restore it, or add --fresh to begin anew"
            problems.append(file.problem(changed, message))
    check(file, folder, claims, problems)
    assert network is not None  # else there was a problem
    from rljob_cli.run.command import run_job
    from rljob_cli.run.live import make_output

    console = Console(stderr=output == "json")
    if fresh and (aside := runfolder.set_aside(folder)):
        console.print(f"the earlier run is now {aside}", soft_wrap=True, highlight=False)
    elif runfolder.has_checkpoint(folder):
        console.print(f"going on from the last checkpoint in {folder}", soft_wrap=True, highlight=False)
    runfolder.begin(folder, file.job)
    phase, _ = run_job(file.job, folder, network, claims, make_output(output, console), console)
    if phase == "Interrupted":
        again = f"rljob run {file.path} --dir {folder.parent}"
        console.print(
            f"to go on: {again} (with your --set and --volume, without --fresh)", soft_wrap=True, highlight=False
        )
    print(folder / runfolder.FILE_SUMMARY, flush=True)
    return {"Succeeded": 0, "Interrupted": EXIT_INTERRUPTED}.get(phase, EXIT_FAILED)


def _claim_network(file: JobFile, folder: Path, block: str | None) -> tuple[list[Problem], Network | None]:
    try:
        return [], local_network.claim(str(folder), block)
    except UserError as error:
        return [Problem("", file.document.line_of(()), str(error))], None


def validate_command(path: Path, overrides: list[str], volumes: list[str]) -> int:
    def command() -> int:
        claims = parse_claims(volumes)
        file = load_partly(path, overrides)
        check(file, Path("runs").resolve() / file.job.metadata.name, claims, [])
        print(f"{path}: RLJob {file.job.metadata.name} is valid")
        return 0

    return guard(command)


def render_command(path: Path, overrides: list[str]) -> int:
    def command() -> int:
        from rljob_operator.plan.job import render

        file = load(path, overrides, keep_references=True)
        children = render(file.job, new_token=lambda: _RENDERED_TOKEN, reward_models=file.reward_models)
        yaml.safe_dump_all(children, sys.stdout, sort_keys=False, allow_unicode=True, width=120)
        return 0

    return guard(command)
