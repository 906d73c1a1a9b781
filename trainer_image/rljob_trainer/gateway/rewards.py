"""POST /v1/rewards: the body, and the rewards of an attempt. Pure.

{"reward": 1.0}                           of the episode
{"reward": 0.5, "completion": "ID"}       of the answer with this id
{"reward": null, "turn": 2}               of the third answer: not scored, which is not 0
{"reward": -1.0, "seat": "player1"}       of a seat; with the others, of its answer
{"event_type": "reward", "data": {"value": 1.0}}     of the episode, as Agent Lightning's agents send it
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rljob_trainer.gateway.types import RequestError

_FIELDS = ("reward", "completion", "turn", "seat")


@dataclass(frozen=True)
class PostedReward:
    """For the episode if neither completion nor turn is given."""

    reward: float | None
    completion: str | None = None
    turn: int | None = None
    seat: str = ""
    """Empty: of an episode with one player."""


def read_posted(body: Mapping[str, Any]) -> PostedReward | None:
    """Return the reward; None for an event of Agent Lightning that is none. Raise RequestError for anything else."""
    if "event_type" not in body:
        return read_reward(body)
    if body["event_type"] != "reward":
        return None
    data = body.get("data")
    if not isinstance(data, dict) or "value" not in data:
        raise _refuse("data.value: required: the reward of the episode, a number or null")
    return read_reward({"reward": data["value"]})


def read_reward(body: Mapping[str, Any]) -> PostedReward:
    """Raise RequestError for what is not a reward."""
    unknown = sorted(set(body) - set(_FIELDS))
    if unknown:
        raise _refuse(f"{unknown[0]}: unknown field; the fields are {', '.join(_FIELDS)}")
    if "reward" not in body:
        raise _refuse("reward: required: a number, or null for not scored")
    reward, completion, turn, seat = (body.get(name) for name in _FIELDS)
    if reward is not None and (not _is_number(reward) or not math.isfinite(reward)):
        raise _refuse(f"reward: must be a finite number or null, got {reward!r:.80}")
    if completion is not None and turn is not None:
        raise _refuse("completion, turn: must not both be set; remove one of them")
    if completion is not None and not isinstance(completion, str):
        raise _refuse(f"completion: must be the id of an answer, got {completion!r:.80}")
    if turn is not None and (not isinstance(turn, int) or isinstance(turn, bool)):
        raise _refuse(f"turn: must be the number of an answer, 0 for the first, got {turn!r:.80}")
    if seat is not None and not isinstance(seat, str):
        raise _refuse(f"seat: must be the name of a seat, got {seat!r:.80}")
    return PostedReward(None if reward is None else float(reward), completion, turn, seat or "")


def find_answer(posted: PostedReward, completion_ids: Sequence[str]) -> str | None:
    """Return the id of the rewarded answer; None: the episode. Raise RequestError if there is no such answer."""
    if posted.turn is not None:
        if not 0 <= posted.turn < len(completion_ids):
            raise _refuse(f"turn: must be less than {len(completion_ids)}, the number of answers, got {posted.turn}")
        return completion_ids[posted.turn]
    if posted.completion is not None and posted.completion not in completion_ids:
        raise _refuse(f"completion: no answer of this episode has the id {posted.completion:.80}")
    return posted.completion


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse(message: str) -> RequestError:
    return RequestError(400, "invalid_value", message)
