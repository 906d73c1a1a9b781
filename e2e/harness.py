"""What the end-to-end tests do to a cluster: kubectl, helm, a claim with model and data, and one RLJob watched as a
user would watch it.

Owns the words of the commands and how long to wait. The cluster is the one-machine one of `cluster/`, unless
E2E_CONTEXT names a context of the user's own; E2E_CLAIM then names a ReadWriteMany claim to put the files on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
NAMESPACE = "rljob-e2e"
OPERATOR_NAMESPACE = "rljob-system"
CLAIM = os.environ.get("E2E_CLAIM", "rljob-e2e")
LOADER = "loader"
DEADLINE_SECONDS = 900
_POLL_SECONDS = 1.0
Manifest = dict[str, Any]


class CommandError(AssertionError):
    """A command that must succeed did not."""


def execute(*command: str | Path, input: bytes | None = None) -> bytes:
    """Run a command to its end. Raises CommandError with what it said."""
    done = subprocess.run([str(part) for part in command], input=input, capture_output=True, check=False)
    if done.returncode:
        raise CommandError(
            f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stderr.decode()[-4000:]}"
        )
    return done.stdout


def say(line: str) -> None:
    """What happens now: the whole takes a quarter of an hour, and silence looks like a fault."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


def wait_for(what: str, condition: Callable[[], Any], seconds: float = DEADLINE_SECONDS) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(_POLL_SECONDS)
    raise AssertionError(f"{what} did not come within {seconds:.0f} s")


@dataclass(frozen=True)
class Cluster:
    """A cluster with RLJob installed, by its kubectl."""

    kubectl_command: tuple[str, ...]
    helm_command: tuple[str, ...]
    is_local: bool

    def kubectl(self, *arguments: str | Path, input: bytes | None = None) -> bytes:
        return execute(*self.kubectl_command, *arguments, input=input)

    def get(self, *arguments: str) -> Manifest:
        """One object, or a List."""
        found: Manifest = json.loads(self.kubectl("get", "-n", NAMESPACE, "-o", "json", *arguments))
        return found

    def find(self, kind: str, name: str) -> Manifest | None:
        return next(iter(self.get(kind, f"--field-selector=metadata.name={name}")["items"]), None)

    def apply(self, *manifests: Manifest) -> None:
        self.kubectl("apply", "--server-side", "-f", "-", input=yaml.safe_dump_all(manifests).encode())

    def pods(self, job: str, role: str) -> list[Manifest]:
        """Pods of a role that are not on their way out, oldest first."""
        found = self.get("pods", "-l", f"rljob.dev/job={job},rljob.dev/role={role}")["items"]
        pods = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def events(self, name: str) -> list[Manifest]:
        return list(self.get("events", f"--field-selector=involvedObject.name={name}")["items"])

    def read_file(self, path: str) -> str | None:
        """A file of the claim; None when it is not there."""
        command = ("exec", "-n", NAMESPACE, LOADER, "--", "cat", f"/claim/{path}")
        try:
            return self.kubectl(*command).decode()
        except CommandError:
            return None


class Job:
    """One RLJob on the cluster."""

    def __init__(self, cluster: Cluster, manifest: Manifest) -> None:
        self.cluster = cluster
        self.name: str = manifest["metadata"]["name"]
        say(f"{self.name}: applying it")
        self.cluster.kubectl("delete", "rljob", "-n", NAMESPACE, self.name, "--ignore-not-found", "--wait")
        self.cluster.kubectl("exec", "-n", NAMESPACE, LOADER, "--", "rm", "-rf", f"/claim/{self.name}")
        self.cluster.apply(manifest)

    def read(self) -> Manifest:
        return self.cluster.get("rljob", self.name)

    @property
    def status(self) -> Manifest:
        found: Manifest = self.read().get("status") or {}
        return found

    def condition(self, type_: str) -> Manifest:
        return next((c for c in self.status.get("conditions", []) if c["type"] == type_), {})

    def event_reasons(self) -> set[str]:
        return {str(event["reason"]) for event in self.cluster.events(self.name)}

    def wait_for(self, what: str, condition: Callable[[], Any], seconds: float = DEADLINE_SECONDS) -> Any:
        """As `wait_for`, but a job that has ended is told at once, with what its Pods logged last."""
        say(f"{self.name}: waiting for {what}")

        def look() -> Any:
            failed = self.condition("Failed")
            if failed.get("status") == "True":
                raise AssertionError(f"{self.name} failed before {what}: {failed['message']}\n{self.describe()}")
            has_succeeded = self.condition("Succeeded").get("status") == "True"  # asked first: the next may come true
            found = condition()
            if not found and has_succeeded:
                raise AssertionError(f"{self.name} succeeded before {what}: the fault came too late to be one")
            return found

        try:
            return wait_for(f"{self.name}: {what}", look, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from None

    def wait_for_step(self, step: int) -> None:
        self.wait_for(f"step {step}", lambda: self.step() >= step)

    def step(self) -> int:
        """The newest step of the run's own metrics, which a poll of the status may lag behind."""
        lines = (self.cluster.read_file(f"{self.name}/metrics.jsonl") or "").splitlines()
        return max((json.loads(line)["step"] for line in lines if '"type": "step"' in line), default=0)

    def wait_for_success(self) -> Manifest:
        """The driver's own summary."""
        self.wait_for("Succeeded", lambda: self.condition("Succeeded").get("status") == "True")
        say(f"{self.name}: {self.condition('Succeeded')['message']}")
        text = self.cluster.read_file(f"{self.name}/driver-summary.json")
        assert text, "the driver left no summary on the claim"
        summary: Manifest = json.loads(text)
        return summary

    def delete_pod(self, role: str) -> None:
        """Delete the oldest Pod of a role, and wait until another is there in its place."""
        victim = self.wait_for(f"a {role} Pod to delete", lambda: self.cluster.pods(self.name, role))[0]
        self.cluster.kubectl("delete", "pod", "-n", NAMESPACE, victim["metadata"]["name"], "--wait=false")
        uid = victim["metadata"]["uid"]

        def is_replaced() -> bool:
            uids = {pod["metadata"]["uid"] for pod in self.cluster.pods(self.name, role)}
            return bool(uids) and uid not in uids

        self.wait_for(f"a new {role} Pod", is_replaced)

    def describe(self) -> str:
        parts = [self.cluster.kubectl("describe", "rljob", "-n", NAMESPACE, self.name).decode()[-5000:]]
        parts.append(self.cluster.kubectl("get", "pods", "-n", NAMESPACE, "-o", "wide").decode())
        for pod in self.cluster.get("pods", "-l", f"rljob.dev/job={self.name}")["items"]:
            name = pod["metadata"]["name"]
            try:
                log = self.cluster.kubectl("logs", "-n", NAMESPACE, name, "--tail=25").decode()
            except CommandError as error:
                log = str(error)
            parts.append(f"--- {name}\n{log[-3000:]}")
        return "\n".join(parts)


def python(*arguments: str | Path) -> None:
    """Run one of the project's own programs with its output in sight: cluster, images and models take minutes."""
    if subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, check=False).returncode:
        raise CommandError(f"python {' '.join(map(str, arguments))} failed; its output is above")
