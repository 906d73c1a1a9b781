"""What `rljob explain` reports, as data for --output json and as text. Pure. Field names are part of the JSON."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from rljob_cli.cluster.formatting import format_age
from rljob_cli.cluster.observation import parse_time

_MAX_PODS_NAMED = 5
_WIDTH = 110


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


@dataclass(frozen=True)
class WarningEvent:
    at: str
    about: str
    reason: str
    message: str
    count: int


@dataclass(frozen=True)
class Explanation:
    job: str
    phase: str
    since: str
    why: str
    """What it waits for, or how it ended; empty if nothing blocks it."""
    progress: str
    conditions: list[tuple[str, str]]
    """Other relevant conditions: 'NameConflict (ForeignObject)' and the message."""
    roles: list[RoleReport]
    remedies: list[str]
    warnings: list[WarningEvent]
    next: list[str]
    """Commands to type."""
    unreadable: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["conditions"] = [{"name": name, "message": message} for name, message in self.conditions]
        return data


def format_explanation(found: Explanation, now: datetime) -> str:
    since = parse_time(found.since)
    lines = [f"{found.job}: {found.phase}" + (f" for {format_age(since, now)}" if since else "")]
    lines += [f"  {found.progress}"] if found.progress else []
    lines += _wrap("  ", found.why)
    for name, message in found.conditions:
        lines += _wrap("  ", f"{name}: {message}")
    if found.roles:
        lines += ["", "Roles", *_format_roles(found.roles)]
    if found.remedies:
        lines += ["", "What to do"]
        for remedy in found.remedies:
            lines += _wrap("  - ", remedy)
    if found.warnings:
        lines += ["", "Newest warnings"]
        for warning in found.warnings:
            times = f" (x{warning.count})" if warning.count > 1 else ""
            age = format_age(parse_time(warning.at), now)
            text = f"{age:>4}  {warning.about}  {warning.reason}{times}: {warning.message}"
            lines += _wrap("  ", text, indent_columns=8)
    if found.unreadable:
        lines += ["", "Not readable"]
        for message in found.unreadable:
            lines += _wrap("  - ", message)
    if found.next:
        lines += ["", "Next", *(f"  {line}" for line in found.next)]
    return "\n".join(lines)


def _format_roles(roles: list[RoleReport]) -> list[str]:
    lines = []
    width = max(len(role.name) for role in roles)
    for role in roles:
        restarts = f"   {role.restarts} restarts" if role.restarts else ""
        lines.append(f"  {role.name.ljust(width)}   {role.ready}/{role.desired} ready{restarts}")
        for problem in role.problems[:_MAX_PODS_NAMED]:
            lines += _wrap("    ", ": ".join(filter(None, [problem.name, problem.why])))
        if len(role.problems) > _MAX_PODS_NAMED:
            lines.append(f"    and {len(role.problems) - _MAX_PODS_NAMED} more")
    return lines


def _wrap(prefix: str, text: str, indent_columns: int | None = None) -> list[str]:
    """Lines of at most _WIDTH, later ones indented as the first or by `indent_columns`."""
    indent = " " * (len(prefix) if indent_columns is None else indent_columns)
    wrapped = []
    for index, line in enumerate(text.splitlines()):
        first = prefix if index == 0 else indent
        wrapper = textwrap.TextWrapper(_WIDTH, first, indent, break_long_words=False)  # words: ok
        wrapped += wrapper.wrap(line)
    return wrapped
