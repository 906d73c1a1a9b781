"""Reconcile one RLJob or RewardModel: observe, plan, apply, delete, write the status once, then record events.

Any write may be the last one before a crash: each can be repeated, and the next reconcile starts from what it observes.
Any error of a reconcile ends in the status of its object (`failures`), and what the API server refuses in the status
that says which field (`apply_children`).

Children are applied in an order that leaves nothing half done: first the accounts of Pods, and their roles. Then what
Pods read or are protected by, and at the same time checks of the workloads that are new or whose Pods change: the
Secrets and ConfigMaps that they need, and dry runs if none is missing. Then the workloads and the pools of sandboxes.
Invariant: if anything is refused, none of these is created or changed.

`StatusPace` delays a status in which only counts of starting Pods have changed. The Pods of a job are created, placed
and started one after the other, and each step changes a count or a message. So such writes of one job wait for each
other, the longer the more jobs start. Invariant: whatever else changes is written at once, such as a phase, a reason,
or a restart; so is what has an event.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.status import RLJobStatus
from rljob_core.backend import (
    Backend,
    ChildKey,
    Event,
    ForbiddenError,
    ForeignObjectError,
    InvalidOwnerError,
    JobKey,
    Key,
    Manifest,
    MissingReferencesError,
    ObservedState,
    Owner,
    OwnerStatus,
    Plan,
    PodRejectedError,
    UnknownFieldsError,
    key_of,
)
from rljob_core.children import SANDBOX_POOL, WORKLOAD_KINDS
from rljob_core.children.difference import contains, keep_admitted, stamp
from rljob_core.defaults import DEFAULTS, Defaults
from rljob_core.loop.failures import REASON_STATUS_REFUSED, Attempt, Call, FailureTracker, RefusedStatus, record_event
from rljob_core.plan.built_children import Build, build_checked
from rljob_core.plan.conditions import (
    add_refused_deletion,
    conflict_events,
    derive_cause_events,
    derive_events,
    set_name_conflict,
)
from rljob_core.plan.job import plan_job
from rljob_core.plan.job_status import build_invalid_status
from rljob_core.plan.lifecycle import find_left_by_head, is_managed
from rljob_core.plan.lost_nodes import describe_forced_deletion, describe_refused_deletion
from rljob_core.plan.rejections import describe_pod_rejections, describe_refusal
from rljob_core.plan.reward_model import plan_invalid_model, plan_rejected_model, plan_reward_model

MIN_WAIT_SECONDS = 10.0
"""Between two such writes of one job."""
MAX_WAIT_SECONDS = 60.0
MAX_WRITES_PER_SECOND = 10.0
"""Limit of all jobs together, up to MAX_WAIT_SECONDS."""
_STARTING = ("Pending", "Queued")


class StatusPace:
    """The last writes of jobs that start. The caller passes the times, in seconds of one clock."""

    def __init__(self) -> None:
        self._written: dict[Key, float] = {}
        """Oldest first; only those of the last MAX_WAIT_SECONDS."""

    def wait_seconds(self, key: Key, stored: OwnerStatus, wanted: Plan[Any], now: float) -> float:
        """Return how long the wanted status must wait; 0: write it now.

        What has an event does not wait: without its status, the next reconcile would record the event again."""
        written = self._written.get(key)
        if written is None or wanted.events or not _differ_in_counts(stored, wanted.status):
            return 0.0
        interval = min(MAX_WAIT_SECONDS, max(MIN_WAIT_SECONDS, len(self._written) / MAX_WRITES_PER_SECOND))
        return max(0.0, written + interval - now)

    def record(self, key: Key, stored: OwnerStatus, written: OwnerStatus, now: float) -> None:
        """Record what replaces the stored status, if it differs."""
        if written == stored:
            return
        self._written.pop(key, None)
        while self._written and now - self._written[first := next(iter(self._written))] > MAX_WAIT_SECONDS:
            del self._written[first]
        if isinstance(written, RLJobStatus) and written.phase in _STARTING:
            self._written[key] = now


def _differ_in_counts(stored: OwnerStatus, wanted: OwnerStatus) -> bool:
    """Whether two statuses of a job that starts differ, and in counts and messages alone."""
    if not (isinstance(stored, RLJobStatus) and isinstance(wanted, RLJobStatus) and wanted.phase in _STARTING):
        return False
    return stored != wanted and _without_counts(stored) == _without_counts(wanted)


def _without_counts(status: RLJobStatus) -> dict[str, Any]:
    return dict(status) | {
        "conditions": [dict(condition) | {"message": ""} for condition in status.conditions],
        "roles": [dict(role) | {"ready": 0} for role in status.roles],
        "rollout_replicas": 0,
        "rollouts": "",
        "rewards": "",
        "progress": None,
    }


MISSING_RETRY_SECONDS = 15.0
"""How soon to look again for a missing Secret or ConfigMap: its creation causes no event that the operator watches."""
_FIRST = ("ServiceAccount", "Role")
"""In this order. Dry runs of Pods need their account. The API server refuses a RoleBinding whose Role is missing."""


class ApplyFailure(NamedTuple):
    """A child that a retry does not help to apply: refused by the API server, or another owner's object."""

    child: ChildKey
    error: UserError
    problems: list[str]
    """In terms of the owner's manifest."""


async def apply_children(
    backend: Backend,
    owner: Owner,
    observed: Mapping[ChildKey, Manifest],
    changed: Collection[Manifest],
    replaced: Collection[Manifest] = (),
    guard: Callable[[Call], Call] = lambda call: call,
) -> list[ApplyFailure]:
    """Apply the changed children and return what was refused. `replaced` workloads are checked only: they are applied
    after the deletion of the existing ones. `guard` delays the retries of what was refused. Raises the first error that
    is worth a retry, if nothing was refused."""
    apply = guard(backend.apply)
    standing = [child for child in changed if child["kind"] not in (*_FIRST, SANDBOX_POOL, *WORKLOAD_KINDS)]
    workloads = [child for child in changed if child["kind"] in WORKLOAD_KINDS]
    pools = [child for child in changed if child["kind"] == SANDBOX_POOL]
    checked = [child for child in (*workloads, *replaced) if _needs_check(observed.get(key_of(child)), child)]
    for kind in _FIRST:
        applied = await _call_all(owner, apply, [child for child in changed if child["kind"] == kind])
        if not applied.is_ok:  # what refers to it would be refused, too
            return _read_failures(applied)
    applied, checks = await asyncio.gather(
        _call_all(owner, apply, standing), _check_all(owner, backend, guard(backend.check), checked)
    )
    if applied.is_ok:  # Pods must not start from another owner's Secret, or without their NetworkPolicy
        # Workloads that only change their replicas are applied although a change of others is refused.
        unchecked = [child for child in workloads if checks.is_ok or child not in checked]
        applied = await _call_all(owner, apply, [*(pools if checks.is_ok else []), *unchecked])
    return _read_failures(applied, checks)


def _needs_check(known: Manifest | None, workload: Manifest) -> bool:
    return known is None or not contains(known["spec"]["template"], workload["spec"]["template"])


class _Outcome(NamedTuple):
    failures: list[ApplyFailure]
    error: BaseException | None

    @property
    def is_ok(self) -> bool:
        return not self.failures and self.error is None


def _read_failures(*outcomes: _Outcome) -> list[ApplyFailure]:
    """Return the failures. Raises the first error if there are none."""
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    if not failures and (error := next((each.error for each in outcomes if each.error), None)):
        raise error
    return failures


async def _check_all(owner: Owner, backend: Backend, check: Call, workloads: Collection[Manifest]) -> _Outcome:
    """A job that waits for a Secret is checked again and again, so its dry runs wait, too."""
    try:
        missing = await backend.find_missing(list(workloads))
    except TransientError as error:
        return _Outcome([], error)
    if any(missing):
        return _judge(owner, workloads, [MissingReferencesError(each) if each else None for each in missing])
    return await _call_all(owner, check, workloads)


async def _call_all(owner: Owner, call: Call, children: Collection[Manifest]) -> _Outcome:
    return _judge(owner, children, await asyncio.gather(*map(call, children), return_exceptions=True))


def _judge(owner: Owner, children: Collection[Manifest], outcomes: Sequence[BaseException | None]) -> _Outcome:
    failures, rejected, errors = list[ApplyFailure](), dict[str, PodRejectedError](), list[BaseException]()
    for child, outcome in zip(children, outcomes, strict=True):
        if isinstance(outcome, UserError):
            failures.append(ApplyFailure(key_of(child), outcome, describe_refusal(owner, child, outcome)))
        elif isinstance(outcome, PodRejectedError):
            rejected[child["metadata"]["name"]] = outcome
        elif outcome is not None:
            errors.append(outcome)
    if rejected:
        causes = describe_pod_rejections(owner, rejected)
        message = "; ".join(cause.message for cause in dict.fromkeys(causes))
        longest = MISSING_RETRY_SECONDS if causes[0].reason == "ReferenceMissing" else None
        errors.insert(0, ForbiddenError(message, causes[0].reason, longest))
    return _Outcome(failures, errors[0] if errors else None)


OnUnchanged = Callable[[Owner, ObservedState, Plan[Any]], None]
PlanOwner = Callable[[Owner, ObservedState], Plan[Any]]

CONFLICT_RETRY_SECONDS = 30.0
"""How soon to retry a name that another owner's object has: its deletion causes no watch event."""
REASON_FORBIDDEN = "Forbidden"
REASON_FORCE_DELETED = "ForceDeleted"
WAY_OUT = (
    "an earlier version has stored this object with other types, and the API server refuses each change. Save the "
    "manifest, delete the object, correct the fields and apply it again; a job with a claim resumes from its last "
    "checkpoint"
)
REASON_OUTDATED_OPERATOR = "OutdatedOperator"


async def reconcile(
    backend: Backend,
    key: Key,
    now: datetime,
    defaults: Defaults = DEFAULTS,
    *,
    failures: FailureTracker | None = None,
    on_unchanged: OnUnchanged = lambda owner, observed, wanted: None,
    build: Build = build_checked,
    pace: StatusPace | None = None,
) -> float | None:
    """Converge one object. Return the seconds after which to requeue it; None: only when something changes.

    Calls `on_unchanged` with the observed state and the plan if nothing had to be written. Raises TransientError: the
    caller retries later. `failures` remembers what fails from one reconcile to the next, and reports it; `build` may
    remember the children of jobs; `pace` delays statuses in which only counts have changed.
    """
    failures, pace = failures or FailureTracker(), pace or StatusPace()
    attempt = failures.start(key, now)
    try:
        requeue_after_seconds = await _reconcile(
            backend,
            attempt,
            lambda owner, observed: _plan(owner, observed, now, defaults, build),
            failures,
            on_unchanged,
            pace,
        )
    except UnknownFieldsError as error:
        await record_event(backend, error.owner, Event("Warning", REASON_OUTDATED_OPERATOR, str(error)))
        raise
    except Exception as error:
        await failures.report(backend, attempt, error)
        raise
    failures.clear(key)
    return requeue_after_seconds


async def _reconcile(
    backend: Backend,
    attempt: Attempt,
    plan: PlanOwner,
    failures: FailureTracker,
    on_unchanged: OnUnchanged,
    pace: StatusPace,
) -> float | None:
    key, now = attempt.key, attempt.now
    try:
        owner = await backend.get_owner(key)
    except InvalidOwnerError as error:
        invalid = _plan_invalid(error.owner, error.problems, now)
        for child in find_left_by_head(error.owner, await backend.observe(error.owner)):
            await backend.delete(key.namespace, child)
        try:
            await _report(backend, failures, key, error.owner, invalid)
        except UserError:
            problems = "; ".join(error.problems)
            await record_event(backend, error.owner, Event("Warning", REASON_STATUS_REFUSED, f"{WAY_OUT}: {problems}"))
            raise
        return None
    if owner is None or (isinstance(owner, RLJob) and not is_managed(owner)):
        return None  # the garbage collector deletes the children of a deleted owner
    attempt.owner = stored = owner
    owner = failures.with_refused_status(key, owner)
    observed = await backend.observe(owner)
    wanted = plan(owner, observed)
    attempt.status = _status_unless_replaced(owner, wanted)
    changed = list(_find_changed(observed, wanted.children))
    guard = partial(failures.refusals.guard, owner, attempt.started)
    refused = await apply_children(backend, owner, observed.children, changed, wanted.replaced, guard)
    if all(isinstance(failure.error, ForeignObjectError) for failure in refused):
        for child in wanted.delete:
            await backend.delete(key.namespace, child)
    for pod in wanted.ungate:
        await backend.ungate(key.namespace, pod)
    final = _add_failures(owner, observed, wanted, refused, now)
    final = await _delete_by_force(backend, owner, final)
    if wait := pace.wait_seconds(key, owner.status, final, attempt.started):
        return wait if final.requeue_after_seconds is None else min(wait, final.requeue_after_seconds)
    await _report(backend, failures, key, stored, final)
    pace.record(key, owner.status, final.status, attempt.started)
    if final.delete_job:
        await backend.delete_job(JobKey(key.namespace, key.name))
    writes = (*changed, *wanted.delete, *wanted.ungate, *wanted.force_delete, *final.events)
    if not writes and final.status == owner.status and not final.delete_job:
        on_unchanged(owner, observed, final)
    return final.requeue_after_seconds


def _find_changed(observed: ObservedState, children: Iterable[Manifest]) -> Iterator[Manifest]:
    """The children to apply. What admission made of them before is no change, and an apply repeats it."""
    for child in children:
        existing, stamped = observed.children.get(key_of(child)), stamp(child)
        if not contains(existing, stamped) and not contains(existing, admitted := keep_admitted(stamped, existing)):
            yield admitted


def _status_unless_replaced(owner: Owner, wanted: Plan[Any]) -> OwnerStatus:
    """The planned status if nothing can be applied. The planned conditions know of workloads that are replaced."""
    if not isinstance(owner, RLJob) or not wanted.replaced:
        return wanted.status
    return wanted.status.model_copy(update={"conditions": owner.status.conditions, "phase": owner.status.phase})


def _plan(owner: Owner, observed: ObservedState, now: datetime, defaults: Defaults, build: Build) -> Plan[Any]:
    if isinstance(owner, RLJob):
        return plan_job(owner, observed, now, defaults=defaults, build=build)
    return plan_reward_model(owner, observed, now, defaults=defaults)


def _plan_invalid(owner: Owner, problems: list[str], now: datetime) -> Plan[Any]:
    """Return a plan that reports the problems of the spec and leaves the children alone."""
    if not isinstance(owner, RLJob):
        return plan_invalid_model(owner, problems, now)
    status = build_invalid_status(owner, problems, now)
    return Plan((), (), status, derive_events(owner.status, status))


def _add_failures(
    owner: Owner, observed: ObservedState, wanted: Plan[Any], failures: list[ApplyFailure], now: datetime
) -> Plan[Any]:
    """Return the plan whose status and events report what could not be applied."""
    if not isinstance(owner, RLJob):
        rejections = "; ".join(problem for failure in failures for problem in failure.problems)
        return plan_rejected_model(owner, observed, rejections, now) if failures else wanted
    rejected = [failure for failure in failures if not isinstance(failure.error, ForeignObjectError)]
    if problems := list(dict.fromkeys(problem for failure in rejected for problem in failure.problems)):
        invalid = _plan_invalid(owner, problems, now)
        return replace(wanted, status=invalid.status, events=invalid.events, delete_job=False)
    conflicts = [f"{failure.child.kind} {failure.child.name}" for failure in failures]
    status = set_name_conflict(wanted.status, conflicts, now)
    events = (*wanted.events, *conflict_events(owner.status, status))
    requeue = wanted.requeue_after_seconds
    if conflicts:
        requeue = min(CONFLICT_RETRY_SECONDS, requeue or CONFLICT_RETRY_SECONDS)
    return replace(wanted, status=status, events=events, requeue_after_seconds=requeue)


async def _delete_by_force(backend: Backend, owner: Owner, wanted: Plan[Any]) -> Plan[Any]:
    """Delete the Pods that lost nodes keep. Return the plan with an event per Pod. A refusal stops nothing else: the
    status says which right is missing, and the deletion is retried."""
    if not isinstance(owner, RLJob) or not wanted.force_delete:
        return wanted
    status, events = wanted.status, list(wanted.events)
    for deletion in wanted.force_delete:
        try:
            await backend.force_delete(owner.metadata.namespace, deletion.pod)
            events.append(Event("Warning", REASON_FORCE_DELETED, describe_forced_deletion(owner, deletion)))
        except (ForbiddenError, UserError) as error:
            refusal = describe_refused_deletion(error)
            status = add_refused_deletion(wanted.status, refusal)
            events += derive_cause_events(owner.status, status, [(REASON_FORBIDDEN, refusal)])
            break
        except TransientError:
            break
    requeue = min(CONFLICT_RETRY_SECONDS, wanted.requeue_after_seconds or CONFLICT_RETRY_SECONDS)
    return replace(wanted, status=status, events=tuple(events), requeue_after_seconds=requeue)


async def _report(backend: Backend, failures: FailureTracker, key: Key, owner: Owner, wanted: Plan[Any]) -> None:
    """Write status and events."""
    if wanted.status != owner.status:
        try:
            await backend.update_status(owner, wanted.status)
        except UserError as error:
            failures.refused_statuses[key] = RefusedStatus(owner.metadata.uid, wanted.status, str(error))
            raise
    for event in wanted.events:
        await record_event(backend, owner, event)
