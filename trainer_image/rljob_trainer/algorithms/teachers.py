"""Teachers: their log-probs of an episode's tokens become a score and advantages. On-policy distillation. Pure.

    d_t  = clip(log pi(y_t) - log nu(y_t), -limit, limit)       pi: the policy that sampled y; nu: the teacher
    A_t += -weight x d_t

With topK a teacher adds nothing to the advantages, but its k likeliest tokens v to the loss (algorithms.losses):

    weight x clip(sum over v of nu(v) x (log nu(v) - log pi(v)), -limit, limit)

The mean of d over the policy's own tokens estimates KL(pi || nu), whose negative is the score (Agarwal et al.,
arXiv:2306.13649; as advantage: Lu, On-Policy Distillation, Thinking Machines, 2025). The advantage is added after the
algorithm has normalized those of the other rewards. Invariant: a row without this teacher, or a result without
log-probs, adds nothing.
"""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rljob_api.manifest.services.models import TeacherReward
from rljob_api.manifest.services.reward import Reward
from rljob_api.wire.base import InvalidReason
from rljob_trainer.episodes.types import TOP, Episode, ScoredResult, told_dtype

_NO_TOP = np.array((0, -1e4), TOP)
"""Adds nothing to the divergence: its probability is 0."""


def score_by_teacher(teacher: TeacherReward, result: ScoredResult, episode: Episode) -> ScoredResult:
    """Return the result with minus the mean difference of log-probs as score; invalid if there is not one for each
    sampled token."""
    if not result.valid or result.failed_as is not None:
        return result
    size = told_dtype(teacher.top_k).itemsize
    lengths = [size * int(np.count_nonzero(segment.loss_mask)) for segment in episode.segments]
    if [len(base64.b64decode(each)) for each in result.logprobs or ()] != lengths:
        invalid = {"valid": False, "score": None, "reason": InvalidReason.BAD_RETURN, "logprobs": None}
        return result.model_copy(update={**invalid, "message": "the log-probs are not those of the sampled tokens"})
    differences = _differ(teacher, _read(teacher, result), episode)
    return result.model_copy(update={"score": -float(differences.mean()) if len(differences) else 0.0})


def teacher_advantages(rewards: Sequence[Reward], episode: Episode) -> NDArray[np.float64] | None:
    """Return what the teachers add to the advantage of each sampled token, in the order of the segments; None if there
    is none."""
    parts = [
        -weight * _differ(teacher, told, episode)
        for weight, teacher, told in _list_told(rewards, episode)
        if not teacher.top_k
    ]
    return np.sum(parts, axis=0) if parts else None


def teaches(rewards: Sequence[Reward], episode: Episode) -> bool:
    """Return whether what teachers told of the episode has a gradient."""
    return any(
        weight and (teacher.top_k or _differ(teacher, told, episode).any())
        for weight, teacher, told in _list_told(rewards, episode)
    )


def find_top(teachers: Sequence[Reward], episode: Episode) -> NDArray[np.void] | None:  # [sampled, teachers, k]
    """Return TrainRow.top of all segments, in their order. A teacher that did not read the episode has _NO_TOP.
    `teachers`: those with topK."""
    if not teachers:
        return None
    found = np.full((episode.num_sampled, len(teachers), max(each.top_k for each in teachers)), _NO_TOP)
    for i, reward in enumerate(teachers):
        for *_, told in _list_told([reward], episode):
            found[:, i, : reward.top_k] = np.concatenate(told)["top"]
    return found


def _list_told(rewards: Sequence[Reward], episode: Episode) -> list[tuple[float, TeacherReward, list[NDArray[Any]]]]:
    return [
        (reward.weight, reward.teacher, _read(reward.teacher, result))
        for reward in rewards
        if reward.teacher and (result := episode.results.get(reward.name)) and result.logprobs is not None
    ]


def _read(teacher: TeacherReward, result: ScoredResult) -> list[NDArray[Any]]:  # [segments][sampled]
    return [np.frombuffer(base64.b64decode(each), told_dtype(teacher.top_k)) for each in result.logprobs or ()]


def _differ(teacher: TeacherReward, told: Sequence[NDArray[Any]], episode: Episode) -> NDArray[np.float64]:  # [sampled]
    """Return log policy - log teacher, within the limit."""
    own = [segment.logprobs[segment.loss_mask] for segment in episode.segments]
    theirs = [each["logprob"] if teacher.top_k else each for each in told]
    differences = np.concatenate([np.zeros(0), *own]) - np.concatenate([np.zeros(0), *theirs])
    return np.clip(differences, -teacher.clip, teacher.clip)
