"""The body of POST /v1/rewards."""

import pytest

from rljob_trainer.gateway.rewards import PostedReward, find_answer, read_posted, read_reward
from rljob_trainer.gateway.types import RequestError


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"reward": 1}, PostedReward(1.0)),
        ({"reward": None}, PostedReward(None)),
        ({"reward": -0.5, "completion": "a"}, PostedReward(-0.5, completion="a")),
        ({"reward": None, "turn": 1}, PostedReward(None, turn=1)),
        ({"reward": 0, "turn": None, "completion": None}, PostedReward(0.0)),
    ],
)
def test_rewards_are_numbers_or_null(body, expected):
    assert read_reward(body) == expected


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "reward: required"),
        ({"value": 1}, "value: unknown field"),
        ({"reward": True}, "finite number"),
        ({"reward": "1"}, "finite number"),
        ({"reward": float("nan")}, "finite number"),
        ({"reward": float("inf")}, "finite number"),
        ({"reward": 1, "turn": 1, "completion": "a"}, "must not both be set"),
        ({"reward": 1, "turn": True}, "turn: must be"),
        ({"reward": 1, "turn": "0"}, "turn: must be"),
        ({"reward": 1, "completion": 3}, "completion: must be"),
    ],
)
def test_what_is_not_a_reward_is_refused(body, problem):
    with pytest.raises(RequestError, match=problem) as caught:
        read_reward(body)
    assert caught.value.status == 400


def test_an_answer_is_found_by_its_number_or_id():
    ids = ["a", "b"]

    assert find_answer(PostedReward(1.0), ids) is None
    assert find_answer(PostedReward(1.0, turn=1), ids) == "b"
    assert find_answer(PostedReward(1.0, completion="a"), ids) == "a"


@pytest.mark.parametrize("posted", [PostedReward(1, turn=2), PostedReward(1, turn=-1), PostedReward(1, completion="c")])
def test_rewards_of_unknown_answers_are_refused(posted):
    with pytest.raises(RequestError, match=r"turn: must be less than 2|no answer of this episode"):
        find_answer(posted, ["a", "b"])


def test_events_of_agent_lightning_are_rewards_of_the_episode_or_nothing():
    assert read_posted({"event_type": "reward", "data": {"value": 0.5}}) == PostedReward(0.5)
    assert read_posted({"event_type": "reward", "data": {"value": 1, "source": "grader"}}) == PostedReward(1.0)
    assert read_posted({"event_type": "trace", "data": {"steps": 3}}) is None
    assert read_posted({"reward": 1, "turn": 0}) == PostedReward(1.0, turn=0)


@pytest.mark.parametrize(
    ("data", "problem"),
    [({}, "data.value: required"), (1.0, "data.value: required"), ({"value": "1"}, "finite number")],
)
def test_an_event_without_a_number_is_refused(data, problem):
    with pytest.raises(RequestError, match=problem):
        read_posted({"event_type": "reward", "data": data})
