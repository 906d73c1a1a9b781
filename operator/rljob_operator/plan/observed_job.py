"""What was observed, seen role by role: which children are really ours, which Pods are ready, restarted or stuck.

Reads Kubernetes' statuses and decides nothing. Invariants: objects of an earlier job of the same name never count;
only what names such a job as its controller is called stale, anything else of that name is somebody's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rljob_api import API_VERSION
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import Reward
from rljob_api.manifest.roles import Role
from rljob_api.wire.contract import LABEL_MANAGED_BY, LABEL_REWARD, LABEL_ROLE, MANAGED_BY, ExitCode
from rljob_operator.backend import ChildKey, Manifest, Observed
from rljob_operator.children.common import ANNOTATION_JOB_UID, HEAD, REWARD, ROLLOUT, TRAINER, Owner, child_name

_MAX_PODS_NAMED = 3
_MAX_DETAIL_LENGTH = 300
_MAX_SAID_LENGTH = 1000
_MAX_SHORT_LINES = 5
_ERROR_PREFIX = "error: "
"""How our programs begin the last thing that they print when they give up."""


@dataclass(frozen=True)
class RoleView:
    """One role: what the spec wants and the Pods that are there."""

    name: str
    """head, trainer, rollout, or reward-NAME."""
    kind: str
    """head, trainer, rollout or reward."""
    spec: Role
    desired: int
    pods: tuple[Manifest, ...]

    @property
    def ready(self) -> int:
        return min(self.desired, sum(is_ready(pod) for pod in self.pods))

    @property
    def needed(self) -> int:
        """Ready Pods without which the job cannot go on: the group whole, of a fleet one. Of a reward that may have
        none, none: its samples wait."""
        if isinstance(self.spec, Reward) and self.spec.autoscaling:
            return min(1, self.spec.autoscaling.min_replicas)
        return self.desired if self.kind in (HEAD, TRAINER) else min(1, self.desired)

    @property
    def container_restarts(self) -> int:
        """Replicas fail alone, so their restarts add up. Trainers fail together: when the head goes, each of them
        rejoins, and that is one restart of the group."""
        counts = [count_restarts(pod) for pod in self.pods]
        return max(counts, default=0) if self.kind == TRAINER else sum(counts)


@dataclass(frozen=True)
class World:
    """The observed world of one incarnation of a job."""

    children: dict[ChildKey, Manifest]
    """Ours, those under deletion included."""
    blocked: frozenset[ChildKey]
    """Names that cannot be applied now: held by an earlier incarnation, or under deletion."""
    roles: tuple[RoleView, ...]
    head_job: Manifest | None
    stale: tuple[ChildKey, ...] = ()
    """See find_stale."""


def observe_world(job: RLJob, observed: Observed) -> World:
    ours, blocked = find_ours(job, observed)
    roles = tuple(_roles(job, find_pods(job, observed)))
    head_job = ours.get(ChildKey("Job", child_name(job, HEAD)))
    return World(ours, blocked, roles, head_job, find_stale(job, observed))


def find_ours(owner: Owner, observed: Observed) -> tuple[dict[ChildKey, Manifest], frozenset[ChildKey]]:
    """World.children and World.blocked of an owner."""
    ours = {key: child for key, child in observed.children.items() if is_owned(owner, child)}
    blocked = {key for key in observed.children if key not in ours}
    blocked |= {key for key, child in ours.items() if is_terminating(child)}
    return ours, frozenset(blocked)


def find_stale(owner: Owner, observed: Observed) -> tuple[ChildKey, ...]:
    """Children of an earlier incarnation that nothing deletes yet. Garbage collection should, and can miss an owner's
    end (its CRD was just upgraded): the names would never become free."""
    return tuple(sorted(key for key, child in observed.children.items() if _is_stale(owner, child)))


def find_pods(owner: Owner, observed: Observed) -> list[Manifest]:
    """The Pods of this incarnation that are to stay."""
    return [pod for pod in observed.pods if _is_current(owner, pod) and not is_terminating(pod)]


def is_owned(owner: Owner, child: Manifest) -> bool:
    """Whether the child belongs to this very incarnation of its owner."""
    uids = {ref.get("uid") for ref in child["metadata"].get("ownerReferences", [])}
    return owner.metadata.uid in uids if owner.metadata.uid else not uids


def is_terminating(manifest: Manifest) -> bool:
    return bool(manifest["metadata"].get("deletionTimestamp"))


def _is_stale(owner: Owner, child: Manifest) -> bool:
    metadata = child["metadata"]
    if is_terminating(child) or (metadata.get("labels") or {}).get(LABEL_MANAGED_BY) != MANAGED_BY:
        return False
    controller = next((ref for ref in metadata.get("ownerReferences") or [] if ref.get("controller")), None)
    return (
        bool(owner.metadata.uid)
        and controller is not None
        and (controller["kind"], controller["name"]) == (owner.kind, owner.metadata.name)
        and controller["apiVersion"].partition("/")[0] == API_VERSION.partition("/")[0]
        and controller["uid"] != owner.metadata.uid
        and not is_owned(owner, child)
    )


def _is_current(owner: Owner, pod: Manifest) -> bool:
    uid = pod["metadata"].get("annotations", {}).get(ANNOTATION_JOB_UID, owner.metadata.uid)
    return bool(uid == owner.metadata.uid)


def _roles(job: RLJob, pods: list[Manifest]) -> Iterator[RoleView]:
    def find(role: str, reward: str | None = None) -> tuple[Manifest, ...]:
        found = [
            pod
            for pod in pods
            if _labels(pod).get(LABEL_ROLE) == role and reward in (None, _labels(pod).get(LABEL_REWARD))
        ]
        return tuple(sorted(found, key=name_of))

    spec = job.spec
    yield RoleView(HEAD, HEAD, spec.head, 1, find(HEAD))
    yield RoleView(TRAINER, TRAINER, spec.trainer, spec.trainer.replicas, find(TRAINER))
    yield RoleView(ROLLOUT, ROLLOUT, spec.rollout, spec.rollout.replicas, find(ROLLOUT))
    for reward in spec.rewards:
        if reward.is_served:
            name = f"{REWARD}-{reward.name}"
            yield RoleView(name, REWARD, reward, reward.replicas, find(REWARD, reward.name))


def name_of(manifest: Manifest) -> str:
    return str(manifest["metadata"]["name"])


def _labels(pod: Manifest) -> dict[str, str]:
    return pod["metadata"].get("labels") or {}


def container_statuses(pod: Manifest) -> list[Manifest]:
    status = pod.get("status", {})
    return (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or [])


def is_ready(pod: Manifest) -> bool:
    conditions = pod.get("status", {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def count_restarts(pod: Manifest) -> int:
    return sum(int(status.get("restartCount", 0)) for status in container_statuses(pod))


def last_termination(pod: Manifest) -> Manifest | None:
    """The newest end of a container that failed: its exit code and message."""
    for status in container_statuses(pod):
        for state in (status.get("state") or {}, status.get("lastState") or {}):
            terminated: Manifest | None = state.get("terminated")
            if terminated and terminated.get("exitCode", 0) != 0:
                return terminated
    return None


def find_user_error(world: World) -> tuple[RoleView, Manifest, Manifest] | None:
    """The first role, Pod and termination whose exit code says that the user alone can mend it."""
    for role in world.roles:
        for pod in role.pods:
            termination = last_termination(pod)
            if termination and termination["exitCode"] == int(ExitCode.USER):
                return role, pod, termination
    return None


def has_ended_well(world: World) -> bool:
    """Whether the driver is through, though its Job does not say so yet. What the others do now matters no more."""
    return any(map(_has_succeeded, world.roles[0].pods))


def _has_succeeded(pod: Manifest) -> bool:
    """A container's end is told before its Pod's phase."""
    ends = [
        (status.get("state") or {}).get("terminated") for status in pod.get("status", {}).get("containerStatuses") or []
    ]
    return pod.get("status", {}).get("phase") == "Succeeded" or (
        bool(ends) and all(end is not None and end.get("exitCode") == 0 for end in ends)
    )


def describe_waiting(role: RoleView) -> str:
    """'waits for 1 of 2 rollout Pods: gsm8k-rollout-abc: ImagePullBackOff: ...'; empty when all are ready."""
    missing = role.desired - role.ready
    if missing <= 0:
        return ""
    unready = [pod for pod in role.pods if not is_ready(pod)]
    words = [f"{name_of(pod)}: {_why_unready(pod)}" for pod in unready[:_MAX_PODS_NAMED]]
    if len(unready) > _MAX_PODS_NAMED:
        words.append(f"and {len(unready) - _MAX_PODS_NAMED} more")
    noun = "Pod" if role.desired == 1 else "Pods"
    return f"waits for {missing} of {role.desired} {role.name} {noun}: {'; '.join(words) or 'not created yet'}"


def _why_unready(pod: Manifest) -> str:
    for status in container_statuses(pod):
        state = status.get("state") or {}
        if waiting := state.get("waiting"):
            waiting = _stable_waiting(waiting, status.get("image"))
            return _join(waiting.get("reason") or "Waiting", waiting.get("message"))
        if terminated := state.get("terminated"):
            return _join(f"ended with exit code {terminated.get('exitCode')}", what_it_said(terminated.get("message")))
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] != "True":
            return _join(condition.get("reason") or "Unschedulable", condition.get("message"))
    return "starts" if container_statuses(pod) else "waits for its node"


def _stable_waiting(waiting: Manifest, image: str | None) -> Manifest:
    """Without what changes from look to look: the seconds of a back-off, and the turns of ErrImagePull and its
    back-off."""
    if waiting.get("reason") == "CrashLoopBackOff":
        return {"reason": "CrashLoopBackOff"}
    if waiting.get("reason") in ("ErrImagePull", "ImagePullBackOff") and image:
        return {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}"'}
    return waiting


def _join(reason: str, message: str | None) -> str:
    return f"{reason}: {message}"[:_MAX_DETAIL_LENGTH] if message else reason


def what_it_said(message: str | None) -> str:
    """A container's own words about its end: from its last `error: ` on; else all of a short message (the head
    writes its own); else, of a log or a traceback, the last line."""
    lines = [line.rstrip() for line in (message or "").splitlines() if line.strip()]
    told = [index for index, line in enumerate(lines) if line.startswith(_ERROR_PREFIX)]
    is_short = 0 < len(lines) <= _MAX_SHORT_LINES and not lines[0].startswith("Traceback")
    said = lines[told[-1] :] if told else lines if is_short else lines[-1:]
    return "\n".join(said).removeprefix(_ERROR_PREFIX).strip()[:_MAX_SAID_LENGTH]
