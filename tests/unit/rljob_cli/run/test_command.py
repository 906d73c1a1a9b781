"""A run on this machine: its rewards are unknown if one does not answer, what Ctrl-C does, and its sessions."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.job_sections import TrainingService
from rljob_api.run.sessions import read_sessions
from rljob_api.wire.contract import PORT_DRIVER, PORT_SERVICE
from rljob_cli.run.command import Run, SessionLog, _find_token, build_rewards, fetch_metrics, serve_job
from rljob_cli.run.reward_rows import RewardMetrics
from tests.support.loopback import next_address
from tests.support.records import container_failure
from tests.support.waiting import DEADLINE_SECONDS

HEAD, FIRST, SECOND, SILENT = (next_address() for _ in range(4))
SERVER = 'rljob_reward_slots{reward="correct"} 4.0\nrljob_reward_slots_in_use{lane="train",reward="correct"} 3.0\n'
DRIVER = (
    'rljob_reward_invalid_total{lane="train",reason="timeout",reward="correct"} 2.0\n'
    'rljob_reward_waiting{reward="correct"} 5.0\n'
)
JOB = RLJob.model_validate(
    {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "job"},
        "spec": {
            "model": {"source": "/m"},
            "data": {"train": {"source": "/d"}},
            "rewards": [{"name": "correct", "slots": 4, "function": {"file": "/r.py"}}],
        },
        "status": {"roles": [{"name": "reward-correct", "desired": 2, "ready": 0}]},
    }
)


def ready_pod(address: str, **labels: str) -> dict[str, Any]:
    named = {f"rljob.dev/{name}": value for name, value in labels.items()}
    status = {"phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": address, "labels": named}, "status": status}


PODS = [ready_pod(HEAD, role="head"), *(ready_pod(a, role="reward", reward="correct") for a in (FIRST, SECOND))]


async def serve(address: str, port: int, text: str) -> web.AppRunner:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=text)

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, address, port).start()
    return runner


async def test_row_sums_the_servers_and_is_unknown_when_one_does_not_answer() -> None:
    runners = [await serve(HEAD, PORT_DRIVER, DRIVER)]
    runners += [await serve(address, PORT_SERVICE, SERVER) for address in (FIRST, SECOND)]
    try:
        async with aiohttp.ClientSession() as session:
            known = await fetch_metrics(session, PODS, int)
            partly = await fetch_metrics(session, [*PODS, ready_pod(SILENT, role="reward", reward="correct")], int)
    finally:
        for runner in runners:
            await runner.cleanup()
    [row] = build_rewards(JOB, PODS, known)
    assert (row.kind, row.ready, row.replicas) == ("function", 2, 2)
    assert (row.slots_wanted, row.slots_given, row.slots_in_use) == (None, 8, 6)
    assert (row.waiting, row.invalid) == (5, {"timeout": 2})
    [row] = build_rewards(JOB, PODS, partly)
    assert (row.slots_in_use, row.waiting, row.invalid) == (None, None, {"timeout": 2})


def test_row_without_metrics_has_only_the_numbers_of_the_pods() -> None:
    [row] = build_rewards(JOB, PODS, RewardMetrics())
    assert (row.ready, row.replicas, row.slots_given) == (2, 2, 8)
    assert (row.slots_in_use, row.waiting, row.latency_p95_seconds, row.invalid) == (None, None, None, None)


class Interrupted:
    """A run whose Pods end when they are killed, after two signals. `said`: what a user reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr("rljob_cli.run.command._SAY_SECONDS", 0.0)
        self.said: list[str] = []
        self.killed = asyncio.Event()
        output: Any = SimpleNamespace(say=self._say)
        network: Any = SimpleNamespace(environment={})
        self.run = Run(JOB, tmp_path, network, {}, output)
        self.run._cluster = cast(Any, SimpleNamespace(stop=self._stop, kubelet=SimpleNamespace(kill=self.killed.set)))

    def _say(self, text: str) -> None:
        self.said.append(text)
        if text.startswith("waits"):
            self.run._on_signal()

    async def _stop(self, grace_seconds: float, first: tuple[str, ...]) -> None:
        await self.killed.wait()


async def test_ctrl_c_waits_and_says_how_long_and_a_second_one_kills(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    interrupted = Interrupted(monkeypatch, tmp_path)
    interrupted.run._on_signal()
    assert not interrupted.killed.is_set()
    await asyncio.wait_for(interrupted.run._stop(), DEADLINE_SECONDS)
    assert interrupted.killed.is_set()
    assert interrupted.said == [
        "saving the last steps, then stopping (press again to end at once, without them)",
        "waits for the checkpoint of the last steps since 0 s (press again: lose it)",
        "killing all processes",
    ]


def test_sessions_of_a_folder_are_kept_in_order(tmp_path: Path) -> None:
    SessionLog(tmp_path, 0).update(seconds=10.0, phase="Interrupted", last_step=3, restarts={"head": 1})
    log = SessionLog(tmp_path, 2)
    log.update(seconds=5.0, last_step=2)
    log.update(seconds=7.5, last_step=4, restarts={"head": 2})
    first, second = read_sessions(tmp_path)
    assert (first.phase, first.last_step, first.restarts) == ("Interrupted", 3, {"head": 1})
    assert (second.after_step, second.phase, second.last_step, second.seconds) == (2, "", 4, 7.5)
    assert log.sessions == [first, second]


def test_session_has_the_versions_of_this_environment(tmp_path: Path) -> None:
    SessionLog(tmp_path, 0).update(seconds=0.0, last_step=0)
    [session] = read_sessions(tmp_path)
    assert {"python", "rljob", "torch"} <= session.versions.keys()


def test_failures_of_a_crash_loop_are_bounded(tmp_path: Path) -> None:
    failures = [container_failure(exit_code=code) for code in range(1000)]
    SessionLog(tmp_path, 0).update(seconds=1.0, last_step=0, failures=failures)
    [session] = read_sessions(tmp_path)
    assert [failure.exit_code for failure in session.failures] == list(range(50))


def test_a_service_begins_only_where_its_port_is_free(tmp_path):
    job = JOB.with_spec(service=TrainingService(), given_data=None, rewards=[])
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = ("127.0.0.1", server.getsockname()[1])
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{address[1]}: .*; pass another --port"):
            serve_job(job, tmp_path, cast(Any, None), {}, cast(Any, None), address)


def test_keys_stay_when_the_service_starts_again(tmp_path):
    first = _find_token(tmp_path / "service.json")
    assert _find_token(tmp_path / "service.json") == first
    assert (tmp_path / "service.json").stat().st_mode & 0o777 == 0o600
