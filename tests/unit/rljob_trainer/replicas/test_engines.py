"""Changes of turns in all trainer Pods, against supervisors on loopback addresses."""

import asyncio
from types import SimpleNamespace

import pytest
from aiohttp import web

from rljob_api.errors import TransientError
from rljob_api.wire.contract import PORT_ENGINES
from rljob_api.wire.weights import EnginesReport, WeightManifest
from rljob_trainer.replicas import engines
from rljob_trainer.replicas.engines import TrainerEngines
from rljob_trainer.replicas.http import open_session
from tests.support.loopback import next_address
from tests.support.waiting import DEADLINE_SECONDS

MANIFEST = WeightManifest(generation="g", version=3, url="http://x", num_bytes=1, file_hash="s", checksum="c")


class Supervisor:
    """One Pod's. `answers`: what it says before it confirms."""

    def __init__(self, *answers):
        self.address, self.answers, self.asked, self.runner = next_address(), list(answers), [], None

    async def change(self, request):
        assert request.headers["Authorization"] == "Bearer token"
        self.asked.append(dict(request.query))
        if self.answers:
            return self.answers.pop(0)
        report = EnginesReport(num_running=2, num_restarts=1, num_bytes=100, seconds=0.5)
        return web.json_response(report.model_dump())

    async def start(self):
        app = web.Application()
        app.router.add_post("/rljob/engines", self.change)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, self.address, PORT_ENGINES).start()

    async def stop(self):
        await self.runner.cleanup()


@pytest.fixture
async def pods(tmp_path, monkeypatch):
    """Two Pods of a job, and what it takes to change their turns."""
    hosts = tmp_path / "hosts"
    monkeypatch.setenv("RLJOB_HOSTS_FILE", str(hosts))
    monkeypatch.setenv("RLJOB_ROLLOUT_SERVICE", "trainers")
    monkeypatch.setenv("RLJOB_TOKEN", "token")
    monkeypatch.setattr(engines, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(engines, "_MARGIN_SECONDS", 0)
    supervisors, waits = [Supervisor(), Supervisor()], []

    def list_pods(listed):
        hosts.write_text("".join(f"{each.address} trainers\n" for each in listed))

    async with open_session() as session, asyncio.timeout(DEADLINE_SECONDS):
        for each in supervisors:
            await each.start()
        list_pods(supervisors)

        def build(timeout=30):
            return TrainerEngines(2, timeout, session, report=waits.append)

        yield SimpleNamespace(supervisors=supervisors, build=build, list=list_pods, waits=waits)
        for each in supervisors:
            await each.stop()


async def test_all_pods_change_and_their_reports_add_up(pods):
    client = pods.build()
    expected = EnginesReport(num_running=4, num_restarts=2, num_bytes=200, seconds=0.5)
    assert await client.sleep() == expected
    assert await client.wake(MANIFEST) == expected
    for each in pods.supervisors:
        assert each.asked == [{"turn": "trainer"}, {"turn": "rollouts", "want": "g:3"}]
    assert not any(pods.waits)


async def test_pod_that_refuses_is_asked_again_and_the_others_are_not(pods):
    first, second = pods.supervisors
    first.answers = [web.Response(status=409, text="superseded"), web.Response(text="{}")]
    await pods.build().sleep()
    assert (len(first.asked), len(second.asked)) == (3, 1)
    assert f"{first.address}: 409 superseded" in pods.waits[0]
    assert pods.waits[-1] == ""


async def test_pods_that_are_not_listed_yet_are_waited_for(pods):
    first, second = pods.supervisors
    pods.list([first])
    change = asyncio.create_task(pods.build().sleep())
    while not pods.waits:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert pods.waits[0] == "rollouts in trainer Pods do not sleep yet: the service lists 1 of 2 Pods"
    pods.list([first, second])
    assert (await change).num_running == 4
    assert len(first.asked) == 1


async def test_pod_that_has_left_is_forgotten(pods):
    first, second = pods.supervisors
    third = Supervisor()
    pods.list([first, second, third])  # no server listens at the third one's address
    change = asyncio.create_task(pods.build().sleep())
    while not pods.waits:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert third.address in pods.waits[0]
    pods.list([first, second])
    assert (await change).num_running == 4


async def test_end_of_the_wait_names_the_pod_and_what_it_said(pods):
    first, _ = pods.supervisors
    first.answers = [web.Response(status=500, text="engine 0 starts") for _ in range(1000)]
    text = rf"after 0\.1 s, .* do not serve yet: {first.address}: 500 engine 0 starts"
    with pytest.raises(TransientError, match=text):
        await pods.build(timeout=0.1).wake(MANIFEST)


def test_bytes_of_served_models_add_up_if_there_are_any():
    report = EnginesReport(num_running=2, num_restarts=1, num_bytes=100, seconds=0.5)
    assert engines.add_reports([report, report]).model_bytes is None
    assert engines.add_reports([report.model_copy(update={"model_bytes": 5})] * 2).model_bytes == 10
