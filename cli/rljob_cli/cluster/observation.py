"""The observed state of a job in a cluster: the job, its Pods, workloads, claims and warnings.

What the user may not read is left out and listed, since a partial explanation is better than none. Decides nothing.
"""

import re
from collections.abc import Awaitable
from dataclasses import dataclass, field
from datetime import datetime

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.status import RLJobStatus
from rljob_api.wire.contract import LABEL_JOB
from rljob_cli.cluster.client import Cluster, ClusterError
from rljob_cli.cluster.other_versions import parse_job, parse_reward_models, parse_status
from rljob_core.backend import Manifest, ObservedState, key_of, utc_now


@dataclass(frozen=True)
class JobObservation:
    manifest: Manifest
    pods: list[Manifest] = field(default_factory=list)
    workloads: list[Manifest] = field(default_factory=list)
    warnings: list[Manifest] = field(default_factory=list)
    """Warning Events about the job and its objects, newest first."""
    reward_models: list[Manifest] | None = field(default_factory=list)
    """None: they could not be read."""
    unreadable: list[str] = field(default_factory=list)
    """What could not be read, and why."""
    observed_at: datetime = field(default_factory=utc_now)

    @property
    def status(self) -> RLJobStatus:
        return parse_status(self.manifest)

    def parse(self) -> RLJob | None:
        """Return the job in this version's types; None if a value of its spec is not one of this version."""
        return parse_job(self.manifest)

    def as_observed(self) -> ObservedState:
        """Return the same as the operator's input."""
        newest = {involved_object(event): event for event in reversed(self.warnings)}
        return ObservedState(
            children={key_of(workload): workload for workload in self.workloads},
            pods=tuple(self.pods),
            warnings=tuple(newest.values()),
            reward_models=parse_reward_models(self.reward_models or []),
        )


async def fetch_observation(cluster: Cluster, name: str) -> JobObservation:
    """Raise only if the job itself cannot be read."""
    manifest = await cluster.get_job(name)
    unreadable: list[str] = []

    async def read(objects: Awaitable[list[Manifest]]) -> list[Manifest] | None:
        try:
            return await objects
        except ClusterError as error:
            unreadable.append(str(error))
            return None

    selector = f"{LABEL_JOB}={name}"
    pods = await read(cluster.list_pods(selector)) or []
    workloads = await read(cluster.list_workloads(selector)) or []
    models = await read(cluster.list_reward_models())
    warnings = await read(cluster.list_warnings()) or []
    relevant = [event for event in warnings if _is_about_job(event, manifest, pods, workloads)]
    relevant.sort(key=event_time, reverse=True)
    return JobObservation(manifest, pods, workloads, relevant, models, unreadable)


def involved_object(event: Manifest) -> tuple[str, str]:
    involved = event.get("involvedObject") or {}
    return str(involved.get("kind")), str(involved.get("name"))


def event_time(event: Manifest) -> str:
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return str(next(filter(None, times), event["metadata"].get("creationTimestamp") or ""))


def parse_time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _is_about_job(event: Manifest, job: Manifest, pods: list[Manifest], workloads: list[Manifest]) -> bool:
    """Whether an Event is about this job. Events from before its creation are about an earlier job with its name."""
    metadata = job["metadata"]
    if event_time(event)[:19] < (metadata.get("creationTimestamp") or "")[:19]:
        return False
    kind, name = involved_object(event)
    if kind == "RLJob":
        return name == metadata["name"]
    if kind == "PersistentVolumeClaim":
        volumes = [volume for pod in pods for volume in pod["spec"].get("volumes") or []]
        return any((each.get("persistentVolumeClaim") or {}).get("claimName") == name for each in volumes)
    if kind in ("Pod", "ReplicaSet"):
        names = {pod["metadata"]["name"] for pod in pods}
        return name in names or any(_is_named_after(name, workload) for workload in workloads)
    return (kind, name) in {(w["kind"], w["metadata"]["name"]) for w in workloads}


def _is_named_after(name: str, workload: Manifest) -> bool:
    """Whether a ReplicaSet or Pod, which may be deleted by now, has a name that the workload's controller gives."""
    return re.fullmatch(re.escape(workload["metadata"]["name"]) + r"(-[a-z0-9]{1,10}){1,2}", name) is not None
