"""One bad day: a namespace of its own, a job that trains nothing in it, and what the operator and `kubectl rljob
explain` say of it.

Owns how words are read and how long to wait for them. Leaves making the trouble and mending it to the tests.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from harness import Cluster, Manifest, execute, say, wait_for

TROUBLE_SECONDS = 300.0
MEND_SECONDS = 600.0
"""Controllers that were refused, and containers that crash, are tried again after ever longer breaks."""
_JOB = yaml.safe_load((Path(__file__).parent / "job.yaml").read_text())


@dataclass(frozen=True)
class Day:
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
        """Apply job.yaml with some fields of its spec changed, maps field by field."""
        manifest = copy.deepcopy(_JOB)
        manifest["metadata"] = {"name": name}
        _change(manifest["spec"], changes)
        self.apply(manifest)

    def get(self, kind: str, name: str) -> Manifest:
        found: Manifest = json.loads(self.kubectl("get", kind, name, "-o", "json"))
        return found

    def pods(self) -> list[Manifest]:
        """Those that hold a node."""
        found = json.loads(self.kubectl("get", "pods", "-o", "json"))["items"]
        return [pod for pod in found if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")]

    def condition(self, type_: str, name: str = "job", kind: str = "rljob") -> Manifest:
        conditions = (self.get(kind, name).get("status") or {}).get("conditions") or []
        return next((c for c in conditions if c["type"] == type_), {})

    def warnings(self, name: str = "job", kind: str = "RLJob") -> list[Manifest]:
        about = f"involvedObject.kind={kind},involvedObject.name={name},type=Warning"
        found = json.loads(self.kubectl("get", "events", "-o", "json", f"--field-selector={about}"))
        return list(found["items"])

    def wait_for_trouble(
        self,
        reason: str,
        words: Sequence[str],
        *,
        name: str = "job",
        condition: str = "Running",
        kind: str = "RLJob",
    ) -> str:
        """The message of the Warning that has this reason and these words; the condition must say the same."""
        say(f"{self.namespace}/{name}: waiting for {reason}")

        def look() -> str:
            said = self.condition(condition, name, kind.lower()).get("message", "")
            for event in self.warnings(name, kind):
                message = str(event["message"])
                if event["reason"] == reason and all(word in message for word in words) and message in said:
                    return message
            return ""

        try:
            found: str = wait_for(f"{reason} with {list(words)}", look, TROUBLE_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from None
        return found

    def wait_until_well(self, trouble: str = "", name: str = "job") -> None:
        """The job runs, and nothing is left of the trouble's words in its conditions and in explain."""
        say(f"{self.namespace}/{name}: mended; waiting until it runs")

        def is_well() -> bool:
            running = self.condition("Running", name)
            return running.get("status") == "True" and running["message"] == "all Pods are ready"

        try:
            wait_for(f"{name} that runs", is_well, MEND_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from None
        said = self.explain(name)
        assert trouble not in said["remedies"], "what is mended is no remedy any more"
        assert not said["why"], said["why"]

    def explain(self, name: str = "job") -> Manifest:
        found: Manifest = json.loads(self.rljob("explain", name, "-o", "json"))
        return found

    def rljob(self, *arguments: str) -> str:
        """`kubectl rljob`: kubectl takes a plugin's options after its name alone."""
        program, *options = self.cluster.kubectl_command
        return execute(program, "rljob", *arguments, "-n", self.namespace, *options).decode()

    def describe(self) -> str:
        objects, pods = ("describe", "rljob,rewardmodel"), ("get", "pods", "-o", "wide")
        looks = (objects, pods, ("get", "events", "--sort-by=.lastTimestamp"))
        return "\n".join(self.kubectl(*look)[-6000:] for look in looks)


def _change(spec: Manifest, changes: Manifest) -> None:
    for field, value in changes.items():
        if isinstance(value, dict) and isinstance(spec.get(field), dict):
            _change(spec[field], value)
        else:
            spec[field] = value
