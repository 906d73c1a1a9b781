"""Records the session that runs, behind those before it in the folder."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rljob_api.run.sessions import ContainerFailure, Session, read_sessions, write_sessions
from rljob_cli.version import find_versions

_MAX_FAILURES = 50


class SessionLog:
    def __init__(self, folder: Path, after_step: int) -> None:
        self._folder = folder
        self._earlier = read_sessions(folder)
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        self.current = Session(started=now, after_step=after_step, last_step=after_step, versions=find_versions())

    def update(self, *, failures: Sequence[ContainerFailure] = (), **changes: Any) -> None:
        """Write what the session did so far. `changes`: fields of Session."""
        self.current = self.current.model_copy(update={**changes, "failures": tuple(failures[:_MAX_FAILURES])})
        write_sessions(self._folder, self.sessions)

    @property
    def sessions(self) -> list[Session]:
        return [*self._earlier, self.current]
