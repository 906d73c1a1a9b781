"""What the operator or `rljob run` gives to the head: environment variables, and the job's file, which may change.

A cluster swaps the symbolic link of a ConfigMap's volume; `rljob run` renames a new file over it. The driver decides
what a change means. Invariant: an unusable file changes nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.read.load import load_job
from rljob_api.wire.contract import (
    ENV_EVAL_DATA,
    ENV_HEAD_JOB_UID,
    ENV_JOB_FILE,
    ENV_MODEL,
    ENV_POD_IP,
    ENV_REWARD_SERVICES,
    ENV_ROLLOUT_SERVICE,
    ENV_RUN_DIR,
    ENV_TOKEN,
    ENV_TRAIN_DATA,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Environment:
    job: RLJob
    job_file: Path
    run_dir: Path
    address: str
    model: str
    train_data: str
    eval_data: str | None
    head_job_uid: str = ""


def read_environment(variables: dict[str, str]) -> Environment:
    """Parse the environment variables. Raise UserError if one is missing, or the job file is invalid."""
    needed = (
        ENV_JOB_FILE, ENV_RUN_DIR, ENV_POD_IP, ENV_MODEL, ENV_TRAIN_DATA, ENV_TOKEN, ENV_ROLLOUT_SERVICE,
        ENV_REWARD_SERVICES,
    )  # fmt: skip
    missing = [name for name in needed if not variables.get(name)]
    if missing:
        raise UserError(
            f"environment variables not set: {', '.join(missing)}; start the head with the operator or `rljob run`"
        )
    return Environment(
        job=load_job(variables[ENV_JOB_FILE]),
        job_file=Path(variables[ENV_JOB_FILE]),
        run_dir=Path(variables[ENV_RUN_DIR]),
        address=variables[ENV_POD_IP],
        model=variables[ENV_MODEL],
        train_data=variables[ENV_TRAIN_DATA],
        eval_data=variables.get(ENV_EVAL_DATA) or None,
        head_job_uid=variables.get(ENV_HEAD_JOB_UID, ""),
    )


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
