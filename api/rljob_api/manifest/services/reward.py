"""Rewards: what scores a trajectory, where it runs, and how failures are handled."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rljob_api.functions.values import COLUMNS
from rljob_api.manifest import base
from rljob_api.manifest.base import ObjectMeta, ObjectName, Rule, Spec, Url
from rljob_api.manifest.pod_settings import PodSettings
from rljob_api.manifest.quantity import Size
from rljob_api.manifest.scaling import RewardScaling
from rljob_api.manifest.services.base import PythonVersion, ServiceSettings
from rljob_api.manifest.services.function import SHARES_NO_CPU_LIMIT, PythonFunction
from rljob_api.manifest.services.models import (
    JudgeEndpoint,
    JudgeReward,
    ModelReward,
    ServedModel,
    TeacherReward,
    limits_suffice,
)
from rljob_api.manifest.status import MAX_IMAGE_LENGTH, Condition
from rljob_api.wire.contract import API_VERSION

Scope = Literal["sample", "group", "sampleThenGroup"]

_COLUMN_PATTERN = rf"^({'|'.join(COLUMNS)}|extra_info\..+)$"


class FunctionReward(PythonFunction):
    """A Python function, run in worker processes of the reward server: exactly one of inline, file, configMapKeyRef and
    module."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        *PythonFunction.RULES,
        Rule(
            ("entrypoints",),
            "must be empty with an entrypoint",
            "name all functions in entrypoints",
            lambda function: not function.entrypoints or function.entrypoint is None,
            "!has(self.entrypoints) || size(self.entrypoints) == 0 || !has(self.entrypoint)",
        ),
    )

    entrypoints: list[Annotated[str, Field(pattern=base.FUNCTION_PATTERN, max_length=128)]] = Field(
        default=[], max_length=64
    )
    """Names of several functions of the source, in place of entrypoint. Their scores are summed, and each is a
    component with its own curve. For a weight of its own, a function needs an entry of `rewards`."""
    signature: base.PluginName = "auto"
    """Convention of the function. auto: detected from its parameter names. plain: any of prompt, completion (or
    response), ground_truth (or answer), as strings. Else the name of a plugin: docs/rewards.md lists the forms of each
    project. With scope group, arguments are lists with one element per sample."""
    isolation: Literal["worker", "request"] = "worker"
    """What has a separate process. worker: each slot, which serves many requests. request: each request, in a process
    that is forked from a worker with the function. So a request cannot change what later ones find in memory. It costs
    some milliseconds, and the import must leave no thread."""
    columns: Annotated[
        dict[str, Annotated[str, Field(pattern=_COLUMN_PATTERN, max_length=256)]], Field(max_length=64)
    ] = {}
    """What parameters get, by name, where no convention fits or another value is wanted: prompt, prompt_text,
    rendered_prompt, completion, completion_messages, conversation (prompt and completion as one text with special
    tokens), ground_truth, data_source, extra_info, extra_info.KEY (a column of the data), prompt_ids, completion_ids,
    step (how many have ended) or total_steps. Example: `{text: completion, gold: ground_truth}`."""


class HttpReward(Spec):
    """An external endpoint. RLJob deploys nothing for it."""

    url: Url
    """URL that requests are posted to."""
    protocol: Literal["rljob", "openrlhf", "nemoGym"] = "rljob"
    """rljob: the request is a ScoreRequest, the response a ScoreResult. openrlhf: `{query, prompts, labels}` and
    `{rewards}`. nemoGym: those of `/verify` of a NeMo Gym resources server. Not with scope group."""


class FailureScores(Spec):
    """What failures count as that the policy itself can cause, such as code that never ends. By the result's reason.
    Null: it has no score."""

    exception: float | None = None
    """The function raised."""
    timeout: float | None = None
    """An execution exceeded timeoutSeconds."""
    worker_died: float | None = None
    """The process ended: a crash, os._exit, or a limit of memory, files or processes."""
    not_finite: float | None = None
    """The function returned NaN or infinity."""
    bad_return: float | None = None
    """The function returned what its signature does not allow."""
    refused: float | None = None
    """The judge refused to answer."""
    content_filter: float | None = None
    """A filter of the judge's endpoint withheld the answer."""
    empty: float | None = None
    """The judge's answer has no text."""


class FailurePolicy(Spec):
    """Handling of an invalid result (exception, timeout, NaN, dead worker). An invalid result never counts as zero,
    unless `scores` says so."""

    retries: int = Field(default=2, ge=0, le=100)
    """Maximum retries, each on another replica if one exists."""
    action: Literal["dropSample", "dropGroup", "failJob"] = "dropSample"
    """Action after the last attempt: mask the sample, mask its whole group, or fail the job."""
    scores: FailureScores = FailureScores()
    """Scores of failures by their reason, in place of `action`, after the last attempt. Such a result is valid, and its
    reason is still counted in metrics, logs and problems."""

    def score_of(self, reason: str | None) -> float | None:
        """Return what a failure for this reason counts as; None if it has no score."""
        return getattr(self.scores, reason, None) if reason in FailureScores.model_fields else None


class Hedging(Spec):
    """A second request to another replica for a sample that is unusually slow. The first result is used."""

    percentile: float = Field(default=95, ge=50, lt=100)
    """A request is hedged when it has executed for longer than this percentile of recent requests."""
    max_percent: float = Field(default=10, gt=0, le=100)
    """Maximum share of requests that are hedged, in percent. It bounds the extra load when the whole reward is slow."""


class RewardBase(ServiceSettings):
    """Fields that rewards of a job and RewardModels share."""

    replicas: int = Field(default=1, ge=0, le=4096)
    """Number of reward Pods. May change while the job runs. Ignored if autoscaling is set."""
    python: PythonVersion | None = None
    """Python that runs a function, such as "3.12" for packages that require it. On a cluster it chooses the image
    (defaults.pythonImages of the chart), unless `image` is set. `rljob run` takes it from this machine, where uv
    installs it if it is missing. Null: that of the image, or RLJob's own."""
    slots: int = Field(default=16, ge=1, le=4096)
    """Requests that one Pod executes concurrently. A function runs them in slots / episodesPerProcess worker processes;
    a model, a judge or a teacher sends each to vLLM or to the endpoint."""
    episodes_per_process: int = Field(default=1, ge=1, le=1024)
    """Requests (for an episode or a group) that one worker process scores at once, if the function is async: as
    coroutines of one event loop. 1: each has the process alone, since an async function may still block the others. See
    docs/isolation.md."""
    queue_length: int = Field(default=4096, ge=1)
    """Maximum queued requests per Pod. The server rejects further requests with 429 and Retry-After."""
    max_request_size: Size = Size("16Mi")
    """Maximum size of a sample as JSON, with its row of the data. A group may have three times as much, at most 60Mi.
    Rows with large test cases need more than the default."""
    cache: bool = False
    """Whether a request that equals an earlier one, except for id and lane, reuses its valid result. Use it for rewards
    that are deterministic. With scope sampleThenGroup only the results of single samples are cached."""
    function: FunctionReward | None = None
    """A Python function."""
    model: ModelReward | None = None
    """A sequence classifier, served by vLLM as a sidecar of the reward server."""
    judge: JudgeReward | None = None
    """A chat model that judges."""
    http: HttpReward | None = None
    """An external endpoint."""
    scope: Scope = "sample"
    """What one request scores. sample: one trajectory, as soon as it ends. group: all trajectories of a prompt, as soon
    as the last one ends (rankings, pairwise judges, lengths relative to the group). sampleThenGroup: each trajectory as
    soon as it ends, then the valid results of the group together, by a class with `compute_score` and
    `post_process_scores`. With rewardModelRef: the scope of the RewardModel."""
    timeout_seconds: int = Field(default=30, ge=1)
    """Maximum seconds of one execution, excluding queueing; then it is killed. With scope group one execution scores
    the whole group. If a judge compares, each of its questions is one execution."""

    @property
    def is_served(self) -> bool:
        """Whether RLJob deploys Pods for it: not for an external endpoint, a reference, and the policy with a hint."""
        return self.kind not in ("", "http") and getattr(self.asked, "hint", None) is None

    @property
    def kind(self) -> str:
        """Name of the field that is set: function, model, judge, http or teacher. Empty for a reference."""
        kinds = ("function", "model", "judge", "http", "teacher")
        return next((kind for kind in kinds if getattr(self, kind, None) is not None), "")

    @property
    def asked(self) -> JudgeReward | TeacherReward | None:
        """What asks a chat model, its own or an endpoint's, if anything."""
        return self.judge

    @property
    def served_model(self) -> ServedModel | None:
        """The checkpoint that vLLM serves as a sidecar of the reward server, if any."""
        return self.model or (self.asked.model if self.asked else None)

    @property
    def served_model_field(self) -> str:
        """Field of served_model."""
        return "model" if self.model else f"{self.kind}.model"

    @property
    def endpoint(self) -> JudgeEndpoint | None:
        """The OpenAI-compatible endpoint that the server asks, if any; field `KIND.endpoint`."""
        return self.asked.endpoint if self.asked else None


_SHARED_RULES = (
    SHARES_NO_CPU_LIMIT,
    Rule(
        ("episodesPerProcess", "function"),
        "must be 1 without a function",
        "remove it: a model or an endpoint has no worker processes of its own",
        lambda reward: reward.episodes_per_process == 1 or reward.function is not None,
        "!has(self.episodesPerProcess) || self.episodesPerProcess == 1 || has(self.function)",
    ),
    Rule(
        ("episodesPerProcess", "function.isolation"),
        "must be 1 with isolation: request, which gives each request a process",
        "remove one of them",
        lambda reward: (
            reward.episodes_per_process == 1 or reward.function is None or reward.function.isolation == "worker"
        ),
        "!has(self.episodesPerProcess) || self.episodesPerProcess == 1 || !has(self.function) || "
        "!has(self.function.isolation) || self.function.isolation == 'worker'",
    ),
    *limits_suffice("judge"),
    Rule(
        ("scope", "model"),
        "must be sample for a model: a classifier scores one text at a time",
        "remove scope, or use a judge with compare",
        lambda reward: reward.model is None or reward.scope == "sample",
        "!has(self.model) || !has(self.scope) || self.scope == 'sample'",
    ),
    Rule(
        ("scope", "judge.compare"),
        "must be group exactly when judge.compare is set",
        "set scope: group and judge.compare together",
        lambda reward: reward.judge is None or reward.scope == ("group" if reward.judge.compare else "sample"),
        "!has(self.judge) || (has(self.scope) ? self.scope : 'sample') == "
        "(has(self.judge.compare) ? 'group' : 'sample')",
    ),
    Rule(
        ("scope", "http"),
        "must be sample or group for an endpoint",
        "use group; sampleThenGroup needs a Python class",
        lambda reward: reward.http is None or reward.scope != "sampleThenGroup",
        "!has(self.http) || !has(self.scope) || self.scope != 'sampleThenGroup'",
    ),
    Rule(
        ("scope", "http.protocol"),
        "must be sample with protocol nemoGym: /verify gets one response",
        "remove scope",
        lambda reward: reward.http is None or reward.http.protocol != "nemoGym" or reward.scope == "sample",
        "!has(self.http) || !has(self.http.protocol) || self.http.protocol != 'nemoGym' || !has(self.scope) || "
        "self.scope == 'sample'",
    ),
    Rule(
        ("cache", "scope"),
        "must be false with scope group: groups do not repeat",
        "remove cache; a retry reuses the result of its first attempt anyway",
        lambda reward: not reward.cache or reward.scope != "group",
        "!has(self.cache) || !self.cache || !has(self.scope) || self.scope != 'group'",
    ),
    Rule(
        ("autoscaling", "http"),
        "must not be set together with http",
        "remove it: RLJob deploys no Pods for an endpoint",
        lambda reward: reward.autoscaling is None or reward.http is None,
        "!has(self.autoscaling) || !has(self.http)",
    ),
)


def _separate(field: str, given: str) -> Rule:
    """The rule that a served model of a RewardModel has a container of its own. `given`: whether there is one, in
    CEL."""
    return Rule(
        (f"{field}.placement",),
        "must be separate: a RewardModel has no trainer",
        "remove it, or define the reward in the job",
        lambda reward: reward.served_model_field != field or getattr(reward.served_model, "placement", "") != "trainer",
        f"!({given}) || !has(self.{field}.placement) || self.{field}.placement == 'separate'",
    )


class RewardModelSpec(PodSettings, RewardBase):
    """A reward service. Exactly one of function, model, judge and http."""

    RULES: ClassVar = (
        *ServiceSettings.RULES,
        base.exactly_one("function", "model", "judge", "http"),
        *_SHARED_RULES,
        _separate("model", "has(self.model)"),
        _separate("judge.model", "has(self.judge) && has(self.judge.model)"),
    )


class RewardModelRef(Spec):
    """A RewardModel in the job's namespace."""

    name: ObjectName
    """Name of the RewardModel."""


_HAS_HINT = "has(self.teacher) && has(self.teacher.hint)"


class Reward(RewardBase):
    """One reward of a job: exactly one of function, model, judge, http, teacher and rewardModelRef. The job's score is
    the weighted sum of its rewards; teachers are in it if there are no others."""

    RULES: ClassVar = (
        *ServiceSettings.RULES,
        base.exactly_one("function", "model", "judge", "http", "teacher", "rewardModelRef"),
        *_SHARED_RULES,
        *limits_suffice("teacher"),
        Rule(
            ("scope", "teacher"),
            "must be sample for a teacher, which reads one episode at a time",
            "remove scope",
            lambda reward: reward.teacher is None or reward.scope == "sample",
            "!has(self.teacher) || !has(self.scope) || self.scope == 'sample'",
        ),
        Rule(
            ("cache", "teacher"),
            "must be false for a teacher: its answers are long, and episodes do not repeat",
            "remove cache; a retry reuses the result of its first attempt anyway",
            lambda reward: reward.teacher is None or not reward.cache,
            "!has(self.teacher) || !has(self.cache) || !self.cache",
        ),
        Rule(
            ("use", "teacher.hint"),
            "must be training with a hint: the policy is evaluated without it",
            "set use: training",
            lambda reward: not (reward.teacher and reward.teacher.hint) or reward.use == "training",
            f"!({_HAS_HINT}) || self.use == 'training'",
        ),
        Rule(
            ("autoscaling", "rewardModelRef", "teacher.hint"),
            "must not be set together with rewardModelRef, nor with teacher.hint, which has no Pods",
            "set it in the RewardModel, which owns the Pods, or remove it",
            lambda reward: reward.autoscaling is None or (reward.reward_model_ref is None and reward.hint is None),
            f"!has(self.autoscaling) || !(has(self.rewardModelRef) || {_HAS_HINT})",
        ),
        Rule(
            ("episodesPerProcess", "failurePolicy.scores.workerDied"),
            "must be 1 if a dead process has a score: it would count for all requests of the process",
            "remove one of them",
            lambda reward: reward.episodes_per_process == 1 or reward.failure_policy.scores.worker_died is None,
            "!has(self.episodesPerProcess) || self.episodesPerProcess == 1 || !has(self.failurePolicy) || "
            "!has(self.failurePolicy.scores) || !has(self.failurePolicy.scores.workerDied)",
        ),
    )

    name: str = Field(pattern=base.REWARD_NAME_PATTERN, max_length=40)
    """Name in metrics and in the names of children, which have a digest in place of more than 15 characters or `_`.
    Unique within the job."""
    reward_model_ref: RewardModelRef | None = None
    """A RewardModel, possibly shared by several jobs; it defines its own placement and replicas. `rljob run` reads it
    from the job file."""
    teacher: TeacherReward | None = None
    """A model that the policy learns from, token by token (on-policy distillation). Its score is minus the mean of
    log policy - log teacher over the sampled tokens: minus the KL divergence from the teacher."""
    weight: float = 1.0
    """Factor in the weighted sum; of a teacher, of what it adds to the advantage of each token."""
    use: Literal["both", "training", "evaluation"] = "both"
    """What it scores. training: episodes of training alone. evaluation: those of evaluation alone, so it is in no
    advantage. An evaluation set may choose among the others (evaluation.sets[].rewards)."""
    failure_policy: FailurePolicy = FailurePolicy()
    deadline_seconds: int = Field(default=3600, ge=1)
    """Maximum seconds from the end of a trajectory (with scope group, of the group's last) to its result, including
    queueing and retries. Then the sample is invalid, with reason deadline."""
    hedging: Hedging | None = None
    """Second requests for the slowest samples. Null: off."""

    @property
    def hint(self) -> str | None:
        """That of a teacher which is the policy itself."""
        return self.teacher.hint if self.teacher else None

    @property
    def top_k(self) -> int:
        """That of a teacher; 0 if none of its likeliest tokens are read."""
        return self.teacher.top_k if self.teacher else 0

    def scores_row(self, columns: Mapping[str, Any], data_source: str) -> bool:
        """Return whether it scores the answers to the prompt of a row: all, but for those that a teacher does not
        teach. `columns`: extra_info of a prompt, or of a request."""
        columns, when = {**columns, "data_source": data_source}, self.teacher.when if self.teacher else {}
        return all(str(columns.get(name)) in values for name, values in when.items())

    @property
    def asked(self) -> JudgeReward | TeacherReward | None:
        """As of RewardBase; or the teacher."""
        return self.teacher or self.judge

    @property
    def retries(self) -> int:
        """Maximum retries of a request, as of other services."""
        return self.failure_policy.retries


class RewardModelStatus(Spec):
    """Observed state of a RewardModel."""

    conditions: list[Condition] = Field(default=[], json_schema_extra=base.list_map("type"))
    """Ready, Reconciling, Stalled, Degraded, Scaling, Updating."""
    observed_generation: int = 0
    """Generation of spec that this status refers to."""
    replicas: int = 0
    """Existing Pods."""
    ready_replicas: int = 0
    """Ready Pods."""
    endpoints: list[str] = []
    """Host name and port of the Service of its ready Pods, or the URL of an external endpoint. Empty while no Pod is
    ready."""
    latency_p95_seconds: float | None = None
    """95th percentile of the execution time of recent samples, as measured by the drivers of its jobs; the maximum over
    jobs. Updated on changes of more than 10 %, and kept while no job runs."""
    scaling: RewardScaling | None = None
    """Last decision of spec.autoscaling."""
    selector: str = ""
    """Label selector of the Pods, for the scale subresource."""
    image: str = Field(default="", max_length=MAX_IMAGE_LENGTH)
    """Image of the main container, which the Pods keep over an upgrade of the operator (see RLJob status.roles)."""


class RewardModel(Spec):
    """A reward service that jobs can share."""

    api_version: Literal["rljob.dev/v1alpha1"] = API_VERSION
    kind: Literal["RewardModel"] = "RewardModel"
    metadata: ObjectMeta
    spec: RewardModelSpec
    status: RewardModelStatus = RewardModelStatus()
