"""The real driver with rollouts on the trainer's devices: who works when, also after failures at any moment.

The trainer group and the rollouts of the harness record whatever they are asked for in the other's turn.
"""

import asyncio
import itertools
import random

import pytest

from rljob_api.errors import TransientError
from rljob_api.wire.scores import ScoreResult
from tests.support.driver_harness import run_undisturbed, stop_when, wait_until

STEPS = {"steps": 3, "promptsPerStep": 4, "seed": 7}
SHARED = {"rollout": {"placement": "trainer"}, "schedule": STEPS}


@pytest.mark.parametrize("kind", ["onPolicy", "synchronous"])
async def test_nobody_works_in_the_others_turn_and_the_run_is_that_of_separate_devices(make_harness, kind):
    separate = await run_undisturbed(make_harness, schedule=STEPS | {"type": "synchronous"})
    async with make_harness(**SHARED | {"schedule": STEPS | {"type": kind}}) as harness:
        summary = await harness.run()
        records = harness.metrics().steps
        assert harness.violations == []
    assert summary.prompts_trained == separate.summary.prompts_trained
    assert harness.final_weight() == separate.final_weight
    assert summary.accuracy_after == separate.summary.accuracy_after
    for record in records:
        assert record.device_bytes == {
            "trainer_update": 200, "trainer_freed": 50, "rollouts_awake": 100, "rollouts_asleep": 10,
        }  # fmt: skip
        assert record.turn_seconds.keys() == {"sleep", "restore", "free", "wake"}
        assert record.num_engine_restarts == 1
        assert {"sleep", "wake"} <= record.phase_seconds.keys()


async def test_inspection_waits_for_the_turn_and_replaced_groups_are_sampled_before_it(make_harness):
    algorithm = {"type": "dapo", "groupSize": 4, "kl": {"coefficient": 0.1}}
    async with make_harness(**SHARED, algorithm=algorithm) as harness:
        equal = set()

        def judge(reward, body):
            """Give equal scores to two groups, which are then replaced."""
            lane, group = body["lane"], body["prompt"]
            if lane == "train" and (len(equal) < 2 or group in equal):
                equal.add(group)
                return ScoreResult(id=body["id"], valid=True, score=0.5)
            return None

        harness.judge = judge
        await harness.run()
        assert harness.violations == []
        assert sum(record.num_replaced_groups for record in harness.metrics().steps) > 0


async def test_turn_waits_for_the_completions_of_an_evaluation(make_harness):
    async with make_harness(**SHARED, evaluation={"everySteps": 1}) as harness:
        for rollout in harness.rollouts:

            async def complete(request, answer=rollout.complete):
                """Answer held-out prompts once the driver waits for nothing else."""
                if (await request.json())["token_ids"][:2] == [9, 9]:
                    await wait_until(lambda: harness.board.snapshot().phase == "evaluate")
                return await answer(request)

            rollout.complete = complete
            await harness.stop(rollout)
            await harness.serve_rollout(rollout)
        await harness.run()
        assert harness.violations == []
        assert [record.step for record in harness.metrics().evaluations] == [0, 1, 2, 3]


def in_trainer(name):
    """A reward whose model sleeps with the rollouts."""
    return {"rewards": [{"name": name, "model": {"source": "/m", "placement": "trainer"}}]}


def forbid_scores_of_sleepers(harness, judge=lambda reward, body: None):
    def record(reward, body):
        if any(rollout.is_asleep for rollout in harness.sharing):
            harness.violations.append(f"{body['id']} is scored while the reward's model sleeps")
        return judge(reward, body)

    harness.judge = record


async def test_turn_waits_for_the_scores_of_an_evaluation_if_the_model_sleeps_then(make_harness):
    async with make_harness(**SHARED, **in_trainer("r"), evaluation={"everySteps": 1}) as harness:
        forbid_scores_of_sleepers(harness)
        for reward in harness.rewards:

            async def score(request, answer=reward.score):
                """Answer held-out samples once the driver has waited for them for a while, or no longer waits."""
                num_seen = itertools.count()

                def is_due():
                    waits = harness.board.snapshot().phase == "evaluate" and next(num_seen) > 20
                    return waits or harness.rollouts[0].is_asleep

                if (await request.json())["lane"] == "eval":
                    await wait_until(is_due)
                return await answer(request)

            reward.score = score
            await harness.stop(reward)
            await harness.serve_reward(reward)
        await harness.run()
        assert harness.violations == []
        assert [record.step for record in harness.metrics().evaluations] == [0, 1, 2, 3]
        assert harness.metrics().evaluations[-1].num_invalid == 0


async def test_scores_of_an_earlier_version_are_replaced_before_the_model_sleeps(make_harness):
    async with make_harness(**SHARED, **in_trainer("r")) as harness:
        for reward in harness.rewards:
            reward.version = "v1"

        def upgrade(reward, body):
            if len(harness.requests) == 9:
                for each in harness.rewards:
                    each.version = "v2"

        forbid_scores_of_sleepers(harness, upgrade)
        await harness.run()
        assert harness.violations == []
        assert [step.reward_versions for step in harness.metrics().steps] == [{"r": 1}] * 3
    assert len(harness.requests) > 3 * 16, "some were scored twice"


@pytest.mark.parametrize("seed", range(3))
async def test_group_deaths_and_drivers_killed_at_any_moment_keep_the_turns(make_harness, seed):
    expected = await run_undisturbed(make_harness, **SHARED)
    draw, num_drivers, is_finished = random.Random(seed), 0, False
    async with make_harness(**SHARED) as harness:
        harness.kill_trainer = lambda what: draw.random() < 0.03
        while not is_finished:
            num_drivers += 1
            begun, limit = [], draw.randrange(1, 7) if num_drivers < 4 else 10**9

            async def count(turn, begun=begun):
                begun.append(turn)
                await asyncio.sleep(0)

            harness.before_turn = count
            async with harness.driver() as driver:
                task = asyncio.create_task(driver.run())
                await wait_until(lambda: task.done() or len(begun) >= limit)  # noqa: B023
                is_finished = task.done()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        assert harness.violations == []
    assert num_drivers > 1
    assert harness.summary().prompts_trained == expected.summary.prompts_trained
    assert harness.final_weight() == expected.final_weight


async def test_stopped_driver_saves_the_steps_of_a_freed_trainer(make_harness):
    async with make_harness(**SHARED, checkpoint={"everySteps": 100}) as harness:
        await stop_when(harness, lambda: harness.board.status.step == 2)
        assert harness.trainers[-1].is_free
        assert (harness.run_dir / "checkpoints" / "step-000002" / "COMPLETE").exists()
        await harness.run()
        assert harness.violations == []


async def test_rollouts_that_do_not_change_end_the_driver_with_the_reason(make_harness):
    shown = []
    async with make_harness(**SHARED) as harness:

        async def refuse(turn):
            if turn == "trainer" and harness.updates:
                harness.board.waits_for("10.0.0.7: engine 0 starts")
                status = harness.board.snapshot()
                shown.append((status.phase, status.waits_for))
                raise TransientError("rollouts in trainer Pods do not sleep yet: 10.0.0.7: no answer")

        harness.before_turn = refuse
        with pytest.raises(TransientError, match=r"do not sleep yet: 10\.0\.0\.7"):
            await harness.run()
        assert len(harness.updates) == 1
    assert shown == [("sleep", "10.0.0.7: engine 0 starts")]
