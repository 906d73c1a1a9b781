"""`rljob ui` as a program: the page, its samples by page, and events while the folder grows and a head answers."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from rljob_api.run.folder import trajectory_file
from rljob_api.run.metrics import append_records
from rljob_api.run.trajectories import RecentSamples, ResultRow
from rljob_api.wire.driver_status import DriverStatus
from rljob_cli.run.endpoint import Endpoint, write_endpoint
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import Group, ScoredResult
from rljob_trainer.history.trajectory_log import write_file
from tests.paths import DATA
from tests.support.episodes import episode
from tests.support.records import result_row, sample_row, step_record
from tests.support.waiting import DEADLINE_SECONDS

RLJOB = Path(sys.executable).with_name("rljob")


@pytest.fixture
async def ui(tmp_path):
    """The address of a page about two runs, and the folder of the runs."""
    for name in ("letters", "other"):
        shutil.copytree(DATA / "report", tmp_path / name)
    process = await asyncio.create_subprocess_exec(RLJOB, "ui", tmp_path, stdout=asyncio.subprocess.PIPE)
    url = (await asyncio.wait_for(process.stdout.readline(), DEADLINE_SECONDS)).decode().strip()
    yield url, tmp_path
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), DEADLINE_SECONDS) == 0


class Stream:
    """One connection to the events."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response, self.cursor = response, ""

    async def next(self, kind: str) -> dict:
        """Return the data of the next event of a kind."""
        found = ""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                line = (await self._response.content.readline()).decode().rstrip("\n")
                name, _, value = line.partition(": ")
                if name == "event":
                    found = value
                elif name == "id":
                    self.cursor = value
                elif name == "data" and found == kind:
                    return json.loads(value)


async def test_steps_waits_and_samples_arrive_and_a_reconnect_loses_nothing(ui, monkeypatch):
    url, runs = ui
    samples = [sample_row(step=9, sample=0, rewards=[result_row(name="judge", reason="timeout", latency_seconds=90.0)])]

    async def status(request):
        assert request.headers["Authorization"] == "Bearer secret"
        return web.Response(text=DriverStatus(step=8, phase="score", waits_for="waits for judge").model_dump_json())

    async def scored(request):
        after = int(request.query["after"])
        return web.Response(text=RecentSamples(feed="f", next=len(samples), samples=samples[after:]).model_dump_json())

    app = web.Application()
    app.router.add_get("/status", status)
    app.router.add_get("/samples", scored)
    async with TestServer(app) as head, aiohttp.ClientSession() as session:
        async with session.get(f"{url}?run=letters") as response:
            page = await response.text()
        cursor = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])["live"]["cursor"]
        events = f"{url}events?run=letters&after={cursor}"
        async with session.get(events) as response:
            stream = Stream(response)
            assert await stream.next("status") == {"is_running": False, "rows": []}
            append_records(runs / "letters/metrics.jsonl", [step_record(9, reward=0.5, time=2e9)])
            records = await stream.next("records")
            assert records["line"] == "step 9, reward 0.500"
            assert records["charts"], "their new points"
            write_endpoint(runs / "letters", Endpoint(str(head.make_url("")).rstrip("/"), "secret"))
            [sample] = (await stream.next("samples"))["samples"]
            assert (sample["rewards"][0]["reason"], sample["rewards"][0]["latency"]) == ("timeout", 90.0)
            assert (await stream.next("status"))["rows"] == [["driver", "score: waits for judge"]]
        # Meanwhile the page is not connected.
        append_records(runs / "letters/metrics.jsonl", [step_record(10, time=2e9 + 1)])
        samples.append(sample_row(step=10, sample=1))
        async with session.get(events, headers={"Last-Event-ID": stream.cursor}) as response:
            stream = Stream(response)
            assert (await stream.next("records"))["line"] == "step 10"
            assert [each["sample"] for each in (await stream.next("samples"))["samples"]] == [1]


async def test_samples_come_page_by_page_filtered_and_sorted(ui):
    url, _ = ui
    async with aiohttp.ClientSession() as session:

        async def get(query):
            async with session.get(f"{url}samples?run=letters&{query}") as response:
                assert response.status == 200, await response.text()
                return await response.json()

        first, second = await get("order=slow&limit=5"), await get("order=slow&limit=5&offset=5")
        assert (first["total"], first["matching"], len(first["samples"])) == (152, 152, 5)
        slowest = [
            max(each["latency"] for each in sample["rewards"]) for sample in first["samples"] + second["samples"]
        ]
        assert slowest == sorted(slowest, reverse=True)
        failed = await get("reason=exception")
        assert 0 < failed["matching"] < 152
        assert all(any(each["reason"] for each in sample["rewards"]) for sample in failed["samples"])
        assert (await get("step=3&lane=train&limit=9999"))["matching"] == 16
        assert len((await get("limit=9999"))["samples"]) == 100, "a page is bounded"
        assert (await get("text=no%20sample%20has%20this"))["matching"] == 0


async def test_page_is_read_only_and_only_for_those_with_its_address(ui):
    url, _ = ui
    async with aiohttp.ClientSession() as session:
        for method, address, status in (
            ("GET", f"{url}?run=letters&with=other", 200),
            ("GET", f"{url}?run=../letters", 404),
            ("GET", url.rsplit("/", 2)[0] + "/", 404),
            ("GET", f"{url}samples?run=letters&order=shell", 400),
            ("POST", url, 405),
            ("DELETE", f"{url}samples", 405),
        ):
            async with session.request(method, address) as response:
                assert (address, response.status) == (address, status)


async def test_no_answer_has_a_secret_of_the_job(ui):
    url, runs = ui
    secret = 'top"secret&value'
    job = yaml.safe_load((runs / "letters/job.yaml").read_text())
    job["spec"]["head"]["env"] = {"API_KEY": secret}
    (runs / "letters/job.yaml").write_text(yaml.safe_dump(job))
    call = json.dumps({"key": secret})
    judged = {"valid": False, "reason": "exception", "message": f"401 for {secret}"}
    failed = ResultRow(name="judge", **judged)
    samples = [sample_row(prompt=f"use {secret}", completion=f"call({call})", rewards=[failed])]
    waits = f"waits for https://user:password1@judge and {secret}"

    async def status(_):
        return web.Response(text=DriverStatus(step=8, phase="score", waits_for=waits).model_dump_json())

    async def scored(_):
        return web.Response(text=RecentSamples(feed="f", next=1, samples=samples).model_dump_json())

    app = web.Application()
    app.router.add_get("/status", status)
    app.router.add_get("/samples", scored)
    answer = episode(
        text=f"call({call})", index=(0, 0, 0), results={"judge": ScoredResult(id="x", **judged)}, score=None
    )
    path = trajectory_file(runs / "letters", 99, "train")
    write_file(path, "train", 99, [Group(0, Prompt(0, f"use {secret}", [1]), [answer])])
    async with TestServer(app) as head, aiohttp.ClientSession() as session:
        write_endpoint(runs / "letters", Endpoint(str(head.make_url("")).rstrip("/"), "secret"))
        async with session.get(f"{url}samples?run=letters&step=99&lane=train") as response:
            [stored] = (await response.json())["samples"]
        async with session.get(f"{url}events?run=letters") as response:
            stream = Stream(response)
            [recent] = (await stream.next("samples"))["samples"]
            assert (await stream.next("status"))["rows"] == [
                ["driver", "score: waits for https://(hidden)@judge and (hidden)"]
            ]
    for sample in (stored, recent):
        assert (sample["prompt"], sample["completion"]) == ("use (hidden)", 'call({"key": "(hidden)"})')
        assert sample["rewards"][0]["message"] == "401 for (hidden)"


async def test_runs_that_are_deleted_or_unreadable_meanwhile_are_no_error_of_the_server(ui):
    url, runs = ui
    async with aiohttp.ClientSession() as session:

        async def get(query):
            async with session.get(url + query) as response:
                return response.status, await response.text()

        (runs / "letters").rename(runs / "letters.old")  # as with --fresh
        assert (await get("?run=letters"))[0] == 404
        assert (await get("?run=letters.old"))[0] == 200
        for path in (runs / "other/trajectories").iterdir():
            path.write_bytes(b"no parquet")
        code, text = await get("?run=other")
        assert (code, "cannot be read" in text) == (200, True)
        shutil.rmtree(runs / "letters.old")
        shutil.rmtree(runs / "other")
        assert await get("") == (404, "no run is left: their folders were deleted\n")
