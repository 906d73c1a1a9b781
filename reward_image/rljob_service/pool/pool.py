"""The worker processes of one service: started a few at a time as demand grows, replaced when they die.

Owns their number. Consumes demand (ensure), produces slots for requests (start, and on_idle when one becomes free). As
many workers are ready as `size` requests need, and the spare ones; the caller runs at most `size` requests. If the
first worker cannot start, the service is not served. `worker_slots` chooses the worker of a request.
"""

import asyncio
import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Coroutine, Hashable, Iterator
from functools import partial
from typing import Any

from rljob_api.errors import TransientError, UserError
from rljob_api.quantity import format_bytes
from rljob_api.wire.base import InvalidReason
from rljob_service.pool.isolation import Isolation
from rljob_service.pool.process import WorkerProcess
from rljob_service.pool.shared_files import Share, SharedFolder, count_shares
from rljob_service.pool.worker_slots import WorkerSlots, draw_max_requests
from rljob_service.results import StartupReport
from rljob_service.slots import Callback, Kill
from rljob_service.worker.settings import FunctionSettings

logger = logging.getLogger(__name__)

_IMPORT_REPORT_SECONDS = 3.0
_MAX_IMPORT_REPORT_SECONDS = 60.0
_MIN_PATIENCE_SECONDS = 5.0
_PATIENCE_PER_START = 3.0
"""A start that takes this many times as long as earlier ones is late."""
_MAX_FAILED_STARTS = 5
_MAX_BACKOFF_SECONDS = 5.0
_SCRATCH_POLL_SECONDS = 0.5
_LOOP_POLL_SECONDS = 0.5
_SCRATCH_SLACK_BYTES = 1 << 20
"""So that one file of the allowed size does not exceed the limit."""
_OUTPUT_BURST_BYTES = 256 << 10
_OUTPUT_BYTES_PER_SECOND = 16 << 10


class OutputLog:
    """Passes output of user code on to the server's log within a budget, so that printing never fills a disk.

    A token bucket over bytes. After a drop, the next admitted output reports how much was dropped.
    """

    def __init__(self) -> None:
        self._budget = float(_OUTPUT_BURST_BYTES)
        self._at = time.monotonic()
        self._num_dropped = 0

    def write(self, data: bytes) -> None:
        """Write what the budget admits. If standard error is full or closed, lines are lost, but no requests."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.buffer.write(self._admit(data))
            sys.stderr.buffer.flush()

    def _admit(self, data: bytes) -> bytes:
        now = time.monotonic()
        self._budget = min(_OUTPUT_BURST_BYTES, self._budget + (now - self._at) * _OUTPUT_BYTES_PER_SECOND)
        self._at = now
        if len(data) > self._budget:
            self._num_dropped += len(data)
            return b""
        self._budget -= len(data)
        notice = f"[{self._num_dropped} bytes of the reward's output left out]\n" if self._num_dropped else ""
        self._num_dropped = 0
        return notice.encode() + data


class WorkerPool:
    enforces_timeout = False
    notice = ""

    def __init__(
        self,
        settings: FunctionSettings,
        size: int,
        *,
        name: str = "",
        on_idle: Callable[[], None],
        on_restart: Callable[[], None],
        on_fatal_error: Callable[[TransientError], None],
    ) -> None:
        self._settings = settings
        self._name = name
        self._isolation = Isolation(settings)
        self._size = size
        self._on_idle = on_idle
        self._on_restart = on_restart
        self._on_fatal_error = on_fatal_error
        self._output = OutputLog()
        self._shared_folders: list[SharedFolder] = []
        self._slots: WorkerSlots[WorkerProcess] = WorkerSlots(settings.per_process)
        """Slots of the workers that are ready."""
        self._starting_since: dict[WorkerProcess, float] = {}
        self._start_seconds = 0.0
        """The longest start that has succeeded."""
        self._workers: set[WorkerProcess] = set()
        self._num_starting = 0
        self._max_starting = max(2, os.cpu_count() or 1)
        self._num_failed_starts = 0
        self._demand = 1
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def can_serve(self) -> bool:
        """Whether a worker is ready, or is starting on time and no start has failed since the last success."""
        return bool(self._slots) or not (self._num_failed_starts or self._is_start_late())

    @property
    def has_idle(self) -> bool:
        return self._slots.has_free

    def owns(self, pid: int) -> bool:
        return any(worker.pid == pid for worker in self._workers)

    async def start_first(self) -> StartupReport:
        worker = self._spawn()
        report = await self._await_start(worker)
        if report.error:
            await worker.exited
            raise UserError(report.error)
        self._isolation.record(report.missing)
        self._shared_folders = self._isolation.find_shared_folders()
        self._keep(self._watch_scratch())
        if self._settings.is_shared:
            self._keep(self._watch_loops())
        self._on_worker_ready(worker)
        return report.model_copy(update={"missing": self._isolation.missing})

    def start(self, body: bytes, num_samples: int, callback: Callback) -> Kill:
        worker = self._slots.acquire()
        return partial(worker.end_request, worker.start(body, num_samples, callback))

    def ensure(self, demand: int) -> None:
        """Grow towards `demand` workers and the spare ones, and replace dead ones."""
        self._demand = max(1, demand)
        num_busy = math.ceil(min(self._size, self._demand) / self._settings.per_process)
        num_wanted = num_busy + self._settings.spare_workers
        num_lasting = sum(not worker.problem for worker in self._slots)  # the others end with their last request
        max_starting = 1 if self._num_failed_starts else self._max_starting
        while not self._closing and num_lasting + self._num_starting < num_wanted and self._num_starting < max_starting:
            self._num_starting += 1
            self._keep(self._start())

    async def close(self) -> None:
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        workers = list(self._workers)
        for worker in workers:
            worker.kill(InvalidReason.CANCELLED, "the server shut down")
        await asyncio.gather(*(worker.exited for worker in workers))
        self._isolation.close()

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch_scratch(self) -> None:
        """Kill workers whose directory exceeds the limit. Without disk quotas no kernel limits a directory, so poll."""
        limit = self._settings.max_file_bytes + _SCRATCH_SLACK_BYTES
        while True:
            await asyncio.sleep(_SCRATCH_POLL_SECONDS)
            running = [worker for worker in self._workers if worker.is_busy]
            if not running:
                continue
            self._observe_files()
            shares = [share for folder in self._shared_folders for share in folder.find_shares()]
            for worker in await asyncio.to_thread(_find_excessive, running, shares, limit):
                message = (
                    f"its files took more than {format_bytes(self._settings.max_file_bytes)} (maxFileSize), "
                    "and the function was killed"
                )
                worker.kill(InvalidReason.WORKER_DIED, message)

    async def _watch_loops(self) -> None:
        """Kill shared workers whose event loop does not turn."""
        while True:
            await asyncio.sleep(_LOOP_POLL_SECONDS)
            for worker in list(self._workers):
                if worker.shared is not None and worker.shared.is_blocked():
                    self._keep(worker.shared.end_blocked())

    async def _start(self) -> None:
        try:
            if self._num_failed_starts:
                await asyncio.sleep(min(_MAX_BACKOFF_SECONDS, 0.1 * 2**self._num_failed_starts))
            worker = self._spawn()
            started = await self._await_start(worker)
        except OSError as error:
            started = StartupReport(error=f"cannot start a process: {error}")
        finally:
            self._num_starting -= 1
        if not started.error:
            self._num_failed_starts = 0
            self._on_worker_ready(worker)
        else:
            self._num_failed_starts += 1
            if self._num_failed_starts >= _MAX_FAILED_STARTS and not self._slots:
                self._on_fatal_error(TransientError(f"{_MAX_FAILED_STARTS} workers failed to start: {started.error}"))
        self.ensure(self._demand)

    def _spawn(self) -> WorkerProcess:
        worker = WorkerProcess(
            self._settings,
            self._isolation,
            self._output.write,
            self._on_worker_free,
            self._slots.withdraw,
            self._on_worker_exit,
        )
        self._workers.add(worker)
        return worker

    async def _await_start(self, worker: WorkerProcess) -> StartupReport:
        """Wait until the worker has imported the function or failed; log where it is, if that takes long."""
        self._starting_since[worker] = started_at = time.monotonic()
        reports = asyncio.create_task(self._report_import(worker, started_at))
        try:
            await worker.connect()
            async with asyncio.timeout(self._settings.import_timeout_seconds):
                report = await asyncio.shield(worker.started)
        except TimeoutError:
            place = await worker.locate()
            where = f" and is still at {place}" if place else ""
            limit = f"{self._settings.import_timeout_seconds:g} s (function.importTimeoutSeconds)"
            worker.kill(InvalidReason.TIMEOUT, f"it took more than {limit}{where}")
            report = await worker.started
        finally:
            reports.cancel()
            del self._starting_since[worker]
        if not report.error:
            self._start_seconds = max(self._start_seconds, time.monotonic() - started_at)
        return report

    async def _report_import(self, worker: WorkerProcess, started_at: float) -> None:
        pause = max(_IMPORT_REPORT_SECONDS, _PATIENCE_PER_START * self._start_seconds)
        while True:
            await asyncio.sleep(pause)
            place = await worker.locate()
            logger.info(
                "%s: the import of %s has taken %.0f s so far%s; after %g s it fails (importTimeoutSeconds)",
                self._name,
                self._settings.module or self._settings.path,
                time.monotonic() - started_at,
                f", now at {place}" if place else "",
                self._settings.import_timeout_seconds,
            )
            pause = min(_MAX_IMPORT_REPORT_SECONDS, 2 * pause)

    def _is_start_late(self) -> bool:
        patience = max(_MIN_PATIENCE_SECONDS, _PATIENCE_PER_START * self._start_seconds)
        now = time.monotonic()
        return bool(self._starting_since) and all(now - since > patience for since in self._starting_since.values())

    def _on_worker_ready(self, worker: WorkerProcess) -> None:
        if worker.exited.done():
            return
        self._observe_files()
        self._slots.add(worker, draw_max_requests(self._settings.max_requests))
        self._on_idle()

    def _on_worker_free(self, worker: WorkerProcess) -> None:
        """A request of the worker has ended. One that must be replaced ends with its last request."""
        is_idle = not worker.requests
        if is_idle:
            self._observe_files(worker)
        worker.problem = self._slots.release(worker, failed=worker.has_failed, problem=worker.problem)
        if worker.problem and is_idle:
            logger.info("%s: worker %d is replaced: %s", self._name, worker.pid, worker.problem)
            worker.kill(InvalidReason.CANCELLED, worker.problem)  # it has no request; its exit starts another one
        self._on_idle()  # also after a replacement: a spare worker may be idle

    def _observe_files(self, *ended: Hashable) -> None:
        """Note which shared files are new, and remove those whose possible creators have all ended."""
        for folder in self._shared_folders:
            folder.observe(self._list_running())
            for each in ended:
                folder.end(each)

    def _list_running(self) -> Iterator[Hashable]:
        """Yield what may be creating files: requests, by their worker, and imports."""
        for worker in self._workers:
            if worker not in self._slots:
                yield worker, "import"
            elif self._slots[worker].num_running:
                yield worker

    def _on_worker_exit(self, worker: WorkerProcess) -> None:
        self._observe_files(worker, (worker, "import"))
        self._workers.discard(worker)
        was_ready = worker in self._slots
        self._slots.remove(worker)
        if was_ready and not self._closing:
            self._on_restart()
        if not self._closing:
            self.ensure(self._demand)
            self._on_idle()


def _find_excessive(workers: list[WorkerProcess], shares: list[Share], limit_bytes: int) -> list[WorkerProcess]:
    shared = count_shares(shares, limit_bytes)

    def count(worker: WorkerProcess) -> float:
        return worker.used_bytes(limit_bytes) + shared.get(worker, 0) + shared.get((worker, "import"), 0)

    return [worker for worker in workers if count(worker) > limit_bytes]
