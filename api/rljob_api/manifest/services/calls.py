"""What the user, each tool and the runner of an agent have in common: a server in Pods, which executes calls."""

from __future__ import annotations

from typing import Any, Final

from pydantic import Field

from rljob_api.manifest.base import DEFER_RULES, PART_NAME_PATTERN
from rljob_api.manifest.quantity import Size
from rljob_api.manifest.services.base import ServiceSettings
from rljob_api.manifest.services.function import PythonFunction
from rljob_api.manifest.services.models import JudgeEndpoint, ServedModel, UserModel

PROGRAM_LIMITS: Final[dict[str, Any]] = {
    "max_memory": Size("64Gi"),
    "max_file_size": Size("4Gi"),
    "max_processes": 1024,
}
"""Limits of what is not Python of the user: Node.js reserves much more address space than it uses, tools write many
files. The limits of the Pod hold."""


class AgentService(ServiceSettings):
    """What an agent calls: code in isolated worker processes of separate Pods."""

    timeout_seconds: int = Field(default=30, ge=1)
    """Maximum seconds of one call, excluding queueing; then it is killed."""
    retries: int = Field(default=2, ge=0, le=100)
    """Maximum retries of a call that raised, timed out or lost its worker, each on another replica if one exists."""
    deadline_seconds: int = Field(default=600, ge=1)
    """Maximum seconds from a call to its result, including queueing and retries."""

    def _build(self, name: str, **executed: Any) -> CallService:
        """Return the settings of its server. `executed`: the field of CallService that says what a call executes."""
        shared = {field: getattr(self, field) for field in AgentService.model_fields}
        # The rules of the job's own fields name these: a violation is not one of the settings.
        return CallService.model_validate({**shared, **executed, "name": name}, context=DEFER_RULES)


class CallService(AgentService):
    """The settings of the server of a user, a tool or a runner: exactly one of function and userModel. Not part of a
    manifest."""

    replicas: int = Field(default=1, ge=0, le=4096)
    """Number of Pods: autoscaling may have decided on none."""
    name: str = Field(pattern=PART_NAME_PATTERN, max_length=15)
    """user, runner, or the name of the tool."""
    function: PythonFunction | None = None
    """What executes calls: of the user, or a module of the reward image."""
    user_model: UserModel | None = None
    """Who answers as the user."""
    episodes_per_process: int = Field(default=1, ge=1)
    """Episodes that a worker process of a runner plays at once."""
    seats: list[str] | None = None
    """A runner's agent.seats."""

    @property
    def is_served(self) -> bool:
        """Always true."""
        return True

    @property
    def kind(self) -> str:
        """Name of the field of the agent's part: function or model."""
        return "model" if self.user_model else "function"

    @property
    def served_model(self) -> ServedModel | None:
        """The checkpoint that vLLM serves as a sidecar, if any."""
        return self.user_model.model if self.user_model else None

    @property
    def served_model_field(self) -> str:
        """Field of served_model, below agent.user."""
        return "model.model"

    @property
    def endpoint(self) -> JudgeEndpoint | None:
        """The OpenAI-compatible endpoint whose chat model plays the user, if any."""
        return self.user_model.endpoint if self.user_model else None
