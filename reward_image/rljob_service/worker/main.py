"""One worker process: `python -m rljob_service.worker FD PARENT_PID HANDOVER_FD STACK_FD BOARD_FD`.

One request at a time, or many coroutines (shared_calls.py), with BOARD_FD; -1: none. The server kills it at a timeout,
the kernel when the server dies. Frames have a dedicated socket, so output of user code cannot disturb them. SIGUSR1
writes the stack to STACK_FD: until the function has loaded, or always in a shared process. Invariant: no user code runs
outside the sandbox, and each request finds the process as the import left it, except for Python's objects and for what
requests leave that run together.

Of what a request leaves behind in the worker's own process, timers are reset and files removed; what cannot be undone
is a reason to replace the worker. Processes are ended by the server (pool/process.py). Invariant: nothing that the
import created is touched.
"""

from __future__ import annotations

import errno
import faulthandler
import inspect
import json
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rljob_api.errors import UserError
from rljob_api.functions.values import Sample
from rljob_service.worker import sandbox, trace_context
from rljob_service.worker.forked_calls import CallDiedError, ForkedCalls
from rljob_service.worker.forms.binding import Binding
from rljob_service.worker.forms.outcome import EXCEPTION, WORKER_DIED, CallOutcome, Outcome, failed_call, invalid
from rljob_service.worker.load.entrypoints import BoundFunction
from rljob_service.worker.load.loading import describe_limit, explain, load
from rljob_service.worker.process.board import Board
from rljob_service.worker.process.frames import RETIRING, BlockingChannel, add_computed, split_traceparent
from rljob_service.worker.process.scratch import ScratchCleaner
from rljob_service.worker.sandbox import WorkerSandbox, private_folders
from rljob_service.worker.sandbox.system import die_with
from rljob_service.worker.settings import EPISODES, REQUEST, FunctionSettings

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_THREAD_GRACE_SECONDS = 0.02
_EXHAUSTED = frozenset((errno.ENOMEM, errno.EMFILE, errno.ENFILE))
_MAX_CAUSES = 100


class Leftovers:
    """Created after the import. `reset` undoes one request and returns why the worker must be replaced, or ''."""

    def __init__(self) -> None:
        self._kept = frozenset(_find_threads())

    def reset(self) -> str:
        _reset_timers()
        threading = sys.modules.get("threading")
        if threading is None or threading.active_count() == 1:
            return ""
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer) and thread not in self._kept:
                thread.cancel()
        left = [thread for thread in _find_threads() if thread not in self._kept]
        for thread in left:
            thread.join(_THREAD_GRACE_SECONDS / len(left))
        names = ", ".join(thread.name for thread in left if thread.is_alive())
        return f"a request left threads that still run: {names}" if names else ""


def _reset_timers() -> None:
    """Cancel pending alarms. A handler of the function may raise meanwhile."""
    pending = True
    while pending:
        try:
            for timer in _TIMERS:
                signal.setitimer(timer, 0)
            pending = False
        except BaseException:  # raised by a signal handler that the function installed
            continue


def _find_threads() -> Iterator[Any]:
    """Yield the threads that would keep a program from ending. Threads of executors wait for work, and may stay."""
    threading = sys.modules.get("threading")
    if threading is None:
        return
    executors = sys.modules.get("concurrent.futures.thread")
    pooled = getattr(executors, "_threads_queues", {})
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread() and thread not in pooled:
            yield thread


def describe_exhaustion(error: BaseException) -> str:
    """Return the resource of the process that is used up, by an error or its causes; empty if none is."""
    current: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if current is None:
            break
        if isinstance(current, MemoryError) or (isinstance(current, OSError) and current.errno in _EXHAUSTED):
            what = "memory" if isinstance(current, MemoryError) or current.errno == errno.ENOMEM else "open files"
            return f"it ran out of {what}"
        current = current.__cause__ or current.__context__
    return ""


def main(arguments: list[str]) -> int:
    descriptor, parent_pid, handover, stack, board = map(int, arguments)
    die_with(parent_pid)
    # A woken worker must not preempt the server in the middle of its loop: that would delay every request.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # A process that user code starts must not hold this socket open.
    os.set_inheritable(descriptor, False)
    os.set_inheritable(stack, False)
    # Before the server sees the end of the handover, after which it may send the signal.
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    connection = socket.socket(fileno=descriptor)
    channel = BlockingChannel(connection)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    first = channel.read()
    if first is None or first.payload is None:
        return 0
    message = json.loads(first.payload)
    settings, worker_sandbox = FunctionSettings(**message["settings"]), WorkerSandbox(**message["sandbox"])
    with socket.socket(fileno=handover) as sock:
        missing = sandbox.enter(settings, worker_sandbox, sock)
    home = os.getcwd()
    mounted = [entry.path for entry in os.scandir(worker_sandbox.temporary)]
    _limit_cpu(settings)
    sys.path.append(worker_sandbox.modules)
    if settings.is_shared and settings.serves == EPISODES:
        from rljob_service.worker.episodes.variables import share_environment

        share_environment()
    try:
        bound = load(settings)
    except UserError as error:
        channel.write(json.dumps({"error": str(error)}).encode())
        return 0
    if not settings.is_shared:
        faulthandler.unregister(signal.SIGUSR1)
        os.close(stack)
    report: dict[str, Any] = {"entrypoint": bound.entrypoint, "signature": bound.signature, "missing": missing}
    report |= {"reads": sorted(bound.reads), "takes_groups": bound.takes_groups, "tools": bound.tools}
    others = [] if sandbox.lacks(missing, sandbox.PRIVATE_SHM) else [private_folders.SHARED_MEMORY]
    cleaner = ScratchCleaner(home, worker_sandbox.temporary, *others, left_out=mounted)
    executor = Executor(bound, settings)
    try:
        calls = ForkedCalls(executor.answer, [descriptor]) if settings.isolation == REQUEST else None
    except UserError as error:
        channel.write(json.dumps({"error": f"{bound.path}: {error}"}).encode())
        return 0
    leftovers = Leftovers()
    channel.write(json.dumps(report).encode())
    if settings.is_shared:
        _serve_shared(connection, board, executor, leftovers, cleaner, settings)
    elif calls is None:
        _serve(channel, executor, leftovers, cleaner)
    else:
        _serve_forked(channel, calls, cleaner)
    return 0


def _limit_cpu(settings: FunctionSettings) -> None:
    """Set the CPU limit of one call: the kernel counts the whole life of a process, so start from the time used."""
    if settings.cpu_seconds is not None:
        used = math.ceil(time.process_time())
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (used + settings.cpu_seconds, hard))


def _serve(channel: BlockingChannel, executor: Executor, leftovers: Leftovers, cleaner: ScratchCleaner) -> None:
    own_pid = os.getpid()
    while (frame := channel.read()) is not None:
        before = resource.getrusage(resource.RUSAGE_SELF)
        answer = executor.answer(frame.payload or b"")
        if os.getpid() != own_pid:
            os._exit(0)  # a child that user code forked and let return: it must not answer or clean for the worker
        answer = add_computed(answer, _count_computed(before, resource.getrusage(resource.RUSAGE_SELF)))
        problem = leftovers.reset() or executor.find_problem()
        _answer(channel, frame.number, answer, cleaner, problem)


def _count_computed(before: resource.struct_rusage, after: resource.struct_rusage) -> int | None:
    """Return the CPU time between both in microseconds; None if the process has waited for anything but a processor."""
    if after.ru_nvcsw != before.ru_nvcsw:
        return None
    return round(1e6 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))


def _serve_shared(
    connection: socket.socket,
    board: int,
    executor: Executor,
    leftovers: Leftovers,
    cleaner: ScratchCleaner,
    settings: FunctionSettings,
) -> None:
    """Serve with episodesPerProcess above 1."""
    from rljob_service.worker import shared_calls  # here, since other workers need no event loop

    def reset() -> str:
        return leftovers.reset() or _clean(cleaner)

    shown = Board(board)
    os.close(board)
    ends_tasks = settings.serves == EPISODES
    shared_calls.serve(connection, shown, executor.answer_shared, reset, settings.per_process, ends_tasks=ends_tasks)


def _serve_forked(channel: BlockingChannel, calls: ForkedCalls, cleaner: ScratchCleaner) -> None:
    """Serve with isolation: request. What a request leaves in memory has ended with its process."""
    while (frame := channel.read()) is not None:
        problem = ""
        try:
            answer = calls.execute(frame.payload or b"")
        except CallDiedError as error:
            answer = _encode([invalid(WORKER_DIED, str(error))])
        except (OSError, MemoryError) as error:  # no process can be started
            problem = describe_exhaustion(error)
            answer = _encode([invalid(EXCEPTION, f"the process of the call cannot be started: {error}")])
        _answer(channel, frame.number, answer, cleaner, problem)


def _answer(channel: BlockingChannel, number: int, answer: bytes, cleaner: ScratchCleaner, problem: str) -> None:
    uncleaned = _clean(cleaner)
    if problem := problem or uncleaned:
        channel.write(RETIRING + problem.encode(errors="replace"), number)
    channel.write(answer, number)


def _clean(cleaner: ScratchCleaner) -> str:
    """Remove what requests left. Return why the worker must be replaced, or ''."""
    try:
        cleaner.clean()
    except OSError as error:
        return describe_exhaustion(error) or f"its scratch directory cannot be cleaned: {error}"
    return ""


def _encode(outcomes: Sequence[Outcome | CallOutcome]) -> bytes:
    return json.dumps([outcome._asdict() for outcome in outcomes], allow_nan=False).encode()


class Executor:
    """Calls the bound function, awaits it where it is async, and turns every failure into a reason."""

    def __init__(self, bound: BoundFunction, settings: FunctionSettings) -> None:
        self._bound = bound
        self._settings = settings
        self._loop: Any = None
        self.exhaustion = ""
        """The resource that the last request found used up: the next one would fail, too."""

    def answer(self, body: bytes) -> bytes:
        """Return the outcomes as JSON."""
        return _encode(self.execute(body))

    def execute(self, body: bytes) -> list[Outcome] | list[CallOutcome]:
        """Return one outcome per sample or call; or a single one with a reason, which applies to all samples."""
        self.exhaustion = ""
        calls = self._bound.calls
        try:
            _limit_cpu(self._settings)
            traceparent, text = split_traceparent(body)
            request = json.loads(text)
            with trace_context.within(traceparent):
                return self._score(request) if calls is None else [calls.read(self._wait(calls.call(request)), request)]
        except BaseException as error:  # including SystemExit and KeyboardInterrupt: only this request fails
            self.exhaustion = describe_exhaustion(error)
            message = explain(error, self._bound.path) + describe_limit(error, self._settings)
            return [invalid(EXCEPTION, message)] if calls is None else [failed_call(EXCEPTION, message)]

    async def answer_shared(self, body: bytes) -> tuple[bytes, str]:
        """Return the outcomes of one of several requests as JSON, and why the worker must be replaced after it."""
        outcomes, problem = await self._execute_shared(body)
        return _encode(outcomes), problem

    async def _execute_shared(self, body: bytes) -> tuple[list[Outcome] | list[CallOutcome], str]:
        calls = self._bound.calls
        try:
            traceparent, text = split_traceparent(body)
            request = json.loads(text)
            with trace_context.within(traceparent, is_alone=False):
                if calls is None:
                    binding, samples = self._find_binding(request)
                    return binding.read(await binding.call(samples), samples), ""
                assert calls.call_shared is not None
                return [calls.read(await calls.call_shared(request), request)], ""
        except BaseException as error:  # also CancelledError: the server knows why, and waits for this answer
            exhaustion = describe_exhaustion(error)
            message = explain(error, self._bound.path) + describe_limit(error, self._settings)
            # What the requests of a process share is used up. That of this one failed first: it need not be the cause.
            reason = WORKER_DIED if exhaustion else EXCEPTION
            return [invalid(reason, message)] if calls is None else [failed_call(reason, message)], exhaustion

    def find_problem(self) -> str:
        """Return why the worker must be replaced after the last request; '' if it need not."""
        calls = self._bound.calls
        return self.exhaustion or (calls.find_problem() if calls is not None else "")

    def _score(self, request: dict[str, Any]) -> list[Outcome]:
        binding, samples = self._find_binding(request)
        return binding.read(self._wait(binding.call(samples)), samples)

    def _find_binding(self, request: dict[str, Any]) -> tuple[Binding, list[Sample]]:
        binding = self._bound.group if "samples" in request else self._bound.sample
        if binding is None:
            raise UserError(f"scope: {self._settings.scope} does not score requests of this kind")
        return binding, _samples_of(request)

    def _wait(self, value: Any) -> Any:
        """Return the value; of an awaitable its result. One event loop for the worker's life, so that the function may
        keep sessions open across calls."""
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            import asyncio  # here, since sync functions do not need it

            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop.run_until_complete(value)


def _samples_of(request: dict[str, Any]) -> list[Sample]:
    """Return a ScoreRequest as the only sample, or a GroupRequest's samples, each with its individual result."""
    if "samples" not in request:
        return [request]
    samples, results = request["samples"], request.get("results")
    if results is None:
        return list(samples)
    return [{**sample, "result": result} for sample, result in zip(samples, results, strict=True)]
