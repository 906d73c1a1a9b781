"""The plan of a job: from its spec and status, the observed state and the time to what to apply, delete and report.

The first step that applies decides. Pure, except for the token of a new job. Leaves I/O to `loop`.
Invariant: what an end needs to remember is stored before anything is deleted. So an end takes two reconciles: the
first stores the status, the second deletes the workloads.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from types import MappingProxyType

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.kept_defaults import merge_defaults, read_defaults
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.manifest.status import RLJobStatus
from rljob_core.backend import PROGRESS_POLL_SECONDS, ChildKey, Event, Manifest, ObservedState, Plan, key_of
from rljob_core.children import POD_KINDS, WORKLOAD_KINDS, build_children, keep, sort_deletions
from rljob_core.children.common import child_name
from rljob_core.children.config import read_token
from rljob_core.children.gang import keep_gang
from rljob_core.children.reward_refs import find_frozen_children
from rljob_core.children.start_model import with_any_claim
from rljob_core.defaults import DEFAULTS, Defaults
from rljob_core.plan import active_time, conditions, job_status, lifecycle, run_files
from rljob_core.plan.apply_scaling import is_autoscaled, scale_job, scaling_events
from rljob_core.plan.avoided_nodes import avoidance_events, find_avoided
from rljob_core.plan.built_children import Build, build_checked
from rljob_core.plan.causes import find_causes
from rljob_core.plan.failures import Failures, count_failures, is_stored, reset_event, why_reset
from rljob_core.plan.gang import evaluate_gang
from rljob_core.plan.lost_nodes import find_due_causes, find_forced_deletions, find_lost_pods
from rljob_core.plan.observed_job import ObservedJob, find_owned_children, find_stale, has_condition, observe_job
from rljob_core.plan.policy_defaults import apply_policy, choose_queue, mark_queue
from rljob_core.plan.policy_limits import find_policy_problems
from rljob_core.plan.progress import add_progressing, end_progress
from rljob_core.plan.run_files import read_figures
from rljob_core.plan.start_model import place_model
from rljob_core.plan.validate import find_problems

BLOCKED_RETRY_SECONDS = 1.0
"""How soon to check whether a name has become free."""
_NEVER = datetime.max.replace(tzinfo=UTC)

JobPlan = Plan[RLJobStatus]


def new_random_token() -> str:
    return secrets.token_urlsafe(32)


def plan_job(
    job: RLJob,
    observed: ObservedState,
    now: datetime,
    *,
    defaults: Defaults = DEFAULTS,
    new_token: Callable[[], str] = new_random_token,
    build: Build = build_checked,
) -> JobPlan:
    """The plan now. Equal arguments give equal plans once the job's Secret exists."""
    now = now.replace(microsecond=0)  # as Kubernetes' times: the same observations must give the same status
    if not lifecycle.is_managed(job):
        return Plan((), (), job.status)
    owned, blocked = find_owned_children(job, observed)
    kept = {key: child for key, child in owned.items() if key not in blocked}
    own_queue, job = job.spec.scheduling.queue, choose_queue(job, observed.policy, kept)
    policy_queue = job.spec.scheduling.queue if own_queue is None else None
    job, unplaced = place_model(job, observed, kept, now)
    scaled, next_decision_seconds = scale_job(job, observed, now)
    defaults = apply_policy(defaults, observed.policy)
    context = _Context(observe_job(scaled, observed), now, defaults, new_token, build, policy_queue, unplaced)
    steps = (
        *(_plan_retry, _plan_finished, _plan_end, _plan_deleted, _plan_unplaced, _plan_invalid, _plan_suspended),
        *(_plan_refused, _plan_active),
    )
    plan = next(filter(None, (step(context) for step in steps)))
    events = conditions.derive_events(job.status, plan.status)
    if not lifecycle.has_been_running(job):
        events = tuple(run_files.add_warning(context.observed, event) for event in events)
    forced = find_forced_deletions(job, observed)
    waits = [seconds for seconds in (plan.requeue_after_seconds, next_decision_seconds) if seconds is not None]
    waits += [(deletion.since - now).total_seconds() for deletion in forced if deletion.since > now]
    return replace(
        plan,
        force_delete=tuple(deletion for deletion in forced if deletion.since <= now),
        delete=plan.delete + find_stale(job, observed),
        events=plan.events + events + scaling_events(job, plan.status.scaling),
        requeue_after_seconds=min(waits, default=None),
        valid_until=plan.valid_until and min([plan.valid_until, *(deletion.since for deletion in forced)]),
    )


def render_children(
    job: RLJob,
    token: str,
    models: Mapping[str, RewardModel] = MappingProxyType({}),
    *,
    defaults: Defaults = DEFAULTS,
) -> list[Manifest]:
    """The children of a new job, as `validate --render` prints them. Raises UserError with one problem per line."""
    if problems := find_problems(job):
        raise UserError("\n".join(problems))
    return build_children(with_any_claim(job), token, defaults, models)


class _Context:
    """What the steps of one plan share. Each part is computed when it is first needed."""

    def __init__(
        self,
        observed: ObservedJob,
        now: datetime,
        defaults: Defaults,
        new_token: Callable[[], str],
        build: Build,
        policy_queue: str | None,
        unplaced: conditions.Reason | None,
    ) -> None:
        self.unplaced = unplaced
        """Why spec.model cannot be read."""
        self.job, self.observed, self.now = observed.job, observed, now
        self._defaults, self._new_token, self._build = defaults, new_token, build
        self._policy_queue = policy_queue

    @cached_property
    def restarts(self) -> dict[str, int]:
        return lifecycle.count_restarts(self.observed)

    @cached_property
    def failures(self) -> Failures:
        return count_failures(self.observed, self.now)

    @cached_property
    def decision(self) -> lifecycle.LifecycleDecision:
        return lifecycle.decide_lifecycle(self.observed, self.failures, self.now)

    @cached_property
    def built(self) -> tuple[dict[ChildKey, Manifest], list[str]]:
        """Workloads that run with or without the name of Kubernetes' default account are built as they run: the name
        changes nothing in their Pods."""
        job, observed = self.job, self.observed
        secret = observed.children.get(ChildKey("Secret", child_name(job, "token")))
        token = read_token(secret) or self._new_token()
        children, problems = self._build(job, token, self._defaults, observed.state.reward_models)
        built = {key_of(child): child for child in children}
        if secret and "immutable" in secret:  # of an earlier version: the API server refuses a change
            built[key_of(secret)] |= {"immutable": True}
        changed = {key for key in observed.children if key.kind in keep.KINDS} - _find_unchanged(observed, built)
        if changed and (other := keep.name_otherwise(job)):
            others, _ = self._build(other, token, self._defaults, observed.state.reward_models)
            named = {key_of(child): child for child in others}
            built |= {key: named[key] for key in changed & _find_unchanged(observed, named)}
        if queue := self._policy_queue:
            built = {key: mark_queue(child, queue) for key, child in built.items()}
        return built, problems

    @cached_property
    def policy_problems(self) -> list[str]:
        return find_policy_problems(self.job, self.built[0].values(), self.observed.state, self._defaults)

    @property
    def workloads(self) -> set[ChildKey]:
        return {key for key in self.observed.children if key.kind in POD_KINDS}

    def deletable(self, keys: Iterable[ChildKey]) -> tuple[ChildKey, ...]:
        return tuple(sort_deletions(set(keys) - self.observed.blocked))


def _plan_retry(context: _Context) -> JobPlan | None:
    """Start a failed job again: delete its workloads, wait until no Pod is left, then reset the status."""
    job = context.job
    if not lifecycle.should_retry(job):
        return None
    if context.workloads or any(role.pods for role in context.observed.roles):
        delete = context.deletable(context.workloads)
        return Plan((), delete, job.status, requeue_after_seconds=BLOCKED_RETRY_SECONDS)
    reset = {"retried": lifecycle.requested_retry(job), "start_time": None, "completion_time": None} | active_time.RESET
    status = job.status.model_copy(
        update=reset | {"roles": [], "evaluation": [], "avoided_nodes": [], "queued_since": None, "not_before": None}
    )
    status = job_status.set_conditions(job, status, {}, {}, context.now)
    why = "retried" if status.retried != job.status.retried else "its spec was changed"
    message = f"{why}: starts again from its last checkpoint; restarts count from zero"
    return Plan((), (), status, (Event("Normal", "Retried", message),), requeue_after_seconds=0.0)


def _plan_finished(context: _Context) -> JobPlan | None:
    """After the end, delete the workloads; the job itself after its TTL. A head Job that has ended, or is suspended
    because its Pods failed too often, keeps their logs and uses no resources, so it stays."""
    job, observed, now = context.job, context.observed, context.now
    if not conditions.is_finished(job.status):
        return None
    has_ended = any(has_condition(observed.head_job, type_) for type_ in ("Complete", "Failed"))
    suspended = () if has_ended else _suspend_failed_head(context)
    kept = {observed.head_key} if has_ended or suspended else set()
    roles = [role.model_copy(update={"desired": 0, "ready": 0}) for role in job.status.roles]
    status = job_status.set_roles(job.status, roles)
    generation = {"observed_generation": job.metadata.generation}
    left_out = (conditions.RECONCILE_FAILED, conditions.RECONCILING)
    reported = [c.model_copy(update=generation) for c in status.conditions if c.type not in left_out]
    expiry = lifecycle.expiry_of(job)
    return Plan(
        children=suspended,
        delete=context.deletable(context.workloads - kept),
        status=status.model_copy(update=generation | {"conditions": reported}),
        requeue_after_seconds=max(0.0, (expiry - now).total_seconds()) if expiry and expiry > now else None,
        delete_job=expiry is not None and now >= expiry and not lifecycle.find_finalizers(job),
    )


def _suspend_failed_head(context: _Context) -> tuple[Manifest, ...]:
    """The head's Job without a running Pod, if the head is why the job failed; empty if it must be deleted."""
    observed, failed = context.observed, conditions.find(context.job.status, conditions.FAILED)
    running = observed.head_job
    if running is None or failed is None or failed.reason != lifecycle.HEAD_FAILED:
        return ()
    desired = _choose_children(context, is_backing_off=False).get(observed.head_key)
    if desired is None or keep.must_recreate(desired, running) or observed.head_key in observed.blocked:
        return ()
    return (desired | {"spec": desired["spec"] | {"suspend": True}},)


def _plan_end(context: _Context) -> JobPlan | None:
    """Store success or failure, also of workloads of an earlier spec."""
    job, decision = context.job, context.decision
    if decision.state not in ("succeeded", "failed"):
        return None
    type_ = conditions.SUCCEEDED if decision.state == "succeeded" else conditions.FAILED
    status = job_status.observe_status(context.observed, context.restarts, context.failures, context.now).model_copy(
        update={"completion_time": context.now, "queued_since": None, "not_before": None}
    )
    status = status.model_copy(update={"progress": end_progress(status.progress)})
    if type_ == conditions.SUCCEEDED:
        # The driver ends before the operator polls its last step. Its success means that all steps are done.
        done = {"step": max(status.progress.step, job.spec.num_steps), "phase": "done", "waits_for": ""}
        update = {"progress": status.progress.model_copy(update=done), "evaluation": read_figures(context.observed)}
        status = status.model_copy(update=update)
    true, false_reasons = {type_: (decision.reason, decision.message)}, conditions.Reasons()
    job_status.add_learning(context.observed, true, false_reasons)
    run_files.add_progress_lost(context.observed, true)
    status = job_status.set_conditions(job, status, true, false_reasons, context.now)
    return Plan((), (), status, requeue_after_seconds=0.0)


def _plan_deleted(context: _Context) -> JobPlan | None:
    """Release the Pods of a job whose deletion waits for others, and say for whom."""
    if not (finalizers := lifecycle.find_finalizers(context.job)):
        return None
    message = f"it is being deleted, and waits for who set the finalizers {', '.join(finalizers)}; its Pods are deleted"
    return Plan((), context.deletable(context.workloads), _suspend(context, "Deleting", message))


def _plan_unplaced(context: _Context) -> JobPlan | None:
    """Wait for the model of another job, without Pods. Workloads of an earlier spec stay, as of an invalid one."""
    job, now, why = context.job, context.now, context.unplaced
    if why is None:
        return None
    if context.workloads:
        status = job_status.build_invalid_status(job, [why[1]], now, keeps_running=not job.spec.suspend)
        return Plan((), context.deletable(context.workloads if job.spec.suspend else ()), status)
    true = {conditions.SUSPENDED: ("Suspended", why[1])} if job.spec.suspend else {}
    status = job_status.set_conditions(job, job.status, true, {conditions.RUNNING: why}, now)
    events = conditions.derive_cause_events(job.status, status, [why])
    # The operator's own writes, such as the other job's status, cause no reconcile.
    return Plan((), (), status, events, requeue_after_seconds=PROGRESS_POLL_SECONDS)


def _plan_invalid(context: _Context) -> JobPlan | None:
    """Report an invalid spec. Workloads of an earlier spec stay, unless the job is suspended."""
    job, (_, problems) = context.job, context.built
    if not problems:
        return None
    status = job_status.build_invalid_status(job, problems, context.now, keeps_running=not job.spec.suspend)
    return Plan((), context.deletable(context.workloads if job.spec.suspend else ()), status)


def _plan_suspended(context: _Context) -> JobPlan | None:
    """Delete the workloads and keep the other children. A job that has not run has Secrets alone."""
    observed = context.observed
    if context.decision.state != "suspended":
        return None
    kept = {
        key: child
        for key, child in context.built[0].items()
        if key.kind not in POD_KINDS and (key.kind == "Secret" or key in observed.children)
    }
    status = _suspend(context, "Suspended", run_files.describe_suspension(observed))
    blocked = observed.blocked & kept.keys()
    return Plan(
        children=tuple(child for key, child in kept.items() if key not in blocked),
        delete=context.deletable(observed.children.keys() - kept.keys()),
        status=status,
        requeue_after_seconds=BLOCKED_RETRY_SECONDS if blocked else None,
    )


def _suspend(context: _Context, reason: str, message: str) -> RLJobStatus:
    status = job_status.observe_status(context.observed, context.restarts, context.failures, context.now)
    status = job_status.set_roles(status, [role.model_copy(update={"desired": 0}) for role in status.roles])
    reset = {"start_time": None, "queued_since": None, "not_before": None} | active_time.RESET
    status = status.model_copy(update={"avoided_nodes": [], "progress": end_progress(status.progress), **reset})
    return job_status.set_conditions(context.job, status, {conditions.SUSPENDED: (reason, message)}, {}, context.now)


def _plan_refused(context: _Context) -> JobPlan | None:
    """Report what the namespace's policy does not allow. Workloads of an earlier spec stay."""
    problems = context.policy_problems
    return Plan((), (), job_status.build_invalid_status(context.job, problems, context.now)) if problems else None


def _plan_active(context: _Context) -> JobPlan:
    """Start the job, or keep it running."""
    job, observed, now = context.job, context.observed, context.now
    was_running = lifecycle.has_been_running(job)
    gang = evaluate_gang(observed, was_running, now)
    desired = _choose_children(context, gang.is_backing_off)
    frozen = find_frozen_children(job, observed.state, desired.values(), observed.head_job is not None)
    blocked = sorted(observed.blocked & desired.keys())
    kept = {key for key in frozen if key.kind not in POD_KINDS}
    delete = context.deletable(observed.children.keys() - desired.keys() - kept)
    outdated = [
        key
        for key, child in desired.items()
        if key not in {*blocked, *frozen}
        and (running := observed.children.get(key))
        and keep.must_recreate(child, running)
    ]
    reset = why_reset(observed, context.built[0][observed.head_key], context.failures, now) if was_running else ""
    is_reset = bool(reset) and is_stored(observed, context.failures)
    outdated += [observed.head_key] if is_reset and observed.head_key not in {*blocked, *frozen, *outdated} else []
    delete += tuple(outdated)  # a reconcile after the deletion recreates them
    blocked += outdated

    def can_apply(key: ChildKey) -> bool:
        # No Pod must start from the Secret or ConfigMap of an earlier job with this name.
        return key not in frozen and not (blocked and (key.kind in POD_KINDS or key in blocked))

    applied = {key: child for key, child in desired.items() if can_apply(key)}
    lost, avoided = find_lost_pods(observed), find_avoided(observed)
    causes = find_due_causes(lost, now) + find_causes(observed)
    status = job_status.observe_status(observed, context.restarts, context.failures, now, applied).model_copy(
        update={
            "start_time": job.status.start_time or now,
            "defaults": merge_defaults(read_defaults(job.spec), job.status.defaults),
            # The annotation of a job that has not failed has no effect, even later.
            "retried": lifecycle.requested_retry(job),
            "queued_since": gang.queued_since,
            "not_before": gang.not_before,
            "avoided_nodes": avoided,  # the next reconcile builds Pods that avoid them
        }
    )
    true, false_reasons = job_status.active_conditions(observed, gang, blocked, causes)
    unknown = conditions.Reasons()
    progress = add_progressing(observed, status.progress, now, true, false_reasons, unknown)
    status = job_status.set_conditions(job, status, true, false_reasons, now, unknown)
    moments = (active_time.deadline_of(job, status), gang.next_deadline(job), progress)
    deadlines = [moment for moment in moments if moment]
    deadlines += [each.since for each in lost if each.since > now]
    waits = [BLOCKED_RETRY_SECONDS if blocked else PROGRESS_POLL_SECONDS]
    waits += [0.0] if avoided != job.status.avoided_nodes or (reset and not is_reset) else []
    waits += [(moment - now).total_seconds() for moment in deadlines]
    return Plan(
        children=tuple(applied.values()),
        delete=delete,
        replaced=tuple(child for key, child in desired.items() if outdated and key.kind in WORKLOAD_KINDS),
        status=status,
        events=conditions.derive_cause_events(job.status, status, causes)
        + avoidance_events(observed, avoided)
        + ((reset_event(observed, reset),) if is_reset else ()),
        requeue_after_seconds=max(0.0, min(waits)),
        ungate=gang.ungate,
        valid_until=None if blocked or is_autoscaled(job) else min(deadlines, default=_NEVER),
    )


def _choose_children(context: _Context, is_backing_off: bool) -> dict[ChildKey, Manifest]:
    """The desired children. Existing workloads keep what they run unless the user has changed its configuration, and
    running ones keep their gang; while the gang backs off there are no workloads."""
    observed, is_running = context.observed, lifecycle.has_been_running(context.job)
    built, _ = context.built
    unchanged = _find_unchanged(observed, built)
    desired = dict[ChildKey, Manifest]()
    for key, child in built.items():
        if is_backing_off and key.kind in POD_KINDS:
            continue
        if key.kind in keep.KINDS:
            running = observed.children.get(key)
            has_gang = is_running and key.kind in WORKLOAD_KINDS
            child = keep.record_built(keep_gang(child, running) if has_gang else child)
            if running is not None and key in unchanged:
                child = keep.keep_running(child, running)
        desired[key] = child
    return desired


def _find_unchanged(observed: ObservedJob, built: Mapping[ChildKey, Manifest]) -> set[ChildKey]:
    """Existing workloads that were built from the current configuration. Head and trainers are one Ray cluster, which
    must run the same image: if one of them is rebuilt, so is the other."""
    unchanged = keep.find_unchanged(built, observed.children, lifecycle.has_been_running(observed.job))
    ray_cluster = {observed.head_key, observed.trainer_key} if observed.job.spec.trains else {observed.head_key}
    return unchanged if ray_cluster <= unchanged else unchanged - ray_cluster
