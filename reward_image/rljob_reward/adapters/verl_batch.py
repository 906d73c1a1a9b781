"""verl's batches: compute_score(data_sources, solution_strs, ground_truths, extra_infos), as its batch reward manager
calls it. Returns a list with, for each sample, what a function of one sample returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rljob_reward.adapters import verl
from rljob_reward.adapters.binding import Binding, Sample
from rljob_reward.adapters.outcome import Outcome, read_each
from rljob_reward.adapters.signature import Parameters

NAME = verl.NAME
MARKER = "solution_strs"
TAKES_GROUPS = True
_EXPECTED = "compute_score(data_sources, solution_strs, ground_truths, extra_infos)"
_EXPECTED_RETURN = 'a list with a number, a dict with "score" or None for each sample'
_PARAMETERS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


def bind(function: Callable[..., Any], kwargs: dict[str, Any], place: str) -> Binding:
    parameters = Parameters(function, place)
    parameters.check({*_PARAMETERS, *kwargs}, _EXPECTED, needs=MARKER)
    parameters.check_kwargs(kwargs)
    taken = frozenset(name for name in _PARAMETERS if parameters.accepts(name))

    def call(samples: list[Sample]) -> Any:
        columns = map(list, zip(*map(verl.arguments_of, samples), strict=True))
        values = dict(zip(_PARAMETERS, columns, strict=True))
        return function(**{**{name: values[name] for name in taken}, **kwargs})

    return Binding(call, read)


def read(value: Any, samples: list[Sample]) -> list[Outcome]:
    return read_each(value, len(samples), _EXPECTED_RETURN, verl.read)
