"""The real driver loop and gateway with programs, which play behind HTTP: from the first prompt to rows and metrics."""

import asyncio
import json
import re
from collections import Counter

import aiohttp
import pytest

from rljob_api.errors import UserError
from rljob_api.wire.calls import EpisodeCall
from tests.support.chat_templates import build_template
from tests.support.driver_harness import run_with_killed_drivers, stop_when, wait_until
from tests.support.waiting import DEADLINE_SECONDS

AGENT = {"type": "program", "rewardWeight": 2.0, "runner": {"function": {"inline": "x"}, "retries": 0, "slots": 16}}


class Model:
    """The policy, as a program calls it."""

    def __init__(self, session, body):
        self.call = EpisodeCall.model_validate(body["arguments"])
        self.session, self.messages = session, list(self.call.prompt)
        self.headers = {"Authorization": f"Bearer {self.call.model.api_key}"}

    async def post(self, path, body):
        url = f"{self.call.model.url}/v1/{path}"
        async with self.session.post(url, json=body, headers=self.headers) as response:
            return response.status, await response.json()

    async def answer(self, *added):
        """Ask for the next answer of the conversation. Return its id and text."""
        self.messages += added
        status, found = await self.post("chat/completions", {"model": "policy", "messages": self.messages})
        assert status == 200, found
        message = found["choices"][0]["message"]
        self.messages.append(message)
        return found["id"], message["content"]


async def guess_twice(model):
    """Two answers; the reward is the second number."""
    await model.answer()
    _, text = await model.answer({"role": "user", "content": "Again."})
    number = int(text.split()[0])
    return {"reward": number / 100, "state": {"number": number}, "info": {"exact": number > 50}}


@pytest.fixture
def make_programs(make_harness):
    """Makes harnesses whose job has a program, and no rewards unless given."""

    def make(folder="harness", agent=None, play=guess_twice, rewards=(), **settings):
        harness = make_harness(
            folder, agent={**AGENT, **(agent or {})}, data={"format": "chat"}, rewards=list(rewards), **settings
        )
        harness.template = build_template("qwen25")
        harness.write_answer = lambda draw, prompt: f"{draw.randrange(1, 90)} is it"

        async def answer_call(service, body):
            async with aiohttp.ClientSession() as session:
                return await play(Model(session, body))

        harness.answer_call = answer_call
        return harness

    return make


def steps_of(harness):
    return harness.metrics().steps


async def test_status_reports_a_slot_for_each_episode(make_programs):
    seen = []

    async def play(model):
        seen.append(harness.board.snapshot().demand["runner"])
        return await guess_twice(model)

    async with make_programs(play=play, schedule={"steps": 2}, evaluation={"atStart": False}) as harness:
        await harness.run()
        last = harness.board.snapshot().demand["runner"]
        [*_, step] = harness.metrics().steps
    assert all(each.holds_slots and each.is_open for each in seen)
    assert {each.samples for each in seen[: 2 * 16]} == {16}, "an evaluation follows"
    assert (last.samples, last.is_open) == (0, False), "no step follows the last one"
    assert 0 < step.busy_shares["runners"] <= 1


async def test_program_trains_without_rewards_of_the_job(make_programs):
    async with make_programs(schedule={"steps": 2}) as harness:
        summary = await harness.run()
        metrics = harness.prometheus.render().decode()
    assert (summary.samples_trained, summary.invalid_by_reason) == (2 * 16, {})
    for step in steps_of(harness):
        assert step.reward == pytest.approx(2 * step.rewards["runner"])
        assert 0 <= step.components["exact"] <= 1
        assert step.reward_latency_p50_seconds is None
        assert step.agent.turns_mean == 2
        assert step.agent.episodes_by_end == {"returned": 16}
        assert (step.agent.segments_mean, step.agent.failures) == (1, {})
    first, _ = harness.metrics().evaluations
    assert first.accuracy == first.means["exact"]
    assert (summary.rewards_served, len(harness.requests)) == (0, 0)
    status = harness.board.snapshot()
    assert (status.agent.turns_mean, status.agent.episodes_by_end) == (2, {"returned": 16})
    assert status.learning.is_learning
    assert 'rljob_agent_call_seconds_count{lane="train",outcome="valid",service="runner"} 32.0' in metrics
    assert 'rljob_reward_score_count{component="score",lane="train",reward="runner"} 32.0' in metrics
    assert 'rljob_gateway_responses_total{api="chat/completions",model="policy",status="200"}' in metrics
    assert 'rljob_gateway_overhead_seconds_count{part="to_engine"}' in metrics
    assert "rljob_gateway_episodes 0.0" in metrics


async def test_trained_tokens_are_the_sampled_ones_and_the_log_has_the_program(make_programs):
    async with make_programs(schedule={"steps": 1}) as harness:
        await harness.run()
        decode = harness.template.decode
    rows = [row for update in harness.updates for row in update]
    logged = [row for key, row in harness.trajectories().items() if key[1] == "train"]
    assert len(rows) == len(logged) == 16
    texts = sorted(decode(row.token_ids[row.loss_mask]) for row in rows)
    assert texts == sorted("".join(f"{turn.text}<|im_end|>" for turn in row.turns) for row in logged)
    for row in logged:
        number = int(row.completion.split()[0])
        assert (row.own_reward, row.score, row.end) == (number / 100, 2 * number / 100, "returned")
        assert (json.loads(row.state), json.loads(row.info)) == ({"number": number}, {"exact": number > 50})
        assert [message["role"] for message in json.loads(row.messages)] == ["user", "assistant"] * 2
    assert any(row.advantage for row in logged)


async def test_rewards_of_the_job_are_added_and_see_the_episode(make_programs):
    rewards = [{"name": "correct", "function": {"inline": "x"}}]
    async with make_programs(rewards=rewards, schedule={"steps": 1}, evaluation={"atStart": False}) as harness:
        await harness.run()
    row = next(row for key, row in harness.trajectories().items() if key[1] == "train")
    [given] = row.rewards
    assert row.score == pytest.approx(given.score + 2 * row.own_reward)
    info = harness.requests[0]["extra_info"]
    assert (len(info["turns"]), info["end"], set(info["state"])) == (2, "returned", {"number"})
    [step] = steps_of(harness)
    assert set(step.rewards) == {"correct", "runner"}
    assert {"correct/exact", "runner/exact"} <= set(step.components)


async def reward_turns(model):
    """Only its turns are rewarded: the first by the gateway, the second by the reply."""
    first, _ = await model.answer()
    assert (await model.post("rewards", {"completion": first, "reward": -0.5}))[0] == 200
    second, text = await model.answer({"role": "user", "content": "Again."})
    return {"rewards": {second: int(text.split()[0]) / 100}}


async def test_rewards_of_turns_give_each_turn_its_advantage(make_programs):
    async with make_programs(play=reward_turns, schedule={"steps": 1}, evaluation={"accuracy": None}) as harness:
        await harness.run()
    logged = [row for key, row in harness.trajectories().items() if key[1] == "train"]
    assert {row.turns[0].reward for row in logged} == {-0.5}
    assert all(row.score == 0.0 and row.own_reward is None for row in logged)
    assert any(turn.advantage for row in logged for turn in row.turns)
    [step] = steps_of(harness)
    assert step.agent.turn_reward_mean is not None


def fail_for(*episodes, how):
    async def play(model):
        found = await guess_twice(model)
        return how(found) if model.call.episode.endswith(episodes) else found

    return play


def raise_error(found):
    return {"valid": False, "reason": "exception", "message": "agent.py:3: KeyError: 'a'"}


@pytest.mark.parametrize(
    ("how", "reason"), [(raise_error, "exception"), (lambda found: {}, "abstained"), (lambda found: [1], "bad_return")]
)
async def test_failed_episode_is_masked_and_its_group_trains_on_the_others(make_programs, how, reason):
    play = fail_for("/train/1/1/2", "/train/1/3/0", how=how)
    async with make_programs(play=play, schedule={"steps": 1}, evaluation={"atStart": False}) as harness:
        summary = await harness.run()
        metrics = harness.prometheus.render().decode()
    [step] = steps_of(harness)
    assert (step.num_masked, step.invalid_by_reason) == (2, {reason: 2})
    assert (step.agent.failures, summary.samples_trained) == ({"runner": 2}, 14)
    train = {key[2:]: row for key, row in harness.trajectories().items() if key[1] == "train"}
    assert {key for key, row in train.items() if row.failure} == {(1, 2), (3, 0)}
    assert train[1, 2].failure.startswith(f"spec.agent.runner: {reason}: ")
    assert (train[1, 2].score, train[1, 2].advantage) == (None, None)
    assert len(train[1, 2].turns) == 2, "what it did is in the log"
    [problem] = harness.board.snapshot().problems
    assert (problem.reward, problem.reason, problem.count) == ("spec.agent.runner", reason, 2)
    assert f'rljob_agent_failures_total{{lane="train",reason="{reason}",service="runner"}} 2.0' in metrics


async def test_job_fails_with_the_field_when_no_episode_is_rewarded(make_programs):
    async def play(model):
        await model.answer()
        return {}

    async with make_programs(play=play, evaluation={"atStart": False, "everySteps": 0}) as harness:
        with pytest.raises(UserError, match=r"^spec\.agent\.runner: no sample of the last 3 steps") as caught:
            await harness.run()
    assert "x abstained of spec.agent.runner: the program gave no reward" in str(caught.value)


async def test_groups_with_equal_rewards_are_replaced_by_dynamic_sampling(make_programs):
    async def play(model):
        _, text = await model.answer()
        is_equal = model.call.episode.split("/")[-2] in ("0", "2")
        return {"reward": 1.0 if is_equal else int(text.split()[0]) / 100}

    settings = {"algorithm": {"type": "dapo", "groupSize": 4}, "evaluation": {"atStart": False, "accuracy": None}}
    async with make_programs(play=play, schedule={"steps": 1}, **settings) as harness:
        await harness.run()
    [step] = steps_of(harness)
    assert (step.num_replaced_groups, step.zero_signal_share) == (2, 0)
    train = [key for key in harness.trajectories() if key[1] == "train"]
    assert len({group for _, _, group, _ in train}) == 4


async def test_status_names_what_the_step_waits_for(make_programs):
    is_open = asyncio.Event()

    async def play(model):
        found = await guess_twice(model)
        await is_open.wait()
        return found

    settings = {"schedule": {"steps": 1}, "evaluation": {"atStart": False}}
    async with make_programs(play=play, **settings) as harness, harness.driver() as driver:
        task = asyncio.create_task(driver.run())
        read = lambda: harness.board.snapshot().waits_for  # noqa: E731
        await wait_until(lambda: task.done() or read().endswith("wait for a completion"))
        await wait_until(
            lambda: task.done() or re.search(r"^waits for 16 episodes in the runner, oldest [\d.]+ s$", read())
        )
        assert not task.done()
        is_open.set()
        await asyncio.wait_for(task, DEADLINE_SECONDS)


async def test_long_episodes_span_updates_and_no_token_is_older_than_the_bound(make_programs):
    settings = {"schedule": {"type": "bounded", "maxStaleness": 1, "steps": 4}, "evaluation": {"atStart": False}}

    async def play(model):
        await model.answer()
        if model.call.episode.split("/")[-2] in ("4", "5", "6", "7"):  # of the second step: they start in the first
            await wait_until(lambda: harness.published.version >= 1)
        _, text = await model.answer({"role": "user", "content": "Again."})
        return {"reward": int(text.split()[0]) / 100, "info": {"exact": True}}

    runner = AGENT["runner"] | {"slots": 32}  # for the episodes of two steps
    async with make_programs(play=play, agent={"runner": runner}, **settings) as harness:
        await harness.run()
    staleness = [key for step in steps_of(harness) for key in step.staleness_histogram]
    assert max(staleness) == 1
    rows = [row for update in harness.updates for row in update]
    mixed = [row for row in rows if {0, 1} <= set(row.versions[row.loss_mask].tolist())]
    assert len(mixed) == 16, "two versions sampled the turns of an episode, and each token has its own"


async def test_branches_and_foreign_histories_are_segments_and_each_token_trains_once(make_programs):
    async def play(model):
        await model.answer()
        until_first = list(model.messages)
        await model.answer({"role": "user", "content": "Again."})
        model.messages = until_first
        await model.answer({"role": "user", "content": "Or so?"})
        model.messages = [{"role": "user", "content": "Sum up."}]
        _, text = await model.answer()
        return {"reward": int(text.split()[0]) / 100}

    settings = {"schedule": {"steps": 1}, "evaluation": {"atStart": False, "accuracy": None}}
    async with make_programs(play=play, **settings) as harness:
        await harness.run()
        metrics = harness.prometheus.render().decode()
    [step] = steps_of(harness)
    assert (step.agent.turns_mean, step.agent.segments_mean) == (4, 3)
    assert step.agent.segments_by_cause == {"branch": 16, "unmatched": 16}
    assert 'rljob_agent_further_segments_total{cause="branch",lane="train"} 16.0' in metrics
    logged = [row for key, row in harness.trajectories().items() if key[1] == "train"]
    for row in logged:
        found = [[span for span in segment.spans if span.turn >= 0] for segment in row.segments]
        assert [[span.turn for span in spans] for spans in found] == [[0, 1], [2], [3]]
        texts = [span.text for spans in found for span in spans]
        assert texts == [f"{turn.text}<|im_end|>" for turn in row.turns]
    rows = [row for update in harness.updates for row in update]
    assert sum(int(row.loss_mask.sum()) for row in rows) == sum(row.num_sampled_tokens for row in logged)


async def test_evaluation_counts_an_episode_that_its_program_failed_as_not_solved(make_programs):
    async def play(model):
        solved = await guess_twice(model) | {"info": {"exact": True}}
        found = {"eval/0/0/0": raise_error(solved), "eval/0/1/0": {"info": {"exact": True}}}
        return found.get(model.call.episode.partition("/")[2], solved)

    async with make_programs(play=play, schedule={"steps": 1}) as harness:
        await harness.run()
    first, _ = harness.metrics().evaluations
    num_solved = first.num_samples - 2
    assert (first.num_failed, first.num_left_out) == (1, 1)
    assert first.accuracy == num_solved / (num_solved + 1)


async def test_second_attempt_of_an_episode_drops_the_first_one_whose_key_is_refused(make_programs):
    first, statuses = {}, []

    async def play(model):
        if model.call.episode.endswith("/1/2") and "/train/" in model.call.episode:
            await model.answer()
            if model.call.attempt == 0:
                first["model"] = model
                return raise_error(None)
            first["model"].session = model.session
            statuses.append(await first["model"].post("chat/completions", {"model": "policy", "messages": []}))
        return await guess_twice(model)

    runner = AGENT["runner"] | {"retries": 1}
    settings = {"schedule": {"steps": 1}, "evaluation": {"atStart": False}}
    async with make_programs(play=play, agent={"runner": runner}, **settings) as harness:
        summary = await harness.run()
        bodies = [body for body in harness.services["runner"].bodies if body["id"].endswith("/1/2")]
    [(status, found)] = statuses
    assert (status, found["error"]["code"]) == (410, "attempt_superseded")
    assert [body["arguments"]["attempt"] for body in bodies] == [0, 1]
    assert len({body["arguments"]["model"]["api_key"] for body in bodies}) == 2
    assert (summary.samples_trained, summary.invalid_by_reason) == (16, {})
    row = next(row for key, row in harness.trajectories().items() if key[1:] == ("train", 1, 2))
    assert len(row.turns) == 3, "of the second attempt alone"


@pytest.mark.parametrize("seed", [1, 2])
async def test_driver_killed_during_episodes_repeats_them_and_ends_the_same(make_programs, seed):
    settings = {"schedule": {"steps": 2}, "checkpoint": {"everySteps": 1}}
    async with make_programs("undisturbed", **settings) as harness:
        expected, weight = await harness.run(), harness.final_weight()
    async with make_programs(**settings) as harness:
        ids = Counter(body["id"] for body in await run_with_killed_drivers(harness, "runner", seed))
        summary = harness.summary()
    assert set(ids.values()) == {1}, "a repeated episode has another id"
    assert (harness.final_weight(), summary.prompts_trained) == (weight, expected.prompts_trained)


async def test_stopped_driver_closes_the_requests_of_its_episodes(make_programs):
    ended = []

    async def play(model):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(model.call.episode)

    async with make_programs(play=play, evaluation={"atStart": False}) as harness, asyncio.timeout(DEADLINE_SECONDS):
        bodies = harness.services["runner"].bodies
        await stop_when(harness, lambda: len(bodies) == 16)
        await wait_until(lambda: len(ended) == 16)
