"""The watch of vLLM's engine, and the end of its server once the engine hangs: of a rollout, and of a served model.

Invariant: the stacks, or why there are none, are in the log before the process ends, and no process of the engine is
left after it. Who started it starts it again: the kubelet, or the program of the trainer's Pod.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from rljob_api.manifest.job_sections import HangDetection
from rljob_api.wire.contract import ENV_HEAD, ENV_TOKEN, ExitCode
from rljob_api.wire.driver_status import HungPart
from rljob_api.wire.termination import end_program
from rljob_trainer.progress.pace import Pace
from rljob_trainer.progress.work import Hang, WatchedClock, Work
from rljob_trainer.rollout.engine_stacks import end_engine, log_engine_stacks
from rljob_trainer.rollout.engine_watch import EngineWatch, count_outputs
from rljob_trainer.rollout.weight_transfer import report_hang

logger = logging.getLogger(__name__)

Report = Callable[[Hang, str], Awaitable[None]]
"""Tells somebody what the engine owes. It must end soon."""


def build_watch(bounds: HangDetection, engine: Any, is_loading: Callable[[], bool] = lambda: False) -> EngineWatch:
    """`engine`: vLLM's AsyncLLM. `is_loading`: whether its weights or its memory are being changed."""
    work, processor = Work(Pace(bounds), WatchedClock(time.monotonic())), engine.output_processor
    return EngineWatch(
        work, engine.is_sleeping, processor.has_unfinished_requests, is_loading, count_outputs(processor)
    )


async def end_if_it_hangs(watch: EngineWatch, report: Report | None = None) -> NoReturn:
    """End this process once the engine hangs."""
    hang = await watch.run()
    stacks = await asyncio.to_thread(log_engine_stacks)
    owed = f"owes {hang.kind}"
    message = (
        f"the engine hangs: it {owed} for {hang.seconds:.0f} s, and {hang.limit_seconds:.0f} s are allowed "
        f"(spec.hangDetection){_join(stacks)}"
    )
    logger.error("%s", message)
    if report is not None:
        await report(hang, owed + _join(stacks))
    end_engine()
    os._exit(end_program(message, ExitCode.INFRASTRUCTURE))


def report_to_head(role: str, name: str) -> Report:
    """`role`, `name`: what hangs, as in status.progress.hung. The head is that of the environment."""

    async def report(hang: Hang, doing: str) -> None:
        part = HungPart(
            role=role,
            name=name,
            seconds=hang.seconds,
            limit_seconds=hang.limit_seconds,
            doing=doing,
            action="its process is replaced",
        )
        await report_hang(os.environ[ENV_HEAD], os.environ[ENV_TOKEN], part)

    return report


def _join(stacks: list[str]) -> str:
    return "".join(f"; {each}" for each in stacks)
