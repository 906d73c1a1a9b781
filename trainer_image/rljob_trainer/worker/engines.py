"""The engines of a trainer Pod, for its program and for the driver: a thread with the supervisor and its HTTP endpoint.

Invariant: the Pod's Ray node may join only after `sleep_all` was true for it, so that ranks find free devices.
"""

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from aiohttp import web

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.pod_engines import find_engines
from rljob_api.wire.contract import ENV_HAND_OVER, ENV_POD_IP, ENV_TOKEN, PORT_ENGINES, ExitCode, UrlPath
from rljob_api.wire.ports import listening_port
from rljob_api.wire.weights import EnginesReport
from rljob_trainer.server_thread import ServerThread, require_token
from rljob_trainer.temporary import TemporaryFolder
from rljob_trainer.weights.key import parse_key
from rljob_trainer.worker.engine_process import ROLLOUT, SERVED_MODEL, EngineProcess, engine_environment
from rljob_trainer.worker.supervisor import EngineClient, SupersededError, Supervisor
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
