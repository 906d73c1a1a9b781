"""From a request to an answer: identity, lanes, slots, time-outs, metrics. A group is one request, as a sample is.

Consumes requests (submit) and idle slots; produces one encoded answer a request, with a result for each of its samples,
valid or invalid with a reason. A request with the same id and body as one under way joins it; an answer without invalid
results is remembered for a while, so a retry after a lost answer costs nothing and cannot differ. With `cache`, equal
content of a sample is enough (result_cache). Waits for a slot; unblocked by the pool's on_idle.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from functools import partial
from typing import Protocol

from rljob_api.errors import TransientError
from rljob_api.wire.protocol import InvalidReason, Lane, ScoreRequest
from rljob_reward.server.lanes import Lanes
from rljob_reward.server.metrics import VALID, Metrics
from rljob_reward.server.pacing import BEGINNING_SECONDS, Pacing
from rljob_reward.server.pools import build_pool
from rljob_reward.server.responses import Asked, Request, build_answer
from rljob_reward.server.result_cache import Follower, ResultCache, digest_content
from rljob_reward.server.served_reward import Program
from rljob_reward.server.watchdog import Watchdog
from rljob_reward.slots import Slot
from rljob_reward.workers.process import Ended, Started, Verdict

_MAX_REMEMBERED = 4096
_MAX_RETRY_AFTER_SECONDS = 60
_MEAN_WEIGHT = 0.05
"""Weight of the newest execution in the moving mean behind Retry-After."""
_LOOK_SECONDS = 0.25
"""Between two looks at a full queue: one at 4,096 clients takes 8 ms, in which nothing else is done."""

_ABANDONED = Ended(InvalidReason.CANCELLED, "the client left before execution started")

Key = tuple[str, int]
"""id and hash of the body: the same sample or group asked again, not another one under the same id."""


class QueueFullError(Exception):
    """The lane's queue is full."""

    def __init__(self, retry_after_seconds: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after_seconds} s")
        self.retry_after_seconds = retry_after_seconds


class Waiter(Protocol):
    """A request that waits for a job's result."""

    def deliver(self, result: bytes) -> None: ...

    def has_left(self) -> bool:
        """Whether the client has gone; asked just before execution would start."""
        ...


class Job:
    """One execution, and the requests that wait for it."""

    __slots__ = ("arrived", "asked", "body", "content", "key", "lane", "started", "waiters")

    def __init__(self, request: Request, body: bytes, key: Key, waiter: Waiter, content: bytes | None) -> None:
        self.asked = Asked.of(request)
        self.lane: Lane = request.lane
        self.body = body
        self.key = key
        self.content = content
        """What the cache knows it by; None without one."""
        self.waiters = [waiter]
        self.arrived = time.perf_counter()
        self.started: float | None = None


class Scorer:
    """The reward of this server."""

    def __init__(self, program: Program, metrics: Metrics) -> None:
        self._program = program
        self._metrics = metrics
        self._lanes: Lanes[Job] = Lanes(program.slots, program.queue_length)
        metrics.watch(self._lanes)
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[Key, Job] = {}
        self._remembered: OrderedDict[Key, bytes] = OrderedDict()
        self._cache = ResultCache() if program.cache else None
        self._jobs_by_content: dict[bytes, Job] = {}
        self._mean_seconds = 0.0
        self._pacing = Pacing()
        self._next_dispatch: asyncio.TimerHandle | None = None
        self._watchdog = Watchdog(self._loop, program.timeout_seconds, self._kill_late)
        self._next_look: dict[Lane, float] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.hopeless: asyncio.Future[TransientError] = self._loop.create_future()
        self.pool = build_pool(program, metrics, on_idle=self._dispatch, on_hopeless=self._give_up)

    async def start(self) -> Started:
        """Start the first slot. UserError: the reward cannot be served."""
        return await self.pool.start_first()

    def submit(self, request: Request, body: bytes, waiter: Waiter) -> None:
        """Have `waiter` get the result, now or later. QueueFullError when the request must be refused."""
        key = (request.id, hash(body))
        known = self._jobs.get(key)
        if known is not None:
            known.waiters.append(waiter)
            return
        remembered = self._remembered.get(key)
        if remembered is not None:
            self._remembered.move_to_end(key)
            waiter.deliver(remembered)
            return
        content = None
        if self._cache and isinstance(request, ScoreRequest):
            content = digest_content(request)
            if self._answer_from_cache(content, request, waiter):
                return
        job = Job(request, body, key, waiter, content)
        if not self._lanes.admit(job.lane, job):
            self._drop_abandoned(job.lane)
            if not self._lanes.admit(job.lane, job):
                self._metrics.record_refused(job.lane)
                raise QueueFullError(self._retry_after(job.lane))
        self._jobs[key] = job
        if content:
            self._jobs_by_content[content] = job
        self._idle.clear()
        self._dispatch(fresh=job)

    def _answer_from_cache(self, content: bytes, request: ScoreRequest, waiter: Waiter) -> bool:
        """From an earlier result, or the one that an equal request is about to get. False: there is neither."""
        assert self._cache is not None
        cached = self._cache.get(content, request.id)
        if cached is not None:
            self._metrics.record_cache("hit")
            waiter.deliver(cached)
            return True
        job = self._jobs_by_content.get(content)
        # A request of the other lane must not wait in this one's queue.
        if job is None or (job.lane != request.lane and job.started is None):
            self._metrics.record_cache("miss")
            return False
        self._metrics.record_cache("joined")
        job.waiters.append(Follower(request.id, waiter))
        return True

    async def drained(self) -> None:
        """Wait until nothing runs or waits."""
        await self._idle.wait()

    async def close(self) -> None:
        """Cancel what waits, kill what runs, end all slots."""
        self._watchdog.close()
        if self._next_dispatch:
            self._next_dispatch.cancel()
        cancelled = Ended(InvalidReason.CANCELLED, "the server shut down")
        for job in self._lanes.jobs():
            if self._lanes.cancel(job.lane, job):
                self._settle(job, cancelled)
        await self.pool.close()

    def _give_up(self, error: TransientError) -> None:
        if not self.hopeless.done():
            self.hopeless.set_result(error)

    def _retry_after(self, lane: Lane) -> int:
        seconds = self._lanes.num_waiting(lane) * self._mean_seconds / self._program.slots
        return max(1, min(_MAX_RETRY_AFTER_SECONDS, math.ceil(seconds)))

    def _drop_abandoned(self, lane: Lane) -> None:
        """Make room in a full queue: requests whose clients have gone. All are looked at, so not for each refusal."""
        now = self._loop.time()
        if now < self._next_look.get(lane, 0.0):
            return
        self._next_look[lane] = now + _LOOK_SECONDS
        for job in self._lanes.jobs():
            if job.lane == lane and job.started is None and _is_abandoned(job) and self._lanes.cancel(lane, job):
                self._settle(job, _ABANDONED)

    def _dispatch(self, fresh: Job | None = None) -> None:
        """Start what may start. The client of a `fresh` job was there a moment ago."""
        while self.pool.has_idle:
            if not self._pacing.has_room(self._mean_seconds, time.perf_counter()):
                self._dispatch_soon()
                return
            job = self._lanes.start_next()
            if job is None:
                return
            if job is not fresh and _is_abandoned(job):
                self._lanes.finish(job.lane, job)
                self._settle(job, _ABANDONED)
            else:
                self._begin(job, self.pool.acquire())
        self.pool.ensure(self._lanes.num_demanded)

    def _dispatch_soon(self) -> None:
        """Unless an execution ends before that, which is the rule."""
        if self._next_dispatch is None:
            self._next_dispatch = self._loop.call_later(BEGINNING_SECONDS, self._dispatch_again)

    def _dispatch_again(self) -> None:
        self._next_dispatch = None
        self._dispatch()

    def _begin(self, job: Job, slot: Slot) -> None:
        job.started = time.perf_counter()
        self._pacing.begin(job, job.started)
        if not self.pool.keeps_time:
            self._watchdog.add(slot)
        slot.execute(job.body, len(job.asked.sample_ids), partial(self._finish, job, slot))

    def _finish(self, job: Job, slot: Slot, verdict: Verdict) -> None:
        self._watchdog.remove(slot)
        self._pacing.end(job)
        self._lanes.finish(job.lane, job)
        self._settle(job, verdict)

    def _kill_late(self, slot: Slot) -> None:
        seconds = self._program.timeout_seconds
        message = f"the {self._program.kind} ran longer than {seconds:g} s (timeoutSeconds) and was killed"
        slot.kill(InvalidReason.TIMEOUT, message)

    def _settle(self, job: Job, verdict: Verdict) -> None:
        """Turn a verdict into the answer that every waiter gets."""
        now = time.perf_counter()
        started = now if job.started is None else job.started
        queue_seconds, execute_seconds = started - job.arrived, now - started
        answer = build_answer(job.asked, verdict, queue_seconds, execute_seconds, self._program.version)
        del self._jobs[job.key]
        if job.content and self._jobs_by_content.get(job.content) is job:
            del self._jobs_by_content[job.content]
        if answer.is_valid:
            self._remember(job.key, answer.encoded)
            if self._cache and job.content:
                self._cache.put(job.content, answer.results[0])
        if job.started is not None:
            self._mean_seconds += _MEAN_WEIGHT * (execute_seconds - self._mean_seconds)
        for result in answer.results:
            outcome = VALID if result.reason is None else result.reason.value
            self._metrics.record_result(job.lane, outcome, queue_seconds, execute_seconds)
        for waiter in job.waiters:
            waiter.deliver(answer.encoded)
        if not self._jobs:
            self._idle.set()

    def _remember(self, key: Key, encoded: bytes) -> None:
        self._remembered[key] = encoded
        if len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)


def _is_abandoned(job: Job) -> bool:
    return all(waiter.has_left() for waiter in job.waiters)
