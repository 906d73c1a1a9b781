"""The trainer Pod: a Ray node that offers its ranks. `python -m rljob_trainer.worker`.

After the head restarts, it joins again, so a dead driver costs no Pod. With rollout.placement trainer, the Pod has
engines, too, which outlive a node. Invariants: no process of a node outlives the node or this program; a node joins
only while the Pod's engines sleep.

The engines have a thread with their supervisor and its HTTP endpoint. Invariant: the Pod's Ray node may join only after
`sleep_all` was true for it, so that ranks find free devices.
"""

import asyncio
import concurrent.futures
import contextlib
import ctypes
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import FrameType

import psutil
from aiohttp import web

from rljob_api.errors import RLJobError, UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.pod_engines import find_engines
from rljob_api.read.pod_files import load_job_file
from rljob_api.run.start_model import find_exports
from rljob_api.wire import discovery
from rljob_api.wire.contract import (
    ENV_GRACE_SECONDS,
    ENV_HAND_OVER,
    ENV_HEAD,
    ENV_JOB_FILE,
    ENV_MODEL,
    ENV_MODEL_STEP,
    ENV_POD_IP,
    ENV_TOKEN,
    GRACE_SECONDS,
    PORT_DRIVER,
    PORT_ENGINES,
    PORT_RAY,
    RAY_RESOURCE_TRAINER,
    ExitCode,
    UrlPath,
)
from rljob_api.wire.discovery import listening_port
from rljob_api.wire.logs import configure_logging
from rljob_api.wire.termination import end_program
from rljob_api.wire.weights import EnginesReport, parse_key
from rljob_inputs.memory.object_store import trainer_store_bytes
from rljob_inputs.models.defaults import resolve_job
from rljob_inputs.models.own_settings import ModelSettings, load_model_settings
from rljob_trainer.ranks import ray_node
from rljob_trainer.server_thread import ServerThread, require_token
from rljob_trainer.temporary import TemporaryFolder
from rljob_trainer.worker.supervisor import (
    ROLLOUT,
    SERVED_MODEL,
    EngineClient,
    EngineProcess,
    SupersededError,
    Supervisor,
    engine_environment,
)
from rljob_trainer.worker.turns import Engine, Engines, Order


class PodEngines:
    """Runs from construction to `close`."""

    def __init__(self, job: RLJob, environment: Mapping[str, str], stop_seconds: float) -> None:
        """UserError if the Pod's devices are not those of the job, or if the port is in use."""
        self._stop_seconds, self._address = stop_seconds, environment.get(ENV_POD_IP, "")
        self._folder = TemporaryFolder("engines")
        self.variables = {ENV_HAND_OVER: self._folder.name}
        """Variables of the ranks, which meet the engines in this folder."""
        self._engines = find_engines(job.spec)
        self._environments = [
            engine_environment(
                {**environment, **self.variables},
                engine,
                job.spec.trainer.gpus_per_replica,
                Path(self._folder.name, f"engine-{engine.number}"),
            )
            for engine in self._engines
        ]
        self._supervisor: Supervisor
        self._loop: asyncio.AbstractEventLoop
        app = web.Application(middlewares=[require_token(environment[ENV_TOKEN])])
        app.router.add_post(UrlPath.ENGINES, self._change)
        app.cleanup_ctx.append(self._supervise)
        port = listening_port(PORT_ENGINES)
        try:
            self._server = ServerThread(app, self._address, port)
        except OSError as error:
            raise UserError(
                f"cannot listen on {self._address}:{port} (engines): {error.strerror}; stop the process that holds the "
                "port"
            ) from error

    def close(self) -> None:
        """End all engines."""
        self._server.close()
        self._folder.cleanup()

    def sleep_all(self) -> concurrent.futures.Future[EnginesReport]:
        """Give the turn to the trainer. The first time, wait until each engine was warm."""
        return asyncio.run_coroutine_threadsafe(self._supervisor.change(Order("trainer")), self._loop)

    def sessions(self) -> set[int]:
        """Return the sessions of the engines' processes."""
        return self._supervisor.sessions()

    @property
    def failure(self) -> tuple[str, ExitCode] | None:
        """Message and code with which the Pod must end."""
        return self._supervisor.failure

    def reason_not_warm(self) -> str:
        return "; ".join(f"engine {number}: {reason}" for number, reason in sorted(self._supervisor.reasons.items()))

    async def _supervise(self, _: web.Application) -> AsyncIterator[None]:
        engines = Engines([Engine(each.startup_seconds, each.gpus, each.model) for each in self._engines])
        self._loop, self._supervisor = asyncio.get_running_loop(), Supervisor(engines, self._start)
        async with EngineClient(self._address) as client, self._supervisor.running(client):
            yield
        await self._supervisor.stop(self._stop_seconds)

    def _start(self, number: int) -> EngineProcess:
        command = SERVED_MODEL if self._engines[number].model else ROLLOUT
        return EngineProcess(number, self._environments[number], command)

    async def _change(self, request: web.Request) -> web.Response:
        try:
            order = parse_order(request.query)
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        try:
            report = await self._supervisor.change(order)
        except SupersededError as error:
            raise web.HTTPConflict(text=str(error)) from error
        return web.Response(text=report.model_dump_json(), content_type="application/json")


def parse_order(query: Mapping[str, str]) -> Order:
    """Read the query of a change of turns. ValueError with what is wrong."""
    match query.get("turn"):
        case "trainer":
            return Order("trainer")
        case "rollouts":
            parse_key(want := query.get("want", ""))
            return Order("rollouts", want)
        case other:
            raise ValueError(f"turn must be trainer or rollouts, got {other!r}")


log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_WAIT_LOG_SECONDS = 30.0
_HEAD_GONE_SECONDS = 3.0
"""A head that does not answer for this long is dead. Ray's own node would wait for a minute."""
_LOOKUP_SECONDS = 5.0
"""Interval of DNS lookups of the head. A new head has a new address, and another Pod may reuse the old one for its own
Ray, which accepts connections."""
_STOP_SECONDS = 8.0
_LEAVE_SHARE = 0.75
"""Part of the grace period for which a Pod that is terminated waits until its ranks are saved."""
_PR_SET_CHILD_SUBREAPER = 36


def build_command(address: str, head_address: str, num_gpus: int, folder: str, store_bytes: int) -> list[str]:
    """Return the command line of the node, with an object store of `store_bytes`. It offers one rank per GPU,
    or one without GPUs."""
    arguments = [
        f"--address={head_address}:{listening_port(PORT_RAY)}",
        f"--num-gpus={num_gpus}",
        f"--resources={json.dumps({RAY_RESOURCE_TRAINER: max(1, num_gpus)})}",
        # Any free port: Pods of one machine may share its network.
        "--dashboard-agent-listen-port=0",
        "--metrics-export-port=0",
    ]
    return ray_node.build_start_command(arguments, address, folder, store_bytes)


def build_environment(values: Mapping[str, str]) -> dict[str, str]:
    num_threads = {ray_node.ENV_NUM_THREADS: values["OMP_NUM_THREADS"]} if values.get("OMP_NUM_THREADS") else {}
    # Of each rank's torch.compile; torch's default is one per core, up to 32.
    compilers = {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
    return {**compilers, **values, **ray_node.ray_environment(), **num_threads}


@dataclass
class Worker:
    """`engines`: rollouts that share the Pod's devices."""

    address: str
    head: str
    num_gpus: int
    store_bytes: int
    engines: PodEngines | None = None
    _is_stopped: bool = False

    def stop(self, number: int, _: FrameType | None) -> None:
        log.info("received %s; stopping", signal.Signals(number).name)
        self._is_stopped = True

    def run(self) -> None:
        """Run until stopped, or until the Pod must end because of an engine."""
        while self._wait_for_engines() and (head_address := self._wait_for_head()) is not None:
            self._run_node(head_address)

    @property
    def _stopping(self) -> bool:
        return self._is_stopped or (self.engines is not None and self.engines.failure is not None)

    def _wait_for_engines(self) -> bool:
        """Wait until all engines sleep; the first time, until each was warm before. Return False when stopped."""
        if self.engines is None:
            return True
        asleep, next_log = self.engines.sleep_all(), 0.0
        while not self._stopping:
            try:
                asleep.result(_POLL_SECONDS)
                return True
            except TimeoutError:
                pass
            except SupersededError:  # by a driver that lost its ranks and does not know it
                asleep = self.engines.sleep_all()
            if time.monotonic() >= next_log:
                log.info("waiting for the engines, before joining a head: %s", self.engines.reason_not_warm())
                next_log = time.monotonic() + _WAIT_LOG_SECONDS
        return False

    def _wait_for_head(self) -> str | None:
        """Return the address of a head that accepts connections; None when stopped."""
        next_log = 0.0
        while not self._stopping:
            for address in discovery.resolve(self.head):
                if ray_node.is_listening(address):
                    return address
            if time.monotonic() >= next_log:
                log.info("waiting for the head: %s:%d", self.head, listening_port(PORT_RAY))
                next_log = time.monotonic() + _WAIT_LOG_SECONDS
            time.sleep(_POLL_SECONDS)
        return None

    def _run_node(self, head_address: str) -> None:
        log.info("joining the head at %s", head_address)
        started = time.monotonic()
        with TemporaryFolder("ray") as folder:
            command = build_command(self.address, head_address, self.num_gpus, folder, self.store_bytes)
            shared = {} if self.engines is None else self.engines.variables
            environment = build_environment({**os.environ, **shared})
            node = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
            try:
                reason = self._watch(node, head_address)
                log.info("leaving the head at %s: %s", head_address, reason)
                if self._is_stopped:
                    log.info("the driver: %s", announce_leave(head_address, os.environ))
            finally:
                keep = self.engines.sessions if self.engines is not None else set
                terminate_descendants(_STOP_SECONDS if self._stopping else 0, keep)
        # A node that cannot join must not be restarted in a tight loop.
        while not self._stopping and time.monotonic() < started + _HEAD_GONE_SECONDS:
            time.sleep(_POLL_SECONDS)

    def _watch(self, node: subprocess.Popen[bytes], head_address: str) -> str:
        """Wait until the node ends, the head dies or moves, or the worker is stopped. Return the reason."""
        last_seen = last_lookup = time.monotonic()
        raylet = ray_node.Raylet(node.pid)
        while not self._stopping:
            if node.poll() is not None:
                return f"the Ray node exited with {node.returncode}"
            if raylet.has_died():
                return "the Ray node lost its raylet"
            now = time.monotonic()
            try:
                ray_node.connect(head_address)
                last_seen = now
            except ConnectionRefusedError:
                # Its process has ended. The next one may listen before _HEAD_GONE_SECONDS have passed, and this node
                # would wait for 40 s and more until its raylet finds that it does not belong to that head.
                return "the head has ended"
            except OSError:
                if now - last_seen > _HEAD_GONE_SECONDS:
                    return "the head accepts no connection"
            if now - last_lookup > _LOOKUP_SECONDS:
                addresses = discovery.resolve(self.head)
                if addresses and head_address not in addresses:  # no address proves nothing: DNS may be down
                    return "the head has another address"
                last_lookup = time.monotonic()
                last_seen += last_lookup - now  # a slow DNS server does not mean a dead head
            time.sleep(_POLL_SECONDS)
        return "the worker was stopped"


def announce_leave(head_address: str, values: Mapping[str, str]) -> str:
    """Let the driver save what this Pod's ranks hold. Return its report, or why there is none."""
    seconds = _LEAVE_SHARE * float(values.get(ENV_GRACE_SECONDS) or GRACE_SECONDS)
    connection = HTTPConnection(head_address, listening_port(PORT_DRIVER), timeout=seconds)
    try:
        connection.request("POST", UrlPath.LEAVE, headers={"Authorization": f"Bearer {values.get(ENV_TOKEN, '')}"})
        response = connection.getresponse()
        return response.read().decode(errors="replace") if response.status == 200 else f"HTTP {response.status}"
    except (OSError, HTTPException) as error:  # it ends, too
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends, so that terminate_descendants finds it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def terminate_descendants(grace_seconds: float, keep: Callable[[], set[int]] = set) -> None:
    """Send SIGTERM to all descendants, after `grace_seconds` SIGKILL, and return once all have ended. With 0, kill them
    at once. `keep`: returns the sessions of those to be left alone."""
    deadline = time.monotonic() + grace_seconds
    if grace_seconds:
        for process in _find_descendants(keep()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
    while remaining := _find_descendants(keep()):
        for process in remaining:
            if time.monotonic() >= deadline:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
        time.sleep(0.05)


def _find_descendants(sessions: set[int]) -> list[psutil.Process]:
    """Return the descendants outside of these sessions."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) not in sessions:
                found.append(process)
    return found


def read_lengths(job: RLJob, model: str) -> ModelSettings:
    """Return the job with the lengths that it leaves to its model. The head reports a model that cannot be read; a
    store that is too small spills to disk."""
    try:
        return load_model_settings(job, model)
    except RLJobError as error:
        log.warning("the model's settings are unknown: %s", error)
        return ModelSettings(resolve_job(job, None))


def _find_model() -> str:
    """Return where the model is. All exports of a run have the same lengths: the head decides which one is trained."""
    model = os.environ[ENV_MODEL]
    exports = find_exports(Path(model)) if os.environ.get(ENV_MODEL_STEP) else {}
    return str(next(iter(exports.values()), model))


def main() -> int:
    configure_logging()
    try:
        job = load_job_file(os.environ[ENV_JOB_FILE])
    except UserError as error:
        return end_program(str(error), ExitCode.USER)
    settings = read_lengths(job, _find_model())
    store_bytes = trainer_store_bytes(settings.job, settings.context_length)
    adopt_orphans()
    try:
        engines = PodEngines(job, os.environ, _STOP_SECONDS) if job.spec.shares_trainer else None
    except UserError as error:
        return end_program(str(error), ExitCode.USER)
    num_gpus = job.spec.trainer.gpus_per_replica
    worker = Worker(os.environ[ENV_POD_IP], os.environ[ENV_HEAD], num_gpus, store_bytes, engines)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, worker.stop)
    worker.run()
    if engines is None:
        return ExitCode.SUCCEEDED
    failure = engines.failure
    engines.close()
    terminate_descendants(0)
    return end_program(*failure) if failure is not None else ExitCode.SUCCEEDED
