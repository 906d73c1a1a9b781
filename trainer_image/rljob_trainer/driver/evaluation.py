"""Held-out evaluation: each prompt of data.eval once, in the eval lane, next to training.

Ids, seeds and lane differ from training's, so the two neither queue behind each other nor share results. Invariants:
all completions are of the weights after the step that is evaluated, so the next weights wait for
`wait_until_generated`; for `wait_until_scored`, if a reward's model sleeps then. A prompt that the agent failed is not
solved, and one without a score is unknown: the accuracy is never without their numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rljob_api.errors import UserError
from rljob_api.manifest.services.runner import RUNNER_SERVICE
from rljob_api.wire.protocol import InvalidReason
from rljob_inputs.prompts import Prompt
from rljob_trainer.agents.base import AGENT, REASON_CONTEXT
from rljob_trainer.agents.hosted import REASON_NO_TURNS
from rljob_trainer.driver.collection import Collection, CollectionPlan, Collector
from rljob_trainer.episodes.progress import CollectionProgress
from rljob_trainer.episodes.types import Episode, Group
from rljob_trainer.history.metrics import collect_scores, mean, summarize_scores

_AGENTS_REASONS: Final = frozenset(
    [
        *(InvalidReason.EXCEPTION, InvalidReason.TIMEOUT, InvalidReason.DEADLINE, InvalidReason.WORKER_DIED),
        *(REASON_CONTEXT, REASON_NO_TURNS),
    ]
)
"""Reasons of an episode's failure: what the agent did or did not do. A Pod that is away, and a reward that is none, say
nothing about the policy."""


@dataclass(frozen=True)
class Accuracy:
    """The held-out accuracy, and what it is about."""

    value: float | None
    """Over the scored episodes, and the failed ones with 0. None if none was scored, unless the agent failed all."""
    num_failed: int
    """Episodes that the agent failed: a timeout, an exception, the limit of turns."""
    num_left_out: int
    """Other episodes without this figure, such as those with an invalid reward."""


@dataclass(frozen=True)
class EvaluationResult:
    step: int
    """Finished steps of the weights."""
    accuracy: Accuracy
    means: dict[str, float]
    """score and every component, over valid samples."""
    groups: list[Group]
    """In the order of the data."""
    seconds: float


class EvalLane:
    """At most one evaluation at a time. Use it as a context: leaving it cancels the evaluation."""

    def __init__(
        self, collector: Collector, prompts: Sequence[Prompt], plan: CollectionPlan, accuracy: str | None
    ) -> None:
        """`plan`: whatever its step, each evaluation has its own. `accuracy`: spec.evaluation.accuracy."""
        self._collector, self._prompts, self._plan, self._accuracy = collector, prompts, plan, accuracy
        self._running: asyncio.Task[EvaluationResult] | None = None
        self.step: int | None = None
        """Finished steps of the weights that are evaluated; None without an evaluation."""
        self.progress = CollectionProgress("eval")
        """Progress of the newest evaluation."""

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
        collection = Collection(self._collector, self._prompts, replace(self._plan, step=step))
        self.progress = collection.progress
        self._running = asyncio.create_task(evaluate(collection, self._accuracy))

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

    async def wait_until_scored(self) -> None:
        """Wait until the evaluation has ended, if there is one. Raise its error if it has failed."""
        if self._running is not None:
            await asyncio.wait({self._running})
            self._running.result()

    async def finish(self, *, wait: bool) -> EvaluationResult | None:
        """Return the result of the evaluation, once. None without one, or if it runs and `wait` is false."""
        running = self._running
        if running is None or not (wait or running.done()):
            return None
        await asyncio.wait({running})
        self._running, self.step = None, None
        return running.result()


async def evaluate(collection: Collection, accuracy: str | None) -> EvaluationResult:
    """Evaluate the weights that the rollouts serve. `accuracy`: the component to report, see `pick_accuracy`."""
    loop, plan = asyncio.get_running_loop(), collection.plan
    started_at = loop.time()
    async with collection:
        groups = [group async for group in collection.groups()]
        await collection.rescore_stale(groups)
    groups.sort(key=lambda group: group.index)
    episodes = [episode for group in groups for episode in group.episodes]
    found, seconds = measure_accuracy(episodes, accuracy), loop.time() - started_at
    return EvaluationResult(plan.step, found, summarize_scores(episodes), groups, seconds)


def measure_accuracy(episodes: Sequence[Episode], wanted: str | None) -> Accuracy:
    """Return the accuracy by the component `wanted`, see `pick_component`. Raise UserError if no reward returned it."""
    num_failed = sum(map(is_failed_by_agent, episodes))
    scores = pick_component(collect_scores(episodes), wanted)
    num_left_out = len(episodes) - num_failed - len(scores)
    is_unknown = not scores and num_left_out > 0
    return Accuracy(None if is_unknown else mean([*scores, *[0.0] * num_failed]), num_failed, num_left_out)


def is_failed_by_agent(episode: Episode) -> bool:
    """Return whether the policy, or the program or environment that plays for it, is why the episode has no score. The
    simulated user and the tools are not the agent."""
    failure = episode.failure
    return failure is not None and failure.service in (AGENT, RUNNER_SERVICE) and failure.reason in _AGENTS_REASONS


def pick_component(scores: Mapping[str, Sequence[float]], wanted: str | None) -> Sequence[float]:
    """Return the values of the component `wanted`, else of acc, else of score. Raise UserError if no reward returned
    it.

    Empty if no sample was valid in all of its rewards, for example because one reward is down: unknown, not 0.
    """
    for name in (wanted,) if wanted else ("acc", "score"):
        for component, values in scores.items():
            if component == name or component.endswith(f"/{name}"):
                return values
    if "score" not in scores:
        return ()
    raise UserError(
        f"spec.evaluation.accuracy: no reward returned the component {wanted}; returned: {', '.join(sorted(scores))}"
    )
