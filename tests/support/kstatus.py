"""The rules of kstatus (sigs.k8s.io/cli-utils), by which Flux and kpt find the status of an object."""

from typing import Any


def compute_status(found: dict[str, Any]) -> str:
    """Return Terminating, InProgress, Failed or Current: the deletion, the generation, the first abnormal condition,
    then Ready."""
    status = found.get("status", {})
    if found["metadata"].get("deletionTimestamp"):
        return "Terminating"
    if status.get("observedGeneration", found["metadata"]["generation"]) != found["metadata"]["generation"]:
        return "InProgress"
    conditions = [(each["type"], each["status"]) for each in status.get("conditions", [])]
    abnormal = {("Reconciling", "True"): "InProgress", ("Stalled", "True"): "Failed"}
    for condition in conditions:
        if condition in abnormal:
            return abnormal[condition]
    return "InProgress" if dict(conditions).get("Ready", "True") != "True" else "Current"
