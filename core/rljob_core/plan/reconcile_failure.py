"""The condition ReconcileFailed: the operator cannot do what the object asks for, and why. Pure.

It is True while reconciles fail, and absent otherwise: a plan leaves it out, so the next success removes it. Invariant:
the state of a job that runs or has ended stays as it was observed.
"""

from datetime import datetime

from rljob_api.manifest.job import RLJob
from rljob_core.backend import Owner, OwnerStatus
from rljob_core.plan import conditions
from rljob_core.plan.applied_generation import (
    describe_refused_change,
    find_running_generation,
    keep_running_generation,
    working_type,
)
from rljob_core.plan.job_status import build_waiting_status


def set_reconcile_failed(owner: Owner, status: OwnerStatus, reason: str, message: str, now: datetime) -> OwnerStatus:
    """Return `status`, which was planned for the owner or is the owner's, with the condition."""
    now, generation = now.replace(microsecond=0), owner.metadata.generation
    if find_running_generation(owner):
        message = describe_refused_change(owner, message)
        status = keep_running_generation(owner, status)
    else:
        status = _set_waiting(owner, status, reason, message, now)
    types = (conditions.RECONCILE_FAILED, conditions.RECONCILING)
    built = [
        conditions.build_condition(owner.status, type_, True, reason, message, generation=generation, now=now)
        for type_ in types
    ]
    others = [condition for condition in status.conditions if condition.type not in types]
    return status.model_copy(update={"conditions": [*others, *built], "observed_generation": generation})


def _set_waiting(owner: Owner, status: OwnerStatus, reason: str, message: str, now: datetime) -> OwnerStatus:
    """Say in the condition Running or Ready why it is False. The status of a job that has ended stays."""
    if isinstance(owner, RLJob):
        return build_waiting_status(owner.model_copy(update={"status": status}), reason, message, now)
    generation, type_ = owner.metadata.generation, working_type(owner)
    waiting = conditions.build_condition(owner.status, type_, False, reason, message, generation=generation, now=now)
    others = [condition for condition in status.conditions if condition.type != type_]
    return status.model_copy(update={"conditions": [waiting, *others]})
