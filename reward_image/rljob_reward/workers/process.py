"""One worker process as the server sees it: spawn, one request at a time, kill, notice its death.

Owns the process, its socket, its output pipe and its gate. Exactly one verdict comes back for each request: the
worker's reply, or what ended the process. Leaves to the pool when to start one, to isolation what it may do, and to
scoring what a verdict means.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError, model_validator

from rljob_api.wire.protocol import InvalidReason
from rljob_reward.worker import frames
from rljob_reward.worker.loading import Settings
from rljob_reward.workers.isolation import Isolation
from rljob_reward.workers.output import OutputLog
from rljob_reward.workers.seccomp_supervisor import Gate

_OUTPUT_CHUNK_BYTES = 64 << 10
_EXIT_AFTER_CLOSE_SECONDS = 1.0


class Reply(BaseModel):
    """What a worker may answer of a sample. User code shares its process, so nothing else is believed."""

    model_config = ConfigDict(extra="forbid", strict=True)

    score: FiniteFloat | None
    components: dict[str, FiniteFloat]
    reason: InvalidReason | None = Field(strict=False)
    message: str = Field(max_length=2000)

    @model_validator(mode="after")
    def _score_xor_reason(self) -> Reply:
        if (self.score is None) == (self.reason is None):
            raise ValueError("an answer has a score or a reason")
        return self


class Started(BaseModel):
    """A worker's first frame: what it found in the source, or why it cannot run it."""

    model_config = ConfigDict(extra="forbid")

    entrypoint: str = ""
    signature: str = ""
    missing: list[str] = []
    """Means of isolation that this machine does not offer."""
    error: str = ""


@dataclass(frozen=True)
class Ended:
    """The process ended before it answered."""

    reason: InvalidReason
    message: str


Verdict = list[Reply] | Ended
"""A reply for each sample of the execution, or what ended it for all of them."""
_REPLIES = TypeAdapter(list[Reply])


class WorkerProcess(asyncio.Protocol):
    """on_started, on_idle and on_exit tell the pool; the callback given to execute gets the one verdict."""

    def __init__(
        self,
        settings: Settings,
        isolation: Isolation,
        output: OutputLog,
        on_idle: Callable[[WorkerProcess], None],
        on_exit: Callable[[WorkerProcess], None],
    ) -> None:
        self._function = settings
        self._isolation = isolation
        self._cage = isolation.make_cage()
        self._gate: Gate | None = None
        self._output = output
        self._on_idle = on_idle
        self._on_exit = on_exit
        self._buffer = frames.FrameBuffer()
        self._callback: Callable[[Verdict], None] | None = None
        self._num_samples = 0
        self._killed_as: Ended | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._loop = asyncio.get_running_loop()
        self.started: asyncio.Future[Started] = self._loop.create_future()
        self.exited: asyncio.Future[None] = self._loop.create_future()
        self._spawn()

    def _spawn(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._handover, their_handover = socket.socketpair()
        passed = (theirs.fileno(), their_handover.fileno())
        with theirs, their_handover:
            self._process = subprocess.Popen(
                # -P: nothing that user code wrote into a working directory is imported in place of ours.
                [
                    self._isolation.python,
                    "-P",
                    "-m",
                    "rljob_reward.worker",
                    str(passed[0]),
                    str(os.getpid()),
                    str(passed[1]),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=passed,
                env=self._isolation.build_environment(self._cage),
                start_new_session=True,  # a process group of its own: a kill reaches what user code started, too
                bufsize=0,
            )
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._loop.add_reader(self._stdout.fileno(), self._drain_output)
        # The pidfd, not the socket, tells of death: a grandchild may hold the socket's other end open.
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._reap)
        self._handover.setblocking(False)
        self._loop.add_reader(self._handover, self._take_gate)

    @property
    def scratch(self) -> str:
        """Its directory."""
        return self._cage.scratch

    @property
    def is_busy(self) -> bool:
        """It runs user code."""
        return self._callback is not None or not self.started.done()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def connect(self) -> None:
        """Hand the settings over. The answer arrives in `started`."""
        await self._loop.create_unix_connection(lambda: self, sock=self._socket)
        if self._transport is not None:
            told = {"settings": self._function._asdict(), "cage": self._cage._asdict()}
            self._transport.write(frames.encode(json.dumps(told).encode()))

    def execute(self, body: bytes, num_samples: int, callback: Callable[[Verdict], None]) -> None:
        """Run one request. The worker must be idle."""
        assert self._callback is None
        assert self._transport is not None
        self._callback = callback
        self._num_samples = num_samples
        if not self._transport.is_closing():  # else the verdict is how the process ends, which is about to be noticed
            self._transport.write(frames.encode(body))

    def kill(self, reason: InvalidReason, message: str) -> None:
        """End the process and all that it started; its request, if any, ends with this verdict once it is dead."""
        if self.exited.done():
            return  # its number may be another process's by now
        if self._killed_as is None:
            self._killed_as = Ended(reason, message)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's share no base class with asyncio's

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._buffer.feed(data):
                self._receive(frame)
        except (frames.BrokenFrameError, ValidationError) as error:
            what = str(error) if isinstance(error, frames.BrokenFrameError) else error.errors()[0]["msg"]
            self.kill(InvalidReason.WORKER_DIED, f"the worker wrote garbage to its pipe and was replaced: {what}")

    def connection_lost(self, error: Exception | None) -> None:
        # As a rule its process is about to end, and how it ends says more than this does.
        message = "the worker closed its pipe and was replaced"
        self._loop.call_later(_EXIT_AFTER_CLOSE_SECONDS, self.kill, InvalidReason.WORKER_DIED, message)

    def _receive(self, frame: bytes) -> None:
        if self._killed_as is not None:
            return
        if not self.started.done():
            self.started.set_result(Started.model_validate_json(frame))
            return
        replies = _REPLIES.validate_json(frame)
        if len(replies) == 1 and replies[0].reason is not None:
            replies *= self._num_samples  # one failure of all
        if len(replies) != self._num_samples:
            raise frames.BrokenFrameError(f"{len(replies)} answers for {self._num_samples} samples")
        callback, self._callback = self._callback, None
        if callback is None:
            raise frames.BrokenFrameError("an answer without a request")
        callback(replies)
        self._on_idle(self)

    def _take_gate(self) -> None:
        """The worker hands over its gate, or closes the socket where there is none."""
        try:
            _, descriptors, _, _ = socket.recv_fds(self._handover, 1, 1)
        except BlockingIOError:
            return
        except OSError:
            descriptors = []
        self._close_handover()
        if descriptors:
            self._gate = Gate(descriptors[0], self._cage.mark, self._function.max_processes, self._kill_excessive)

    def _close_handover(self) -> None:
        if self._handover.fileno() >= 0:
            self._loop.remove_reader(self._handover)
            self._handover.close()

    def _kill_excessive(self) -> None:
        num = self._function.max_processes
        message = f"the function had more than {num} processes and threads (maxProcesses) and was killed"
        self.kill(InvalidReason.WORKER_DIED, message)

    def _drain_output(self) -> None:
        try:
            data = os.read(self._stdout.fileno(), _OUTPUT_CHUNK_BYTES)
        except BlockingIOError:
            return
        if data:
            self._output.write(data)
        else:
            self._loop.remove_reader(self._stdout.fileno())

    def _reap(self) -> None:
        """The process is dead but not yet waited for, so its group's number is still its own."""
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        self._release()
        self._drain_output()
        self._loop.remove_reader(self._stdout.fileno())
        self._stdout.close()
        verdict = self._killed_as or Ended(InvalidReason.WORKER_DIED, f"the worker process {_how_it_ended(code)}")
        self._killed_as = verdict
        if self._transport is not None:
            self._transport.abort()
        self.exited.set_result(None)
        if not self.started.done():
            self.started.set_result(Started(error=f"{self._function.path}: while it was imported, {verdict.message}"))
        callback, self._callback = self._callback, None
        if callback is not None:
            callback(verdict)
        self._on_exit(self)

    def _release(self) -> None:
        """End what it left behind. A closed gate lets none of that start another process."""
        self._close_handover()
        had_children = self._gate is None or self._gate.has_spawned
        if self._gate is not None:
            self._gate.close()
        self._isolation.release(self._cage, had_children)


def _how_it_ended(code: int) -> str:
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hints: dict[int, str] = {signal.SIGKILL: " (perhaps out of memory)", signal.SIGXCPU: " (cpuSeconds)"}
        hint = hints.get(-code, "")
        return f"was ended by {name}{hint}; its log has what it printed"
    return f"ended with exit code {code}"
