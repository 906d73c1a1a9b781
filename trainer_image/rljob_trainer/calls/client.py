"""The client of one service of an agent: the simulated user, the functions of one tool, or the runner of episodes.

Retries, the deadline and the waits are those of a reward. Invariant: each call ends with a value or with a reason.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import aiohttp

from rljob_api.manifest.job import Service
from rljob_api.wire.protocol import CallRequest, CallResult
from rljob_trainer.calls.messages import FunctionCall
from rljob_trainer.replicas.http import auth_headers
from rljob_trainer.replicas.pool import ReplicaPool
from rljob_trainer.rewards.client import IN_FLIGHT_PER_SLOT, UNAVAILABLE_SECONDS, discover_service
from rljob_trainer.rewards.messages import Call
from rljob_trainer.rewards.transport import Requests, Transport


class ServiceClient(ABC):
    """What the clients of all services have in common: replicas, requests, and what they report."""

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

    async def start(self) -> None:
        await self.replicas.start()

    async def close(self) -> None:
        await self.replicas.close()

    async def _run(self, call: Call[CallResult]) -> tuple[CallResult, float]:
        """Return the result and the seconds until it, with waits and retries. Raise UserError for a configuration that
        no retry can change, and TransientError if no replica has answered for long."""
        started_at = time.monotonic()
        [result], _ = await self._requests.run(call)
        return result, time.monotonic() - started_at

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
        count = len(self._requests.in_flight)
        if not count:
            return ""
        if self.service.kind == "user":
            what = f"{count} {'replies' if count > 1 else 'reply'} of the user"
        else:
            what = f"{count} {'results' if count > 1 else 'result'} of the tool {self.service.reward.name}"
        missing = "" if self.replicas.fleet.replicas else ", no replica exists"
        return f"{what}, oldest {self._requests.oldest_seconds():.1f} s{missing}"
