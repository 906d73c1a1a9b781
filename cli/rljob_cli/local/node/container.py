"""One container, restarted as its Pod's restartPolicy says.

Invariant: when `supervise` has returned, no process of the container is alive (the shim ensures it).
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from rljob_api.wire.contract import ENV_TERMINATION_LOG
from rljob_cli.local.node.podshim import SIGNAL_KILL_ALL
from rljob_cli.local.node.podspec import ContainerConfigError, Process
from rljob_cli.local.node.podstatus import EXIT_OF_SIGNAL, ContainerRecord
from rljob_cli.local.node.probes import ProbeState, run_probe, spawn
from rljob_core.backend import Manifest

_BACKOFF_SECONDS = 1.0
_BACKOFF_MAX_SECONDS = 30.0
_BACKOFF_RESET_SECONDS = 60.0
"""A container that ran this long starts again with the first backoff."""
_CONFIG_RETRY_SECONDS = 1.0
_EAGER_PERIOD_SECONDS = 1.0
"""While a container is not ready, it is probed at least this often: on one machine that is cheap."""
_MARKER = " rljob: container "
_MAX_COMMAND_CHARACTERS = 500
_TAIL_LINES = 12
_TAIL_BYTES = 4096


@dataclass(eq=False)
class Container:
    manifest: Manifest
    record: ContainerRecord
    build: Callable[[list[str] | None], Process]
    """build(command) returns the process of the container, or of another command in it (exec probes)."""
    log: Path
    cwd: Path
    on_change: Callable[[], None]
    on_lost_shim: Callable[[], None]
    listening_port: Callable[[int], int]
    """listening_port(containerPort) returns the port at which the process listens instead."""
    started: asyncio.Event = field(default_factory=asyncio.Event)
    """It has started and passed its startup probe (if any) once, or it will not run again."""
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _process: asyncio.subprocess.Process | None = None
    _address: str = ""
    _failed_probe: str = ""
    """Why it was killed."""

    @property
    def termination_log(self) -> Path:
        return self.cwd / f".termination-{self.manifest['name']}"

    async def supervise(self, address: str, restart_policy: str, grace_seconds: float) -> None:
        """Run the container repeatedly until the policy or stop() ends it."""
        self._address, backoff = address, _BACKOFF_SECONDS
        while not self._stopping.is_set():
            started = time.monotonic()
            code = await self._run_once(grace_seconds)
            is_final = restart_policy == "Never" or (restart_policy == "OnFailure" and code == 0)
            if is_final or self._stopping.is_set():
                break
            if time.monotonic() - started > _BACKOFF_RESET_SECONDS:
                backoff = _BACKOFF_SECONDS
            self.record.record_waiting("CrashLoopBackOff", f"back-off {backoff:g} s restarting failed container")
            self.on_change()
            await self._pause(backoff)
            backoff = min(2 * backoff, _BACKOFF_MAX_SECONDS)
            self.record.restart_count += 1
        self.record.finished = True
        self.started.set()
        self.on_change()

    async def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM, and after the grace period SIGKILL to the process tree. Return when it has ended."""
        self._stopping.set()
        await self._terminate(grace_seconds)

    def kill(self) -> None:
        self._stopping.set()
        self._signal(SIGNAL_KILL_ALL)

    async def _run_once(self, grace_seconds: float) -> int | None:
        process = await self._wait_for_config()
        if process is None:
            return None
        process = replace(process, env={**process.env, ENV_TERMINATION_LOG: str(self.termination_log)})
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.termination_log.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            command = " ".join(process.argv).replace("\n", "\\n")[:_MAX_COMMAND_CHARACTERS]
            log.write(self._marker(f"start {self.record.restart_count + 1}: {command}"))
            log.flush()
            running = await spawn(process, log.fileno(), self.cwd)
        self._process = running
        self.record.record_running(datetime.now(UTC))
        self.on_change()
        if self._stopping.is_set():  # stop() was called during the start
            self._signal(signal.SIGTERM)
        probes = asyncio.create_task(self._probe(grace_seconds))
        try:
            code = await running.wait()
        finally:
            probes.cancel()
            await asyncio.gather(probes, return_exceptions=True)
        if code < 0:  # the shim itself was killed; its descendants are orphans now
            self.on_lost_shim()
            code = EXIT_OF_SIGNAL - code
        message = read_termination_log(self.termination_log) or self._failed_probe or read_tail(self.log)
        self._failed_probe = ""
        with self.log.open("ab") as log:
            log.write(self._marker(f"ended with exit code {code}"))
        self.record.record_terminated(code, message, datetime.now(UTC))
        self.on_change()
        return code

    async def _wait_for_config(self) -> Process | None:
        """Return the process to start; None if stop() was called first."""
        while not self._stopping.is_set():
            try:
                return self.build(None)
            except ContainerConfigError as error:
                self.record.record_waiting("CreateContainerConfigError", str(error))
                self.on_change()
                await self._pause(_CONFIG_RETRY_SECONDS)
        return None

    async def _probe(self, grace_seconds: float) -> None:
        """Run the startup probe, then the readiness and liveness probes concurrently."""
        startup = self.manifest.get("startupProbe")
        if startup and (problem := await self._wait_until_started(ProbeState(startup))):
            await self._fail("startup", startup, problem, grace_seconds)
            return
        readiness, liveness = self.manifest.get("readinessProbe"), self.manifest.get("livenessProbe")
        self.record.started, self.record.ready = True, readiness is None
        self.record.has_started = True
        self.started.set()
        self.on_change()
        loops = []
        if readiness:
            loops.append(self._watch_readiness(ProbeState(readiness)))
        if liveness:
            loops.append(self._watch_liveness(ProbeState(liveness), grace_seconds))
        await asyncio.gather(*loops)

    async def _wait_until_started(self, state: ProbeState) -> str:
        """Probe every second, to notice a start early. A failure counts once per period. Return the last error of a
        start that took too long."""
        await asyncio.sleep(state.delay_seconds)
        failed_at = float("-inf")
        while True:
            if not (problem := await self._probe_once(state)):
                return ""
            if time.monotonic() - failed_at >= state.period_seconds:
                failed_at = time.monotonic()
                if state.record(False) is False:
                    return problem
            await asyncio.sleep(min(state.period_seconds, _EAGER_PERIOD_SECONDS))

    async def _watch_readiness(self, state: ProbeState) -> None:
        await asyncio.sleep(state.delay_seconds)
        while True:
            ready = bool(state.record(not await self._probe_once(state)))
            if ready != self.record.ready:
                self.record.ready = ready
                self.on_change()
            await asyncio.sleep(state.period_seconds if ready else min(state.period_seconds, _EAGER_PERIOD_SECONDS))

    async def _watch_liveness(self, state: ProbeState, grace_seconds: float) -> None:
        await asyncio.sleep(state.delay_seconds)
        while True:
            problem = await self._probe_once(state)
            if state.record(not problem) is False:
                await self._fail("liveness", state.probe, problem, grace_seconds)
                return
            await asyncio.sleep(state.period_seconds)

    async def _probe_once(self, state: ProbeState) -> str:
        command = state.probe.get("exec", {}).get("command")
        ports = {port["name"]: port["containerPort"] for port in self.manifest.get("ports", []) if "name" in port}
        listening = {name: self.listening_port(port) for name, port in ports.items()}
        return await run_probe(state.probe, self._address, listening, self.build(command))

    async def _fail(self, which: str, probe: Manifest, problem: str, grace_seconds: float) -> None:
        """Kill the container for a failed probe; `supervise` decides whether it restarts."""
        self._failed_probe = f"its {which} probe failed: {problem}"
        with self.log.open("ab") as log:
            log.write(self._marker(f"killed: {self._failed_probe}"))
        # Shielded, because this task is cancelled as soon as the process ends.
        await asyncio.shield(self._terminate(float(probe.get("terminationGracePeriodSeconds", grace_seconds))))

    async def _terminate(self, grace_seconds: float) -> None:
        running = self._process
        if running is None or running.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_seconds):
                await running.wait()
        except TimeoutError:
            self._signal(SIGNAL_KILL_ALL)
            await running.wait()

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    def _marker(self, text: str) -> bytes:
        moment = datetime.now().astimezone().isoformat(timespec="seconds")
        return f"--- {moment}{_MARKER}{self.manifest['name']} {text}\n".encode()


def is_marker(line: str) -> bool:
    return line.startswith("--- ") and _MARKER in line


def read_termination_log(path: Path) -> str:
    """Return what the program wrote about its end; empty if nothing."""
    try:
        return path.read_bytes()[:_TAIL_BYTES].decode(errors="replace")
    except OSError:
        return ""


def read_tail(path: Path) -> str:
    """Return the last lines that the container wrote since its last start."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    starts = [number for number, line in enumerate(lines) if is_marker(line) and " start " in line]
    written = [line for line in lines[starts[-1] if starts else 0 :] if not is_marker(line)]
    return "\n".join(written[-_TAIL_LINES:])
