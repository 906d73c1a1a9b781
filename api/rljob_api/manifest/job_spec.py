"""The fields of a job's spec, and what follows from them. The rules between them are in `job_rules`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal, Self, TypeVar

import pydantic
from pydantic import Field

from rljob_api.manifest import job_sections as sections
from rljob_api.manifest.agent import Agent
from rljob_api.manifest.algorithm import Algorithm
from rljob_api.manifest.base import decide, list_map
from rljob_api.manifest.evaluation import Evaluation, HeldOutSet, list_held_out
from rljob_api.manifest.pod_settings import PodSettings
from rljob_api.manifest.roles import OWN_GPU, HeadRole, Lora, Role, RolloutRole, TrainerRole
from rljob_api.manifest.roles import SHARED_GPU as ROLLOUT_GPU
from rljob_api.manifest.schedule import Schedule
from rljob_api.manifest.services.base import ServiceSettings
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.function import PythonFunction
from rljob_api.manifest.services.models import ServedModel
from rljob_api.manifest.services.reward import Reward
from rljob_api.manifest.services.runner import COMMAND_MODULE, ENVIRONMENTS_MODULE, RUNNER_SERVICE
from rljob_api.manifest.services.sandbox import SANDBOX_MODULE
from rljob_api.manifest.services.tool import MCP_MODULE
from rljob_api.manifest.services.user import USER_SERVICE
from rljob_api.manifest.sources import Hub, ObjectStorage, parse_source

CHECKPOINT_BYTES_PER_PARAMETER: Final = 12
"""fp32 weights and AdamW's two moments."""
_STARTUP_SECONDS: Final = 600
"""vLLM loads and compiles before it listens."""
_HUB_STARTUP_SECONDS: Final = 4200
"""A restarted replica would begin its download again."""
_SERVICE_SECONDS: Final = 1800
"""The least of hangDetection.minSeconds of a service."""
_MAX_SLOTS: Final = 8
"""Each takes the memory of an adapter of the highest rank from a rollout's cache."""
_SOURCES: Final = {ENVIRONMENTS_MODULE: "spec.agent.environment", COMMAND_MODULE: "spec.agent.runner.command"}
"""By module of the reward image."""
_TOOL_SOURCES: Final = {MCP_MODULE: "mcp", SANDBOX_MODULE: "sandbox"}
"""Field of a tool, by the same."""
ServiceKind = Literal["reward", "user", "tool", "runner"]
_Service = TypeVar("_Service", bound=ServiceSettings)


@dataclass(frozen=True)
class Service:
    """What one Deployment serves: a reward, the simulated user, functions that the policy calls, or episodes."""

    kind: ServiceKind
    path: str
    """In the job: spec.rewards[0], spec.agent.user."""
    settings: Reward | CallService
    """What its server reads."""
    framework: str = ""
    """A runner's agent.environment.framework. Empty: it runs a program."""

    @property
    def source(self) -> str:
        """Field of what it runs: spec.rewards[0].judge, spec.agent.user.function, spec.agent.runner.command."""
        module = self.settings.function.module if self.settings.function else None
        if module in _TOOL_SOURCES:
            return f"{self.path}.{_TOOL_SOURCES[module]}"
        return _SOURCES.get(module or "", f"{self.path}.{self.settings.kind}")


class JobSpec(PodSettings):
    """Desired state of an RLJob, without the rules between its sections."""

    task: Literal["train", "evaluate"] = "train"
    """train: train the model, and evaluate it on the way. evaluate: evaluate the model as it is, and end; the job then
    has no trainer, and `rljob evaluate` writes it. Immutable."""
    model: sections.Model
    """The model to train, or to evaluate."""
    given_data: sections.Data | None = Field(default=None, alias="data")
    """Training and evaluation data. Required without service."""
    rewards: list[Reward] = Field(default=[], max_length=16, json_schema_extra=list_map("name"))
    """Rewards that score a trajectory. At least one, unless agent.type is environment or program, or without
    data.train."""
    service: sections.TrainingService | None = None
    """A training service, in place of data and rewards. It runs until it is suspended or deleted. See
    docs/training-service.md. Null: the job trains by itself."""
    hub: Hub = Hub()
    object_storage: ObjectStorage = ObjectStorage()
    algorithm: Algorithm = Algorithm()
    schedule: Schedule = Schedule()
    agent: Agent = Agent()
    head: HeadRole = HeadRole()
    trainer: TrainerRole = TrainerRole()
    rollout: RolloutRole = RolloutRole()
    evaluation: Evaluation = Evaluation()
    checkpoint: sections.Checkpoint = sections.Checkpoint()
    tracking: sections.Tracking = sections.Tracking()
    tracing: sections.Tracing | None = None
    """Traces of episodes. Null: none."""
    scheduling: sections.Scheduling = sections.Scheduling()
    suspend: bool = False
    """Whether the job is suspended. true deletes the Pods and keeps the checkpoint; false resumes from it."""
    managed_by: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """Controller that manages this job, if not RLJob's operator (set by Kueue's MultiKueue). Immutable."""
    active_deadline_seconds: int | None = Field(default=None, ge=1, le=sections.MAX_SECONDS)
    """Seconds of running after which the job fails. Time in a queue, or before all needed Pods are ready, does not
    count; a restart does. The count starts again after a suspension or a retry. Null: no deadline."""
    progress_deadline_seconds: int | None = Field(default=None, ge=1, le=sections.MAX_SECONDS)
    """Seconds without a finished step after which the condition Progressing is False; the job goes on. Time in a queue,
    suspended, or waiting for an outage to end does not count. Null: as long as the job's own steps allow."""
    outage_seconds: int = Field(default=21600, ge=0, le=sections.MAX_SECONDS)
    """Seconds for which the job waits for a service that fails all requests: a reward, a judge, a runner, the hub, the
    checkpoint's volume. Then it fails. May change while the job runs."""
    hang_detection: sections.HangDetection = sections.HangDetection()
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0, le=sections.MAX_SECONDS)
    """Seconds after the end when the RLJob is deleted. Null: never."""

    @pydantic.model_validator(mode="after")
    def _complete(self) -> Self:
        """Set what a service implies, or a job without prompts."""
        if self.given_data and self.given_data.given_train is None:
            self.rollout = self.rollout.model_copy(update={"replicas": 0})
        if self.service is None:
            return self
        if self.trainer.lora is None:
            rank = self.service.max_rank
            lora = Lora(rank=rank, alpha=rank, publish="adapter")
            self.trainer = self.trainer.model_copy(update={"lora": lora})
        # A call of its ranks may have a thousand times the tokens of those before.
        seconds = max(self.hang_detection.min_seconds, _SERVICE_SECONDS)
        self.hang_detection = self.hang_detection.model_copy(update={"min_seconds": seconds})
        return self

    @property
    def data(self) -> sections.Data:
        return self.given_data or sections.NO_DATA

    @property
    def services(self) -> list[Service]:
        """All that RLJob deploys, or reaches by URL, besides head, trainer and rollout."""
        user, tools, runner = self.agent.user, self.agent.tools, self.agent.runner_settings
        framework = self.agent.environment.framework if self.agent.environment else ""
        return [
            *(Service("reward", f"spec.rewards[{index}]", reward) for index, reward in enumerate(self.rewards)),
            *([Service("user", "spec.agent.user", user.build_service())] if user else []),
            *(Service("tool", f"spec.agent.tools[{index}]", tool.build_service()) for index, tool in enumerate(tools)),
            *([Service("runner", "spec.agent.runner", runner, framework)] if runner else []),
        ]

    @property
    def training_rewards(self) -> list[Reward]:
        """The rewards of training episodes, in order."""
        return [reward for reward in self.rewards if reward.use != "evaluation"]

    @property
    def held_out_sets(self) -> list[HeldOutSet]:
        """All evaluation sets, that of data.eval first."""
        return list_held_out(self.evaluation, self.data, self.rewards)

    @property
    def own_roles(self) -> dict[str, Role]:
        """The roles with Pods, besides services, by name: head, trainer, and rollouts with Pods of their own."""
        roles: dict[str, Role] = {"head": self.head}
        roles |= {"trainer": self.trainer} if self.trains else {}
        return roles if self.shares_trainer else roles | {"rollout": self.rollout}

    @property
    def num_adapter_slots(self) -> int:
        """Adapters that a rollout holds side by side, by name; 0: one, which every request uses."""
        return min(self.service.max_adapters, _MAX_SLOTS) if self.service else 0

    @property
    def trains(self) -> bool:
        """Whether the job has a trainer. If not, it evaluates."""
        return self.task == "train"

    @property
    def num_steps(self) -> int:
        """The steps after which the job ends."""
        return self.schedule.steps if self.trains and self.service is None else 0

    @property
    def num_trainer_pods(self) -> int:
        return self.trainer.replicas if self.trains else 0

    @property
    def shares_trainer(self) -> bool:
        """Whether the rollouts run in the trainer's Pods, in turns with it."""
        return self.rollout.placement == "trainer"

    @property
    def engines_per_pod(self) -> int:
        """Rollout replicas in each trainer Pod; 0 if they have Pods of their own."""
        return self.count_per_pod(self.rollout.gpus_per_replica) if self.shares_trainer else 0

    def count_per_pod(self, num_gpus: int) -> int:
        """Return how many engines with `num_gpus` each a trainer Pod has: they use all of its GPUs."""
        return max(1, self.trainer.gpus_per_replica) // max(1, num_gpus)

    @property
    def models_in_trainer(self) -> dict[str, ServedModel]:
        """Those of served_models that run in the trainer's Pods, in turns with it, in the same order."""
        return {path: model for path, model in self.served_models.items() if model.placement == "trainer"}

    @property
    def models_gpu_share(self) -> float:
        """The part of a trainer's GPU that these use while the rollouts work."""
        return sum(model.gpu_share for model in self.models_in_trainer.values())

    @property
    def rollout_gpu_share(self) -> float:
        """rollout.gpuMemoryUtilization, and what null means."""
        rest = round(ROLLOUT_GPU - self.models_gpu_share, 4)
        return self.rollout.gpu_memory_utilization or (rest if self.shares_trainer else OWN_GPU)

    @property
    def num_rollout_replicas(self) -> int:
        """Rollout replicas of the job, wherever they run."""
        return self.trainer.replicas * self.engines_per_pod if self.shares_trainer else self.rollout.replicas

    @property
    def num_rollout_pods(self) -> int:
        """Pods of rollouts alone."""
        return 0 if self.shares_trainer else self.rollout.replicas

    @property
    def rollout_startup_seconds(self) -> int:
        """rollout.startupTimeoutSeconds, and what null means."""
        is_downloaded = parse_source(self.model.source).is_remote
        return self.rollout.startup_timeout_seconds or (_HUB_STARTUP_SECONDS if is_downloaded else _STARTUP_SECONDS)

    def with_replicas(self, replicas: Mapping[str, int]) -> Self:
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
        """The checkpoints that vLLM serves besides the policy, by path, such as spec.rewards[0].judge.model.

        Changes to one change the job.
        """
        found = {
            f"spec.rewards[{index}].{reward.served_model_field}": reward.served_model
            for index, reward in enumerate(self.rewards)
        }
        if self.agent.user and self.agent.user.model:
            found["spec.agent.user.model.model"] = self.agent.user.model.model
        return {path: model for path, model in found.items() if model is not None}

    @property
    def sources(self) -> dict[str, str]:
        """Where models and data come from, by path, such as spec.model.source and spec.data.train.source."""
        found = {"spec.model.source": self.model.source}
        found |= {f"{each.path}.source": each.source.source for each in self.data.train_sources}
        found |= {f"{each.data_path}.source": each.data.source for each in self.held_out_sets}
        return found | {f"{path}.source": model.source for path, model in self.served_models.items()}

    @property
    def env_sources(self) -> dict[str, sections.DataSource]:
        """The data that the agent's environment or program has or makes, by path, such as spec.data.train."""
        found: dict[str, sections.DataSource] = {each.path: each.source for each in self.data.train_sources}
        found |= {each.data_path: each.data for each in self.held_out_sets}
        return {path: source for path, source in found.items() if source.env_split is not None}

    @property
    def num_kept_checkpoints(self) -> int:
        """How many complete checkpoints the run's folder has at most: the newest, and that of the best step."""
        return self.checkpoint.keep + (self.evaluation.best is not None)

    @property
    def num_exports(self) -> int:
        """How many models the run's folder has at most, one that is being written included."""
        if self.service is not None:
            return 0
        return {"never": 0, "last": 1, "best": 1, "every": self.num_kept_checkpoints + 1}[
            self.checkpoint.exported_steps
        ]

    def checkpoint_bytes(self, num_parameters: int) -> int:
        """Return about how much disk one checkpoint of a model of that size takes. Adapters are small and left out; the
        critic of ppo is as large as the model."""
        num_models = (self.trainer.lora is None) + (self.algorithm.type == "ppo")
        return num_models * num_parameters * CHECKPOINT_BYTES_PER_PARAMETER

    @property
    def saves_asynchronously(self) -> bool:
        """Whether training continues while a checkpoint is written."""
        return decide(self.checkpoint.asynchronous, automatic=self.trainer.gpus_per_replica > 0)
