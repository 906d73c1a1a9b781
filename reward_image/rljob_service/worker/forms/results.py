"""Reading what a function returned, for each kind of Convention.returns: never a zero by accident."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rljob_service.worker.forms.outcome import (
    BAD_RETURN,
    Outcome,
    invalid,
    read_each,
    read_pred,
    read_score,
)

PRED = "pred"
"""Key of the answer that a function read in the completion, as in verl's validation."""
_EXPECTED = 'a number, a dict or record with "{key}", a tuple that begins with the score, or None'
_EXPECTED_NUMBER = "a number or None for each sample"

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


def read_value(value: Any, key: str = "score") -> Outcome:
    """Read a number, or the `key` of a dict or record, whose other numbers become components."""
    expected = _EXPECTED.format(key=key)
    fields = fields_of(value)
    if fields is not None:
        if key not in fields:
            what = "dict" if isinstance(value, Mapping) else type(value).__name__
            found = ", ".join(map(str, fields)) or "none"
            return invalid(BAD_RETURN, f'the function returned a {what} without "{key}" (its keys: {found})')
        extras = ((name, extra) for name, extra in fields.items() if name != key)
        outcome = read_score(fields[key], extras, expected)
        return outcome._replace(pred=read_pred(fields.get(PRED))) if PRED in fields else outcome
    if isinstance(value, (tuple, list)) and value:
        return read_score(value[0], ((f"value_{n}", each) for n, each in enumerate(value[1:], 2)), expected)
    return read_score(value, (), expected)


def read_list(value: Any, num_samples: int, read: ReadOne) -> list[Outcome]:
    if fields_of(value) is not None:  # a record is not a list of scores
        value = dict(fields_of(value) or {})
    return read_each(value, num_samples, "a list with one result for each sample", read)


def reader_of(returns: str, key: str, extras: Callable[[], Extras] = tuple) -> ReadOne:
    """Return how one sample's part is read. `key` names the score of a record, `extras` are components besides it."""
    if returns == "numbers":
        return lambda value: read_score(value, extras(), _EXPECTED_NUMBER)
    return lambda value: read_value(value, key)
