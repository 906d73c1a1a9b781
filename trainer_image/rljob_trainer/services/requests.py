"""Requests to the replicas of one service, such as a reward: attempts, hedges, retries, the deadline.

    run       until a result is final, no retry is left, or the deadline passes
    _attempt  one request to a replica, perhaps with a hedge, and its response

Invariants: each request has an end; a failure is never a score of zero; only an executed attempt with an invalid result
uses up a retry.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Generic

import aiohttp

from rljob_api.errors import UserError
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.reward import Hedging, Reward
from rljob_api.tracing.spans import Span
from rljob_api.wire.base import InvalidReason, Lane
from rljob_api.wire.contract import PORT_SERVICE
from rljob_api.wire.driver_status import HungPart
from rljob_api.wire.ports import listening_port
from rljob_trainer import traces
from rljob_trainer.outages.deadline import deadline
from rljob_trainer.replicas.http import CONNECT_SECONDS
from rljob_trainer.replicas.pool import ReplicaLease, ReplicaPool
from rljob_trainer.services.hangs import Hangs
from rljob_trainer.services.hedging import HedgeTracker, InFlightRequest
from rljob_trainer.services.messages import Call, R, busy_seconds, is_final, num_valid
from rljob_trainer.services.refusals import REFUSED_STATUSES, Refusals, describe_redirect, is_redirect
from rljob_trainer.services.version_tracker import VersionTracker

_MIN_QUEUE_SECONDS = 600.0
"""Minimum time that a request may wait in a server's queue before another server gets it. The client's timeout includes
it, because the server's timeout starts with the execution."""
_UNAVAILABLE_STATUSES = (502, 503, 504)
_MALFORMED_STATUS = 422
"""From our servers: a request that breaks the protocol. From others, perhaps the data of one sample."""
_UNABLE_REASONS = (InvalidReason.CANCELLED, InvalidReason.UNREACHABLE)
"""One of our servers shuts down, or the endpoint of its model is away. Neither is an attempt of the function."""
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
    was_failed: bool = False
    """By an endpoint that answered another request afterwards."""
    num_executions: int = 0
    execute_seconds: float = 0.0
    seconds: float = 0.0
    """From its start to its end, waits and retries included."""


class Requests(Generic[R]):
    """Runs requests to their end, and knows those that have none yet."""

    def __init__(
        self,
        where: str,
        session: aiohttp.ClientSession,
        headers: Mapping[str, str],
        replicas: ReplicaPool,
        versions: VersionTracker | None,
        settings: Reward | CallService,
        *,
        url: str = "",
        hedging: Hedging | None = None,
        hangs: Hangs | None = None,
    ) -> None:
        """`where`: the service in messages to the user, such as spec.rewards: NAME. `settings`: its
        deadline is without the time in which the service was away. `url`: of an external endpoint; empty for replicas.
        `hangs`: learns of timeouts; None for an endpoint."""
        self.in_flight: set[PendingRequest[R]] = set()
        self.num_requests: Counter[Lane] = Counter()
        """Sent so far, including retries and hedges."""
        self.hedges = HedgeTracker(hedging) if hedging else None
        self._hangs = hangs
        self._where, self._url, self._is_external = where, url, bool(url)
        # Two requests per slot: the second waits for the whole execution of the first.
        queue_seconds = 0.0 if url else max(_MIN_QUEUE_SECONDS, settings.timeout_seconds)
        self.timeout_seconds = settings.timeout_seconds + queue_seconds
        """Maximum time from sending a request to its response."""
        self._session, self._headers, self._replicas, self._versions = session, headers, replicas, versions
        self._health, self._settings = replicas.fleet.health, settings
        self._refusals = Refusals(self._probe)

    async def run(self, call: Call[R], since: float | None = None) -> tuple[list[R], PendingRequest[R]]:
        """Return the results and how they came about. `since`: the time that decides its place among those that wait
        for a replica; None: now. Raise UserError for a response that no retry can change, and OutageError if none
        has succeeded for spec.outageSeconds."""
        now = time.monotonic()
        pending = PendingRequest(call, started_at=now, waits_since=now)
        self.in_flight.add(pending)
        try:
            async with deadline(self._settings.deadline_seconds, lambda: self._health.away_seconds) as scope:
                results = await self._run_attempts(pending, since)
        except TimeoutError:
            if not scope.expired():
                raise
            results = self._end_late(pending)
        finally:
            self.in_flight.discard(pending)
        pending.seconds = time.monotonic() - pending.started_at
        return results, pending

    def _end_late(self, pending: PendingRequest[R]) -> list[R]:
        # If no replica responded, the cause is the servers and not the time.
        is_unreachable = pending.num_failures == pending.num_requests > 0
        reason = InvalidReason.UNREACHABLE if is_unreachable else InvalidReason.DEADLINE
        message = (
            f"no result within {self._settings.deadline_seconds:g} s and {pending.num_requests} requests; "
            f"waited for {pending.waits_for}"
        )
        return pending.call.fail(reason, message)

    async def _run_attempts(self, pending: PendingRequest[R], since: float | None) -> list[R]:
        """Make attempts until one is final or no retry is left. Return the results with the most valid samples."""
        num_invalid, best = 0, list[R]()
        while True:
            pending.waits_for, pending.waits_since = "a replica", time.monotonic()
            async with self._replicas.lease(pending.tried, since) as lease:
                pending.sent_at, pending.waits_for = time.monotonic(), f"the response of {lease.address}"
                try:
                    results = await self._attempt(lease, pending)
                finally:
                    pending.sent_at = None
            if results is None:
                continue
            if num_valid(results) >= num_valid(best):
                best = results
            num_invalid += not is_final(results)
            if is_final(results) or num_invalid > self._settings.retries:
                return best

    def num_waiting(self) -> int:
        return sum(pending.sent_at is None for pending in self.in_flight)

    def longest_wait_seconds(self) -> float:
        """Return the age of the oldest wait for a replica; 0 if no request waits for one."""
        waits_since = [pending.waits_since for pending in self.in_flight if pending.sent_at is None]
        return time.monotonic() - min(waits_since) if waits_since else 0.0

    def oldest_seconds(self) -> float:
        """Return the age of the oldest request; 0 without requests."""
        return time.monotonic() - min((pending.started_at for pending in self.in_flight), default=time.monotonic())

    async def _attempt(self, lease: ReplicaLease, pending: PendingRequest[R]) -> list[R] | None:
        """Send a request, and a hedge if it becomes due; return the first final results, of all samples. None: this
        replica could not return any, and another one is needed."""
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
            with traces.begin_attempt(lease.address, pending.call.path, pending.num_requests + 1) as span:
                return await self._post(lease, pending, span)
        finally:
            pending.call.end()

    async def _post(self, lease: ReplicaLease, pending: PendingRequest[R], span: Span) -> list[R] | None:
        sent_at, call = time.monotonic(), pending.call
        try:
            body = call.encode(() if self._versions is None else self._versions.reads)
        except ValueError as error:
            lease.unused()
            return call.fail(InvalidReason.BAD_REQUEST, f"the sample cannot be sent as JSON: {error}")
        pending.tried.add(lease.address)
        pending.num_requests += 1
        self.num_requests[call.lane] += 1
        own = f"http://{lease.address}:{listening_port(PORT_SERVICE)}{call.path}"
        try:
            async with self._request(self._url or own, body) as response:
                text = await _read_text(response, call.max_response_bytes)
                traces.record_status(span, response.status)
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
            pending.num_failures += 1
            span.fail(type(error).__name__)
            # Without a connection nothing was executed.
            timed_out = isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError)
            message = (
                f"no response within {self.timeout_seconds:.0f} s" if timed_out else f"{type(error).__name__}: {error}"
            )
            if not (timed_out and self._is_external):
                if timed_out and self._hangs:
                    self._hangs.record_timeout(lease.address, sent_at, time.monotonic(), message)
                lease.failed(message)
                return None
            results = await self._judge_failure(lease, pending, InvalidReason.TIMEOUT, message, sent_at)
        else:
            results = await self._interpret(lease, pending, response, text, sent_at)
            if results is not None and response.status == 200 and self._is_external:
                self._refusals.record_answer(body)
        if results is not None:
            self._record_execution(lease.address, results, sent_at)
            pending.num_executions += 1
            pending.execute_seconds += max(result.execute_seconds for result in results)
            if self.hedges:
                self.hedges.record_latency(time.monotonic() - sent_at)
        return results

    def _record_execution(self, replica: str, results: Sequence[R], sent_at: float) -> None:
        if self._hangs is None:
            return
        late = [result for result in results if result.reason is InvalidReason.TIMEOUT]
        if results and len(late) == len(results):
            self._hangs.record_timeout(replica, sent_at, time.monotonic(), late[0].message)
        else:
            self._hangs.record_answer(replica)

    def list_hung(self) -> list[HungPart]:
        """Return the replicas whose executions all time out."""
        return self._hangs.list_hung(self._replicas.fleet.replicas, time.monotonic()) if self._hangs else []

    def _request(self, url: str, body: bytes) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=self.timeout_seconds, sock_connect=CONNECT_SECONDS)
        headers = {**self._headers, **_JSON}
        return self._session.post(url, data=body, headers=headers, timeout=timeout, allow_redirects=False)

    async def _judge_failure(
        self, lease: ReplicaLease, pending: PendingRequest[R], reason: InvalidReason, answer: str, sent_at: float
    ) -> list[R] | None:
        """Judge a request that an external endpoint failed. Return its invalid results, if it is the only one; None if
        all fail, which is an outage.

        An outage may have ended after the failure, so only the second one counts: of a request that was sent while the
        endpoint answered."""
        seconds = time.monotonic() - sent_at
        if self._health.has_answered and not (self._refusals.has_answered and await self._refusals.is_answering()):
            lease.failed(answer[:200])
            return None
        lease.answered()
        if self._health.has_answered and not pending.was_failed:
            pending.was_failed = True
            return None
        return pending.call.fail(reason, answer, seconds)

    async def _probe(self, body: bytes) -> int:
        async with self._request(self._url, body) as response:
            return response.status

    async def _interpret(
        self,
        lease: ReplicaLease,
        pending: PendingRequest[R],
        response: aiohttp.ClientResponse,
        text: str,
        sent_at: float,
    ) -> list[R] | None:
        """Return the results in a response. Raise UserError for one that a retry cannot change."""
        status, call, seconds = response.status, pending.call, time.monotonic() - sent_at
        if status == 429:
            lease.busy(busy_seconds(response.headers.get("Retry-After")))
            return None
        if status in REFUSED_STATUSES and not self._health.has_answered:
            raise UserError(f"{self._where}: {lease.address} returned {status}: {text[:500]}")
        if is_redirect(status) and self._is_external and not self._health.has_answered:
            raise UserError(f"{self._where}: {describe_redirect(lease.address, status, response.headers)}")
        if status == _MALFORMED_STATUS and not self._is_external:
            raise UserError(f"{self._where}: {lease.address} returned {status}: {text[:500]}")
        is_away = status >= 500 or status in REFUSED_STATUSES
        if status in _UNAVAILABLE_STATUSES or (is_away and not self._is_external):
            lease.failed(f"{status} {text[:200]}")
            return None
        if status != 200:
            answer = f"{status} {text[:500]}"
            if self._is_external:
                return await self._judge_failure(lease, pending, InvalidReason.EXCEPTION, answer, sent_at)
            lease.answered()
            return call.fail(InvalidReason.EXCEPTION, answer, seconds)
        if not response.content.at_eof():
            lease.done()
            return call.fail(InvalidReason.BAD_RETURN, f"the response is too long for a result: {text[:200]}", seconds)
        results = call.read(text, seconds)
        if not self._is_external and any(result.reason is InvalidReason.INTERRUPTED for result in results):
            lease.done()
            return None
        if not self._is_external:
            unable = [result for result in results if result.reason in _UNABLE_REASONS]
            if unable:
                lease.failed(unable[0].message)
                return None
        if self._versions is not None and not all(
            self._versions.record_result(lease.address, result.version) for result in results
        ):
            lease.done()
            return None
        lease.done()
        return results


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
