"""Reading what a function returned, for each kind of the conventions' table: never a zero by accident."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from rljob_reward.worker.adapters import outcome
from rljob_reward.worker.adapters.outcome import (
    BAD_RETURN,
    Outcome,
    describe,
    invalid,
    read_each,
    read_number,
    read_score,
)

_EXPECTED = 'a number, a dict or record with "{key}", a tuple that begins with the score, or None'
_EXPECTED_NUMBER = "a number or None for each sample"
_EXPECTED_SUM = "a number, a dict of numbers, or None"
_EXPECTED_REWARDS = 'a dict with "rewards", or the rewards as a tensor or list, one for each query'

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
        return read_score(fields[key], ((name, extra) for name, extra in fields.items() if name != key), expected)
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


def read_rewards(value: Any, num_samples: int) -> list[Outcome]:
    """Read OpenRLHF's result. A single sample's reward may be a number."""
    rewards = value
    extras: dict[Any, Any] = {}
    if isinstance(value, dict):
        if "rewards" not in value:
            keys = ", ".join(map(str, value)) or "none"
            return [invalid(BAD_RETURN, f'the function returned a dict without "rewards" (its keys: {keys})')]
        logs = value["extra_logs"] if isinstance(value.get("extra_logs"), dict) else {}
        extras = logs | {key: value[key] for key in ("scores",) if key in value}
        rewards = value["rewards"]
    scores = _elements(rewards, num_samples)
    if scores is None:
        got = f"{describe(rewards)} for {num_samples} {'query' if num_samples == 1 else 'queries'}"
        return [invalid(BAD_RETURN, f"the function returned {got}; expected {_EXPECTED_REWARDS}")]
    columns = {key: _elements(extra, num_samples) or [extra] * num_samples for key, extra in extras.items()}
    return [
        read_score(score, ((key, column[i]) for key, column in columns.items()), _EXPECTED_REWARDS)
        for i, score in enumerate(scores)
    ]


def _elements(value: Any, num_samples: int) -> list[Any] | None:
    """Return one element per sample: also of None, and of the number that a single sample may have."""
    if value is None or (num_samples == 1 and read_number(value) is not None):
        return [value] * num_samples
    return outcome.elements_of(value, num_samples)


def read_list(value: Any, num_samples: int, read: ReadOne) -> list[Outcome]:
    if fields_of(value) is not None:  # a record is not a list of scores
        value = dict(fields_of(value) or {})
    return read_each(value, num_samples, "a list with one result for each sample", read)


KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "score": ("score",),
    "reward": ("reward", "score"),
    "overall": ("overall", "score"),
}
"""The named results of the table that are read by key."""


def reader_of(returns: str, extras: Callable[[], Extras] = tuple, key: str | None = None) -> ReadOne:
    """Return how one sample's part is read. `extras` are components besides it, `key` replaces the default one."""
    if returns == "numbers":
        return lambda value: read_score(value, extras(), _EXPECTED_NUMBER)
    if returns == "sum":
        return read_sum
    keys = (key,) if key else KEYS[returns]
    return lambda value: read_value(value, keys)
