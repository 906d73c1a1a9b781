"""Gives a run the model of another run's step, before its processes start.

Invariant: model.json is written last, so a run that was killed before begins again with the same or a newer step.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from rljob_api.run.folder import current_export
from rljob_api.run.start_model import FILE_PIN
from rljob_cli.check.job_source import FIELD, MODEL, StartModel
from rljob_cli.export.steps import export_step
from rljob_cli.local.node.volumes import write_atomically


def provide_model(start: StartModel, folder: Path, say: Callable[[str], None]) -> str:
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
