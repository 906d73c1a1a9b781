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

_Identity = tuple[int, int, int]


class JobFile:
    """The file of the job called `name`."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._read: _Identity | None = None
        self._steps: int | None = None

    def read_steps(self) -> int | None:
        """Return schedule.steps of the newest readable file; None if no file was readable yet."""
        try:
            found = self._path.stat()
        except OSError as error:
            log.warning("%s: cannot stat it (%s); schedule.steps is unchanged", self._path, error.strerror)
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
            log.warning("the job's file is unusable, so schedule.steps is unchanged: %s", error)
            return
        if job.metadata.name != self._name:
            log.warning("%s: ignored: it is of job %s, not %s", self._path, job.metadata.name, self._name)
            return
        self._steps = job.spec.schedule.steps
