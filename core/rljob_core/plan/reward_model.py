"""The plan of a RewardModel: children, status and events. Pure, except for the token of a new model.

Every child is named NAME-rewardmodel, a name that no child of a job has. Invariant: no Pod of a model starts from an
object of another owner, or of an earlier model with its name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from rljob_api.errors import UserError
from rljob_api.manifest.services.reward import RewardModel, RewardModelStatus
from rljob_api.manifest.status import Condition
from rljob_api.wire.contract import LABEL_ROLE, PORT_SERVICE
from rljob_core.backend import ChildKey, Event, Manifest, ObservedState, Plan, key_of
from rljob_core.children import WORKLOAD_KINDS, keep, sort_children
from rljob_core.children.common import HEAD, REWARD
from rljob_core.children.config import build_service_config, build_token_secret, read_token
from rljob_core.children.network import build_disruption_budgets, build_service_policy
from rljob_core.children.reward_refs import child_name
from rljob_core.children.service import build_model_selector, build_server, service_of
from rljob_core.defaults import DEFAULTS, Defaults
from rljob_core.plan import conditions, validate
from rljob_core.plan.apply_scaling import scale_model
from rljob_core.plan.autoscale import derive_scaling_events, is_recent
from rljob_core.plan.causes import Cause, find_model_causes
from rljob_core.plan.conditions import Reason, describe_blocked
from rljob_core.plan.job import BLOCKED_RETRY_SECONDS, new_random_token
from rljob_core.plan.observed_job import (
    RoleView,
    describe_waiting,
    find_images,
    find_owned_children,
    find_pods,
    find_stale,
)
from rljob_core.plan.policy_defaults import apply_policy
from rljob_core.plan.policy_limits import find_policy_problems
from rljob_core.plan.reward_versions import SETTLED, describe_update

DEGRADED = "Degraded"
SCALING = "Scaling"
UPDATING = "Updating"
REASON_REFUSED = "Refused"
REASON_WAITING_FOR_DELETION = "WaitingForDeletion"
REFUSED_RETRY_SECONDS = 30.0
"""How soon to retry what was rejected: no watch event reports that another owner's object was deleted."""
_USER_REASONS = (conditions.REASON_INVALID_SPEC, REASON_REFUSED)
"""Reasons that only the user can resolve."""
_SETTLE_SECONDS = 120.0
"""A model is not degraded for this long after a change of its replicas, while new Pods start."""
_LATENCY_POLL_SECONDS = 30.0
"""How often the drivers report latencies for a model that is not autoscaled."""
_LATENCY_TOLERANCE = 0.1
"""A p95 within this share of the stored one is not written: no two measurements are equal."""


@dataclass(frozen=True)
class _ObservedModel:
    """A model with its decided replicas, its children and its Pods."""

    model: RewardModel
    state: ObservedState
    children: dict[ChildKey, Manifest]
    """Children of this incarnation of the model."""
    blocked: frozenset[ChildKey]
    """Names that cannot be applied now."""
    role: RoleView

    @property
    def child_name(self) -> str:
        return child_name(self.model.metadata.name)


def plan_reward_model(
    model: RewardModel,
    observed: ObservedState,
    now: datetime,
    *,
    defaults: Defaults = DEFAULTS,
    new_token: Callable[[], str] = new_random_token,
) -> Plan[RewardModelStatus]:
    """The plan now. For a spec that cannot be built it reports why, and leaves existing children alone."""
    now = now.replace(microsecond=0)
    scaled, next_decision_seconds = scale_model(model, observed, now)
    seen = _observe(scaled, observed)
    plan = _plan_children(seen, now, apply_policy(defaults, observed.policy), new_token)
    poll_seconds = _LATENCY_POLL_SECONDS if observed.demands else None
    waits = (plan.requeue_after_seconds, next_decision_seconds, poll_seconds)
    return replace(
        plan,
        delete=plan.delete + find_stale(model, observed),
        events=plan.events + derive_scaling_events(model.status.scaling, plan.status.scaling, "scaled"),
        requeue_after_seconds=min((seconds for seconds in waits if seconds is not None), default=None),
    )


def plan_rejected_model(
    model: RewardModel, observed: ObservedState, rejected: str, now: datetime
) -> Plan[RewardModelStatus]:
    """The plan for a model whose children could not all be applied: its status reports why."""
    now = now.replace(microsecond=0)
    scaled, _ = scale_model(model, observed, now)
    plan = _build_plan(_observe(scaled, observed), now, not_ready=(REASON_REFUSED, rejected))
    return replace(plan, requeue_after_seconds=REFUSED_RETRY_SECONDS)


def plan_invalid_model(model: RewardModel, problems: Sequence[str], now: datetime) -> Plan[RewardModelStatus]:
    """The plan for a model whose spec cannot be read: its status reports why, and its children stay."""
    old, generation = model.status, model.metadata.generation
    build = partial(
        conditions.build_condition,
        old,
        reason=conditions.REASON_INVALID_SPEC,
        message="; ".join(problems),
        generation=generation,
        now=now,
    )
    built = [build(conditions.READY, holds=False), build(conditions.STALLED, holds=True)]
    others = [c for c in old.conditions if c.type not in (conditions.READY, *conditions.ABNORMAL)]
    status = old.model_copy(update={"conditions": [*built, *others], "observed_generation": generation})
    return Plan((), (), status, _derive_events(old, status, ()))


def _observe(model: RewardModel, observed: ObservedState) -> _ObservedModel:
    children, blocked = find_owned_children(model, observed)
    role = RoleView(REWARD, REWARD, "spec", model.spec, model.spec.replicas, tuple(find_pods(model, observed)))
    return _ObservedModel(model, observed, children, blocked, role)


def _plan_children(
    seen: _ObservedModel, now: datetime, defaults: Defaults, new_token: Callable[[], str]
) -> Plan[RewardModelStatus]:
    secret = seen.children.get(ChildKey("Secret", seen.child_name))
    build, running = partial(_build_children, token=read_token(secret) or new_token(), defaults=defaults), seen.children
    try:
        built = build(seen.model)
        other = None if keep.find_unchanged(built, running) else keep.name_otherwise(seen.model)
        if other and keep.find_unchanged(others := build(other), running):
            built = others
        if problems := find_policy_problems(seen.model, built.values(), seen.state, defaults):
            raise UserError("; ".join(problems))
    except UserError as error:
        return _build_plan(seen, now, not_ready=(conditions.REASON_INVALID_SPEC, str(error)))
    if secret and "immutable" in secret:  # as in a job
        built[key_of(secret)] |= {"immutable": True}
    built = {key: keep.record_built(child) for key, child in built.items()}
    built |= {key: keep.keep_running(built[key], running[key]) for key in keep.find_unchanged(built, running)}
    delete = tuple(sorted(running.keys() - built.keys() - seen.blocked))
    not_ready = None
    if blocked := sorted(seen.blocked & built.keys()):
        # Pods must not start from the Secret or ConfigMap of an earlier model with this name.
        built = {key: built[key] for key in built if key.kind not in WORKLOAD_KINDS and key not in blocked}
        not_ready = (REASON_WAITING_FOR_DELETION, describe_blocked(seen.model, seen.state, blocked))
    plan = _build_plan(seen, now, tuple(built.values()), not_ready)
    return replace(plan, delete=delete, requeue_after_seconds=BLOCKED_RETRY_SECONDS if not_ready else None)


def _build_children(model: RewardModel, token: str, defaults: Defaults) -> dict[ChildKey, Manifest]:
    """All children, in order. Raises UserError for a spec that cannot be built, or that the API server would reject."""
    if problems := validate.find_model_spec_problems(model):
        raise UserError("; ".join(problems))
    if not model.spec.is_served:
        return {}
    service = service_of(model)
    heads = {"podSelector": {"matchLabels": {LABEL_ROLE: HEAD}}}
    children = [
        build_token_secret(model, service.token_secret, token),
        build_service_config(service),
        *build_server(service, token, defaults),
        build_service_policy(service, heads),
    ]
    children += build_disruption_budgets(model, children)
    if problems := validate.find_model_child_problems(model, children):
        raise UserError("; ".join(problems))
    return {key_of(child): child for child in sort_children(children)}


def _build_plan(
    seen: _ObservedModel, now: datetime, children: tuple[Manifest, ...] = (), not_ready: Reason | None = None
) -> Plan[RewardModelStatus]:
    model, causes, update = seen.model, list[Cause](), None
    if model.spec.is_served:
        template = next((child["spec"]["template"] for child in children if child["kind"] == "Deployment"), None)
        update = describe_update(seen.role.pods, template)
        causes = [] if not_ready else find_model_causes(model, seen.role, seen.children, seen.state)
    images = find_images({**seen.children, **{key_of(child): child for child in children}})
    status = _build_status(seen, now, not_ready, causes, update).model_copy(
        update={"image": images.get(REWARD, model.status.image) if model.spec.is_served else ""}
    )
    return Plan(children, (), status, _derive_events(model.status, status, causes))


def _build_status(
    seen: _ObservedModel, now: datetime, not_ready: Reason | None, causes: Sequence[Cause], update: Reason | None
) -> RewardModelStatus:
    model, served = seen.model, seen.model.spec.is_served
    desired, generation = model.spec.replicas, model.metadata.generation
    deployment = seen.children.get(ChildKey("Deployment", seen.child_name), {}).get("status", {}) if served else {}
    replicas, ready = deployment.get("replicas", 0), deployment.get("readyReplicas", 0)

    def build(type_: str, holds: bool, reason: str, message: str) -> Condition:
        return conditions.build_condition(model.status, type_, holds, reason, message, generation=generation, now=now)

    is_short = served and ready < desired
    counts = f"{min(ready, desired)} of {desired} Pods are ready"
    waits = describe_waiting(seen.role) if is_short else ""
    why = conditions.describe_wait([waits], [cause.message for cause in causes]) or counts
    cause = causes[0].reason if causes else ""
    is_degraded = is_short and not is_recent(model.status.scaling, now, _SETTLE_SECONDS)
    why_degraded = (cause or "TooFewReady") if is_degraded else "Scaling" if is_short else "AllReady"
    is_ready, *described = _evaluate_ready(model, ready, not_ready, counts, cause, why)
    built = [build(conditions.READY, is_ready, *described), build(DEGRADED, is_degraded, why_degraded, why)]
    if not is_ready:
        standard = conditions.STALLED if described[0] in _USER_REASONS else conditions.RECONCILING
        built.append(build(standard, True, *described))
    if served:
        built.append(build(SCALING, *_evaluate_scaling(model, replicas, ready, update is not None)))
        reason, versions = update or (SETTLED, "")
        versions = "; ".join([versions, *(cause.message for cause in causes)]) if update else ""
        built.append(build(UPDATING, update is not None, reason, versions))
    selector = build_model_selector(model.metadata.name)
    return RewardModelStatus(
        conditions=built,
        observed_generation=generation,
        replicas=replicas,
        ready_replicas=ready,
        endpoints=_find_endpoints(model, ready),
        latency_p95_seconds=_observe_p95(model, seen.state),
        scaling=model.status.scaling,
        selector=",".join(f"{key}={value}" for key, value in selector.items()) if served else "",
    )


def _evaluate_ready(
    model: RewardModel, ready: int, not_ready: Reason | None, counts: str, cause: str, why: str
) -> tuple[bool, str, str]:
    """Whether the model is ready, reason and message. `not_ready` applies whatever its Pods are."""
    if not_ready:
        return False, *not_ready
    if not model.spec.is_served:
        return True, "External", "an external endpoint"
    if ready:
        return True, "Serving", counts
    if model.spec.replicas:
        return False, cause or "WaitingForPods", why
    if model.status.scaling:
        return True, "ScaledToZero", "scaled to zero: no samples to score; Pods start before the next step"
    return False, "NoReplicas", why


def _evaluate_scaling(model: RewardModel, replicas: int, ready: int, is_updating: bool) -> tuple[bool, str, str]:
    """Whether Pods are being added or removed, and why their number is the desired one."""
    desired, scaling = model.spec.replicas, model.status.scaling
    why = scaling.message if scaling else f"spec.replicas is {desired}"
    if replicas > desired and not is_updating:  # an update surges above the desired number
        return True, "ScalingDown", why
    if ready < desired:
        return True, "ScalingUp", why
    is_limited = scaling is not None and scaling.slots > model.spec.slots * desired
    return False, "AtMaximum" if is_limited else "Steady", why


def _find_endpoints(model: RewardModel, ready: int) -> list[str]:
    if model.spec.http is not None:
        return [model.spec.http.url]
    host = f"{child_name(model.metadata.name)}.{model.metadata.namespace}.svc"
    return [f"{host}:{PORT_SERVICE}"] if ready else []


def _observe_p95(model: RewardModel, observed: ObservedState) -> float | None:
    """The longest p95 that a driver reports. The stored one stays if they are close, or if no driver reports one."""
    before = model.status.latency_p95_seconds
    reported = [demand.reported.latency_p95_seconds for demand in observed.demands if demand.reported]
    longest = max((seconds for seconds in reported if seconds is not None), default=None)
    if longest is None or (before is not None and abs(longest - before) <= _LATENCY_TOLERANCE * before):
        return before
    return float(f"{longest:.3g}")


def _derive_events(old: RewardModelStatus, new: RewardModelStatus, causes: Sequence[Cause]) -> tuple[Event, ...]:
    """One event per new cause, per condition that becomes True, and per new reason that only the user can resolve.
    A new model is not degraded while its first Pods start."""
    true = {condition.type for condition in old.conditions if condition.status == "True"}
    known = {(condition.reason, condition.message) for condition in old.conditions}
    events = list(conditions.derive_cause_events(old, new, causes))
    for condition in new.conditions:
        if condition.type in conditions.ABNORMAL:
            continue
        is_user_error = condition.reason in _USER_REASONS
        if condition.type == UPDATING and condition.status == "False" and UPDATING in true:
            events.append(Event("Normal", "Updated", "all Pods run the same version"))
        # derive_scaling_events reports the condition Scaling.
        becomes_true = condition.status == "True" and condition.type not in {*true, SCALING}
        if condition.type == DEGRADED:
            becomes_true = becomes_true and conditions.READY in true and not causes
        if becomes_true or (is_user_error and (condition.reason, condition.message) not in known):
            is_warning = condition.type == DEGRADED or is_user_error
            events.append(Event("Warning" if is_warning else "Normal", condition.reason, condition.message))
    return tuple(events)
