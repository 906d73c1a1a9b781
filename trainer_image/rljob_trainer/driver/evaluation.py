"""Held-out evaluation: each prompt of data.eval once, in the eval lane, next to training.

Ids, seeds and lane differ from training's, so the two neither queue behind each other nor share results. Invariant: all
completions are of the weights after the step that is evaluated, so the next weights wait for `wait_until_generated`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJobSpec
from rljob_api.manifest.roles import Sampling
from rljob_inputs.prompts import Prompt
from rljob_trainer.driver.collection import Collection, CollectionPlan, Collector
from rljob_trainer.episodes.progress import CollectionProgress
from rljob_trainer.episodes.types import Group
from rljob_trainer.history.metrics import summarize_scores


@dataclass(frozen=True)
class EvaluationResult:
    step: int
    """Finished steps of the weights."""
    accuracy: float | None
    """None if no sample was valid."""
    means: dict[str, float]
    """score and every component, over valid samples."""
    groups: list[Group]
    """In the order of the data."""
    seconds: float


class EvalLane:
    """At most one evaluation at a time. Use it as a context: leaving it cancels the evaluation."""

    def __init__(self, collector: Collector, prompts: Sequence[Prompt], spec: RLJobSpec, incarnation: str) -> None:
        self._collector, self._prompts, self._spec, self._incarnation = collector, prompts, spec, incarnation
        self._running: asyncio.Task[EvaluationResult] | None = None
        self.step: int | None = None
        """Finished steps of the weights that are evaluated; None without an evaluation."""
        self.progress = CollectionProgress("eval")
        """Of the newest evaluation."""

    async def __aenter__(self) -> EvalLane:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def start(self, step: int) -> None:
        """Evaluate the weights that the rollouts serve now."""
        assert self._running is None
        self.step = step
        collection = self._collector.collect(self._prompts, plan_evaluation(self._spec, step, self._incarnation))
        self.progress = collection.progress
        self._running = asyncio.create_task(evaluate(collection, self._spec.evaluation.accuracy))

    async def wait_until_generated(self) -> None:
        """Wait until no completion is open. Rewards may still be. Raise the evaluation's error if it has failed."""
        if self._running is None:
            return
        generated = asyncio.create_task(self.progress.all_generated.wait())
        try:
            await asyncio.wait({self._running, generated}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            generated.cancel()
        if self._running.done():
            self._running.result()

    async def finish(self, *, wait: bool) -> EvaluationResult | None:
        """Return the result of the evaluation, once. None without one, or if it runs and `wait` is false."""
        running = self._running
        if running is None or not (wait or running.done()):
            return None
        await asyncio.wait({running})
        self._running, self.step = None, None
        return running.result()


def plan_evaluation(spec: RLJobSpec, step: int, incarnation: str) -> CollectionPlan:
    """Return the plan: evaluation.sampling, or training's at temperature 0."""
    default: Sampling = spec.rollout.sampling.model_copy(update={"temperature": 0.0})
    return CollectionPlan("eval", step, 1, spec.evaluation.sampling or default, spec.schedule.seed, incarnation)


async def evaluate(collection: Collection, accuracy: str | None) -> EvaluationResult:
    """Evaluate the weights that the rollouts serve. `accuracy`: the component to report, see `pick_accuracy`."""
    loop, plan = asyncio.get_running_loop(), collection.plan
    started_at = loop.time()
    async with collection:
        groups = [group async for group in collection.groups()]
        await collection.rescore_stale(groups)
    groups.sort(key=lambda group: group.index)
    means = summarize_scores([episode for group in groups for episode in group.episodes])
    return EvaluationResult(plan.step, pick_accuracy(means, accuracy), means, groups, loop.time() - started_at)


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
