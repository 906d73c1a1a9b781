"""What the reconcile core needs of the world, and what it says of it. Two implementations: Kubernetes, and local.

Objects are plain manifests in Kubernetes' JSON form, on both sides: what `plan` builds is what `kubectl apply`
would take, and what a backend observes carries a Kubernetes `status`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import RewardModel
from rljob_api.manifest.status import RLJobStatus
from rljob_api.wire.protocol import DriverStatus

if TYPE_CHECKING:
    from rljob_operator.plan.autoscale import Demand

Manifest = dict[str, Any]


class JobKey(NamedTuple):
    """Names one RLJob."""

    namespace: str
    name: str


class ChildKey(NamedTuple):
    """Names one child within its job's namespace."""

    kind: str
    name: str


def key_of(manifest: Manifest) -> ChildKey:
    return ChildKey(manifest["kind"], manifest["metadata"]["name"])


@dataclass(frozen=True)
class Event:
    """A Kubernetes Event about the job. Equal events are one event with a count."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class Observed:
    """The world as a backend sees it now. `children` are the objects that carry the job's label, Pods apart."""

    children: dict[ChildKey, Manifest] = field(default_factory=dict)
    pods: tuple[Manifest, ...] = ()
    driver: DriverStatus | None = None
    """What the driver's /status answered; None when it did not."""
    warnings: tuple[Manifest, ...] = ()
    """Newest Events of type Warning about the job's Pods and workloads: why a Pod could not be made, or mounted."""
    reward_models: dict[str, RewardModel] = field(default_factory=dict)
    """The RewardModels of the namespace that the job names, as far as they exist."""
    demands: tuple[Demand, ...] = ()
    """Of a RewardModel with autoscaling: what the jobs that refer to it will ask of it."""


@dataclass(frozen=True)
class Plan:
    """What should be, and what to say about it. Applying the same plan twice writes nothing."""

    children: tuple[Manifest, ...]
    """Server-side applied, in this order."""
    delete: tuple[ChildKey, ...]
    """Children of the job that are no longer wanted."""
    status: RLJobStatus
    events: tuple[Event, ...] = ()
    requeue_after_seconds: float | None = None
    """When to look again though nothing happened; null: only upon a change."""
    ungate: tuple[str, ...] = ()
    """Pods whose scheduling gate goes now."""
    delete_job: bool = False
    """ttlSecondsAfterFinished has passed."""
    holds_until: datetime | None = None
    """Until then the same job and the same observations give a plan that does nothing new, whatever the time; null:
    not known. Whoever makes a plan depend on the time must say it here."""


class ForeignObjectError(UserError):
    """The name of a child is taken by an object that is not ours, which is neither adopted nor overwritten."""


class Backend(Protocol):
    """I/O of the reconcile core. Every method may raise TransientError, which means: try again later."""

    async def get_job(self, key: JobKey) -> RLJob | None: ...

    async def observe(self, job: RLJob) -> Observed: ...

    async def apply(self, manifest: Manifest) -> None:
        """Server-side apply. Raises ForeignObjectError for a name that someone else's object holds, UserError for
        what the API server refuses for good."""
        ...

    async def delete(self, namespace: str, child: ChildKey) -> None: ...

    async def ungate(self, namespace: str, pod: str) -> None:
        """Remove the scheduling gate of a Pod."""
        ...

    async def delete_job(self, key: JobKey) -> None: ...

    async def update_status(self, job: RLJob, status: RLJobStatus) -> None: ...

    async def record_event(self, job: RLJob, event: Event) -> None: ...

    def watch(self) -> AsyncIterator[JobKey]:
        """Keys of jobs whose spec, children or Pods may have changed, and all of them now and then."""
        ...


def utc_now() -> datetime:
    from datetime import UTC

    return datetime.now(UTC)
