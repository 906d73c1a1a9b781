"""The whole operator in a thread of this process, restarted whenever it ends, like the Pod of a Deployment.

Owns the event loop, the fault proxies and the clocks. A death is like kill -9: nothing more reaches the API server, and
all memory is lost. Only its Lease is released for it; other tests wait for its expiry.
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

from kubernetes.aio.client import Configuration

from rljob_api.errors import RLJobError
from rljob_core.defaults import DEFAULTS
from rljob_core.kube.client import MERGE_PATCH, ApiError, KubeApi, connect
from rljob_operator.operator import LeaseLostError, run_operator
from rljob_operator.settings import Settings
from tests.integration.apiserver.fault_proxy import FaultProxy, Faults, OnWrite

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
RESYNC_SECONDS = 0.5
LEASE = "rljob-operator"
_JOIN_SECONDS = 120.0
_DUMP_SECONDS = 10.0


class OperatorThread:
    """`start`, then `stop`. `num_reconciles` counts started reconciles of all incarnations."""

    def __init__(self, kubeconfig: str, namespace: str, address: str, on_write: OnWrite) -> None:
        self._kubeconfig, self._namespace, self._address, self._on_write = kubeconfig, namespace, address, on_write
        self.faults = Faults()
        self.defaults = DEFAULTS
        """Contents of the next incarnation."""
        self.num_reconciles = self.num_starts = 0
        self.errors: list[BaseException] = []
        self._offset_seconds = 0.0
        self._started_at = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._must_stop = asyncio.Event()
        self._leftover: list[str] = []
        self._proxy: FaultProxy | None = None
        self._thread = threading.Thread(target=self._run, name=f"operator of {namespace}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._must_stop.set)
        self._thread.join(_JOIN_SECONDS)
        assert not self._thread.is_alive(), f"the operator did not end; its stacks:\n{self._describe_stacks()}"
        assert not self._leftover, f"the operator ended, but not all of its tasks: {self._leftover}"

    def _describe_stacks(self) -> str:
        """Return the stacks of all tasks of the operator and all threads of this process."""
        output, is_done = io.StringIO(), threading.Event()

        def print_tasks() -> None:
            for task in asyncio.all_tasks(self._loop):
                print(f"--- cancelled {task.cancelling()} times: {task!r}", file=output)
                task.print_stack(file=output)
            is_done.set()

        self._loop.call_soon_threadsafe(print_tasks)
        if not is_done.wait(_DUMP_SECONDS):
            print("--- its event loop is blocked", file=output)
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            return output.getvalue() + file.read()

    def move_clock(self, seconds: float) -> None:
        self._offset_seconds += seconds

    def now(self) -> datetime:
        return EPOCH + timedelta(seconds=self._clock() - self._started_at)

    def drop_watches(self) -> None:
        if proxy := self._proxy:
            self._loop.call_soon_threadsafe(proxy.drop_watches)

    def kill(self) -> None:
        if proxy := self._proxy:
            self._loop.call_soon_threadsafe(proxy.die)

    @property
    def num_resyncs(self) -> tuple[int, int]:
        """The incarnation, and the number of its completed rounds of LISTs."""
        proxy = self._proxy
        return self.num_starts, proxy.num_resyncs if proxy else 0

    def _clock(self) -> float:
        return time.monotonic() + self._offset_seconds

    def _count_reconcile(self) -> datetime:
        self.num_reconciles += 1
        return self.now()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._keep_running())
            self._leftover = [repr(task) for task in asyncio.all_tasks(self._loop)]
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    async def _keep_running(self) -> None:
        direct = await connect(self._kubeconfig)
        upstream = direct.new_session(limit=0)
        try:
            while not self._must_stop.is_set():
                proxy = FaultProxy(upstream, direct.server, self.faults, self._on_write)
                try:
                    await self._run_once(await proxy.open(self._address), proxy)
                finally:
                    self._proxy = None
                    await proxy.close()
                await self._end_lease(direct)
        finally:
            await upstream.close()
            await direct.close()

    async def _end_lease(self, api: KubeApi) -> None:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases/{LEASE}"
        with contextlib.suppress(ApiError):  # not created yet
            await api.request("PATCH", path, body={"spec": {"holderIdentity": ""}}, content_type=MERGE_PATCH)

    async def _run_once(self, url: str, proxy: FaultProxy) -> None:
        """Run until it ends or dies."""
        self._proxy, self.num_starts = proxy, self.num_starts + 1
        api = KubeApi(Configuration(host=url))
        settings = Settings(
            namespaces=(self._namespace,),
            workers=2,
            resync_seconds=RESYNC_SECONDS,
            lease_namespace=self._namespace,
            lease_name=LEASE,
            metrics_port=0,
            health_port=0,
            defaults=self.defaults,
        )
        work = asyncio.create_task(run_operator(settings, api=api, clock=self._clock, now=self._count_reconcile))
        others = [asyncio.create_task(event.wait()) for event in (proxy.has_died, self._must_stop)]
        try:
            await asyncio.wait([work, *others], return_when=asyncio.FIRST_COMPLETED)
            if work.done() and not isinstance(error := work.exception(), LeaseLostError):
                self.errors.append(error or RLJobError("run_operator returned"))
        finally:
            for task in (work, *others):
                task.cancel()
            await asyncio.wait([work, *others])
            await api.close()
