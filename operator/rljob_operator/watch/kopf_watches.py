"""Watches by kopf. The informer takes their events before kopf parses them.

The package's docstring says what of kopf is used, and why no object reaches it. Invariant: kopf writes nothing into
objects, and knows nothing of them but their resourceVersions.
"""

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from typing import Any

import aiohttp
import kopf
import msgspec
import yarl

from rljob_core.json_depth import load_json
from rljob_core.kube.client import KubeApi
from rljob_core.kube.resources import WATCHED, Resource
from rljob_operator.watch.tasks import TaskTree, run_uncancelled

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
