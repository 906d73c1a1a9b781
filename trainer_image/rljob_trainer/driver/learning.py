"""Whether the last steps gave the model anything to learn from. Pure.

Facts come in through `StepsWithoutSignal.after`, once per step; `judge` decides. The counts are part of the history, so
a resumed run continues them. Invariant: one step with an advantage resets every count.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from rljob_api.manifest.services.reward import Reward
from rljob_api.run.metrics import StepRecord
from rljob_api.wire.driver_status import DriverProblem, Learning, LearningReason
from rljob_trainer.driver.reports import is_field
from rljob_trainer.episodes.types import UpdateMetrics

MAX_SKIPPED_UPDATES = 10
"""Single updates overflow now and then; this many in a row mean that the parameters or the rewards are broken."""
_MAX_REASONS = 3
"""Problems in the message of a failed job."""


class StepSignal(enum.Enum):
    ADVANTAGES = "at least one sample has an advantage"
    NO_ADVANTAGES = "the samples of each group have the same score"
    NO_VALID_SAMPLES = "no sample may be trained on"


class StepsWithoutSignal(NamedTuple):
    """Consecutive steps up to the last one."""

    without_valid: int = 0
    """Without a sample that may be trained on."""
    without_advantage: int = 0
    """Without an advantage; this includes the former."""

    def after(self, signal: StepSignal) -> StepsWithoutSignal:
        if signal is StepSignal.ADVANTAGES:
            return StepsWithoutSignal()
        is_invalid = signal is StepSignal.NO_VALID_SAMPLES
        return StepsWithoutSignal(self.without_valid + 1 if is_invalid else 0, self.without_advantage + 1)


def classify_step(record: StepRecord) -> StepSignal:
    if record.num_masked == record.num_samples > 0:  # a step of the warm start has no samples
        return StepSignal.NO_VALID_SAMPLES
    return StepSignal.NO_ADVANTAGES if record.zero_signal_share == 1 else StepSignal.ADVANTAGES


def count_last_skipped(updates: Sequence[UpdateMetrics], before: int) -> int:
    """Return the number of consecutive skipped updates, up to the last one. `before`: up to the previous step."""
    for update in updates:
        before = before + 1 if update.is_skipped else 0
    return before


def describe_skipped(count: int) -> str:
    """Return why a job fails whose updates change nothing; empty while it may continue."""
    if count < MAX_SKIPPED_UPDATES:
        return ""
    return (
        f"spec.algorithm: the gradients of the last {count} updates were not finite, so the model did not change: "
        "lower algorithm.optimizer.learningRate, set trainer.dtype to float32 or bfloat16, and look for immense "
        "rewards in `rljob trajectories`"
    )


def judge(counts: StepsWithoutSignal, step: int, limit: int, zero_std_threshold: float, num_warm: int = 0) -> Learning:
    """Return the verdict after `step` steps. Its message is the same in each step of a series. `limit`:
    schedule.maxStepsWithoutSignal. `num_warm`: steps of the warm start, which have no advantages."""
    if step > num_warm and counts.without_advantage == 0:
        message = "the last step had advantages"
        return Learning(is_learning=True, reason=LearningReason.ADVANTAGES_FOUND, message=message)
    if limit == 0 or counts.without_advantage < limit:
        return Learning()
    if counts.without_valid >= limit:
        first = step - counts.without_valid + 1
        message = f"since step {first} no sample has had a valid score"
        return Learning(is_learning=False, reason=LearningReason.NO_VALID_SAMPLES, message=message)
    first = step - counts.without_advantage + 1
    message = (
        f"since step {first} no sample has had an advantage, so the model learns nothing: the scores of each group are "
        "equal or invalid, or differ by at most algorithm.zeroStdThreshold "
        f"({zero_std_threshold:g}); change the rewards or their weights so that they distinguish "
        "answers, use easier prompts, or raise algorithm.groupSize"
    )
    return Learning(is_learning=False, reason=LearningReason.NO_ADVANTAGES, message=message)


def describe_failure(counts: StepsWithoutSignal, problems: Sequence[DriverProblem], rewards: Sequence[Reward]) -> str:
    """Return why a job without valid samples fails, with its most frequent problems. The first word is the field."""
    top = sorted(problems, key=lambda problem: -problem.count)[:_MAX_REASONS]
    reasons = [
        f"{each.count} x {each.reason} of {'' if is_field(each) else 'reward '}{each.reward}: {each.message}"
        for each in top
    ]
    return (
        f"{_field(top, rewards)}: no sample of the last {counts.without_valid} steps has a valid score, so the model "
        f"learned nothing: {'; '.join(reasons) or 'no weighted sum of scores is finite'}; fix that, or set "
        "spec.schedule.maxStepsWithoutSignal to 0 to continue regardless"
    )


def _field(problems: Sequence[DriverProblem], rewards: Sequence[Reward]) -> str:
    """Return the path of the reward with the most frequent problem, or of what failed."""
    if problems and is_field(problems[0]):
        return problems[0].reward
    for index, reward in enumerate(rewards):
        if problems and reward.name == problems[0].reward:
            return f"spec.rewards[{index}]" + (f".{reward.kind}" if reward.kind else "")
    return "spec.rewards" if rewards else "spec.agent"
