"""The client of one service: a reward, a simulated user, a tool, or the runner of episodes.

Owns its replicas, the requests in flight, what it has measured and what it reports.

    call      until a result is final, no retry is left, or the deadline passes
    _attempt  one request to a replica, perhaps with a hedge, and its response

Invariants: each request has an end; a failure is never a score of zero; only an executed attempt with an invalid result
uses up a retry.
"""

import asyncio
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import ClassVar, Generic, get_args

import aiohttp

from rljob_api.errors import UserError
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.reward import Hedging, Reward
from rljob_api.wire.base import InvalidReason, Lane
from rljob_api.wire.contract import ENV_REWARD_SERVICES, PORT_SERVICE
from rljob_api.wire.discovery import listening_port, resolve
from rljob_api.wire.driver_status import HungPart
from rljob_trainer import traces
from rljob_trainer.outages import FIRST_ANSWER_SECONDS, Outages, deadline, hide_secrets
from rljob_trainer.replicas.http import auth_headers, send
from rljob_trainer.replicas.pool import ReplicaLease, ReplicaPool
from rljob_trainer.services.demand import CallTotals, ServiceLoad
from rljob_trainer.services.hangs import Hangs
from rljob_trainer.services.hedging import HedgeTracker, InFlightRequest
from rljob_trainer.services.messages import (
    REFUSED_STATUSES,
    Call,
    PendingRequest,
    R,
    Refusals,
    busy_seconds,
    describe_redirect,
    first_final,
    is_final,
    num_valid,
    read_text,
)
from rljob_trainer.services.version_tracker import VersionTracker

_IN_FLIGHT_PER_SLOT = 2
"""Requests that a replica holds per slot, so that the next one is ready when an execution ends. All others wait in the
driver: a replica that appears during a burst gets its share."""
_IN_FLIGHT_PER_ENDPOINT = 1024
"""The limit for an external endpoint, whose slots are unknown: each request is a connection."""
_NUM_LATENCIES = 2048
"""Newest calls from which the autoscaler takes the latency: it notices soon that a service has become slow."""
_LANES: tuple[Lane, ...] = get_args(Lane)
_MIN_QUEUE_SECONDS = 600.0
"""Minimum time that a request may wait in a server's queue before another server gets it. The client's timeout includes
it, because the server's timeout starts with the execution."""
_UNAVAILABLE_STATUSES = (502, 503, 504)
_MALFORMED_STATUS = 422
"""From our servers: a request that breaks the protocol. From others, perhaps the data of one sample."""
_UNABLE_REASONS = (InvalidReason.CANCELLED, InvalidReason.UNREACHABLE)
"""One of our servers shuts down, or the endpoint of its model is away. Neither is an attempt of the function."""
_JSON = {"Content-Type": "application/json"}


class ServiceClient(ABC, Generic[R]):
    HOLDS_SLOTS: ClassVar[bool] = False
    """Whether a call lasts for a whole episode."""
    SPREADS: ClassVar[bool] = True
    """Whether calls that come one after the other go to all replicas in turn."""

    def __init__(
        self,
        settings: Reward | CallService,
        where: str,
        session: aiohttp.ClientSession,
        *,
        name: str,
        source: str,
        outages: Outages | None = None,
        url: str = "",
        headers: Mapping[str, str] | None = None,
        in_flight_per_slot: int = _IN_FLIGHT_PER_SLOT,
        allow_empty: bool = False,
        pins_version: bool = False,
        hedging: Hedging | None = None,
    ) -> None:
        """`where`: the service in messages to the user, such as spec.agent.user. `name`: in those of the log. `source`:
        the field of what it runs, such as spec.rewards[0].http. `outages`: which learn whether it answers. `url`: of an
        external endpoint; empty: the job's own replicas. `headers`: None: the job's token. `allow_empty`: the
        operator may scale it to zero, as it does with autoscaling. `pins_version`: one version answers a collection."""
        host = "" if url else str(json.loads(os.environ[ENV_REWARD_SERVICES])[settings.name])
        remedy = "make it answer at its url" if url else "see `kubectl rljob explain` and the log of its Pods"
        first = FIRST_ANSWER_SECONDS if url else math.inf
        watched = f"{source} ({host or hide_secrets(url)})"
        self.health = (outages or Outages()).watch(watched, remedy, first_answer_seconds=first)
        self.headers = auth_headers() if headers is None else headers
        self.replicas = ReplicaPool(
            name,
            lambda: [url] if url else resolve(host),
            max_in_flight=_IN_FLIGHT_PER_ENDPOINT if url else in_flight_per_slot * settings.slots,
            health=self.health,
            allow_empty=allow_empty or settings.autoscaling is not None,
            readiness_lags=False,
            spreads=self.SPREADS,
            on_tick=self._tick,
        )
        self.versions = VersionTracker(self.replicas, session, self.headers) if pins_version else None
        self._where, self._url, self._is_external = where, url, bool(url)
        self._session, self._settings = session, settings
        self.timeout_seconds = settings.timeout_seconds
        """Limit of one execution."""
        # Two requests per slot: the second waits for the whole execution of the first.
        queue_seconds = 0.0 if url else max(_MIN_QUEUE_SECONDS, settings.timeout_seconds)
        self.request_seconds = settings.timeout_seconds + queue_seconds
        """Maximum time from sending a request to its response."""
        self.in_flight: set[PendingRequest[R]] = set()
        self.num_requests: Counter[Lane] = Counter()
        """Sent so far, including retries and hedges."""
        self.hedges = HedgeTracker(hedging) if hedging else None
        role = f"{'reward' if isinstance(settings, Reward) else 'agent'}-{settings.name}"
        self._hangs = None if url else Hangs(role, settings.timeout_seconds, settings.slots)
        """Learns of timeouts; None for an endpoint."""
        self._refusals = Refusals(self._probe)
        self._latencies: deque[float] = deque(maxlen=_NUM_LATENCIES)
        self._totals = dict.fromkeys(_LANES, CallTotals())

    async def start(self) -> None:
        await self.replicas.start()

    async def close(self) -> None:
        await self.replicas.close()
        if self.versions:
            await self.versions.close()

    async def call(self, call: Call[R], since: float | None = None) -> tuple[list[R], PendingRequest[R]]:
        """Return the results and how they came about. `since`: the time that decides its place among those that wait
        for a replica; None: now. Raise UserError for a response that no retry can change, and OutageError if none
        has succeeded for spec.outageSeconds."""
        now = time.monotonic()
        pending = PendingRequest(call, started_at=now, waits_since=now)
        self.in_flight.add(pending)
        try:
            async with deadline(self._settings.deadline_seconds, lambda: self.health.away_seconds) as scope:
                results = await self._run_attempts(pending, since)
        except TimeoutError:
            if not scope.expired():
                raise
            results = self._end_late(pending)
        finally:
            self.in_flight.discard(pending)
        pending.seconds = time.monotonic() - pending.started_at
        if pending.num_executions and not call.is_short:
            self._latencies.append(pending.execute_seconds)
        before, busy = self._totals[call.lane], pending.execute_seconds
        self._totals[call.lane] = CallTotals(
            before.num_calls + 1, before.busy_seconds + busy, before.wait_seconds + max(0.0, pending.seconds - busy)
        )
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
            async with self.replicas.lease(pending.tried, since) as lease:
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
            results = await first_final([first, second] if second else [first])
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
        while request := self.hedges.next_due(self.replicas.now()):
            lease = self.replicas.try_lease({request.address})
            if lease is None:
                return
            self.hedges.record_hedged(request)
            request.second.set_result(lease)

    async def _send(self, lease: ReplicaLease, pending: PendingRequest[R]) -> list[R] | None:
        """Send the request to a replica. Return its results; None if another attempt is needed."""
        sent_at, call = time.monotonic(), pending.call
        url = self._url or f"http://{lease.address}:{listening_port(PORT_SERVICE)}{call.path}"
        with traces.begin_attempt(url, call.path, pending.num_requests + 1) as span:
            try:
                body = call.encode(() if self.versions is None else self.versions.reads)
            except ValueError as error:
                lease.unused()
                return call.fail(InvalidReason.BAD_REQUEST, f"the sample cannot be sent as JSON: {error}")
            pending.tried.add(lease.address)
            pending.num_requests += 1
            self.num_requests[call.lane] += 1
            try:
                async with self._request(url, body) as response:
                    text = await read_text(response, call.max_response_bytes)
                    span.record_status(response.status)
            except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
                span.fail(type(error).__name__)
                results = await self._judge_error(lease, pending, error, sent_at)
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

    async def _judge_error(
        self, lease: ReplicaLease, pending: PendingRequest[R], error: Exception, sent_at: float
    ) -> list[R] | None:
        """Judge a request without a response. Only that of an endpoint may have been executed for too long."""
        pending.num_failures += 1
        # Without a connection nothing was executed.
        timed_out = isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError)
        message = (
            f"no response within {self.request_seconds:.0f} s" if timed_out else f"{type(error).__name__}: {error}"
        )
        if timed_out and self._is_external:
            return await self._judge_failure(lease, pending, InvalidReason.TIMEOUT, message, sent_at)
        if timed_out and self._hangs:
            self._hangs.record_timeout(lease.address, sent_at, time.monotonic(), message)
        lease.failed(message)
        return None

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
        return self._hangs.list_hung(self.replicas.fleet.replicas, time.monotonic()) if self._hangs else []

    def _request(self, url: str, body: bytes) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return send(self._session, "POST", url, self.request_seconds, {**self.headers, **_JSON}, data=body)

    async def _judge_failure(
        self, lease: ReplicaLease, pending: PendingRequest[R], reason: InvalidReason, answer: str, sent_at: float
    ) -> list[R] | None:
        """Judge a request that an external endpoint failed. Return its invalid results, if it is the only one; None if
        all fail, which is an outage.

        An outage may have ended after the failure, so only the second one counts: of a request that was sent while the
        endpoint answered."""
        seconds = time.monotonic() - sent_at
        if self.health.has_answered and not (self._refusals.has_answered and await self._refusals.is_answering()):
            lease.failed(answer[:200])
            return None
        lease.answered()
        if self.health.has_answered and not pending.was_failed:
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
        if status in REFUSED_STATUSES and not self.health.has_answered:
            raise UserError(f"{self._where}: {lease.address} returned {status}: {text[:500]}")
        if 300 <= status < 400 and self._is_external and not self.health.has_answered:
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
        if self.versions is not None and not all(
            self.versions.record_result(lease.address, result.version) for result in results
        ):
            lease.done()
            return None
        lease.done()
        return results

    def load(self) -> ServiceLoad:
        """Return what the autoscaler needs. Short requests do not count."""
        ordered, now = sorted(self._latencies), time.monotonic()
        executions = [pending for pending in self.in_flight if not pending.call.is_short]
        sent_at = [pending.sent_at for pending in executions if pending.sent_at is not None]
        waits = dict.fromkeys(_LANES, 0.0)
        for pending in executions:
            if pending.sent_at is None:
                waits[pending.call.lane] += now - pending.waits_since
        num_in_flight = len(executions) + self._count_readers()
        return ServiceLoad(
            holds_slots=self.HOLDS_SLOTS,
            in_flight=num_in_flight,
            waiting=num_in_flight - len(sent_at),
            oldest_in_flight_seconds=now - min(sent_at) if sent_at else 0.0,
            latency_seconds=sum(ordered) / len(ordered) if ordered else None,
            latency_p95_seconds=ordered[int(0.95 * (len(ordered) - 1))] if ordered else None,
            totals={
                lane: replace(total, wait_seconds=total.wait_seconds + waits[lane])
                for lane, total in self._totals.items()
            },
        )

    def num_waiting(self) -> int:
        return sum(pending.sent_at is None for pending in self.in_flight)

    def longest_wait_seconds(self) -> float:
        """Return the age of the oldest wait for a replica; 0 if no request waits for one."""
        waits_since = [pending.waits_since for pending in self.in_flight if pending.sent_at is None]
        return time.monotonic() - min(waits_since) if waits_since else 0.0

    def _count_readers(self) -> int:
        """Return the number of callers that wait for a replica without a request."""
        return 0

    def statistics(self) -> dict[str, float]:
        """Return the current value of each metric of the service."""
        return {
            "in_flight": sum(pending.call.num_results for pending in self.in_flight),
            "waiting": self.num_waiting(),
            "waiting_oldest_seconds": self.longest_wait_seconds(),
            "replicas": len(self.replicas.fleet.replicas),
        }

    @abstractmethod
    def describe_wait(self) -> str:
        """Describe what is in flight; empty if nothing is."""

    def _describe_oldest(self, more: str = "") -> str:
        """Return `, oldest 4.1 s`, `more`, and what is missing."""
        seconds = time.monotonic() - min(pending.started_at for pending in self.in_flight)
        return f", oldest {seconds:.1f} s{more}{self._describe_missing()}"

    def _describe_missing(self) -> str:
        """Return `, no replica exists` if there is none, with `yet` if the operator starts one; or which version is
        missing."""
        fleet = self.replicas.fleet
        if not fleet.replicas:
            return ", no replica exists" + (" yet" if self.replicas.allow_empty else "")
        if not self.versions or not fleet.required_key or fleet.num_serving():
            return ""
        version = self.versions.pin.version
        return f", no replica serves version {version}" if version else ", no replica has reported its version yet"

    def _tick(self) -> None:
        if self.versions:
            self.versions.tick()
        self.send_due_hedges()
