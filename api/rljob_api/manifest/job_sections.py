"""The sections of an RLJob's spec that have no module of their own: model, data, checkpoint, tracking, scheduling."""

import base64
import hmac
import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

import pydantic
from pydantic import Field

from rljob_api.manifest.base import (
    FACTORY_PATTERN,
    PART_NAME_PATTERN,
    PRESERVE,
    Choice,
    ClusterRule,
    LongText,
    ObjectName,
    ObjectPrefix,
    PathText,
    Rule,
    ShortText,
    Spec,
    Url,
    list_map,
)
from rljob_api.manifest.quantity import Size, size_within
from rljob_api.manifest.sources import (
    OF_DATA,
    OF_MODEL,
    ChatTemplate,
    ChatTemplateArguments,
    HasSource,
    ModelSource,
    SecretKeyRef,
)

MAX_SECONDS = 1_000_000_000
"""31 years. Adding it to the current time still gives a valid date."""
WandbTag = Annotated[str, Field(min_length=1, max_length=64)]
_PLACEHOLDER = re.compile(r"\{[A-Za-z_][A-Za-z0-9_]*\}")


class Model(ModelSource):
    """The model to train, or to evaluate. Immutable."""

    MAY_BE_JOB: ClassVar[bool] = True
    RULES: ClassVar[tuple[Rule, ...]] = (OF_MODEL,)

    chat_template: ChatTemplate | None = None
    """Chat template for prompts, agents and the exported model. Null: the model's."""


class DataSource(HasSource):
    """Prompts, and the data needed to score them."""

    MAY_BE_ENV: ClassVar[bool] = True
    RULES: ClassVar[tuple[Rule, ...]] = (
        OF_DATA,
        Rule(
            ("split", "source"),
            "must be left out with env://, as subset and revision must: the source names the split",
            "remove the three",
            lambda data: (
                not data.source.startswith("env://")
                or (data.split is None and data.subset is None and data.revision is None)
            ),
            "!self.source.startsWith('env://') || !(has(self.split) || has(self.subset) || has(self.revision))",
        ),
    )

    source: PathText
    """`hf://org/name`, or files. A file is .jsonl, .parquet, .json, .csv or .tsv; a folder or glob has such files, or a
    folder is one of `save_to_disk`: `pvc://claim/path`, `s3://bucket/path` (also `gs://`, `az://`), `/path`, or a path
    relative to the job file (`rljob run` only). Or `env://split`: the rows of a split that the agent's environment or
    program has or makes, such as `env://train`.
    They are read once, when the job starts. Endless ones need limit."""
    subset: ShortText | None = None
    """Configuration of an hf:// dataset."""
    revision: ShortText | None = None
    """Branch, tag or commit of an hf:// dataset."""
    split: ShortText | None = None
    """Split of an hf:// dataset or of a folder of `save_to_disk`. Null: train for data.train, and test for
    evaluation."""
    prompt: ShortText = "prompt"
    """Column of the prompt: a string, or chat messages that do not end with the assistant's."""
    answer: ShortText | None = "answer"
    """Column passed to the reward as ground_truth (TRL: answer, OpenRLHF: label). Null: none. The column of
    prompt: the last message, which is then not part of the prompt."""
    data_source: ShortText | None = None
    """Value passed to functions as data_source. Null: the row's column data_source, else the repository's id, the
    file's name, or the split of env://."""
    limit: int | None = Field(default=None, ge=1)
    """Number of rows to use, after offset. Null: all."""
    offset: int = Field(default=0, ge=0)
    """Rows to leave out at the start. Those that data.eval uses by its limit, for example."""

    @property
    def env_split(self) -> str | None:
        """The split of an env:// source; None of another one. Its rows carry it as `split`."""
        # A wrong source is reported by its own rule, next to those that read this.
        return self.source.removeprefix("env://") if self.source.startswith("env://") else None


Weight = Annotated[float, Field(gt=0, le=1_000_000)]


class TrainSource(DataSource):
    """The first, or the only, source of training prompts."""

    name: ObjectName = "train"
    """Name of the source in metrics and logs."""
    weight: Weight = 1.0
    """Weight of the source beside those of data.mix: its share of the prompts is weight / sum of all weights."""


class MixedSource(DataSource):
    """A further source of training prompts."""

    name: ObjectName
    """Name of the source in metrics and logs."""
    weight: Weight = 1.0
    """Its share of the prompts is weight / sum of all weights, also that of data.train. Each source has epochs of its
    own: a small one with a large weight begins its next epoch earlier."""


class GivenSource(DataSource):
    """Complete conversations: each row's prompt, and what the assistant answers."""

    MAY_BE_ENV: ClassVar[bool] = False
    RULES: ClassVar[tuple[Rule, ...]] = HasSource.RULES
    name: ClassVar[str] = "warmStart"
    """No other source can have it."""
    weight: ClassVar[float] = 1.0

    answer: ShortText = "answer"
    """Column of the assistant's answer: a string, or a list of messages. The column of prompt: a conversation that ends
    with the assistant's message. All messages of the assistant train."""


class Curriculum(Spec):
    """Draws a prompt less often if the samples of its last groups all succeeded, or all failed: such groups teach
    nothing. After n of them in sequence, it is drawn in one of 2^n epochs of its source, up to a limit. A group of
    mixed results ends the sequence. A limit that is no power of two counts as the next lower one."""

    success: float = 0.5
    """Reward from which on a sample is a success: the sum that training raises, with the rewards of turns."""
    easy_epochs: int = Field(default=8, ge=1, le=1024)
    """Limit for a prompt that always succeeds: it is drawn at least once in so many epochs. 1: in each."""
    hard_epochs: int = Field(default=4, ge=1, le=1024)
    """Limit for a prompt that never succeeds. 1: it is drawn in each epoch."""


@dataclass(frozen=True)
class NamedSource:
    """One source of training prompts, and its field."""

    path: str
    """spec.data.train, spec.data.mix[0]."""
    source: TrainSource | MixedSource | GivenSource


def _different_sources(data: Any) -> bool:
    return len({each.source.name for each in data.train_sources}) == len(data.train_sources)


class Data(Spec):
    """Training and evaluation data.

    Several sources are data.train and the list data.mix. data.train is not a list: a schema of Kubernetes cannot say
    "an object or a list", nearly all jobs have one source, and the first of several is a source like the others.
    """

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("template",),
            "must contain at least one column in braces",
            "write {prompt} where the prompt belongs",
            lambda data: _PLACEHOLDER.search(data.template) is not None,
            "self.template.matches('[{][A-Za-z_][A-Za-z0-9_]*[}]')",
        ),
        Rule(
            ("mix",),
            "must have names that differ from each other and from data.train.name",
            "rename one of the sources",
            _different_sources,
            "!has(self.mix) || !has(self.train) || !self.mix.exists(source, source.name == self.train.name)",
        ),
        Rule(
            ("train",),
            "must be set with mix, curriculum or eval, or without warmStart",
            "set it, or remove these",
            lambda data: data.given_train or (data.warm_start and not (data.mix or data.curriculum or data.eval)),
            "has(self.train) || has(self.warmStart) && !has(self.mix) && !has(self.curriculum) && !has(self.eval)",
        ),
    )

    given_train: TrainSource | None = Field(default=None, alias="train")
    """Prompts to train on. Null: there is only the warm start, and no rollouts. Immutable."""
    mix: list[MixedSource] = Field(default=[], max_length=31, json_schema_extra=list_map("name"))
    """Further prompts to train on, mixed with those of data.train by weight. Shares are met by counting, not by chance:
    no source is ever ahead of its share by a whole prompt. Immutable."""
    curriculum: Curriculum | None = None
    """Draws prompts that always or never succeed less often. Null: each prompt is drawn once in each epoch."""
    warm_start: GivenSource | None = None
    """Conversations for the steps of schedule.warmStart. Their text is made as that of prompts, with the chat template,
    and the tools of a column `tools`."""
    eval: DataSource | None = None
    """Held-out prompts: the evaluation set named eval, with the settings of `evaluation`. Null: there are only those of
    evaluation.sets."""
    format: Literal["chat", "text"] = "chat"
    """chat: the model's chat template with a generation prompt. text: the prompt without a template."""
    chat_template_arguments: ChatTemplateArguments = {}
    """Variables of the chat template in all prompts and turns of the policy, such as `{enable_thinking: false}` or
    `{reasoning_effort: low}`."""
    system_prompt: LongText | None = None
    """System message for chat. Null: the template's default. Empty: none."""
    template: LongText = "{prompt}"
    """Text of each prompt. `{prompt}` and `{COLUMN}` are replaced by the row's values."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Prompts with more tokens are left out and counted, as are prompts that leave no room for sampling.maxTokens in
    rollout.maxModelLen or the model's context. Null: only these."""
    shuffle: bool = True
    """Whether to shuffle each epoch of each source, with schedule.seed."""

    @property
    def train(self) -> TrainSource:
        return self.given_train or NO_PROMPTS

    @property
    def train_sources(self) -> list[NamedSource]:
        """The sources of training prompts, in order; then that of the warm start."""
        mixed = (NamedSource(f"spec.data.mix[{index}]", source) for index, source in enumerate(self.mix))
        given = [NamedSource("spec.data.warmStart", self.warm_start)] if self.warm_start else []
        train = [NamedSource("spec.data.train", self.given_train)] if self.given_train else []
        return [*train, *mixed, *given]

    @property
    def tells_sources_apart(self) -> bool:
        """Whether metrics are also by source."""
        return bool(self.mix) or self.curriculum is not None


NO_PROMPTS: Final = TrainSource.model_construct(source="")
NO_DATA: Final = Data.model_construct()
"""What a training service has: no source."""
ClientName = Annotated[str, Field(pattern=PART_NAME_PATTERN, max_length=40)]


class TrainingService(Spec):
    """What a training service serves. Its clients bring the loop, the data and the rewards."""

    api: Literal["tinker"] = "tinker"
    """What clients speak: the API of Tinker's SDK."""
    model_name: ShortText | None = None
    """By which clients know the model. Null: org/name of hf://, or the name of its folder."""
    max_adapters: int = Field(default=16, ge=1, le=1024)
    """Adapters that clients train side by side."""
    max_rank: int = Field(default=32, ge=1, le=512)
    """Highest rank of an adapter: trainer.lora, where that is null. Immutable."""
    clients: list[ClientName] = Field(default=["default"], min_length=1, max_length=64)
    """Names of clients, each with a key in the Secret JOB-clients."""

    def derive_keys(self, token: str) -> dict[str, str]:
        """Return the key of each client, which follows from the job's token: it stays as long as that."""
        found = {each: hmac.digest(token.encode(), each.encode(), "sha256") for each in self.clients}
        return {client: f"tml-{base64.urlsafe_b64encode(key[:24]).decode()}" for client, key in found.items()}


class HangDetection(Spec):
    """When a part of the job that finishes nothing is replaced. The limit follows the durations of its own work,
    between these bounds."""

    min_seconds: int = Field(default=60, ge=1, le=MAX_SECONDS)
    """The lowest limit."""
    max_seconds: int = Field(default=7200, ge=1, le=MAX_SECONDS)
    """The highest limit, and the one of work that was never seen to end, such as the first step."""


class PersistentVolumeClaimRef(Spec):
    """An existing PersistentVolumeClaim."""

    claim_name: ObjectName
    """Name of the PersistentVolumeClaim."""
    mounted_by: Literal["all", "head"] = "all"
    """all: head and trainers, so the claim must be ReadWriteMany unless they run on one node. head: the head alone, so
    ReadWriteOnce is enough; the trainers send their files to the head."""


ExportedSteps = Literal["never", "last", "best", "every"]
EarlierExport = Literal["never", "last", "best", "every", True, False]


class Checkpoint(Spec):
    """Location and frequency of checkpoints."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("storage", "persistentVolumeClaim"),
            "must not be set next to persistentVolumeClaim",
            "remove one of them",
            lambda checkpoint: checkpoint.storage is None or checkpoint.persistent_volume_claim is None,
            "!has(self.storage) || !has(self.persistentVolumeClaim)",
        ),
    )

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """Claim for the run's files: checkpoints, metrics, trajectories and the export. Null: on a cluster an emptyDir of
    the head, deleted with the head's Pod, also at the end of the job; under `rljob run` the run's folder."""
    storage: ObjectPrefix | None = None
    """Prefix in object storage, such as `s3://bucket/runs`, for a copy of the run's files in a folder with the job's
    name. A head with an empty disk resumes from it. Credentials: objectStorage. Null: no copy."""
    every_steps: int = Field(default=10, ge=1)
    """Steps between checkpoints. Another one is written after the last step. May change while the job runs."""
    keep: int = Field(default=2, ge=1)
    """Number of checkpoints to keep. May change while the job runs."""
    asynchronous: Choice = "auto"
    """Whether training continues while a checkpoint is written, from a copy in the host's memory: 12 bytes per trained
    parameter. auto: with GPUs. never: training waits."""
    export_policy: ExportedSteps | None = None
    """Steps to also write in Hugging Face format. last: the last. best: that of evaluation.best. every: each with a
    checkpoint. Null: last."""
    export: Annotated[EarlierExport | None, pydantic.WithJsonSchema({PRESERVE: True})] = None
    """The name of exportPolicy before 0.2.0, read where that is absent: a choice of exportPolicy, or true for last and
    false for never. Use exportPolicy."""

    @pydantic.field_validator("export", mode="before")
    @classmethod
    def _leave_out_default(cls, export: Any) -> Any:
        """Earlier CRDs stored the default in each object. It must restart no head. 1 is no true."""
        return None if export == "last" or export is True else str(export) if type(export) in (int, float) else export

    @property
    def exported_steps(self) -> ExportedSteps:
        """The policy that applies."""
        if self.export_policy is not None or self.export is None:
            return self.export_policy or "last"
        return "never" if isinstance(self.export, bool) else self.export

    @property
    def outlives_head(self) -> bool:
        """Whether the run's files are also where the loss of the head's Pod does not reach them."""
        return self.persistent_volume_claim is not None or self.storage is not None


def _has_project(tracking: Any) -> bool:
    needs = tracking.wandb_entity is not None or tracking.wandb_group is not None or tracking.wandb_tags
    return tracking.wandb_project is not None or not needs


class Tracking(Spec):
    """Destinations of metrics, in addition to metrics.jsonl."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("wandbProject",),
            "must be set, since wandbEntity, wandbGroup or wandbTags is",
            "name the project, or remove them",
            _has_project,
            "!has(self.wandbEntity) && !has(self.wandbGroup) && (!has(self.wandbTags) || size(self.wandbTags) == 0) "
            "|| has(self.wandbProject)",
        ),
        size_within("trajectoriesSize", "1Mi", may_be_zero=True),
    )
    CLUSTER_RULES: ClassVar[tuple[ClusterRule, ...]] = (
        ClusterRule(
            "custom",
            "names a file, which only `rljob run` reads; install it as a package of head.image, and name its module",
            "!has(self.custom) || !self.custom.contains('.py:')",
        ),
    )

    tensorboard: bool = True
    """Whether to write TensorBoard event files to the run's folder."""
    wandb_project: ShortText | None = None
    """Weights & Biases project. Null: off. Set WANDB_API_KEY in head.env or in the head's template."""
    wandb_entity: ShortText | None = None
    """User or team that owns the project. Null: the default of the API key."""
    wandb_group: ShortText | None = None
    """Group of the run. Null: none."""
    wandb_tags: list[WandbTag] = Field(default=[], max_length=32)
    """Tags of the run."""
    wandb_samples: int = Field(default=8, ge=0, le=256)
    """Samples of each step and evaluation in a table of W&B and trackio. 0: no table."""
    mlflow_experiment: ShortText | None = None
    """MLflow experiment. Null: off. Needs MLFLOW_TRACKING_URI in head.env or in the head's template."""
    trackio_project: ShortText | None = None
    """trackio project. Null: off. TRACKIO_SPACE_ID or TRACKIO_SERVER_URL in head.env or in the head's template names a
    server. Without them, it is in the run's folder."""
    custom: Annotated[str, Field(min_length=1, max_length=1024, pattern=FACTORY_PATTERN)] | None = None
    """Another tracker: MODULE:NAME, or FILE.py:NAME with `rljob run`, of what returns a run with `log(values, step)`
    and `finish()` (docs/trackers.md). Null: none."""
    trajectories_size: Size = Size("4Gi")
    """Maximum disk space of the trajectory log (`rljob trajectories`) in the run's folder. Files of the oldest steps
    are deleted first. 0 is off. May change while the job runs."""

    @property
    def packages(self) -> dict[str, str]:
        """The field that needs it, by the package of a tracker's client."""
        trackers = (
            ("tensorboard", "tensorboard", self.tensorboard),
            ("wandb", "wandbProject", self.wandb_project),
            ("mlflow", "mlflowExperiment", self.mlflow_experiment),
            ("trackio", "trackioProject", self.trackio_project),
        )
        return {package: field for package, field, value in trackers if value}


class Tracing(Spec):
    """Traces of episodes by OpenTelemetry, which the head and the servers of rewards, users, tools and runners send to
    a collector by OTLP over HTTP (docs/tracing.md)."""

    endpoint: Url
    """The collector's base URL, such as http://otel-collector.observability:4318. Spans go to its /v1/traces. The
    network policies open its port. Other settings are the standard variables (OTEL_*) in a role's env, which take
    precedence."""
    sampling_ratio: float = Field(default=0.1, ge=0, le=1)
    """The part of episodes that are traced, each from the first span to the last: 1 is all, 0 none."""
    headers_secret_ref: SecretKeyRef | None = None
    """Key of a Secret with headers for the collector, as NAME=VALUE,NAME=VALUE. Null: none."""


class Scheduling(Spec):
    """Gang scheduling: starts the job's Pods together, so that an incomplete job does not occupy nodes indefinitely."""

    gang: Literal["none", "gates", "kueue"] = "none"
    """none: each Pod starts independently. gates: Pods have a scheduling gate until all Pods exist; a gang that is
    incomplete after timeoutSeconds releases its nodes and is retried later. kueue: the same with Kueue's Pod group."""
    timeout_seconds: int = Field(default=600, ge=1, le=MAX_SECONDS)
    """Seconds within which all Pods of the gang must be scheduled; otherwise the Pods are removed and retried later.
    Unused with gang none."""
    queue: ShortText | None = None
    """LocalQueue of Kueue."""
    scheduler_name: ShortText | None = None
    """Scheduler of all Pods. Null: the cluster's default."""
    force_delete_after_seconds: int | None = Field(default=None, ge=10, le=MAX_SECONDS)
    """Seconds after the grace period of a Pod when the operator deletes it by force, because its node does not confirm
    its end. Null: never; a lost node then stops the job until someone acts. A partitioned node may still run the Pod,
    so set it only where that cannot happen, or does no harm (docs/lifecycle.md, A lost node). May change while the job
    runs. Needs the right to delete Pods (chart: features.forceDeletion)."""
