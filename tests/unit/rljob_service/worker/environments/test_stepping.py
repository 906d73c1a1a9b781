"""The loop of stepped environments: rewards of their answers, limits, and what the policy sees."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rljob_service.worker.environments.base import RefusedError
from rljob_service.worker.environments.stepping import Step, append_text, play_steps, seed_of
from tests.support.environments import PROMPT, GivenAnswers, build_episode


def run(model: GivenAnswers, steps: list[Step], max_turns: int = 8) -> Any:
    remaining = iter(steps)
    return asyncio.run(play_steps(build_episode(max_turns=max_turns), model, PROMPT, lambda answer: next(remaining)))


def test_rewards_belong_to_their_answers_and_none_is_not_zero() -> None:
    played = run(GivenAnswers("a", "b", "c"), [Step(reward=None), Step(reward=0), Step(reward=1.5, done=True)])
    assert played.rewards == {"c1": 0, "c2": 1.5}
    assert (played.num_turns, played.end) == (3, "done")


def test_policy_sees_its_answers_and_what_follows() -> None:
    model = GivenAnswers("a", "b")
    run(model, [Step([{"role": "user", "content": "next"}]), Step(done=True)])
    answer = {"role": "assistant", "content": "a"}
    assert model.conversations == [PROMPT, [*PROMPT, answer, {"role": "user", "content": "next"}]]


def test_environment_may_replace_an_answer() -> None:
    model = GivenAnswers("a and more", "b")
    run(model, [Step(answer={"role": "assistant", "content": "a"}), Step(done=True)])
    assert model.last_seen == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize("code", ["turn_limit", "context_length_exceeded"])
def test_limit_ends_the_episode_with_the_rewards_so_far(code: str) -> None:
    played = run(GivenAnswers("a", code=code), [Step(reward=0.5)])
    assert (played.rewards, played.end) == ({"c0": 0.5}, code)


def test_other_refusals_fail_the_episode() -> None:
    with pytest.raises(RefusedError, match="no turns left"):
        run(GivenAnswers(code="gone"), [])


def test_no_answer_is_requested_after_the_last_turn() -> None:
    model = GivenAnswers("a", "b", "c")
    assert run(model, [Step(reward=1), Step(reward=1), Step()], max_turns=2).end == "max_turns"
    assert len(model.conversations) == 2


def test_text_is_appended_to_the_last_message_of_the_user() -> None:
    assert append_text(PROMPT, "Board") == [{"role": "user", "content": "Play.\n\nBoard"}]
    assert append_text([{"role": "system", "content": "s"}], "Board")[1] == {"role": "user", "content": "Board"}
    parts = [{"role": "user", "content": [{"type": "text", "text": "Play."}]}]
    assert append_text(parts, "Board")[0]["content"][1] == {"type": "text", "text": "Board"}
    assert parts[0]["content"] == [{"type": "text", "text": "Play."}], "the row is not changed"


def test_seed_is_the_same_for_all_episodes_of_a_row() -> None:
    assert seed_of(build_episode(index=5)) == 5
    assert seed_of(build_episode(index=5, seed=9)) == 9
    assert seed_of(build_episode(index="a")) == seed_of(build_episode(index="a")) != seed_of(build_episode(index="b"))
