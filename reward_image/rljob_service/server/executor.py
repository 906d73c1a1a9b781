"""From a request to a response: lanes, slots, timeouts, metrics. A group or a call is one request, like a sample.

Consumes requests (submit) and idle slots; produces one encoded response per request, with a result for each of its
samples, valid or invalid with a reason. Waits for a slot; unblocked by the pool's on_idle.

Functions that only compute need a processor each: more workers only take turns, each with its own memory, and each
takes longer, perhaps for longer than its timeout. Others wait for something else, so all slots may have one. Invariant:
a free slot is held back for at most START_WINDOW_SECONDS, or for some times as long as a function computes.

Requests whose result is known or on its way are found by id and body, and with `cache: true` by content. A request with
the key of a pending execution joins it. Responses with only valid results are remembered for a while, so a retry after
a lost response costs nothing and cannot differ. With a cache, an equal sample under another id gets the same valid
result; a failure is always retried. Bounded: responses drop the oldest, the cache what was used least recently.
"""

import asyncio
import contextlib
import hashlib
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cachetools import LRUCache

from rljob_api.errors import RLJobError
from rljob_api.manifest.services.models import JudgeReward, TeacherReward, UserModel
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.scores import ScoreRequest, ScoreResult
from rljob_service.kinds import Request
from rljob_service.pool.pool import WorkerPool
from rljob_service.results import ExecutionResult, failure
from rljob_service.server.bodies import Unscorable
from rljob_service.server.execution import Execution, RequestKey, Response, Waiter, build_response
from rljob_service.server.lanes import LANES, MIN_SLOTS_FOR_RESERVE, Lanes
from rljob_service.server.metrics import VALID, ServerMetrics
from rljob_service.server.served_service import ServedService
from rljob_service.server.traces import ExecutionSpans
from rljob_service.slots import SlotPool
from rljob_service.worker.settings import FunctionSettings

_MAX_RESPONSES = 4096
_MAX_RESPONSE_BYTES = 256 << 20
"""Limit of all remembered responses: as many of the longest results of samples, but not of calls."""
_MAX_CACHED_RESULTS = 65_536


class KnownRequests:
    def __init__(self, metrics: ServerMetrics, *, cache: bool, max_cached_results: int = _MAX_CACHED_RESULTS) -> None:
        self._metrics = metrics
        self._pending: dict[RequestKey, Execution] = {}
        self._pending_by_content: dict[bytes, Execution] = {}
        self._responses: OrderedDict[RequestKey, bytes] = OrderedDict()
        self._num_response_bytes = 0
        self._cache: LRUCache[bytes, ScoreResult] | None = LRUCache(max_cached_results) if cache else None

    def serve(self, execution: Execution, request: Request) -> bool:
        """Serve a new request from an earlier or a pending result. False: it must be executed."""
        [waiter] = execution.waiters
        if pending := self._pending.get(execution.key):
            pending.add_waiter(waiter)
            return True
        if (response := self._responses.get(execution.key)) is not None:
            waiter.deliver(response)
            return True
        if self._cache is None or not isinstance(request, ScoreRequest):
            return False
        execution.content = digest_content(request)
        outcome = self._serve_equal(execution, execution.content, waiter)
        self._metrics.record_cache(outcome)
        return outcome != "miss"

    def _serve_equal(self, execution: Execution, content: bytes, waiter: Waiter) -> str:
        assert self._cache is not None
        if (result := self._cache.get(content)) is not None:
            own = {"id": execution.id, "queue_seconds": 0.0, "execute_seconds": 0.0}
            waiter.deliver(result.model_copy(update=own).model_dump_json().encode())
            return "hit"
        equal = self._pending_by_content.get(content)
        # A request of the other lane must not wait in this one's queue.
        if equal is None or (equal.lane != execution.lane and equal.started is None):
            return "miss"
        equal.add_waiter(_Follower(execution.id, waiter))
        return "joined"

    def add(self, execution: Execution) -> None:
        self._pending[execution.key] = execution
        if execution.content:
            self._pending_by_content[execution.content] = execution

    def finish(self, execution: Execution, response: Response) -> None:
        del self._pending[execution.key]
        if execution.content and self._pending_by_content.get(execution.content) is execution:
            del self._pending_by_content[execution.content]
        if all(reply.reason is None for reply in response.replies):  # a retry could not improve it
            self._responses[execution.key] = response.encoded
            self._num_response_bytes += len(response.encoded)
            while len(self._responses) > _MAX_RESPONSES or self._num_response_bytes > _MAX_RESPONSE_BYTES:
                self._num_response_bytes -= len(self._responses.popitem(last=False)[1])
            if self._cache is not None and execution.content:
                self._cache[execution.content] = ScoreResult.model_validate_json(response.encoded)


def digest_content(request: ScoreRequest) -> bytes:
    """Return the digest of everything in a request except its id and its lane."""
    content = request.model_dump_json(exclude={"id", "lane"})
    return hashlib.blake2b(content.encode(), digest_size=16).digest()


class _Follower(NamedTuple):
    """A request that waits for the result of another one with equal content."""

    request_id: str
    waiter: Waiter

    def deliver(self, response: bytes) -> None:
        own = ScoreResult.model_validate_json(response).model_copy(update={"id": self.request_id})
        self.waiter.deliver(own.model_dump_json().encode())

    def is_disconnected(self) -> bool:
        return self.waiter.is_disconnected()

    def call_when_left(self, callback: Callable[[], None]) -> None:
        self.waiter.call_when_left(callback)


START_WINDOW_SECONDS = 0.002

_STARTS_PER_SECOND = 2000
"""Starts of short executions that wait: the limit grows with their length (Little's law). Below what a server can hand
out; otherwise a mean that is long only because too many workers take turns would admit them all."""

_NUM_COMPUTED = 20
"""Executions in a row that only computed, after which the function counts as one that does."""

_PATIENCE = 8.0
"""Times the CPU time of such a function, after which those that run need not have a processor: on a busy machine they
take longer, and one may wait after all."""

_STARTS_PER_PROCESSOR = 1


def count_processors(limits: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many processors this Pod may use: at most what its limit of CPU time makes."""
    number = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or "max": no limit
        quota, period = map(int, limits.read_text().split())
        number = min(number, -(-quota // period))
    return number


_NUM_PROCESSORS = count_processors()


_MAX_RETRY_AFTER_SECONDS = 60
_MEAN_WEIGHT = 0.05
"""Weight of the newest execution in the moving mean behind Retry-After."""
_ABANDONED_SECONDS = 2.0
"""For which an execution continues after its clients have left: a retry may join it, and most end sooner than a worker
is replaced."""

_ABANDONED = failure(InvalidReason.CANCELLED, "the client left before execution started")
_SHUT_DOWN = failure(InvalidReason.CANCELLED, "the server shut down")


class QueueFullError(Exception):
    def __init__(self, retry_after_seconds: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after_seconds} s")
        self.retry_after_seconds = retry_after_seconds


class Executor:
    def __init__(self, service: ServedService, metrics: ServerMetrics) -> None:
        self._config = service.config
        self._version = service.version
        self._metrics = metrics
        self._lanes: Lanes[Execution] = Lanes(_count_slots(service), self._config.queue_length)
        metrics.watch(self._lanes)
        self._loop = asyncio.get_running_loop()
        self._known = KnownRequests(metrics, cache=service.kind.caches(service.config))
        self._pace = Pace()
        self._next_dispatch: asyncio.TimerHandle | None = None
        self._next_timeout: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.fatal_error: asyncio.Future[RLJobError] = self._loop.create_future()
        self.pool = build_pool(service, metrics, on_idle=self._dispatch, on_fatal_error=self._set_fatal_error)

    def submit(self, request: Request, body: bytes, waiter: Waiter, traceparent: str = "") -> None:
        """Deliver the result to `waiter`, now or later. Raise QueueFullError if the request must be refused.
        `traceparent`: of the request's span; empty without one."""
        execution = Execution(request, body, waiter, self._on_abandoned)
        if self._known.serve(execution, request):
            return
        lane = execution.lane
        if not self._lanes.admit(lane, execution):
            self._metrics.record_refused(lane)
            seconds = self._lanes.num_waiting(lane) * self._pace.mean_seconds / self._config.slots
            raise QueueFullError(max(1, min(_MAX_RETRY_AFTER_SECONDS, math.ceil(seconds))))
        if traceparent:
            execution.spans = ExecutionSpans(traceparent, execution.id, lane, len(execution.sample_ids))
        self._known.add(execution)
        self._idle.clear()
        self._dispatch()

    def reject(self, unscorable: Unscorable, waiter: Waiter) -> None:
        """Deliver invalid results for a request whose data cannot be read."""
        replies = failure(InvalidReason.BAD_REQUEST, unscorable.problem)
        response = build_response(unscorable.request_id, unscorable.sample_ids, replies, unscorable.kind, self._version)
        for _ in unscorable.sample_ids:
            self._metrics.record_result(unscorable.lane, InvalidReason.BAD_REQUEST.value, 0.0, 0.0)
        waiter.deliver(response.encoded)

    async def drained(self) -> None:
        await self._idle.wait()

    async def close(self) -> None:
        """Cancel what waits, kill what runs, end all slots."""
        for timer in (self._next_dispatch, self._next_timeout):
            if timer is not None:
                timer.cancel()
        for lane in LANES:
            for execution in self._lanes.waiting(lane):
                self._cancel(execution, _SHUT_DOWN)
        await self.pool.close()

    def _set_fatal_error(self, error: RLJobError) -> None:
        if not self.fatal_error.done():
            self.fatal_error.set_result(error)

    def _on_abandoned(self, execution: Execution) -> None:
        """Free the slot of an execution that no client waits for, or its place in the queue."""
        if execution.kill is not None:
            self._loop.call_later(_ABANDONED_SECONDS, self._kill_abandoned, execution)
        else:
            self._cancel(execution, _ABANDONED)

    def _kill_abandoned(self, execution: Execution) -> None:
        if execution.kill is not None and execution.is_abandoned():
            execution.kill(InvalidReason.CANCELLED, "the client left while it was executed")

    def _cancel(self, execution: Execution, result: ExecutionResult) -> None:
        if self._lanes.cancel(execution.lane, execution):
            self._deliver(execution, result)

    def _dispatch(self) -> None:
        """Start what may start."""
        while self._lanes.has_waiting and self.pool.has_idle:
            if self._lanes.num_running >= self._pace.limit and not self._pace.may_start(
                (running.started or 0.0 for running in self._lanes.running_newest_first()), time.perf_counter()
            ):
                # Usually an execution ends, and dispatches, before the window has passed.
                if self._next_dispatch is None:
                    self._next_dispatch = self._loop.call_later(self._pace.window, self._dispatch_again)
                return
            execution = self._lanes.start_next()
            if execution is None:
                break
            self._start(execution)
        self.pool.ensure(self._lanes.num_demanded)

    def _dispatch_again(self) -> None:
        self._next_dispatch = None
        self._dispatch()

    def _start(self, execution: Execution) -> None:
        execution.started = time.perf_counter()
        if self._next_timeout is None and not self.pool.enforces_timeout:
            self._next_timeout = self._loop.call_later(self._config.timeout_seconds, self._kill_late)
        with execution.spans.start():
            finish = partial(self._finish, execution)
            execution.kill = self.pool.start(execution.body, len(execution.sample_ids), finish)

    def _kill_late(self) -> None:
        """Kill what has run too long. One timer serves all: they have the same time, in the order of their starts."""
        self._next_timeout = None
        seconds = self._config.timeout_seconds
        message = f"the {self._config.kind} ran longer than {seconds:g} s (timeoutSeconds) and was killed"
        now = time.perf_counter()
        for execution in list(self._lanes.running_oldest_first()):
            assert execution.started is not None
            assert execution.kill is not None
            left = execution.started + seconds - now
            if left > 0:
                self._next_timeout = self._loop.call_later(left, self._kill_late)
                return
            execution.kill(InvalidReason.TIMEOUT, message)

    def _finish(self, execution: Execution, result: ExecutionResult, computed_seconds: float | None = None) -> None:
        assert execution.started is not None
        execution.kill = None
        self._pace.record(time.perf_counter() - execution.started, computed_seconds)
        self._lanes.finish(execution)
        self._deliver(execution, result)

    def _deliver(self, execution: Execution, result: ExecutionResult) -> None:
        """Turn a result into the response that every waiter gets."""
        now = time.perf_counter()
        started = now if execution.started is None else execution.started
        queue_seconds, execute_seconds = started - execution.arrived, now - started
        response = build_response(
            execution.id, execution.sample_ids, result, execution.kind, self._version, queue_seconds, execute_seconds
        )
        execution.spans.end(response.replies)
        self._known.finish(execution, response)
        for each in response.replies:
            outcome = VALID if each.reason is None else each.reason.value
            self._metrics.record_result(execution.lane, outcome, queue_seconds, execute_seconds)
        for waiter in execution.waiters:
            waiter.deliver(response.encoded)
        if not self._lanes.num_demanded:
            self._idle.set()


def _count_slots(service: ServedService) -> int:
    """Return the slots with the one that is kept for evaluations: in shared processes it costs nothing, so it is one
    more, if there are enough that one is kept."""
    slots = service.config.slots
    is_shared = isinstance(service.backend, FunctionSettings) and service.backend.is_shared
    return slots + 1 if is_shared and slots + 1 >= MIN_SLOTS_FOR_RESERVE else slots


def build_pool(
    service: ServedService,
    metrics: ServerMetrics,
    *,
    on_idle: Callable[[], None],
    on_fatal_error: Callable[[RLJobError], None],
) -> SlotPool:
    """Return the pool of this service's kind. A server that runs a function imports no client of a model."""
    config, backend = service.config, service.backend
    if isinstance(backend, FunctionSettings):
        return WorkerPool(
            backend,
            config.slots,
            name=f"{service.kind.noun} {config.name}",
            on_idle=on_idle,
            on_restart=metrics.record_restart,
            on_fatal_error=on_fatal_error,
        )
    from rljob_service.models.backend import ModelBackend
    from rljob_service.models.metrics import UpstreamMetrics
    from rljob_service.models.model_slots import ModelSlotPool

    model: ModelBackend
    upstream_metrics = UpstreamMetrics(metrics.registry, config.name)
    # With autoscaling, the largest number of Pods shares an endpoint's limits until they are counted.
    replicas = config.autoscaling.max_replicas if config.autoscaling else max(1, config.replicas)
    if isinstance(backend, JudgeReward):
        from rljob_service.models.judge.judge import Judge

        model = Judge(backend, config.slots, replicas, config.timeout_seconds, upstream_metrics, on_fatal_error)
    elif isinstance(backend, TeacherReward):
        from rljob_service.models.teacher import Teacher

        model = Teacher(backend, replicas, upstream_metrics, on_fatal_error)
    elif isinstance(backend, UserModel):
        from rljob_service.models.user import ChatUser

        model = ChatUser(backend, replicas, upstream_metrics, on_fatal_error)
    else:
        from rljob_service.models.classifier import Classifier

        model = Classifier(backend, upstream_metrics, on_fatal_error)
    return ModelSlotPool(model, upstream_metrics, config.slots, config.timeout_seconds, on_idle=on_idle)


class Pace:
    """How many executions may be started at once. Facts come in through `record`."""

    def __init__(self, num_processors: int = _NUM_PROCESSORS) -> None:
        self._num_processors = _STARTS_PER_PROCESSOR * num_processors
        self.mean_seconds = 0.0
        """How long executions took recently."""
        self.limit: float = self._num_processors
        """Executions of which each may have a processor, or waits."""
        self.window = START_WINDOW_SECONDS
        """Seconds after a start, after which the limit need not be kept."""
        self._computed_seconds = 0.0
        self._num_computed = 0

    def record(self, seconds: float, computed_seconds: float | None) -> None:
        """An execution has ended. `computed_seconds`: see slots.Callback."""
        self.mean_seconds += _MEAN_WEIGHT * (seconds - self.mean_seconds)
        if computed_seconds is None:
            self._num_computed, self._computed_seconds = 0, 0.0
        else:
            self._num_computed += 1
            weight = max(_MEAN_WEIGHT, 1 / self._num_computed)
            self._computed_seconds += weight * (computed_seconds - self._computed_seconds)
        only_computes = self._num_computed >= _NUM_COMPUTED
        self.limit = max(self._num_processors, 0.0 if only_computes else self.mean_seconds * _STARTS_PER_SECOND)
        self.window = max(START_WINDOW_SECONDS, _PATIENCE * self._computed_seconds if only_computes else 0.0)

    def may_start(self, started_newest_first: Iterable[float], now: float) -> bool:
        """Return whether one more execution may start beside those that run."""
        for number, started in enumerate(started_newest_first, start=1):
            if now - started >= self.window:
                return True
            if number >= self.limit:
                return False
        return True
