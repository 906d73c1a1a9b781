"""From the body of a request to a sample, a group or a call.

Separates two kinds of errors: a body that breaks the protocol (422: the client is wrong, whatever it scores), and one
whose data cannot be read, such as half a surrogate pair or deep nesting (an invalid result: the next sample is fine).
"""

import json
from typing import NamedTuple

from pydantic import ValidationError

from rljob_api.wire.base import Lane
from rljob_api.wire.scores import GroupRequest
from rljob_service.kinds import Request, RequestType, describe_errors

_MAX_ID_CHARACTERS = 256


class MalformedError(Exception):
    """The body breaks the protocol."""


class Unscorable(NamedTuple):
    """A well-formed request with data that cannot be read."""

    request_id: str
    lane: Lane
    sample_ids: list[str]
    kind: RequestType
    problem: str


def parse(kind: RequestType, body: bytes) -> Request | Unscorable:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problem = describe_errors(error)
        if error.errors(include_url=False, include_input=False)[0]["type"] != "json_invalid":
            raise MalformedError(problem) from None
    unscorable = _read_ids(kind, body, problem)
    if unscorable is None:
        raise MalformedError(problem)
    return unscorable


def _read_ids(kind: RequestType, body: bytes, problem: str) -> Unscorable | None:
    """Return the ids of what Python's parser, which is more lenient, can read; None if it cannot."""
    try:
        request = json.loads(body)
        sample_ids = [each["id"] for each in request["samples"]] if kind is GroupRequest else [request["id"]]
        request_id, lane = request["id"], request.get("lane", "train")
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
    if not all(_is_id(each) for each in (request_id, *sample_ids)) or lane not in ("train", "eval"):
        return None
    return Unscorable(request_id, lane, sample_ids, kind, problem)


def _is_id(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_ID_CHARACTERS and value.isprintable()
