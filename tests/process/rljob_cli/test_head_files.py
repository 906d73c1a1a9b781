"""The files of a job in a cluster: the head's own server, reached as through the API server's port-forward."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from types import SimpleNamespace
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rljob_api.errors import TransientError
from rljob_api.run.files import RunFile
from rljob_api.wire.contract import PORT_RUN_FILES, RUN_ROUTE
from rljob_cli.cluster.client import ClusterError
from rljob_cli.cluster.head_files import FolderCopy, HeadPorts, copy_run
from rljob_cli.cluster.pod_exec import PROTOCOL
from rljob_trainer.run_folder.server import RunFileServer
from tests.paths import DATA
from tests.support.loopback import next_address

TOKEN = "secret"


@pytest.fixture
def head(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(DATA / "report", run)
    (run / "checkpoints/step-000004/trainer").mkdir(parents=True)
    (run / "checkpoints/step-000004/driver.json").write_text("{}")
    server = RunFileServer(run, next_address(), TOKEN)
    yield SimpleNamespace(run=run, url=server.folder.url.removesuffix(RUN_ROUTE))
    server.close()


class Kubelet:
    """Connects a WebSocket to a port, as the kubelet does: both channels begin with the port."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=(PROTOCOL,))
        await socket.prepare(request)
        for channel in range(2):
            await socket.send_bytes(bytes([channel]) + PORT_RUN_FILES.to_bytes(2, "little"))
        reader, writer = await asyncio.open_connection(self._host, self._port)

        async def send() -> None:
            while chunk := await reader.read(7_000):
                await socket.send_bytes(b"\x00" + chunk)

        sending = asyncio.create_task(send())
        async for message in socket:
            writer.write(message.data[1:])
        sending.cancel()
        writer.close()
        return socket


class FakeCluster:
    """A job `sums` whose head's port-forward is a kubelet's."""

    namespace = "team"

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url
        self.phase, self.connections = "Running", 0
        self.refusal: ClusterError | None = None

    async def get_job(self, name):
        return {"metadata": {"name": name}}

    async def list_pods(self, selector):
        return [{"metadata": {"name": "sums-head-1"}, "status": {"phase": self.phase}}]

    async def find(self, resource, name):
        assert (resource.kind, name) == ("Secret", "sums-token")
        return {"data": {"token": "c2VjcmV0"}}

    @contextlib.asynccontextmanager
    async def open_port(self, pod, port):
        self.connections += 1
        if self.refusal:
            raise self.refusal
        async with self._session.ws_connect(self._url, protocols=(PROTOCOL,)) as socket:
            yield socket


@contextlib.asynccontextmanager
async def connect(head):
    url, app = urlsplit(head.url), web.Application()
    app.router.add_get("/forward", Kubelet(url.hostname, url.port).handle)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        yield FakeCluster(session, server.make_url("/forward"))


def names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


async def test_a_copy_through_the_port_forward_has_what_reports_read(head, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    async with connect(head) as cluster:
        await copy_run(cluster, "sums", copy, lambda file: file.lane == "train")
        assert cluster.connections >= 1
    logs = {f"trajectories/step-{step:06d}.train.parquet" for step in range(1, 9)}
    assert names(copy) == {"job.yaml", "metrics.jsonl", *logs}
    for name in names(copy):
        assert (copy / name).read_bytes() == (head.run / name).read_bytes()


async def test_a_copy_follows_what_changes_and_what_is_deleted(head, tmp_path):
    copy = tmp_path / "copy"
    async with aiohttp.ClientSession() as session:
        mirror = FolderCopy(session, HeadPorts("", head.url, TOKEN), copy)
        await mirror.refresh()
        (copy / "job.yaml").write_text("mine")
        with (head.run / "metrics.jsonl").open("a") as file:
            file.write("{}\n")
        (head.run / "trajectories/step-000001.train.parquet").unlink()
        await mirror.refresh()
    assert (copy / "metrics.jsonl").read_text().endswith("{}\n")
    assert not (copy / "trajectories/step-000001.train.parquet").exists()
    assert (copy / "job.yaml").read_text() == "mine", "what has not changed is not read again"


async def test_nothing_else_is_served_and_nothing_without_the_token(head):
    async with aiohttp.ClientSession() as session:
        for name, token, status in (
            ("metrics.jsonl", TOKEN, 200),
            ("metrics.jsonl", "other", 401),
            ("", "other", 401),
            (".run-id", TOKEN, 403),
            ("checkpoints/step-000004/driver.json", TOKEN, 403),
            ("trajectories/..%2fsessions.json", TOKEN, 403),
        ):
            headers = {"Authorization": f"Bearer {token}"}
            async with session.get(f"{head.url}{RUN_ROUTE}/{name}", headers=headers) as response:
                assert (name, response.status) == (name, status)
        copy = FolderCopy(session, HeadPorts("", head.url, "other"), head.run / "none")
        with pytest.raises(TransientError, match="does not serve the run's files"):
            await copy.refresh()


async def test_a_job_without_a_head_says_so(head, tmp_path):
    async with connect(head) as cluster:
        cluster.phase = "Succeeded"
        with pytest.raises(Exception, match="RLJob team/sums: no head runs that would serve the run's files"):
            await copy_run(cluster, "sums", tmp_path, lambda file: True)


async def test_a_head_chooses_no_path_outside_of_the_copy(tmp_path):
    names_of_head = ["../outside", "trajectories/../../outside", "/tmp/outside", "trajectories/x.sh", ".bashrc"]
    listed = [RunFile(name=name, num_bytes=1, modified=1) for name in ["job.yaml", *names_of_head]]

    async def answer(request):
        if request.match_info["path"]:
            return web.Response(text="spec: {}")
        return web.json_response([file.model_dump() for file in listed])

    app = web.Application()
    app.router.add_get(f"{RUN_ROUTE}/{{path:.*}}", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        head = HeadPorts("", str(server.make_url("")).rstrip("/"), TOKEN)
        await FolderCopy(session, head, tmp_path / "in" / "copy").refresh()
    assert names(tmp_path) == {"in/copy/job.yaml"}


async def test_a_viewer_without_rights_is_told_which_are_missing(head, tmp_path):
    async with connect(head) as cluster:
        cluster.refusal = ClusterError("create pods/portforward: forbidden")
        with pytest.raises(ClusterError, match=r"RLJob team/sums: .*: create pods/portforward: forbidden"):
            await copy_run(cluster, "sums", tmp_path, lambda file: True)
