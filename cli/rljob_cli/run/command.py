"""`rljob run`: the operator's reconciler over the local backend, until the job has ended.

Invariant: when `run_job` returns or raises, no process of the run is alive.
"""

import asyncio
import contextlib
import json
import math
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from rich.console import Console

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.run.folder import FILE_METRICS, FILE_SERVICE, FILE_SUMMARY, last_checkpoint
from rljob_api.run.metrics import Metrics, read_metrics
from rljob_api.run.sessions import ContainerFailure, Session, read_sessions, write_sessions
from rljob_api.run.summaries import RunSummary, format_summary, read_driver_summary
from rljob_api.wire.contract import ENV_CLIENTS_ADDRESS, PORT_CLIENTS, PORT_DRIVER, UrlPath
from rljob_api.wire.driver_status import DriverStatus
from rljob_cli.exits import EXIT_FAILED, EXIT_INTERRUPTED
from rljob_cli.local.cluster import LOCAL_DEFAULTS, STOP_SECONDS, LocalCluster
from rljob_cli.local.network import Network
from rljob_cli.local.node.kubelet import log_path
from rljob_cli.local.node.volumes import write_atomically
from rljob_cli.manifests import is_ready, labels_of, phase_of, role_of
from rljob_cli.run.endpoint import Endpoint, remove_endpoint, write_endpoint
from rljob_cli.run.live import PlainOutput
from rljob_cli.run.reward_rows import RewardMetrics, RewardRow, build_row, gather_metrics
from rljob_cli.run.runfolder import MetricsReader
from rljob_cli.run.snapshot import FINAL_PHASES, RunHistory, Snapshot, build_roles, message_of
from rljob_cli.run.summary import build_summary, print_summary
from rljob_cli.version import find_versions
from rljob_core.backend import Manifest
from rljob_core.children.common import HEAD, child_name, read_service_name, role_of_service
from rljob_core.children.config import build_token_secret, read_token
from rljob_core.loop import workqueue
from rljob_core.loop.reconcile import reconcile
from rljob_core.plan.job import new_random_token
from rljob_inputs.hub import name_model
from rljob_inputs.machine.installation import describe_tracker, has_module

_REFRESH_SECONDS = 0.5
_POLL_SECONDS = 1.0
_METRICS_SECONDS = 2.0
_POLL_TIMEOUT_SECONDS = 2.0
_RECORD_SECONDS = 5.0
"""Between two writes of the session: the time that a kill can take from it."""
_SAY_SECONDS = 10.0
_MAX_FAILURES = 50
STOPPED = "Stopped"
"""The phase of a run that has reached what its caller waits for."""


class ServedHere(NamedTuple):
    """How clients of this machine reach a training service."""

    address: str
    """HOST:PORT."""
    token: str
    """The job's, from which the keys follow: it outlives the run."""


class SessionLog:
    """Records the session that runs, behind those before it in the folder."""

    def __init__(self, folder: Path, after_step: int) -> None:
        self._folder = folder
        self._earlier = read_sessions(folder)
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        self.current = Session(started=now, after_step=after_step, last_step=after_step, versions=find_versions())

    def update(self, *, failures: Sequence[ContainerFailure] = (), **changes: Any) -> None:
        """Write what the session did so far. `changes`: fields of Session."""
        self.current = self.current.model_copy(update={**changes, "failures": tuple(failures[:_MAX_FAILURES])})
        write_sessions(self._folder, self.sessions)

    @property
    def sessions(self) -> list[Session]:
        return [*self._earlier, self.current]


class Run:
    def __init__(
        self,
        job: RLJob,
        folder: Path,
        network: Network,
        claims: Mapping[str, Path],
        output: PlainOutput,
        until: Callable[[], bool] = lambda: False,
        served: ServedHere | None = None,
    ) -> None:
        """`until`: stops the run before its end once it is true. `served`: of a training service."""
        self._job = job
        self._until = until
        self._folder = folder
        self._served, self._is_serving = served, False
        env = {ENV_CLIENTS_ADDRESS: served.address} if served else {}
        self._cluster = LocalCluster(job, network, folder, claims, env)
        self.history = RunHistory(partial(log_path, self._cluster.paths))
        self._output = output
        self._started = time.monotonic()
        self._interrupted = asyncio.Event()
        self._phase = ""
        self.message = ""
        """Message of the last phase."""
        self._metrics = RewardMetrics()
        self.session = SessionLog(folder, last_checkpoint(folder) or 0)
        self._records = MetricsReader(folder / FILE_METRICS)
        self._recorded_at = -math.inf
        self._endpoint: Endpoint | None = None

    async def execute(self) -> str:
        """Run until the job ends. Return the phase: Succeeded, Failed, Interrupted or STOPPED."""
        earlier = self._records.read()
        self._output.begin(Snapshot(steps=earlier.steps, evals=earlier.evaluations))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        async with self._cluster:
            store = self._cluster.store
            if self._served:
                await store.apply(build_token_secret(self._job, child_name(self._job, "token"), self._served.token))
            tasks = [
                asyncio.create_task(
                    workqueue.run(store.watch, partial(reconcile, store, defaults=LOCAL_DEFAULTS), workers=1)
                )
            ]
            tasks.append(asyncio.create_task(self._poll(self._refresh_driver, _POLL_SECONDS)))
            tasks.append(asyncio.create_task(self._poll(self._refresh_metrics, _METRICS_SECONDS)))
            try:
                await self._follow(tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                remove_endpoint(self._folder)
                await self._stop()
                # Not from a new snapshot: Pods that this stops have not failed.
                self._record_session(self.message, self._phase)
        return self._phase

    def write_summary(self, metrics: Metrics) -> RunSummary:
        """Write the summary of a run that has ended. `metrics`: of its folder."""
        summary = build_summary(
            name=self._job.metadata.name,
            phase=self._phase,
            total_steps=self._job.spec.num_steps,
            driver=read_driver_summary(self._folder),
            metrics=metrics,
            sessions=self.session.sessions,
            checkpoint=last_checkpoint(self._folder),
            template_arguments=self._job.spec.data.chat_template_arguments,
        )
        (self._folder / FILE_SUMMARY).write_text(format_summary(summary))
        return summary

    async def _stop(self) -> None:
        """Stop all Pods. If a signal is why, say meanwhile that the head saves, and then what it has saved."""
        if self._served:
            return await self._cluster.stop(STOP_SECONDS)
        stopping = asyncio.create_task(self._cluster.stop(STOP_SECONDS, first=(child_name(self._job, HEAD),)))
        started, last = time.monotonic(), self._records.read().last_step
        while not (await asyncio.wait((stopping,), timeout=_SAY_SECONDS))[0] and self._interrupted.is_set():
            seconds = time.monotonic() - started
            self._output.say(f"waits for the checkpoint of the last steps since {seconds:.0f} s (press again: lose it)")
        await stopping
        if self._interrupted.is_set() and last:
            saved, seconds = last_checkpoint(self._folder) or 0, time.monotonic() - started
            lost = "" if saved >= last else f", steps {saved + 1} to {last} are lost"
            self._output.say(f"step {saved} is saved{lost}; the end took {seconds:.0f} s")

    @property
    def wall_seconds(self) -> float:
        return time.monotonic() - self._started

    async def _follow(self, tasks: list[asyncio.Task[None]]) -> None:
        while True:
            self._cluster.check()
            for task in tasks:
                if task.done():
                    task.result()
            snapshot = self.take_snapshot()
            self._output.show(snapshot)
            self._say_keys(snapshot)
            self._phase = snapshot.phase
            self.message = snapshot.message
            if time.monotonic() >= self._recorded_at + _RECORD_SECONDS:
                self._record_session(snapshot.message)
            if self._interrupted.is_set():
                self._phase, self.message = "Interrupted", "stopped by a signal"
                return
            if self._until():
                self._phase, self.message = STOPPED, "stopped by its caller"
                return
            if snapshot.phase in FINAL_PHASES:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REFRESH_SECONDS):
                    await self._interrupted.wait()

    def _say_keys(self, snapshot: Snapshot) -> None:
        """Say how clients reach the service, each time that it begins to answer."""
        was_serving, self._is_serving = self._is_serving, snapshot.is_serving
        service = self._job.spec.service
        if was_serving or not self._is_serving or self._served is None or service is None:
            return
        keys = service.derive_keys(self._served.token)
        name = service.model_name or name_model(self._job.spec.model.source)
        self._output.say(f"serves {name}; Ctrl-C stops it, and the next start goes on. For a client:")
        self._output.say(f"export TINKER_BASE_URL=http://{self._served.address}")
        for client, key in keys.items():
            self._output.say(f"export TINKER_API_KEY={key}{f'  # {client}' if len(keys) > 1 else ''}")

    def _record_session(self, message: str, phase: str = "") -> None:
        self._recorded_at = time.monotonic()
        self.session.update(
            seconds=round(self.wall_seconds, 3),
            phase=phase,
            message=message,
            last_step=self._records.read().last_step,
            restarts=self.history.restarts,
            failures=self.history.failures,
        )

    def take_snapshot(self) -> Snapshot:
        store = self._cluster.store
        pods = list(store.pods.values())
        self.history.record([*store.failed_pods, *pods])
        job = store.job or self._job
        metrics = self._records.read()
        return Snapshot(
            name=job.metadata.name,
            phase=job.status.phase or "Pending",
            message=message_of(job.status),
            roles=build_roles(job.status, pods, self.history.restarts),
            rewards=build_rewards(job, pods, self._metrics),
            driver=store.driver,
            steps=metrics.steps,
            evals=metrics.evaluations,
            total_steps=job.spec.num_steps,
            elapsed_seconds=self.wall_seconds,
            failures=tuple(self.history.failures),
            problems=tuple(job.status.progress.problems),
            events=tuple(f"{event.reason}: {event.message}" for event in store.events if event.type == "Warning"),
        )

    def _on_signal(self) -> None:
        if self._interrupted.is_set():
            self._output.say("killing all processes")
            self._cluster.kubelet.kill()
            return
        text = "saving the last steps, then stopping (press again to end at once, without them)"
        self._output.say("stopping" if self._served else text)
        self._interrupted.set()

    async def _poll(self, refresh: Callable[[aiohttp.ClientSession], Awaitable[None]], interval_seconds: float) -> None:
        timeout = aiohttp.ClientTimeout(total=_POLL_TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                await refresh(session)
                await asyncio.sleep(interval_seconds)

    async def _refresh_driver(self, session: aiohttp.ClientSession) -> None:
        store = self._cluster.store
        heads = [pod for pod in store.pods.values() if role_of(pod) == HEAD and phase_of(pod) == "Running"]
        secret = store.find("Secret", child_name(self._job, "token"))
        if heads and secret:
            address = f"{heads[0]['status']['podIP']}:{self._cluster.network.port(PORT_DRIVER)}"
            token = read_token(secret) or ""
            if (endpoint := Endpoint(f"http://{address}", token)) != self._endpoint:  # for `rljob ui`
                with contextlib.suppress(OSError):  # a full disk must not end the run
                    write_endpoint(self._folder, endpoint)
                    self._endpoint = endpoint
            store.set_driver(await _fetch_driver_status(session, address, token))

    async def _refresh_metrics(self, session: aiohttp.ClientSession) -> None:
        pods = list(self._cluster.store.pods.values())
        self._metrics = await fetch_metrics(session, pods, self._cluster.network.port)


async def _fetch_driver_status(session: aiohttp.ClientSession, address: str, token: str) -> DriverStatus | None:
    url = f"http://{address}{UrlPath.STATUS}"
    text = await _get(session, url, {"Authorization": f"Bearer {token}"})
    try:
        return DriverStatus.model_validate_json(text)
    except ValueError:
        return None


async def _get(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str] | None = None) -> str:
    """Return the body; empty if there is no answer, or its status is not 200."""
    try:
        async with session.get(url, headers=headers) as response:
            return await response.text() if response.status == 200 else ""
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return ""


async def fetch_metrics(
    session: aiohttp.ClientSession, pods: Sequence[Manifest], listening_port: Callable[[int], int]
) -> RewardMetrics:
    async def read(pod: Manifest, port: int) -> str:
        return await _get(session, f"http://{pod['status']['podIP']}:{listening_port(port)}/metrics")

    ready = [pod for pod in pods if is_ready(pod)]
    servers: dict[str, list[Manifest]] = {}
    for pod in ready:
        if name := read_service_name(labels_of(pod)):
            servers.setdefault(name, []).append(pod)
    return await gather_metrics(read, [pod for pod in ready if role_of(pod) == HEAD], servers)


def build_rewards(job: RLJob, pods: Sequence[Manifest], metrics: RewardMetrics) -> tuple[RewardRow, ...]:
    roles = {role.name: role for role in job.status.roles}
    scaling = {decision.name: decision for decision in job.status.scaling}
    rows = []
    for service in job.spec.services:
        name = service.settings.name
        role = roles.get(f"{role_of_service(service)}-{name}")
        ready = sum(read_service_name(labels_of(pod)) == name and is_ready(pod) for pod in pods) if role else None
        desired = role.desired if role else None
        rows.append(build_row(metrics, name, service.settings, ready, desired, scaling.get(name), service.kind))
    return tuple(rows)


def run_job(
    job: RLJob, folder: Path, network: Network, claims: Mapping[str, Path], output: PlainOutput, console: Console
) -> RunSummary:
    """Run the job. Return its summary, which is written."""
    try:
        run = Run(job, folder, network, claims, output)
        asyncio.run(run.execute())
    finally:
        output.close()
    summary = run.write_summary(read_metrics(folder / FILE_METRICS))
    print_summary(console, summary)
    return summary


def serve_job(
    job: RLJob,
    folder: Path,
    network: Network,
    claims: Mapping[str, Path],
    output: PlainOutput,
    address: tuple[str, int] = ("127.0.0.1", PORT_CLIENTS),
) -> int:
    """Run a job with spec.service until a signal stops it, or it fails."""
    if not has_module("tinker"):
        raise UserError(f"a training service {describe_tracker('tinker')}")
    _check_port(*address)
    served = ServedHere("{}:{}".format(*address), _find_token(folder / FILE_SERVICE))
    try:
        phase = asyncio.run(Run(job, folder, network, claims, output, served=served).execute())
    finally:
        output.close()
    output.say(f"{phase.lower()}; checkpoints are in {folder / 'tinker'}, logs in {folder / 'logs'}")
    return EXIT_INTERRUPTED if phase == "Interrupted" else EXIT_FAILED


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; pass another --port") from error


def _find_token(path: Path) -> str:
    """Return the token of an earlier start, so that the keys stay, or a new one."""
    try:
        return str(json.loads(path.read_text())["token"])
    except (OSError, ValueError, KeyError):
        token = new_random_token()
        write_atomically(path, json.dumps({"token": token}).encode(), 0o600)
        return token
