"""What a program may return: each form becomes an EpisodeReply, anything else a reason, and nothing a zero."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy
import pytest

from rljob_api.wire.calls import EpisodeReply, SeatReply
from rljob_api.wire.contract import MAX_EPISODE_REPLY_BYTES
from rljob_service.worker.episodes import reply
from rljob_service.worker.episodes.types import Reply, SeatResult


@dataclasses.dataclass
class Result:
    reward: float
    info: dict[str, Any]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (None, EpisodeReply()),
        (0.5, EpisodeReply(reward=0.5)),
        (True, EpisodeReply(reward=1.0)),
        (numpy.float32(0.5), EpisodeReply(reward=0.5)),
        ((1, {"why": {1}}), EpisodeReply(reward=1.0, info={"why": "{1}"})),
        ((None, {"n": 1}), EpisodeReply(info={"n": 1})),
        ([1, None], EpisodeReply(reward=1.0)),
        ({}, EpisodeReply()),
        ({"reward": None}, EpisodeReply()),
        ({"reward": 1, "state": {"n": (1, 2)}}, EpisodeReply(reward=1.0, state={"n": [1, 2]})),
        ({"rewards": {"c-1": 0.5, 1: None}}, EpisodeReply(rewards={"c-1": 0.5, "1": None})),
        ({"chatcmpl-1": 0, "chatcmpl-2": None}, EpisodeReply(rewards={"chatcmpl-1": 0.0, "chatcmpl-2": None})),
        (Result(2, {"x": float("nan")}), EpisodeReply(reward=2.0, info={"x": "nan"})),
        ({"seats": {"a": 1, "b": None}}, EpisodeReply(seats=[SeatReply(seat="a", reward=1), SeatReply(seat="b")])),
        (
            {"reward": 2, "seats": {"a": {"reward": -1, "rewards": {0: 0.5}, "info": {"n": 1}}}},
            EpisodeReply(reward=2, seats=[SeatReply(seat="a", reward=-1, rewards={"0": 0.5}, info={"n": 1})]),
        ),
        (
            Reply(seats=[SeatResult("a", "s-1", 0.5, baseline="episode")]),
            EpisodeReply(seats=[SeatReply(seat="a", session="s-1", reward=0.5, baseline="episode")]),
        ),
        (Reply(1, {"0": 1}, {"a": "\ud83d"}), EpisodeReply(reward=1.0, rewards={"0": 1.0}, state={"a": "?"})),
    ],
)
def test_each_form_of_a_reply_is_read(returned: Any, expected: EpisodeReply) -> None:
    outcome = reply.read(returned, "run")
    assert outcome.reason is None, outcome.message
    assert EpisodeReply.model_validate(outcome.value) == expected


def build_deep() -> dict[str, Any]:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    return deep


@pytest.mark.parametrize(
    ("returned", "reason", "message"),
    [
        ("good", "bad_return", "run: returned str 'good'; expected None, a number"),
        ([1, 2, 3], "bad_return", "returned list [1, 2, 3]"),
        ((1, "info"), "bad_return", "expected None, a number"),
        (float("nan"), "not_finite", "reward is nan"),
        (10**400, "not_finite", "reward is inf"),
        ({"reward": "1"}, "bad_return", "reward is str '1'; expected a number or None"),
        ({"reward": 1, "score": 2}, "bad_return", "unknown key score; its keys may be reward, rewards, state, info"),
        ({"rewards": {"a": "b"}}, "bad_return", "rewards['a'] is str 'b'"),
        ({"rewards": {"a": float("inf")}}, "not_finite", "rewards['a'] is inf"),
        ({"rewards": {1.5: 1}}, "bad_return", "the key float 1.5; its keys are ids of completions"),
        ({"rewards": [1]}, "bad_return", "rewards is list [1]; expected a dict"),
        ({"score": "high"}, "bad_return", "rewards['score'] is str 'high'"),
        ({"state": {"a": {1}}}, "bad_return", "state['a'] is a set"),
        ({"state": {1: 2}}, "bad_return", "keys must be str"),
        ({"info": 3}, "bad_return", "info is int 3; expected a dict"),
        ({"state": build_deep()}, "bad_return", "nested too deeply"),
        ({"info": {"a": "x" * MAX_EPISODE_REPLY_BYTES}}, "bad_return", "the reply has 4096 KiB as JSON, at most 4096"),
    ],
)
def test_another_form_is_a_reason_and_never_a_zero(returned: Any, reason: str, message: str) -> None:
    outcome = reply.read(returned, "run")
    assert (outcome.value, outcome.reason) == (None, reason)
    assert message in outcome.message
