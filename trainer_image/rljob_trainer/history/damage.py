"""Which checkpoints are intact: COMPLETE lists their files with their hashes. A damaged one is set aside.

    open_checkpoint --> damaged --> DAMAGED says why --> renamed to damaged-step-000010 --> the one before is opened

Owns COMPLETE and DAMAGED. The ranks compare their own files. Invariant: a checkpoint that is set aside is kept for the
user and never counts again; a crash in between leaves it as it was.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from rljob_api.errors import UserError
from rljob_api.run.folder import (
    CHECKPOINTS,
    DAMAGED_PREFIX,
    FILE_COMPLETE,
    FILE_DAMAGED,
    checkpoint_folder,
    damaged_checkpoints,
    last_checkpoint,
)
from rljob_trainer.history.disk import sync, write_durably
from rljob_trainer.run_folder.file_facts import (
    Checkpoint,
    DamagedCheckpointError,
    FileFacts,
    verify_files,
    verify_sizes,
)

log = logging.getLogger(__name__)


class _Complete(BaseModel):
    """The content of COMPLETE."""

    model_config = ConfigDict(extra="forbid", strict=True)

    files: dict[str, FileFacts]
    """All other files of the checkpoint, by path below its folder."""
    hash: str
    """The hash of `files`."""

    @classmethod
    def of(cls, files: Mapping[str, FileFacts]) -> _Complete:
        listed = {name: facts.model_dump() for name, facts in files.items()}
        return cls(files=dict(files), hash=xxhash.xxh3_128(json.dumps(listed).encode()).hexdigest())


def write_complete(folder: Path, files: Mapping[str, FileFacts]) -> None:
    """`files`: all files of the checkpoint, by path below the folder."""
    write_durably(folder / FILE_COMPLETE, _Complete.of(files).model_dump_json(indent=1))


def open_checkpoint(folder: Path, *names: str) -> Checkpoint:
    """Return a complete checkpoint whose files exist with their sizes, and whose files `names` are as they were
    written. Raise DamagedCheckpointError."""
    checkpoint = Checkpoint(folder, _read_complete(folder / FILE_COMPLETE))
    verify_sizes(folder, checkpoint.files)
    verify_files(folder, checkpoint.files, names)
    return checkpoint


def _read_complete(path: Path) -> dict[str, FileFacts]:
    try:
        complete = _Complete.model_validate_json(path.read_bytes())
    except ValidationError:
        raise DamagedCheckpointError(f"{path} is not readable") from None
    if complete != _Complete.of(complete.files):
        raise DamagedCheckpointError(f"{path} does not have its own hash")
    return complete.files


def set_aside(run_dir: Path, error: DamagedCheckpointError) -> None:
    """Let the newest checkpoint no longer count. It is the one from which a run resumes."""
    damaged = _newest(run_dir)
    assert damaged is not None, "a run without a checkpoint has found it damaged"
    write_durably(damaged / FILE_DAMAGED, f"{error}\n")
    names = (f"{DAMAGED_PREFIX}{damaged.name}" + f"-{number}" * (number > 1) for number in count(1))
    kept = next(path for path in map(damaged.with_name, names) if not path.exists())
    damaged.rename(kept)
    sync(kept.parent)
    before = _newest(run_dir)
    then = "there is no other checkpoint" if before is None else f"the job resumes from {before.name}"
    log.warning("%s is damaged: %s; it is kept as %s, and %s", damaged.name, error, kept.name, then)


def _newest(run_dir: Path) -> Path | None:
    step = last_checkpoint(run_dir)
    return None if step is None else checkpoint_folder(run_dir, step)


def check_any_left(run_dir: Path) -> None:
    """Raise UserError if there are only damaged checkpoints: a job does not lose all its steps without a word."""
    if damaged := damaged_checkpoints(run_dir):
        found = "; ".join(f"{name}: {why}" for name, why in damaged.items())
        raise UserError(
            f"{run_dir / CHECKPOINTS}: no checkpoint is intact ({found}); restore one under its name without "
            f"{DAMAGED_PREFIX!r}, or remove these folders to train from step 0"
        )
