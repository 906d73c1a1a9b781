"""The groups of commands in `rljob -h`: by where a command acts. Pure."""

from collections.abc import Iterable, Iterator
from typing import Any

_GROUPS = {
    "Job files": ("init", "validate", "plan", "render", "test-reward", "test-agent"),
    "On this machine": ("run", "evaluate"),
    "Data of a run": ("ui", "trajectories", "report", "export"),
    "In a cluster": ("submit", "top", "explain", "logs", "suspend", "resume", "retry", "restart"),
}
_OTHERS = "Other commands"
_INDENT = 6
"""Columns that a list of commands takes besides names and texts."""


def group_commands(commands: Iterable[Any], width: int) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the title of each group, and its commands with a line of help for a terminal of this width."""
    shown = {command.name: command for command in commands if not command.hidden}
    limit = width - max(map(len, shown), default=0) - _INDENT
    groups = {title: [name for name in names if name in shown] for title, names in _GROUPS.items()}
    known = {name for names in groups.values() for name in names}
    groups[_OTHERS] = [name for name in shown if name not in known]
    longest = max(map(len, shown), default=0)
    for title, names in groups.items():
        if names:
            yield title, [(name.ljust(longest), shown[name].get_short_help_str(limit)) for name in names]
