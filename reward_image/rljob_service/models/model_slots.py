"""Slots that are coroutines: each sends requests to a model's server and reads the answers.

An execution has one result, whatever happens. A ModelBackend defines the requests, and its rate limiter when one may
start. Waits for the limiter with a timer, because it sends no events; unblocked by a finished execution or that timer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from rljob_api.wire.base import InvalidReason
from rljob_api.wire.calls import UserReply
from rljob_service.models.backend import TURN, ModelBackend
from rljob_service.models.execution import ExecutionProgress, NoScoreError, Score
from rljob_service.models.metrics import UpstreamMetrics
from rljob_service.models.shared_engines import AwayError
from rljob_service.results import ExecutionResult, Reply, SampleReply, StartupReport, UserCallReply, failure
from rljob_service.slots import Callback, Kill

_MAX_POLL_SECONDS = 1.0
"""Maximum time between checks of the rate limiter, which may admit earlier than it estimated."""


@dataclass(eq=False)
class ModelSlot:
    _backend: ModelBackend
    _timeout_seconds: float
    _on_idle: Callable[[ModelSlot], None]

    def __post_init__(self) -> None:
        self._callback: Callable[[ExecutionResult], None] | None = None
        self._progress = ExecutionProgress(0.0)
        self.task: asyncio.Task[None] | None = None

    def execute(self, body: bytes, callback: Callable[[ExecutionResult], None]) -> None:
        self._callback = callback
        self._progress = ExecutionProgress(time.monotonic() + self._timeout_seconds, self._backend.limiter.admit())
        self.task = asyncio.get_running_loop().create_task(self._run(body))
        self.task.add_done_callback(self._on_done)  # also called for a task that is cancelled before it starts

    def kill(self, reason: InvalidReason, message: str) -> None:
        activity = f"; it was {self._progress.activity}" if self._progress.activity else ""
        if reason is InvalidReason.TIMEOUT:
            was_away = self._backend.upstream.was_away(self._progress.started_at)
            reason = InvalidReason.UNREACHABLE if was_away else reason
            self._backend.upstream.suspect()
        self._report(failure(reason, f"{message}{activity}"))
        if self.task is not None:
            self.task.cancel()

    async def _run(self, body: bytes) -> None:
        try:
            outcomes = await self._backend.execute(body, self._progress)
            result: ExecutionResult = [_to_reply(outcome) for outcome in outcomes]
        except NoScoreError as error:
            result = failure(error.reason, error.message)
        except AwayError as error:  # the driver sends it again, and that costs no retry
            result = failure(InvalidReason.CANCELLED, str(error))
        except Exception as error:  # a bug in RLJob costs one sample
            result = failure(InvalidReason.EXCEPTION, f"{type(error).__name__}: {error}")
        self._report(result)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """Become idle: only now are the connections of the execution closed."""
        self.task = None
        self._report(failure(InvalidReason.EXCEPTION, "the call ended without an answer"))  # if it was cancelled
        self._backend.limiter.release(self._progress.charged, self._progress.used)
        self._on_idle(self)

    def _report(self, result: ExecutionResult) -> None:
        """Deliver the result. Only the first one of an execution counts."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback(result)


def _to_reply(outcome: Score | UserReply | NoScoreError) -> Reply:
    if isinstance(outcome, Score):
        given = {"components": outcome.components, "logprobs": outcome.logprobs}
        return SampleReply.model_validate({"score": outcome.value, **given, "reason": None, "message": ""})
    if isinstance(outcome, UserReply):
        return UserCallReply(value=outcome, reason=None, message="")
    return failure(outcome.reason, outcome.message)[0]


class ModelSlotPool:
    def __init__(
        self,
        backend: ModelBackend,
        metrics: UpstreamMetrics,
        size: int,
        timeout_seconds: float,
        *,
        on_idle: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._metrics = metrics
        self._on_idle = on_idle
        self._slots = [ModelSlot(backend, timeout_seconds, self._on_slot_idle) for _ in range(size)]
        self._idle = list(self._slots)
        self._timer: asyncio.TimerHandle | None = None
        self._limited_since: tuple[float, str] | None = None
        self._closing = False

    @property
    def can_serve(self) -> bool:
        return self._backend.can_serve

    @property
    def has_idle(self) -> bool:
        return bool(self._idle) and not self._closing and not self._backend.required_wait()[0]

    @property
    def enforces_timeout(self) -> bool:
        return self._backend.enforces_timeout

    @property
    def notice(self) -> str:
        if self._backend.required_wait()[1] == TURN:
            return "the model's vLLM is asleep, or starts, in the trainer's Pods: requests wait"
        seconds = self._backend.pause_seconds
        return f"the endpoint answered 429: the next request follows in {seconds:.0f} s" if seconds else ""

    def owns(self, pid: int) -> bool:
        return False

    async def start_first(self) -> StartupReport:
        return await self._backend.start()

    def start(self, body: bytes, num_samples: int, callback: Callback) -> Kill:
        if self._limited_since is not None:
            since, limit = self._limited_since
            self._limited_since = None
            self._metrics.record_wait(limit, time.monotonic() - since)
        slot = self._idle.pop()
        slot.execute(body, callback)
        return slot.kill

    def ensure(self, demand: int) -> None:
        """If slots are idle despite demand, the rate limiter is the cause, or a model that sleeps: check again when it
        may admit."""
        if demand <= len(self._slots) - len(self._idle) or not self._idle or self._closing:
            return
        seconds, limit = self._backend.required_wait()
        if self._limited_since is None and seconds:
            self._limited_since = (time.monotonic(), limit)
        if self._timer is None:
            delay = min(seconds, _MAX_POLL_SECONDS)
            self._timer = asyncio.get_running_loop().call_later(delay, self._recheck_limiter)

    async def close(self) -> None:
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = [slot.task for slot in self._slots if slot.task is not None]
        for slot in self._slots:
            slot.kill(InvalidReason.CANCELLED, "the server shut down")
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._backend.close()

    def _recheck_limiter(self) -> None:
        self._timer = None
        self._on_idle()

    def _on_slot_idle(self, slot: ModelSlot) -> None:
        self._idle.append(slot)
        if not self._closing:
            self._on_idle()
