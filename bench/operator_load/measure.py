"""What is measured of an operator, whichever it is. Figures are added to the result as they come."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from operator_load.arrivals import Arrivals, watch_phases, watch_pods
from operator_load.operator_process import Command, OperatorProcess, Prober, Sample, count, quantile
from operator_load.plane import CONSOLE, NAMESPACE, open_api
from rljob_cluster.control_plane.control_plane import ControlPlane
from rljob_core.kube.client import KubeApi

_SECONDS_PER_OBJECT = 2.1
_MIN_LIMIT_SECONDS = 420.0
_REPORT_SECONDS = 15.0
_SETTLE_SECONDS = 30.0
"""From the last object that runs to the measurement of the steady state."""
_RESTART_LIMIT_SECONDS = 600.0


@dataclass(frozen=True)
class Subject:
    """An operator, its objects, and the names of its metrics."""

    command: Command
    path: str
    """Path of its objects."""
    body: Any
    label: str
    """The label that names the object of a Pod."""
    pods_per_object: int
    column: str
    """A printed column, and its value (in lower case) when an object runs."""
    running: str
    requests: tuple[str, str]
    """A counter of requests to the API server, and its label for the HTTP method."""
    reconciles: str
    """A histogram."""
    reconcile_labels: dict[str, str]
    leader: str
    """A gauge."""
    depth: str
    lease: str


@dataclass(frozen=True)
class Load:
    """What an operator is given, and for how long it is measured while all objects run."""

    num_objects: int
    window: int | None
    """At most as many objects are submitted that do not run yet; None: all at once."""
    steady_seconds: float


@dataclass(frozen=True)
class Point:
    """The counters at one time."""

    at: float
    cpu_seconds: float
    requests: Counter[str]

    def since(self, earlier: Point) -> Counter[str]:
        return self.requests - earlier.requests


class Measurement:
    """One operator on one control plane."""

    def __init__(self, plane: ControlPlane, subject: Subject, figures: dict[str, Any], load: Load) -> None:
        self._plane, self._subject, self._figures, self._load = plane, subject, figures, load
        self._num_objects = load.num_objects
        self._operator = OperatorProcess(subject.command, plane.folder / f"logs/{subject.command.name}.log")
        self._arrivals = Arrivals(subject.pods_per_object)
        self._limit_seconds = max(_MIN_LIMIT_SECONDS, _SECONDS_PER_OBJECT * load.num_objects)

    def stop(self) -> None:
        self._operator.stop()

    async def run(self, count_answers: Callable[[], Awaitable[dict[str, int]]] | None) -> None:
        async with open_api(self._plane) as api:
            await self._operator.wait_ready()
            await self._wait("the Lease", self._is_leader, 60.0)
            transitions = await self._count_transitions(api)
            async with _running(Prober(self._operator)) as prober:
                await self._measure_burst(api)
                seconds = self._load.steady_seconds
                self._log(f"waits {_SETTLE_SECONDS:.0f} s, then measures {seconds:.0f} s while all run")
                await asyncio.sleep(_SETTLE_SECONDS)
                await self._measure_steady(seconds, count_answers)
                self._figures |= prober.figures()
            self._figures["lease_losses"] = await self._count_transitions(api) - transitions
            await self._measure_restart()

    async def _measure_burst(self, api: KubeApi) -> None:
        subject, arrivals = self._subject, self._arrivals
        tasks = [
            asyncio.create_task(watch_pods(api, subject.label, arrivals)),
            asyncio.create_task(watch_phases(api, subject.path, subject.column, subject.running, arrivals)),
        ]
        try:
            await asyncio.sleep(1.0)
            before = await self._point()
            names = [f"bench-{index}" for index in range(self._num_objects)]
            self._log(f"submits {len(names)} objects with {subject.pods_per_object} Pods each")
            submission = arrivals.submit(api, subject.path, subject.body, names, self._load.window)
            tasks.append(asyncio.create_task(submission))
            await self._wait("Pods", lambda: self._are_complete(arrivals.complete, tasks), self._limit_seconds)
            self._record_pods()
            await self._wait("running", lambda: self._are_complete(arrivals.running, tasks), self._limit_seconds)
            self._record_burst(before, await self._point())
        finally:
            for task in tasks:
                task.cancel()

    def _record_pods(self) -> None:
        arrivals, first = self._arrivals, min(self._arrivals.submitted.values())
        seconds = max(arrivals.complete.values()) - first
        self._figures |= {
            "pods_per_second": round(arrivals.num_pods / seconds, 1),
            "seconds_to_all_pods": round(seconds, 1),
            "seconds_to_pods": arrivals.percentiles(arrivals.complete),
        }

    def _record_burst(self, before: Point, after: Point) -> None:
        requests = after.since(before)
        reads = requests["GET"]
        self._figures |= {
            "seconds_to_all_running": round(max(self._arrivals.running.values()) - before.at, 1),
            "seconds_to_running": self._arrivals.percentiles(self._arrivals.running),
            "requests_per_object": {
                "all": round(requests.total() / self._num_objects, 2),
                "reads": round(reads / self._num_objects, 2),
                "writes": round((requests.total() - reads) / self._num_objects, 2),
            },
            "burst_cpu_seconds": round(after.cpu_seconds - before.cpu_seconds, 1),
            "peak_mib": self._operator.peak_mib(),
        }

    async def _measure_steady(
        self, seconds: float, count_answers: Callable[[], Awaitable[dict[str, int]]] | None
    ) -> None:
        before, answers = await self._point(), await count_answers() if count_answers else {}
        await asyncio.sleep(seconds)
        after = await self._point()
        requests, passed = after.since(before), after.at - before.at
        samples = await self._operator.samples()
        subject = self._subject
        self._figures["steady"] = {
            "cores": round((after.cpu_seconds - before.cpu_seconds) / passed, 3),
            "requests_per_second": round(requests.total() / passed, 2),
            "patches_per_second": round(requests["PATCH"] / passed, 2),
            "rss_mib": self._operator.rss_mib(),
        }
        if count_answers:
            now = await count_answers()
            asked = {name: now[name] - answers[name] for name in ("answered", "hung", "without_token")}
            asked["answers_per_driver_per_minute"] = round(asked["answered"] / max(1, now["drivers"]) * 60 / passed, 2)
            self._figures["steady"]["drivers"] = asked
        self._figures |= {
            "peak_mib": self._operator.peak_mib(),
            "reconcile_p50_seconds": quantile(samples, subject.reconciles, 0.5, **subject.reconcile_labels),
            "reconcile_p99_seconds": quantile(samples, subject.reconciles, 0.99, **subject.reconcile_labels),
        }

    async def _measure_restart(self) -> None:
        """Kill the operator. Measure until its successor leads, and until it has reconciled every object."""
        self._log("kill -9, and start again")
        self._operator.kill()
        self._operator.start()
        started_at = self._operator.started_at
        async with _running(Prober(self._operator)) as prober:
            await self._wait("the Lease after the restart", self._is_leader, _RESTART_LIMIT_SECONDS)
            leads_at = time.monotonic()
            await self._wait("the reconcile of every object", self._has_reconciled_all, _RESTART_LIMIT_SECONDS)
            self._figures["restart"] = {
                "seconds_to_lead": round(leads_at - started_at, 1),
                "seconds_from_lead_to_all_reconciled": round(time.monotonic() - leads_at, 1),
                "cpu_seconds": round(self._operator.cpu_seconds(), 1),
                "peak_mib": self._operator.peak_mib(),
                **prober.figures(),
            }

    async def _is_leader(self) -> bool:
        return any(sample.name == self._subject.leader and sample.value == 1 for sample in await self._try_samples())

    async def _has_reconciled_all(self) -> bool:
        samples, subject = await self._try_samples(), self._subject
        labels = subject.reconcile_labels.items()
        named = [sample for sample in samples if labels <= sample.labels.items()]
        num = sum(sample.value for sample in named if sample.name == f"{subject.reconciles}_count")
        return num >= self._num_objects and not any(s.value for s in samples if s.name == subject.depth)

    async def _try_samples(self) -> Sequence[Sample]:
        with contextlib.suppress(OSError):
            return await self._operator.samples()
        return []

    async def _are_complete(self, times: dict[str, float], tasks: list[asyncio.Task[None]]) -> bool:
        for task in tasks:
            if task.done():
                task.result()
        return len(times) >= self._num_objects

    async def _count_transitions(self, api: KubeApi) -> int:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{self._subject.lease}"
        return int((await api.request("GET", path))["spec"].get("leaseTransitions") or 0)

    async def _point(self) -> Point:
        name, label = self._subject.requests
        requests = count(await self._operator.samples(), name, label)
        return Point(time.monotonic(), self._operator.cpu_seconds(), requests)

    async def _wait(self, what: str, holds: Callable[[], Awaitable[bool]], limit_seconds: float) -> None:
        started_at = reported_at = time.monotonic()
        while not await holds():
            self._operator.check()
            now = time.monotonic()
            if now - started_at > limit_seconds:
                raise TimeoutError(f"{what}: not after {limit_seconds:.0f} s; {self._describe()}")
            if now - reported_at > _REPORT_SECONDS:
                reported_at = now
                self._log(f"waits for {what}: {self._describe()}")
            await asyncio.sleep(0.2)

    def _describe(self) -> str:
        arrivals = self._arrivals
        parts = f"{arrivals.num_pods} Pods, {len(arrivals.running)} of {self._num_objects} objects run"
        return f"{parts}, {self._operator.rss_mib():.0f} MiB, {self._operator.cpu_seconds():.0f} CPU-s"

    def _log(self, text: str) -> None:
        CONSOLE.log(f"{self._subject.command.name}: {text}")


@contextlib.asynccontextmanager
async def _running(prober: Prober) -> Any:
    task = asyncio.create_task(prober.run())
    try:
        yield prober
    finally:
        task.cancel()


def run_measurement(
    plane: ControlPlane,
    subject: Subject,
    figures: dict[str, Any],
    load: Load,
    count_answers: Callable[[], Awaitable[dict[str, int]]] | None = None,
) -> None:
    measurement = Measurement(plane, subject, figures, load)
    try:
        asyncio.run(measurement.run(count_answers))
    finally:
        measurement.stop()


def crds_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.yaml"))
