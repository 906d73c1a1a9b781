"""One worker process as the server sees it: spawn, requests, kill, notice its death.

Owns the process, its socket, its pipes and its seccomp supervisor. Each request gets exactly one result: the worker's
replies, or how the process ended. Processes that requests started end before the worker is idle again. The pool decides
when to start and to replace a worker, isolation what it may do, `worker_slots` what each request gets; a request of a
shared process (episodesPerProcess) is ended by `shared_requests`.
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

import psutil
from pydantic import ValidationError

from rljob_api.tracing.spans import current
from rljob_api.wire.base import InvalidReason
from rljob_service.kinds import KINDS
from rljob_service.pool import process_marks
from rljob_service.pool.environment import build_environment
from rljob_service.pool.import_watch import StackPipe
from rljob_service.pool.isolation import Isolation
from rljob_service.pool.seccomp_supervisor import SeccompSupervisor
from rljob_service.pool.shared_requests import SharedRequests
from rljob_service.pool.worker_slots import RunningRequests, has_failed
from rljob_service.results import ExecutionResult, StartupReport, failure
from rljob_service.slots import Callback
from rljob_service.worker.code.code_output import describe_end
from rljob_service.worker.process import frames, scratch
from rljob_service.worker.sandbox import PRIVATE_SHM, lacks, private_folders
from rljob_service.worker.settings import REQUEST, TEARDOWN_SECONDS, FunctionSettings

_OUTPUT_CHUNK_BYTES = 64 << 10
_EXIT_AFTER_CLOSE_SECONDS = 1.0
_MAX_REPORT_BYTES = 1 << 20
"""Limit of a worker's first frame."""
_MAX_REASON_CHARACTERS = 300
_HINTS: dict[int, str] = {signal.SIGKILL: " (perhaps out of memory)", signal.SIGXCPU: " (cpuSeconds)"}
_MULTIPROCESSING = ("multiprocessing.spawn", "multiprocessing.forkserver")
_GENTLE = frozenset((InvalidReason.TIMEOUT, InvalidReason.CANCELLED))
"""Reasons for which a request may still run its `finally` blocks, if its kind has a teardown."""


@dataclass(eq=False)
class WorkerProcess(asyncio.Protocol):
    """Calls for the pool on_free when a request has ended, on_hold if it must get none until then, and on_exit;
    `started` and `exited` are the futures of both ends of its life."""

    settings: FunctionSettings
    _isolation: Isolation
    _write_output: Callable[[bytes], None]
    _on_free: Callable[[WorkerProcess], None]
    _on_hold: Callable[[WorkerProcess], None]
    _on_exit: Callable[[WorkerProcess], None]

    def __post_init__(self) -> None:
        self._sandbox = self._isolation.allocate_sandbox()
        self.scratch = self._sandbox.scratch
        self._supervisor: SeccompSupervisor | None = None
        kind = KINDS[self.settings.serves]
        self._replies, self._has_teardown = kind.replies, kind.has_teardown
        self._buffer = frames.FrameBuffer(_MAX_REPORT_BYTES)
        self.requests = RunningRequests()
        self._killed_as: ExecutionResult | None = None
        self.has_failed = False
        """Whether the last request failed."""
        self.problem = ""
        """Why it must be replaced after its current requests, as it said or as its processes show."""
        self.shared = SharedRequests(self) if self.settings.is_shared else None
        self._has_private_memory = False
        self._kept: set[psutil.Process] = set()
        """Processes that the import started: they stay until the worker ends."""
        self._ending: asyncio.Task[None] | None = None
        self._culprit = 0
        """The request for which the process ended."""
        self._transport: asyncio.WriteTransport | None = None
        self._loop = asyncio.get_running_loop()
        self.started: asyncio.Future[StartupReport] = self._loop.create_future()
        self.exited: asyncio.Future[None] = self._loop.create_future()
        self._spawn()

    def _spawn(self) -> None:
        self._socket, worker_socket = socket.socketpair()
        self._handover, worker_handover = socket.socketpair()
        self._stack = StackPipe()
        descriptors = [worker_socket.fileno(), worker_handover.fileno(), self._stack.write_end]
        descriptors += [self.shared.descriptor] if self.shared is not None else []
        # -P: Python must not import files that user code wrote into a working directory.
        self._command = [self._isolation.python, "-P", "-m", "rljob_service.worker"]
        self._command += map(str, (descriptors[0], os.getpid(), *descriptors[1:]))
        self._command += ["-1"] if self.shared is None else []
        with worker_socket, worker_handover:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=descriptors,
                env=build_environment(os.environ, self._sandbox.home),
                start_new_session=True,  # its own process group: a kill also reaches what user code started
                bufsize=0,
            )
        self._stack.close_write_end()
        if self.shared is not None:
            self.shared.close_descriptor()
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._loop.add_reader(self._stdout.fileno(), self._drain_output)
        # Only the pidfd reports the death: a grandchild may hold the socket's other end open.
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._reap)
        self._handover.setblocking(False)
        self._loop.add_reader(self._handover, self._receive_listener)

    @property
    def is_busy(self) -> bool:
        return bool(self.requests) or not self.started.done()

    async def connect(self) -> None:
        """Send the settings. The worker's answer arrives in `started`."""
        await self._loop.create_unix_connection(lambda: self, sock=self._socket)
        if self._transport is not None:
            first = {"settings": self.settings._asdict(), "sandbox": self._sandbox._asdict()}
            self._transport.write(frames.encode(json.dumps(first).encode()))

    def start(self, body: bytes, num_samples: int, callback: Callback) -> int:
        """Start one request, and call `callback` with its result. Return its number."""
        assert self.shared is not None or not self.requests
        request = self.requests.start(body, num_samples, callback)
        most_samples = max(each.num_samples for each in self.requests.values())
        self._buffer.max_bytes = self._replies.max_bytes * most_samples
        if self.shared is not None and len(self.requests) == 1:
            self.shared.start_watch()
        self.send(frames.add_traceparent(body, current()), request.number)
        return request.number

    def send(self, payload: bytes, number: int) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():  # else _reap() delivers how the process ended
            self._transport.write(frames.encode(payload, number))

    def end_request(self, number: int, reason: InvalidReason, message: str) -> None:
        """End one request with this reason. No effect without it."""
        if self.shared is None:
            self.kill(reason, message)
        else:
            self.shared.end(number, failure(reason, message))

    def used_bytes(self, limit: int) -> int:
        """Return the size of its files, or more than `limit`. Blocks; may be called from another thread."""
        total = scratch.used_bytes(self.scratch, limit)
        processes = [self.pid]
        if self._supervisor is not None and self._supervisor.has_spawned:
            processes = [process.pid for process in process_marks.find_processes(self._sandbox.mark)]
        total += sum(scratch.unnamed_bytes(pid, self.scratch, private_folders.TEMPORARY) for pid in processes)
        if self._has_private_memory:
            total += scratch.shared_memory_bytes(self.pid, private_folders.SHARED_MEMORY)
        return total

    async def locate(self) -> str:
        """Return the line that its import, or a shared process, executes; empty if that is unknown."""
        can_answer = self._handover.fileno() < 0 and (self.shared is not None or not self.started.done())
        return await self._stack.locate(self.pid, self.settings.path) if can_answer else ""

    def kill(self, reason: InvalidReason, message: str) -> None:
        """Kill the process and all that it started; its requests fail with this reason once it is dead.

        A request with a teardown gets SIGTERM first, or is cancelled, and has some seconds to release what it holds.
        """
        if self.exited.done():
            return  # the kernel may have reused its pid
        is_first = self._killed_as is None
        self._killed_as = self._killed_as or failure(reason, message)
        if not self._has_teardown or not self.requests or reason not in _GENTLE:
            self._kill_group()
        elif is_first:
            if self.shared is None:
                os.kill(self.pid, signal.SIGTERM)
            else:
                self.shared.end_all(self._killed_as)
            self._loop.call_later(TEARDOWN_SECONDS, self._kill_group)

    def kill_for(self, culprit: int, message: str) -> None:
        """Kill a shared process because of one of its requests; 0: it is unknown which."""
        self._culprit = self._culprit or culprit
        self.kill(InvalidReason.WORKER_DIED, message)

    def _kill_group(self) -> None:
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's share no base class with asyncio's

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._buffer.feed(data):
                self._receive(frame.number, frame.payload)
        except (frames.BrokenFrameError, ValidationError) as error:
            what = str(error) if isinstance(error, frames.BrokenFrameError) else error.errors()[0]["msg"]
            self.kill(InvalidReason.WORKER_DIED, f"the worker wrote garbage to its pipe and was replaced: {what}")

    def connection_lost(self, error: Exception | None) -> None:
        # Usually the process is about to exit, and its exit status explains more than a closed pipe.
        message = "the worker closed its pipe and was replaced"
        self._loop.call_later(_EXIT_AFTER_CLOSE_SECONDS, self.kill, InvalidReason.WORKER_DIED, message)

    def _receive(self, number: int, frame: bytes | None) -> None:
        if self._killed_as is not None and (self.shared is None or self.shared.count_answer(number)):
            return self._kill_group()  # it has released what it held
        if self._killed_as is not None:
            return
        if frame is None:
            return self._finish(number, self._replies.too_long)
        if not self.started.done():
            if self.shared is None:
                self._stack.close()
            if self._supervisor is not None and self._supervisor.has_new_processes:
                self._kept = set(process_marks.find_processes(self._sandbox.mark))
                self._supervisor.has_new_processes = False
            report = StartupReport.model_validate_json(frame)
            self._has_private_memory = not lacks(report.missing, PRIVATE_SHM)
            self.started.set_result(report)
            return
        if frame.startswith(frames.RETIRING):
            text = frame[len(frames.RETIRING) :].decode(errors="replace")
            self.problem = text[:_MAX_REASON_CHARACTERS]
            return
        request = self.requests.get(number)
        if request is None:
            raise frames.BrokenFrameError("an answer without a request")
        if request.ends_as is not None:
            return self._finish(number, request.ends_as)
        computed_seconds, answer = frames.split_computed(frame)
        replies: ExecutionResult = self._replies.adapter.validate_json(answer)
        failed_as_a_whole = len(replies) == 1 and replies[0].reason is not None
        if len(replies) != request.num_samples and not failed_as_a_whole:
            raise frames.BrokenFrameError(f"{len(replies)} answers for {request.num_samples} samples")
        self._finish(number, replies, computed_seconds)

    def _finish(self, number: int, result: ExecutionResult, computed_seconds: float | None = None) -> None:
        if self.requests.get(number) is None:
            raise frames.BrokenFrameError("an answer without a request")
        callback, result = self.requests.finish(number, result)
        if self.shared is not None and not self.requests:
            self.shared.watch.stop()
        callback(result, computed_seconds)
        self.has_failed = has_failed(result)
        if not self.requests and self._supervisor is not None and self._supervisor.has_new_processes:
            self._supervisor.has_new_processes = False
            self._on_hold(self)
            self._ending = self._loop.create_task(self._end_processes())
        else:
            self._on_free(self)

    async def _end_processes(self) -> None:
        """Kill what the request started and left running."""
        if self.exited.done():
            return
        kept = {psutil.Process(self.pid), *self._kept}
        commands = await asyncio.to_thread(process_marks.kill_processes, self._sandbox.mark, kept)
        if self.exited.done():
            return
        if self.settings.isolation != REQUEST and any(map(self._may_depend_on, commands)):
            self.problem = self.problem or (
                "a request left processes of multiprocessing, which ended with it; create pools during the import"
            )
        self._on_free(self)

    def _may_depend_on(self, command: list[str]) -> bool:
        """Whether the process was forked, or started by multiprocessing: without it, an object may be broken."""
        return command == self._command or any(each in word for word in command for each in _MULTIPROCESSING)

    def _receive_listener(self) -> None:
        """Take the worker's seccomp listener; a worker without one closes the socket."""
        try:
            _, descriptors, _, _ = socket.recv_fds(self._handover, 1, 1)
        except BlockingIOError:
            return
        except OSError:
            descriptors = []
        self._close_handover()
        if descriptors:
            self._supervisor = SeccompSupervisor(
                descriptors[0],
                self._sandbox.mark,
                self.scratch,
                self.settings.process_limit,
                self._kill_excessive,
                self.pid if self.settings.isolation == REQUEST else None,
            )

    def _close_handover(self) -> None:
        if self._handover.fileno() >= 0:
            self._loop.remove_reader(self._handover)
            self._handover.close()

    def _kill_excessive(self) -> None:
        num = self.settings.max_processes
        message = f"the function had more than {num} processes and threads (maxProcesses) and was killed"
        # The process waits in the call with which it would start one more.
        self.kill_for(self.shared.board.current if self.shared is not None else 0, message)

    def _drain_output(self) -> None:
        try:
            data = os.read(self._stdout.fileno(), _OUTPUT_CHUNK_BYTES)
        except BlockingIOError:
            return
        if data:
            self._write_output(data)
        else:
            self._loop.remove_reader(self._stdout.fileno())

    def _reap(self) -> None:
        """Clean up after the dead process. It is not reaped yet, so the kernel cannot have reused its group's id."""
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        self._close_handover()
        had_children = self._supervisor is None or self._supervisor.has_spawned
        # Once the supervisor is closed, nothing that is left behind can start another process.
        if self._supervisor is not None:
            self._supervisor.close()
        self._isolation.release(self._sandbox, had_children)
        self._drain_output()
        self._loop.remove_reader(self._stdout.fileno())
        self._stdout.close()
        self._stack.close()
        if self._killed_as is None:
            self._culprit = self.shared.board.current if self.shared is not None else 0
            hint = _HINTS.get(-code, "") + ("; its log has what it printed" if code < 0 else "")
            self._killed_as = failure(InvalidReason.WORKER_DIED, f"the worker process {describe_end(code)}{hint}")
        if self._transport is not None:
            self._transport.abort()
        self.exited.set_result(None)
        if not self.started.done():
            message = f"{self.settings.path}: while it was imported, {self._killed_as[0].message}"
            self.started.set_result(StartupReport(error=message))
        for callback, result in self.requests.end_all(self._name_cause(self._killed_as), self._culprit):
            callback(result)
        self._on_exit(self)

    def _name_cause(self, result: ExecutionResult) -> ExecutionResult:
        """Return why its request failed. Code of the policy that ended its worker would do it again: this is for the
        model to know, and no reason to retry."""
        if result[0].reason is InvalidReason.WORKER_DIED and self.settings.runs_code_of_policy:
            return failure(InvalidReason.BAD_REQUEST, f"the code ended its sandbox: {result[0].message}")
        return result
