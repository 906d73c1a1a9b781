"""The nouns and the I/O interface that all parts of the operator share.

Owns keys, observed state, plans and the errors of a backend; imports no other module of the operator. There are two
backends: Kubernetes (`kube`) and `rljob run` (`rljob_cli.local`). Objects are plain manifests in Kubernetes' JSON form:
planned ones are what `kubectl apply` takes, observed ones carry a Kubernetes `status`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.policy import RLJobPolicy
from rljob_api.manifest.services.reward import RewardModel, RewardModelStatus
from rljob_api.manifest.status import RLJobStatus
from rljob_api.wire.driver_status import DriverStatus, RewardDemand
from rljob_api.wire.text import clean_text

Manifest = dict[str, Any]
Owner = RLJob | RewardModel
"""What children can belong to."""
OwnerStatus = RLJobStatus | RewardModelStatus
StatusT = TypeVar("StatusT", RLJobStatus, RewardModelStatus)

PROGRESS_POLL_SECONDS = 10.0
"""How often the operator requests the progress of an active job from its driver."""
MAX_EVENT_LENGTH = 1024
"""What the API server takes."""
DEMAND_POLL_SECONDS = 2.0
"""The same while a service of the job is autoscaled. With 10 s, no Pod would start in a sixth of a one-minute
generation."""


class JobKey(NamedTuple):
    """Names one RLJob."""

    namespace: str
    name: str


class RewardModelKey(NamedTuple):
    """Names one RewardModel. `kind` distinguishes it from the JobKey of the same name."""

    namespace: str
    name: str
    kind: str = "RewardModel"


Key = JobKey | RewardModelKey


def describe_key(key: Key) -> str:
    return f"{'RewardModel' if isinstance(key, RewardModelKey) else 'RLJob'} {key.namespace}/{key.name}"


class ChildKey(NamedTuple):
    """Names one child within its job's namespace."""

    kind: str
    name: str


def key_of(manifest: Manifest) -> ChildKey:
    return ChildKey(manifest["kind"], manifest["metadata"]["name"])


@dataclass(frozen=True)
class Event:
    """A Kubernetes Event about a job or RewardModel. Equal events are one event with a count. Its message is printable
    and bounded."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", clean_text(self.message, MAX_EVENT_LENGTH))


DRIVER_UNREADABLE = "the driver's answer is not readable"
DRIVER_SILENT = "the driver does not answer the operator"
"""Both start DriverAnswer.problem. Silence is a problem only of a head that is ready: another one starts, or ends."""


class DriverAnswer(NamedTuple):
    """A driver's answer to /status, or what is wrong with it. Neither: it has not answered lately."""

    status: DriverStatus | None = None
    problem: str = ""
    """The answer is the job's own: it concerns no other job."""


@dataclass(frozen=True)
class Demand:
    """What one job will request from a reward."""

    job: str
    reported: RewardDemand | None
    """None: unknown, because the job's driver runs and does not answer."""


class StartJob(NamedTuple):
    """Where the run's files of a job are, and how far it is: for a job that starts from its model (job://NAME)."""

    claim: str = ""
    """Claim of spec.checkpoint; empty: none."""
    storage: str = ""
    """spec.checkpoint.storage; empty: none."""
    trains: bool = True
    """Whether spec.task is train."""
    exports: str = "last"
    """spec.checkpoint.exportPolicy."""
    every_steps: int = 10
    """spec.checkpoint.everySteps."""
    step: int = 0
    """Its last finished step."""
    has_ended: bool = False
    """Whether it has succeeded or failed."""
    failure: str = ""
    """Why it has failed: the reason of its condition. Empty: it has not."""


@dataclass(frozen=True)
class ObservedState:
    """What a backend sees now."""

    children: dict[ChildKey, Manifest] = field(default_factory=dict)
    """Objects with the label of the job or RewardModel, without Pods."""
    pods: tuple[Manifest, ...] = ()
    driver: DriverStatus | None = None
    """The driver's answer to /status; None when it did not answer."""
    driver_problem: str = ""
    """Why `driver` is None, if the driver's answer is the cause."""
    warnings: tuple[Manifest, ...] = ()
    """Newest Events of type Warning about the Pods and workloads: why a Pod was not created or started."""
    reward_models: dict[str, RewardModel] = field(default_factory=dict)
    """The RewardModels that the job references, as far as they exist."""
    start_job: StartJob | None = None
    """The job that spec.model.source names (job://NAME), if it exists."""
    demands: tuple[Demand, ...] = ()
    """For a RewardModel: the demand of the jobs that reference it."""
    policy: RLJobPolicy | None = None
    """The policy of the namespace."""
    policy_problem: str = ""
    """Why the namespace's policy cannot be read: then nothing new starts."""
    keeps_files: bool = False
    """Whether the folder of a run stays without a claim, as with `rljob run`."""


class ForcedDeletion(NamedTuple):
    """A Pod whose node does not confirm its end, and the time from which to delete it without a grace period."""

    pod: str
    node: str
    since: datetime


@dataclass(frozen=True)
class Plan(Generic[StatusT]):
    """The desired state of a job or RewardModel, its status and its events. Applying a plan twice writes nothing."""

    children: tuple[Manifest, ...]
    """Server-side applied, in this order."""
    delete: tuple[ChildKey, ...]
    """Children that are no longer desired."""
    status: StatusT
    events: tuple[Event, ...] = ()
    requeue_after_seconds: float | None = None
    """When to reconcile again although nothing changed; None: only after a change."""
    replaced: tuple[Manifest, ...] = ()
    """Workloads to apply after `delete` has deleted their predecessors. Nothing is deleted if they would be refused."""
    ungate: tuple[str, ...] = ()
    """Pods whose scheduling gate to remove now."""
    force_delete: tuple[ForcedDeletion, ...] = ()
    """Pods to delete now without a grace period."""
    delete_job: bool = False
    """ttlSecondsAfterFinished has passed."""
    valid_until: datetime | None = None
    """Until then the same job and the same observations give a plan that writes nothing new; None: unknown. Code that
    makes a plan depend on the time must set it."""


class ForeignObjectError(UserError):
    """An object of another owner has the name of a child. It is neither adopted nor overwritten."""


class FieldProblem(NamedTuple):
    """A field that the API server refuses."""

    path: str
    """In the API server's syntax: spec.template.spec.containers[0].image, or .spec.containers[name="a"].image."""
    message: str


class RefusedError(UserError):
    """The API server refuses a manifest for good. `fields` are those that its answer names."""

    def __init__(self, message: str, fields: tuple[FieldProblem, ...] = ()) -> None:
        super().__init__(message)
        self.fields = fields


class InvalidOwnerError(UserError):
    """Raised by `get_owner` for an object that the operator's types reject. `owner` has its metadata and, if it can be
    read, its old status; its spec must not be read."""

    def __init__(self, owner: Owner, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.owner, self.problems = owner, problems


class UnknownFieldsError(TransientError):
    """Raised by `get_owner` for an object with fields that only a newer CRD has. Nothing is written for `owner` until
    the operator is upgraded."""

    def __init__(self, owner: Owner, message: str) -> None:
        super().__init__(message)
        self.owner = owner


class UnansweredError(TransientError):
    """The API server, or an admission webhook that it calls, did not answer in time. Of the objects of one namespace
    with this error, the work queue tries one at a time."""


class ForbiddenError(TransientError):
    """RBAC, a quota or a policy forbids a write. The operator retries, since an administrator may grant it, and reports
    it at once. `reason` is that of the conditions and events. `retry_within_seconds` limits the delay of a retry."""

    def __init__(self, message: str, reason: str = "Forbidden", retry_within_seconds: float | None = None) -> None:
        super().__init__(message)
        self.reason, self.retry_within_seconds = reason, retry_within_seconds


class PodRejectedError(TransientError):
    """A workload is admitted and its Pods are not: a policy, PodSecurity, a quota or a LimitRange forbids them, or
    their service account or priority class does not exist. Raised by `check`; the operator retries. `cause` is that of
    rljob_core.plan.causes, unless the message is about a quota."""

    def __init__(self, message: str, cause: str = "FailedCreate") -> None:
        super().__init__(message)
        self.cause = cause


class Reference(NamedTuple):
    """An object that Pods read."""

    kind: str
    name: str


class MissingReferencesError(PodRejectedError):
    """Secrets, ConfigMaps and claims without which the Pods of a workload cannot start do not exist. Not raised: one
    workload's of several."""

    def __init__(self, missing: tuple[Reference, ...]) -> None:
        super().__init__(", ".join(f"{each.kind} {each.name}" for each in missing), "ReferenceMissing")
        self.missing = missing


class Backend(Protocol):
    """The I/O of a reconcile. Every method may raise TransientError: try again later."""

    async def get_owner(self, key: Key) -> Owner | None:
        """Return None for an object that does not exist, and a RewardModel that is being deleted. Raises
        InvalidOwnerError and UnknownFieldsError."""

    async def observe(self, owner: Owner) -> ObservedState: ...

    async def apply(self, manifest: Manifest) -> None:
        """Server-side apply. Raises ForeignObjectError when an object of another owner has the name, and UserError for
        what the API server rejects permanently."""

    async def find_missing(self, workloads: Sequence[Manifest]) -> list[tuple[Reference, ...]]:
        """Return the Secrets and ConfigMaps without which the Pods of each workload could not start."""

    async def check(self, workload: Manifest) -> None:
        """Raise what `apply` of a workload would raise, and PodRejectedError if its Pods would be rejected for another
        reason than quota. Writes nothing."""

    async def delete(self, namespace: str, child: ChildKey) -> None:
        """Delete a child with its dependents."""

    async def ungate(self, namespace: str, pod: str) -> None:
        """Remove the scheduling gate of a Pod."""

    async def force_delete(self, namespace: str, pod: str) -> None:
        """Delete a Pod that is being deleted without waiting for its node. Raises ForbiddenError without the right."""

    async def delete_job(self, key: JobKey) -> None: ...

    async def update_status(self, owner: Owner, status: OwnerStatus) -> None: ...

    async def record_event(self, owner: Owner, event: Event) -> None: ...


def utc_now() -> datetime:
    return datetime.now(UTC)
