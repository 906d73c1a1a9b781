"""One group's way through all rewards of the job: which reward sees a sample alone, and which sees them together.

Consumes: the group's trajectories as they end, each as a request. Produces: their results by reward. Waits for: with
scope group the group's last trajectory, with sampleThenGroup the last result of its samples; then for the rewards.
Unblocked by: their clients, each of which has a deadline. Invariant: an invalid sample stays invalid, and is in no
group that is scored together after it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from rljob_api.wire.protocol import GroupRequest, Lane, ScoreRequest, ScoreResult
from rljob_trainer.episodes.types import Scored
from rljob_trainer.rewards.client import RewardClient

_Member = tuple[ScoreRequest, Scored | None]
"""A sample of a group, and what it got alone where the reward scores it alone first."""


class GroupScorer:
    """Scores the samples of one group."""

    def __init__(self, clients: Mapping[str, RewardClient], group_id: str, lane: Lane, size: int) -> None:
        self._clients = clients
        self._group_id, self._lane = group_id, lane
        self._meetings = {
            name: _Meeting(size, self._build_step(client))
            for name, client in clients.items()
            if client.reward.scope != "sample"
        }

    async def score(self, position: int, request: ScoreRequest, ended_at: float | None = None) -> dict[str, Scored]:
        """Results of all rewards for the sample at `position`, whose trajectory ended at `ended_at` (now). Each
        position is asked for once, and all of them are."""
        ended_at = time.monotonic() if ended_at is None else ended_at
        async with asyncio.TaskGroup() as tasks:
            running = {
                name: tasks.create_task(self._score_by(name, position, request, ended_at)) for name in self._clients
            }
        return {name: task.result() for name, task in running.items()}

    async def _score_by(self, name: str, position: int, request: ScoreRequest, ended_at: float) -> Scored:
        client = self._clients[name]
        result = None if client.reward.scope == "group" else await client.score(request)
        if result is None or client.reward.scope == "sampleThenGroup":
            result = await self._meetings[name].join(position, (request, result))
        # A sample's wait is its own: the first of a group waited for the last one, too.
        return Scored.model_construct(**{**dict(result), "latency_seconds": time.monotonic() - ended_at})

    def _build_step(self, client: RewardClient) -> Callable[[Sequence[_Member]], Awaitable[list[Scored]]]:
        async def together(members: Sequence[_Member]) -> list[Scored]:
            samples = [request for request, _ in members]
            return await client.score_group(GroupRequest(id=self._group_id, lane=self._lane, samples=samples))

        async def afterwards(members: Sequence[_Member]) -> list[Scored]:
            alone = [result for _, result in members if result is not None]
            valid = [(request, result) for request, result in members if result is not None and result.valid]
            if not valid:
                return alone
            request = GroupRequest(
                id=self._group_id,
                lane=self._lane,
                samples=[request for request, _ in valid],
                results=[
                    ScoreResult(**result.model_dump(include=set(ScoreResult.model_fields))) for _, result in valid
                ],
            )
            together = iter(await client.score_group(request))
            return [merge(result, next(together)) if result.valid else result for result in alone]

        return together if client.reward.scope == "group" else afterwards


class _Meeting:
    """Where the samples of a group wait for each other. The last one to come does the work of all."""

    def __init__(self, size: int, work: Callable[[Sequence[_Member]], Awaitable[list[Scored]]]) -> None:
        self._work = work
        self._members: dict[int, _Member] = {}
        self._results: list[asyncio.Future[Scored]] = [asyncio.Future() for _ in range(size)]

    async def join(self, position: int, member: _Member) -> Scored:
        self._members[position] = member
        if len(self._members) < len(self._results):
            return await self._results[position]
        others = [future for i, future in enumerate(self._results) if i != position]
        try:
            results = await self._work([self._members[i] for i in range(len(self._results))])
        except Exception as error:
            for future in others:
                if not future.done():
                    future.set_exception(error)
            raise
        except asyncio.CancelledError:
            for future in others:
                future.cancel()
            raise
        for i, (future, result) in enumerate(zip(self._results, results, strict=True)):
            if i != position and not future.done():
                future.set_result(result)
        return results[position]


def merge(alone: Scored, together: Scored) -> Scored:
    """A sample's result after its group was scored: the group's word counts, the components of both are kept, and so
    is the older version where they differ, by which a step sees that it has two."""
    return Scored.model_construct(
        **{
            **dict(together),
            "components": {**alone.components, **together.components} if together.valid else {},
            "queue_seconds": alone.queue_seconds + together.queue_seconds,
            "execute_seconds": alone.execute_seconds + together.execute_seconds,
            "version": alone.version or together.version,
            "attempts": alone.attempts + together.attempts,
        }
    )
