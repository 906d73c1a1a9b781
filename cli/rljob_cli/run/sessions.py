"""The sessions of a run: each `rljob run` in its folder, with its seconds, its steps and the versions that it used.

Invariant: the file is complete at any time, and at most a few seconds behind. So the sum of the sessions is the wall
time of the run, also if a session was killed.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rljob_cli.run.runfolder import FILE_SESSIONS
from rljob_cli.version import find_versions

_MAX_FAILURES = 50


@dataclass(frozen=True)
class Session:
    started: str
    """Local time with its zone, ISO 8601."""
    after_step: int = 0
    """The step of the checkpoint that it resumed from; 0: from the model."""
    seconds: float = 0.0
    phase: str = ""
    """Succeeded, Failed or Interrupted. Empty: it runs, or was killed."""
    message: str = ""
    """Why it is in this phase."""
    last_step: int = 0
    restarts: dict[str, int] = field(default_factory=dict)
    """By role."""
    failures: tuple[dict[str, Any], ...] = ()
    """Containers that ended with an error."""
    versions: dict[str, str] = field(default_factory=dict)
    """By package; the roles of a local run use this Python environment."""


class SessionLog:
    """Writes the session that runs behind those before it."""

    def __init__(self, folder: Path, after_step: int) -> None:
        self._path = folder / FILE_SESSIONS
        self._earlier = read_sessions(folder)
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        self.current = Session(now, after_step, last_step=after_step, versions=find_versions())

    def update(self, **facts: Any) -> None:
        self.current = replace(self.current, **facts)
        if len(self.current.failures) > _MAX_FAILURES:
            self.current = replace(self.current, failures=self.current.failures[:_MAX_FAILURES])
        temporary = self._path.with_name(f".{self._path.name}.partial")
        temporary.write_text(json.dumps([asdict(session) for session in self.sessions], indent=1) + "\n")
        temporary.replace(self._path)

    @property
    def sessions(self) -> list[Session]:
        return [*self._earlier, self.current]


def read_sessions(folder: Path) -> list[Session]:
    """Return the sessions, oldest first. None are known of a run in a cluster."""
    try:
        return [Session(**fields) for fields in json.loads((folder / FILE_SESSIONS).read_text())]
    except (OSError, ValueError, TypeError):
        return []


def total_seconds(sessions: Sequence[Session]) -> float:
    return sum(session.seconds for session in sessions)


def total_restarts(sessions: Sequence[Session]) -> dict[str, int]:
    roles = sorted({role for session in sessions for role in session.restarts})
    return {role: sum(session.restarts.get(role, 0) for session in sessions) for role in roles}
