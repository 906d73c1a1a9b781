"""Slots that are coroutines: each asks a model's server and reads the answer.

Owns the life of one execution: begun, ended with one verdict, cancelled when it is late. Leaves what to ask to a
Caller and when one may begin to its gate. Consumes free slots and the gate's leave; waits for the gate (a timer, since
nothing else tells); unblocked by a finished execution or by that timer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from rljob_api.wire.protocol import InvalidReason
from rljob_reward.results import MAX_MESSAGE_CHARACTERS, ExecutionResult, SampleReply, StartupReport, failure

_LONGEST_NAP_SECONDS = 1.0
"""Most time until a closed gate is asked again: what it waits for may come sooner than it thought."""


class NoScoreError(Exception):
    """An execution has no score, for this reason."""

    def __init__(self, reason: InvalidReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Progress:
    """One execution: what it is doing, to be told when it is late, and what it was charged and took."""

    def __init__(self, deadline: float, charged: float = 0.0) -> None:
        self.deadline = deadline
        """Monotonic time at which it will be killed."""
        self.now = ""
        self.charged = charged
        """What the gate charged it in advance."""
        self.used: float | None = None
        """What it took in the end; None: nobody knows."""

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()


class Score:
    """A valid result."""

    __slots__ = ("components", "value")

    def __init__(self, value: float, components: dict[str, float] | None = None) -> None:
        self.value = value
        self.components = components or {}


class Gate(Protocol):
    """When an execution may begin."""

    def closed(self) -> tuple[float, str]:
        """Seconds until it may be open (0: it is), and by the name of which limit it is closed."""
        ...

    def enter(self) -> float:
        """An execution begins. The gate is open. Returns what it is charged in advance."""
        ...

    def leave(self, charged: float, used: float | None) -> None:
        """That execution ended, however it did."""
        ...


class Caller(Protocol):
    """What a reward asks and how it reads the answer."""

    @property
    def gate(self) -> Gate: ...

    @property
    def can_serve(self) -> bool: ...

    @property
    def enforces_timeout(self) -> bool:
        """Whether it sees to timeoutSeconds itself."""
        ...

    async def start(self) -> StartupReport:
        """Wait until its server answers. UserError when the reward cannot be served."""
        ...

    async def call(self, body: bytes, progress: Progress) -> Sequence[Score | NoScoreError]:
        """Score the samples of one request. Raises NoScoreError where that is so of all of them, or anything else for
        what nobody foresaw."""
        ...

    async def close(self) -> None: ...

    def record_wait(self, limit: str, seconds: float) -> None:
        """Requests waited for a limit."""
        ...


class OpenGate:
    """No limits."""

    def closed(self) -> tuple[float, str]:
        return 0.0, ""

    def enter(self) -> float:
        return 0.0

    def leave(self, charged: float, used: float | None) -> None:
        pass


class CallSlot:
    """One execution at a time."""

    def __init__(self, caller: Caller, timeout_seconds: float, on_idle: Callable[[CallSlot], None]) -> None:
        self._caller = caller
        self._timeout_seconds = timeout_seconds
        self._on_idle = on_idle
        self._callback: Callable[[ExecutionResult], None] | None = None
        self._charged = 0.0
        self._progress = Progress(0.0)
        self.task: asyncio.Task[None] | None = None

    def enter(self) -> None:
        """Pass the gate; execute() follows."""
        self._charged = self._caller.gate.enter()

    def execute(self, body: bytes, num_samples: int, callback: Callable[[ExecutionResult], None]) -> None:
        self._callback = callback
        self._progress = Progress(time.monotonic() + self._timeout_seconds, self._charged)
        self.task = asyncio.get_running_loop().create_task(self._run(body))
        self.task.add_done_callback(self._ended)  # also of a task that was cancelled before it began

    def kill(self, reason: InvalidReason, message: str) -> None:
        doing = f"; it was {self._progress.now}" if self._progress.now else ""
        self._tell(failure(reason, f"{message}{doing}"))
        if self.task is not None:
            self.task.cancel()

    async def _run(self, body: bytes) -> None:
        self._tell(await _verdict_of(self._caller.call(body, self._progress)))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Its connections are free only now."""
        self.task = None
        self._tell(failure(InvalidReason.EXCEPTION, "the call ended without an answer"))  # unless there was a verdict
        self._caller.gate.leave(self._progress.charged, self._progress.used)
        self._on_idle(self)

    def _tell(self, verdict: ExecutionResult) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback(verdict)


async def _verdict_of(call: Coroutine[Any, Any, Sequence[Score | NoScoreError]]) -> ExecutionResult:
    try:
        return [_reply_of(score) for score in await call]
    except NoScoreError as error:
        return failure(error.reason, error.message)
    except Exception as error:  # a bug of ours costs one sample, with its name
        return failure(InvalidReason.EXCEPTION, f"{type(error).__name__}: {error}")


def _reply_of(score: Score | NoScoreError) -> SampleReply:
    if isinstance(score, Score):
        return SampleReply(score=score.value, components=score.components, reason=None, message="")
    return SampleReply(score=None, components={}, reason=score.reason, message=score.message[:MAX_MESSAGE_CHARACTERS])


class CallPool:
    """`size` slots over one Caller."""

    def __init__(self, caller: Caller, size: int, timeout_seconds: float, *, on_idle: Callable[[], None]) -> None:
        self._caller = caller
        self._on_idle = on_idle
        self._slots = [CallSlot(caller, timeout_seconds, self._idle_again) for _ in range(size)]
        self._idle = list(self._slots)
        self._timer: asyncio.TimerHandle | None = None
        self._closed_since: tuple[float, str] | None = None
        self._ending = False

    @property
    def can_serve(self) -> bool:
        return self._caller.can_serve

    @property
    def has_idle(self) -> bool:
        return bool(self._idle) and not self._ending and not self._caller.gate.closed()[0]

    @property
    def enforces_timeout(self) -> bool:
        return self._caller.enforces_timeout

    def owns(self, pid: int) -> bool:
        return False

    async def start_first(self) -> StartupReport:
        return await self._caller.start()

    def acquire(self) -> CallSlot:
        self._record_wait()
        slot = self._idle.pop()
        slot.enter()
        return slot

    def ensure(self, demand: int) -> None:
        """Nothing to grow. With work and a free slot it is the gate that is closed: ask it again when it may open."""
        if demand <= len(self._slots) - len(self._idle) or not self._idle or self._ending:
            return
        seconds, limit = self._caller.gate.closed()
        if self._closed_since is None and seconds:
            self._closed_since = (time.monotonic(), limit)
        if self._timer is None:
            nap = min(seconds, _LONGEST_NAP_SECONDS)
            self._timer = asyncio.get_running_loop().call_later(nap, self._ask_again)

    async def close(self) -> None:
        self._ending = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = [slot.task for slot in self._slots if slot.task is not None]
        for slot in self._slots:
            slot.kill(InvalidReason.CANCELLED, "the server shut down")
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._caller.close()

    def _ask_again(self) -> None:
        self._timer = None
        self._on_idle()

    def _record_wait(self) -> None:
        if self._closed_since is not None:
            since, limit = self._closed_since
            self._closed_since = None
            self._caller.record_wait(limit, time.monotonic() - since)

    def _idle_again(self, slot: CallSlot) -> None:
        self._idle.append(slot)
        if not self._ending:
            self._on_idle()
