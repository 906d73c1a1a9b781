"""Submits objects, and watches when their Pods appear and when they run. Nothing is polled."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import aiohttp

from operator_load.plane import NAMESPACE
from rljob_core.kube.client import KubeApi

_SUBMITTERS = 20
_CHUNK_BYTES = 2**24
_TABLE = "application/json;as=Table;g=meta.k8s.io;v=v1"
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"


class Arrivals:
    """Times, by the name of the object: its submission, its last Pod, and when it ran first."""

    def __init__(self, pods_per_object: int) -> None:
        self.submitted: dict[str, float] = {}
        self.complete: dict[str, float] = {}
        self.running: dict[str, float] = {}
        self._pods_per_object = pods_per_object
        self._pods: defaultdict[str, set[str]] = defaultdict(set)
        self._has_run = asyncio.Event()

    @property
    def num_pods(self) -> int:
        return sum(map(len, self._pods.values()))

    def record_pod(self, owner: str, pod: str) -> None:
        self._pods[owner].add(pod)
        if len(self._pods[owner]) == self._pods_per_object:
            self.complete.setdefault(owner, time.monotonic())

    def record_running(self, name: str) -> None:
        self.running.setdefault(name, time.monotonic())
        self._has_run.set()

    async def submit(self, api: KubeApi, path: str, body: Any, names: list[str], window: int | None = None) -> None:
        """Submit all objects over a few connections: at once, or at most `window` that do not run yet at a time.

        An object's time starts when its request is sent.
        """
        free = asyncio.Semaphore(_SUBMITTERS)

        async def submit_one(name: str) -> None:
            async with free:
                while window and len(self.submitted) - len(self.running) >= window:
                    self._has_run.clear()
                    await self._has_run.wait()
                self.submitted[name] = time.monotonic()
                await api.request("POST", path, body=body | {"metadata": {"name": name}})

        await asyncio.gather(*map(submit_one, names))

    def percentiles(self, times: dict[str, float]) -> dict[str, float]:
        seconds = sorted(times[name] - self.submitted[name] for name in times)
        return {
            f"p{percent}": round(seconds[min(len(seconds) - 1, len(seconds) * percent // 100)], 1)
            for percent in (50, 99)
        }


async def watch_pods(api: KubeApi, label: str, arrivals: Arrivals) -> None:
    """Watch the metadata of Pods with a label that names their object, until cancelled."""

    def record(event: Any) -> None:
        metadata = event["object"]["metadata"]
        arrivals.record_pod(metadata["labels"][label], metadata["name"])

    path = f"/api/v1/namespaces/{NAMESPACE}/pods"
    await _watch(api, path, {"labelSelector": label}, _METADATA, ("ADDED",), record)


async def watch_phases(api: KubeApi, path: str, column: str, running: str, arrivals: Arrivals) -> None:
    """Watch a printed column of a kind until cancelled. The rows have the first cells of `kubectl get`."""
    position: list[int] = []

    def record(event: Any) -> None:
        table = event["object"]
        if table.get("columnDefinitions"):  # in the first event alone
            position[:] = [[found["name"].lower() for found in table["columnDefinitions"]].index(column)]
        for row in table.get("rows") or []:
            if str(row["cells"][position[0]]).lower() == running:
                arrivals.record_running(row["cells"][0])

    await _watch(api, path, {"includeObject": "None"}, _TABLE, ("ADDED", "MODIFIED"), record)


async def _watch(
    api: KubeApi, path: str, query: dict[str, str], accept: str, types: tuple[str, ...], record: Callable[[Any], None]
) -> None:
    """Record all objects and their changes. The API server ends the watch of a client that falls behind; the next one
    begins with all objects; a second record of one has no effect."""
    query = {**query, "watch": "true", "resourceVersion": "0"}
    request = {"params": query, "headers": {"Accept": accept}, "timeout": aiohttp.ClientTimeout(total=None)}
    async with api.new_session() as session:
        while True:
            async with session.get(api.server + path, read_bufsize=_CHUNK_BYTES, **request) as answer:
                if answer.status == HTTPStatus.TOO_MANY_REQUESTS:  # it still reads the objects of a new CRD
                    await asyncio.sleep(float(answer.headers.get("Retry-After", 1)))
                    continue
                answer.raise_for_status()
                async for line in answer.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        sys.exit(f"the watch of {path} ended: {event['object'].get('message')}")
                    if event["type"] in types:
                        record(event)
