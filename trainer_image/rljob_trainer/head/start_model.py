"""The model of another job's run on a claim (spec.model.source: job://NAME@STEP): a run begins with one step, and keeps
it.

    first start --> the newest, the best or the named export --> model.json
    restart     --> the step of model.json, whatever the other run has exported since

Owns model.json of runs on a cluster; `rljob run` gives a path instead. Invariant: the other run's folder is read alone.
"""

from __future__ import annotations

import logging
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.run.start_model import FILE_PIN, Pin, choose_export, describe_missing, find_exports, read_pin
from rljob_inputs.errors import InputError
from rljob_trainer.history.durable import write_durably

log = logging.getLogger(__name__)
_FIELD = "spec.model.source"


def pin_start_model(run_dir: Path, source: str, folder: str, step: str) -> str:
    """Return the path of the model that the run begins with, and write model.json. `source`: as the job has it, which
    names the run in `folder` and its `step`. Raise InputError if that step is not exported, and OSError of the run's
    folder."""
    run, pin = Path(folder), read_pin(run_dir)
    if pin is None or pin.source != source:
        pin = Pin(source=source, run=folder, step=_choose(run, source, step))
        write_durably(run_dir / FILE_PIN, pin.model_dump_json(indent=1) + "\n")
    exports = find_exports(run)
    if pin.step not in exports:
        why = f"{describe_missing(run, str(pin.step), list(exports))}. This run has begun with that model ({FILE_PIN})"
        raise InputError(_FIELD, f"{source} {why}")
    log.info("%s: %s: starts from step %d of %s", _FIELD, source, pin.step, exports[pin.step])
    return str(exports[pin.step])


def _choose(run: Path, source: str, step: str) -> int:
    try:
        return choose_export(run, step)
    except UserError as error:
        raise InputError(_FIELD, f"{source} {error}") from error
