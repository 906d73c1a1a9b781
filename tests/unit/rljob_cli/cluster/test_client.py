"""Kubeconfigs and answers of the API server as users have them: each error is one line with a remedy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rljob_api.errors import UserError
from rljob_cli.cluster.client import Cluster, ClusterError, NotReadyError, connect
from rljob_cli.options import Target

CONFIG = """
apiVersion: v1
kind: Config
current-context: %s
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: u, user: {token: secret}}]
contexts:
- {name: here, context: {cluster: c, user: u, namespace: research}}
- {name: there, context: {cluster: c, user: u}}
"""


async def namespace_of(folder: Path, text: str, context: str | None = None, namespace: str | None = None) -> str:
    file = folder / "config"
    file.write_text(text)
    async with connect(Target(namespace, context, str(file))) as cluster:
        return cluster.namespace


@pytest.mark.parametrize(
    "text", ["garbage: [", "5", "- a", "contexts: 5", "contexts: [5]", "contexts: [{}]", "", "a: b"]
)
@pytest.mark.parametrize("context", [None, "here"])
async def test_file_that_is_not_a_kubeconfig_is_one_line(tmp_path: Path, text: str, context: str | None) -> None:
    with pytest.raises(ClusterError, match=r"no cluster: .*--kubeconfig") as raised:
        await namespace_of(tmp_path, text, context)
    assert "\n" not in str(raised.value)


async def test_context_and_namespace_come_from_options_then_the_kubeconfig(tmp_path: Path) -> None:
    for current in ('""', "deleted"):
        assert await namespace_of(tmp_path, CONFIG % current, "here") == "research"
    assert await namespace_of(tmp_path, CONFIG % "here") == "research"
    assert await namespace_of(tmp_path, CONFIG % "there") == "default"
    assert await namespace_of(tmp_path, CONFIG % "there", "here", "mine") == "mine"


@pytest.mark.parametrize(
    ("current", "context", "missing"),
    [
        ("deleted", None, "no context deleted"),
        ("here", "other", "no context other"),
        ('""', None, "no current context"),
    ],
)
async def test_missing_context_is_reported_with_the_existing_ones(
    tmp_path: Path, current: str, context: str | None, missing: str
) -> None:
    with pytest.raises(ClusterError, match=f"the kubeconfig has {missing}; it has here, there; pass --kubeconfig"):
        await namespace_of(tmp_path, CONFIG % current, context)


async def test_missing_kubeconfig_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ClusterError, match=r"kubeconfig .*nope not found"):
        async with connect(Target(kubeconfig=str(tmp_path / "nope"))):
            pass
    assert caplog.text == "", "its library would say it, too"


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
async def serve(tmp_path: Path) -> Any:
    """Serve all paths with one handler, and use the cluster in a function."""

    async def run(handler: Handler, use: Callable[[Cluster], Awaitable[Any]]) -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        async with TestServer(app) as server:
            file = tmp_path / "config"
            file.write_text((CONFIG % "here").replace("http://127.0.0.1:1", str(server.make_url(""))))
            async with connect(Target(kubeconfig=str(file))) as cluster:
                return await use(cluster)

    return run


async def test_page_that_is_not_an_api_response_is_reported(serve: Any) -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<html>log in</html>", content_type="text/html")

    for use in (Cluster.list_jobs, lambda cluster: cluster.list_pods("a=b"), Cluster.list_reward_models):
        with pytest.raises(ClusterError, match="did not return a Kubernetes API response; check the server URL"):
            await serve(page, use)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (401, "unauthorized: the API server rejected your credentials"),
        (403, "forbidden: you may not list pods in namespace research; request a role that allows it: because"),
        (500, "list pods: the API server answered 500: because"),
    ],
)
async def test_refusal_is_reported_with_a_remedy(serve: Any, code: int, message: str) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"message": "because"}, status=code)

    with pytest.raises(ClusterError, match=message):
        await serve(refuse, lambda cluster: cluster.list_pods("a=b"))


async def test_server_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(CONFIG % "here")
    async with connect(Target(kubeconfig=str(tmp_path / "config"))) as cluster:
        with pytest.raises(ClusterError, match=r"the API server http://127\.0\.0\.1:1 did not answer: .*is running"):
            await cluster.list_jobs()


async def test_missing_job_is_reported_with_similar_names(serve: Any) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.path.endswith("/rljobs"):
            assert request.headers["Authorization"] == "Bearer secret"
            return web.json_response({"apiVersion": "v1", "items": [{"metadata": {"name": "sums"}}]})
        return web.json_response({"message": "not found"}, status=404)

    with pytest.raises(UserError, match="RLJob research/sumz: not found; did you mean sums"):
        await serve(answer, lambda cluster: cluster.get_job("sumz"))


async def test_log_is_streamed_as_lines_of_any_length(serve: Any) -> None:
    lines = ["short", "x" * 300_000, "", "last without an end"]

    async def answer(request: web.Request) -> web.Response:
        assert request.path == "/api/v1/namespaces/research/pods/head/log"
        assert request.query == {
            **{"container": "c", "follow": "false", "previous": "true", "timestamps": "true"},
            **{"tailLines": "7", "sinceSeconds": "9"},
        }
        return web.Response(text="\n".join(lines))

    async def use(cluster: Cluster) -> list[str]:
        log = cluster.stream_log("head", "c", tail=7, previous=True, since_seconds=9)
        return [line async for line in log]

    assert await serve(answer, use) == lines


async def test_log_that_does_not_exist_yet_is_not_ready(serve: Any) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"message": "container is waiting to start"}, status=400)

    async def use(cluster: Cluster) -> None:
        async for _ in cluster.stream_log("head", "c"):
            pass

    with pytest.raises(NotReadyError, match="container is waiting to start"):
        await serve(answer, use)


async def test_metrics_of_a_pod_are_read_through_its_proxy(serve: Any) -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.path == "/api/v1/namespaces/research/pods/head:8100/proxy/metrics"
        return web.Response(text="up 1\n")

    assert await serve(answer, lambda cluster: cluster.read_pod_metrics("head", 8100)) == "up 1\n"


@pytest.mark.parametrize(("no_proxy", "is_used"), [("", True), ("cluster.invalid", False)])
async def test_requests_use_the_proxy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_proxy: str, is_used: bool
) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"apiVersion": "v1", "items": [{"metadata": {"name": request.host}}]})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    (tmp_path / "config").write_text((CONFIG % "here").replace("127.0.0.1:1", "cluster.invalid"))
    async with TestServer(app) as proxy:
        monkeypatch.setenv("http_proxy", str(proxy.make_url("")))
        monkeypatch.setenv("no_proxy", no_proxy)
        async with connect(Target(kubeconfig=str(tmp_path / "config"))) as cluster:
            if is_used:
                assert [pod["metadata"]["name"] for pod in await cluster.list_pods("")] == ["cluster.invalid"]
            else:
                with pytest.raises(ClusterError, match="did not answer"):
                    await cluster.list_pods("")


async def test_texts_of_pods_and_events_reach_no_terminal_with_their_escapes(tmp_path: Path) -> None:
    pod = {"metadata": {"name": "x"}, "status": {"message": "\x1b[2Jgone\n\x1b]0;title\x07"}}

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"apiVersion": "v1", "kind": "PodList", "items": [pod]})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        file = tmp_path / "config"
        file.write_text((CONFIG % "here").replace("http://127.0.0.1:1", f"http://127.0.0.1:{server.port}"))
        async with connect(Target(kubeconfig=str(file))) as cluster:
            assert (await cluster.list_pods(""))[0]["status"]["message"] == "gone\n"
