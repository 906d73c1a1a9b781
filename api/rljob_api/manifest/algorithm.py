"""spec.algorithm: what the trainer computes from scored episodes.

What a type's paper prescribes are its defaults, and the fields for them are null unless the user decides otherwise.
"""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from pydantic import Field

from rljob_api.manifest.base import Choice, Rule, Spec, yaml_fields

AlgorithmType = Literal[
    "grpo", "drGrpo", "dapo", "rloo", "reinforcePlusPlus", "reinforcePlusPlusBaseline", "gspo", "cispo", "ppo"
]
Normalization = Literal["group", "batch", "none"]
LossLevel = Literal["token", "sequence", "constant"]
TruncatedAnswers = Literal["train", "mask", "shape"]
RatioLevel = Literal["token", "sequence", "geometric"]

_GROUP_BASELINE: Final = ("grpo", "dapo", "gspo", "cispo")
"""Types that divide by a deviation of the group."""
_BATCH_WHITENED: Final = ("reinforcePlusPlus", "reinforcePlusPlusBaseline")
"""Types that whiten over the batch."""


class Kl(Spec):
    """KL penalty against the reference model (the initial model)."""

    coefficient: float = Field(default=0.0, ge=0)
    """Coefficient of the penalty. With 0, no reference model is loaded."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators of KL(policy || reference). k2 and k3 are in the loss. k1 is in the reward: each token gets
    minus the coefficient times what it and the later tokens of its episode contribute (as a loss, its expected gradient
    would be zero)."""


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


class Loss(Spec):
    """The policy loss, where it must differ from the type's. See docs/algorithms.md for the defaults of each type."""

    clip_low: float | None = Field(default=None, gt=0, lt=1)
    """Lower clip bound of the ratio: 1 - clipLow. Null: the type's."""
    clip_high: float | None = Field(default=None, gt=0)
    """Upper clip bound of the ratio: 1 + clipHigh. Null: the type's."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Largest ratio of a token with a negative advantage, whose loss clipHigh does not bound: beyond it the token has
    no gradient (dual-clip PPO, arXiv:1912.09729). 1e9 is beyond every ratio. Null: 3; 10 with dapo; none with rloo,
    gspo and cispo."""
    level: LossLevel | None = None
    """token: the mean over all tokens of the update. sequence: the mean over episodes of the mean over their tokens.
    constant: the sum over tokens, divided by episodes x rollout.sampling.maxTokens, so that a token's weight depends on
    no length. Null: the type's."""


class Advantages(Spec):
    """How rewards become advantages, where it must differ from the type's."""

    normalization: Normalization | None = None
    """Divisor of the centered rewards: the standard deviation of the group or of the step's batch, or none. batch waits
    for all groups of a step before it trains on the first. Null: the type's."""
    per_reward: bool = False
    """Normalize each reward alone, before the weighted sum (GDPO, arXiv:2601.05242), so that a reward with a small
    spread has the influence of its weight. The sum is divided by its standard deviation in the step's batch, so
    training waits for all groups of a step."""


class Rejection(Spec):
    """Tokens or sequences that are left out, whatever their weight: those whose probability under the policy now,
    divided by the rollout's, is above the cap or below the floor. They stay in the loss's denominator."""

    level: RatioLevel = "geometric"
    """As correction.level. geometric compares sequences of any length."""
    cap: float = Field(gt=1)
    """Largest ratio."""
    floor: float | None = Field(default=None, ge=0, le=1)
    """Smallest ratio. Null: 1 / cap."""

    @property
    def smallest(self) -> float:
        """The floor, and what null means."""
        return 1 / self.cap if self.floor is None else self.floor


class Correction(Spec):
    """Importance weights of tokens, because the rollout computes other probabilities than the trainer: it has other
    kernels, and under a bounded schedule older weights. The weight is the probability of the policy to which clipping
    refers, divided by the rollout's."""

    type: Literal["truncate", "mask", "none"] = "truncate"
    """truncate: a weight above the cap is the cap. mask: what has a weight above the cap or below the floor is left out
    (IcePop). none: every weight is 1."""
    level: RatioLevel = "token"
    """What has a weight. token: each token. sequence: each segment of an episode, whose tokens share the product of
    their weights. geometric: the same with their geometric mean."""
    cap: float = Field(default=2.0, ge=1)
    """Largest weight."""
    floor: float = Field(default=0.5, ge=0, le=1)
    """Smallest weight, for mask."""
    rejection: Rejection | None = None
    """Null: nothing is rejected."""


class Truncated(Spec):
    """Answers that hit rollout.sampling.maxTokens."""

    answers: TruncatedAnswers | None = None
    """train: they train with their score. mask: they neither train nor count in the group's mean. shape: they train,
    and long answers lose score (DAPO's soft overlong punishment). Null: shape with dapo, otherwise train."""
    buffer_tokens: int | None = Field(default=None, ge=1)
    """shape: an answer within this many tokens of the limit loses score, linearly up to the penalty at the limit.
    Null: a fifth of rollout.sampling.maxTokens."""
    penalty: float = Field(default=1.0, gt=0)
    """shape: what an answer at the limit loses."""


class DynamicSampling(Spec):
    """Replacement of groups whose scores are equal, since they teach nothing, by groups of further prompts (DAPO)."""

    enabled: Choice = "auto"
    """auto: always with dapo, otherwise never."""
    max_replacement_factor: float = Field(default=3.0, ge=0, le=1000)
    """At most this x schedule.promptsPerStep groups are replaced in a step. After that, groups without signal stay:
    they count in the update, and add no gradient."""


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


class Critic(Optimizer):
    """The critic of ppo: a value model, which starts from spec.model with a new head, and its AdamW."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    value_clip: float | None = Field(default=0.5, gt=0)
    """An update moves a value by at most this, as far as its loss can see. Null: no limit. Rewards that are much larger
    than 1 need a larger one."""


def _is_of_ppo(field: str, defaults: Spec) -> Rule:
    """Return the rule that only ppo reads a part of the algorithm. Stored objects have its defaults."""
    names = {name: python for name, (python, _) in yaml_fields(type(defaults)).items()}
    values = {name: getattr(defaults, python) for name, python in names.items()}

    def find_changed(algorithm: Algorithm) -> str:
        part = getattr(algorithm, field)
        return ", ".join(name for name, python in names.items() if getattr(part, python) != values[name])

    unchanged = " && ".join(
        f"(!has(self.{field}.{name}) || self.{field}.{name} == {value!r})" for name, value in values.items()
    )
    return Rule(
        (field, "type"),
        "is for type ppo alone",
        "remove it, or set type: ppo",
        lambda algorithm: algorithm.type == "ppo" or getattr(algorithm, field) == defaults,
        f"!has(self.{field}) || (has(self.type) && self.type == 'ppo') || ({unchanged})",
        find_changed,
    )


class Algorithm(Spec):
    """GRPO and its relatives: see docs/algorithms.md. Only type is immutable."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        _is_of_ppo("gae", Gae()),
        _is_of_ppo("critic", Critic()),
        Rule(
            ("loss.dualClip", "type"),
            "has no effect with cispo, which clips the ratio of every token at loss.clipHigh",
            "remove it, or change the type",
            lambda algorithm: algorithm.type != "cispo" or algorithm.loss.dual_clip is None,
            "!has(self.type) || self.type != 'cispo' || !has(self.loss) || !has(self.loss.dualClip)",
        ),
        Rule(
            ("advantages.normalization", "type"),
            "must be batch or null with reinforcePlusPlus(Baseline), which normalizes over the batch",
            "remove it, or set type: grpo",
            lambda algorithm: (
                algorithm.type not in _BATCH_WHITENED or algorithm.advantages.normalization in (None, "batch")
            ),
            f"!has(self.type) || !(self.type in {list(_BATCH_WHITENED)}) || !has(self.advantages) || "
            "!has(self.advantages.normalization) || self.advantages.normalization == 'batch'",
        ),
        Rule(
            ("advantages.normalization", "type"),
            "must be batch, none or null with ppo, whose advantages come from the critic and not from the group",
            "remove it, or set none",
            lambda algorithm: algorithm.type != "ppo" or algorithm.advantages.normalization != "group",
            "!has(self.type) || self.type != 'ppo' || !has(self.advantages) || "
            "!has(self.advantages.normalization) || self.advantages.normalization != 'group'",
        ),
        Rule(
            ("advantages.perReward", "type"),
            "needs a type that divides by a deviation of the group: grpo, dapo, gspo or cispo",
            "remove it, or change the type",
            lambda algorithm: not algorithm.advantages.per_reward or algorithm.type in _GROUP_BASELINE,
            "!has(self.advantages) || !has(self.advantages.perReward) || !self.advantages.perReward || "
            f"!has(self.type) || self.type in {list(_GROUP_BASELINE)}",
        ),
    )

    type: AlgorithmType = "grpo"
    """The algorithm, with the defaults of its paper. grpo: Shao et al. 2024, and any variant by its fields. drGrpo: no
    deviation, no lengths. dapo: clip-higher, dynamic sampling, overlong shaping. rloo: leave-one-out baseline, no clip.
    reinforcePlusPlus: batch baseline. reinforcePlusPlusBaseline: group baseline, then whitened over the batch. gspo:
    one ratio for each sequence. cispo: clipped weights, no token loses its gradient. ppo: a critic."""
    group_size: int = Field(default=8, ge=2, le=1024)
    """Trajectories per prompt."""
    loss: Loss = Loss()
    advantages: Advantages = Advantages()
    kl: Kl = Kl()
    entropy_coefficient: float = 0.0
    """Coefficient of the entropy bonus."""
    correction: Correction = Correction()
    truncated: Truncated = Truncated()
    dynamic_sampling: DynamicSampling = DynamicSampling()
    zero_std_threshold: float = Field(default=1e-2, ge=0)
    """The advantages of a group are 0 if the standard deviation of its rewards is at most this times the largest
    absolute reward of the group (if that is above 1: times 1), or within the precision of floats."""
    optimizer: Optimizer = Optimizer()
    turn_rewards: TurnRewards = TurnRewards()
    gae: Gae = Gae()
    critic: Critic = Critic()
