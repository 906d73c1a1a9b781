"""The head's parts, made and wired: status server, data, clients, Ray head, and the driver over all of them.

Owns what is started in which order, and that all of it ends with the driver. Leaves training to `driver`. What only the
user can mend is looked at before the trainers start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rljob_api.errors import UserError
from rljob_trainer.agents import build_agent
from rljob_trainer.driver.collection import Collector
from rljob_trainer.driver.loop import Driver, Parts
from rljob_trainer.driver.status import Board, StatusServer
from rljob_trainer.driver.updates import Trainer
from rljob_trainer.episodes.prompts import Prompt, load_prompts
from rljob_trainer.head.environment import Environment
from rljob_trainer.head.job_file import JobFile
from rljob_trainer.history.run_state import check_room
from rljob_trainer.history.tracking import Prometheus, build_trackers
from rljob_trainer.ranks.group import TrainerGroup, connect, disconnect
from rljob_trainer.ranks.ray_head import RayHead
from rljob_trainer.replicas.http import open_session
from rljob_trainer.replicas.rollout_client import Rollouts
from rljob_trainer.rewards.clients import Rewards

log = logging.getLogger(__name__)


def load_tokenizer(environment: Environment) -> Any:
    from transformers import AutoTokenizer  # seconds to import

    model = environment.job.spec.model
    name = environment.model.removeprefix("hf://")
    if not environment.model.startswith("hf://") and not (Path(name) / "config.json").exists():
        raise UserError(f"spec.model.source: {name} is no model folder: it has no config.json")
    try:
        return AutoTokenizer.from_pretrained(name, revision=model.revision, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # transformers and its hub client raise dozens of types
        raise UserError(f"spec.model.source: the tokenizer of {name} cannot be loaded: {error}") from error


def load_data(environment: Environment) -> tuple[list[Prompt], list[Prompt]]:
    """Training and evaluation prompts."""
    data, tokenizer = environment.job.spec.data, load_tokenizer(environment)
    train = load_prompts(data, data.train, environment.train_data, tokenizer, split="train")
    held_out: list[Prompt] = []
    if data.eval is not None and environment.eval_data is not None:
        held_out = load_prompts(data, data.eval, environment.eval_data, tokenizer, split="test")
    log.info("%d training prompts, %d held-out prompts", len(train), len(held_out))
    return train, held_out


async def run_head(environment: Environment, *, on_ray: Callable[[], None] = lambda: None) -> None:
    """Run the job to its end. `on_ray` is called once Ray is connected, which takes over the process's signals."""
    job, run_dir = environment.job, environment.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    board, prometheus = Board(), Prometheus()
    async with AsyncExitStack() as stack:
        server = StatusServer(board, prometheus.render)
        await server.start(environment.address)
        stack.push_async_callback(server.close)

        check_room(run_dir, Path(environment.model), keep=job.spec.checkpoint.keep)
        ray_head = RayHead(environment.address)
        stack.push_async_callback(ray_head.close)
        board.waits_for("reads the data and starts Ray")
        # Together: each takes many seconds, most of them imports.
        (train, held_out), _ = await asyncio.gather(asyncio.to_thread(load_data, environment), ray_head.start())
        # A head that has died in the meantime (a busy machine is enough) would be waited for in vain.
        await run_until_first(asyncio.to_thread(connect), ray_head.watch())
        stack.push_async_callback(asyncio.to_thread, disconnect)
        on_ray()
        board.waits_for("")
        trackers = build_trackers(job, run_dir, prometheus)
        stack.callback(trackers.close)

        session = await stack.enter_async_context(open_session())
        rollouts, rewards = Rollouts(job.spec.rollout, session), Rewards(job.spec.rewards, session)
        for client in (rollouts, rewards):
            await client.start()
            stack.push_async_callback(client.close)

        collector = Collector(build_agent(job.spec.agent), rollouts, rewards, job.spec.rewards)
        driver = Driver(
            job,
            run_dir,
            Parts(
                start_trainer=_trainer_starter(environment),
                rollouts=rollouts,
                rewards=rewards,
                collector=collector,
                board=board,
                trackers=trackers,
                prometheus=prometheus,
                train=train,
                eval=held_out,
                model=environment.model,
                read_steps=JobFile(environment.job_file, job.metadata.name).read_steps,
            ),
            environment.life,
        )
        await run_until_first(driver.run(), ray_head.watch())


def _trainer_starter(environment: Environment) -> Callable[..., Coroutine[Any, Any, Trainer]]:
    async def start(generation: str, checkpoint: Path | None, report: Callable[[str], None]) -> Trainer:
        return await TrainerGroup.start(
            environment.job, model=environment.model, generation=generation, checkpoint=checkpoint, report=report
        )

    return start


async def run_until_first(work: Coroutine[Any, Any, None], watch: Coroutine[Any, Any, None]) -> None:
    """Run `work`, but end with `watch`'s error should that come first. Both have ended when this returns."""
    tasks = [asyncio.create_task(work), asyncio.create_task(watch)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in reversed(tasks):  # when both failed, the watch names the cause
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
