"""The settings of an agent: its rules, and the services and functions that follow from them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from rljob_api.manifest.base import REQUIREMENT_PATTERN
from rljob_api.manifest.job import RLJobSpec
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.tool import MCP_MODULE

FUNCTION = {"function": {"inline": "x = 1"}}
USER: dict[str, Any] = {"type": "loop", "user": FUNCTION}
TOOL: dict[str, Any] = {"name": "calculator"} | FUNCTION

COMMAND: dict[str, Any] = {"command": ["python", "agent.py"]}
PROGRAM: dict[str, Any] = {"type": "program", "runner": FUNCTION}
GYM: dict[str, Any] = {"framework": "gymnasium", "id": "Blackjack-v1", "packages": ["gymnasium"]}


@pytest.mark.parametrize(
    ("requirement", "is_valid"),
    [
        *((each, True) for each in ("numpy", "math-verify==0.8.0", "verl[math] >= 0.9; python_version < '4'")),
        *((each, True) for each in ("trl @ git+https://h/trl", "git+https://h/x", "openai>=2,<3")),
        *((each, False) for each in ("pip install numpy", "-r more.txt", "numpy 2.0")),
        *((each, True) for each in ("a===1", "a (>=1)", "a!=1 ", "a @ https://h/x?t=b=", 'a>2;python_version<"4"')),
        *((each, False) for each in ("numpy=1.0", "numpy>=", "numpy >= ", "numpy==", "numpy>=1,<")),
    ],
)
def test_requirement_is_one_line_of_a_requirements_file(requirement, is_valid):
    assert bool(re.match(REQUIREMENT_PATTERN, requirement)) is is_valid


def build(reward: str = "correct", data_format: str = "chat", **agent: Any) -> RLJobSpec:
    data = {"train": {"source": "/d"}, "format": data_format}
    rewards = [{"name": reward} | FUNCTION]
    return RLJobSpec.model_validate({"model": {"source": "/m"}, "data": data, "rewards": rewards, "agent": agent})


def test_services_are_the_rewards_the_user_and_the_tools_with_their_paths() -> None:
    spec = build(**USER, tools=[TOOL, TOOL | {"name": "search"}])
    assert [(service.kind, service.path, service.settings.name) for service in spec.services] == [
        ("reward", "spec.rewards[0]", "correct"),
        ("user", "spec.agent.user", "user"),
        ("tool", "spec.agent.tools[0]", "calculator"),
        ("tool", "spec.agent.tools[1]", "search"),
    ]
    assert [service.kind for service in build().services] == ["reward"]


def test_settings_of_a_function_are_those_of_its_server() -> None:
    settings = {"replicas": 3, "slots": 5, "timeoutSeconds": 7, "retries": 4, "env": {"A": "b"}, "backoffLimit": 1}
    tool = TOOL | settings | {"onError": "invalid", "maxResultCharacters": 9}
    server = build(type="loop", tools=[tool]).services[1].settings
    assert isinstance(server, CallService)
    assert (server.replicas, server.slots, server.timeout_seconds, server.retries) == (3, 5, 7, 4)
    assert (server.env, server.backoff_limit, server.is_served) == ({"A": "b"}, 1, True)


def test_a_tool_may_be_an_mcp_server() -> None:
    search = {"url": "http://search:8000/mcp", "headers": {"Authorization": "Bearer ${KEY}"}, "functions": ["find"]}
    clock = {"command": ["mcp-server-time"], "requirements": ["mcp-server-time"]}
    spec = build(type="loop", tools=[{"name": "search", "mcp": search}, {"name": "clock", "mcp": clock}])

    functions = [service.settings.function for service in spec.services[1:]]
    assert [(each.module, each.entrypoint, each.network) for each in functions if each] == [
        (MCP_MODULE, "McpTools", True),
        (MCP_MODULE, "McpTools", False),
    ]
    assert functions[0] is not None
    assert functions[0].factory_args == search | {"command": []}
    assert functions[1] is not None
    assert functions[1].requirements[1:] == ["mcp-server-time"]
    assert [service.source for service in spec.services[1:]] == ["spec.agent.tools[0].mcp", "spec.agent.tools[1].mcp"]
    assert [*spec.functions] == ["spec.rewards[0].function"]


def build_model_user(**fields: Any) -> dict[str, Any]:
    """Return an agent whose user is a chat model at an endpoint, changed by `fields`."""
    limits = {"concurrency": 4, "requestsPerMinute": 8}
    endpoint = {"url": "https://x/v1", "model": "m", "limits": limits}
    model = {"endpoint": endpoint, "persona": "You want {{ ground_truth }}.", "stop": "[DONE]"}
    return {"type": "loop", "user": {"model": model} | fields}


def test_a_user_may_be_a_chat_model_at_an_endpoint() -> None:
    service = build(**build_model_user(replicas=4, timeoutSeconds=7)).services[1]
    assert (service.kind, service.source) == ("user", "spec.agent.user.model")
    assert isinstance(service.settings, CallService)
    assert service.settings.user_model is not None
    assert (service.settings.replicas, service.settings.timeout_seconds, service.settings.is_served) == (4, 7, True)
    assert service.settings.endpoint is not None
    assert service.settings.endpoint.model == "m"
    assert service.settings.served_model is None


def test_served_models_are_found_by_path_and_may_be_changed_in_place() -> None:
    spec = build(type="loop", user={"model": {"model": {"source": "./m"}, "persona": "x"}})
    assert [*spec.served_models] == ["spec.agent.user.model.model"]
    spec.served_models["spec.agent.user.model.model"].source = "/m"
    model = spec.services[1].settings.served_model
    assert model is not None
    assert model.source == "/m"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"replicas": 5}, "model.endpoint.limits.concurrency must be at least replicas: each replica gets"),
        (
            {"autoscaling": {"maxReplicas": 5}},
            "model.endpoint.limits.requestsPerMinute must be at least 2 x replicas: each replica gets",
        ),
        (FUNCTION, "must have exactly one of function, model"),
        ({"model": {"persona": "x"}}, "must have exactly one of model, endpoint"),
        ({"model": {"endpoint": {"url": "https://x", "model": "m"}, "persona": "x", "stop": " "}}, "stop"),
    ],
)
def test_a_model_user_that_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        build(**build_model_user(**fields))


def test_a_tool_may_be_a_sandbox_whose_code_ends_before_its_worker() -> None:
    sandbox = {"languages": ["shell"], "requirements": ["numpy"], "maxMemory": "64Mi"}
    settings = {"timeoutSeconds": 7, "maxResultCharacters": 9}
    service = build(type="loop", tools=[{"name": "code", "sandbox": sandbox} | settings]).services[1]
    function = service.settings.function
    assert function is not None
    assert (service.source, service.settings.timeout_seconds) == ("spec.agent.tools[0].sandbox", 12)
    assert function.factory_args == {
        "provider": "process",
        "languages": ["shell"],
        "timeout_seconds": 7,
        "max_characters": 9,
    }
    assert (function.requirements, function.max_memory, function.network) == (["numpy"], "64Mi", False)


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({}, "must have exactly one of function, mcp"),
        (FUNCTION | {"mcp": {"url": "http://a"}}, "must have exactly one of function, mcp"),
        ({"mcp": {}}, "must have exactly one of url, command"),
        ({"mcp": {"url": "http://a", "command": ["b"]}}, "must have exactly one of url, command"),
    ],
)
def test_a_tool_has_one_source(tool: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        build(type="loop", tools=[{"name": "search"} | tool])


def test_functions_are_found_by_path_and_may_be_changed_in_place() -> None:
    spec = build(**USER, tools=[TOOL])
    assert [*spec.functions] == [
        "spec.rewards[0].function", "spec.agent.user.function", "spec.agent.tools[0].function"
    ]  # fmt: skip
    spec.functions["spec.agent.user.function"].inline = "y = 2"
    assert spec.services[1].settings.function is not None
    assert spec.services[1].settings.function.inline == "y = 2"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"user": FUNCTION}, "user is for type loop alone"),
        ({"tools": [TOOL]}, "tools is for type loop alone, got 1 of them"),
        ({"type": "loop"}, "type needs a user or tools with loop"),
        (USER | {"tools": [TOOL, TOOL]}, "tools must have different names, got calculator in tools[0] and tools[1]"),
        (USER | {"tools": [TOOL | {"name": "user"}]}, "tools must not be named user, .*, got tools\\[0\\]"),
        ({"type": "loop", "tools": [TOOL], "reward": "calculator"}, "agent.tools must have names that no reward has"),
        (USER | {"reward": "user"}, "rewards must not be named user, .*, got rewards\\[0\\]"),
        (USER | {"data_format": "text"}, "data.format must be chat unless agent.type is singleTurn"),
        (PROGRAM | {"data_format": "text"}, "data.format must be chat unless agent.type is singleTurn"),
        (PROGRAM | {"reward": "runner"}, "rewards must not be named runner, .*, got rewards\\[0\\]"),
        (PROGRAM | {"environment": GYM}, "environment must be set with type environment, and with no other type"),
        ({"type": "environment"}, "environment must be set with type environment, and with no other type"),
        (
            {"type": "environment", "environment": {"framework": "trl"}},
            "environment needs environment.id or runner.function",
        ),
        (
            {"type": "environment", "environment": GYM, "runner": FUNCTION},
            "environment needs environment.id or runner",
        ),
        ({"runner": FUNCTION}, "runner is for the types environment and program, got singleTurn"),
        ({"type": "program"}, "runner must have a function or a command with type program"),
        ({"type": "program", "runner": FUNCTION | COMMAND}, "are alternatives"),
        ({"type": "environment", "environment": GYM, "runner": COMMAND}, "no command with type environment"),
    ],
)
def test_rule_names_the_offender(fields: dict[str, Any], message: str) -> None:
    pattern = message if "\\" in message else message.replace("[", "\\[").replace("]", "\\]")
    with pytest.raises(ValidationError, match=pattern):
        build(**fields)


def test_reward_may_be_named_user_without_a_simulated_one() -> None:
    assert build(reward="user").services[0].settings.name == "user"


def test_runner_is_a_service_with_the_function_the_command_or_the_environment() -> None:
    of_function = build(**PROGRAM).services[1]
    assert (of_function.kind, of_function.path, of_function.settings.name) == ("runner", "spec.agent.runner", "runner")
    of_command = build(type="program", runner=COMMAND | {"workingDir": "agents"}).services[1].settings.function
    assert of_command is not None
    assert of_command.factory_args == {"command": ["python", "agent.py"], "working_dir": "agents"}
    assert of_command.max_memory == "64Gi", "Node.js reserves much more than it uses"
    service = build(type="environment", environment=GYM | {"args": {"a": 1}}, runner={"slots": 2}).services[1]
    assert (service.framework, service.settings.slots) == ("gymnasium", 2)
    assert service.settings.function is not None
    assert service.settings.function.requirements == ["gymnasium"]
    assert service.settings.function.factory_args == {"id": "Blackjack-v1", "args": {"a": 1}}


def test_python_of_the_runner_reaches_its_server() -> None:
    runner = {"python": "3.12"}
    assert build(type="environment", environment=GYM, runner=runner).services[1].settings.python == "3.12"
    assert build(type="environment", environment=GYM).services[1].settings.python is None


def test_environment_of_the_users_source_gets_its_arguments_and_packages() -> None:
    environment = {"framework": "trl", "args": {"a": 1}, "packages": ["trl"]}
    function = {"function": {"inline": "x = 1", "requirements": ["numpy"]}}
    service = build(type="environment", environment=environment, runner=function).services[1]
    assert service.framework == "trl"
    assert service.settings.function is not None
    assert (service.settings.function.inline, service.settings.function.factory_args) == ("x = 1", {"a": 1})
    assert service.settings.function.requirements == ["trl", "numpy"]


def test_rewards_may_be_absent_only_where_the_agent_brings_one() -> None:
    job = {"model": {"source": "/m"}, "data": {"train": {"source": "/d"}}}
    assert not RLJobSpec.model_validate(job | {"agent": PROGRAM}).rewards
    with pytest.raises(ValidationError, match="rewards must have at least one entry"):
        RLJobSpec.model_validate(job)
    with pytest.raises(ValidationError, match="must have a weight other than 0"):
        RLJobSpec.model_validate(job | {"agent": PROGRAM | {"rewardWeight": 0}})


def test_turns_are_limited_by_type_unless_given() -> None:
    assert [build(**each).agent.turn_limit for each in (USER, PROGRAM, PROGRAM | {"maxAssistantTurns": 3})] == [
        8,
        100,
        3,
    ]
