"""verl: compute_score(data_source, solution_str, ground_truth, extra_info=None), one sample per call.

Returns a number, a bool, a dict with "score" (its other numbers become components), a sequence whose first element is
the score, or None to abstain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rljob_reward.worker.adapters.binding import Binding, Sample
from rljob_reward.worker.adapters.outcome import BAD_RETURN, Outcome, invalid, read_score
from rljob_reward.worker.adapters.signature import call_by_name

NAME = "verl"
MARKER = "solution_str"
TAKES_GROUPS = False
_EXPECTED = "compute_score(data_source, solution_str, ground_truth, extra_info=None)"
_EXPECTED_RETURN = 'a number, a dict with "score", a tuple that begins with the score, or None'
_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")


def bind(function: Callable[..., Any], kwargs: dict[str, Any], place: str) -> Binding:
    call = call_by_name(function, _PARAMETERS, kwargs, place, expected=_EXPECTED, marker=MARKER)
    return Binding(lambda samples: call(arguments_of(samples[0])), lambda value, samples: [read(value)])


def arguments_of(sample: Sample) -> tuple[Any, ...]:
    """Return verl's arguments for a sample, in the order of the parameters."""
    return sample.get("data_source", ""), sample["completion"], sample.get("ground_truth"), sample.get("extra_info", {})


def read(value: Any) -> Outcome:
    if isinstance(value, dict):
        if "score" not in value:
            keys = ", ".join(map(str, value)) or "none"
            return invalid(BAD_RETURN, f'the function returned a dict without "score" (its keys: {keys})')
        extras = ((key, extra) for key, extra in value.items() if key != "score")
        return read_score(value["score"], extras, _EXPECTED_RETURN)
    if isinstance(value, (tuple, list)) and value:
        return read_score(value[0], (), _EXPECTED_RETURN)
    return read_score(value, (), _EXPECTED_RETURN)
