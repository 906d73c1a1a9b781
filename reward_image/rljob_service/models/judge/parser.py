"""Read the score from a judge's answer, and combine votes into one score. Pure.

Endpoints may ignore a schema, so it is checked here. Prose around a JSON object is tolerated: the last object that is a
verdict counts, as the last match does for regex. Invariants: an unreadable answer is invalid, with its beginning in the
message, and never counts as zero; no answer and no schema can block the server.
"""

import json
import math
import operator
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jsonschema_rs

from rljob_api.errors import UserError
from rljob_api.manifest.services.models import JudgeParser, JudgeReward, compile_judge_regex, find_judge_problems
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.contract import MAX_COMPONENTS
from rljob_service.models.execution import NoScoreError, Score
from rljob_service.models.texts import describe, drop_reasoning
from rljob_service.worker.forms.outcome import read_components

T = TypeVar("T")

_MAX_READ_CHARACTERS = 1 << 14
"""Regular expressions are applied to the end of an answer only: one match is linear in it, but all may be quadratic."""
_MAX_SEARCHED_CHARACTERS = 1 << 14
"""Objects are searched in the end of an answer only."""
_MAX_CANDIDATES = 256
_MAX_MESSAGE_LENGTH = 300
_FENCE = "```"
_SCORE_GROUP = "score"
_SCHEMA_NAME = "verdict"


class Parser:
    def __init__(self, judge: JudgeReward) -> None:
        """Raises UserError if the parser cannot read any answer."""
        problems = [f"judge.{field} {problem}" for field, problem in find_judge_problems(judge)]
        if problems:
            raise UserError("; ".join(problems))
        self._spec: JudgeParser = judge.parser
        self._scores = {word.strip().casefold(): score for word, score in judge.parser.scores.items()}
        self._regex = compile_judge_regex(judge.parser.regex) if judge.parser.regex else None
        self._path = judge.parser.score_path.split(".")
        self._schema: SchemaChecker | None = None
        if judge.parser.json_schema is not None:
            try:
                self._schema = SchemaChecker(judge.parser.json_schema)
            except ValueError as error:
                raise UserError(f"judge.parser.jsonSchema {error}") from None

    @property
    def response_format(self) -> dict[str, Any] | None:
        """Field of the request that asks for the schema; None without a schema, or if it is not sent."""
        schema, form = self._spec.json_schema, self._spec.response_format
        if schema is None or form == "none":
            return None
        if form == "json_object":
            return {"type": "json_object"}
        strict = {"strict": True} if is_strict(schema) else {}
        return {"type": "json_schema", "json_schema": {"name": _SCHEMA_NAME, "schema": schema, **strict}}

    def read(self, answer: str) -> Score:
        """Return the score of an answer. Raises NoScoreError."""
        if self._regex:
            return self._read_text(self._regex, _drop_reasoning(answer))
        value, components = self._find(answer)
        return Score(self.to_number(value, answer), components)

    def _read_text(self, regex: Any, answer: str) -> Score:
        # Earlier matches belong to the reasoning.
        matches = deque(regex.finditer(answer.rstrip()[-_MAX_READ_CHARACTERS:]), maxlen=1)
        if not matches:
            raise unreadable("the judge's answer does not match judge.parser.regex", answer)
        [last] = matches
        word = last[_SCORE_GROUP] if _SCORE_GROUP in regex.groupindex else last[1]
        return Score(self.to_number(word, answer))

    def read_list(self, answer: str) -> tuple[list[Any], dict[str, float]]:
        """Return the elements of the list at scorePath, and the components on its level."""
        value, components = self._find(answer)
        if not isinstance(value, list):
            raise unreadable(f"the judge's {self._spec.score_path} is not a list", answer)
        return value, components

    def _find(self, answer: str) -> tuple[Any, dict[str, float]]:
        """Return the value at scorePath, and the numbers on its level."""
        try:
            whole = read_json(_drop_reasoning(answer), lambda value: not self._find_problem(value))
        except ValueError as error:
            raise unreadable(f"the judge's answer is not JSON ({error})", answer) from None
        if problem := self._find_problem(whole):
            raise unreadable(f"the judge's answer {problem}", answer)
        parent, value = self._follow(whole)
        siblings = parent if isinstance(parent, dict) else {}
        components = read_components((name, other) for name, other in siblings.items() if name != self._path[-1])
        if len(components) > MAX_COMPONENTS:
            raise unreadable(f"the judge's answer has more than {MAX_COMPONENTS} components")
        return value, components

    def _find_problem(self, value: Any) -> str:
        """Return why a value is no verdict; empty if it is one."""
        try:
            self._follow(value)
        except (LookupError, TypeError, ValueError):
            return f"has no {self._spec.score_path}"
        problem = self._schema.find_problem(value, self._path) if self._schema else ""
        return problem and f"does not meet judge.parser.jsonSchema: {problem}"

    def _follow(self, value: Any) -> tuple[Any, Any]:
        """Return what has the value at scorePath, and that value."""
        parent: Any = None
        for part in self._path:
            parent, value = value, value[int(part)] if isinstance(value, list) else value[part]
        return parent, value

    def to_number(self, value: Any, answer: str) -> float:
        """Convert a number, or a word of judge.parser.scores. Raises NoScoreError for other values."""
        if value is None:
            raise NoScoreError(InvalidReason.ABSTAINED, f"the judge's score is null: {describe(answer)}")
        word = str(value).strip().casefold()
        if word in self._scores:
            return self._scores[word]
        try:
            number = float(value.strip() if isinstance(value, str) else value)
        except (TypeError, ValueError, OverflowError):
            known = f" (judge.parser.scores has {', '.join(self._spec.scores)})" if self._scores else ""
            raise unreadable(f"the judge's score is {describe(value)}, which is not a number{known}") from None
        if not math.isfinite(number):
            raise NoScoreError(InvalidReason.NOT_FINITE, f"the judge's score is {number}: {describe(answer)}")
        for limit, name, is_within in (
            (self._spec.min_score, "minScore", operator.ge),
            (self._spec.max_score, "maxScore", operator.le),
        ):
            if limit is not None and not is_within(number, limit):
                raise unreadable(f"the judge's score is {number:g}; judge.parser.{name} is {limit:g}", answer)
        return number


def _drop_reasoning(answer: str) -> str:
    """Return the answer without its reasoning. Raises NoScoreError if nothing is left."""
    rest = drop_reasoning(answer)
    if answer.strip() and not rest:
        raise NoScoreError(InvalidReason.EMPTY, f"the judge's answer has its reasoning alone: {describe(answer)}")
    return rest


def combine(votes: Sequence[Score | NoScoreError], aggregate: str) -> Score:
    """Combine votes into one score. Raises NoScoreError unless more than half are readable."""
    scores = require_majority(votes, "votes")
    if len(votes) == 1:
        return scores[0]
    counts = Counter(score.value for score in scores)
    top_count = max(counts.values())
    value = mean_value(scores)
    if aggregate == "majority":
        value = mean_value([Score(winner) for winner, count in counts.items() if count == top_count])
    components = mean_components(scores) | {"votes": float(len(scores)), "agreement": top_count / len(scores)}
    return Score(value, components)


def require_majority(answers: Sequence[Score | NoScoreError], what: str) -> list[Score]:
    """Return the answers that are scores. Raises NoScoreError unless they are more than half."""
    scores = [answer for answer in answers if isinstance(answer, Score)]
    failed = [answer for answer in answers if isinstance(answer, NoScoreError)]
    failed.sort(key=lambda error: error.reason is not InvalidReason.UNREACHABLE)  # clients wait for an endpoint
    if 2 * len(scores) > len(answers):
        return scores
    if len(answers) == 1:
        raise failed[0]
    raise NoScoreError(failed[0].reason, f"{len(failed)} of {len(answers)} {what} failed, the first: {failed[0]}")


def mean_value(scores: Sequence[Score]) -> float:
    return math.fsum(score.value for score in scores) / len(scores)


def mean_components(scores: Sequence[Score]) -> dict[str, float]:
    """Return each component's mean over the scores that have it."""
    names = {name: None for score in scores for name in score.components}
    found = {name: [score.components[name] for score in scores if name in score.components] for name in names}
    return {name: math.fsum(values) / len(values) for name, values in found.items()}


def is_strict(schema: Any) -> bool:
    """Return whether a schema meets OpenAI's conditions for `strict`: closed objects, all properties required."""
    if isinstance(schema, list):
        return all(map(is_strict, schema))
    if not isinstance(schema, dict):
        return True
    properties = schema.get("properties")
    if schema.get("type") == "object" or isinstance(properties, dict):
        if schema.get("additionalProperties") is not False:
            return False
        if set(schema.get("required") or ()) != set(properties or ()):
            return False
    return all(map(is_strict, schema.values()))


def value_or_error(function: Callable[..., T], *arguments: Any) -> T | NoScoreError:
    """Return the error as a value."""
    try:
        return function(*arguments)
    except NoScoreError as error:
        return error


def unreadable(message: str, answer: str | None = None) -> NoScoreError:
    """`answer`: None, if its beginning says nothing about the problem."""
    return NoScoreError(InvalidReason.BAD_RETURN, message if answer is None else f"{message}: {describe(answer)}")


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
