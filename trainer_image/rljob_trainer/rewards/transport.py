"""Requests to the replicas of one service, such as a reward: attempts, hedges, retries, the deadline.

    Requests.run      until a result is final, no retry is left, or the deadline passes
    Transport.attempt one request to a replica, perhaps with a hedge, and its response

Invariants: each request has an end; a failure is never a score of zero; only an executed attempt with an invalid result
uses up a retry.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic

import aiohttp

from rljob_api.errors import UserError
from rljob_api.manifest.reward import Reward
from rljob_api.wire.contract import PORT_REWARD
from rljob_api.wire.protocol import InvalidReason, Lane
from rljob_trainer.replicas.hedging import HedgeTracker, InFlightRequest
from rljob_trainer.replicas.http import CONNECT_SECONDS
from rljob_trainer.replicas.pool import ReplicaLease, ReplicaPool
from rljob_trainer.rewards.messages import Call, Outcome, R, busy_seconds, is_final
from rljob_trainer.rewards.version_tracker import VersionTracker

_MIN_QUEUE_SECONDS = 600.0
"""Minimum time that a request may wait in a server's queue before another server gets it. The client's timeout includes
it, because the server's timeout starts with the execution."""
_UNAVAILABLE_STATUSES = (502, 503, 504)
_USER_ERROR_STATUSES = (401, 403, 404, 405)
_MALFORMED_STATUS = 422
"""From our servers: a request that breaks the protocol. From others, perhaps the data of one sample."""
_JSON = {"Content-Type": "application/json"}


@dataclass(eq=False)
class PendingRequest(Generic[R]):
    call: Call[R]
    started_at: float
    waits_since: float
    """When it last started to wait for a replica."""
    waits_for: str = "a replica"
    sent_at: float | None = None
    """When the current replica received it; None while it waits for one."""
    tried: set[str] = field(default_factory=set)
    """Replicas that have had it; another attempt avoids them."""
    num_requests: int = 0
    num_failures: int = 0
    """Requests without a response: rejected, broken off, or timed out."""
    num_executions: int = 0
    execute_seconds: float = 0.0


class Transport(Generic[R]):
    """An attempt has the results of all samples of the request; None if this replica could not return any and another
    one is needed."""

    def __init__(
        self,
        reward: Reward,
        where: str,
        session: aiohttp.ClientSession,
        headers: Mapping[str, str],
        replicas: ReplicaPool,
        versions: VersionTracker | None,
    ) -> None:
        """`where`: the service in messages to the user, such as spec.rewards: NAME."""
        self.num_requests: Counter[Lane] = Counter()
        """Sent so far, including retries and hedges."""
        self._where = where
        self.hedges = HedgeTracker(reward.hedging) if reward.hedging else None
        self._is_external = reward.http is not None
        # Two requests per slot: the second waits for the whole execution of the first.
        queue_seconds = 0.0 if self._is_external else max(_MIN_QUEUE_SECONDS, reward.timeout_seconds)
        self.timeout_seconds = reward.timeout_seconds + queue_seconds
        """Maximum time from sending a request to its response."""
        self._session, self._headers, self._replicas, self._versions = session, headers, replicas, versions

    async def attempt(self, lease: ReplicaLease, pending: PendingRequest[R]) -> list[R] | None:
        """Send a request, and a hedge if it becomes due; return the first final results."""
        if self.hedges is None or pending.call.is_short:
            return await self._send(lease, pending)
        request = InFlightRequest(lease.address, time.monotonic(), asyncio.get_running_loop().create_future())
        self.hedges.record_sent(request)
        first = asyncio.create_task(self._send(lease, pending))
        second: asyncio.Task[list[R] | None] | None = None
        try:
            await asyncio.wait((first, request.second), return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                self.hedges.num_hedges += 1
                pending.waits_for += f" or {request.second.result().address}"
                second = asyncio.create_task(self._send(request.second.result(), pending))
            results = await _first_final([first, second] if second else [first])
            if results is not None and second and second.done() and results is second.result():
                self.hedges.num_wins += 1
            return results
        finally:
            self.hedges.record_ended(request)
            if not first.done():  # it lost, or the caller was cancelled: it took at least this long
                self.hedges.record_latency(time.monotonic() - request.sent_at)
            tasks = [task for task in (first, second) if task]
            for task in tasks:
                task.cancel()
            if request.second.done():
                request.second.result().unused()
            request.second.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def send_due_hedges(self) -> None:
        """Give each request that is due for a hedge a second replica, as far as replicas are free."""
        if self.hedges is None:
            return
        while request := self.hedges.next_due(self._replicas.now()):
            lease = self._replicas.try_lease({request.address})
            if lease is None:
                return
            self.hedges.record_hedged(request)
            request.second.set_result(lease)

    async def _send(self, lease: ReplicaLease, pending: PendingRequest[R]) -> list[R] | None:
        try:
            return await self._post(lease, pending)
        finally:
            pending.call.end()

    async def _post(self, lease: ReplicaLease, pending: PendingRequest[R]) -> list[R] | None:
        sent_at, call = time.monotonic(), pending.call
        try:
            body = call.encode(with_tokens=self._versions is not None and self._versions.reads_tokens)
        except ValueError as error:
            lease.unused()
            return call.fail(InvalidReason.BAD_REQUEST, f"the sample cannot be sent as JSON: {error}")
        pending.tried.add(lease.address)
        pending.num_requests += 1
        self.num_requests[call.lane] += 1
        try:
            async with self._session.post(
                lease.address if self._is_external else f"http://{lease.address}:{PORT_REWARD}{call.path}",
                data=body,
                headers={**self._headers, **_JSON},
                timeout=aiohttp.ClientTimeout(total=self.timeout_seconds, sock_connect=CONNECT_SECONDS),
            ) as response:
                text = await _read_text(response, call.max_response_bytes)
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
            pending.num_failures += 1
            # Without a connection nothing was executed.
            timed_out = isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError)
            message = (
                f"no response within {self.timeout_seconds:.0f} s" if timed_out else f"{type(error).__name__}: {error}"
            )
            if not (timed_out and self._is_external):
                lease.failed(message)
                return None
            lease.done()
            results: list[R] | None = call.fail(InvalidReason.TIMEOUT, message, time.monotonic() - sent_at)
        else:
            results = self._interpret(lease, call, response, text, time.monotonic() - sent_at)
        if results is not None:
            pending.num_executions += 1
            pending.execute_seconds += max(result.execute_seconds for result in results)
            if self.hedges:
                self.hedges.record_latency(time.monotonic() - sent_at)
        return results

    def _interpret(
        self, lease: ReplicaLease, call: Call[R], response: aiohttp.ClientResponse, text: str, seconds: float
    ) -> list[R] | None:
        """Return the results in a response. Raise UserError for one that a retry cannot change."""
        status = response.status
        if status == 429:
            lease.busy(busy_seconds(response.headers.get("Retry-After")))
            return None
        if status in _USER_ERROR_STATUSES or (status == _MALFORMED_STATUS and not self._is_external):
            raise UserError(f"{self._where}: {lease.address} returned {status}: {text[:500]}")
        if status in _UNAVAILABLE_STATUSES or (status >= 500 and not self._is_external):
            lease.failed(f"{status} {text[:200]}")
            return None
        if status != 200:
            lease.done()
            return call.fail(InvalidReason.EXCEPTION, f"{status} {text[:500]}", seconds)
        if not response.content.at_eof():
            lease.done()
            return call.fail(InvalidReason.BAD_RETURN, f"the response is too long for a result: {text[:200]}", seconds)
        results = call.read(text, seconds)
        if not self._is_external:
            cancelled = [result for result in results if result.reason is InvalidReason.CANCELLED]
            if cancelled:  # the server shut down first: not an attempt of the function
                lease.failed(cancelled[0].message)
                return None
        if self._versions is not None and not all(
            self._versions.record_result(lease.address, result.version) for result in results
        ):
            lease.done()
            return None
        lease.done()
        return results


class Requests(Generic[R]):
    """Runs requests to their end, and knows those that have none yet."""

    def __init__(
        self, transport: Transport[R], replicas: ReplicaPool, *, retries: int, deadline_seconds: float
    ) -> None:
        self.in_flight: set[PendingRequest[R]] = set()
        self._transport, self._replicas = transport, replicas
        self._retries, self._deadline_seconds = retries, deadline_seconds

    async def run(self, call: Call[R], since: float | None = None) -> tuple[list[R], PendingRequest[R]]:
        """Return the results and how they came about. `since`: the time that decides its place among those that wait
        for a replica; None: now. Raise UserError for a response that no retry can change, and TransientError if no
        replica has answered for long."""
        now = time.monotonic()
        pending = PendingRequest(call, started_at=now, waits_since=now)
        self.in_flight.add(pending)
        try:
            return await self._run_within_deadline(pending, since), pending
        finally:
            self.in_flight.discard(pending)

    def num_waiting(self) -> int:
        return sum(pending.sent_at is None for pending in self.in_flight)

    def longest_wait_seconds(self) -> float:
        """Return the age of the oldest wait for a replica; 0 if no request waits for one."""
        waits_since = [pending.waits_since for pending in self.in_flight if pending.sent_at is None]
        return time.monotonic() - min(waits_since) if waits_since else 0.0

    def oldest_seconds(self) -> float:
        """Return the age of the oldest request; 0 without requests."""
        return time.monotonic() - min((pending.started_at for pending in self.in_flight), default=time.monotonic())

    async def _run_within_deadline(self, pending: PendingRequest[R], since: float | None) -> list[R]:
        seconds = self._deadline_seconds
        try:
            async with asyncio.timeout(seconds) as scope:
                return await self._run_attempts(pending, since)
        except TimeoutError:
            if not scope.expired():
                raise
        # If no replica responded, the cause is the servers and not the time.
        is_unreachable = pending.num_failures == pending.num_requests > 0
        reason = InvalidReason.UNREACHABLE if is_unreachable else InvalidReason.DEADLINE
        message = f"no result within {seconds:g} s and {pending.num_requests} requests; waited for {pending.waits_for}"
        return pending.call.fail(reason, message)

    async def _run_attempts(self, pending: PendingRequest[R], since: float | None) -> list[R]:
        """Make attempts until one is final or no retry is left. Return the results with the most valid samples."""
        num_invalid, best = 0, list[R]()
        while True:
            pending.waits_for, pending.waits_since = "a replica", time.monotonic()
            async with self._replicas.lease(pending.tried, since) as lease:
                pending.sent_at, pending.waits_for = time.monotonic(), f"the response of {lease.address}"
                try:
                    results = await self._transport.attempt(lease, pending)
                finally:
                    pending.sent_at = None
            if results is None:
                continue
            if num_valid(results) >= num_valid(best):
                best = results
            num_invalid += not is_final(results)
            if is_final(results) or num_invalid > self._retries:
                return best


async def _read_text(response: aiohttp.ClientResponse, max_bytes: int) -> str:
    """Return the body, up to what exceeds `max_bytes`. The rest is not received."""
    body = bytearray()
    while len(body) <= max_bytes and (chunk := await response.content.readany()):
        body += chunk
    return body.decode(errors="replace")  # the parser reports what is not text


async def _first_final(tasks: Sequence[asyncio.Task[list[R] | None]]) -> list[R] | None:
    """Return the first final results; if there are none, the results with the most valid samples."""
    best: list[R] | None = None
    for next_done in asyncio.as_completed(tasks):
        results = await next_done
        if results is None:
            continue
        if is_final(results):
            return results
        if best is None or num_valid(results) > num_valid(best):
            best = results
    return best


def num_valid(results: Sequence[Outcome]) -> int:
    return sum(result.valid for result in results)
