"""The client of one reward: a sample or a group to valid scores, or to invalid results with a reason.

Owns which replica gets a request, retries by the failure policy, the deadline, second requests, and what counts as
which failure. Leaves masking to `batches`, decisions on hedging and versions to `hedging` and `versions`. Invariants: a
failure is never a zero; only an executed attempt that came out invalid uses up a retry; every request has an end.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from rljob_api.errors import UserError
from rljob_api.manifest.reward import Reward
from rljob_api.wire.contract import ENV_REWARD_SERVICES, ENV_REWARD_TOKENS, ENV_TOKEN, PORT_REWARD
from rljob_api.wire.discovery import resolve
from rljob_api.wire.protocol import GroupRequest, InvalidReason, Lane, RewardDemand, ScoreRequest, ScoreResult
from rljob_trainer.episodes.types import Scored
from rljob_trainer.replicas.hedging import HedgeTracker, InFlightRequest
from rljob_trainer.replicas.http import CONNECT_SECONDS, auth_headers
from rljob_trainer.replicas.pool import Lease, ReplicaPool
from rljob_trainer.rewards.forecast import Outlook
from rljob_trainer.rewards.messages import Ask, busy_seconds, is_final
from rljob_trainer.rewards.version_tracker import VersionWatch

_QUEUE_SECONDS = 600.0
"""Time that a request may wait in a server's queue at least before another one is asked: the client's own time-out,
since the server's begins with the execution."""
_UNAVAILABLE = (502, 503, 504)
_IN_FLIGHT_A_SLOT = 2
"""Requests that one replica gets at once, by its slots: the next ones are there when an execution ends. All others wait
here, so that a replica that comes in the middle of a burst gets its share of it."""
_IN_FLIGHT_AN_ENDPOINT = 1024
"""The same for somebody else's URL, whose slots nobody knows: each request is a connection."""
_NUM_LATENCIES = 2048
"""Newest samples by which the autoscaler judges how long one takes: a scorer that has become slow is seen soon."""

Attempt = list[ScoreResult] | None
"""Results of all samples asked about, or None: this replica could not answer, ask another."""


@dataclass(eq=False)
class _Underway:
    """What has become of one request so far, over all of its attempts."""

    ask: Ask
    began: float
    waits_since: float
    """When it began to wait for a replica, the last time that it had none."""
    is_group_step: bool
    """The second half of sampleThenGroup: short, and no execution that the autoscaler reckons with."""
    waits_for: str = "a replica"
    asked_at: float | None = None
    """When the replica was asked that has it now."""
    asked: set[str] = field(default_factory=set)
    """Replicas that had it; another attempt goes elsewhere."""
    num_requests: int = 0
    num_failures: int = 0
    """Requests that had no answer: refused, broken off, or not there in time."""
    num_executions: int = 0
    execute_seconds: float = 0.0


class RewardClient:
    """One reward of the job, over all of its replicas."""

    def __init__(
        self, reward: Reward, session: aiohttp.ClientSession, *, unavailable_timeout_seconds: float = 600.0
    ) -> None:
        self.reward = reward
        self.in_flight: set[_Underway] = set()
        """Requests under way: one a sample, or one a group."""
        self.num_requests: Counter[Lane] = Counter()
        """Sent so far, retries and hedges included."""
        self.num_rescored = 0
        """Samples that were scored again since the reward's version changed in the middle of a step."""
        self.hedges = HedgeTracker(reward.hedging) if reward.hedging else None
        self._latencies: deque[float] = deque(maxlen=_NUM_LATENCIES)
        self._session = session
        self._is_ours = reward.http is None
        self._protocol = reward.http.protocol if reward.http else "rljob"
        # The job's token is nobody else's business.
        self._headers = auth_headers(_token_variable(reward)) if self._is_ours else {}
        self.replicas = ReplicaPool(
            f"reward {reward.name}",
            _discovery(reward),
            max_in_flight=_IN_FLIGHT_A_SLOT * reward.slots if self._is_ours else _IN_FLIGHT_AN_ENDPOINT,
            # An execution that takes its time is no sign that nothing works.
            unavailable_timeout_seconds=max(unavailable_timeout_seconds, 2 * reward.timeout_seconds),
            # How many there are of a RewardModel, and whether any, is its own affair.
            allow_empty=reward.autoscaling is not None or reward.reward_model_ref is not None,
            readiness_lags=False,
        )
        # Two requests a slot: the second waits for the whole execution of the first.
        queue_seconds = max(_QUEUE_SECONDS, reward.timeout_seconds) if self._is_ours else 0.0
        self.answer_seconds = reward.timeout_seconds + queue_seconds
        """Most time from sending a request to its answer."""
        self.versions = VersionWatch(self.replicas, session, self._headers) if self._is_ours else None
        self.replicas.on_tick = self._tick

    async def start(self) -> None:
        await self.replicas.start()

    async def close(self) -> None:
        await self.replicas.close()
        if self.versions:
            await self.versions.close()

    def begin(self) -> None:
        """A collection begins: all of it is scored by one version."""
        if self.versions:
            self.versions.begin()

    def is_stale(self, result: ScoreResult) -> bool:
        """Whether `result` is of another version than the pinned one."""
        return self.versions is not None and not self.versions.pin.accepts(result.version)

    async def score(self, request: ScoreRequest) -> Scored:
        """Score one sample. Raises UserError where the policy is failJob, TransientError when nobody answers at all."""
        [result] = await self._run(Ask(request, self._protocol), is_group_step=False)
        return result

    async def score_group(self, request: GroupRequest) -> list[Scored]:
        """Score the samples of a group together: all of them, or those that were valid alone.  [samples]"""
        return await self._run(Ask(request, self._protocol), is_group_step=request.results is not None)

    @property
    def num_samples_in_flight(self) -> int:
        return sum(len(underway.ask.samples) for underway in self.in_flight)

    @property
    def num_waiting(self) -> int:
        """Requests for which no replica is there or free."""
        return sum(underway.asked_at is None for underway in self.in_flight)

    @property
    def oldest_waiting_seconds(self) -> float:
        """For how long the oldest of them waits; 0 when none does."""
        since = [underway.waits_since for underway in self.in_flight if underway.asked_at is None]
        return time.monotonic() - min(since) if since else 0.0

    def demand(self, outlook: Outlook) -> RewardDemand:
        """What this reward is asked for, in executions, and how long one takes. With scope group that is one a group;
        with sampleThenGroup one a sample, as the step over the group is short against them."""
        if self.reward.scope == "group":
            outlook = outlook.in_groups()
        ordered, now = sorted(self._latencies), time.monotonic()
        mean = sum(ordered) / len(ordered) if ordered else None
        counted = [underway for underway in self.in_flight if not underway.is_group_step]
        asked_at = [underway.asked_at for underway in counted if underway.asked_at is not None]
        return RewardDemand(
            samples=outlook.samples,
            expected=outlook.expected,
            is_open=outlook.is_open,
            is_first=outlook.is_first,
            starts_in_seconds=outlook.starts_in_seconds,
            elapsed_seconds=outlook.elapsed_seconds,
            due_seconds=outlook.due_seconds,
            window_seconds=outlook.window_seconds(mean),
            in_flight=len(counted),
            waiting=len(counted) - len(asked_at),
            oldest_in_flight_seconds=now - min(asked_at) if asked_at else 0.0,
            latency_seconds=mean,
            latency_p95_seconds=ordered[int(0.95 * (len(ordered) - 1))] if ordered else None,
        )

    def describe_wait(self) -> str:
        """In words, for how long results are waited for, and what is missing; empty when none are under way."""
        if not self.in_flight:
            return ""
        oldest = time.monotonic() - min(underway.began for underway in self.in_flight)
        fleet, missing = self.replicas.fleet, ""
        if not fleet.replicas:
            missing = ", no replica is there" + (" yet" if self.replicas.allow_empty else "")
        elif fleet.required_key and not fleet.num_serving():
            version = self.versions.pin.version if self.versions else None
            missing = f", no replica serves version {version}" if version else ", no replica has told its version"
        return f"({self.reward.name}), oldest {oldest:.1f} s{missing}"

    async def _run(self, ask: Ask, *, is_group_step: bool) -> list[Scored]:
        now = time.monotonic()
        underway = _Underway(ask, began=now, waits_since=now, is_group_step=is_group_step)
        self.in_flight.add(underway)
        try:
            results = await self._within_deadline(underway)
        finally:
            self.in_flight.discard(underway)
        if underway.num_executions and not is_group_step:
            self._latencies.append(underway.execute_seconds)
        for result in results:
            if not result.valid and self.reward.failure_policy.action == "failJob":
                raise UserError(
                    f"spec.rewards: {self.reward.name} gave no valid score ({result.reason}: {result.message}) and its "
                    f"failurePolicy.action is failJob"
                )
        latency = time.monotonic() - underway.began
        num = underway.num_requests
        return [Scored.model_construct(**dict(r), attempts=num, latency_seconds=latency) for r in results]

    async def _within_deadline(self, underway: _Underway) -> list[ScoreResult]:
        seconds = self.reward.deadline_seconds
        try:
            async with asyncio.timeout(seconds) as scope:
                return await self._try(underway)
        except TimeoutError:
            if not scope.expired():
                raise
        # Whoever was asked did not answer: that is about the servers, and not about the time.
        unreachable = underway.num_failures == underway.num_requests > 0
        reason = InvalidReason.UNREACHABLE if unreachable else InvalidReason.DEADLINE
        message = (
            f"no result within {seconds:g} s and {underway.num_requests} requests; waited for {underway.waits_for}"
        )
        return underway.ask.fail(reason, message)

    async def _try(self, underway: _Underway) -> list[ScoreResult]:
        """Attempts, until one is final or the policy has no more. Of several the one with the most valid results."""
        num_invalid, best = 0, list[ScoreResult]()
        while True:
            underway.waits_for, underway.waits_since = "a replica", time.monotonic()
            async with self.replicas.lease(underway.asked) as lease:
                underway.asked_at, underway.waits_for = time.monotonic(), f"the answer of {lease.address}"
                try:
                    results = await self._exchange(lease, underway)
                finally:
                    underway.asked_at = None
            if results is None:
                continue
            if _num_valid(results) >= _num_valid(best):
                best = results
            num_invalid += not is_final(results)
            if is_final(results) or num_invalid > self.reward.failure_policy.retries:
                return best

    # ---- one attempt: a request, and perhaps a second one ----

    async def _exchange(self, lease: Lease, underway: _Underway) -> Attempt:
        if self.hedges is None or underway.is_group_step:
            return await self._ask(lease, underway)
        out = InFlightRequest(lease.address, time.monotonic(), asyncio.get_running_loop().create_future())
        self.hedges.record_sent(out)
        first, second = asyncio.create_task(self._ask(lease, underway)), None
        try:
            await asyncio.wait((first, out.second), return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                self.hedges.num_hedges += 1
                underway.waits_for += f" or {out.second.result().address}"
                second = asyncio.create_task(self._ask(out.second.result(), underway))
            results, winner = await _first_final(first, second)
            self.hedges.num_wins += winner is not None and winner is second
            return results
        finally:
            self.hedges.record_ended(out)
            if not first.done():  # it lost, or nobody waits any more: it took at least so long
                self.hedges.record_latency(time.monotonic() - out.sent_at)
            tasks = [task for task in (first, second) if task]
            for task in tasks:
                task.cancel()
            if out.second.done():
                out.second.result().unused()
            out.second.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _tick(self) -> None:
        if self.versions:
            self.versions.tick()
        if self.hedges is None:
            return
        while (out := self.hedges.next_due(self.replicas.now())) and (lease := self.replicas.try_lease({out.address})):
            self.hedges.record_hedged(out)
            out.second.set_result(lease)

    async def _ask(self, lease: Lease, underway: _Underway) -> Attempt:
        """One request to one replica."""
        sent_at, limit, ask = time.monotonic(), self.answer_seconds, underway.ask
        underway.asked.add(lease.address)
        underway.num_requests += 1
        self.num_requests[ask.request.lane] += 1
        try:
            async with self._session.post(
                f"http://{lease.address}:{PORT_REWARD}{ask.path}" if self._is_ours else lease.address,
                json=ask.payload(),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=limit, sock_connect=CONNECT_SECONDS),
            ) as response:
                # Replaced: what is no text at all is an answer too, and the parser says what is wrong with it.
                status, text = response.status, await response.text(errors="replace")
                retry_after = response.headers.get("Retry-After")
        except aiohttp.ConnectionTimeoutError:  # a TimeoutError too, but nothing was executed
            underway.num_failures += 1
            lease.failed(f"no connection within {CONNECT_SECONDS:g} s")
            return None
        except TimeoutError:
            underway.num_failures += 1
            if self._is_ours:
                lease.failed(f"no answer within {limit:.0f} s")
                return None
            lease.done()
            results: Attempt = ask.fail(
                InvalidReason.TIMEOUT, f"no answer within {limit:.0f} s", time.monotonic() - sent_at
            )
        except (aiohttp.ClientError, OSError) as error:
            underway.num_failures += 1
            lease.failed(f"{type(error).__name__}: {error}")
            return None
        else:
            results = self._judge(lease, ask, status, text, retry_after, time.monotonic() - sent_at)
        if results is not None:
            underway.num_executions += 1
            underway.execute_seconds += max(result.execute_seconds for result in results)
            if self.hedges:
                self.hedges.record_latency(time.monotonic() - sent_at)
        return results

    def _judge(
        self, lease: Lease, ask: Ask, status: int, text: str, retry_after: str | None, seconds: float
    ) -> Attempt:
        """What an answer means."""
        if status == 429:
            lease.busy(busy_seconds(retry_after))
            return None
        if status in (401, 403, 404, 405, 422):
            raise UserError(f"spec.rewards: {self.reward.name}: {lease.address} answered {status}: {text[:500]}")
        if status in _UNAVAILABLE or (status >= 500 and self._is_ours):
            lease.failed(f"{status} {text[:200]}")
            return None
        if status != 200:
            lease.done()
            return ask.fail(InvalidReason.EXCEPTION, f"{status} {text[:500]}", seconds)
        results = ask.read(text, seconds)
        if self._is_ours:
            cancelled = [result for result in results if result.reason is InvalidReason.CANCELLED]
            if cancelled:
                lease.failed(cancelled[0].message)  # it shut down before it had an answer: no attempt of the function's
                return None
            versions = self.versions
            if versions and not all(versions.record_result(lease.address, result.version) for result in results):
                lease.done()
                return None
        lease.done()
        return results


async def _first_final(
    first: asyncio.Task[Attempt], second: asyncio.Task[Attempt] | None
) -> tuple[Attempt, asyncio.Task[Attempt] | None]:
    """The first final results of the two; where neither has any, the best that there is, and whose they are."""
    pending = {task for task in (first, second) if task}
    best: Attempt = None
    whose: asyncio.Task[Attempt] | None = None
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            results = task.result()
            if results is None:
                continue
            if is_final(results):
                return results, task
            if best is None or _num_valid(results) > _num_valid(best):
                best, whose = results, task
    return best, whose


def _num_valid(results: list[ScoreResult]) -> int:
    return sum(result.valid for result in results)


def _discovery(reward: Reward) -> Callable[[], list[str]]:
    """Finds the addresses of our servers, or the one URL of somebody else's."""
    if reward.http is not None:
        url = reward.http.url
        return lambda: [url]
    services: dict[str, str] = json.loads(os.environ.get(ENV_REWARD_SERVICES, "{}"))
    if reward.name not in services:
        raise UserError(f"${ENV_REWARD_SERVICES} names no service for reward {reward.name}")
    host = services[reward.name]
    return lambda: resolve(host)


def _token_variable(reward: Reward) -> str:
    """The environment variable with the token that this reward's servers take: the job's own, or a RewardModel's."""
    variables: dict[str, str] = json.loads(os.environ.get(ENV_REWARD_TOKENS) or "{}")
    variable = variables.get(reward.name, ENV_TOKEN)
    if variable != ENV_TOKEN and not os.environ.get(variable):
        raise UserError(
            f"spec.rewards: {reward.name}: ${ENV_REWARD_TOKENS} names {variable} for its token, which is not set: "
            "look whether the Secret of its RewardModel is there"
        )
    return variable
