"""Held-out evaluation: each prompt of data.eval once, in the eval lane.

Ids, seeds and lane differ from training's, so the two neither queue behind each other nor share results.
"""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJobSpec
from rljob_api.manifest.roles import Sampling
from rljob_trainer.driver.collection import Collection, CollectionPlan
from rljob_trainer.episodes.types import Group
from rljob_trainer.history.metrics import summarize_scores


@dataclass(frozen=True)
class EvaluationResult:
    accuracy: float | None
    """None if no sample was valid."""
    means: dict[str, float]
    """score and every component, over valid samples."""
    groups: list[Group]
    """In the order of the data."""


def plan_evaluation(spec: RLJobSpec, step: int, incarnation: str) -> CollectionPlan:
    """Return the plan: evaluation.sampling, or training's at temperature 0."""
    default: Sampling = spec.rollout.sampling.model_copy(update={"temperature": 0.0})
    return CollectionPlan("eval", step, 1, spec.evaluation.sampling or default, spec.schedule.seed, incarnation)


async def evaluate(collection: Collection, accuracy: str | None) -> EvaluationResult:
    """Evaluate the weights that the rollouts serve. `accuracy`: the component to report, see `pick_accuracy`."""
    async with collection:
        groups = [group async for group in collection.groups()]
        await collection.rescore_stale(groups)
    groups.sort(key=lambda group: group.index)
    episodes = [episode for group in groups for episode in group.episodes]
    means = summarize_scores(episodes)
    return EvaluationResult(pick_accuracy(means, accuracy), means, groups)


def pick_accuracy(means: dict[str, float], wanted: str | None) -> float | None:
    """Return the mean of the component `wanted`, else of acc, else of score. Raise UserError if no reward returned it.

    None if no sample was valid in all of its rewards, for example because one reward is down: unknown, not 0.
    """
    for name in (wanted,) if wanted else ("acc", "score"):
        for component in means:
            if component == name or component.endswith(f"/{name}"):
                return means[component]
    if "score" not in means:
        return None
    raise UserError(
        f"spec.evaluation.accuracy: no reward returned the component {wanted}; returned: {', '.join(sorted(means))}"
    )
