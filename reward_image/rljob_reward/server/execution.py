"""One execution of the reward over a sample or a group, and the requests that wait for its result."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from rljob_api.wire.protocol import Lane, ScoreResult
from rljob_reward.server.responses import Request, RequestSummary

RequestKey = tuple[str, int]
"""id and hash of the body: a retry of the same sample or group has the same key."""


class Waiter(Protocol):
    """A request that waits for an execution's result."""

    def deliver(self, result: bytes) -> None: ...

    def is_disconnected(self) -> bool:
        """Whether the client has disconnected; called just before the execution would start."""
        ...


class Execution:
    """Created when a request arrives; other requests may join its waiters until it ends."""

    __slots__ = ("arrived", "body", "content", "key", "lane", "started", "summary", "timeout", "waiters")

    def __init__(self, request: Request, body: bytes, waiter: Waiter, content: bytes | None) -> None:
        self.summary = RequestSummary.of(request)
        self.lane: Lane = request.lane
        self.body = body
        self.key: RequestKey = (request.id, hash(body))
        self.content = content
        """Its key in the result cache; None without a cache."""
        self.waiters = [waiter]
        self.arrived = time.perf_counter()
        self.started: float | None = None
        self.timeout: asyncio.TimerHandle | None = None

    def is_abandoned(self) -> bool:
        return all(waiter.is_disconnected() for waiter in self.waiters)


class Follower:
    """A request that waits for the result of another one with equal content."""

    def __init__(self, request_id: str, waiter: Waiter) -> None:
        self._id = request_id
        self._waiter = waiter

    def deliver(self, result: bytes) -> None:
        own = ScoreResult.model_validate_json(result).model_copy(update={"id": self._id})
        self._waiter.deliver(own.model_dump_json().encode())

    def is_disconnected(self) -> bool:
        return self._waiter.is_disconnected()
