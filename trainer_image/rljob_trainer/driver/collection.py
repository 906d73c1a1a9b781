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
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from rljob_api.manifest.roles import Sampling
from rljob_api.manifest.services.reward import Reward
from rljob_api.tracing import spans
from rljob_api.wire.base import Lane
from rljob_api.wire.driver_status import HungPart
from rljob_inputs.prompts import Prompt
from rljob_trainer import traces
from rljob_trainer.agents import AgentLoop
from rljob_trainer.agents.base import EpisodeTask
from rljob_trainer.algorithms.rows import score_group
from rljob_trainer.algorithms.teachers import score_by_teacher
from rljob_trainer.calls.client import AgentServices
from rljob_trainer.concurrency import end_tasks, run_all
from rljob_trainer.driver.role_clock import PhaseClock, RoleClock
from rljob_trainer.episodes.progress import CollectionProgress
from rljob_trainer.episodes.types import Completion, Episode, Group
from rljob_trainer.replicas.fleet import Affinity
from rljob_trainer.replicas.rollout_client import RolloutClient
from rljob_trainer.rewards.groups import GroupScorer, RequestBuilder, RewardClients
from rljob_trainer.services.demand import ServiceLoad

log = logging.getLogger(__name__)

_MAX_RESCORINGS = 3
"""Limit of a group before each use. If the reward's version changes more often, the scores are used as they are; the
step's record then counts several versions."""

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
    rewards: Sequence[Reward] = ()
    """Those that score the episodes; their weighted sum is the score."""
    held_out: str = ""
    """Name of the evaluation set. Empty: training."""

    def sample_seed(self, prompt_index: int, group: int, sample: int, turn: int = 0) -> int:
        """Return the seed of one answer. In evaluation it depends on the prompt only, not on the step."""
        where = (self.step, group, sample) if self.lane == "train" else (prompt_index, sample)
        parts = (self.seed, self.lane, *where, *([turn] if turn else []))
        return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big") >> 1

    def group_id(self, group: int) -> str:
        return f"{self.incarnation}/{self.lane}/{self.step}/{group}"

    def episode_id(self, group: int, sample: int) -> str:
        return f"{self.group_id(group)}/{sample}"

    def trajectory_id(self, episode: Episode) -> str:
        """Return the id of what is scored: the episode's, and with seats that of the trajectory."""
        own = f"/{episode.trajectory}" if episode.seat else ""
        return f"{self.episode_id(episode.group, episode.sample)}{own}"


@dataclass
class Collector:
    agent: AgentLoop
    rollouts: RolloutClient
    rewards: RewardClients
    requests: RequestBuilder
    services: AgentServices | None = None
    """Those of the agent, to describe what it waits for."""
    own_weight: float = 1.0
    """spec.agent.rewardWeight"""
    roles: RoleClock = field(default_factory=lambda: RoleClock(time.monotonic()))
    """The services feed them, too."""
    on_scored: Callable[[Lane, Group, Episode], None] = lambda lane, group, episode: None
    """Called once per episode, when its last reward arrives."""
    job: str = ""
    """Its name, in traces."""
    phases: PhaseClock = field(default_factory=lambda: PhaseClock(time.monotonic()))

    def loads(self) -> dict[str, ServiceLoad]:
        """Return what the agent's services have measured, by name."""
        return {} if self.services is None else self.services.loads()

    def list_hung(self) -> list[HungPart]:
        """Return the parts that hang, of rollouts, rewards and the agent's services."""
        called = {} if self.services is None else self.services.clients
        hung = [client.list_hung() for client in self.rewards.clients.values()]
        hung += [client.list_hung() for client in called.values()]
        return [*self.rollouts.list_hung(), *itertools.chain.from_iterable(hung)]

    async def run_group(self, group: Group, plan: CollectionPlan, progress: ReadProgress) -> Group:
        """Run the group's episodes and score them. The first error ends them all."""
        row = group.prompt
        names = {
            reward.name
            for reward in plan.rewards
            if reward.teacher is None or reward.scores_row(row.extra_info, row.data_source)
        }
        scorer = self.rewards.open_group(plan.group_id(group.index), plan.lane, plan.group_size, names)
        prefix = Affinity()
        runs = [EpisodeRun(self, group, i, plan, scorer, progress, Affinity(prefix)) for i in range(plan.group_size)]
        found = await run_all([run.play() for run in runs])
        group.episodes = [trajectory for trajectories in found for trajectory in trajectories]
        score_group(group, plan.rewards, self.own_weight)
        return group

    async def rescore_stale(self, groups: Sequence[Group], plan: CollectionPlan, progress: ReadProgress) -> None:
        """Rescore what an older version scored: rewards may change meanwhile. Call it before scores are used."""
        for _ in range(_MAX_RESCORINGS):
            stale = [(group, names) for group in groups if (names := self.rewards.find_stale(group.episodes))]
            if not stale:
                return
            log.warning("rescoring %d groups: %s", len(stale), ", ".join(sorted(set().union(*(n for _, n in stale)))))
            progress().num_scored -= sum(len(group.by_sample()) for group, _ in stale)
            await run_all([self._rescore(group, names, plan, progress) for group, names in stale])

    async def _rescore(self, group: Group, names: set[str], plan: CollectionPlan, progress: ReadProgress) -> None:
        scorer = self.rewards.open_group(plan.group_id(group.index), plan.lane, plan.group_size, names)

        async def score(trajectories: Sequence[Episode]) -> None:
            with spans.resume(trajectories[0].traceparent):
                await EpisodeRun(self, group, trajectories[0].sample, plan, scorer, progress).score(trajectories)

        await run_all([score(each) for each in group.by_sample()])
        score_group(group, plan.rewards, self.own_weight)
        for name in names:
            self.rewards.clients[name].num_rescored += sum(episode.failure is None for episode in group.episodes)


@dataclass
class EpisodeRun:
    """One episode, from its prompt to its scores."""

    collector: Collector
    group: Group
    sample: int
    plan: CollectionPlan
    scorer: GroupScorer
    progress: ReadProgress
    affinity: Affinity = field(default_factory=Affinity)
    traceparent: str = ""
    """That of the span of what the agent does: the gateway's requests have no other."""
    _turns: Iterator[int] = field(default_factory=itertools.count)

    async def play(self) -> list[Episode]:
        """Return its trajectories, scored."""
        collector, group, plan, prompt = self.collector, self.group, self.plan, self.group.prompt
        episode_id = plan.episode_id(group.index, self.sample)
        with traces.begin_episode(episode_id, plan.lane, plan.step, group, self.sample) as span:
            seed = plan.sample_seed(prompt.index, group.index, self.sample)
            task = EpisodeTask(
                episode_id, plan.lane, prompt, group.index, self.sample, self.generate, seed, not plan.rewards
            )
            # The time of an open episode of training is that of generation.
            phase = collector.phases.within("generate", time.monotonic) if plan.lane == "train" else nullcontext()
            with phase, traces.begin_agent(collector.job, episode_id) as agent_span:
                self.traceparent = agent_span.traceparent
                trajectories = await collector.agent.run(task)
            ended_at = time.monotonic()
            for trajectory in trajectories:
                trajectory.ended_at, trajectory.traceparent = ended_at, span.traceparent
                trajectory.sampling = plan.sampling
            self.progress().record_ended(trajectories)
            await self.score(trajectories)
            for trajectory in trajectories:
                collector.on_scored(plan.lane, group, trajectory)
            traces.record_episode(span, trajectories)
        return trajectories

    async def generate(
        self, token_ids: list[int], max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        """Return the next answer of the policy."""
        turn, sampling, roles = next(self._turns), self.plan.sampling, self.collector.roles
        seed = self.plan.sample_seed(self.group.prompt.index, self.group.index, self.sample, turn)
        if max_tokens is not None and max_tokens < sampling.answer_tokens:
            sampling = sampling.model_copy(update={"max_tokens": max_tokens})
        if stop:
            sampling = sampling.model_copy(update={"stop": [*sampling.stop, *stop]})
        parent = None if spans.current() else self.traceparent
        chat = traces.begin_chat(parent, turn, len(token_ids), sampling, seed)
        with roles.within("rollouts", time.monotonic), chat:
            completion = await self.collector.rollouts.complete(token_ids, sampling, seed, self.affinity)
            traces.record_completion(chat, completion)
            return completion

    async def score(self, trajectories: Sequence[Episode]) -> None:
        """Score the episode: each of its trajectories is a sample of the rewards."""
        self.scorer.expect(len(trajectories))
        with self.collector.roles.within("rewards", time.monotonic):
            await run_all([self._score_alone(each) for each in trajectories])
        self.progress().record_scored(trajectories, time.monotonic())

    async def _score_alone(self, episode: Episode) -> None:
        plan, prompt = self.plan, self.group.prompt
        if episode.failure is not None:
            await self.scorer.skip()
            return
        if plan.rewards:
            finished = plan.step - (plan.lane == "train")
            request = self.collector.requests.build(plan.trajectory_id(episode), plan.lane, prompt, episode, finished)
            results = await self.scorer.score(episode.position, request, episode.ended_at, episode.peers)
            for reward in plan.rewards:
                if reward.teacher is not None and reward.name in results:
                    results[reward.name] = score_by_teacher(reward.teacher, results[reward.name], episode)
            episode.results = {**episode.results, **results}
        # Until its group ends:
        score_group(Group(episode.group, prompt, [episode]), plan.rewards, self.collector.own_weight)


class Collection:
    """Sampling and scoring of a fixed set of prompts, with `plan.group_size` episodes each. It starts on entry to its
    context; leaving it cancels the tasks that still run."""

    def __init__(
        self,
        collector: Collector,
        prompts: Sequence[Prompt],
        plan: CollectionPlan,
        progress: CollectionProgress | None = None,
        first_group: int = 0,
    ) -> None:
        """`progress`: which it shares with others: all their samples are in it. `first_group`: its first number, so
        that collections next to each other have different ids."""
        self.plan = plan
        num_samples = len(prompts) * plan.group_size
        self.progress = progress or CollectionProgress(
            plan.lane, num_samples, plan.group_size, started_at=time.monotonic()
        )
        self._collector = collector
        self._groups = [Group(index, each, held_out=plan.held_out) for index, each in enumerate(prompts, first_group)]
        self._tasks: list[asyncio.Task[Group]] = []

    async def __aenter__(self) -> Collection:
        self._collector.rewards.begin()
        self._tasks = [
            asyncio.create_task(self._collector.run_group(group, self.plan, self._progress)) for group in self._groups
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(*self._tasks)

    async def groups(self) -> AsyncIterator[Group]:
        """Yield the groups in the order in which they complete."""
        for next_done in asyncio.as_completed(self._tasks):
            yield await next_done

    async def rescore_stale(self, groups: Sequence[Group]) -> None:
        await self._collector.rescore_stale(groups, self.plan, self._progress)

    def _progress(self) -> CollectionProgress:
        return self.progress
