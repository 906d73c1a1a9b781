"""verl: compute_score(data_source, solution_str, ground_truth, extra_info=None), one sample per call; and the function
of its batch reward manager, compute_score(data_sources, solution_strs, ground_truths, extra_infos).

Returns a number, a bool, a dict with "score" (its other numbers become components), a sequence whose first element is
the score, or None to abstain; for a batch, a list with one for each sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rljob_reward.worker.adapters.binding import Adapter, Binding, Sample, call_by_name
from rljob_reward.worker.adapters.outcome import BAD_RETURN, Outcome, invalid, read_each, read_score

_EXPECTED_RETURN = 'a number, a dict with "score", a tuple that begins with the score, or None'
_EXPECTED_BATCH_RETURN = 'a list with a number, a dict with "score" or None for each sample'


def bind(function: Callable[..., Any], kwargs: dict[str, Any], place: str) -> Binding:
    names = ("data_source", "solution_str", "ground_truth", "extra_info")
    expected = "compute_score(data_source, solution_str, ground_truth, extra_info=None)"
    call = call_by_name(function, names, kwargs, place, expected=expected, marker="solution_str")
    return Binding(lambda samples: call(arguments_of(samples[0])), lambda value, samples: [read(value)])


def bind_batch(function: Callable[..., Any], kwargs: dict[str, Any], place: str) -> Binding:
    names = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
    expected = f"compute_score({', '.join(names)})"
    call = call_by_name(function, names, kwargs, place, expected=expected, marker="solution_strs")
    return Binding(lambda samples: call(map(list, zip(*map(arguments_of, samples), strict=True))), read_batch)


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


def read_batch(value: Any, samples: list[Sample]) -> list[Outcome]:
    return read_each(value, len(samples), _EXPECTED_BATCH_RETURN, read)


ADAPTER = Adapter("verl", "solution_str", False, bind)
BATCH_ADAPTER = Adapter("verl", "solution_strs", True, bind_batch)
