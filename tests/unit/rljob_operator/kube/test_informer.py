"""The Feed with kopf itself, against an API server of this test: whatever ends the watches ends all of them."""

import asyncio
import json
import time

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rljob_api.errors import TransientError
from rljob_operator.kube.cache import Cache
from rljob_operator.kube.client import KubeApi
from rljob_operator.kube.informer import Feed
from rljob_operator.kube.resources import RLJOB, WATCHED

DEADLINE_SECONDS = 90.0
JOB = {"metadata": {"name": "lifted", "namespace": "ns", "resourceVersion": "7", "uid": "a"}, "spec": {}}


class Server:
    """Every kind, and one RLJob. Watches stay open and tell nothing, until one is to fail."""

    def __init__(self):
        self.open, self.must_fail = set(), asyncio.Event()

    async def handle(self, request):
        plural = request.path.rpartition("/")[2]
        if "watch" in request.query:
            return await self.watch(request, plural)
        if "/namespaces/" in request.path:
            items = [JOB] if plural == RLJOB.plural else []
            return web.json_response({"metadata": {"resourceVersion": "9"}, "items": items})
        return web.json_response(self.discover(request.path))

    def discover(self, path):
        if path == "/api":
            return {"versions": ["v1"]}
        if path == "/apis":
            found = {(r.group, r.version) for r in WATCHED if r.group}
            versions = {group: {"groupVersion": f"{group}/{version}", "version": version} for group, version in found}
            return {"groups": [{"name": g, "preferredVersion": v, "versions": [v]} for g, v in versions.items()]}
        kinds = {r.plural: r.kind for r in WATCHED if path == f"/api{'s' if r.group else ''}/{r.api_version}"}
        if path == "/api/v1":
            kinds["namespaces"] = "Namespace"  # kopf waits for it
        verbs = ["list", "watch", "get", "patch"]
        return {
            "resources": [
                {"name": plural, "kind": kind, "singularName": "", "namespaced": kind != "Namespace", "verbs": verbs}
                for plural, kind in kinds.items()
            ]
        }

    async def watch(self, request, plural):
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        self.open.add(request.path)
        try:
            if plural == "pods":
                await self.must_fail.wait()
                error = {"type": "ERROR", "object": {"code": 500, "message": "a fault of this test"}}
                await answer.write(json.dumps(error).encode() + b"\n")
            await asyncio.Event().wait()
        finally:
            self.open.discard(request.path)
        return answer


async def _no_token():
    return None


@pytest.fixture
async def server():
    app, player = web.Application(), Server()
    app.router.add_route("*", "/{path:.*}", player.handle)
    player.at = TestServer(app)
    await player.at.start_server(shutdown_timeout=0.1)
    yield player
    await player.at.close()


@pytest.fixture
async def feed(server):
    api = KubeApi(str(server.at.make_url("")), None, _no_token)
    yield Feed(api, Cache(), ("ns",), resync_seconds=1000)
    await api.close()


async def until(holds):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)  # between looks at the condition


def left_of_kopf():
    marks = ("watcher for", "pause-waiter", "cleaner of", "spawner of", "credentials", "startup", "multidimensional")
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(marks)]


async def consume(feed):
    async for _ in feed.keys():
        pass


async def test_when_one_watch_fails_the_others_end_too(server, feed):
    """kopf leaves them: they would go on beside those begun next, and at the end take a cancellation for a pause."""
    consuming = asyncio.create_task(consume(feed))
    await until(lambda: len(server.open) == len(WATCHED))
    assert left_of_kopf(), "or this test knows kopf's tasks no more"
    server.must_fail.set()
    with pytest.raises(TransientError, match="watching ended"):
        await consuming
    assert not left_of_kopf()
    await until(lambda: not server.open)


@pytest.mark.parametrize("num_open", [0, 1, len(WATCHED)])
async def test_a_cancelled_feed_leaves_nothing_behind_whenever_and_however_often_it_is_cancelled(
    server, feed, num_open
):
    consuming = asyncio.create_task(consume(feed))
    await until(lambda: feed.has_listed and len(server.open) >= num_open)
    for _ in range(3):
        consuming.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await consuming
    assert not left_of_kopf()
    await until(lambda: not server.open)
