"""Episodes with several seats: which trajectories train, and which rewards each gets."""

import asyncio

import pytest

from rljob_api.wire.base import InvalidReason
from rljob_inputs.prompts import Prompt
from rljob_trainer.agents.base import EpisodeTask, Recording
from rljob_trainer.agents.hosted import HostedLoop
from rljob_trainer.episodes.types import Turn, empty_segment
from tests.support.hosted_episodes import MESSAGES, FakeHost, make_program


def recording(seat="", session="", *texts, **fields):
    turns = [Turn(text) for text in texts]
    segments = [empty_segment()] if texts else []
    ids = [f"{seat}{session}-{number}" for number in range(len(texts))]
    return Recording(segments, turns, ids, messages=list(MESSAGES), seat=seat, session=session, **fields)


def play(reply, *seats, main=None, agent=None):
    """Return the trajectories of an episode: the gateway has recorded `seats`, and the program replied."""

    async def run(call, episode):
        episode.recording = main or Recording()
        episode.recording.seats = list(seats)
        return reply

    host = FakeHost(run)
    loop = HostedLoop(agent or make_program(seats=["a", "b"]), host, host)
    task = EpisodeTask("g/train/1/5/2", "train", Prompt(7, MESSAGES, [1, 2]), 5, 2, None, needs_reward=True)
    return asyncio.run(loop.run(task)), host


def test_each_seat_is_a_trajectory_with_its_own_reward():
    reply = {
        "seats": [
            {"seat": "a", "reward": 1, "rewards": {"0": 0.5}, "info": {"moves": 2}},
            {"seat": "b", "reward": -1, "baseline": "episode"},
        ]
    }
    found, host = play(reply, recording("a", "", "x", "y"), recording("b", "", "z"))
    assert [(each.seat, each.trajectory, each.sample, each.own_reward) for each in found] == [
        ("a", 0, 2, 1.0),
        ("b", 1, 2, -1.0),
    ]
    assert [[turn.reward for turn in each.turns] for each in found] == [[0.5, None], [None]]
    assert [each.baseline for each in found] == ["group", "episode"]
    assert (found[0].info, found[1].info) == ({"moves": 2}, {})
    assert all(each.failure is None for each in found)
    assert host.calls[0].seats == ["a", "b"]


def test_a_reward_of_the_episode_is_that_of_each_seat_without_its_own():
    found, _ = play(
        {"reward": 2, "seats": [{"seat": "b", "reward": 0}]}, recording("a", "", "x"), recording("b", "", "y")
    )
    assert [each.own_reward for each in found] == [2.0, 0.0]


def test_rewards_of_answers_reach_the_seat_that_gave_them():
    seats = recording("a", "", "x", "y"), recording("b", "", "z")
    found, _ = play({"reward": 0, "rewards": {"a-1": 0.25, "b-0": -0.25}}, *seats)
    assert [[turn.reward for turn in each.turns] for each in found] == [[None, 0.25], [-0.25]]
    for key in ("c-0", "0"):
        found, _ = play({"reward": 0, "rewards": {key: 1}}, *seats)
        assert {each.failure.reason for each in found} == {str(InvalidReason.BAD_RETURN)}, "no seat has this answer"


def test_answers_of_a_player_that_does_not_train_are_dropped():
    found, _ = play(
        {"seats": [{"seat": "a", "reward": 1}]}, recording("a", "", "x"), main=recording("", "", "opponent")
    )
    assert [(each.seat, each.text) for each in found] == [("a", "x")]


def test_a_session_that_the_environment_gave_up_does_not_train():
    reply = {"seats": [{"seat": "a", "session": "2", "reward": 1}, {"seat": "a", "session": "3", "reward": 0}]}
    found, _ = play(reply, *[recording("a", session, session) for session in "123"])
    assert [(each.text, each.own_reward) for each in found] == [("2", 1.0), ("3", 0.0)]


def test_a_seat_without_a_reward_is_invalid_alone():
    found, _ = play({"seats": [{"seat": "a", "reward": 1}]}, recording("a", "", "x"), recording("b", "", "y"))
    assert [each.failure and each.failure.reason for each in found] == [None, str(InvalidReason.ABSTAINED)]


def test_a_seat_that_had_no_move_has_no_trajectory():
    reply = {"seats": [{"seat": "a", "reward": -1}, {"seat": "b", "reward": 1}]}
    found, _ = play(reply, recording("a", "", "x"))
    assert [each.seat for each in found] == ["a"]


def test_a_program_that_never_calls_as_a_seat_learns_which_model_to_name():
    for reply in ({"reward": 1}, {"seats": [{"seat": "a", "reward": 1}]}):
        [found], _ = play(reply, main=recording("", "", "x"))
        assert found.failure.reason == "no_turns"
        assert "such as policy/a" in found.failure.message


def test_a_failed_episode_fails_all_its_trajectories():
    found, _ = play(InvalidReason.EXCEPTION, recording("a", "", "x"), recording("b", "", "y"))
    assert [each.seat for each in found] == ["a", "b"]
    assert {each.failure.reason for each in found} == {str(InvalidReason.EXCEPTION)}


@pytest.mark.parametrize("reason", [InvalidReason.EXCEPTION, InvalidReason.UNREACHABLE])
def test_a_failure_before_the_first_turn_of_a_seat_keeps_its_own_reason(reason):
    """What the runner failed is not what the agent did: an outage must not count as an unsolved prompt."""
    [found], _ = play(reason)
    assert (found.failure.service, found.failure.reason) == ("runner", reason)
    assert "KeyError" in found.failure.message
