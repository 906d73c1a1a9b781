"""Conversations with tools and a user: every end, every failure, and exact tokens."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.errors import UserError
from rljob_api.wire.base import InvalidReason
from rljob_trainer.conversation.template import TemplateError
from rljob_trainer.episodes.types import EpisodeEnd, PromptTooLongError
from tests.support.agent_services import (
    MESSAGES,
    FakeServices,
    GivenPolicy,
    call_text,
    complete,
    fail,
    make_agent,
    play,
    reply,
)
from tests.support.chat_templates import build_template
from tests.support.episodes import listed
from tests.support.waiting import DEADLINE_SECONDS

ADD, MUL = call_text("add", '{"a": 2, "b": 2}'), call_text("mul", '{"a": 3}')


def texts(episode, role):
    return [message["content"] for message in episode.messages if message["role"] == role]


async def test_user_replies_rewards_and_ends_the_conversation():
    services = FakeServices(
        user=[reply("Too low.", -0.5, state={"tries": 1}, info={"n": 1}), reply(None, 1.0, state={"tries": 2})]
    )
    policy = GivenPolicy("3", "4")
    episode = await play(make_agent(user=True), services, policy)
    assert (episode.end, episode.failure) == (EpisodeEnd.USER, None)
    assert [(turn.text, turn.reward, turn.user_info) for turn in episode.turns] == [
        ("3", -0.5, {"n": 1}),
        ("4", 1.0, {}),
    ]
    assert [message["content"] for message in episode.messages] == ["2 + 2?", "3", "Too low.", "4"]
    assert (episode.state, episode.generation, episode.text) == ({"tries": 2}, "g", "4")
    first, second = (request.arguments for request in services.requests)
    assert (first["state"], second["state"], first["turn"], second["turn"]) == ({}, {"tries": 1}, 0, 1)
    assert (first["prompt"], first["ground_truth"], first["data_source"]) == (MESSAGES, "4", "sums")
    assert (first["extra_info"]["level"], first["episode"]) == ("easy", "g/train/1/5/2")
    assert first["messages"][-1] == {"role": "assistant", "content": "3"}, "the call has its own copy"
    assert len({request.id for request in services.requests}) == 2
    [segment] = listed(episode.segments)
    assert policy.prompts[1] == segment.token_ids[: len(policy.prompts[1])], "the second prompt continues the first"
    assert segment.turns.count(0) == len(complete("3").token_ids)


async def test_calls_run_at_once_and_their_results_are_in_order():
    second_is_called = asyncio.Event()

    async def add(request):
        await asyncio.wait_for(second_is_called.wait(), DEADLINE_SECONDS)
        return "four"

    async def mul(request):
        second_is_called.set()
        return "nine"

    services = FakeServices(add=lambda request: add(request), mul=lambda request: mul(request))
    agent = make_agent(tools=["add-tool", "mul-tool"])
    episode = await play(agent, services, GivenPolicy(f"Let me see. {ADD}\n{MUL}", "It is 4."))
    assert episode.end is EpisodeEnd.ANSWERED
    assert texts(episode, "tool") == ["four", "nine"]
    answer = episode.messages[1]
    assert (answer["content"], [call["function"]["name"] for call in answer["tool_calls"]]) == (
        "Let me see. ",
        ["add", "mul"],
    )
    assert [message["tool_call_id"] for message in episode.messages[2:4]] == [c["id"] for c in answer["tool_calls"]]
    calls = episode.turns[0].tool_calls
    assert [(c.name, c.tool, c.arguments, c.error, c.seconds) for c in calls] == [
        ("add", "add-tool", {"a": 2, "b": 2}, "", 0.5),
        ("mul", "mul-tool", {"a": 3}, "", 0.5),
    ]
    assert len({request.id for request in services.requests}) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (call_text("sub"), "Error: there is no function sub; the functions are add"),
        ("<tool_call>{oops</tool_call>", "Error: the call is not a JSON object with a name and an object of arguments"),
        (call_text("add", '{"a": NaN}'), "Error: the arguments must be JSON, without NaN and deep nesting"),
        (call_text("add", '{"a": ' + "[" * 70 + "]" * 70 + "}"), "Error: the arguments must be JSON"),
    ],
)
async def test_call_that_cannot_be_made_is_a_message_to_the_model(text, expected):
    services = FakeServices(add="4")
    agent = make_agent(tools=["add-tool"], tool={"onError": "invalid"})
    episode = await play(agent, services, GivenPolicy(text, "so be it"))
    assert (episode.end, services.requests) == (EpisodeEnd.ANSWERED, [])
    [result] = texts(episode, "tool")
    assert result.startswith(expected)
    [call] = episode.turns[0].tool_calls
    assert (call.tool, f"Error: {call.error}") == ("", result)


@pytest.mark.parametrize(
    ("on_error", "reason", "ends"),
    [
        ("message", InvalidReason.TIMEOUT, EpisodeEnd.ANSWERED),
        ("invalid", InvalidReason.TIMEOUT, EpisodeEnd.FAILED),
        ("invalid", InvalidReason.BAD_REQUEST, EpisodeEnd.ANSWERED),
    ],
)
async def test_failed_call_is_a_message_or_an_invalid_episode(on_error, reason, ends):
    services = FakeServices(mul="9", add=fail(reason, "took 30 s"))
    agent = make_agent(tools=["mul-tool", "add-tool"], tool={"onError": on_error})
    episode = await play(agent, services, GivenPolicy(f"{ADD}{MUL}", "done"))
    assert episode.end is ends
    assert [call.error for call in episode.turns[0].tool_calls] == [f"{reason}: took 30 s", ""]
    if ends is EpisodeEnd.FAILED:
        assert str(episode.failure) == "spec.agent.tools[1]: timeout: took 30 s"
        assert episode.failure.service == "add-tool"
    else:
        assert texts(episode, "tool") == ["Error: took 30 s", "9"]


async def test_long_result_is_cut():
    agent = make_agent(tools=["add-tool"], tool={"maxResultCharacters": 5})
    episode = await play(agent, FakeServices(add="123456789"), GivenPolicy(ADD, "done"))
    assert texts(episode, "tool") == ["12345"]


async def test_user_gets_the_results_of_tools_and_is_not_asked_after_a_call():
    services = FakeServices(add="4", user=reply(None, 1.0))
    agent = make_agent(user=True, tools=["add-tool"])
    episode = await play(agent, services, GivenPolicy(ADD, "4"))
    assert [request.function for request in services.requests] == ["add", ""]
    assert [message["role"] for message in services.requests[1].arguments["messages"]] == [
        *("user", "assistant", "tool", "assistant"),
    ]
    assert [turn.reward for turn in episode.turns] == [None, 1.0]


async def test_last_answer_is_rewarded_and_what_the_user_says_is_not_used():
    services = FakeServices(user=lambda request: reply("Again.", -0.1))
    episode = await play(make_agent(user=True, maxAssistantTurns=2), services, GivenPolicy("1", "2"))
    assert episode.end is EpisodeEnd.MAX_TURNS
    assert [turn.reward for turn in episode.turns] == [-0.1, -0.1]
    assert episode.messages[-1]["content"] == "2"


async def test_max_user_turns_counts_the_replies():
    services = FakeServices(user=lambda request: reply("Again.", -0.1))
    episode = await play(make_agent(user=True, maxUserTurns=1), services, GivenPolicy("1", "2"))
    assert episode.end is EpisodeEnd.MAX_TURNS
    assert texts(episode, "user") == ["2 + 2?", "Again."]
    assert [request.arguments["turn"] for request in services.requests] == [0, 1]


async def test_calls_of_the_last_answer_are_not_made():
    services = FakeServices(add="4")
    episode = await play(make_agent(tools=["add-tool"], maxAssistantTurns=1), services, GivenPolicy(ADD))
    assert (episode.end, services.requests) == (EpisodeEnd.MAX_TURNS, [])
    assert episode.turns[0].tool_calls[0].error == "it was not called: the episode has reached maxAssistantTurns"


async def test_truncated_answer_ends_the_episode_without_calls_and_reply():
    services = FakeServices(add="4", user=reply("Again."))
    policy = GivenPolicy(complete(f"{ADD}{ADD}", truncated=True))
    episode = await play(make_agent(user=True, tools=["add-tool"]), services, policy)
    assert (episode.end, episode.truncated, services.requests) == (EpisodeEnd.TRUNCATED, True, [])
    assert (policy.limits, episode.turns[0].tool_calls) == ([None], []), "it may end within a call"


async def test_answer_gets_the_room_that_the_context_has_and_ends_there():
    first = GivenPolicy("1", "2")
    await play(make_agent(user=True), FakeServices(user=[reply("Again."), reply(None)]), first, context_length=1000)
    assert first.limits == [1000 - len(prompt) for prompt in first.prompts]
    cut = complete("2", truncated=True)
    limit = len(first.prompts[1]) + len(cut.token_ids)
    policy = GivenPolicy("1", cut)
    episode = await play(make_agent(user=True), FakeServices(user=reply("Again.")), policy, context_length=limit)
    assert (policy.limits[1], episode.end) == (len(cut.token_ids), EpisodeEnd.CONTEXT)


async def test_episode_ends_when_the_next_prompt_leaves_no_room():
    first = GivenPolicy("1", "2")
    await play(make_agent(user=True), FakeServices(user=[reply("Again."), reply(None)]), first)
    policy = GivenPolicy("1")
    services = FakeServices(user=reply("Again.", -1.0))
    episode = await play(make_agent(user=True), services, policy, context_length=len(first.prompts[1]))
    assert (episode.end, episode.failure, len(policy.prompts)) == (EpisodeEnd.CONTEXT, None, 1)
    assert episode.segments[-1].turns[-1] == 0, "no context that nothing answers"
    assert episode.turns[0].reward == -1.0


async def test_first_prompt_without_room_is_invalid_with_a_row():
    episode = await play(make_agent(user=True), FakeServices(user=reply(None)), GivenPolicy(), context_length=3)
    assert (episode.end, episode.failure.reason) == (EpisodeEnd.FAILED, "context")
    assert episode.failure.path == "spec.rollout.maxModelLen"
    assert (episode.num_tokens, episode.num_sampled) == (2, 0)


async def test_engine_that_knows_a_shorter_limit_ends_the_episode_too():
    policy = GivenPolicy("1", PromptTooLongError(90, 64))
    episode = await play(make_agent(user=True), FakeServices(user=reply("Again.", -1.0)), policy)
    assert (episode.end, episode.failure, len(episode.turns)) == (EpisodeEnd.CONTEXT, None, 1)
    episode = await play(make_agent(user=True), FakeServices(), GivenPolicy(PromptTooLongError(90, 64)))
    assert str(episode.failure).startswith("spec.rollout.maxModelLen: context: the prompt has 90 tokens, and")
    assert (episode.num_tokens, episode.num_sampled) == (2, 0)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (fail(InvalidReason.EXCEPTION), "exception"),
        (fail(InvalidReason.UNREACHABLE), "unreachable"),
        ("not a reply", "bad_return"),
        ({"text": 3}, "bad_return"),
        ({"text": None, "reward": "much"}, "bad_return"),
    ],
)
async def test_user_without_a_reply_makes_the_episode_invalid(answer, reason):
    episode = await play(make_agent(user=True), FakeServices(user=answer), GivenPolicy("4"))
    assert (episode.end, episode.failure.reason, episode.failure.path) == (
        EpisodeEnd.FAILED, reason, "spec.agent.user",
    )  # fmt: skip
    assert [turn.reward for turn in episode.turns] == [None], "no reward is not 0"


async def test_episode_that_takes_too_long_is_invalid_and_keeps_its_turns():
    async def hang(request):
        await asyncio.Event().wait()

    services = FakeServices(user=lambda request: hang(request))
    episode = await play(make_agent(user=True, episodeSeconds=0.05), services, GivenPolicy("4"))
    assert str(episode.failure) == (
        "spec.agent.episodeSeconds: deadline: the episode took more than 0.05 s, while it waited for the user"
    )
    assert (episode.end, episode.text) == (EpisodeEnd.FAILED, "4")


async def test_timeout_of_the_rollouts_is_not_that_of_the_episode():
    class Policy(GivenPolicy):
        async def __call__(self, token_ids, max_tokens=None):
            raise TimeoutError

    with pytest.raises(TimeoutError):
        await play(make_agent(user=True), FakeServices(user=reply(None)), Policy())


async def test_template_that_refuses_the_data_is_a_user_error():
    with pytest.raises(UserError, match=r"^spec.model.source: the chat template fails"):
        await play(make_agent(user=True), FakeServices(user=reply(None)), GivenPolicy(), messages=[{"role": "user"}])


async def test_template_that_refuses_a_later_message_makes_the_episode_invalid(monkeypatch):
    template = build_template("smollm2")
    render = type(template).render

    def refuse(self, messages, tools, *, generate):
        if messages[-1]["content"] == "Again.":
            raise TemplateError("refused")
        return render(self, messages, tools, generate=generate)

    monkeypatch.setattr(type(template), "render", refuse)
    services = FakeServices(user=reply("Again."))
    episode = await play(make_agent(user=True), services, GivenPolicy("4", family="smollm2"))
    assert str(episode.failure) == "spec.model.source: exception: refused"


async def test_dropped_reasoning_continues_in_a_new_segment_with_the_cause():
    services = FakeServices(user=[reply("Again."), reply(None)])
    policy = GivenPolicy("<think>\nhm\n</think>\n\n3", "4", family="qwen3")
    episode = await play(make_agent(user=True), services, policy)
    assert [set(segment.turns) - {-1} for segment in episode.segments] == [{0}, {1}]
    [found] = episode.breaks
    assert found.cause == "history"
    assert "hm" in found.difference


async def test_user_error_of_a_service_ends_the_job():
    def refuse(request):
        raise UserError("spec.agent.user: 10.0.0.1 returned 401")

    with pytest.raises(UserError, match="401"):
        await play(make_agent(user=True), FakeServices(user=refuse), GivenPolicy("4"))
    agent = make_agent(tools=["add-tool", "mul-tool"])
    with pytest.raises(UserError, match="401"):
        await play(agent, FakeServices(add=refuse, mul="9"), GivenPolicy(ADD + MUL))


OUTCOMES = st.one_of(
    st.sampled_from([fail(reason) for reason in InvalidReason]),
    st.builds(reply, st.none() | st.text(max_size=5), st.none() | st.floats(-1, 1)),
    st.sampled_from(["text", 3, None, [], {"text": []}]),
)
ANSWERS = st.sampled_from(["4", ADD, MUL, ADD + MUL, call_text("sub"), "<tool_call>", complete("4", truncated=True)])


@given(st.data())
def test_any_schedule_of_failures_ends_every_episode_valid_or_with_a_reason(data):
    on_error = data.draw(st.sampled_from(["message", "invalid"]))
    services = FakeServices(**{name: lambda request: data.draw(OUTCOMES) for name in ("user", "add", "mul")})
    agent = make_agent(
        user=True,
        tools=["add-tool", "mul-tool"],
        tool={"onError": on_error},
        maxAssistantTurns=data.draw(st.integers(1, 4)),
    )
    policy = GivenPolicy(*data.draw(st.lists(ANSWERS, min_size=4, max_size=4)))
    limit = data.draw(st.none() | st.integers(1, 600))
    episode = asyncio.run(play(agent, services, policy, context_length=limit))
    assert (episode.failure is not None) == (episode.end is EpisodeEnd.FAILED)
    assert len(episode.breaks) == len(episode.segments) - 1
    assert episode.failure is None or (episode.failure.reason and episode.failure.path.startswith("spec."))
    sampled = [turn for segment in episode.segments for turn in segment.turns if turn >= 0]
    assert sorted(set(sampled)) == list(range(len(episode.turns))), "each answer is in one segment"
    assert episode.failure is not None or episode.turns


SANDBOX = {"function": None, "sandbox": {"provider": "agentSandbox"}}


async def test_each_sandbox_that_an_episode_used_is_given_back_once():
    services = FakeServices(add="4", mul="9")
    agent = make_agent(tools=["add-tool", "mul-tool"], tool=SANDBOX)
    await play(agent, services, GivenPolicy(ADD, ADD, "4"))
    assert services.ended == [("add-tool", "g/train/1/5/2")]
    assert {request.episode for request in services.requests} == {"g/train/1/5/2"}


async def test_the_sandbox_of_a_cancelled_episode_is_given_back():
    is_called = asyncio.Event()

    async def add(request):
        is_called.set()
        await asyncio.Event().wait()

    services = FakeServices(add=lambda request: add(request))
    episode = asyncio.create_task(play(make_agent(tools=["add-tool"], tool=SANDBOX), services, GivenPolicy(ADD)))
    await asyncio.wait_for(is_called.wait(), DEADLINE_SECONDS)
    episode.cancel()
    await asyncio.wait({episode})
    assert services.ended == [("add-tool", "g/train/1/5/2")]


async def test_tools_without_sandboxes_are_not_called_at_the_end():
    services = FakeServices(add="4")
    await play(make_agent(tools=["add-tool"]), services, GivenPolicy(ADD, "4"))
    assert services.ended == []


@pytest.mark.parametrize("tool", [SANDBOX, {"function": None, "sandbox": {}}])
async def test_sandbox_that_fails_is_a_message_and_a_problem_of_the_job(tool):
    services = FakeServices(add=fail(InvalidReason.EXCEPTION, "DependenciesNotReady: Pod is Pending"))
    episode = await play(make_agent(tools=["add-tool"], tool=tool), services, GivenPolicy(ADD, "4"))
    assert (episode.failure, episode.end) == (None, EpisodeEnd.ANSWERED)
    [failure] = episode.sandbox_failures
    assert str(failure) == "spec.agent.tools[0]: exception: DependenciesNotReady: Pod is Pending"


@pytest.mark.parametrize(("tool", "reason"), [({}, InvalidReason.EXCEPTION), (SANDBOX, InvalidReason.BAD_REQUEST)])
async def test_what_the_policy_did_wrong_is_not_a_problem_of_the_job(tool, reason):
    services = FakeServices(add=fail(reason))
    episode = await play(make_agent(tools=["add-tool"], tool=tool), services, GivenPolicy(ADD, "4"))
    assert episode.sandbox_failures == []
