"""run_operator on a clock that only the test moves: what it requests at one moment, and in the minutes that follow.

`settle` waits until nothing is due at the present time, and the watches have reported the operator's own writes. So the
number of requests is the same in each run, however slow the machine is. The resync's LISTs are off; `requeue` is what
a resync does with a key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import aiohttp
import pytest

from rljob_core.backend import JobKey, utc_now
from rljob_core.kube.client import KubeApi
from rljob_core.loop.workqueue import WorkQueue
from rljob_operator import operator
from rljob_operator.kube.cache import Cache
from rljob_operator.settings import Settings
from rljob_operator.watch import informer
from tests.integration.apiserver.operator_harness import Manifest
from tests.support.waiting import DEADLINE_SECONDS

_POLL_SECONDS = 0.003
_NUM_QUIET_POLLS = 3
"""A change of another client is on its way from the watch to the queue for less than this number of polls."""
NEVER_SECONDS = 86400.0


class _Informer(informer.Informer):
    @property
    def is_drained(self) -> bool:
        return self._changed.empty()


class SteppedOperator:
    """`start`, then `stop`. It watches all namespaces; `count` has the requests about one namespace."""

    def __init__(self, api: KubeApi) -> None:
        self.seconds, self._began = 0.0, utc_now()
        """The operator's clock."""
        self.task: asyncio.Task[None] | None = None
        self._api, self._num_wakes = api, 0
        self._paths: list[str] = []
        self._queue: WorkQueue | None = None
        self._cache: Cache | None = None
        self._informer: _Informer | None = None
        api.hooks.append(self._record)

    async def start(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(operator, "WorkQueue", self._build_queue)
            patch.setattr(operator, "Cache", self._build_cache)
            patch.setattr(operator, "Informer", self._build_informer)
            settings = Settings(lease=False, metrics_port=0, health_port=0, resync_seconds=NEVER_SECONDS)
            run = operator.run_operator(settings, api=self._api, clock=lambda: self.seconds, now=self._now)
            self.task = asyncio.create_task(run)
            await self._until(lambda: self._informer is not None and self._informer.has_listed)

    async def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        await self._api.close()

    def count(self, namespace: str) -> int:
        """Return the number of requests about a namespace so far, dry runs and events included."""
        return sum(f"/namespaces/{namespace}/" in path for path in self._paths)

    async def until_current(self, kind: str, namespace: str, found: Manifest) -> None:
        """Wait until the watch has reported this version of an object."""
        metadata = found["metadata"]

        def is_current() -> bool:
            assert self._cache is not None
            known = self._cache.get(kind, namespace, metadata["name"])
            return bool(known and int(known["metadata"]["resourceVersion"]) >= int(metadata["resourceVersion"]))

        await self._until(is_current)

    async def until_forgotten(self, kind: str, namespace: str, name: str) -> None:
        """Wait until the watch has reported the deletion of an object."""
        await self._until(lambda: self._cache is not None and self._cache.get(kind, namespace, name) is None)

    async def settle(self) -> None:
        """Wait until nothing is due now."""
        num_quiet = 0

        def is_settled() -> bool:
            nonlocal num_quiet
            num_quiet = num_quiet + 1 if self._is_quiet() else 0
            return num_quiet >= _NUM_QUIET_POLLS

        await self._until(is_settled)

    async def step(self, until: float) -> bool:
        """Do what is due first, and all else that is due at that time. Return False if nothing is due before `until`,
        a time of the operator's clock."""
        assert self._queue is not None
        due = self._queue.next_due()
        if due is None or due > until:
            return False
        self.seconds = max(self.seconds, due)
        self._wake()
        await self.settle()
        return True

    async def pass_seconds(self, seconds: float) -> None:
        """Do all that is due within this time."""
        until = self.seconds + seconds
        while await self.step(until):
            pass
        self.seconds = until
        self._wake()
        await self.settle()

    async def requeue(self, key: JobKey) -> None:
        """Reconcile a key whether it is due or not, as a resync does."""
        assert self._informer is not None
        self._informer.requeue(key)
        self._wake()
        await self.settle()

    def _now(self) -> datetime:
        return self._began + timedelta(seconds=self.seconds)

    def _wake(self) -> None:
        """Let the workers read the clock: each gets a key that no object has."""
        assert self._informer is not None
        self._num_wakes += 1
        self._informer.requeue(JobKey("wake", str(self._num_wakes)))

    def _is_quiet(self) -> bool:
        assert self._queue is not None
        assert self._cache is not None
        assert self._informer is not None
        due = self._queue.next_due()
        is_due = due is not None and due <= self.seconds
        is_idle = self._queue.is_idle and self._informer.is_drained and not is_due
        return is_idle and self._cache.unconfirmed_write_seconds() == 0

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not holds():
                if self.task is not None and self.task.done():
                    self.task.result()
                await asyncio.sleep(_POLL_SECONDS)

    async def _record(self, request: aiohttp.ClientRequest) -> None:
        self._paths.append(request.url.path)

    def _build_queue(self, min_interval_seconds: float) -> WorkQueue:
        self._queue = WorkQueue(min_interval_seconds)
        return self._queue

    def _build_cache(self, clock: Any) -> Cache:
        self._cache = Cache()  # on the real clock: a write that no event has confirmed yet has an age
        return self._cache

    def _build_informer(self, *arguments: Any) -> _Informer:
        self._informer = _Informer(*arguments)
        return self._informer
