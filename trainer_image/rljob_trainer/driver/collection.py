"""Prompts to scored groups: one task per sample runs its agent loop, and the rewards score the episode at once.

Yields groups in the order in which they complete. Training steps and evaluation use it, each with its own lane.
Invariant: after `rescore_stale`, one version of each reward scored a group.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from rljob_api.manifest.reward import Reward
from rljob_api.manifest.roles import Sampling
from rljob_api.wire.protocol import Lane, ScoreRequest
from rljob_inputs.prompts import Prompt
from rljob_trainer.agents import AgentLoop
from rljob_trainer.episodes.batches import weighted_score
from rljob_trainer.episodes.progress import CollectionProgress
from rljob_trainer.episodes.types import Episode, Group
from rljob_trainer.replicas.rollout_client import RolloutClient
from rljob_trainer.rewards.clients import RewardClients
from rljob_trainer.rewards.groups import GroupScorer, run_all

log = logging.getLogger(__name__)

_MAX_RESCORINGS = 3
"""Of a group before each use. If the reward's version changes more often, the scores are used as they are; the step's
record then counts several versions."""


@dataclass(frozen=True)
class CollectionPlan:
    lane: Lane
    step: int
    group_size: int
    sampling: Sampling
    seed: int
    incarnation: str
    """Generation of the weights: a step that is repeated after a restart requests new scores under new ids."""

    def sample_seed(self, prompt_index: int, group: int, sample: int) -> int:
        """Return the seed of one sample. In evaluation it depends on the prompt only, not on the step."""
        where = (self.step, group, sample) if self.lane == "train" else (prompt_index, sample)
        text = f"{self.seed}/{self.lane}/{'/'.join(map(str, where))}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1

    def group_id(self, group: int) -> str:
        return f"{self.incarnation}/{self.lane}/{self.step}/{group}"


class Collector:
    def __init__(
        self, agent: AgentLoop, rollouts: RolloutClient, rewards: RewardClients, specs: Sequence[Reward]
    ) -> None:
        self.agent, self.rollouts, self.rewards, self.specs = agent, rollouts, rewards, specs
        self.progress = CollectionProgress()
        """Of the newest collection."""
        self.on_scored: Callable[[Lane, Episode], None] = lambda lane, episode: None
        """Called once per sample, when its last reward arrives."""

    def collect(self, prompts: Sequence[Prompt], plan: CollectionPlan) -> Collection:
        """Return a collection of `plan.group_size` episodes per prompt. It starts on entry to its context."""
        collection = Collection(self, prompts, plan)
        self.progress = collection.progress
        return collection


class Collection:
    """Sampling and scoring of one step or one evaluation. Leaving its context cancels the tasks that still run."""

    def __init__(self, collector: Collector, prompts: Sequence[Prompt], plan: CollectionPlan) -> None:
        self.plan = plan
        num_samples = len(prompts) * plan.group_size
        self.progress = CollectionProgress(plan.lane, num_samples, plan.group_size, started_at=time.monotonic())
        self._collector = collector
        self._groups = [Group(index, prompt) for index, prompt in enumerate(prompts)]
        self._tasks: list[asyncio.Task[Episode]] = []

    async def __aenter__(self) -> Collection:
        self._collector.rewards.begin()
        for group in self._groups:
            scorer = self._open_scorer(group)
            self._tasks += [
                asyncio.create_task(self._sample(group, sample, scorer)) for sample in range(self.plan.group_size)
            ]
        for task in self._tasks:
            # A caller in wait_until_generated takes no group meanwhile, and would not learn of the failure.
            task.add_done_callback(self.progress.record_failure)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def groups(self) -> AsyncIterator[Group]:
        for next_done in asyncio.as_completed(self._tasks):
            episode = await next_done
            group = self._groups[episode.group]
            group.episodes.append(episode)
            if len(group.episodes) == self.plan.group_size:
                group.episodes.sort(key=lambda episode: episode.sample)
                yield group

    async def rescore_stale(self, groups: Sequence[Group]) -> None:
        """Rescore what an older version scored: rewards may change during a step. Call it before scores are used."""
        rewards = self._collector.rewards
        for _ in range(_MAX_RESCORINGS):
            stale = [(group, names) for group in groups if (names := rewards.find_stale(group.episodes))]
            if not stale:
                return
            log.warning("rescoring %d groups: %s", len(stale), ", ".join(sorted(set().union(*(n for _, n in stale)))))
            self.progress.num_scored -= sum(len(group.episodes) for group, _ in stale)
            await run_all([self._rescore(group, names) for group, names in stale])

    async def _sample(self, group: Group, sample: int, scorer: GroupScorer) -> Episode:
        collector, plan = self._collector, self.plan
        seed = plan.sample_seed(group.prompt.index, group.index, sample)
        episode = await collector.agent.run(
            group.prompt, group.index, sample, lambda tokens: collector.rollouts.complete(tokens, plan.sampling, seed)
        )
        episode.ended_at = time.monotonic()
        self.progress.record_ended(episode)
        await self._score(group.prompt, episode, scorer)
        collector.on_scored(plan.lane, episode)
        return episode

    async def _score(self, prompt: Prompt, episode: Episode, scorer: GroupScorer) -> None:
        request = build_request(prompt, episode, self.plan)
        results = await scorer.score(episode.sample, request, episode.ended_at)
        episode.results = {**episode.results, **results}
        episode.score = weighted_score(episode, self._collector.specs)
        self.progress.record_scored(episode, time.monotonic())

    async def _rescore(self, group: Group, names: set[str]) -> None:
        scorer = self._open_scorer(group, names)
        await run_all([self._score(group.prompt, episode, scorer) for episode in group.episodes])
        for name in names:
            self._collector.rewards.clients[name].num_rescored += len(group.episodes)

    def _open_scorer(self, group: Group, names: set[str] | None = None) -> GroupScorer:
        plan = self.plan
        return self._collector.rewards.open_group(plan.group_id(group.index), plan.lane, plan.group_size, names)


def build_request(prompt: Prompt, episode: Episode, plan: CollectionPlan) -> ScoreRequest:
    return ScoreRequest(
        id=f"{plan.group_id(episode.group)}/{episode.sample}",
        lane=plan.lane,
        prompt=prompt.prompt,
        completion=episode.text,
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        extra_info={**prompt.extra_info, "truncated": episode.truncated, "num_tokens": episode.num_sampled},
        prompt_ids=prompt.token_ids,
        completion_ids=episode.segments[-1].token_ids[len(prompt.token_ids) :],
    )
