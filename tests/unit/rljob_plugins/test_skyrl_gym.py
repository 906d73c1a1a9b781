"""SkyRL-Gym: a class in the form of BaseTextEnv."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_service.worker import environments
from tests.support.environments import PROMPT, GivenAnswers, build_episode, load_adapter, play


class Guess:
    closed = 0

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        self.config, self.extras, self.turns = env_config, extras, 0

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return [*prompt, {"role": "user", "content": self.config.hints.first}], {"level": self.extras["level"]}

    def step(self, action: str) -> dict[str, Any]:
        if action == "crash":
            raise RuntimeError("boom")
        self.turns += 1
        right = action == self.extras["reward_spec"]["ground_truth"]
        shown = [] if right else [{"role": "user", "content": "no"}]
        cut = {"postprocessed_action": action.split("!")[0]} if "!" in action else {}
        return {"observations": shown, "reward": float(right), "done": right, "metadata": {"last": action}, **cut}

    def close(self) -> None:
        type(self).closed += 1

    def get_metrics(self) -> dict[str, Any]:
        return {"steps": self.turns, "max_turns": self.extras["max_turns"]}


ARGS = {"hints": {"first": "A number?"}}


def test_row_and_args_reach_the_class_and_its_rewards_come_back() -> None:
    model = GivenAnswers("1", "4")
    reply = play("skyrlGym", Guess, model, build_episode("4", level=3), ARGS)
    assert model.conversations[0] == [*PROMPT, {"role": "user", "content": "A number?"}]
    assert (reply.reward, reply.rewards) == (None, {"c0": 0.0, "c1": 1.0})
    assert reply.info == {"level": 3, "last": "4", "steps": 2, "max_turns": 8}
    assert reply.state == {"end": "done", "turns": 2}


def test_reward_spec_of_the_row_wins() -> None:
    row = build_episode("4", level=1, reward_spec={"ground_truth": "5"}, max_turns=3)
    reply = play("skyrlGym", Guess, GivenAnswers("5"), row, ARGS)
    assert reply.rewards == {"c0": 1.0}


def test_postprocessed_answer_is_what_the_policy_sees() -> None:
    model = GivenAnswers("1! and more", "4")
    play("skyrlGym", Guess, model, build_episode("4", level=1), ARGS)
    assert model.conversations[1][-2] == {"role": "assistant", "content": "1"}


def test_environment_is_closed_after_a_crash() -> None:
    before = Guess.closed
    with pytest.raises(RuntimeError, match="boom"):
        play("skyrlGym", Guess, GivenAnswers("crash"), build_episode("4", level=1), ARGS)
    assert Guess.closed == before + 1


def test_classes_without_the_methods_are_refused() -> None:
    adapter = load_adapter("skyrlGym")
    assert adapter.is_environment("Guess", Guess)
    assert not adapter.is_environment("GivenAnswers", GivenAnswers)
    with pytest.raises(UserError, match="must be a class with init, step, close"):
        environments.adopt(load_adapter("skyrlGym"), GivenAnswers, {})
