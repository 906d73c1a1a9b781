"""Rewards: what scores a trajectory, where it runs, and what happens when it fails."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rljob_api import API_VERSION
from rljob_api.manifest.base import (
    MODULE_PATTERN,
    PART_NAME_PATTERN,
    REQUIREMENT_PATTERN,
    URL_PATTERN,
    ObjectMeta,
    PathText,
    Rule,
    ShortText,
    Spec,
)
from rljob_api.manifest.roles import Role
from rljob_api.manifest.scaling import Autoscaling, RewardScaling
from rljob_api.manifest.scorers import EndpointLimits, JudgeReward, ModelReward, ServedModel
from rljob_api.manifest.status import Condition

Scope = Literal["sample", "group", "sampleThenGroup"]


class ConfigMapKeyRef(Spec):
    """A key of a ConfigMap in the job's namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the ConfigMap."""
    key: Annotated[str, Field(min_length=1, max_length=253)]
    """Key that holds the source of the function."""


class FunctionReward(Spec):
    """A Python function, run in worker processes of the reward server: exactly one of inline, file, configMapKeyRef and
    module."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("",),
            "must have exactly one of inline, file, configMapKeyRef, module",
            "say in one way where the source is",
            lambda f: [f.inline, f.file, f.config_map_key_ref, f.module].count(None) == 3,
            "[has(self.inline), has(self.file), has(self.configMapKeyRef), has(self.module)]"
            ".filter(given, given).size() == 1",
        ),
    )

    inline: Annotated[str, Field(min_length=1, max_length=262144)] | None = None
    """Python source of the function, at most 256 KiB."""
    file: PathText | None = None
    """Path of a Python file. `rljob run` reads it beside the job file; on a cluster it is a path inside the image."""
    config_map_key_ref: ConfigMapKeyRef | None = None
    """A ConfigMap's key that holds the source."""
    module: Annotated[str, Field(min_length=1, max_length=256, pattern=MODULE_PATTERN)] | None = None
    """A module to import, such as `trl.rewards`: of a package in requirements, or of the reward's image."""
    requirements: list[Annotated[str, Field(min_length=1, max_length=512, pattern=REQUIREMENT_PATTERN)]] = Field(
        default=[], max_length=256
    )
    """Packages that the function needs, as lines of a pip requirements file without options. Installed once when a Pod
    starts, apart from the server's own packages. The index is told by env (UV_INDEX_URL, PIP_INDEX_URL)."""
    entrypoint: ShortText | None = None
    """Name of the function; with scope sampleThenGroup, of the class. Null means the first of compute_score,
    reward_func, reward that the source defines, or the first class with `compute_score` and `post_process_scores`."""
    signature: Literal["auto", "verl", "trl", "openrlhf"] = "auto"
    """Convention of the function: verl `(data_source, solution_str, ground_truth, extra_info)`, TRL
    `(prompts, completions, **columns)`, OpenRLHF `(queries, prompts, labels)`. With scope group each gets lists with
    one element a sample; verl's parameters are then called data_sources, solution_strs, ground_truths, extra_infos.
    auto reads the parameter names."""
    kwargs: dict[str, Any] = Field(default={}, json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})
    """Further keyword arguments of each call; of a class, those that it is made with."""
    max_memory_mib: int = Field(default=2048, ge=64, alias="maxMemoryMiB")
    """Address space that one process of the function may use, in MiB."""
    max_file_mib: int = Field(default=256, ge=1, alias="maxFileMiB")
    """Size of one file that the function writes, and of its scratch directory together, in MiB."""
    max_processes: int = Field(default=128, ge=0, le=100000)
    """Processes and threads that one worker may have at a time, itself left out."""
    cpu_seconds: int | None = Field(default=None, ge=1)
    """CPU time that one call may use, in seconds, of all its threads; a process that it starts, in its whole life.
    Null means that timeoutSeconds alone ends it."""
    network: bool = False
    """Whether the function may open network connections. Without it sockets fail, and the NetworkPolicy of the reward's
    Pods lets nothing out."""


class HttpReward(Spec):
    """An endpoint that is not ours. Nothing is deployed for it."""

    url: str = Field(pattern=URL_PATTERN, max_length=2048)
    """Where to POST."""
    protocol: Literal["rljob", "openrlhf"] = "rljob"
    """rljob: a ScoreRequest, answered by a ScoreResult. openrlhf: `{query, prompts, labels}`, by `{rewards}`."""


class FailurePolicy(Spec):
    """What an invalid result (an exception, a time-out, NaN, a dead worker) means for its sample. Never a zero."""

    retries: int = Field(default=2, ge=0, le=100)
    """Further attempts, each on another replica where there is one."""
    action: Literal["dropSample", "dropGroup", "failJob"] = "dropSample"
    """After the last attempt: mask the sample, mask its whole group, or fail the job."""


class Hedging(Spec):
    """A second request for a sample that takes unusually long, to another replica. The first answer counts."""

    percentile: float = Field(default=95, ge=50, lt=100)
    """A request is hedged once it has executed for longer than this percentile of the newest ones."""
    max_percent: float = Field(default=10, gt=0, le=100)
    """Most requests that are hedged, in percent of all: a reward that is slow as a whole is not asked for twice as
    much."""


class RewardServer(Role):
    """The Pods that run a reward."""

    replicas: int = Field(default=1, ge=0, le=4096)
    """Number of reward Pods. May change while the job runs. Not read where autoscaling is set."""
    autoscaling: Autoscaling | None = None
    """Pods by demand. Null: as many as replicas says. May change while the job runs."""
    slots: int = Field(default=16, ge=1, le=4096)
    """Requests that one Pod executes at once: a function's each in a worker process of its own, a model's and a judge's
    each as a question to vLLM or the endpoint."""
    queue_length: int = Field(default=4096, ge=1)
    """Requests that may wait on one Pod. A further one is answered 429 with Retry-After."""
    cache: bool = False
    """Whether a request that equals an earlier one in all but its id and lane gets that one's valid result. For rewards
    that give the same score for the same sample. With scope sampleThenGroup it is what each sample gets alone."""


class RewardBase(RewardServer):
    """What a reward has, be it a job's own or a RewardModel."""

    function: FunctionReward | None = None
    """A Python function."""
    model: ModelReward | None = None
    """A sequence classifier, under vLLM beside the reward server."""
    judge: JudgeReward | None = None
    """A chat model that is asked for a verdict."""
    http: HttpReward | None = None
    """Someone else's endpoint."""
    scope: Scope = "sample"
    """What is scored at once. sample: each trajectory alone, the moment it ends. group: all trajectories of a prompt,
    the moment the last of them ends (rankings, pairwise judges, lengths relative to the group). sampleThenGroup: each
    alone the moment it ends, and then the valid results of the group together, by a class with `compute_score` and
    `post_process_scores`. With rewardModelRef: the RewardModel's."""
    timeout_seconds: float = Field(default=30, gt=0)
    """Most time that one execution may take, from its start (waiting does not count); then it is killed. With scope
    group an execution is that of the whole group; where a judge compares, each of its questions is one."""

    @property
    def is_served(self) -> bool:
        """Whether it has Pods of its own here: not someone else's endpoint, and not a reference."""
        return self.function is not None or self.model is not None or self.judge is not None

    @property
    def kind(self) -> str:
        """The field that says what it is: function, model, judge or http; empty for a reference."""
        return next((kind for kind in ("function", "model", "judge", "http") if getattr(self, kind) is not None), "")

    @property
    def served_model(self) -> ServedModel | None:
        """The checkpoint that vLLM serves beside the reward server; None where there is none."""
        return self.model or (self.judge.model if self.judge else None)


def _given(reward: RewardBase) -> int:
    return 4 - [reward.function, reward.model, reward.judge, reward.http].count(None)


def _limit_is_enough(reward: RewardBase, limit: float | None, factor: int) -> bool:
    """Whether each of the replicas gets enough of a limit to ask all votes of a question."""
    most = reward.autoscaling.max_replicas if reward.autoscaling else reward.replicas
    return limit is None or reward.judge is None or limit >= factor * reward.judge.votes * most


def _limits_of(reward: RewardBase) -> EndpointLimits:
    return reward.judge.endpoint.limits if reward.judge and reward.judge.endpoint else EndpointLimits()


def _limit_cel(name: str, factor: int) -> str:
    field = f"self.judge.endpoint.limits.{name}"
    votes = "(has(self.judge.votes) ? self.judge.votes : 1)"
    replicas = "(has(self.autoscaling) ? self.autoscaling.maxReplicas : has(self.replicas) ? self.replicas : 1)"
    return (
        "!has(self.judge) || !has(self.judge.endpoint) || !has(self.judge.endpoint.limits) || "
        f"!has({field}) || {field} >= {factor} * {votes} * {replicas}"
    )


_LIMIT_REMEDY = "raise it, or lower replicas (autoscaling.maxReplicas) or judge.votes"
_LIMITS = (
    Rule(
        ("judge.endpoint.limits.concurrency", "judge.votes", "replicas"),
        "must be at least votes x replicas: each replica holds a share of it",
        _LIMIT_REMEDY,
        lambda reward: _limit_is_enough(reward, _limits_of(reward).concurrency, 1),
        _limit_cel("concurrency", 1),
    ),
    Rule(
        ("judge.endpoint.limits.requestsPerMinute", "judge.votes", "replicas"),
        "must be at least 2 x votes x replicas: each replica holds a share of it",
        _LIMIT_REMEDY,
        lambda reward: _limit_is_enough(reward, _limits_of(reward).requests_per_minute, 2),
        _limit_cel("requestsPerMinute", 2),
    ),
)
_SCOPE = (
    Rule(
        ("scope", "model"),
        "must be sample for a model: a classifier sees one text at a time",
        "remove scope, or use a judge with compare",
        lambda reward: reward.model is None or reward.scope == "sample",
        "!has(self.model) || !has(self.scope) || self.scope == 'sample'",
    ),
    Rule(
        ("scope", "judge.compare"),
        "must be group exactly when judge.compare is given",
        "set scope: group and judge.compare together",
        lambda reward: reward.judge is None or reward.scope == ("group" if reward.judge.compare else "sample"),
        "!has(self.judge) || (has(self.scope) ? self.scope : 'sample') == "
        "(has(self.judge.compare) ? 'group' : 'sample')",
    ),
    Rule(
        ("scope", "http"),
        "must be sample or group for an endpoint",
        "sampleThenGroup is for a class of yours; use group",
        lambda reward: reward.http is None or reward.scope != "sampleThenGroup",
        "!has(self.http) || !has(self.scope) || self.scope != 'sampleThenGroup'",
    ),
    Rule(
        ("cache", "scope"),
        "must be false where whole groups are scored: no group comes twice",
        "remove cache; a retry gets the result of its first attempt anyway",
        lambda reward: not reward.cache or reward.scope != "group",
        "!has(self.cache) || !self.cache || !has(self.scope) || self.scope != 'group'",
    ),
)
_NO_PODS_TO_SCALE = Rule(
    ("autoscaling", "http"),
    "must not be set beside http",
    "remove it: nothing of ours runs there",
    lambda reward: reward.autoscaling is None or reward.http is None,
    "!has(self.autoscaling) || !has(self.http)",
)


class RewardModelSpec(RewardBase):
    """A reward service. Exactly one of function, model, judge and http."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        *RewardServer.RULES,
        Rule(
            ("",),
            "must have exactly one of function, model, judge, http",
            "give a function of your own, a model, a judge, or the URL of an endpoint",
            lambda reward: _given(reward) == 1,
            "[has(self.function), has(self.model), has(self.judge), has(self.http)].filter(given, given).size() == 1",
        ),
        *_LIMITS,
        *_SCOPE,
        _NO_PODS_TO_SCALE,
    )


class RewardModelRef(Spec):
    """A RewardModel in the job's namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the RewardModel."""


class Reward(RewardBase):
    """One reward of a job: exactly one of function, model, judge, http and rewardModelRef. The job's score is the
    weighted sum of its rewards."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        *RewardServer.RULES,
        Rule(
            ("",),
            "must have exactly one of function, model, judge, http, rewardModelRef",
            "give a function of your own, a model, a judge, the URL of an endpoint, or the name of a RewardModel",
            lambda reward: _given(reward) + (reward.reward_model_ref is not None) == 1,
            "[has(self.function), has(self.model), has(self.judge), has(self.http), has(self.rewardModelRef)]"
            ".filter(given, given).size() == 1",
        ),
        *_LIMITS,
        *_SCOPE,
        _NO_PODS_TO_SCALE,
        Rule(
            ("autoscaling", "rewardModelRef"),
            "must not be set beside rewardModelRef",
            "set it in the RewardModel, whose Pods they are",
            lambda reward: reward.autoscaling is None or reward.reward_model_ref is None,
            "!has(self.autoscaling) || !has(self.rewardModelRef)",
        ),
    )

    # A reward's Service is called JOB-reward-NAME, and that must fit the 63 characters of a DNS label.
    name: str = Field(pattern=PART_NAME_PATTERN, max_length=15)
    """Name, in metrics and in the names of children. Unique within the job."""
    reward_model_ref: RewardModelRef | None = None
    """A RewardModel that several jobs may share; where it runs, and how many replicas it has, is its own affair.
    `rljob run` takes it from the same file."""
    weight: float = 1.0
    """Factor in the weighted sum."""
    failure_policy: FailurePolicy = FailurePolicy()
    """What an invalid result means."""
    deadline_seconds: float = Field(default=3600, gt=0)
    """Most time from a trajectory's end (with scope group, that of the group's last) to its result, waits and retries
    included; after it the sample is invalid, with reason deadline."""
    hedging: Hedging | None = None
    """Second requests for the slowest samples. Null: none."""


class RewardModelStatus(Spec):
    """Observed state of a RewardModel."""

    conditions: list[Condition] = Field(
        default=[], json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    )
    """Ready, Degraded, Scaling, Updating."""
    observed_generation: int = 0
    """The generation of spec that this status speaks of."""
    replicas: int = 0
    """Pods that exist."""
    ready_replicas: int = 0
    """Pods that answer."""
    endpoints: list[str] = []
    """Where it answers: host name and port of the Service of its ready Pods, or the URL of someone else's endpoint.
    Empty while no Pod is ready."""
    latency_p95_seconds: float | None = None
    """Execution time that 95 % of the newest samples stayed below, as the drivers of its jobs saw it; of several, the
    longest. It is written when it has changed by more than a tenth, and stays when no job runs."""
    scaling: RewardScaling | None = None
    """The last decision of spec.autoscaling."""
    selector: str = ""
    """Label selector of the Pods, for the scale subresource."""


class RewardModel(Spec):
    """A reward service of its own, shared by jobs."""

    api_version: Literal["rljob.dev/v1alpha1"] = API_VERSION
    kind: Literal["RewardModel"] = "RewardModel"
    metadata: ObjectMeta
    spec: RewardModelSpec
    status: RewardModelStatus = RewardModelStatus()
