"""A class that scores samples first and then their group: compute_score(...), in any form for one sample, and
post_process_scores(group).

`group` is a list with one dict per valid sample, in order: prompt, completion, ground_truth, data_source, extra_info,
and the score and components from the first step. The value returned for a sample (a number, or a dict with "score")
replaces its score; the components of both steps are kept. One instance lives as long as its worker.
"""

import inspect
from collections.abc import Callable
from typing import Any

from rljob_api.functions.descriptions import SCORER_METHODS
from rljob_api.functions.forms import ScorerPlan
from rljob_api.functions.values import Sample, as_whole
from rljob_service.worker.forms import results
from rljob_service.worker.forms.binding import Binding, bind_call, is_coroutine_function
from rljob_service.worker.forms.inspection import read_parameters
from rljob_service.worker.forms.outcome import Outcome

NAME = "class"


def is_scorer_class(value: Any) -> bool:
    return inspect.isclass(value) and all(callable(getattr(value, name, None)) for name in SCORER_METHODS)


def bind(instance: Any, plan: ScorerPlan) -> tuple[Binding, Binding]:
    """Return the bindings for samples and for groups."""
    post_process: Callable[..., Any] = instance.post_process_scores
    whole = plan.call.convention.whole
    group = Binding(
        lambda samples: post_process([_describe(sample, whole=whole) for sample in samples]),
        _read,
        is_async=is_coroutine_function(post_process),
    )
    compute = instance.compute_score
    return bind_call(compute, read_parameters("compute_score", compute), plan.call), group


def _describe(sample: Sample, *, whole: bool) -> dict[str, Any]:
    """`whole`: whether the first step sees the whole completion; the second one sees the same."""
    sample, result = as_whole(sample) if whole else sample, sample["result"]
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
    outcomes = results.read_list(value, len(samples), results.read_value)
    if len(outcomes) != len(samples):
        return outcomes
    return [
        outcome._replace(components={**sample["result"].get("components", {}), **outcome.components})
        for sample, outcome in zip(samples, outcomes, strict=True)
    ]
