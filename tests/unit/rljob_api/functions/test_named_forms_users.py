"""Forms of simulated users: which are taken, and which are refused with their line and the fix."""

from __future__ import annotations

import pytest

from rljob_service.worker.settings import USER
from tests.support.loading import find_problems


def check(source: str, **settings: object) -> list[str]:
    return find_problems(source, "user.py", USER, **settings)


@pytest.mark.parametrize(
    "source",
    [
        "def respond(messages, state): ...",
        "async def respond(messages, difficulty, **kwargs): ...",
        "def respond(turn): ...",
        "def respond(): ...",
        "class User:\n    def respond(self, messages, state): ...",
        "class respond:\n    def __call__(self, messages): ...",
    ],
)
def test_user_that_can_be_called_has_no_problem(source: str) -> None:
    assert check(source) == []


@pytest.mark.parametrize(
    ("source", "line", "expected"),
    [
        ("\ndef respond(message): ...", 2, "rename message to messages"),
        ("def respond(history): ...", 1, "write def respond(messages, state)"),
        ("def respond(messages, /): ...", 1, "remove the '/'"),
        ("respond = 3", None, "respond is a int"),
        ("def reply(messages): ...", 1, "set function.entrypoint: reply"),
        ("", 1, "def respond(messages, state):"),
        ("class User:\n    def answer(self): ...", 1, "set function.entrypoint: User"),
        ("\nclass User:\n    def __init__(self, level): ...\n    def respond(self, messages): ...", 2, "{level: ...}"),
    ],
)
def test_user_that_cannot_be_called_is_refused_with_the_fix(source: str, line: int | None, expected: str) -> None:
    [problem] = check(source)
    assert problem.startswith(f"user.py:{line}: " if line else "user.py: ")
    assert expected in problem


def test_settings_of_a_user_are_checked() -> None:
    source = "class Strict:\n    def __init__(self, level): ...\n    def respond(self, messages): ...\n"
    assert check(source, entrypoint="Strict", kwargs={"level": 1}) == []
    assert check(source, factory_args={"level": 1}) == []
    [problem] = check(source, entrypoint="Stricd")
    assert "did you mean Strict?" in problem
    [problem] = check("def respond(messages): ...", kwargs={"levle": 1})
    assert "does not accept levle" in problem
    [problem] = check("class U:\n    def m(self): ...", entrypoint="U")
    assert "without respond; add respond(self, messages, state)" in problem
