"""`python -m rljob_trainer.head`: the head Pod. Status server, Ray head, and the driver, in this order.

Owns reading the environment, wiring the parts, and turning an error into an exit code and a last line. Leaves
training to `driver`. What only the user can mend is looked at before the trainers start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_api.contract import (
    ENV_EVAL_DATA,
    ENV_JOB_FILE,
    ENV_MODEL,
    ENV_POD_IP,
    ENV_REWARD_SERVICES,
    ENV_ROLLOUT_SERVICE,
    ENV_RUN_DIR,
    ENV_TOKEN,
    ENV_TRAIN_DATA,
    ExitCode,
)
from rljob_api.errors import TransientError, UserError
from rljob_api.job import RLJob
from rljob_api.load import load_job
from rljob_trainer.agents import build_agent
from rljob_trainer.collection import Collector
from rljob_trainer.data import Prompt, load_prompts
from rljob_trainer.driver import Driver, Parts
from rljob_trainer.http_client import open_session
from rljob_trainer.ray_head import RayHead, ray_environment
from rljob_trainer.rewards import Rewards
from rljob_trainer.rollouts import Rollouts
from rljob_trainer.state import check_room
from rljob_trainer.status import Board, StatusServer
from rljob_trainer.tracking import Prometheus, build_trackers
from rljob_trainer.updating import Trainer

log = logging.getLogger(__name__)

_TERMINATION_LOG = Path("/dev/termination-log")
"""Where Kubernetes reads a container's last words."""


@dataclass(frozen=True)
class Environment:
    """What the operator says to the head."""

    job: RLJob
    run_dir: Path
    address: str
    model: str
    train_data: str
    eval_data: str | None


def read_environment(variables: dict[str, str]) -> Environment:
    """Raises UserError for what is missing or wrong."""
    needed = (
        ENV_JOB_FILE, ENV_RUN_DIR, ENV_POD_IP, ENV_MODEL, ENV_TRAIN_DATA, ENV_TOKEN, ENV_ROLLOUT_SERVICE,
        ENV_REWARD_SERVICES,
    )  # fmt: skip
    missing = [name for name in needed if not variables.get(name)]
    if missing:
        raise UserError(
            f"the environment lacks {', '.join(missing)}: the head is started by the operator or by `rljob run`"
        )
    return Environment(
        job=load_job(variables[ENV_JOB_FILE]),
        run_dir=Path(variables[ENV_RUN_DIR]),
        address=variables[ENV_POD_IP],
        model=variables[ENV_MODEL],
        train_data=variables[ENV_TRAIN_DATA],
        eval_data=variables.get(ENV_EVAL_DATA) or None,
    )


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


async def run_head(environment: Environment) -> None:
    """Run the job to its end."""
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
            ),
        )
        await run_until_first(driver.run(), ray_head.watch())


def _trainer_starter(environment: Environment) -> Callable[..., Coroutine[Any, Any, Trainer]]:
    async def start(generation: str, checkpoint: Path | None, report: Callable[[str], None]) -> Trainer:
        from rljob_trainer.trainer_group import TrainerGroup

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


async def _run_until_signalled(environment: Environment) -> None:
    """SIGTERM and SIGINT cancel the run, so that everything it started is ended in order."""
    task = asyncio.create_task(run_head(environment))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        raise TransientError("stopped by a signal; a restart resumes from the last checkpoint") from None


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.environ.update(ray_environment())
    try:
        asyncio.run(_run_until_signalled(read_environment(dict(os.environ))))
    except UserError as error:
        return _last_words(str(error), ExitCode.USER)
    except TransientError as error:
        return _last_words(str(error), ExitCode.INFRASTRUCTURE)
    except Exception as error:  # unknown: loud, and worth another try within the role's budget
        log.exception("unexpected error")
        return _last_words(f"{type(error).__name__}: {error}", ExitCode.INFRASTRUCTURE)
    return ExitCode.SUCCEEDED


def _last_words(message: str, code: ExitCode) -> int:
    with contextlib.suppress(OSError):
        _TERMINATION_LOG.write_text(message[:4000])
    print(message, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
