"""How late the driver's event loop runs what is due, and the end of the process if it no longer turns.
Everything of the driver is in one loop: a piece of work that holds it delays /status, the gateway and all rewards.

A blocked loop answers no probe, and not each node probes. Invariant: the stacks of all threads are in the log
before the process ends. A process that is stopped as a whole has no thread that runs: its probe finds that.
"""

import asyncio
import contextlib
import faulthandler
import threading
import time
from collections.abc import AsyncIterator, Callable

from rljob_trainer.concurrency import end_tasks
from rljob_trainer.liveness.judge import Beat, Judge, Pace

_PERIOD_SECONDS = 1.0
_TURN_SECONDS = 0.1


class LoopWatchdog:
    """A thread watches the loop."""

    def __init__(
        self,
        pace: Pace,
        end: Callable[[str], None],
        observe_lag: Callable[[float], None] = lambda seconds: None,
        *,
        period_seconds: float = _PERIOD_SECONDS,
        turn_seconds: float = _TURN_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`end` gets why the process must end. It is called in the watchdog's thread, once. `observe_lag` gets the
        seconds by which the loop is late, after each `turn_seconds`."""
        self._end, self._observe_lag, self._now = end, observe_lag, clock
        self._period_seconds, self._turn_seconds = period_seconds, turn_seconds
        self._judge = Judge(pace, clock())
        self._num_turns = 0
        self._is_over = threading.Event()

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the running event loop within."""
        turning = asyncio.create_task(self._turn())
        threading.Thread(target=self._watch, name="loop-watchdog", daemon=True).start()
        try:
            yield
        finally:
            self._is_over.set()
            await end_tasks(turning)

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._turn_seconds
            await asyncio.sleep(self._turn_seconds)
            self._num_turns += 1
            self._observe_lag(max(0.0, loop.time() - due))

    def _watch(self) -> None:
        while not self._is_over.wait(self._period_seconds):
            self._judge.tick(self._now())
            self._judge.hear("loop", Beat(self._num_turns, "a turn of the event loop"))
            if hang := self._judge.find_hang():
                faulthandler.dump_traceback()
                self._end(f"the driver's event loop has not turned for {hang}; its stacks are in the log")
                return
