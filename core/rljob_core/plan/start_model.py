"""From which claim a job with spec.model.source job://NAME@STEP reads the model of another job. Pure.

    Pods exist        --> the claim that they mount
    RLJob NAME exists --> its claim
    it is deleted     --> the claim of before, else this job's own: the folder NAME may still be there. A new job first
                          waits for an RLJob NAME that is created after it

Leaves the step to the head, which sees the files, and keeps what it reports: rollouts that live have loaded that model.
Invariant: a job that has started once goes on, and starts again, whatever happens to the other job.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.sources import Source
from rljob_core.backend import ChildKey, Manifest, ObservedState, StartJob
from rljob_core.children import WORKLOAD_KINDS
from rljob_core.children.start_model import FIELD, parse_start, set_claim, set_step
from rljob_core.plan import conditions

MISSING = "StartModelMissing"
"""Reason of a job that waits for a model to start from."""
NOT_EXPORTED = "StartModelNotExported"
"""The same: the other job has not ended, and exports its model then."""
_CLAIM = "spec.checkpoint.persistentVolumeClaim"
_APPLY_SECONDS = 60
"""For which a new job waits for the other one to be created: both may be applied together, in any order."""


def place_model(
    job: RLJob, state: ObservedState, owned: Iterable[ChildKey], now: datetime
) -> tuple[RLJob, tuple[str, str] | None]:
    """The job whose status has the claim, and the step once the head has reported it; or why it cannot start: a reason
    and a message. `owned`: its children. The claim of an earlier source stays until there is one: its Pods may run, and
    the change may be taken back."""
    placed, why = _place(job, state, owned, now)
    if why is None and state.driver is not None:
        placed = set_step(placed, state.driver.start_step)
    return placed, why


def _place(
    job: RLJob, state: ObservedState, owned: Iterable[ChildKey], now: datetime
) -> tuple[RLJob, tuple[str, str] | None]:
    start = parse_start(job)
    before = job.status.start_model
    if start is None:
        return (job if before is None else set_claim(job, None)), None
    if conditions.is_finished(job.status):
        return job, None
    known = before.claim if before and before.job == start.path else None
    if known and any(key.kind in WORKLOAD_KINDS for key in owned):
        return job, None
    if start.path == job.metadata.name:
        return job, (MISSING, _describe(job, "names this job itself; name another one"))
    own = job.spec.checkpoint.persistent_volume_claim
    if (found := state.start_job) is None:
        if claim := known or (own.claim_name if own and not _is_new(job, now) else None):
            return set_claim(job, claim), None
        return job, (MISSING, _describe(job, _describe_absent(job, start)))
    if (problem := _find_problem(start, found)) and not known:
        return job, (problem[0], _describe(job, problem[1]))
    return set_claim(job, found.claim or known), None


def read_start_job(manifest: Manifest | None) -> StartJob | None:
    """Read the fields that matter here from a stored job, whose other fields this version need not know."""
    if manifest is None or manifest["metadata"].get("deletionTimestamp"):
        return None
    spec = manifest.get("spec") or {}
    checkpoint = spec.get("checkpoint") or {}
    claim = (checkpoint.get("persistentVolumeClaim") or {}).get("claimName") or ""
    earlier = checkpoint.get("export")  # before 0.2.0
    exports = "never" if earlier is False else "last" if earlier in (None, True) else str(earlier)
    status = manifest.get("status") or {}
    ends = {end["type"]: end.get("reason") or "" for end in status.get("conditions") or () if _is_end(end)}
    return StartJob(
        claim=claim,
        storage=checkpoint.get("storage") or "",
        trains=spec.get("task") != "evaluate",
        exports=checkpoint.get("exportPolicy") or exports,
        every_steps=checkpoint.get("everySteps") or 10,
        step=(status.get("progress") or {}).get("step") or 0,
        has_ended=bool(ends),
        failure=ends.get(conditions.FAILED, ""),
    )


def _is_end(condition: Manifest) -> bool:
    """Whether a job with this condition has ended. While its spec, or a change, is refused, it may run, or start."""
    is_final = condition.get("type") in (conditions.SUCCEEDED, conditions.FAILED)
    return is_final and condition.get("status") == "True" and condition.get("reason") != conditions.REASON_INVALID_SPEC


def _is_new(job: RLJob, now: datetime) -> bool:
    created = (job.metadata.model_extra or {}).get("creationTimestamp")
    return created is not None and now < datetime.fromisoformat(created) + timedelta(seconds=_APPLY_SECONDS)


def _describe(job: RLJob, problem: str) -> str:
    return f"{FIELD}: {job.spec.model.source} {problem}"


def _describe_absent(job: RLJob, start: Source) -> str:
    return (
        f"needs RLJob {start.path}, which does not exist in the namespace {job.metadata.namespace}; create it, or "
        f"correct the name. If it was deleted, set this job's {_CLAIM} to the claim with its folder, or name that "
        f"folder: pvc://CLAIM/{start.path}/export"
    )


def _find_problem(start: Source, found: StartJob) -> tuple[str, str] | None:
    name = start.path
    if not found.trains:
        return (
            MISSING,
            f"needs a model, and RLJob {name} evaluates one (spec.task: evaluate); name the one that trained it",
        )
    if found.storage and not found.claim:
        where = f"{found.storage.rstrip('/')}/{name}"
        return MISSING, f"needs a claim, and RLJob {name} keeps its files in {where}; name its export there"
    if not found.claim:
        return MISSING, f"needs the files of RLJob {name}, which are deleted with its head; set {_CLAIM} in {name}"
    if found.exports == "never":
        remedy = f"set spec.checkpoint.exportPolicy in {name} to last, best or every"
        return MISSING, f"needs a model, and RLJob {name} exports none (spec.checkpoint.exportPolicy: never); {remedy}"
    if found.failure:
        return _find_failure(start, found)
    return None if found.has_ended else _find_wait(start, found)


def _find_failure(start: Source, found: StartJob) -> tuple[str, str] | None:
    """Why a job that has failed has no model and will have none. None: it may have exported a checkpoint."""
    name, exports = start.path, f"(spec.checkpoint.exportPolicy: {found.exports})"
    if found.exports != "every":
        when = f"exports its model at its end {exports}"
    elif found.step < (step := _find_first_step(start, found)):
        when = f"exports it after step {step} {exports}"
    else:
        return None
    return MISSING, (
        f"needs a model, and RLJob {name} has failed at step {found.step} ({found.failure}): it {when}, so no export "
        f"will come. Correct and retry {name} (kubectl rljob resume --retry {name}), or name an export that is on its "
        f"claim: pvc://{found.claim}/{name}/exports/step-..."
    )


def _find_first_step(start: Source, found: StartJob) -> int:
    """The first step whose export is, or may be, the model."""
    return int(start.step) if start.step.isdigit() else found.every_steps


def _find_wait(start: Source, found: StartJob) -> tuple[str, str] | None:
    """Why a job that trains has not exported the model yet, as far as its status says. After a later step than the
    model's its export is written, or being written: the head waits for it."""
    exports = f"(spec.checkpoint.exportPolicy: {found.exports})"
    if found.exports != "every":
        remedy = "this job starts then, or set every there to start from a checkpoint"
        return NOT_EXPORTED, f"waits: RLJob {start.path} exports its model at its end {exports}; {remedy}"
    if start.step == "best":  # until then it may be the model before training, or have no checkpoint yet
        remedy = "this job starts then, or name a step or last"
        return NOT_EXPORTED, f"waits: the best step of RLJob {start.path} is known at its end; {remedy}"
    step = _find_first_step(start, found)
    if found.step > step:
        return None
    return NOT_EXPORTED, f"waits: RLJob {start.path} exports it after step {step} {exports}; this job starts then"
