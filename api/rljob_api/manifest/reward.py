"""Rewards: what scores a trajectory, where it runs, and how failures are handled."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rljob_api.functions.conventions import Signature
from rljob_api.manifest import base
from rljob_api.manifest.base import FreeForm, ObjectMeta, ObjectName, PathText, Rule, ShortText, Spec, Url
from rljob_api.manifest.pod_settings import PodSettings
from rljob_api.manifest.roles import Role
from rljob_api.manifest.scaling import Autoscaling, RewardScaling
from rljob_api.manifest.scorers import EndpointLimits, JudgeEndpoint, JudgeReward, ModelReward, ServedModel
from rljob_api.manifest.status import MAX_IMAGE_LENGTH, Condition
from rljob_api.wire.contract import API_VERSION

Scope = Literal["sample", "group", "sampleThenGroup"]

_COLUMN_PATTERN = r"^(prompt|completion|ground_truth|data_source|extra_info(\..+)?|prompt_ids|completion_ids)$"


class ConfigMapKeyRef(Spec):
    """A key of a ConfigMap in the job's namespace."""

    name: ObjectName
    """Name of the ConfigMap."""
    key: ObjectName
    """Key that holds the function's source."""


class PythonFunction(Spec):
    """Python source of the user, run in isolated worker processes: exactly one of inline, file, configMapKeyRef and
    module."""

    RULES: ClassVar = (base.exactly_one("inline", "file", "configMapKeyRef", "module"),)

    inline: Annotated[str, Field(min_length=1, max_length=262144)] | None = None
    """Python source of the function, at most 256 KiB."""
    file: PathText | None = None
    """Path of a Python file. With `rljob run` relative to the job file; on a cluster a path inside the image."""
    config_map_key_ref: ConfigMapKeyRef | None = None
    """Key of a ConfigMap that holds the source."""
    module: Annotated[str, Field(min_length=1, max_length=256, pattern=base.MODULE_PATTERN)] | None = None
    """Module to import, such as `trl.rewards`, from a package in requirements or from the reward's image."""
    requirements: list[Annotated[str, Field(min_length=1, max_length=512, pattern=base.REQUIREMENT_PATTERN)]] = Field(
        default=[], max_length=256
    )
    """Packages that the function needs, as lines of a pip requirements file without options. Each Pod installs them
    once at startup, separately from the server's packages. Set the package index in env (UV_INDEX_URL,
    PIP_INDEX_URL)."""
    entrypoint: ShortText | None = None
    """Name of the function, or of a class, a list of functions, or an object. Null: of a reward the first of
    compute_score, reward_func, reward, reward_fn, score_answer, rubric and reward_funcs that the source defines; with
    scope sampleThenGroup the first class with `compute_score` and `post_process_scores`. Null: of a simulated user
    `respond`, or the first class that has it; of tools the list `tools`, or all public functions."""
    factory_args: FreeForm | None = None
    """Arguments of an entry point that returns the function, such as `get_soft_overlong_punishment` of TRL, or of the
    constructor of a class with `__call__`. Each worker calls it once. Null: the entry point is the function itself; a
    class is created without arguments."""
    kwargs: FreeForm = {}
    """Additional keyword arguments of each call; with scope sampleThenGroup, and for a user or tools that are a class,
    of its constructor."""
    max_memory_mib: int = Field(default=2048, ge=64, alias="maxMemoryMiB")
    """Maximum address space of each process of the function, in MiB."""
    max_file_mib: int = Field(default=256, ge=1, alias="maxFileMiB")
    """Maximum size of each file that the function writes, and of its scratch directory in total, in MiB."""
    max_processes: int = Field(default=128, ge=0, le=100000)
    """Maximum concurrent child processes and threads of one worker. Processes that a call starts end with it."""
    max_requests: int | None = Field(default=None, ge=1)
    """Requests after which a worker process is replaced, or up to 10 % earlier, so that not all restart at once. Set it
    for a function that leaks. Null: no limit. Workers that fail repeatedly are replaced anyway."""
    spare_workers: int = Field(default=1, ge=0, le=256)
    """Ready worker processes of each Pod beyond the busy ones. They replace workers that were killed, so that a timeout
    or a crash does not cost the time of an import. Each takes the memory of an idle worker."""
    import_timeout_seconds: float = Field(default=300, gt=0, le=3600)
    """Maximum seconds of the import of the function, in each worker process. Later the import fails."""
    cpu_seconds: int | None = Field(default=None, ge=1)
    """Maximum CPU time of one call over all its threads, and of each process that it starts, in seconds. Null: limited
    only by timeoutSeconds."""
    network: bool = False
    """Whether the function may open network connections. If false, sockets fail, and the NetworkPolicy of the reward's
    Pods blocks egress."""


class FunctionReward(PythonFunction):
    """A Python function, run in worker processes of the reward server: exactly one of inline, file, configMapKeyRef and
    module."""

    signature: Signature = "auto"
    """Convention of the function. auto: detected from its parameter names. docs/rewards.md lists the forms of each
    project. With scope group, arguments are lists with one element per sample. plain: any of prompt, completion (or
    response), ground_truth (or answer), as strings."""
    columns: Annotated[
        dict[str, Annotated[str, Field(pattern=_COLUMN_PATTERN, max_length=256)]], Field(max_length=64)
    ] = {}
    """What parameters get, by name, where no convention fits: prompt, completion, ground_truth, data_source,
    extra_info, extra_info.KEY (a column of the data), prompt_ids or completion_ids. Example: `{text: completion, gold:
    ground_truth}`."""


class HttpReward(Spec):
    """An external endpoint. RLJob deploys nothing for it."""

    url: Url
    """URL that requests are posted to."""
    protocol: Literal["rljob", "openrlhf"] = "rljob"
    """rljob: the request is a ScoreRequest, the response a ScoreResult. openrlhf: `{query, prompts, labels}` and
    `{rewards}`."""


class FailurePolicy(Spec):
    """Handling of an invalid result (exception, timeout, NaN, dead worker). An invalid result never counts as zero."""

    retries: int = Field(default=2, ge=0, le=100)
    """Maximum retries, each on another replica if one exists."""
    action: Literal["dropSample", "dropGroup", "failJob"] = "dropSample"
    """Action after the last attempt: mask the sample, mask its whole group, or fail the job."""


class Hedging(Spec):
    """A second request to another replica for a sample that is unusually slow. The first result is used."""

    percentile: float = Field(default=95, ge=50, lt=100)
    """A request is hedged when it has executed for longer than this percentile of recent requests."""
    max_percent: float = Field(default=10, gt=0, le=100)
    """Maximum share of requests that are hedged, in percent. It bounds the extra load when the whole reward is slow."""


class RewardBase(Role):
    """Fields that rewards of a job and RewardModels share."""

    replicas: int = Field(default=1, ge=0, le=4096)
    """Number of reward Pods. May change while the job runs. Ignored if autoscaling is set."""
    autoscaling: Autoscaling | None = None
    """Scales the number of Pods with demand. Null: replicas applies. May change while the job runs."""
    slots: int = Field(default=16, ge=1, le=4096)
    """Requests that one Pod executes concurrently. A function runs each in a separate worker process; a model or a
    judge sends each to vLLM or to the endpoint."""
    queue_length: int = Field(default=4096, ge=1)
    """Maximum queued requests per Pod. The server rejects further requests with 429 and Retry-After."""
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
    timeout_seconds: float = Field(default=30, gt=0)
    """Maximum seconds of one execution, excluding queueing; then it is killed. With scope group one execution scores
    the whole group. If a judge compares, each of its questions is one execution."""

    @property
    def is_served(self) -> bool:
        """Whether RLJob deploys Pods for it: not for an external endpoint, and not for a reference."""
        return self.function is not None or self.model is not None or self.judge is not None

    @property
    def kind(self) -> str:
        """Name of the field that is set: function, model, judge or http. Empty for a reference."""
        return next((kind for kind in ("function", "model", "judge", "http") if getattr(self, kind) is not None), "")

    @property
    def served_model(self) -> ServedModel | None:
        """The checkpoint that vLLM serves as a sidecar of the reward server, if any."""
        return self.model or (self.judge.model if self.judge else None)

    @property
    def served_model_field(self) -> str:
        """Field of served_model."""
        return "model" if self.model else "judge.model"

    @property
    def endpoint(self) -> JudgeEndpoint | None:
        """The OpenAI-compatible endpoint whose chat model the server asks, if any; field `KIND.endpoint`."""
        return self.judge.endpoint if self.judge else None


def limits_suffice(asker: Literal["judge", "model"]) -> tuple[Rule, ...]:
    """Return the rules that each replica's share of an endpoint's limits suffices for its smallest execution.

    `asker`: the field that has the endpoint.
    """
    return _limit_suffices(asker, "concurrency", 1), _limit_suffices(asker, "requestsPerMinute", 2)


def _limit_suffices(asker: Literal["judge", "model"], name: str, num_requests: int) -> Rule:
    """Return the rule that a share suffices for `num_requests`; of a judge, for each vote of a question."""
    attribute = base.yaml_fields(EndpointLimits)[name][0]
    has_votes = asker == "judge"

    def holds(service: Any) -> bool:
        asking = getattr(service, asker)
        if asking is None or asking.endpoint is None:
            return True
        limit = getattr(asking.endpoint.limits, attribute)
        replicas = service.autoscaling.max_replicas if service.autoscaling else service.replicas
        return limit is None or limit >= num_requests * (asking.votes if has_votes else 1) * replicas

    field = f"{asker}.endpoint.limits.{name}"
    factors = [*([str(num_requests)] if num_requests > 1 else []), *(["votes"] if has_votes else []), "replicas"]
    votes = " (has(self.judge.votes) ? self.judge.votes : 1) *" if has_votes else ""
    return Rule(
        (field, *(["judge.votes"] if has_votes else []), "replicas"),
        f"must be at least {' x '.join(factors)}: each replica gets an equal share",
        f"raise it, or lower replicas (autoscaling.maxReplicas){' or judge.votes' if has_votes else ''}",
        holds,
        f"!has(self.{asker}) || !has(self.{asker}.endpoint) || !has(self.{asker}.endpoint.limits) || "
        f"!has(self.{field}) || self.{field} >= {num_requests} *{votes} "
        "(has(self.autoscaling) ? self.autoscaling.maxReplicas : has(self.replicas) ? self.replicas : 1)",
    )


_SHARED_RULES = (
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


class RewardModelSpec(PodSettings, RewardBase):
    """A reward service. Exactly one of function, model, judge and http."""

    RULES: ClassVar = (*Role.RULES, base.exactly_one("function", "model", "judge", "http"), *_SHARED_RULES)


class RewardModelRef(Spec):
    """A RewardModel in the job's namespace."""

    name: ObjectName
    """Name of the RewardModel."""


class Reward(RewardBase):
    """One reward of a job: exactly one of function, model, judge, http and rewardModelRef. The job's score is the
    weighted sum of its rewards."""

    RULES: ClassVar = (
        *Role.RULES,
        base.exactly_one("function", "model", "judge", "http", "rewardModelRef"),
        *_SHARED_RULES,
        Rule(
            ("autoscaling", "rewardModelRef"),
            "must not be set together with rewardModelRef",
            "set it in the RewardModel, which owns the Pods",
            lambda reward: reward.autoscaling is None or reward.reward_model_ref is None,
            "!has(self.autoscaling) || !has(self.rewardModelRef)",
        ),
    )

    # The reward's Service is named JOB-reward-NAME, which must fit the 63 characters of a DNS label.
    name: str = Field(pattern=base.PART_NAME_PATTERN, max_length=15)
    """Name in metrics and in the names of children. Unique within the job."""
    reward_model_ref: RewardModelRef | None = None
    """A RewardModel, possibly shared by several jobs; it defines its own placement and replicas. `rljob run` reads it
    from the job file."""
    weight: float = 1.0
    """Factor in the weighted sum."""
    failure_policy: FailurePolicy = FailurePolicy()
    deadline_seconds: float = Field(default=3600, gt=0)
    """Maximum seconds from the end of a trajectory (with scope group, of the group's last) to its result, including
    queueing and retries. Then the sample is invalid, with reason deadline."""
    hedging: Hedging | None = None
    """Second requests for the slowest samples. Null: off."""


class RewardModelStatus(Spec):
    """Observed state of a RewardModel."""

    conditions: list[Condition] = Field(default=[], json_schema_extra=base.list_map("type"))
    """Ready, Degraded, Scaling, Updating."""
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
