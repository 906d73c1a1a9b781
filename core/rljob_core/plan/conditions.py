"""Conditions of jobs and RewardModels, and the phase and the events of a job that follow from them.

Invariant: lastTransitionTime changes only with status. So equal observations give an equal status, and no write.

Names of children may belong to other objects, so that they cannot be applied yet. Who deletes what is waited for:

    a child of this object, or of an earlier one of its name --> the garbage collector, or the operator
    without such an owner                                    --> the user: the message has the command

The last are left by `kubectl delete --cascade=orphan`, or come from a backup. They may run Pods, and be in use,
so the operator never deletes them.

The generation of a spec that runs, although a later one was refused, is the observedGeneration of the condition
Running of a job, and of Ready of a RewardModel, while it is True.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Literal, TypeVar

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import RewardModelStatus
from rljob_api.manifest.status import Condition, JobProgress, RLJobStatus, RoleStatus
from rljob_api.phrases import list_some
from rljob_api.wire.contract import LABEL_JOB, LABEL_REWARD_MODEL
from rljob_api.wire.text import MAX_MESSAGE_LENGTH
from rljob_core.backend import (
    DRIVER_SILENT,
    DRIVER_UNREADABLE,
    ChildKey,
    Event,
    Manifest,
    ObservedState,
    Owner,
    OwnerStatus,
)
from rljob_core.children.common import HEAD
from rljob_core.plan.observed_job import find_stale, is_owned, is_terminating

QUEUED = "Queued"
SUSPENDED = "Suspended"
RUNNING = "Running"
RESTARTING = "Restarting"
SUCCEEDED = "Succeeded"
FAILED = "Failed"
POOLS_ISOLATED = "PoolsIsolated"
NAME_CONFLICT = "NameConflict"
REWARD_VERSIONS_MIXED = "RewardVersionsMixed"
LEARNING = "Learning"
PROGRESSING = "Progressing"
PROGRESS_LOST = "ProgressLost"
READY = "Ready"
RECONCILING = "Reconciling"
STALLED = "Stalled"
ABNORMAL = (RECONCILING, STALLED)
STANDARD_OF_PHASE = {
    **dict.fromkeys(("Running", "Succeeded"), READY),
    **dict.fromkeys(("Pending", "Queued", "Restarting"), RECONCILING),
    "Failed": STALLED,
}
"""The condition of kstatus that is True in a phase. Ready is also False; the others are absent unless they are True.
A suspended job is what it should be and does not work: it has no such condition."""
RECONCILE_FAILED = "ReconcileFailed"
"""Condition of jobs and RewardModels while a reconcile fails. A plan leaves it out, so that a success removes it."""
TYPES = (QUEUED, SUSPENDED, RUNNING, RESTARTING, SUCCEEDED, FAILED)
"""Conditions that every job has."""
OPTIONAL_TYPES = (PROGRESSING, POOLS_ISOLATED, REWARD_VERSIONS_MIXED, LEARNING, PROGRESS_LOST, NAME_CONFLICT)
"""Conditions that a job has once they apply. NameConflict is last because set_name_conflict appends it."""

REASON_FOREIGN_OBJECT = "ForeignObject"
REASON_INVALID_SPEC = "InvalidSpec"
"""The only failure from which a changed spec recovers."""
UNHEARD = {DRIVER_UNREADABLE: "DriverUnreadable", DRIVER_SILENT: "DriverSilent"}
"""Reasons of events and of Progressing: the driver's status cannot be read, by what the problem starts with."""
REASON_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
"""Reason of Progressing, as of a Deployment's condition: no step within the deadline."""
REASON_INVALID_SAMPLES = "InvalidSamples"
"""Reason of events: a reward gave no valid score for a new reason."""
REASON_CHECKPOINT_DAMAGED = "CheckpointDamaged"
"""Reason of events: a checkpoint is damaged, and the job resumed from the one before."""
REASON_ROLE_RESTARTED = "RoleRestarted"
"""Reason of events: Pods or the trainer group restarted, and whether that counts against backoffLimit."""
_MAX_PODS_NAMED = 3

Phase = Literal["", "Pending", "Queued", "Suspended", "Running", "Restarting", "Succeeded", "Failed"]
PHASES: tuple[Phase, ...] = ("Failed", "Succeeded", "Suspended", "Queued", "Restarting", "Running")
"""Condition types in the order in which a True one gives the phase its name."""
_WARNING_TYPES = {FAILED, RESTARTING, NAME_CONFLICT, PROGRESS_LOST}
_REPEATED_TYPES = {FAILED, PROGRESS_LOST}
"""A change of the message is an event, too."""

Reason = tuple[str, str]
"""A reason and its message."""
Reasons = dict[str, Reason]
"""By condition type."""
_NONE = Reasons()


def find(status: OwnerStatus, type_: str) -> Condition | None:
    return next((condition for condition in status.conditions if condition.type == type_), None)


def is_true(status: OwnerStatus, type_: str) -> bool:
    condition = find(status, type_)
    return condition is not None and condition.status == "True"


def is_finished(status: RLJobStatus) -> bool:
    """Whether the job has ended permanently."""
    failed = find(status, FAILED)
    is_permanent = failed is not None and failed.status == "True" and failed.reason != REASON_INVALID_SPEC
    return is_permanent or is_true(status, SUCCEEDED)


def build_condition(
    old: OwnerStatus, type_: str, holds: bool | None, reason: str, message: str, *, generation: int, now: datetime
) -> Condition:
    """The condition now; None: unknown. It keeps the transition time of `old` while its status stays the same."""
    before = find(old, type_)
    status: Literal["True", "False", "Unknown"] = "Unknown" if holds is None else "True" if holds else "False"
    since = before.last_transition_time if before and before.status == status else now.replace(microsecond=0)
    return Condition(
        type=type_,
        status=status,
        reason=reason,
        message=message[:MAX_MESSAGE_LENGTH],
        last_transition_time=since,
        observed_generation=generation,
    )


def build_conditions(
    old: RLJobStatus,
    true: Reasons,
    false_reasons: Reasons,
    generation: int,
    now: datetime,
    unknown: Reasons = _NONE,
) -> list[Condition]:
    """All conditions of a job, in a fixed order. `true` has those that hold, `false_reasons` explains others."""
    conditions = []
    known = {**unknown, **false_reasons, **true}
    for type_ in TYPES + OPTIONAL_TYPES:
        if type_ in TYPES or type_ in known:
            reason, message = known.get(type_) or (f"Not{type_}", "")
            holds = None if type_ in unknown else type_ in true
            built = build_condition(old, type_, holds, reason, message, generation=generation, now=now)
            conditions.append(built)
        elif type_ == NAME_CONFLICT and (kept := find(old, type_)):  # only set_name_conflict changes it
            conditions.append(kept.model_copy(update={"observed_generation": generation}))
    return conditions


def describe_wait(waits: Iterable[str], causes: Sequence[str]) -> str:
    """The message of a condition that waits: what for, and why. It is shortened in front of the causes. A cause that no
    condition contains would emit its event in every reconcile."""
    known, waiting = "; ".join(causes), "; ".join(filter(None, waits))
    room = max(0, MAX_MESSAGE_LENGTH - len(known) - len("; "))
    cut = waiting if len(waiting) <= room else waiting[: max(0, room - 1)] + "…"
    return "; ".join(filter(None, [cut, known]))


def add_refused_deletion(status: RLJobStatus, error: str) -> RLJobStatus:
    """`status` whose deciding condition also says why a Pod could not be deleted by force."""
    phase = next((type_ for type_ in PHASES if is_true(status, type_)), RUNNING)

    def extend(condition: Condition) -> Condition:
        if condition.type not in (phase, RUNNING):
            return condition
        return condition.model_copy(update={"message": describe_wait([condition.message], [error])})

    return status.model_copy(update={"conditions": [extend(condition) for condition in status.conditions]})


def set_name_conflict(status: RLJobStatus, conflicts: list[str], now: datetime) -> RLJobStatus:
    """`status` of a plan with the condition NameConflict. `conflicts` are the children ("Service gsm8k-head") whose
    apply raised ForeignObjectError; an empty list resets the condition."""
    if not conflicts and not is_true(status, NAME_CONFLICT):
        return status
    names, reason, message = ", ".join(sorted(conflicts)), "NoConflict", ""
    if conflicts:
        reason = REASON_FOREIGN_OBJECT
        message = f"{names}: an object of that name exists and is not this job's; delete it, or rename the job"
    generation = status.observed_generation
    condition = build_condition(status, NAME_CONFLICT, bool(conflicts), reason, message, generation=generation, now=now)
    others = [other for other in status.conditions if other.type != NAME_CONFLICT]
    return status.model_copy(update={"conditions": [*others, condition]})


def derive_cause_events(old: OwnerStatus, new: OwnerStatus, causes: Iterable[tuple[str, str]]) -> tuple[Event, ...]:
    """One event per cause (reason, message) that the new conditions contain and the old ones do not."""
    before, now = ("\n".join(condition.message for condition in status.conditions) for status in (old, new))
    return tuple(Event("Warning", *cause) for cause in causes if cause[1] in now and cause[1] not in before)


def conflict_events(old: RLJobStatus, new: RLJobStatus) -> tuple[Event, ...]:
    condition = find(new, NAME_CONFLICT)
    if condition is None or condition.status != "True" or is_true(old, NAME_CONFLICT):
        return ()
    return (Event("Warning", condition.reason, condition.message),)


def derive_events(old: RLJobStatus, new: RLJobStatus) -> tuple[Event, ...]:
    """One event per transition of a condition, and per role that restarted."""
    events = [
        Event(type_, condition.reason, condition.message)
        for condition in new.conditions
        if (type_ := _event_type(find(old, condition.type), condition))
    ]
    return (*events, *_restart_events(old, new), *_driver_events(old, new), *_problem_events(old, new))


def _restart_events(old: RLJobStatus, new: RLJobStatus) -> Iterator[Event]:
    """At most two events per role, however many of its Pods restarted: those that count against backoffLimit, and
    those that do not. Without a count of restarts: equal causes give equal events. None at the end of a job, which
    restarts nothing."""
    if is_finished(new):
        return
    before = {role.name: role for role in old.roles}
    for role in new.roles:
        previous = before.get(role.name) or RoleStatus(name=role.name)
        counted = {(record.pod, record.created): record.counted for record in previous.failures}
        recorded = [r for r in role.failures if r.counted > counted.get((r.pod, r.created), 0)]
        for is_charged in (True, False):
            if pods := [record for record in recorded if record.charged == is_charged]:
                names = list_some([record.pod for record in pods], _MAX_PODS_NAMED)
                charge = "counts" if is_charged else "does not count"
                message = f"{role.name} restarted: {pods[0].last}; {charge} against backoffLimit (Pods: {names})"
                yield Event("Warning" if is_charged else "Normal", REASON_ROLE_RESTARTED, message)
        # The count of a head's Job follows its Pods, which are recorded.
        if not recorded and role.restarts > previous.restarts and role.name != HEAD:
            message = f"{role.name} restarted, but its containers did not fail; does not count against backoffLimit"
            yield Event("Normal", REASON_ROLE_RESTARTED, message)


def find_unheard(progress: JobProgress) -> str:
    """The reason if the driver's last answer could not be read, or did not come; otherwise empty. The progress is then
    that of an earlier one."""
    return next((reason for problem, reason in UNHEARD.items() if progress.waits_for.startswith(problem)), "")


def _driver_events(old: RLJobStatus, new: RLJobStatus) -> Iterator[Event]:
    """One event when the answers of a driver become unreadable, or end."""
    reason = find_unheard(new.progress)
    if reason and reason != find_unheard(old.progress):
        yield Event("Warning", reason, new.progress.waits_for)


def _problem_events(old: RLJobStatus, new: RLJobStatus) -> Iterator[Event]:
    """One event per kind of problem that the driver has reported since the last status."""
    for problem in new.progress.problems:
        if problem not in old.progress.problems:
            reason = REASON_CHECKPOINT_DAMAGED if problem.is_checkpoint else REASON_INVALID_SAMPLES
            yield Event("Warning", reason, problem.describe())


def _event_type(before: Condition | None, condition: Condition) -> Literal["Normal", "Warning"] | None:
    """The type of a transition's event; None: no event."""
    was, holds = before.status if before else None, condition.status == "True"
    if condition.type in (READY, *ABNORMAL):  # the condition that they follow from has the event
        return None
    if condition.type == PROGRESSING:
        return _progress_event_type(before, condition)
    if condition.type in (POOLS_ISOLATED, LEARNING) and not holds:
        return "Warning" if was != "False" else None
    if condition.type == POOLS_ISOLATED:
        return None
    if condition.type == REWARD_VERSIONS_MIXED and not holds:
        return "Normal" if was == "True" else None
    is_same = before is not None and (before.reason, before.message) == (condition.reason, condition.message)
    if not holds or (was == "True" and (is_same or condition.type not in _REPEATED_TYPES)):
        return None
    return "Warning" if condition.type in _WARNING_TYPES else "Normal"


def _progress_event_type(before: Condition | None, condition: Condition) -> Literal["Normal", "Warning"] | None:
    """An event when progress ends, when the reason or who is named changes, and when progress continues."""
    if condition.status == "False":
        is_same = before is not None and before.status == "False" and before.message == condition.message
        return None if is_same else "Warning"
    return "Normal" if condition.status == "True" and before is not None and before.status == "False" else None


_MAX_NAMED = 4


def describe_blocked(owner: Owner, state: ObservedState, blocked: Sequence[ChildKey]) -> str:
    """Return what a plan waits for, with the command for what is deleted by hand alone."""
    stale = find_stale(owner, state)
    left = [key for key in blocked if key not in stale and _is_left(owner, state.children.get(key))]
    waiting = f"waits until an earlier {_list_names(blocked)} is deleted"
    if not left:
        return waiting
    kinds = ",".join(sorted({key.kind.lower() for key in left}))
    label = LABEL_JOB if isinstance(owner, RLJob) else LABEL_REWARD_MODEL
    command = f"kubectl delete {kinds} -n {owner.metadata.namespace} -l {label}={owner.metadata.name}"
    return f"{waiting}; nothing deletes {_list_names(left)}, since this {owner.kind} is not the owner: {command}"


def _is_left(owner: Owner, child: Manifest | None) -> bool:
    return child is not None and not is_owned(owner, child) and not is_terminating(child)


def _list_names(keys: Sequence[ChildKey]) -> str:
    return list_some([f"{kind} {name}" for kind, name in keys], _MAX_NAMED)


_Status = TypeVar("_Status", RLJobStatus, RewardModelStatus, RLJobStatus | RewardModelStatus)


def working_type(owner: Owner) -> str:
    """The type of the condition that is True while Pods work."""
    return RUNNING if isinstance(owner, RLJob) else READY


def find_running_generation(owner: Owner) -> int:
    """Return the generation whose Pods work; 0 if none do."""
    condition = find(owner.status, working_type(owner))
    return condition.observed_generation if condition and condition.status == "True" else 0


def keep_running_generation(owner: Owner, status: _Status) -> _Status:
    """Return `status` with the generation that runs instead of the one that was refused."""
    running, type_ = find_running_generation(owner), working_type(owner)
    kept = [
        c.model_copy(update={"observed_generation": running}) if running and c.type == type_ else c
        for c in status.conditions
    ]
    return status.model_copy(update={"conditions": kept})


def describe_refused_change(owner: Owner, message: str) -> str:
    """Return the message with the generation that it is about and the one that runs, if they differ."""
    running, generation = find_running_generation(owner), owner.metadata.generation
    if running in (0, generation):
        return message
    return f"generation {generation} is not applied: {message}; generation {running} stays"
