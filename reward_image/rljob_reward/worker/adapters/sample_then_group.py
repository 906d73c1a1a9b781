"""A class that scores samples first and then their group: compute_score(...), as verl calls it, and
post_process_scores(group).

`group` is a list with one dict per valid sample, in order: prompt, completion, ground_truth, data_source, extra_info,
and the score and components from the first step. The value returned for a sample (a number, or a dict with "score")
replaces its score; the components of both steps are kept. One instance lives as long as its worker.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rljob_api.errors import UserError
from rljob_reward.worker.adapters import verl
from rljob_reward.worker.adapters.binding import Binding, Sample
from rljob_reward.worker.adapters.outcome import Outcome, read_each

NAME = "class"
METHODS = ("compute_score", "post_process_scores")
_EXPECTED_RETURN = 'a list with a number, a dict with "score" or None for each sample of the group'


def is_scorer_class(value: Any) -> bool:
    return inspect.isclass(value) and all(callable(getattr(value, name, None)) for name in METHODS)


def bind(instance: Any, place: str) -> tuple[Binding, Binding]:
    """Return the bindings for samples and for groups."""
    post_process: Callable[..., Any] = instance.post_process_scores
    try:
        inspect.signature(post_process).bind([])
    except TypeError as error:
        raise UserError(f"{place}.post_process_scores: {error}; expected post_process_scores(self, group)") from None
    group = Binding(lambda samples: post_process([_describe(sample) for sample in samples]), _read)
    return verl.bind(instance.compute_score, {}, f"{place}.compute_score"), group


def _describe(sample: Sample) -> dict[str, Any]:
    result = sample["result"]
    return {
        "prompt": sample["prompt"],
        "completion": sample["completion"],
        "ground_truth": sample.get("ground_truth"),
        "data_source": sample.get("data_source", ""),
        "extra_info": sample.get("extra_info", {}),
        "score": result["score"],
        "components": result.get("components", {}),
    }


def _read(value: Any, samples: list[Sample]) -> list[Outcome]:
    outcomes = read_each(value, len(samples), _EXPECTED_RETURN, verl.read)
    if len(outcomes) != len(samples):
        return outcomes
    return [
        outcome._replace(components={**sample["result"].get("components", {}), **outcome.components})
        for sample, outcome in zip(samples, outcomes, strict=True)
    ]
