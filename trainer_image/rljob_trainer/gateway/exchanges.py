"""Which request gets which answer: repeated requests of one attempt.

A client that timed out, or whose connection broke, sends the same request again. So does a program that wants two
samples of a prompt. The difference is whether the first answer arrived:

    the client of an identical request left without its answer      its answer, sampled once
    the request says that it is a retry (x-stainless-retry-count)   the same answer, also if it was delivered
    otherwise                                                       a new sample

The SDKs of OpenAI and Anthropic send that header. Other clients close their connection before they try again, which the
first rule covers. After its client has left, an answer is sampled to its end and kept for RETRY_SECONDS: SDKs retry
after 0.5 to 8 s, and would otherwise wait for a second sample, which may time out as the first one did. Then it is
cancelled or dropped.

Invariant: an answer becomes a turn when a client takes it, once. The others are not recorded, and do not train.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from rljob_trainer.gateway.types import ModelAnswer, RequestError

RETRY_SECONDS = 60.0
_MAX_DELIVERED = 8
"""Delivered answers of an attempt that a retry may get again."""


@dataclass
class Sampled:
    """An answer of the policy."""

    answer: ModelAnswer
    record: Callable[[], Coroutine[Any, Any, None]] | None
    """Makes it a turn. None afterwards: it refers to the whole prompt, and answers are kept for retries."""
    asked_at: float
    """When the engine got the request, on the monotonic clock."""
    answered_at: float
    """When the engine had answered."""


class Exchange:
    """One answer, and the requests that wait for it."""

    def __init__(self, digest: bytes, sample: Coroutine[Any, Any, Sampled], now: float) -> None:
        """`digest`: of the request. `now`: on the monotonic clock."""
        self.digest, self.started_at = digest, now
        self.num_clients = 0
        self.is_delivered = False
        self.recording: asyncio.Task[None] | None = None
        self.closed: RequestError | None = None
        self.task = asyncio.create_task(sample)
        self.task.add_done_callback(_retrieve)
        self.timer: asyncio.TimerHandle | None = None

    @property
    def has_failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    @property
    def is_abandoned(self) -> bool:
        """Whether the client left without its answer."""
        return not self.num_clients and not self.is_delivered

    async def wait(self, seconds: float | None = None) -> bool:
        """Return whether there is an answer or an error, after at most `seconds`. A caller that is cancelled leaves the
        others waiting."""
        done, _ = await asyncio.wait({self.task}, timeout=seconds)
        return bool(done)

    def cancel(self, reason: RequestError) -> None:
        """Cancel the sampling. Requests that wait get `reason`."""
        self.closed = reason
        self.task.cancel()
        self.stop_timer()

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Exchanges:
    """The exchanges of one attempt."""

    def __init__(self, retry_seconds: float = RETRY_SECONDS) -> None:
        self._retry_seconds = retry_seconds
        self._exchanges: list[Exchange] = []
        self._num_taken = 0

    @property
    def num_turns(self) -> int:
        """Answers that clients took, and those that they may still take."""
        return self._num_taken + sum(each.recording is None and not each.has_failed for each in self._exchanges)

    @property
    def waiting_since(self) -> float | None:
        """When the oldest request that waits came, on the monotonic clock; None: none waits."""
        waiting = (each.started_at for each in self._exchanges if each.num_clients and not each.task.done())
        return min(waiting, default=None)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an answer."""
        return sum(each.num_clients for each in self._exchanges if not each.task.done())

    def find(self, digest: bytes, *, is_retry: bool) -> Exchange | None:
        """Return the exchange whose answer a request gets; None: it is to be sampled."""
        same = [each for each in self._exchanges if each.digest == digest and not each.has_failed]
        abandoned = next((each for each in same if each.is_abandoned), None)
        if abandoned is not None or not is_retry:
            return abandoned
        # The gateway may notice later than the client that the first connection is closed.
        in_flight = next((each for each in same if not each.is_delivered), None)
        return in_flight or next(reversed(same), None)

    def add(self, exchange: Exchange) -> None:
        self._exchanges = [each for each in self._exchanges if not each.has_failed]
        self._exchanges.append(exchange)

    def enter(self, exchange: Exchange) -> None:
        """A client begins to wait for the answer."""
        exchange.num_clients += 1
        exchange.stop_timer()

    async def take(self, exchange: Exchange) -> Sampled:
        """Return the answer, which is a turn from now on. Raise RequestError without one."""
        if exchange.closed is not None:
            raise exchange.closed.with_traceback(None)
        sampled = exchange.task.result()
        if exchange.recording is None and sampled.record is not None:
            self._num_taken += 1
            exchange.recording = asyncio.create_task(sampled.record())
            sampled.record = None
        if exchange.recording is not None:
            await asyncio.shield(exchange.recording)
        return sampled

    def leave(self, exchange: Exchange) -> None:
        """A client has the answer, or has left."""
        exchange.num_clients -= 1
        if exchange.is_delivered:
            delivered = [each for each in self._exchanges if each.is_delivered and not each.num_clients]
            dropped = delivered[: max(0, len(delivered) - _MAX_DELIVERED)]
            self._exchanges = [each for each in self._exchanges if each not in dropped]
        elif not exchange.num_clients and not exchange.has_failed and exchange.closed is None:
            loop = asyncio.get_running_loop()
            exchange.timer = loop.call_later(self._retry_seconds, self._drop, exchange)

    def close(self, reason: RequestError) -> None:
        """Cancel all. Requests that wait get `reason`."""
        for exchange in self._exchanges:
            exchange.cancel(reason)
        self._exchanges = []

    def _drop(self, exchange: Exchange) -> None:
        exchange.cancel(RequestError(410, "dropped", "the client left, and did not try again in time"))
        self._exchanges = [each for each in self._exchanges if each is not exchange]


def _retrieve(task: asyncio.Task[Sampled]) -> None:
    """Mark the error as seen: asyncio would log that of an answer for which no client waits."""
    if not task.cancelled():
        task.exception()
