"""`make bench-operator`: how fast the operator creates the Pods of many jobs, and its cost while the jobs only run.

Runs a real control plane with KWOK's nodes and the operator as a process. This process submits the jobs, and watches
workloads and Pods by their metadata, without polling. A job's time runs from its POST until its last workload appears,
which the operator applies last, and until its last Pod appears, which includes the controllers' time. The controllers
have no rate limits, so that they are not the bottleneck. Last line: one JSON object.

A file operator.py would shadow the standard library's module in every benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml
from rich.console import Console

from rljob_api.wire.contract import LABEL_JOB
from rljob_cluster.control_plane.control_plane import COMPONENTS, ControlPlane, free_port
from rljob_cluster.control_plane.kwok import run_kwok
from rljob_operator.kube.client import KubeApi, connect
from rljob_operator.kube.resources import RLJOB

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE = "bench"
NUM_NODES = 50
PODS_PER_JOB = 7
WORKLOADS = ("apis/batch/v1", "jobs"), ("apis/apps/v1", "statefulsets"), ("apis/apps/v1", "deployments")
WORKLOADS_PER_JOB = 4
SUBMITTERS = 20
START_SECONDS = 60.0
DEADLINE_SECONDS = 420.0
"""For JOBS_PER_DEADLINE jobs; proportional for more jobs."""
JOBS_PER_DEADLINE = 200
IDLE_SECONDS = 60.0
SETTLE_SECONDS = 30.0
"""The operator is idle after writing nothing for this long. After the last Pod was created, all Pods still get nodes,
run, and change the jobs' statuses."""
WATCH_CHUNK_BYTES = 2**24
CONSOLE = Console(stderr=True, log_path=False)
_CLIENT_RATE = ("--kube-api-qps=2000", "--kube-api-burst=4000")
ARGUMENTS = {
    "kube-scheduler": _CLIENT_RATE,
    # Pods get loopback addresses, which endpoints may not have, and this benchmark uses no Service.
    "kube-controller-manager": (
        *_CLIENT_RATE,
        "--controllers=*,-endpoints-controller,-endpointslice-controller,-endpointslice-mirroring-controller",
        # KWOK renews no Lease: during the measurement its nodes would become lost, and their Pods unready.
        "--node-monitor-grace-period=12h",
    ),
}
JOB = """
apiVersion: rljob.dev/v1alpha1
kind: RLJob
spec:
  model: {source: /models/tiny}
  data: {train: {source: /data/train.parquet}}
  rewards:
  - name: correct
    replicas: 2
    function:
      inline: |
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return 1.0
  trainer: {replicas: 2, gpusPerReplica: 0}
  rollout: {replicas: 2, gpusPerReplica: 0}
"""


class Operator:
    """`python -m rljob_operator`, its process statistics, and its /metrics."""

    def __init__(self, kubeconfig: Path, log: Path) -> None:
        self.log, self.port = log, free_port("0.0.0.0")
        command = [sys.executable, "-m", "rljob_operator", f"--kubeconfig={kubeconfig}", "--no-lease"]
        command += [f"--metrics-port={self.port}", "--health-port=0", "--log-level=warning"]
        with log.open("wb") as file:
            self._process = psutil.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except psutil.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def check(self) -> None:
        if (code := self._process.poll()) is not None:
            sys.exit(f"the operator ended with exit code {code}:\n{self.log.read_text()[-3000:]}")

    async def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            self.check()
            with contextlib.suppress(OSError):
                self._get("/readyz")
                return
            await asyncio.sleep(0.1)
        sys.exit(f"the operator was not ready after {START_SECONDS:.0f} s:\n{self.log.read_text()[-3000:]}")

    def api_calls(self) -> Counter[str]:
        """Return API calls by verb and resource, such as 'GET secrets'."""
        pattern = r'^rljob_operator_api_calls_total\{code="\w+",resource="(\w+)",verb="(\w+)"\} (\S+)$'
        calls: Counter[str] = Counter()
        for resource, verb, count in re.findall(pattern, self._get("/metrics"), re.MULTILINE):
            calls[f"{verb} {resource}"] += int(float(count))
        return calls

    def num_writes(self) -> int:
        return sum(count for call, count in self.api_calls().items() if not call.startswith("GET "))

    def errors(self) -> int:
        found = re.findall(r"^rljob_operator_errors_total\{.*\} (\S+)$", self._get("/metrics"), re.MULTILINE)
        return int(sum(map(float, found)))

    def cpu_seconds(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def rss_mib(self) -> float:
        return float(self._process.memory_info().rss / 2**20)

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return str(answer.read().decode())


class Arrivals:
    """When the last object of each job appeared."""

    def __init__(self, num_per_job: int) -> None:
        self.complete: dict[str, float] = {}
        self._num_per_job = num_per_job
        self._seen: dict[str, set[tuple[str, str]]] = defaultdict(set)

    def record(self, job: str, kind: str, name: str) -> None:
        self._seen[job].add((kind, name))
        if len(self._seen[job]) == self._num_per_job:
            self.complete.setdefault(job, time.monotonic())

    def seconds(self, submitted: dict[str, float], jobs: list[str]) -> list[float]:
        return sorted(self.complete[job] - submitted[job] for job in jobs)


async def watch_added(api: KubeApi, group: str, plural: str, arrivals: Arrivals) -> None:
    """Watch the metadata of the namespace's objects of a kind, from the first one, until cancelled."""
    url = f"{api.server}/{group}/namespaces/{NAMESPACE}/{plural}"
    query = {"labelSelector": LABEL_JOB, "watch": "true", "resourceVersion": "0", "allowWatchBookmarks": "true"}
    headers = {"Accept": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"}
    endless = aiohttp.ClientTimeout(total=None)
    async with (
        api.new_session() as session,
        session.get(url, params=query, headers=headers, timeout=endless, read_bufsize=WATCH_CHUNK_BYTES) as answer,
    ):
        answer.raise_for_status()
        async for line in answer.content:
            event = json.loads(line)
            if event["type"] == "ERROR":
                sys.exit(f"the watch of the {plural} ended: {event['object'].get('message')}")
            if event["type"] == "ADDED":
                metadata = event["object"]["metadata"]
                arrivals.record(metadata["labels"][LABEL_JOB], plural, metadata["name"])
    sys.exit(f"the API server ended the watch of the {plural}")


async def submit(api: KubeApi, submitted: dict[str, float], names: list[str]) -> None:
    """Submit all jobs at once, over SUBMITTERS connections. A job's time starts when its request is sent."""
    body, free = yaml.safe_load(JOB), asyncio.Semaphore(SUBMITTERS)

    async def one(name: str) -> None:
        async with free:
            submitted[name] = time.monotonic()
            await api.request("POST", RLJOB.path(NAMESPACE), body=body | {"metadata": {"name": name}})

    await asyncio.gather(*(one(name) for name in names))


def find_limit_seconds(num_jobs: int) -> float:
    return DEADLINE_SECONDS * max(1.0, num_jobs / JOBS_PER_DEADLINE)


async def wait_complete(arrivals: Arrivals, num_jobs: int, operator: Operator) -> None:
    """Wait until `num_jobs` jobs have all their objects."""
    limit_seconds = find_limit_seconds(num_jobs)
    try:
        async with asyncio.timeout(limit_seconds):
            while len(arrivals.complete) < num_jobs:
                operator.check()
                await asyncio.sleep(0.1)
    except TimeoutError:
        sys.exit(
            f"{len(arrivals.complete)} of {num_jobs} jobs had all their objects after {limit_seconds:.0f} s; "
            f"use fewer --jobs\n{operator.log.read_text()[-3000:]}"
        )


async def measure(plane: ControlPlane, operator: Operator, options: argparse.Namespace) -> dict[str, Any]:
    timed = [f"timed-{index}" for index in range(min(options.timed, options.jobs))]
    rest = [f"more-{index}" for index in range(options.jobs - len(timed))]
    pods, workloads, submitted = Arrivals(PODS_PER_JOB), Arrivals(WORKLOADS_PER_JOB), dict[str, float]()
    async with _api(plane) as api, asyncio.TaskGroup() as group:
        await operator.wait_ready()
        watching = [group.create_task(watch_added(api, "api/v1", "pods", pods))]
        watching += [group.create_task(watch_added(api, *kind, workloads)) for kind in WORKLOADS]
        cpu = operator.cpu_seconds()
        CONSOLE.log(f"Pods of {len(timed)} jobs")
        await submit(api, submitted, timed)
        for arrivals in (workloads, pods):
            await wait_complete(arrivals, len(timed), operator)
        cpu = operator.cpu_seconds() - cpu
        CONSOLE.log(f"Pods of {options.jobs} jobs")
        await submit(api, submitted, rest)
        await wait_complete(pods, options.jobs, operator)
        for task in watching:
            task.cancel()
    figures = {
        **_percentiles("apply_to_children", workloads.seconds(submitted, timed)),
        **_percentiles("apply_to_pods", pods.seconds(submitted, timed)),
        "burst_cpu_seconds": round(cpu, 1),
        "timed_jobs": len(timed),
        "jobs": options.jobs,
        "operator_cpu_seconds": round(operator.cpu_seconds(), 1),
        "operator_rss_mib": round(operator.rss_mib(), 1),
        "api_calls": operator.api_calls().total(),
        "errors": operator.errors(),
    }
    await wait_until_idle(operator, options.jobs)
    return figures | await measure_idle(operator)


async def wait_until_idle(operator: Operator, num_jobs: int) -> None:
    """Wait until the operator has written nothing for a while, or a limit has passed."""
    CONSOLE.log("waiting until the operator is idle")
    limit, before = time.monotonic() + find_limit_seconds(num_jobs), -1
    while time.monotonic() < limit and before != (written := operator.num_writes()):
        before = written
        await asyncio.sleep(SETTLE_SECONDS)
        operator.check()


async def measure_idle(operator: Operator) -> dict[str, Any]:
    """Measure the cost per minute without changes."""
    CONSOLE.log(f"idle for {IDLE_SECONDS:.0f} s")
    before, cpu, started_at = operator.api_calls(), operator.cpu_seconds(), time.monotonic()
    await asyncio.sleep(IDLE_SECONDS)
    minutes = (time.monotonic() - started_at) / 60
    calls = operator.api_calls() - before
    return {
        "idle_api_calls_per_minute": round(calls.total() / minutes, 1),
        "idle_cpu_seconds_per_minute": round((operator.cpu_seconds() - cpu) / minutes, 2),
        "idle_rss_mib": round(operator.rss_mib(), 1),
        "idle_calls": dict(calls.most_common()),
    }


@contextlib.asynccontextmanager
async def _api(plane: ControlPlane) -> AsyncIterator[KubeApi]:
    api = await connect(str(plane.kubeconfig))
    try:
        yield api
    finally:
        await api.close()


async def prepare(plane: ControlPlane) -> None:
    """Create the CRDs, the namespace, and addresses for the nodes' Pods."""
    first = ".".join(plane.address.split(".")[:2])
    async with _api(plane) as api:
        for path in sorted((ROOT / "crds").glob("*.yaml")):
            crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
            await api.request("POST", crds, body=yaml.safe_load(path.read_text()))
        await api.request("POST", "/api/v1/namespaces", body={"metadata": {"name": NAMESPACE}})
        for index in range(NUM_NODES):
            # Loopback refuses connections to a driver at once; KWOK's default range may be a real network.
            cidr = f"{first}.{100 + index}.0/24"
            await api.request(
                "PATCH",
                f"/api/v1/nodes/kwok-{index}",
                body={"spec": {"podCIDR": cidr, "podCIDRs": [cidr]}},
                content_type="application/merge-patch+json",
            )
        account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
        deadline = time.monotonic() + START_SECONDS
        while not (await api.request("GET", account)).get("items"):  # Pods cannot be created without it
            if time.monotonic() > deadline or not plane.processes.is_running("kube-controller-manager"):
                log = (plane.folder / "logs/kube-controller-manager.log").read_text()
                sys.exit(f"the controller manager created no service account:\n{log[-1000:]}")
            await asyncio.sleep(0.1)


def _percentiles(name: str, ordered: list[float]) -> dict[str, float]:
    indices = {percent: min(len(ordered) - 1, len(ordered) * percent // 100) for percent in (50, 99)}
    return {f"{name}_p{percent}_seconds": round(ordered[index], 2) for percent, index in indices.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timed", type=int, default=200, help="jobs submitted at once and timed (default 200)")
    help_jobs = "jobs in all; the others follow (default 200, which takes 3 min on 2 cores)"
    parser.add_argument("--jobs", type=int, default=200, help=help_jobs)
    parser.add_argument("--address", default="127.36.0.1", help="loopback address of the control plane")
    parser.add_argument("--dir", type=Path, help="keep the control plane's data and all logs in this new folder")
    options = parser.parse_args()
    if not 1 <= options.timed <= options.jobs:
        parser.error(f"--timed must be at least 1 and at most --jobs ({options.jobs}), got {options.timed}")
    return options


def main() -> None:
    options = parse()
    with contextlib.ExitStack() as stack:
        folder = options.dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-operator-")))
        plane = ControlPlane(folder, address=options.address, components=COMPONENTS, extra_arguments=ARGUMENTS)
        stack.enter_context(plane)
        stack.enter_context(run_kwok(plane, num_nodes=NUM_NODES, jobs_end=False))
        asyncio.run(prepare(plane))
        operator = Operator(plane.kubeconfig, folder / "logs/operator.log")
        stack.callback(operator.stop)
        figures = asyncio.run(measure(plane, operator, options))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
