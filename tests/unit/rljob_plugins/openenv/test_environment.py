"""OpenEnv: actions from text or JSON, observations as messages, classes and clients."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import pydantic
import pytest

from rljob_api.errors import UserError
from rljob_plugins.openenv.environment import find_action_class, read_action, show, show_result
from rljob_service.worker import environments
from rljob_service.worker.environments.stepping import NotAnActionError
from tests.support.environments import GivenAnswers, build_episode, load_adapter, play

ActT = TypeVar("ActT")


class Say(pydantic.BaseModel):
    metadata: dict[str, Any] = {}
    message: str


class Move(pydantic.BaseModel):
    metadata: dict[str, Any] = {}
    row: int
    column: int = 0


class Seen(pydantic.BaseModel):
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = {}
    text: str = ""


class State(pydantic.BaseModel):
    episode_id: str
    seed: int


class Environment(Generic[ActT]):
    """In the place of OpenEnv's base class."""


class Echo(Environment[Say]):
    closed = 0

    def __init__(self, reward: float | None = 0.5) -> None:
        self.reward = reward

    def reset(self, seed: int | None = None, episode_id: str | None = None, split: str = "") -> Seen:
        self._state = State(episode_id=episode_id or "", seed=seed or 0)
        return Seen(text=f"ready for {split}", reward=9.0)

    def step(self, action: Say) -> Seen:
        return Seen(text=action.message, reward=self.reward, done=action.message == "bye")

    @property
    def state(self) -> State:
        return self._state

    def close(self) -> None:
        type(self).closed += 1


def test_class_gets_row_and_seed_and_its_rewards_come_back() -> None:
    model, before = GivenAnswers("hi", "bye"), Echo.closed
    reply = play("openenv", Echo, model, build_episode(index=4, split="test", other="ignored"))
    assert [each[-1]["content"] for each in model.conversations] == ["Play.\n\nready for test", "hi"]
    assert reply.rewards == {"c0": 0.5, "c1": 0.5}, "the reward of reset has no answer"
    assert reply.state == {"episode_id": "e-1-2", "seed": 4}
    assert Echo.closed == before + 1


def test_reward_of_none_is_not_zero() -> None:
    assert play("openenv", Echo, GivenAnswers("bye"), args={"reward": None}).rewards == {}


def test_client_is_awaited() -> None:
    class EnvClient(Generic[ActT]): ...

    class Result:
        def __init__(self, text: str, done: bool = False) -> None:
            self.observation, self.reward, self.done = {"text": text}, 1.0, done

    class EchoClient(EnvClient[Say]):
        async def reset(self, **kwargs: Any) -> Result:
            return Result(f"seed {kwargs['seed']}")

        async def step(self, action: Say) -> Result:
            return Result(action.message, done=True)

        async def state(self) -> dict[str, Any]:
            return {"steps": 1}

        async def close(self) -> None: ...

    model = GivenAnswers("hi")
    reply = play("openenv", EchoClient, model, build_episode(index=3))
    assert model.last_seen["content"] == "Play.\n\nseed 3"
    assert (reply.rewards, reply.state) == ({"c0": 1.0}, {"steps": 1})


def test_answer_that_is_not_an_action_gets_the_invalid_reward() -> None:
    class Board(Echo):
        def step(self, action: Move) -> Seen:  # type: ignore[override]
            return Seen(text=f"{action.row}", reward=1.0, done=True)

    model = GivenAnswers("somewhere", '{"row": "x"}', 'I choose {"row": 2}.')
    reply = play("openenv", Board, model, args={"rljob": {"invalid_reward": -0.5}})
    assert reply.rewards == {"c0": -0.5, "c1": -0.5, "c2": 1.0}
    assert model.conversations[1][-1]["content"] == "Reply with one JSON object with the keys row, column."
    assert "row\n" in model.conversations[2][-1]["content"], "what is wrong"


def test_class_of_actions_is_found_by_annotation_or_base() -> None:
    class Unannotated(Environment[Say]):
        def step(self, action: Any) -> Any: ...

    class Nothing(Environment[Any]):
        def step(self, action: Any) -> Any: ...

    assert find_action_class(Echo) is Say
    assert find_action_class(Unannotated) is Say
    with pytest.raises(UserError, match="its class of actions is not known"):
        find_action_class(Nothing)


def test_dicts_are_actions_of_untyped_clients() -> None:
    assert read_action(dict, '```json\n{"message": "hi"}\n```') == {"message": "hi"}
    with pytest.raises(NotAnActionError, match="Reply with one JSON object"):
        read_action(dict, "hi")


def test_observations_are_text_or_json() -> None:
    assert show(Seen(text="hi", reward=1)) == "hi"
    assert show({"a": 1, "b": [2], "done": True}) == '{"a": 1, "b": [2]}'
    assert show({"done": True, "reward": 1}) == ""


def test_results_of_tools_are_text() -> None:
    parts = {"content": [{"type": "text", "text": "5"}, {"type": "text", "text": "6"}], "is_error": False}
    assert show_result({"result": parts, "error": None}) == "5\n6"
    assert show_result({"result": {"sum": 5}}) == '{"sum": 5}'
    assert show_result({"error": {"message": "no tool"}}) == '{"error": {"message": "no tool"}}'


def test_other_classes_are_refused() -> None:
    with pytest.raises(UserError, match="neither a subclass of OpenEnv's Environment nor of EnvClient"):
        environments.adopt(load_adapter("openenv"), GivenAnswers, {})
    assert not load_adapter("openenv").is_environment("Environment", Environment)
