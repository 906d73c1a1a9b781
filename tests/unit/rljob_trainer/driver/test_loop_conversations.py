"""The real driver loop with conversations: a user and a tool behind HTTP, from the first prompt to rows and metrics."""

import asyncio
import json
from collections import Counter

import pytest
from aiohttp import web

from rljob_api.errors import UserError
from tests.support.agent_services import call_text
from tests.support.chat_templates import build_template
from tests.support.driver_harness import run_with_killed_drivers, stop_when

SOURCE = {"function": {"inline": "x"}}
AGENT = {
    "type": "loop",
    "maxAssistantTurns": 4,
    "user": {**SOURCE, "retries": 0},
    "tools": [{"name": "calc", **SOURCE, "retries": 0}],
}


def write_answer(draw, prompt):
    number = draw.randrange(1, 90)
    return call_text("calc_function", f'{{"a": {number}}}') if draw.random() < 0.3 else f"{number} is it"


def answer_call(service, body):
    """The same for the same call: every third number is right."""
    if service.function:
        return f"result {body['arguments']['a']}"
    number = int(body["arguments"]["messages"][-1]["content"].split()[0])
    state = {"tries": body["arguments"]["state"].get("tries", 0) + 1}
    return (
        {"text": f"Not {number}.", "reward": -0.25, "state": state} if number % 3 else {"reward": 1.0, "state": state}
    )


@pytest.fixture
def make_talks(make_harness):
    """Makes harnesses whose job has conversations."""

    def make(folder="harness", agent=None, **settings):
        harness = make_harness(folder, agent={**AGENT, **(agent or {})}, data={"format": "chat"}, **settings)
        harness.template = build_template("qwen25")
        harness.write_answer, harness.answer_call = write_answer, answer_call
        harness.judge = score_last_answer
        return harness

    return make


def score_last_answer(reward, body):
    """An episode that ended with a call has no number: 0."""
    first = body["completion"].split()[0]
    score = int(first) / 100 if first.isdigit() else 0.0
    return web.json_response(
        {"id": body["id"], "valid": True, "score": score, "components": {"exact": float(score > 0.5)}}
    )


def steps_of(harness):
    return harness.metrics().steps


async def test_turns_are_counted_by_where_their_prompt_is_cached(make_talks):
    async with make_talks(schedule={"steps": 2}, evaluation={"atStart": False}) as harness:
        await harness.run()
        shown = harness.board.snapshot().schedule.prefix_hits
    for step in steps_of(harness):
        assert step.turns_by_prefix["new"] <= len(step.prompts), "a group's first turn"
        assert step.turns_by_prefix["hit"] > step.num_samples, "most second turns, and first turns of other episodes"
    assert shown == step.prefix_share("hit")


async def test_status_reports_the_demand_on_user_and_tools(make_talks):
    seen = []
    async with make_talks(schedule={"steps": 2}, evaluation={"atStart": False}) as harness:

        def watch(service, body):
            seen.append(harness.board.snapshot().demand)
            return answer_call(service, body)

        harness.answer_call = watch
        await harness.run()
        last = harness.board.snapshot().demand
    for name in ("user", "calc"):
        assert all(each[name].is_open for each in seen)
        assert (seen[0][name].samples, seen[0][name].latency_seconds, seen[0][name].is_first) == (16, None, True)
        assert seen[-1][name].due_seconds > 0
        assert (last[name].samples, last[name].is_open) == (0, False), "no step follows the last one"
    assert seen[-1]["user"].latency_seconds is not None
    busy = steps_of(harness)[-1].busy_shares
    assert list(busy) == ["rollouts", "rewards", "trainer", "users", "tools"]
    assert min(busy.values()) > 0


async def test_conversations_train_and_are_reported(make_talks):
    async with make_talks(schedule={"steps": 2}) as harness:
        summary = await harness.run()
        metrics = harness.prometheus.render().decode()
    assert summary.samples_trained == 2 * 4 * 4
    assert summary.invalid_by_reason == {}
    step = steps_of(harness)[-1].agent
    assert 1 < step.turns_mean <= 4
    assert step.tools["calc"].calls > 0
    assert step.user_seconds_mean > 0
    assert sum(step.episodes_by_end.values()) == 16
    assert set(step.episodes_by_end) <= {"user", "max_turns"}
    assert -0.25 <= step.turn_reward_mean <= 1
    assert (step.segments_mean, step.segments_by_cause, step.failures) == (1, {}, {})
    evaluations = harness.metrics().evaluations
    assert all(line.agent.turns_mean >= 1 for line in evaluations)
    status = harness.board.snapshot().agent
    assert (status.turns_mean, status.episodes_by_end) == (step.turns_mean, step.episodes_by_end)
    assert 'rljob_agent_call_seconds_count{lane="train",outcome="valid",service="calc"}' in metrics
    assert 'rljob_agent_episodes_total{end="user",lane="train"}' in metrics
    assert 'rljob_agent_in_flight{service="user"} 0.0' in metrics


async def test_trained_tokens_are_the_sampled_ones_with_the_advantage_of_their_turn(make_talks):
    async with make_talks(schedule={"steps": 2}) as harness:
        await harness.run()
        decode = harness.template.decode
    rows = [row for update in harness.updates for row in update]
    logged = [row for key, row in harness.trajectories().items() if key[1] == "train"]
    assert len(rows) == len(logged) == 2 * 16
    for row in rows:
        answers = decode(row.token_ids[row.loss_mask])
        assert answers.count("<|im_end|>") == answers.count("is it") + answers.count("</tool_call>")
        assert (row.versions[row.loss_mask] >= 0).all()
    talks = [row for row in logged if len(row.turns) > 1 and any(turn.reward for turn in row.turns)]
    assert talks, "an episode of several turns with rewards"
    assert any(len({round(turn.advantage, 6) for turn in row.turns}) > 1 for row in talks), (
        "turns of one episode have different advantages"
    )
    for row in talks:
        [segment] = row.segments
        spans = [span for span in segment.spans if span.turn >= 0]
        assert [span.turn for span in spans] == list(range(len(row.turns)))
        assert [span.text for span in spans] == [turn.text + "<|im_end|>" for turn in row.turns]
        assert json.loads(row.messages)[0]["role"] == "user"


async def test_reward_sees_the_whole_conversation(make_talks):
    async with make_talks(schedule={"steps": 1}) as harness:
        await harness.run()
    bodies = [body for body in harness.requests if len(body["extra_info"]["turns"]) > 1]
    assert bodies
    for body in bodies:
        info = body["extra_info"]
        assert body["completion"] == info["turns"][-1]["text"]
        assert info["messages"][0] == body["prompt"][0]
        assert info["end"] in ("user", "max_turns")
        assert set(info["turns"][0]) == {"text", "reward", "tool_calls"}
        called = [call for turn in info["turns"] for call in turn["tool_calls"]]
        assert all(set(call) == {"name", "arguments", "error"} for call in called)
    assert any(body["extra_info"]["state"].get("tries", 0) > 1 for body in bodies)


@pytest.mark.parametrize("seed", [1, 2])
async def test_driver_killed_in_a_conversation_repeats_it(make_talks, seed):
    settings = {"schedule": {"steps": 2}, "checkpoint": {"everySteps": 1}}
    async with make_talks("undisturbed", **settings) as harness:
        expected, weight = await harness.run(), harness.final_weight()
    async with make_talks(**settings) as harness:
        ids = Counter(body["id"] for body in await run_with_killed_drivers(harness, "user", seed))
        summary = harness.summary()
    assert set(ids.values()) == {1}, "a repeated episode has other ids"
    assert (harness.final_weight(), summary.prompts_trained) == (weight, expected.prompts_trained)


def fail_for(episodes):
    """Fail the user in episodes whose id ends so: GROUP/SAMPLE."""

    def answer(service, body):
        if not service.function and body["arguments"]["episode"].endswith(episodes):
            return {"valid": False, "reason": "exception", "message": "user.py:3: KeyError: 'a'"}
        return answer_call(service, body)

    return answer


async def test_failed_episode_is_masked_and_its_group_trains_on_the_others(make_talks):
    async with make_talks(schedule={"steps": 1}, evaluation={"atStart": False}) as harness:
        harness.answer_call = fail_for(("/1/2", "/3/0"))
        harness.write_answer = lambda draw, prompt: f"{draw.randrange(1, 90)} is it"
        summary = await harness.run()
        metrics = harness.prometheus.render().decode()
    step = steps_of(harness)[0]
    assert (step.num_masked, step.num_invalid, step.invalid_by_reason) == (2, 2, {"exception": 2})
    assert step.agent.failures == {"user": 2}
    assert summary.samples_trained == 14
    train = {key[2:]: row for key, row in harness.trajectories().items() if key[1] == "train"}
    failed = {key for key, row in train.items() if row.failure}
    assert failed == {(1, 2), (3, 0)}
    for key in failed:
        row = train[key]
        assert row.failure == "spec.agent.user: exception: user.py:3: KeyError: 'a'"
        assert (row.score, row.advantage, row.rewards, row.end) == (None, None, [], "failed")
    assert all(train[group, sample].advantage is not None for group, sample in train if (group, sample) not in failed)
    assert not [body for body in harness.requests if body["id"].endswith(("/1/2", "/3/0")) and body["lane"] == "train"]
    masked = [row for update in harness.updates for row in update if not row.loss_mask.any()]
    assert len(masked) == 2, "their rows train nothing"
    [problem] = harness.board.snapshot().problems
    assert (problem.reward, problem.reason, problem.count) == ("spec.agent.user", "exception", 2)
    assert 'rljob_agent_failures_total{lane="train",reason="exception",service="user"} 2.0' in metrics


async def test_job_fails_with_the_field_when_every_episode_fails(make_talks):
    async with make_talks(evaluation={"atStart": False, "everySteps": 0}) as harness:
        harness.answer_call = fail_for(tuple(f"/{sample}" for sample in range(4)))
        with pytest.raises(UserError, match=r"^spec\.agent\.user: no sample of the last 3 steps") as caught:
            await harness.run()
    assert "x exception of spec.agent.user: user.py:3: KeyError: 'a'" in str(caught.value)


async def test_rejected_token_fails_the_job_at_once(make_talks):
    async with make_talks() as harness:
        harness.answer_call = lambda service, body: web.Response(status=401, text="wrong token")
        with pytest.raises(UserError, match=r"^spec\.agent\.(user|tools\[0\]): .* returned 401: wrong token"):
            await harness.run()
    assert not harness.updates


async def test_status_says_what_a_step_waits_for(make_talks):
    async with make_talks(evaluation={"atStart": False}) as harness:
        released, found = asyncio.Event(), []

        async def wait(service, body):
            await released.wait()
            return answer_call(service, body)

        def is_waiting():
            waits_for = harness.board.snapshot().waits_for
            if "16 replies of the user" in waits_for:
                found.append(waits_for)
            return bool(found)

        harness.answer_call = wait
        harness.write_answer = lambda draw, prompt: f"{draw.randrange(1, 90)} is it"
        await stop_when(harness, is_waiting)
        released.set()
    assert found[0].startswith("waits for 16 replies of the user, oldest 0.")
