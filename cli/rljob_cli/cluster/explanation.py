"""What `rljob explain` reports, as data for --output json and as text. Pure. Field names are part of the JSON."""

import functools
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from rljob_cli.cluster.formatting import format_age
from rljob_cli.cluster.observation import parse_time

_MAX_PODS_NAMED = 5
_Wrap = Callable[..., list[str]]
"""`_wrap` for the width of the terminal."""
DEFAULT_WIDTH = 110
"""Columns of a text for a pipe, or a file."""


@dataclass(frozen=True)
class PodProblem:
    name: str
    why: str
    restarts: int


@dataclass(frozen=True)
class RoleReport:
    name: str
    ready: int
    desired: int
    restarts: int
    problems: list[PodProblem]
    image: str = ""
    """What it runs: after an upgrade of the operator, roles may run images of different versions."""


@dataclass(frozen=True)
class WarningEvent:
    at: str
    about: str
    reason: str
    message: str
    count: int


@dataclass(frozen=True)
class InvalidSamples:
    """One kind of problem of a reward."""

    reward: str
    reason: str
    message: str
    first_step: int


@dataclass(frozen=True)
class Explanation:
    job: str
    phase: str
    since: str
    why: str
    """What it waits for, or how it ended; empty if nothing blocks it."""
    progress: str
    stalls: list[str]
    """What hangs, and what is waited for with the time that is left."""
    conditions: list[tuple[str, str]]
    """Other relevant conditions: 'NameConflict (ForeignObject)' and the message."""
    roles: list[RoleReport]
    invalid_samples: list[InvalidSamples]
    damaged_checkpoints: list[str]
    """Why samples have no valid score."""
    remedies: list[str]
    warnings: list[WarningEvent]
    next: list[str]
    """Commands to type."""
    unreadable: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["conditions"] = [{"name": name, "message": message} for name, message in self.conditions]
        return data


def format_explanation(found: Explanation, now: datetime, width: int = DEFAULT_WIDTH) -> str:
    """Return lines of at most `width` columns, unless a word or a command to type is longer."""
    wrap = functools.partial(_wrap, width)
    since = parse_time(found.since)
    lines = [f"{found.job}: {found.phase}" + (f" for {format_age(since, now)}" if since else "")]
    conditions = [f"{name}: {message}" for name, message in found.conditions]
    for text in (found.progress, found.why, *found.stalls, *conditions):
        lines += wrap("  ", text, indent_columns=4)
    damaged = [line for each in found.damaged_checkpoints for line in wrap("  ", each, indent_columns=4)]
    sections = {
        "Roles": _format_roles(wrap, found.roles),
        "Samples without a valid score": [
            line
            for each in found.invalid_samples
            for line in wrap(
                "  ",
                f"{each.reward}: {each.reason}, first in step {each.first_step}: {each.message}",
                indent_columns=4,
            )
        ],
        "Damaged checkpoints": damaged,
        "What to do": [line for remedy in found.remedies for line in wrap("  - ", remedy)],
        "Newest warnings": [line for warning in found.warnings for line in _format_warning(wrap, warning, now)],
        "Not readable": [line for message in found.unreadable for line in wrap("  - ", message)],
        "Next": [f"  {command}" for command in found.next],
    }
    for title, section in sections.items():
        lines += ["", title, *section] if section else []
    return "\n".join(lines)


def _format_warning(wrap: _Wrap, warning: WarningEvent, now: datetime) -> list[str]:
    times = f" (x{warning.count})" if warning.count > 1 else ""
    age = format_age(parse_time(warning.at), now)
    text = f"{age:>4}  {warning.about}  {warning.reason}{times}: {warning.message}"
    return wrap("  ", text, indent_columns=8)


def _format_roles(wrap: _Wrap, roles: list[RoleReport]) -> list[str]:
    lines = []
    width = max((len(role.name) for role in roles), default=0)
    for role in roles:
        state = [f"{role.ready}/{role.desired} ready", f"{role.restarts} restarts" if role.restarts else "", role.image]
        lines += wrap("  ", "   ".join([role.name.ljust(width), *filter(None, state)]), indent_columns=6)
        for problem in role.problems[:_MAX_PODS_NAMED]:
            lines += wrap("    ", ": ".join(filter(None, [problem.name, problem.why])), indent_columns=6)
        if len(role.problems) > _MAX_PODS_NAMED:
            lines.append(f"    and {len(role.problems) - _MAX_PODS_NAMED} more")
    return lines


def _wrap(width: int, prefix: str, text: str, indent_columns: int | None = None) -> list[str]:
    """Lines of at most `width`, divided between words; later ones indented as the first or by `indent_columns`."""
    indent = " " * (len(prefix) if indent_columns is None else indent_columns)
    wrapper = textwrap.TextWrapper(width, prefix, indent, break_long_words=False, break_on_hyphens=False)
    wrapped = []
    for line in text.splitlines():
        wrapped += wrapper.wrap(line)
        wrapper.initial_indent = indent
    return wrapped
