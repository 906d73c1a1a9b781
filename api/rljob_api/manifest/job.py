"""RLJob: what a user writes. Everything but model, data and rewards has a default."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rljob_api import API_VERSION
from rljob_api.manifest import job_rules
from rljob_api.manifest.base import ClusterRule, LongText, ObjectMeta, PathText, Rule, ShortText, Spec
from rljob_api.manifest.reward import Reward
from rljob_api.manifest.roles import HeadRole, RolloutRole, Sampling, TrainerRole
from rljob_api.manifest.source_rules import SOURCE_FORM, SOURCE_ON_A_CLUSTER
from rljob_api.manifest.status import RLJobStatus

MAX_SECONDS = 1_000_000_000
"""31 years: a moment so long after another is still one that a calendar has."""
_PLACEHOLDER = re.compile(r"\{[A-Za-z_][A-Za-z0-9_]*\}")


class Model(Spec):
    """The model to train. Immutable."""

    RULES: ClassVar[tuple[Rule, ...]] = (SOURCE_FORM,)
    CLUSTER_RULES: ClassVar[tuple[ClusterRule, ...]] = (SOURCE_ON_A_CLUSTER,)

    source: PathText
    """A Hugging Face folder: `hf://org/name`, `pvc://claim/path`, `/path`, or a path relative to the job
    file (`./path`, `../path`; for `rljob run` alone)."""
    revision: ShortText | None = None
    """Branch, tag or commit of an hf:// source."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""


class DataSource(Spec):
    """Prompts and what is needed to score them."""

    RULES: ClassVar[tuple[Rule, ...]] = (SOURCE_FORM,)
    CLUSTER_RULES: ClassVar[tuple[ClusterRule, ...]] = (SOURCE_ON_A_CLUSTER,)

    source: PathText
    """`hf://org/name`, or a .jsonl or .parquet file or a folder of such files as `pvc://claim/path`, `/path`, or a path
    relative to the job file (for `rljob run` alone)."""
    subset: ShortText | None = None
    """Configuration of an hf:// data set."""
    split: ShortText | None = None
    """Split of an hf:// data set; null means train for train and test for eval."""
    prompt: ShortText = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    answer: ShortText | None = "answer"
    """Column that the reward gets as ground_truth (TRL: answer, OpenRLHF: label). Null: rewards need none."""
    data_source: ShortText | None = None
    """What verl's functions get as data_source; null means the source without its scheme."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first rows. Null means all."""


class Data(Spec):
    """Training and evaluation data."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("template",),
            "must hold at least one column in braces",
            "write {prompt} where the prompt belongs",
            lambda data: _PLACEHOLDER.search(data.template) is not None,
            "self.template.matches('[{][A-Za-z_][A-Za-z0-9_]*[}]')",
        ),
    )

    train: DataSource
    """Prompts to train on. Immutable."""
    eval: DataSource | None = None
    """Held-out prompts. Null: nothing is evaluated."""
    format: Literal["chat", "text"] = "chat"
    """chat: the model's chat template with a generation prompt. text: the prompt as it is."""
    system_prompt: LongText | None = None
    """System message for chat. Null: what the template does by itself; an empty string: none."""
    template: LongText = "{prompt}"
    """Text of each prompt; `{prompt}` and every column's name are filled in."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Prompts with more tokens are left out, and counted. Null means no limit."""
    shuffle: bool = True
    """Whether each epoch has its own order, drawn from schedule.seed."""


class Kl(Spec):
    """A penalty for leaving the reference (the model as it was at the start)."""

    coefficient: float = Field(default=0.0, ge=0)
    """Factor of the penalty in the loss; 0 keeps no reference model."""
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
    """Global gradient-norm clip; null is off."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate over peak, for linear and cosine."""


class Algorithm(Spec):
    """GRPO (Shao et al. 2024) with the choices its users expect. Immutable."""

    type: Literal["grpo"] = "grpo"
    """The algorithm."""
    group_size: int = Field(default=8, ge=2, le=1024)
    """Trajectories of one prompt."""
    normalization: Literal["group", "batch", "none"] = "group"
    """What divides the centred rewards: the group's standard deviation, the batch's, or nothing (Dr. GRPO)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip of the ratio: 1 - clipLow."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper clip of the ratio: 1 + clipHigh (DAPO: 0.28)."""
    loss_level: Literal["token", "sequence"] = "token"
    """token: every token of the batch weighs the same. sequence: every trajectory does."""
    kl: Kl = Kl()
    """Penalty to the reference."""
    entropy_coefficient: float = 0.0
    """Factor of the entropy bonus."""
    importance_cap: float | None = Field(default=None, gt=0)
    """Truncated importance sampling: weigh tokens by min(trainer/rollout probability, cap). Null is off."""
    zero_std_threshold: float = Field(default=1e-2, ge=0)
    """A group whose rewards' standard deviation is at most this carries no signal: its advantages are 0."""
    optimizer: Optimizer = Optimizer()
    """Optimizer and learning-rate schedule."""


class Schedule(Spec):
    """How much of what. Immutable, but for steps."""

    steps: int = Field(default=100, ge=1)
    """Training steps. May change while the job runs: below the present step, the job ends after that step. Linear and
    cosine learning rates follow the new length."""
    prompts_per_step: int = Field(default=64, ge=1)
    """Prompts (groups) of a step. promptsPerStep x groupSize samples."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer updates a step; must divide promptsPerStep."""
    max_staleness: Literal[0] = 0
    """Most versions by which sampled tokens may lag. 0 is on-policy."""
    seed: int = 0
    """Seed of data order, sampling and initialisation."""


class SingleTurnAgent(Spec):
    """One prompt, one completion."""

    type: Literal["singleTurn"] = "singleTurn"
    """The kind of agent loop."""


class Evaluation(Spec):
    """Evaluation on data.eval, by its own lane."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 means only before the first and after the last."""
    at_start: bool = True
    """Whether to evaluate before the first step."""
    sampling: Sampling | None = None
    """How evaluation trajectories are sampled. Null means rollout.sampling at temperature 0."""
    accuracy: ShortText | None = None
    """Component of the reward's result that is reported as accuracy. Null means acc where there is one, else score."""


class PersistentVolumeClaimRef(Spec):
    """An existing claim."""

    claim_name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the PersistentVolumeClaim."""


class Checkpoint(Spec):
    """Where and how often the job's state is saved."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """Claim for checkpoints. Null: an emptyDir on a cluster (lost with the Pods), the run's folder
    under `rljob run`."""
    every_steps: int = Field(default=10, ge=1)
    """Steps between checkpoints. One more is written after the last step."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept."""
    export: bool = True
    """Whether the last one is also written in Hugging Face format."""


class Tracking(Spec):
    """Where metrics go, besides metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard event files into the run's folder."""
    wandb_project: ShortText | None = None
    """Weights & Biases project; null is off. WANDB_API_KEY comes from head.env or the head's template."""
    mlflow_experiment: ShortText | None = None
    """MLflow experiment; null is off. MLFLOW_TRACKING_URI comes from head.env or the head's template."""
    trajectories_mib: int = Field(default=4096, ge=0, alias="trajectoriesMiB")
    """Most disk space that the trajectory log (`rljob trajectories`) may take in the run's folder, in MiB: files of the
    oldest steps go first. 0 is off."""


class Scheduling(Spec):
    """How the job's Pods are started together, so that half a job never holds nodes for ever."""

    gang: Literal["none", "gates", "volcano", "coscheduling", "kueue"] = "none"
    """none: each Pod starts when it can. gates: Pods hold a scheduling gate until all of them exist, and a job that is
    not whole after timeoutSeconds gives its nodes back, waits, and tries again. volcano, coscheduling, kueue: the same
    by that scheduler's Pod group."""
    timeout_seconds: int = Field(default=600, ge=1, le=MAX_SECONDS)
    """Time in which all Pods must have found a node, for gang other than none; else all are removed for a while."""
    queue: ShortText | None = None
    """Queue of Volcano or Kueue."""
    scheduler_name: ShortText | None = None
    """Scheduler of all Pods. Null: the cluster's own, or the one that gang names."""


class RLJobSpec(Spec):
    """Desired state of an RLJob."""

    RULES: ClassVar[tuple[Rule, ...]] = job_rules.RULES
    CLUSTER_RULES: ClassVar[tuple[ClusterRule, ...]] = job_rules.IMMUTABLE

    model: Model
    """The model to train."""
    data: Data
    """Training and evaluation data."""
    rewards: list[Reward] = Field(
        min_length=1,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """What scores a trajectory."""
    algorithm: Algorithm = Algorithm()
    """How scores become an update."""
    schedule: Schedule = Schedule()
    """How much of what."""
    agent: SingleTurnAgent = SingleTurnAgent()
    """The agent loop."""
    head: HeadRole = HeadRole()
    """The driver's Pod."""
    trainer: TrainerRole = TrainerRole()
    """The FSDP2 ranks."""
    rollout: RolloutRole = RolloutRole()
    """The vLLM replicas."""
    evaluation: Evaluation = Evaluation()
    """When and how to evaluate."""
    checkpoint: Checkpoint = Checkpoint()
    """Where and how often to save."""
    tracking: Tracking = Tracking()
    """Where metrics go."""
    scheduling: Scheduling = Scheduling()
    """How Pods are started together."""
    suspend: bool = False
    """true removes the Pods and keeps the checkpoint; false goes on from it."""
    managed_by: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """Controller that acts on this job, if not RLJob's own (Kueue's MultiKueue sets it). Immutable."""
    active_deadline_seconds: int | None = Field(default=None, ge=1, le=MAX_SECONDS)
    """Seconds from start after which the job fails. Null is none."""
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0, le=MAX_SECONDS)
    """Seconds after the end when the RLJob is deleted. Null keeps it."""


class RLJob(Spec):
    """One reinforcement-learning post-training job."""

    api_version: Literal["rljob.dev/v1alpha1"] = API_VERSION
    kind: Literal["RLJob"] = "RLJob"
    metadata: ObjectMeta
    spec: RLJobSpec
    status: RLJobStatus = RLJobStatus()
