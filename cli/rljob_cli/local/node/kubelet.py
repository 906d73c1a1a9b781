"""Runs the store's Pods as processes of this machine, and reports their status.

Invariant: a Pod is removed from the store only after its last process has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil

from rljob_cli.local.controllers import ANNOTATION_IDENTITY
from rljob_cli.local.network import Network, build_hosts
from rljob_cli.local.node import volumes
from rljob_cli.local.node.container import Container
from rljob_cli.local.node.gpus import GpuPool
from rljob_cli.local.node.podspec import ContainerConfigError, PodContext, Process, build_process
from rljob_cli.local.node.podstatus import ContainerRecord, build_pod_status
from rljob_cli.local.node.probes import SHIM
from rljob_cli.local.node.volumes import RunPaths
from rljob_cli.local.store import LocalStore
from rljob_cli.manifests import is_sidecar, phase_of
from rljob_core.backend import Manifest
from rljob_core.plan.observed_job import is_terminating, name_of

_RETRY_SECONDS = 1.0
_RESCAN_SECONDS = 0.01
_DEFAULT_GRACE_SECONDS = 30.0


def log_path(paths: RunPaths, pod: Manifest, container: str) -> Path:
    """logs/POD.log, or logs/POD.CONTAINER.log if the Pod has several containers."""
    several = len(pod["spec"]["containers"]) + len(pod["spec"].get("initContainers", [])) > 1
    return paths.logs / (f"{name_of(pod)}.{container}.log" if several else f"{name_of(pod)}.log")


class PodRunner:
    def __init__(self, pod: Manifest, kubelet: Kubelet) -> None:
        self.pod = pod
        self._kubelet = kubelet
        self.address = kubelet.network.address(pod["metadata"]["annotations"][ANNOTATION_IDENTITY])
        self._message = ""
        self._stopping = False
        self._sidecars: list[asyncio.Task[None]] = []
        spec = pod["spec"]
        self.grace = float(spec.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_SECONDS))
        self._init = [self._container(c, is_init=True) for c in spec.get("initContainers", [])]
        self._main = [self._container(c, is_init=False) for c in spec["containers"]]
        self.task = asyncio.create_task(self._run(), name=f"pod {name_of(pod)}")

    def _container(self, manifest: Manifest, is_init: bool) -> Container:
        paths = self._kubelet.paths
        return Container(
            manifest,
            ContainerRecord(manifest["name"], is_init, is_sidecar=is_init and is_sidecar(manifest)),
            build=lambda command: self._process(manifest, command),
            log=log_path(paths, self.pod, manifest["name"]),
            cwd=paths.pod(name_of(self.pod)),
            on_change=self._publish,
            on_lost_shim=self._kubelet.kill_orphans,
            listening_port=self._kubelet.network.port,
        )

    def _process(self, manifest: Manifest, command: list[str] | None) -> Process:
        kubelet = self._kubelet
        held = kubelet.gpus.acquire(name_of(self.pod), kubelet.gpus.count(self.pod)) or []
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(held)}
        context = PodContext(
            pod=self.pod,
            address=self.address,
            mounts=volumes.mounts_of(manifest, self.pod, kubelet.paths),
            hosts_file=kubelet.paths.hosts,
            find=kubelet.store.find,
            base_env={**kubelet.base_env, **gpus},
        )
        if command is not None:
            manifest = {**manifest, "command": command, "args": []}
        return build_process(manifest, context)

    async def _run(self) -> None:
        try:
            await self._prepare()
            policy = self.pod["spec"].get("restartPolicy", "Always")
            for container in self._init:
                if container.record.is_sidecar:
                    supervised = container.supervise(self.address, "Always", self.grace)
                    self._sidecars.append(asyncio.create_task(supervised))
                    await container.started.wait()
                    continue
                await container.supervise(self.address, "Never" if policy == "Never" else "OnFailure", self.grace)
                if container.record.exit_code != 0:
                    return
            await asyncio.gather(*(container.supervise(self.address, policy, self.grace) for container in self._main))
        finally:
            await self._stop_sidecars(self.grace)
            self._kubelet.gpus.release(name_of(self.pod))

    async def _prepare(self) -> None:
        """Create volumes and acquire GPUs; retry while either is missing."""
        kubelet, name = self._kubelet, name_of(self.pod)
        wanted = kubelet.gpus.count(self.pod)
        while not self._stopping:
            try:
                if kubelet.gpus.acquire(name, wanted) is None:
                    raise ContainerConfigError(f"waiting for {wanted} GPUs; this machine has {kubelet.gpus.size}")
                volumes.prepare(self.pod, kubelet.paths, kubelet.store.find)
                kubelet.paths.pod(name).mkdir(parents=True, exist_ok=True)
                self._message = ""
                break
            except ContainerConfigError as error:
                self._message = str(error)
            self._publish()
            await asyncio.sleep(_RETRY_SECONDS)
        self._publish()

    def refresh(self) -> None:
        """Write changed ConfigMaps and Secrets into the volumes."""
        with contextlib.suppress(ContainerConfigError):  # if it was deleted, running Pods keep their files
            volumes.refresh(self.pod, self._kubelet.paths, self._kubelet.store.find)

    async def stop(self, grace_seconds: float | None) -> None:
        """Stop all containers, sidecars last, and wait. None: for the Pod's own grace period."""
        self._stopping = True
        grace = self.grace if grace_seconds is None else grace_seconds
        ending = [container for container in [*self._init, *self._main] if not container.record.is_sidecar]
        await asyncio.gather(*(container.stop(grace) for container in ending))
        await self._stop_sidecars(grace)
        await asyncio.gather(self.task, return_exceptions=True)

    async def _stop_sidecars(self, grace_seconds: float) -> None:
        sidecars = [container for container in self._init if container.record.is_sidecar]
        await asyncio.gather(*(container.stop(grace_seconds) for container in sidecars))
        await asyncio.gather(*self._sidecars, return_exceptions=True)

    def kill(self) -> None:
        self._stopping = True
        for container in [*self._init, *self._main]:
            container.kill()

    def _publish(self) -> None:
        store, name = self._kubelet.store, name_of(self.pod)
        records = [container.record for container in [*self._init, *self._main]]
        old = store.pods.get(name, {}).get("status", {})
        store.set_pod_status(name, build_pod_status(old, self.address, records, datetime.now(UTC), self._message))


@dataclass(eq=False)
class Kubelet:
    store: LocalStore
    network: Network
    paths: RunPaths
    base_env: Mapping[str, str]
    gpus: GpuPool
    _runners: dict[str, PodRunner] = field(default_factory=dict)
    _stops: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _hosts: str | None = None
    _config_version: tuple[str, ...] = ()
    _closing: bool = False
    _other_children: set[int] = field(default_factory=lambda: {child.pid for child in psutil.Process().children()})

    async def run(self) -> None:
        changed = self.store.subscribe()
        while True:
            changed.clear()
            self.sync()
            await changed.wait()

    def sync(self) -> None:
        self._write_hosts()
        self._refresh_volumes()
        for name, pod in list(self.store.pods.items()):
            if is_terminating(pod):
                if name not in self._stops:
                    self._stops[name] = asyncio.create_task(self._remove(pod))
            elif name not in self._runners and phase_of(pod) == "Pending" and not self._closing:
                self._runners[name] = PodRunner(pod, self)

    async def shutdown(self, first: tuple[str, ...], grace_seconds: float, first_seconds: float) -> None:
        """Stop the Pods whose name starts with one of `first`, then all others, at most for their own grace periods."""
        self._closing = True
        for is_early in (True, False):
            group = [runner for name, runner in self._runners.items() if name.startswith(first) is is_early]
            stops = (runner.stop(first_seconds if is_early else min(runner.grace, grace_seconds)) for runner in group)
            await asyncio.gather(*stops)
        await asyncio.gather(*self._stops.values(), return_exceptions=True)

    def kill(self) -> None:
        """Send SIGKILL to all Pods now. shutdown() then does not wait."""
        self._closing = True
        for runner in self._runners.values():
            runner.kill()

    def kill_orphans(self) -> None:
        """Kill the processes that this process inherited as subreaper because their shim was killed."""
        while alive := [process for process in self._find_orphans() if _is_alive(process)]:
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(_RESCAN_SECONDS)
            for process in alive:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)

    def _find_orphans(self) -> Iterator[psutil.Process]:
        """Yield descendants of children that are neither a shim nor older than this kubelet, and those children.
        A dead child counts too: if only its first thread has ended, it is still the parent of living processes."""
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                is_dead = child.status() == psutil.STATUS_ZOMBIE
                if is_dead or (child.pid not in self._other_children and str(SHIM) not in child.cmdline()):
                    yield from (child, *child.children(recursive=True))

    async def _remove(self, pod: Manifest) -> None:
        name = name_of(pod)
        runner = self._runners.get(name)
        if runner is not None:
            await runner.stop(None)
            del self._runners[name]
        volumes.remove(pod, self.paths)
        self.store.remove_pod(name)
        del self._stops[name]

    def _write_hosts(self) -> None:
        text = build_hosts(self.store.of_kind("Service"), self.store.pods.values())
        if text != self._hosts:
            volumes.write_atomically(self.paths.hosts, text.encode())
            self._hosts = text

    def _refresh_volumes(self) -> None:
        version = tuple(o["metadata"]["resourceVersion"] for o in self.store.of_kind("ConfigMap", "Secret"))
        if version != self._config_version:
            self._config_version = version
            for runner in self._runners.values():
                runner.refresh()


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False
