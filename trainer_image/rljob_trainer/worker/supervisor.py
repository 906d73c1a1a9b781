"""Runs the engines of a trainer Pod as `Engines` says: starts, asks, kills and buries them.

Invariant: an engine counts as dead only when none of its processes is left, so that its memory is free.

The processes of one engine are a session of its own, which ends as a whole. Invariant: after `kill`, no process of the
session is left, not even a zombie. The program must be a subreaper.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import aiohttp
from pydantic import ValidationError

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.pod_engines import PodEngine
from rljob_api.wire.contract import (
    ENV_ENGINE,
    ENV_ENGINE_MODEL,
    ENV_TERMINATION_LOG,
    ENV_TOKEN,
    PORT_ROLLOUT,
    ExitCode,
    UrlPath,
)
from rljob_api.wire.discovery import listening_port
from rljob_api.wire.termination import ERROR_PREFIX, GPU_FAULT_PREFIX
from rljob_api.wire.weights import EngineMemory, EnginesReport
from rljob_trainer.concurrency import end_tasks
from rljob_trainer.worker.turns import SERVE, SLEEP, Engines, Order

ROLLOUT = (sys.executable, "-m", "rljob_trainer.rollout")
SERVED_MODEL = (sys.executable, "-m", "rljob_trainer.rollout.served")
ENV_DEVICES = "CUDA_VISIBLE_DEVICES"


def engine_environment(values: Mapping[str, str], engine: PodEngine, num_pod_gpus: int, log: Path) -> dict[str, str]:
    """Return the variables of an engine of a Pod with `num_pod_gpus`. `log`: where it writes why it ends."""
    environment = {**values, ENV_ENGINE: str(engine.number), ENV_TERMINATION_LOG: str(log)}
    if engine.model:
        environment[ENV_ENGINE_MODEL] = engine.model
    if engine.gpus:
        given = values.get(ENV_DEVICES)
        names = [name.strip() for name in given.split(",")] if given else [str(index) for index in range(num_pod_gpus)]
        if len(names) < num_pod_gpus:
            raise UserError(
                f"spec.trainer.gpusPerReplica is {num_pod_gpus}, but {ENV_DEVICES} has {len(names)} GPUs: {given}; "
                "remove the variable from spec.trainer.env"
            )
        environment[ENV_DEVICES] = ",".join(names[index] for index in engine.gpus)
    return environment


class EngineProcess:
    """Runs from construction until it ends or is killed. Its output goes to this program's, with a prefix."""

    def __init__(self, number: int, environment: Mapping[str, str], command: Sequence[str]) -> None:
        self._message = Path(environment[ENV_TERMINATION_LOG])
        self._message.unlink(missing_ok=True)
        process = subprocess.Popen(
            command,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.session = process.pid
        self._is_gone, self._lock = False, threading.Lock()
        process.returncode = 0  # `poll` and `kill` wait for it
        arguments = (process.stdout, f"engine {number}: ".encode())
        threading.Thread(target=_copy_lines, args=arguments, name=f"engine-{number}", daemon=True).start()

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal; None while the engine runs. Not after `kill`.

        It stays a zombie until then, so that its session's number belongs to no other process."""
        ended = os.waitid(os.P_PID, self.session, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def message(self) -> str:
        """Return why it ended, as it wrote it; empty if it did not."""
        with contextlib.suppress(OSError):
            return self._message.read_text(errors="replace").removeprefix(ERROR_PREFIX)
        return ""

    def terminate(self) -> None:
        """Ask it to end."""
        os.kill(self.session, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the whole session, and return once it is gone. May be repeated, also by another thread."""
        with self._lock:
            if self._is_gone:
                return
            os.killpg(self.session, signal.SIGKILL)
            # Who loses its parent becomes a child of this program before the parent can be reaped.
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.waitpid(-self.session, 0)
            self._is_gone = True


def _copy_lines(output: BinaryIO, prefix: bytes) -> None:
    with output:
        for line in output:
            # One write: lines of several engines do not mix.
            sys.stderr.buffer.write(prefix + line)
            sys.stderr.buffer.flush()


log = logging.getLogger(__name__)

_NOT_WARM = 409


class EngineClient:
    """Must be created, and used, in one event loop."""

    def __init__(self, address: str) -> None:
        """`address`: where this Pod's servers listen; empty for all addresses."""
        self._address = address or "127.0.0.1"
        headers = {"Authorization": f"Bearer {os.environ[ENV_TOKEN]}"}
        self._session = aiohttp.ClientSession(headers=headers)

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def ask(self, number: int, wish: str, timeout: float, *, is_warm: bool) -> EngineMemory | None:
        """Ask an engine to sleep (SLEEP), to serve its own model (SERVE), or to wake up for the weights with the key
        `wish`. Return what it holds then;
        None if it does not answer within `timeout` seconds, or is not warm. TransientError if it fails. `is_warm`: it
        was warm before, so it fails if it does not listen."""
        url = f"http://{self._address}:{listening_port(PORT_ROLLOUT) + number}"
        if wish == SLEEP:
            url += UrlPath.ROLLOUT_SLEEP
        else:
            url += UrlPath.ROLLOUT_WAKE if wish == SERVE else f"{UrlPath.ROLLOUT_WAKE}?want={wish}"
        try:
            async with self._session.post(
                url, timeout=aiohttp.ClientTimeout(total=timeout), allow_redirects=False
            ) as response:
                text = await response.text()
        except aiohttp.ClientConnectorError as error:
            if is_warm:
                raise TransientError(f"{url}: {error}") from error
            return None
        except (aiohttp.ClientError, TimeoutError):
            return None
        if response.status == _NOT_WARM:
            return None
        try:
            if response.status != 200:
                raise TransientError(f"{url}: HTTP {response.status}: {text[:500]}")
            return EngineMemory.model_validate_json(text)
        except ValidationError as error:
            raise TransientError(f"{url}: {error}") from error


_POLL_SECONDS = 0.05


class SupersededError(Exception):
    """Another change of turns was requested meanwhile."""


class Supervisor:
    """All methods but those of a program's end are for one event loop."""

    def __init__(self, engines: Engines, start: Callable[[int], EngineProcess]) -> None:
        """`start`: starts the engine with this number."""
        self._engines, self._start = engines, start
        self._processes: dict[int, EngineProcess] = {}
        self._dying: set[int] = set()
        """Engines that are being killed."""
        self._begun = asyncio.Event()
        self.reasons: dict[int, str] = {}
        """Why an engine is not warm, by its number; the last end of each that has died."""
        self.failure: tuple[str, ExitCode] | None = None
        """Message and code with which the Pod must end: a new start of the engine does not help."""

    def sessions(self) -> set[int]:
        """Return the sessions of the engines that run. For any thread."""
        return {process.session for process in list(self._processes.values())}

    @contextlib.asynccontextmanager
    async def running(self, client: EngineClient) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._run(client, number)) for number in range(len(self._engines.engines))]
        tasks.append(asyncio.create_task(self._begin()))
        try:
            yield
        finally:
            await end_tasks(*tasks)

    async def change(self, order: Order) -> EnginesReport:
        """Change the turn, and return once it is true. Before the first turn, all engines must have been warm. Raise
        SupersededError if a later call asks for another turn."""
        begin = time.monotonic()
        await self._begun.wait()
        if self._engines.order != order:
            log.info("turn: %s %s", order.turn, order.want)
            self._engines.order = order
        await _poll(lambda: self._engines.order != order or self._engines.is_true(time.monotonic()))
        if self._engines.order != order:
            raise SupersededError(f"superseded by the turn: {self._engines.order.turn}")
        seconds, engines = time.monotonic() - begin, self._engines
        return EnginesReport(
            num_running=engines.num_running,
            num_restarts=engines.num_restarts,
            num_bytes=engines.num_bytes(of_models=False),
            model_bytes=engines.num_bytes(of_models=True) if engines.has_models else None,
            seconds=seconds,
        )

    async def stop(self, grace_seconds: float) -> None:
        """End all engines: ask them, and kill them after `grace_seconds`. Not while `running`."""
        deadline = time.monotonic() + grace_seconds
        for number in list(self._dying):
            await self._bury(number)  # begun before
        for process in self._processes.values():
            process.terminate()
        await _poll(lambda: time.monotonic() > deadline or all(p.poll() is not None for p in self._processes.values()))
        for number in list(self._processes):
            await self._bury(number)

    async def _begin(self) -> None:
        await _poll(lambda: self._engines.is_true(time.monotonic()))
        self._engines.order = Order("trainer")
        self._begun.set()

    async def _run(self, client: EngineClient, number: int) -> None:
        while True:
            await self._act(client, number)
            await asyncio.sleep(_POLL_SECONDS)

    async def _act(self, client: EngineClient, number: int) -> None:
        process = self._processes.get(number)
        if process is not None and (code := process.poll()) is not None:
            await self._record_end(number, code, process.message())
            return
        step = self._engines.next_step(number, time.monotonic())
        if step == "start":
            try:
                self._processes[number] = self._start(number)
            except OSError as error:  # no memory or no process number left
                self._engines.record_started(number, time.monotonic())
                self._record_died(number, f"it does not start: {error}")
                return
            self._engines.record_started(number, time.monotonic())
            self.reasons.setdefault(number, "it starts")
        elif step == "kill":
            await self._kill(number, "it did not obey in time")
        elif step == "ask":
            await self._ask(client, number)

    async def _ask(self, client: EngineClient, number: int) -> None:
        engine = self._engines.engines[number]
        wish = self._engines.order.wish_of(engine)
        try:
            timeout = max(1.0, engine.deadline - time.monotonic())
            memory = await client.ask(number, wish, timeout, is_warm=engine.is_warm)
        except TransientError as error:
            await self._kill(number, str(error))
            return
        if memory is not None:
            self._engines.record_obeyed(number, wish, memory, time.monotonic())
            self.reasons.pop(number, None)

    async def _kill(self, number: int, reason: str) -> None:
        await self._bury(number)
        self._record_died(number, f"killed: {reason}")

    async def _record_end(self, number: int, code: int, message: str) -> None:
        await self._bury(number)
        is_misconfigured = code == ExitCode.USER and not self._engines.engines[number].was_warm
        if is_misconfigured or message.startswith(GPU_FAULT_PREFIX):
            known = code in {each.value for each in ExitCode}
            self.failure = message or f"engine {number} ended", ExitCode(code if known else ExitCode.INFRASTRUCTURE)
        end = f"ended with {code}" if code >= 0 else f"ended by signal {-code}"
        self._record_died(number, f"{end}: {message}" if message else end)

    async def _bury(self, number: int) -> None:
        self._dying.add(number)
        await asyncio.to_thread(self._processes[number].kill)
        self._dying.discard(number)
        del self._processes[number]

    def _record_died(self, number: int, reason: str) -> None:
        delay = self._engines.record_died(number, time.monotonic())
        self.reasons[number] = reason
        log.error("engine %d %s; it starts again after %.0f s, not in the trainer's turn", number, reason, delay)


async def _poll(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - processes and clocks have no event
        await asyncio.sleep(_POLL_SECONDS)
