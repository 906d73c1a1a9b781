"""The outcome of an execution for one sample or one call, and the reading of numbers that user code returns.

Owns the rule that a failure is never a zero: everything except a finite number becomes a reason. The reasons are values
of rljob_api.wire.base.InvalidReason, repeated here since workers do not import pydantic (a test compares them).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rljob_api.wire.contract import MAX_COMPONENTS

EXCEPTION = "exception"
WORKER_DIED = "worker_died"
NOT_FINITE = "not_finite"
BAD_RETURN = "bad_return"
ABSTAINED = "abstained"
BAD_REQUEST = "bad_request"

_MAX_NAME_CHARACTERS = 200
_MAX_MESSAGE_CHARACTERS = 2000
_MAX_PRED_CHARACTERS = 1000


class Outcome(NamedTuple):
    """A finite score with components, or a reason with a message."""

    score: float | None
    components: dict[str, float]
    reason: str | None = None
    message: str = ""
    pred: str | None = None
    """The answer that the function read in the completion."""
    abstained: Sequence[str] = ()
    """The functions of a list that returned None for this sample."""


class CallOutcome(NamedTuple):
    """The value of a call of a simulated user or a tool, or a reason with a message."""

    value: Any
    """For a user the fields of a UserReply, for a tool a str."""
    reason: str | None = None
    message: str = ""


def failed_call(reason: str, message: str) -> CallOutcome:
    return CallOutcome(None, reason, encodable(message)[:_MAX_MESSAGE_CHARACTERS])


def invalid(reason: str, message: str, components: dict[str, float] | None = None) -> Outcome:
    return Outcome(None, components or {}, reason, encodable(message)[:_MAX_MESSAGE_CHARACTERS])


def encodable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def read_score(value: Any, extras: Iterable[tuple[Any, Any]], expected: str) -> Outcome:
    """Read `value` as the score, and the finite numbers among `extras` as its components."""
    components = read_components(extras)
    if len(components) > MAX_COMPONENTS:
        return invalid(BAD_RETURN, f"the function returned more than {MAX_COMPONENTS} components")
    if value is None:
        return invalid(ABSTAINED, "the function returned None for this sample", components)
    score = read_number(value)
    if score is None:
        return invalid(BAD_RETURN, f"the function returned {describe(value)}; expected {expected}", components)
    if not math.isfinite(score):
        return invalid(NOT_FINITE, f"the function returned {score}", components)
    return Outcome(score, components)


def read_each(value: Any, num_samples: int, expected: str, read: Callable[[Any], Outcome]) -> list[Outcome]:
    """Read one outcome per element of a list, array or tensor; a single failure if `value` is something else."""
    elements = elements_of(value, num_samples)
    if elements is None:
        samples = "1 sample" if num_samples == 1 else f"{num_samples} samples"
        return [invalid(BAD_RETURN, f"the function returned {describe(value)} for {samples}; expected {expected}")]
    return [read(element) for element in elements]


def elements_of(value: Any, num_samples: int) -> list[Any] | None:
    """Return the elements of a list, array or tensor, one per sample; None if `value` has another form."""
    if isinstance(value, (str, bytes, dict)):
        return None
    try:
        elements = list(value)
    except TypeError:  # not a sequence, or a tensor without dimensions
        return None
    return elements if len(elements) == num_samples else None


def read_components(extras: Iterable[tuple[Any, Any]]) -> dict[str, float]:
    """Return the finite numbers among `extras`, with bools as 0 and 1. More than MAX_COMPONENTS are too many."""
    components: dict[str, float] = {}
    for name, value in extras:
        number = read_number(value)
        if number is not None and math.isfinite(number):
            components[encodable(str(name))[:_MAX_NAME_CHARACTERS]] = number
            if len(components) > MAX_COMPONENTS:
                break
    return components


def read_pred(value: Any) -> str | None:
    """Return the answer that a function names: a text, or a number or bool as text; None for anything else."""
    number = None if isinstance(value, str) else read_number(value)
    if not isinstance(value, str) and number is None:
        return None
    text = value if isinstance(value, str) else f"{number:.15g}"
    return encodable(text[:_MAX_PRED_CHARACTERS])


def read_number(value: Any) -> float | None:
    """Return a number, bool, or a NumPy or torch value with one element as a float; None for anything else."""
    if type(value) is float:
        return value
    if isinstance(value, (str, bytes, bytearray)) or not hasattr(value, "__float__"):
        return None
    try:
        # item() returns the only element. Not for values without dimensions: item() of a masked value is 0, while
        # float() returns NaN.
        return float(value.item() if getattr(value, "ndim", 0) else value)
    except OverflowError:
        return math.inf
    except Exception:  # an array of several elements; a user's class may raise anything
        return None


def describe(value: Any) -> str:
    """Return type and abbreviated repr of a value from user code; repr() itself may fail."""
    try:
        text = repr(value)
    except Exception:
        text = "?"
    return f"{type(value).__name__} {text[:200]}"
