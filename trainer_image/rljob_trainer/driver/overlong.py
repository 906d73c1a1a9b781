"""Whether the punishment of long answers outweighs the rewards. Pure."""

from __future__ import annotations

from rljob_api.run.metrics import StepRecord
from rljob_trainer.algorithms.settings import Settings

MAX_SHAPED_SHARE = 0.5
"""The quickstart with dapo begins at 0.67, and learned within 6 steps to answer with nothing: an answer that is too
long costs 1 there, and a wrong one 0."""


def judge_overlong(record: StepRecord, settings: Settings) -> str:
    """Return a warning for the log, or an empty text while all is well.

    The text has the numbers of the step: log it when the text before it was empty.
    """
    share = record.truncated_share
    if settings.truncated != "shape" or share is None or share <= MAX_SHAPED_SHARE:
        return ""
    return (
        f"in step {record.step} {share:.0%} of the answers reached rollout.sampling.maxTokens "
        f"({settings.max_tokens}), and each lost {settings.algorithm.truncated.penalty:g} of its score "
        "(algorithm.truncated): the model may learn to answer with nothing; raise rollout.sampling.maxTokens, lower "
        "algorithm.truncated.penalty, or set algorithm.truncated.answers to train or mask"
    )
