"""Prompts to scored groups: one task per episode runs its agent loop, and the rewards score the episode at once.

The lanes of training and of evaluation use it. Invariants: after `rescore_stale`, one version of each reward scored a
group. An episode that failed is never scored.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from rljob_api.manifest.reward import Reward
from rljob_api.manifest.roles import Sampling
from rljob_api.wire.protocol import Lane, ScoreRequest
from rljob_inputs.prompts import Prompt
from rljob_trainer.agents import AgentLoop
from rljob_trainer.agents.base import EpisodeTask, Generate
from rljob_trainer.calls.services import AgentServices
from rljob_trainer.concurrency import run_all
from rljob_trainer.driver.role_clock import ROLE_OF_SERVICE, PhaseClock, RoleClock
from rljob_trainer.episodes.batches import weighted_score
from rljob_trainer.episodes.progress import CollectionProgress
from rljob_trainer.episodes.types import NOT_SAMPLED, Completion, Episode, Group, Segment
from rljob_trainer.replicas.rollout_client import RolloutClient
from rljob_trainer.rewards.clients import RewardClients
from rljob_trainer.rewards.groups import GroupScorer

log = logging.getLogger(__name__)

_MAX_RESCORINGS = 3
"""Of a group before each use. If the reward's version changes more often, the scores are used as they are; the step's
record then counts several versions."""

ReadProgress = Callable[[], CollectionProgress]
"""Returns the progress in which an event counts now: training counts it in the step in which it happens."""


@dataclass(frozen=True)
class CollectionPlan:
    lane: Lane
    step: int
    """The step during which the group starts, or after which the evaluation takes place."""
    group_size: int
    sampling: Sampling
    seed: int
    incarnation: str
    """Generation of the weights: a group that is repeated after a restart requests new scores under new ids."""

    def sample_seed(self, prompt_index: int, group: int, sample: int, turn: int = 0) -> int:
        """Return the seed of one answer. In evaluation it depends on the prompt only, not on the step."""
        where = (self.step, group, sample) if self.lane == "train" else (prompt_index, sample)
        parts = (self.seed, self.lane, *where, *([turn] if turn else []))
        return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big") >> 1

    def group_id(self, group: int) -> str:
        return f"{self.incarnation}/{self.lane}/{self.step}/{group}"

    def episode_id(self, group: int, sample: int) -> str:
        return f"{self.group_id(group)}/{sample}"


class Collector:
    def __init__(
        self,
        agent: AgentLoop,
        rollouts: RolloutClient,
        rewards: RewardClients,
        specs: Sequence[Reward],
        services: AgentServices | None = None,
        *,
        own_weight: float = 1.0,
    ) -> None:
        """`services`: of the agent, to describe what it waits for. `own_weight`: spec.agent.rewardWeight."""
        self.agent, self.rollouts, self.rewards, self.specs, self.services = agent, rollouts, rewards, specs, services
        self._own_weight = own_weight
        kinds = {client.service.kind for client in services.clients.values()} if services else set()
        further = [role for kind, role in ROLE_OF_SERVICE.items() if kind in kinds]
        self.roles, self.phases = RoleClock(time.monotonic(), further), PhaseClock(time.monotonic())
        if services is not None:
            services.working = lambda kind: self.roles.working(ROLE_OF_SERVICE[kind], time.monotonic)
        self.on_scored: Callable[[Lane, Episode], None] = lambda lane, episode: None
        """Called once per episode, when its last reward arrives."""

    def collect(self, prompts: Sequence[Prompt], plan: CollectionPlan) -> Collection:
        """Return a collection of `plan.group_size` episodes per prompt. It starts on entry to its context."""
        return Collection(self, prompts, plan)

    async def run_group(self, group: Group, plan: CollectionPlan, progress: ReadProgress) -> Group:
        """Run the group's episodes and score them. The first error ends them all."""
        scorer = self._open_scorer(group, plan)
        samples = range(plan.group_size)
        group.episodes = await run_all([self._run_episode(group, i, plan, scorer, progress) for i in samples])
        return group

    async def rescore_stale(self, groups: Sequence[Group], plan: CollectionPlan, progress: ReadProgress) -> None:
        """Rescore what an older version scored: rewards may change meanwhile. Call it before scores are used."""
        for _ in range(_MAX_RESCORINGS):
            stale = [(group, names) for group in groups if (names := self.rewards.find_stale(group.episodes))]
            if not stale:
                return
            log.warning("rescoring %d groups: %s", len(stale), ", ".join(sorted(set().union(*(n for _, n in stale)))))
            progress().num_scored -= sum(len(group.episodes) for group, _ in stale)
            await run_all([self._rescore(group, names, plan, progress) for group, names in stale])

    async def _run_episode(
        self, group: Group, sample: int, plan: CollectionPlan, scorer: GroupScorer, progress: ReadProgress
    ) -> Episode:
        episode_id = plan.episode_id(group.index, sample)
        generate = self._bind_generate(group, sample, plan)
        seed = plan.sample_seed(group.prompt.index, group.index, sample)
        task = EpisodeTask(episode_id, plan.lane, group.prompt, group.index, sample, generate, seed)
        with self._generating(plan.lane):
            episode = await self.agent.run(task)
        episode.ended_at = time.monotonic()
        progress().record_ended(episode)
        await self._score(group.prompt, episode, plan, scorer, progress)
        self.on_scored(plan.lane, episode)
        return episode

    def _bind_generate(self, group: Group, sample: int, plan: CollectionPlan) -> Generate:
        turns = itertools.count()

        async def generate(token_ids: list[int], max_tokens: int | None = None, stop: Sequence[str] = ()) -> Completion:
            seed, sampling = plan.sample_seed(group.prompt.index, group.index, sample, next(turns)), plan.sampling
            if max_tokens is not None and max_tokens < sampling.max_tokens:
                sampling = sampling.model_copy(update={"max_tokens": max_tokens})
            if stop:
                sampling = sampling.model_copy(update={"stop": [*sampling.stop, *stop]})
            with self.roles.working("rollouts", time.monotonic):
                return await self.rollouts.complete(token_ids, sampling, seed)

        return generate

    def _generating(self, lane: Lane) -> AbstractContextManager[None]:
        """Return the context of an open episode, which makes the time that of generation."""
        return self.phases.within("generate", time.monotonic) if lane == "train" else nullcontext()

    async def _score(
        self, prompt: Prompt, episode: Episode, plan: CollectionPlan, scorer: GroupScorer, progress: ReadProgress
    ) -> None:
        with self.roles.working("rewards", time.monotonic):
            if episode.failure is not None:
                await scorer.skip()
            else:
                results = await scorer.score(episode.sample, build_request(prompt, episode, plan), episode.ended_at)
                episode.results = {**episode.results, **results}
                episode.score = weighted_score(episode, self.specs, self._own_weight)
        progress().record_scored(episode, time.monotonic())

    async def _rescore(self, group: Group, names: set[str], plan: CollectionPlan, progress: ReadProgress) -> None:
        scorer = self._open_scorer(group, plan, names)
        await run_all([self._score(group.prompt, episode, plan, scorer, progress) for episode in group.episodes])
        for name in names:
            self.rewards.clients[name].num_rescored += sum(episode.failure is None for episode in group.episodes)

    def _open_scorer(self, group: Group, plan: CollectionPlan, names: set[str] | None = None) -> GroupScorer:
        return self.rewards.open_group(plan.group_id(group.index), plan.lane, plan.group_size, names)


class Collection:
    """Sampling and scoring of a fixed set of prompts. Leaving its context cancels the tasks that still run."""

    def __init__(self, collector: Collector, prompts: Sequence[Prompt], plan: CollectionPlan) -> None:
        self.plan = plan
        num_samples = len(prompts) * plan.group_size
        self.progress = CollectionProgress(plan.lane, num_samples, plan.group_size, started_at=time.monotonic())
        self._collector = collector
        self._groups = [Group(index, prompt) for index, prompt in enumerate(prompts)]
        self._tasks: list[asyncio.Task[Group]] = []

    async def __aenter__(self) -> Collection:
        self._collector.rewards.begin()
        self._tasks = [
            asyncio.create_task(self._collector.run_group(group, self.plan, self._progress)) for group in self._groups
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def groups(self) -> AsyncIterator[Group]:
        """Yield the groups in the order in which they complete."""
        for next_done in asyncio.as_completed(self._tasks):
            yield await next_done

    async def rescore_stale(self, groups: Sequence[Group]) -> None:
        await self._collector.rescore_stale(groups, self.plan, self._progress)

    def _progress(self) -> CollectionProgress:
        return self.progress


def build_request(prompt: Prompt, episode: Episode, plan: CollectionPlan) -> ScoreRequest:
    """Return the request for the last answer. A conversation adds its messages, turns, state and end to extra_info."""
    segment, (start, end) = _find_last_answer(episode.segments)
    facts = {"truncated": episode.truncated, "num_tokens": episode.num_sampled}
    return ScoreRequest(
        id=plan.episode_id(episode.group, episode.sample),
        lane=plan.lane,
        prompt=prompt.prompt,
        completion=episode.text,
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        extra_info={**prompt.extra_info, **facts, **(_describe_conversation(episode) if episode.messages else {})},
        prompt_ids=segment.token_ids[:start],
        completion_ids=segment.token_ids[start:end],
    )


def _describe_conversation(episode: Episode) -> dict[str, Any]:
    turns = [
        {
            "text": turn.text,
            "reward": turn.reward,
            "tool_calls": [
                {"name": call.name, "arguments": call.arguments, "error": call.error} for call in turn.tool_calls
            ],
        }
        for turn in episode.turns
    ]
    return {"messages": episode.messages, "turns": turns, "state": episode.state, "end": episode.end.value}


def _find_last_answer(segments: Sequence[Segment]) -> tuple[Segment, tuple[int, int]]:
    """Return the segment of the last turn, and where its tokens begin and end. It is not always the last segment: a
    program may continue an earlier one."""
    last = max(max(segment.turns, default=NOT_SAMPLED) for segment in segments)
    if last == NOT_SAMPLED:
        segment = segments[-1]
        return segment, (len(segment.turns), len(segment.turns))
    segment = next(segment for segment in segments if last in segment.turns)
    start = segment.turns.index(last)
    return segment, (start, start + segment.turns.count(last))
