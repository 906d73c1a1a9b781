"""spec.agent.environment and spec.agent.runner: episodes that an environment of another project or a program plays."""

from typing import Annotated, ClassVar, Final

from pydantic import Field

from rljob_api.manifest import base
from rljob_api.manifest.base import FreeForm, Rule, Spec
from rljob_api.manifest.services.calls import PROGRAM_LIMITS, AgentService, CallService
from rljob_api.manifest.services.function import SHARES_NO_CPU_LIMIT, PythonFunction

RUNNER_SERVICE: Final = "runner"
"""Name of the service that runs the episodes of an environment or a program."""
ENVIRONMENTS_MODULE: Final = "rljob_service.worker.environments"
"""Module of the reward image: finds an environment by its id."""
COMMAND_MODULE: Final = "rljob_service.worker.episodes.command"
"""Module of the reward image: starts a program for each episode."""


class Environment(Spec):
    """An environment of another project. The runner plays its episodes. See docs/environments.md."""

    framework: base.PluginName
    """The project, whose interface the environment implements: the name of a plugin. docs/environments.md lists those
    of RLJob."""
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
        *AgentService.RULES,
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
        Rule(
            ("episodesPerProcess", "command"),
            "must be 1 for a command, which is a process of each episode",
            "remove episodesPerProcess, or use a function that is async",
            lambda runner: runner.episodes_per_process == 1 or not runner.command,
            "!has(self.episodesPerProcess) || self.episodesPerProcess == 1 || !has(self.command) || "
            "self.command.size() == 0",
        ),
        SHARES_NO_CPU_LIMIT,
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
    """Episodes that one Pod runs concurrently, in slots / episodesPerProcess worker processes."""
    episodes_per_process: int = Field(default=1, ge=1, le=1024)
    """Episodes that one worker process plays at once, if `run` is async or the environment's framework is: as
    coroutines of one event loop. 1: each has the process alone, since an async function may still block the others or
    keep an episode in a global. See docs/isolation.md."""
    timeout_seconds: int = Field(default=1800, ge=1)
    """Maximum seconds of one episode in the runner, excluding queueing; then its process is killed."""
    deadline_seconds: int = Field(default=3600, ge=1)
    """Maximum seconds of an episode, including queueing and retries."""
    retries: int = Field(default=1, ge=0, le=100)
    """Maximum retries of an episode that raised, timed out or lost its worker. Each starts again: what the earlier
    attempt sampled is dropped."""

    def build_service(self, environment: Environment | None = None, seats: list[str] | None = None) -> CallService:
        """Return the settings of its server. `seats`: agent.seats."""
        function = self._find_function(environment)
        network = function.network or self.network
        function = function.model_copy(update={"network": network})
        shared = self.episodes_per_process
        return self._build(RUNNER_SERVICE, function=function, episodes_per_process=shared, seats=seats)

    def _find_function(self, environment: Environment | None) -> PythonFunction:
        if environment is None:
            return self.function or PythonFunction(
                module=COMMAND_MODULE,
                entrypoint="Command",
                factory_args={"command": self.command, "working_dir": self.working_dir},
                **PROGRAM_LIMITS,
            )
        if self.function is not None:
            requirements = [*environment.packages, *self.function.requirements]
            given = {"requirements": requirements, "factory_args": environment.args}
            return self.function.model_copy(update=given)
        return PythonFunction(
            module=ENVIRONMENTS_MODULE,
            entrypoint="make",
            factory_args={"id": environment.id, "args": environment.args},
            requirements=environment.packages,
            **PROGRAM_LIMITS,
        )
