"""episodesPerProcess: many requests of one worker at once, as tasks of one event loop.

Consumes frames of the server (a request, or that one must end), produces one answer for each request. A request that
must end is cancelled, like any task. Its tasks carry its number in a context variable, and the board shows which of
them runs. Files and timers that requests leave are removed when none runs. Standard library only.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, cast
from weakref import WeakSet

from rljob_service.worker.process.board import Board
from rljob_service.worker.process.frames import CANCEL, NO_REQUEST, RETIRING, FrameBuffer, encode

_BEAT_SECONDS = 0.25

_NUMBER: ContextVar[int] = ContextVar("rljob_request", default=NO_REQUEST)
"""The request that a task belongs to."""

Answer = Callable[[bytes], Awaitable[tuple[bytes, str]]]
"""Executes a request. Returns its answer, and why the worker must be replaced after it, or ''."""


def serve(
    sock: socket.socket, board: Board, answer: Answer, reset: Callable[[], str], size: int, *, ends_tasks: bool
) -> None:
    """Serve until the server closes the socket.

    `reset`: undoes what requests left, and returns why the worker must be replaced, or ''; called when none runs.
    `size`: requests at once. `ends_tasks`: whether tasks that a request left end with it.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    calls = SharedCalls(loop, board, answer, reset, ends_tasks=ends_tasks)
    loop.set_task_factory(calls.make_task)  # type: ignore[arg-type]
    loop.set_default_executor(ThreadPoolExecutor(size, "rljob"))  # each request may wait in a thread
    sock.setblocking(False)
    loop.run_until_complete(loop.connect_accepted_socket(lambda: calls, sock))
    while not calls.is_closed:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            continue  # of a task that a request started: the request gets it, too


class SharedCalls(asyncio.Protocol):
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        board: Board,
        answer: Answer,
        reset: Callable[[], str],
        *,
        ends_tasks: bool,
    ) -> None:
        self._loop, self._board, self._answer, self._reset = loop, board, answer, reset
        self._ends_tasks = ends_tasks
        self._buffer = FrameBuffer()
        self._transport: asyncio.WriteTransport | None = None
        self._running: dict[int, asyncio.Task[None]] = {}
        self._started: dict[int, WeakSet[asyncio.Task[Any]]] = {}
        """What each request has started with create_task."""
        self._beat: asyncio.TimerHandle | None = None
        self.is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        self._loop.stop()

    def data_received(self, data: bytes) -> None:
        for number, payload in self._buffer.feed(data):
            if payload is None:
                continue  # longer than any frame of the server
            if payload == CANCEL:
                if number in self._running:  # else its answer is on its way
                    self._running[number].cancel()
            else:
                self._start(number, payload)

    def make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        """The task factory of the loop: the board shows the request of each task while it runs."""
        context = options.get("context")
        number = _NUMBER.get() if context is None else context.get(_NUMBER, NO_REQUEST)
        if number == NO_REQUEST:
            return asyncio.Task(coroutine, loop=loop, **options)
        task = asyncio.Task(_mark(coroutine, number, self._board), loop=loop, **options)
        if (started := self._started.get(number)) is not None:
            started.add(task)
        return task

    def _start(self, number: int, body: bytes) -> None:
        if not self._running:
            self._send_beats()
        self._started[number] = WeakSet()
        token = _NUMBER.set(number)
        try:
            task = self._running[number] = self._loop.create_task(self._run(number, body))
        finally:
            _NUMBER.reset(token)
        task.add_done_callback(lambda task: self._on_end(number))

    async def _run(self, number: int, body: bytes) -> None:
        answer, problem = await self._answer(body)
        if self._ends_tasks:
            left = [task for task in self._started[number] if not task.done() and task is not self._running[number]]
            for task in left:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # it must end meanwhile: it is ending
                await asyncio.gather(*left, return_exceptions=True)
        self._finish(number, answer, problem)

    def _on_end(self, number: int) -> None:
        """Answer for a request that was cancelled before its first step."""
        if number in self._running:
            self._finish(number, b"", "")

    def _finish(self, number: int, answer: bytes, problem: str) -> None:
        assert self._transport is not None
        del self._running[number], self._started[number]
        if not self._running:
            problem = problem or self._reset()
            if self._beat is not None:
                self._beat.cancel()
        if problem:
            self._transport.write(encode(RETIRING + problem.encode(errors="replace"), number))
        self._transport.write(encode(answer, number))

    def _send_beats(self) -> None:
        self._board.beat()
        self._beat = self._loop.call_later(_BEAT_SECONDS, self._send_beats)


async def _mark(coroutine: Coroutine[Any, Any, Any], number: int, board: Board) -> Any:
    return await _Steps(coroutine, number, board)


class _Steps:
    """Runs a coroutine step by step, and shows its request during each step."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], number: int, board: Board) -> None:
        self._coroutine, self._number, self._board = coroutine, number, board

    def __await__(self) -> Generator[Any, Any, Any]:
        step = self._coroutine.send
        given: Any = None
        while True:
            before, self._board.current = self._board.current, self._number
            try:
                waits_for = step(given)
            except StopIteration as end:
                return end.value
            finally:
                self._board.current = before
            step, given = self._coroutine.send, None
            try:
                given = yield waits_for
            except GeneratorExit:
                self._coroutine.close()
                raise
            except BaseException as error:  # thrown into the task, such as its cancellation
                step, given = self._coroutine.throw, error
