"""The operator's one decision: from the job, the observed world and the time, what should be and what to say of it.

Pure but for the token of a job that has none yet, which comes from `new_token`. Leaves I/O to `reconcile`.
Invariant: nothing that would be lost is deleted before the status that remembers it is stored. So an end takes two
looks: the first stores it, the second removes the workloads.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import RewardModel
from rljob_api.manifest.status import JobProgress, RLJobStatus, RoleStatus
from rljob_operator.backend import PROGRESS_POLL_SECONDS, ChildKey, Manifest, ObservedState, Plan, key_of
from rljob_operator.children import WORKLOAD_KINDS, build_children
from rljob_operator.children.common import ANNOTATION_CONFIG_HASH, HEAD, REWARD, ROLLOUT, child_name
from rljob_operator.children.config import read_token
from rljob_operator.children.gang import keep_gang
from rljob_operator.children.reward_refs import find_frozen_children
from rljob_operator.defaults import DEFAULTS, Defaults
from rljob_operator.plan import conditions
from rljob_operator.plan.apply_scaling import scale_job, scaling_events
from rljob_operator.plan.causes import Cause, find_blocking_pods, find_causes
from rljob_operator.plan.difference import is_stamped
from rljob_operator.plan.gang import evaluate_gang
from rljob_operator.plan.lifecycle import (
    LifecycleDecision,
    count_restarts,
    deadline_of,
    decide_lifecycle,
    expiry_of,
    is_managed,
    requested_retry,
    should_retry,
)
from rljob_operator.plan.observed_job import ObservedJob, describe_waiting, driver_succeeded, observe_job
from rljob_operator.plan.pool_isolation import evaluate_isolation
from rljob_operator.plan.reward_versions import MIXED, SETTLED, describe_mixed_rewards
from rljob_operator.plan.validate import find_problems, find_size_problems, find_spec_problems

BLOCKED_RETRY_SECONDS = 1.0
"""How soon to look again whether a name has become free."""
_NEVER = datetime.max.replace(tzinfo=UTC)


def new_random_token() -> str:
    return secrets.token_urlsafe(32)


def plan(
    job: RLJob,
    observed: ObservedState,
    now: datetime,
    *,
    defaults: Defaults = DEFAULTS,
    new_token: Callable[[], str] = new_random_token,
) -> Plan:
    """What should be now. Equal arguments give equal plans once the job's Secret exists."""
    now = now.replace(microsecond=0)  # Kubernetes' times have no more; the same world must give the same status
    if not is_managed(job):
        return Plan((), (), job.status)
    scaled = scale_job(job, observed, now)
    world = observe_job(scaled.job, observed)
    wanted = _plan_managed(scaled.job, world, observed, now, defaults, new_token)
    waits = [seconds for seconds in (wanted.requeue_after_seconds, scaled.requeue_after_seconds) if seconds is not None]
    return replace(
        wanted,
        delete=wanted.delete + world.stale,
        events=wanted.events + scaling_events(job.status.scaling, wanted.status.scaling),
        requeue_after_seconds=min(waits, default=None),
    )


def _plan_managed(
    job: RLJob,
    world: ObservedJob,
    observed: ObservedState,
    now: datetime,
    defaults: Defaults,
    new_token: Callable[[], str],
) -> Plan:
    if should_retry(job):
        return _plan_retry(job, world, now)
    if conditions.is_finished(job.status):
        return _plan_finished(job, world, now)
    restarts = count_restarts(job, world, observed)
    decision = decide_lifecycle(job, world, restarts, now)
    if decision.state in ("succeeded", "failed"):  # also of what runs of an earlier spec
        return _plan_end(job, world, observed, restarts, decision, now)
    if problems := find_spec_problems(job):
        return _plan_invalid(job, world, problems, now)
    try:
        children = build_children(job, _token(job, world) or new_token(), defaults, observed.reward_models)
    except UserError as error:
        return _plan_invalid(job, world, [str(error)], now)
    if problems := list(find_size_problems(children)):
        return _plan_invalid(job, world, problems, now)
    if decision.state == "suspended":
        return _plan_suspended(job, world, observed, restarts, children, now)
    return _plan_active(job, world, observed, restarts, children, now)


def render(
    job: RLJob,
    *,
    defaults: Defaults = DEFAULTS,
    new_token: Callable[[], str] = new_random_token,
    reward_models: Mapping[str, RewardModel] = MappingProxyType({}),
) -> list[Manifest]:
    """The children of a new job, as `rljob render` prints them. Raises UserError with every problem, one a line."""
    problems = find_problems(job)
    if problems:
        raise UserError("\n".join(problems))
    return build_children(job, new_token(), defaults, reward_models)


def build_invalid_status(job: RLJob, problems: list[str], now: datetime, *, is_left: bool = True) -> RLJobStatus:
    """The status of a job whose spec cannot be carried out. `is_left`: what runs of an earlier spec is left alone."""
    true = {conditions.FAILED: (conditions.REASON_INVALID_SPEC, "; ".join(problems))}
    running = conditions.find(job.status, conditions.RUNNING)
    if is_left and running and running.status == "True":
        true[conditions.RUNNING] = (running.reason, running.message)
    return _with_conditions(job, job.status, true, {}, now.replace(microsecond=0))


def build_waiting_status(job: RLJob, reason: str, message: str, now: datetime) -> RLJobStatus:
    """The status of a job of which the plan could not be carried out yet: why it does not run. Of one that runs, or
    has ended, it is what it was."""
    held = {c.type: (c.reason, c.message) for c in job.status.conditions if c.status == "True"}
    if conditions.RUNNING in held or conditions.is_finished(job.status):
        return job.status
    others = {c.type: (c.reason, c.message) for c in job.status.conditions if c.type in conditions.OPTIONAL_TYPES}
    return _with_conditions(
        job, job.status, held, others | {conditions.RUNNING: (reason, message)}, now.replace(microsecond=0)
    )


def _plan_finished(job: RLJob, world: ObservedJob, now: datetime) -> Plan:
    """After the end. The head's Job, once it has ended, stays for its log and takes nothing."""
    ended = world.head_job is not None and any(
        condition["type"] in ("Complete", "Failed") and condition["status"] == "True"
        for condition in world.head_job.get("status", {}).get("conditions") or []
    )
    kept = {ChildKey("Job", child_name(job, HEAD))} if ended else set()
    workloads = {key for key in world.children if key.kind in WORKLOAD_KINDS} - world.blocked
    roles = [role.model_copy(update={"desired": 0, "ready": 0}) for role in job.status.roles]
    status = job.status.model_copy(
        update={
            "roles": roles,
            **_count_ready(roles),
            "observed_generation": job.metadata.generation,
            "conditions": [
                condition.model_copy(update={"observed_generation": job.metadata.generation})
                for condition in job.status.conditions
            ],
        }
    )
    expiry = expiry_of(job)
    return Plan(
        children=(),
        delete=tuple(sorted(workloads - kept)),
        status=status,
        requeue_after_seconds=max(0.0, (expiry - now).total_seconds()) if expiry and expiry > now else None,
        delete_job=expiry is not None and now >= expiry,
    )


def _plan_retry(job: RLJob, world: ObservedJob, now: datetime) -> Plan:
    """A failed job that begins anew: first all that is left of its Pods goes, then the status forgets the failure."""
    workloads = {key for key in world.children if key.kind in WORKLOAD_KINDS}
    if workloads or any(role.pods for role in world.roles):
        return Plan(
            (), tuple(sorted(workloads - world.blocked)), job.status, requeue_after_seconds=BLOCKED_RETRY_SECONDS
        )
    fresh = {"retried": requested_retry(job), "start_time": None, "completion_time": None}
    status = job.status.model_copy(update=fresh | {"roles": [], "queued_since": None, "not_before": None})
    status = _with_conditions(job, status, {}, {}, now)
    return Plan((), (), status, conditions.derive_retry_events(job.status, status), requeue_after_seconds=0.0)


def _plan_invalid(job: RLJob, world: ObservedJob, problems: list[str], now: datetime) -> Plan:
    """What runs of an earlier spec goes on, unless the job is to give its nodes back."""
    workloads = {key for key in world.children if key.kind in WORKLOAD_KINDS} if job.spec.suspend else set()
    status = build_invalid_status(job, problems, now, is_left=not job.spec.suspend)
    delete = tuple(sorted(workloads - world.blocked))
    return Plan((), delete, status, conditions.derive_events(job.status, status))


def _plan_end(
    job: RLJob,
    world: ObservedJob,
    observed: ObservedState,
    restarts: dict[str, int],
    decision: LifecycleDecision,
    now: datetime,
) -> Plan:
    type_ = conditions.SUCCEEDED if decision.state == "succeeded" else conditions.FAILED
    status = _observe_status(job, world, observed, restarts).model_copy(
        update={"completion_time": now, "queued_since": None, "not_before": None}
    )
    if type_ == conditions.SUCCEEDED:
        # The driver is gone before it could be asked for its last step; that it ended well says that all are done.
        done = {"step": max(status.progress.step, job.spec.schedule.steps), "phase": "done", "waits_for": ""}
        status = status.model_copy(update={"progress": status.progress.model_copy(update=done)})
    status = _with_conditions(job, status, {type_: (decision.reason, decision.message)}, {}, now)
    return Plan((), (), status, conditions.derive_events(job.status, status), requeue_after_seconds=0.0)


def _plan_suspended(
    job: RLJob,
    world: ObservedJob,
    observed: ObservedState,
    restarts: dict[str, int],
    children: list[Manifest],
    now: datetime,
) -> Plan:
    kept = [child for child in children if child["kind"] not in WORKLOAD_KINDS]
    status = _observe_status(job, world, observed, restarts)
    roles = [role.model_copy(update={"desired": 0}) for role in status.roles]
    status = status.model_copy(update=_count_ready(roles))
    status = status.model_copy(update={"roles": roles, "start_time": None, "queued_since": None, "not_before": None})
    true = {conditions.SUSPENDED: ("Suspended", "spec.suspend is true; set it to false to go on from the checkpoint")}
    status = _with_conditions(job, status, true, {}, now)
    blocked = world.blocked & {key_of(child) for child in kept}
    return Plan(
        children=tuple(child for child in kept if key_of(child) not in blocked),
        delete=_find_obsolete_children(world, kept),
        status=status,
        events=conditions.derive_events(job.status, status),
        requeue_after_seconds=BLOCKED_RETRY_SECONDS if blocked else None,
    )


def _plan_active(
    job: RLJob,
    world: ObservedJob,
    observed: ObservedState,
    restarts: dict[str, int],
    children: list[Manifest],
    now: datetime,
) -> Plan:
    has_been_running = conditions.is_true(job.status, conditions.RUNNING) or conditions.is_true(
        job.status, conditions.RESTARTING
    )
    gang = evaluate_gang(job, world, has_been_running, now)
    blocking = find_blocking_pods(job, world, observed)
    causes = find_causes(job, world, observed) + [cause for since, cause in blocking if since <= now]
    if has_been_running:
        children = [
            keep_gang(child, world.children.get(key_of(child))) if child["kind"] in WORKLOAD_KINDS else child
            for child in children
        ]
    if gang.is_backing_off:
        children = [child for child in children if child["kind"] not in WORKLOAD_KINDS]
    delete = _find_obsolete_children(world, children)
    blocked = sorted(world.blocked & {key_of(child) for child in children})
    head_job = ChildKey("Job", child_name(job, HEAD))
    children = [_keep_head_template(child, world) if key_of(child) == head_job else child for child in children]
    held = find_frozen_children(job, observed, children, world.head_job is not None)
    children = [child for child in children if key_of(child) not in held]
    if head_job not in {*blocked, *held} and not gang.is_backing_off and _head_is_outdated(children, head_job, world):
        delete += (head_job,)
        blocked.append(head_job)
    if blocked:
        # Pods must not start from the Secret or ConfigMap of an earlier job of this name.
        children = [c for c in children if c["kind"] not in WORKLOAD_KINDS and key_of(c) not in blocked]
    status = _observe_status(job, world, observed, restarts)
    status = status.model_copy(
        update={
            "start_time": job.status.start_time or now,
            "retried": requested_retry(job),  # of a job that has not failed it asks for nothing, now or later
            "queued_since": gang.queued_since,
            "not_before": gang.not_before,
        }
    )
    true, false_reasons = _running_conditions(job, world, blocked, causes)
    if gang.queued:
        reason, message = gang.queued
        true[conditions.QUEUED] = (reason, "; ".join([message, *(cause.message for cause in causes)]))
    if isolation := evaluate_isolation(world):
        holds, reason, message = isolation
        (true if holds else false_reasons)[conditions.POOLS_ISOLATED] = (reason, message)
    if mixed := describe_mixed_rewards(world.roles):
        true[conditions.REWARD_VERSIONS_MIXED] = (MIXED, mixed)
    elif conditions.find(job.status, conditions.REWARD_VERSIONS_MIXED):
        false_reasons[conditions.REWARD_VERSIONS_MIXED] = (SETTLED, "the ready Pods of each reward are of one version")
    status = _with_conditions(job, status, true, false_reasons, now)
    deadline = deadline_of(job)
    moments = [moment for moment in (deadline, gang.next_deadline(job)) if moment]
    moments += [since for since, _ in blocking if since > now]
    waits = [BLOCKED_RETRY_SECONDS if blocked else PROGRESS_POLL_SECONDS]
    waits += [(moment - now).total_seconds() for moment in moments]
    is_scaled = any(reward.autoscaling for reward in job.spec.rewards)
    valid_until = None if blocked or is_scaled else min(moments, default=_NEVER)
    told = [(cause.reason, cause.message) for cause in causes]
    events = conditions.derive_events(job.status, status, told)
    return Plan(tuple(children), delete, status, events, max(0.0, min(waits)), gang.ungate, valid_until=valid_until)


def _find_obsolete_children(world: ObservedJob, wanted: list[Manifest]) -> tuple[ChildKey, ...]:
    """Children of ours that the plan no longer has."""
    return tuple(sorted(set(world.children) - {key_of(child) for child in wanted} - world.blocked))


def _token(job: RLJob, world: ObservedJob) -> str | None:
    secret = world.children.get(ChildKey("Secret", child_name(job, "token")))
    return read_token(secret) if secret else None


def _config_hash(workload: Manifest) -> str | None:
    annotations = workload["spec"]["template"].get("metadata", {}).get("annotations") or {}
    found: str | None = annotations.get(ANNOTATION_CONFIG_HASH)
    return found


def _head_is_outdated(children: list[Manifest], head_job: ChildKey, world: ObservedJob) -> bool:
    if world.head_job is None:
        return False
    wanted = next(child for child in children if key_of(child) == head_job)
    return _config_hash(wanted) != _config_hash(world.head_job)


def _keep_head_template(wanted: Manifest, world: ObservedJob) -> Manifest:
    """A Job's template cannot be changed. While nothing that the driver reads has changed, it keeps the one that it
    was made with, so that a new operator's other idea of a probe restarts no training."""
    running = world.head_job
    if running is None or is_stamped(running, wanted) or _config_hash(running) != _config_hash(wanted):
        return wanted
    kept = {name: running["spec"][name] for name in ("template", "podFailurePolicy") if name in running["spec"]}
    return wanted | {"spec": wanted["spec"] | kept}


def _observe_status(job: RLJob, world: ObservedJob, observed: ObservedState, restarts: dict[str, int]) -> RLJobStatus:
    """The old status with what was seen of roles and driver. A driver that did not answer said nothing new."""
    roles = [
        RoleStatus(name=role.name, desired=role.desired, ready=role.ready, restarts=restarts[role.name])
        for role in world.roles
    ]
    driver = observed.driver
    if driver is None:
        progress = job.status.progress.model_copy(update={"total_steps": job.spec.schedule.steps})
    else:
        progress = JobProgress(
            step=driver.step,
            total_steps=driver.total_steps or job.spec.schedule.steps,
            reward=None if driver.reward is None else round(driver.reward, 4),  # a column for people
            weight_version=driver.weight_version,
            phase=driver.phase,
            waits_for=driver.waits_for,
        )
    return job.status.model_copy(update={"roles": roles, "progress": progress} | _count_ready(roles))


def _count_ready(roles: list[RoleStatus]) -> dict[str, str]:
    """The printed columns: 2/2."""
    rollouts = [role for role in roles if role.name == ROLLOUT]
    rewards = [role for role in roles if role.name.startswith(f"{REWARD}-")]
    return {
        name: f"{sum(role.ready for role in group)}/{sum(role.desired for role in group)}" if group else ""
        for name, group in (("rollouts", rollouts), ("rewards", rewards))
    }


def _running_conditions(
    job: RLJob, world: ObservedJob, blocked: list[ChildKey], causes: list[Cause]
) -> tuple[dict[str, tuple[str, str]], dict[str, tuple[str, str]]]:
    """What an active job's conditions say: those that hold, and why others do not."""
    # A driver that has said 'done' only tidies up: its Pod is no longer ready, and nobody waits for it.
    ending = job.status.progress.phase == "done"
    short = [role for role in world.roles if role.ready < role.needed and not ending]
    waiting = conditions.describe_wait(map(describe_waiting, world.roles), [cause.message for cause in causes])
    if blocked:
        names = ", ".join(f"{kind} {name}" for kind, name in blocked)
        waiting = f"waits until an earlier {names} is gone"
    has_been_running = conditions.is_true(job.status, conditions.RUNNING) or conditions.is_true(
        job.status, conditions.RESTARTING
    )
    if has_been_running and driver_succeeded(world):
        return {conditions.RUNNING: ("Running", "the driver has ended; its Job is about to complete")}, {}
    if not short and not blocked:
        return {conditions.RUNNING: ("Running", waiting or "all Pods are ready")}, {}
    if not has_been_running:
        return {}, {conditions.RUNNING: (causes[0].reason if causes else "WaitingForPods", waiting)}
    reason = f"{short[0].kind.capitalize()}Restarting" if short else "HeadRestarting"
    return {conditions.RESTARTING: (reason, waiting)}, {conditions.RUNNING: (reason, waiting)}


def _with_conditions(
    job: RLJob,
    status: RLJobStatus,
    true: dict[str, tuple[str, str]],
    false_reasons: dict[str, tuple[str, str]],
    now: datetime,
) -> RLJobStatus:
    generation = job.metadata.generation
    built = conditions.build_conditions(job.status, true, false_reasons, generation, now)
    phase = conditions.derive_phase(built)
    return status.model_copy(update={"conditions": built, "phase": phase, "observed_generation": generation})
