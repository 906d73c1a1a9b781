"""The end of a trainer group that must stop, because the head's Pod or a trainer's Pod ends: saves its last steps.

    SIGTERM of the head, or `leave` --> an update or a save that has begun ends --> checkpoint --> report
                                    '-> generation is aborted

Owns the decision what to save, and the text that says what became of the last steps. Invariants: only a state of the
history is saved; all of it takes at most half of the grace period, so that the rest can end in order.
"""

import asyncio
import logging
from collections.abc import Coroutine

from rljob_trainer.concurrency import wait_for_event
from rljob_trainer.driver.between_steps import BetweenSteps

log = logging.getLogger(__name__)

NOTHING_TRAINS = "no trainer group runs"


class PodLeavesError(Exception):
    """A trainer Pod is terminated, and the group with it."""


class LastSave:
    """The last save of one trainer group."""

    def __init__(self, between: BetweenSteps, grace_seconds: float) -> None:
        """`grace_seconds`: from SIGTERM to SIGKILL."""
        self._between, self._seconds = between, grace_seconds / 2
        self._deadline: float | None = None
        """On the event loop's clock, once the stop has begun."""
        self._leaves, self._is_over = asyncio.Event(), asyncio.Event()
        self.report = NOTHING_TRAINS
        """What became of the last steps."""

    async def leave(self) -> str:
        """Let `run` stop, and return what became of the last steps once `save` has ended."""
        self._leaves.set()
        await self._is_over.wait()
        return self.report

    async def run(self, work: Coroutine[None, None, None]) -> None:
        """Run `work` to its end. A stop cancels it, once what the trainer's state follows from has ended. Raise
        PodLeavesError or CancelledError then."""
        working, leaving = asyncio.create_task(work), asyncio.create_task(self._leaves.wait())
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            await self._settle(working)
            if working.done():  # also if the group dies meanwhile
                return working.result()
            raise PodLeavesError
        except asyncio.CancelledError:
            await self._settle(working)
            raise
        finally:
            working.cancel()
            leaving.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def save(self, checkpoint_seconds: float) -> None:
        """Save the steps since the last checkpoint, if that fits. `checkpoint_seconds`: of the last one. The first
        cancellation waits for the save: the Pods of a job are terminated one after the other."""
        saving = asyncio.create_task(self._save(checkpoint_seconds))
        try:
            await asyncio.shield(saving)
        except asyncio.CancelledError:
            await asyncio.shield(saving)
            raise
        finally:
            saving.cancel()

    async def _save(self, checkpoint_seconds: float) -> None:
        step = self._between.ledger.history.step
        try:
            async with asyncio.timeout_at(self._begin()):
                lost = await self._try_to_save(step, checkpoint_seconds)
        except TimeoutError:
            lost = f"a checkpoint takes more than the {self._seconds:.0f} s for it"
        except Exception as error:  # of any kind: the previous checkpoint is intact, and the exit must not wait
            lost = f"{type(error).__name__}: {error}"
        self._finish(step, lost)

    def end(self) -> None:
        """Answer those who wait for `save`, which may not have been called: the group has ended by itself."""
        self._is_over.set()

    async def _try_to_save(self, step: int, checkpoint_seconds: float) -> str:
        """Return why the steps are lost; an empty text if they are saved."""
        checkpoints = self._between.checkpoints
        await checkpoints.wait()
        if step == 0 or checkpoints.exists(step):
            return ""
        if not self._between.settled.is_set():
            return f"step {step + 1} was being applied, and did not end in time"
        if checkpoint_seconds >= self._seconds:
            return f"the last checkpoint took {checkpoint_seconds:.0f} s, and there are {self._seconds:.0f} s for one"
        await self._between.save(exports=False)  # the next group writes it: a model takes longer than there is time
        await checkpoints.wait()
        return ""

    async def _settle(self, working: asyncio.Task[None]) -> None:
        """Wait until the trainer's state is that of the history, or `working` has ended."""
        deadline = self._begin()
        try:
            async with asyncio.timeout_at(deadline):
                while not (self._between.settled.is_set() or working.done()):
                    await wait_for_event(self._between.settled, working)
        except TimeoutError:
            log.warning("the update did not end in %.0f s", self._seconds)

    def _begin(self) -> float:
        """Return the time until which the steps must be saved."""
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._seconds
        return self._deadline

    def _finish(self, step: int, lost: str) -> None:
        saved = self._between.checkpoints.newest or 0
        if lost and saved < step:
            self.report = f"steps after {saved} are not saved: {lost}"
            log.warning("%s", self.report)
        else:
            self.report = f"step {step} is saved" if step else "no step has ended"
            log.info("%s", self.report)
        self._is_over.set()
