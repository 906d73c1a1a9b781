"""One version a collection, with servers: who is asked, what counts, and what is scored again."""

import asyncio

import pytest

from rljob_api.manifest.roles import Sampling
from rljob_trainer.driver.collection import CollectionPlan, Collector
from rljob_trainer.episodes.types import Prompt, Trajectory
from rljob_trainer.history.metrics import count_versions
from rljob_trainer.rewards.version_pin import VersionPin
from tests.support.reward_harness import make_request, make_reward, until

PLAN = CollectionPlan("train", 1, 2, Sampling(), 0, "g")
PROMPTS = [Prompt(i, f"p{i}", [1], ground_truth=str(i)) for i in range(6)]


class Agent:
    """Conversations of one token, whose text is the number of its sample."""

    async def run(self, prompt, group, sample, generate):
        return Trajectory(prompt.index, group, sample, [1, 2], [0, 1], [0.0, -1.0], str(group + sample), False, "g:0")


async def collect(collection):
    async with collection:
        return [group async for group in collection.groups()]


def client_of(rewards):
    return rewards.clients["r"]


def versions_of(groups):
    return {t.results["r"].version for group in groups for t in group.trajectories}


async def test_all_of_a_collection_goes_to_the_version_that_most_replicas_serve(reward_harness):
    servers = [await reward_harness.serve(version) for version in ("v1", "v1", "v2")]
    reward_harness.list(*servers)
    async with reward_harness.rewards(make_reward()) as rewards:
        await until(lambda: len(client_of(rewards).replicas.fleet.versions()) == 3)
        rewards.begin()
        found = await asyncio.gather(*[rewards.score(make_request(i)) for i in range(30)])
    assert {each["r"].version for each in found} == {"v1"}
    assert not servers[2].asked, "it stays known, but is as if not there"
    assert all(server.asked for server in servers[:2])


async def test_a_collection_that_begins_before_any_version_is_known_waits_for_the_first(reward_harness):
    async with reward_harness.rewards(make_reward()) as rewards, asyncio.TaskGroup() as tasks:
        rewards.begin()
        scored = tasks.create_task(rewards.score(make_request(1)))
        await until(lambda: client_of(rewards).replicas.num_waiting == 1)
        reward_harness.list(await reward_harness.serve("v7"))
        assert (await scored)["r"].version == "v7"


async def test_the_status_says_which_version_is_waited_for(reward_harness):
    servers = [await reward_harness.serve("v1"), await reward_harness.serve("v2")]
    reward_harness.list(servers[0])
    async with reward_harness.rewards(make_reward()) as rewards, asyncio.TaskGroup() as tasks:
        client = client_of(rewards)
        client.versions.pin = pin = VersionPin(absent_seconds=1e9)
        await until(client.replicas.fleet.versions)
        rewards.begin()
        reward_harness.list(servers[1])
        await until(lambda: client.replicas.fleet.versions() == ["v2"])
        scored = tasks.create_task(rewards.score(make_request(1)))
        await until(lambda: rewards.describe_wait(1, 1).endswith("no replica serves version v1"))
        pin._absent_seconds = 0.0
        assert (await scored)["r"].version == "v2"


async def test_a_result_of_another_version_behind_the_same_address_is_not_counted(reward_harness):
    reused, other = await reward_harness.serve(), await reward_harness.serve()
    reward_harness.list(reused, other)
    async with reward_harness.rewards(make_reward(failurePolicy={"retries": 0})) as rewards:
        await until(lambda: len(client_of(rewards).replicas.fleet.versions()) == 2)
        rewards.begin()
        reused.version = "v2"
        found = await asyncio.gather(*[rewards.score(make_request(i)) for i in range(20)])
        assert client_of(rewards).replicas.fleet.replicas[reused.address].serves == "v2"
    assert {each["r"].version for each in found} == {"v1"}
    assert all(each["r"].valid for each in found), "it uses up no retry"
    assert reused.asked, "this test must have met it"


async def test_when_the_old_version_is_gone_the_new_one_scores_all_that_no_update_has_used(reward_harness):
    old = await reward_harness.serve("v1")
    reward_harness.list(old)
    spec = make_reward()
    old.fault = lambda body: {"valid": True, "score": 100.0}
    async with reward_harness.rewards(spec) as rewards:
        collector = Collector(Agent(), None, rewards, [spec])
        told = []
        collector.on_scored = lambda lane, trajectory: told.append((trajectory.group, trajectory.sample))
        groups = []
        async with collector.collect(PROMPTS, PLAN) as collection:
            async for group in collection.groups():
                groups.append(group)
                if len(groups) == 2:  # a mini-batch: it is used
                    await collection.rescore_stale(groups)
                    used = list(groups)
        assert versions_of(groups) == {"v1"}
        # The rollout finishes.
        new = await reward_harness.serve("v2")
        reward_harness.list(new)
        await until(lambda: client_of(rewards).versions.pin.version == "v2")
        rest = groups[2:]
        await collection.rescore_stale(rest)
        assert versions_of(rest) == {"v2"}
        assert versions_of(used) == {"v1"}, "what an update has used stays"
        assert [t.score for group in rest for t in group.trajectories] == [
            float(group.index + t.sample) for group in rest for t in group.trajectories
        ]
        trajectories = [t for group in groups for t in group.trajectories]
        assert count_versions(trajectories, [spec]) == {"r": 2}, "and the step's record says so"
        assert client_of(rewards).num_rescored == 8
        assert sorted(told) == sorted({(t.group, t.sample) for t in trajectories}), "each sample is told of once"
        assert collector.progress.num_scored == collector.progress.num_samples == 12
        assert sorted(new.asked) == sorted(f"g/train/1/{g.index}/{s}" for g in rest for s in range(2)), "the same ids"


async def test_a_group_that_two_versions_scored_in_its_two_steps_is_scored_again_as_a_whole(reward_harness):
    old = await reward_harness.serve("v1")
    reward_harness.list(old)
    spec = make_reward(scope="sampleThenGroup")
    async with reward_harness.rewards(spec) as rewards, asyncio.TaskGroup() as tasks:
        collector = Collector(Agent(), None, rewards, [spec])

        old.judge_group = None  # its group step fails with 500, which another replica may do better
        collection = collector.collect(PROMPTS[:1], PLAN)
        collecting = tasks.create_task(collect(collection))
        await until(lambda: old.groups)
        new = await reward_harness.serve("v2")
        reward_harness.list(new)
        await old.stop()
        groups = await collecting
        assert versions_of(groups) == {"v1"}, "the older one of the two"
        await collection.rescore_stale(groups)
        assert versions_of(groups) == {"v2"}
        assert len(new.asked) == 2
        assert len(new.groups) == 2


@pytest.mark.parametrize("scope", ["sample", "group"])
async def test_an_evaluation_after_a_step_takes_the_version_of_its_own_time(reward_harness, scope):
    servers = [await reward_harness.serve("v1"), await reward_harness.serve("v2"), await reward_harness.serve("v2")]
    reward_harness.list(servers[0])
    spec = make_reward(scope=scope)
    async with reward_harness.rewards(spec) as rewards:
        collector = Collector(Agent(), None, rewards, [spec])
        train = await collect(collector.collect(PROMPTS[:2], PLAN))
        reward_harness.list(*servers)
        await until(lambda: len(client_of(rewards).replicas.fleet.versions()) == 3)
        plan = CollectionPlan("eval", 1, 1, Sampling(), 0, "g")
        held_out = await collect(collector.collect(PROMPTS[:2], plan))
    assert (versions_of(train), versions_of(held_out)) == ({"v1"}, {"v2"})
