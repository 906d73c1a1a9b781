"""Forms of tools: which are taken, and which are refused with their line and the fix."""

from __future__ import annotations

import pytest

from rljob_service.worker.settings import TOOLS
from tests.support.loading import find_problems


def check(source: str, **settings: object) -> list[str]:
    return find_problems(source, "tools.py", TOOLS, **settings)


@pytest.mark.parametrize(
    "source",
    [
        "def add(a: int, b: 'float | None' = 1): ...",
        "from typing import Literal\nUnit = Literal['C', 'F']\ndef convert(unit: Unit): ...",
        "def add(a: int): ...\ndef _helper(x): ...",
        "def add(a: int): ...\ndef helper(x): ...\ntools = [add]",
        "class Box:\n    size = 3\n    def add(self, a: int): ...\n    def _own(self, b): ...\ntools = [Box()]",
        "def now() -> str: ...",
    ],
)
def test_tools_that_can_be_called_have_no_problem(source: str) -> None:
    assert check(source) == []


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
        ("tools = []", None, "tools is an empty list"),
        ("x = 1\nclass Box:\n    def add(self, a): ...\ntools = [Box]", 3, "the parameter a has no type"),
        ("class Box:\n    def _add(self): ...\ntools = [Box]", 1, "without public methods"),
        ("def add(a: int): ...\ntools = [add, add]", None, "two tools are named add"),
        (f"def {'a' * 65}(): ...", 1, "at most 64 characters"),
    ],
)
def test_tools_that_cannot_be_called_are_refused_with_the_fix(source: str, line: int | None, expected: str) -> None:
    [problem] = check(source)
    assert problem.startswith(f"tools.py:{line}: " if line else "tools.py: "), problem
    assert expected in problem


def test_settings_of_tools_are_checked() -> None:
    source = "def read(path: str, folder): ...\n"
    assert check(source, kwargs={"folder": "/data"}) == []
    [problem] = check(source + "def write(text: str): ...", entrypoint="raed")
    assert "did you mean read?" in problem
    [problem] = check("def read(path: str, folder: str): ...", kwargs={"foldr": 1})
    assert "did you mean folder?" in problem
    box = "class Box:\n    def __init__(self, size): ...\n    def add(self, a: int): ...\n"
    assert check(box, entrypoint="Box", kwargs={"size": 1}) == []
    [problem] = check(box, entrypoint="Box")
    assert "Box(size) requires size; set function.kwargs" in problem
    assert check("def build(n):\n    return [g]\ndef g(x): ...", entrypoint="build", factory_args={"n": 1})
