"""How many failures of each Pod count against backoffLimit: a rolling window, kept in status.roles[].failures.

Counts failures of RLJob's own containers, of the head's Pods, and of the ranks as the driver reports them. Deciding
about the job is left to lifecycle. Invariants: a failure is counted once, also after a restart of the operator; the
record is bounded; while it has room, it changes only with a new failure, so time alone writes nothing.

The head's Job may be replaced, so that the next Pod starts without the delay of earlier failures: Kubernetes doubles
the delay before a Job's next Pod with each failure in the Job's life, from 10 s to 10 minutes: only a new Job starts
again. It is replaced when a head fails that finished a step, since that is no crash loop; or when the Job counts
failures older than the window. What ends a job is head.backoffLimit, which no replacement touches. Invariants: a
failure is in the status before its Pod is deleted with the Job; a Pod that may run is never deleted; each new Job
needs a new failure that counts against backoffLimit.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from rljob_api.manifest.roles import Role
from rljob_api.manifest.status import MAX_FAILING_PODS, MAX_FAILURE_TIMES, FailureTime, PodFailures
from rljob_core.backend import Event, Manifest
from rljob_core.children import keep
from rljob_core.children.common import HEAD, TRAINER
from rljob_core.children.gang import keep_gang
from rljob_core.plan import conditions, observed_job
from rljob_core.plan.observed_job import ObservedJob, RoleView, find_disruption, is_lost, name_of, was_told_to_end

_NUM_SLOTS = 16
"""Above so many failures, their times are rounded to this part of the window."""
_SAME_FAILURE = timedelta(seconds=60)
"""Trainers that fail together, each within this time of the previous one, are one failure of their group."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_STATES = ("state", "lastState")

Failures = dict[str, list[PodFailures]]
"""By role."""
_Identity = tuple[str, datetime]
"""Name and creation of a Pod: a StatefulSet reuses the names."""


@dataclass(frozen=True)
class _Source:
    """One counter of restarts: the own containers of a Pod, or the driver's count of failed ranks."""

    identity: _Identity
    count: int
    """Restarts so far, charged or not."""
    ended: datetime | None
    """End of the last run; None: not known."""
    free: str
    """Why the last restart is not charged; empty: it is."""
    reason: str
    """Why the last run ended."""
    is_driver: bool = False


@dataclass(frozen=True)
class _Window:
    """The window of one role. Every failure counts for at least `length`, and for a slot more if times are rounded."""

    limit: int
    length: timedelta
    now: datetime

    @classmethod
    def of(cls, spec: Role, now: datetime) -> "_Window":
        return cls(spec.backoff_limit, spec.backoff_window, now)

    @property
    def _slot(self) -> timedelta:
        return timedelta(0) if self.limit < _NUM_SLOTS else self.length / _NUM_SLOTS

    def contains(self, at: datetime) -> bool:
        return self.now - at < self.length + self._slot

    def round(self, at: datetime) -> datetime:
        slot = self._slot
        at = min(at, self.now)  # a clock was set back
        return (at - (at - _EPOCH) % slot if slot else at).replace(microsecond=0)

    def add(self, times: Iterable[FailureTime], new: Sequence[FailureTime]) -> list[FailureTime]:
        """`times` with the new ones, without those that no longer matter."""
        counts = dict[datetime, int]()
        for time in (*times, *new):
            at = self.round(time.at)
            if self.contains(at):
                counts[at] = counts.get(at, 0) + time.count
        newest = max(counts, default=None)
        # A time without failures only keeps a new record from being forgotten.
        kept = [FailureTime(at=at, count=count) for at, count in sorted(counts.items()) if count or at == newest]
        return kept[-MAX_FAILURE_TIMES:]


def count_failures(observed: ObservedJob, now: datetime) -> Failures:
    """What the status will record. A suspension ends all counts."""
    job = observed.job
    is_resumed = conditions.is_true(job.status, conditions.SUSPENDED) and not job.spec.suspend
    before = {} if is_resumed else {role.name: role.failures for role in job.status.roles}
    found: Failures = {}
    for role in observed.roles:
        old, window = before.get(role.name, []), _Window.of(role.spec, now)
        if role.kind == HEAD:
            found[role.name] = _record_head(old, role, window)
        else:
            found[role.name] = _record(old, list(_find_sources(role, observed)), window)
    return found


def count_charged(role: RoleView, failures: Sequence[PodFailures], now: datetime) -> tuple[int, PodFailures | None]:
    """The failures within the window that count together, of one Pod or of the group, and its last record."""
    window = _Window.of(role.spec, now)
    charged = [
        (sum(time.count for time in record.times if window.contains(time.at)), record)
        for record in failures
        if record.times
    ]
    if not charged:
        return 0, None
    if role.kind == TRAINER:
        return _count_group(failures, window), max(failures, key=_last_time)
    return max(charged, key=lambda pair: pair[0])


def _last_time(record: PodFailures) -> datetime:
    return record.times[-1].at if record.times else _EPOCH


def _count_group(failures: Sequence[PodFailures], window: _Window) -> int:
    """Failures of the trainers as a group. Several that fail at once count as the one that fails most."""
    times = sorted(
        (time.at, index, time.count)
        for index, record in enumerate(failures)
        for time in record.times
        if window.contains(time.at)
    )
    total, together, previous = 0, dict[int, int](), _EPOCH
    for at, index, count in times:
        if at - previous > _SAME_FAILURE:
            total += max(together.values(), default=0)
            together = {}
        together[index], previous = together.get(index, 0) + count, at
    return total + max(together.values(), default=0)


def _find_sources(role: RoleView, observed: ObservedJob) -> Iterator[_Source]:
    for pod in role.pods:
        if count := observed_job.count_restarts(pod):
            container, end = _last_end(pod)
            free = find_disruption(pod) or (str(end.get("reason")) if is_lost(end) else "")
            if not free and was_told_to_end(end, container):
                free = f"ended on SIGTERM (exit code {end['exitCode']})"
            yield _Source(_identify(pod), count, _end_of(end), free, _describe(end))
    driver = observed.state.driver
    heads = [pod for pod in observed.roles[0].pods if observed_job.is_running_head(pod)]
    if role.kind == TRAINER and driver and driver.rank_failures.count and heads:
        # A container that fails takes its node along, which the driver does not count.
        yield _Source(
            _identify(heads[0]), driver.rank_failures.count, None, "", driver.rank_failures.last, is_driver=True
        )


def _record(old: list[PodFailures], sources: list[_Source], window: _Window) -> list[PodFailures]:
    """`old` with the restarts that are new; the same list if there are none."""
    records = {(record.pod, record.created): record for record in old}
    changed = False
    for source in sources:
        before = records.get(source.identity)
        times = _new_times(source, before, window)
        if times:
            changed = True
            pod, created = source.identity
            records[source.identity] = PodFailures(
                pod=pod,
                created=created,
                counted=source.count,
                last=source.free or source.reason,
                charged=not source.free,
                times=window.add(before.times if before else [], times),
            )
    if not changed:
        return old
    current = {source.identity: source.is_driver for source in sources}
    kept = [record.model_copy(update={"times": window.add(record.times, [])}) for record in records.values()]
    return _bound([record for record in kept if record.times or (record.pod, record.created) in current], current)


def _new_times(source: _Source, before: PodFailures | None, window: _Window) -> list[FailureTime]:
    """The restarts since the record was made. Without a record, as many as are known to be within the window: all of
    a new Pod, else the last one. A Pod that restarted long ago, or before the operator recorded it, is not charged."""
    _, created = source.identity
    at = max(source.ended or window.now, created)
    if before is not None:
        num = source.count - before.counted
    elif not window.contains(at):
        num = 0
    elif source.is_driver or window.contains(created):
        num = source.count
    else:
        num = 1
    if num <= 0:
        return []
    return [FailureTime(at=at, count=num - bool(source.free))]


def _record_head(old: list[PodFailures], role: RoleView, window: _Window) -> list[PodFailures]:
    """One record for all Pods of the head: a Job replaces each one that fails. They run one after the other, so those
    that were created after the recorded one are new."""
    before = old[0] if old else None
    failed = sorted((pod for pod in role.pods if _has_failed(pod)), key=lambda pod: _identify(pod)[1])
    new = [pod for pod in failed if before is None or _identify(pod)[1] > before.created]
    ends = [last_end(pod) for pod in new]
    times = [
        FailureTime(at=max(_end_of(end) or created, created))
        for end, created in zip(ends, (_identify(pod)[1] for pod in new), strict=True)
    ]
    kept = window.add(before.times if before else [], times)
    if not new or not kept:
        return old
    pod, created = _identify(new[-1])
    counted = len(new) + (before.counted if before else 0)
    return [PodFailures(pod=pod, created=created, counted=counted, last=_describe(ends[-1]), times=kept)]


def _has_failed(pod: Manifest) -> bool:
    """Whether a Pod that is not restarted failed through its own container, or before that ran. One whose driver has
    succeeded did not, even if another container failed."""
    if pod.get("status", {}).get("phase") != "Failed" or find_disruption(pod):
        return False
    end = last_end(pod)
    return not is_lost(end) and end.get("exitCode") != 0


def _bound(records: list[PodFailures], is_driver: Mapping[_Identity, bool]) -> list[PodFailures]:
    """The Pods with most failures, of equal ones the last that failed, by name. The driver's count stays: without it,
    all of its failures would look new. So do Pods whose failures have expired, if there is room."""

    def rank(record: PodFailures) -> tuple[bool, int, datetime]:
        count = sum(time.count for time in record.times)
        return is_driver.get((record.pod, record.created), False), count, _last_time(record)

    kept = sorted(records, key=rank, reverse=True)[:MAX_FAILING_PODS]
    return sorted(kept, key=lambda record: (record.pod, record.created))


def last_end(pod: Manifest) -> Manifest:
    """How the own container of the Pod that ended last has ended; empty if none has."""
    return _last_end(pod)[1]


def _last_end(pod: Manifest) -> tuple[str, Manifest]:
    """The name of the own container that ended last, and its end; empty if none has ended."""
    found = [
        (str(status.get("name")), (status.get(name) or {}).get("terminated"))
        for status in observed_job.own_container_statuses(pod)
        for name in _STATES
    ]
    ends = [(name, end) for name, end in found if end]
    return max(ends, key=lambda pair: str(pair[1].get("finishedAt") or ""), default=("", {}))


def _identify(pod: Manifest) -> _Identity:
    return observed_job.name_of(pod), _parse(pod["metadata"].get("creationTimestamp")) or _EPOCH


def _end_of(termination: Manifest) -> datetime | None:
    return _parse(termination.get("finishedAt"))


def _parse(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _describe(termination: Manifest) -> str:
    if not termination:
        return "ended before its container ran"
    reason = observed_job.extract_error_message(termination.get("message")) or termination.get("reason") or "no message"
    return f"exit code {termination['exitCode']}: {reason}"


REASON = "HeadBackoffReset"
"""Reason of the event."""
_MAX_END_LENGTH = 700
"""Characters of the last lines in the event, which has at most 1024."""
Why = Literal["", "progress", "age"]
_BECAUSE: dict[Why, str] = {
    "progress": "the head has finished a step since its start",
    "age": "the head's earlier failures are older than head.backoffWindowSeconds",
}


def why_reset(observed: ObservedJob, built: Manifest, failures: Failures, now: datetime) -> Why:
    """Why the Job of a head that failed is replaced; empty: it is not. `built` is the Job as this operator builds it.
    One of an earlier operator stays: its successor could not keep what runs."""
    role, running = observed.roles[0], observed.head_job
    if running is None or role.terminating or keep.is_outdated(keep.record_built(keep_gang(built, running)), running):
        return ""
    if any(pod.get("status", {}).get("phase") != "Failed" for pod in role.pods):
        return ""
    num, last = count_charged(role, failures[HEAD], now)
    newest, num_failed = _find_newest(observed), int((running.get("status") or {}).get("failed") or 0)
    if newest is None or last is None or last.pod != name_of(newest) or not num_failed:
        return ""
    return "progress" if _made_progress(observed, newest) else "age" if num_failed > num else ""


def is_stored(observed: ObservedJob, failures: Failures) -> bool:
    """Whether the status has all failures of the head."""
    stored = next((role.failures for role in observed.job.status.roles if role.name == HEAD), [])
    return stored == failures[HEAD]


def reset_event(observed: ObservedJob, why: Why) -> Event:
    """The failed Pods are deleted with their logs, so it has the end of the last one."""
    message = (
        f"{_BECAUSE[why]}: its Job is replaced, so that the next Pod starts without delay; failed Pods are deleted"
    )
    if (newest := _find_newest(observed)) is not None:
        end = last_end(newest)
        text = (end.get("message") or "").strip()[-_MAX_END_LENGTH:]
        message += f"; the last one, {name_of(newest)}, ended with exit code {end.get('exitCode')}"
        message += f": {text}" if text else ""
    return Event("Normal", REASON, message)


def _find_newest(observed: ObservedJob) -> Manifest | None:
    heads = observed.roles[0].pods
    return max(heads, key=lambda pod: str(pod["metadata"].get("creationTimestamp") or ""), default=None)


def _made_progress(observed: ObservedJob, pod: Manifest) -> bool:
    """Whether a step was counted since the Pod's container started: a first one, not one that was repeated."""
    started, step = last_end(pod).get("startedAt"), observed.job.status.progress.last_step_time
    return started is not None and step is not None and step > datetime.fromisoformat(str(started))
