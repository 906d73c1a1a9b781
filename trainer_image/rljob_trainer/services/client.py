"""The client of one service: a reward, a simulated user, a tool, or the runner of episodes.

Owns its replicas, what it has measured and what it reports; `requests` makes the attempts. Invariants: a failure is
never a zero; every request has an end.
"""

import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar, Generic, get_args

import aiohttp

from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.reward import Hedging, Reward
from rljob_api.wire.base import Lane
from rljob_api.wire.contract import ENV_REWARD_SERVICES
from rljob_api.wire.discovery import resolve
from rljob_trainer.outages.registry import FIRST_ANSWER_SECONDS, Outages, hide_secrets
from rljob_trainer.replicas.http import auth_headers
from rljob_trainer.replicas.pool import ReplicaPool
from rljob_trainer.services.hangs import Hangs
from rljob_trainer.services.load import CallTotals, ServiceLoad
from rljob_trainer.services.messages import Call, R
from rljob_trainer.services.requests import PendingRequest, Requests
from rljob_trainer.services.version_tracker import VersionTracker

_IN_FLIGHT_PER_SLOT = 2
"""Requests that a replica holds per slot, so that the next one is ready when an execution ends. All others wait in the
driver: a replica that appears during a burst gets its share."""
_IN_FLIGHT_PER_ENDPOINT = 1024
"""The limit for an external endpoint, whose slots are unknown: each request is a connection."""
_NUM_LATENCIES = 2048
"""Newest calls from which the autoscaler takes the latency: it notices soon that a service has become slow."""
_LANES: tuple[Lane, ...] = get_args(Lane)


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
        place = hide_secrets(url) if url else _host_of(settings.name)
        remedy = "make it answer at its url" if url else "see `kubectl rljob explain` and the log of its Pods"
        first = FIRST_ANSWER_SECONDS if url else math.inf
        self.health = (outages or Outages()).watch(f"{source} ({place})", remedy, first_answer_seconds=first)
        self.headers = auth_headers() if headers is None else headers
        self.replicas = ReplicaPool(
            name,
            (lambda: [url]) if url else _discover(settings.name),
            max_in_flight=_IN_FLIGHT_PER_ENDPOINT if url else in_flight_per_slot * settings.slots,
            health=self.health,
            allow_empty=allow_empty or settings.autoscaling is not None,
            readiness_lags=False,
            spreads=self.SPREADS,
            on_tick=self._tick,
        )
        self.versions = VersionTracker(self.replicas, session, self.headers) if pins_version else None
        self.timeout_seconds = settings.timeout_seconds
        role = f"{'reward' if isinstance(settings, Reward) else 'agent'}-{settings.name}"
        self.requests = Requests[R](
            where,
            session,
            self.headers,
            self.replicas,
            self.versions,
            settings,
            url=url,
            hedging=hedging,
            hangs=None if url else Hangs(role, settings.timeout_seconds, settings.slots),
        )
        self.num_requests = self.requests.num_requests
        self._latencies: deque[float] = deque(maxlen=_NUM_LATENCIES)
        self._totals = dict.fromkeys(_LANES, CallTotals())

    async def start(self) -> None:
        await self.replicas.start()

    async def close(self) -> None:
        await self.replicas.close()
        if self.versions:
            await self.versions.close()

    async def _run(self, call: Call[R], since: float | None = None) -> tuple[list[R], PendingRequest[R]]:
        """See Requests.run."""
        results, pending = await self.requests.run(call, since)
        if pending.num_executions and not call.is_short:
            self._latencies.append(pending.execute_seconds)
        before, busy = self._totals[call.lane], pending.execute_seconds
        self._totals[call.lane] = CallTotals(
            before.num_calls + 1, before.busy_seconds + busy, before.wait_seconds + max(0.0, pending.seconds - busy)
        )
        return results, pending

    def load(self) -> ServiceLoad:
        """Return what the autoscaler needs. Short requests do not count."""
        ordered, now = sorted(self._latencies), time.monotonic()
        executions = [pending for pending in self.requests.in_flight if not pending.call.is_short]
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

    def _count_readers(self) -> int:
        """Return the number of callers that wait for a replica without a request."""
        return 0

    def statistics(self) -> dict[str, float]:
        """Return the current value of each metric of the service."""
        return {
            "in_flight": sum(pending.call.num_results for pending in self.requests.in_flight),
            "waiting": self.requests.num_waiting(),
            "waiting_oldest_seconds": self.requests.longest_wait_seconds(),
            "replicas": len(self.replicas.fleet.replicas),
        }

    @abstractmethod
    def describe_wait(self) -> str:
        """Describe what is in flight; empty if nothing is."""

    def _describe_oldest(self, more: str = "") -> str:
        """Return `, oldest 4.1 s`, `more`, and what is missing."""
        return f", oldest {self.requests.oldest_seconds():.1f} s{more}{self._describe_missing()}"

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
        self.requests.send_due_hedges()


def _host_of(service: str) -> str:
    return str(json.loads(os.environ[ENV_REWARD_SERVICES])[service])


def _discover(name: str) -> Callable[[], list[str]]:
    """Return a function that finds the addresses of a service's ready replicas."""
    host = _host_of(name)
    return lambda: resolve(host)
