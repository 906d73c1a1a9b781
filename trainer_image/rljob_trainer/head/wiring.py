"""The head's components, built and wired: status server, data, clients, Ray head, and the driver.

Errors that only the user can fix are detected before the trainers start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rljob_api.manifest.job_sections import DataSource
from rljob_api.wire.contract import ENV_TOKEN
from rljob_inputs.data.lengths import find_limit
from rljob_inputs.data.prompts import PromptSet, load_prompts
from rljob_inputs.findings import describe_lengths
from rljob_inputs.hub.repository import HubAccess
from rljob_inputs.memory.object_store import head_store_bytes
from rljob_inputs.models.config import find_context_length, overrides_length
from rljob_inputs.models.files import read_config
from rljob_inputs.prompts import Prompt
from rljob_trainer.calls.services import AgentServices
from rljob_trainer.driver.collection import Collector
from rljob_trainer.driver.ledger import Reports
from rljob_trainer.driver.loop import Datasets, Driver, DriverParts
from rljob_trainer.driver.schedules import build_schedule
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.driver.watcher import run_with_watcher
from rljob_trainer.head.agent import export_metrics, start_agent
from rljob_trainer.head.environment import Environment, JobFile
from rljob_trainer.head.status_server import StatusServer
from rljob_trainer.head.tokenizer import load_tokenizer
from rljob_trainer.history.prometheus import PrometheusMetrics
from rljob_trainer.history.run_state import check_disk_space
from rljob_trainer.history.tracking import build_trackers
from rljob_trainer.ranks.group import TrainerGroup, connect, disconnect
from rljob_trainer.ranks.ray_head import RayHead
from rljob_trainer.replicas.http import open_session
from rljob_trainer.replicas.pull_reports import PullReports
from rljob_trainer.replicas.rollout_client import RolloutClient
from rljob_trainer.rewards.clients import RewardClients
from rljob_trainer.run_folder.location import read_run_id
from rljob_trainer.run_folder.server import RunFileServer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    train: PromptSet
    held_out: list[Prompt]
    tokenizer: Any
    context_length: int | None
    """Of the rollouts: the longest prompt with its answer, in tokens. None: not known."""


def load_inputs(environment: Environment) -> Inputs:
    """Return the training and the held-out prompts, without those that are too long for the rollouts."""
    spec, access = environment.job.spec, HubAccess.from_environment(os.environ)
    config = read_config(environment.model, spec.model.revision, access)
    overridden = overrides_length(spec.rollout.extra_args, spec.rollout.env)
    context_length = None if overridden else find_context_length(config)
    tokenizer = load_tokenizer(environment.model, spec.model)

    def load(source: DataSource, location: str, split: str) -> PromptSet:
        limit = find_limit(spec, split, context_length)
        prompts, table = load_prompts(spec.data, source, location, tokenizer, split=split, limit=limit, access=access)
        log.info("%s", describe_lengths(table))
        return prompts

    train = load(spec.data.train, environment.train_data, "train")
    held_out: list[Prompt] = []
    if spec.data.eval is not None and environment.eval_data is not None:
        held_out = list(load(spec.data.eval, environment.eval_data, "test").by_row.values())
    return Inputs(train, held_out, tokenizer, spec.rollout.max_model_len or context_length)


async def run_head(environment: Environment, *, on_ray: Callable[[], None] = lambda: None) -> None:
    """Run the job to its end. `on_ray` is called once Ray is connected, since Ray replaces the signal handlers."""
    job, run_dir = environment.job, environment.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    board, prometheus, pulls = StatusBoard(), PrometheusMetrics(), PullReports()
    board.update(run_id=read_run_id(run_dir))  # before the first answer, from which the operator learns of a new folder
    async with AsyncExitStack() as stack:
        server = StatusServer(board, prometheus.render, lambda report: pulls.record(report, time.monotonic()))
        await server.start(environment.address)
        stack.push_async_callback(server.close)

        files = RunFileServer(run_dir, environment.address, os.environ.get(ENV_TOKEN, ""))
        stack.callback(files.close)
        check_disk_space(run_dir, Path(environment.model), job.spec)
        ray_head = RayHead(environment.address, head_store_bytes(job))
        stack.push_async_callback(ray_head.close)
        board.waits_for("reads the data and starts Ray")
        # Concurrently: each takes many seconds, mostly for imports.
        inputs, _ = await asyncio.gather(asyncio.to_thread(load_inputs, environment), ray_head.start())
        # connect() would wait forever for a Ray head that has died since.
        await run_with_watcher(asyncio.to_thread(connect), ray_head.watch())
        stack.push_async_callback(asyncio.to_thread, disconnect)
        on_ray()
        board.waits_for("")
        trackers = build_trackers(job, run_dir, prometheus)
        stack.callback(trackers.close)

        session = await stack.enter_async_context(open_session())
        spans_updates = build_schedule(job.spec.schedule).spans_updates
        rollouts = RolloutClient(job.spec.rollout, session, spans_updates=spans_updates, reports=pulls)
        rewards = RewardClients(job.spec.rewards, session)
        services = AgentServices(job.spec.services, session)
        for client in (rollouts, rewards, services):
            await client.start()
            stack.push_async_callback(client.close)
        agent = await start_agent(
            stack, job.spec, inputs.tokenizer, inputs.context_length, services, environment.address
        )
        if agent.gateway is not None:
            export_metrics(agent.gateway, prometheus)

        parts = DriverParts(
            start_trainer=partial(TrainerGroup.start, job, model=environment.model, run=files.folder),
            collector=Collector(
                agent.loop, rollouts, rewards, job.spec.rewards, services, own_weight=job.spec.agent.reward_weight
            ),
            reports=Reports(board, trackers, prometheus, agent.template.decode if agent.template else None),
            data=Datasets(inputs.train, inputs.held_out),
            model=environment.model,
            read_schedule=JobFile(environment.job_file).read_schedule,
        )
        driver = Driver(job, run_dir, parts, environment.head_job_uid)
        await run_with_watcher(driver.run(), ray_head.watch())
