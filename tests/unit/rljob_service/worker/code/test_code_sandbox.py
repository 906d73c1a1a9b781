"""The tools of a sandbox, with a provider that runs nothing: what the model sees, and which calls fail."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.manifest.services.sandbox import SANDBOX_MODULE
from rljob_api.manifest.services.tool import Tool
from rljob_api.wire.calls import ToolSchema
from rljob_service.worker.code import code_sandbox
from rljob_service.worker.code.code_sandbox import Sandbox
from rljob_service.worker.forms.outcome import CallOutcome
from rljob_service.worker.settings import CODE_MODULE


class Provider:
    problem = ""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str]] = []

    def run(self, language: str, code: str, episode: str) -> str:
        self.calls.append((language, code, episode))
        if code == "fail":
            raise OSError("no space left")
        return "4"


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Provider:
    made = Provider()
    monkeypatch.setattr(code_sandbox, "_make_provider", lambda *arguments: made)
    return made


def call(function: str, arguments: dict[str, Any], languages: tuple[str, ...] = ("python", "shell")) -> CallOutcome:
    sandbox = Sandbox("process", languages)
    return sandbox.call({"function": function, "arguments": arguments, "episode": "e/0"})


def test_the_manifest_names_this_module() -> None:
    assert code_sandbox.__name__ == SANDBOX_MODULE == CODE_MODULE


def test_the_arguments_of_the_manifest_fit(provider: Provider) -> None:
    tool = Tool.model_validate({"name": "code", "sandbox": {"languages": ["shell"]}, "timeoutSeconds": 7})
    function = tool.build_service().function
    assert function is not None
    sandbox = Sandbox(**function.factory_args or {})
    assert [schema["name"] for schema in sandbox.schemas] == ["run_shell"]


@pytest.mark.parametrize(
    ("languages", "names"), [(("python",), ["run_python"]), (("shell", "python"), ["run_shell", "run_python"])]
)
def test_the_model_sees_one_tool_for_each_language(
    provider: Provider, languages: tuple[str, ...], names: list[str]
) -> None:
    schemas = [ToolSchema.model_validate(schema) for schema in Sandbox("process", languages).schemas]
    assert [schema.name for schema in schemas] == names
    assert all(schema.description and len(schema.parameters["required"]) == 1 for schema in schemas)


def test_the_provider_gets_the_code_and_the_episode(provider: Provider) -> None:
    assert call("run_python", {"code": "2+2"}) == CallOutcome("4")
    assert call("run_shell", {"command": "ls"}) == CallOutcome("4")
    assert provider.calls == [("python", "2+2", "e/0"), ("shell", "ls", "e/0")]


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("run_shell", {"command": "ls"}, "unknown function run_shell. Available functions: run_python"),
        ("run_python", {}, "missing argument code. Expected: run_python(code: string)"),
        ("run_python", {"code": ["ls"]}, "code must be a string"),
        ("run_python", {"code": "1", "a": 2}, "unknown argument a"),
    ],
)
def test_a_wrong_call_is_a_message_for_the_model(
    provider: Provider, function: str, arguments: dict[str, Any], message: str
) -> None:
    outcome = call(function, arguments, ("python",))
    assert (outcome.value, outcome.reason) == (None, "bad_request")
    assert message in outcome.message
    assert provider.calls == []


def test_a_number_as_code_is_its_text(provider: Provider) -> None:
    assert call("run_python", {"code": 7}).value == "4"
    assert provider.calls == [("python", "7", "e/0")]


def test_a_provider_that_fails_fails_the_call(provider: Provider) -> None:
    outcome = call("run_python", {"code": "fail"})
    assert (outcome.value, outcome.reason) == (None, "exception")
    assert outcome.message == "the sandbox failed: OSError: no space left"
