"""Teachers: their log-probs of an episode's tokens become a score and advantages. On-policy distillation. Pure.

    d_t  = clip(log pi(y_t) - log nu(y_t), -limit, limit)       pi: the policy that sampled y; nu: the teacher
    A_t += -weight x d_t

The mean of d over the policy's own tokens estimates KL(pi || nu), whose negative is the score (Agarwal et al.,
arXiv:2306.13649; as advantage: Lu, On-Policy Distillation, Thinking Machines, 2025). The advantage is added after the
algorithm has normalized those of the other rewards. Invariant: a row without this teacher, or a result without
log-probs, adds nothing.
"""

import base64
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rljob_api.manifest.services.models import TeacherReward
from rljob_api.manifest.services.reward import Reward
from rljob_api.wire.base import InvalidReason
from rljob_trainer.episodes.types import Episode, ScoredResult


def score_by_teacher(teacher: TeacherReward, result: ScoredResult, episode: Episode) -> ScoredResult:
    """Return the result with minus the mean difference of log-probs as score; invalid if there is not one for each
    sampled token."""
    if not result.valid or result.failed_as is not None:
        return result
    found = _read(result)
    if [len(each) for each in found] != [int(np.count_nonzero(segment.loss_mask)) for segment in episode.segments]:
        invalid = {"valid": False, "score": None, "reason": InvalidReason.BAD_RETURN, "logprobs": None}
        return result.model_copy(update={**invalid, "message": "the log-probs are not those of the sampled tokens"})
    differences = _differ(teacher, found, episode)
    return result.model_copy(update={"score": -float(differences.mean()) if len(differences) else 0.0})


def teacher_advantages(rewards: Sequence[Reward], episode: Episode) -> NDArray[np.float64] | None:
    """Return what the teachers add to the advantage of each sampled token, in the order of the segments; None if there
    is none."""
    parts = [
        -reward.weight * _differ(reward.teacher, _read(result), episode)
        for reward in rewards
        if reward.teacher and (result := episode.results.get(reward.name)) and result.logprobs is not None
    ]
    return np.sum(parts, axis=0) if parts else None


def _read(result: ScoredResult) -> list[NDArray[np.float32]]:  # [segments][sampled]
    return [np.frombuffer(base64.b64decode(each), "<f4") for each in result.logprobs or ()]


def _differ(
    teacher: TeacherReward, logprobs: Sequence[NDArray[np.float32]], episode: Episode
) -> NDArray[np.float64]:  # [sampled]
    """Return log policy - log teacher, within the limit."""
    own = [segment.logprobs[segment.loss_mask] for segment in episode.segments]
    differences = np.concatenate([np.zeros(0), *own]) - np.concatenate([np.zeros(0), *logprobs])
    return np.clip(differences, -teacher.clip, teacher.clip)
