"""spec.agent.tools: what the policy may call, which is Python functions, an MCP server or a sandbox."""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from rljob_api.manifest import base
from rljob_api.manifest.base import Rule, Spec
from rljob_api.manifest.services.calls import PROGRAM_LIMITS, AgentService, CallService
from rljob_api.manifest.services.function import PythonFunction
from rljob_api.manifest.services.sandbox import Sandbox

MCP_MODULE: Final = "rljob_service.worker.mcp_client"
"""Module of the reward image: calls the tools of an MCP server."""
_MCP_SDK: Final = "mcp>=2.3,<3"
_SANDBOX_GRACE_SECONDS: Final = 5
"""After timeoutSeconds, in which a sandbox ends the code and reports it to the model. Later the call has failed."""


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
            **PROGRAM_LIMITS,
        )


class Tool(AgentService):
    """Functions that the policy may call: Python functions, whose names, typed parameters and docstrings become the
    schema that the model sees, the tools of an MCP server, or a sandbox that runs the code that the policy writes. See
    docs/agents.md."""

    RULES: ClassVar[tuple[Rule, ...]] = (*AgentService.RULES, base.exactly_one("function", "mcp", "sandbox"))

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

    def build_service(self) -> CallService:
        """Return the settings of its server."""
        if self.sandbox:
            seconds = self.timeout_seconds
            settings = self._build(self.name, function=self.sandbox.as_function(seconds, self.max_result_characters))
            return settings.model_copy(update={"timeout_seconds": seconds + _SANDBOX_GRACE_SECONDS})
        return self._build(self.name, function=self.mcp.as_function() if self.mcp else self.function)
