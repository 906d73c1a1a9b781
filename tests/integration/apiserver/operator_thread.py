"""The whole operator in a thread of this process, begun anew whenever it ends, as a Deployment's Pod would be.

Owns the event loop, the doors and the clocks. A death is as by kill -9: nothing more reaches the API server, and what
was in memory is gone. Only its Lease is ended for it: to wait for that is what other tests are for. The test's own
thread looks on.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import io
import tempfile
import threading
import time
from datetime import UTC, datetime, timedelta

from door import Door, Faults, OnWrite

from rljob_api.errors import RLJobError
from rljob_operator.kube.client import MERGE_PATCH, ApiError, KubeApi, connect
from rljob_operator.kube.operator import LeaseLost, run_operator
from rljob_operator.settings import Settings

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
RESYNC_SECONDS = 0.7
LEASE = "rljob-operator"
_JOIN_SECONDS = 120.0
_DUMP_SECONDS = 10.0


async def _no_token() -> str | None:
    return None


class OperatorThread:
    """`start`, then `stop`. `num_looks` are the looks at jobs that were begun, of all incarnations."""

    def __init__(self, kubeconfig: str, namespace: str, address: str, on_write: OnWrite) -> None:
        self._kubeconfig, self._namespace, self._address, self._on_write = kubeconfig, namespace, address, on_write
        self.faults = Faults()
        self.num_looks = self.num_starts = 0
        self.errors: list[BaseException] = []
        self._offset_seconds = 0.0
        self._began = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._must_stop = asyncio.Event()
        self._left: list[str] = []
        self._door: Door | None = None
        self._thread = threading.Thread(target=self._run, name=f"operator of {namespace}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._must_stop.set)
        self._thread.join(_JOIN_SECONDS)
        assert not self._thread.is_alive(), f"the operator did not end; it is at:\n{self._describe_stacks()}"
        assert not self._left, f"the operator ended, but not all of its tasks: {self._left}"

    def _describe_stacks(self) -> str:
        """Of every task of the operator and every thread of this process."""
        told, has_told = io.StringIO(), threading.Event()

        def tell() -> None:
            for task in asyncio.all_tasks(self._loop):
                print(f"--- cancelled {task.cancelling()} times: {task!r}", file=told)
                task.print_stack(file=told)
            has_told.set()

        self._loop.call_soon_threadsafe(tell)
        if not has_told.wait(_DUMP_SECONDS):
            print("--- its event loop does not turn", file=told)
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            return told.getvalue() + file.read()

    def move_clock(self, seconds: float) -> None:
        self._offset_seconds += seconds

    def now(self) -> datetime:
        return EPOCH + timedelta(seconds=self._clock() - self._began)

    def drop_watches(self) -> None:
        if door := self._door:
            self._loop.call_soon_threadsafe(door.drop_watches)

    def kill(self) -> None:
        if door := self._door:
            self._loop.call_soon_threadsafe(door._die)

    @property
    def num_resyncs(self) -> tuple[int, int]:
        """The incarnation, and the LISTs of all kinds that it has ended."""
        door = self._door
        return self.num_starts, door.num_resyncs if door else 0

    def _clock(self) -> float:
        return time.monotonic() + self._offset_seconds

    def _now_of_a_look(self) -> datetime:
        self.num_looks += 1
        return self.now()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._keep_running())
            self._left = [repr(task) for task in asyncio.all_tasks(self._loop)]
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    async def _keep_running(self) -> None:
        direct = await connect(self._kubeconfig)
        upstream = direct.new_session(limit=0)
        try:
            while not self._must_stop.is_set():
                door = Door(upstream, direct.server, self.faults, self._on_write)
                try:
                    await self._run_once(await door.open(self._address), door)
                finally:
                    self._door = None
                    await door.close()
                await self._end_lease(direct)
        finally:
            await upstream.close()
            await direct.close()

    async def _end_lease(self, api: KubeApi) -> None:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases/{LEASE}"
        with contextlib.suppress(ApiError):  # there may be none yet
            await api.request("PATCH", path, body={"spec": {"holderIdentity": ""}}, content_type=MERGE_PATCH)

    async def _run_once(self, url: str, door: Door) -> None:
        """Until it ends, or has died."""
        self._door, self.num_starts = door, self.num_starts + 1
        api = KubeApi(url, None, _no_token)
        settings = Settings(
            namespaces=(self._namespace,),
            workers=2,
            resync_seconds=RESYNC_SECONDS,
            lease_namespace=self._namespace,
            lease_name=LEASE,
            metrics_port=0,
            health_port=0,
        )
        work = asyncio.create_task(run_operator(settings, api=api, clock=self._clock, now=self._now_of_a_look))
        others = [asyncio.create_task(event.wait()) for event in (door.has_died, self._must_stop)]
        try:
            await asyncio.wait([work, *others], return_when=asyncio.FIRST_COMPLETED)
            if work.done() and not isinstance(error := work.exception(), LeaseLost):
                self.errors.append(error or RLJobError("run_operator returned"))
        finally:
            for task in (work, *others):
                task.cancel()
            await asyncio.wait([work, *others])
            await api.close()
