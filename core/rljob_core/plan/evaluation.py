"""The results of a job that only evaluates: what its driver left in the termination message of the head's Pod. Pure.

The Pod may be gone, or of an image that writes something else: then the run's files alone have the results.
"""

from pydantic import TypeAdapter, ValidationError

from rljob_api.manifest.status import MAX_FIGURES, EvaluationFigure
from rljob_api.wire.termination import RESULT_PREFIX
from rljob_core.plan.observed_job import ObservedJob, container_statuses

_FIGURES = TypeAdapter(list[EvaluationFigure])


def read_figures(observed: ObservedJob) -> list[EvaluationFigure]:
    """Return the results of the head's Pod that succeeded; empty for a job that trains, and if they are unknown."""
    if observed.job.spec.trains:
        return []
    for pod in observed.roles[0].pods:
        for status in container_statuses(pod):
            message = ((status.get("state") or {}).get("terminated") or {}).get("message") or ""
            if message.startswith(RESULT_PREFIX):
                try:
                    return _FIGURES.validate_json(message.removeprefix(RESULT_PREFIX))[:MAX_FIGURES]
                except ValidationError:
                    return []
    return []


def describe_figures(figures: list[EvaluationFigure]) -> str:
    """`eval: accuracy 0.412`; empty without any."""
    sets: dict[str, list[str]] = {}
    for figure in figures:
        value = "unknown" if figure.value is None else f"{figure.value:.3f}"
        sets.setdefault(figure.set, []).append(f"{figure.name} {value}")
    return "; ".join(f"{name}: {', '.join(values)}" for name, values in sets.items())
