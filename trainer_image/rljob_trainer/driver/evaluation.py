"""Held-out evaluation: every prompt of data.eval once, by the eval lane.

Owns how evaluation samples, and which number is the accuracy. Leaves when to evaluate to the driver. Its ids, seeds
and lane differ from training's, so neither queues behind the other nor is mistaken for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.roles import Sampling
from rljob_trainer.driver.collection import Collector, Plan
from rljob_trainer.episodes.batches import Group
from rljob_trainer.episodes.prompts import Prompt
from rljob_trainer.history.metrics import count_invalid, summarize_scores


@dataclass(frozen=True)
class Evaluated:
    """One evaluation's outcome."""

    accuracy: float | None
    """None where no sample was valid."""
    means: dict[str, float]
    """score and every component, over valid samples."""
    num_samples: int
    invalid_by_reason: dict[str, int]
    groups: list[Group]
    """In the order of the data."""


def eval_sampling(job: RLJob) -> Sampling:
    """evaluation.sampling, or training's at temperature 0."""
    return job.spec.evaluation.sampling or job.spec.rollout.sampling.model_copy(update={"temperature": 0.0})


async def evaluate(
    collector: Collector, prompts: Sequence[Prompt], job: RLJob, *, step: int, incarnation: str
) -> Evaluated:
    """Evaluate the weights that the rollouts serve."""
    plan = Plan("eval", step, 1, eval_sampling(job), job.spec.schedule.seed, incarnation)
    async with aclosing(collector.collect(prompts, plan)) as scored:
        groups = [group async for group in scored]
        await collector.settle(groups)
    groups.sort(key=lambda group: group.index)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    means = summarize_scores(trajectories)
    return Evaluated(
        accuracy=pick_accuracy(means, job.spec.evaluation.accuracy),
        means=means,
        num_samples=len(trajectories),
        invalid_by_reason=dict(count_invalid(trajectories)),
        groups=groups,
    )


def pick_accuracy(means: dict[str, float], wanted: str | None) -> float | None:
    """The component that is reported as accuracy. Raises UserError for one that no reward returns."""
    for name in (wanted,) if wanted else ("acc", "score"):
        for component in means:
            if component == name or component.endswith(f"/{name}"):
                return means[component]
    if "score" not in means:
        return None  # no sample was valid in all of its rewards, perhaps since one is down: unknown, not 0
    raise UserError(
        f"spec.evaluation.accuracy names {wanted}, which no reward returned; they returned: {', '.join(sorted(means))}"
    )
