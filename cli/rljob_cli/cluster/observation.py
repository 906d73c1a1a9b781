"""One look at a job in a cluster: itself, its Pods, workloads, claims and warnings, as far as the user may see them.

What cannot be read is left out and told, since an explanation of a part is better than none. Decides nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from pydantic import ValidationError

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import RewardModel
from rljob_api.manifest.status import RLJobStatus
from rljob_api.wire.contract import LABEL_JOB
from rljob_cli.cluster.client import Cluster, ClusterError, Manifest
from rljob_operator.backend import Observed, key_of

_CLAIM = re.compile(r"pvc://([^/]+)")


@dataclass(frozen=True)
class Look:
    """What was seen."""

    manifest: Manifest
    pods: list[Manifest] = field(default_factory=list)
    workloads: list[Manifest] = field(default_factory=list)
    warnings: list[Manifest] = field(default_factory=list)
    """Warning Events about the job and what belongs to it, newest first."""
    claims: list[Manifest] | None = None
    """PersistentVolumeClaims of the namespace; None: they could not be read."""
    reward_models: list[Manifest] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    """What could not be read, and why."""

    @property
    def status(self) -> RLJobStatus:
        return parse_status(self.manifest)

    def parse(self) -> RLJob | None:
        """The job by this version's types; None when the cluster's are newer."""
        try:
            return RLJob.model_validate(self.manifest)
        except ValidationError:
            return None

    def as_observed(self) -> Observed:
        """The same as the operator's core takes it."""
        newest: dict[tuple[str, str], Manifest] = {}
        for event in reversed(self.warnings):
            newest[about(event)] = event
        models = {}
        for manifest in self.reward_models:
            try:
                models[manifest["metadata"]["name"]] = RewardModel.model_validate(manifest)
            except ValidationError:
                continue  # its own status says what is wrong with it
        children = {key_of(child): child for child in self.workloads}
        return Observed(children, tuple(self.pods), None, tuple(newest.values()), models)


def parse_status(manifest: Manifest) -> RLJobStatus:
    """The status as far as this version knows it."""
    known = {f.alias or name for name, f in RLJobStatus.model_fields.items()}
    try:
        return RLJobStatus.model_validate({k: v for k, v in (manifest.get("status") or {}).items() if k in known})
    except ValidationError:
        return RLJobStatus(phase=(manifest.get("status") or {}).get("phase", ""))


def take_look(cluster: Cluster, name: str) -> Look:
    """Raises for the job itself alone."""
    manifest = cluster.get_job(name)
    unseen: list[str] = []

    def see(ask: Callable[[], list[Manifest]]) -> list[Manifest] | None:
        try:
            return ask()
        except ClusterError as error:
            unseen.append(str(error))
            return None

    selector = f"{LABEL_JOB}={name}"
    pods = see(lambda: cluster.list_pods(selector)) or []
    workloads = see(lambda: cluster.list_workloads(selector)) or []
    claims = see(cluster.list_claims) if name_claims(manifest) else []
    models = see(cluster.list_reward_models) or []
    warnings = see(cluster.list_warnings) or []
    ours = [event for event in warnings if _concerns(event, manifest, pods, workloads)]
    ours.sort(key=said_at, reverse=True)
    return Look(manifest, pods, workloads, ours, claims, models, unseen)


def name_claims(manifest: Manifest) -> list[str]:
    """The PersistentVolumeClaims that a job's spec names."""
    spec = manifest["spec"]
    data = spec.get("data") or {}
    sources = [spec.get("model"), data.get("train"), data.get("eval")]
    found = [match[1] for s in sources if s and (match := _CLAIM.match(s.get("source", "")))]
    checkpoint = (spec.get("checkpoint") or {}).get("persistentVolumeClaim") or {}
    return sorted({*found, *filter(None, [checkpoint.get("claimName")])})


def about(event: Manifest) -> tuple[str, str]:
    involved = event.get("involvedObject") or {}
    return str(involved.get("kind")), str(involved.get("name"))


def said_at(event: Manifest) -> str:
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return str(next(filter(None, times), event["metadata"].get("creationTimestamp") or ""))


def parse_time(text: str | None) -> datetime | None:
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError:
        return None


def _concerns(event: Manifest, job: Manifest, pods: list[Manifest], workloads: list[Manifest]) -> bool:
    """Whether an Event speaks of this job. What was said before the job was made is of an earlier one's."""
    metadata = job["metadata"]
    if said_at(event)[:19] < (metadata.get("creationTimestamp") or "")[:19]:
        return False
    kind, name = about(event)
    if kind == "RLJob":
        return name == metadata["name"]
    if kind == "PersistentVolumeClaim":
        return name in name_claims(job)
    if kind in ("Pod", "ReplicaSet"):
        names = {pod["metadata"]["name"] for pod in pods}
        return name in names or any(_is_made_by(name, workload) for workload in workloads)
    return (kind, name) in {(w["kind"], w["metadata"]["name"]) for w in workloads}


def _is_made_by(name: str, workload: Manifest) -> bool:
    """Whether a ReplicaSet or Pod, which may be gone by now, has the name that the workload's controller gives."""
    return re.fullmatch(re.escape(workload["metadata"]["name"]) + r"(-[a-z0-9]{1,10}){1,2}", name) is not None
