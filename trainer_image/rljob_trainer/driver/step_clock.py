"""How long ago the last step counted, and how long the job's own steps allow. Pure: the caller ticks.

Invariant: time in which the job waits for something outside of it does not count, nor that after the last step.
"""

from rljob_trainer.liveness.judge import Beat, Judge, Pace

_STEP = "step"
_IDLE = "nothing"


class StepClock:
    def __init__(self, pace: Pace, now: float) -> None:
        self._judge, self._num_steps = Judge(pace, now), 0

    def tick(self, now: float, *, is_paused: bool = False, is_idle: bool = False) -> None:
        """`now`: of a monotonic clock. `is_paused`: the time since the last tick does not count. `is_idle`: nothing
        that the driver could wait for has work now."""
        self._judge.tick(now, is_paused=is_paused)
        self._judge.hear(_IDLE, Beat(0, _IDLE if is_idle else ""))

    def begin(self) -> None:
        """The driver trains, with its first trainer group or a later one."""
        self._judge.hear(_STEP, Beat(self._num_steps, _STEP))

    def finish(self) -> None:
        """A step counts."""
        self._num_steps += 1
        self.begin()

    @property
    def seconds(self) -> float | None:
        """Since the last step; None before the driver trains."""
        return self._judge.seconds(_STEP)

    @property
    def limit_seconds(self) -> float:
        return self._judge.pace.limit(_STEP)

    @property
    def is_stuck(self) -> bool:
        """Whether the step is late, and the driver has waited for itself alone for as long as any work may take.
        Between two pieces of work, all are idle for a moment."""
        is_late = (self.seconds or 0.0) > self.limit_seconds
        return is_late and (self._judge.seconds(_IDLE) or 0.0) > self._judge.pace.floor
