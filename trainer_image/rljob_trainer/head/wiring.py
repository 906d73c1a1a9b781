"""The head's components, built and wired: status server, data, clients, Ray head, and the driver.

Errors that only the user can fix are detected before the trainers start.

The trainer of a job that only evaluates has no ranks, and its weights are those of spec.model, which the rollouts load
themselves. So the driver runs a job of no steps, whose one evaluation is that before the first step. Whatever would
change weights or write them is a mistake of the driver.
"""

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.pod_engines import find_engines
from rljob_api.manifest.status import EvaluationFigure
from rljob_api.read.pod_files import JobFile
from rljob_api.run.comparisons import list_figures
from rljob_api.run.folder import FILE_METRICS
from rljob_api.run.metrics import read_metrics
from rljob_api.wire.contract import ENV_TOKEN, ExitCode
from rljob_api.wire.driver_status import TrainerChoices
from rljob_api.wire.termination import end_program, leave_result
from rljob_api.wire.weights import OWN_WEIGHTS, WeightManifest
from rljob_inputs.hub import HubAccess
from rljob_inputs.memory.object_store import head_store_bytes
from rljob_inputs.models.defaults import resolve
from rljob_inputs.models.own_settings import ModelSettings, load_model_settings
from rljob_inputs.objects.folder import ObjectFolder
from rljob_trainer.calls.client import AgentServices
from rljob_trainer.concurrency import run_with_watcher, wait_forever
from rljob_trainer.driver.collection import Collector
from rljob_trainer.driver.model_check import ModelCheck
from rljob_trainer.driver.ports import StartTrainer, Trainer
from rljob_trainer.driver.reports import RecentSampleLog, Reports
from rljob_trainer.driver.role_clock import ROLE_OF_SERVICE, RoleClock
from rljob_trainer.driver.run import Datasets, Driver, DriverParts
from rljob_trainer.driver.schedules import build_schedule
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.gateway.forwarding import watch_models
from rljob_trainer.head.agent import start_agent
from rljob_trainer.head.environment import Environment
from rljob_trainer.head.inputs import STARTING, HubWait, Inputs, read_inputs
from rljob_trainer.head.origin import check_origin, find_start_model, find_versions, keep_origin
from rljob_trainer.head.status_server import StatusServer
from rljob_trainer.head.watchdog import LoopWatchdog
from rljob_trainer.history.disk import RunDisk
from rljob_trainer.history.prometheus import PrometheusMetrics
from rljob_trainer.history.run_state import check_disk_space
from rljob_trainer.history.tracking import build_trackers
from rljob_trainer.liveness.judge import Pace
from rljob_trainer.mirror.mirror import Mirror
from rljob_trainer.mirror.owner import Ownership
from rljob_trainer.outages import Outages
from rljob_trainer.ranks.group import TrainerGroup, connect, disconnect
from rljob_trainer.ranks.ray_head import RayHead
from rljob_trainer.replicas.engines import TrainerEngines
from rljob_trainer.replicas.http import open_session
from rljob_trainer.replicas.pull_reports import PullReports
from rljob_trainer.replicas.rollout_client import RolloutClient
from rljob_trainer.rewards.groups import RequestBuilder, RewardClients
from rljob_trainer.rewards.hinted import HintedPolicy
from rljob_trainer.run_folder.client import read_run_id
from rljob_trainer.run_folder.file_facts import Checkpoint
from rljob_trainer.run_folder.server import RunFileServer
from rljob_trainer.traces import tracing_episodes

_NO_TRAINER = "a job that evaluates has no trainer"


def as_evaluation(job: RLJob) -> RLJob:
    """Return what the driver runs for a job with task evaluate: all sets before a step that never comes, and nothing to
    write at the end."""
    spec = job.spec
    sets = [each.model_copy(update={"at_start": True}) for each in spec.evaluation.sets]
    return job.with_spec(
        schedule=spec.schedule.model_copy(update={"steps": 0}),
        evaluation=spec.evaluation.model_copy(update={"at_start": True, "sets": sets, "best": None}),
        checkpoint=spec.checkpoint.model_copy(update={"export_policy": "never"}),
    )


def read_figures(run_dir: Path) -> list[EvaluationFigure]:
    """Return the results of the job, as its status shows them: from the lines of metrics.jsonl."""
    fields = set(EvaluationFigure.model_fields)
    figures = list_figures(read_metrics(run_dir / FILE_METRICS).evaluations)
    return [EvaluationFigure.model_validate(figure.model_dump(include=fields)) for figure in figures]


async def start_fixed(*, generation: str, checkpoint: Checkpoint | None, report: Callable[[str], None]) -> Trainer:
    """As StartTrainer."""
    return cast(Trainer, FixedModel())


class FixedModel:
    """Implements what the driver calls of Trainer."""

    choices = TrainerChoices()

    async def publish(self, version: int) -> WeightManifest:
        assert version == OWN_WEIGHTS.version, _NO_TRAINER
        return OWN_WEIGHTS

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"{name}: {_NO_TRAINER}")

    async def watch(self) -> NoReturn:
        await wait_forever()

    async def close(self) -> None:
        """Nothing runs."""


log = logging.getLogger(__name__)


class Head:
    """What the head of a job has, in the order in which it starts. Each part ends with `stack`."""

    def __init__(self, environment: Environment, stack: AsyncExitStack) -> None:
        self.environment, self.run_dir, self.stack = environment, environment.run_dir, stack
        self.outages = Outages(environment.job.spec.outage_seconds)
        self.pace = Pace(environment.job.spec.hang_detection)
        self.board, self.prometheus = StatusBoard(self.outages), PrometheusMetrics()
        self.pulls, self.recent = PullReports(), RecentSampleLog()
        self.disk = RunDisk(self.run_dir, self.outages)
        self.hub = HubWait(self.outages, self.board, environment.job.spec.sources.values())
        self.access = HubAccess.from_environment(os.environ).objects
        self.copy: Mirror | None = None
        """The copy of the run's files in object storage; None without spec.checkpoint.storage."""

    async def answer(self) -> None:
        """Serve the status, and what rollouts ask. Watch the event loop."""
        spec, pulls = self.environment.job.spec, self.pulls
        if spec.checkpoint.storage is None:
            self.board.update(run_id=read_run_id(self.run_dir))  # before the first answer: it names a new folder
        self.stack.enter_context(tracing_episodes(self.environment.job))
        watchdog = LoopWatchdog(
            self.pace,
            lambda message: os._exit(end_program(message, ExitCode.INFRASTRUCTURE)),
            self.prometheus.loop_lag.observe,
        )
        await self.stack.enter_async_context(watchdog.watching())
        server = StatusServer(
            self.board,
            self.prometheus.render,
            lambda report: pulls.record(report, time.monotonic()),
            lambda part: pulls.record_hung(part, time.monotonic()),
            self.recent,
        )
        await server.start(self.environment.address)
        self.stack.push_async_callback(server.close)

    async def open_run(self) -> RunFileServer:
        """Bring the run's folder to what this job may resume from, and find the model with which it begins. Return what
        serves the folder. Raise UserError if it is of another job or run, and wait for room for its checkpoints."""
        environment, spec, disk, run_dir = self.environment, self.environment.job.spec, self.disk, self.run_dir
        if (url := environment.job.copy_url) is not None:
            self.copy = await self._open_copy(url)
            self.stack.push_async_callback(self.copy.close)
            self.board.update(run_id=read_run_id(run_dir))
        await disk.write(run_dir, partial(keep_origin, environment))
        if environment.model_step:
            environment, step = await find_start_model(environment, disk, self.outages, self.board.waits_for)
            self.board.update(start_step=step)
        files = RunFileServer(run_dir, environment.address, os.environ.get(ENV_TOKEN, ""), environment.shown_job_file)
        self.stack.callback(files.close)
        if spec.trains:
            check = partial(
                check_disk_space,
                run_dir,
                Path(environment.model),
                keep=spec.num_kept_checkpoints,
                checkpoint_bytes=spec.checkpoint_bytes,
                num_exports=spec.num_exports,
            )
            await disk.write(run_dir, check)
        self.board.waits_for(STARTING)
        versions = await self.hub.read(partial(find_versions, run_dir, environment.sources, self.access))
        if versions is not None:
            await disk.write(run_dir, partial(versions.write, run_dir))
            environment = environment.with_sources(versions.pinned)
        self.environment, self.board.model = environment, environment.model
        return files

    async def _open_copy(self, url: str) -> Mirror:
        """Return the copy, which this head owns, once the run's folder has what a resume needs."""
        environment, job, board = self.environment, self.environment.job, self.board
        folder = ObjectFolder(url, self.access)
        ownership = Ownership(folder, f"{job.metadata.namespace}/{job.metadata.name}", environment.head_job_uid)
        mirror = Mirror(
            self.run_dir,
            folder,
            ownership,
            environment.shown_job_file,
            self.outages,
            self.disk,
            board.waits_for,
            partial(check_origin, environment),
        )
        board.waits_for(f"reads the copy of the run at {url}")
        await mirror.take_over()
        try:
            await run_with_watcher(mirror.bring_back(), mirror.renew())
        except UserError:
            await mirror.close(saves=False)
            raise
        return mirror

    async def start_ray(self, store_bytes: int) -> Callable[[], Coroutine[Any, Any, None]]:
        """Start the job's Ray, and connect to it. Return what watches it."""
        ray_head = RayHead(self.environment.address, store_bytes)
        self.stack.push_async_callback(ray_head.close)
        await ray_head.start()
        # connect() would wait forever for a Ray head that has died since.
        await run_with_watcher(asyncio.to_thread(connect), ray_head.watch())
        self.stack.push_async_callback(asyncio.to_thread, disconnect)
        return ray_head.watch

    async def connect(self, job: RLJob, settings: ModelSettings, inputs: Inputs, files: RunFileServer) -> DriverParts:
        """Start the clients of what runs in other Pods, and the agent. Return what the driver needs."""
        spec, tokenizer, length, outages = job.spec, inputs.tokenizer, settings.context_length, self.outages
        stack, prometheus = self.stack, self.prometheus
        trackers = build_trackers(job, self.run_dir)
        stack.push_async_callback(trackers.close)
        prometheus.register_trackers(trackers.counts)
        session = await stack.enter_async_context(open_session())
        rollouts = RolloutClient(
            spec.rollout,
            session,
            per_pod=spec.engines_per_pod or 1,
            spans_updates=build_schedule(spec.schedule).spans_updates,
            reports=self.pulls,
            special_ids=settings.own.special_tokens,
            outages=outages,
            on_mismatch=prometheus.mismatches.inc,
        )
        rewards = RewardClients(spec.rewards, session, tokenizer, outages, partial(HintedPolicy, rollouts, spec.data))
        roles = RoleClock(time.monotonic(), {service.kind for service in spec.services})
        models = watch_models(spec.agent.models, outages)
        services = AgentServices(
            spec.services,
            session,
            outages=outages,
            runner_calls=[rollouts.replicas.fleet.health, *models.values()],
            on_call=prometheus.record_call,
            working=lambda kind: roles.within(ROLE_OF_SERVICE[kind], time.monotonic),
        )
        for client in (rollouts, rewards, services):
            await client.start()
            stack.push_async_callback(client.close)
        agent = await start_agent(
            stack, spec, tokenizer, length, services, self.environment.address, prometheus, outages, models
        )
        reports = Reports(
            self.board, trackers, prometheus, agent.template.decode if agent.template else None, recent=self.recent
        )
        engines: TrainerEngines | None = None
        start_trainer: StartTrainer = start_fixed
        if spec.shares_trainer:
            startup = max(engine.startup_seconds for engine in find_engines(spec))
            engines = TrainerEngines(spec.trainer.replicas, startup, session, report=self.board.waits_for)
        if spec.trains:
            start = partial(
                TrainerGroup.start,
                job,
                model=self.environment.model,
                run=files.folder,
                reserve=engines.sleep if engines else None,
                pace=self.pace,
                is_paused=outages.is_open,
            )
            start_trainer = partial(self.hub.start_trainer, start)
        read_spec = JobFile(self.environment.job_file, spec, lambda read: resolve(read, settings.own).spec).read_spec
        return DriverParts(
            start_trainer=start_trainer,
            collector=Collector(
                agent.loop,
                rollouts,
                rewards,
                RequestBuilder(
                    tokenizer,
                    spec.agent.completion,
                    spec.schedule.steps,
                    has_teacher=any(reward.teacher for reward in spec.rewards),
                ),
                services,
                own_weight=spec.agent.reward_weight,
                roles=roles,
                on_scored=reports.record_scored,
                job=job.metadata.name,
            ),
            reports=reports,
            data=Datasets(inputs.train, inputs.held_out, inputs.given),
            model=self.environment.model,
            read_spec=read_spec if spec.trains else lambda: spec,
            pace=self.pace,
            check=ModelCheck(spec, settings.own.config, tokenizer, length)
            if spec.trains and spec.num_rollout_replicas
            else None,
            engines=engines,
            outages=outages,
            copies=self.copy,
        )

    async def run(self, driver: Driver) -> None:
        """Run the driver to its end, and the copy of its files with it."""
        if self.copy is None:
            return await driver.run()
        await run_with_watcher(driver.run(), self.copy.watch())
        await run_with_watcher(self.copy.finish(), self.copy.renew())


def _leave_figures(run_dir: Path) -> None:
    """Let the operator read the results of a job that evaluates."""
    items = [figure.model_dump_json(exclude_none=True) for figure in read_figures(run_dir)]
    if num_left_out := leave_result(items):
        log.warning("status.evaluation has no room for the last %d results: metrics.jsonl has all", num_left_out)


async def run_head(
    environment: Environment,
    *,
    on_ray: Callable[[], None] = lambda: None,
    on_stopped: Callable[[str], None] = lambda report: None,
) -> None:
    """Run the job to its end. `on_ray` is called once Ray is connected, since Ray replaces the signal handlers;
    `on_stopped` after a cancellation, with what became of the last steps."""
    environment.run_dir.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        head = Head(environment, stack)
        await head.answer()
        files = await head.open_run()
        settings = await head.hub.read(partial(load_model_settings, environment.job, head.environment.model))
        job = settings.job
        for each in settings.from_model:
            log.info("%s: %s (%s)", each.field, each.value, each.source)
        read = read_inputs(head.environment, settings, head.board, head.disk, head.hub)
        if job.spec.trains:
            # Concurrently: each takes many seconds, mostly for imports.
            ray = head.start_ray(head_store_bytes(job, settings.context_length))
            inputs, watch_ray = await asyncio.gather(read, ray)
        else:
            inputs, watch_ray = await read, wait_forever
            job = as_evaluation(job)
        on_ray()
        head.board.waits_for("")
        parts = await head.connect(job, settings, inputs, files)
        # What is imported and loaded stays: a full collection would visit it all, and hold the loop for as long.
        gc.collect()
        gc.freeze()
        driver = Driver(job, head.run_dir, parts, environment.head_job_uid, environment.grace_seconds)
        stack.enter_context(head.board.live(driver.describe_live, driver.leave))
        try:
            await run_with_watcher(head.run(driver), watch_ray())
            if not job.spec.trains:
                await asyncio.to_thread(_leave_figures, head.run_dir)
        except asyncio.CancelledError:
            on_stopped(driver.exit_report)
            raise
