"""Conditions: the truth about a job, and the words, the phase and the events that are derived from them.

Invariant: lastTransitionTime moves only when status does, so that equal worlds give equal statuses and no write.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from rljob_api.status import Condition, RLJobStatus
from rljob_operator.backend import Event

SUSPENDED = "Suspended"
RUNNING = "Running"
RESTARTING = "Restarting"
SUCCEEDED = "Succeeded"
FAILED = "Failed"
TYPES = (SUSPENDED, RUNNING, RESTARTING, SUCCEEDED, FAILED)

REASON_INVALID_SPEC = "InvalidSpec"
"""The one failure that a change of the spec undoes."""

Phase = Literal["", "Pending", "Queued", "Suspended", "Running", "Restarting", "Succeeded", "Failed"]
_PHASES: tuple[tuple[str, Phase], ...] = (
    (FAILED, "Failed"),
    (SUCCEEDED, "Succeeded"),
    (SUSPENDED, "Suspended"),
    (RESTARTING, "Restarting"),
    (RUNNING, "Running"),
)
_MAX_MESSAGE_LENGTH = 2000
_BAD_NEWS = {FAILED, RESTARTING}


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
    for type_ in TYPES:
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
                message=message[:_MAX_MESSAGE_LENGTH],
                last_transition_time=before.last_transition_time if before and unchanged else now,
                observed_generation=generation,
            )
        )
    return conditions


def derive_phase(conditions: list[Condition]) -> Phase:
    held = {condition.type for condition in conditions if condition.status == "True"}
    return next((phase for type_, phase in _PHASES if type_ in held), "Pending")


def derive_events(old: RLJobStatus, new: RLJobStatus) -> tuple[Event, ...]:
    """One event for each condition that has come true, and for each role that restarted."""
    events = []
    for condition in new.conditions:
        if condition.status == "True" and not is_true(old, condition.type):
            kind: Literal["Normal", "Warning"] = "Warning" if condition.type in _BAD_NEWS else "Normal"
            events.append(Event(kind, condition.reason, condition.message))
    before = {role.name: role.restarts for role in old.roles}
    events.extend(
        Event("Warning", "RoleRestarted", f"{role.name} restarted; {role.restarts} restarts so far")
        for role in new.roles
        if role.restarts > before.get(role.name, 0)
    )
    return tuple(events)
