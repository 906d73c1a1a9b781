"""The JSON object in a judge's answer, and whether it meets the judge's schema. Pure.

Endpoints may ignore a schema, so it is checked here. Prose around the object is tolerated: the last object that is a
verdict counts, as the last match does for regex. Invariant: no answer and no schema can block the server.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jsonschema_rs

_MAX_SEARCHED_CHARACTERS = 1 << 14
_MAX_CANDIDATES = 256
_MAX_MESSAGE_LENGTH = 300
_FENCE = "```"


class SchemaChecker:
    def __init__(self, schema: dict[str, Any]) -> None:
        """Raises ValueError if it is not a JSON schema, or has patterns that cannot be searched in linear time."""
        try:
            self._validator: Any = jsonschema_rs.validator_for(
                schema, pattern_options=jsonschema_rs.RegexOptions(), retriever=_refuse_reference
            )
        except jsonschema_rs.ValidationError as error:
            raise ValueError(f"is not a JSON schema: {_describe(error)}") from None

    def find_problem(self, value: Any, score_path: Sequence[str]) -> str:
        """Return the problem of a value that does not meet the schema, such as `9 is not one of 1 or 5 at $.score`;
        empty if it does. A null as the score, or in a list of scores, is an abstention: few schemas allow it."""
        errors = self._validator.iter_errors(value)
        return next((_describe(each) for each in errors if not _is_abstention(each, score_path)), "")


def read_json(answer: str, is_verdict: Callable[[Any], bool]) -> Any:
    """Return the answer as JSON, or else the last verdict in it, or without one the last whole object. Raises
    ValueError."""
    try:
        return json.loads(_remove_fence(answer))
    except RecursionError as error:
        raise ValueError(str(error)) from None
    except ValueError:
        found = list(_find_objects(answer[-_MAX_SEARCHED_CHARACTERS:]))
        if not found:
            raise
        return next(filter(is_verdict, reversed(found)), found[-1])


def _find_objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the objects in a text, without those inside of others. The search ends after many braces without one."""
    decoder, place = json.JSONDecoder(), text.find("{")
    for _ in range(_MAX_CANDIDATES):
        if place < 0:
            return
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            place = text.find("{", place + 1)
            continue
        yield value
        place = text.find("{", end)


def _remove_fence(answer: str) -> str:
    """Return what a Markdown block contains, if the answer is one."""
    text = answer.strip()
    first, _, rest = text.partition("\n")
    is_fenced = first.strip() in (_FENCE, f"{_FENCE}json") and rest.endswith(_FENCE)
    return rest.removesuffix(_FENCE) if is_fenced else text


def _refuse_reference(uri: str) -> Any:
    raise ValueError(f"a reference to another place, {uri}, is not supported")


def _describe(error: jsonschema_rs.ValidationError) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.instance_path)
    return f"{error.message[:_MAX_MESSAGE_LENGTH]} at ${path}"


def _is_abstention(error: jsonschema_rs.ValidationError, score_path: Sequence[str]) -> bool:
    place = [str(part) for part in error.instance_path]
    return error.instance is None and place[: len(score_path)] == list(score_path)
