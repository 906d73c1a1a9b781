"""What a cluster must hold for one RewardModel, derived from its stored manifest alone; as job_oracle for RLJobs."""

from __future__ import annotations

from collections.abc import Iterator

from tests.integration.apiserver.job_oracle import Key, Manifest, Objects, is_ready

SUFFIX = "-rewardmodel"
"""Ends the names of all its children, and of no child of a job here."""
KINDS = ("Secret", "ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment")
INVALID = {"bogus": 1}


def is_of_model(key: Key) -> bool:
    return key[1].endswith(SUFFIX)


def find_wrong(model: Manifest, found: Objects, pods: list[Manifest]) -> Iterator[str]:
    """`found` are the objects with names of its children, `pods` all Pods of the namespace."""
    is_invalid = model["spec"].get("template") == INVALID
    yield from _find_wrong_status(model, pods, is_invalid)
    for key, child in found.items():
        owners = [owner["uid"] for owner in child["metadata"].get("ownerReferences") or []]
        if owners != [model["metadata"]["uid"]] or child["metadata"].get("deletionTimestamp"):
            yield f"{key} belongs to {owners}, or is being deleted"
    if is_invalid:
        return  # existing children stay as they are
    kinds = set(KINDS) - ({"PodDisruptionBudget"} if model["spec"]["replicas"] < 2 else set())
    wanted = {(kind, model["metadata"]["name"] + SUFFIX) for kind in kinds}
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
    replicas, desired = found["Deployment"]["spec"]["replicas"], model["spec"]["replicas"]
    if replicas != desired:
        yield f"its Deployment has {replicas} replicas, not {desired}"
    if found["ConfigMap"]["data"].get("function.py") != model["spec"]["function"]["inline"]:
        yield "its ConfigMap has another function"
    if found["Service"]["spec"].get("clusterIP") != "None":
        yield "its Service has a cluster IP"
    if not found["Secret"].get("data", {}).get("token"):
        yield "its Secret has no token"


def _find_wrong_status(model: Manifest, pods: list[Manifest], is_invalid: bool) -> Iterator[str]:
    status, spec, generation = model.get("status") or {}, model["spec"], model["metadata"]["generation"]
    conditions = {c["type"]: c for c in status.get("conditions") or []}
    if status.get("observedGeneration") != generation or "Ready" not in conditions:
        yield f"its status is of generation {status.get('observedGeneration')}, not {generation}"
        return
    if old := sorted(t for t, c in conditions.items() if c.get("observedGeneration") != generation):
        yield f"its conditions {old} are of an earlier generation"
    owned = [p for p in pods if p["metadata"]["labels"].get("rljob.dev/reward-model") == model["metadata"]["name"]]
    ready = sum(map(is_ready, owned))
    reported = (status.get("replicas", 0), status.get("readyReplicas", 0))
    if reported != (len(owned), ready):
        yield f"its status counts {reported} Pods; {len(owned)} exist and {ready} are ready"
    true = {type_: c["status"] == "True" for type_, c in conditions.items()}
    if is_invalid:
        if true["Ready"] or conditions["Ready"]["reason"] != "InvalidSpec":
            yield f"its spec is invalid and Ready is {conditions['Ready']}"
        return
    wanted = {"Ready": ready > 0, "Degraded": ready < spec["replicas"], "Scaling": ready < spec["replicas"]}
    if wrong := {type_: conditions.get(type_) for type_, value in wanted.items() if true.get(type_) != value}:
        yield f"{ready} of {spec['replicas']} are ready, and its conditions are {wrong}"
    if true.get("Updating") is not False:
        yield f"all Pods run the same version, and Updating is {conditions.get('Updating')}"
    if bool(status.get("endpoints")) != (ready > 0):
        yield f"{ready} are ready, and its endpoints are {status.get('endpoints')}"
