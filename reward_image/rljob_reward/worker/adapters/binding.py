"""A user's function, bound by an adapter: how to check its parameters, call it and read its return value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rljob_api.errors import UserError
from rljob_reward.worker.adapters.outcome import Outcome

Sample = dict[str, Any]
"""A ScoreRequest from JSON; fields with defaults may be missing. `result` is its ScoreResult from the first step of
scope: sampleThenGroup."""

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Binding(NamedTuple):
    """A function ready to be called. One that takes a single sample gets lists of length one."""

    call: Callable[[list[Sample]], Any]
    """Call the user's function. May return an awaitable."""
    read: Callable[[Any, list[Sample]], list[Outcome]]
    """Read its return value: one outcome per sample, or a single one with a reason, which applies to all samples."""


class Adapter(NamedTuple):
    name: str
    marker: str
    """Parameter that only this convention has."""
    takes_groups: bool
    """Whether the function takes lists with one element per sample."""
    bind: Callable[[Callable[..., Any], dict[str, Any], str], Binding]
    """Bind a function with function.kwargs. Raise UserError, with the place and the expected form, if its signature
    does not fit."""


class Parameters:
    """The parameters of a user's function. Adapters pass all of them by keyword."""

    def __init__(self, function: Callable[..., Any], place: str) -> None:
        self._place = place
        parameters = inspect.signature(function).parameters.values()
        self.names = frozenset(p.name for p in parameters if p.kind in _NAMED)
        self.required = frozenset(p.name for p in parameters if p.kind in _NAMED and p.default is p.empty)
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        if positional:
            raise UserError(f"{place}: {', '.join(positional)} cannot be passed by name; remove the `/`")

    def accepts(self, name: str) -> bool:
        return self.takes_any or name in self.names

    def check(self, given: Iterable[str], kwargs: Iterable[str], expected: str, marker: str) -> None:
        """Raise UserError unless `given` has all required parameters, and the function takes `marker` and `kwargs`."""
        missing = sorted(self.required - set(given))
        if missing:
            raise UserError(
                f"{self._place}: no value for the parameter {', '.join(missing)}, expected {expected}; "
                "give it a default, or a value in function.kwargs"
            )
        if not self.accepts(marker):
            raise UserError(f"{self._place}: takes no {marker}; expected {expected}, or another function.signature")
        unknown = sorted(name for name in kwargs if not self.accepts(name))
        if unknown:
            raise UserError(
                f"{self._place}: function.kwargs has {', '.join(unknown)}, which the function does not take; "
                f"it takes {', '.join(sorted(self.names))}"
            )


def call_by_name(
    function: Callable[..., Any],
    names: Sequence[str],
    kwargs: dict[str, Any],
    place: str,
    *,
    expected: str,
    marker: str,
) -> Callable[[Iterable[Any]], Any]:
    """Return a call of `function` for values in the order of `names`, which passes those that it takes, and `kwargs`.

    Raise UserError if its parameters do not fit.
    """
    parameters = Parameters(function, place)
    parameters.check({*names, *kwargs}, kwargs, expected, marker)
    taken = [parameters.accepts(name) and name not in kwargs for name in names]

    def call(values: Iterable[Any]) -> Any:
        given = {name: value for name, value, is_taken in zip(names, values, taken, strict=True) if is_taken}
        return function(**given, **kwargs)

    return call
