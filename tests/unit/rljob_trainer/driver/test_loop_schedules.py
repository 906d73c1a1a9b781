"""The driver loop under each schedule: the same prompts, each once, within the bound of staleness, whatever dies."""

import asyncio
import itertools
import random
from functools import partial

import pytest
from aiohttp import web

from rljob_api.errors import TransientError
from tests.support.driver_harness import run_undisturbed, stop_when, wait_until
from tests.support.waiting import DEADLINE_SECONDS

SCHEDULES = {
    "synchronous": {"type": "synchronous"},
    "onPolicy": {"type": "onPolicy"},
    "oneStepOff": {"type": "oneStepOff"},
    "bounded 1": {"type": "bounded", "maxStaleness": 1},
    "bounded 3": {"type": "bounded", "maxStaleness": 3},
}
BOUNDS = {"synchronous": 0, "onPolicy": 0, "oneStepOff": 1, "bounded 1": 1, "bounded 3": 3}


@pytest.fixture
def make_harness(make_harness):
    """Groups of two samples: what dies, and when, is what these tests are about."""
    return partial(make_harness, algorithm={"groupSize": 2})


@pytest.fixture(params=SCHEDULES)
def name(request):
    return request.param


def prompts_of(summary):
    """Return how often each prompt was trained on, by row."""
    return sorted(itertools.chain(*summary.prompts_trained))


def check_staleness(harness, bound):
    steps = harness.metrics().steps
    assert all(0 <= line.staleness_max <= bound for line in steps), [line.staleness_max for line in steps]


async def test_each_prompt_trains_once_within_the_bound(make_harness, name):
    expected = await run_undisturbed(make_harness)
    async with make_harness(schedule=SCHEDULES[name]) as harness:
        summary = await harness.run()
    assert prompts_of(summary) == prompts_of(expected.summary)
    assert [len(step) for step in summary.prompts_trained] == [4] * 6
    check_staleness(harness, BOUNDS[name])


async def test_rollouts_that_cannot_load_the_weights_end_the_step_that_trains_meanwhile(make_harness):
    async with make_harness(schedule=SCHEDULES["bounded 1"]) as harness, asyncio.timeout(DEADLINE_SECONDS):

        def judge(reward, body):  # no score ends the step
            return web.Response(status=429, headers={"Retry-After": "0"}) if harness.published.version == 2 else None

        harness.judge = judge
        async with harness.driver() as driver:
            rollouts = driver._parts.collector.rollouts
            sync = rollouts.sync

            async def fail(manifest):
                if manifest.version == 2:
                    raise TransientError("no rollout has got nearer to weights g:2")
                return await sync(manifest)

            rollouts.sync = fail
            with pytest.raises(TransientError, match="weights g:2"):
                await driver.run()


async def test_on_policy_step_is_the_synchronous_one(make_harness):
    expected = await run_undisturbed(make_harness)
    async with make_harness(schedule=SCHEDULES["synchronous"]) as harness:
        summary = await harness.run()
    assert summary.prompts_trained == expected.summary.prompts_trained
    assert harness.final_weight() == expected.final_weight


async def test_driver_killed_at_any_moment_trains_each_prompt_once(make_harness, name):
    expected = await run_undisturbed(make_harness)
    draw = random.Random(name)
    async with make_harness(schedule=SCHEDULES[name]) as harness:
        for _ in range(4):
            start, dies_after = len(harness.requests), draw.randrange(5, 80)
            await stop_when(harness, lambda: len(harness.requests) - start >= dies_after)  # noqa: B023
        summary = await harness.run()
    assert prompts_of(summary) == prompts_of(expected.summary)
    assert [len(step) for step in summary.prompts_trained] == [4] * 6
    check_staleness(harness, BOUNDS[name])


async def test_trainers_that_die_at_any_moment_train_each_prompt_once(make_harness, name):
    expected = await run_undisturbed(make_harness)
    draw = random.Random(name)
    async with make_harness(schedule=SCHEDULES[name]) as harness:
        harness.kill_trainer = lambda what: draw.random() < 0.05
        summary = await harness.run()
    assert prompts_of(summary) == prompts_of(expected.summary)
    assert [len(step) for step in summary.prompts_trained] == [4] * 6


async def test_bounded_schedule_trains_on_while_a_slow_group_is_not_due(make_harness):
    """Groups that started with it train first; its own step comes when it is due."""
    async with make_harness(schedule={"type": "bounded", "maxStaleness": 2}) as harness:
        steps = []

        def judge(reward, body):
            if "/train/1/0/" in body["id"] and harness.board.status.step < 2:
                return web.Response(status=429, headers={"Retry-After": "0.02"})
            if "/train/1/0/" in body["id"]:
                steps.append(harness.board.status.step)
            return None

        harness.judge = judge
        summary = await harness.run()
    slow = summary.prompts_trained[2]
    assert set(steps) == {2}, "two steps finished without it"
    assert len(slow) == 4
    check_staleness(harness, 2)


async def test_bounded_schedule_generates_while_the_trainer_works(make_harness):
    async with make_harness(schedule={"type": "bounded", "maxStaleness": 1}, evaluation={"atStart": False}) as harness:
        is_open, seen = asyncio.Event(), []
        harness.before_apply = is_open.wait
        async with harness.driver() as driver, asyncio.timeout(DEADLINE_SECONDS):
            running = asyncio.create_task(driver.run())
            await wait_until(lambda: len(harness.requests) >= 2 * 4 * 2)
            seen.append(len(harness.updates))
            is_open.set()
            await running
    assert seen == [0], "the episodes of the second step were scored before the first update"


async def test_on_policy_groups_are_accumulated_while_others_are_scored(make_harness):
    """The gradient of a scored group does not wait for the slowest reward of the step."""
    async with make_harness(evaluation={"atStart": False}) as harness:

        def judge(reward, body):
            is_last = "/train/1/3/" in body["id"]
            if is_last and not harness.versions:
                return web.Response(status=429, headers={"Retry-After": "0.02"})
            return None

        harness.judge = judge
        await harness.run()
    assert len(harness.updates) == 6


async def test_evaluation_runs_next_to_training(make_harness):
    async with make_harness(schedule={"steps": 2}) as harness:

        def judge(reward, body):
            if "/eval/0/" in body["id"] and harness.board.status.step < 1:
                return web.Response(status=429, headers={"Retry-After": "0.02"})
            return None

        harness.judge = judge
        summary = await harness.run()
    assert summary.accuracy_before is not None
    metrics = harness.metrics()
    assert metrics.steps[0].time < metrics.evaluations[0].time, "its rewards came after the first step"
    assert (metrics.steps[0].step, metrics.evaluations[0].step) == (1, 0)


async def test_no_request_of_a_group_goes_to_weights_before_those_of_its_ticket(make_harness):
    """Even if the update of the rollouts begins late: the key that requests need is set before groups start."""
    async with make_harness(schedule=SCHEDULES["bounded 1"]) as harness, harness.driver() as driver:
        rollouts, seen = driver._parts.collector.rollouts, []
        complete, sync = rollouts.complete, rollouts.sync

        async def record(*args):
            version = int(rollouts.replicas.fleet.required_key.rpartition(":")[2])
            seen.append(version - driver._loop.lane.finished_steps)
            return await complete(*args)

        async def sync_late(manifest):
            await asyncio.sleep(0.02)
            return await sync(manifest)

        rollouts.complete, rollouts.sync = record, sync_late
        await asyncio.wait_for(driver.run(), DEADLINE_SECONDS)
    assert seen
    assert min(seen) == 0
