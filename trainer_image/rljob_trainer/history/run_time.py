"""What the wall time of a run went into, over all of its drivers: training, or a cause for which it was lost. Pure.

    a driver starts --> resume: what was done since the checkpoint is repeated --> close, at each end of phases --> stop

Invariant: `trained` and `lost` add up to the time from the run's begin to `until`, and none is negative. Time counts
once: seconds that `add` gives to a cause are taken from the phases in which they passed.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

log = logging.getLogger(__name__)

FILE_TIME: Final = "time.json"
Cause = Literal["start", "checkpoint", "evaluation", "restart", "hung", "outage", "queue"]
"""start: from the start of a driver to its first step. checkpoint, evaluation: training waited for it. restart: steps
that are repeated, and from the death of a driver to the start of the next one. hung: a rank or the driver finished
nothing, for which it was replaced. outage: training waited while something outside of the job was away. queue: from the
orderly end of a driver, such as for a suspension, to the start of the next one."""
_CAUSE_OF_PHASE: Final[Mapping[str, Cause]] = {
    "starting": "start",
    "checkpoint": "checkpoint",
    "evaluate": "evaluation",
}


class RunTime(BaseModel):
    """All in seconds."""

    model_config = ConfigDict(extra="forbid")

    trained: float = 0.0
    """Time of steps that count: generation, scores, updates, and weights for the rollouts."""
    lost: dict[Cause, float] = {}
    until: float
    """Up to which wall time, since 1970, this is known."""
    has_ended: bool = False
    """Whether the last driver ended in order."""
    named: dict[Cause, float] = {}
    """What `add` got since the last phases were closed."""

    @property
    def share(self) -> float | None:
        """Share that trained of the time in which the job could: the queue is not in it. None: no time has passed."""
        total = self.trained + sum(self.lost.values()) - self.lost.get("queue", 0.0)
        return self.trained / total if total > 0 else None

    def add(self, cause: Cause, seconds: float) -> None:
        """Say for what the last `seconds` were lost, whatever their phase. They are counted when it is closed."""
        self.named[cause] = self.named.get(cause, 0.0) + seconds

    def resume(self, now: float, started_seconds: float, trained: float) -> None:
        """Continue with a checkpoint. `now`: the wall time. `started_seconds`: spent on the start of this driver.
        `trained`: at the checkpoint; what was trained since will be repeated."""
        self._lose("restart", max(0.0, self.trained - trained))
        self.trained, passed = min(self.trained, trained), max(0.0, now - self.until)
        started = min(started_seconds, passed)
        self._lose("start", started)
        self._lose("queue" if self.has_ended else "restart", passed - started)
        self.until, self.has_ended, self.named = max(self.until, now), False, {}

    def close(self, phases: Mapping[str, float], other: Cause | None) -> None:
        """Count phases that followed on `until`. `other`: for what those were lost that have no cause; None: they
        trained."""
        passed = sum(phases.values())
        self.until += passed
        of_cause: dict[Cause | None, float] = {}
        for phase, seconds in phases.items():
            cause = _CAUSE_OF_PHASE.get(phase, other)
            of_cause[cause] = of_cause.get(cause, 0.0) + seconds
        for named, seconds in self.named.items():
            for cause in sorted(of_cause, key=lambda cause: cause != other):  # most likely, training waited
                taken = min(seconds, of_cause[cause])
                of_cause[cause], seconds = of_cause[cause] - taken, seconds - taken
                self._lose(named, taken)
        self.named = {}
        for cause, seconds in of_cause.items():
            if cause is None:
                self.trained += seconds
            else:
                self._lose(cause, seconds)

    def _lose(self, cause: Cause, seconds: float) -> None:
        if seconds > 0:
            self.lost[cause] = self.lost.get(cause, 0.0) + seconds


def read_run_time(run_dir: Path) -> RunTime | None:
    """Return what the last driver wrote; None if it is missing or torn: the run begins then."""
    try:
        return RunTime.model_validate_json((run_dir / FILE_TIME).read_bytes())
    except (OSError, ValidationError):
        return None


def write_run_time(run_dir: Path, time: RunTime) -> None:
    """Replace the file at once. It is not flushed to the disk: after a crash of the node, an older one is as good."""
    partial = run_dir / f".{FILE_TIME}.partial"
    try:
        partial.write_text(time.model_dump_json(exclude={"named"}), encoding="utf-8")
        partial.replace(run_dir / FILE_TIME)
    except OSError as error:  # a full disk ends the run elsewhere, if it must
        log.warning("cannot write %s: %s", run_dir / FILE_TIME, error)
