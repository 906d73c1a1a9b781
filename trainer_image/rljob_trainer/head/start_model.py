"""The model of another job's run on a claim (spec.model.source: job://NAME@STEP): a run begins with one step, and keeps
it.

    first start --> the newest, the best or the named export --> model.json, and the status of the job
    restart     --> the step of model.json, whatever the other run has exported since; without the run's files, that of
                    the status, which rollouts that live have loaded
    the other run writes an export now --> wait: it trains on before a checkpoint and its export are whole

Owns model.json of runs on a cluster; `rljob run` gives a path instead. Invariant: the other run's folder is read alone.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rljob_api.errors import TransientError, UserError
from rljob_api.run.start_model import FILE_PIN, Pin, choose_export, describe_missing, find_exports, read_pin
from rljob_inputs.errors import InputError
from rljob_trainer.head.environment import Environment
from rljob_trainer.history.disk import RunDisk, write_durably
from rljob_trainer.outages.registry import Outages
from rljob_trainer.outages.waiting import wait_out
from rljob_trainer.run_folder.location import EXPORT_PARTIAL

log = logging.getLogger(__name__)
_FIELD = "spec.model.source"


class NotWrittenError(TransientError):
    """The other run lacks the step, and writes an export."""


async def find_start_model(
    environment: Environment, disk: RunDisk, outages: Outages, report: Callable[[str], None]
) -> tuple[Environment, int]:
    """Return the environment with the model that the run begins with, once it is written, and its step. `report`: gets
    what the head waits for. Raise InputError if the step is not exported, and OutageError after spec.outageSeconds."""
    source = environment.job.spec.model.source
    placed = environment.job.status.start_model
    known = None if placed is None else placed.step
    pin = partial(pin_start_model, environment.run_dir, source, environment.model, environment.model_step, known)

    def explain(error: Exception) -> str:
        if not isinstance(error, NotWrittenError):
            return ""
        report(f"waits for spec.model: {error}")
        return str(error)

    health = outages.watch(f"{_FIELD} ({source})", "see the log of the head of that job")
    model = await wait_out(health, lambda: disk.write(environment.run_dir, pin), explain)
    written = read_pin(environment.run_dir)
    assert written is not None, "it was written above"
    return environment.with_sources({_FIELD: model}), written.step


def pin_start_model(run_dir: Path, source: str, folder: str, step: str, known: int | None = None) -> str:
    """Return the path of the model that the run begins with, and write model.json. `source`: as the job has it, which
    names the run in `folder` and its `step`. `known`: the step that the job began with, if its status has it. Raise
    InputError if that step is not exported, NotWrittenError while that may change, and OSError of the run's folder."""
    run, pin = Path(folder), read_pin(run_dir)
    is_writing = (run / EXPORT_PARTIAL).is_dir()  # asked first: its name may come in between
    try:
        return _pin(run_dir, run, pin, source, step, known)
    except InputError as error:
        if is_writing:
            raise NotWrittenError(f"{run.name} writes an export ({EXPORT_PARTIAL}); {error}") from error
        raise


def _pin(run_dir: Path, run: Path, pin: Pin | None, source: str, step: str, known: int | None) -> str:
    if pin is None or pin.source != source:
        pin = Pin(source=source, run=str(run), step=_choose(run, source, step) if known is None else known)
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
