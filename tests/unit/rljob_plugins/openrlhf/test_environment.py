"""OpenRLHF's AgentInstance, also where OpenRLHF is missing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_service.worker import environments
from tests.support.environments import PROMPT, GivenAnswers, build_episode, load_adapter, play


class Scalar:
    """A tensor of one element."""

    def __init__(self, value: float) -> None:
        self._value = value

    def numel(self) -> int:
        return 1

    def item(self) -> float:
        return self._value


class AgentInstance:
    seen: list[str] = []

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.seen.append(states["observation_text"])
        right = states["action_text"] == states["label"]
        return {
            "rewards": Scalar(float(right)),
            "scores": Scalar(0.5),
            "environment_feedback": "" if right else " Again.",
            "done": right,
            "extra_logs": {"tries": 1},
        }


def test_rewards_belong_to_answers_and_feedback_is_the_next_message() -> None:
    AgentInstance.seen.clear()
    model = GivenAnswers("1", "4")
    reply = play("openrlhf", AgentInstance, model, build_episode("4"))
    assert model.conversations[0] == PROMPT
    assert model.last_seen == {"role": "user", "content": " Again."}
    assert (reply.reward, reply.rewards) == (None, {"c0": 0.0, "c1": 1.0})
    assert reply.info == {"scores": 0.5, "tries": 1}
    assert AgentInstance.seen == ["Play.", "Play.1 Again."], "the text so far, as OpenRLHF passes it"


def test_observation_of_reset_replaces_the_prompt() -> None:
    class Other(AgentInstance):
        async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            return {"observation": "Another game."}

    model = GivenAnswers("4")
    play("openrlhf", Other, model, build_episode("4"))
    assert model.conversations == [[{"role": "user", "content": "Another game."}]]


@pytest.fixture
def clean_modules() -> Iterator[None]:
    finders, modules = list(sys.meta_path), set(sys.modules)
    yield
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_base_classes_are_provided_where_openrlhf_is_missing(clean_modules: None) -> None:
    load_adapter("openrlhf")
    module: Any = importlib.import_module("openrlhf.utils.agent")

    class Executor(module.MultiTurnAgentExecutor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(AgentInstance)

    assert issubclass(Executor, module.MultiTurnAgentExecutor)
    assert Executor() is not None


def test_only_the_instance_is_the_environment() -> None:
    adapter = load_adapter("openrlhf")
    assert adapter.is_environment("AgentInstance", AgentInstance)
    assert not adapter.is_environment("AgentExecutor", AgentInstance)
    with pytest.raises(UserError, match="must be a class with step"):
        environments.adopt(load_adapter("openrlhf"), object, {})
