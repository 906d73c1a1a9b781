"""TRL's environment classes: tools, reset with the row, the reward of the end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_service.worker import environments
from tests.support.environments import GivenAnswers, build_episode, call, load_adapter, play


class Counter:
    made = 0

    def __init__(self, goal: int = 3) -> None:
        self.goal, self.count, self._hidden, self.lock = goal, 0, "private", object()
        type(self).made += 1

    def reset(self, start: int = 0, **row: Any) -> str | None:
        self.count = start
        return f" Begin with {start}." if start else None

    def add(self, amount: int) -> str:
        """Add to the counter.

        Args:
            amount: How much.
        """
        if amount < 0:
            raise ValueError("negative")
        self.count += amount
        return f"now {self.count}"

    async def show(self) -> int:
        """Show the counter."""
        return self.count

    def get_reward(self) -> float | None:
        return None if self.count < 0 else 1.0 - abs(self.goal - self.count)

    def _reset_all(self) -> None: ...


def test_public_methods_are_tools_and_get_reward_scores_the_end() -> None:
    model = GivenAnswers(call("add", amount=2), call("show"), "done")
    reply = play("trl", Counter, model, build_episode(start=1), {"goal": 4})
    assert [tool["name"] for tool in model.tools] == ["add", "show"]
    assert model.tools[0]["parameters"]["properties"]["amount"] == {"type": "integer", "description": "How much."}
    assert model.conversations[0][0]["content"] == "Play. Begin with 1.", "TRL appends what reset returns as it is"
    assert model.last_seen == {"role": "tool", "tool_call_id": "call-1", "name": "show", "content": "3"}
    assert (reply.reward, reply.rewards) == (0.0, {})
    assert reply.state == {"goal": 4, "count": 3}


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (call("add", amount=-1), "{'error': 'negative'}"),
        (call("run"), "{'error': 'Tool run not found.'}"),
        (call("reset"), "{'error': 'Tool reset not found.'}"),
        (call("_reset_all"), "{'error': 'Tool _reset_all not found.'}"),
    ],
)
def test_failed_call_is_a_message_as_in_trl(answer: dict[str, Any], shown: str) -> None:
    model = GivenAnswers(answer, "done")
    play("trl", Counter, model)
    assert model.last_seen["content"] == shown


def test_reward_of_none_is_not_zero() -> None:
    assert play("trl", Counter, GivenAnswers("done"), build_episode(start=-1)).reward is None


def test_instance_is_reset_and_used_again() -> None:
    loaded = environments.adopt(load_adapter("trl"), Counter, {})
    before = Counter.made
    replies = [play_again(loaded, start) for start in (1, 2)]
    assert [reply.state["count"] for reply in replies] == [1, 2]
    assert Counter.made == before


def play_again(loaded: Any, start: int) -> Any:
    return asyncio.run(loaded.play(build_episode(start=start), GivenAnswers("done")))


def test_column_chooses_among_several_environments() -> None:
    factories = {"three": Counter, "five": lambda: Counter(goal=5)}
    assert play("trl", factories, GivenAnswers("x"), build_episode(environment="five")).state["goal"] == 5
    with pytest.raises(UserError, match="'seven' is not one of three, five"):
        play("trl", factories, GivenAnswers("x"), build_episode(environment="seven"))


def test_class_without_reset_or_types_is_refused() -> None:
    class Untyped:
        def reset(self) -> None: ...
        def add(self, amount): ...  # type: ignore[no-untyped-def]

    with pytest.raises(UserError, match="has no method reset"):
        environments.adopt(load_adapter("trl"), object, {})
    with pytest.raises(UserError, match=r"Untyped: .*amount"):
        environments.adopt(load_adapter("trl"), Untyped, {})
    with pytest.raises(UserError, match="MODULE:NAME"):
        environments.make(load_adapter("trl"), "counter", {})
