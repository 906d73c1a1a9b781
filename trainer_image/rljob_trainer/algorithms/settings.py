"""An algorithm's settings, with the type's defaults where the user left a field null. Pure, without torch.

Each algorithm's file has the `Defaults` of its paper.
"""

import math
from dataclasses import dataclass

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
    """Limit of one answer."""
    max_replacements: int
    """Groups without signal that are replaced per step. 0: none."""

    @property
    def reward_weights(self) -> tuple[float, ...]:
        """[rewards] In the order of `rewards`; then `own_weight`, if there is one."""
        own = () if self.own_weight is None else (self.own_weight,)
        return (*(reward.weight for reward in self.rewards), *own)

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
