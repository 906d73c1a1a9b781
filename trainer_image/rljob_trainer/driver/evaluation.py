"""Held-out evaluation: the prompts of the sets that are due, in the eval lane, next to training.

Ids, seeds and lane differ from training's, so the two neither queue behind each other nor share results. Invariants:
all completions are of the weights after the step that is evaluated, so the next weights wait for
`wait_until_generated`; for `wait_until_scored`, if a reward's model sleeps then. A prompt that the agent failed is not
solved, and one without a score is unknown: the figures are never without their numbers.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rljob_api.errors import UserError
from rljob_api.manifest.evaluation import HeldOutSet
from rljob_api.manifest.services.runner import RUNNER_SERVICE
from rljob_api.run.metrics import EvaluationNumbers
from rljob_api.wire.base import InvalidReason
from rljob_inputs.prompts import Prompt
from rljob_trainer.agents.base import AGENT, REASON_CONTEXT
from rljob_trainer.agents.hosted import REASON_NO_TURNS
from rljob_trainer.concurrency import end_tasks, run_all, wait_for_event
from rljob_trainer.driver.collection import Collection as PromptCollection
from rljob_trainer.driver.collection import CollectionPlan, Collector
from rljob_trainer.driver.estimates import Answer, Estimate, estimate_majority, estimate_mean, estimate_pass
from rljob_trainer.episodes.progress import CollectionProgress
from rljob_trainer.episodes.types import Episode, Group
from rljob_trainer.history.metrics import collect_scores, list_scores, summarize_scores

_AGENTS_REASONS: Final = frozenset(
    [
        *(InvalidReason.EXCEPTION, InvalidReason.TIMEOUT, InvalidReason.DEADLINE, InvalidReason.WORKER_DIED),
        *(REASON_CONTEXT, REASON_NO_TURNS),
    ]
)
"""Reasons of an episode's failure: what the agent did or did not do. A Pod that is away, and a reward that is none, say
nothing about the policy."""


@dataclass(frozen=True)
class SetResult:
    """What an evaluation found of one set."""

    held_out: HeldOutSet
    figures: EvaluationNumbers
    means: dict[str, float]
    """score and every component, over valid samples."""
    groups: list[Group]
    """In the order of the data."""
    seconds: float

    @property
    def episodes(self) -> list[Episode]:
        return [episode for group in self.groups for episode in group.episodes]


@dataclass(frozen=True)
class EvaluationResult:
    step: int
    """Finished steps of the weights."""
    sets: list[SetResult]

    @property
    def groups(self) -> list[Group]:
        return [group for found in self.sets for group in found.groups]


@dataclass(frozen=True)
class HeldOut:
    """One evaluation set, with its prompts."""

    settings: HeldOutSet
    prompts: Sequence[Prompt]
    plan: CollectionPlan
    """Whatever its step: each evaluation has its own."""

    @property
    def num_samples(self) -> int:
        return len(self.prompts) * self.plan.group_size


class EvalLane:
    """At most one evaluation at a time. Use it as a context: leaving it cancels the evaluation."""

    def __init__(self, collector: Collector, sets: Sequence[HeldOut]) -> None:
        self._collector, self.sets = collector, sets
        self._running: asyncio.Task[EvaluationResult] | None = None
        self.step: int | None = None
        """Finished steps of the weights that are evaluated; None without an evaluation."""
        self.names: frozenset[str] = frozenset()
        """Sets of the newest evaluation."""
        self.progress = CollectionProgress("eval")
        """Progress of the newest evaluation."""

    async def __aenter__(self) -> EvalLane:
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._running)

    def follow(self, sets: Sequence[HeldOutSet]) -> None:
        """Sample as `sets` say from the next evaluation on."""
        given = {each.name: each.sampling for each in sets}
        self.sets = [
            replace(each, plan=replace(each.plan, sampling=given.get(each.settings.name) or each.plan.sampling))
            for each in self.sets
        ]

    def start(self, step: int, names: Collection[str]) -> None:
        """Evaluate the weights that the rollouts serve now on the sets `names`."""
        assert self._running is None
        due = [each for each in self.sets if each.settings.name in names]
        num_samples, group_size = sum(each.num_samples for each in due), max(each.plan.group_size for each in due)
        self.step, self.names = step, frozenset(names)
        self.progress = CollectionProgress("eval", num_samples, group_size, started_at=time.monotonic())
        self._running = asyncio.create_task(evaluate(self._collector, due, step, self.progress))

    async def wait_until_generated(self) -> None:
        """Wait until no completion is open. Rewards may still be. Raise the evaluation's error if it has failed."""
        if self._running is None:
            return
        await wait_for_event(self.progress.all_generated, self._running)
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


async def evaluate(
    collector: Collector, sets: Sequence[HeldOut], step: int, progress: CollectionProgress
) -> EvaluationResult:
    """Evaluate the weights that the rollouts serve, all sets at the same time. `progress`: with all their samples."""
    starts = itertools.accumulate((len(each.prompts) for each in sets), initial=0)
    work = [_evaluate_set(collector, each, step, progress, start) for each, start in zip(sets, starts, strict=False)]
    return EvaluationResult(step, await run_all(work))


async def _evaluate_set(
    collector: Collector, each: HeldOut, step: int, progress: CollectionProgress, first_group: int
) -> SetResult:
    started_at = time.monotonic()
    collection = PromptCollection(collector, each.prompts, replace(each.plan, step=step), progress, first_group)
    async with collection:
        groups = [group async for group in collection.groups()]
        await collection.rescore_stale(groups)
    groups.sort(key=lambda group: group.index)
    episodes = [episode for group in groups for episode in group.episodes]
    figures, seconds = measure(groups, each.settings), time.monotonic() - started_at
    return SetResult(each.settings, figures, summarize_scores(episodes), groups, seconds)


def measure(groups: Sequence[Group], held_out: HeldOutSet) -> EvaluationNumbers:
    """Return the figures of a set. Raise UserError if no reward returned the component that is its accuracy.

    An episode that the agent failed counts as 0, and has no vote. Another one without the component is in no figure.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    scores = list_scores(episodes)
    name = find_component(collect_scores(episodes), held_out)
    counted = [_read_answer(episode, found, name) for episode, found in zip(episodes, scores, strict=True)]
    num_failed = sum(map(is_failed_by_agent, episodes))
    num_left_out = counted.count(None)
    if num_left_out and num_left_out + num_failed == len(episodes):  # nothing is known of the policy
        return EvaluationNumbers(num_failed=num_failed, num_left_out=num_left_out)
    remaining = iter(counted)
    prompts = [[answer for _ in group.episodes if (answer := next(remaining)) is not None] for group in groups]
    passes = {k: estimate_pass(prompts, k, held_out.pass_threshold) for k in held_out.pass_at}
    known = {k: found for k, found in passes.items() if found is not None}
    is_repeated = held_out.samples_per_prompt > 1
    return EvaluationNumbers(
        **_describe("accuracy", estimate_mean(prompts)),
        pass_at={k: found.value for k, found in known.items()},
        pass_at_low={k: found.low for k, found in known.items() if found.low is not None},
        pass_at_high={k: found.high for k, found in known.items() if found.high is not None},
        **_describe("majority", estimate_majority(prompts) if is_repeated else None),
        num_failed=num_failed,
        num_left_out=num_left_out,
    )


def _describe(name: str, found: Estimate | None) -> dict[str, float | None]:
    return {} if found is None else {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def _read_answer(episode: Episode, scores: Mapping[str, float], component: str | None) -> Answer | None:
    """Return what counts of an episode; None if it is left out. `component`: name of its accuracy."""
    if is_failed_by_agent(episode):
        return Answer(0.0)
    value = scores.get(component) if component is not None else None
    return None if value is None else Answer(value, _find_text(episode))


def _find_text(episode: Episode) -> str | None:
    """Return the answer that the first reward with `pred` named, else the environment or the program."""
    named = next((result.pred for result in episode.results.values() if result.pred is not None), None)
    own = episode.info.get("pred")
    return named if named is not None or own is None else str(own)


def is_failed_by_agent(episode: Episode) -> bool:
    """Return whether the policy, or the program or environment that plays for it, is why the episode has no score. The
    simulated user and the tools are not the agent."""
    failure = episode.failure
    return failure is not None and failure.service in (AGENT, RUNNER_SERVICE) and failure.reason in _AGENTS_REASONS


def find_component(scores: Collection[str], held_out: HeldOutSet) -> str | None:
    """Return the component that is the set's accuracy: the one that it names, else acc, else score. Raise UserError if
    no reward returned what it names.

    None if no sample was valid in all of its rewards, for example because one reward is down: unknown, not 0.
    """
    for name in (held_out.accuracy,) if held_out.accuracy else ("acc", "score"):
        for component in scores:
            if component == name or component.endswith(f"/{name}"):
                return component
    if "score" not in scores:
        return None
    raise UserError(
        f"{held_out.path}.accuracy: no reward returned the component {held_out.accuracy}; "
        f"returned: {', '.join(sorted(scores))}"
    )
