"""What a cluster must hold of one RLJob, told from its stored manifest alone. Pure, and knows nothing of plan().

A table by role instead of builders, and questions of what is found instead of a comparison with what is wanted. Says
in words what is wrong; no words mean that all is well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Manifest = dict[str, Any]
Key = tuple[str, str]
Objects = dict[Key, Manifest]
"""By kind and name."""

STANDING = {
    "Secret": ("token",),
    "ConfigMap": ("config", "rewards"),
    "Service": ("head", "trainer", "rollout", "rewards"),
    "NetworkPolicy": ("head", "trainer", "rollout", "rewards"),
    "PodDisruptionBudget": ("head", "trainer", "rollout", "rewards"),
}
"""What costs nothing: there from the first look until the job is deleted. By kind, the ends of the names."""
WORKING = {"Job": ("head",), "StatefulSet": ("trainer",), "Deployment": ("rollout", "rewards")}
"""What has Pods: there while the job is to run."""
KINDS = (*STANDING, *WORKING)
PRECEDENCE = ("Failed", "Succeeded", "Suspended", "Queued", "Restarting", "Running")
"""Of conditions that hold, the phase is the first."""
ACTIVE_PHASES = ("Pending", "Queued", "Restarting", "Running")


def names_of(job: Manifest, of: dict[str, tuple[str, ...]]) -> set[Key]:
    name, rewards = job["metadata"]["name"], served_rewards(job)
    ends = {"rewards": [f"reward-{reward['name']}" for reward in rewards]}
    return {(kind, f"{name}-{end}") for kind, roles in of.items() for role in roles for end in ends.get(role, [role])}


def served_rewards(job: Manifest) -> list[Manifest]:
    return [reward for reward in job["spec"]["rewards"] if "function" in reward]


def replicas_of(job: Manifest) -> dict[Key, int]:
    """Of each workload that has a number of them."""
    name, spec = job["metadata"]["name"], job["spec"]
    wanted = {("StatefulSet", f"{name}-trainer"): spec["trainer"]["replicas"]}
    wanted[("Deployment", f"{name}-rollout")] = spec["rollout"]["replicas"]
    return wanted | {("Deployment", f"{name}-reward-{r['name']}"): r["replicas"] for r in served_rewards(job)}


def desired_of(spec: Manifest) -> dict[str, int]:
    """What the status of an active job says that each role shall have."""
    rewards = {f"reward-{r['name']}": r["replicas"] for r in spec["rewards"] if "function" in r}
    return {"head": 1, "trainer": spec["trainer"]["replicas"], "rollout": spec["rollout"]["replicas"]} | rewards


def find_wrong_children(job: Manifest, stage: str, found: Objects, foreign: set[Key]) -> Iterator[str]:
    """`found` are the objects of the operator's kinds; `foreign` the names that someone else's objects hold."""
    ours = {key: child for key, child in found.items() if key not in foreign}
    for key, child in ours.items():
        yield from _find_wrong_owner(job, key, child)
    standing, working = names_of(job, STANDING) - foreign, names_of(job, WORKING)
    optional: set[Key] = set()
    if stage in ("Succeeded", "Failed"):
        # The head's Job stays for its log; and nothing is made any more for one that has ended.
        standing, optional = set(), {key for key in ours if key[0] in STANDING or key[0] == "Job"}
    elif stage == "Invalid":
        standing, optional = set(), set(ours)
    elif stage == "Active" and not foreign:
        standing |= working
    elif stage == "Active":
        optional = working  # those that were there before; new Pods are not made while a name is someone else's
    if missing := standing - set(ours):
        yield f"missing: {sorted(missing)}"
    if extra := set(ours) - standing - optional:
        yield f"left over: {sorted(extra)}"
    if stage == "Active" and not foreign and not missing:
        yield from _find_wrong_content(job, ours)


def _find_wrong_owner(job: Manifest, key: Key, child: Manifest) -> Iterator[str]:
    metadata = child["metadata"]
    owners = [owner["uid"] for owner in metadata.get("ownerReferences") or []]
    if owners != [job["metadata"]["uid"]]:
        yield f"{key} belongs to {owners}"
    if metadata.get("deletionTimestamp"):
        yield f"{key} is being deleted"


def _find_wrong_content(job: Manifest, ours: Objects) -> Iterator[str]:
    name = job["metadata"]["name"]
    wanted = {"app.kubernetes.io/managed-by": "rljob-operator", "rljob.dev/job": name}
    for key, child in ours.items():
        labels = child["metadata"].get("labels") or {}
        if wrong := {label for label, value in wanted.items() if labels.get(label) != value}:
            yield f"{key} lacks its labels {sorted(wrong)}"
    for key, replicas in replicas_of(job).items():
        if ours[key]["spec"]["replicas"] != replicas:
            yield f"{key} has {ours[key]['spec']['replicas']} replicas, not {replicas}"
    for key, child in ours.items():
        spec = child.get("spec") or {}
        if key[0] == "NetworkPolicy" and ({} in spec.get("egress", []) or {} in spec.get("ingress", [])):
            yield f"{key} is open to all"
        if key[0] == "Service" and spec.get("clusterIP") != "None":
            yield f"{key} has an address of its own"
        if key[0] == "ConfigMap" and "tampered" in child["data"].values():
            yield f"{key} has been tampered with"
    if not ours["Secret", f"{name}-token"].get("data", {}).get("token"):
        yield "the Secret holds no token"


def find_wrong_status(job: Manifest, stage: str, pods: list[Manifest], foreign: set[Key]) -> Iterator[str]:
    status, generation = job.get("status") or {}, job["metadata"]["generation"]
    conditions = {c["type"]: c for c in status.get("conditions") or []}
    if not conditions:
        yield "no status yet"
        return
    if status.get("observedGeneration") != generation:
        yield f"the status speaks of generation {status.get('observedGeneration')} of {generation}"
    if old := sorted(t for t, c in conditions.items() if c.get("observedGeneration") != generation):
        yield f"conditions of an earlier generation: {old}"
    holds = [type_ for type_ in PRECEDENCE if conditions.get(type_, {}).get("status") == "True"]
    phase = status.get("phase")
    if phase != next(iter(holds), "Pending"):
        yield f"the phase is {phase}, but these hold: {holds}"
    in_conflict = conditions.get("NameConflict", {}).get("status") == "True"
    if stage in ("Active", "Suspended") and in_conflict != bool(foreign):
        yield f"NameConflict is {conditions.get('NameConflict')}, and someone else has {sorted(foreign)}"
    if stage == "Active":
        yield from _find_wrong_active_status(job, status, pods, foreign)
    elif stage == "Invalid":
        if phase != "Failed" or conditions["Failed"]["reason"] != "InvalidSpec":
            yield f"the spec is invalid and the phase is {phase}"
    elif phase != stage:
        yield f"the phase is {phase}, not {stage}"


def _find_wrong_active_status(
    job: Manifest, status: Manifest, pods: list[Manifest], foreign: set[Key]
) -> Iterator[str]:
    if status.get("phase") not in ACTIVE_PHASES:
        yield f"the phase is {status.get('phase')}, and nothing has ended the job"
    said = {role["name"]: role["desired"] for role in status.get("roles") or []}
    if said != desired_of(job["spec"]):
        yield f"the status wants {said}"
    ready = {role["name"]: role.get("ready", 0) for role in status.get("roles") or []}
    seen = {role: sum(is_ready(pod) for pod in pods if role_of(pod) == role) for role in said}
    if ready != seen:
        yield f"the status says that these are ready: {ready}, but they are {seen}"
    enough = all(seen[role] >= (most if role in ("head", "trainer") else 1) for role, most in said.items())
    if not foreign and enough != (status["phase"] == "Running"):
        yield f"the phase is {status['phase']} with {seen} ready"


def role_of(pod: Manifest) -> str:
    labels = pod["metadata"]["labels"]
    reward = labels.get("rljob.dev/reward")
    return f"reward-{reward}" if reward else str(labels["rljob.dev/role"])


def is_ready(pod: Manifest) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
