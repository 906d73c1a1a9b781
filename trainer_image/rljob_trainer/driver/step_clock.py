"""How long ago the last step counted, and how long the job's own steps allow. Pure: the caller ticks.

Invariant: time in which the job waits for something outside of it does not count, nor that after the last step.
"""

from rljob_trainer.liveness.judge import Beat, Judge, Pace

_STEP, _WARM_STEP = "step", "step of the warm start"
_IDLE = "nothing"


class StepClock:
    def __init__(self, pace: Pace, now: float) -> None:
        self._judge, self._num_steps, self._kind = Judge(pace, now), 0, _STEP

    def tick(self, now: float, *, is_paused: bool = False, is_idle: bool = False) -> None:
        """`now`: of a monotonic clock. `is_paused`: the time since the last tick does not count. `is_idle`: nothing
        that the driver could wait for has work now."""
        self._judge.tick(now, is_paused=is_paused)
        self._judge.hear(_IDLE, Beat(0, _IDLE if is_idle else ""))

    def begin(self, *, is_warm: bool = False) -> None:
        """The driver trains, with its first trainer group or a later one. `is_warm`: the step is of the warm start, and
        says nothing about those that sample."""
        self._kind = _WARM_STEP if is_warm else _STEP
        self._judge.hear(_STEP, Beat(self._num_steps, self._kind))

    def finish(self, *, is_warm: bool = False) -> None:
        """A step counts. `is_warm`: the next one is of the warm start."""
        self._num_steps += 1
        self.begin(is_warm=is_warm)

    @property
    def seconds(self) -> float | None:
        """Since the last step; None before the driver trains."""
        return self._judge.seconds(_STEP)

    @property
    def limit_seconds(self) -> float:
        return self._judge.pace.limit(self._kind)

    @property
    def is_stuck(self) -> bool:
        """Whether the step is late, and the driver has waited for itself alone for as long as any work may take.
        Between two pieces of work, all are idle for a moment."""
        is_late = (self.seconds or 0.0) > self.limit_seconds
        return is_late and (self._judge.seconds(_IDLE) or 0.0) > self._judge.pace.floor
