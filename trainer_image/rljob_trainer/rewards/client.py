"""The client of one reward: a sample or a group to valid scores, or to invalid results with a reason.

Owns statistics and demand; `transport` makes the attempts. Invariants: a failure is never a zero; every request has an
end.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable

import aiohttp

from rljob_api.errors import UserError
from rljob_api.manifest.reward import Reward
from rljob_api.wire.contract import ENV_REWARD_SERVICES, ENV_REWARD_TOKENS, ENV_TOKEN
from rljob_api.wire.discovery import resolve
from rljob_api.wire.protocol import GroupRequest, RewardDemand, ScoreRequest, ScoreResult
from rljob_trainer.episodes.types import ScoredResult
from rljob_trainer.replicas.http import auth_headers
from rljob_trainer.replicas.pool import ReplicaPool
from rljob_trainer.rewards.forecast import DemandForecast
from rljob_trainer.rewards.messages import RewardCall
from rljob_trainer.rewards.transport import Requests, Transport
from rljob_trainer.rewards.version_tracker import VersionTracker

IN_FLIGHT_PER_SLOT = 2
"""Requests that a replica holds per slot, so that the next one is ready when an execution ends. All others wait in the
driver: a replica that appears during a burst gets its share."""
_IN_FLIGHT_PER_ENDPOINT = 1024
"""The limit for an external endpoint, whose slots are unknown: each request is a connection."""
UNAVAILABLE_SECONDS = 600.0
"""Without any answer of a replica for so long, the job ends with an infrastructure error."""
_MAX_GROUPS = 65_536
"""Groups whose first request is known; far more than are under way."""
_NUM_LATENCIES = 2048
"""Newest samples from which the autoscaler takes the latency: it notices soon that a scorer has become slow."""


class RewardClient:
    def __init__(self, reward: Reward, session: aiohttp.ClientSession) -> None:
        self.reward = reward
        self.num_rescored = 0
        """Samples that were rescored because the reward's version changed in the middle of a step."""
        self._latencies: deque[float] = deque(maxlen=_NUM_LATENCIES)
        is_external = reward.http is not None
        self._protocol = reward.http.protocol if reward.http else "rljob"
        headers = {} if is_external else auth_headers(_token_variable(reward))  # never send a token elsewhere
        self.replicas = ReplicaPool(
            f"reward {reward.name}",
            _discovery(reward),
            max_in_flight=_IN_FLIGHT_PER_ENDPOINT if is_external else IN_FLIGHT_PER_SLOT * reward.slots,
            # A long execution is not a sign of failure.
            unavailable_timeout_seconds=max(UNAVAILABLE_SECONDS, 2 * reward.timeout_seconds),
            # The operator may scale these to zero.
            allow_empty=reward.autoscaling is not None or reward.reward_model_ref is not None,
            readiness_lags=False,
        )
        self.versions = None if is_external else VersionTracker(self.replicas, session, headers)
        where = f"spec.rewards: {reward.name}"
        self.transport = Transport[ScoreResult](reward, where, session, headers, self.replicas, self.versions)
        retries = reward.failure_policy.retries
        self.requests = Requests(
            self.transport, self.replicas, retries=retries, deadline_seconds=reward.deadline_seconds
        )
        self._group_since: dict[str, float] = {}
        """By group, the oldest first."""
        self.in_flight = self.requests.in_flight
        """Requests that have no result yet: one per sample, or one per group."""
        self.hedges, self.num_requests = self.transport.hedges, self.transport.num_requests
        self.replicas.on_tick = self._tick

    async def start(self) -> None:
        await self.replicas.start()

    async def close(self) -> None:
        await self.replicas.close()
        if self.versions:
            await self.versions.close()

    def begin(self) -> None:
        if self.versions:
            self.versions.begin()

    def is_stale(self, result: ScoreResult) -> bool:
        return self.versions is not None and not self.versions.pin.accepts(result.version)

    async def score(self, request: ScoreRequest | GroupRequest) -> list[ScoredResult]:
        """Score the samples together.  [samples]  Raise UserError with failJob, TransientError without any response."""
        results, pending = await self.requests.run(RewardCall(request, self._protocol), self._place(request))
        if pending.num_executions and not pending.call.is_short:
            self._latencies.append(pending.execute_seconds)
        for result in results:
            if not result.valid and self.reward.failure_policy.action == "failJob":
                raise UserError(
                    f"spec.rewards: {self.reward.name} returned no valid score ({result.reason}: {result.message}) and "
                    f"its failurePolicy.action is failJob"
                )
        latency, attempts = time.monotonic() - pending.started_at, pending.num_requests
        return [ScoredResult.model_construct(**dict(r), attempts=attempts, latency_seconds=latency) for r in results]

    def _place(self, request: ScoreRequest | GroupRequest) -> float:
        """Return when the first request of the group arrived. A group trains when all its samples are scored, so they
        are sent together, before those of groups that came later."""
        group = request.id if isinstance(request, GroupRequest) else request.id.rpartition("/")[0]
        since = self._group_since.setdefault(group, self.replicas.now())
        if len(self._group_since) > _MAX_GROUPS:
            del self._group_since[next(iter(self._group_since))]
        return since

    def statistics(self) -> dict[str, float]:
        """Return the current value of each metric `rljob_reward_NAME`."""
        return {
            "in_flight": sum(pending.call.num_results for pending in self.in_flight),
            "waiting": self.requests.num_waiting(),
            "waiting_oldest_seconds": self.requests.longest_wait_seconds(),
            "replicas": len(self.replicas.fleet.replicas),
            "hedges": self.hedges.num_hedges if self.hedges else 0,
            "hedge_wins": self.hedges.num_wins if self.hedges else 0,
            "rescored": self.num_rescored,
        }

    def demand(self, forecast: DemandForecast) -> RewardDemand:
        """Return the demand in executions: of groups with scope group, else of samples, since a group step is short."""
        if self.reward.scope == "group":
            forecast = forecast.in_groups()
        ordered, now = sorted(self._latencies), time.monotonic()
        mean = sum(ordered) / len(ordered) if ordered else None
        executions = [pending for pending in self.in_flight if not pending.call.is_short]
        sent_at = [pending.sent_at for pending in executions if pending.sent_at is not None]
        measured = {
            "window_seconds": forecast.window_seconds(mean),
            "in_flight": len(executions),
            "waiting": len(executions) - len(sent_at),
            "oldest_in_flight_seconds": now - min(sent_at) if sent_at else 0.0,
            "latency_seconds": mean,
            "latency_p95_seconds": ordered[int(0.95 * (len(ordered) - 1))] if ordered else None,
        }
        return forecast.demand.model_copy(update=measured)

    def describe_wait(self) -> str:
        """Return the age of the oldest request and what is missing; empty if nothing is in flight."""
        if not self.in_flight:
            return ""
        oldest = self.requests.oldest_seconds()
        fleet, missing = self.replicas.fleet, ""
        if not fleet.replicas:
            missing = ", no replica exists" + (" yet" if self.replicas.allow_empty else "")
        elif fleet.required_key and not fleet.num_serving():
            version = self.versions.pin.version if self.versions else None
            missing = (
                f", no replica serves version {version}" if version else ", no replica has reported its version yet"
            )
        return f"({self.reward.name}), oldest {oldest:.1f} s{missing}"

    def _tick(self) -> None:
        if self.versions:
            self.versions.tick()
        self.transport.send_due_hedges()


def _discovery(reward: Reward) -> Callable[[], list[str]]:
    """Return a function that finds the addresses of the job's servers, or the URL of an external endpoint."""
    if reward.http is not None:
        url = reward.http.url
        return lambda: [url]
    return discover_service(reward.name)


def discover_service(name: str) -> Callable[[], list[str]]:
    """Return a function that finds the addresses of a service's ready replicas."""
    host = json.loads(os.environ[ENV_REWARD_SERVICES])[name]
    return lambda: resolve(host)


def _token_variable(reward: Reward) -> str:
    """Return the environment variable with the token for this reward's servers: the job's, or a RewardModel's."""
    variables: dict[str, str] = json.loads(os.environ.get(ENV_REWARD_TOKENS) or "{}")
    variable = variables.get(reward.name, ENV_TOKEN)
    if variable != ENV_TOKEN and not os.environ.get(variable):
        raise UserError(
            f"spec.rewards: {reward.name}: {variable}, its token's variable in ${ENV_REWARD_TOKENS}, is not set; "
            "check that the Secret of its RewardModel exists"
        )
    return variable
