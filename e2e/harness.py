"""Drives a cluster for the end-to-end tests: kubectl, helm, a claim with model and data, and one RLJob per test.

Owns the command lines and the timeouts. The cluster is the one-machine cluster of `cluster/`, unless E2E_CONTEXT names
a context of your kubeconfig. E2E_CLAIM then names a ReadWriteMany claim for the files.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow.parquet as pq
import yaml

from rljob_api.run.metrics import Metrics, parse_metrics
from rljob_api.run.summaries import DriverSummary

ROOT = Path(__file__).parents[1]
NAMESPACE = "rljob-e2e"
OPERATOR_NAMESPACE = "rljob-system"
CLAIM = os.environ.get("E2E_CLAIM", "rljob-e2e")
LOADER = "loader"
TIMEOUT_SECONDS = 900
_POLL_SECONDS = 1.0
_VALUES = {"replicas": "2", "features.forceDeletion": "true", "features.agentSandbox": "true"}
"""Values of the chart, in all tests."""
Manifest = dict[str, Any]


class CommandError(AssertionError):
    """A command that must succeed failed."""


def execute(*command: str | Path, input: bytes | None = None) -> bytes:
    """Return the output of a command. Raise CommandError with its error output if it fails."""
    done = subprocess.run([str(part) for part in command], input=input, capture_output=True)
    if done.returncode:
        text = done.stderr.decode()[-4000:]
        raise CommandError(f"{' '.join(map(str, command))}: exit code {done.returncode}:\n{text}")
    return done.stdout


def python(*arguments: str | Path) -> None:
    """Run one of the project's programs with visible output: cluster, images and models take minutes."""
    if subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT).returncode:
        raise CommandError(f"python {' '.join(map(str, arguments))} failed; see its output above")


def log_step(line: str) -> None:
    """Print what happens now; a complete run takes a quarter of an hour."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


def wait_for(what: str, condition: Callable[[], Any], timeout_seconds: float = TIMEOUT_SECONDS) -> Any:
    """Return the first true value of `condition`."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(_POLL_SECONDS)
    raise AssertionError(f"{what}: not seen within {timeout_seconds:.0f} s")


@dataclass(frozen=True)
class Cluster:
    """A cluster with RLJob installed, accessed by kubectl."""

    kubectl_command: tuple[str, ...]
    helm_command: tuple[str, ...]
    is_local: bool

    def kubectl(self, *arguments: str | Path, input: bytes | None = None) -> bytes:
        return execute(*self.kubectl_command, *arguments, input=input)

    def get(self, *arguments: str) -> Manifest:
        """Return one object, or a List."""
        found: Manifest = json.loads(self.kubectl("get", "-n", NAMESPACE, "-o", "json", *arguments))
        return found

    def apply(self, *manifests: Manifest) -> None:
        self.kubectl("apply", "--server-side", "-f", "-", input=yaml.safe_dump_all(manifests).encode())

    def pods(self, job: str, role: str) -> list[Manifest]:
        """Return the Pods of a role that are not terminating, oldest first."""
        found = self.get("pods", "-l", f"rljob.dev/job={job},rljob.dev/role={role}")["items"]
        pods = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def rljob(self, *arguments: str, namespace: str = NAMESPACE) -> str:
        """Run `kubectl rljob`; kubectl accepts a plugin's options only after its name, and finds it on PATH."""
        program, *options = self.kubectl_command
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        command = ("env", f"PATH={path}", program, "rljob", *arguments, "-n", namespace, *options)
        return execute(*command).decode()

    def in_loader(self, *command: str, input: bytes | None = None) -> bytes:
        """Run a command in the Pod that mounts the claim at /claim."""
        stdin = ("-i",) if input is not None else ()
        return self.kubectl("exec", *stdin, "-n", NAMESPACE, LOADER, "--", *command, input=input)

    def unpack_on_claim(self, archive: bytes) -> None:
        self.in_loader("tar", "x", "--no-same-owner", "-C", "/claim", input=archive)

    def read_file(self, path: str) -> str | None:
        """Return a file of the claim; None if it does not exist."""
        try:
            return self.in_loader("cat", f"/claim/{path}").decode()
        except CommandError:
            return None


def install(cluster: Cluster, values: Mapping[str, str] = MappingProxyType({})) -> None:
    """Install or upgrade the chart with these values only, and wait until the operator's new Pods are ready."""
    sets = [part for name, value in (_VALUES | values).items() for part in ("--set", f"{name}={value}")]
    if cluster.is_local:
        python("-m", "rljob_cluster", "install", *sets)
        return
    execute(
        *cluster.helm_command,
        *("upgrade", "--install", "rljob", ROOT / "charts/rljob", "--namespace", OPERATOR_NAMESPACE),
        *("--create-namespace", *sets, "--wait", "--timeout", "5m"),
    )


class Job:
    """One RLJob on the cluster."""

    def __init__(self, cluster: Cluster, manifest: Manifest) -> None:
        self.cluster = cluster
        self.name: str = manifest["metadata"]["name"]
        log_step(f"{self.name}: applying it")
        self.cluster.kubectl("delete", "rljob", "-n", NAMESPACE, self.name, "--ignore-not-found", "--wait")
        self.cluster.in_loader("rm", "-rf", f"/claim/{self.name}")
        self.cluster.apply(manifest)

    @property
    def status(self) -> Manifest:
        found: Manifest = self.cluster.get("rljob", self.name).get("status") or {}
        return found

    def condition(self, type_: str) -> Manifest:
        return next((c for c in self.status.get("conditions", []) if c["type"] == type_), {})

    def event_reasons(self) -> set[str]:
        return {str(event["reason"]) for event in self._events()}

    def event_messages(self, reason: str) -> str:
        return "\n".join(event["message"] for event in self._events() if event["reason"] == reason)

    def _events(self) -> list[Any]:
        return list(self.cluster.get("events", f"--field-selector=involvedObject.name={self.name}")["items"])

    def wait_for(self, what: str, condition: Callable[[], Any]) -> Any:
        """Like `wait_for`, but fails at once if the job ends, and shows the last log lines of its Pods."""
        log_step(f"{self.name}: waiting for {what}")

        def check() -> Any:
            failed = self.condition("Failed")
            if failed.get("status") == "True":
                raise AssertionError(f"{self.name} failed before {what}: {failed['message']}")
            # Read before `condition`, which may become true between the two reads.
            has_succeeded = self.condition("Succeeded").get("status") == "True"
            found = condition()
            if not found and has_succeeded:
                raise AssertionError(f"{self.name} succeeded before {what}: the fault came too late to have an effect")
            return found

        try:
            return wait_for(f"{self.name}: {what}", check)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from None

    def wait_for_step(self, step: int) -> None:
        self.wait_for(f"step {step}", lambda: self.step() >= step)

    def step(self) -> int:
        """Return the newest step of the run's metrics; the job's status may lag behind."""
        return self.metrics().last_step

    def metrics(self) -> Metrics:
        return parse_metrics((self.cluster.read_file(f"{self.name}/metrics.jsonl") or "").split("\n"))

    def wait_for_success(self) -> DriverSummary:
        """Return the driver's summary."""
        self.wait_for("Succeeded", lambda: self.condition("Succeeded").get("status") == "True")
        log_step(f"{self.name}: {self.condition('Succeeded')['message']}")
        text = self.cluster.read_file(f"{self.name}/driver-summary.json")
        assert text, "the driver wrote no summary to the claim"
        return DriverSummary.model_validate_json(text)

    def read_samples(self) -> list[Manifest]:
        """Return all samples of training from the trajectory log, with the results of their rewards by name."""
        samples = []
        for name in self.cluster.in_loader("ls", f"/claim/{self.name}/trajectories").decode().split():
            if "train" in name:
                content = self.cluster.in_loader("cat", f"/claim/{self.name}/trajectories/{name}")
                samples += pq.read_table(io.BytesIO(content)).to_pylist()
        for sample in samples:
            sample["rewards"] = {reward["name"]: reward for reward in sample["rewards"]}
        return samples

    def delete_pod(self, role: str) -> None:
        """Delete the oldest Pod of a role, and wait until another one replaces it."""
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
