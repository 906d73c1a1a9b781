"""A run at one moment, for every kind of output, and the changes between two such snapshots. Pure.

Invariant: each step, state and failure is reported exactly once.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_api.manifest.status import RewardProblem, RLJobStatus
from rljob_api.run.metrics import EvaluationRecord, StepRecord
from rljob_api.run.sessions import ContainerFailure
from rljob_api.wire.contract import ExitCode
from rljob_api.wire.driver_status import SERVING, DriverStatus, LearningReason, Outage, ScheduleStatus
from rljob_cli.manifests import is_ready, role_of
from rljob_cli.run.reward_rows import RewardRow
from rljob_cli.run.summary import describe_uncounted
from rljob_core.backend import Manifest
from rljob_core.plan import conditions
from rljob_core.plan.observed_job import extract_error_message, is_terminating, name_of
from rljob_core.plan.progress import NO_PROGRESS, WAITS_FOR_OUTAGE

_ROLE_ORDER = ("head", "trainer", "rollout", "reward", "agent")
FINAL_PHASES = ("Succeeded", "Failed")
_URGENT_EVENTS = {LearningReason.NO_ADVANTAGES, *NO_PROGRESS}
_SHOWN_ELSEWHERE = (conditions.REASON_INVALID_SAMPLES, conditions.REASON_CHECKPOINT_DAMAGED, WAITS_FOR_OUTAGE)
"""Reasons of events that repeat problems and outages."""


@dataclass(frozen=True)
class RoleRow:
    name: str
    desired: int
    ready: int
    restarts: int


@dataclass(frozen=True)
class Snapshot:
    name: str = ""
    phase: str = ""
    message: str = ""
    """The message of the condition that decides the phase."""
    roles: tuple[RoleRow, ...] = ()
    rewards: tuple[RewardRow, ...] = ()
    driver: DriverStatus | None = None
    steps: tuple[StepRecord, ...] = ()
    evals: tuple[EvaluationRecord, ...] = ()
    total_steps: int = 0
    elapsed_seconds: float = 0.0
    failures: tuple[ContainerFailure, ...] = ()
    problems: tuple[RewardProblem, ...] = ()
    """The first reasons for which samples have no valid score."""
    events: tuple[str, ...] = ()
    """Warnings: their reason and message."""

    @property
    def step(self) -> int:
        return self.steps[-1].step if self.steps else (self.driver.step if self.driver else 0)

    @property
    def waits_for(self) -> str:
        """What hangs, and what the job waits for: the driver's status, or else the roles that are not ready."""
        if self.driver:
            hung = [f"{part.role}: {part.name} hangs for {part.seconds:.0f} s" for part in self.driver.hung]
            return "; ".join(filter(None, [*hung, self.driver.waits_for]))
        missing = [f"{role.name} {role.ready}/{role.desired}" for role in self.roles if role.ready < role.desired]
        return ", ".join(missing) or self.message

    @property
    def is_serving(self) -> bool:
        """Whether it is a training service that answers."""
        return self.driver is not None and self.driver.phase == SERVING

    @property
    def outages(self) -> Sequence[Outage]:
        return self.driver.outages if self.driver else ()

    @property
    def eta_seconds(self) -> float | None:
        """Estimate the remaining time from the median of the last steps."""
        times = sorted(record.step_seconds for record in self.steps[-9:] if record.step_seconds)
        return times[len(times) // 2] * max(0, self.total_steps - self.step) if times else None


@dataclass(frozen=True)
class Change:
    """One thing to report: a line of text, and an object for programs."""

    text: str
    """Empty: another change shows it."""
    data: dict[str, Any]
    is_urgent: bool = False
    """Whether it must stay on the screen."""


def diff_snapshots(old: Snapshot, new: Snapshot) -> list[Change]:
    changes: list[Change] = []
    if new.phase != old.phase:
        changes.append(_format_phase(new))
    before = {role.name: (role.ready, role.desired) for role in old.roles}
    for role in () if new.phase in FINAL_PHASES else new.roles:  # the end releases all of them
        if before.get(role.name) != (role.ready, role.desired):
            data = {"type": "role", **role.__dict__}
            changes.append(Change(f"{role.name}: {role.ready} of {role.desired} ready", data))
    new_failures = range(len(old.failures), len(new.failures))
    changes += [_format_failure(new.failures[index], new.failures[:index]) for index in new_failures]
    changes += _format_outages(old.outages, new.outages)
    changes += [
        Change(problem.describe(), {"type": "problem", **problem.model_dump()}, is_urgent=True)
        for problem in new.problems
        if problem not in old.problems
    ]
    changes += [_format_event(event, {old.message, new.message}) for event in new.events[len(old.events) :]]
    reported = {(record.set, record.step) for record in old.evals}
    changes += [_format_eval(record) for record in new.evals if (record.set, record.step) not in reported]
    last = old.steps[-1].step if old.steps else 0
    if new.steps and new.steps[-1].step < last:
        last = new.steps[-1].step
        changes.append(Change(f"resumed after step {last}", {"type": "resumed", "step": last}))
    changes += [_format_step(record, new.total_steps) for record in new.steps if record.step > last]
    return changes


def describe_groups(schedule: ScheduleStatus) -> str:
    """Return how many groups are where, as far as it is known."""
    groups = {"in flight": schedule.groups_in_flight, "scored": schedule.groups_scored, "due": schedule.groups_due}
    return ", ".join(f"{count} {name}" for name, count in groups.items() if count is not None)


def describe_work(snapshot: Snapshot) -> list[Change]:
    """Return what a run does at the moment, for a step that takes long; nothing after its end, or while it serves."""
    if snapshot.phase in FINAL_PHASES or snapshot.is_serving:
        return []
    phase = snapshot.driver.phase if snapshot.driver else ""
    doing = ": ".join(filter(None, [phase, snapshot.waits_for])) or "waiting for Pods"
    step = snapshot.step + 1 if snapshot.step < snapshot.total_steps else snapshot.step
    where = f"step {step}/{snapshot.total_steps}, " if snapshot.steps or phase not in ("", "starting") else ""
    data = {"type": "work", "step": step, "phase": phase, "waits_for": snapshot.waits_for}
    return [Change(f"{where}{doing}", data)]


def _format_outages(old: Sequence[Outage], new: Sequence[Outage]) -> list[Change]:
    """Report the beginning and the end of each outage."""
    before, now = {each.what: each for each in old}, {each.what: each for each in new}
    changes = []
    for what, outage in now.items():
        if what not in before:
            text = f"{what} is away: {outage.message}; the job waits for at most {outage.limit_seconds:.0f} s"
            changes.append(Change(text, {"type": "outage", **outage.model_dump()}, is_urgent=True))
    for what, outage in before.items():
        if what not in now:
            data = {"type": "outage_end", "what": what, "seconds": outage.seconds}
            changes.append(Change(f"{what} is back after {outage.seconds:.0f} s", data, is_urgent=True))
    return changes


def _format_phase(new: Snapshot) -> Change:
    """The message of a failed job contains the error of the container that caused it; its log follows."""
    text = new.phase + (f": {new.message}" if new.message else "")
    if is_failed := new.phase == "Failed":
        causes = [failure for failure in new.failures if (error := find_error(failure)) and error in new.message]
        logs = [failure.log for failure in causes if failure.log]
        text += f"\n    log: {logs[-1]}" if logs else ""
    return Change(text, {"type": "phase", "phase": new.phase, "message": new.message}, is_urgent=is_failed)


def _format_failure(failure: ContainerFailure, earlier: tuple[ContainerFailure, ...]) -> Change:
    error = find_error(failure)
    text = f"{failure.role}: {failure.pod} ended with exit code {failure.exit_code}"
    if failure.exit_code == ExitCode.USER and error:
        text = ""  # it fails the job, whose message has the error
    elif (failure.role, error) in [(other.role, find_error(other)) for other in earlier]:
        text += ": the same error again"
    else:
        text += f": {error}" if error else ""
        text += f"\n    log: {failure.log}" if failure.log else ""
    return Change(text, {"type": "failure", **failure.model_dump()}, is_urgent=True)


def _format_event(event: str, shown: set[str]) -> Change:
    """`shown`: messages of phases. Events about phases, problems and outages repeat other changes."""
    reason, _, message = event.partition(": ")
    text = "" if message in shown or reason in _SHOWN_ELSEWHERE else event
    return Change(text, {"type": "event", "message": event}, is_urgent=reason in _URGENT_EVENTS)


def _format_eval(record: EvaluationRecord) -> Change:
    shown = "no accuracy" if record.accuracy is None else f"accuracy {record.accuracy:.3f}"
    shown += "".join(f", pass@{k} {value:.3f}" for k, value in list(record.pass_at.items())[-1:])
    if counts := describe_uncounted(record):
        shown += f" ({counts})"
    of_set = "" if record.set == record.type else f" of {record.set}"
    return Change(f"evaluation{of_set} after step {record.step}: {shown}", record.model_dump(mode="json"))


def _format_step(record: StepRecord, total: int) -> Change:
    parts = [f"step {record.step}/{total}"]
    if not record.num_samples and record.loss is not None:
        parts.append(f"warm start: loss {record.loss:.3f}")
    parts += [] if record.reward is None else [f"reward {record.reward:.3f}"]
    parts += [] if record.tokens_per_second is None else [f"{record.tokens_per_second:.0f} tokens/s"]
    parts += [] if record.step_seconds is None else [f"{record.step_seconds:.1f} s"]
    parts += [f"{record.num_invalid} invalid"] if record.num_invalid else []
    return Change("  ".join(parts), record.model_dump(mode="json"))


def find_error(failure: ContainerFailure) -> str:
    """Return the error in the last lines of a container."""
    return extract_error_message(failure.message)


class RunHistory:
    """Restarts by role, and failures, including those of deleted Pods."""

    def __init__(self, find_log: Callable[[Manifest, str], Path] | None = None) -> None:
        """`find_log` returns the path of the log of a Pod's container."""
        self._find_log = find_log
        self.failures: list[ContainerFailure] = []
        self._restarts: dict[str, tuple[str, int]] = {}
        self._seen: set[tuple[str, str, str]] = set()

    def record(self, pods: list[Manifest]) -> None:
        for pod in pods:
            status = pod.get("status", {})
            containers = status.get("containerStatuses", [])
            for container in containers:
                for state in (container.get("lastState", {}), container.get("state", {})):
                    self._record_end(pod, container["name"], state.get("terminated"))
            # A failed Pod is replaced, which is a restart of its role too.
            num_restarts = sum(int(container.get("restartCount", 0)) for container in containers)
            num_restarts += status.get("phase") == "Failed"
            self._restarts[pod["metadata"].get("uid", "")] = (role_of(pod), num_restarts)

    def _record_end(self, pod: Manifest, container: str, terminated: Manifest | None) -> None:
        # Containers of a deleted Pod end by a signal, which is not a failure.
        if not terminated or terminated["exitCode"] == 0 or is_terminating(pod):
            return
        key = (pod["metadata"].get("uid", ""), container, terminated["finishedAt"])
        if key not in self._seen:
            self._seen.add(key)
            failure = ContainerFailure(
                pod=name_of(pod),
                role=role_of(pod),
                container=container,
                exit_code=terminated["exitCode"],
                reason=terminated["reason"],
                message=terminated["message"],
                log=str(self._find_log(pod, container)) if self._find_log else "",
            )
            self.failures.append(failure)

    @property
    def restarts(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for role, count in self._restarts.values():
            total[role] += count
        return dict(total)


def build_roles(status: RLJobStatus, pods: list[Manifest], restarts: dict[str, int]) -> tuple[RoleRow, ...]:
    """Return the roles in order: desired from the status, ready from the Pods."""
    desired = {role.name: role.desired for role in status.roles}
    ready = Counter(role_of(pod) for pod in pods if is_ready(pod))
    names = {*desired, *map(role_of, pods)}
    ordered = sorted(names, key=lambda name: (_ROLE_ORDER.index(name.partition("-")[0]), name))
    return tuple(RoleRow(name, desired.get(name, 0), ready[name], restarts.get(name, 0)) for name in ordered)


def message_of(status: RLJobStatus) -> str:
    """Return the message of the condition named like the phase, or else of any condition that is True."""
    holding = [c for c in status.conditions if c.status == "True"]
    named = [c.message for c in holding if c.type == status.phase]
    return (named or [c.message for c in holding if c.message] or [""])[0]
