"""The JSON object in a judge's answer, and whether it meets the judge's schema. Pure.

Endpoints may ignore a schema, so it is checked here. Prose around the object is tolerated: the last whole object
counts, as the last match does for regex. Invariant: no answer and no schema can block the server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
from jsonschema.protocols import Validator
from referencing.exceptions import Unresolvable
from referencing.jsonschema import EMPTY_REGISTRY

from rljob_api.manifest.judge_regex import compile_judge_regex

_MAX_SEARCHED_CHARACTERS = 1 << 14
_MAX_CANDIDATES = 256
_FENCE = "```"


class SchemaChecker:
    def __init__(self, schema: dict[str, Any]) -> None:
        """Raises ValueError if it is not a JSON schema, or cannot be checked in bounded time."""
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ValueError(f"is not a JSON schema: {error.message} at {error.json_path}") from None
        for name, value in _find_regexes(schema):
            if name == "patternProperties":
                raise ValueError("has patternProperties, which is not supported; name the properties")
            try:
                compile_judge_regex(value)
            except ValueError as error:
                raise ValueError(f"has a pattern that is not a regular expression of RE2: {error}") from None
        bounded = jsonschema.validators.extend(kind, {"pattern": _check_pattern})
        self._validator: Validator = bounded(schema, registry=EMPTY_REGISTRY)  # a $ref is never downloaded

    def find_problem(self, value: Any, score_path: Sequence[str]) -> str:
        """Return the problem of a value that does not meet the schema, such as `9 is not one of [1, 5] at $.score`;
        empty if it does. A null as the score, or in a list of scores, is an abstention: few schemas allow it."""
        try:
            errors = self._validator.iter_errors(value)
            error = jsonschema.exceptions.best_match(each for each in errors if not _is_abstention(each, score_path))
        except (Unresolvable, RecursionError, OverflowError) as failure:
            return f"the schema cannot be applied ({type(failure).__name__}: {failure})"
        return "" if error is None else f"{error.message} at {error.json_path}"


def read_json(answer: str) -> Any:
    """Return the answer as JSON, or else the last whole object in it. Raises ValueError."""
    try:
        return json.loads(_remove_fence(answer))
    except RecursionError as error:
        raise ValueError(str(error)) from None
    except ValueError:
        found = list(_find_objects(answer[-_MAX_SEARCHED_CHARACTERS:]))
        if not found:
            raise
        return found[-1]


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


def _find_regexes(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keywords with regular expressions. A property with such a name has a schema instead of a text."""
    if isinstance(schema, list):
        for item in schema:
            yield from _find_regexes(item)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            if (name == "pattern" and isinstance(value, str)) or name == "patternProperties":
                yield name, value
            yield from _find_regexes(value)


def _is_abstention(error: jsonschema.ValidationError, score_path: Sequence[str]) -> bool:
    place = [str(part) for part in error.absolute_path]
    return error.instance is None and place[: len(score_path)] == list(score_path)


def _check_pattern(
    validator: Validator, pattern: str, instance: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    if isinstance(instance, str) and not compile_judge_regex(pattern).search(instance):
        yield jsonschema.ValidationError(f"{instance[:80]!r} does not match {pattern!r}")
