"""The interface of an algorithm: advantages for each token (numpy, in the driver) and a loss (torch, in the ranks).

One file per algorithm, registered by `spec.algorithm.type`. Common to all, and applied by the caller: the weight of a
token, the correction for the rollout's weights, the KL penalty and the entropy bonus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from rljob_trainer.algorithms.settings import Defaults, Settings

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
