"""From a request to a result: identity, lanes, workers, time-outs, metrics.

Consumes requests (submit) and idle workers; produces one encoded ScoreResult a request, valid or invalid with a reason.
A request with the same id and body as one under way joins it; a valid result is remembered for a while, so a retry
after a lost answer costs nothing and cannot differ. Waits for a worker; unblocked by the pool's on_idle.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from functools import partial

from rljob_api.errors import TransientError
from rljob_api.protocol import InvalidReason, Lane, ScoreRequest, ScoreResult
from rljob_reward.lanes import Lanes
from rljob_reward.metrics import VALID, Metrics
from rljob_reward.pool import Pool
from rljob_reward.process import Ended, Started, Verdict, WorkerProcess
from rljob_reward.program import Program

_MAX_REMEMBERED = 4096
_MAX_RETRY_AFTER_SECONDS = 60
_MEAN_WEIGHT = 0.05
"""Weight of the newest execution in the moving mean behind Retry-After."""

Key = tuple[str, int]


class QueueFullError(Exception):
    """The lane's queue is full."""

    def __init__(self, retry_after_seconds: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after_seconds} s")
        self.retry_after_seconds = retry_after_seconds


class Job:
    """One execution, and how many requests wait for it."""

    __slots__ = ("arrived", "body", "future", "id", "key", "lane", "num_waiters", "started", "timer")

    def __init__(self, request: ScoreRequest, body: bytes, key: Key, future: asyncio.Future[bytes]) -> None:
        self.id = request.id
        self.lane: Lane = request.lane
        self.body = body
        self.key = key
        self.future = future
        self.num_waiters = 1
        self.arrived = time.perf_counter()
        self.started: float | None = None
        self.timer: asyncio.TimerHandle | None = None


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
        self._mean_seconds = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self.hopeless: asyncio.Future[TransientError] = self._loop.create_future()
        self.pool = Pool(
            program.worker_settings,
            program.slots,
            on_idle=self._dispatch,
            on_restart=metrics.record_restart,
            on_hopeless=self._give_up,
        )

    async def start(self) -> Started:
        """Start the first worker. UserError: the function cannot be served."""
        return await self.pool.start_first()

    def submit(self, request: ScoreRequest, body: bytes) -> Job | bytes:
        """The job to wait for, or the result where it is known already. QueueFullError when it must be refused."""
        key = (request.id, hash(body))
        known = self._jobs.get(key)
        if known is not None:
            known.num_waiters += 1
            return known
        remembered = self._remembered.get(key)
        if remembered is not None:
            self._remembered.move_to_end(key)
            return remembered
        job = Job(request, body, key, self._loop.create_future())
        if not self._lanes.admit(job.lane, job):
            self._metrics.record_refused(job.lane)
            raise QueueFullError(self._retry_after(job.lane))
        self._jobs[key] = job
        self._idle.clear()
        self._dispatch()
        return job

    def leave(self, job: Job) -> None:
        """One of the job's requests has gone. The last one takes the job with it, unless it runs already."""
        job.num_waiters -= 1
        if job.num_waiters == 0 and self._lanes.cancel(job.lane, job):
            self._settle(job, Ended(InvalidReason.CANCELLED, "the client left before execution started"))

    async def drained(self) -> None:
        """Wait until nothing runs or waits."""
        await self._idle.wait()

    async def close(self) -> None:
        """Cancel what waits, kill what runs, end all workers."""
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

    def _dispatch(self) -> None:
        while self.pool.has_idle:
            job = self._lanes.start_next()
            if job is None:
                return
            self._begin(job, self.pool.acquire())
        self.pool.ensure(self._lanes.num_demanded)

    def _begin(self, job: Job, worker: WorkerProcess) -> None:
        job.started = time.perf_counter()
        seconds = self._program.timeout_seconds
        message = f"the function ran longer than {seconds:g} s (timeoutSeconds) and was killed"
        job.timer = self._loop.call_later(seconds, worker.kill, InvalidReason.TIMEOUT, message)
        worker.execute(job.body, partial(self._finish, job))

    def _finish(self, job: Job, verdict: Verdict) -> None:
        assert job.timer is not None
        job.timer.cancel()
        self._lanes.finish(job.lane, job)
        self._settle(job, verdict)

    def _settle(self, job: Job, verdict: Verdict) -> None:
        """Turn a verdict into the result that every waiter gets."""
        now = time.perf_counter()
        started = now if job.started is None else job.started
        result = ScoreResult(
            id=job.id,
            valid=verdict.reason is None,
            score=None if isinstance(verdict, Ended) else verdict.score,
            components={} if isinstance(verdict, Ended) else verdict.components,
            reason=verdict.reason,
            message=verdict.message[:2000],
            queue_seconds=started - job.arrived,
            execute_seconds=now - started,
            version=self._program.version,
        )
        encoded = result.model_dump_json().encode()
        del self._jobs[job.key]
        if result.valid:
            self._remember(job.key, encoded)
        if job.started is not None:
            self._mean_seconds += _MEAN_WEIGHT * (result.execute_seconds - self._mean_seconds)
        outcome = VALID if result.reason is None else result.reason.value
        self._metrics.record_result(job.lane, outcome, result.queue_seconds, result.execute_seconds)
        if not job.future.done():
            job.future.set_result(encoded)
        if not self._jobs:
            self._idle.set()

    def _remember(self, key: Key, encoded: bytes) -> None:
        self._remembered[key] = encoded
        if len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)
