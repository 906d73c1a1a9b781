"""Tools: which functions the policy may call, how, and what it gets."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_api.wire.calls import ToolSchema
from rljob_api.wire.contract import MAX_TOOL_RESULT_CHARACTERS
from tests.support.agent_functions import call_tool, load_tools

SOURCE = '''
import functools
from json import dumps

def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b

async def now() -> str:
    return "noon"

@functools.lru_cache
def square(x: float): return x * x

def boom(): raise ValueError("no such city")

def _helper(x): ...

class Box:
    def __init__(self, size: int = 2):
        self.size = size
    def fill(self, text: str):
        return {"text": text * self.size}
    async def empty(self): return None
    @staticmethod
    def weigh(grams: int): return grams
    def _own(self): ...

box = Box(3)
def build(size: int): return Box(size)
also_add = add
'''


def names_of(source: str = SOURCE, **settings: Any) -> list[str]:
    schemas = load_tools(source, **settings).tools
    return [ToolSchema.model_validate(schema).name for schema in schemas]


@pytest.mark.parametrize(
    ("source", "settings", "expected"),
    [
        (SOURCE, {}, ["add", "now", "square", "boom", "build"]),
        (SOURCE + "\ntools = [add, Box]", {}, ["add", "fill", "empty", "weigh"]),
        (SOURCE + "\ntools = (box, now)", {}, ["fill", "empty", "weigh", "now"]),
        (SOURCE, {"entrypoint": "add"}, ["add"]),
        (SOURCE, {"entrypoint": "also_add"}, ["also_add"]),
        (SOURCE, {"entrypoint": "Box"}, ["fill", "empty", "weigh"]),
        (SOURCE, {"entrypoint": "box"}, ["fill", "empty", "weigh"]),
        (SOURCE, {"entrypoint": "build", "factory_args": {"size": 1}}, ["fill", "empty", "weigh"]),
    ],
)
def test_functions_that_the_policy_may_call(source: str, settings: dict[str, Any], expected: list[str]) -> None:
    assert names_of(source, **settings) == expected


@pytest.mark.parametrize(
    ("function", "arguments", "settings", "expected"),
    [
        ("add", {"a": 2, "b": 3}, {}, "5"),
        ("add", {"a": "2"}, {}, "3"),
        ("now", {}, {}, "noon"),
        ("square", {"x": 3}, {}, "9"),
        ("add", {"a": 2}, {"kwargs": {"b": 40}}, "42"),
        ("fill", {"text": "ä"}, {"entrypoint": "Box"}, '{"text": "ää"}'),
        ("fill", {"text": "ä"}, {"entrypoint": "Box", "kwargs": {"size": 1}}, '{"text": "ä"}'),
        ("fill", {"text": "ä"}, {"entrypoint": "box"}, '{"text": "äää"}'),
        ("fill", {"text": "ä"}, {"entrypoint": "build", "factory_args": {"size": 4}}, '{"text": "ääää"}'),
        ("empty", {}, {"entrypoint": "Box"}, "null"),
        ("weigh", {"grams": 5}, {"entrypoint": "Box"}, "5"),
    ],
)
def test_call_returns_text(function: str, arguments: dict[str, Any], settings: dict[str, Any], expected: str) -> None:
    outcome = call_tool(SOURCE, function, arguments, **settings)
    assert (outcome.value, outcome.reason) == (expected, None), outcome.message


@pytest.mark.parametrize(
    ("function", "arguments", "reason", "message"),
    [
        ("ad", {}, "bad_request", "unknown function ad. Did you mean add? Available functions: add, now"),
        ("", {}, "bad_request", "unknown function . Available functions: add"),
        ("_helper", {"x": 1}, "bad_request", "unknown function _helper"),
        ("dumps", {"obj": 1}, "bad_request", "unknown function dumps"),
        ("add", {}, "bad_request", "missing argument a. Expected: add(a: integer, b: integer = 1)"),
        ("add", {"a": "two"}, "bad_request", 'a must be an integer, got "two"'),
        ("boom", {}, "exception", "ValueError: no such city"),
    ],
)
def test_call_that_fails_has_a_reason(function: str, arguments: dict[str, Any], reason: str, message: str) -> None:
    outcome = call_tool(SOURCE, function, arguments)
    assert (outcome.value, outcome.reason) == (None, reason)
    assert message in outcome.message


def test_argument_of_the_settings_cannot_be_chosen_by_the_policy() -> None:
    outcome = call_tool(SOURCE, "add", {"a": 1, "b": 2}, kwargs={"b": 40})
    assert (outcome.reason, "unknown argument b" in outcome.message) == ("bad_request", True)


def test_types_may_be_written_as_text() -> None:
    source = "from __future__ import annotations\nfrom typing import Literal\nUnit = Literal['C', 'F']\n"
    [schema] = load_tools(f"{source}def convert(to: Unit | None, at: list[float] = []): ...").tools
    assert schema["parameters"]["properties"]["to"] == {
        "anyOf": [{"type": "string", "enum": ["C", "F"]}, {"type": "null"}]
    }


def test_long_result_is_cut_off_before_it_leaves_the_worker() -> None:
    outcome = call_tool("def flood() -> str: return 'x' * (5 << 20)", "flood", {})
    assert outcome.value == "x" * MAX_TOOL_RESULT_CHARACTERS


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ("import os", {}, "function.py:1: no public function was found"),
        ("def _f(): ...", {}, "function.py:1: no public function was found"),
        ("\n\ndef f(x): ...", {}, "function.py:3: f.x.: the parameter x has no type"),
        ("x = 1\nclass B:\n    def f(self, x: set): ...", {"entrypoint": "B"}, "function.py:3: .*the type set"),
        ("from datetime import date\ndef f(day: date): ...", {}, "function.py:2: .*the type date"),
        ("def f(x: 'Missing'): ...", {}, "function.py:1: .*cannot be resolved: NameError"),
        ("def f(x: int): ...", {"entrypoint": "g"}, "function.py:1: the entry point g was not found .it defines f."),
        ("def f(x: int): ...", {"kwargs": {"y": 1}}, "no tool takes y"),
        ("def f(x: int): ...\ntools = [f, f]", {}, "two tools are named f"),
        ("tools = [lambda x: x]", {}, "has no name"),
        ("tools = [3]", {}, "is a int"),
        ("tools = []", {}, "tools is an empty list"),
        ("class B:\n    def __init__(self, n): ...\n    def f(self): ...", {"entrypoint": "B"}, "B.n. requires n"),
        ("class B:\n    def __init__(self): 1/0\n    def f(self): ...", {"entrypoint": "B"}, "function.py:2: ZeroDiv"),
    ],
)
def test_source_without_callable_tools_is_refused_with_the_fix(
    source: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=f"(?s){message}"):
        load_tools(source, **settings)
