"""Prompts to scored groups: one task a sample runs its agent loop and posts the trajectory to the rewards the moment
it ends.

Consumes: prompts. Produces: groups, in the order in which they complete. Waits for: rollouts, then rewards. Unblocked
by: the last reward of a group. Used by training steps and by evaluation alike; only the lane differs. Leaving the
iteration early, for whatever reason, cancels every task that still runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from rljob_api.protocol import Lane, ScoreRequest
from rljob_api.reward import Reward
from rljob_api.roles import Sampling
from rljob_trainer.agents import AgentLoop, Completion
from rljob_trainer.batches import Group, weigh_score
from rljob_trainer.data import Prompt
from rljob_trainer.rewards import Rewards
from rljob_trainer.rollouts import Rollouts
from rljob_trainer.types import Trajectory


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
    latencies: list[float] = field(default_factory=list)
    """[scored] Seconds from a trajectory's end to its last reward."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """Ended ones, scored or not."""
    all_generated: asyncio.Event = field(default_factory=asyncio.Event)


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

    def sample_id(self, group: int, sample: int) -> str:
        return f"{self.incarnation}/{self.lane}/{self.step}/{group}/{sample}"


class Collector:
    """Runs agent loops against rollouts and rewards."""

    def __init__(self, agent: AgentLoop, rollouts: Rollouts, rewards: Rewards, specs: Sequence[Reward]) -> None:
        self.progress = Progress()
        self.on_scored: Callable[[Lane, Trajectory], None] = lambda lane, trajectory: None
        """Told of each sample the moment its last reward is there."""
        self._agent = agent
        self._rollouts = rollouts
        self._rewards = rewards
        self._specs = specs

    def collect(self, prompts: Sequence[Prompt], plan: Plan) -> AsyncGenerator[Group]:
        """Groups of `plan.group_size` trajectories, as they complete. `progress` speaks of the newest collection."""
        num_samples = len(prompts) * plan.group_size
        self.progress = Progress(plan.lane, num_samples, started_at=time.monotonic())
        return self._collect(prompts, plan, self.progress)

    async def _collect(self, prompts: Sequence[Prompt], plan: Plan, progress: Progress) -> AsyncGenerator[Group]:
        groups = [Group(index, prompt) for index, prompt in enumerate(prompts)]
        tasks = [
            asyncio.create_task(self._sample(group, sample, plan, progress))
            for group in groups
            for sample in range(plan.group_size)
        ]
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

    async def _sample(self, group: Group, sample: int, plan: Plan, progress: Progress) -> Trajectory:
        seed = plan.sample_seed(group.prompt.index, group.index, sample)

        async def generate(token_ids: list[int]) -> Completion:
            return await self._rollouts.complete(token_ids, plan.sampling, seed)

        trajectory = await self._agent.run(group.prompt, group.index, sample, generate)
        ended_at = progress.generated_at = time.monotonic()
        progress.ended_at.append(ended_at)
        progress.num_generated += 1
        progress.num_tokens += trajectory.num_sampled
        progress.trajectories.append(trajectory)
        if progress.num_generated == progress.num_samples:
            progress.all_generated.set()
        request = build_request(group.prompt, trajectory, plan)
        try:
            trajectory.results = dict(await self._rewards.score(request))
        except BaseExceptionGroup as group_error:
            raise _first_cause(group_error) from group_error
        trajectory.score = weigh_score(trajectory, self._specs)
        self.on_scored(plan.lane, trajectory)
        progress.num_scored += 1
        progress.scored_at = time.monotonic()
        progress.latencies.append(progress.scored_at - ended_at)
        return trajectory


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


def _first_cause(error: BaseException) -> BaseException:
    """A task group wraps what went wrong; callers want the thing itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
