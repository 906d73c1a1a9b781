"""What the user, each tool and the runner of an agent have in common: a server in Pods, as a reward has."""

from __future__ import annotations

from typing import Any, Final

from pydantic import Field

from rljob_api.manifest.reward import FailurePolicy, FunctionReward, PythonFunction, Reward
from rljob_api.manifest.roles import Role
from rljob_api.manifest.scaling import Autoscaling

PROGRAM_LIMITS: Final[dict[str, Any]] = {"max_memory_mib": 65536, "max_file_mib": 4096, "max_processes": 1024}
"""Of what is not Python of the user: Node.js reserves much more address space than it uses, tools write many files. The
limits of the Pod hold."""


class AgentService(Role):
    """What an agent calls: code in isolated worker processes of separate Pods."""

    replicas: int = Field(default=1, ge=1, le=4096)
    """Number of Pods. May change while the job runs. Ignored if autoscaling is set."""
    autoscaling: Autoscaling | None = None
    """Scales the number of Pods with demand. Null: replicas applies. May change while the job runs."""
    slots: int = Field(default=16, ge=1, le=4096)
    """Calls that one Pod executes concurrently, each in a worker process."""
    queue_length: int = Field(default=4096, ge=1)
    """Maximum queued calls per Pod. The server rejects further calls with 429 and Retry-After."""
    timeout_seconds: float = Field(default=30, gt=0)
    """Maximum seconds of one call, excluding queueing; then it is killed."""
    retries: int = Field(default=2, ge=0, le=100)
    """Maximum retries of a call that raised, timed out or lost its worker, each on another replica if one exists."""
    deadline_seconds: float = Field(default=600, gt=0)
    """Maximum seconds from a call to its result, including queueing and retries."""

    def settings(self, name: str, function: PythonFunction) -> Reward:
        """Return the settings of its server, which are those of a reward's server. `function`: what it executes."""
        as_reward = FunctionReward.model_validate(function.model_dump(by_alias=True))
        return Reward.model_validate({**self.shared_settings(name), "function": as_reward})

    def shared_settings(self, name: str) -> dict[str, Any]:
        """Return the fields of a reward's server that do not depend on what it executes."""
        shared = {field: getattr(self, field) for field in AgentService.model_fields if field in Reward.model_fields}
        return {**shared, "name": name, "failure_policy": FailurePolicy(retries=self.retries)}
