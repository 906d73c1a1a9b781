"""spec.algorithm: what the trainer computes from scored episodes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rljob_api.manifest.base import Spec


class Kl(Spec):
    """KL penalty against the reference model (the initial model)."""

    coefficient: float = Field(default=0.0, ge=0)
    """Coefficient of the penalty in the loss. With 0, no reference model is loaded."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators of KL(policy || reference)."""


class Optimizer(Spec):
    """AdamW over fp32 master weights."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """First-moment decay."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Second-moment decay."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Denominator term."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Maximum global gradient norm. Null: no clipping."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Ratio of the final to the peak learning rate, for linear and cosine."""


class TurnRewards(Spec):
    """Credit of the rewards that an environment gives after a turn. It changes nothing where all of these are 0."""

    discount: float = Field(default=1.0, gt=0, le=1)
    """Factor per turn of later rewards. The return of turn k is its reward, plus discount x the return of turn k + 1.
    The score of the episode counts as a reward of its last turn."""
    baseline: Literal["leaveOneOut", "group", "none"] = "leaveOneOut"
    """What is subtracted from the return of a turn. leaveOneOut: the mean return, from the same turn on, of the other
    members of the group that reached it. group: the same, with the member itself. none: nothing."""


class Gae(Spec):
    """Generalized advantage estimation (Schulman et al. 2016) of ppo."""

    level: Literal["token", "turn"] = "token"
    """What counts as one action: a token, or the whole answer of a turn, whose tokens share its advantage."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """Factor per action of later rewards."""
    decay: float = Field(default=1.0, ge=0, le=1, alias="lambda")
    """Factor per action of later temporal differences. 1: the whole return minus the critic's value, without bias.
    Less: a smaller variance, and the bias of the critic."""
    whiten: bool = True
    """Whether the advantages of a step are shifted to mean 0 and divided by their standard deviation. A step then
    trains once all of its groups are scored."""


class Critic(Optimizer):
    """The critic of ppo: a value model, which starts from spec.model with a new head, and its AdamW."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    value_clip: float | None = Field(default=0.5, gt=0)
    """An update moves a value by at most this, as far as its loss can see. Null: no limit. Rewards that are much larger
    than 1 need a larger one."""


class Algorithm(Spec):
    """GRPO (Shao et al. 2024) and its common variants. Immutable."""

    type: Literal["grpo"] = "grpo"
    """The algorithm."""
    group_size: int = Field(default=8, ge=2, le=1024)
    """Trajectories per prompt."""
    normalization: Literal["group", "batch", "none"] = "group"
    """Divisor of the centered rewards: the standard deviation of the group or of the batch, or none (Dr. GRPO)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip bound of the ratio: 1 - clipLow."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper clip bound of the ratio: 1 + clipHigh (DAPO: 0.28)."""
    loss_level: Literal["token", "sequence"] = "token"
    """token: every token of the batch has the same weight. sequence: every trajectory has the same weight."""
    kl: Kl = Kl()
    entropy_coefficient: float = 0.0
    """Coefficient of the entropy bonus."""
    importance_cap: float | None = Field(default=None, gt=0)
    """Truncated importance sampling: weight tokens by min(trainer/rollout probability, cap). Null: off."""
    zero_std_threshold: float = Field(default=1e-2, ge=0)
    """If the standard deviation of a group's rewards is at most this, its advantages are 0."""
    optimizer: Optimizer = Optimizer()
    turn_rewards: TurnRewards = TurnRewards()
    gae: Gae = Gae()
    critic: Critic = Critic()
