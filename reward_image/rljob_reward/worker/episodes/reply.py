"""Reading what a program or an environment returned: the fields of an EpisodeReply, or a reason.

Invariant: a reply is JSON of a bounded size with finite numbers. What is missing stays None, and never becomes 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from rljob_api.wire.contract import MAX_EPISODE_REPLY_BYTES
from rljob_reward.worker.adapters.json_values import NotJsonError, to_json, to_log
from rljob_reward.worker.adapters.outcome import (
    BAD_RETURN,
    NOT_FINITE,
    CallOutcome,
    describe,
    encodable,
    failed_call,
    read_number,
)
from rljob_reward.worker.adapters.results import fields_of

KEYS: Final = ("reward", "rewards", "state", "info")
_EXPECTED: Final = (
    "None, a number, (number or None, info), a dict with reward, rewards, state and info, or the rewards of single "
    "answers by the id of their completion"
)


class _WrongReplyError(Exception):
    def __init__(self, problem: str, reason: str = BAD_RETURN) -> None:
        super().__init__(problem)
        self.reason = reason


def read(value: Any, name: str) -> CallOutcome:
    """Return an EpisodeReply of what `name` returned."""
    try:
        fields = _find_fields(value)
        reply = {
            "reward": _read_reward(fields.get("reward"), "reward"),
            "rewards": _read_rewards(fields.get("rewards")),
            "state": to_json(_read_mapping(fields.get("state"), "state"), "state"),
            "info": to_log(_read_mapping(fields.get("info"), "info")),
        }
        num_bytes = len(json.dumps(reply))
    except _WrongReplyError as error:
        return failed_call(error.reason, f"{name}: {error}")
    except NotJsonError as error:
        return failed_call(BAD_RETURN, f"{name}: {error}; the state travels to the rewards as JSON")
    except RecursionError:
        return failed_call(BAD_RETURN, f"{name}: state or info is nested too deeply")
    if num_bytes > MAX_EPISODE_REPLY_BYTES:
        limit = MAX_EPISODE_REPLY_BYTES >> 10
        problem = f"the reply has {num_bytes >> 10} KiB as JSON, at most {limit} KiB; shorten state and info"
        return failed_call(BAD_RETURN, f"{name}: {problem}")
    return CallOutcome(reply)


def _find_fields(value: Any) -> Mapping[Any, Any]:
    """Return the parts of a reply by name."""
    if value is None:
        return {}
    fields = fields_of(value)
    if fields is not None:
        if not any(key in fields for key in KEYS):
            return {"rewards": fields}  # AReaL's form
        unknown = [str(key) for key in fields if key not in KEYS]
        if unknown:
            raise _WrongReplyError(f"the reply has the unknown key {unknown[0]}; its keys may be {', '.join(KEYS)}")
        return fields
    if isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[1], Mapping | None):
        return {"reward": value[0], "info": value[1]}
    if read_number(value) is None:
        raise _WrongReplyError(f"returned {describe(value)}; expected {_EXPECTED}")
    return {"reward": value}


def _read_reward(value: Any, place: str) -> float | None:
    if value is None:
        return None
    number = read_number(value)
    if number is None:
        raise _WrongReplyError(f"{place} is {describe(value)}; expected a number or None")
    if not math.isfinite(number):
        raise _WrongReplyError(f"{place} is {number}", NOT_FINITE)
    return number


def _read_rewards(value: Any) -> dict[str, float | None]:
    rewards = _read_mapping(value, "rewards")
    wrong = next((key for key in rewards if not isinstance(key, str | int)), None)
    if wrong is not None:
        what = "keys are ids of completions or numbers of turns"
        raise _WrongReplyError(f"rewards has the key {describe(wrong)}; its {what}")
    return {encodable(str(key)): _read_reward(each, f"rewards[{key!r}]") for key, each in rewards.items()}


def _read_mapping(value: Any, place: str) -> Mapping[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _WrongReplyError(f"{place} is {describe(value)}; expected a dict")
    return value
