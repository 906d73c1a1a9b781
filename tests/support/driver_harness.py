"""The environment of a driver in one process, for its tests.

The servers around it are those of tests.support.driver_fakes, on loopback addresses. The driver itself is real:
discovery, HTTP, retries, checkpoints, metrics.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from aiohttp import web

from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import PORT_REWARD, PORT_ROLLOUT
from rljob_inputs.data.prompts import PromptSet
from rljob_inputs.prompts import Prompt
from rljob_trainer.agents import build_agent
from rljob_trainer.calls.services import AgentServices
from rljob_trainer.driver.collection import Collector
from rljob_trainer.driver.ledger import Reports
from rljob_trainer.driver.loop import Datasets, Driver, DriverParts
from rljob_trainer.driver.ports import TrainerGroupDiedError
from rljob_trainer.driver.schedules import build_schedule
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.gateway.server import ModelGateway
from rljob_trainer.head.agent import export_metrics
from rljob_trainer.history.prometheus import PrometheusMetrics
from rljob_trainer.history.run_state import list_trajectory_files
from rljob_trainer.history.tracking import build_trackers
from rljob_trainer.replicas.http import open_session
from rljob_trainer.replicas.rollout_client import RolloutClient
from rljob_trainer.rewards.clients import RewardClients
from tests.support.driver_fakes import FakeReward, FakeRollout, FakeService, FakeTrainer
from tests.support.waiting import DEADLINE_SECONDS

NETWORK = f"127.{130 + os.getpid() % 100}"
"""Loopback addresses of this process: tests run in parallel."""


class DriverHarness:
    """Everything around the driver. Faults are callables that a test replaces."""

    def __init__(self, folder: Path, monkeypatch, job: RLJob, *, network: str, num_rollouts=2, num_rewards=2):
        self.folder, self.job = folder, job
        self.run_dir = folder / "run"
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.published, self.weight = None, 0
        self.updates, self.requests, self.generations, self.trainer_steps, self.versions = [], [], [], [], []
        self.read_steps = lambda: None
        self.calls = Counter()
        self.kill_trainer = lambda what: False
        self.before_apply = lambda: asyncio.sleep(0)
        self.before_write = lambda: asyncio.sleep(0)
        """Of a checkpoint, whose trainer state is copied before."""
        self.trainer_died = asyncio.Event()
        self.loses_node = False
        self.withhold = lambda manifest: False
        self.break_completion = lambda rollout: False
        self.rejects = lambda token_ids: False
        """Prompts that the engines refuse as too long."""
        self.judge = lambda reward, body: None
        self.template, self.context_length = None, None
        self.write_answer = None
        self.answer_call = lambda service, body: None
        self.rollouts = [FakeRollout(self, f"{network}.{10 + i}") for i in range(num_rollouts)]
        self.rewards = [FakeReward(self, f"{network}.{100 + i}") for i in range(num_rewards)]
        self.gateway_address = f"{network}.9"
        names = [service.reward.name for service in job.spec.services if service.kind != "reward"]
        self.services = {
            name: FakeService(self, f"{network}.{150 + i}", "" if name in ("user", "runner") else f"{name}_function")
            for i, name in enumerate(names)
        }
        self.hosts = folder / "hosts"
        self.write_hosts()
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no test here depends on it, and disks are slow
        monkeypatch.setenv("RLJOB_HOSTS_FILE", str(self.hosts))
        monkeypatch.setenv("RLJOB_TOKEN", "token")
        monkeypatch.setenv("RLJOB_ROLLOUT_SERVICE", "rollouts")
        monkeypatch.setenv(
            "RLJOB_REWARD_SERVICES",
            json.dumps({r.name: "rewards" for r in job.spec.rewards} | dict(zip(names, names, strict=True))),
        )
        self.board = StatusBoard()
        self.runners = {}

    def group_death(self, message):
        error = TrainerGroupDiedError(message)
        error.lost_node = self.loses_node
        return error

    def write_hosts(self, without=()):
        """List all servers as ready except `without`."""
        lines = [f"{r.address} rollouts" for r in self.rollouts if r not in without]
        lines += [f"{r.address} rewards" for r in self.rewards if r not in without]
        lines += [f"{service.address} {name}" for name, service in self.services.items() if service not in without]
        new = self.hosts.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.replace(self.hosts)

    async def serve(self, server, port, routes):
        app = web.Application()
        app.add_routes(routes)
        # As the real servers do: a client that leaves ends what runs for it.
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, server.address, port, reuse_address=True).start()
        self.runners[server.address] = runner

    async def serve_rollout(self, rollout):
        routes = [
            web.get("/rljob/weights", rollout.weights),
            web.post("/inference/v1/generate", rollout.complete),
            web.get("/v1/models", rollout.models),
        ]
        await self.serve(rollout, PORT_ROLLOUT, routes)

    async def serve_reward(self, reward):
        await self.serve(reward, PORT_REWARD, [web.get("/v1/info", reward.info), web.post("/v1/score", reward.score)])

    async def serve_service(self, service):
        await self.serve(service, PORT_REWARD, [web.get("/v1/info", service.info), web.post("/v1/call", service.call)])

    async def stop(self, server):
        await self.runners.pop(server.address).cleanup()

    async def __aenter__(self):
        for rollout in self.rollouts:
            await self.serve_rollout(rollout)
        for reward in self.rewards:
            await self.serve_reward(reward)
        for service in self.services.values():
            await self.serve_service(service)
        return self

    async def __aexit__(self, *_):
        for runner in list(self.runners.values()):
            await runner.cleanup()

    def read_schedule(self):
        steps = self.read_steps()
        return None if steps is None else self.job.spec.schedule.model_copy(update={"steps": steps})

    async def start_trainer(self, generation, checkpoint, report):
        self.generations.append(generation)
        weight = int((checkpoint / "trainer" / "weight").read_text()) if checkpoint else 0
        trainer = FakeTrainer(self, generation, weight)
        trainer._live("start")
        return trainer

    @asynccontextmanager
    async def driver(self, head_job_uid=""):
        """Yield a driver in a new environment, as after a restart of its process."""
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(open_session())
            spans_updates = build_schedule(self.job.spec.schedule).spans_updates
            rollouts = RolloutClient(self.job.spec.rollout, session, spans_updates=spans_updates)
            rewards = RewardClients(self.job.spec.rewards, session)
            for client in (rollouts, rewards):
                await client.start()
                stack.push_async_callback(client.close)
            prometheus = self.prometheus = PrometheusMetrics()
            trackers = build_trackers(self.job, self.run_dir, prometheus)
            stack.callback(trackers.close)
            services = AgentServices(self.job.spec.services, session)
            await services.start()
            stack.push_async_callback(services.close)
            spec, gateway = self.job.spec, None
            if spec.agent.is_hosted:
                gateway = ModelGateway(spec.agent, self.template, self.context_length)
                await gateway.start(self.gateway_address)
                stack.push_async_callback(gateway.close)
                export_metrics(gateway, prometheus)
            needs_reward, weight = not spec.rewards, spec.agent.reward_weight
            agent = build_agent(
                spec.agent, services, self.template, self.context_length, gateway, needs_reward=needs_reward
            )
            collector = Collector(agent, rollouts, rewards, spec.rewards, services, own_weight=weight)
            text = self._write_prompt
            train = {i: Prompt(i, text(f"p{i}"), [1, 2, 3 + i], ground_truth=str(i)) for i in range(10)}
            held_out = [Prompt(i, text(f"e{i}"), [9, 9, i], ground_truth=str(i)) for i in range(4)]
            parts = DriverParts(
                self.start_trainer,
                collector,
                Reports(self.board, trackers, prometheus, self.template.decode if self.template else None),
                Datasets(PromptSet(len(train), train), held_out),
                "/m",
                self.read_schedule,
            )
            yield Driver(self.job, self.run_dir, parts, head_job_uid)

    def _write_prompt(self, text):
        return text if self.template is None else [{"role": "user", "content": text}]

    async def run(self):
        async with self.driver() as driver:
            await asyncio.wait_for(driver.run(), DEADLINE_SECONDS)
        return self.summary()

    def summary(self):
        return json.loads((self.run_dir / "driver-summary.json").read_text())

    def metrics(self):
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def trajectories(self):
        """Return (step, lane, group, sample) -> row of the trajectory log."""
        files = list_trajectory_files(self.run_dir)
        rows = [row for file in files for row in pq.read_table(file.path).to_pylist()]
        by_key = {(row["step"], row["lane"], row["group"], row["sample"]): row for row in rows}
        assert len(by_key) == len(rows), "a sample is duplicated"
        return by_key

    def final_weight(self):
        return int((self.run_dir / "export" / "weight").read_text())


async def run_with_killed_drivers(harness, service, seed):
    """Run the job to its end, and kill three drivers before, each after some calls of `service`. Return the calls."""
    draw, num_drivers, is_finished = random.Random(seed), 0, False
    while not is_finished:
        num_drivers += 1
        bodies = harness.services[service].bodies
        limit = len(bodies) + draw.randrange(3, 30) if num_drivers < 4 else 10**9
        async with harness.driver() as driver:
            task = asyncio.create_task(driver.run())
            await wait_until(lambda: task.done() or len(bodies) >= limit)  # noqa: B023
            is_finished = task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert num_drivers > 1
    return harness.services[service].bodies


def make_job(**spec):
    """A small job; keyword arguments are merged over its spec, one level deep."""
    base = {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/t.jsonl"}, "eval": {"source": "/e.jsonl"}},
        "rewards": [{"name": "correct", "function": {"inline": "x"}}],
        "algorithm": {"groupSize": 4},
        "schedule": {"steps": 6, "promptsPerStep": 4, "seed": 7},
        "trainer": {"backoffLimit": 100},
        "checkpoint": {"everySteps": 2},
        "evaluation": {"accuracy": "exact"},
        "tracking": {"tensorboard": False},
    }
    for name, value in spec.items():
        base[name] = {**base[name], **value} if isinstance(value, dict) and isinstance(base.get(name), dict) else value
    return RLJob.model_validate(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "t"}, "spec": base}
    )


@dataclass(frozen=True)
class Run:
    """What a finished run left."""

    summary: dict
    metrics: list
    trajectories: dict
    final_weight: int


_undisturbed_runs: dict[str, Run] = {}


async def run_undisturbed(make_harness, **settings) -> Run:
    """Run a job without faults. It is deterministic, so one run per session and settings is enough."""
    key = repr(settings)
    if key not in _undisturbed_runs:
        async with make_harness("undisturbed", **settings) as harness:
            summary = await harness.run()
            _undisturbed_runs[key] = Run(summary, harness.metrics(), harness.trajectories(), harness.final_weight())
    return _undisturbed_runs[key]


async def stop_when(harness, condition, head_job_uid=""):
    """Run a driver until `condition` holds, and cancel it as SIGTERM does."""
    async with harness.driver(head_job_uid) as driver, asyncio.timeout(DEADLINE_SECONDS):
        task = asyncio.create_task(driver.run())
        await wait_until(lambda: task.done() or condition())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def wait_until(condition):
    while not condition():  # noqa: ASYNC110 - any condition, not one that sets an event
        await asyncio.sleep(0.002)
