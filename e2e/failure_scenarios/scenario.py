"""One failure scenario: a namespace, a job in it that trains nothing, and what users read about the failure.

Owns how messages are read and how long to wait for them. The tests cause the failure and fix it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from harness import Cluster, Manifest, log_step, wait_for

WARNING_TIMEOUT_SECONDS = 300.0
RECOVERY_TIMEOUT_SECONDS = 600.0
"""Rejected controllers and crashing containers are retried with a growing backoff."""
_JOB = yaml.safe_load((Path(__file__).parent / "job.yaml").read_text())


@dataclass(frozen=True)
class Scenario:
    """What a user sees in one namespace."""

    cluster: Cluster
    namespace: str

    def kubectl(self, *arguments: str, input: bytes | None = None) -> str:
        return self.cluster.kubectl("-n", self.namespace, *arguments, input=input).decode()

    def apply(self, *manifests: Manifest) -> None:
        self.kubectl(
            "apply", "--server-side", "--force-conflicts", "-f", "-", input=yaml.safe_dump_all(manifests).encode()
        )

    def submit(self, name: str = "job", **changes: Any) -> None:
        """Apply job.yaml with some fields of its spec changed; maps are merged."""
        manifest = copy.deepcopy(_JOB)
        manifest["metadata"] = {"name": name}
        _merge(manifest["spec"], changes)
        self.apply(manifest)

    def get(self, *arguments: str) -> Manifest:
        found: Manifest = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return found

    def pods(self) -> list[Manifest]:
        """The Pods that have not ended."""
        pods = self.get("pods")["items"]
        return [pod for pod in pods if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")]

    def condition(self, type_: str, name: str = "job", kind: str = "rljob") -> Manifest:
        conditions = (self.get(kind, name).get("status") or {}).get("conditions") or []
        return next((c for c in conditions if c["type"] == type_), {})

    def wait_for_warning(
        self,
        reason: str,
        fragments: Sequence[str],
        *,
        name: str = "job",
        condition: str = "Running",
        kind: str = "RLJob",
    ) -> str:
        """Return the message of the Warning with this reason and these fragments; the condition must contain it."""
        log_step(f"{self.namespace}/{name}: waiting for {reason}")
        selector = f"involvedObject.kind={kind},involvedObject.name={name},type=Warning,reason={reason}"

        def find_message() -> str:
            text = self.condition(condition, name, kind.lower()).get("message", "")
            messages = [str(event["message"]) for event in self.get("events", f"--field-selector={selector}")["items"]]
            matches = (m for m in messages if m in text and all(fragment in m for fragment in fragments))
            return next(matches, "")

        return str(self._wait_for(f"{reason} with {list(fragments)}", find_message, WARNING_TIMEOUT_SECONDS))

    def wait_until_healthy(self, warning: str = "", name: str = "job") -> None:
        """Wait until the job runs; the warning must have disappeared from `kubectl rljob explain`."""
        log_step(f"{self.namespace}/{name}: fixed; waiting until it runs")

        def is_healthy() -> bool:
            running = self.condition("Running", name)
            return running.get("status") == "True" and running["message"] == "all Pods are ready"

        self._wait_for(f"{name} running", is_healthy, RECOVERY_TIMEOUT_SECONDS)
        explanation = self.explain(name)
        assert warning not in explanation["remedies"], "the cause was fixed"
        assert not explanation["why"], explanation["why"]

    def _wait_for(self, what: str, condition: Callable[[], Any], timeout_seconds: float) -> Any:
        try:
            return wait_for(what, condition, timeout_seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from None

    def explain(self, name: str = "job") -> Manifest:
        found: Manifest = json.loads(self.rljob("explain", name, "-o", "json"))
        return found

    def rljob(self, *arguments: str) -> str:
        return self.cluster.rljob(*arguments, namespace=self.namespace)

    def describe(self) -> str:
        objects, pods = ("describe", "rljob,rewardmodel"), ("get", "pods", "-o", "wide")
        events = ("get", "events", "--sort-by=.lastTimestamp")
        return "\n".join(self.kubectl(*command)[-6000:] for command in (objects, pods, events))


def _merge(spec: Manifest, changes: Manifest) -> None:
    for field, value in changes.items():
        if isinstance(value, dict) and isinstance(spec.get(field), dict):
            _merge(spec[field], value)
        else:
            spec[field] = value
