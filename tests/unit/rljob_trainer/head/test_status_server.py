"""The driver's HTTP server."""

import asyncio
from urllib.parse import quote

import aiohttp
import pytest

from rljob_api.errors import UserError
from rljob_api.run.trajectories import RecentSamples
from rljob_api.wire.contract import PORT_DRIVER
from rljob_api.wire.driver_status import DriverStatus, HungPart
from rljob_api.wire.weights import PullReport, WeightManifest
from rljob_inputs.prompts import Prompt
from rljob_trainer.driver.reports import RecentSampleLog
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.episodes.types import Group
from rljob_trainer.head.status_server import StatusServer
from rljob_trainer.outages import Outages
from rljob_trainer.rollout.server import find_model
from rljob_trainer.worker.main import announce_leave
from tests.support.driver_harness import NETWORK, wait_until
from tests.support.episodes import episode
from tests.support.waiting import DEADLINE_SECONDS

ADDRESS = f"{NETWORK}.252.1"
URL = f"http://{ADDRESS}:{PORT_DRIVER}"
TOKEN = {"Authorization": "Bearer secret"}


def manifest(version, generation="g"):
    return WeightManifest(
        generation=generation, version=version, url="http://x", num_bytes=1, file_hash="s", checksum=f"c{version}"
    )


@pytest.fixture
async def board(monkeypatch):
    monkeypatch.setenv("RLJOB_TOKEN", "secret")
    board = StatusBoard()
    board.reports, board.hung, board.recent = [], [], RecentSampleLog()
    server = StatusServer(board, lambda: b"metric 1\n", board.reports.append, board.hung.append, board.recent)
    board.server = server
    await server.start(ADDRESS)
    yield board
    await server.close()


async def get(path, headers=TOKEN):
    async with aiohttp.ClientSession() as session, session.get(URL + path, headers=headers) as response:
        return response.status, await response.text()


@pytest.mark.parametrize(
    ("path", "status"),
    [("/status", 401), ("/model", 401), ("/samples", 401), ("/weights/current", 401), ("/nothing", 401)],
)
async def test_other_paths_require_the_token(board, path, status):
    assert (await get(path, {}))[0] == status
    assert (await get(path, {"Authorization": "Bearer other"}))[0] == status


async def test_token_of_any_bytes_is_refused(board):
    reader, writer = await asyncio.open_connection(ADDRESS, PORT_DRIVER)
    writer.write(b"GET /status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n")
    assert (await reader.readline()).split()[1] == b"401"
    writer.close()


async def test_rollouts_wait_until_the_head_has_found_the_version_of_the_model(board, monkeypatch):
    for name, value in {"RLJOB_HEAD": ADDRESS, "RLJOB_MODEL": "s3://bucket/model"}.items():
        monkeypatch.setenv(name, value)
    outages = Outages()
    asking = asyncio.create_task(find_model(outages.watch("the head")))
    await wait_until(lambda: outages._dependencies[0].failing_since is not None)
    assert "has not found the model yet" in outages._dependencies[0].last_error
    board.model = "s3+abc://bucket/model"
    assert await asking == "s3+abc://bucket/model"
    monkeypatch.setenv("RLJOB_MODEL", "hf://org/name")
    assert await find_model(outages.watch("the head")) == "hf://org/name", "the head is not asked"


async def test_rollouts_have_the_step_of_a_run_that_the_head_has_chosen(board, monkeypatch):
    for name, value in {"RLJOB_HEAD": ADDRESS, "RLJOB_MODEL": "/mnt/pvc/runs/sums", "RLJOB_MODEL_STEP": "last"}.items():
        monkeypatch.setenv(name, value)
    board.model = "/mnt/pvc/runs/sums/exports/step-000020"
    assert await find_model(Outages().watch("the head")) == "/mnt/pvc/runs/sums/exports/step-000020"


async def test_readiness_and_metrics_need_no_token(board):
    assert (await get("/rljob/ready", {}))[0] == 200
    assert await get("/metrics", {}) == (200, "metric 1\n")


async def test_samples_scored_last_are_served_from_a_number_on(board):
    for number in range(3):
        board.recent.record("train", 1, Group(0, Prompt(0, "p", [1])), episode(text="a", index=(0, 0, number)))
    for query, numbers in (("", [0, 1, 2]), ("?after=2", [2]), ("?after=3", [])):
        code, text = await get(f"/samples{query}")
        found = RecentSamples.model_validate_json(text)
        assert (code, found.next, [row.sample for row in found.samples]) == (200, 3, numbers)
    assert (await get("/samples?after=x"))[0] == 422


async def test_status_is_the_current_snapshot_of_the_board(board):
    board.update(step=3, phase="generate")
    waits = {"waits_for": "waits for 3 of 64 rewards"}
    with board.live(lambda status: status.model_copy(update=waits)):
        status = DriverStatus.model_validate_json((await get("/status"))[1])
    assert (status.step, status.waits_for) == (3, "waits for 3 of 64 rewards")


async def test_report_of_a_rollout_is_recorded_unless_it_is_unreadable(board):
    report = PullReport(replica="10.0.0.7", key="g:1", error="no space")
    for text in (report.model_dump_json(), '{"of": "another version"}'):
        assert (await get(f"/weights/current?report={quote(text)}"))[0] == 204
    assert board.reports == [report]


async def test_waiting_rollout_gets_the_next_weights_immediately(board):
    assert (await get("/weights/current"))[0] == 204, "nothing is published yet"
    await board.announce(manifest(1))
    assert WeightManifest.model_validate_json((await get("/weights/current"))[1]).version == 1
    assert (await get("/weights/current?after=g:1&timeout=0.05"))[0] == 204
    waiting = asyncio.create_task(get("/weights/current?after=g:1&timeout=30"))
    await asyncio.sleep(0)
    await board.announce(manifest(2))
    assert WeightManifest.model_validate_json((await asyncio.wait_for(waiting, DEADLINE_SECONDS))[1]).version == 2


async def test_rollouts_that_share_their_downloads_are_named_to_each_other(board):
    for peer in ("a:8200", "b:8200"):
        assert (await get(f"/weights/current?peer={peer}"))[0] == 204
    await board.announce(manifest(1))
    found = WeightManifest.model_validate_json((await get("/weights/current?peer=a:8200"))[1])
    assert found.peers == ["b:8200"]
    assert WeightManifest.model_validate_json((await get("/weights/current"))[1]).peers == []


async def test_lower_version_of_a_new_generation_is_new(board):
    await board.announce(manifest(5))
    await board.announce(manifest(2, "h"))
    found = WeightManifest.model_validate_json((await get("/weights/current?after=g:5"))[1])
    assert found.key == "h:2", "after a restart from a checkpoint the version goes back"


async def test_port_in_use_is_a_user_error(board):
    with pytest.raises(
        UserError,
        match=rf"cannot listen on {ADDRESS}:{PORT_DRIVER} \(driver\): .*; stop the process that holds the port",
    ):
        await StatusServer(StatusBoard(), lambda: b"").start(ADDRESS)


async def test_pod_that_leaves_gets_what_became_of_the_last_steps(board):
    def announce():
        return announce_leave(ADDRESS, {"RLJOB_TOKEN": "secret", "RLJOB_GRACE_SECONDS": "60"})

    async def leave():
        return "step 3 is saved"

    assert await asyncio.to_thread(announce) == "no trainer group runs"
    with board.live(lambda status: status, leave):
        assert await asyncio.to_thread(announce) == "step 3 is saved"
    assert await asyncio.to_thread(announce) == "no trainer group runs", "the driver has ended"
    await board.server.close()
    assert "refused" in await asyncio.to_thread(announce), "the head has ended before"


async def test_a_part_that_hangs_is_recorded_and_liveness_needs_no_token(board):
    part = HungPart(role="rollout", name="10.0.0.7:8000", seconds=70, limit_seconds=60)
    async with aiohttp.ClientSession(headers=TOKEN) as session:
        for text, status in ((part.model_dump_json(), 200), ('{"of": "another version"}', 422)):
            async with session.post(URL + "/hung", data=text) as response:
                assert response.status == status
    assert board.hung == [part]
    assert (await get("/rljob/live", {}))[0] == 200
