"""The real driver loop while what it depends on is away: it waits, loses nothing, and ends only after outageSeconds.

What causes of waiting (docs/lifecycle.md) do to a job, as the driver sees it: replicas that no list has (Unschedulable,
ImagePull, QuotaExceeded, NodeLost, RewardModelMissing), that take no connection (OOMKilled), or that refuse all
requests (a RewardModel with a new token).
"""

import asyncio
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from rljob_api.errors import UserError
from rljob_trainer.outages import OutageError
from tests.support.driver_harness import run_undisturbed, wait_until
from tests.support.skipped_time import SkippedTime
from tests.support.waiting import DEADLINE_SECONDS

REWARD_SECONDS = 1800
"""Deadline of a request. Only skipped time is as long."""
REWARD = {
    "name": "correct",
    "function": {"inline": "x"},
    "deadlineSeconds": REWARD_SECONDS,
    "failurePolicy": {"retries": 0},
}


class Away:
    """Takes the servers of a role away, and brings them back."""

    def __init__(self, harness, role, how):
        self.harness, self.how = harness, how
        self.servers = {"reward": harness.rewards, "rollout": harness.rollouts}[role]
        self.serve = {"reward": harness.serve_reward, "rollout": harness.serve_rollout}[role]

    async def begin(self):
        if self.how in ("refused", "failing"):
            status = {"refused": 401, "failing": 503}[self.how]
            self.harness.judge = lambda reward, body: web.Response(status=status, text="gone")
            return
        if self.how == "not listed":
            self.harness.write_hosts(without=self.servers)
        for server in self.servers:
            await self.harness.stop(server)

    async def end(self):
        self.harness.judge = lambda reward, body: None
        if self.how not in ("refused", "failing"):
            for server in self.servers:
                await self.serve(server)
            self.harness.write_hosts()


def find_health(driver, role):
    collector = driver._parts.collector
    clients = {"reward": collector.rewards.clients.get("correct"), "rollout": collector.rollouts}
    return clients[role].replicas.fleet.health


@pytest.mark.parametrize(
    ("role", "how"),
    [
        ("reward", "not listed"),
        ("reward", "no connection"),
        ("reward", "refused"),
        ("reward", "failing"),
        ("rollout", "not listed"),
        ("rollout", "no connection"),
    ],
)
async def test_what_is_away_for_longer_than_its_deadline_costs_nothing(make_harness, role, how):
    settings = {"rewards": [REWARD]}
    expected = await run_undisturbed(make_harness, **settings)
    async with make_harness(**settings) as harness:
        time = SkippedTime()
        harness.clock = time.now
        await check_outage_costs_nothing(harness, time, role, how)
    assert harness.summary().invalid_by_reason == {}
    assert len(harness.trainers) == 1, "no trainer is loaded again"
    assert harness.summary().prompts_trained == expected.summary.prompts_trained
    assert harness.trajectories().keys() == expected.trajectories.keys()
    assert harness.final_weight() == expected.final_weight


async def check_outage_costs_nothing(harness, time, role, how):
    async with harness.driver() as driver:
        away, health = Away(harness, role, how), find_health(driver, role)
        running = asyncio.create_task(driver.run())
        await wait_until(lambda: running.done() or harness.board.status.step >= 2)
        await away.begin()
        await wait_until(lambda: running.done() or health.failing_seconds > 0)
        time.skip(REWARD_SECONDS + 1)
        await asyncio.sleep(0.1)  # what is due runs
        assert not running.done()
        await away.end()
        await running


async def test_reward_that_never_returns_ends_the_job_which_keeps_its_steps(make_harness):
    settings = {"outageSeconds": 3600, "checkpoint": {"everySteps": 100}}
    async with make_harness(**settings) as harness, AsyncExitStack() as stack:
        time = SkippedTime()
        harness.clock = time.now
        driver = await stack.enter_async_context(harness.driver())
        away, health = Away(harness, "reward", "no connection"), find_health(driver, "reward")
        running = asyncio.create_task(driver.run())
        await wait_until(lambda: running.done() or harness.board.status.step >= 2)
        await away.begin()
        await wait_until(lambda: running.done() or health.failing_seconds > 0)
        time.skip(1800)
        [outage] = harness.board.snapshot().outages
        assert outage.what == "spec.rewards[0].function (rewards)"
        assert harness.board.snapshot().waits_for.startswith("waits for spec.rewards[0].function (rewards), away for ")
        assert "Connect" in outage.message
        time.skip(1800)
        with pytest.raises(OutageError, match=r"^spec.rewards\[0\].function \(rewards\): away since"):
            await running
        step = harness.board.status.step
    async with make_harness(**settings) as harness, harness.driver() as driver:
        await driver.run()
        assert [record.step for record in harness.metrics().steps] == [1, 2, 3, 4, 5, 6]
        assert len(harness.updates) <= 6 - step + 1, "it resumed from the steps before the outage"


async def test_new_driver_knows_what_answered_before(make_harness):
    """A driver restarts while the reward refuses all: no wrong configuration, since the reward has answered."""
    settings = {"rewards": [REWARD]}
    async with make_harness(**settings) as harness:
        async with harness.driver() as driver:
            running = asyncio.create_task(driver.run())
            await wait_until(lambda: running.done() or harness.board.status.step >= 3)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        away = Away(harness, "reward", "refused")
        await away.begin()
        async with harness.driver() as driver:
            running, health = asyncio.create_task(driver.run()), find_health(driver, "reward")
            await wait_until(lambda: running.done() or health.failing_seconds > 0.5)
            assert not running.done()
            await away.end()
            await asyncio.wait_for(running, DEADLINE_SECONDS)
        assert harness.summary().invalid_by_reason == {}


async def test_reward_that_never_answered_and_refuses_is_a_wrong_configuration(make_harness):
    async with make_harness() as harness:
        harness.judge = lambda reward, body: web.Response(status=404, text="no such page")
        with pytest.raises(UserError, match=r"spec.rewards: correct: .* returned 404: no such page") as raised:
            await harness.run()
        assert not isinstance(raised.value, OutageError)
