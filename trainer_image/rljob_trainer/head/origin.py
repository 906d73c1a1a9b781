"""What a run began with: its job, the versions of its objects, and the model of another run. A run that resumes has the
same, or ends.

    no checkpoint --> origin.json has this job
    a checkpoint  --> what may not change equals origin.json, or the head ends with a user error
                  '-> what may change is recorded there, with the step

Sources in object storage: head, ranks and rollouts get locations that name the version that the head found
(objects.json), so that all read the same bytes. From the first checkpoint on, a run never reads another version:
cursors of a checkpoint are numbers of rows, and a model belongs to its adapters and optimizer.

The model of another job's run on a claim (spec.model.source: job://NAME@STEP):

    first start --> the newest, the best or the named export --> model.json, and the status of the job
    restart     --> the step of model.json, whatever the other run has exported since; without the run's files, that of
                    the status, which rollouts that live have loaded
    the other run writes an export now --> wait: it trains on before a checkpoint and its export are whole

Owns origin.json, objects.json, and model.json of runs on a cluster; `rljob run` gives a path instead. Invariants: the
first is written before the first checkpoint, and stays as long as there is one; the other run's folder is read alone.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.immutable_fields import read_resume_fields
from rljob_api.phrases import list_some
from rljob_api.run.folder import last_checkpoint
from rljob_api.run.origin import (
    FILE_OBJECTS,
    FILE_ORIGIN,
    Change,
    ObjectsRecord,
    Origin,
    build_origin,
    read_objects,
    read_origin,
)
from rljob_api.run.start_model import FILE_PIN, Pin, choose_export, describe_missing, find_exports, read_pin
from rljob_inputs.findings import InputError
from rljob_inputs.objects.access import ObjectAccess, is_object, pin
from rljob_inputs.objects.listing import Listing, list_objects
from rljob_trainer.head.environment import Environment
from rljob_trainer.history.disk import RunDisk, write_durably
from rljob_trainer.outages import Outages, wait_out
from rljob_trainer.run_folder.client import EXPORT_PARTIAL

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
    write = partial(pin_start_model, environment.run_dir, source, environment.model, environment.model_step, known)

    def explain(error: Exception) -> str:
        if not isinstance(error, NotWrittenError):
            return ""
        report(f"waits for spec.model: {error}")
        return str(error)

    health = outages.watch(f"{_FIELD} ({source})", "see the log of the head of that job")
    model = await wait_out(health, lambda: disk.write(environment.run_dir, write), explain)
    written = read_pin(environment.run_dir)
    assert written is not None, "it was written above"
    return environment.with_sources({_FIELD: model}), written.step


def pin_start_model(run_dir: Path, source: str, folder: str, step: str, known: int | None = None) -> str:
    """Return the path of the model that the run begins with, and write model.json. `source`: as the job has it, which
    names the run in `folder` and its `step`. `known`: the step that the job began with, if its status has it. Raise
    InputError if that step is not exported, NotWrittenError while that may change, and OSError of the run's folder."""
    run, known_pin = Path(folder), read_pin(run_dir)
    is_writing = (run / EXPORT_PARTIAL).is_dir()  # asked first: its name may come in between
    try:
        return _pin(run_dir, run, known_pin, source, step, known)
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


_MAX_OBJECTS = 3


class Versions(NamedTuple):
    """Which objects a job reads."""

    record: ObjectsRecord
    pinned: dict[str, str]
    """By field: the location that names this version, for all processes of the job."""

    def write(self, run_dir: Path) -> None:
        """Raise OSError of the run's folder."""
        write_durably(run_dir / FILE_OBJECTS, self.record.model_dump_json(indent=1))


def find_versions(run_dir: Path, sources: Mapping[str, str], access: ObjectAccess) -> Versions | None:
    """Return the versions of sources, by field; None if none is an object. Of a run that resumes, compare them with
    what it began with.

    Raise InputError if an object is missing or has changed, and StorageAwayError."""
    listings = {field: _list(field, url, access) for field, url in sources.items() if is_object(url)}
    if not listings:
        return None
    found = {
        field: {listing.url_of(name): each.tag for name, each in listing.objects.items()}
        for field, listing in listings.items()
    }
    known = _read_record(run_dir) if last_checkpoint(run_dir) is not None else None
    before = known.tags if known else {}
    for field, tags in found.items():
        if changes := find_changes(before.get(field, tags), tags):
            listed = list_some(changes, _MAX_OBJECTS)
            problem = f"{listed} changed after the run began ({FILE_OBJECTS}); restore it, or start a new run"
            raise InputError(field, problem)
    pinned = {field: pin(sources[field], listing.digest) for field, listing in listings.items()}
    return Versions(ObjectsRecord(tags={**before, **found}), pinned)


def find_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the URLs of objects that are new, gone, or have another tag."""
    return [url for url in sorted(before.keys() | now.keys()) if before.get(url) != now.get(url)]


def _list(field: str, url: str, access: ObjectAccess) -> Listing:
    try:
        return list_objects(url, access)
    except UserError as error:
        raise InputError(field, str(error)) from error


def _read_record(run_dir: Path) -> ObjectsRecord | None:
    try:
        return read_objects(run_dir)
    except ValueError as error:
        problem = "is damaged, which says what the run began with; restore it, or start a new run"
        raise InputError("spec.model.source", f"{run_dir / FILE_OBJECTS} {problem}") from error


log = logging.getLogger(__name__)

_MAX_NAMED = 4


def keep_origin(environment: Environment) -> None:
    """Write origin.json. Raise InputError if there are checkpoints of another job, and OSError of the run's folder."""
    fields, step = read_resume_fields(environment.job.spec), last_checkpoint(environment.run_dir)
    origin = None if step is None else check_origin(environment)
    if step is None or origin is None:
        record = build_origin(fields.fixed, fields.recorded)
    else:
        record = origin.resume(step, fields.recorded)
        for each in record.changes[len(origin.changes) :]:
            log.info("the job has changed %s", each)
    if record != origin:
        write_durably(environment.run_dir / FILE_ORIGIN, record.model_dump_json(indent=1) + "\n")


def check_origin(environment: Environment) -> Origin | None:
    """Return what origin.json has; None if it is missing. Raise InputError if it is of another job."""
    origin = _read(environment)
    if origin and (changes := origin.find_refused(read_resume_fields(environment.job.spec).fixed)):
        raise InputError(changes[0].path, _describe(environment, changes))
    return origin


def _read(environment: Environment) -> Origin | None:
    try:
        return read_origin(environment.run_dir)
    except ValueError as error:
        problem = f"{FILE_ORIGIN} in {_find_place(environment)} is damaged, which says which job its checkpoints are of"
        raise InputError("spec.checkpoint", f"{problem}; remove it to go on from them with this job") from error


def _find_place(environment: Environment) -> str:
    """Where the user finds the run's folder."""
    job = environment.job
    claim = job.spec.checkpoint.persistent_volume_claim
    mounted = f"pvc://{claim.claim_name}/{job.metadata.name}" if claim and environment.is_on_cluster else None
    return job.copy_url or mounted or str(environment.run_dir)


def _describe(environment: Environment, changes: list[Change]) -> str:
    (first, *others), place = changes, _find_place(environment)
    also = "".join(f", and {each.path} is {each.text_now}, not {each.text_before}" for each in others[: _MAX_NAMED - 1])
    more = f", and {len(changes) - _MAX_NAMED} more differ" if len(changes) > _MAX_NAMED else ""
    return (
        f"is {first.text_now}, but the checkpoints in {place} are of a job with {first.text_before}{also}{more}; to "
        f"train this job, give it another metadata.name or another place in spec.checkpoint, or remove {place}; to go "
        f"on with that one, set the fields as they were. To use its checkpoints anyway, remove {FILE_ORIGIN} there"
    )
