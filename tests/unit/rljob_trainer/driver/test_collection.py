"""The seeds and limits of a collection's answers."""

import pytest

from rljob_api.manifest.roles import Sampling
from rljob_api.manifest.services.reward import Reward
from rljob_inputs.prompts import Prompt
from rljob_trainer.driver.collection import CollectionPlan, Collector, EpisodeRun
from rljob_trainer.episodes.progress import CollectionProgress
from rljob_trainer.episodes.types import Group
from rljob_trainer.rewards.groups import RewardClients
from tests.support.episodes import episode


async def test_each_answer_has_its_own_seed_and_at_most_the_room_that_is_left():
    requests = []

    class Rollouts:
        async def complete(self, token_ids, sampling, seed, affinity):
            requests.append((sampling.max_tokens, seed))

    plan = CollectionPlan("train", 1, 2, Sampling(max_tokens=16), 0, "g")
    collector = Collector(None, Rollouts(), None, None)
    for sample in (0, 1):
        generate = EpisodeRun(collector, Group(3, Prompt(7, [], [1])), sample, plan, None, None).generate
        await generate([1])
        await generate([1, 2], 40)
        await generate([1, 2, 3], 5)
    assert [max_tokens for max_tokens, _ in requests] == [16, 16, 5] * 2
    assert [seed for _, seed in requests] == [
        plan.sample_seed(7, 3, sample, turn) for sample in (0, 1) for turn in (0, 1, 2)
    ]
    assert len({seed for _, seed in requests}) == 6


async def test_strings_that_end_one_answer_are_added_to_those_of_the_job():
    stops = []

    class Rollouts:
        async def complete(self, token_ids, sampling, seed, affinity):
            stops.append(sampling.stop)

    plan = CollectionPlan("train", 1, 2, Sampling(stop=["END"]), 0, "g")
    collector = Collector(None, Rollouts(), None, None)
    generate = EpisodeRun(collector, Group(3, Prompt(7, [], [1])), 0, plan, None, None).generate
    await generate([1], None, ["\n"])
    await generate([1])
    assert stops == [["END", "\n"], ["END"]]


REWARD = Reward.model_validate({"name": "r", "function": {"inline": "x"}})


@pytest.mark.parametrize(("rewards", "needs_reward"), [([REWARD], False), ([], True)])
async def test_an_episode_that_no_reward_of_its_lane_scores_needs_one_of_its_program(rewards, needs_reward):
    tasks = []

    class Agent:
        async def run(self, task):
            tasks.append(task)
            return [episode([1], own_reward=1.0)]

    class NoRequests:
        def build(self, *arguments):
            raise AssertionError("no reward scores it")

    collector = Collector(Agent(), None, RewardClients([], None), NoRequests())
    plan = CollectionPlan("train", 1, 1, Sampling(max_tokens=16), 0, "g", rewards)
    if needs_reward:
        await collector.run_group(Group(3, Prompt(7, [], [1])), plan, CollectionProgress)
    else:
        with pytest.raises(AssertionError, match="no reward scores it"):
            await collector.run_group(Group(3, Prompt(7, [], [1])), plan, CollectionProgress)
    assert [task.needs_reward for task in tasks] == [needs_reward]
