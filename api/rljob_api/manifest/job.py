"""RLJob: the job that a user writes. Only model, data and rewards are required.

A rule between sections exists twice, in Python and in CEL. Invariant: the CEL rules of RLJobSpec may rely on defaults,
because spec itself has none and the API server fills in the defaults of its fields first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal, TypeVar

from pydantic import Field

from rljob_api.manifest import job_sections as sections
from rljob_api.manifest.agent import Agent
from rljob_api.manifest.algorithm import Algorithm
from rljob_api.manifest.base import ClusterRule, ObjectMeta, Rule, Spec, different_names, list_map
from rljob_api.manifest.pod_settings import PodSettings
from rljob_api.manifest.reward import PythonFunction, Reward
from rljob_api.manifest.roles import HeadRole, Role, RolloutRole, TrainerRole
from rljob_api.manifest.runner import COMMAND_MODULE, ENVIRONMENTS_MODULE, RUNNER_SERVICE
from rljob_api.manifest.sandbox import SANDBOX_MODULE
from rljob_api.manifest.schedule import Schedule
from rljob_api.manifest.scorers import ServedModel
from rljob_api.manifest.simulated_user import USER_SERVICE
from rljob_api.manifest.sources import Hub
from rljob_api.manifest.status import RLJobStatus
from rljob_api.manifest.tool import MCP_MODULE
from rljob_api.wire.contract import API_VERSION


def _divides_over_ranks(spec: RLJobSpec) -> bool:
    prompts, remainder = divmod(spec.schedule.prompts_per_step, spec.schedule.mini_batches)
    # A batch that does not divide into mini-batches is reported once, by its own rule.
    return remainder > 0 or prompts * spec.algorithm.group_size % spec.trainer.num_ranks == 0


def _prompt_and_completion_fit(spec: RLJobSpec) -> bool:
    limit, prompt = spec.rollout.max_model_len, spec.data.max_prompt_tokens
    return limit is None or (prompt or 1) + spec.rollout.sampling.max_tokens <= limit


def _evaluation_fits(spec: RLJobSpec) -> bool:
    limit, sampling = spec.rollout.max_model_len, spec.evaluation.sampling
    return limit is None or sampling is None or sampling.max_tokens < limit


_HOSTED: Final = "self.agent.type == 'environment' || self.agent.type == 'program'"

_RULES: Final = (
    Rule(
        ("schedule.miniBatches", "schedule.promptsPerStep"),
        "must divide schedule.promptsPerStep",
        "change either",
        lambda spec: spec.schedule.prompts_per_step % spec.schedule.mini_batches == 0,
        "self.schedule.promptsPerStep % self.schedule.miniBatches == 0",
    ),
    Rule(
        (
            "schedule.promptsPerStep",
            "schedule.miniBatches",
            "algorithm.groupSize",
            "trainer.replicas",
            "trainer.gpusPerReplica",
        ),
        "x algorithm.groupSize / schedule.miniBatches must be divisible by the number of trainer ranks",
        "change the batch, or trainer.replicas and trainer.gpusPerReplica",
        _divides_over_ranks,
        "self.schedule.promptsPerStep % self.schedule.miniBatches != 0 || "
        "self.schedule.promptsPerStep / self.schedule.miniBatches * self.algorithm.groupSize % "
        "(self.trainer.replicas * (self.trainer.gpusPerReplica > 0 ? self.trainer.gpusPerReplica : 1)) == 0",
    ),
    different_names("rewards"),
    Rule(
        ("agent.tools", "rewards"),
        "must have names that no reward has: both are services of the job",
        "rename one of them",
        lambda spec: not {tool.name for tool in spec.agent.tools} & {reward.name for reward in spec.rewards},
        "!has(self.agent.tools) || !self.agent.tools.exists(tool, self.rewards.exists(r, r.name == tool.name))",
        lambda spec: ", ".join(sorted({t.name for t in spec.agent.tools} & {r.name for r in spec.rewards})),
    ),
    Rule(
        ("rewards", "agent.user"),
        f"must not be named {USER_SERVICE}, which is the service of agent.user",
        "choose another name",
        lambda spec: spec.agent.user is None or all(reward.name != USER_SERVICE for reward in spec.rewards),
        f"!has(self.agent.user) || self.rewards.all(reward, reward.name != '{USER_SERVICE}')",
        lambda spec: ", ".join(f"rewards[{i}]" for i, r in enumerate(spec.rewards) if r.name == USER_SERVICE),
    ),
    Rule(
        ("rewards", "agent.runner"),
        f"must not be named {RUNNER_SERVICE}, which is the service of agent.runner",
        "choose another name",
        lambda spec: not spec.agent.is_hosted or all(reward.name != RUNNER_SERVICE for reward in spec.rewards),
        f"!({_HOSTED}) || self.rewards.all(reward, reward.name != '{RUNNER_SERVICE}')",
        lambda spec: ", ".join(f"rewards[{i}]" for i, r in enumerate(spec.rewards) if r.name == RUNNER_SERVICE),
    ),
    Rule(
        ("data.format", "agent.type"),
        "must be chat unless agent.type is singleTurn: turns are chat messages",
        "set data.format: chat",
        lambda spec: spec.agent.type == "singleTurn" or spec.data.format == "chat",
        "self.agent.type == 'singleTurn' || self.data.format == 'chat'",
    ),
    Rule(
        ("rewards",),
        "must have at least one entry: only agents of type environment and program reward an episode themselves",
        "add a reward",
        lambda spec: bool(spec.rewards) or spec.agent.is_hosted,
        f"self.rewards.size() > 0 || {_HOSTED}",
    ),
    Rule(
        ("rewards", "agent.rewardWeight"),
        "must have a weight other than 0: otherwise every score is 0 and the model learns nothing",
        "set rewards[].weight",
        lambda spec: (
            any(reward.weight != 0 for reward in spec.rewards)
            or (spec.agent.is_hosted and spec.agent.reward_weight != 0)
            or (not spec.rewards and not spec.agent.is_hosted)  # reported by its own rule
        ),
        "self.rewards.exists(reward, reward.weight != 0.0) || "
        f"(({_HOSTED}) ? self.agent.rewardWeight != 0.0 : self.rewards.size() == 0)",
    ),
    Rule(
        ("rollout.replicas", "suspend"),
        "must be at least 1 unless the job is suspended",
        "set it to 1 or more, or suspend: true",
        lambda spec: spec.suspend or spec.rollout.replicas > 0,
        "self.suspend || self.rollout.replicas > 0",
    ),
    Rule(
        ("rewards",),
        "must have at least 1 replica each unless the job is suspended",
        "set replicas to 1 or more, or autoscaling with minReplicas 0, or suspend: true",
        lambda spec: spec.suspend or all(r.http or r.autoscaling or r.replicas > 0 for r in spec.rewards),
        "self.suspend || self.rewards.all(reward, has(reward.http) || has(reward.autoscaling) || reward.replicas > 0)",
        lambda spec: "0 for " + ", ".join(r.name for r in spec.rewards if not (r.http or r.autoscaling or r.replicas)),
    ),
    Rule(
        ("rollout.sampling.maxTokens", "rollout.maxModelLen", "data.maxPromptTokens"),
        "must leave room for the prompt in rollout.maxModelLen",
        "raise rollout.maxModelLen, or lower maxTokens or data.maxPromptTokens",
        _prompt_and_completion_fit,
        "!has(self.rollout.maxModelLen) || self.rollout.sampling.maxTokens + "
        "(has(self.data.maxPromptTokens) ? self.data.maxPromptTokens : 1) <= self.rollout.maxModelLen",
    ),
    Rule(
        ("evaluation.sampling.maxTokens", "rollout.maxModelLen"),
        "must leave room for the prompt in rollout.maxModelLen",
        "raise rollout.maxModelLen, or lower maxTokens",
        _evaluation_fits,
        "!has(self.rollout.maxModelLen) || !has(self.evaluation.sampling) || "
        "self.evaluation.sampling.maxTokens < self.rollout.maxModelLen",
    ),
    Rule(
        ("rollout.sampling.temperature",),
        "must be more than 0 for training: greedy trajectories of a prompt are identical",
        "set it to 1; evaluation is greedy by default",
        lambda spec: spec.rollout.sampling.temperature > 0,
        "self.rollout.sampling.temperature > 0.0",
    ),
    Rule(
        ("evaluation.everySteps", "data.eval"),
        "must be 0 without data.eval",
        "add data.eval, or remove everySteps",
        lambda spec: spec.evaluation.every_steps == 0 or spec.data.eval is not None,
        "self.evaluation.everySteps == 0 || has(self.data.eval)",
    ),
)


def _unchanged(path: str) -> ClusterRule:
    return ClusterRule(path, "is immutable; create a new RLJob instead", f"self.{path} == oldSelf.{path}")


def _unchanged_optional(path: str) -> ClusterRule:
    kept = f"has(self.{path}) == has(oldSelf.{path}) && (!has(self.{path}) || self.{path} == oldSelf.{path})"
    return ClusterRule(path, "is immutable; create a new RLJob instead", kept)


def _unchanged_unless_suspended(path: str) -> ClusterRule:
    message = "is immutable while the job runs; set suspend: true first"
    return ClusterRule(path, message, f"self.{path} == oldSelf.{path} || oldSelf.suspend")


_KUEUE_MESSAGE: Final = (
    "is immutable under scheduling.gang: kueue while the job runs, because Kueue fixes the number of a group's Pods; "
    "set suspend: true first"
)
_FREE_UNDER_KUEUE: Final = "oldSelf.suspend || oldSelf.scheduling.gang != 'kueue'"
_IN_GROUP: Final = "!has(r.http) && !has(r.rewardModelRef) && !has(r.autoscaling)"
"""Whether the Pods of a reward are in Kueue's group: each Pod of an autoscaled one is queued on its own."""


def _group_sizes(spec: str) -> str:
    return f"{spec}.rewards.map(r, {_IN_GROUP}, r.replicas)"


def _agent_sizes(spec: str) -> str:
    """The replicas of what is not autoscaled."""
    user, runner, tools = (f"{spec}.agent.{part}" for part in ("user", "runner", "tools"))
    return (
        f"(has({user}) && !has({user}.autoscaling) ? [{user}.replicas] : []) + "
        # Environments have a runner in any case.
        f"[has({runner}) ? (has({runner}.autoscaling) ? 0 : {runner}.replicas) : 1] + "
        f"(has({tools}) ? {tools}.map(t, !has(t.autoscaling), t.replicas) : [])"
    )


_IMMUTABLE: Final = (
    *map(_unchanged, ("model", "data.train", "algorithm", "agent.type")),
    *(_unchanged(f"schedule.{field}") for field in ("type", "promptsPerStep", "miniBatches", "maxStaleness", "seed")),
    *map(_unchanged_optional, ("managedBy", "trainer.lora")),
    *map(_unchanged_unless_suspended, ("trainer.replicas", "trainer.gpusPerReplica")),
    ClusterRule(
        "rollout.replicas", _KUEUE_MESSAGE, f"{_FREE_UNDER_KUEUE} || self.rollout.replicas == oldSelf.rollout.replicas"
    ),
    ClusterRule(
        "rewards",
        _KUEUE_MESSAGE.replace("immutable", "immutable in its replicas (except for autoscaled rewards)"),
        f"{_FREE_UNDER_KUEUE} || {_group_sizes('self')} == {_group_sizes('oldSelf')}",
    ),
    ClusterRule(
        "agent",
        _KUEUE_MESSAGE.replace(
            "immutable", "immutable in the replicas of its user, tools and runner (except for autoscaled ones)"
        ),
        f"{_FREE_UNDER_KUEUE} || {_agent_sizes('self')} == {_agent_sizes('oldSelf')}",
    ),
)


_SOURCES: Final = {ENVIRONMENTS_MODULE: "spec.agent.environment", COMMAND_MODULE: "spec.agent.runner.command"}
"""By module of the reward image."""
_TOOL_SOURCES: Final = {MCP_MODULE: "mcp", SANDBOX_MODULE: "sandbox"}
"""Field of a tool, by the same."""
ServiceKind = Literal["reward", "user", "tool", "runner"]
_Service = TypeVar("_Service", bound=Role)


@dataclass(frozen=True)
class Service:
    """What one Deployment serves: a reward, the simulated user, functions that the policy calls, or episodes."""

    kind: ServiceKind
    path: str
    """In the job: spec.rewards[0], spec.agent.user."""
    reward: Reward
    """Its settings; for what is not a reward, in the form of a reward."""
    framework: str = ""
    """Of a runner: agent.environment.framework. Empty: it runs a program."""

    @property
    def source(self) -> str:
        """Field of what it runs: spec.rewards[0].judge, spec.agent.user.function, spec.agent.runner.command."""
        module = self.reward.function.module if self.reward.function else None
        if module in _TOOL_SOURCES:
            return f"{self.path}.{_TOOL_SOURCES[module]}"
        return _SOURCES.get(module or "", f"{self.path}.{self.reward.kind}")


class RLJobSpec(PodSettings):
    """Desired state of an RLJob."""

    RULES: ClassVar[tuple[Rule, ...]] = _RULES
    CLUSTER_RULES: ClassVar[tuple[ClusterRule, ...]] = _IMMUTABLE

    model: sections.Model
    """The model to train."""
    data: sections.Data
    """Training and evaluation data."""
    rewards: list[Reward] = Field(default=[], max_length=16, json_schema_extra=list_map("name"))
    """Rewards that score a trajectory. At least one, unless agent.type is environment or program."""
    hub: Hub = Hub()
    algorithm: Algorithm = Algorithm()
    schedule: Schedule = Schedule()
    agent: Agent = Agent()
    head: HeadRole = HeadRole()
    trainer: TrainerRole = TrainerRole()
    rollout: RolloutRole = RolloutRole()
    evaluation: sections.Evaluation = sections.Evaluation()
    checkpoint: sections.Checkpoint = sections.Checkpoint()
    tracking: sections.Tracking = sections.Tracking()
    scheduling: sections.Scheduling = sections.Scheduling()
    suspend: bool = False
    """Whether the job is suspended. true deletes the Pods and keeps the checkpoint; false resumes from it."""
    managed_by: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """Controller that manages this job, if not RLJob's operator (set by Kueue's MultiKueue). Immutable."""
    active_deadline_seconds: int | None = Field(default=None, ge=1, le=sections.MAX_SECONDS)
    """Seconds of running after which the job fails. Time in a queue, or before all needed Pods are ready, does not
    count; a restart does. The count starts again after a suspension or a retry. Null: no deadline."""
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0, le=sections.MAX_SECONDS)
    """Seconds after the end when the RLJob is deleted. Null: never."""

    @property
    def services(self) -> list[Service]:
        """All that RLJob deploys, or reaches by URL, besides head, trainer and rollout."""
        user, tools, runner = self.agent.user, self.agent.tools, self.agent.runner_settings
        framework = self.agent.environment.framework if self.agent.environment else ""
        return [
            *(Service("reward", f"spec.rewards[{index}]", reward) for index, reward in enumerate(self.rewards)),
            *([Service("user", "spec.agent.user", user.as_reward(USER_SERVICE))] if user else []),
            *(
                Service("tool", f"spec.agent.tools[{index}]", tool.as_reward(tool.name))
                for index, tool in enumerate(tools)
            ),
            *([Service("runner", "spec.agent.runner", runner, framework)] if runner else []),
        ]

    def with_replicas(self, replicas: Mapping[str, int]) -> RLJobSpec:
        """Return the spec with other numbers of Pods, by name of the service."""

        def change(role: _Service, name: str) -> _Service:
            return role.model_copy(update={"replicas": replicas[name]}) if name in replicas else role

        agent = self.agent
        tools = [change(tool, tool.name) for tool in agent.tools]
        user = change(agent.user, USER_SERVICE) if agent.user else None
        # Environments have a runner in any case; without settings it is not autoscaled.
        runner = change(agent.runner, RUNNER_SERVICE) if agent.runner else None
        changed = {"rewards": [change(reward, reward.name) for reward in self.rewards]}
        parts = {"user": user, "tools": tools, "runner": runner}
        return self.model_copy(update=changed | {"agent": agent.model_copy(update=parts)})

    @property
    def functions(self) -> dict[str, PythonFunction]:
        """The Python of the user that the job runs, by path: spec.rewards[0].function, spec.agent.user.function."""
        found: dict[str, PythonFunction | None] = {}
        for index, reward in enumerate(self.rewards):
            found[f"spec.rewards[{index}].function"] = reward.function
        if self.agent.user:
            found["spec.agent.user.function"] = self.agent.user.function
        for index, tool in enumerate(self.agent.tools):
            found[f"spec.agent.tools[{index}].function"] = tool.function
        if self.agent.runner:
            found["spec.agent.runner.function"] = self.agent.runner.function
        return {path: function for path, function in found.items() if function is not None}

    @property
    def served_models(self) -> dict[str, ServedModel]:
        """The checkpoints that vLLM serves as sidecars, by path, such as spec.rewards[0].judge.model.

        Changes to one change the job.
        """
        rewards = ((service.path, service.reward) for service in self.services)
        return {
            f"{path}.{reward.served_model_field}": model for path, reward in rewards if (model := reward.served_model)
        }

    @property
    def sources(self) -> dict[str, str]:
        """Where models and data come from, by path, such as spec.model.source and spec.data.train.source."""
        found = {"spec.model.source": self.model.source, "spec.data.train.source": self.data.train.source}
        if self.data.eval is not None:
            found["spec.data.eval.source"] = self.data.eval.source
        return found | {f"{path}.source": model.source for path, model in self.served_models.items()}

    @property
    def num_optimized_models(self) -> int:
        """Whole models with an optimizer state. The critic of ppo is as large as the model; adapters are small."""
        return (self.trainer.lora is None) + (self.algorithm.type == "ppo")

    @property
    def saves_asynchronously(self) -> bool:
        """Whether training continues while a checkpoint is written."""
        chosen = self.checkpoint.asynchronous
        return self.trainer.gpus_per_replica > 0 if chosen is None else chosen


class RLJob(Spec):
    """One reinforcement-learning post-training job."""

    api_version: Literal["rljob.dev/v1alpha1"] = API_VERSION
    kind: Literal["RLJob"] = "RLJob"
    metadata: ObjectMeta
    spec: RLJobSpec
    status: RLJobStatus = RLJobStatus()
