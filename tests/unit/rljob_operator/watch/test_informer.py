"""The informer with kopf, against an API server of this test: whatever ends one watch ends all."""

import asyncio
import json
import time
import tracemalloc

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import Configuration

from rljob_api.errors import TransientError
from rljob_core.backend import JobKey, RewardModelKey
from rljob_core.kube.client import ApiError, KubeApi, ListPage
from rljob_core.kube.resources import POD, POLICY, REWARD_MODEL, RLJOB, WATCHED
from rljob_operator.kube.cache import Cache
from rljob_operator.watch.informer import SLICE_OBJECTS, Informer
from tests.support.waiting import DEADLINE_SECONDS

JOB = {"metadata": {"name": "lifted", "namespace": "ns", "resourceVersion": "7", "uid": "a"}, "spec": {}}


class Server:
    """Serves every kind, and one RLJob. Watches stay open without events until one must fail."""

    def __init__(self):
        self.open, self.must_fail = set(), asyncio.Event()
        self.num_kopf_lists, self.watched_from, self.events = 0, [], {}

    async def handle(self, request):
        plural = request.path.rpartition("/")[2]
        if "watch" in request.query:
            return await self.watch(request, plural)
        if "/namespaces/" in request.path:
            items, version = [JOB] if plural == RLJOB.plural else [], {"resourceVersion": "9"}
            if request.query["limit"] == "1":
                self.num_kopf_lists += 1
                version["continue"] = "there is more"
            return web.json_response({"metadata": version, "items": items})
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
            if plural == RLJOB.plural:
                self.watched_from.append(request.query["resourceVersion"])
            if plural in self.events:
                for chunk in self.events.pop(plural):
                    await answer.write(chunk)
                return answer
            if plural == "pods":
                await self.must_fail.wait()
                error = {"type": "ERROR", "object": {"code": 500, "message": "a fault of this test"}}
                await answer.write(json.dumps(error).encode() + b"\n")
            await asyncio.Event().wait()
        finally:
            self.open.discard(request.path)
        return answer


@pytest.fixture
async def server():
    app, server = web.Application(), Server()
    app.router.add_route("*", "/{path:.*}", server.handle)
    server.at = TestServer(app)
    await server.at.start_server(shutdown_timeout=0.1)
    yield server
    await server.at.close()


@pytest.fixture
async def informer(server):
    api = KubeApi(Configuration(host=str(server.at.make_url(""))))
    yield Informer(api, Cache(), ("ns",), resync_seconds=1000)
    await api.close()


async def until(holds):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)  # polling


def list_kopf_tasks():
    prefixes = ("watcher for", "pause-waiter", "cleaner of", "spawner of", "credentials", "startup", "multidimensional")
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(prefixes)]


async def consume(informer):
    async for _ in informer.keys():
        pass


async def test_failure_of_one_watch_ends_the_others(server, informer):
    """kopf leaves them running, next to those of the next start."""
    consuming = asyncio.create_task(consume(informer))
    await until(lambda: len(server.open) == len(WATCHED))
    assert list_kopf_tasks(), "otherwise kopf has renamed its tasks"
    server.must_fail.set()
    with pytest.raises(TransientError, match="watching ended"):
        await consuming
    assert not list_kopf_tasks()
    await until(lambda: not server.open)


async def test_kopf_sees_no_object_and_knows_its_version(server, informer):
    """It would start a task for each of 80,000 objects, and remember each."""
    lines = [json.dumps({"type": "MODIFIED", "object": build_job(version)}).encode() + b"\n" for version in (12, 13)]
    broken_off = b'{"type": "MODIFIED", "object": {"metadata"'
    server.events["rljobs"] = [lines[0][:20], lines[0][20:] + lines[1], broken_off]
    consuming = asyncio.create_task(consume(informer))
    await until(lambda: len(server.open) == len(WATCHED) and len(server.watched_from) == 2)
    assert server.watched_from == ["9", "13"], "the next watch continues after the last whole event"
    assert server.num_kopf_lists == len(WATCHED)
    assert not any(task.get_name().startswith("worker for") for task in asyncio.all_tasks())
    found = informer._cache.get(RLJOB.kind, "ns", "lifted")
    assert found["metadata"]["resourceVersion"] == "13"
    consuming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consuming


def build_job(version):
    return JOB | {"metadata": JOB["metadata"] | {"resourceVersion": str(version)}}


async def test_event_of_an_object_that_is_being_written_waits_for_the_answer_alone():
    cache = Cache()
    informer = Informer(None, cache, (), 600)
    cache.upsert(RLJOB.kind, build_job(7))
    with cache.track_write(RLJOB, "ns", "lifted"):
        informer._on_event(RLJOB, {"type": "MODIFIED", "object": build_job(8)})
        informer._on_event(RLJOB, {"type": "DELETED", "object": build_job(9)})
        informer._on_event(POD, {"type": "ADDED", "object": build_pod("other")})
        await asyncio.sleep(0)
        assert names_in(cache) == ["other"]
        cache.upsert_own(RLJOB, build_job(8))
        num_changes = cache.num_changes
    await until(lambda: not informer._waiting)
    assert cache.names(RLJOB) == []
    assert cache.num_changes == num_changes + 1, "the event of the operator's own write changed nothing"


class PagedApi:
    """Serves the Pods of one LIST in pages; requests for the next page may be too late."""

    def __init__(self, *pages, num_too_late=0):
        self.pages, self.num_too_late = pages, num_too_late

    async def list_pages(self, resource, namespace):
        for number, page in enumerate(self.pages):
            if number and self.num_too_late:
                self.num_too_late -= 1
                raise ApiError(410, "Expired", "the continue token is too old")
            yield ListPage([build_pod(name) for name in page], "50")


def build_pod(name):
    labels = {"rljob.dev/job": "a"}
    return {"metadata": {"name": str(name), "namespace": "ns", "resourceVersion": "7", "labels": labels}}


def names_in(cache):
    return sorted(key.name for key in cache.names(POD))


async def test_list_that_expires_between_two_pages_starts_again():
    cache = Cache()
    cache.upsert("Pod", build_pod("deleted"))
    await Informer(PagedApi("ab", "c", num_too_late=2), cache, (), 600)._list([POD])
    assert names_in(cache) == ["a", "b", "c"]


async def test_list_that_always_expires_fails_and_removes_nothing():
    cache = Cache()
    cache.upsert("Pod", build_pod("old"))
    with pytest.raises(TransientError, match="410"):
        await Informer(PagedApi("ab", "c", num_too_late=99), cache, (), 600)._list([POD])
    assert names_in(cache) == ["a", "b", "old"]


async def test_pages_are_stored_in_slices_between_which_the_loop_works():
    cache, sizes = Cache(), []
    upsert = cache.upsert

    def count(*arguments, **options):
        sizes[-1] += 1
        return upsert(*arguments, **options)

    async def other_work():
        while True:
            sizes.append(0)
            await asyncio.sleep(0)

    cache.upsert = count
    working = asyncio.create_task(other_work())
    await asyncio.sleep(0)
    await Informer(PagedApi(range(400), range(400, 500)), cache, (), 600)._list([POD])
    working.cancel()
    assert sum(sizes) == 500
    assert max(sizes) <= SLICE_OBJECTS


async def test_list_keeps_one_page_in_memory():
    async def list_pages(resource, namespace):
        for number in range(20):
            pods = [build_pod(f"{number}-{index}") | {"spec": {"text": "x" * 10_000}} for index in range(100)]
            yield ListPage(pods, "50")

    api = PagedApi()
    api.list_pages = list_pages
    tracemalloc.start()
    await Informer(api, Cache(), (), 600)._list([POD])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 100 * 10_000, "20 pages of 1 MB each"


@pytest.mark.parametrize("num_open", [0, 1, len(WATCHED)])
async def test_cancelled_informer_leaves_no_tasks_when_cancelled_repeatedly(server, informer, num_open):
    consuming = asyncio.create_task(consume(informer))
    await until(lambda: informer.has_listed and len(server.open) >= num_open)
    for _ in range(3):
        consuming.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await consuming
    assert not list_kopf_tasks()
    await until(lambda: not server.open)


@pytest.mark.parametrize("autoscaling", [{"autoscaling": {"maxReplicas": 8}}, {}])
async def test_change_of_a_job_queues_the_reward_models_that_it_references(autoscaling):
    cache, rewards = Cache(), [{"name": "correct", "rewardModelRef": {"name": "math"}}]
    informer = Informer(None, cache, (), 600)

    def build(name, spec, version):
        return {"metadata": {"name": name, "namespace": "ns", "resourceVersion": str(version)}, "spec": spec}

    cache.upsert(REWARD_MODEL.kind, build("math", autoscaling, 1))
    cache.upsert(REWARD_MODEL.kind, build("other", {"autoscaling": {"maxReplicas": 8}}, 2))
    cache.upsert(RLJOB.kind, build("a", {"rewards": rewards}, 3))
    informer._on_event(RLJOB, {"type": "MODIFIED", "object": build("a", {"rewards": rewards}, 9)})
    keys = [informer._changed.get_nowait() for _ in range(informer._changed.qsize())]
    assert keys == [JobKey("ns", "a"), RewardModelKey("ns", "math")]


@pytest.mark.parametrize("type_", ["ADDED", "MODIFIED", "DELETED"])
async def test_change_of_a_job_queues_those_that_start_from_its_model(type_):
    cache = Cache()
    informer = Informer(None, cache, (), 600)

    def build(name, version, source="/m"):
        metadata = {"name": name, "namespace": "ns", "resourceVersion": str(version)}
        return {"metadata": metadata, "spec": {"model": {"source": source}}}

    if type_ != "ADDED":
        cache.upsert(RLJOB.kind, build("sums", 1))
    cache.upsert(RLJOB.kind, build("longer", 2, "job://sums@20"))
    informer._on_event(RLJOB, {"type": type_, "object": build("sums", 9)})
    keys = [informer._changed.get_nowait() for _ in range(informer._changed.qsize())]
    assert keys == [JobKey("ns", "sums"), JobKey("ns", "longer")]


async def test_change_of_a_policy_queues_all_of_its_namespace():
    cache = Cache()
    informer = Informer(None, cache, (), 600)

    def build(name, version, namespace="ns"):
        metadata = {"name": name, "namespace": namespace, "resourceVersion": str(version)}
        return {"metadata": metadata, "spec": {}}

    cache.upsert(REWARD_MODEL.kind, build("math", 1))
    cache.upsert(RLJOB.kind, build("a", 2))
    cache.upsert(RLJOB.kind, build("b", 3, "other"))
    for type_, version in (("ADDED", 4), ("MODIFIED", 5), ("DELETED", 6)):
        informer._on_event(POLICY, {"type": type_, "object": build("default", version)})
        keys = [informer._changed.get_nowait() for _ in range(informer._changed.qsize())]
        assert keys == [JobKey("ns", "a"), RewardModelKey("ns", "math")], type_
