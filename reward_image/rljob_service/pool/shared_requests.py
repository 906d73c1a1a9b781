"""How the requests of a shared process end (episodesPerProcess): alone where they can, else with the process.

A request that must end is cancelled. One that goes on nevertheless, or that blocks the event loop, costs the process:
it is named as the cause, and the others are interrupted, which is no failure of theirs. Invariant: a request that was
late because another one blocked the loop has not timed out.

A coroutine that does not await blocks all others of its process: `LoopWatch` says whether the loop turns. Facts come
in through the board and the caller's clock. Invariant: a loop without requests, which does not beat, is never blocked.
"""

import asyncio
import json
import os
from collections.abc import Callable
from typing import Protocol

from rljob_service.kinds import KINDS
from rljob_service.pool.worker_slots import RunningRequests
from rljob_service.results import ExecutionResult
from rljob_service.worker.process import board
from rljob_service.worker.process.frames import CANCEL
from rljob_service.worker.settings import TEARDOWN_SECONDS, FunctionSettings

BLOCKED_SECONDS = 10.0
"""Without a turn of its loop a process is killed. Longer than an import inside a function usually takes, and than a
process may have to wait for a processor."""

_LATE_SECONDS = 2.0
"""Without a turn, what takes too long may do so because of the request that runs."""


class LoopWatch:
    def __init__(self) -> None:
        self._beats = -1
        self._since: float | None = None
        """When the loop was last seen to turn; None without requests."""

    def start(self, now: float) -> None:
        """The first request begins."""
        self._since = now

    def stop(self) -> None:
        """The last request has ended."""
        self._since = None

    def observe(self, beats: int, now: float) -> float:
        """Return the seconds for which the loop has not turned."""
        if self._since is None:
            return 0.0
        if beats != self._beats:
            self._beats, self._since = beats, now
        return now - self._since

    def is_late(self, beats: int, now: float) -> bool:
        return self.observe(beats, now) > _LATE_SECONDS


_CANCEL_SECONDS = 1.0
"""For which a request without a teardown may run after its cancellation."""
_ENOUGH_BEATS = 2
"""Turns of the loop in which a request can end after its cancellation."""
_REMEDY = "await what takes long (an async client, asyncio.to_thread), or remove episodesPerProcess"


class Worker(Protocol):
    """What this needs of WorkerProcess."""

    settings: FunctionSettings
    requests: RunningRequests

    def send(self, payload: bytes, number: int) -> None: ...
    def kill_for(self, culprit: int, message: str) -> None: ...
    async def locate(self) -> str: ...


class SharedRequests:
    def __init__(self, worker: Worker, now: Callable[[], float] | None = None) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._now = now or self._loop.time
        self._seconds = TEARDOWN_SECONDS if KINDS[worker.settings.serves].has_teardown else _CANCEL_SECONDS
        self._is_ending = False
        self._answered: set[int] = set()
        """Requests that have ended since the process must."""
        self.watch = LoopWatch()
        self.descriptor = board.create()
        """For the process, which inherits it."""
        self.board = board.Board(self.descriptor)

    def start_watch(self) -> None:
        """The first of its requests begins."""
        self.watch.start(self._now())

    def close_descriptor(self) -> None:
        os.close(self.descriptor)

    def end(self, number: int, result: ExecutionResult) -> None:
        """End one request with this result."""
        request = self._worker.requests.get(number)
        if request is None or request.ends_as is not None or self._is_ending:
            return
        culprit = self.board.current
        if culprit not in (0, number) and self.watch.is_late(self.board.beats, self._now()):
            self._end_process(culprit, "its event loop does not turn")
        else:
            self._worker.requests.must_end(number, result)
            self._worker.send(CANCEL, number)
            self._loop.call_later(self._seconds, self._check_ended, number, self.board.beats)

    def end_all(self, result: ExecutionResult) -> None:
        """Cancel all requests, since the process ends."""
        self._is_ending = True
        for number in list(self._worker.requests):
            if self._worker.requests.must_end(number, result):
                self._worker.send(CANCEL, number)

    def count_answer(self, number: int) -> bool:
        """Note that a request has ended in a process that ends. Return whether it was the last one."""
        self._answered.add(number)
        return self._answered.issuperset(self._worker.requests)

    def is_blocked(self) -> bool:
        """Whether the loop has not turned for so long that the process must end."""
        return not self._is_ending and self.watch.observe(self.board.beats, self._now()) > BLOCKED_SECONDS

    async def end_blocked(self) -> None:
        """Kill the process, and name the request and the line that block its loop."""
        culprit, self._is_ending = self.board.current, True
        place = await self._worker.locate()
        where = f" at {place}" if place else ""
        self._end_process(culprit, f"it blocked the event loop of its process for {BLOCKED_SECONDS:g} s{where}")

    def _check_ended(self, number: int, beats: int) -> None:
        """End the process if a request goes on. `beats`: those of the board when it was cancelled."""
        if self._worker.requests.get(number) is None or self._is_ending:
            return
        if self.board.current == number or self.board.beats - beats >= _ENOUGH_BEATS:
            self._end_process(number, f"it ran on for {self._seconds:g} s after it was cancelled")
        else:  # another one runs, so it could not end yet; a loop that is blocked for long ends in another way
            self._loop.call_later(self._seconds, self._check_ended, number, beats)

    def _end_process(self, culprit: int, what: str) -> None:
        self._is_ending = True
        request = self._worker.requests.get(culprit)
        # The server has checked when the request arrived that it has an id.
        name = f"request {json.loads(request.body)['id']}: " if request is not None else ""
        self._worker.kill_for(culprit, f"{name}{what}, and the process was killed; {_REMEDY}")
