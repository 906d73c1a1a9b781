"""What a check finds, and how findings and a file's own problems are reported together."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from rljob_api.read.documents import Problem
from rljob_api.read.load import InvalidManifestError
from rljob_cli.check.jobfile import JobFile


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or for a warning, may go wrong."""

    path: str
    message: str
    is_warning: bool = False
    line_within: int = 0
    """The line of a multi-line text at `path`, from 1."""


def check_file(file: JobFile, findings: Iterable[Finding], extra: Iterable[Problem] = ()) -> None:
    """Raise all errors at once; print warnings."""
    problems = [*file.problems, *extra]
    for finding in findings:
        if file.has_problem(finding.path):
            continue
        problem = file.problem(finding.path, finding.message, finding.line_within)
        if finding.is_warning:
            print(f"warning: {file.path}:{problem.line}: {problem}", file=sys.stderr)
        else:
            problems.append(problem)
    if problems:
        raise InvalidManifestError(str(file.path), problems)
