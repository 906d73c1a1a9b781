"""The time of one trainer group: the phase of each moment, who worked, and what time of the run trained or was lost.

    lanes, publisher, turns --> phases, roles --> close, at a step's end --> the history, the status, time.json

Owns time.json. Invariant: each moment belongs to one phase, and counts once.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rljob_api.errors import UserError
from rljob_trainer.driver.ports import TrainerGroupDiedError
from rljob_trainer.driver.role_clock import Phase, PhaseClock, RoleClock
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.history.prometheus import PrometheusMetrics
from rljob_trainer.history.run_state import History
from rljob_trainer.history.run_time import RunTime, read_run_time, write_run_time

_PHASES_OF_TRAINER: tuple[Phase, ...] = ("update", "publish")
"""The trainer works: an outage costs nothing meanwhile."""


@dataclass
class RunClock:
    run_dir: Path
    history: History
    board: StatusBoard
    prometheus: PrometheusMetrics
    roles: RoleClock
    """Which the lanes feed, too; reset when a step begins."""
    phases: PhaseClock
    step_started_at: float = field(default_factory=time.monotonic)
    _is_replaced: bool = False
    """Whether the driver ends because it hangs."""
    _has_begun: bool = False
    """Whether this group has begun a step."""

    def __post_init__(self) -> None:
        """The time since the last driver, or the last trainer group, is counted now."""
        self._away_seconds = self.board.outages.seconds()
        """Those of outages that are counted."""
        self.time = self._resume()
        """That of the whole run, as far as phases are closed."""

    @contextmanager
    def phase(self, name: Phase, waits_for: str = "") -> Iterator[None]:
        """Count the time within as that of a phase, unless a phase that takes precedence is active."""
        self.board.set_phase(name, waits_for)
        with self.phases.within(name, time.monotonic):
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Within, the trainer computes an update."""
        with self.phases.within("update", time.monotonic), self.roles.within("trainer", time.monotonic):
            yield

    @contextmanager
    def publishing(self) -> Iterator[None]:
        with self.phase("publish"), self.roles.within("trainer", time.monotonic):
            yield

    def begin_step(self) -> None:
        self.close()  # the phases of evaluation and checkpoint, between two steps
        self._has_begun = True
        self.step_started_at = time.monotonic()
        self.roles.reset(self.step_started_at)

    def pipeline_seconds(self) -> float:
        """Return the work of the busier of trainer and rollouts since the step began."""
        busy = self.roles.busy_seconds(time.monotonic())
        return max(busy["trainer"], busy["rollouts"])

    @property
    def lost_seconds(self) -> dict[str, float]:
        """Seconds that did not train, by cause."""
        return dict[str, float](self.time.lost.items())

    def lose_hung(self, seconds: float) -> None:
        """Count the last `seconds`, in which the driver hung, for which it is replaced."""
        self.time.add("hung", seconds)
        self._is_replaced = True

    @contextmanager
    def until_end(self) -> Iterator[None]:
        """Within, the driver works. What follows on its orderly end is the time of the queue, and not of a restart."""
        try:
            yield
        except TrainerGroupDiedError as error:
            if error.hung:
                self.time.add("hung", max(part.seconds for part in error.hung))
                self.close()
            raise
        except (asyncio.CancelledError, UserError):
            self._end()
            raise
        self._end()

    def close(self) -> dict[str, float]:
        """End the phases so far, and count them. Return their seconds."""
        closed = self._take_phases()
        # Count outages since the last phases were closed, as far as training waited.
        away = self.board.outages.seconds()
        waited = sum(seconds for phase, seconds in closed.items() if phase not in _PHASES_OF_TRAINER)
        self.time.add("outage", min(away - self._away_seconds, waited))
        self._away_seconds = away
        self.time.close(closed, None if self._has_begun else "start")
        self.board.update(training_share=self.time.share, lost_seconds=self.lost_seconds)
        write_run_time(self.run_dir, self.time)
        return closed

    def _end(self) -> None:
        self.time.has_ended = not self._is_replaced
        self.close()

    def _resume(self) -> RunTime:
        now, taken, trained = time.time(), self._take_phases(), self.history.trained_seconds
        found = read_run_time(self.run_dir)
        if found is None:
            found = RunTime(trained=trained, until=now - sum(taken.values()))
            found.close(taken, "start")
        else:
            found.resume(now, taken.get("starting", 0.0), trained)
        return found

    def _take_phases(self) -> dict[str, float]:
        closed: dict[str, float] = dict(self.phases.take(time.monotonic()).items())
        for name, seconds in closed.items():
            self.history.phase_seconds[name] = self.history.phase_seconds.get(name, 0.0) + seconds
            self.prometheus.phases.labels(name).inc(seconds)
        return closed
