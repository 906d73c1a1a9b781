"""The commands of a model in their order, and the results that clients wait for. No I/O, no clock.

Number 0 creates the model. A client numbers its commands from 1, and may send them in another order, or twice.
Invariant: each number runs once, after all lower ones, whether these fail or not; a command that comes again has the
result of the first.
"""

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rljob_trainer.tinker.wire import RefusedError

Result = bytes | dict[str, Any]
"""A message, or a JSON object."""
Running = Coroutine[Any, Any, Result]
Work = Callable[[], Running]
NUM_KEPT = 256
"""Results that are kept of a session after its client has got them: the answer may be lost on its way."""


class Turns:
    """Which command runs, one at a time: of the models that have one, that of the model with the fewest tokens."""

    def __init__(self) -> None:
        self._line: list[Stream] = []
        self._is_held = False
        self._least = 0
        """The tokens of the model that had the last turn: one that comes later has no credit."""
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def holding(self, stream: "Stream") -> AsyncIterator[None]:
        async with self._changed:
            stream.num_tokens = max(stream.num_tokens, self._least)
            self._line.append(stream)
            try:
                await self._changed.wait_for(
                    lambda: not self._is_held and min(self._line, key=lambda each: each.num_tokens) is stream
                )
                self._is_held, self._least = True, stream.num_tokens
                stream.num_tokens += 1  # of those with as many, the next is another one
            finally:
                self._line.remove(stream)
        try:
            yield
        finally:
            async with self._changed:
                self._is_held = False
                self._changed.notify_all()


@dataclass(eq=False)
class Stream:
    """The commands of one model."""

    turns: Turns
    ended: str = ""
    """Why the model runs no more commands."""
    num_tokens: int = 0
    """What its commands have computed."""
    _next: int = 0
    _waiting: dict[int, asyncio.Event] = field(default_factory=dict)
    """The turns of the commands that wait or run, by number."""

    def run(self, number: int, work: Callable[[], Awaitable[Result]]) -> Coroutine[Any, Any, Result]:
        """Take the command, and return what runs it once it is its turn."""
        self.check(number)
        self._waiting[number] = asyncio.Event()
        self._start()
        return self._run(number, work)

    def check(self, number: int) -> None:
        """Raise RefusedError for one that was used."""
        if number < self._next or number in self._waiting:
            raise RefusedError(f"seq_id: {number} was used before; the next is {self._next}")

    async def _run(self, number: int, work: Callable[[], Awaitable[Result]]) -> Result:
        try:
            await self._waiting[number].wait()
            async with self.turns.holding(self):
                try:
                    if self.ended:  # while it was in line
                        raise RefusedError(self.ended)
                    return await work()
                finally:
                    self.finish(number)  # so that the next command is in line when the turn is given
        finally:
            self.finish(number)

    def finish(self, number: int) -> None:
        """The command has ended; so has each lower one."""
        self._waiting.pop(number, None)
        self._next = max(self._next, number + 1)
        self._start()

    @property
    def is_busy(self) -> bool:
        """Whether commands wait or run."""
        return bool(self._waiting)

    def end(self, reason: str) -> None:
        """Refuse the commands that wait. One that runs does so to its end."""
        self.ended = reason
        for turn in self._waiting.values():
            turn.set()

    def _start(self) -> None:
        if (turn := self._waiting.get(self._next)) is not None:
            turn.set()


class Futures:
    """Results by the ids of their requests."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Future[Result]] = {}
        self._delivered: defaultdict[str, deque[str]] = defaultdict(deque)
        """By session."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tasks

    def begin(self, request_id: str, work: Work) -> None:
        """Do the work, unless it was begun before under this id."""
        if request_id not in self._tasks:
            self._tasks[request_id] = asyncio.create_task(work())

    def put(self, request_id: str, result: Result) -> None:
        """Take the result of work that was done before."""
        self._tasks[request_id] = done = asyncio.get_running_loop().create_future()
        done.set_result(result)

    async def wait(self, request_id: str, seconds: float) -> Result | None:
        """Return the result; None after `seconds`. Raise its error."""
        task = self._tasks[request_id]
        await asyncio.wait((task,), timeout=seconds)
        if not task.done():
            return None
        self._keep(request_id)
        return task.result()

    def _keep(self, request_id: str) -> None:
        delivered = self._delivered[request_id.partition(":")[0]]
        if request_id not in delivered:
            delivered.append(request_id)
        if len(delivered) > NUM_KEPT:
            self._tasks.pop(delivered.popleft(), None)

    def forget(self, session: str) -> None:
        """Drop the requests of a session, whose ids begin with its own: each once it is done."""
        for request_id in [key for key in self._tasks if key.startswith(f"{session}:")]:
            self._tasks[request_id].add_done_callback(partial(self._tasks.pop, request_id))
        self._delivered.pop(session, None)
