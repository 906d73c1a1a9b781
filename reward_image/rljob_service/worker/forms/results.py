"""Reading what a function returned, for each kind of Convention.returns: never a zero by accident."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rljob_service.worker.forms.outcome import (
    BAD_RETURN,
    Outcome,
    describe,
    invalid,
    read_each,
    read_number,
    read_pred,
    read_score,
)

PRED = "pred"
"""Key of the answer that a function read in the completion, as in verl's validation."""
_EXPECTED = 'a number, a dict or record with "{key}", a tuple that begins with the score, or None'
_EXPECTED_NUMBER = "a number or None for each sample"
_EXPECTED_SUM = "a number, a dict of numbers, or None"

Extras = Iterable[tuple[Any, Any]]
"""Names and values of further components."""
ReadOne = Callable[[Any], Outcome]


def fields_of(value: Any) -> Mapping[Any, Any] | None:
    """Return the named fields of a dict, NamedTuple, dataclass or pydantic model; None for anything else."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: getattr(value, name) for name in value._fields}
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    fields = getattr(type(value), "model_fields", None)
    return {name: getattr(value, name) for name in fields} if isinstance(fields, Mapping) else None


def read_value(value: Any, keys: tuple[str, ...] = ("score",)) -> Outcome:
    """Read a number, or the first of `keys` that a dict or record has; its other numbers become components."""
    expected = _EXPECTED.format(key=keys[0])
    fields = fields_of(value)
    if fields is not None:
        key = next((key for key in keys if key in fields), None)
        if key is None:
            what = "dict" if isinstance(value, Mapping) else type(value).__name__
            found = ", ".join(map(str, fields)) or "none"
            return invalid(BAD_RETURN, f'the function returned a {what} without "{keys[0]}" (its keys: {found})')
        extras = ((name, extra) for name, extra in fields.items() if name != key)
        outcome = read_score(fields[key], extras, expected)
        return outcome._replace(pred=read_pred(fields.get(PRED))) if PRED in fields else outcome
    if isinstance(value, (tuple, list)) and value:
        return read_score(value[0], (), expected)
    return read_score(value, (), expected)


def read_sum(value: Any) -> Outcome:
    """Read a number, or the sum of a dict of numbers, which become components."""
    fields = fields_of(value)
    if fields is None:
        return read_score(value, (), _EXPECTED_SUM)
    numbers = [read_number(each) for each in fields.values()]
    known = [number for number in numbers if number is not None]
    if not numbers or len(known) < len(numbers):
        return invalid(BAD_RETURN, f"the function returned {describe(value)}; expected {_EXPECTED_SUM}")
    return read_score(sum(known), ((name, each) for name, each in fields.items() if name != "score"), _EXPECTED_SUM)


def read_list(value: Any, num_samples: int, read: ReadOne) -> list[Outcome]:
    if fields_of(value) is not None:  # a record is not a list of scores
        value = dict(fields_of(value) or {})
    return read_each(value, num_samples, "a list with one result for each sample", read)


def reader_of(returns: str, keys: tuple[str, ...], extras: Callable[[], Extras] = tuple) -> ReadOne:
    """Return how one sample's part is read. `keys` name the score of a record, `extras` are components besides it."""
    if returns == "numbers":
        return lambda value: read_score(value, extras(), _EXPECTED_NUMBER)
    return read_sum if returns == "sum" else lambda value: read_value(value, keys)
