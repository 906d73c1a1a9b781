"""The objects of one local run, in memory, as an API server would store them. Implements the operator's `Backend`.

Invariant: a write that changes nothing notifies no subscriber, so the loops become idle.
"""

import asyncio
import contextlib
import copy
import os
import uuid
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime
from typing import Any

from rljob_api.manifest.job import RLJob
from rljob_api.wire.driver_status import DriverStatus
from rljob_cli.local.secrets import build_secrets
from rljob_cli.manifests import timestamp
from rljob_core.backend import (
    ChildKey,
    Event,
    JobKey,
    Key,
    Manifest,
    ObservedState,
    Owner,
    OwnerStatus,
    Reference,
    key_of,
)
from rljob_core.plan.observed_job import is_terminating, name_of

_RESYNC_SECONDS = 10.0


class LocalStore:
    def __init__(self, job: RLJob) -> None:
        self.job: RLJob | None = job
        self.objects: dict[ChildKey, Manifest] = {}
        self._secrets = build_secrets(job, os.environ)
        """The user's Secrets. Not among `objects`, because the job does not own them."""
        self.pods: dict[str, Manifest] = {}
        self.failed_pods: list[Manifest] = []
        """Those that failed and were then deleted, as they were: a head's Job may be replaced within a second."""
        self.driver: DriverStatus | None = None
        self.events: list[Event] = []
        self._applied: dict[ChildKey, Manifest] = {}
        self._version = 0
        self._subscribers: list[asyncio.Event] = []

    # Backend, for the reconcile core.

    async def get_owner(self, key: Key) -> Owner | None:
        return self.job if self.job and key == self.key else None

    async def observe(self, owner: Owner) -> ObservedState:
        pods = tuple(copy.deepcopy(list(self.pods.values())))
        return ObservedState(children=copy.deepcopy(self.objects), pods=pods, driver=self.driver, keeps_files=True)

    async def apply(self, manifest: Manifest) -> None:
        """Server-side apply with one field manager: remove what it applied before and omits now, keep other fields."""
        key, manifest = key_of(manifest), copy.deepcopy(manifest)
        old, before = self.objects.get(key), self._applied.get(key, {})
        new = merge(prune(copy.deepcopy(old or {}), before, manifest), manifest)
        self._applied[key] = manifest
        metadata = new["metadata"]
        metadata.setdefault("uid", str(uuid.uuid4()))
        metadata.setdefault("creationTimestamp", timestamp(datetime.now(UTC)))
        if old != new:
            self._write(self.objects, key, new)

    async def find_missing(self, workloads: Sequence[Manifest]) -> list[tuple[Reference, ...]]:
        """Nothing: the keys of Secrets are variables of the shell, which `rljob run` has checked."""
        return [() for _ in workloads]

    async def check(self, workload: Manifest) -> None:
        """There is nothing to do: one machine refuses no workload."""

    async def delete(self, namespace: str, child: ChildKey) -> None:
        """The controllers then delete a workload's Pods (garbage collection)."""
        self._applied.pop(child, None)
        if self.objects.pop(child, None):
            self.changed()

    async def ungate(self, namespace: str, pod: str) -> None:
        """There is nothing to do: one machine has no scheduler that a gate could block."""

    async def force_delete(self, namespace: str, pod: str) -> None:
        """There is nothing to do: a process of this machine does not outlive its Pod."""

    async def delete_job(self, key: JobKey) -> None:
        self.job = None
        self.objects.clear()
        self._applied.clear()
        self.changed()

    async def update_status(self, owner: Owner, status: OwnerStatus) -> None:
        if self.job and self.job.status != status:
            self.job = self.job.model_copy(update={"status": status})
            self.changed()

    async def record_event(self, owner: Owner, event: Event) -> None:
        self.events.append(event)

    async def watch(self) -> AsyncGenerator[Key, None]:
        event = self.subscribe()
        while self.job:
            yield self.key
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RESYNC_SECONDS):
                    await event.wait()
            event.clear()

    # For controllers and kubelet.

    @property
    def key(self) -> JobKey:
        assert self.job is not None, "the job was deleted"
        return JobKey(self.job.metadata.namespace, self.job.metadata.name)

    def of_kind(self, *kinds: str) -> list[Manifest]:
        return [o for key, o in self.objects.items() if key.kind in kinds]

    def find(self, kind: str, name: str) -> Manifest | None:
        return self.objects.get(ChildKey(kind, name)) or (self._secrets.get(name) if kind == "Secret" else None)

    def set_status(self, key: ChildKey, status: Manifest) -> None:
        old = self.objects.get(key)
        if old is not None and old.get("status") != status:
            self._write(self.objects, key, {**old, "status": status})

    def set_driver(self, status: DriverStatus | None) -> None:
        if status != self.driver:
            self.driver = status
            self.changed()

    def create_pod(self, pod: Manifest) -> None:
        pod["metadata"]["uid"] = str(uuid.uuid4())
        self._write(self.pods, name_of(pod), pod)

    def set_pod_status(self, name: str, status: Manifest) -> None:
        pod = self.pods.get(name)
        if pod is not None and pod.get("status") != status:
            self._write(self.pods, name, {**pod, "status": status})

    def delete_pod(self, name: str) -> None:
        """Mark the Pod as terminating; the kubelet stops it and then removes it."""
        pod = self.pods.get(name)
        if pod is not None and not is_terminating(pod):
            if pod.get("status", {}).get("phase") == "Failed":
                self.failed_pods.append(pod)
            metadata = {**pod["metadata"], "deletionTimestamp": timestamp(datetime.now(UTC))}
            self._write(self.pods, name, {**pod, "metadata": metadata})

    def remove_pod(self, name: str) -> None:
        if self.pods.pop(name, None):
            self.changed()

    def subscribe(self) -> asyncio.Event:
        """Return an event that every change sets. The caller clears it before reading the objects."""
        event = asyncio.Event()
        self._subscribers.append(event)
        return event

    def changed(self) -> None:
        for event in self._subscribers:
            event.set()

    def _write(self, table: dict[Any, Manifest], key: Any, value: Manifest) -> None:
        self._version += 1
        value["metadata"]["resourceVersion"] = str(self._version)
        table[key] = value
        self.changed()


def merge(old: Manifest, new: Manifest) -> Manifest:
    """Merge `new` over `old`: maps by key; lists and scalars are replaced."""
    merged = dict(old)
    for key, value in new.items():
        current = merged.get(key)
        merged[key] = merge(current, value) if isinstance(value, dict) and isinstance(current, dict) else value
    return merged


def prune(stored: Manifest, before: Manifest, now: Manifest) -> Manifest:
    for key, value in before.items():
        if key not in now:
            stored.pop(key, None)
        elif isinstance(value, dict) and isinstance(now[key], dict) and isinstance(stored.get(key), dict):
            prune(stored[key], value, now[key])
    return stored
