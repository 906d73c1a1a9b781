"""run_operator in this process, hands on its requests, and the administrator's hands in one namespace.

Nothing plays controllers but the test itself. What is waited for is a condition of the cluster, with a deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from rljob_operator.kube.client import MERGE_PATCH, ApiError, KubeApi, connect
from rljob_operator.kube.operator import run_operator
from rljob_operator.kube.resources import resources_of_kind
from rljob_operator.settings import Settings

DEADLINE_SECONDS = 60.0
NAME = "smallest"
Manifest = dict[str, Any]


class World:
    """One namespace, with the administrator's hands in it and operators that run beside."""

    def __init__(self, api: KubeApi, namespace: str, kubeconfig: str) -> None:
        self.api, self.namespace, self.kubeconfig = api, namespace, kubeconfig
        self.tasks: list[asyncio.Task[None]] = []
        self.apis: list[KubeApi] = []

    async def start(self, *hooks: Any, **settings: Any) -> asyncio.Task[None]:
        api = await connect(settings.pop("kubeconfig", self.kubeconfig))
        api.hooks += hooks
        self.apis.append(api)
        plain: Manifest = {"lease": False, "metrics_port": 0, "health_port": 0, "namespaces": (self.namespace,)}
        task = asyncio.create_task(run_operator(Settings(**(plain | settings)), api=api))
        self.tasks.append(task)
        return task

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for api in self.apis:
            await api.close()

    def path(self, kind: str, name: str | None = None) -> str:
        return resources_of_kind(kind)[0].path(self.namespace, name)

    async def get(self, kind: str, name: str) -> Manifest | None:
        try:
            return await self.api.request("GET", self.path(kind, name))
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def create(self, manifest: Manifest) -> Manifest:
        return await self.api.request("POST", self.path(manifest["kind"]), body=manifest)

    async def patch(self, kind: str, name: str, change: Manifest) -> None:
        await self.api.request("PATCH", self.path(kind, name), body=change, content_type=MERGE_PATCH)

    async def delete(self, kind: str, name: str) -> None:
        await self.api.request("DELETE", self.path(kind, name), body={"propagationPolicy": "Background"})

    async def condition(self, type_: str, kind: str = "RLJob", name: str = NAME) -> Manifest:
        status = ((await self.get(kind, name)) or {}).get("status") or {}
        return next((c for c in status.get("conditions") or [] if c["type"] == type_), {})

    async def events(self, reason: str) -> list[Manifest]:
        items = (await self.api.request("GET", self.path("Event")))["items"]
        return [item for item in items if item["reason"] == reason]

    async def workloads(self) -> list[Manifest]:
        kinds = ("Job", "StatefulSet", "Deployment")
        return [item for kind in kinds for item in (await self.api.request("GET", self.path(kind)))["items"]]

    async def until(self, what: str, holds: Callable[[], Awaitable[Any]]) -> Any:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (value := await holds()):
            for task in self.tasks:
                if task.done() and not task.cancelled() and (error := task.exception()):
                    raise AssertionError(f"the operator ended before {what}") from error
            assert time.monotonic() < deadline, f"never came: {what}; job: {await self.get('RLJob', NAME)}"
            await asyncio.sleep(0.1)  # between looks at the condition
        return value

    async def all_children(self) -> None:
        async def there() -> bool:
            return len(await self.workloads()) == 4 and bool(await self.condition("Running"))

        await self.until("all workloads", there)

    async def back(self, kind: str, name: str, uid: str) -> None:
        async def anew() -> bool:
            found = await self.get(kind, name)
            return bool(found and found["metadata"]["uid"] != uid)

        await self.until(f"{kind} {name} anew", anew)


class Writes:
    """A hook that counts what is written."""

    def __init__(self) -> None:
        self.made: list[str] = []

    async def __call__(self, request: aiohttp.ClientRequest) -> None:
        if request.method != "GET":
            self.made.append(f"{request.method} {request.url.path}")


class Lists:
    """A hook that counts LISTs of jobs."""

    def __init__(self) -> None:
        self.num = 0

    async def __call__(self, request: aiohttp.ClientRequest) -> None:
        self.num += request.url.path.endswith("/rljobs") and "watch" not in request.url.query
