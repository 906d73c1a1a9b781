"""The sections of an RLJob's spec: model, data, algorithm, schedule, evaluation, checkpoint, tracking, scheduling."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

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
    mounted_by: Literal["all", "head"] = "all"
    """all: head and trainers, so the claim must be ReadWriteMany unless they run on one node. head: the head alone, so
    ReadWriteOnce is enough; the trainers send their files to the head."""


class Checkpoint(Spec):
    """Location and frequency of checkpoints."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """Claim for the run's files: checkpoints, metrics, trajectories and the export. Null: on a cluster an emptyDir of
    the head, deleted with the head's Pod, also at the end of the job; under `rljob run` the run's folder."""
    every_steps: int = Field(default=10, ge=1)
    """Steps between checkpoints. Another one is written after the last step."""
    keep: int = Field(default=2, ge=1)
    """Number of checkpoints to keep."""
    asynchronous: bool | None = None
    """Whether training continues while a checkpoint is written, from a copy in the host's memory: 12 bytes per trained
    parameter over all ranks. Null: with GPUs. false: training waits."""
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
