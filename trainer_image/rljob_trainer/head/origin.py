"""The job that a run's checkpoints are of: another job of the same name, in the same folder, may not resume from them.

    no checkpoint --> origin.json has this job
    a checkpoint  --> what may not change equals origin.json, or the head ends with a user error
                  '-> what may change is recorded there, with the step

Owns origin.json. Invariant: it is written before the first checkpoint, and stays as long as there is one.
"""

import logging

from rljob_api.manifest.immutable_fields import read_resume_fields
from rljob_api.run.folder import last_checkpoint
from rljob_api.run.origin import FILE_ORIGIN, Change, Origin, build_origin, read_origin
from rljob_inputs.errors import InputError
from rljob_trainer.head.environment import Environment
from rljob_trainer.history.disk import write_durably

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
