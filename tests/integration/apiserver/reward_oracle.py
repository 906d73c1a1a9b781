"""What a cluster must hold of one RewardModel, told from its stored manifest alone; `oracle` does so of an RLJob.

Pure, and knows nothing of plan_reward_model(). Says in words what is wrong; no words mean that all is well.
"""

from __future__ import annotations

from collections.abc import Iterator

from oracle import Key, Manifest, Objects, is_ready

ENDING = "-rewardmodel"
"""Of the names of all its children, and of no child of a job here."""
KINDS = ("Secret", "ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment")
INVALID = {"bogus": 1}


def is_models(key: Key) -> bool:
    return key[1].endswith(ENDING)


def find_wrong(model: Manifest, found: Objects, pods: list[Manifest]) -> Iterator[str]:
    """`found` are the objects whose names are its children's, `pods` all Pods of the namespace."""
    is_invalid = model["spec"].get("template") == INVALID
    yield from _find_wrong_status(model, pods, is_invalid)
    for key, child in found.items():
        owners = [owner["uid"] for owner in child["metadata"].get("ownerReferences") or []]
        if owners != [model["metadata"]["uid"]] or child["metadata"].get("deletionTimestamp"):
            yield f"{key} belongs to {owners}, or is being deleted"
    if is_invalid:
        return  # what there is stays as it is
    wanted = {(kind, model["metadata"]["name"] + ENDING) for kind in KINDS}
    if wanted != set(found):
        yield f"its children are {sorted(found)}"
    else:
        yield from _find_wrong_content(model, {key[0]: child for key, child in found.items()})


def _find_wrong_content(model: Manifest, found: dict[str, Manifest]) -> Iterator[str]:
    wanted = {"app.kubernetes.io/managed-by": "rljob-operator", "rljob.dev/reward-model": model["metadata"]["name"]}
    for kind, child in found.items():
        labels = child["metadata"].get("labels") or {}
        if wrong := {label for label, value in wanted.items() if labels.get(label) != value}:
            yield f"its {kind} lacks its labels {sorted(wrong)}"
    replicas, asked = found["Deployment"]["spec"]["replicas"], model["spec"]["replicas"]
    if replicas != asked:
        yield f"its Deployment has {replicas} replicas, not {asked}"
    if found["ConfigMap"]["data"].get("function.py") != model["spec"]["function"]["inline"]:
        yield "its ConfigMap holds another function"
    if found["Service"]["spec"].get("clusterIP") != "None":
        yield "its Service has an address of its own"
    if not found["Secret"].get("data", {}).get("token"):
        yield "its Secret holds no token"


def _find_wrong_status(model: Manifest, pods: list[Manifest], is_invalid: bool) -> Iterator[str]:
    status, spec, generation = model.get("status") or {}, model["spec"], model["metadata"]["generation"]
    conditions = {c["type"]: c for c in status.get("conditions") or []}
    if status.get("observedGeneration") != generation or "Ready" not in conditions:
        yield f"its status speaks of generation {status.get('observedGeneration')} of {generation}"
        return
    if old := sorted(t for t, c in conditions.items() if c.get("observedGeneration") != generation):
        yield f"its conditions {old} are of an earlier generation"
    theirs = [p for p in pods if p["metadata"]["labels"].get("rljob.dev/reward-model") == model["metadata"]["name"]]
    ready = sum(map(is_ready, theirs))
    said = (status.get("replicas", 0), status.get("readyReplicas", 0))
    if said != (len(theirs), ready):
        yield f"its status counts {said} Pods, there are {len(theirs)}, {ready} of them ready"
    holds = {type_: c["status"] == "True" for type_, c in conditions.items()}
    if is_invalid:
        if holds["Ready"] or conditions["Ready"]["reason"] != "InvalidSpec":
            yield f"its spec is invalid and Ready is {conditions['Ready']}"
        return
    wanted = {"Ready": ready > 0, "Degraded": ready < spec["replicas"], "Scaling": ready < spec["replicas"]}
    if wrong := {type_: conditions.get(type_) for type_, held in wanted.items() if holds.get(type_) != held}:
        yield f"{ready} of {spec['replicas']} are ready, and it says {wrong}"
    if holds.get("Updating") is not False:
        yield f"all Pods are of one version, and it says {conditions.get('Updating')}"
    if bool(status.get("endpoints")) != (ready > 0):
        yield f"{ready} are ready, and its endpoints are {status.get('endpoints')}"
