"""spec.schedule: when groups start, when they train, and for how long."""

from typing import ClassVar, Final, Literal

from pydantic import Field

from rljob_api.manifest.base import Rule, Spec

ScheduleType = Literal["onPolicy", "bounded", "synchronous", "oneStepOff"]
ALTERNATING: Final = ("onPolicy", "synchronous")
"""Types under which no episode is sampled while the trainer updates."""
_STALENESS: Final = {"onPolicy": 0, "bounded": 2, "synchronous": 0, "oneStepOff": 1}
"""Unless maxStaleness is set."""


class WarmStart(Spec):
    """The first steps of a run, which train on the conversations of data.warmStart by cross-entropy, and not by RL."""

    steps: int = Field(ge=1)
    """How many of schedule.steps these are. Each trains on promptsPerStep rows in miniBatches updates. Immutable."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Peak learning rate of these steps. Null: algorithm.optimizer.learningRate. The optimizer's warm-up and schedule
    apply to these steps, and begin again with the first step of RL."""


class Schedule(Spec):
    """When groups start and train, and for how many steps. Only seed is immutable."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("maxStaleness", "type"),
            "is for type bounded alone",
            "remove it, or set type: bounded",
            lambda schedule: schedule.max_staleness is None or schedule.type == "bounded",
            "!has(self.maxStaleness) || (has(self.type) && self.type == 'bounded')",
        ),
        Rule(
            ("steps", "warmStart.steps"),
            "must be at least warmStart.steps: it counts the steps of the warm start, too",
            "raise steps, or lower warmStart.steps",
            lambda schedule: schedule.num_warm_steps <= schedule.steps,
            "!has(self.warmStart) || self.warmStart.steps <= self.steps",
        ),
    )

    type: ScheduleType = "onPolicy"
    """onPolicy: the weights that a step updates have sampled all of its episodes; a group trains as soon as it is
    scored. bounded: rollouts never wait for the trainer; an episode trains at most maxStaleness steps after its start,
    with correction, and weights change while it is sampled. oneStepOff: bounded with maxStaleness 1, and a weight
    update waits for the requests in flight. synchronous: generation, rewards and updates one after the other.
    See docs/schedules.md."""
    steps: int = Field(default=100, ge=1)
    """Training steps, those of warmStart included. May change while the job runs; below the current step, the job ends
    after that step. Linear and cosine learning-rate schedules follow the new length."""
    prompts_per_step: int = Field(default=64, ge=1)
    """Prompts (groups) per step. A step has promptsPerStep x groupSize samples."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer updates per step. Must divide promptsPerStep."""
    max_staleness: int | None = Field(default=None, ge=1, le=8)
    """bounded: steps by which an episode's start may precede the step that trains on it. No episode is discarded for
    its age: this bounds how many are started. Null: 2."""
    max_steps_without_signal: int = Field(default=3, ge=0, le=1_000_000)
    """Consecutive steps from which the model learns nothing before the job reacts. If all samples of these steps are
    invalid, the job fails as UserError with the reasons. If only the advantages are all zero, because the samples of
    each group have the same score, the condition Learning becomes False with a warning. 0 is off. May change while the
    job runs."""
    seed: int = 0
    """Seed of data order, sampling and initialization."""
    warm_start: WarmStart | None = None
    """Trains on given conversations (data.warmStart) before RL. Null: RL from the first step on."""

    @property
    def num_warm_steps(self) -> int:
        return self.warm_start.steps if self.warm_start else 0

    @property
    def staleness(self) -> int:
        """The bound in steps; 0 is on-policy."""
        return _STALENESS[self.type] if self.max_staleness is None else self.max_staleness


MUTABLE_SCHEDULE_FIELDS: Final = ("steps", "maxStepsWithoutSignal")
"""The driver reads these again while the job runs. Others restart it from the last checkpoint; seed is immutable."""
