"""What was observed of a job, role by role: its own children, and which Pods are ready, restarted or stuck.

Interprets Kubernetes statuses and decides nothing. Invariants: objects of an earlier job with the same name never
count. A child is stale only if such a job is its controller; other objects with that name belong to another owner.

Some ends of Pods and containers are not their own failure: evictions, lost nodes, refusals by the node, a signal. What
is not known to be the cluster's doing counts as a failure, so a new reason is noticed. The tests name the source of
each reason.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rljob_api import API_VERSION, foreign_texts
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.roles import Role
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.reward import Reward
from rljob_api.manifest.status import MAX_IMAGE_LENGTH, MAX_PULL_SECRETS
from rljob_api.wire.contract import LABEL_MANAGED_BY, LABEL_ROLE, MANAGED_BY, ExitCode
from rljob_api.wire.termination import ERROR_PREFIX
from rljob_api.wire.text import clean_text
from rljob_core.backend import ChildKey, Manifest, ObservedState, Owner
from rljob_core.children.common import (
    ANNOTATION_JOB_UID,
    DISRUPTION_CONDITIONS,
    HEAD,
    ROLLOUT,
    SERVING,
    TRAINER,
    WORKLOAD_KINDS,
    build_role_labels,
    child_name,
    read_role_name,
    role_of_service,
)
from rljob_core.children.pods import VLLM_CONTAINER

_MAX_PODS_NAMED = 3
_MAX_DETAIL_LENGTH = 300
_MAX_ERROR_LENGTH = 1000
_MAX_TERMINATION_LENGTH = 4096
"""What the kubelet keeps of a message."""
_MAX_SHORT_LINES = 5
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Failure)(: |$)")
"""The line of a traceback that says what is wrong. Further lines may follow."""


@dataclass(frozen=True)
class RoleView:
    name: str
    """head, trainer, rollout, reward-NAME or agent-NAME."""
    kind: str
    """head, trainer, rollout, reward or agent."""
    path: str
    """In the manifest: spec.rewards[0], spec.agent.user."""
    spec: Role
    desired: int
    pods: tuple[Manifest, ...]
    """Those of this incarnation that are not being deleted."""
    terminating: tuple[Manifest, ...] = ()
    """Pods that are being deleted, of any incarnation: a trainer's has a name that its replacement needs."""
    source: str = ""
    """The field of what a service runs, such as spec.agent.user.function."""

    @property
    def ready(self) -> int:
        return min(self.desired, sum(is_ready(pod) for pod in self.pods))

    @property
    def needed(self) -> int:
        """Ready Pods that the job needs to continue: all of the head and the trainers, one of the others. None of
        what may scale to zero: its requests wait."""
        if isinstance(self.spec, Reward | CallService) and self.spec.autoscaling:
            return min(1, self.spec.autoscaling.min_replicas)
        return self.desired if self.kind in (HEAD, TRAINER) else min(1, self.desired)


@dataclass(frozen=True)
class ObservedJob:
    """What was observed of one incarnation of a job."""

    job: RLJob
    """With the replicas that autoscaling has decided."""
    state: ObservedState
    children: dict[ChildKey, Manifest]
    """Children of this incarnation, including those being deleted."""
    blocked: frozenset[ChildKey]
    """Names that cannot be applied now: an earlier incarnation has them, or they are being deleted."""
    roles: tuple[RoleView, ...]

    @property
    def head_key(self) -> ChildKey:
        return ChildKey("Job", child_name(self.job, HEAD))

    @property
    def trainer_key(self) -> ChildKey:
        return ChildKey("StatefulSet", child_name(self.job, TRAINER))

    @property
    def head_job(self) -> Manifest | None:
        return self.children.get(self.head_key)


def observe_job(job: RLJob, state: ObservedState) -> ObservedJob:
    children, blocked = find_owned_children(job, state)
    terminating = [pod for pod in state.pods if is_terminating(pod)]
    return ObservedJob(job, state, children, blocked, tuple(_roles(job, find_pods(job, state), terminating)))


def find_owned_children(owner: Owner, state: ObservedState) -> tuple[dict[ChildKey, Manifest], frozenset[ChildKey]]:
    """ObservedJob.children and ObservedJob.blocked of an owner."""
    owned = {key: child for key, child in state.children.items() if is_owned(owner, child)}
    terminating = {key for key, child in owned.items() if is_terminating(child)}
    return owned, frozenset(state.children.keys() - owned.keys() | terminating)


def find_images(children: Mapping[ChildKey, Manifest]) -> dict[str, str]:
    """The image of the main container of each role's workload, by the role's name."""
    images = {}
    for key, child in children.items():
        labels = labels_of(child)
        if key.kind in WORKLOAD_KINDS and (role := labels.get(LABEL_ROLE)):
            containers = child["spec"]["template"]["spec"].get("containers") or []
            found = [container.get("image") or "" for container in containers if container["name"] == role]
            images[read_role_name(labels)] = "".join(found)[:MAX_IMAGE_LENGTH]
    return images


def find_pull_secrets(children: Iterable[Manifest]) -> list[str] | None:
    """The Secrets with which the head's image is pulled; None without a head."""
    for child in children:
        if child["kind"] in WORKLOAD_KINDS and labels_of(child).get(LABEL_ROLE) == HEAD:
            secrets = child["spec"]["template"]["spec"].get("imagePullSecrets") or []
            return [str(secret.get("name")) for secret in secrets][:MAX_PULL_SECRETS]
    return None


def find_stale(owner: Owner, state: ObservedState) -> tuple[ChildKey, ...]:
    """Children of an earlier incarnation that are not being deleted. Garbage collection can miss the deletion of an
    owner whose CRD was just upgraded; their names would stay blocked."""
    return tuple(sorted(key for key, child in state.children.items() if _is_stale(owner, child)))


def find_pods(owner: Owner, state: ObservedState) -> list[Manifest]:
    """The Pods of this incarnation that are not being deleted."""
    alive = [pod for pod in state.pods if not is_terminating(pod)]
    uid = owner.metadata.uid
    return [pod for pod in alive if pod["metadata"].get("annotations", {}).get(ANNOTATION_JOB_UID, uid) == uid]


def is_owned(owner: Owner, child: Manifest) -> bool:
    """Whether the child belongs to this incarnation of its owner."""
    uids = {ref.get("uid") for ref in child["metadata"].get("ownerReferences", [])}
    return owner.metadata.uid in uids if owner.metadata.uid else not uids


def is_running_head(pod: Manifest) -> bool:
    """Whether it runs a driver, which answers, or should."""
    return labels_of(pod).get(LABEL_ROLE) == HEAD and pod.get("status", {}).get("phase") == "Running"


def is_terminating(manifest: Manifest) -> bool:
    return bool(manifest["metadata"].get("deletionTimestamp"))


def _is_stale(owner: Owner, child: Manifest) -> bool:
    if is_terminating(child) or is_owned(owner, child) or labels_of(child).get(LABEL_MANAGED_BY) != MANAGED_BY:
        return False
    controller = find_controller(child)
    return (
        bool(owner.metadata.uid)
        and (controller.get("kind"), controller.get("name")) == (owner.kind, owner.metadata.name)
        and controller["apiVersion"].partition("/")[0] == API_VERSION.partition("/")[0]
        and controller["uid"] != owner.metadata.uid
    )


def find_controller(manifest: Manifest) -> Manifest:
    """The owner reference of its controller; empty if it has none."""
    return next((ref for ref in manifest["metadata"].get("ownerReferences") or [] if ref.get("controller")), {})


def _roles(job: RLJob, pods: list[Manifest], terminating: list[Manifest]) -> Iterator[RoleView]:
    def view(role: str, path: str, spec: Role, desired: int, service: str = "", source: str = "") -> RoleView:
        labels = build_role_labels(role, service)

        def of_role(pods: list[Manifest]) -> tuple[Manifest, ...]:
            return tuple(sorted((pod for pod in pods if labels.items() <= labels_of(pod).items()), key=name_of))

        name = read_role_name(labels)
        return RoleView(name, role, path, spec, desired, of_role(pods), of_role(terminating), source)

    spec = job.spec
    desired = {HEAD: 1, TRAINER: spec.trainer.replicas, ROLLOUT: spec.rollout.replicas}
    for name, role in spec.own_roles.items():
        yield view(name, f"spec.{name}", role, desired[name])
    for service in spec.services:
        if (own := service.settings).is_served:
            yield view(role_of_service(service), service.path, own, own.replicas, own.name, service.source)


def name_of(manifest: Manifest) -> str:
    return str(manifest["metadata"]["name"])


def labels_of(manifest: Manifest) -> dict[str, str]:
    return manifest["metadata"].get("labels") or {}


def container_statuses(pod: Manifest) -> list[Manifest]:
    status = pod.get("status", {})
    return (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or [])


def own_container_statuses(pod: Manifest) -> list[Manifest]:
    """The statuses of the main container and of RLJob's vLLM sidecar, without containers of others: a mesh's proxy, or
    what the user's template adds."""
    role = labels_of(pod).get(LABEL_ROLE, "")
    names = {role, VLLM_CONTAINER} if role in SERVING else {role}
    return [status for status in container_statuses(pod) if status.get("name") in names]


def has_gate(pod: Manifest, gate: str) -> bool:
    """Whether a scheduling gate keeps the Pod from a node."""
    return any(found.get("name") == gate for found in pod.get("spec", {}).get("schedulingGates") or [])


def find_condition(manifest: Manifest | None, type_: str) -> Manifest:
    """A condition of the object; empty if it has none of this type."""
    found = ((manifest or {}).get("status") or {}).get("conditions") or []
    return next((condition for condition in found if condition["type"] == type_), {})


def has_condition(manifest: Manifest | None, type_: str) -> bool:
    return bool(find_condition(manifest, type_).get("status") == "True")


def is_ready(pod: Manifest) -> bool:
    return has_condition(pod, "Ready")


def count_restarts(pod: Manifest) -> int:
    """Restarts of RLJob's containers, for whatever reason."""
    return sum(int(status.get("restartCount", 0)) for status in own_container_statuses(pod))


def last_termination(pod: Manifest) -> Manifest | None:
    """The last failed run of an own container: its exit code and message."""
    for status in own_container_statuses(pod):
        for state in (status.get("state") or {}, status.get("lastState") or {}):
            terminated: Manifest | None = state.get("terminated")
            if terminated and terminated.get("exitCode", 0) != 0:
                return terminated
    return None


def driver_succeeded(observed: ObservedJob) -> bool:
    """Whether the driver has ended successfully, even if its Job does not report it yet. Then no other role matters."""
    return any(map(_has_succeeded, observed.roles[0].pods))


def _has_succeeded(pod: Manifest) -> bool:
    """The end of a container is reported before the phase of its Pod."""
    status = pod.get("status", {})
    ends = [(c.get("state") or {}).get("terminated") or {} for c in status.get("containerStatuses") or []]
    return status.get("phase") == "Succeeded" or (bool(ends) and all(end.get("exitCode") == 0 for end in ends))


def describe_waiting(role: RoleView) -> str:
    """'waits for 1 of 2 rollout Pods: gsm8k-rollout-abc: ImagePullBackOff: ...'; empty when all are ready."""
    missing = role.desired - role.ready
    if missing <= 0:
        return ""
    unready = [pod for pod in role.pods if not is_ready(pod)]
    details = [f"{name_of(pod)}: {_describe_unready_pod(pod)}" for pod in unready]
    if len(role.pods) < role.desired:  # their replacements do not exist yet
        details += [f"{name_of(pod)}: being deleted" for pod in role.terminating]
    if len(details) > _MAX_PODS_NAMED:
        details[_MAX_PODS_NAMED:] = [f"and {len(details) - _MAX_PODS_NAMED} more"]
    noun = "Pod" if role.desired == 1 else "Pods"
    return f"waits for {missing} of {role.desired} {role.name} {noun}: {'; '.join(details) or 'not created yet'}"


def _describe_unready_pod(pod: Manifest) -> str:
    """Why the Pod is not ready; the same in every reconcile."""
    for status in container_statuses(pod):
        state = status.get("state") or {}
        if waiting := state.get("waiting"):
            reason = waiting.get("reason") or "Waiting"
            if reason == "CrashLoopBackOff":
                return reason  # the seconds in its message change
            if reason in ("ErrImagePull", "ImagePullBackOff") and (image := status.get("image")):
                return _join("ImagePullBackOff", f'Back-off pulling image "{image}"')  # they alternate
            return _join(reason, waiting.get("message"))
        if terminated := state.get("terminated"):
            code, message = terminated.get("exitCode"), extract_error_message(terminated.get("message"))
            return _join(f"ended with exit code {code}", message)
    if (scheduled := find_condition(pod, "PodScheduled")) and scheduled["status"] != "True":
        return _join(scheduled.get("reason") or "Unschedulable", scheduled.get("message"))
    return "starting" if container_statuses(pod) else "waiting to be scheduled"


def _join(reason: str, message: str | None) -> str:
    return f"{reason}: {message}"[:_MAX_DETAIL_LENGTH] if message else reason


def extract_error_message(message: str | None) -> str:
    """The error in a termination message: everything after its last `error: `, else a short message as a whole, else
    the last exception of a log with the first line of its details, else the last line."""
    lines = [line.rstrip() for line in (message or "")[:_MAX_TERMINATION_LENGTH].splitlines() if line.strip()]
    errors = [index for index, line in enumerate(lines) if line.startswith(ERROR_PREFIX)]
    is_short = 0 < len(lines) <= _MAX_SHORT_LINES and not lines[0].startswith("Traceback")
    relevant = lines[errors[-1] :] if errors else lines if is_short else _last_exception(lines) or lines[-1:]
    return clean_text("\n".join(relevant).removeprefix(ERROR_PREFIX).strip(), _MAX_ERROR_LENGTH)


def _last_exception(lines: list[str]) -> list[str]:
    found = [index for index, line in enumerate(lines) if _EXCEPTION.match(line)]
    if not found:
        return []
    first = found[-1]
    return lines[first : first + 1] + [line for line in lines[first + 1 : first + 2] if line.startswith(" ")]


_POD_REASONS = frozenset(
    {
        # Killed by the kubelet or the node controller.
        "Evicted", "NodeLost", "NodeShutdown", "Preempting", "Shutdown", "Terminated",
        # Refused by the kubelet, because the node changed after the scheduler had chosen it.
        "InvalidNodeInfo", "NodeAffinity", "NodeName", "NodePorts", "TaintToleration", "TopologyAffinityError",
        "UnexpectedAdmissionError", "UnexpectedPredicateFailureType", "UnknownReason",
    }
)  # fmt: skip
"""Values of status.reason of a Pod that failed before, or without, a failure of its containers."""
_NO_RESOURCES_PREFIX = "OutOf"
"""Prefix of status.reason: OutOfcpu, OutOfmemory, OutOfpods, OutOfnvidia.com/gpu."""
_EXIT_OF_SIGTERM = 128 + 15
_CONTAINER_REASONS = ("ContainerStatusUnknown", "Unknown")
"""Reasons of a container whose end was not observed, as when its node rebooted: set by the kubelet and by
containerd."""


def find_disruption(pod: Manifest) -> str:
    """Who ended the Pod, or is about to: 'EvictionByEvictionAPI', 'OutOfcpu'. Empty: only its containers."""
    status = pod.get("status") or {}
    reason = str(status.get("reason") or "")
    if exceeded_own_limit(pod):
        return ""
    for type_ in DISRUPTION_CONDITIONS:
        if has_condition(pod, type_):
            return str(find_condition(pod, type_).get("reason") or type_)
    is_disrupted = reason in _POD_REASONS or reason.startswith(_NO_RESOURCES_PREFIX)
    return reason if status.get("phase") == "Failed" and is_disrupted else ""


def exceeded_own_limit(pod: Manifest) -> str:
    """The kubelet's message, if it evicted the Pod because that used more disk than its limits allow; else empty."""
    status = pod.get("status") or {}
    message = str(status.get("message") or "")
    return message.strip() if status.get("reason") == "Evicted" and foreign_texts.OVER_OWN_DISK.search(message) else ""


def is_lost(termination: Manifest) -> bool:
    """Whether the end of the container was not observed."""
    return termination.get("reason") in _CONTAINER_REASONS


def was_told_to_end(termination: Manifest, container: str) -> bool:
    """Whether a program that serves until it is terminated got SIGTERM. RLJob's own exit with 0 then, and at no other
    time. vLLM's does so, too, when its engine has died. A probe that failed ends as SIGKILL if the program hangs."""
    code = termination.get("exitCode")
    return code == _EXIT_OF_SIGTERM or (code == int(ExitCode.SUCCEEDED) and container != VLLM_CONTAINER)
