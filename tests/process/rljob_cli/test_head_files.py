"""The files of a job in a cluster: the head's own server, reached as through the API server's port-forward."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import aiohttp
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from rljob_api.errors import TransientError, UserError
from rljob_api.run.files import ModelFiles, RunFile
from rljob_api.wire.contract import PORT_RUN_FILES, RUN_ROUTE
from rljob_cli.cluster import head_files
from rljob_cli.cluster.client import PROTOCOL, ClusterError
from rljob_cli.cluster.head_files import FolderCopy, HeadPorts, copy_run
from rljob_cli.export.from_cluster import use_model
from rljob_trainer import reader
from rljob_trainer.run_folder.server import RunFileServer
from tests.paths import DATA
from tests.support.loopback import next_address

TOKEN = "secret"


@pytest.fixture
def head(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(DATA / "report", run)
    (tmp_path / "to").mkdir()
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
        self.spec, self.pods = {}, set()
        self.refusal: ClusterError | None = None

    async def get_job(self, name):
        return {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": name}, "spec": self.spec}

    async def list_pods(self, selector):
        return [{"metadata": {"name": "sums-head-1"}, "status": {"phase": self.phase}}]

    async def find(self, resource, name):
        assert (resource.kind, name) == ("Secret", "sums-token")
        return {"data": {"token": "c2VjcmV0"}}

    @contextlib.asynccontextmanager
    async def open_port(self, pod, port):
        self.connections += 1
        self.pods.add(pod)
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
            ("checkpoints/step-000004/driver.json", TOKEN, 200),
            ("checkpoints/step-000004/driver.json", "other", 401),
            ("checkpoints/step-000004/..%2f..%2f.run-id", TOKEN, 403),
            ("export/..%2f.run-id", TOKEN, 403),
            ("?step=last", "other", 401),
            ("?step=..", TOKEN, 400),
            ("?step=3", TOKEN, 404),
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
        cluster.spec = {"checkpoint": {"storage": "s3://bucket/runs/"}}
        with pytest.raises(Exception, match=r"no head runs .*; s3://bucket/runs/sums has its checkpoints and exports"):
            await copy_run(cluster, "sums", tmp_path, lambda file: True)


async def test_the_export_of_a_step_is_copied_or_else_its_checkpoint(head, tmp_path):
    (head.run / "checkpoints/step-000004/trainer/__0_0.distcp").write_bytes(bytes(9))
    (head.run / "checkpoints/step-000004/COMPLETE").write_text("{}")
    async with aiohttp.ClientSession() as session:
        checkpoint = await FolderCopy(session, HeadPorts("", head.url, TOKEN), tmp_path / "a").copy_model("last")
        export = head.run / "exports/step-000004"
        (export / "adapter").mkdir(parents=True)
        (export / "config.json").write_text("{}")
        (export / "adapter/adapter_config.json").write_text("{}")
        exported = await FolderCopy(session, HeadPorts("", head.url, TOKEN), tmp_path / "b").copy_model("4")
        with pytest.raises(UserError, match=r"^the run has no checkpoint of step 3; it has 4$"):
            await FolderCopy(session, HeadPorts("", head.url, TOKEN), tmp_path / "c").copy_model("3")
    assert (checkpoint.step, checkpoint.is_export) == (4, False)
    folder = "checkpoints/step-000004"
    assert names(tmp_path / "a") == {f"{folder}/{n}" for n in ("COMPLETE", "driver.json", "trainer/__0_0.distcp")}
    assert (exported.step, exported.folder, exported.is_export) == (4, "exports/step-000004", True)
    assert names(tmp_path / "b") == {f"{exported.folder}/{n}" for n in ("config.json", "adapter/adapter_config.json")}


@pytest.mark.parametrize("name", ["../outside", "checkpoints/step-000004/../../../outside", "exports/step-000005/x"])
async def test_a_head_chooses_no_place_of_a_model_outside_of_its_folder(tmp_path, name):
    found = ModelFiles(step=4, folder="exports/step-000004", files=[RunFile(name=name, num_bytes=1, modified=1)])

    async def answer(_):
        return web.json_response(found.model_dump())

    app = web.Application()
    app.router.add_get(f"{RUN_ROUTE}/{{path:.*}}", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        head = HeadPorts("", str(server.make_url("")).rstrip("/"), TOKEN)
        with pytest.raises(TransientError, match=r"names .* as a file of the model"):
            await FolderCopy(session, head, tmp_path / "in" / "copy").copy_model("4")
    assert names(tmp_path) == set()


@pytest.mark.parametrize("folder", ["../outside", "/home/user", "export/../../..", ".", "exports/step-000004"])
async def test_a_head_chooses_no_folder_that_has_no_files_of_a_model(tmp_path, folder):
    """The folder is renamed to what --to names."""
    found = ModelFiles(step=4, folder=folder, files=[])

    async def answer(_):
        return web.json_response(found.model_dump())

    app = web.Application()
    app.router.add_get(f"{RUN_ROUTE}/{{path:.*}}", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        head = HeadPorts("", str(server.make_url("")).rstrip("/"), TOKEN)
        with pytest.raises(TransientError, match=r"names .* as the folder of the model"):
            await FolderCopy(session, head, tmp_path / "copy").copy_model("4")


async def test_exported_model_of_a_job_is_used_from_a_copy_that_is_deleted(head, tmp_path):
    export = head.run / "exports/step-000004"
    export.mkdir(parents=True)
    (export / "config.json").write_text("{}")
    seen = []

    def use(copy, step, exported):
        seen.append((step, exported.relative_to(copy).as_posix(), names(copy)))
        return 3

    async with connect(head) as cluster:
        assert await use_model(cluster, "sums", "4", "--step 4", tmp_path / "to", use) == 3
        with pytest.raises(UserError, match=r"^--step 7: the run has no checkpoint of step 7"):
            await use_model(cluster, "sums", "7", "--step 7", tmp_path / "to", use)
    [(step, folder, files)] = seen
    assert (step, folder) == (4, "exports/step-000004")
    assert files == {"job.yaml", "metrics.jsonl", "exports/step-000004/config.json"}
    assert list((tmp_path / "to").iterdir()) == []


async def test_head_does_not_choose_the_base_model_of_a_checkpoint_nor_its_code(head, tmp_path):
    (head.run / "checkpoints/step-000004/COMPLETE").write_text("{}")
    (head.run / "job.yaml").write_text("spec: {model: {source: 'hf://else/where', trustRemoteCode: true}}")
    seen = []

    def use(copy, step, exported):
        seen.append((step, exported, yaml.safe_load((copy / "job.yaml").read_text())["spec"]))
        return 0

    async with connect(head) as cluster:
        cluster.spec = {"model": {"source": "hf://org/base"}}
        assert await use_model(cluster, "sums", "4", "--step 4", tmp_path / "to", use) == 0
    assert seen == [(4, None, {"model": {"source": "hf://org/base"}})]


async def test_files_of_a_job_that_has_ended_are_read_from_its_claim(head, tmp_path, monkeypatch):
    started = []

    @contextlib.asynccontextmanager
    async def reader_pod(cluster, job, last):
        assert last["metadata"]["name"] == "sums-head-1"
        started.append(job["metadata"]["name"])
        yield "sums-reader-1"
        started.append("deleted")

    monkeypatch.setattr(head_files, "reader_pod", reader_pod)
    copy = tmp_path / "copy"
    copy.mkdir()
    async with connect(head) as cluster:
        cluster.phase, cluster.spec = "Succeeded", {"checkpoint": {"persistentVolumeClaim": {"claimName": "runs"}}}
        await copy_run(cluster, "sums", copy, lambda file: False)
        assert cluster.pods == {"sums-reader-1"}
    assert names(copy) == {"job.yaml", "metrics.jsonl"}
    assert started == ["sums", "deleted"]


def test_reader_serves_the_run_to_its_own_pod_and_takes_nothing(head, monkeypatch):
    address = next_address()
    monkeypatch.setattr(reader, "_HOST", address)
    variables = {"RLJOB_RUN_DIR": head.run, "RLJOB_TOKEN": TOKEN, "RLJOB_JOB_FILE": head.run / "job.yaml"}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    server, headers = reader.serve(), {"Authorization": f"Bearer {TOKEN}"}
    try:
        target = f"http://{address}:{PORT_RUN_FILES}{RUN_ROUTE}/checkpoints/step-000004/trainer/x"
        with pytest.raises(HTTPError, match="405"):
            urlopen(Request(target, data=b"x", headers=headers, method="PUT"))
        with urlopen(Request(f"{target.partition('checkpoints')[0]}job.yaml", headers=headers)) as answer:
            assert answer.read() == (head.run / "job.yaml").read_bytes()
    finally:
        server.close()
    (head.run / ".run-id").unlink()
    with pytest.raises(UserError, match="has no run: the job has not started with this claim"):
        reader.serve()


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
