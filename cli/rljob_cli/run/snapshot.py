"""A run at one moment, for every kind of output, and the changes between two such snapshots. Pure.

Invariant: each step, state and failure is reported exactly once.
"""

from collections import Counter
from dataclasses import dataclass

from rljob_api.manifest.status import RLJobStatus
from rljob_api.wire.protocol import DriverStatus
from rljob_cli.manifests import is_ready, role_of
from rljob_cli.run.reward_rows import RewardRow
from rljob_cli.run.runfolder import Row
from rljob_operator.backend import Manifest
from rljob_operator.plan.observed_job import is_terminating, name_of

_ROLE_ORDER = ("head", "trainer", "rollout", "reward")
_MAX_FAILURE_LINES = 8
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
    """The last lines of its log."""


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
    events: tuple[str, ...] = ()

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
    data: Row


def diff_snapshots(old: Snapshot, new: Snapshot) -> list[Change]:
    changes: list[Change] = []
    if new.phase != old.phase:
        text = new.phase + (f": {new.message}" if new.message else "")
        changes.append(Change(text, {"type": "phase", "phase": new.phase, "message": new.message}))
    before = {role.name: (role.ready, role.desired) for role in old.roles}
    for role in new.roles:
        if before.get(role.name) != (role.ready, role.desired):
            data = {"type": "role", **role.__dict__}
            changes.append(Change(f"{role.name}: {role.ready} of {role.desired} ready", data))
    changes += [_format_failure(failure) for failure in new.failures[len(old.failures) :]]
    changes += [Change(event, {"type": "event", "message": event}) for event in new.events[len(old.events) :]]
    reported = {row["step"] for row in old.evals}
    changes += [_format_eval(row) for row in new.evals if row["step"] not in reported]
    last = old.steps[-1]["step"] if old.steps else 0
    if new.steps and new.steps[-1]["step"] < last:
        last = new.steps[-1]["step"]
        changes.append(Change(f"resumed after step {last}", {"type": "resumed", "step": last}))
    changes += [_format_step(row, new.total_steps) for row in new.steps if row["step"] > last]
    return changes


def _format_failure(failure: Failure) -> Change:
    lines = "".join(f"\n    {line}" for line in failure.message.splitlines()[-_MAX_FAILURE_LINES:])
    text = f"{failure.role}: {failure.pod} ended with exit code {failure.exit_code}{lines}"
    return Change(text, {"type": "failure", **failure.__dict__})


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

    def __init__(self) -> None:
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
            self.failures.append(Failure(name_of(pod), role_of(pod), container, *how))

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
