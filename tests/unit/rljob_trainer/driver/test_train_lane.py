"""Which groups a lane starts when: those whose tokens can be of the version that their ticket names."""

import asyncio

from rljob_inputs.data.prompts import PromptSet
from rljob_inputs.prompts import Prompt
from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.driver.collection import CollectionPlan, Collector
from rljob_trainer.driver.dispatcher import DispatchState
from rljob_trainer.driver.train_lane import LaneState, TrainLane
from rljob_trainer.episodes.types import ScoredResult
from rljob_trainer.feed.prompt_feed import FeedState, PromptFeed, PromptSource
from tests.support.driver_harness import make_job, wait_until
from tests.support.episodes import episode
from tests.support.waiting import DEADLINE_SECONDS


class Rewards:
    def begin(self):
        pass

    def find_stale(self, episodes):
        return set()


class Groups(Collector):
    """Groups that end when the test says so, with the scores that it gives."""

    def __init__(self):
        super().__init__(None, None, Rewards(), (), None)
        self.open = {}

    async def run_group(self, group, plan, progress):
        self.open[group.index] = asyncio.get_running_loop().create_future()
        scores = await self.open[group.index]
        group.episodes = [
            episode(
                index=(0, group.index, i),
                score=score,
                results={"correct": ScoredResult(id="x", valid=True, score=score)},
            )
            for i, score in enumerate(scores)
        ]
        return group


async def test_group_that_replaces_another_between_two_steps_starts_with_the_next_step():
    """The rollouts still serve the weights before those of its ticket."""
    job = make_job(
        algorithm={"type": "dapo", "groupSize": 2},
        schedule={"type": "bounded", "maxStaleness": 1, "promptsPerStep": 1, "steps": 10},
        rewards=[{"name": "correct", "function": {"inline": "x"}}],
    )
    prompts = {i: Prompt(i, f"p{i}", [1]) for i in range(10)}
    groups = Groups()
    lane = TrainLane(
        groups,
        PromptFeed([PromptSource("train", 1.0, PromptSet(10, prompts))], FeedState(), seed=0, shuffle=True),
        CollectionPlan("train", 0, 2, job.spec.rollout.sampling, 0, "g"),
        job.spec.schedule,
        build_algorithm(job.spec),
        LaneState(dispatch=DispatchState()),
    )
    async with lane, asyncio.timeout(DEADLINE_SECONDS):
        assert lane.episodes_at_once == 2 * 2, "those that the first step will start"
        lane.begin_step(10)
        await wait_until(lambda: len(groups.open) == 2)
        groups.open[0].set_result([0.0, 1.0])
        await lane.take(1)
        assert (lane.episodes_at_once, lane.num_generated) == (2 * 2, 0), "as at the begin of the step"
        lane.finish_step()
        assert lane.episodes_at_once == 2 * 2, "one group is in flight, and another one starts"
        groups.open[1].set_result([1.0, 1.0])
        await wait_until(lambda: lane.num_replaced == 1)
        await asyncio.sleep(0)
        assert list(groups.open) == [0, 1], "the weights of the finished step are not published yet"
        lane.begin_step(10)
        await wait_until(lambda: len(groups.open) == 4)
