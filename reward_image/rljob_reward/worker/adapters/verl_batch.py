"""verl's batch reward manager: compute_score(data_sources, solution_strs, ground_truths, extra_infos).

Returns a list with one element per sample, in the form that a function of one sample returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rljob_reward.worker.adapters import verl
from rljob_reward.worker.adapters.binding import Binding, Sample
from rljob_reward.worker.adapters.outcome import Outcome, read_each
from rljob_reward.worker.adapters.signature import call_by_name

NAME = verl.NAME
MARKER = "solution_strs"
TAKES_GROUPS = True
_EXPECTED = "compute_score(data_sources, solution_strs, ground_truths, extra_infos)"
_EXPECTED_RETURN = 'a list with a number, a dict with "score" or None for each sample'
_PARAMETERS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


def bind(function: Callable[..., Any], kwargs: dict[str, Any], place: str) -> Binding:
    call = call_by_name(function, _PARAMETERS, kwargs, place, expected=_EXPECTED, marker=MARKER)
    return Binding(lambda samples: call(map(list, zip(*map(verl.arguments_of, samples), strict=True))), read)


def read(value: Any, samples: list[Sample]) -> list[Outcome]:
    return read_each(value, len(samples), _EXPECTED_RETURN, verl.read)
