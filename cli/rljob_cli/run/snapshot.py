"""A run at one moment, for every kind of output, and the changes between two such snapshots. Pure.

Invariant: each step, state and failure is reported exactly once.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rljob_api.manifest.status import RewardProblem, RLJobStatus
from rljob_api.wire.contract import ExitCode
from rljob_api.wire.protocol import DriverStatus, LearningReason
from rljob_cli.manifests import is_ready, role_of
from rljob_cli.run.reward_rows import RewardRow
from rljob_cli.run.runfolder import Row
from rljob_operator.backend import Manifest
from rljob_operator.plan import conditions
from rljob_operator.plan.observed_job import extract_error_message, is_terminating, name_of

_ROLE_ORDER = ("head", "trainer", "rollout", "reward", "agent")
_FINAL_PHASES = ("Succeeded", "Failed")
_STEP_NUMBERS = (("reward", "reward {:.3f}"), ("tokens_per_second", "{:.0f} tokens/s"), ("step_seconds", "{:.1f} s"))


@dataclass(frozen=True)
class RoleRow:
    name: str
    desired: int
    ready: int
    restarts: int


@dataclass(frozen=True)
class Failure:
    pod: str
    role: str
    container: str
    exit_code: int
    reason: str
    message: str
    """What it wrote about its end, or the last lines of its log."""
    log: str = ""
    """Path of its log."""

    @property
    def error(self) -> str:
        return extract_error_message(self.message)


@dataclass(frozen=True)
class Snapshot:
    name: str = ""
    phase: str = ""
    message: str = ""
    """The message of the condition that decides the phase."""
    roles: tuple[RoleRow, ...] = ()
    rewards: tuple[RewardRow, ...] = ()
    driver: DriverStatus | None = None
    steps: tuple[Row, ...] = ()
    evals: tuple[Row, ...] = ()
    total_steps: int = 0
    elapsed_seconds: float = 0.0
    failures: tuple[Failure, ...] = ()
    problems: tuple[RewardProblem, ...] = ()
    """The first reasons for which samples have no valid score."""
    events: tuple[str, ...] = ()
    """Warnings: their reason and message."""

    @property
    def step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else (self.driver.step if self.driver else 0)

    @property
    def waits_for(self) -> str:
        """What the job waits for: the driver's status, or else the roles that are not ready."""
        if self.driver:
            return self.driver.waits_for
        missing = [f"{role.name} {role.ready}/{role.desired}" for role in self.roles if role.ready < role.desired]
        return ", ".join(missing) or self.message

    @property
    def eta_seconds(self) -> float | None:
        """Estimate the remaining time from the median of the last steps."""
        times = sorted(float(row["step_seconds"]) for row in self.steps[-9:] if row.get("step_seconds"))
        return times[len(times) // 2] * max(0, self.total_steps - self.step) if times else None


@dataclass(frozen=True)
class Change:
    """One thing to report: a line of text, and an object for programs."""

    text: str
    """Empty: another change shows it."""
    data: Row
    is_urgent: bool = False
    """Whether it must stay on the screen."""


def diff_snapshots(old: Snapshot, new: Snapshot) -> list[Change]:
    changes: list[Change] = []
    if new.phase != old.phase:
        changes.append(_format_phase(new))
    before = {role.name: (role.ready, role.desired) for role in old.roles}
    for role in () if new.phase in _FINAL_PHASES else new.roles:  # the end releases all of them
        if before.get(role.name) != (role.ready, role.desired):
            data = {"type": "role", **role.__dict__}
            changes.append(Change(f"{role.name}: {role.ready} of {role.desired} ready", data))
    new_failures = range(len(old.failures), len(new.failures))
    changes += [_format_failure(new.failures[index], new.failures[:index]) for index in new_failures]
    changes += [_format_problem(problem) for problem in new.problems if problem not in old.problems]
    changes += [_format_event(event, {old.message, new.message}) for event in new.events[len(old.events) :]]
    reported = {row["step"] for row in old.evals}
    changes += [_format_eval(row) for row in new.evals if row["step"] not in reported]
    last = old.steps[-1]["step"] if old.steps else 0
    if new.steps and new.steps[-1]["step"] < last:
        last = new.steps[-1]["step"]
        changes.append(Change(f"resumed after step {last}", {"type": "resumed", "step": last}))
    changes += [_format_step(row, new.total_steps) for row in new.steps if row["step"] > last]
    return changes


def _format_phase(new: Snapshot) -> Change:
    """The message of a failed job contains the error of the container that caused it; its log follows."""
    text = new.phase + (f": {new.message}" if new.message else "")
    if is_failed := new.phase == "Failed":
        causes = [failure for failure in new.failures if failure.error and failure.error in new.message]
        logs = [failure.log for failure in causes if failure.log]
        text += f"\n    log: {logs[-1]}" if logs else ""
    return Change(text, {"type": "phase", "phase": new.phase, "message": new.message}, is_urgent=is_failed)


def _format_failure(failure: Failure, earlier: tuple[Failure, ...]) -> Change:
    text = f"{failure.role}: {failure.pod} ended with exit code {failure.exit_code}"
    if failure.exit_code == ExitCode.USER and failure.error:
        text = ""  # it fails the job, whose message has the error
    elif (failure.role, failure.error) in [(other.role, other.error) for other in earlier]:
        text += ": the same error again"
    else:
        text += f": {failure.error}" if failure.error else ""
        text += f"\n    log: {failure.log}" if failure.log else ""
    return Change(text, {"type": "failure", **failure.__dict__}, is_urgent=True)


def _format_problem(problem: RewardProblem) -> Change:
    return Change(problem.describe(), {"type": "problem", **problem.model_dump()}, is_urgent=True)


def _format_event(event: str, shown: set[str]) -> Change:
    """`shown`: messages of phases. Events about problems of rewards, and about phases, repeat other changes."""
    reason, _, message = event.partition(": ")
    text = "" if message in shown or reason == conditions.REASON_INVALID_SAMPLES else event
    return Change(text, {"type": "event", "message": event}, is_urgent=reason == LearningReason.NO_ADVANTAGES)


def _format_eval(row: Row) -> Change:
    accuracy = row.get("accuracy")
    shown = "no accuracy" if accuracy is None else f"accuracy {accuracy:.3f}"
    return Change(f"evaluation after step {row['step']}: {shown}", row)


def _format_step(row: Row, total: int) -> Change:
    parts = [f"step {row['step']}/{total}"]
    parts += [form.format(row[key]) for key, form in _STEP_NUMBERS if row.get(key) is not None]
    if row.get("num_invalid"):
        parts.append(f"{row['num_invalid']} invalid")
    return Change("  ".join(parts), row)


class RunHistory:
    """Restarts by role, and failures, including those of deleted Pods."""

    def __init__(self, find_log: Callable[[Manifest, str], Path] | None = None) -> None:
        """`find_log` returns the path of the log of a Pod's container."""
        self._find_log = find_log
        self.failures: list[Failure] = []
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
            how = (terminated["exitCode"], terminated["reason"], terminated["message"])
            log = str(self._find_log(pod, container)) if self._find_log else ""
            self.failures.append(Failure(name_of(pod), role_of(pod), container, *how, log))

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
