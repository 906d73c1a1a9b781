"""The sessions of a run, in sessions.json: each `rljob run` in its folder. A run in a cluster has none.

Invariant: the file is complete at any time, and at most a few seconds behind. So the sum of the sessions is the wall
time of the run, also if a session was killed.
"""

from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from rljob_api.run.base import Count, Record, Seconds
from rljob_api.run.folder import FILE_SESSIONS


class ContainerFailure(Record):
    """A container that ended with an error."""

    pod: str
    """Name of its Pod."""
    role: str
    """head, trainer, rollout, reward-NAME or agent-NAME."""
    container: str
    """Its name in the Pod."""
    exit_code: int
    """Above 128: 128 plus the signal that ended its program."""
    reason: str
    """Kubernetes' reason, such as Error or OOMKilled."""
    message: str
    """What it wrote about its end, or the last lines of its log."""
    log: str = ""
    """Path of its log."""


class Session(Record):
    """One `rljob run`."""

    started: str
    """Local time with its zone, ISO 8601."""
    after_step: Count = 0
    """The step of the checkpoint that it resumed from; 0: from the model."""
    seconds: Seconds = 0.0
    """Its wall time so far."""
    phase: str = ""
    """Succeeded, Failed or Interrupted. Empty: it runs, or was killed."""
    message: str = ""
    """Why it is in this phase."""
    last_step: Count = 0
    """The last step that it finished, or `after_step`."""
    restarts: dict[str, int] = {}
    """Restarts of Pods by role."""
    failures: tuple[ContainerFailure, ...] = ()
    """Containers that ended with an error: the first ones."""
    versions: dict[str, str] = {}
    """By package; the roles of a local run use this Python environment."""


_SESSIONS = TypeAdapter(list[Session])


def write_sessions(folder: Path, sessions: Sequence[Session]) -> None:
    """Replace the file atomically."""
    path = folder / FILE_SESSIONS
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_bytes(_SESSIONS.dump_json(list(sessions), indent=1) + b"\n")
    temporary.replace(path)


def read_sessions(folder: Path) -> list[Session]:
    """Return the sessions, oldest first; none if the file does not exist or is not readable."""
    try:
        return _SESSIONS.validate_json((folder / FILE_SESSIONS).read_bytes())
    except (OSError, ValueError):
        return []


def total_seconds(sessions: Sequence[Session]) -> float:
    return sum(session.seconds for session in sessions)


def total_restarts(sessions: Sequence[Session]) -> dict[str, int]:
    roles = sorted({role for session in sessions for role in session.restarts})
    return {role: sum(session.restarts.get(role, 0) for session in sessions) for role in roles}
