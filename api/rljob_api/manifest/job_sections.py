"""The sections of an RLJob's spec: model, data, algorithm, schedule, evaluation, checkpoint, tracking, scheduling."""

from __future__ import annotations

import re
from typing import ClassVar, Final, Literal

from pydantic import Field

from rljob_api.manifest.base import LongText, ObjectName, PathText, Rule, ShortText, Spec
from rljob_api.manifest.roles import Sampling
from rljob_api.manifest.sources import HasSource, ModelSource

MAX_SECONDS = 1_000_000_000
"""31 years. Adding it to the current time still gives a valid date."""
_PLACEHOLDER = re.compile(r"\{[A-Za-z_][A-Za-z0-9_]*\}")


class Model(ModelSource):
    """The model to train. Immutable."""


class DataSource(HasSource):
    """Prompts, and the data needed to score them."""

    source: PathText
    """`hf://org/name`, or a .jsonl or .parquet file or a folder of such files as `pvc://claim/path`, `/path`, or a path
    relative to the job file (`rljob run` only)."""
    subset: ShortText | None = None
    """Configuration of an hf:// dataset."""
    revision: ShortText | None = None
    """Branch, tag or commit of an hf:// dataset."""
    split: ShortText | None = None
    """Split of an hf:// dataset. Null: train for data.train and test for data.eval."""
    prompt: ShortText = "prompt"
    """Column of the prompt: a string, or a list of chat messages."""
    answer: ShortText | None = "answer"
    """Column passed to the reward as ground_truth (TRL: answer, OpenRLHF: label). Null: none."""
    data_source: ShortText | None = None
    """Value passed to verl functions as data_source. Null: the source without its scheme."""
    limit: int | None = Field(default=None, ge=1)
    """Number of rows to use, from the first. Null: all."""


class Data(Spec):
    """Training and evaluation data."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("template",),
            "must contain at least one column in braces",
            "write {prompt} where the prompt belongs",
            lambda data: _PLACEHOLDER.search(data.template) is not None,
            "self.template.matches('[{][A-Za-z_][A-Za-z0-9_]*[}]')",
        ),
    )

    train: DataSource
    """Prompts to train on. Immutable."""
    eval: DataSource | None = None
    """Held-out prompts. Null: no evaluation."""
    format: Literal["chat", "text"] = "chat"
    """chat: the model's chat template with a generation prompt. text: the prompt without a template."""
    system_prompt: LongText | None = None
    """System message for chat. Null: the template's default. Empty: none."""
    template: LongText = "{prompt}"
    """Text of each prompt. `{prompt}` and `{COLUMN}` are replaced by the row's values."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Prompts with more tokens are left out and counted, as are prompts that leave no room for sampling.maxTokens in
    rollout.maxModelLen or the model's context. Null: only these."""
    shuffle: bool = True
    """Whether to shuffle each epoch, with schedule.seed."""


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


class Schedule(Spec):
    """Steps, batch sizes and seed. Immutable, except steps and maxStepsWithoutSignal."""

    steps: int = Field(default=100, ge=1)
    """Training steps. May change while the job runs; below the current step, the job ends after that step. Linear and
    cosine learning-rate schedules follow the new length."""
    prompts_per_step: int = Field(default=64, ge=1)
    """Prompts (groups) per step. A step has promptsPerStep x groupSize samples."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer updates per step. Must divide promptsPerStep."""
    max_staleness: Literal[0] = 0
    """Maximum number of weight versions by which sampled tokens may lag. 0 is on-policy."""
    max_steps_without_signal: int = Field(default=3, ge=0, le=1_000_000)
    """Consecutive steps from which the model learns nothing before the job reacts. If all samples of these steps are
    invalid, the job fails as UserError with the reasons. If only the advantages are all zero, because the samples of
    each group have the same score, the condition Learning becomes False with a warning. 0 is off. May change while the
    job runs."""
    seed: int = 0
    """Seed of data order, sampling and initialization."""


MUTABLE_SCHEDULE_FIELDS: Final = ("steps", "maxStepsWithoutSignal")
"""The driver reads these again while the job runs. All others of schedule are immutable."""


class SingleTurnAgent(Spec):
    """The agent loop: one prompt, one completion."""

    type: Literal["singleTurn"] = "singleTurn"
    """Type of agent loop."""


class Evaluation(Spec):
    """Evaluation on data.eval. It has its own lane."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations. 0: only before the first step and after the last."""
    at_start: bool = True
    """Whether to evaluate before the first step."""
    sampling: Sampling | None = None
    """How evaluation trajectories are sampled. Null: rollout.sampling at temperature 0."""
    accuracy: ShortText | None = None
    """Component of the reward's result that is reported as accuracy. Null: acc if it exists, else score."""


class PersistentVolumeClaimRef(Spec):
    """An existing PersistentVolumeClaim."""

    claim_name: ObjectName
    """Name of the PersistentVolumeClaim."""


class Checkpoint(Spec):
    """Location and frequency of checkpoints."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """Claim for checkpoints. Null: an emptyDir on a cluster (lost with the Pods), or the run's folder under
    `rljob run`."""
    every_steps: int = Field(default=10, ge=1)
    """Steps between checkpoints. Another one is written after the last step."""
    keep: int = Field(default=2, ge=1)
    """Number of checkpoints to keep."""
    export: bool = True
    """Whether to also write the last checkpoint in Hugging Face format."""


class Tracking(Spec):
    """Destinations of metrics, in addition to metrics.jsonl."""

    tensorboard: bool = True
    """Whether to write TensorBoard event files to the run's folder."""
    wandb_project: ShortText | None = None
    """Weights & Biases project. Null: off. Set WANDB_API_KEY in head.env or in the head's template."""
    mlflow_experiment: ShortText | None = None
    """MLflow experiment. Null: off. Set MLFLOW_TRACKING_URI in head.env or in the head's template."""
    trajectories_mib: int = Field(default=4096, ge=0, alias="trajectoriesMiB")
    """Maximum disk space of the trajectory log (`rljob trajectories`) in the run's folder, in MiB. Files of the oldest
    steps are deleted first. 0 is off."""


class Scheduling(Spec):
    """Gang scheduling: starts the job's Pods together, so that an incomplete job does not occupy nodes indefinitely."""

    gang: Literal["none", "gates", "volcano", "coscheduling", "kueue"] = "none"
    """none: each Pod starts independently. gates: Pods have a scheduling gate until all Pods exist; a gang that is
    incomplete after timeoutSeconds releases its nodes and is retried later. volcano, coscheduling, kueue: the same with
    that scheduler's Pod group."""
    timeout_seconds: int = Field(default=600, ge=1, le=MAX_SECONDS)
    """Seconds within which all Pods of the gang must be scheduled; otherwise the Pods are removed and retried later.
    Unused with gang none."""
    queue: ShortText | None = None
    """Queue of Volcano or Kueue."""
    scheduler_name: ShortText | None = None
    """Scheduler of all Pods. Null: the cluster's default, or the scheduler of gang."""
    force_delete_after_seconds: int | None = Field(default=None, ge=10, le=MAX_SECONDS)
    """Seconds after the grace period of a Pod when the operator deletes it by force, because its node does not confirm
    its end. Null: never; a lost node then stops the job until someone acts. A partitioned node may still run the Pod,
    so set it only where that cannot happen, or does no harm (docs/lifecycle.md, A lost node). May change at any time.
    Needs the right to delete Pods (chart: features.forceDeletion)."""
