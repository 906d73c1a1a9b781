"""The cache's feed: kopf's watches for news, a LIST of every kind at the start and now and then for the truth.

The only user of kopf; its handlers take an object in and name the jobs concerned, no more. Invariant: no key is given
out before every kind has been listed once; then every job is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection
from http import HTTPStatus
from typing import Any

import aiohttp
import kopf

from rljob_api.errors import TransientError
from rljob_operator.backend import JobKey
from rljob_operator.kube.cache import Cache, OwnerKey, names_model
from rljob_operator.kube.client import ApiError, KubeApi, translate
from rljob_operator.kube.resources import EVENT, REWARD_MODEL, RLJOB, WATCHED, Resource
from rljob_operator.kube.tasks import TaskTree, finish, to_the_end
from rljob_operator.loop.workqueue import Key, RewardModelKey

log = logging.getLogger(__name__)
_RELIST_SECONDS = 1.0
"""In which the watches of several kinds begin together."""


class KindsChanged(TransientError):  # noqa: N818 - it says what happened
    """A kind that a cluster need not have is there now, or is gone: the watches must begin again."""


class Feed:
    """Keeps a cache fresh, and says which keys changed."""

    def __init__(self, api: KubeApi, cache: Cache, namespaces: tuple[str, ...], resync_seconds: float) -> None:
        self._api, self._cache, self._resync_seconds = api, cache, resync_seconds
        self._scopes: tuple[str | None, ...] = namespaces or (None,)
        self._changed: asyncio.Queue[Key] = asyncio.Queue()
        self._absent: frozenset[Resource] = frozenset()
        self.has_listed = False
        self._relisted: set[Resource] = set()
        self._has_relisted = asyncio.Event()
        self.on_watching: Callable[[], None] = lambda: None

    async def keys(self) -> AsyncIterator[Key]:
        """List, then watch for ever. TransientError when the lists or the watches break."""
        await self.list_all()
        self.has_listed = True
        tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._resync())]
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
            left = [*tasks, *([getter] if getter else [])]
            for task in left:
                task.cancel()
            await finish(left)

    def all_keys(self) -> list[Key]:
        jobs = [JobKey(key.namespace, key.name) for key in self._cache.names(RLJOB)]
        return [*jobs, *(RewardModelKey(key.namespace, key.name) for key in self._cache.names(REWARD_MODEL))]

    async def list_all(self) -> None:
        """Replace the cache's content kind by kind by what there is."""
        absent = await self._list(WATCHED)
        was, self._absent = self._absent, frozenset(absent)
        if self.has_listed and was != self._absent:
            self.has_listed = False
            raise KindsChanged("a CRD came or went")

    async def _list(self, resources: Collection[Resource]) -> set[Resource]:
        """Returns the kinds that are not there."""
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
        """List all now and then, and at once what a watch has listed for itself: what went between our LIST and its
        own is told by neither."""
        due = asyncio.get_running_loop().time() + self._resync_seconds
        while True:
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(due):
                        await self._list_after_watches()
                due = asyncio.get_running_loop().time() + self._resync_seconds
                await self.list_all()
            except KindsChanged:
                raise
            except TransientError as error:
                log.warning("resync: %s; next in %.0f s", error, self._resync_seconds)
                continue
            for key in self.all_keys():
                self._changed.put_nowait(key)

    async def _list_after_watches(self) -> None:
        while True:
            await self._has_relisted.wait()
            await asyncio.sleep(_RELIST_SECONDS)
            self._has_relisted.clear()
            relisted, self._relisted = self._relisted, set()
            try:
                await self._list(relisted)
            except TransientError as error:
                log.warning("list after a watch's: %s", error)
                self._relisted |= relisted
                self._has_relisted.set()
            except asyncio.CancelledError:
                self._relisted |= relisted
                self._has_relisted.set()
                raise

    async def _note_list(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        response = await handler(request)
        plural = request.url.path.rpartition("/")[2]
        if request.method == "GET" and "watch" not in request.url.query:
            listed = {r for r in WATCHED if r.plural == plural and r not in self._absent}
            self._relisted |= listed
            if listed:
                self._has_relisted.set()
        return response

    def take_in(self, kind: str, event: Any) -> None:
        """A watch event."""
        body = dict(event["object"])
        self._cache.heard(kind, body)
        change = self._cache.remove if event["type"] == "DELETED" else self._cache.upsert
        for owner in change(kind, body):
            self._enqueue(owner)

    def _enqueue(self, owner: OwnerKey) -> None:
        if owner.kind == RLJOB.kind:
            self._changed.put_nowait(JobKey(owner.namespace, owner.name))
            self._enqueue_models_of(owner)
            return
        self._changed.put_nowait(RewardModelKey(owner.namespace, owner.name))
        for key in self._cache.names(RLJOB):
            if key.namespace == owner.namespace and names_model(self._cache.get(*key), owner.name):
                self._changed.put_nowait(JobKey(key.namespace, key.name))

    def _enqueue_models_of(self, job: OwnerKey) -> None:
        """A job that comes, goes or gets its head changes what its RewardModels are asked for, and who tells how long
        a sample takes."""
        manifest = self._cache.get(*job)
        for key in self._cache.names(REWARD_MODEL):
            if key.namespace == job.namespace and names_model(manifest, key.name):
                self._changed.put_nowait(RewardModelKey(key.namespace, key.name))

    async def _watch(self) -> None:
        registry, sessions = kopf.OperatorRegistry(), list[aiohttp.ClientSession]()
        for resource in WATCHED:
            if resource not in self._absent:
                self._register(resource, registry)

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.AiohttpSession:
            # A connection for each watch, and a few for kopf's own questions.
            session = self._api.new_session(limit=len(WATCHED) * len(self._scopes) + 10, middlewares=(self._note_list,))
            sessions.append(session)
            return kopf.AiohttpSession(server=self._api.server, aiohttp_session=session)

        async def end() -> None:
            await tree.end()
            for session in sessions:
                await session.close()

        # Not kopf.operator: at its end that cancels every task of the loop that began after it, our workers included.
        # But its roots are not all: when one watch fails, their root leaves the others to go on for ever.
        tree = TaskTree()
        try:
            roots = await tree.create_task(self._begin_watches(registry))
            done, _ = await asyncio.wait(roots, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await to_the_end(end())

    async def _begin_watches(self, registry: kopf.OperatorRegistry) -> Collection[asyncio.Task[Any]]:
        named = tuple(scope for scope in self._scopes if scope)
        settings = _settings()
        # What is named needs no look at the namespaces, which a Role cannot allow: kopf would log nine errors.
        settings.scanning.disabled = bool(named)
        try:
            return await kopf.spawn_tasks(
                registry=registry, settings=settings, standalone=True, clusterwide=not named, namespaces=named
            )
        finally:
            self.on_watching()

    def _register(self, resource: Resource, registry: kopf.OperatorRegistry) -> None:
        @kopf.on.event(resource.group, resource.version, resource.plural, id=resource.plural, registry=registry)
        async def on_event(event: Any, **_: Any) -> None:
            await self._cache.wait_written(resource.key, event["object"])
            self.take_in(resource.key, event)


class _NoDiffs(kopf.DiffBaseStorage):
    """kopf copies each object and compares it with the one before, for change handlers; we have none, and it was a
    quarter of the CPU of a burst."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        raise AssertionError("nothing of kopf's is written into objects")


class _NoProgress(kopf.ProgressStorage):
    """As above, of its handlers' states."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        raise AssertionError("nothing of kopf's is written into objects")

    def purge(self, **_: Any) -> None:
        pass

    def touch(self, **_: Any) -> None:
        pass

    def clear(self, *, essence: Any) -> Any:
        return essence


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.persistence.diffbase_storage, settings.persistence.progress_storage = _NoDiffs(), _NoProgress()
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = 500
    settings.networking.request_timeout = 30
    settings.posting.enabled = False
    settings.posting.loggers = False
    settings.persistence.finalizer = "rljob.dev/never-set"
    for resource in WATCHED:
        key = (resource.group, resource.version, resource.plural)
        if resource.label_selector:
            settings.watching.label_selectors[key] = resource.label_selector
        if resource is EVENT and resource.field_selector:
            settings.watching.field_selectors[key] = resource.field_selector
    return settings
