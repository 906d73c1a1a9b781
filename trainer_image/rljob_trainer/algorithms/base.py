"""The interface of an algorithm: advantages for each token (numpy, in the driver) and a loss (torch, in the ranks).

One file per algorithm, registered by `spec.algorithm.type`. Common to all, and applied by the caller: the weight of a
token, the correction for the rollout's weights, the KL penalty and the entropy bonus.
Its settings have the type's defaults where the user left a field null: each algorithm's file has the `Defaults` of its
paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from rljob_api.manifest.algorithm import Algorithm, LossLevel, Normalization, TruncatedAnswers
from rljob_api.manifest.base import decide
from rljob_api.manifest.job import RLJobSpec
from rljob_api.manifest.services.reward import Reward


@dataclass(frozen=True)
class Defaults:
    """What a paper prescribes, for the fields that may be null."""

    clip_low: float | None = 0.2
    """None: the ratio has no lower bound."""
    clip_high: float | None = 0.2
    """None: the ratio has no upper bound."""
    dual_clip: float | None = 3.0
    """Bound of the ratio of negative advantages, which clip_high does not limit. None: there is none. Few papers have
    it; verl's default is on for every type with a clipped ratio."""
    level: LossLevel = "token"
    normalization: Normalization = "group"
    truncated: TruncatedAnswers = "train"
    replaces_groups: bool = False
    """Dynamic sampling."""
    clips_stale_tokens: bool = True
    """Whether the ratio of tokens that older weights sampled has the way since then. False: the range is too narrow for
    more than the updates of one step."""


@dataclass(frozen=True)
class Settings:
    algorithm: Algorithm
    """As the user wrote it; for everything that does not depend on the type."""
    rewards: tuple[Reward, ...]
    """spec.training_rewards."""
    own_weight: float | None
    """Weight of what the environment or the program gives; None without one."""
    clip_low: float | None
    clip_high: float | None
    dual_clip: float | None
    level: LossLevel
    normalization: Normalization
    truncated: TruncatedAnswers
    buffer_tokens: int
    """Answers within this many tokens of the limit lose score; with truncated: shape."""
    max_tokens: int
    """Limit of one answer, as the job began with it."""
    max_replacements: int
    """Groups without signal that are replaced per step. 0: none."""

    @property
    def reward_weights(self) -> tuple[float, ...]:
        """[rewards] In the order of `summed`; then `own_weight`, if there is one."""
        own = () if self.own_weight is None else (self.own_weight,)
        return (*(reward.weight for reward in self.summed), *own)

    @property
    def summed(self) -> list[Reward]:
        """Those of `rewards` that the score is the sum of: not teachers."""
        return [reward for reward in self.rewards if reward.teacher is None]

    @property
    def top_teachers(self) -> list[Reward]:
        """Those of `rewards` whose likeliest tokens are part of the loss."""
        return [reward for reward in self.rewards if reward.top_k]

    @property
    def kl_in_reward(self) -> bool:
        return self.algorithm.kl.coefficient > 0 and self.algorithm.kl.estimator == "k1"

    @property
    def needs_whole_step(self) -> bool:
        return self.normalization == "batch" or self.algorithm.advantages.per_reward


def resolve(spec: RLJobSpec, defaults: Defaults) -> Settings:
    """Return the settings of `spec`, whose type has these `defaults`."""
    algorithm = spec.algorithm
    loss, dynamic, limit = algorithm.loss, algorithm.dynamic_sampling, spec.rollout.sampling.answer_tokens
    replaces = decide(dynamic.enabled, automatic=defaults.replaces_groups)
    return Settings(
        algorithm=algorithm,
        rewards=tuple(spec.training_rewards),
        own_weight=spec.agent.reward_weight if spec.agent.is_hosted else None,
        clip_low=defaults.clip_low if loss.clip_low is None else loss.clip_low,
        clip_high=defaults.clip_high if loss.clip_high is None else loss.clip_high,
        dual_clip=loss.dual_clip or defaults.dual_clip,
        level=loss.level or defaults.level,
        normalization=algorithm.advantages.normalization or defaults.normalization,
        truncated=algorithm.truncated.answers or defaults.truncated,
        buffer_tokens=min(limit, algorithm.truncated.buffer_tokens or math.ceil(limit / 5)),
        max_tokens=limit,
        max_replacements=math.floor(dynamic.max_replacement_factor * spec.schedule.prompts_per_step) if replaces else 0,
    )


if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Needs:
    """What an algorithm needs beyond log-probs of the rollout and of the policy."""

    reference: bool = False
    """Log-probs of the reference model before advantages are computed (a KL penalty in the reward)."""
    values: bool = False
    """A critic, and its values before advantages are computed."""
    whole_step: bool = False
    """All groups of the step at once, because a statistic of the batch enters each advantage."""


@dataclass(frozen=True)
class EpisodeRewards:
    """What advantages are computed from. A masked episode is not among them."""

    score: float
    """Weighted sum of the rewards for the whole episode, with what a long answer loses."""
    turn_rewards: Sequence[float]
    """[turns] What the environment gave after each turn; 0.0 where it gave nothing."""
    turn_of_token: NDArray[np.int32]
    """[sampled] Turn of each sampled token. Never descends: the tokens are in the order of the turns, which is that of
    the segments unless a program continued an earlier one."""
    components: Sequence[float] = ()
    """[rewards + 1] The score of each reward without its weight, in the order of Settings.reward_weights; then what a
    long answer loses, as a negative number. The score is their weighted sum."""
    reference_kl: Floats | None = None
    """[sampled] Policy's minus reference model's log-prob; only if needed."""
    values: Floats | None = None
    """[sampled] The critic's values; only if needed."""
    teachers: Floats | None = None
    """[sampled] What teachers add to the advantages; None without any."""


@dataclass(frozen=True)
class EpisodeAdvantages:
    advantages: Floats
    """[sampled]"""
    returns: Floats | None = None
    """[sampled] Targets of the critic; None without one."""


@dataclass(frozen=True)
class LossInputs:
    """The sampled tokens of one micro-batch. All [tokens], in fp32."""

    logprobs: Tensor
    """Log-probs of the policy, with gradient."""
    proximal_logprobs: Tensor
    """Log-probs of the policy to which clipping refers (corrections.loglinear_proximal); no gradient."""
    rollout_logprobs: Tensor
    advantages: Tensor
    rows: Tensor
    """int64: tokens of one row have the same number, 0 <= number < num_rows. A row is never split."""
    num_rows: int


@dataclass(frozen=True)
class PolicyLoss:
    per_token: Tensor
    """[tokens] To be minimised; with gradient."""
    clipped: Tensor
    """[tokens] bool: where clipping removed the gradient, or reduced a weight."""


class AlgorithmCode(Protocol):
    DEFAULTS: ClassVar[Defaults]

    def __init__(self, settings: Settings) -> None: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def needs(self) -> Needs: ...

    def advantages(self, groups: Sequence[Sequence[EpisodeRewards | None]]) -> list[list[EpisodeAdvantages | None]]:
        """Return the advantages of each group's episodes; None for a masked one.  [groups][episodes]"""
        ...

    def loss(self, inputs: LossInputs) -> PolicyLoss: ...
