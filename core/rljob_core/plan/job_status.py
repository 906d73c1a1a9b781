"""The status of a job: roles, progress and conditions, built once at the end of each plan. Pure.

The condition PoolsIsolated is whether roles that require separate nodes have them. A role requires it with
nodePool.exclusive; two roles require it with different nodeSelectors.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import combinations
from types import MappingProxyType

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.status import RLJobStatus, RoleStatus
from rljob_core.backend import ChildKey, Manifest
from rljob_core.children.common import REWARD, ROLLOUT, build_selector
from rljob_core.plan import conditions
from rljob_core.plan.active_time import account
from rljob_core.plan.causes import Cause
from rljob_core.plan.conditions import Reasons, describe_blocked, describe_refused_change, keep_running_generation
from rljob_core.plan.failures import Failures
from rljob_core.plan.gang import GangState
from rljob_core.plan.lifecycle import has_been_running
from rljob_core.plan.lost_nodes import BLOCKING_DELETION
from rljob_core.plan.observed_job import (
    ObservedJob,
    RoleView,
    describe_waiting,
    driver_succeeded,
    find_images,
    find_pull_secrets,
)
from rljob_core.plan.progress import observe_progress
from rljob_core.plan.reward_versions import MIXED, SETTLED, describe_mixed_rewards
from rljob_core.plan.run_files import add_progress_lost


def build_invalid_status(job: RLJob, problems: list[str], now: datetime, *, keeps_running: bool = True) -> RLJobStatus:
    """The status of a job with an invalid spec. `keeps_running`: the workloads of an earlier spec stay."""
    message, running = "; ".join(problems), conditions.find(job.status, conditions.RUNNING)
    if not keeps_running or running is None or running.status != "True":
        return set_conditions(job, job.status, {conditions.FAILED: (conditions.REASON_INVALID_SPEC, message)}, {}, now)
    true = {
        conditions.FAILED: (conditions.REASON_INVALID_SPEC, describe_refused_change(job, message)),
        conditions.RUNNING: (running.reason, running.message),
    }
    return keep_running_generation(job, set_conditions(job, job.status, true, {}, now))


def build_waiting_status(job: RLJob, reason: str, message: str, now: datetime) -> RLJobStatus:
    """The status of a job whose plan could not be applied yet: why it does not run. The status of a job that runs or
    has ended stays."""
    true = {c.type: (c.reason, c.message) for c in job.status.conditions if c.status == "True"}
    if conditions.RUNNING in true or conditions.is_finished(job.status):
        return job.status
    others = {c.type: (c.reason, c.message) for c in job.status.conditions if c.type in conditions.OPTIONAL_TYPES}
    return set_conditions(job, job.status, true, others | {conditions.RUNNING: (reason, message)}, now)


def set_conditions(
    job: RLJob,
    status: RLJobStatus,
    true: Reasons,
    false_reasons: Reasons,
    now: datetime,
    unknown: Reasons | None = None,
) -> RLJobStatus:
    """`status` with the conditions, and the phase and the running time that follow from them."""
    generation = job.metadata.generation
    built = conditions.build_conditions(job.status, true, false_reasons, generation, now, unknown or {})
    held = {condition.type for condition in built if condition.status == "True"}
    phase = next((phase for phase in conditions.PHASES if phase in held), "Pending")
    why = next(c for c in built if c.type == (conditions.RUNNING if phase == "Pending" else phase))
    if standard := conditions.STANDARD_OF_PHASE.get(phase):
        built[:0] = [
            conditions.build_condition(
                job.status,
                type_,
                type_ == standard,
                why.reason,
                why.message * (type_ == standard),  # once besides that of the phase
                generation=generation,
                now=now,
            )
            for type_ in dict.fromkeys((conditions.READY, standard))
        ]
    new = status.model_copy(update={"conditions": built, "phase": phase, "observed_generation": generation})
    return account(job.status, new, now)


def set_roles(status: RLJobStatus, roles: list[RoleStatus]) -> RLJobStatus:
    """`status` with the roles, the printed columns that summarize them (2/2), and the scale of the rollouts. Rollouts
    in the trainer's Pods have no column: the driver knows which of them serve."""
    rollouts = [role for role in roles if role.name == ROLLOUT]
    rewards = [role for role in roles if role.name.startswith(f"{REWARD}-")]
    columns = {
        name: f"{sum(role.ready for role in group)}/{sum(role.desired for role in group)}" if group else ""
        for name, group in (("rollouts", rollouts), ("rewards", rewards))
    }
    return status.model_copy(
        update={"roles": roles, "rollout_replicas": sum(role.ready for role in rollouts)} | columns
    )


def observe_status(
    observed: ObservedJob,
    restarts: dict[str, int],
    failures: Failures,
    now: datetime,
    applied: Mapping[ChildKey, Manifest] = MappingProxyType({}),
) -> RLJobStatus:
    """The old status with the observed roles and progress, and the images of workloads as they are `applied` now."""
    job, children = observed.job, {**observed.children, **applied}
    images = {role.name: role.image for role in job.status.roles} | find_images(children)
    secrets = find_pull_secrets(children.values())
    roles = [
        RoleStatus(
            name=role.name,
            desired=role.desired,
            ready=role.ready,
            restarts=restarts[role.name],
            failures=failures[role.name],
            image=images.get(role.name, ""),
        )
        for role in observed.roles
    ]
    labels = {} if job.spec.shares_trainer else build_selector(job, ROLLOUT)  # nothing to scale
    selector = ",".join(f"{key}={value}" for key, value in labels.items())
    return set_roles(job.status, roles).model_copy(
        update={
            "progress": observe_progress(observed, now),
            "rollout_selector": selector,
            "image_pull_secrets": job.status.image_pull_secrets if secrets is None else secrets,
        }
    )


def active_conditions(
    observed: ObservedJob, gang: GangState, blocked: Sequence[ChildKey], causes: Sequence[Cause]
) -> tuple[Reasons, Reasons]:
    """The conditions of an active job that hold, and why others do not."""
    true, false_reasons = _running_conditions(observed, blocked, causes)
    if gang.queued:
        reason, message = gang.queued
        true[conditions.QUEUED] = (reason, "; ".join([message, *(cause.message for cause in causes)]))
    if isolation := evaluate_isolation(observed.roles):
        holds, reason, message = isolation
        (true if holds else false_reasons)[conditions.POOLS_ISOLATED] = (reason, message)
    if mixed := describe_mixed_rewards(observed.roles):
        true[conditions.REWARD_VERSIONS_MIXED] = (MIXED, mixed)
    elif conditions.find(observed.job.status, conditions.REWARD_VERSIONS_MIXED):
        message = "the ready Pods of each reward run the same version"
        false_reasons[conditions.REWARD_VERSIONS_MIXED] = (SETTLED, message)
    add_learning(observed, true, false_reasons)
    add_progress_lost(observed, true)
    return true, false_reasons


def add_learning(observed: ObservedJob, true: Reasons, false_reasons: Reasons) -> None:
    """Add the condition Learning, from the first time that it is False. An unknown state keeps it."""
    old, driver = conditions.find(observed.job.status, conditions.LEARNING), observed.state.driver
    if driver is not None and driver.learning.is_learning is not None:
        holds, reason, message = driver.learning.is_learning, driver.learning.reason, driver.learning.message
    elif old is not None:
        holds, reason, message = old.status == "True", old.reason, old.message
    else:
        return
    if old is not None or not holds:
        (true if holds else false_reasons)[conditions.LEARNING] = (reason, message)


def _running_conditions(
    observed: ObservedJob, blocked: Sequence[ChildKey], causes: Sequence[Cause]
) -> tuple[Reasons, Reasons]:
    """Running and Restarting: those that hold, and why not."""
    was_running = has_been_running(observed.job)
    # The driver reports 'done' while it cleans up. Its Pod is no longer ready then, and no role is waited for.
    is_ending = observed.job.status.progress.phase == "done"
    short = [role for role in observed.roles if role.ready < role.needed and not is_ending]
    waiting = conditions.describe_wait(map(describe_waiting, observed.roles), [cause.message for cause in causes])
    if blocked:
        known = [cause.message for cause in causes if cause.reason in BLOCKING_DELETION]
        waiting = conditions.describe_wait([describe_blocked(observed.job, observed.state, blocked)], known)
    if was_running and driver_succeeded(observed):
        return {conditions.RUNNING: ("Running", "the driver has ended; its Job is about to complete")}, {}
    if not short and not blocked:
        return {conditions.RUNNING: ("Running", waiting or "all Pods are ready")}, {}
    if not was_running:
        return {}, {conditions.RUNNING: (causes[0].reason if causes else "WaitingForPods", waiting)}
    reason = f"{short[0].kind.capitalize()}Restarting" if short else "HeadRestarting"
    return {conditions.RESTARTING: (reason, waiting)}, {conditions.RUNNING: (reason, waiting)}


ISOLATED = "NodesNotShared"
SHARED = "NodeShared"
_MAX_NODES_NAMED = 3


def evaluate_isolation(roles: tuple[RoleView, ...]) -> tuple[bool, str, str] | None:
    """Whether it holds, reason and message; None if no role requires it, or no Pod of such roles has a node."""
    pairs = [pair for pair in combinations(roles, 2) if _require_isolation(*pair)]
    nodes = {role.name: _nodes(role) for role in roles}
    if not any(nodes[role.name] for pair in pairs for role in pair):
        return None
    shared = sorted(
        (node, first.name, second.name) for first, second in pairs for node in nodes[first.name] & nodes[second.name]
    )
    if not shared:
        return True, ISOLATED, "no two roles that require separate nodes share one"
    named = [f"node {node} runs both {first} and {second}" for node, first, second in shared[:_MAX_NODES_NAMED]]
    more = [f"and {len(shared) - _MAX_NODES_NAMED} more"] if len(shared) > _MAX_NODES_NAMED else []
    remedy = "; give the roles' nodePool.nodeSelector labels that no node has both of, or set nodePool.exclusive"
    return False, SHARED, "; ".join(named + more) + remedy


def _require_isolation(first: RoleView, second: RoleView) -> bool:
    if first.kind == second.kind:
        return False  # exclusive excludes other roles, not replicas of the same role
    pools = first.spec.node_pool, second.spec.node_pool
    selectors = [pool.node_selector for pool in pools]
    return any(pool.exclusive for pool in pools) or (all(selectors) and selectors[0] != selectors[1])


def _nodes(role: RoleView) -> set[str]:
    return {
        node
        for pod in role.pods
        if (node := pod.get("spec", {}).get("nodeName"))
        and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")
    }
