"""Whether vLLM's engine works, and the end of its server, a rollout's or a served model's, once the engine hangs. Asks
the engine's own process, not the API server that runs here.

Two facts. The engine answers a cheap question between two steps, so an answer that takes long shows a step, or a load,
that takes long. And an engine that has requests puts out tokens. Each is a kind of work with its own history: a long
prefill, a compilation or a load of weights is no hang. Invariants: an engine that answers within its limit, and puts
out tokens within that, is never declared hung; the stacks, or why there are none, are in the log before the process
ends, and no process of the engine is left after it. Who started it starts it again: the kubelet, or the program of the
trainer's Pod.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from rljob_api.manifest.job_sections import HangDetection
from rljob_api.wire.contract import ENV_HEAD, ENV_TOKEN, ExitCode
from rljob_api.wire.termination import end_program
from rljob_trainer.liveness.judge import Beat, Hang, Judge, Pace
from rljob_trainer.liveness.stacks import end_children, log_stacks
from rljob_trainer.rollout.weight_transfer import report_hang

_PERIOD_SECONDS = 1.0
_ANSWERS = ("an answer without requests", "an answer between two steps", "an answer after a load")
"""What a question may wait for. One that waits for several things is the last of these kinds."""
_TOKENS = "tokens of its requests"


@dataclass
class EngineWatch:
    """`read_bounds`: returns those of now. `ask`: returns once the engine's process has answered. `is_loading`: whether
    its weights or its memory are being changed. `count_outputs`: the number of outputs with tokens so far."""

    judge: Judge
    read_bounds: Callable[[], HangDetection]
    ask: Callable[[], Awaitable[object]]
    has_requests: Callable[[], bool]
    is_loading: Callable[[], bool]
    count_outputs: Callable[[], int]
    clock: Callable[[], float] = time.monotonic
    _num_answers: int = 0

    async def run(self) -> Hang:
        """Return once the engine hangs."""
        while True:
            self.judge.tick(self.clock())  # what was slept is no part of the answer
            answer, awaited = asyncio.ensure_future(self.ask()), 0
            self._hear_answers(_ANSWERS[awaited])
            try:
                while not answer.done():
                    await asyncio.wait((answer,), timeout=_PERIOD_SECONDS)
                    awaited = max(awaited, 2 if self.is_loading() else int(self.has_requests()))
                    self.judge.tick(self.clock())
                    self.judge.pace.bounds = self.read_bounds()
                    self._hear_answers(_ANSWERS[awaited])
                    is_owed = self.has_requests() and not self.is_loading()
                    self.judge.hear(_TOKENS, Beat(self.count_outputs(), _TOKENS if is_owed else ""))
                    if not answer.done() and (hang := self.judge.find_hang()):
                        return hang
                # A dead engine ends the server: that is no hang.
                self._num_answers += not answer.exception()
                self._hear_answers("")
            except asyncio.CancelledError:
                self._hear_answers("")
                raise
            finally:
                answer.cancel()
            if hang := self.judge.find_hang():
                return hang
            await asyncio.sleep(_PERIOD_SECONDS)

    def _hear_answers(self, awaited: str) -> None:
        self.judge.hear("an answer", Beat(self._num_answers, awaited))

    async def check(self, seconds: float) -> str:
        """Ask now. Return why the engine gives no answer within `seconds`; empty if it does."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(seconds):
                await self.ask()
                return self.reason_silent()
        return self.reason_silent(0.0) or "the engine does not answer"

    def reason_silent(self, share: float = 0.5) -> str:
        """Return what the engine owes for more than this share of its limit; else nothing."""
        late = self.judge.find_hang(share)
        if late is None:
            return ""
        return f"the engine owes {late.kind} for {late.seconds:.0f} s; {late.limit_seconds:.0f} s are allowed"


def count_outputs(processor: Any) -> Callable[[], int]:
    """Return a counter of the outputs of vLLM's output processor. Those without tokens are not counted."""
    process, count = processor.process_outputs, 0

    def counted(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += bool(outputs)
        return process(outputs, *args, **kwargs)

    processor.process_outputs = counted
    return lambda: count


logger = logging.getLogger(__name__)


def build_watch(
    read_bounds: Callable[[], HangDetection], engine: Any, is_loading: Callable[[], bool] = lambda: False
) -> EngineWatch:
    """`engine`: vLLM's AsyncLLM. `is_loading`: whether its weights or its memory are being changed."""
    judge, processor = Judge(Pace(read_bounds()), time.monotonic()), engine.output_processor
    return EngineWatch(
        judge, read_bounds, engine.is_sleeping, processor.has_unfinished_requests, is_loading, count_outputs(processor)
    )


async def end_if_it_hangs(watch: EngineWatch, role: str = "", name: str = "") -> NoReturn:
    """End this process once the engine hangs. `role`, `name`: what hangs, as in status.progress.hung; the head of
    the environment gets to know it if it has a name."""
    hang = await watch.run()
    owed = f"owes {hang.kind}"
    reasons = "".join(f"; {each}" for each in await asyncio.to_thread(log_stacks))
    message = f"the engine hangs: it {owed} for {hang}{reasons}"
    logger.error("%s", message)
    if name:
        part = hang.blame(role, name, owed + reasons, "its process is replaced")
        await report_hang(os.environ[ENV_HEAD], os.environ[ENV_TOKEN], part)
    end_children()
    os._exit(end_program(message, ExitCode.INFRASTRUCTURE))
