"""Feeds the cache, and yields the keys of the objects that may have changed.

Consumes watch events (kopf_watches) and LISTs: one of every kind at the start and periodically, and one of each kind
that kopf has just listed. The last works around kopf: it emits no event for an object that was deleted before its own
LIST. Invariant: no key is yielded before every kind was listed; then all are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection
from http import HTTPStatus
from typing import Any

from rljob_api.errors import TransientError
from rljob_operator.backend import JobKey, Key, RewardModelKey
from rljob_operator.kube.cache import Cache, OwnerKey, references_model
from rljob_operator.kube.client import ApiError, KubeApi, translate
from rljob_operator.kube.resources import REWARD_MODEL, RLJOB, WATCHED, Resource
from rljob_operator.watch.kopf_watches import run_watches
from rljob_operator.watch.tasks import wait_for_all

log = logging.getLogger(__name__)
_RELIST_SECONDS = 1.0
"""Watches of several kinds that start within this time are listed together."""


class WatchedKindsChangedError(TransientError):
    """An optional kind was installed or removed: the watches must start again."""


class Informer:
    """`on_watching` is called when kopf has started its watches, and with them its signal handlers."""

    def __init__(
        self,
        api: KubeApi,
        cache: Cache,
        namespaces: tuple[str, ...],
        resync_seconds: float,
        on_watching: Callable[[], None] = lambda: None,
    ) -> None:
        self._api, self._cache, self._resync_seconds, self._on_watching = api, cache, resync_seconds, on_watching
        self._scopes: tuple[str | None, ...] = namespaces or (None,)
        self._changed: asyncio.Queue[Key] = asyncio.Queue()
        self._absent: frozenset[Resource] = frozenset()
        self.has_listed = False
        self._to_relist: set[Resource] = set()
        self._has_relisted = asyncio.Event()

    async def keys(self) -> AsyncIterator[Key]:
        """List, then watch forever. Raises TransientError when the LISTs or the watches fail."""
        await self.list_all()
        self.has_listed = True
        watches = run_watches(
            self._api, self._scopes, self._watched(), self._on_event, self._on_kopf_list, self._on_watching
        )
        tasks = [asyncio.create_task(watches), asyncio.create_task(self._resync())]
        getter: asyncio.Task[Key] | None = None
        try:
            for key in self.all_keys():
                yield key
            while True:
                getter = asyncio.create_task(self._changed.get())
                await asyncio.wait([getter, *tasks], return_when=asyncio.FIRST_COMPLETED)
                if not getter.done():
                    broken = next(task for task in tasks if task.done())
                    raise TransientError(f"watching ended: {broken.exception() or 'kopf stopped'}")
                yield getter.result()
        finally:
            pending = [*tasks, *([getter] if getter else [])]
            for task in pending:
                task.cancel()
            await wait_for_all(pending)

    def all_keys(self) -> list[Key]:
        jobs = [JobKey(key.namespace, key.name) for key in self._cache.names(RLJOB)]
        return [*jobs, *(RewardModelKey(key.namespace, key.name) for key in self._cache.names(REWARD_MODEL))]

    async def list_all(self) -> None:
        """Replace the content of the cache, kind by kind."""
        absent = await self._list(WATCHED)
        was, self._absent = self._absent, frozenset(absent)
        if self.has_listed and was != self._absent:
            self.has_listed = False
            raise WatchedKindsChangedError("an optional CRD was installed or removed")

    def handle_event(self, kind: str, event: Any) -> None:
        """Store a watch event, and queue the keys that it concerns."""
        body = dict(event["object"])
        self._cache.confirm_write(kind, body)
        change = self._cache.remove if event["type"] == "DELETED" else self._cache.upsert
        for owner in change(kind, body):
            self._enqueue(owner)

    async def _on_event(self, resource: Resource, event: Any) -> None:
        await self._cache.wait_written(resource.key, event["object"])
        self.handle_event(resource.key, event)

    def _on_kopf_list(self, plural: str) -> None:
        if listed := {resource for resource in self._watched() if resource.plural == plural}:
            self._to_relist |= listed
            self._has_relisted.set()

    def _watched(self) -> list[Resource]:
        return [resource for resource in WATCHED if resource not in self._absent]

    async def _list(self, resources: Collection[Resource]) -> set[Resource]:
        """Return the kinds that do not exist."""
        absent = set()
        for resource in resources:
            for namespace in self._scopes:
                try:
                    items, version = await self._api.list(resource, namespace)
                except ApiError as error:
                    if resource.is_optional and error.code in (HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN):
                        absent.add(resource)  # without its CRD, or RBAC for it, no job can have one
                        continue
                    raise translate(error, "list", resource.plural, f"LIST of {resource.plural}") from error
                for owner in self._cache.replace(resource, namespace, items, version):
                    self._enqueue(owner)
        return absent

    async def _resync(self) -> None:
        """List everything periodically, and between that the kinds that kopf lists."""
        due = asyncio.get_running_loop().time() + self._resync_seconds
        while True:
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(due):
                        await self._list_after_kopf()
                due = asyncio.get_running_loop().time() + self._resync_seconds
                await self.list_all()
            except WatchedKindsChangedError:
                raise
            except TransientError as error:
                log.warning("resync: %s; next in %.0f s", error, self._resync_seconds)
                continue
            for key in self.all_keys():
                self._changed.put_nowait(key)

    async def _list_after_kopf(self) -> None:
        while True:
            await self._has_relisted.wait()
            await asyncio.sleep(_RELIST_SECONDS)
            self._has_relisted.clear()
            resources, self._to_relist = self._to_relist, set()
            try:
                await self._list(resources)
            except (TransientError, asyncio.CancelledError) as error:
                self._to_relist |= resources
                self._has_relisted.set()
                if not isinstance(error, TransientError):
                    raise
                log.warning("LIST after a watch's: %s", error)

    def _enqueue(self, owner: OwnerKey) -> None:
        if owner.kind == RLJOB.kind:
            self._changed.put_nowait(JobKey(owner.namespace, owner.name))
            self._enqueue_models_of(owner)
            return
        self._changed.put_nowait(RewardModelKey(owner.namespace, owner.name))
        for key in self._cache.names(RLJOB):
            if key.namespace == owner.namespace and references_model(self._cache.get(*key), owner.name):
                self._changed.put_nowait(JobKey(key.namespace, key.name))

    def _enqueue_models_of(self, job: OwnerKey) -> None:
        """A change of a job changes the demand for its RewardModels, and which drivers report their latency."""
        manifest = self._cache.get(*job)
        for key in self._cache.names(REWARD_MODEL):
            if key.namespace == job.namespace and references_model(manifest, key.name):
                self._changed.put_nowait(RewardModelKey(key.namespace, key.name))
