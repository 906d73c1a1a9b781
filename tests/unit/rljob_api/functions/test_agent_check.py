"""The static check of simulated users and tools: what it reports, with its line and the fix, and what it leaves."""

from __future__ import annotations

import pytest

from rljob_api.functions.agent_check import check_environment, check_program, check_tools, check_user
from rljob_api.functions.user_forms import UserSpec
from tests.support.plugins import KNOWN

INTERACTION = """
from verl.interactions.base import BaseInteraction

class Sums(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs): ...

    async def generate_response(self, instance_id, messages, **kwargs): ...
"""


@pytest.mark.parametrize(
    "source",
    [
        "def respond(messages, state): ...",
        "async def respond(messages, difficulty, **kwargs): ...",
        "def respond(turn): ...",
        "def respond(): ...",
        "class User:\n    def respond(self, messages, state): ...",
        "class respond:\n    def __call__(self, messages): ...",
        "from somewhere import respond",
        "from somewhere import *",
        "from somewhere import Base\nclass User(Base): ...",
        "def build(): ...\nrespond = build()",
        INTERACTION,
    ],
)
def test_user_that_can_be_called_has_no_problem(source: str) -> None:
    assert check_user(source, "user.py", UserSpec(), KNOWN) == []


@pytest.mark.parametrize(
    ("source", "line", "expected"),
    [
        ("\ndef respond(message): ...", 2, "rename message to messages"),
        ("def respond(history): ...", 1, "write def respond(messages, state)"),
        ("def respond(messages, /): ...", 1, "remove the '/'"),
        ("respond = 3", 1, "respond is a int"),
        ("def reply(messages): ...", 1, "set function.entrypoint: reply"),
        ("", 1, "def respond(messages, state):"),
        ("\n\ndef respond(", 3, "syntax error"),
        ("class User:\n    def answer(self): ...", 1, "set function.entrypoint: User"),
        ("\nclass User:\n    def __init__(self, level): ...\n    def respond(self, messages): ...", 2, "{level: ...}"),
        ("class User:\n    def generate_response(self, messages): ...", 1, "does not take instance_id"),
    ],
)
def test_user_that_cannot_be_called_is_reported_with_line_and_fix(source: str, line: int, expected: str) -> None:
    [problem] = check_user(source, "user.py", UserSpec(), KNOWN)
    assert problem.startswith(f"user.py:{line}: ")
    assert expected in problem


def test_user_may_take_values_and_the_columns_of_the_data_alone() -> None:
    """Another required parameter would make each episode invalid."""
    for source in (
        "def respond(messages, level, limit=3): ...",
        "class User:\n    def respond(self, messages, level, **rest): ...",
    ):
        assert check_user(source, "user.py", UserSpec(), KNOWN, ["level"]) == []
        [problem] = check_user(source, "user.py", UserSpec(), KNOWN, ["levels", "other"])
        assert "requires level; passed are messages, state, turn, " in problem
        assert "and the columns of the data (levels, other); rename level to levels" in problem
    assert check_user("def respond(messages, n): ...", "user.py", UserSpec(kwargs={"n": 1}), KNOWN, []) == []
    [problem] = check_user("def respond(mesages, anwser): ...", "user.py", UserSpec(), KNOWN, ["question"])
    assert "requires mesages, anwser; " in problem
    assert problem.endswith("rename mesages to messages")


def test_settings_of_a_user_are_checked() -> None:
    source = "class Strict:\n    def __init__(self, level): ...\n    def respond(self, messages): ...\n"
    assert check_user(source, "user.py", UserSpec("Strict", {"level": 1}), KNOWN) == []
    assert check_user(source, "user.py", UserSpec(None, {}, {"level": 1}), KNOWN) == []
    [problem] = check_user(source, "user.py", UserSpec("Stricd"), KNOWN)
    assert "did you mean Strict?" in problem
    [problem] = check_user("def respond(messages): ...", "user.py", UserSpec(None, {"levle": 1}), KNOWN)
    assert "does not accept levle" in problem
    [problem] = check_user("class U:\n    def m(self): ...", "user.py", UserSpec("U"), KNOWN)
    assert "without respond; add respond(self, messages, state)" in problem


@pytest.mark.parametrize(
    "source",
    [
        "def add(a: int, b: 'float | None' = 1): ...",
        "from x import Unit\ndef convert(unit: Unit, units: list[Unit]): ...",
        "from typing import Literal\nUnit = Literal['C', 'F']\ndef convert(unit: Unit): ...",
        "def add(a: int): ...\ndef _helper(x): ...",
        "def add(a: int): ...\ndef helper(x): ...\ntools = [add]",
        "class Box:\n    size = 3\n    def add(self, a: int): ...\n    def _own(self, b): ...\ntools = [Box()]",
        "def now() -> str: ...",
        "from x import *",
        "from x import search\ntools = [search]",
    ],
)
def test_tools_that_can_be_called_have_no_problem(source: str) -> None:
    assert check_tools(source, "tools.py", UserSpec()) == []


@pytest.mark.parametrize(
    ("source", "line", "expected"),
    [
        ("\ndef add(a, b: int): ...", 2, "the parameter a has no type"),
        ("def add(a: bytes): ...", 1, "the type bytes, which has no JSON schema"),
        ("def add(a: dict[int, str]): ...", 1, "the type dict[int, str]"),
        ("def add(a: int, /): ...", 1, "remove the '/'"),
        ("def add(a: int, **more): ...", 1, "replace * and **"),
        ("def add(*numbers): ...", 1, "no named parameters"),
        ("def _add(a: int): ...", 1, "no public function was found (it defines _add)"),
        ("import os", 1, "no public function was found"),
        ("tools = []", 1, "tools is an empty list"),
        ("x = 1\nclass Box:\n    def add(self, a): ...\ntools = [Box]", 2, "the parameter a has no type"),
        ("class Box:\n    def _add(self): ...\ntools = [Box]", 1, "without public methods"),
        ("def add(a: int): ...\ntools = [add, add]", 1, "two tools are named add"),
        (f"def {'a' * 65}(): ...", 1, "at most 64 characters"),
        ("\ndef add(", 2, "syntax error"),
    ],
)
def test_tools_that_cannot_be_called_are_reported_with_line_and_fix(source: str, line: int, expected: str) -> None:
    [problem] = check_tools(source, "tools.py", UserSpec())
    assert problem.startswith(f"tools.py:{line}: "), problem
    assert expected in problem


def test_each_wrong_tool_is_reported() -> None:
    problems = check_tools("def add(a): ...\ndef sub(a: int): ...\ndef mul(a): ...", "tools.py", UserSpec())
    assert [problem.partition(" add")[0].partition(" mul")[0] for problem in problems] == ["tools.py:1:", "tools.py:3:"]


def test_settings_of_tools_are_checked() -> None:
    source = "def read(path: str, folder): ...\n"
    assert check_tools(source, "tools.py", UserSpec(None, {"folder": "/data"})) == []
    [problem] = check_tools(source + "def write(text: str): ...", "tools.py", UserSpec("raed"))
    assert "did you mean read?" in problem
    [problem] = check_tools("def read(path: str, folder: str): ...", "tools.py", UserSpec(None, {"foldr": 1}))
    assert "did you mean folder?" in problem
    box = "class Box:\n    def __init__(self, size): ...\n    def add(self, a: int): ...\n"
    assert check_tools(box, "tools.py", UserSpec("Box", {"size": 1})) == []
    [problem] = check_tools(box, "tools.py", UserSpec("Box"))
    assert "Box(size) requires size; set function.kwargs" in problem
    assert check_tools("def build(n):\n    return [g]\ndef g(x): ...", "t.py", UserSpec("build", {}, {"n": 1}))


AREAL = """
class MathAgent:
    def __init__(self, temperature=1.0, **kwargs): ...

    async def run(self, data, **extra_kwargs): ...
"""


@pytest.mark.parametrize(
    "source",
    [
        "def run(prompt, client): ...",
        "async def run(messages, base_url, api_key, difficulty=1): ...",
        "def run(question, difficulty): ...",
        "def run(): ...",
        "def run(**anything): ...",
        "def run(data, http_client=None): ...",
        "class Agent:\n    def setup(self, level): ...\n    def run(self, task): ...\n    def close(self): ...",
        "class run:\n    def __call__(self, prompt): ...",
        "from somewhere import run",
        "from somewhere import *",
        "from somewhere import Base\nclass Agent(Base): ...",
        AREAL,
    ],
)
def test_program_that_can_be_called_has_no_problem(source: str) -> None:
    assert check_program(source, "agent.py", UserSpec()) == []


@pytest.mark.parametrize(
    ("source", "line", "expected"),
    [
        ("\ndef run(promt): ...", 2, "rename promt to prompt"),
        ("def run(x): ...", 1, "write def run(prompt, client)"),
        ("def run(prompt, /): ...", 1, "remove the '/'"),
        ("def run(data, http_client): ...", 1, "write http_client=None"),
        ("run = 3", 1, "run is a int"),
        ("def main(prompt): ...", 1, "set function.entrypoint: main"),
        ("", 1, "def run(prompt, client):"),
        ("\n\ndef run(", 3, "the program has a syntax error"),
        ("class Agent:\n    def act(self): ...", 1, "set function.entrypoint: Agent"),
        ("\nclass Agent:\n    def __init__(self, level): ...\n    def run(self, prompt): ...", 2, "{level: ...}"),
        ("class Agent:\n    def run(self, prompt): ...\n    def close(self, x, /): ...", 1, "positional-only"),
    ],
)
def test_program_that_cannot_be_called_is_reported_with_line_and_fix(source: str, line: int, expected: str) -> None:
    [problem] = check_program(source, "agent.py", UserSpec())
    assert problem.startswith(f"agent.py:{line}: ")
    assert expected in problem


def test_program_may_take_the_columns_of_the_data_alone() -> None:
    source = "def run(prompt, level): ..."
    assert check_program(source, "agent.py", UserSpec(), ["level"]) == []
    [problem] = check_program(source, "agent.py", UserSpec(), ["levels", "other"])
    assert "requires level; passed are prompt, " in problem
    assert "the columns of the data (levels, other); rename level to levels" in problem
    [problem] = check_program("def run(client): ...", "agent.py", UserSpec(kwargs={"n": 1}), [])
    assert "does not accept n" in problem


def test_environment_of_a_source_is_found_by_its_name() -> None:
    source = "class Sums(BaseTextEnv): ..."
    assert check_environment(source, "env.py", UserSpec(), "skyrlGym") == []
    assert check_environment(source, "env.py", UserSpec("Sums"), "skyrlGym") == []
    [problem] = check_environment(source, "env.py", UserSpec("Sum"), "skyrlGym")
    assert "env.py:1: the entry point Sum was not found (it defines Sums); did you mean Sums?" in problem
    [problem] = check_environment("", "env.py", UserSpec(), "skyrlGym")
    assert "no environment of skyrlGym was found" in problem
