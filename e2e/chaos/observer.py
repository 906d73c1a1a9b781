"""What a job shows while it runs: its steps, and all that its status, its Pods and its events say of a fault."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import CommandError, Job, Manifest, wait_for

from chaos.plan import Injection
from chaos.report import Outcome
from rljob_api.run.folder import FILE_METRICS
from rljob_api.run.metrics import read_metrics

_POLL_SECONDS = 0.5
_REPLACED = frozenset({"containers", "restarts"})
_ALARMS = _REPLACED | {"hung"}
"""What a fault that is waited out must not change."""


@dataclass
class Observer:
    """Follows one job. Its steps are read from the claim's folder, everything else from the API server."""

    job: Job
    folder: Path
    """The run's files."""
    limit_seconds: float
    """For one fault."""

    def step(self) -> int:
        return read_metrics(self.folder / FILE_METRICS).last_step

    def look(self) -> dict[str, Any]:
        """Return what a fault changes, by what it is called in a report. Empty: no answer."""
        with suppress(CommandError):
            pods = self.job.cluster.get("pods", "-l", f"rljob.dev/job={self.job.name}", "--request-timeout=5s")["items"]
            status = self.job.cluster.get("rljob", self.job.name, "--request-timeout=5s").get("status") or {}
            progress = status.get("progress") or {}
            conditions = {each["type"]: (each["status"], each["reason"]) for each in status.get("conditions", [])}
            return {
                "hung": bool(progress.get("hung")),
                "outage": bool(progress.get("outages")),
                "condition": conditions,
                "restarts": sum(role.get("restarts", 0) for role in status.get("roles", [])),
                "containers": sorted(_count_restarts(pod) for pod in pods),
                "readiness": sorted((pod["metadata"]["name"], _is_ready(pod)) for pod in pods if not _has_ended(pod)),
            }
        return {}

    def look_until_answered(self) -> dict[str, Any]:
        """Return the first answer of `look`: the API server may be busy, as after the fault before."""
        found: dict[str, Any] = wait_for("an answer of the API server", self.look)
        return found

    def follow(
        self, injection: Injection, before: dict[str, Any], at_step: int, has_successor: Callable[[], bool]
    ) -> Outcome:
        """Return once the job has recovered, or the limit has passed. `before`: what `look` returned. `has_successor`:
        whether the process that was struck is replaced; it also shows a fault that the status does not."""
        injected_at, fault = time.monotonic(), injection.fault
        detected: float | None = None
        found, lowest, recovered, alarms = "", at_step, None, set[str]()
        while (now := time.monotonic() - injected_at) < self.limit_seconds:
            step, seen = self.step(), self.look()
            lowest = min(lowest, step)
            changed = [name for name, value in seen.items() if value != before[name]]
            alarms |= _ALARMS & set(changed) if fault.is_waited_out else set()
            is_replaced = has_successor() and (not fault.is_replaced or bool(_REPLACED & set(changed)))
            if detected is None and (changed or (fault.action in ("kill", "freeze") and is_replaced)):
                detected, found = now, ", ".join(changed) or "a new process"
            if step > at_step and seen and is_replaced and self.is_whole(seen) and now > fault.seconds:
                recovered = now
                break
            time.sleep(_POLL_SECONDS)
        alarm = ", ".join(sorted(alarms))
        return Outcome(fault.name, at_step, detected, found, recovered, at_step - lowest, alarm)

    @staticmethod
    def is_whole(seen: dict[str, Any]) -> bool:
        return all(is_ready for _, is_ready in seen["readiness"]) and not seen["hung"] and not seen["outage"]


def _count_restarts(pod: Manifest) -> tuple[str, str, int]:
    statuses = pod["status"].get("containerStatuses", [])
    return pod["metadata"]["name"], pod["metadata"]["uid"], sum(each["restartCount"] for each in statuses)


def _has_ended(pod: Manifest) -> bool:
    """Whether nothing of it runs again: a failed head stays, for its log, next to the one that replaced it."""
    return pod["status"].get("phase") in ("Failed", "Succeeded")


def _is_ready(pod: Manifest) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
