"""The client of one service of an agent: the simulated user, the functions of one tool, or the runner of episodes.

Retries, the deadline and the waits are those of a reward. Invariant: each call ends with a value or with a reason.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import replace
from typing import ClassVar, get_args

import aiohttp

from rljob_api.manifest.job import Service
from rljob_api.wire.protocol import CallRequest, CallResult, Lane
from rljob_trainer.calls.demand import CallTotals, ServiceLoad
from rljob_trainer.calls.messages import FunctionCall
from rljob_trainer.replicas.http import auth_headers
from rljob_trainer.replicas.pool import ReplicaPool
from rljob_trainer.rewards.client import IN_FLIGHT_PER_SLOT, UNAVAILABLE_SECONDS, discover_service
from rljob_trainer.rewards.messages import Call
from rljob_trainer.rewards.transport import PendingRequest, Requests, Transport

_NUM_LATENCIES = 2048
"""Newest calls from which the autoscaler takes the latency."""
_LANES: tuple[Lane, ...] = get_args(Lane)


class ServiceClient(ABC):
    """What the clients of all services have in common: replicas, requests, and what they report."""

    HOLDS_SLOTS: ClassVar[bool] = False
    """Whether a call lasts for a whole episode."""

    def __init__(
        self,
        service: Service,
        session: aiohttp.ClientSession,
        name: str,
        *,
        in_flight_per_slot: int = IN_FLIGHT_PER_SLOT,
    ) -> None:
        """`name`: of the service in messages."""
        settings = service.reward
        self.service = service
        self.replicas = ReplicaPool(
            name,
            discover_service(settings.name),
            max_in_flight=in_flight_per_slot * settings.slots,
            # A long execution is not a sign of failure.
            unavailable_timeout_seconds=max(UNAVAILABLE_SECONDS, 2 * settings.timeout_seconds),
            # The operator may scale these to zero.
            allow_empty=settings.autoscaling is not None,
            readiness_lags=False,
        )
        self.headers = auth_headers()
        transport = Transport[CallResult](settings, service.path, session, self.headers, self.replicas, None)
        self.num_requests = transport.num_requests
        self._requests = Requests(
            transport,
            self.replicas,
            retries=settings.failure_policy.retries,
            deadline_seconds=settings.deadline_seconds,
        )
        self._latencies: deque[float] = deque(maxlen=_NUM_LATENCIES)
        self._totals = dict.fromkeys(_LANES, CallTotals())

    async def start(self) -> None:
        await self.replicas.start()

    async def close(self) -> None:
        await self.replicas.close()

    async def _run(self, call: Call[CallResult]) -> tuple[CallResult, float]:
        """Return the result and the seconds until it, with waits and retries. Raise UserError for a configuration that
        no retry can change, and TransientError if no replica has answered for long."""
        [result], pending = await self._requests.run(call)
        seconds = time.monotonic() - pending.started_at
        self._record(pending, seconds)
        return result, seconds

    def _record(self, pending: PendingRequest[CallResult], seconds: float) -> None:
        lane, busy = pending.call.lane, pending.execute_seconds
        if pending.num_executions:
            self._latencies.append(busy)
        before = self._totals[lane]
        self._totals[lane] = CallTotals(
            before.num_calls + 1, before.busy_seconds + busy, before.wait_seconds + max(0.0, seconds - busy)
        )

    def load(self) -> ServiceLoad:
        """Return what the autoscaler needs."""
        ordered, now = sorted(self._latencies), time.monotonic()
        in_flight = self._requests.in_flight
        sent_at = [pending.sent_at for pending in in_flight if pending.sent_at is not None]
        waits = dict.fromkeys(_LANES, 0.0)
        for pending in in_flight:
            if pending.sent_at is None:
                waits[pending.call.lane] += now - pending.waits_since
        # Readers of a tool's functions have no request.
        num_in_flight = max(len(in_flight), len(sent_at) + self.replicas.num_waiting)
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

    def statistics(self) -> dict[str, float]:
        """Return the current value of each metric `rljob_agent_NAME`."""
        return {
            "in_flight": len(self._requests.in_flight),
            "waiting": self._requests.num_waiting(),
            "waiting_oldest_seconds": self._requests.longest_wait_seconds(),
            "replicas": len(self.replicas.fleet.replicas),
        }

    @abstractmethod
    def describe_wait(self) -> str:
        """Describe what is in flight; empty if nothing is."""

    def _describe_missing(self) -> str:
        """Return `, no replica exists` if there is none; with `yet` if the operator starts one."""
        if self.replicas.fleet.replicas:
            return ""
        return ", no replica exists" + (" yet" if self.replicas.allow_empty else "")


class CallClient(ServiceClient):
    """Of the simulated user or a tool."""

    def __init__(self, service: Service, session: aiohttp.ClientSession) -> None:
        super().__init__(
            service, session, "simulated user" if service.kind == "user" else f"tool {service.reward.name}"
        )

    async def call(self, request: CallRequest) -> tuple[CallResult, float]:
        """Return the result and the seconds until it. Raise UserError and TransientError."""
        return await self._run(FunctionCall(request))

    def describe_wait(self) -> str:
        """Return `3 replies of the user, oldest 4.1 s`, and what is missing; empty if nothing is in flight."""
        count, missing = len(self._requests.in_flight), self._describe_missing()
        if not count:  # its functions must be known before the first prompt
            return f"the functions of the {self.replicas.name}{missing}" if self.replicas.num_waiting else ""
        if self.service.kind == "user":
            what = f"{count} {'replies' if count > 1 else 'reply'} of the user"
        else:
            what = f"{count} {'results' if count > 1 else 'result'} of the tool {self.service.reward.name}"
        return f"{what}, oldest {self._requests.oldest_seconds():.1f} s{missing}"
