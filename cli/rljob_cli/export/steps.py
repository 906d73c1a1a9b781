"""Which step of a run is meant, and the export of its checkpoint. The trainer's own export does it, in a process: the
CLI loads no torch.

`provide_model` gives a run the model of another run's step, before its processes start. Invariant: model.json is
written last, so a run that was killed before begins again with the same or a newer step.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.run.files import read_best_step
from rljob_api.run.folder import current_export, last_checkpoint
from rljob_api.run.start_model import FILE_PIN
from rljob_cli.check.job_source import FIELD, MODEL, StartModel
from rljob_cli.local.node.volumes import write_atomically
from rljob_cli.output import Say
from rljob_inputs.machine.installation import require

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
    require(given)
    command = [sys.executable, "-m", "rljob_trainer.policy.export_step", str(run), str(step), str(to)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"{given}: {reason.removeprefix('error: ')}")


def provide_model(start: StartModel, folder: Path, say: Say) -> str:
    """Export the step to the run's folder, unless it is there. Return its path. Raise UserError if that fails."""
    model, pin = folder / MODEL, start.pin
    if start.is_pinned:
        say(f"starts from step {pin.step} of {pin.run}, as before")
        return str(model)
    say(f"starts from step {pin.step} of {pin.run}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE_PIN).unlink(missing_ok=True)
    shutil.rmtree(model, ignore_errors=True)
    run = Path(pin.run)
    if export := current_export(run, pin.step):
        shutil.copytree(export, model, copy_function=_link_or_copy)
    else:
        export_step(run, pin.step, model, FIELD)
    write_atomically(folder / FILE_PIN, f"{pin.model_dump_json(indent=1)}\n".encode())
    return str(model)


def _link_or_copy(source: str, target: str) -> None:
    """No program changes the files of an export: they are replaced as a whole."""
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copy2(source, target)
