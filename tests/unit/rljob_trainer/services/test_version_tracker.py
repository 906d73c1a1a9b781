"""One version per collection: which replicas get requests, which results count, and what is rescored."""

import asyncio
from dataclasses import replace

import pytest

from rljob_api.manifest.roles import Sampling
from rljob_inputs.prompts import Prompt
from rljob_trainer.driver.collection import Collection, CollectionPlan, Collector
from rljob_trainer.history.metrics import count_versions
from rljob_trainer.rewards.groups import RequestBuilder
from rljob_trainer.services.version_tracker import VersionPin
from tests.support.episodes import episode
from tests.support.reward_harness import make_request, make_reward, score_alone, until

PLAN = CollectionPlan("train", 1, 2, Sampling(), 0, "g")
PROMPTS = [Prompt(i, f"p{i}", [1], ground_truth=str(i)) for i in range(6)]


class Agent:
    """Conversations of one token; the text is the number of the sample."""

    async def run(self, task):
        index = (task.prompt.index, task.group, task.sample)
        return [episode(text=str(task.group + task.sample), index=index)]


async def collect(collection):
    async with collection:
        return [group async for group in collection.groups()]


def client_of(rewards):
    return rewards.clients["r"]


def versions_of(groups):
    return {t.results["r"].version for group in groups for t in group.episodes}


async def test_collection_uses_the_version_of_most_replicas(reward_harness):
    servers = [await reward_harness.serve(version) for version in ("v1", "v1", "v2")]
    reward_harness.list(*servers)
    async with reward_harness.rewards(make_reward()) as rewards:
        await until(lambda: len(client_of(rewards).replicas.fleet.versions()) == 3)
        rewards.begin()
        found = await asyncio.gather(*[score_alone(rewards, make_request(i)) for i in range(30)])
    assert {each["r"].version for each in found} == {"v1"}
    assert not servers[2].asked, "it stays known, but gets no request"
    assert all(server.asked for server in servers[:2])


async def test_collection_waits_for_the_first_known_version(reward_harness):
    async with reward_harness.rewards(make_reward()) as rewards, asyncio.TaskGroup() as tasks:
        rewards.begin()
        scored = tasks.create_task(score_alone(rewards, make_request(1)))
        await until(lambda: client_of(rewards).replicas.num_waiting == 1)
        reward_harness.list(await reward_harness.serve("v7"))
        assert (await scored)["r"].version == "v7"


async def test_wait_description_contains_the_missing_version(reward_harness):
    servers = [await reward_harness.serve("v1"), await reward_harness.serve("v2")]
    reward_harness.list(servers[0])
    async with reward_harness.rewards(make_reward()) as rewards, asyncio.TaskGroup() as tasks:
        client = client_of(rewards)
        client.versions.pin = pin = VersionPin(absent_seconds=1e9)
        await until(client.replicas.fleet.versions)
        rewards.begin()
        reward_harness.list(servers[1])
        await until(lambda: client.replicas.fleet.versions() == ["v2"])
        scored = tasks.create_task(score_alone(rewards, make_request(1)))
        await until(lambda: rewards.describe_wait(1, 1).endswith("no replica serves version v1"))
        pin._absent_seconds = 0.0
        assert (await scored)["r"].version == "v2"


async def test_result_does_not_count_when_its_address_has_a_new_version(reward_harness):
    reused, other = await reward_harness.serve(), await reward_harness.serve()
    reward_harness.list(reused, other)
    async with reward_harness.rewards(make_reward(failurePolicy={"retries": 0})) as rewards:
        await until(lambda: len(client_of(rewards).replicas.fleet.versions()) == 2)
        rewards.begin()
        reused.version = "v2"
        found = await asyncio.gather(*[score_alone(rewards, make_request(i)) for i in range(20)])
        assert client_of(rewards).replicas.fleet.replicas[reused.address].serves == "v2"
    assert {each["r"].version for each in found} == {"v1"}
    assert all(each["r"].valid for each in found), "a stale result uses up no retry"
    assert reused.asked, "this test must hit the reused address"


async def test_unused_samples_are_rescored_when_the_old_version_disappears(reward_harness):
    old = await reward_harness.serve("v1")
    reward_harness.list(old)
    spec = make_reward()
    old.fault = lambda body: {"valid": True, "score": 100.0}
    async with reward_harness.rewards(spec) as rewards:
        scored = []

        def record(lane, group, trajectory):
            scored.append((trajectory.group, trajectory.sample))

        collector = Collector(Agent(), None, rewards, RequestBuilder(None), on_scored=record)
        groups = []
        async with Collection(collector, PROMPTS, replace(PLAN, rewards=[spec])) as collection:
            async for group in collection.groups():
                groups.append(group)
                if len(groups) == 2:  # a mini-batch: it is used
                    await collection.rescore_stale(groups)
                    used = list(groups)
        assert versions_of(groups) == {"v1"}
        # The rolling update finishes.
        new = await reward_harness.serve("v2")
        reward_harness.list(new)
        await until(lambda: client_of(rewards).versions.pin.version == "v2")
        rest = groups[2:]
        await collection.rescore_stale(rest)
        assert versions_of(rest) == {"v2"}
        assert versions_of(used) == {"v1"}, "used samples keep their scores"
        assert [t.score for group in rest for t in group.episodes] == [
            float(group.index + t.sample) for group in rest for t in group.episodes
        ]
        trajectories = [t for group in groups for t in group.episodes]
        assert count_versions(trajectories, [spec]) == {"r": 2}, "the step's record counts both"
        assert client_of(rewards).num_rescored == 8
        assert sorted(scored) == sorted({(t.group, t.sample) for t in trajectories}), "called once per sample"
        assert collection.progress.num_scored == collection.progress.num_samples == 12
        assert sorted(new.asked) == sorted(f"g/train/1/{g.index}/{s}" for g in rest for s in range(2)), "the same ids"


async def test_group_scored_by_two_versions_is_rescored_as_a_whole(reward_harness):
    old = await reward_harness.serve("v1")
    reward_harness.list(old)
    spec = make_reward(scope="sampleThenGroup")
    async with reward_harness.rewards(spec) as rewards, asyncio.TaskGroup() as tasks:
        collector = Collector(Agent(), None, rewards, RequestBuilder(None))

        old.judge_group = None  # its group step fails with 500 and is retried on another replica
        collection = Collection(collector, PROMPTS[:1], replace(PLAN, rewards=[spec]))
        collecting = tasks.create_task(collect(collection))
        await until(lambda: old.groups)
        new = await reward_harness.serve("v2")
        reward_harness.list(new)
        await old.stop()
        groups = await collecting
        assert versions_of(groups) == {"v1"}, "the older of both"
        await collection.rescore_stale(groups)
        assert versions_of(groups) == {"v2"}
        assert len(new.asked) == 2
        assert len(new.groups) == 2


@pytest.mark.parametrize("scope", ["sample", "group"])
async def test_evaluation_after_a_step_pins_the_current_version(reward_harness, scope):
    servers = [await reward_harness.serve("v1"), await reward_harness.serve("v2"), await reward_harness.serve("v2")]
    reward_harness.list(servers[0])
    spec = make_reward(scope=scope)
    async with reward_harness.rewards(spec) as rewards:
        collector = Collector(Agent(), None, rewards, RequestBuilder(None))
        train = await collect(Collection(collector, PROMPTS[:2], replace(PLAN, rewards=[spec])))
        reward_harness.list(*servers)
        await until(lambda: len(client_of(rewards).replicas.fleet.versions()) == 3)
        plan = CollectionPlan("eval", 1, 1, Sampling(), 0, "g", [spec])
        held_out = await collect(Collection(collector, PROMPTS[:2], plan))
    assert (versions_of(train), versions_of(held_out)) == ({"v1"}, {"v2"})


async def test_token_ids_are_sent_only_to_versions_that_read_them(reward_harness):
    server = await reward_harness.serve("v1")
    bodies = []
    server.fault = lambda body: bodies.append(body)  # returns None: no fault
    reward_harness.list(server)
    request = make_request(1, prompt_ids=[1, 2], completion_ids=[3])
    async with reward_harness.rewards(make_reward()) as rewards:
        rewards.begin()
        await score_alone(rewards, request)
        assert not {"prompt_ids", "completion_ids"} & set(bodies[-1])
        # An update, which the tracker learns of by a result of the new version.
        server.version, server.reads = "v2", ["tokens"]
        await score_alone(rewards, request.model_copy(update={"id": "s2"}))
        await until(lambda: client_of(rewards).versions.reads)
        rewards.begin()
        await score_alone(rewards, request.model_copy(update={"id": "s3"}))
    assert (bodies[-1]["prompt_ids"], bodies[-1]["completion_ids"]) == ([1, 2], [3])


async def test_groups_have_token_ids_of_each_sample(reward_harness):
    server = await reward_harness.serve("v1")
    server.reads = ["tokens"]
    reward_harness.list(server)
    async with reward_harness.rewards(make_reward(scope="group")) as rewards:
        rewards.begin()
        await score_alone(rewards, make_request(1, prompt_ids=[1, 2], completion_ids=[3]))
    assert [sample.completion_ids for sample in server.groups[0].samples] == [[3]]
