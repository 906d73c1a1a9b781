"""Reconciles that fail: since when, and what the object's status and events say about it.

`FailureTracker` remembers the first failure of each object until its next success. What only an administrator or a
developer can change is reported at once, anything else when it lasts. Invariant: reporting never raises, so that a
status or event that the API server refuses costs nothing but itself.

The condition ReconcileFailed is True while reconciles fail, and absent otherwise: a plan leaves it out, so the next
success removes it. Invariant: the state of a job that runs or has ended stays as it was observed.

`Refusals` has the manifests that the API server refused for good, and when to send them again. It consumes the
refusals of one process's writes and dry runs; produces the same refusal without a request until the next try is due.
Invariant: a manifest of a changed spec, or of an owner with changed annotations, is sent at once.
"""

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from rljob_api.errors import RLJobError, TransientError, UserError
from rljob_api.manifest.job import RLJob
from rljob_core.backend import Backend, Event, ForbiddenError, ForeignObjectError, Key, Manifest, Owner, OwnerStatus
from rljob_core.children.common import digest
from rljob_core.plan import conditions
from rljob_core.plan.conditions import (
    describe_refused_change,
    find_running_generation,
    keep_running_generation,
    working_type,
)
from rljob_core.plan.job_status import build_waiting_status

FIRST_RETRY_SECONDS = 30.0
MAX_RETRY_SECONDS = 300.0
"""The cause may be repaired in the cluster, such as a policy or a missing kind."""
MAX_REFUSED = 1000

Call = Callable[[Manifest], Awaitable[None]]


class _Refused(NamedTuple):
    error: UserError
    """A copy, which is never raised: a traceback keeps the manifest and all else that its frames refer to."""
    until: float
    delay_seconds: float


class Refusals:
    """The refusals of all owners; of more than MAX_REFUSED the latest."""

    def __init__(self) -> None:
        self._refused: dict[str, _Refused] = {}

    def guard(self, owner: Owner, now: float, call: Call) -> Call:
        """Return `call` without the requests that are refused. `now`: seconds of one clock."""

        async def call_if_due(manifest: Manifest) -> None:
            key = _identify(owner, manifest) if self._refused else ""
            known = self._refused.get(key)
            if known and now < known.until:
                raise copy(known.error)
            try:
                await call(manifest)
            except ForeignObjectError:
                raise  # the other object may be deleted at any time
            except UserError as error:
                self._record(_identify(owner, manifest), known, error, now)
                raise

        return call_if_due

    def _record(self, key: str, known: _Refused | None, error: UserError, now: float) -> None:
        delay = min(MAX_RETRY_SECONDS, known.delay_seconds * 2) if known else FIRST_RETRY_SECONDS
        self._refused.pop(key, None)
        self._refused[key] = _Refused(copy(error), now + delay, delay)
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]


def _identify(owner: Owner, manifest: Manifest) -> str:
    return digest((owner.metadata.generation, owner.metadata.annotations, manifest))


def set_reconcile_failed(owner: Owner, status: OwnerStatus, reason: str, message: str, now: datetime) -> OwnerStatus:
    """Return `status`, which was planned for the owner or is the owner's, with the condition."""
    now, generation = now.replace(microsecond=0), owner.metadata.generation
    if find_running_generation(owner):
        message = describe_refused_change(owner, message)
        status = keep_running_generation(owner, status)
    else:
        status = _set_waiting(owner, status, reason, message, now)
    types = (conditions.RECONCILE_FAILED, conditions.RECONCILING)
    others = [condition for condition in status.conditions if condition.type not in types]
    said = [condition.message for condition in others]
    built = [
        conditions.build_condition(
            owner.status,
            type_,
            True,
            reason,
            message * (type_ == conditions.RECONCILING or message not in said),  # at most twice
            generation=generation,
            now=now,
        )
        for type_ in types
    ]
    return status.model_copy(update={"conditions": [*others, *built], "observed_generation": generation})


def _set_waiting(owner: Owner, status: OwnerStatus, reason: str, message: str, now: datetime) -> OwnerStatus:
    """Say in the condition Running or Ready why it is False. The status of a job that has ended stays."""
    if isinstance(owner, RLJob):
        return build_waiting_status(owner.model_copy(update={"status": status}), reason, message, now)
    generation, type_ = owner.metadata.generation, working_type(owner)
    waiting = conditions.build_condition(owner.status, type_, False, reason, message, generation=generation, now=now)
    others = [condition for condition in status.conditions if condition.type != type_]
    return status.model_copy(update={"conditions": [waiting, *others]})


log = logging.getLogger(__name__)

REPORT_AFTER_SECONDS = 10.0
"""How long a reconcile must fail to be reported. With the retries' backoff the status is written within 16 s."""
REASON_API_SERVER_ERROR = "ApiServerError"
REASON_STATUS_REFUSED = "StatusRefused"
REASON_OPERATOR_ERROR = "OperatorError"


@dataclass
class Attempt:
    """One reconcile, as far as it came."""

    key: Key
    now: datetime
    started: float
    owner: Owner | None = None
    status: OwnerStatus | None = None
    """As planned. None: there is no plan yet."""


@dataclass(frozen=True)
class RefusedStatus:
    """A status that the API server does not store."""

    uid: str
    """Identifies the object."""
    status: OwnerStatus
    why: str


@dataclass
class _Failing:
    since: float
    reported: tuple[str, str] | None = None
    """Reason and message of the last event."""


class FailureTracker:
    """The objects whose last reconcile failed. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failing: dict[Key, _Failing] = {}
        self.refusals = Refusals()
        self.refused_statuses: dict[Key, RefusedStatus] = {}
        """Those of the last reconciles."""

    def start(self, key: Key, now: datetime) -> Attempt:
        return Attempt(key, now, self._clock())

    def clear(self, key: Key) -> None:
        """The object was reconciled, or does not exist."""
        self._failing.pop(key, None)
        self.refused_statuses.pop(key, None)

    def with_refused_status(self, key: Key, owner: Owner) -> Owner:
        """Return the owner as if its last status had been stored, so that the end of a job is carried out."""
        refused = self.refused_statuses.get(key)
        if refused is None or refused.uid != owner.metadata.uid:
            return owner
        return owner.model_copy(update={"status": refused.status})

    async def report(self, backend: Backend, attempt: Attempt, error: Exception) -> None:
        """Record the failure of an attempt. Write the status and an event once it is to be reported."""
        failing = self._failing.setdefault(attempt.key, _Failing(attempt.started))
        reason, message = describe_failure(error)
        is_lasting = self._clock() - failing.since >= REPORT_AFTER_SECONDS
        if attempt.owner is None or not (is_lasting or reason not in (REASON_API_SERVER_ERROR, REASON_STATUS_REFUSED)):
            return
        try:
            owner = await backend.get_owner(attempt.key)  # its status may have been written since
        except RLJobError:
            return
        if owner is None or owner.metadata.generation != attempt.owner.metadata.generation:
            return  # a later spec was not planned, and must not count as observed
        planned = None if isinstance(error, UserError) else attempt.status  # the planned status may be what is refused
        status = set_reconcile_failed(owner, planned or owner.status, reason, message, attempt.now)
        if status != owner.status:
            with _ignore_failure(owner, "its status cannot be written"):
                await backend.update_status(owner, status)
        if failing.reported != (reason, message):
            await record_event(backend, owner, Event("Warning", reason, message))
            failing.reported = (reason, message)


def describe_failure(error: Exception) -> tuple[str, str]:
    """The reason and message of a failed reconcile, the same for the same failure."""
    if isinstance(error, ForbiddenError):
        return error.reason, str(error)
    if isinstance(error, TransientError):
        return REASON_API_SERVER_ERROR, f"{error}; the operator retries"
    if isinstance(error, UserError):
        return REASON_STATUS_REFUSED, f"the API server refuses a write: {error}; the operator retries"
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return REASON_OPERATOR_ERROR, f"defect of the operator: {what}; its log has the traceback; report it"


async def record_event(backend: Backend, owner: Owner, event: Event) -> None:
    """Emit an event if the API server takes it."""
    with _ignore_failure(owner, f"the event {event.reason} cannot be recorded"):
        await backend.record_event(owner, event)


@contextlib.contextmanager
def _ignore_failure(owner: Owner, what: str) -> Iterator[None]:
    try:
        yield
    except RLJobError as error:
        log.warning("%s %s/%s: %s: %s", owner.kind, owner.metadata.namespace, owner.metadata.name, what, error)
