"""The environment of a driver in one process, for its tests.

The servers around it are those of tests.support.driver_fakes, on loopback addresses. The driver itself is real:
discovery, HTTP, retries, checkpoints, metrics.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter, defaultdict
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from aiohttp import web

from rljob_api.manifest.job import RLJob
from rljob_api.run.folder import FILE_METRICS, TRAJECTORIES, list_trajectory_files
from rljob_api.run.metrics import Metrics, read_metrics
from rljob_api.run.summaries import RunSummary, read_driver_summary
from rljob_api.run.trajectories import SampleRow
from rljob_api.wire.contract import PORT_ROLLOUT, PORT_SERVICE
from rljob_cli.run.summary import build_summary
from rljob_inputs.data.prompts import PromptSet
from rljob_inputs.models.defaults import resolve_job
from rljob_inputs.prompts import Prompt
from rljob_trainer.agents import build_agent
from rljob_trainer.calls.client import AgentServices
from rljob_trainer.driver.collection import Collector
from rljob_trainer.driver.ports import TrainerGroupDiedError
from rljob_trainer.driver.reports import Reports
from rljob_trainer.driver.role_clock import ROLE_OF_SERVICE, RoleClock
from rljob_trainer.driver.run import Datasets, Driver, DriverParts
from rljob_trainer.driver.schedules import build_schedule
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.feed.prompt_feed import PromptSource
from rljob_trainer.gateway.server import ModelGateway
from rljob_trainer.history.prometheus import PrometheusMetrics
from rljob_trainer.history.tracking import build_trackers
from rljob_trainer.liveness.judge import Pace
from rljob_trainer.outages import Outages
from rljob_trainer.replicas.http import open_session
from rljob_trainer.replicas.rollout_client import RolloutClient
from rljob_trainer.rewards.groups import RequestBuilder, RewardClients
from rljob_trainer.run_folder.file_facts import verify_files
from tests.support.driver_fakes import FakeEngines, FakeReward, FakeRollout, FakeService, FakeTrainer
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
        self.sampling = {}
        """Parameters of each answer's request, by the tokens of prompt and answer."""
        self.updates, self.requests, self.generations, self.trainer_specs, self.versions = [], [], [], [], []
        self.read_steps = lambda: None
        self.calls = Counter()
        self.kill_trainer = lambda what: False
        self.before_start = lambda: asyncio.sleep(0)
        self.before_apply = lambda: asyncio.sleep(0)
        self.before_turn = lambda turn: asyncio.sleep(0)
        self.violations, self.trainers = [], []
        """What happened outside of its turn on shared devices; all trainer groups."""
        self.before_write = lambda: asyncio.sleep(0)
        """Called before a checkpoint is written; the trainer's state is copied before."""
        self.trainer_died = asyncio.Event()
        self.loses_node = False
        self.withhold = lambda manifest: False
        self.break_completion = lambda rollout: False
        self.rejects = lambda token_ids: False
        """Prompts that the engines refuse as too long."""
        self.judge = lambda reward, body: None
        self.template, self.context_length = None, None
        self.sources = []
        """Sources of training prompts. Empty: one with ten rows."""
        self.given = None
        """Rows of the warm start."""
        self.write_answer = None
        self.answer_call = lambda service, body: None
        self.rollouts = [FakeRollout(self, f"{network}.{10 + i}") for i in range(num_rollouts)]
        self.sharing = self.rollouts if job.spec.shares_trainer else []
        """Rollouts that share the trainer's devices."""
        self.engines = FakeEngines(self) if self.sharing else None
        self.rewards = [FakeReward(self, f"{network}.{100 + i}") for i in range(num_rewards)]
        self.gateway_address = f"{network}.9"
        names = [service.settings.name for service in job.spec.services if service.kind != "reward"]
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
        self.outages = Outages(job.spec.outage_seconds)
        self.clock = time.monotonic
        """Measures outages."""
        self.board = StatusBoard(self.outages)
        self._views = ExitStack()
        """Views of all drivers: tests read the board after the last one has ended."""
        self.runners = {}
        self.traceparents = defaultdict(list)
        """Headers of requests, by path; empty texts for requests without it."""

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
        app = web.Application(middlewares=[self._record_traceparent])
        app.add_routes(routes)
        # As the real servers do: a client that leaves ends what runs for it.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, server.address, port, reuse_address=True).start()
        self.runners[server.address] = runner

    @web.middleware
    async def _record_traceparent(self, request, handler):
        self.traceparents[request.path].append(request.headers.get("traceparent", ""))
        return await handler(request)

    async def serve_rollout(self, rollout):
        routes = [
            web.get("/rljob/weights", rollout.weights),
            web.post("/inference/v1/generate", rollout.complete),
            web.get("/v1/models", rollout.models),
        ]
        await self.serve(rollout, PORT_ROLLOUT, routes)

    async def serve_reward(self, reward):
        await self.serve(reward, PORT_SERVICE, [web.get("/v1/info", reward.info), web.post("/v1/score", reward.score)])

    async def serve_service(self, service):
        await self.serve(service, PORT_SERVICE, [web.get("/v1/info", service.info), web.post("/v1/call", service.call)])

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

    def read_spec(self):
        if (steps := self.read_steps()) is None:
            return self.job.spec
        schedule = self.job.spec.schedule.model_copy(update={"steps": steps})
        return self.job.spec.model_copy(update={"schedule": schedule})

    async def start_trainer(self, generation, checkpoint, report):
        await self.before_start()
        self.generations.append(generation)
        if self.engines is not None:
            await self.engines.sleep()
        weight = 0
        if checkpoint:  # the files that are read are verified before
            verify_files(checkpoint.folder, checkpoint.files, ["trainer/weight"])
            weight = int((checkpoint.folder / "trainer" / "weight").read_text())
        trainer = FakeTrainer(self, generation, weight)
        self.trainers.append(trainer)
        trainer._live("start")
        return trainer

    @asynccontextmanager
    async def driver(self, head_job_uid="", **settings):
        """Yield a driver in a new environment, as after a restart of its process."""
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(open_session())
            spans_updates = build_schedule(self.job.spec.schedule).spans_updates
            prometheus = self.prometheus = PrometheusMetrics()
            self.pace = Pace(self.job.spec.hang_detection)
            outages = self.outages = self.board.outages = Outages(self.job.spec.outage_seconds, self.clock)
            rollouts = RolloutClient(
                self.job.spec.rollout,
                session,
                spans_updates=spans_updates,
                outages=outages,
                on_mismatch=prometheus.mismatches.inc,
            )
            tokenizer = self.template._tokenizer if self.template else None
            rewards = RewardClients(self.job.spec.rewards, session, tokenizer, outages)
            for client in (rollouts, rewards):
                await client.start()
                stack.push_async_callback(client.close)
            trackers = build_trackers(self.job, self.run_dir)
            stack.push_async_callback(trackers.close)
            roles = RoleClock(time.monotonic(), {service.kind for service in self.job.spec.services})
            services = AgentServices(
                self.job.spec.services,
                session,
                outages=outages,
                runner_calls=[rollouts.replicas.fleet.health],
                on_call=prometheus.record_call,
                working=lambda kind: roles.within(ROLE_OF_SERVICE[kind], time.monotonic),
            )
            await services.start()
            stack.push_async_callback(services.close)
            spec, gateway = self.job.spec, None
            if spec.agent.is_hosted:
                gateway = ModelGateway(
                    spec.agent,
                    self.template,
                    self.context_length,
                    on_response=prometheus.record_response,
                    on_turn=lambda times: prometheus.record_overhead(times.to_engine, times.to_client),
                )
                prometheus.register_gateway(gateway.statistics)
                await gateway.start(self.gateway_address)
                stack.push_async_callback(gateway.close)
            weight = spec.agent.reward_weight
            agent = build_agent(spec.agent, services, self.template, self.context_length, gateway, outages.seconds)
            requests = RequestBuilder(tokenizer, spec.agent.completion)
            reports = Reports(self.board, trackers, prometheus, self.template.decode if self.template else None)
            collector = Collector(
                agent,
                rollouts,
                rewards,
                requests,
                services,
                own_weight=weight,
                roles=roles,
                on_scored=reports.record_scored,
            )
            text = self._write_prompt
            train = {i: Prompt(i, text(f"p{i}"), [1, 2, 3 + i], ground_truth=str(i)) for i in range(10)}
            held_out = [Prompt(i, text(f"e{i}"), [9, 9, i], ground_truth=str(i)) for i in range(4)]
            parts = DriverParts(
                self.start_trainer,
                collector,
                reports,
                Datasets(
                    self.sources or [PromptSource("train", 1.0, PromptSet(len(train), train))],
                    {each.name: held_out for each in spec.held_out_sets},
                    self.given,
                ),
                "/m",
                self.read_spec,
                self.pace,
                self.engines,
                outages,
            )
            driver = Driver(self.job, self.run_dir, parts, head_job_uid, **settings)
            self._views.enter_context(self.board.live(driver.describe_live))
            yield driver

    def disk_waits(self):
        """Return what the driver waits for, if that is the disk."""
        waits = self.board.snapshot().waits_for
        return waits if "spec.checkpoint" in waits else ""

    def _write_prompt(self, text):
        return text if self.template is None else [{"role": "user", "content": text}]

    async def run(self):
        async with self.driver() as driver:
            await asyncio.wait_for(driver.run(), DEADLINE_SECONDS)
        return self.summary()

    def summary(self):
        """Return what `rljob run` shows of the run; None if the driver wrote no summary."""
        driver = read_driver_summary(self.run_dir)
        steps, metrics = self.job.spec.schedule.steps, self.metrics()
        return driver and build_summary(
            name="t", phase="", total_steps=steps, driver=driver, metrics=metrics, sessions=[], checkpoint=None
        )

    def metrics(self):
        return read_metrics(self.run_dir / FILE_METRICS)

    def trajectories(self):
        """Return (step, lane, group, sample) -> row of the trajectory log."""
        files = list_trajectory_files(self.run_dir / TRAJECTORIES)
        found = (row for file in files for row in pq.read_table(file.path).to_pylist())
        rows = [SampleRow.model_validate(row) for row in found]
        by_key = {(row.step, row.lane, row.group, row.sample): row for row in rows}
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
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "t"}, "spec": base}
    return resolve_job(RLJob.model_validate(job), None)


@dataclass(frozen=True)
class Run:
    """What a finished run left."""

    summary: RunSummary
    metrics: Metrics
    trajectories: dict
    final_weight: int


_undisturbed_runs: dict[str, Run] = {}


async def run_undisturbed(make_harness, **settings) -> Run:
    """Run a job without faults. It is deterministic, so one run per session and settings is enough."""
    harness = make_harness("undisturbed", **settings)
    key = harness.job.model_dump_json()
    if key not in _undisturbed_runs:
        async with harness:
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
