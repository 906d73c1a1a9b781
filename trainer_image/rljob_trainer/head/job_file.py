"""Rereads the job's file ($RLJOB_JOB_FILE) for the fields that may change while the job runs.

Owns detecting that the file was replaced: a cluster swaps the symbolic link of a ConfigMap's volume, `rljob run`
renames a new file over it. The driver decides what a change means. Invariant: an unusable file changes nothing; the job
continues with the last values.
"""

from __future__ import annotations

import logging
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.read.load import load_job

log = logging.getLogger(__name__)


class JobFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[int, int, int] | None = None
        self._steps: int | None = None

    def read_steps(self) -> int | None:
        """Return schedule.steps of the newest readable file; None if no file was readable yet."""
        try:
            found = self._path.stat()
            identity = (found.st_ino, found.st_mtime_ns, found.st_size)
            if identity != self._read:
                self._read = identity
                self._steps = load_job(self._path).spec.schedule.steps
        except (OSError, UserError) as error:
            log.warning("the job's file is unusable, so schedule.steps is unchanged: %s", error)
        return self._steps
