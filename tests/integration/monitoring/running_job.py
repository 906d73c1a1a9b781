"""A running job for Prometheus to scrape, with real reward servers and the operator's metrics.

Real: the driver with its loop, collection, retries and /metrics; two reward servers with worker processes, whose
functions raise, crash, abstain and are slow for some samples; two judge servers with a cache, which share the limits of
an endpoint that sometimes rejects or fails; the operator's metrics server. Fakes (those of the unit tests): the
rollouts, the trainer group, the endpoint; and the exporters of vLLM and of GPUs. This module makes up the operator's
decisions, and conversations.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import yaml
from aiohttp import web

from rljob_api.manifest.job import RLJob
from rljob_api.wire.calls import CallResult
from rljob_api.wire.contract import ENV_PEERS, ENV_POD_IP, ENV_TOKEN, PORT_DRIVER, PORT_SERVICE
from rljob_core.backend import JobKey
from rljob_core.loop.workqueue import WorkQueue
from rljob_operator.health import Health
from rljob_operator.metrics import OperatorMetrics
from rljob_trainer.episodes.types import ContextBreak, Episode, EpisodeEnd, EpisodeFailure, ToolCall, Turn
from rljob_trainer.head.status_server import StatusServer
from tests.support import driver_harness, fake_endpoint
from tests.support.waiting import DEADLINE_SECONDS

_TOKEN = "token"
NETWORK = os.environ.get("RLJOB_TEST_MONITORING", "127.37.1")
"""First three numbers of all addresses."""
OPERATOR, PROMETHEUS, HEAD = f"{NETWORK}.1", f"{NETWORK}.2", f"{NETWORK}.3"
ENDPOINT = f"{NETWORK}.20"
REWARDS = {"correct": [f"{NETWORK}.11"], "style": [f"{NETWORK}.12"], "helpful": [f"{NETWORK}.13", f"{NETWORK}.14"]}
"""Addresses of the replicas of each reward."""
PROMPT_TOKENS = 70
"""Per call that succeeds."""

_CORRECT = """
import hashlib, os, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    draw = int(hashlib.sha256(solution_str.encode()).hexdigest(), 16) % 100
    time.sleep(0.05 + draw / 200)
    if draw < 6:
        raise ValueError("cannot read the answer")
    if draw < 9:
        return None
    if draw < 12:
        return float("nan")
    if draw < 14:
        os._exit(3)
    value = int(solution_str.split()[0]) / 100
    found = {"score": float(value > 0.5), "closeness": value}
    return found | {"steps": float(len(solution_str.split()))} if draw % 2 else found
"""
_STYLE = """
import time

def reward(prompts, completions, **columns):
    time.sleep(0.02)
    return [1.0 - 0.2 * len(completion.split()) for completion in completions]
"""
_SPECS: list[dict[str, Any]] = [
    {
        "name": "correct",
        "function": {"inline": _CORRECT},
        "slots": 4,
        "timeoutSeconds": 20,
        "failurePolicy": {"retries": 1},
    },
    {"name": "style", "weight": 0.2, "function": {"inline": _STYLE}, "slots": 2, "timeoutSeconds": 20},
    {
        "name": "helpful",
        "weight": 0.5,
        "slots": 4,
        "timeoutSeconds": 60,
        "cache": True,
        "hedging": {},
        "judge": {
            "endpoint": {
                "url": f"http://{ENDPOINT}:9000/v1",
                "model": "played",
                "limits": {"requestsPerMinute": 600, "concurrency": 6},
            },
            "template": "Rate: {{ completion }}",
            "parser": {"regex": r"Score: (\S+)"},
        },
    },
]


async def _judge(body: dict[str, Any], number: int) -> web.Response:
    """Respond as the endpoint: some calls exceed its rate limit, some fail."""
    if number % 30 == 17:
        return web.Response(status=429, headers={"Retry-After": "1"})
    if number % 30 == 29:
        return web.Response(status=503)
    await asyncio.sleep(0.1)
    asked = body["messages"][-1]["content"]
    answer = {"message": {"content": f"Score: {len(asked.split()) / 10}"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 3}
    return web.json_response({"choices": [answer], "usage": usage})


_EXPORTER_PORT = 9400
_EXPORTED = """
vllm:num_requests_running 7
vllm:num_requests_waiting 1
vllm:kv_cache_usage_perc 0.4
vllm:generation_tokens_total 100
vllm:prompt_tokens_total 50
DCGM_FI_DEV_GPU_UTIL{gpu="0"} 93
DCGM_FI_DEV_FB_USED{gpu="0"} 61440
DCGM_FI_DEV_XID_ERRORS{gpu="0"} 0
"""
"""What vLLM and NVIDIA's dcgm-exporter export, by their documentation: neither a GPU nor an engine runs here."""


async def _export(request: web.Request) -> web.Response:
    return web.Response(text=_EXPORTED.lstrip(), content_type="text/plain")


async def _serve_exporter() -> web.AppRunner:
    app = web.Application()
    app.router.add_get("/metrics", _export)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, HEAD, _EXPORTER_PORT).start()
    return runner


_FAILED = {
    "type": "Failed",
    "status": "True",
    "reason": "HeadFailed",
    "message": "",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


def build_scrape_configs(operator_port: int) -> list[dict[str, Any]]:
    """Return all targets with the labels that the chart's monitors add."""
    job_labels = {"namespace": "team", "rljob_dev_job": "sums"}

    def target(address: str, port: int, **labels: str) -> dict[str, Any]:
        return {"targets": [f"{address}:{port}"], "labels": labels}

    servers = [target(address, PORT_SERVICE, **job_labels, rljob_dev_reward=name) for name, address in _list_replicas()]
    operator = target(OPERATOR, operator_port, namespace="rljob")
    engine = target(HEAD, _EXPORTER_PORT, **job_labels, pod="sums-rollout-0")
    return [
        {"job_name": "rljob-jobs", "static_configs": [target(HEAD, PORT_DRIVER, **job_labels), *servers, engine]},
        {"job_name": "rljob", "honor_labels": True, "static_configs": [operator]},
    ]


def _list_replicas() -> list[tuple[str, str]]:
    """Return (reward, address) of every reward server."""
    return [(name, address) for name, addresses in REWARDS.items() for address in addresses]


NUM_TARGETS = 3 + len(_list_replicas())


class AgentService:
    """What a client of a tool, or of the simulated user, reports."""

    num_requests: ClassVar = {"train": 3, "eval": 0}

    def statistics(self) -> dict[str, float]:
        return {"in_flight": 2.0, "waiting": 1.0, "waiting_oldest_seconds": 0.5, "replicas": 1.0}


class RunningJob:
    """A job that trains until it is stopped."""

    def __init__(self, folder: Path, monkeypatch: Any) -> None:
        self._folder = folder
        job = driver_harness.make_job(
            rewards=_SPECS,
            algorithm={"kl": {"coefficient": 0.001}},
            schedule={"steps": 10_000, "promptsPerStep": 4},
            evaluation={"accuracy": "score", "everySteps": 4},
            checkpoint={"everySteps": 3},
        )
        self.harness = driver_harness.DriverHarness(
            folder, monkeypatch, job, network=f"{driver_harness.NETWORK}.240", num_rewards=0
        )
        hosts = [f"{rollout.address} rollouts" for rollout in self.harness.rollouts]
        hosts += [f"{address} reward-{name}" for name, address in _list_replicas()]
        self.harness.hosts.write_text("\n".join(hosts) + "\n")
        monkeypatch.setenv("RLJOB_REWARD_SERVICES", json.dumps({name: f"reward-{name}" for name in REWARDS}))
        self.operator = OperatorMetrics(["rljobs"])
        with socket.socket() as free:
            free.bind((OPERATOR, 0))
            self.operator_port = free.getsockname()[1]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[RunningJob]:
        """Run all servers and the job."""
        endpoint = fake_endpoint.Endpoint(ENDPOINT)
        endpoint.answer = _judge
        servers = [self._start_reward(name, address) for name, address in _list_replicas()]
        try:
            await self._until_ready(servers)
            async with self.harness, self.harness.driver() as driver:
                status = StatusServer(self.harness.board, self.harness.prometheus.render)
                await status.start(HEAD)
                operator = await Health(WorkQueue(), self.operator).serve(0, self.operator_port)
                exporter = await _serve_exporter()
                try:
                    async with asyncio.TaskGroup() as group:  # a task that fails ends the test at once
                        work = (driver.run(), self._operate(), self._converse())
                        tasks = [group.create_task(each) for each in work]
                        yield self
                        for task in tasks:
                            task.cancel()
                finally:
                    await exporter.cleanup()
                    await operator.cleanup()
                    await status.close()
        finally:
            for server in servers:
                server.terminate()
            for server in servers:
                server.wait(DEADLINE_SECONDS)
            endpoint.close()

    def _start_reward(self, name: str, address: str) -> subprocess.Popen[bytes]:
        folder = self._folder / address
        folder.mkdir()
        [reward] = [spec for spec in _SPECS if spec["name"] == name]
        (folder / "service.yaml").write_text(yaml.safe_dump(reward))
        own = {ENV_TOKEN: _TOKEN, ENV_POD_IP: address, ENV_PEERS: f"reward-{name}"}
        environment = {**os.environ, **own}
        with (folder / "log").open("wb") as file:
            command = [sys.executable, "-m", "rljob_service", "--config", str(folder / "service.yaml")]
            return subprocess.Popen(command, env=environment, stdout=file, stderr=file)

    async def _until_ready(self, servers: list[subprocess.Popen[bytes]]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        for server, (name, address) in zip(servers, _list_replicas(), strict=True):
            while True:
                log = (self._folder / address / "log").read_text()
                assert server.poll() is None, f"reward {name} has exited: {log}"
                assert time.monotonic() < deadline, f"reward {name} does not serve: {log}"
                try:
                    reader, writer = await asyncio.open_connection(address, PORT_SERVICE)
                    writer.write(b"GET /rljob/ready HTTP/1.0\r\n\r\n")
                    answer = await reader.read()
                    writer.close()
                except OSError:
                    answer = b""
                if b" 200 " in answer:
                    break
                await asyncio.sleep(0.1)

    async def _converse(self) -> None:
        """Record conversations and turns in the gateway, as the driver of a job with an agent does. Some fail."""
        prometheus, ends = self.harness.prometheus, (EpisodeEnd.USER, EpisodeEnd.MAX_TURNS, EpisodeEnd.FAILED)
        prometheus.register_agent({name: AgentService() for name in ("user", "calculator")})
        prometheus.register_gateway(lambda: {"episodes": 4.0, "in_flight": 2.0, "oldest_seconds": 0.3})
        prometheus.register_service(lambda: {"clients": 2.0, "adapters": 3.0})
        for number in itertools.count():
            end = ends[number % len(ends)]
            calls = [ToolCall("0", "add", {}, tool="calculator"), ToolCall("1", "sub", {}, error="no such function")]
            failure = EpisodeFailure("user", "spec.agent.user", "timeout", "killed")
            episode = Episode(
                0, number, 0,
                turns=[Turn("", tool_calls=calls), Turn("")],
                messages=[{"role": "user", "content": ""}],
                end=end,
                failure=failure if end is EpisodeEnd.FAILED else None,
                breaks=[ContextBreak("history")],
            )  # fmt: skip
            prometheus.record_scored("train", episode)
            prometheus.record_response("chat/completions", "policy", 499 if end is EpisodeEnd.FAILED else 200)
            prometheus.record_overhead(to_engine=0.002, to_client=0.001)
            await prometheus.measure("ann", "optim_step", asyncio.sleep(0.1))
            for service in ("user", "calculator"):
                prometheus.record_call(service, "train", CallResult(id="0", valid=True), 0.05)
            await asyncio.sleep(0.5)

    async def _operate(self) -> None:
        """Record what an operator of this job records. It decides for as many slots as samples wait."""
        manifest = self.harness.job.to_manifest()
        for reward in manifest["spec"]["rewards"]:
            reward["autoscaling"] = {"maxReplicas": 2}
        while True:
            demand = self.harness.board.snapshot().demand
            slots = {name: each.in_flight for name, each in demand.items()}
            scaling = [
                {"name": name, "slots": count, "replicas": max(1, min(2, count // 4))} for name, count in slots.items()
            ]
            # Another job fails and is retried.
            phase = "Failed" if round(asyncio.get_running_loop().time()) % 20 < 10 else "Running"
            other = RLJob.model_validate({**manifest, "status": {"phase": phase, "conditions": [_FAILED]}})
            self.operator.record_owner(JobKey("team", "other"), other)
            job = RLJob.model_validate({**manifest, "status": {"phase": "Running", "scaling": scaling}})
            with self.operator.reconcile.labels("RLJob").time():
                self.operator.record_owner(JobKey("team", "sums"), job)
            self.operator.leader.set(1)
            self.operator.on_response("get", "/apis/rljob.dev/v1alpha1/namespaces/team/rljobs/sums", 200)
            self.operator.errors.labels("TransientError").inc(0)
            await asyncio.sleep(0.5)
