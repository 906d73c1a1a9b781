"""Watches by kopf: thin event handlers, and settings without kopf's own state.

The package's docstring lists what of kopf is used, and each workaround with its reason. Invariants: kopf writes nothing
into objects, and keeps nothing about them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import aiohttp
import kopf
import yarl
from kopf._core.reactor.inventory import ResourceMemories, ResourceMemory

from rljob_operator.kube.client import KubeApi
from rljob_operator.kube.resources import WATCHED, Resource
from rljob_operator.watch.tasks import TaskTree, run_uncancelled

_OBJECT_TASK_SECONDS = 1.0
"""How long kopf keeps the task of an object without events: by default five times as long, and thousands of tasks."""

OnEvent = Callable[[Resource, Any], Awaitable[None]]


async def run_watches(
    api: KubeApi,
    scopes: Sequence[str | None],
    resources: Collection[Resource],
    on_event: OnEvent,
    on_list: Callable[[str], None],
    on_watching: Callable[[], None],
) -> None:
    """Watch until cancelled or a watch fails, and leave no task behind.

    `scopes` are namespaces; None: all. `on_list` gets the plural name of a kind that kopf has listed.
    """
    registry, sessions = kopf.OperatorRegistry(), list[aiohttp.ClientSession]()

    async def handle(event: Any, param: Any = None, **_: Any) -> None:
        await on_event(param, event)

    for resource in resources:
        names = (resource.group, resource.version, resource.plural)
        kopf.on.event(*names, id=resource.plural, param=resource, registry=registry)(handle)

    watched = {resource.path(scope) for resource in resources for scope in scopes}

    def is_list(url: yarl.URL) -> bool:
        return "watch" not in url.query and any(url.path.endswith(path) for path in watched)

    async def report_list(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        if not is_list(request.url):
            return await handler(request)
        request.url = request.url.update_query(limit="1")
        response = await handler(request)
        on_list(request.url.path.rpartition("/")[2])
        return response

    class Response(aiohttp.ClientResponse):
        """Hides the objects of kopf's LISTs from it: it needs only their resourceVersion."""

        async def json(self, **options: Any) -> Any:
            answer = await super().json(**options)
            return (
                {"metadata": {"resourceVersion": answer["metadata"]["resourceVersion"]}}
                if is_list(self.url)
                else answer
            )

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        # One connection per watch, and a few for kopf's own requests.
        session = api.new_session(
            limit=len(WATCHED) * len(scopes) + 10, middlewares=(report_list,), response_class=Response
        )
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


async def _start(
    registry: kopf.OperatorRegistry, scopes: Sequence[str | None], on_watching: Callable[[], None]
) -> Collection[asyncio.Task[Any]]:
    namespaces = tuple(scope for scope in scopes if scope)
    settings = _build_settings()
    # Named namespaces need no scan, which a Role cannot allow: kopf would log nine errors.
    settings.scanning.disabled = bool(namespaces)
    try:
        return await kopf.spawn_tasks(
            registry=registry,
            settings=settings,
            memories=_NoMemories(),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
        )
    finally:
        on_watching()


class _NoMemories(ResourceMemories):
    """kopf's own remembers each object until its deletion: 2 KB for each of 80,000."""

    async def recall(self, raw_body: Any, *, ephemeral: bool = False, **options: Any) -> ResourceMemory:
        return await super().recall(raw_body, ephemeral=True, **options)


class _NoDiffs(kopf.StatusDiffBaseStorage):
    """Without it, copying and comparing objects took a quarter of the CPU of a burst."""

    def build(self, **_: Any) -> Any:
        return {}


def _build_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.persistence.finalizer = "rljob.dev/never-set"
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 10
    settings.queueing.idle_timeout = _OBJECT_TASK_SECONDS
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
