"""What of the job may change while it runs, read again from $RLJOB_JOB_FILE.

Owns noticing that the file is another one: a cluster swaps the symbolic link of a ConfigMap's volume, `rljob run`
renames a new file over it. Leaves to the driver what a change means. Invariant: a file that cannot be used changes
nothing; the job goes on with what it knew.
"""

from __future__ import annotations

import logging
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.read.load import load_job

log = logging.getLogger(__name__)

_Identity = tuple[int, int, int]


class JobFile:
    """The file of the job called `name`."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._read: _Identity | None = None
        self._steps: int | None = None

    def read_steps(self) -> int | None:
        """schedule.steps as the newest readable file has it; None when there never was one."""
        try:
            found = self._path.stat()
        except OSError as error:
            log.warning("%s: cannot be looked at (%s); schedule.steps stays as it was", self._path, error.strerror)
            return self._steps
        identity = (found.st_ino, found.st_mtime_ns, found.st_size)
        if identity != self._read:
            self._read = identity
            self._load()
        return self._steps

    def _load(self) -> None:
        try:
            job = load_job(self._path)
        except UserError as error:
            log.warning("schedule.steps stays as it was, since the job's file cannot be used: %s", error)
            return
        if job.metadata.name != self._name:
            log.warning("%s: holds job %s, not %s: ignored", self._path, job.metadata.name, self._name)
            return
        self._steps = job.spec.schedule.steps
