"""The local backend: store, controllers and kubelet, running together.

Invariant: after `async with LocalCluster(...)` no process that it started is alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import ENV_GRACE_SECONDS, PATH_RUN
from rljob_cli.local.controllers import WORKLOADS, plan_pods
from rljob_cli.local.network import Network
from rljob_cli.local.node.gpus import GpuPool, find_gpus, find_resources
from rljob_cli.local.node.kubelet import Kubelet
from rljob_cli.local.node.podshim import set_child_subreaper
from rljob_cli.local.node.volumes import RunPaths
from rljob_cli.local.store import LocalStore
from rljob_core.backend import Manifest
from rljob_core.children.common import HEAD
from rljob_core.defaults import DEFAULTS

_NOT_INHERITED = ("RLJOB_", "RAY_ADDRESS", "RAY_AUTH_", "VLLM_HOST_IP", "MASTER_")
LOCAL_DEFAULTS = DEFAULTS.model_copy(update={"read_only_root_filesystem": False})
"""For processes, which share this machine's file system. A volume at /tmp would replace the user's paths below it."""
STOP_SECONDS = 15.0
"""For one Pod, from SIGTERM to SIGKILL."""
SAVE_SECONDS = 3600.0
"""The same for those that stop first: the head completes a checkpoint. A user who does not wait kills it."""


class LocalCluster:
    def __init__(
        self,
        job: RLJob,
        network: Network,
        root: Path,
        claims: Mapping[str, Path] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`env`: further variables of all processes."""
        self.paths = RunPaths(root.resolve(), claims or {})
        self.network = network
        self.store = LocalStore(job)
        base_env = (
            build_base_env(os.environ) | network.environment | {ENV_GRACE_SECONDS: str(SAVE_SECONDS)} | dict(env or {})
        )
        gpus = GpuPool(find_gpus(), find_resources(job.spec))
        self.kubelet = Kubelet(self.store, network, self.paths, base_env, gpus)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> LocalCluster:
        set_child_subreaper()
        self.paths.clear()
        self._tasks = [asyncio.create_task(self._run_controllers()), asyncio.create_task(self.kubelet.run())]
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop(STOP_SECONDS)

    async def stop(self, grace_seconds: float, first: tuple[str, ...] = ()) -> None:
        """Stop the loops, then all Pods: those whose name starts with one of `first` before the others, without
        haste. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.kubelet.shutdown(first, grace_seconds, first_seconds=SAVE_SECONDS)
        self.network.close()
        self.paths.clear()

    def check(self) -> None:
        """Raise the error that ended a loop, so that a bug does not become a hanging run."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def _run_controllers(self) -> None:
        changed = self.store.subscribe()
        while True:
            changed.clear()
            now = datetime.now(UTC)
            plan = plan_pods(self.store.of_kind(*WORKLOADS), self.store.pods.values(), now)
            for key, status in plan.statuses.items():
                self.store.set_status(key, status)
            for name in plan.delete:
                self.store.delete_pod(name)
            for pod in plan.create:
                self.store.create_pod(pod)
            timeout = max(0.0, (plan.wake_at - now).total_seconds()) if plan.wake_at else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await changed.wait()


@contextlib.asynccontextmanager
async def running(
    cluster: LocalCluster,
    objects: Iterable[Manifest],
    stop_seconds: float,
    progress: Coroutine[None, None, None] | None = None,
    signals: Iterable[signal.Signals] = (signal.SIGTERM,),
) -> AsyncIterator[None]:
    """Within, the Pods of the objects run beside `progress`, and the signals cancel the caller's task. `stop_seconds`:
    for a Pod, at the end."""
    task = asyncio.current_task()
    assert task is not None
    for number in signals:
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    async with cluster:
        reporting = asyncio.create_task(progress) if progress else None
        try:
            for each in objects:
                await cluster.store.apply(each)
            yield
        finally:
            if reporting:
                reporting.cancel()
            await cluster.stop(stop_seconds)


def build_base_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return this program's environment without the variables of another run."""
    env = {name: value for name, value in environ.items() if not name.startswith(_NOT_INHERITED)}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}"
    env["PYTHONUNBUFFERED"] = "1"
    # All addresses of Pods are on this interface.
    env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    return env


def replace_head(children: Iterable[Manifest], module: str, settings: str) -> None:
    """Let the head run another module, with a file of settings in the run's folder."""
    for child in children:
        for container in child["spec"]["template"]["spec"]["containers"] if child["kind"] == "Job" else []:
            if container["name"] == HEAD:
                container["command"] = ["python", "-m", module, f"{PATH_RUN}/{settings}"]
