"""When the driver of each job is requested, and who waits for its answer.

Invariants: a driver gets at most one request at a time, and one per poll. Requests run in the background, so no driver
delays another one's. A reconcile waits for PATIENCE_SECONDS at most, and only for a driver that has been punctual. Who
did not wait is reported to `on_change` when the answer differs from the last one.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from cachetools import TTLCache

from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import PORT_DRIVER
from rljob_api.wire.text import clean_line
from rljob_core.backend import (
    DRIVER_SILENT,
    DRIVER_UNREADABLE,
    PROGRESS_POLL_SECONDS,
    ChildKey,
    DriverAnswer,
    Key,
    ObservedState,
)
from rljob_core.children.common import child_name
from rljob_core.children.config import read_token
from rljob_core.plan.observed_job import find_pods, is_running_head
from rljob_operator.kube.driver_request import (
    TIMEOUT_SECONDS,
    DriverEndpoint,
    UnreadableAnswerError,
    new_session,
    request_status,
)
from rljob_operator.kube.kept_status import keep_status, read_status

PATIENCE_SECONDS = 0.2
"""A driver answers within milliseconds."""
_MAX_WAITING = 6
"""Reconciles that wait at a time: workers remain for others, whatever the drivers do."""
_MAX_POLL_SECONDS = 60.0
"""Between requests to a driver that never answers in time. The time doubles with each failure."""
_DISTRUST_SECONDS = 60.0
"""No reconcile waits for a driver that was late within this time. A busy operator makes drivers late, too."""
_MIN_MISSED_REPORTED = 3
"""Answers in a row that are late, or do not come: a driver that is busy, for instance with a checkpoint, may miss a
request."""
_MAX_ERROR_LENGTH = 200
_MAX_DRIVERS, _FORGET_SECONDS = 100_000, 600.0
_NO_ANSWER = DriverAnswer()


@dataclass(slots=True)
class _Driver:
    """One head Pod's driver."""

    status: bytes = b""
    """The last status, as kept_status has it; empty: none."""
    problem: str = ""
    requested_at: float = float("-inf")
    late_at: float = float("-inf")
    num_late: int = 0
    """Late answers in a row."""
    num_refused: int = 0
    """Requests in a row without a connection, or whose connection failed."""
    request: asyncio.Task[None] | None = None
    waiting: frozenset[Key] = frozenset()
    """Who got the last answer instead of that of `request`."""

    @property
    def answer(self) -> DriverAnswer:
        return DriverAnswer(read_status(self.status) if self.status else None, self.problem)

    def keep(self, answer: DriverAnswer) -> bool:
        """Return whether it differs from the last one."""
        last = self.status, self.problem
        self.status, self.problem = keep_status(answer.status) if answer.status else b"", answer.problem
        return (self.status, self.problem) != last

    def is_due(self, now: float, max_age_seconds: float) -> bool:
        backoff = max_age_seconds * 2.0 ** min(self.num_late, 10)
        # Slightly less than the maximum: otherwise a punctual poll would get the answer of the previous one.
        return now - self.requested_at >= 0.9 * min(backoff, max(max_age_seconds, _MAX_POLL_SECONDS))

    def is_punctual(self, now: float) -> bool:
        return now - self.late_at > _DISTRUST_SECONDS


class DriverClient:
    """The drivers of all jobs, by their Pods."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, on_change: Callable[[Key], None] = lambda key: None
    ) -> None:
        self._clock, self._on_change = clock, on_change
        self._drivers: TTLCache[str, _Driver] = TTLCache(_MAX_DRIVERS, _FORGET_SECONDS, clock)
        self._requests: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None
        self._waiting: Counter[Key] = Counter()
        """Reconciles that wait, with the number of drivers."""

    async def get_status(
        self, endpoint: DriverEndpoint | None, key: Key, max_age_seconds: float = PROGRESS_POLL_SECONDS
    ) -> DriverAnswer:
        """Return an answer of at most this age, or the last one if the driver does not answer at once. `key` is what to
        reconcile when it does."""
        if endpoint is None:
            return _NO_ANSWER
        driver = self._drivers.get(endpoint.pod_uid) or _Driver()
        if driver.request is None:
            if not driver.is_due(self._clock(), max_age_seconds):
                return driver.answer
            driver.request = self._start(driver, endpoint)
        if driver.is_punctual(self._clock()) and (key in self._waiting or len(self._waiting) < _MAX_WAITING):
            await self._wait(driver.request, key)
        if driver.request is not None:
            driver.waiting |= {key}
        return driver.answer

    def _start(self, driver: _Driver, endpoint: DriverEndpoint) -> asyncio.Task[None]:
        self._drivers[endpoint.pod_uid] = driver
        driver.requested_at = self._clock()
        task = asyncio.create_task(self._update(driver, endpoint))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)
        return task

    async def _wait(self, request: asyncio.Task[None], key: Key) -> None:
        self._waiting[key] += 1
        try:
            await asyncio.wait({request}, timeout=PATIENCE_SECONDS)
        finally:
            self._waiting[key] -= 1
            self._waiting += Counter()  # without zeros

    async def _update(self, driver: _Driver, endpoint: DriverEndpoint) -> None:
        try:
            is_changed = driver.keep(await self._ask(driver, endpoint))
        finally:
            waiting, driver.waiting, driver.request = driver.waiting, frozenset[Key](), None
        if is_changed:
            for key in waiting:
                self._on_change(key)

    async def _ask(self, driver: _Driver, endpoint: DriverEndpoint) -> DriverAnswer:
        if self._session is None:
            self._session = new_session()
        try:
            answer = DriverAnswer(await request_status(self._session, endpoint, PORT_DRIVER))
        except UnreadableAnswerError as error:
            answer = DriverAnswer(problem=f"{DRIVER_UNREADABLE}: {error}")
        except TimeoutError:
            driver.num_late, driver.late_at = driver.num_late + 1, self._clock()
            late = f"{DRIVER_UNREADABLE}: it is not complete after {TIMEOUT_SECONDS:g} s"
            return DriverAnswer(problem=late) if driver.num_late >= _MIN_MISSED_REPORTED else _NO_ANSWER
        except OSError as error:  # it has not started, has ended, or something between blocks the operator
            driver.num_late, driver.num_refused = 0, driver.num_refused + 1
            silent = f"{DRIVER_SILENT}: {clean_line(str(error), _MAX_ERROR_LENGTH) or type(error).__name__}"
            return DriverAnswer(problem=silent) if driver.num_refused >= _MIN_MISSED_REPORTED else _NO_ANSWER
        driver.num_late = driver.num_refused = 0
        return answer

    async def close(self) -> None:
        for task in self._requests:
            task.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        if self._session is not None:
            await self._session.close()


def find_driver(job: RLJob, observed: ObservedState) -> DriverEndpoint | None:
    """Return the running driver. The head of an earlier job of this name may still run; it is ignored."""
    secret = observed.children.get(ChildKey("Secret", child_name(job, "token")))
    token = read_token(secret) if secret else None
    heads = filter(is_running_head, find_pods(job, observed))
    pod = next((head for head in heads if head["status"].get("podIP")), None)
    return DriverEndpoint(pod["metadata"]["uid"], pod["status"]["podIP"], token) if pod and token else None
