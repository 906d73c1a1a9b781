"""Traces of the real driver loop: one tree for each episode, also if it fails, and one for each step."""

import asyncio
from collections import Counter

import aiohttp
import pytest
from aiohttp import web

from rljob_api.tracing import spans
from rljob_api.wire.calls import EpisodeCall
from rljob_api.wire.contract import PORT_SERVICE
from tests.support.agent_services import call_text
from tests.support.chat_templates import build_template
from tests.support.driver_harness import stop_when
from tests.support.traces import recording

SOURCE = {"function": {"inline": "x"}}
TALK = {
    "type": "loop",
    "maxAssistantTurns": 4,
    "user": {**SOURCE, "retries": 0},
    "tools": [{"name": "calc", **SOURCE, "retries": 0}],
}
ATTEMPT = "POST /inference/v1/generate"
CHAT = ["chat policy", "queue", ATTEMPT]
REWARD = ["reward correct", "queue", "POST /v1/score"]


def names_of(trace):
    """Return the tree without the train spans, which only groups that a step took have."""
    return [each for each in trace.names() if each != "train"]


async def test_an_episode_of_one_answer(make_harness):
    with recording() as recorded:
        async with make_harness(schedule={"steps": 1}, evaluation={"atStart": False}) as harness:
            await harness.run()
        traces, [step] = recorded.traces(), recorded.traces(spans.STEP)
    of_training = [each for each in traces if each.root.attributes["rljob.lane"] == "train"]
    assert all(names_of(each) == ["episode", ["invoke_agent", CHAT], REWARD] for each in traces)
    trained = [each for each in of_training if each.named("train")]
    assert len(trained) == harness.job.spec.schedule.prompts_per_step * harness.job.spec.algorithm.group_size
    of_first = [each for each in trained if each.root.attributes["rljob.group"] == 0]
    [episode] = [each for each in of_first if each.root.attributes["rljob.sample"] == 0]
    assert episode.root.attributes["rljob.step"] == 1
    [chat] = episode.named("chat policy")
    assert (chat.kind, chat.attributes["gen_ai.operation.name"]) == ("client", "chat")
    assert chat.attributes["gen_ai.request.model"] == "policy"
    assert chat.attributes["gen_ai.usage.output_tokens"] > 0
    assert chat.attributes["gen_ai.response.model"] == "policy"
    [attempt] = episode.named(ATTEMPT)
    assert attempt.attributes["http.response.status_code"] == 200
    [reward] = episode.named("reward correct")
    assert reward.events[0][0] == "gen_ai.evaluation.result"
    assert reward.attributes["rljob.score"] == reward.events[0][1]["gen_ai.evaluation.score.value"]
    [train] = episode.named("train")
    assert train.links == (step.root.id,), "an episode leads to the step that trained it"
    assert train.started_at >= episode.root.ended_at
    assert Counter(each.name for each in step.spans)["accumulate"] >= 1
    linked = {link for each in step.named("apply") for link in each.links}
    assert linked == {each.root.id for each in trained}, "and the step to its episodes"
    assert step.names()[-1] == "publish"


async def test_a_conversation_with_a_tool_and_a_user(make_harness):
    def write_answer(draw, prompt):
        return "17 is it" if "<tool_response>" in prompt else call_text("calc_function", '{"a": 17}')

    agent = {**TALK, "maxAssistantTurns": 2}
    with recording() as recorded:
        async with make_harness(agent=agent, data={"format": "chat"}, schedule={"steps": 1}) as harness:
            harness.template, harness.write_answer = build_template("qwen25"), write_answer
            harness.answer_call = lambda service, body: "secret" if service.function else {"reward": 1.0}
            await harness.run()
        trace = recorded.traces()[-1]
    call = ["queue", "POST /v1/call"]
    turns = [["turn 0", CHAT, ["execute_tool calc_function", *call]], ["turn 1", CHAT, ["user", *call]]]
    assert names_of(trace) == ["episode", ["invoke_agent", *turns], REWARD]
    [tool] = trace.named("execute_tool calc_function")
    assert tool.attributes["gen_ai.operation.name"] == "execute_tool"
    assert tool.attributes["gen_ai.tool.name"] == "calc_function"
    assert not any("secret" in str(each) or "is it" in str(each) for each in trace.spans), "no text is recorded"


async def test_every_attempt_of_a_reward_is_a_span(make_harness):
    tries = Counter()

    def judge(reward, body):
        tries[body["id"]] += 1
        return web.Response(status=503) if tries[body["id"]] == 1 else None

    with recording() as recorded:
        async with make_harness(schedule={"steps": 1}, num_rewards=1, evaluation={"atStart": False}) as harness:
            harness.judge = judge
            await harness.run()
        trace = recorded.traces()[0]
    [reward] = trace.named("reward correct")
    assert trace.names(reward)[:3] == ["reward correct", "queue", "POST /v1/score"]
    posts = [each for each in trace.children(reward) if each.name == "POST /v1/score"]
    assert [each.attributes["http.response.status_code"] for each in posts] == [503, 200]
    assert {each.attributes["server.port"] for each in posts} == {PORT_SERVICE}
    resends = [(each.failed, each.attributes.get("http.request.resend_count")) for each in posts]
    assert resends == [(True, None), (False, 1)]
    assert not reward.failed, "its result counts"


async def test_requests_have_the_traceparent_of_their_attempt(make_harness):
    with recording() as recorded:
        async with make_harness(schedule={"steps": 1}) as harness:
            await harness.run()
        for path in ("/v1/score", "/inference/v1/generate"):
            attempts = {f"00-{e.trace}-{e.id}-01" for each in recorded.traces() for e in each.named(f"POST {path}")}
            assert set(harness.traceparents[path]) == attempts
    assert set(harness.traceparents["/v1/info"]) <= {""}, "what belongs to no episode has none"


async def test_an_invalid_reward_and_a_failed_episode_have_whole_trees(make_harness):
    def judge(reward, body):
        return web.json_response({"id": body["id"], "valid": False, "reason": "exception", "message": "secret 51"})

    def answer_call(service, body):
        return web.json_response({"id": body["id"], "valid": False, "reason": "timeout", "message": "secret"})

    agent = {**TALK, "tools": []}
    with recording() as recorded:
        settings = {"schedule": {"steps": 1}, "evaluation": {"atStart": False}}
        async with make_harness("invalid", **settings) as harness:
            harness.judge = judge
            await harness.run()
        [invalid, *_] = recorded.traces()
        recorded.exporter.clear()
        async with make_harness("failed", agent=agent, data={"format": "chat"}, **settings) as harness:
            harness.template, harness.answer_call = build_template("qwen25"), answer_call
            harness.write_answer = lambda draw, prompt: "17"
            await harness.run()
        [failed, *_] = recorded.traces()
    [reward] = invalid.named("reward correct")
    assert (reward.failed, reward.attributes["error.type"]) == (True, "exception")
    assert reward.attributes["rljob.valid"] is False
    assert failed.root.failed
    assert (failed.root.attributes["rljob.reason"], failed.root.attributes["rljob.service"]) == ("timeout", "user")
    assert not failed.named("reward correct"), "what failed is not scored"
    assert not any("secret" in str(each) for each in [*invalid.spans, *failed.spans])


async def test_all_spans_end_when_the_driver_is_stopped(make_harness):
    """`recording` fails if one does not."""
    started = asyncio.Event()

    async def never_answer():
        started.set()
        await asyncio.Event().wait()

    agent = {**TALK, "tools": []}
    with recording() as recorded:
        async with make_harness(agent=agent, data={"format": "chat"}, evaluation={"atStart": False}) as harness:
            harness.template, harness.write_answer = build_template("qwen25"), lambda draw, prompt: "17"
            harness.answer_call = lambda service, body: never_answer()
            await stop_when(harness, started.is_set)
        [step] = recorded.traces(spans.STEP)
        assert step.root.attributes["rljob.cancelled"] is True
        stopped = recorded.traces()
    assert all(each.root.attributes["rljob.cancelled"] is True for each in stopped)
    assert any(user.attributes["rljob.cancelled"] for each in stopped for user in each.named("user"))


async def test_episodes_of_an_update_that_failed_have_whole_trees(make_harness):
    deaths = []
    with recording() as recorded:
        async with make_harness(schedule={"steps": 1}, evaluation={"atStart": False}) as harness:
            harness.kill_trainer = lambda what: what == "update" and not deaths and not deaths.append(what)
            await harness.run()
        trained = [train for each in recorded.traces() for train in each.named("train")]
    assert {each.attributes.get("error.type") for each in trained} == {"TrainerGroupDiedError", None}


@pytest.mark.parametrize("ratio", [0.0, 0.5])
async def test_a_part_of_the_episodes_is_traced(make_harness, ratio):
    with recording(ratio=ratio) as recorded:
        async with make_harness(schedule={"steps": 2}) as harness:
            await harness.run()
        traces = recorded.traces()
    assert (len(traces) > 0) == (ratio > 0)
    assert all(names_of(each) == ["episode", ["invoke_agent", CHAT], REWARD] for each in traces)


async def test_answers_of_a_program_are_in_its_episode(make_harness):
    async def play(service, body):
        call = EpisodeCall.model_validate(body["arguments"])
        headers = {"Authorization": f"Bearer {call.model.api_key}"}
        question = {"model": "policy", "messages": call.prompt}
        async with aiohttp.ClientSession() as session:
            for _ in range(2):
                async with session.post(
                    f"{call.model.url}/v1/chat/completions", json=question, headers=headers
                ) as answer:
                    assert answer.status == 200
        return {"reward": 1.0, "info": {"exact": 1.0}}

    agent = {"type": "program", "runner": {"function": {"inline": "x"}, "retries": 0, "slots": 16}}
    settings = {"agent": agent, "data": {"format": "chat"}, "rewards": [], "schedule": {"steps": 1}}
    with recording() as recorded:
        async with make_harness(**settings) as harness:
            harness.template, harness.answer_call = build_template("qwen25"), play
            harness.write_answer = lambda draw, prompt: f"{draw.randrange(1, 90)} is it"
            await harness.run()
        trace = recorded.traces()[-1]
    assert names_of(trace) == ["episode", ["invoke_agent", ["run_program", "queue", "POST /v1/call"], CHAT, CHAT]]
