"""Whether a job is valid, where it can run, and what to print about it."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api.errors import UserError
from rljob_api.manifest.policy import RLJobPolicy
from rljob_api.read.documents import Problem
from rljob_api.read.load import InvalidManifestError
from rljob_cli.check import tenant_policy
from rljob_cli.check.from_model import describe_from_model, describe_unread
from rljob_cli.check.job_source import go_offline
from rljob_cli.check.jobfile import Finding, JobFile, Target
from rljob_cli.check.machine import Machine
from rljob_cli.check.other_objects import describe
from rljob_cli.check.preflight import Preflight, can_read_rows, read_problem, run_checks
from rljob_cli.output import say
from rljob_inputs.findings import LengthTable, describe_lengths
from rljob_inputs.machine.installation import describe_installation
from rljob_inputs.models.defaults import FromModel

if TYPE_CHECKING:
    from rljob_cli.check.trial import Trial


@dataclass(frozen=True)
class Verdict:
    """The result of all checks of one file."""

    file: JobFile
    problems: list[Problem]
    """Errors. Empty: valid."""
    warnings: list[Problem] = field(default_factory=list)
    local: list[Problem] = field(default_factory=list)
    """Without a target: why it cannot run on this machine."""
    from_model: list[FromModel] = field(default_factory=list)
    lengths: list[LengthTable] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Lines about what was not read or called."""
    sharing: str = ""
    """As Preflight.sharing."""

    def raise_problems(self) -> None:
        """Raise InvalidManifestError if there are errors."""
        if self.problems:
            raise InvalidManifestError(str(self.file.path), self.problems)

    def describe(self) -> list[str]:
        """Return lines about what was found out."""
        lines = [*describe_from_model(self.from_model), *map(describe_lengths, self.lengths)]
        lines += describe_unread(self.file.job)
        return [*lines, *(trial.describe() for trial in self.trials), *self.skipped]

    def print_warnings(self) -> None:
        for problem in self.warnings:
            say(f"warning: {self.file.path}:{problem.line}: {problem}")


def judge(
    file: JobFile,
    run_dir: Path,
    claims: dict[str, Path],
    *,
    target: Target | None = None,
    extra: Iterable[Problem] = (),
    should_call: bool = True,
) -> Verdict:
    """Check a job for `target` (None: both), and then call its rewards once, unless there are errors."""
    go_offline(file.job)
    preflight = run_checks(file, run_dir, claims, Machine(), target)
    verdict = build_verdict(file, preflight, target, extra)
    if not can_read_rows():
        verdict = replace(verdict, skipped=[describe_skipped()])
    row = preflight.first_prompt
    has_no_rows = row is None and (verdict.skipped or file.job.spec.env_sources)  # both are said
    if not should_call or verdict.problems or has_no_rows or target == "cluster":
        return verdict
    from rljob_cli.check import trial  # imports an HTTP client

    trials = trial.call_rewards(file.job, row, say)
    found = list(trial.find_problems(file.job, trials))
    doubts = [*trial.find_missed_groups(file.job, trials)]
    if row is not None:
        doubts += trial.find_unrewarded_answer(file.job, trials, row)
    elif file.job.spec.rewards:
        doubts.append(Finding("spec.data.train.source", _UNREAD, is_warning=True))
    local = [_locate(file, finding) for finding in found if finding.only == "local" and target is None]
    problems = [_locate(file, finding) for finding in found if finding.only is None or target is not None]
    return replace(
        verdict,
        problems=problems,
        local=verdict.local + local,
        warnings=[*verdict.warnings, *(_locate(file, finding) for finding in doubts)],
        trials=trials,
        skipped=trial.describe_skipped(file.job, trials),
    )


_UNREAD = (
    "gave no row here, so no reward was called: columns, answers and scores are not checked. Call them with "
    "`rljob test-reward --completion TEXT --answer TEXT`"
)


def build_verdict(file: JobFile, preflight: Preflight, target: Target | None, extra: Iterable[Problem] = ()) -> Verdict:
    """Sort findings into errors, warnings, and what keeps a job from running on this machine alone."""
    verdict = Verdict(file, [*file.problems, *extra], from_model=preflight.from_model, lengths=preflight.lengths)
    verdict = replace(verdict, sharing=preflight.sharing)
    if target != "cluster":
        (verdict.problems if target == "local" else verdict.local).extend(file.local_problems)
    for finding in preflight.findings:
        if file.has_problem(finding.path):
            continue
        problem = _locate(file, finding)
        if finding.is_warning:
            verdict.warnings.append(problem)
        elif target is None and finding.only == "local":
            verdict.local.append(problem)
        elif target is not None or finding.only is None:
            verdict.problems.append(problem)
    return verdict


def find_policy_problems(file: JobFile, policy: RLJobPolicy | None) -> tuple[list[Problem], list[Problem]]:
    """What the policy of a namespace does not allow: errors, and warnings of what the defaults of the installation may
    allow. Empty for a file with other errors, which come first."""
    if policy is None or file.problems:
        return [], []
    with contextlib.suppress(UserError):  # another check says why the job cannot be built
        found = [*tenant_policy.find_policy_problems(file.job, file.reward_models, policy)]
        located = [(_locate(file, read_problem(each.message)), each.is_certain) for each in found]
        return [each for each, certain in located if certain], [each for each, certain in located if not certain]
    return [], []


def _locate(file: JobFile, finding: Finding) -> Problem:
    return file.problem(finding.path, finding.message, finding.line_within)


def print_verdict(verdict: Verdict, target: Target | None) -> None:
    """Print a valid file: what was found out about it, where it can run, and last that it is valid."""
    file, where = verdict.file, {"cluster": " for a cluster", "local": " for this machine", None: ""}[target]
    for line in verdict.describe():
        print(f"  {line}")
    if verdict.sharing:
        print(f"  `rljob run`: {verdict.sharing}")
    if verdict.local:
        print("  not on this machine, only on a cluster:")
        for problem in verdict.local:
            what = str(problem).partition("; run `")[0]  # who only submits need not install
            print(f"    {file.path}:{problem.line}: {what}")
    if target is None and file.relative:
        names = ", ".join(dict.fromkeys(file.relative.values()))
        print(f"  on a cluster: `rljob submit {shlex.quote(str(file.path))}` takes {names} along")
    if target is None and file.unused:
        print(f"  {describe_unused(file)}")
    warnings = verdict.warnings
    doubts = f", with {len(warnings)} warning{'s' * (len(warnings) > 1)}" if warnings else ""
    print(f"{file.path}: RLJob {file.job.metadata.name} is valid{where}{doubts}")


def describe_skipped() -> str:
    return f"no row was read, and no function was called: {describe_installation('data')}"


def describe_unused(file: JobFile) -> str:
    return f"`rljob run` ignores {', '.join(map(describe, file.unused))}; kubectl applies them"


_LISTS = {
    "problems": "problems",
    "warnings": "warnings",
    "local_problems": "local",
    "from_model": "from_model",
    "prompt_lengths": "lengths",
}
"""By name in JSON: the field of a verdict."""


def to_json(path: Path, verdict: Verdict | None, error: Exception | None = None) -> dict[str, Any]:
    """Return the verdict of one file, or why it cannot be read."""
    if verdict is None:
        problems = [asdict(problem) for problem in getattr(error, "problems", [])]
        problems = problems or [{"path": "", "line": 1, "message": str(error)}]
        return {"file": str(path), "valid": False, "problems": problems}
    return {
        "file": str(path),
        "valid": not verdict.problems,
        **{name: [asdict(each) for each in getattr(verdict, field)] for name, field in _LISTS.items()},
        "relative_paths": verdict.file.relative,
        "skipped": verdict.skipped,
        "rewards": [
            _show(trial, result=trial.result.model_dump(mode="json", exclude={"id"}) if trial.result else None)
            for trial in verdict.trials
            if trial.kind == "reward"
        ],
        "agent": [
            _show(trial, kind=trial.kind, serves=trial.serves) for trial in verdict.trials if trial.kind != "reward"
        ],
    }


def _show(trial: Trial, **own: Any) -> dict[str, Any]:
    return {"name": trial.name, "start_seconds": round(trial.start_seconds, 3), **own, "error": trial.error}
