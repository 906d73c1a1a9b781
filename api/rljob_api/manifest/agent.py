"""spec.agent: how the policy acts on a prompt. One answer, a conversation with tools and a simulated user, an
environment of another project, or a program of the user.

What is not the policy runs in separate Pods, like the function of a reward: one service for the simulated user, one for
each entry of tools, and one for the runner of environments and programs.
"""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from rljob_api.manifest import base
from rljob_api.manifest.base import Rule, ShortText, Spec
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.runner import Environment, Runner
from rljob_api.manifest.services.tool import Tool
from rljob_api.manifest.services.user import USER_SERVICE, SimulatedUser
from rljob_api.manifest.sources import SecretKeyRef

ToolFormat = Literal["auto", "hermes", "llama3"]
CompletionChoice = Literal["auto", "last", "all"]


class OtherModel(Spec):
    """A model besides the policy that the program or the environment calls at the same address: a judge, a simulated
    user. The gateway forwards its requests; what it answers never trains."""

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$")]
    """The `model` of its requests, such as gpt-5-mini."""
    url: base.Url
    """Base URL of an endpoint that has the API which the program uses, such as https://api.openai.com/v1. RLJob appends
    the path, such as /chat/completions."""
    model: ShortText | None = None
    """The `model` that the endpoint gets. Null: name."""
    api_key_secret_ref: SecretKeyRef | None = None
    """API key, which the head alone has. Null: no key is sent."""


_LOOP_ONLY = "is for type loop alone"
HOSTED: Final = ("environment", "program")
"""Types whose episodes a runner runs."""
_POLICY_NAMES: Final = ("policy", "default")
_LOOP_TURNS: Final = 8
SeatName = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")]
_HOSTED_TURNS: Final = 100


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
        base.different_names("tools"),
        Rule(
            ("tools",),
            f"must not be named {USER_SERVICE}, which is the service of agent.user",
            "choose another name",
            lambda agent: all(tool.name != USER_SERVICE for tool in agent.tools),
            f"!has(self.tools) || self.tools.all(tool, tool.name != '{USER_SERVICE}')",
            lambda agent: ", ".join(f"tools[{i}]" for i, tool in enumerate(agent.tools) if tool.name == USER_SERVICE),
        ),
        Rule(
            ("environment", "type"),
            "must be set with type environment, and with no other type",
            "add agent.environment, or remove it, or change type",
            lambda agent: (agent.type == "environment") == (agent.environment is not None),
            "!has(self.environment) ? !has(self.type) || self.type != 'environment' : "
            "has(self.type) && self.type == 'environment'",
        ),
        Rule(
            ("environment", "runner"),
            "needs environment.id or runner.function, which name the class of the environment, and not both",
            "set one of them",
            lambda agent: (
                agent.environment is None
                or (agent.environment.id is None) != (agent.runner is None or agent.runner.function is None)
            ),
            "!has(self.environment) || has(self.environment.id) != (has(self.runner) && has(self.runner.function))",
        ),
        Rule(
            ("runner", "type"),
            "is for the types environment and program",
            "remove it, or change type",
            lambda agent: agent.is_hosted or agent.runner is None,
            "!has(self.runner) || (has(self.type) && (self.type == 'environment' || self.type == 'program'))",
            lambda agent: agent.type,
        ),
        Rule(
            ("models", "type"),
            "are called by environments and programs alone",
            "remove it, or change type",
            lambda agent: agent.is_hosted or not agent.models,
            "!has(self.models) || self.models.size() == 0 || "
            "(has(self.type) && (self.type == 'environment' || self.type == 'program'))",
            lambda agent: f"{len(agent.models)} of them",
        ),
        base.different_names("models", "must have one entry for each name"),
        Rule(
            ("models",),
            f"must not be named {' or '.join(_POLICY_NAMES)}: these are the model that trains",
            "choose another name",
            lambda agent: all(model.name not in _POLICY_NAMES for model in agent.models),
            f"!has(self.models) || self.models.all(model, !(model.name in {list(_POLICY_NAMES)}))",
            lambda agent: ", ".join(f"models[{i}]" for i, m in enumerate(agent.models) if m.name in _POLICY_NAMES),
        ),
        Rule(
            ("seats", "type"),
            "are of environments and programs alone",
            "remove it, or change type",
            lambda agent: agent.is_hosted or agent.seats is None,
            "!has(self.seats) || (has(self.type) && (self.type == 'environment' || self.type == 'program'))",
        ),
        Rule(
            ("seats",),
            "must have different names",
            "remove the second one",
            lambda agent: len(set(agent.seats or ())) == len(agent.seats or ()),
            "",
            lambda agent: base.find_duplicates("seats", agent.seats or []),
        ),
        Rule(
            ("runner", "type"),
            "must have a function or a command with type program, and no command with type environment",
            "set runner.function or runner.command",
            lambda agent: _has_program(agent),
            "!has(self.type) || "
            "(self.type == 'program' ? has(self.runner) && (has(self.runner.function) || "
            "(has(self.runner.command) && self.runner.command.size() > 0)) : "
            "!has(self.runner) || !has(self.runner.command) || self.runner.command.size() == 0)",
        ),
    )

    type: Literal["singleTurn", "loop", "environment", "program"] = "singleTurn"
    """singleTurn: one prompt, one answer. loop: the policy answers, calls tools, and gets the replies of a simulated
    user, until one of them ends the conversation. environment: an environment of another project plays the episode.
    program: a program of the user, which calls the policy through an OpenAI or Anthropic API."""
    max_assistant_turns: int | None = Field(default=None, ge=1, le=1000)
    """Maximum answers of the policy in an episode; with seats, of each of its trajectories. An answer that calls tools
    counts. Null: 8 with loop, 100 with environment and program."""
    max_user_turns: int | None = Field(default=None, ge=1, le=1000)
    """loop: maximum replies of the simulated user. Null: only maxAssistantTurns limits them."""
    tool_format: ToolFormat = "auto"
    """loop: how the model writes tool calls. hermes: JSON in <tool_call> tags (Qwen, SmolLM). llama3: JSON with name
    and parameters (Llama 3). auto: by the model's chat template."""
    user: SimulatedUser | None = None
    """loop: who replies to an answer without tool calls. Null: such an answer ends the episode."""
    tools: list[Tool] = Field(default=[], max_length=16, json_schema_extra=base.list_map("name"))
    """loop: functions that the policy may call."""
    episode_seconds: int = Field(default=3600, ge=1, le=1_000_000)
    """Maximum seconds of an episode, without its rewards. Then it is invalid."""
    environment: Environment | None = None
    """environment: which one."""
    runner: Runner | None = None
    """environment, program: the Pods that run the episodes, and the program."""
    models: list[OtherModel] = Field(default=[], max_length=16, json_schema_extra=base.list_map("name"))
    """environment, program: models besides the policy that the program may call by name. A name that is not listed is
    an error."""
    seats: list[SeatName] | None = Field(
        default=None, min_length=1, max_length=16, json_schema_extra={"x-kubernetes-list-type": "set"}
    )
    """environment, program: names of the seats that train, where an episode has several players. Each trains on its own
    answers and rewards; the policy plays the others, too, and does not train on them. Null: all seats that the
    environment trains; of a program, the one player that it has."""
    completion: CompletionChoice = "auto"
    """Completion that rewards get of an episode with several answers. last: the last answer. all: all that followed the
    prompt, results of tools and replies of the user included. auto: as the project of the function's signature passes
    it; all for judges and reward models."""
    constraints: Literal["refuse", "ignore"] = "refuse"
    """environment, program: what happens to fields of requests that force a tool call or a form of the answer
    (tool_choice, response_format), or change the prompt or the sampling, and to tools of the API's own servers. refuse:
    error 400. ignore: the policy answers without them; the header x-rljob-ignored names them."""
    reward_weight: float = Field(default=1.0, allow_inf_nan=False)
    """environment, program: factor of the reward that the environment or the program gives an episode. It is added to
    the weighted sum of spec.rewards, which may then be empty."""

    @property
    def is_hosted(self) -> bool:
        """Whether a runner runs the episodes, and calls the policy through the gateway."""
        return self.type in HOSTED

    @property
    def turn_limit(self) -> int:
        """Maximum answers of the policy in an episode."""
        return self.max_assistant_turns or (_HOSTED_TURNS if self.is_hosted else _LOOP_TURNS)

    @property
    def runner_settings(self) -> CallService | None:
        """Settings of the runner's server; None for types without one."""
        return (self.runner or Runner()).build_service(self.environment, self.seats) if self.is_hosted else None


def _has_program(agent: Agent) -> bool:
    runner = agent.runner
    if agent.type == "program":
        return runner is not None and bool(runner.function or runner.command)
    return runner is None or not runner.command
