"""A plugin of a third party, the one of docs/plugins.md, through the CLI's check and a real server."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rljob_api.functions.conventions import load_signatures
from rljob_api.functions.plugins import ENVIRONMENTS, SIGNATURES, find_plugins
from tests.paths import ROOT
from tests.support.reward_process import Server
from tests.support.scripted_model import ScriptedModel

StartServer = Callable[..., Server]
MARK = "def mark(reply, solution):\n    return float(reply == solution)\n"
QUIZ = """
class Quiz:
    def __init__(self, prefix=""):
        self.prefix = prefix
    def ask(self, question):
        return self.prefix + question
    def mark(self, reply, solution):
        return reply == solution
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for sys.path in which the plugin is installed."""
    folder = tmp_path_factory.mktemp("site")
    text = (ROOT / "docs" / "plugins.md").read_text()
    files = dict(re.findall(r"```\w+\n# (\S+)\n(.*?)```", text, re.S))
    groups = tomllib.loads(files.pop("pyproject.toml"))["project"]["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in names.items())
        for group, names in groups.items()
    ]
    for name, code in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
    (folder / "rljob_quiz" / "__init__.py").touch()
    information = folder / "rljob_quiz-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: rljob-quiz\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def model() -> Iterator[ScriptedModel]:
    model = ScriptedModel()
    yield model
    model.close()


def test_installed_plugin_is_found(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "quiz" not in load_signatures(find_plugins(SIGNATURES)).names
    monkeypatch.syspath_prepend(site)
    find_plugins.cache_clear()  # an installation is not noticed by a running process
    try:
        assert find_plugins(ENVIRONMENTS)["quiz"] == "rljob_quiz.environment"
        assert "quiz" in load_signatures(find_plugins(SIGNATURES)).names
    finally:
        find_plugins.cache_clear()


def test_function_is_scored_in_its_form(start_server: StartServer, site: Path) -> None:
    server = start_server(MARK, environment={"PYTHONPATH": str(site)}, slots=1)
    assert server.request("GET", "/v1/info")[1]["signature"] == "quiz"
    assert [server.score(text, ground_truth="4")["score"] for text in ("4", "5")] == [1.0, 0.0]


def test_environment_plays_an_episode(start_server: StartServer, site: Path, model: ScriptedModel) -> None:
    arguments = ["--serves", "episodes", "--framework", "quiz"]
    function = {"factoryArgs": {"prefix": "Say: "}}
    server = start_server(QUIZ, arguments, environment={"PYTHONPATH": str(site)}, slots=1, function=function)
    call = {"episode": "e1", "attempt": 0, "model": {"url": model.url, "api_key": model.script(["5", "4"])}}
    call |= {"prompt": [{"role": "user", "content": "2+2?"}], "ground_truth": "4"}
    result = server.call({**call, "seed": 1, "max_turns": 4, "deadline_seconds": 60})
    assert result["valid"], result
    assert sorted(result["value"]["rewards"].values()) == [0.0, 1.0]
    assert model.requests[0]["messages"] == [{"role": "user", "content": "Say: 2+2?"}]
    assert model.requests[1]["messages"][-1]["content"] == "Try again."


def test_plugin_that_is_not_installed_ends_the_server_with_those_that_are(start_server: StartServer) -> None:
    server = start_server(QUIZ, ["--serves", "episodes", "--framework", "quiz"], wait=False, slots=1)
    assert server.process.wait(60) == 78
    assert "agent.environment.framework: quiz is not installed; known are gymnasium, " in server.log.read_text()
