"""A Pod's status in Kubernetes' JSON form, from the records of its containers. Pure.

Invariant: a condition's transition time changes only with its status, so an unchanged Pod causes no write.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rljob_cli.manifests import timestamp
from rljob_core.backend import Manifest

EXIT_OF_SIGNAL = 128


@dataclass
class ContainerRecord:
    name: str
    is_init: bool = False
    """Runs before the main containers, to completion unless it is a sidecar."""
    is_sidecar: bool = False
    has_started: bool = False
    """It has started once: the containers after a sidecar need not wait any longer."""
    state: Manifest = field(default_factory=lambda: {"waiting": {"reason": "ContainerCreating"}})
    last_state: Manifest = field(default_factory=dict)
    restart_count: int = 0
    ready: bool = False
    started: bool = False
    finished: bool = False
    """It has ended and will not restart."""

    def record_waiting(self, reason: str, message: str = "") -> None:
        if "terminated" in self.state:
            self.last_state = self.state
        self.state = {"waiting": {"reason": reason, "message": message}}

    def record_running(self, now: datetime) -> None:
        self.state = {"running": {"startedAt": timestamp(now)}}
        self.ready = self.started = self.finished = False

    def record_terminated(self, code: int, message: str, now: datetime) -> None:
        started = self.state.get("running", {}).get("startedAt", timestamp(now))
        terminated = {
            "exitCode": code,
            "reason": "Completed" if code == 0 else "Error",
            "message": message if code else "",
            "startedAt": started,
            "finishedAt": timestamp(now),
        }
        if code > EXIT_OF_SIGNAL:
            terminated["signal"] = code - EXIT_OF_SIGNAL
        self.state = {"terminated": terminated}
        self.ready = self.started = False

    @property
    def exit_code(self) -> int | None:
        code: int | None = self.state.get("terminated", {}).get("exitCode")
        return code

    @property
    def is_done_init(self) -> bool:
        """Whether the other containers need not wait for this init container."""
        return self.is_init and (self.has_started if self.is_sidecar else self.exit_code == 0)

    def to_status(self) -> Manifest:
        return {
            "name": self.name,
            "ready": self.ready or self.is_done_init,
            "started": self.started,
            "restartCount": self.restart_count,
            "state": self.state,
            "lastState": self.last_state,
        }


def build_pod_status(
    old: Manifest, address: str, records: list[ContainerRecord], now: datetime, message: str = ""
) -> Manifest:
    """Build the status. `message`: why the Pod cannot be scheduled yet; else empty."""
    main = [record for record in records if not record.is_init]
    initialized = all(record.is_done_init for record in records if record.is_init)
    lasting = [record for record in records if not record.is_init or record.is_sidecar]
    ready = initialized and bool(main) and all(record.ready for record in lasting)
    waiting = " ".join(record.name for record in lasting if not record.ready)
    unready = "" if ready else f"containers with unready status: [{waiting}]"
    conditions: list[tuple[str, bool, str]] = [
        ("PodScheduled", not message, message),
        ("Initialized", initialized, ""),
        ("ContainersReady", ready, unready),
        ("Ready", ready, unready),
    ]
    status: dict[str, Any] = {
        "phase": _phase(records, main, initialized),
        "podIP": address,
        "podIPs": [{"ip": address}],
        "hostIP": address,
        "startTime": old.get("startTime", timestamp(now)),
        "conditions": [_condition(old, *condition, now) for condition in conditions],
        "containerStatuses": [record.to_status() for record in main],
    }
    if len(main) != len(records):
        status["initContainerStatuses"] = [record.to_status() for record in records if record.is_init]
    return status


def _phase(records: list[ContainerRecord], main: list[ContainerRecord], initialized: bool) -> str:
    if any(r.is_init and not r.is_sidecar and r.finished and r.exit_code != 0 for r in records):
        return "Failed"
    if not initialized:
        return "Pending"
    if all(record.finished for record in main):
        return "Succeeded" if all(record.exit_code == 0 for record in main) else "Failed"
    has_started = any("running" in r.state or "terminated" in r.state or r.restart_count or r.last_state for r in main)
    return "Running" if has_started else "Pending"


def _condition(old: Manifest, type_: str, holds: bool, message: str, now: datetime) -> Manifest:
    status = "True" if holds else "False"
    condition = {"type": type_, "status": status, "lastTransitionTime": timestamp(now)}
    for previous in old.get("conditions", []):
        if previous["type"] == type_ and previous["status"] == status:
            condition["lastTransitionTime"] = previous["lastTransitionTime"]
    if message:
        condition["message"] = message
    return condition
