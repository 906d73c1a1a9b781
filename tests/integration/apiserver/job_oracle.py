"""What a cluster must hold for one RLJob, derived from its stored manifest alone. Pure, and independent of plan.

A table by role instead of builders, and checks of what is found instead of a comparison with desired manifests. Yields
descriptions of what is wrong; none means that the state is correct.
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
    "Service": ("head", "rollout", "rewards"),
    "NetworkPolicy": ("head", "rollout", "rewards"),
    "PodDisruptionBudget": ("head", "rollout", "rewards"),
}
"""Objects that exist until the job is deleted: kind and suffixes of the names. A serving role of one Pod has no
budget."""
WORKLOADS = {"Job": ("head",), "StatefulSet": ("trainer",), "Deployment": ("rollout", "rewards")}
"""Objects with Pods, which exist while the job is active."""
KINDS = (*STANDING, *WORKLOADS)
PRECEDENCE = ("Failed", "Succeeded", "Suspended", "Queued", "Restarting", "Running")
"""The phase is the first of these conditions that is True."""
ACTIVE_PHASES = ("Pending", "Queued", "Restarting", "Running")


def names_of(job: Manifest, roles_by_kind: dict[str, tuple[str, ...]]) -> set[Key]:
    name, rewards = job["metadata"]["name"], served_rewards(job)
    suffixes = {"rewards": [f"reward-{reward['name']}" for reward in rewards]}
    return {
        (kind, f"{name}-{suffix}")
        for kind, roles in roles_by_kind.items()
        for role in roles
        for suffix in suffixes.get(role, [role])
    }


def standing_of(job: Manifest) -> set[Key]:
    replicas = {name: count for (_, name), count in replicas_of(job).items()}
    return {
        (kind, name)
        for kind, name in names_of(job, STANDING)
        if kind != "PodDisruptionBudget" or replicas.get(name, 2) > 1
    }


def served_rewards(job: Manifest) -> list[Manifest]:
    return [reward for reward in job["spec"]["rewards"] if "function" in reward]


def replicas_of(job: Manifest) -> dict[Key, int]:
    """Return the desired replicas of each workload that has any."""
    name, spec = job["metadata"]["name"], job["spec"]
    wanted = {("StatefulSet", f"{name}-trainer"): spec.get("trainer", {}).get("replicas", 1)}
    wanted[("Deployment", f"{name}-rollout")] = spec["rollout"]["replicas"]
    return wanted | {("Deployment", f"{name}-reward-{r['name']}"): r.get("replicas", 1) for r in served_rewards(job)}


def desired_of(spec: Manifest) -> dict[str, int]:
    """Return `desired` of each role in the status of an active job."""
    rewards = {f"reward-{r['name']}": r.get("replicas", 1) for r in spec["rewards"] if "function" in r}
    return {
        "head": 1,
        "trainer": spec.get("trainer", {}).get("replicas", 1),
        "rollout": spec["rollout"]["replicas"],
    } | rewards


def find_wrong_children(job: Manifest, stage: str, found: Objects, foreign: set[Key]) -> Iterator[str]:
    """`found` are the objects of the operator's kinds; `foreign` the names that other owners' objects have."""
    owned = {key: child for key, child in found.items() if key not in foreign}
    for key, child in owned.items():
        yield from _find_wrong_owner(job, key, child)
    standing, workloads = standing_of(job) - foreign, names_of(job, WORKLOADS)
    optional: set[Key] = set()
    if stage in ("Succeeded", "Failed"):
        # The head's Job stays for its log, and nothing is created for a job that has ended.
        standing, optional = set(), {key for key in owned if key[0] in STANDING or key[0] == "Job"}
    elif stage == "Invalid":
        standing, optional = set(), set(owned)
    elif stage == "Suspended":
        # What the job has from its last run.
        standing, optional = {key for key in standing if key[0] == "Secret"}, standing
    elif stage == "Active" and not foreign:
        standing |= workloads
    elif stage == "Active":
        optional = workloads  # existing ones stay; no Pods are created while another owner's object has a name
    if missing := standing - set(owned):
        yield f"missing: {sorted(missing)}"
    if extra := set(owned) - standing - optional:
        yield f"left over: {sorted(extra)}"
    if stage == "Active" and not foreign and not missing:
        yield from _find_wrong_content(job, owned)


def _find_wrong_owner(job: Manifest, key: Key, child: Manifest) -> Iterator[str]:
    metadata = child["metadata"]
    owners = [owner["uid"] for owner in metadata.get("ownerReferences") or []]
    if owners != [job["metadata"]["uid"]]:
        yield f"{key} belongs to {owners}"
    if metadata.get("deletionTimestamp"):
        yield f"{key} is being deleted"


def _find_wrong_content(job: Manifest, owned: Objects) -> Iterator[str]:
    name = job["metadata"]["name"]
    wanted = {"app.kubernetes.io/managed-by": "rljob-operator", "rljob.dev/job": name}
    for key, child in owned.items():
        labels = child["metadata"].get("labels") or {}
        if wrong := {label for label, value in wanted.items() if labels.get(label) != value}:
            yield f"{key} lacks its labels {sorted(wrong)}"
    for key, replicas in replicas_of(job).items():
        if owned[key]["spec"]["replicas"] != replicas:
            yield f"{key} has {owned[key]['spec']['replicas']} replicas, not {replicas}"
    for key, child in owned.items():
        spec = child.get("spec") or {}
        if key[0] == "NetworkPolicy" and ({} in spec.get("egress", []) or {} in spec.get("ingress", [])):
            yield f"{key} is open to all"
        if key[0] == "Service" and spec.get("clusterIP") != "None":
            yield f"{key} has a cluster IP"
        if key[0] == "ConfigMap" and "tampered" in child["data"].values():
            yield f"{key} has been tampered with"
    if not owned["Secret", f"{name}-token"].get("data", {}).get("token"):
        yield "the Secret has no token"


def find_wrong_status(job: Manifest, stage: str, pods: list[Manifest], foreign: set[Key]) -> Iterator[str]:
    status, generation = job.get("status") or {}, job["metadata"]["generation"]
    conditions = {c["type"]: c for c in status.get("conditions") or []}
    if not conditions:
        yield "no status yet"
        return
    if status.get("observedGeneration") != generation:
        yield f"the status is of generation {status.get('observedGeneration')}, not {generation}"
    # While the spec is invalid, Running has the generation that runs.
    may_be_older = {"Running"} if stage == "Invalid" else set()
    wrong = {t for t, c in conditions.items() if c.get("observedGeneration") != generation}
    if old := sorted(wrong - may_be_older):
        yield f"conditions of an earlier generation: {old}"
    true = [type_ for type_ in PRECEDENCE if conditions.get(type_, {}).get("status") == "True"]
    phase = status.get("phase")
    if phase != next(iter(true), "Pending"):
        yield f"the phase is {phase}, but these conditions are True: {true}"
    in_conflict = conditions.get("NameConflict", {}).get("status") == "True"
    # A suspended job makes nothing, so it need not know of names that others have.
    may_be = {"Active": {bool(foreign)}, "Suspended": {False, bool(foreign)}}
    if in_conflict not in may_be.get(stage, {in_conflict}):
        yield f"NameConflict is {conditions.get('NameConflict')}, and these are foreign: {sorted(foreign)}"
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
        yield f"the phase is {status.get('phase')}, although the job has not ended"
    desired = {role["name"]: role["desired"] for role in status.get("roles") or []}
    if desired != desired_of(job["spec"]):
        yield f"the status desires {desired}"
    reported = {role["name"]: role.get("ready", 0) for role in status.get("roles") or []}
    ready = {role: sum(is_ready(pod) for pod in pods if role_of(pod) == role) for role in desired}
    if reported != ready:
        yield f"the status reports {reported} as ready, but {ready} are"
    if extra := {role for role, count in desired.items() if sum(role_of(pod) == role for pod in pods) > count}:
        yield f"too many Pods of {sorted(extra)}"
    enough = all(ready[role] >= (count if role in ("head", "trainer") else 1) for role, count in desired.items())
    if not foreign and enough != (status["phase"] == "Running"):
        yield f"the phase is {status['phase']} with {ready} ready"


def role_of(pod: Manifest) -> str:
    labels = pod["metadata"]["labels"]
    reward = labels.get("rljob.dev/reward")
    return f"reward-{reward}" if reward else str(labels["rljob.dev/role"])


def is_ready(pod: Manifest) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
