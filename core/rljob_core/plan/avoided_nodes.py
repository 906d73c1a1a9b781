"""Nodes with a broken GPU, which the Pods of a role avoid: from what Pods and the driver report to the status. Pure.

A rollout says in its termination message that its GPU failed; the driver reports the addresses of trainers. Building
Pods that avoid the nodes is left to `children.pods`. Invariants: a node is recorded once per role; a Pod that a
requested restart will replace records nothing, so that the request forgets the nodes; the record is bounded.
"""

from collections.abc import Iterator
from datetime import datetime

from rljob_api.manifest.status import MAX_AVOIDED_NODES, AvoidedNode
from rljob_api.wire.termination import GPU_FAULT_PREFIX
from rljob_core.backend import Event, Manifest
from rljob_core.children.common import ANNOTATION_RESTARTED, HEAD, TRAINER
from rljob_core.children.configuration import read_restart
from rljob_core.plan.observed_job import ObservedJob, RoleView, extract_error_message, name_of
from rljob_core.plan.observed_job import own_container_statuses as own_statuses


def find_avoided(observed: ObservedJob) -> list[AvoidedNode]:
    """What the status will record: the nodes so far, without those that a restart forgets, and the new ones."""
    job = observed.job
    restarts = {role.name: read_restart(job, role.name) for role in observed.roles}
    found = [each for each in job.status.avoided_nodes if restarts.get(each.role) == each.restart]
    known = {(each.role, each.node) for each in found}
    for role in observed.roles:
        for pod, message in _find_faults(role, observed):
            node, restart = str(pod["spec"].get("nodeName") or ""), restarts[role.name]
            is_current = (pod["metadata"].get("annotations") or {}).get(ANNOTATION_RESTARTED, "") == restart
            if node and is_current and (role.name, node) not in known and len(found) < MAX_AVOIDED_NODES:
                known.add((role.name, node))
                new = AvoidedNode(role=role.name, node=node, pod=name_of(pod), message=message, restart=restart)
                found.append(new)
    return found


def describe_avoided(avoided: AvoidedNode, *, is_kueue: bool) -> str:
    """Where the GPU is, what it reported, and what to do."""
    use = f"see kubectl describe node {avoided.node}, and cordon or repair it"
    if is_kueue:
        use += f"; with scheduling.gang: kueue, {avoided.role} may use it again"
    else:
        use += f"; {avoided.role} avoids it until kubectl rljob restart --role {avoided.role}"
    return f"{avoided.role}: node {avoided.node} has a broken GPU (Pod {avoided.pod}: {avoided.message}); {use}"


def avoidance_events(observed: ObservedJob, avoided: list[AvoidedNode]) -> tuple[Event, ...]:
    """One event per new node."""
    old, is_kueue = observed.job.status.avoided_nodes, observed.job.spec.scheduling.gang == "kueue"
    new = [each for each in avoided if each not in old]
    return tuple(Event("Warning", "GpuFault", describe_avoided(each, is_kueue=is_kueue)) for each in new)


def _find_faults(role: RoleView, observed: ObservedJob) -> Iterator[tuple[Manifest, str]]:
    """The Pods of a role whose GPU failed, with the message."""
    if role.kind == HEAD:
        return
    for pod in role.pods:
        if message := _read_fault(pod):
            yield pod, message
    driver = observed.state.driver
    for fault in driver.rank_failures.gpu_faults if driver and role.kind == TRAINER else ():
        for pod in role.pods:
            if pod.get("status", {}).get("podIP") == fault.address and _created(pod) <= fault.at:
                yield pod, fault.message.removeprefix(GPU_FAULT_PREFIX)


def _created(pod: Manifest) -> datetime:
    return datetime.fromisoformat(pod["metadata"]["creationTimestamp"])


def _read_fault(pod: Manifest) -> str:
    """What a container of the Pod reported about its GPU at its end; empty if nothing."""
    for status in own_statuses(pod):
        for state in ("state", "lastState"):
            terminated = (status.get(state) or {}).get("terminated") or {}
            message = extract_error_message(terminated.get("message")) if terminated.get("message") else ""
            if message.startswith(GPU_FAULT_PREFIX):
                return message.removeprefix(GPU_FAULT_PREFIX)
    return ""
