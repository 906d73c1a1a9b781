"""The head's components, built and wired: status server, data, clients, Ray head, and the driver.

Errors that only the user can fix are detected before the trainers start.
"""

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import aiohttp

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJobSpec
from rljob_api.manifest.pod_engines import find_engines
from rljob_api.wire.contract import ENV_TOKEN, ExitCode
from rljob_api.wire.termination import end_program, leave_result
from rljob_inputs.hub.repository import HubAccess
from rljob_inputs.memory.object_store import head_store_bytes
from rljob_inputs.models.own_settings import load_model_settings
from rljob_inputs.objects.access import ObjectAccess
from rljob_inputs.objects.folder import ObjectFolder
from rljob_trainer.calls.services import AgentServices
from rljob_trainer.concurrency import run_with_watcher, wait_forever
from rljob_trainer.driver.collection import Collector
from rljob_trainer.driver.fixed_model import as_evaluation, read_figures, start_fixed
from rljob_trainer.driver.model_check import ModelCheck
from rljob_trainer.driver.reports import RecentSampleLog, Reports
from rljob_trainer.driver.role_clock import ROLE_OF_SERVICE, RoleClock
from rljob_trainer.driver.run import Datasets, Driver, DriverParts
from rljob_trainer.driver.schedules import build_schedule
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.gateway.forwarding import watch_models
from rljob_trainer.head.agent import start_agent
from rljob_trainer.head.environment import Environment, JobFile
from rljob_trainer.head.inputs import STARTING, HubWait, read_inputs
from rljob_trainer.head.objects import find_versions, write_versions
from rljob_trainer.head.origin import check_origin, keep_origin
from rljob_trainer.head.start_model import find_start_model
from rljob_trainer.head.status_server import StatusServer
from rljob_trainer.head.watchdog import LoopWatchdog
from rljob_trainer.history.disk import RunDisk
from rljob_trainer.history.prometheus import PrometheusMetrics
from rljob_trainer.history.run_state import check_disk_space
from rljob_trainer.history.tracking import build_trackers
from rljob_trainer.liveness.judge import Pace
from rljob_trainer.mirror.mirror import Mirror
from rljob_trainer.mirror.owner import Ownership
from rljob_trainer.outages.registry import Dependency, Outages
from rljob_trainer.ranks.group import TrainerGroup, connect, disconnect
from rljob_trainer.ranks.ray_head import RayHead
from rljob_trainer.replicas.engines import TrainerEngines
from rljob_trainer.replicas.http import open_session
from rljob_trainer.replicas.pull_reports import PullReports
from rljob_trainer.replicas.rollout_client import RolloutClient
from rljob_trainer.rewards.groups import RewardClients
from rljob_trainer.rewards.requests import RequestBuilder
from rljob_trainer.run_folder.location import read_run_id
from rljob_trainer.run_folder.server import RunFileServer
from rljob_trainer.traces import tracing_episodes

log = logging.getLogger(__name__)


def _end_process(message: str) -> NoReturn:
    os._exit(end_program(message, ExitCode.INFRASTRUCTURE))


async def _start_ray(stack: AsyncExitStack, address: str, store_bytes: int) -> Callable[[], Coroutine[Any, Any, None]]:
    """Start the job's Ray, until `stack` is closed, and connect to it. Return what watches it."""
    ray_head = RayHead(address, store_bytes)
    stack.push_async_callback(ray_head.close)
    await ray_head.start()
    # connect() would wait forever for a Ray head that has died since.
    await run_with_watcher(asyncio.to_thread(connect), ray_head.watch())
    stack.push_async_callback(asyncio.to_thread, disconnect)
    return ray_head.watch


async def _open_copy(
    environment: Environment, access: ObjectAccess, outages: Outages, disk: RunDisk, report: Callable[[str], None]
) -> Mirror | None:
    """Return the copy of the run's files in object storage, which this head owns, once its folder has what a resume
    needs; None without spec.checkpoint.storage. `report`: gets what the head waits for. Raise UserError if the copy is
    of another job or run."""
    job, url = environment.job, environment.job.copy_url
    if url is None:
        return None
    folder = ObjectFolder(url, access)
    ownership = Ownership(folder, f"{job.metadata.namespace}/{job.metadata.name}", environment.head_job_uid)
    check = partial(check_origin, environment)
    mirror = Mirror(environment.run_dir, folder, ownership, environment.shown_job_file, outages, disk, report, check)
    report(f"reads the copy of the run at {url}")
    await mirror.take_over()
    try:
        await run_with_watcher(mirror.bring_back(), mirror.renew())
    except UserError:
        await mirror.close(saves=False)
        raise
    return mirror


async def _run_driver(driver: Driver, copy: Mirror | None) -> None:
    """Run the driver to its end, and its copy with it."""
    if copy is None:
        return await driver.run()
    await run_with_watcher(driver.run(), copy.watch())
    await run_with_watcher(copy.finish(), copy.renew())


def _leave_figures(run_dir: Path) -> None:
    """Let the operator read the results of a job that evaluates."""
    items = [figure.model_dump_json(exclude_none=True) for figure in read_figures(run_dir)]
    if num_left_out := leave_result(items):
        log.warning("status.evaluation has no room for the last %d results: metrics.jsonl has all", num_left_out)


async def _check_disk(environment: Environment, disk: RunDisk) -> None:
    """Wait until the run's folder has room for the checkpoints that are kept."""
    spec = environment.job.spec
    check = partial(
        check_disk_space,
        environment.run_dir,
        Path(environment.model),
        keep=spec.num_kept_checkpoints,
        checkpoint_bytes=spec.checkpoint_bytes,
        num_exports=spec.num_exports,
    )
    await disk.write(environment.run_dir, check)


async def _pin_sources(environment: Environment, hub: HubWait, disk: RunDisk, access: ObjectAccess) -> Environment:
    """Return the environment with the versions that this run reads of its objects."""
    run_dir = environment.run_dir
    versions = await hub.read(partial(find_versions, run_dir, environment.sources, access))
    if versions is None:
        return environment
    await disk.write(run_dir, partial(write_versions, run_dir, versions.record))
    return environment.with_sources(versions.pinned)


async def _start_clients(
    stack: AsyncExitStack,
    spec: RLJobSpec,
    special_ids: Mapping[str, int],
    session: aiohttp.ClientSession,
    tokenizer: Any,
    outages: Outages,
    prometheus: PrometheusMetrics,
    pulls: PullReports,
) -> tuple[RolloutClient, RewardClients, AgentServices, Mapping[str, Dependency], RoleClock]:
    """Start the clients of what runs in other Pods, until `stack` is closed. Return them, the health of the models of
    agent.models, by name, and the clock that the services feed."""
    rollouts = RolloutClient(
        spec.rollout,
        session,
        per_pod=spec.engines_per_pod or 1,
        spans_updates=build_schedule(spec.schedule).spans_updates,
        reports=pulls,
        special_ids=special_ids,
        outages=outages,
        on_mismatch=prometheus.mismatches.inc,
    )
    rewards = RewardClients(spec.rewards, session, tokenizer, outages)
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
    return rollouts, rewards, services, models, roles


async def run_head(
    environment: Environment,
    *,
    on_ray: Callable[[], None] = lambda: None,
    on_stopped: Callable[[str], None] = lambda report: None,
) -> None:
    """Run the job to its end. `on_ray` is called once Ray is connected, since Ray replaces the signal handlers;
    `on_stopped` after a cancellation, with what became of the last steps."""
    run_dir = environment.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    outages = Outages(environment.job.spec.outage_seconds)
    board, prometheus, pulls, recent = StatusBoard(outages), PrometheusMetrics(), PullReports(), RecentSampleLog()
    spec = environment.job.spec
    disk = RunDisk(run_dir, outages)
    if spec.checkpoint.storage is None:
        board.update(run_id=read_run_id(run_dir))  # before the first answer: the operator learns of a new folder by it
    async with AsyncExitStack() as stack:
        stack.enter_context(tracing_episodes(environment.job))
        watchdog = LoopWatchdog(spec.hang_detection, _end_process, prometheus.loop_lag.observe)
        await stack.enter_async_context(watchdog.watching())
        server = StatusServer(
            board,
            prometheus.render,
            lambda report: pulls.record(report, time.monotonic()),
            lambda part: pulls.record_hung(part, time.monotonic()),
            recent,
        )
        await server.start(environment.address)
        stack.push_async_callback(server.close)

        access = HubAccess.from_environment(os.environ).objects
        copy = await _open_copy(environment, access, outages, disk, board.waits_for)
        if copy is not None:
            stack.push_async_callback(copy.close)
            board.update(run_id=read_run_id(run_dir))
        await disk.write(run_dir, partial(keep_origin, environment))
        if environment.model_step:
            environment, step = await find_start_model(environment, disk, outages, board.waits_for)
            board.update(start_step=step)
        files = RunFileServer(run_dir, environment.address, os.environ.get(ENV_TOKEN, ""), environment.shown_job_file)
        stack.callback(files.close)
        if spec.trains:
            await _check_disk(environment, disk)
        board.waits_for(STARTING)
        hub = HubWait(outages, board, spec.sources.values())
        environment = await _pin_sources(environment, hub, disk, access)
        board.model = environment.model
        settings = await hub.read(partial(load_model_settings, environment.job, environment.model))
        job = settings.job
        for each in settings.from_model:
            log.info("%s: %s (%s)", each.field, each.value, each.source)
        read = read_inputs(environment, settings, board, disk, hub)
        if job.spec.trains:
            # Concurrently: each takes many seconds, mostly for imports.
            store_bytes = head_store_bytes(job, settings.context_length)
            inputs, watch_ray = await asyncio.gather(read, _start_ray(stack, environment.address, store_bytes))
        else:
            inputs, watch_ray = await read, wait_forever
            job = as_evaluation(job)
        on_ray()
        board.waits_for("")
        trackers = build_trackers(job, run_dir)
        stack.push_async_callback(trackers.close)
        prometheus.register_trackers(trackers.counts)

        session = await stack.enter_async_context(open_session())
        rollouts, rewards, services, models, roles = await _start_clients(
            stack, job.spec, settings.special_ids, session, inputs.tokenizer, outages, prometheus, pulls
        )
        agent = await start_agent(
            stack,
            job.spec,
            inputs.tokenizer,
            settings.context_length,
            services,
            environment.address,
            prometheus,
            outages,
            models,
        )
        reports = Reports(board, trackers, prometheus, agent.template.decode if agent.template else None, recent=recent)
        engines, reserve = None, None
        if job.spec.shares_trainer:
            startup = max(engine.startup_seconds for engine in find_engines(job.spec))
            engines = TrainerEngines(job.spec.trainer.replicas, startup, session, report=board.waits_for)
            reserve = engines.sleep
        pace = Pace(job.spec.hang_detection)
        start = partial(
            TrainerGroup.start,
            job,
            model=environment.model,
            run=files.folder,
            reserve=reserve,
            pace=pace,
            is_paused=outages.is_open,
        )
        parts = DriverParts(
            start_trainer=partial(hub.start_trainer, start) if job.spec.trains else start_fixed,
            collector=Collector(
                agent.loop,
                rollouts,
                rewards,
                RequestBuilder(inputs.tokenizer, job.spec.agent.completion, job.spec.schedule.steps),
                services,
                own_weight=job.spec.agent.reward_weight,
                roles=roles,
                on_scored=reports.record_scored,
                job=job.metadata.name,
            ),
            reports=reports,
            data=Datasets(inputs.train, inputs.held_out),
            model=environment.model,
            read_spec=JobFile(environment.job_file).read_spec if job.spec.trains else lambda: None,
            check=ModelCheck(job.spec, settings.config, inputs.tokenizer, settings.context_length)
            if job.spec.trains
            else None,
            engines=engines,
            outages=outages,
            copies=copy,
        )
        # What is imported and loaded stays: a full collection would visit it all, and hold the loop for as long.
        gc.collect()
        gc.freeze()
        driver = Driver(job, run_dir, parts, environment.head_job_uid, environment.grace_seconds)
        stack.enter_context(board.live(driver.describe_live, driver.leave))
        try:
            await run_with_watcher(_run_driver(driver, copy), watch_ray())
            if not job.spec.trains:
                await asyncio.to_thread(_leave_figures, run_dir)
        except asyncio.CancelledError:
            on_stopped(driver.exit_report)
            raise
