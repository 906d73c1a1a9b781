"""What user code returned, as JSON: strictly for values that come back, loosely for the log, and as text for a model.

NumPy and torch scalars are numbers. Lone surrogates, which UTF-8 cannot encode, are replaced. Standard library only.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from rljob_service.worker.forms.outcome import describe, encodable
from rljob_service.worker.forms.results import fields_of


class NotJsonError(Exception):
    """A value has no JSON form; the text names its place."""


def to_json(value: Any, place: str) -> Any:
    """Return a copy that is JSON, with tuples as lists. Raise NotJsonError for anything that would not return equal."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        raise NotJsonError(f"{place} is {value}, which JSON does not have")
    if isinstance(value, Mapping):
        wrong = next((key for key in value if not isinstance(key, str)), None)
        if wrong is not None:
            raise NotJsonError(f"{place} has the key {describe(wrong)}; keys must be str")
        return {encodable(key): to_json(each, f"{place}[{key!r}]") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(each, f"{place}[{index}]") for index, each in enumerate(value)]
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 and hasattr(value, "__float__"):
        return to_json(value.item(), place)
    raise NotJsonError(f"{place} is a {type(value).__name__}, which JSON does not have")


def to_log(value: Any) -> Any:
    """Return a copy that is JSON, with str() of what JSON does not have."""
    if isinstance(value, Mapping):
        return {encodable(str(key)): to_log(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_log(each) for each in value]
    try:
        return to_json(value, "")
    except NotJsonError:
        return encodable(str(value))


def to_text(value: Any, max_characters: int) -> str:
    """Return a str as it is, anything else as JSON, with str() of what JSON does not have; at most so many characters.

    A value that cannot be JSON at all, such as a circle, is its str().
    """
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False, default=_convert)
        except (TypeError, ValueError, RecursionError):
            value = str(value)
    return encodable(value[:max_characters])


def _convert(value: Any) -> Any:
    """Convert what json cannot encode: records, sets, arrays; else its str()."""
    fields = fields_of(value)
    if fields is not None:
        return dict(fields)
    if isinstance(value, (set, frozenset)):
        return list(value)
    if hasattr(value, "tolist"):  # NumPy, torch
        return value.tolist()
    return str(value)
