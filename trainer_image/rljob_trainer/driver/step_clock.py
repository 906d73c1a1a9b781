"""How long ago the last step counted, and how long the job's own steps allow. Pure: the caller ticks.

Invariant: time in which the job waits for something outside of it does not count, nor that after the last step.
"""

from rljob_trainer.liveness.judge import Pace, Piece, Work

_KIND = "step"


class StepClock:
    def __init__(self, pace: Pace, now: float) -> None:
        self._work = Work(pace, now)
        self._step: Piece | None = None
        self._idle_since: float | None = None

    def tick(self, now: float, *, is_paused: bool = False, is_idle: bool = False) -> None:
        """`now`: of a monotonic clock. `is_paused`: the time since the last tick does not count. `is_idle`: nothing
        that the driver could wait for has work now."""
        self._work.tick(now, is_paused=is_paused)
        if not is_idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._work.now

    def begin(self) -> None:
        """The driver trains, with its first trainer group or a later one."""
        self._step = self._step or self._work.begin(_KIND)

    def finish(self) -> None:
        """A step counts."""
        if self._step is not None:
            self._work.finish(self._step)
        self._step = self._work.begin(_KIND)

    @property
    def seconds(self) -> float | None:
        """Since the last step; None before the driver trains."""
        return None if self._step is None else self._work.seconds(self._step)

    @property
    def limit_seconds(self) -> float:
        return self._work.pace.limit(_KIND)

    @property
    def is_stuck(self) -> bool:
        """Whether the step is late, and the driver has waited for itself alone for as long as any work may take.
        Between two pieces of work, all are idle for a moment."""
        if self._idle_since is None or self._work.find_hang() is None:
            return False
        return self._work.now - self._idle_since > self._work.pace.floor
