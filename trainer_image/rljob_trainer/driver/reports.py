"""Where a run reports to, and what episodes report the moment they are scored."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from rljob_api.manifest.status import RewardProblem
from rljob_api.wire.base import Lane
from rljob_trainer.driver.problems import ProblemLog
from rljob_trainer.driver.recent_samples import RecentSampleLog
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.episodes.types import Episode, Group
from rljob_trainer.history.prometheus import PrometheusMetrics
from rljob_trainer.history.tracking import Trackers
from rljob_trainer.history.trajectory_log import Decode

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reports:
    board: StatusBoard
    trackers: Trackers
    prometheus: PrometheusMetrics
    decode: Decode | None = None
    """Shows the tokens of conversations in the trajectory log."""
    problems: ProblemLog = field(default_factory=ProblemLog)
    recent: RecentSampleLog = field(default_factory=RecentSampleLog)

    def record_damaged(self, step: int, checkpoints: Mapping[str, str]) -> None:
        """Report damaged checkpoints, with their causes, and the step from which the job resumes."""
        self.problems.record_damaged(step, checkpoints)
        self.board.update(problems=self.problems.failures)

    def record_scored(self, lane: Lane, group: Group, episode: Episode) -> None:
        """Report an episode whose last reward has arrived, and problems of a new kind."""
        self.prometheus.record_scored(lane, episode)
        step = self.board.status.step + (lane == "train")
        self.recent.record(lane, step, group, episode)
        new = self.problems.record(step, episode)
        for problem in new:
            log.warning("%s", RewardProblem.of(problem).describe())
        if new:
            self.board.update(problems=self.problems.failures)
