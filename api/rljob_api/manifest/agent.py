"""spec.agent: how the policy acts on a prompt. One answer, or a conversation with tools and a simulated user.

The user's Python runs in separate Pods, like the function of a reward: one service for the simulated user and one for
each entry of tools.
"""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from pydantic import Field

from rljob_api.manifest import base
from rljob_api.manifest.base import Rule, Spec
from rljob_api.manifest.reward import FailurePolicy, FunctionReward, PythonFunction, Reward
from rljob_api.manifest.roles import Role

ToolFormat = Literal["auto", "hermes", "llama3"]


class AgentFunction(Role):
    """Python of the user that an agent calls, in isolated worker processes of separate Pods."""

    function: PythonFunction
    """The source."""
    replicas: int = Field(default=1, ge=1, le=4096)
    """Number of Pods. May change while the job runs."""
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

    def as_reward(self, name: str) -> Reward:
        """Return the settings of its server, which are those of a reward's server."""
        shared = {field: getattr(self, field) for field in AgentFunction.model_fields if field in Reward.model_fields}
        function = FunctionReward.model_validate(self.function.model_dump(by_alias=True))
        policy = FailurePolicy(retries=self.retries)
        return Reward.model_validate({**shared, "name": name, "function": function, "failure_policy": policy})


class SimulatedUser(AgentFunction):
    """A user that answers the policy, rewards its turns and ends the conversation: a function or class `respond`. See
    docs/agents.md."""


USER_SERVICE: Final = "user"
"""Name of the service of spec.agent.user."""


class Tool(AgentFunction):
    """Python functions that the policy may call. Their names, typed parameters and docstrings become the schema that
    the model sees. See docs/agents.md."""

    name: str = Field(pattern=base.PART_NAME_PATTERN, max_length=15)
    """Name of the service, in the names of its children. Unique among tools and rewards. The model sees the names of
    the functions."""
    on_error: Literal["message", "invalid"] = "message"
    """What a failed call does, after the retries. message: the model gets the error as the result of its call. invalid:
    the episode is invalid, so it is neither scored nor trained. A call of a function that does not exist, or with wrong
    arguments, is always a message."""
    max_result_characters: int = Field(default=8192, ge=1, le=1_000_000)
    """Longest result that the model sees; the rest is cut off."""


_LOOP_ONLY = "is for type loop alone"


class Agent(Spec):
    """How the policy acts on a prompt."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("user", "type"),
            _LOOP_ONLY,
            "remove it, or set type: loop",
            lambda agent: agent.type == "loop" or agent.user is None,
            "!has(self.user) || (has(self.type) && self.type == 'loop')",
            lambda agent: "a simulated user",
        ),
        Rule(
            ("tools", "type"),
            _LOOP_ONLY,
            "remove it, or set type: loop",
            lambda agent: agent.type == "loop" or not agent.tools,
            "!has(self.tools) || self.tools.size() == 0 || (has(self.type) && self.type == 'loop')",
            lambda agent: f"{len(agent.tools)} of them",
        ),
        Rule(
            ("type",),
            "needs a user or tools with loop: without both, an episode has one turn",
            "add agent.user or agent.tools, or set type: singleTurn",
            lambda agent: agent.type != "loop" or agent.user is not None or bool(agent.tools),
            "!has(self.type) || self.type != 'loop' || has(self.user) || (has(self.tools) && self.tools.size() > 0)",
        ),
        Rule(
            ("tools",),
            "must have different names",
            "rename one of them",
            lambda agent: len({tool.name for tool in agent.tools}) == len(agent.tools),
            "",  # x-kubernetes-list-type: map enforces it
            lambda agent: base.find_duplicates("tools", [tool.name for tool in agent.tools]),
        ),
        Rule(
            ("tools",),
            f"must not be named {USER_SERVICE}, which is the service of agent.user",
            "choose another name",
            lambda agent: all(tool.name != USER_SERVICE for tool in agent.tools),
            f"!has(self.tools) || self.tools.all(tool, tool.name != '{USER_SERVICE}')",
            lambda agent: ", ".join(f"tools[{i}]" for i, tool in enumerate(agent.tools) if tool.name == USER_SERVICE),
        ),
    )

    type: Literal["singleTurn", "loop"] = "singleTurn"
    """singleTurn: one prompt, one answer. loop: the policy answers, calls tools, and gets the replies of a simulated
    user, until one of them ends the conversation."""
    max_assistant_turns: int = Field(default=8, ge=1, le=1000)
    """loop: maximum answers of the policy in an episode. An answer that calls tools counts."""
    max_user_turns: int | None = Field(default=None, ge=1, le=1000)
    """loop: maximum replies of the simulated user. Null: only maxAssistantTurns limits them."""
    tool_format: ToolFormat = "auto"
    """loop: how the model writes tool calls. hermes: JSON in <tool_call> tags (Qwen, SmolLM). llama3: JSON with name
    and parameters (Llama 3). auto: by the model's chat template."""
    user: SimulatedUser | None = None
    """loop: who replies to an answer without tool calls. Null: such an answer ends the episode."""
    tools: list[Tool] = Field(default=[], max_length=16, json_schema_extra=base.list_map("name"))
    """loop: functions that the policy may call."""
    episode_seconds: float = Field(default=3600, gt=0, le=1_000_000)
    """loop: maximum seconds of an episode, without its rewards. Then it is invalid."""
