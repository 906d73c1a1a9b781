"""The job that a run's checkpoints are of: another job of the same name, in the same folder, may not resume from them.

    no checkpoint --> origin.json has this job
    a checkpoint  --> this job's fields equal those of origin.json, or the head ends with a user error

Owns origin.json. Invariant: it is written before the first checkpoint, and stays as long as there is one.
"""

from __future__ import annotations

from rljob_api.errors import UserError
from rljob_api.manifest.immutable_fields import read_fixed_fields
from rljob_api.manifest.sources import parse_source
from rljob_api.run.folder import last_checkpoint
from rljob_api.run.origin import FILE_ORIGIN, Change, Origin, find_changes, read_origin
from rljob_inputs.errors import InputError
from rljob_trainer.head.environment import Environment
from rljob_trainer.history.durable import write_durably

_MAX_NAMED = 4


def keep_origin(environment: Environment) -> None:
    """Write origin.json. Raise InputError if there are checkpoints of another job, and OSError of the run's folder."""
    if last_checkpoint(environment.run_dir) is not None:
        check_origin(environment)
        if (environment.run_dir / FILE_ORIGIN).exists():
            return
    record = Origin(fields=read_fixed_fields(environment.job.spec))
    write_durably(environment.run_dir / FILE_ORIGIN, record.model_dump_json(indent=1) + "\n")


def check_origin(environment: Environment) -> None:
    """Raise InputError if origin.json is of another job."""
    if (origin := _read(environment)) is None:
        return
    changes = list(find_changes(origin.fields, read_fixed_fields(environment.job.spec)))
    if not environment.is_on_cluster:
        changes = [each for each in changes if not _is_moved(each)]
    if changes:
        raise InputError(changes[0].path, _describe(environment, changes))


def _read(environment: Environment) -> Origin | None:
    try:
        return read_origin(environment.run_dir)
    except ValueError as error:
        problem = f"{FILE_ORIGIN} in {_find_place(environment)} is damaged, which says which job its checkpoints are of"
        raise InputError("spec.checkpoint", f"{problem}; remove it to go on from them with this job") from error


def _is_moved(change: Change) -> bool:
    """Whether a file or folder has another path and the same name: `rljob run` goes on on another machine."""
    if not change.path.endswith(".source") or not (isinstance(change.before, str) and isinstance(change.now, str)):
        return False
    try:
        before, now = parse_source(change.before), parse_source(change.now)
    except UserError:
        return False
    return before.kind == now.kind == "absolute" and before.name == now.name


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
