"""Conditions: the truth about a job, and the words, the phase and the events that are derived from them.

Invariant: lastTransitionTime moves only when status does, so that equal worlds give equal statuses and no write.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Literal

from rljob_api.manifest.status import Condition, RLJobStatus
from rljob_operator.backend import Event

QUEUED = "Queued"
SUSPENDED = "Suspended"
RUNNING = "Running"
RESTARTING = "Restarting"
SUCCEEDED = "Succeeded"
FAILED = "Failed"
POOLS_ISOLATED = "PoolsIsolated"
NAME_CONFLICT = "NameConflict"
REWARD_VERSIONS_MIXED = "RewardVersionsMixed"
TYPES = (QUEUED, SUSPENDED, RUNNING, RESTARTING, SUCCEEDED, FAILED)
"""Always there."""
OPTIONAL_TYPES = (POOLS_ISOLATED, REWARD_VERSIONS_MIXED, NAME_CONFLICT)
"""There once there is something to say of them. The last is where with_conflicts puts it."""

REASON_FOREIGN_OBJECT = "ForeignObject"
REASON_INVALID_SPEC = "InvalidSpec"
"""The one failure that a change of the spec undoes."""

Phase = Literal["", "Pending", "Queued", "Suspended", "Running", "Restarting", "Succeeded", "Failed"]
_PHASES: tuple[tuple[str, Phase], ...] = (
    (FAILED, "Failed"),
    (SUCCEEDED, "Succeeded"),
    (SUSPENDED, "Suspended"),
    (QUEUED, "Queued"),
    (RESTARTING, "Restarting"),
    (RUNNING, "Running"),
)
MAX_MESSAGE_LENGTH = 2000
_BAD_NEWS = {FAILED, RESTARTING, NAME_CONFLICT}
_NO_NEWS = {POOLS_ISOLATED}


def find(status: RLJobStatus, type_: str) -> Condition | None:
    return next((condition for condition in status.conditions if condition.type == type_), None)


def is_true(status: RLJobStatus, type_: str) -> bool:
    condition = find(status, type_)
    return condition is not None and condition.status == "True"


def is_finished(status: RLJobStatus) -> bool:
    """Whether the job has ended for good."""
    failed = find(status, FAILED)
    for_good = failed is not None and failed.status == "True" and failed.reason != REASON_INVALID_SPEC
    return for_good or is_true(status, SUCCEEDED)


def build_conditions(
    old: RLJobStatus,
    true: dict[str, tuple[str, str]],
    why_not: dict[str, tuple[str, str]],
    generation: int,
    now: datetime,
) -> list[Condition]:
    """All conditions, in a fixed order. `true` gives reason and message of those that hold, `why_not` of others
    about which there is more to say than that they do not."""
    conditions = []
    for type_ in TYPES + OPTIONAL_TYPES:
        if type_ in OPTIONAL_TYPES and type_ not in true and type_ not in why_not:
            kept = find(old, type_) if type_ == NAME_CONFLICT else None  # with_conflicts alone speaks of it
            conditions += [kept.model_copy(update={"observed_generation": generation})] if kept else []
            continue
        holds = type_ in true
        reason, message = true.get(type_) or why_not.get(type_) or (f"Not{type_}", "")
        before = find(old, type_)
        status: Literal["True", "False"] = "True" if holds else "False"
        unchanged = before is not None and before.status == status
        conditions.append(
            Condition(
                type=type_,
                status=status,
                reason=reason,
                message=message[:MAX_MESSAGE_LENGTH],
                last_transition_time=before.last_transition_time if before and unchanged else now,
                observed_generation=generation,
            )
        )
    return conditions


def describe_wait(waits: Iterable[str], causes: Sequence[str]) -> str:
    """What is waited for and why, as a condition says it. When that is too long the causes stay: one that no condition
    names is taken for news at each look."""
    told, waiting = "; ".join(causes), "; ".join(filter(None, waits))
    room = max(0, MAX_MESSAGE_LENGTH - len(told) - len("; "))
    cut = waiting if len(waiting) <= room else waiting[: max(0, room - 1)] + "…"
    return "; ".join(filter(None, [cut, told]))


def derive_phase(conditions: list[Condition]) -> Phase:
    held = {condition.type for condition in conditions if condition.status == "True"}
    return next((phase for type_, phase in _PHASES if type_ in held), "Pending")


def with_conflicts(status: RLJobStatus, conflicts: list[str], now: datetime) -> RLJobStatus:
    """The status that also says which names are taken. For reconcile, after it has applied a plan: `status` is
    `plan.status`, `conflicts` are the children ("Service gsm8k-head") whose apply raised ForeignObjectError; call it
    with an empty list too, which takes the condition back. All other conditions stay. Events of the result:
    `plan.events + conflict_events(job.status, result)`."""
    before = find(status, NAME_CONFLICT)
    if not conflicts and (before is None or before.status == "False"):
        return status
    holds: Literal["True", "False"] = "True" if conflicts else "False"
    names = ", ".join(sorted(conflicts))
    message = f"{names}: an object of that name exists and is not this job's; delete it, or rename the job"
    condition = Condition(
        type=NAME_CONFLICT,
        status=holds,
        reason=REASON_FOREIGN_OBJECT if conflicts else "NoConflict",
        message=message[:MAX_MESSAGE_LENGTH] if conflicts else "",
        last_transition_time=before.last_transition_time
        if before and before.status == holds
        else now.replace(microsecond=0),
        observed_generation=status.observed_generation,
    )
    others = [other for other in status.conditions if other.type != NAME_CONFLICT]
    return status.model_copy(update={"conditions": [*others, condition]})


def _is_news(before: Condition | None, condition: Condition) -> bool:
    """One that has come true; a failure for another cause, too."""
    if before is None or before.status != "True":
        return True
    return condition.type == FAILED and (before.reason, before.message) != (condition.reason, condition.message)


def find_news(
    old: Sequence[Condition], new: Sequence[Condition], causes: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Causes that the conditions name now and did not before. What they do not name would be news for ever."""
    before, now = ("\n".join(condition.message for condition in conditions) for conditions in (old, new))
    return [(reason, words) for reason, words in causes if words in now and words not in before]


def conflict_events(old: RLJobStatus, new: RLJobStatus) -> tuple[Event, ...]:
    """The event of a name conflict that has just come up."""
    condition = find(new, NAME_CONFLICT)
    if condition is None or condition.status != "True" or is_true(old, NAME_CONFLICT):
        return ()
    return (Event("Warning", condition.reason, condition.message),)


def derive_retry_events(old: RLJobStatus, new: RLJobStatus) -> tuple[Event, ...]:
    """Of a failed job that begins anew, because it was told to or because its spec was changed."""
    why = "retried" if new.retried != old.retried else "its spec was changed"
    return (
        Event("Normal", "Retried", f"{why}: starts again from its last checkpoint; restarts count from zero"),
        *derive_events(old, new),
    )


def derive_events(old: RLJobStatus, new: RLJobStatus, causes: Sequence[tuple[str, str]] = ()) -> tuple[Event, ...]:
    """One event for each condition that has come true, or failure with another cause, for each role that restarted,
    and for each cause (reason and words) of waiting that the conditions name now and did not before."""
    events: list[Event] = []
    events.extend(Event("Warning", *cause) for cause in find_news(old.conditions, new.conditions, causes))
    isolated = find(new, POOLS_ISOLATED)
    was = find(old, POOLS_ISOLATED)
    if isolated and isolated.status == "False" and (was is None or was.status != "False"):
        events.append(Event("Warning", isolated.reason, isolated.message))
    for condition in new.conditions:
        if condition.type in _NO_NEWS:
            continue
        if condition.status == "True" and _is_news(find(old, condition.type), condition):
            kind: Literal["Normal", "Warning"] = "Warning" if condition.type in _BAD_NEWS else "Normal"
            events.append(Event(kind, condition.reason, condition.message))
    mixed = find(new, REWARD_VERSIONS_MIXED)
    if mixed and mixed.status == "False" and is_true(old, REWARD_VERSIONS_MIXED):
        events.append(Event("Normal", mixed.reason, mixed.message))
    before = {role.name: role.restarts for role in old.roles}
    events.extend(
        Event("Warning", "RoleRestarted", f"{role.name} restarted; {role.restarts} restarts so far")
        for role in new.roles
        if role.restarts > before.get(role.name, 0)
    )
    return tuple(events)
