"""Prompts to scored groups: one task a sample runs its agent loop and gives the trajectory to the rewards the moment
it ends.

Consumes: prompts. Produces: groups, in the order in which they complete. Waits for: rollouts, then rewards. Unblocked
by: the last reward of a group. Used by training steps and by evaluation alike; only the lane differs. Leaving the
iteration early, for whatever reason, cancels every task that still runs. Leaves to `group_scoring` which reward sees a
sample alone. Who uses groups calls `settle` on them first: what it uses is of one version of each reward.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from rljob_api.manifest.reward import Reward
from rljob_api.manifest.roles import Sampling
from rljob_api.wire.protocol import Lane, ScoreRequest
from rljob_trainer.agents import AgentLoop, Completion
from rljob_trainer.episodes.batches import Group, weigh_score
from rljob_trainer.episodes.prompts import Prompt
from rljob_trainer.episodes.types import Trajectory
from rljob_trainer.replicas.rollout_client import Rollouts
from rljob_trainer.rewards.clients import Rewards
from rljob_trainer.rewards.groups import GroupScorer

log = logging.getLogger(__name__)

_MAX_RESCORINGS = 3
"""Of one group before one use of it. A reward whose version changes more often is used as it is, and the step's record
says that it was scored by several versions."""


@dataclass
class Progress:
    """How far the collection under way is, for /status."""

    lane: Lane = "train"
    num_samples: int = 0
    num_generated: int = 0
    num_scored: int = 0
    num_tokens: int = 0
    started_at: float = 0.0
    generated_at: float = 0.0
    """When the last trajectory ended."""
    ended_at: list[float] = field(default_factory=list)
    """[generated] When each trajectory ended."""
    scored_at: float = 0.0
    """When the last reward came."""
    latency_by_sample: dict[tuple[int, int], float] = field(default_factory=dict)
    """(group, sample) -> seconds from its trajectory's end to its last reward."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """Ended ones, scored or not."""
    all_generated: asyncio.Event = field(default_factory=asyncio.Event)
    """Set too when that will never be, since a sample has failed."""
    failure: BaseException | None = None
    """Of the first sample that failed."""
    group_size: int = 1
    group_ended_at: list[float] = field(default_factory=list)
    """When the last trajectory of each group ended."""
    _num_open: dict[int, int] = field(default_factory=dict)
    """By group: trajectories that have not ended, once one has."""

    def record_ended(self, trajectory: Trajectory) -> None:
        """A conversation is over."""
        self.generated_at = trajectory.ended_at
        self.ended_at.append(trajectory.ended_at)
        self.num_generated += 1
        self.num_tokens += trajectory.num_sampled
        self.trajectories.append(trajectory)
        self._num_open[trajectory.group] = self._num_open.get(trajectory.group, self.group_size) - 1
        if not self._num_open[trajectory.group]:
            self.group_ended_at.append(trajectory.ended_at)
        if self.num_generated == self.num_samples:
            self.all_generated.set()

    async def wait_until_generated(self) -> None:
        """Until the last trajectory has ended. Raises what keeps one from its end."""
        await self.all_generated.wait()
        if self.failure is not None:
            raise self.failure

    def record_task(self, task: asyncio.Task[Trajectory]) -> None:
        """A sample's task is done; of interest where it failed."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = self.failure or error
            self.all_generated.set()

    def record_scored(self, trajectory: Trajectory, now: float) -> None:
        """All of its rewards are there, perhaps once more."""
        self.num_scored += 1
        self.scored_at = now
        self.latency_by_sample[trajectory.group, trajectory.sample] = now - trajectory.ended_at

    @property
    def latencies(self) -> list[float]:
        """[scored]"""
        return list(self.latency_by_sample.values())


@dataclass(frozen=True)
class Plan:
    """What a collection samples, and under which names and seeds."""

    lane: Lane
    step: int
    group_size: int
    sampling: Sampling
    seed: int
    incarnation: str
    """Generation of the weights: a step that is done again after a restart asks for new scores under new ids."""

    def sample_seed(self, prompt_index: int, group: int, sample: int) -> int:
        """Seed of one sample. Evaluation draws by prompt alone, so that its noise is the same at every step."""
        where = (self.step, group, sample) if self.lane == "train" else (prompt_index, sample)
        text = f"{self.seed}/{self.lane}/{'/'.join(map(str, where))}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1

    def group_id(self, group: int) -> str:
        return f"{self.incarnation}/{self.lane}/{self.step}/{group}"

    def sample_id(self, group: int, sample: int) -> str:
        return f"{self.group_id(group)}/{sample}"


class Collector:
    """Runs agent loops against rollouts and rewards."""

    def __init__(self, agent: AgentLoop, rollouts: Rollouts, rewards: Rewards, specs: Sequence[Reward]) -> None:
        self.progress = Progress()
        self.on_scored: Callable[[Lane, Trajectory], None] = lambda lane, trajectory: None
        """Told of each sample once, the moment its last reward is there."""
        self._agent = agent
        self._rollouts = rollouts
        self._rewards = rewards
        self._specs = specs
        self._plan: Plan | None = None

    def collect(self, prompts: Sequence[Prompt], plan: Plan) -> AsyncGenerator[Group]:
        """Groups of `plan.group_size` trajectories, as they complete. `progress` speaks of the newest collection."""
        num_samples = len(prompts) * plan.group_size
        self._plan = plan
        self.progress = Progress(plan.lane, num_samples, started_at=time.monotonic(), group_size=plan.group_size)
        return self._collect(prompts, plan, self.progress)

    async def settle(self, groups: Sequence[Group]) -> None:
        """Have `groups`, of the newest collection, scored by the versions that the rewards are pinned to now: when one
        was rolled out in the middle of the step, what the old one scored is scored again."""
        for _ in range(_MAX_RESCORINGS):
            stale = [(group, self._rewards.find_stale(group.trajectories)) for group in groups]
            stale = [(group, names) for group, names in stale if names]
            if not stale:
                return
            log.warning("scores %d groups again: %s", len(stale), ", ".join(sorted({n for _, ns in stale for n in ns})))
            self.progress.num_scored -= sum(len(group.trajectories) for group, _ in stale)
            await _run_all([self._score_again(group, names) for group, names in stale])

    async def _collect(self, prompts: Sequence[Prompt], plan: Plan, progress: Progress) -> AsyncGenerator[Group]:
        self._rewards.begin()
        groups = [Group(index, prompt) for index, prompt in enumerate(prompts)]
        tasks = [
            asyncio.create_task(self._sample(group, sample, plan, progress, scorer))
            for group in groups
            for scorer in [self._rewards.open_group(plan.group_id(group.index), plan.lane, plan.group_size)]
            for sample in range(plan.group_size)
        ]
        for task in tasks:
            # Who waits for all trajectories does not take the next group meanwhile, by which it would learn of this.
            task.add_done_callback(progress.record_task)
        try:
            for next_done in asyncio.as_completed(tasks):
                trajectory = await next_done
                group = groups[trajectory.group]
                group.trajectories.append(trajectory)
                if len(group.trajectories) == plan.group_size:
                    group.trajectories.sort(key=lambda trajectory: trajectory.sample)
                    yield group
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(
        self, group: Group, sample: int, plan: Plan, progress: Progress, scorer: GroupScorer
    ) -> Trajectory:
        seed = plan.sample_seed(group.prompt.index, group.index, sample)

        async def generate(token_ids: list[int]) -> Completion:
            return await self._rollouts.complete(token_ids, plan.sampling, seed)

        trajectory = await self._agent.run(group.prompt, group.index, sample, generate)
        trajectory.ended_at = time.monotonic()
        progress.record_ended(trajectory)
        await self._score(scorer, build_request(group.prompt, trajectory, plan), trajectory, progress)
        self.on_scored(plan.lane, trajectory)
        return trajectory

    async def _score_again(self, group: Group, names: Collection[str]) -> None:
        """Have `names` score all of a group; the other rewards' results stay."""
        plan, size = self._plan, len(group.trajectories)
        assert plan is not None, "a group was collected by a plan"
        scorer = self._rewards.open_group(plan.group_id(group.index), plan.lane, size, names)
        await _run_all(
            [self._score(scorer, build_request(group.prompt, t, plan), t, self.progress) for t in group.trajectories]
        )
        for name in names:
            self._rewards.clients[name].num_rescored += size

    async def _score(
        self, scorer: GroupScorer, request: ScoreRequest, trajectory: Trajectory, progress: Progress
    ) -> None:
        try:
            results = await scorer.score(trajectory.sample, request, trajectory.ended_at)
        except BaseExceptionGroup as error:
            raise _first_cause(error) from error
        trajectory.results = {**trajectory.results, **results}
        trajectory.score = weigh_score(trajectory, self._specs)
        progress.record_scored(trajectory, time.monotonic())


def build_request(prompt: Prompt, trajectory: Trajectory, plan: Plan) -> ScoreRequest:
    """What the rewards are asked."""
    return ScoreRequest(
        id=plan.sample_id(trajectory.group, trajectory.sample),
        lane=plan.lane,
        prompt=prompt.prompt,
        completion=trajectory.text,
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        extra_info={**prompt.extra_info, "truncated": trajectory.truncated, "num_tokens": trajectory.num_sampled},
    )


async def _run_all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """All at once; the first error ends the others, and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for each in work:
                tasks.create_task(each)
    except BaseExceptionGroup as error:
        raise _first_cause(error) from error


def _first_cause(error: BaseException) -> BaseException:
    """A task group wraps what went wrong; callers want the thing itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
