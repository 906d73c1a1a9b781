"""Feeds the cache, and yields the keys of the objects that may have changed.

Consumes watch events and LISTs: one of every kind at the start, periodically of all but Events, and one
of each kind that kopf has just listed. The last works around kopf: it emits no event for an object that was deleted
before its own LIST. Invariant: no key is yielded before every kind was listed; then all are.

The informer takes the events of kopf's watches before kopf parses them. The package's docstring says what of kopf is
used, and why no object reaches it. Invariant: kopf writes nothing into objects, and knows nothing of them but their
resourceVersions.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import aiohttp
import kopf
import msgspec
import yarl

from rljob_api.errors import TransientError
from rljob_core.backend import JobKey, Key, RewardModelKey
from rljob_core.json_depth import load_json
from rljob_core.kube.client import ApiError, KubeApi
from rljob_core.kube.resources import EVENT, POLICY, REWARD_MODEL, RLJOB, WATCHED, Resource
from rljob_operator.kube.cache import Cache, ObjectKey
from rljob_operator.kube.refusals import translate
from rljob_operator.watch.tasks import TaskTree, run_uncancelled, wait_for_all

OnEvent = Callable[[Resource, Any], None]
_OBJECT_EVENTS = ("ADDED", "MODIFIED", "DELETED")


async def run_watches(
    api: KubeApi,
    scopes: Sequence[str | None],
    resources: Collection[Resource],
    on_event: OnEvent,
    on_list: Callable[[str], None],
    on_watching: Callable[[], None],
) -> None:
    """Watch until cancelled or a watch fails, and leave no task behind.

    `scopes` are namespaces; None: all. `on_event` gets each watch event, `on_list` the plural name of a kind whose
    watch has restarted: events before it may be lost.
    """
    registry, sessions = kopf.OperatorRegistry(), list[aiohttp.ClientSession]()
    for resource in resources:  # kopf watches what has a handler
        kopf.on.event(resource.group, resource.version, resource.plural, registry=registry)(_never_called)
    watched = {resource.path(scope): resource for resource in resources for scope in scopes}

    async def shorten_list(
        request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        resource = _find(watched, request.url)
        if resource is None or _is_watch(request.url):
            return await handler(request)
        request.url = request.url.update_query(limit="1")
        response = await handler(request)
        on_list(resource.plural)
        return response

    class Response(aiohttp.ClientResponse):
        """Hides objects: of a LIST kopf needs the resourceVersion, of a watch the resourceVersion of each event."""

        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            await super().start(connection)
            if self.ok and _is_watch(self.url) and (resource := _find(watched, self.url)):
                stream: Any = _WatchedStream(self.content, functools.partial(on_event, resource))
                self.content = stream
            return self

        async def json(self, **options: Any) -> Any:
            if not _find(watched, self.url):
                return await super().json(**options)
            answer = load_json(await self.read())
            return {"metadata": {"resourceVersion": answer["metadata"]["resourceVersion"]}}

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        # One connection per watch, and a few for kopf's own requests.
        limit = len(WATCHED) * len(scopes) + 10
        session = api.new_session(limit, middlewares=(shorten_list,), response_class=Response)
        sessions.append(session)
        return kopf.AiohttpSession(server=api.server, aiohttp_session=session)

    async def end() -> None:
        await tree.cancel_all()
        for session in sessions:
            await session.close()

    tree = TaskTree()
    try:
        roots = await tree.create_task(_start(registry, scopes, on_watching))
        done, _ = await asyncio.wait(roots, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await run_uncancelled(end())


class _WatchedStream:
    """The body of a watch's response, for kopf: bookmarks in place of events."""

    def __init__(self, content: aiohttp.StreamReader, on_event: Callable[[Any], None]) -> None:
        self._content, self._on_event = content, on_event

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncGenerator[bytes, None]:
        rest = bytearray()
        async for chunk in self._content.iter_chunked(size):
            *lines, tail = chunk.split(b"\n")
            for line in lines:
                rest += line
                if event := bytes(rest).strip():
                    yield self._take(event) + b"\n"
                rest.clear()
            rest += tail  # at the end: an event that broke off, which the next watch has

    def _take(self, line: bytes) -> bytes:
        event = load_json(line)
        if event["type"] not in _OBJECT_EVENTS:
            return line
        version = event["object"]["metadata"]["resourceVersion"]
        self._on_event(event)
        return msgspec.json.encode({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": version}}})


def _find(watched: Mapping[str, Resource], url: yarl.URL) -> Resource | None:
    return next((resource for path, resource in watched.items() if url.path.endswith(path)), None)


def _is_watch(url: yarl.URL) -> bool:
    return "watch" in url.query


async def _never_called(**_: Any) -> None:
    raise AssertionError("kopf has seen an object")


async def _start(
    registry: kopf.OperatorRegistry, scopes: Sequence[str | None], on_watching: Callable[[], None]
) -> Collection[asyncio.Task[Any]]:
    namespaces = tuple(scope for scope in scopes if scope)
    settings = _build_settings()
    # Named namespaces need no scan, which a Role cannot allow: kopf would log nine errors.
    settings.scanning.disabled = bool(namespaces)
    try:
        return await kopf.spawn_tasks(
            registry=registry, settings=settings, standalone=True, clusterwide=not namespaces, namespaces=namespaces
        )
    finally:
        on_watching()


def _build_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.persistence.finalizer = "rljob.dev/never-set"
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 10
    settings.networking.request_timeout = 30
    settings.posting.enabled = False
    settings.posting.loggers = False
    for resource in WATCHED:
        key = (resource.group, resource.version, resource.plural)
        if resource.label_selector:
            settings.watching.label_selectors[key] = resource.label_selector
        if resource.field_selector:
            settings.watching.field_selectors[key] = resource.field_selector
    return settings


log = logging.getLogger(__name__)
_RELIST_SECONDS = 1.0
"""Watches of several kinds that start within this time are listed together."""
SLICE_OBJECTS = 25
"""How many listed objects are stored at once: 25 Pods take about 5 ms."""
_MAX_LIST_STARTS = 3
_RESYNCED = tuple(resource for resource in WATCHED if resource is not EVENT)
"""What is listed periodically. A cluster may have many thousand Warning events; they expire, and explain at most."""


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
        self._changed: asyncio.Queue[Key | None] = asyncio.Queue()
        """None: a task of `keys` has ended."""
        self._absent: frozenset[Resource] = frozenset()
        self.has_listed = False
        self._waiting: set[asyncio.Task[None]] = set()
        """Events of objects that are being written."""
        self._to_relist: set[Resource] = set()
        self._has_relisted = asyncio.Event()

    async def keys(self) -> AsyncGenerator[Key, None]:
        """List, then watch forever. Raises TransientError when the LISTs or the watches fail."""
        changed = self._changed = asyncio.Queue()
        await self._list_all(WATCHED)
        self.has_listed = True
        watches = run_watches(
            self._api, self._scopes, self._watched(), self._on_event, self._on_kopf_list, self._on_watching
        )
        tasks = [asyncio.create_task(watches), asyncio.create_task(self._resync())]
        for task in tasks:
            task.add_done_callback(lambda _: changed.put_nowait(None))
        try:
            for key in self._all_keys():
                yield key
            while next_key := await changed.get():
                yield next_key
            broken = next(task for task in tasks if task.done())
            raise TransientError(f"watching ended: {broken.exception() or 'kopf stopped'}")
        finally:
            for task in tasks:
                task.cancel()
            await wait_for_all(tasks)

    def requeue(self, key: Key) -> None:
        """Yield the key of an object that something else than a watch reports as changed."""
        self._changed.put_nowait(key)

    def _all_keys(self) -> list[Key]:
        return [_key_of(owner) for resource in (RLJOB, REWARD_MODEL) for owner in self._cache.names(resource)]

    async def _list_all(self, resources: Collection[Resource]) -> None:
        absent = await self._list(resources)
        was, self._absent = self._absent, frozenset(absent)
        if self.has_listed and was != self._absent:
            self.has_listed = False
            raise WatchedKindsChangedError("an optional CRD was installed or removed")

    def _on_event(self, resource: Resource, event: Any) -> None:
        """Store a watch event, and queue the keys that it concerns. While the object is being written, the event waits
        for the answer."""
        if written := self._cache.write_in_flight(resource.kind, event["object"]):
            task = asyncio.create_task(self._store_after(written, resource, event))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)
        else:
            self._store(resource, event)

    async def _store_after(self, written: asyncio.Event, resource: Resource, event: Any) -> None:
        await written.wait()
        self._store(resource, event)

    def _store(self, resource: Resource, event: Any) -> None:
        body = event["object"]
        self._cache.confirm_write(resource.kind, body)
        change = self._cache.remove if event["type"] == "DELETED" else self._cache.upsert
        for owner in change(resource.kind, body):
            self._enqueue(owner)

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
                    await self._list_pages(resource, namespace)
                except ApiError as error:
                    if resource.is_optional and error.code in (HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN):
                        absent.add(resource)  # without its CRD, or RBAC for it, no job can have one
                        continue
                    raise translate(error, "list", resource.plural, f"LIST of {resource.plural}") from error
        return absent

    async def _list_pages(self, resource: Resource, namespace: str | None) -> None:
        """Store one kind page by page, in slices between which the loop does other work, such as renewing the Lease."""
        for _ in range(_MAX_LIST_STARTS - 1):
            try:
                return await self._list_once(resource, namespace)
            except ApiError as error:
                if error.code != HTTPStatus.GONE:
                    raise
                log.warning("the LIST of %s took longer than the API server keeps its state; again", resource.plural)
        return await self._list_once(resource, namespace)

    async def _list_once(self, resource: Resource, namespace: str | None) -> None:
        listing, version = self._cache.start_list(resource, namespace), ""
        async with contextlib.aclosing(self._api.list_pages(resource, namespace)) as pages:
            async for items, version in pages:  # noqa: B007 - of the last page
                while items:
                    self._enqueue_all(listing.add(items[-SLICE_OBJECTS:]))
                    del items[-SLICE_OBJECTS:]
                    await asyncio.sleep(0)
        self._enqueue_all(listing.finish(version))

    async def _resync(self) -> None:
        """List what is resynced periodically, and between that the kinds that kopf lists."""
        due = asyncio.get_running_loop().time() + self._resync_seconds
        while True:
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(due):
                        await self._list_after_kopf()
                due = asyncio.get_running_loop().time() + self._resync_seconds
                await self._list_all(_RESYNCED)
            except WatchedKindsChangedError:
                raise
            except TransientError as error:
                log.warning("resync: %s; next in %.0f s", error, self._resync_seconds)
                continue
            for key in self._all_keys():
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

    def _enqueue_all(self, owners: Iterable[ObjectKey]) -> None:
        """Queue changed owners. Before every kind was listed nothing may be reconciled; then all keys are queued."""
        if self.has_listed:
            for owner in owners:
                self._enqueue(owner)

    def _enqueue(self, owner: ObjectKey) -> None:
        """Queue an owner and what depends on it: a job changes the demand for its RewardModels, and they its status; so
        does the job from whose model it starts. A policy concerns all of its namespace."""
        if owner.kind == POLICY.kind:
            for other in self._cache.owners_in(owner.namespace):
                self._changed.put_nowait(_key_of(other))
            return
        self._changed.put_nowait(_key_of(owner))
        models = [model for model in self._cache.models_of(owner) if self._cache.has(model)]
        for other in (*models, *self._cache.jobs_of(owner)):
            self._changed.put_nowait(_key_of(other))


def _key_of(owner: ObjectKey) -> Key:
    return (JobKey if owner.kind == RLJOB.kind else RewardModelKey)(owner.namespace, owner.name)
