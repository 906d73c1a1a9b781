"""The fields that the replies of simulated users and episodes have in common: rewards, state and info.

Invariant: a reply is JSON of a bounded size with finite numbers. What is missing stays None, and never becomes 0.
Standard library only.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from rljob_service.worker.forms.json_values import NotJsonError
from rljob_service.worker.forms.outcome import BAD_RETURN, NOT_FINITE, CallOutcome, describe, failed_call, read_number


class WrongReplyError(Exception):
    def __init__(self, problem: str, reason: str = BAD_RETURN) -> None:
        super().__init__(problem)
        self.reason = reason


def read_reward(value: Any, place: str) -> float | None:
    if value is None:
        return None
    number = read_number(value)
    if number is None:
        raise WrongReplyError(f"{place} is {describe(value)}; expected a number or None")
    if not math.isfinite(number):
        raise WrongReplyError(f"{place} is {number}", NOT_FINITE)
    return number


def read_mapping(value: Any, place: str) -> Mapping[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise WrongReplyError(f"{place} is {describe(value)}; expected a dict")
    return value


def build_reply(build: Callable[[], dict[str, Any]], name: str, max_bytes: int) -> CallOutcome:
    """Return the reply that `build` returns, or the reason for which there is none. `name`: of what replied."""
    try:
        reply = build()
        num_bytes = len(json.dumps(reply))
    except WrongReplyError as error:
        return failed_call(error.reason, f"{name}: {error}")
    except NotJsonError as error:
        return failed_call(BAD_RETURN, f"{name}: {error}; the state travels as JSON")
    except RecursionError:
        return failed_call(BAD_RETURN, f"{name}: state or info is nested too deeply")
    if num_bytes > max_bytes:
        problem = f"the reply has {num_bytes >> 10} KiB as JSON, at most {max_bytes >> 10} KiB; shorten state and info"
        return failed_call(BAD_RETURN, f"{name}: {problem}")
    return CallOutcome(reply)
