"""Tools that run the code which the policy writes: agent.tools[].sandbox.

Owns what the model sees: names, parameters, and wrong calls. A provider runs the code. Whatever the code does
is text for the model. A call fails only if its provider does.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from rljob_api.wire.contract import END_EPISODE
from rljob_service.worker.code.code_runner import PYTHON
from rljob_service.worker.forms.arguments import ArgumentError, check_arguments
from rljob_service.worker.forms.outcome import BAD_REQUEST, EXCEPTION, CallOutcome, failed_call

SHELL = "shell"


def _describe_tool(name: str, description: str, parameter: str, explanation: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string", "description": explanation}}
    return {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties, "required": [parameter]},
    }


SCHEMAS = {
    PYTHON: _describe_tool(
        "run_python", "Run Python code. Return what it prints, and the value of its last line.", "code", "The code."
    ),
    SHELL: _describe_tool("run_shell", "Run a shell command. Return what it prints.", "command", "The command."),
}
"""By language. Each tool has one parameter, the text that runs."""


class Provider(Protocol):
    """Runs code. `problem`: why this worker must be replaced, or an empty text."""

    @property
    def problem(self) -> str: ...

    def run(self, language: str, code: str, episode: str) -> str:
        """Return what the model sees. `episode`: empty, or shared by all calls of an episode. Raise any Exception if
        the call failed for another cause than the code."""

    def end(self, episode: str) -> None:
        """Free what the calls of an episode shared. Raise any Exception if that failed."""


class Sandbox:
    """The tools of one sandbox. Made once for each worker."""

    def __init__(
        self, provider: str, languages: Sequence[str], timeout_seconds: float = 30.0, max_characters: int = 8192
    ) -> None:
        """`max_characters`: of what the model sees of a call."""
        self.schemas = [SCHEMAS[language] for language in languages]
        self._languages = {SCHEMAS[language]["name"]: language for language in languages}
        self._provider = _make_provider(provider, timeout_seconds, max_characters)

    @property
    def problem(self) -> str:
        """Why this worker must be replaced."""
        return self._provider.problem

    def call(self, request: dict[str, Any]) -> CallOutcome:
        """Run the code of a call."""
        name = request.get("function", "")
        if name == END_EPISODE:
            return self._end(request.get("episode", ""))
        if name not in self._languages:
            known = ", ".join(self._languages)
            return failed_call(BAD_REQUEST, f"unknown function {name[:100]}. Available functions: {known}")
        language = self._languages[name]
        try:
            given = check_arguments(name, SCHEMAS[language]["parameters"], request["arguments"])
        except ArgumentError as error:
            return failed_call(BAD_REQUEST, str(error))
        (code,) = given.values()
        try:
            return CallOutcome(self._provider.run(language, code, request.get("episode", "")))
        except Exception as error:
            return failed_call(EXCEPTION, f"the sandbox failed: {type(error).__name__}: {error}")

    def _end(self, episode: str) -> CallOutcome:
        try:
            self._provider.end(episode)
        except Exception as error:
            return failed_call(EXCEPTION, f"the sandbox was not given back: {type(error).__name__}: {error}")
        return CallOutcome("")


def _make_provider(name: str, timeout_seconds: float, max_characters: int) -> Provider:
    if name == "agentSandbox":
        # Here, since workers of `process` do not need it.
        from rljob_service.worker.code.agent_sandbox import AgentSandbox

        return AgentSandbox(timeout_seconds, max_characters)
    from rljob_service.worker.code.code_processes import CodeProcesses

    return CodeProcesses(timeout_seconds, max_characters)
