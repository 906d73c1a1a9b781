"""The real driver loop against fake rollout and reward servers: a whole run, and runs with failing servers."""

import asyncio
import itertools
import json
import random

import pyarrow.parquet as pq
import pytest
from aiohttp import web

from rljob_api.errors import TransientError, UserError
from rljob_api.run.metrics import StepRecord
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.scores import ScoreResult
from rljob_inputs.models.defaults import resolve_job
from tests.support.driver_harness import run_undisturbed, stop_when, wait_until
from tests.support.job_simulation import make_job
from tests.support.waiting import DEADLINE_SECONDS


async def test_job_runs_to_its_end_and_reports_it(make_harness):
    async with make_harness() as harness:
        summary = await harness.run()
    assert [len(step) for step in summary.prompts_trained] == [4] * 6
    assert sorted(list(itertools.chain(*summary.prompts_trained))[:10]) == list(range(10)), (
        "the first epoch sees each prompt once"
    )
    assert summary.samples_trained == 6 * 4 * 4
    assert summary.rewards_served == 6 * 4 * 4 + 2 * 4, "two evaluations of four prompts"
    assert summary.invalid_by_reason == {}
    assert summary.accuracy_before is not None
    assert summary.accuracy_after is not None
    assert len(set(summary.weight_digests.values())) == 1, "every rollout serves the trainer's weights"
    assert len(summary.weight_digests) == 3
    assert summary.pause_seconds == 0.25
    assert summary.transfer_seconds == 0.5
    assert summary.export == str(harness.run_dir / "export")
    metrics = harness.metrics()
    assert (len(metrics.steps), len(metrics.evaluations)) == (6, 2)
    assert metrics.steps[-1].time < metrics.evaluations[-1].time
    needed = StepRecord.model_fields.keys() - {"type", "agent", "sources", "prompt_sources"}
    written = [json.loads(line) for line in (harness.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(line.keys() >= needed for line in written if line["type"] == "step"), "the reader leaves out defaults"
    assert harness.board.snapshot().phase == "done"
    assert harness.board.snapshot().step == 6
    assert all(rollout.num_served for rollout in harness.rollouts), "the load is spread"


async def test_prompt_that_is_too_long_for_the_engine_is_invalid_with_its_reason(make_harness):
    async with make_harness(schedule={"steps": 3}, evaluation={"atStart": False}) as harness:
        harness.rejects = lambda token_ids: 5 in token_ids  # one of ten prompts
        summary = await harness.run()
    assert summary.invalid_by_reason == {"context": 4}
    [failure] = {row.failure for row in harness.trajectories().values() if row.failure}
    assert failure.startswith("spec.rollout.maxModelLen: context: the prompt has 3 tokens, and the context of the")


async def test_runs_of_the_same_job_are_identical(make_harness):
    first = await run_undisturbed(make_harness)
    async with make_harness("second") as second:
        summary = await second.run()
    assert first.summary.prompts_trained == summary.prompts_trained
    assert first.final_weight == second.final_weight(), "the same samples, in the same order, with the same scores"


async def test_raised_steps_take_effect_while_the_job_runs(make_harness):
    expected = await run_undisturbed(make_harness, schedule={"steps": 8})
    async with make_harness(schedule={"steps": 3}) as harness:
        harness.read_steps = lambda: 8 if len(harness.updates) >= 2 else 3
        summary = await harness.run()
    assert harness.board.snapshot().total_steps == 8
    assert [spec.schedule.steps for spec in harness.trainer_specs] == [8], "the ranks need it for the learning rate"
    assert summary.prompts_trained == expected.summary.prompts_trained, "as if the job had started with these steps"
    assert harness.final_weight() == expected.final_weight


async def test_changes_of_checkpoints_and_log_hold_from_the_next_step_on(make_harness):
    async with make_harness(schedule={"steps": 6}, checkpoint={"everySteps": 6, "keep": 9}) as harness:
        changed = {"checkpoint": {"everySteps": 1, "keep": 2}, "tracking": {"trajectoriesSize": 0}}
        spec = make_job(**harness.job.spec.to_manifest() | changed).spec
        harness.read_spec = lambda: spec if len(harness.updates) >= 2 else harness.job.spec
        await harness.run()
    complete = sorted(path.parent.name for path in harness.run_dir.glob("checkpoints/*/COMPLETE"))
    assert complete == ["step-000005", "step-000006"]
    logged = {path.name for path in (harness.run_dir / "trajectories").glob("*.train.parquet")}
    assert logged == {"step-000002.train.parquet"}, "the newest one with a log stays"


async def test_each_sample_trains_as_it_was_drawn_while_the_sampling_changes(make_harness):
    schedule = {"steps": 6, "type": "bounded", "maxStaleness": 2}
    async with make_harness(schedule=schedule, evaluation={"everySteps": 3}) as harness:
        parts = {"rollout": {"sampling": {"temperature": 0.5, "maxTokens": 7, "stop": ["END"]}}, "evaluation": {}}
        length = harness.job.spec.rollout.sampling.max_tokens
        changed = resolve_job(make_job(**harness.job.spec.to_manifest() | parts), None).spec
        harness.read_spec = lambda: changed if len(harness.updates) >= 2 else harness.job.spec
        await harness.run()
    drawn = [[harness.sampling[tuple(row.token_ids.tolist())] for row in rows] for rows in harness.updates]
    for rows, parameters in zip(harness.updates, drawn, strict=True):
        assert [row.temperature for row in rows] == [each["temperature"] for each in parameters]
    temperatures = [{each["temperature"] for each in parameters} for parameters in drawn]
    assert temperatures[0] == {1.0}
    assert temperatures[-1] == {0.5}
    found = {each["temperature"]: (each["max_tokens"], each["stop"]) for each in drawn[-1]}
    assert found == {0.5: (length, ["END"])}, "another maxTokens replaces the head, as ranks plan their memory by it"
    [spec] = harness.trainer_specs
    assert spec.rollout.sampling.stop == ["END"], "the ranks need it for the export"


async def test_limits_of_outages_and_hangs_are_read_while_the_job_runs(make_harness):
    async with make_harness() as harness:
        changed = {"outageSeconds": 77, "hangDetection": {"minSeconds": 900, "maxSeconds": 1000}}
        spec = make_job(**harness.job.spec.to_manifest() | changed).spec
        harness.read_spec = lambda: spec
        await harness.run()
        assert harness.outages.limit_seconds == 77
        assert harness.pace.limit("step") == 900


async def test_steps_raised_during_the_last_evaluation_are_trained(make_harness):
    async with make_harness(schedule={"steps": 2}) as harness:
        taken = []
        harness.read_steps = lambda: taken[-1] if taken else None

        def judge(reward, body):
            if body["lane"] == "eval" and body["id"].split("/")[2] == "2":
                taken.append(3)

        harness.judge = judge
        summary = await harness.run()
    assert len(summary.prompts_trained) == 3


async def test_steps_below_the_current_one_end_the_job_after_it(make_harness):
    async with make_harness(schedule={"steps": 100}) as harness:
        harness.read_steps = lambda: 2 if len(harness.updates) >= 4 else 100
        summary = await harness.run()
    assert len(summary.prompts_trained) == 4
    assert summary.accuracy_after is not None, "the last step is evaluated"
    assert (harness.run_dir / "checkpoints" / "step-000004" / "COMPLETE").exists()
    assert harness.board.snapshot().total_steps == 2


async def test_restarted_trainer_group_receives_the_current_steps(make_harness):
    async with make_harness(schedule={"steps": 3}) as harness:
        harness.read_steps = lambda: 4
        dead = []

        def kill(what):
            return what == "update" and len(harness.updates) == 2 and not dead and (dead.append(what) or True)

        harness.kill_trainer = kill
        await harness.run()
    assert dead
    assert [spec.schedule.steps for spec in harness.trainer_specs] == [4, 4]


@pytest.mark.parametrize("seed", range(3))
async def test_failing_rollouts_and_rewards_change_nothing(make_harness, seed):
    draw = random.Random(seed)

    def judge(reward, body):
        kind = draw.random()
        if kind < 0.05:
            return web.Response(status=429, headers={"Retry-After": "0.05"})
        if kind < 0.10:
            return web.Response(status=503)
        if kind < 0.15:
            return ScoreResult(id=body["id"], valid=False, reason=InvalidReason.WORKER_DIED)
        return None

    settings = {
        "rewards": [{"name": "correct", "function": {"inline": "x"}, "failurePolicy": {"retries": 20}}],
        "schedule": {"steps": 3},
    }
    expected = await run_undisturbed(make_harness, **settings)
    async with make_harness(**settings) as harness:
        harness.judge = judge
        harness.break_completion = lambda rollout: draw.random() < 0.05
        summary = await harness.run()
    assert summary.prompts_trained == expected.summary.prompts_trained
    assert summary.invalid_by_reason == {}, "each was valid in the end"
    assert harness.final_weight() == expected.final_weight


async def test_failures_with_a_score_are_trained_and_counted(make_harness):
    def judge(reward, body):
        if int(body["id"].rpartition("/")[2]) == 3 and body["lane"] == "train":
            return ScoreResult(id=body["id"], valid=False, reason=InvalidReason.TIMEOUT, message="too slow")
        return None

    policy = {"retries": 0, "scores": {"timeout": -1.0}}
    rewards = [{"name": "correct", "function": {"inline": "x"}, "failurePolicy": policy}]
    async with make_harness(schedule={"steps": 2}, rewards=rewards) as harness:
        harness.judge = judge
        summary = await harness.run()
    assert (summary.invalid_by_reason, summary.samples_trained) == ({}, 2 * 4 * 4)
    for samples in harness.updates:
        assert all(sample.advantages.any() for sample in samples[3::4])
    counted = [step.scored_failures_by_reason for step in harness.metrics().steps]
    assert [each for each in counted if each] == [{"timeout": 4}] * 2


async def test_invalid_samples_are_masked_and_counted(make_harness):
    def judge(reward, body):
        if int(body["id"].rpartition("/")[2]) == 3 and body["lane"] == "train":
            return ScoreResult(id=body["id"], valid=False, reason=InvalidReason.TIMEOUT, message="too slow")
        return None

    async with make_harness(schedule={"steps": 2}) as harness:
        harness.judge = judge
        summary = await harness.run()
    assert summary.invalid_by_reason == {"timeout": 2 * 4}
    assert summary.samples_trained == 2 * 4 * 3
    for samples in harness.updates:
        for i, sample in enumerate(samples):
            masked = i % 4 == 3
            assert (sample.loss_mask.sum() == 0) == masked
            assert not masked or not sample.advantages.any()
    num_attempts = sum(body["id"].endswith("/train/1/0/3") for body in harness.requests)
    assert num_attempts == 3, "the policy's two retries"


async def test_mean_of_a_step_is_that_of_its_valid_samples(make_harness):
    """A failure that counted as a zero would lower it."""

    def judge(reward, body):
        if int(body["id"].rpartition("/")[2]) == 3:
            return ScoreResult(id=body["id"], valid=False, reason=InvalidReason.EXCEPTION, message="no")
        return ScoreResult(id=body["id"], valid=True, score=1.0, components={"exact": 1.0})

    async with make_harness(schedule={"steps": 2}) as harness:
        harness.judge = judge
        summary = await harness.run()
    assert summary.step_rewards == [1.0, 1.0]


async def test_fail_job_ends_the_job_with_the_rewards_message(make_harness):
    rewards = [{"name": "correct", "function": {"inline": "x"}, "failurePolicy": {"action": "failJob", "retries": 0}}]
    async with make_harness(rewards=rewards) as harness:
        harness.judge = lambda reward, body: ScoreResult(
            id=body["id"], valid=False, reason=InvalidReason.EXCEPTION, message="KeyError: 'x'"
        )
        with pytest.raises(UserError, match=r"KeyError: 'x'.*failJob"):
            await harness.run()


async def test_rollout_with_wrong_digest_is_not_used(make_harness):
    async with make_harness(schedule={"steps": 2}) as harness:
        harness.rollouts[0].wrong_digest = True
        summary = await harness.run()
    assert harness.rollouts[0].num_served == 0
    assert len(summary.weight_digests) == 2
    assert b"rljob_weight_mismatches_total 3.0" in harness.prometheus.render(), "one per publication"


async def test_rollout_that_joins_late_is_used(make_harness):
    async with (
        make_harness(schedule={"steps": 10_000}) as harness,
        harness.driver() as driver,
        asyncio.timeout(DEADLINE_SECONDS),
    ):
        late = harness.rollouts[1]
        await harness.stop(late)
        running = asyncio.create_task(driver.run())
        await wait_until(lambda: harness.rollouts[0].num_served > 20)
        await harness.serve_rollout(late)
        await wait_until(lambda: late.num_served > 20)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_rollout_death_costs_only_a_retry(make_harness):
    expected = await run_undisturbed(make_harness)
    async with make_harness() as harness:
        first, second = harness.rollouts
        dead = []

        def break_completion(rollout):
            if rollout is first and first.num_served >= 30 and not dead:
                first.down = True
                dead.append(len(harness.requests))
            return rollout.down

        harness.break_completion = break_completion
        summary = await harness.run()
    assert dead, "it must have died during the run"
    assert second.num_served > first.num_served
    assert summary.prompts_trained == expected.summary.prompts_trained
    assert harness.final_weight() == expected.final_weight


async def test_replicas_that_leave_and_return_lose_no_prompt(make_harness):
    """In each round a rollout and a reward leave the list, stop during their requests, and return."""
    expected = await run_undisturbed(make_harness, schedule={"steps": 12})
    async with (
        make_harness(schedule={"steps": 12}) as harness,
        harness.driver() as driver,
        asyncio.timeout(DEADLINE_SECONDS),
    ):
        servers = [*harness.rollouts, *harness.rewards]
        running = asyncio.create_task(driver.run())

        async def serve_again(server):
            await (harness.serve_rollout if server in harness.rollouts else harness.serve_reward)(server)

        for i in range(4):
            leaving = [harness.rollouts[i % 2], harness.rewards[i % 2]]
            step = harness.board.status.step
            await wait_until(lambda: running.done() or harness.board.status.step > step + 1)  # noqa: B023
            harness.write_hosts(without=leaving)
            for server in leaving:
                await harness.stop(server)
            await wait_until(lambda: running.done() or harness.board.status.step > step + 2)  # noqa: B023
            for server in leaving:
                await serve_again(server)
            harness.write_hosts()
        await running
        summary = harness.summary()
    assert all(server.num_served for server in servers)
    assert summary.prompts_trained == expected.summary.prompts_trained
    assert summary.invalid_by_reason == {}
    assert harness.final_weight() == expected.final_weight


async def test_replicas_that_are_discovered_later_get_requests(make_harness):
    async with (
        make_harness(schedule={"steps": 10_000}) as harness,
        harness.driver() as driver,
        asyncio.timeout(DEADLINE_SECONDS),
    ):
        late = [harness.rollouts[1], harness.rewards[1]]
        harness.write_hosts(without=late)
        running = asyncio.create_task(driver.run())
        await wait_until(lambda: harness.board.status.step == 2)
        before = [server.num_served for server in late]
        harness.write_hosts()
        await wait_until(lambda: all(server.num_served > 20 for server in late))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert before[0] < 20


async def test_several_updates_per_step_refer_to_the_policy_at_its_start(make_harness):
    async with make_harness(schedule={"steps": 2, "miniBatches": 2}) as harness:
        summary = await harness.run()
    assert len(harness.updates) == 4
    versions = [(each.proximal, each.current) for each in harness.versions]
    assert sorted(set(versions)) == [(0, 0), (0, 0.5), (1, 1), (1, 1.5)]
    assert versions == sorted(versions)
    assert sorted(summary.prompts_trained[0] + summary.prompts_trained[1]) == sorted(
        set(summary.prompts_trained[0] + summary.prompts_trained[1])
    )


async def test_training_and_evaluation_never_share_an_id(make_harness):
    async with make_harness(schedule={"steps": 2}, evaluation={"accuracy": "exact", "everySteps": 1}) as harness:
        await harness.run()
    ids = [body["id"] for body in harness.requests]
    assert len(set(ids)) == len(ids)
    assert {body["lane"] for body in harness.requests} == {"train", "eval"}
    assert all(f"/{body['lane']}/" in body["id"] for body in harness.requests)


async def test_status_reports_demand_before_each_burst(make_harness):
    """The operator reads it while the step is generated, and scales by it."""
    async with make_harness(schedule={"steps": 2}, evaluation={"atStart": False}) as harness:
        early, bursts = [], []
        harness.break_completion = lambda _: early.append(harness.board.snapshot().demand["correct"])
        harness.judge = lambda _, body: bursts.append(harness.board.snapshot().demand["correct"])
        await harness.run()
    first, last = early[0], harness.board.snapshot().demand["correct"]
    assert (first.samples, first.expected, first.is_open, first.in_flight) == (16, 16, True, 0), "before any is scored"
    assert first.due_seconds is None, "unknown before the first step"
    assert all(demand.is_open and 0 < demand.expected <= demand.samples for demand in bursts)
    second = early[16]
    assert (second.samples, second.expected) == (16, 16)
    assert second.due_seconds > 0
    assert second.window_seconds is not None
    assert second.latency_seconds is not None
    assert (last.samples, last.expected, last.is_open) == (0, 0, False), "no step follows the last one"


def roll_out_in_step_two(harness):
    """Give both reward servers a new version once some of the second step's samples are scored."""
    for reward in harness.rewards:
        reward.version = "v1"

    def judge(reward, body):
        if body["id"].endswith("/train/2/7/0"):
            for each in harness.rewards:
                each.version = "v2"

    harness.judge = judge


def versions_of_step(harness, step):
    [path] = (harness.run_dir / "trajectories").glob(f"*{step}.train.parquet")
    return {row["rewards"][0]["version"] for row in pq.read_table(path).to_pylist()}


async def test_update_sees_a_single_version_when_a_new_one_appears(make_harness):
    async with make_harness(schedule={"steps": 3, "type": "synchronous"}) as harness:
        roll_out_in_step_two(harness)
        await harness.run()
    steps = harness.metrics().steps
    assert [step.reward_versions for step in steps] == [{"correct": 1}] * 3
    assert [versions_of_step(harness, i) for i in (1, 2, 3)] == [{"v1"}, {"v2"}, {"v2"}]
    assert [step.num_invalid for step in steps] == [0, 0, 0]
    assert steps[1].num_samples == 16


async def test_step_whose_first_part_was_used_reports_two_versions(make_harness, caplog):
    async with make_harness(schedule={"steps": 2, "miniBatches": 4}) as harness:
        for reward in harness.rewards:
            reward.version = "v1"

        def roll_out(what):
            if what == "after update" and len(harness.updates) == 5:
                for each in harness.rewards:
                    each.version = "v2"
            return False

        harness.kill_trainer = roll_out
        harness.judge = lambda reward, body: delay_second_step(harness, body)
        await harness.run()
    steps = harness.metrics().steps
    assert [step.reward_versions for step in steps] == [{"correct": 1}, {"correct": 2}]
    assert "step 2: scored by 2 versions of reward correct" in caplog.text


def delay_second_step(harness, body):
    """In the second step, score only the first group before the first update."""
    *_, lane, step, group, _ = body["id"].split("/")
    if (lane, step) == ("train", "2") and group != "4" and len(harness.updates) < 5:
        return web.Response(status=429, headers={"Retry-After": "0.05"})
    return None


async def test_failed_sample_ends_the_step_while_updates_wait_for_completions(make_harness):
    async with make_harness(schedule={"steps": 1, "miniBatches": 2}) as harness, harness.driver() as driver:
        rollouts = driver._parts.collector.rollouts
        complete, first_prompts = rollouts.complete, []

        async def fail_late(token_ids, *rest):
            if token_ids[0] == 1 and token_ids not in first_prompts:
                if len(first_prompts) == 2:
                    while driver._loop.lane.progress.num_scored < 2 * 4:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                    raise TransientError("no rollout answers")
                first_prompts.append(token_ids)
            return await complete(token_ids, *rest)

        rollouts.complete = fail_late
        async with asyncio.timeout(DEADLINE_SECONDS):
            with pytest.raises(TransientError, match="no rollout answers"):
                await driver.run()


def fail_in(steps, message="f.py:3: ZeroDivisionError: division by zero"):
    """Return a judge that fails every sample of training in these steps."""

    def judge(reward, body):
        if body["lane"] == "train" and int(body["id"].split("/")[2]) in steps:
            return ScoreResult(id=body["id"], valid=False, reason=InvalidReason.EXCEPTION, message=message)
        return None

    return judge


def same_score(reward, body):
    return ScoreResult(id=body["id"], valid=True, score=0.0, components={"exact": 0.0})


async def test_job_fails_with_the_reason_when_no_sample_of_three_steps_is_valid(make_harness):
    async with make_harness() as harness:
        harness.judge = fail_in(range(1, 7))
        with pytest.raises(UserError, match=r"spec\.rewards\[0\]\.function: no sample of the last 3 steps") as caught:
            await harness.run()
    assert "16 x exception of reward correct: f.py:3: ZeroDivisionError: division by zero" in str(caught.value)
    assert [step.step for step in harness.metrics().steps] == [1, 2, 3]
    [problem] = harness.board.snapshot().problems
    assert (problem.reward, problem.reason, problem.step, problem.count) == ("correct", "exception", 1, 48)
    assert harness.summary().invalid_by_reason == {"exception": 48}, "the report of the run has the reasons, too"


async def test_one_valid_step_resets_the_count_and_the_reason_stays_shown(make_harness):
    async with make_harness() as harness:
        harness.judge = fail_in({1, 2, 4, 5})
        await harness.run()
    status = harness.board.snapshot()
    assert status.learning.is_learning is True
    assert [problem.count for problem in status.problems] == [64]


async def test_count_of_steps_without_a_valid_sample_survives_a_restart_of_the_driver(make_harness):
    async with make_harness() as harness:
        harness.judge = fail_in(range(2, 7))
        await stop_when(harness, lambda: harness.board.status.step == 3)
        with pytest.raises(UserError, match="no sample of the last 3 steps"):
            await harness.run()
    assert [step.step for step in harness.metrics().steps] == [1, 2, 3, 4]


async def test_steps_with_signal_are_saved_before_the_job_fails(make_harness):
    async with make_harness(checkpoint={"everySteps": 100}) as harness:
        harness.judge = fail_in(range(2, 7))
        with pytest.raises(UserError, match="no sample"):
            await harness.run()
    assert (harness.run_dir / "checkpoints" / "step-000004" / "COMPLETE").exists()


async def test_no_checkpoint_is_written_when_no_step_had_signal(make_harness):
    async with make_harness(checkpoint={"everySteps": 100}) as harness:
        harness.judge = fail_in(range(1, 7))
        with pytest.raises(UserError, match="no sample"):
            await harness.run()
    assert not list((harness.run_dir / "checkpoints").glob("*")), "a fixed job starts with the first prompts again"


async def test_equal_scores_are_reported_and_do_not_end_the_job(make_harness):
    async with make_harness() as harness:
        harness.judge = same_score
        summary = await harness.run()
    assert len(summary.prompts_trained) == 6
    learning = harness.board.snapshot().learning
    assert (learning.is_learning, learning.reason) == (False, "NoAdvantages")
    assert learning.message.startswith("since step 1 no sample has had an advantage")


async def test_limit_of_zero_lets_a_job_without_valid_samples_end(make_harness):
    async with make_harness(schedule={"maxStepsWithoutSignal": 0}) as harness:
        harness.judge = fail_in(range(1, 7))
        summary = await harness.run()
    assert summary.samples_trained == 0
    assert harness.board.snapshot().learning.is_learning is None
