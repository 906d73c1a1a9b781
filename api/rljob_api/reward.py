"""Rewards: what scores a trajectory, where it runs, and what happens when it fails."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rljob_api import API_VERSION
from rljob_api.base import PART_NAME_PATTERN, URL_PATTERN, ObjectMeta, PathText, Rule, ShortText, Spec
from rljob_api.roles import Role
from rljob_api.scaling import Autoscaling, RewardScaling
from rljob_api.status import Condition


class ConfigMapKeyRef(Spec):
    """A key of a ConfigMap in the job's namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the ConfigMap."""
    key: Annotated[str, Field(min_length=1, max_length=253)]
    """Key that holds the source of the function."""


class FunctionReward(Spec):
    """A Python function, run in worker processes of the reward server: exactly one of inline, file, configMapKeyRef."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("",),
            "must have exactly one of inline, file, configMapKeyRef",
            "say in one way where the source is",
            lambda f: [f.inline, f.file, f.config_map_key_ref].count(None) == 2,
            "[has(self.inline), has(self.file), has(self.configMapKeyRef)].filter(given, given).size() == 1",
        ),
    )

    inline: Annotated[str, Field(min_length=1, max_length=262144)] | None = None
    """Python source of the function, at most 256 KiB."""
    file: PathText | None = None
    """Path of a Python file. `rljob run` reads it beside the job file; on a cluster it is a path inside the image."""
    config_map_key_ref: ConfigMapKeyRef | None = None
    """A ConfigMap's key that holds the source."""
    entrypoint: ShortText | None = None
    """Name of the function. Null means the first of compute_score, reward_func, reward that the source defines."""
    signature: Literal["auto", "verl", "trl", "openrlhf"] = "auto"
    """Convention of the function: verl `(data_source, solution_str, ground_truth, extra_info)`, TRL
    `(prompts, completions, **columns)`, OpenRLHF `(queries, prompts, labels)`. auto reads the parameter names."""
    kwargs: dict[str, Any] = Field(default={}, json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})
    """Further keyword arguments of each call."""
    max_memory_mib: int = Field(default=2048, ge=64, alias="maxMemoryMiB")
    """Address space that one call may use, in MiB."""


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


class RewardServer(Role):
    """The Pods that run a reward."""

    replicas: int = Field(default=1, ge=0, le=4096)
    """Number of reward Pods. May change while the job runs. Not read where autoscaling is set."""
    autoscaling: Autoscaling | None = None
    """Pods by demand. Null: as many as replicas says. May change while the job runs."""
    slots: int = Field(default=16, ge=1, le=4096)
    """Requests that one Pod executes at once, each in a worker process of its own."""
    queue_length: int = Field(default=4096, ge=1)
    """Requests that may wait on one Pod. A further one is answered 429 with Retry-After."""


class RewardBase(RewardServer):
    """What a reward has, be it a job's own or a RewardModel."""

    function: FunctionReward | None = None
    """A Python function."""
    http: HttpReward | None = None
    """Someone else's endpoint."""
    timeout_seconds: float = Field(default=30, gt=0)
    """Most time that one execution may take, from its start (waiting does not count); then it is killed."""


_NO_PODS_TO_SCALE = Rule(
    ("autoscaling", "http"),
    "must not be set beside http",
    "remove it: nothing of ours runs there",
    lambda reward: reward.autoscaling is None or reward.http is None,
    "!has(self.autoscaling) || !has(self.http)",
)


class RewardModelSpec(RewardBase):
    """A reward service. Exactly one of function and http."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        *RewardServer.RULES,
        Rule(
            ("",),
            "must have exactly one of function, http",
            "give a function of your own, or the URL of an endpoint",
            lambda reward: (reward.function is None) != (reward.http is None),
            "has(self.function) != has(self.http)",
        ),
        _NO_PODS_TO_SCALE,
    )


class RewardModelRef(Spec):
    """A RewardModel in the job's namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the RewardModel."""


class Reward(RewardBase):
    """One reward of a job: exactly one of function, http and rewardModelRef. The job's score is the weighted sum of its
    rewards."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        *RewardServer.RULES,
        Rule(
            ("",),
            "must have exactly one of function, http, rewardModelRef",
            "give a function of your own, the URL of an endpoint, or the name of a RewardModel",
            lambda reward: [reward.function, reward.http, reward.reward_model_ref].count(None) == 2,
            "[has(self.function), has(self.http), has(self.rewardModelRef)].filter(given, given).size() == 1",
        ),
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


class RewardModelStatus(Spec):
    """Observed state of a RewardModel."""

    conditions: list[Condition] = Field(
        default=[], json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    )
    """Ready, Degraded."""
    observed_generation: int = 0
    """The generation of spec that this status speaks of."""
    replicas: int = 0
    """Pods that exist."""
    ready_replicas: int = 0
    """Pods that answer."""
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
