"""One attempt at a reward: sends a request to a replica, perhaps hedges it, and interprets the response.

Invariant: each attempt has an end, and a failure is never a score of zero.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from rljob_api.errors import UserError
from rljob_api.manifest.reward import Reward
from rljob_api.wire.contract import MAX_RESULT_BYTES, PORT_REWARD
from rljob_api.wire.protocol import GroupRequest, InvalidReason, Lane, ScoreResult
from rljob_trainer.replicas.hedging import HedgeTracker, InFlightRequest
from rljob_trainer.replicas.http import CONNECT_SECONDS
from rljob_trainer.replicas.pool import ReplicaLease, ReplicaPool
from rljob_trainer.rewards.messages import RewardCall, busy_seconds, is_final
from rljob_trainer.rewards.version_tracker import VersionTracker

_MIN_QUEUE_SECONDS = 600.0
"""Minimum time that a request may wait in a server's queue before another server gets it. The client's timeout includes
it, because the server's timeout starts with the execution."""
_UNAVAILABLE_STATUSES = (502, 503, 504)
_USER_ERROR_STATUSES = (401, 403, 404, 405)
_MALFORMED_STATUS = 422
"""From our servers: a request that breaks the protocol. From others, perhaps the data of one sample."""
_MAX_RESPONSE_BYTES_PER_SAMPLE = 2 * MAX_RESULT_BYTES
"""A result with its id, version and message."""
_JSON = {"Content-Type": "application/json"}

Attempt = list[ScoreResult] | None
"""Results of all samples of the request; None if this replica could not return any and another one is needed."""


@dataclass(eq=False)
class PendingRequest:
    call: RewardCall
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

    @property
    def is_group_step(self) -> bool:
        """Whether it is the second half of sampleThenGroup: short, and no execution for autoscaling."""
        return isinstance(self.call.request, GroupRequest) and self.call.request.results is not None


class RewardTransport:
    def __init__(
        self,
        reward: Reward,
        session: aiohttp.ClientSession,
        headers: Mapping[str, str],
        replicas: ReplicaPool,
        versions: VersionTracker | None,
    ) -> None:
        self.num_requests: Counter[Lane] = Counter()
        """Sent so far, including retries and hedges."""
        self.hedges = HedgeTracker(reward.hedging) if reward.hedging else None
        self._name = reward.name
        self._is_external = reward.http is not None
        # Two requests per slot: the second waits for the whole execution of the first.
        queue_seconds = 0.0 if self._is_external else max(_MIN_QUEUE_SECONDS, reward.timeout_seconds)
        self.timeout_seconds = reward.timeout_seconds + queue_seconds
        """Maximum time from sending a request to its response."""
        self._session, self._headers, self._replicas, self._versions = session, headers, replicas, versions

    async def attempt(self, lease: ReplicaLease, pending: PendingRequest) -> Attempt:
        """Send a request, and a hedge if it becomes due; return the first final results."""
        if self.hedges is None or pending.is_group_step:
            return await self._send(lease, pending)
        request = InFlightRequest(lease.address, time.monotonic(), asyncio.get_running_loop().create_future())
        self.hedges.record_sent(request)
        first, second = asyncio.create_task(self._send(lease, pending)), None
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

    async def _send(self, lease: ReplicaLease, pending: PendingRequest) -> Attempt:
        sent_at, call = time.monotonic(), pending.call
        try:
            body = call.encode(with_tokens=self._versions is not None and self._versions.reads_tokens)
        except ValueError as error:
            lease.unused()
            return call.fail(InvalidReason.BAD_REQUEST, f"the sample cannot be sent as JSON: {error}")
        pending.tried.add(lease.address)
        pending.num_requests += 1
        self.num_requests[call.request.lane] += 1
        try:
            async with self._session.post(
                lease.address if self._is_external else f"http://{lease.address}:{PORT_REWARD}{call.path}",
                data=body,
                headers={**self._headers, **_JSON},
                timeout=aiohttp.ClientTimeout(total=self.timeout_seconds, sock_connect=CONNECT_SECONDS),
            ) as response:
                text = await _read_text(response, _MAX_RESPONSE_BYTES_PER_SAMPLE * len(call.samples))
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
            results: Attempt = call.fail(InvalidReason.TIMEOUT, message, time.monotonic() - sent_at)
        else:
            results = self._interpret(lease, call, response, text, time.monotonic() - sent_at)
        if results is not None:
            pending.num_executions += 1
            pending.execute_seconds += max(result.execute_seconds for result in results)
            if self.hedges:
                self.hedges.record_latency(time.monotonic() - sent_at)
        return results

    def _interpret(
        self, lease: ReplicaLease, call: RewardCall, response: aiohttp.ClientResponse, text: str, seconds: float
    ) -> Attempt:
        """Return the results in a response. Raise UserError for one that a retry cannot change."""
        status = response.status
        if status == 429:
            lease.busy(busy_seconds(response.headers.get("Retry-After")))
            return None
        if status in _USER_ERROR_STATUSES or (status == _MALFORMED_STATUS and not self._is_external):
            raise UserError(f"spec.rewards: {self._name}: {lease.address} returned {status}: {text[:500]}")
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
        if self._versions is not None:
            cancelled = [result for result in results if result.reason is InvalidReason.CANCELLED]
            if cancelled:  # the server shut down first: not an attempt of the function
                lease.failed(cancelled[0].message)
                return None
            if not all(self._versions.record_result(lease.address, result.version) for result in results):
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


async def _first_final(tasks: Sequence[asyncio.Task[Attempt]]) -> Attempt:
    """Return the first final results; if there are none, the results with the most valid samples."""
    best: Attempt = None
    for next_done in asyncio.as_completed(tasks):
        results = await next_done
        if results is None:
            continue
        if is_final(results):
            return results
        if best is None or num_valid(results) > num_valid(best):
            best = results
    return best


def num_valid(results: list[ScoreResult]) -> int:
    return sum(result.valid for result in results)
