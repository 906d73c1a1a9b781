"""The reward client: a finished trajectory to a valid score, or to an invalid result with a reason.

Owns which reward replica gets a request, retries by the failure policy, and what counts as which failure. Leaves
masking to `batches`. Invariant: a failure is never a zero. Only an executed attempt that came out invalid uses up a
retry; a replica that is full, unreachable or gone does not.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from rljob_api.contract import ENV_REWARD_SERVICES, ENV_REWARD_TOKENS, ENV_TOKEN, PORT_REWARD, Path
from rljob_api.discovery import resolve
from rljob_api.errors import UserError
from rljob_api.protocol import InvalidReason, RewardDemand, ScoreRequest, ScoreResult
from rljob_api.reward import Reward
from rljob_trainer.forecast import Outlook
from rljob_trainer.http_client import CONNECT_SECONDS, job_headers
from rljob_trainer.replicas import Lease, Replicas
from rljob_trainer.types import Scored

_QUEUE_SECONDS = 600.0
"""Most time that a request may wait in a server's queue before another one is asked: the client's own time-out, since
the server's begins with the execution."""
_SAMPLE_SECONDS = 900.0
"""From a sample's first unreachable replica until it is given up as invalid."""
_DEFAULT_RETRY_AFTER_SECONDS = 1.0
_LONGEST_RETRY_AFTER_SECONDS = 60.0
_UNAVAILABLE = (502, 503, 504)
_IN_FLIGHT_A_SLOT = 2
"""Requests that one replica gets at once, by its slots: the next ones are there when an execution ends. All others wait
here, so that a replica that comes in the middle of a burst gets its share of it."""
_NUM_LATENCIES = 2048
"""Newest samples by which the autoscaler judges how long one takes: a scorer that has become slow is seen soon."""

Attempt = ScoreResult | None
"""A result, or None: this replica could not answer, ask another."""


class RewardClient:
    """One reward of the job, over all of its replicas."""

    def __init__(
        self,
        reward: Reward,
        session: aiohttp.ClientSession,
        *,
        patience_seconds: float = 600.0,
        sample_seconds: float = _SAMPLE_SECONDS,
    ) -> None:
        self.reward = reward
        self.in_flight: dict[str, float] = {}
        """Samples under way, by id: when they began."""
        self._num_attempts: Counter[str] = Counter()
        """Requests made for the samples under way."""
        self._asked_at: dict[str, float] = {}
        """When a replica was asked for the samples of which one has been."""
        self._spent_seconds: dict[str, float] = {}
        """Execution of the samples under way, over their attempts."""
        self._latencies: deque[float] = deque(maxlen=_NUM_LATENCIES)
        self._session = session
        self._sample_seconds = sample_seconds
        self._is_ours = reward.http is None
        # The job's token is nobody else's business.
        self._headers = job_headers(_token_variable(reward)) if self._is_ours else {}
        self.replicas = Replicas(
            f"reward {reward.name}",
            _discovery(reward),
            max_in_flight=_IN_FLIGHT_A_SLOT * reward.slots if self._is_ours else None,
            patience_seconds=patience_seconds,
            # How many there are of a RewardModel, and whether any, is its own affair.
            may_be_empty=reward.autoscaling is not None or reward.reward_model_ref is not None,
        )

    async def score(self, request: ScoreRequest) -> Scored:
        """Score one sample. Raises UserError where the policy is failJob, TransientError when nobody answers at all."""
        began = self.in_flight[request.id] = time.monotonic()
        try:
            found = await self._score(request)
        finally:
            del self.in_flight[request.id]
            num_attempts = self._num_attempts.pop(request.id, 0)
            seconds = self._spent_seconds.pop(request.id, 0.0)
        latency = time.monotonic() - began
        result = Scored.model_construct(**dict(found), attempts=num_attempts, latency_seconds=latency)
        if result.reason is not InvalidReason.UNREACHABLE:
            self._latencies.append(seconds)
        if not result.valid and self.reward.failure_policy.action == "failJob":
            raise UserError(
                f"spec.rewards: {self.reward.name} gave no valid score ({result.reason}: {result.message}) and its "
                f"failurePolicy.action is failJob"
            )
        return result

    def demand(self, outlook: Outlook) -> RewardDemand:
        """What this reward is asked for, and how long one sample takes."""
        ordered, now = sorted(self._latencies), time.monotonic()
        mean = sum(ordered) / len(ordered) if ordered else None
        return RewardDemand(
            samples=outlook.samples,
            expected=outlook.expected,
            is_open=outlook.is_open,
            is_first=outlook.is_first,
            starts_in_seconds=outlook.starts_in_seconds,
            elapsed_seconds=outlook.elapsed_seconds,
            due_seconds=outlook.due_seconds,
            window_seconds=outlook.window_seconds(mean),
            in_flight=len(self.in_flight),
            waiting=len(self.in_flight) - len(self._asked_at),
            oldest_seconds=now - min(self._asked_at.values()) if self._asked_at else 0.0,
            latency_seconds=mean,
            latency_p95_seconds=ordered[int(0.95 * (len(ordered) - 1))] if ordered else None,
        )

    async def _score(self, request: ScoreRequest) -> ScoreResult:
        num_invalid = 0
        avoid: set[str] = set()
        unreachable_since: float | None = None
        while True:
            async with self.replicas.lease(avoid) as lease:
                self._asked_at[request.id] = time.monotonic()
                try:
                    result = await self._attempt(lease, request)
                finally:
                    del self._asked_at[request.id]
                avoid.add(lease.address)
            if result is None:
                unreachable_since = unreachable_since or time.monotonic()
                if time.monotonic() - unreachable_since > self._sample_seconds:
                    return invalid(request.id, InvalidReason.UNREACHABLE, "no replica answered in time")
                continue
            self._spent_seconds[request.id] = self._spent_seconds.get(request.id, 0.0) + result.execute_seconds
            # The same function on the same text abstains again.
            if result.valid or result.reason is InvalidReason.ABSTAINED:
                return result
            num_invalid += 1
            if num_invalid > self.reward.failure_policy.retries:
                return result

    async def _attempt(self, lease: Lease, request: ScoreRequest) -> Attempt:
        limit = self.reward.timeout_seconds + (_QUEUE_SECONDS if self._is_ours else 0)
        started = time.monotonic()
        self._num_attempts[request.id] += 1
        try:
            async with self._session.post(
                self._url(lease.address),
                json=self._payload(request),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=limit, sock_connect=CONNECT_SECONDS),
            ) as response:
                status, text = response.status, await response.text()
                retry_after = response.headers.get("Retry-After")
        except TimeoutError:
            if self._is_ours:
                lease.failed(f"no answer within {limit:.0f} s")
                return None
            lease.done()
            return invalid(
                request.id, InvalidReason.TIMEOUT, f"no answer within {limit:.0f} s", time.monotonic() - started
            )
        except (aiohttp.ClientError, OSError) as error:
            lease.failed(f"{type(error).__name__}: {error}")
            return None
        return self._judge(lease, request, status, text, retry_after, time.monotonic() - started)

    def _judge(
        self, lease: Lease, request: ScoreRequest, status: int, text: str, retry_after: str | None, seconds: float
    ) -> Attempt:
        """What an answer means."""
        if status == 429:
            lease.busy(parse_retry_after(retry_after))
            return None
        if status in (401, 403, 404, 405, 422):
            raise UserError(f"spec.rewards: {self.reward.name}: {lease.address} answered {status}: {text[:500]}")
        if status in _UNAVAILABLE or (status >= 500 and self._is_ours):
            lease.failed(f"{status} {text[:200]}")
            return None
        result = self._read(request.id, status, text, seconds)
        if self._is_ours and result.reason is InvalidReason.CANCELLED:
            lease.failed(result.message)  # it shut down before it had an answer: no attempt of the function's
            return None
        lease.done()
        return result

    def _read(self, request_id: str, status: int, text: str, seconds: float) -> ScoreResult:
        if status != 200:
            return invalid(request_id, InvalidReason.EXCEPTION, f"{status} {text[:500]}", seconds)
        if self.reward.http is not None and self.reward.http.protocol == "openrlhf":
            return parse_openrlhf(request_id, text, seconds)
        return parse_result(request_id, text, seconds)

    def _url(self, address: str) -> str:
        return f"http://{address}:{PORT_REWARD}{Path.SCORE.value}" if self._is_ours else address

    def _payload(self, request: ScoreRequest) -> dict[str, Any]:
        if self.reward.http is None or self.reward.http.protocol == "rljob":
            return request.model_dump(mode="json")
        prompt = request.prompt if isinstance(request.prompt, str) else request.prompt[-1].get("content", "")
        return {"query": [f"{prompt}{request.completion}"], "prompts": [prompt], "labels": [request.ground_truth]}


class Rewards:
    """All rewards of the job."""

    def __init__(
        self, rewards: Sequence[Reward], session: aiohttp.ClientSession, *, patience_seconds: float = 600.0
    ) -> None:
        self.clients = {
            reward.name: RewardClient(reward, session, patience_seconds=patience_seconds) for reward in rewards
        }

    async def start(self) -> None:
        for client in self.clients.values():
            await client.replicas.start()

    async def close(self) -> None:
        for client in self.clients.values():
            await client.replicas.close()

    async def score(self, request: ScoreRequest) -> dict[str, Scored]:
        """Results of all rewards, asked for at once."""
        async with asyncio.TaskGroup() as tasks:
            running = {name: tasks.create_task(client.score(request)) for name, client in self.clients.items()}
        return {name: task.result() for name, task in running.items()}

    def demand(self, outlook: Outlook) -> dict[str, RewardDemand]:
        """What each reward is asked for in the collection under way, or in the next one."""
        return {name: client.demand(outlook) for name, client in self.clients.items()}

    def describe_wait(self, num_open: int, num_total: int) -> str:
        """In words, what scores are waited for; empty when none are under way."""
        waits = []
        for name, client in self.clients.items():
            if not client.in_flight:
                continue
            oldest = time.monotonic() - min(client.in_flight.values())
            gone = ""
            if not client.replicas.fleet.replicas:
                gone = ", no replica is there" + (" yet" if client.replicas.may_be_empty else "")
            waits.append(f"({name}), oldest {oldest:.1f} s{gone}")
        return f"waits for {num_open} of {num_total} rewards {'; '.join(waits)}" if waits else ""


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


def invalid(request_id: str, reason: InvalidReason, message: str, seconds: float = 0.0) -> ScoreResult:
    """An invalid result of the client's own making."""
    return ScoreResult(id=request_id, valid=False, reason=reason, message=message[:2000], execute_seconds=seconds)


def parse_result(request_id: str, text: str, seconds: float) -> ScoreResult:
    """A reward server's answer; one that breaks the protocol is an invalid result."""
    try:
        result = ScoreResult.model_validate_json(text)
    except ValueError as error:
        return invalid(request_id, InvalidReason.BAD_RETURN, f"not a ScoreResult: {error}", seconds)
    if result.id != request_id:
        return invalid(request_id, InvalidReason.BAD_RETURN, f"the answer is for {result.id}", seconds)
    return result


def parse_openrlhf(request_id: str, text: str, seconds: float) -> ScoreResult:
    """`{"rewards": [0.5]}`, the list possibly nested once."""
    try:
        value: Any = json.loads(text)["rewards"]
        while isinstance(value, list):
            [value] = value
        score = float(value)
    except (ValueError, KeyError, TypeError) as error:
        return invalid(request_id, InvalidReason.BAD_RETURN, f"no single reward in {text[:200]}: {error}", seconds)
    if not math.isfinite(score):
        return invalid(request_id, InvalidReason.NOT_FINITE, f"reward is {score}", seconds)
    return ScoreResult(id=request_id, valid=True, score=score, execute_seconds=seconds)


def parse_retry_after(value: str | None) -> float:
    """Seconds; a date, or nothing, means the default."""
    try:
        seconds = float(value) if value else _DEFAULT_RETRY_AFTER_SECONDS
    except ValueError:
        seconds = _DEFAULT_RETRY_AFTER_SECONDS
    return min(max(seconds, 0.05), _LONGEST_RETRY_AFTER_SECONDS)
