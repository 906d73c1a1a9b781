"""spec.agent: how the policy acts on a prompt. One answer, a conversation with tools and a simulated user, an
environment of another project, or a program of the user.

What is not the policy runs in separate Pods, like the function of a reward: one service for the simulated user, one for
each entry of tools, and one for the runner of environments and programs.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from rljob_api.manifest import base
from rljob_api.manifest.base import FreeForm, LongText, PathText, Rule, ShortText, Spec
from rljob_api.manifest.reward import FailurePolicy, FunctionReward, PythonFunction, Reward, limits_suffice
from rljob_api.manifest.roles import Resources, Role
from rljob_api.manifest.scaling import Autoscaling
from rljob_api.manifest.scorers import JudgeEndpoint, JudgeSampling, ServedModel
from rljob_api.manifest.sources import SecretKeyRef

ToolFormat = Literal["auto", "hermes", "llama3"]


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

    def settings(self, name: str, source: PythonFunction | UserModel) -> Reward:
        """Return the settings of its server, which are those of a reward's server. `source`: what it executes."""
        shared = {field: getattr(self, field) for field in AgentService.model_fields if field in Reward.model_fields}
        given = {**shared, "name": name, "failure_policy": FailurePolicy(retries=self.retries)}
        if isinstance(source, UserModel):
            return UserModelService.model_validate({**given, "user_model": source})
        return Reward.model_validate(
            {**given, "function": FunctionReward.model_validate(source.model_dump(by_alias=True))}
        )


class UserModel(Spec):
    """A chat model that plays the user: exactly one of model (served as a sidecar of the user's server) and
    endpoint."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        base.exactly_one(
            "model", "endpoint", remedy="set model to a checkpoint to serve, or endpoint to an existing endpoint"
        ),
    )

    model: ServedModel | None = None
    """A checkpoint to serve."""
    endpoint: JudgeEndpoint | None = None
    """An external OpenAI-compatible endpoint."""
    persona: LongText
    """Jinja template (sandboxed) of the system message: who the user is, what it wants, and when it is satisfied.
    Variables: `prompt` (text), `messages` (the conversation), `ground_truth`, `data_source`, `extra_info`, `turn`
    (number of its earlier replies)."""
    stop: Annotated[str, Field(min_length=1, max_length=256, pattern=r"\S")] | None = None
    """Text with which the model ends the conversation, such as `[DONE]`; the persona must say so. What precedes it is
    not sent to the policy. Null: only the limits of turns end it."""
    sampling: JudgeSampling = JudgeSampling()


class UserModelService(Reward):
    """The settings of the server of a user model, in the form of a reward. Not part of a manifest."""

    RULES: ClassVar[tuple[Rule, ...]] = Role.RULES

    user_model: UserModel
    """Who answers."""

    @property
    def is_served(self) -> bool:
        """Always true."""
        return True

    @property
    def kind(self) -> str:
        """Name of the field of agent.user."""
        return "model"

    @property
    def served_model(self) -> ServedModel | None:
        """The checkpoint that vLLM serves as a sidecar, if any."""
        return self.user_model.model

    @property
    def served_model_field(self) -> str:
        """Field of served_model, below agent.user."""
        return "model.model"

    @property
    def endpoint(self) -> JudgeEndpoint | None:
        """The OpenAI-compatible endpoint whose chat model plays the user, if any."""
        return self.user_model.endpoint


class SimulatedUser(AgentService):
    """A user that answers the policy, rewards its turns and ends the conversation: a function or class `respond`, or a
    chat model with a persona. See docs/agents.md."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        *Role.RULES,
        base.exactly_one("function", "model"),
        *limits_suffice("model"),
    )

    function: PythonFunction | None = None
    """The source."""
    model: UserModel | None = None
    """A chat model that plays the user. It gives no rewards: the job's rewards score the conversation."""

    def as_reward(self, name: str) -> Reward:
        """Return the settings of its server."""
        source = self.function or self.model
        assert source is not None, "a rule requires one of the two"
        return self.settings(name, source)


USER_SERVICE: Final = "user"
"""Name of the service of spec.agent.user."""


_NO_LIMITS: Final[dict[str, Any]] = {"max_memory_mib": 65536, "max_file_mib": 4096, "max_processes": 1024}
"""Of what is not Python of the user: Node.js reserves much more address space than it uses, tools write many files. The
limits of the Pod hold."""
MCP_MODULE: Final = "rljob_reward.worker.mcp_client"
"""Of the reward image: calls the tools of an MCP server."""
_MCP_SDK: Final = "mcp>=2.3,<3"


class McpServer(Spec):
    """An MCP server, whose tools the policy may call: one that listens at a URL, or a command that each worker of the
    Pods starts and talks to over stdin and stdout."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("",),
            "must have exactly one of url, command",
            "set one and remove the others",
            lambda server: (server.url is None) == bool(server.command),
            "has(self.url) != (has(self.command) && self.command.size() > 0)",
        ),
    )

    url: base.Url | None = None
    """Address of its streamable HTTP endpoint, such as http://search.tools:8000/mcp."""
    headers: Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=64)] = {}
    """url: headers of each request. ${NAME} is replaced by a variable of the container, such as one of env."""
    command: list[Annotated[str, Field(min_length=1, max_length=4096)]] = Field(default=[], max_length=256)
    """How to start the server, such as [mcp-server-time]. Each of the tool's slots has a process, with the tool's
    env."""
    requirements: list[Annotated[str, Field(min_length=1, max_length=512, pattern=base.REQUIREMENT_PATTERN)]] = Field(
        default=[], max_length=256
    )
    """Packages of the command, as lines of a pip requirements file without options. Each Pod installs them once at
    startup, with the SDK of MCP."""
    functions: list[Annotated[str, Field(min_length=1, max_length=64)]] = Field(default=[], max_length=128)
    """Names of the server's tools that the model sees. Empty: all."""
    network: bool = False
    """command: whether the server may open network connections. With url the Pods always may."""

    def as_function(self) -> PythonFunction:
        """Return what the tool's server runs."""
        arguments = {"url": self.url, "headers": self.headers, "command": self.command, "functions": self.functions}
        return PythonFunction(
            module=MCP_MODULE,
            entrypoint="McpTools",
            factory_args=arguments,
            requirements=[_MCP_SDK, *self.requirements],
            network=self.network or self.url is not None,
            **_NO_LIMITS,
        )


SANDBOX_MODULE: Final = "rljob_reward.worker.code_sandbox"
"""Of the reward image: runs the code that the policy writes."""
_SANDBOX_GRACE_SECONDS: Final = 5.0
"""After timeoutSeconds, in which a sandbox ends the code and reports it to the model. Later the call has failed."""


class Sandbox(Spec):
    """Where code that the policy writes runs. See docs/sandboxes.md."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("provider", "image"),
            "must be agentSandbox with image, warmReplicas, runtimeClassName or resources: provider process uses the "
            "Pods of the tool",
            "set provider: agentSandbox, or set these fields of the tool",
            lambda sandbox: sandbox.provider == "agentSandbox" or not _has_pods(sandbox),
            "(has(self.provider) && self.provider == 'agentSandbox') || (!has(self.image) && !has(self.warmReplicas) "
            "&& !has(self.runtimeClassName) && !has(self.resources))",
        ),
    )

    provider: Literal["process", "agentSandbox"] = "process"
    """process: each call is a new process in the tool's own Pods, with the limits of a reward's function and an empty
    folder. agentSandbox: each episode claims a Pod from a warm pool of kubernetes-sigs/agent-sandbox, which keeps its
    files from call to call; on a cluster alone."""
    languages: list[Literal["python", "shell"]] = Field(default=["python"], min_length=1, max_length=2)
    """What the model may run: python adds the tool `run_python(code)`, shell adds `run_shell(command)`."""
    requirements: list[Annotated[str, Field(min_length=1, max_length=512, pattern=base.REQUIREMENT_PATTERN)]] = Field(
        default=[], max_length=256
    )
    """process: packages that the code may import, as lines of a pip requirements file without options. Each Pod
    installs them once at startup. With agentSandbox the image has them."""
    max_memory_mib: int = Field(default=1024, ge=64, alias="maxMemoryMiB")
    """process: maximum address space of each process of a call, in MiB."""
    image: PathText | None = None
    """agentSandbox: image with /bin/sh and python3 (3.9 or later). Null: the operator's reward image."""
    warm_replicas: int | None = Field(default=None, ge=0, le=4096)
    """agentSandbox: Pods that wait for an episode. Null: as many as one step has episodes, at most 64."""
    runtime_class_name: ShortText | None = None
    """agentSandbox: RuntimeClass of the sandboxes, such as gvisor or kata. Null: the cluster's default."""
    resources: Resources | None = None
    """agentSandbox: requests and limits of a sandbox. What they leave out: requests of 250m CPU, 512Mi of memory and
    1Gi of ephemeral storage, and limits of 1 CPU and the same memory and storage."""

    def as_function(self, timeout_seconds: float, max_characters: int) -> PythonFunction:
        """Return what the tool's server runs. `max_characters`: of a result."""
        arguments = {"timeout_seconds": timeout_seconds, "max_characters": max_characters}
        return PythonFunction(
            module=SANDBOX_MODULE,
            entrypoint="Sandbox",
            factory_args={"provider": self.provider, "languages": self.languages, **arguments},
            requirements=self.requirements,
            max_memory_mib=self.max_memory_mib,
            network=self.provider == "agentSandbox",
        )


def _has_pods(sandbox: Sandbox) -> bool:
    fields = (sandbox.image, sandbox.warm_replicas, sandbox.runtime_class_name, sandbox.resources)
    return any(field is not None for field in fields)


class Tool(AgentService):
    """Functions that the policy may call: Python functions, whose names, typed parameters and docstrings become the
    schema that the model sees, the tools of an MCP server, or a sandbox that runs the code that the policy writes. See
    docs/agents.md."""

    RULES: ClassVar[tuple[Rule, ...]] = (*Role.RULES, base.exactly_one("function", "mcp", "sandbox"))

    function: PythonFunction | None = None
    """The source of Python functions."""
    mcp: McpServer | None = None
    """An MCP server."""
    sandbox: Sandbox | None = None
    """A sandbox for code that the policy writes."""

    name: str = Field(pattern=base.PART_NAME_PATTERN, max_length=15)
    """Name of the service, in the names of its children. Unique among tools and rewards. The model sees the names of
    the functions."""
    on_error: Literal["message", "invalid"] = "message"
    """What a failed call does, after the retries. message: the model gets the error as the result of its call. invalid:
    the episode is invalid, so it is neither scored nor trained. A call of a function that does not exist, or with wrong
    arguments, is always a message."""
    max_result_characters: int = Field(default=8192, ge=1, le=1_000_000)
    """Longest result that the model sees; the rest is cut off."""

    def as_reward(self, name: str) -> Reward:
        """Return the settings of its server."""
        if self.sandbox:
            seconds = self.timeout_seconds
            settings = self.settings(name, self.sandbox.as_function(seconds, self.max_result_characters))
            return settings.model_copy(update={"timeout_seconds": seconds + _SANDBOX_GRACE_SECONDS})
        function = self.mcp.as_function() if self.mcp else self.function
        assert function is not None, "a rule requires one of the three"
        return self.settings(name, function)


RUNNER_SERVICE: Final = "runner"
"""Name of the service that runs the episodes of an environment or a program."""
Framework = Literal["verifiers", "openenv", "skyrlGym", "gymnasium", "trl", "openrlhf"]
ENVIRONMENTS_MODULE: Final = "rljob_reward.worker.environments"
"""Of the reward image: finds an environment by framework and id."""
COMMAND_MODULE: Final = "rljob_reward.worker.command"
"""Of the reward image: starts a program for each episode."""


class Environment(Spec):
    """An environment of another project. The runner plays its episodes. See docs/environments.md."""

    framework: Framework
    """The project, whose interface the environment implements."""
    id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Name of the environment in its framework, or MODULE:NAME of its class or factory. Null: agent.runner.function has
    the class."""
    args: FreeForm = {}
    """Arguments of its constructor or factory."""
    packages: list[Annotated[str, Field(min_length=1, max_length=512, pattern=base.REQUIREMENT_PATTERN)]] = Field(
        default=[], max_length=256
    )
    """Packages that it needs, as lines of a pip requirements file without options: the framework and the environment.
    Each Pod installs them once at startup, apart from RLJob's own."""


class Runner(AgentService):
    """The Pods that run episodes: of agent.environment, or of a program of the user, which is a function or a command.
    See docs/agents.md."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        *Role.RULES,
        Rule(
            ("function", "command"),
            "are alternatives",
            "remove one of them",
            lambda runner: runner.function is None or not runner.command,
            "!has(self.function) || !has(self.command) || self.command.size() == 0",
        ),
        Rule(
            ("workingDir", "command"),
            "is the folder of a command",
            "remove workingDir, or set command",
            lambda runner: runner.working_dir is None or bool(runner.command),
            "!has(self.workingDir) || (has(self.command) && self.command.size() > 0)",
        ),
    )

    function: PythonFunction | None = None
    """program: a function that runs one episode (by default `run`). environment: the source with the class of the
    environment, unless environment.id names it."""
    command: list[Annotated[str, Field(min_length=1, max_length=4096)]] = Field(default=[], max_length=256)
    """program: what to start for each episode, such as [python, agent.py]. OPENAI_BASE_URL, OPENAI_API_KEY and the same
    for Anthropic are set; RLJOB_EPISODE is a file with the episode as JSON. The last line that it prints may be the
    episode's reward."""
    working_dir: base.PathText | None = None
    """Folder in which `command` starts. With `rljob run` relative to the job file; on a cluster a path inside the
    image. Null: a scratch folder."""
    network: bool = False
    """Whether the Pods may reach more than the policy and the ports of the URLs in env. If false, the NetworkPolicy
    blocks it. function.network has the same effect."""
    slots: int = Field(default=16, ge=1, le=4096)
    """Episodes that one Pod runs concurrently, each in a worker process."""
    timeout_seconds: float = Field(default=1800, gt=0)
    """Maximum seconds of one episode in the runner, excluding queueing; then its process is killed."""
    deadline_seconds: float = Field(default=3600, gt=0)
    """Maximum seconds of an episode, including queueing and retries."""
    retries: int = Field(default=1, ge=0, le=100)
    """Maximum retries of an episode that raised, timed out or lost its worker. Each starts again: what the earlier
    attempt sampled is dropped."""

    def as_reward(self, name: str, environment: Environment | None = None) -> Reward:
        """Return the settings of its server."""
        function = self._find_function(environment)
        return self.settings(name, function.model_copy(update={"network": function.network or self.network}))

    def _find_function(self, environment: Environment | None) -> PythonFunction:
        if environment is None:
            return self.function or PythonFunction(
                module=COMMAND_MODULE,
                entrypoint="Command",
                factory_args={"command": self.command, "working_dir": self.working_dir},
                **_NO_LIMITS,
            )
        if self.function is not None:
            requirements = [*environment.packages, *self.function.requirements]
            given = {"requirements": requirements, "factory_args": environment.args}
            return self.function.model_copy(update=given)
        return PythonFunction(
            module=ENVIRONMENTS_MODULE,
            entrypoint="make",
            factory_args={"framework": environment.framework, "id": environment.id, "args": environment.args},
            requirements=environment.packages,
            **_NO_LIMITS,
        )


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
    """Maximum answers of the policy in an episode. An answer that calls tools counts. Null: 8 with loop, 100 with
    environment and program."""
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
    """Maximum seconds of an episode, without its rewards. Then it is invalid."""
    environment: Environment | None = None
    """environment: which one."""
    runner: Runner | None = None
    """environment, program: the Pods that run the episodes, and the program."""
    models: list[OtherModel] = Field(default=[], max_length=16, json_schema_extra=base.list_map("name"))
    """environment, program: models besides the policy that the program may call by name. A name that is not listed is
    an error."""
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
    def runner_settings(self) -> Reward | None:
        """Settings of the runner's server; None for types without one."""
        return (self.runner or Runner()).as_reward(RUNNER_SERVICE, self.environment) if self.is_hosted else None


def _has_program(agent: Agent) -> bool:
    runner = agent.runner or Runner()
    return bool(runner.function or runner.command) if agent.type == "program" else not runner.command
