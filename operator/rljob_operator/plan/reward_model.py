"""RewardModels: what one should have as children, what to say of it, and the order of the I/O.

Pure but for the token of a model that has none yet. Every child is called NAME-rewardmodel, which no child of a job
is called by default. Invariant: no Pod of a model starts from an object that is not this very model's. A backend
implements exactly these:

    get_reward_model(key: JobKey) -> RewardModel | None
    observe_reward_model(model: RewardModel) -> Observed      (children by LABEL_REWARD_MODEL; pods)
    apply(manifest: Manifest) -> None                         (as in Backend)
    delete(namespace: str, child: ChildKey) -> None           (as in Backend)
    update_reward_model_status(model: RewardModel, status: RewardModelStatus) -> None
    record_event(about: RewardModel, event: Event) -> None
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal, Protocol

from rljob_api.errors import UserError
from rljob_api.manifest.reward import RewardModel, RewardModelStatus
from rljob_api.manifest.status import Condition
from rljob_api.wire.contract import LABEL_ROLE, PORT_REWARD
from rljob_operator.backend import ChildKey, Event, JobKey, Manifest, Observed, key_of
from rljob_operator.children import WORKLOAD_KINDS, sort_children
from rljob_operator.children.common import HEAD, REWARD
from rljob_operator.children.config import build_reward_config, build_token_secret, read_token
from rljob_operator.children.network import build_reward_budget, build_reward_policy
from rljob_operator.children.reward import RewardService, build_model_selector, build_reward, service_of
from rljob_operator.children.reward_refs import child_name
from rljob_operator.defaults import DEFAULTS, Defaults
from rljob_operator.plan.apply_scaling import scale_model
from rljob_operator.plan.autoscale import derive_scaling_events, is_recent
from rljob_operator.plan.causes import Cause, find_model_causes
from rljob_operator.plan.conditions import MAX_MESSAGE_LENGTH, REASON_INVALID_SPEC, describe_wait, find_news
from rljob_operator.plan.difference import contains, stamp
from rljob_operator.plan.job import BLOCKED_SECONDS, new_random_token
from rljob_operator.plan.observed_job import RoleView, describe_waiting, find_ours, find_pods, find_stale
from rljob_operator.plan.reward_versions import SETTLED, describe_update
from rljob_operator.plan.validate import (
    find_model_sources,
    find_source_problems,
    find_template_problems,
    find_url_problems,
)

READY = "Ready"
DEGRADED = "Degraded"
SCALING = "Scaling"
UPDATING = "Updating"
REASON_REFUSED = "Refused"
REASON_WAITING_FOR_NAMES = "WaitingForNames"
REFUSED_SECONDS = 30.0
"""How soon to try again what was refused: nothing tells when someone else's object goes."""
_BAD_REASONS = (REASON_INVALID_SPEC, REASON_REFUSED)
_SETTLE_SECONDS = 120.0
"""For which Pods that an autoscaler has just asked for may be missing: those that start are no trouble."""
_LATENCY_SECONDS = 30.0
"""How often the drivers of its jobs are asked how long a sample takes, where nothing is scaled by it."""
_LATENCY_TOLERANCE = 0.1
"""Within this share of the one that was written, a p95 is no news: it is never twice the same."""


@dataclass(frozen=True)
class Trouble:
    """Why a model is not ready, whatever its Pods are."""

    reason: str
    message: str


@dataclass(frozen=True)
class RewardModelPlan:
    """What should be, and what to say about it."""

    children: tuple[Manifest, ...]
    delete: tuple[ChildKey, ...]
    status: RewardModelStatus
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None


class RewardModelBackend(Protocol):
    """I/O of `reconcile_reward_model`. Every method may raise TransientError: try again later."""

    async def get_reward_model(self, key: JobKey) -> RewardModel | None: ...

    async def observe_reward_model(self, model: RewardModel) -> Observed: ...

    async def apply(self, manifest: Manifest) -> None: ...

    async def delete(self, namespace: str, child: ChildKey) -> None: ...

    async def update_reward_model_status(self, model: RewardModel, status: RewardModelStatus) -> None: ...

    async def record_event(self, about: RewardModel, event: Event) -> None: ...


def plan_reward_model(
    model: RewardModel,
    observed: Observed,
    now: datetime,
    *,
    defaults: Defaults = DEFAULTS,
    new_token: Callable[[], str] = new_random_token,
) -> RewardModelPlan:
    """What should be now. Of a spec that cannot be built the plan says why, and leaves alone what runs."""
    scaled = scale_model(model, observed, now.replace(microsecond=0))
    wanted = _plan_own(scaled.model, observed, now, defaults, new_token)
    looks = (wanted.requeue_after, scaled.next_look_seconds, _LATENCY_SECONDS if observed.demands else None)
    waits = [seconds for seconds in looks if seconds is not None]
    return replace(
        wanted,
        delete=wanted.delete + find_stale(model, observed),
        events=wanted.events + derive_scaling_events(model.status.scaling, wanted.status.scaling, "scaled"),
        requeue_after=min(waits, default=None),
    )


def _plan_own(
    model: RewardModel, observed: Observed, now: datetime, defaults: Defaults, new_token: Callable[[], str]
) -> RewardModelPlan:
    ours, blocked = find_ours(model, observed)
    secret = ours.get(ChildKey("Secret", child_name(model.metadata.name)))
    try:
        children = _build_children(model, (read_token(secret) if secret else None) or new_token(), defaults)
    except UserError as error:
        return _finish(model, observed, now, trouble=Trouble(REASON_INVALID_SPEC, str(error)))
    waits_for = sorted(blocked & {key_of(child) for child in children})
    delete = tuple(sorted(set(ours) - {key_of(child) for child in children} - blocked))
    if not waits_for:
        return _finish(model, observed, now, children=tuple(children), delete=delete)
    # Pods must not start from the Secret or ConfigMap of an earlier model of this name.
    children = [c for c in children if c["kind"] not in WORKLOAD_KINDS and key_of(c) not in blocked]
    names = ", ".join(f"{kind} {name}" for kind, name in waits_for)
    trouble = Trouble(REASON_WAITING_FOR_NAMES, f"waits until an earlier {names} is gone")
    return _finish(model, observed, now, tuple(children), delete, trouble, BLOCKED_SECONDS)


async def reconcile_reward_model(
    backend: RewardModelBackend, key: JobKey, now: datetime, defaults: Defaults = DEFAULTS
) -> float | None:
    """Converge one RewardModel. Returns the seconds after which to look again. TransientError goes to the caller."""
    model = await backend.get_reward_model(key)
    if model is None:
        return None  # its children follow by their owner references
    observed = await backend.observe_reward_model(model)
    wanted = plan_reward_model(model, observed, now, defaults=defaults)
    refused = await _apply_children(backend, wanted, observed)
    for extra in wanted.delete:
        await backend.delete(key.namespace, extra)
    if refused:
        trouble = Trouble(REASON_REFUSED, refused)
        scaled = scale_model(model, observed, now.replace(microsecond=0)).model
        wanted = _finish(scaled, observed, now, trouble=trouble, requeue_after=REFUSED_SECONDS)
    if wanted.status != model.status:
        await backend.update_reward_model_status(model, wanted.status)
    for event in wanted.events:
        await backend.record_event(model, event)
    return wanted.requeue_after


async def _apply_children(backend: RewardModelBackend, wanted: RewardModelPlan, observed: Observed) -> str:
    """Apply what differs. Returns what was refused for good; no Pods are made without what they read."""
    refused: list[str] = []
    for child in map(stamp, wanted.children):
        if refused and child["kind"] in WORKLOAD_KINDS:
            break
        if contains(observed.children.get(key_of(child)), child):
            continue
        try:
            await backend.apply(child)
        except UserError as error:
            kind, name = key_of(child)
            refused.append(f"{kind} {name} was refused: {error}")
    return "; ".join(refused)


def _build_children(model: RewardModel, token: str, defaults: Defaults) -> list[Manifest]:
    sources = find_model_sources("spec", model.spec)
    problems = [*find_url_problems("spec", model.spec), *find_source_problems(sources)]
    if model.spec.is_served:
        problems += find_template_problems("spec", model.spec)
    if problems:
        raise UserError("; ".join(problems))
    if not model.spec.is_served:
        return []
    service: RewardService = service_of(model)
    heads = {"podSelector": {"matchLabels": {LABEL_ROLE: HEAD}}}
    return sort_children(
        [
            build_token_secret(model, service.token_secret, token),
            build_reward_config(service),
            *build_reward(service, token, defaults),
            build_reward_policy(service, heads),
            build_reward_budget(service),
        ]
    )


def _finish(
    model: RewardModel,
    observed: Observed,
    now: datetime,
    children: tuple[Manifest, ...] = (),
    delete: tuple[ChildKey, ...] = (),
    trouble: Trouble | None = None,
    requeue_after: float | None = None,
) -> RewardModelPlan:
    causes = [] if trouble else _find_causes(model, observed)
    template = next((child["spec"]["template"] for child in children if child["kind"] == "Deployment"), None)
    update = describe_update(find_pods(model, observed), template) if model.spec.is_served else None
    status = _build_status(model, observed, now.replace(microsecond=0), trouble, causes, update)
    return RewardModelPlan(children, delete, status, _derive_events(model.status, status, causes), requeue_after)


def _find_causes(model: RewardModel, observed: Observed) -> list[Cause]:
    if not model.spec.is_served:
        return []
    return find_model_causes(model, _view(model, observed), find_ours(model, observed)[0], observed)


def _view(model: RewardModel, observed: Observed) -> RoleView:
    return RoleView(REWARD, REWARD, model.spec, model.spec.replicas, tuple(find_pods(model, observed)))


def _build_status(
    model: RewardModel,
    observed: Observed,
    now: datetime,
    trouble: Trouble | None,
    causes: Sequence[Cause],
    update: tuple[str, str] | None,
) -> RewardModelStatus:
    deployment = find_ours(model, observed)[0].get(ChildKey("Deployment", child_name(model.metadata.name)), {})
    seen = deployment.get("status", {})
    served, settles = model.spec.is_served, is_recent(model.status.scaling, now, _SETTLE_SECONDS)
    replicas, ready = (seen.get("replicas", 0), seen.get("readyReplicas", 0)) if served else (0, 0)
    missing = served and ready < model.spec.replicas
    words = f"{min(ready, model.spec.replicas)} of {model.spec.replicas} Pods are ready"
    waits = describe_waiting(_view(model, observed)) if missing else ""
    why = describe_wait([waits], [cause.words for cause in causes]) or words
    cause = causes[0].reason if causes else ""
    if trouble:
        is_ready, reason, message = False, trouble.reason, trouble.message
    elif not served:
        is_ready, reason, message = True, "External", "an endpoint of someone else"
    elif ready:
        is_ready, reason, message = True, "Serving", words
    elif model.status.scaling and not model.spec.replicas:
        is_ready, reason, message = True, "ScaledToZero", "nothing is to be scored; Pods come before the next step does"
    else:
        is_ready, message = False, why
        reason = (cause or "WaitingForPods") if model.spec.replicas else "NoReplicas"
    degraded = missing and not settles
    why_degraded = (cause or "TooFewReady") if degraded else "Scaling" if missing else "AllReady"
    selector = build_model_selector(model.metadata.name)
    return RewardModelStatus(
        conditions=[
            _build_condition(model, READY, is_ready, reason, message, now),
            _build_condition(model, DEGRADED, degraded, why_degraded, why, now),
            *([_build_scaling(model, replicas, ready, update is not None, now)] if served else []),
            *([_build_updating(model, update, causes, now)] if served else []),
        ],
        observed_generation=model.metadata.generation,
        replicas=replicas,
        ready_replicas=ready,
        endpoints=_find_endpoints(model, ready),
        latency_p95_seconds=_observe_p95(model, observed),
        scaling=model.status.scaling,
        selector=",".join(f"{key}={value}" for key, value in selector.items()) if served else "",
    )


def _find_endpoints(model: RewardModel, ready: int) -> list[str]:
    if model.spec.http is not None:
        return [model.spec.http.url]
    host = f"{child_name(model.metadata.name)}.{model.metadata.namespace}.svc"
    return [f"{host}:{PORT_REWARD}"] if ready else []


def _observe_p95(model: RewardModel, observed: Observed) -> float | None:
    """The longest that a driver tells; the last one while it is about that, or while none tells any."""
    before = model.status.latency_p95_seconds
    said = [demand.said.latency_p95_seconds for demand in observed.demands if demand.said]
    longest = max((seconds for seconds in said if seconds is not None), default=None)
    if longest is None or (before is not None and abs(longest - before) <= _LATENCY_TOLERANCE * before):
        return before
    return float(f"{longest:.3g}")


def _build_updating(
    model: RewardModel, update: tuple[str, str] | None, causes: Sequence[Cause], now: datetime
) -> Condition:
    """Whether Pods of more than one version live, and how many of each are ready."""
    if update is None:
        return _build_condition(model, UPDATING, False, SETTLED, "", now)
    reason, words = update
    message = "; ".join([words, *(cause.words for cause in causes)])
    return _build_condition(model, UPDATING, True, reason, message, now)


def _build_scaling(model: RewardModel, replicas: int, ready: int, is_updating: bool, now: datetime) -> Condition:
    """Whether the number of Pods is on its way to another, and why it is that one."""
    wanted, scaling = model.spec.replicas, model.status.scaling
    why = scaling.message if scaling else f"spec.replicas is {wanted}"
    if replicas > wanted and not is_updating:  # an update's new Pods come on top
        return _build_condition(model, SCALING, True, "ScalingDown", why, now)
    if ready < wanted:
        return _build_condition(model, SCALING, True, "ScalingUp", why, now)
    limited = scaling and scaling.slots > model.spec.slots * wanted
    return _build_condition(model, SCALING, False, "AtMaximum" if limited else "Steady", why, now)


def _build_condition(
    model: RewardModel, type_: str, holds: bool, reason: str, message: str, now: datetime
) -> Condition:
    status: Literal["True", "False"] = "True" if holds else "False"
    before = next((c for c in model.status.conditions if c.type == type_ and c.status == status), None)
    return Condition(
        type=type_,
        status=status,
        reason=reason,
        message=message[:MAX_MESSAGE_LENGTH],
        last_transition_time=before.last_transition_time if before else now,
        observed_generation=model.metadata.generation,
    )


def _derive_events(old: RewardModelStatus, new: RewardModelStatus, causes: Sequence[Cause] = ()) -> tuple[Event, ...]:
    """One for each condition that has come true, one for each new reason that only the user can mend, and one for each
    cause that was not told yet. That a new model's Pods are not ready at once is no news."""
    true = {condition.type for condition in old.conditions if condition.status == "True"}
    said = {(condition.reason, condition.message) for condition in old.conditions}
    news = find_news(old.conditions, new.conditions, [(cause.reason, cause.words) for cause in causes])
    events = [Event("Warning", reason, words) for reason, words in news]
    for condition in new.conditions:
        if condition.type == SCALING:
            continue  # told by derive_scaling_events
        bad = condition.type == DEGRADED or condition.reason in _BAD_REASONS
        is_new = condition.status == "True" and condition.type not in true
        if condition.type == UPDATING and condition.status == "False" and UPDATING in true:
            events.append(Event("Normal", "Updated", "all Pods are of one version"))
        is_new = is_new and (condition.type != DEGRADED or (READY in true and not causes))
        if is_new or (condition.reason in _BAD_REASONS and (condition.reason, condition.message) not in said):
            events.append(Event("Warning" if bad else "Normal", condition.reason, condition.message))
    return tuple(events)
