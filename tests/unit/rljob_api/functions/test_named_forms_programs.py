"""Forms of programs: which are taken, and which are refused with their line and the fix."""

from __future__ import annotations

import pytest

from rljob_service.worker.settings import EPISODES
from tests.support.loading import find_problems


def check(source: str, **settings: object) -> list[str]:
    return find_problems(source, "agent.py", EPISODES, **settings)


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
        AREAL,
    ],
)
def test_program_that_can_be_called_has_no_problem(source: str) -> None:
    assert check(source) == []


@pytest.mark.parametrize(
    ("source", "line", "expected"),
    [
        ("\ndef run(promt): ...", 2, "rename promt to prompt"),
        ("def run(x): ...", 1, "write def run(prompt, client)"),
        ("def run(prompt, /): ...", 1, "remove the '/'"),
        ("def run(data, http_client): ...", 1, "write http_client=None"),
        ("run = 3", None, "run is a int"),
        ("def main(prompt): ...", 1, "set function.entrypoint: main"),
        ("", 1, "def run(prompt, client):"),
        ("class Agent:\n    def act(self): ...", 1, "set function.entrypoint: Agent"),
        ("\nclass Agent:\n    def __init__(self, level): ...\n    def run(self, prompt): ...", 2, "{level: ...}"),
        ("class Agent:\n    def run(self, prompt): ...\n    def close(self, x, /): ...", 1, "positional-only"),
    ],
)
def test_program_that_cannot_be_called_is_refused_with_the_fix(source: str, line: int | None, expected: str) -> None:
    [problem] = check(source)
    assert problem.startswith(f"agent.py:{line}: " if line else "agent.py: ")
    assert expected in problem


def test_program_may_take_columns_besides_a_value() -> None:
    assert check("def run(prompt, level): ...") == []
    [problem] = check("def run(client): ...", kwargs={"n": 1})
    assert "does not accept n" in problem
