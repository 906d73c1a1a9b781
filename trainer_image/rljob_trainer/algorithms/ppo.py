"""PPO with a critic (Schulman et al., arXiv:1707.06347): advantages from GAE, a clipped ratio, a clipped value loss.

    loss    -min(r A, clip(r) A), r = pi / prox; mean over tokens
    critic  max((V - R)^2, (clip(V, V_before +- valueClip) - R)^2) / 2, R = V_before + A before whitening

An episode is compared with what the critic expects, not with its group. Defaults: clip 0.2 (the paper); discount and
lambda 1, since most answers are rewarded at their end; advantages whitened over the step; valueClip 0.5 (verl).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from rljob_trainer.algorithms import gae
from rljob_trainer.algorithms.advantages import Groups, whiten
from rljob_trainer.algorithms.base import Defaults, EpisodeAdvantages, EpisodeRewards, Floats, Settings
from rljob_trainer.algorithms.grpo import Grpo

if TYPE_CHECKING:
    from torch import Tensor


class Ppo(Grpo):
    """Its policy loss is GRPO's."""

    DEFAULTS: ClassVar[Defaults] = Defaults(normalization="batch")

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.needs = dataclasses.replace(self.needs, values=True)

    def advantages(self, groups: Groups) -> list[list[EpisodeAdvantages | None]]:
        estimated = [[None if episode is None else self._estimate(episode) for episode in group] for group in groups]
        return whiten(estimated) if self.settings.normalization == "batch" else estimated

    def _estimate(self, episode: EpisodeRewards) -> EpisodeAdvantages:
        options = self.settings.algorithm.gae
        estimate = gae.over_turns if options.level == "turn" else gae.over_tokens
        return estimate(episode, self._penalties(episode), discount=options.discount, decay=options.decay)

    def _penalties(self, episode: EpisodeRewards) -> Floats:  # [sampled]
        if not self.settings.kl_in_reward:
            return np.zeros(len(episode.turn_of_token))
        if episode.reference_kl is None:
            raise ValueError("a KL penalty in the reward needs log-probs of the reference model")
        return self.settings.algorithm.kl.coefficient * episode.reference_kl


def value_loss(
    values: Tensor, before: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:  # [tokens], [tokens] bool
    """Return the critic's loss, and where the clip removed its gradient. `before`: the values before the update."""
    loss = (values - returns).square() / 2
    if clip is None:
        return loss, loss < 0
    clipped = (before + (values - before).clamp(-clip, clip) - returns).square() / 2
    return loss.maximum(clipped), clipped > loss
