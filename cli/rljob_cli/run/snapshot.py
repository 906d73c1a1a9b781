"""A run as it is at one moment, for every kind of output, and what changed between two. Pure but for `read_rows`.

Leaves drawing to live.py and the end to report.py. Invariant: each step, state and failure is told exactly once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rljob_api.manifest.status import RLJobStatus
from rljob_api.wire.contract import LABEL_REWARD, LABEL_ROLE
from rljob_api.wire.protocol import DriverStatus
from rljob_cli.local.manifests import Manifest, is_ready, labels_of, name_of
from rljob_cli.run.reward_rows import RewardRow

Row = dict[str, Any]
ROLE_ORDER = ("head", "trainer", "rollout", "reward")


@dataclass(frozen=True)
class RoleRow:
    """Pods of one role."""

    name: str
    desired: int
    ready: int
    restarts: int


@dataclass(frozen=True)
class Failure:
    """One container that ended badly, once."""

    pod: str
    role: str
    container: str
    exit_code: int
    reason: str
    message: str
    """Its last lines of log."""


@dataclass(frozen=True)
class Snapshot:
    """All that an output may show."""

    name: str = ""
    phase: str = ""
    message: str = ""
    """Of the condition that the phase was derived from."""
    roles: tuple[RoleRow, ...] = ()
    rewards: tuple[RewardRow, ...] = ()
    driver: DriverStatus | None = None
    steps: tuple[Row, ...] = ()
    evals: tuple[Row, ...] = ()
    total_steps: int = 0
    elapsed_seconds: float = 0.0
    failures: tuple[Failure, ...] = ()
    events: tuple[str, ...] = field(default=())

    @property
    def step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else (self.driver.step if self.driver else 0)

    @property
    def waits_for(self) -> str:
        """What the job waits for, in words: the driver's answer, else which role is not there yet."""
        if self.driver:
            return self.driver.waits_for
        missing = [f"{role.name} {role.ready}/{role.desired}" for role in self.roles if role.ready < role.desired]
        return f"Pods to become ready: {', '.join(missing)}" if missing else self.message

    @property
    def eta_seconds(self) -> float | None:
        """Median of the last steps' times, for the steps that are left."""
        times = sorted(float(row["step_seconds"]) for row in self.steps[-9:] if row.get("step_seconds"))
        return times[len(times) // 2] * max(0, self.total_steps - self.step) if times else None


@dataclass(frozen=True)
class Change:
    """One thing to tell: a line for people, an object for programs."""

    text: str
    data: Row


def changes(old: Snapshot, new: Snapshot) -> list[Change]:
    """What happened between two snapshots, in the order to tell it."""
    told: list[Change] = []
    if new.phase != old.phase:
        text = new.phase + (f": {new.message}" if new.message else "")
        told.append(Change(text, {"type": "phase", "phase": new.phase, "message": new.message}))
    before = {role.name: role for role in old.roles}
    for role in new.roles:
        was = before.get(role.name)
        if was is None or (role.ready, role.desired) != (was.ready, was.desired):
            data = {"type": "role", **role.__dict__}
            told.append(Change(f"{role.name}: {role.ready} of {role.desired} ready", data))
    told += [_tell_failure(failure) for failure in new.failures[len(old.failures) :]]
    told += [Change(event, {"type": "event", "message": event}) for event in new.events[len(old.events) :]]
    seen = {row["step"] for row in old.evals}
    told += [_tell_eval(row) for row in new.evals if row["step"] not in seen]
    last = old.steps[-1]["step"] if old.steps else 0
    if new.steps and new.steps[-1]["step"] < last:
        last = new.steps[-1]["step"]
        told.append(Change(f"resumed after step {last}", {"type": "resumed", "step": last}))
    told += [_tell_step(row, new.total_steps) for row in new.steps if row["step"] > last]
    return told


def _tell_failure(failure: Failure) -> Change:
    lines = "".join(f"\n    {line}" for line in failure.message.splitlines()[-8:])
    return Change(
        f"{failure.role}: {failure.pod} ended with exit code {failure.exit_code}{lines}",
        {"type": "failure", **failure.__dict__},
    )


def _tell_eval(row: Row) -> Change:
    accuracy = row.get("accuracy")
    shown = "no accuracy" if accuracy is None else f"accuracy {accuracy:.3f}"
    return Change(f"evaluation after step {row['step']}: {shown}", row)


def _tell_step(row: Row, total: int) -> Change:
    parts = [f"step {row['step']}/{total}"]
    for key, form in (
        ("reward", "reward {:.3f}"),
        ("tokens_per_second", "{:.0f} tokens/s"),
        ("step_seconds", "{:.1f} s"),
    ):
        if row.get(key) is not None:
            parts.append(form.format(row[key]))
    if row.get("num_invalid"):
        parts.append(f"{row['num_invalid']} invalid")
    return Change("  ".join(parts), row)


def read_rows(path: Path) -> list[Row]:
    """Whole lines of a JSONL file that somebody may be writing to; a torn or foreign last line is left for later."""
    try:
        text = path.read_text()
    except OSError:
        return []
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
    return rows


def role_of(pod: Manifest) -> str:
    """head, trainer, rollout or reward-NAME."""
    labels = labels_of(pod)
    role = labels.get(LABEL_ROLE, "other")
    return f"{role}-{labels[LABEL_REWARD]}" if LABEL_REWARD in labels else role


class RunHistory:
    """Remembers what Pods leave behind when they go: restarts by role, and failures."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self._restarts: dict[str, tuple[str, int]] = {}
        self._seen: set[tuple[str, str, str]] = set()

    def record(self, pods: list[Manifest]) -> None:
        for pod in pods:
            statuses = pod.get("status", {}).get("containerStatuses", [])
            uid, count = pod["metadata"].get("uid", ""), 0
            for status in statuses:
                for state in (status.get("lastState", {}), status.get("state", {})):
                    self._record_end(pod, status["name"], state.get("terminated"))
                count += int(status.get("restartCount", 0))
            # A Pod that failed for good was, or will be, replaced by another: that is a restart of its role too.
            count += pod.get("status", {}).get("phase") == "Failed"
            self._restarts[uid] = (role_of(pod), count)

    def _record_end(self, pod: Manifest, container: str, terminated: Manifest | None) -> None:
        # A Pod that is asked to go ends by a signal; that is no failure.
        if not terminated or terminated["exitCode"] == 0 or pod["metadata"].get("deletionTimestamp"):
            return
        key = (pod["metadata"].get("uid", ""), container, terminated["finishedAt"])
        if key not in self._seen:
            self._seen.add(key)
            self.failures.append(
                Failure(
                    name_of(pod),
                    role_of(pod),
                    container,
                    terminated["exitCode"],
                    terminated.get("reason", ""),
                    terminated.get("message", ""),
                )
            )

    @property
    def restarts(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for role, count in self._restarts.values():
            total[role] = total.get(role, 0) + count
        return total


def build_roles(status: RLJobStatus, pods: list[Manifest], restarts: dict[str, int]) -> tuple[RoleRow, ...]:
    """Roles in their usual order: wanted as the status says, ready as the Pods are."""
    desired = {role.name: role.desired for role in status.roles}
    ready: dict[str, int] = dict.fromkeys(desired, 0)
    for pod in pods:
        role = role_of(pod)
        ready[role] = ready.get(role, 0) + is_ready(pod)
    names = sorted(ready, key=lambda name: (_place(name), name))
    return tuple(RoleRow(n, desired.get(n, 0), ready[n], restarts.get(n, 0)) for n in names)


def _place(role: str) -> int:
    kind = role.partition("-")[0]
    return ROLE_ORDER.index(kind) if kind in ROLE_ORDER else len(ROLE_ORDER)


def message_of(status: RLJobStatus) -> str:
    """The message of the condition that the phase stands for; else of any that holds."""
    holding = [c for c in status.conditions if c.status == "True"]
    named = [c.message for c in holding if c.type == status.phase]
    return (named or [c.message for c in holding if c.message] or [""])[0]
