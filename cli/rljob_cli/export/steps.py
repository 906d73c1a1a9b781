"""Which step of a run is meant, and the export of its checkpoint. The trainer's own export does it, in a process: the
CLI loads no torch.
"""

import subprocess
import sys
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.run.files import read_best_step
from rljob_api.run.folder import last_checkpoint
from rljob_inputs.machine.installation import find_device_extra, require

LAST, BEST = "last", "best"


def is_step(name: str) -> bool:
    """Whether `name` may name a step: its number, last or best."""
    return name in (LAST, BEST) or name.isdecimal()


def read_step(run: Path, name: str, given: str) -> int:
    """Return the step that `name` means in a run. `given`: how the user wrote it, for messages. Raise UserError if
    there is none."""
    assert is_step(name)
    if name == BEST:
        try:
            return read_best_step(run)
        except UserError as error:
            raise UserError(f"{given}: {error}") from None
    if name != LAST:
        return int(name)
    if (step := last_checkpoint(run)) is None:
        raise UserError(f"{given}: {run} has no checkpoint")
    return step


def export_step(run: Path, step: int, to: Path, given: str) -> None:
    """Write the model of a checkpoint to the new folder `to`. Raise UserError with the reason if that fails."""
    require(find_device_extra(), given)  # here, too: `rljob evaluate --submit` needs it for models of runs alone
    command = [sys.executable, "-m", "rljob_trainer.policy.export_step", str(run), str(step), str(to)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"{given}: {reason.removeprefix('error: ')}")
