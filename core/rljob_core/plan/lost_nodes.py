"""Nodes that do not answer: what their Pods show, which Pods block their replacement, and which to delete by force.

A kubelet confirms the end of its Pods. Without one, a deleted Pod stays in Terminating indefinitely; the StatefulSet
and the head's Job (podReplacementPolicy: Failed) create no other Pod meanwhile. The operator may not read Nodes, so
everything is derived from Pods. Pure. Invariant: a message is the same in every reconcile; it has no times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import LABEL_MANAGED_BY, LABEL_ROLE, MANAGED_BY
from rljob_core.backend import ForcedDeletion, Manifest, ObservedState
from rljob_core.children.common import HEAD, TRAINER
from rljob_core.plan.causes import Cause
from rljob_core.plan.observed_job import (
    ObservedJob,
    RoleView,
    find_condition,
    has_condition,
    is_terminating,
    labels_of,
    name_of,
)

NODE_UNREACHABLE: Final = "NodeUnreachable"
NODE_LOST: Final = "NodeLost"
POD_STUCK: Final = "PodStuckTerminating"
BLOCKING_DELETION = (NODE_LOST, POD_STUCK)
"""Causes for which the deletion of a workload waits."""

OUT_OF_SERVICE_TAINT = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
"""Kubernetes then deletes the Pods of the node by force and detaches its volumes."""
_LOST_MARGIN = timedelta(seconds=10)
"""After the end of the grace period, if the node does not answer."""
_STUCK_MARGIN = timedelta(seconds=60)
"""The same if nothing else is known: a kubelet also unmounts volumes before it confirms the end."""
_MAX_PODS_NAMED = 4
_PAST = datetime.min.replace(tzinfo=UTC)
_ENDED = ("Succeeded", "Failed")
_BLOCKING_ROLES = (HEAD, TRAINER)
"""A Deployment replaces a Pod that is being deleted at once."""

Problem = Literal["NodeUnreachable", "NodeLost", "PodStuckTerminating"]


@dataclass(frozen=True)
class LostPods:
    """Pods of one role on one node that have the same problem."""

    problem: Problem
    since: datetime
    """When the message is due."""
    node: str
    pods: tuple[str, ...]
    cause: Cause


def find_lost_pods(observed: ObservedJob) -> list[LostPods]:
    """Problems with nodes, in the order of the roles. Those of the future come with the time when they are due."""
    found: dict[tuple[str, str, Problem], list[tuple[datetime, str]]] = {}
    roles = {role.name: role for role in observed.roles}
    for role in observed.roles:
        for pod in role.pods:
            if is_silent(pod):
                found.setdefault((role.name, _node_of(pod), NODE_UNREACHABLE), []).append((_PAST, name_of(pod)))
        for pod in role.terminating if role.kind in _BLOCKING_ROLES else ():
            if _node_of(pod) and not _has_ended(pod):
                problem, since = _problem_of_terminating(pod)
                found.setdefault((role.name, _node_of(pod), problem), []).append((since, name_of(pod)))
    return [_describe(observed.job, roles[role], node, problem, pods) for (role, node, problem), pods in found.items()]


def find_forced_deletions(job: RLJob, state: ObservedState) -> list[ForcedDeletion]:
    """The Pods of the job, in any role and of any incarnation, whose deletion is or may become overdue by more than
    spec.scheduling.forceDeleteAfterSeconds; each with the time from which it is."""
    seconds = job.spec.scheduling.force_delete_after_seconds
    if seconds is None:
        return []
    margin = timedelta(seconds=seconds)
    return [
        ForcedDeletion(name_of(pod), _node_of(pod), _deletion_end(pod) + margin)
        for pod in state.pods
        if _is_ours(pod) and is_terminating(pod) and not (_has_ended(pod) and _is_without_grace(pod))
    ]


def is_silent(pod: Manifest) -> bool:
    """Whether the node controller has declared the Pod unready because its kubelet reports nothing. It changes only the
    status of the condition Ready. A kubelet would give a reason, and change ContainersReady too."""
    ready = find_condition(pod, "Ready")
    if pod.get("status", {}).get("reason") == NODE_LOST:
        return True
    return ready.get("status") == "False" and not ready.get("reason") and has_condition(pod, "ContainersReady")


def describe_forced_deletion(job: RLJob, deletion: ForcedDeletion) -> str:
    """The message of its event."""
    seconds = job.spec.scheduling.force_delete_after_seconds
    return (
        f"deleted Pod {deletion.pod} of node {deletion.node} by force (gracePeriodSeconds: 0): its node did not "
        f"confirm the end within spec.scheduling.forceDeleteAfterSeconds ({seconds} s)"
    )


def describe_refused_deletion(error: Exception) -> str:
    """For the status, if the API server refuses it."""
    return f"{error}; in the chart's values, features.forceDeletion grants both rights that a forced deletion needs"


def _problem_of_terminating(pod: Manifest) -> tuple[Problem, datetime]:
    by_taint = find_condition(pod, "DisruptionTarget").get("reason") == "DeletionByTaintManager"
    if is_silent(pod) or by_taint:
        return NODE_LOST, _deletion_end(pod) + _LOST_MARGIN
    return POD_STUCK, _deletion_end(pod) + _STUCK_MARGIN


def _describe(
    job: RLJob, role: RoleView, node: str, problem: Problem, pods: Sequence[tuple[datetime, str]]
) -> LostPods:
    names = sorted(name for _, name in pods)
    is_one = len(names) == 1
    listed = ("Pod " if is_one else "Pods ") + ", ".join(names[:_MAX_PODS_NAMED])
    listed += ", ..." if len(names) > _MAX_PODS_NAMED else ""
    stuck = f"{listed} {'is' if is_one else 'are'} stuck in Terminating on node {node}"
    blocks = f"{'blocks its' if is_one else 'block their'} replacement"
    text = {
        NODE_UNREACHABLE: (
            f"node {node} of {listed} is not ready or does not answer; see kubectl describe node {node}; if it stays "
            f"so, Kubernetes deletes the Pods after their tolerationSeconds (300 s by default)"
        ),
        NODE_LOST: f"{stuck}, which does not answer, and {blocks}; {_remedy(job, node)}",
        POD_STUCK: f"{stuck} and {blocks}; see kubectl describe node {node}; {_remedy(job, node)}",
    }[problem]
    cause = Cause(problem, f"{role.name}: {text}")
    return LostPods(problem, min(since for since, _ in pods), node, tuple(names), cause)


def _remedy(job: RLJob, node: str) -> str:
    seconds = job.spec.scheduling.force_delete_after_seconds
    by_hand = (
        f"if the machine is off: kubectl taint nodes {node} {OUT_OF_SERVICE_TAINT}; "
        f"if it never returns: kubectl delete node {node}"
    )
    if seconds is None:
        return f"{by_hand}; or set spec.scheduling.forceDeleteAfterSeconds"
    return f"spec.scheduling.forceDeleteAfterSeconds ({seconds} s) deletes it by force; sooner, {by_hand}"


def find_due_causes(found: Sequence[LostPods], now: datetime) -> list[Cause]:
    return [lost.cause for lost in found if lost.since <= now]


def _deletion_end(pod: Manifest) -> datetime:
    """The end of the grace period, which the deletionTimestamp contains."""
    return datetime.fromisoformat(pod["metadata"]["deletionTimestamp"])


def _has_ended(pod: Manifest) -> bool:
    """Whether all its containers have ended, as its kubelet or a forced deletion reports: only finalizers keep it. A
    user's `kubectl delete --force` does not report it, and the Job of a head waits for that."""
    return pod.get("status", {}).get("phase") in _ENDED


def _is_without_grace(pod: Manifest) -> bool:
    """Whether it was deleted by force. If it has ended, too, nothing is left to do: its finalizers keep it. Before that
    an operator may have ended between the two writes of a forced deletion."""
    return bool(pod["metadata"].get("deletionGracePeriodSeconds") == 0)


def _is_ours(pod: Manifest) -> bool:
    labels = labels_of(pod)
    return LABEL_ROLE in labels and labels.get(LABEL_MANAGED_BY) == MANAGED_BY


def _node_of(pod: Manifest) -> str:
    return str(pod.get("spec", {}).get("nodeName") or "")
