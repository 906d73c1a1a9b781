"""The client of one reward server: it waits for a judge's endpoint that has answered before."""

import contextlib

import pytest
from aiohttp import web

from rljob_api.manifest.job import RLJob
from rljob_api.wire.scores import ScoreRequest
from rljob_cli.check import score_client

SPEC = {
    "model": {"source": "/m"},
    "data": {"train": {"source": "/t.jsonl"}},
    "rewards": [{"name": "r", "function": {"inline": "x"}, "slots": 1}],
}
AWAY = {"valid": False, "reason": "unreachable", "message": "the judge's endpoint failed; last: 503"}
FINE = {"valid": True, "score": 1.0}


@contextlib.asynccontextmanager
async def serve(answers):
    """Serve `answers`, one after the other, and then the last one."""

    async def score(request):
        body = await request.json()
        return web.json_response({"id": body["id"], **(answers.pop(0) if len(answers) > 1 else answers[0])})

    app = web.Application()
    app.add_routes([web.post("/v1/score", score)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


async def score(answers, outage_seconds=60):
    job = RLJob.model_validate({"metadata": {"name": "j"}, "spec": {**SPEC, "outageSeconds": outage_seconds}})
    groups = [[ScoreRequest(id=f"s{i}", prompt="p", completion="c")] for i in range(2)]
    said = []
    async with serve(answers) as url:
        found = await score_client.score_all(url, "token", job, job.spec.rewards[0], groups, said.append)
    return [result.reason for [result] in found], said


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(score_client, "_RETRY_SECONDS", 0.01)


async def test_endpoint_that_has_answered_is_waited_for_on_the_console():
    reasons, said = await score([FINE, AWAY, AWAY, FINE])
    assert reasons == [None, None]
    assert said == ["reward r waits: the judge's endpoint failed; last: 503"] * 2


async def test_endpoint_that_never_answered_is_reported_at_once():
    assert await score([AWAY]) == (["unreachable", "unreachable"], [])


async def test_wait_ends_after_outage_seconds():
    reasons, said = await score([FINE, AWAY], outage_seconds=0)
    assert (reasons, said) == ([None, "unreachable"], [])
