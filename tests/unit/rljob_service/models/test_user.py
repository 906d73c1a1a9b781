"""A model user at a fake endpoint: its requests, and every way in which a reply can fail.

test_judge.py has the cases of the client, which both share.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
from aiohttp import web

from rljob_api.errors import UserError
from rljob_api.wire.contract import ENV_VLLM_SOCKET
from rljob_service.models import upstream
from rljob_service.models.execution import NoScoreError
from rljob_service.models.user import OPENING, read_reply, swap_roles
from tests.support.fake_endpoint import completion, nothing
from tests.support.fake_vllm import FakeVllm

ASKED = {"role": "user", "content": "2+2?"}
ANSWERED = {"role": "assistant", "content": "3"}


@pytest.fixture(autouse=True)
def _fast_retries(monkeypatch):
    monkeypatch.setattr(upstream, "FIRST_DELAY_SECONDS", 0.01)


async def test_request_has_the_persona_and_the_conversation_from_the_other_side(make_user, endpoint):
    endpoint.reset(lambda body, number: completion("No, it is more."))
    persona = (
        "You ask {{ prompt }} ({{ data_source }}), know {{ ground_truth }}, "
        "{{ extra_info.mood }}, {{ turn }}/{{ messages | length }}."
    )
    user = await make_user({"persona": persona, "sampling": {"temperature": 0.7, "extraBody": {"top_p": 0.9}}})
    row = {"ground_truth": "4", "data_source": "sums", "extra_info": {"mood": "calm"}, "turn": 1}
    result = await user.call(ASKED, ANSWERED, **row)
    assert (result.valid, result.value) == (True, {"text": "No, it is more.", "reward": None, "state": {}, "info": {}})
    (request,) = endpoint.requests
    assert request["messages"] == [
        {"role": "system", "content": "You ask 2+2? (sums), know 4, calm, 1/2."},
        {"role": "user", "content": OPENING},
        {"role": "assistant", "content": "2+2?"},
        {"role": "user", "content": "3"},
    ]
    assert {name: request[name] for name in ("model", "temperature", "top_p", "max_tokens")} == {
        "model": "gpt-user",
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 512,
    }


async def test_served_model_is_warmed_up_and_plays_the_user(make_user, monkeypatch):
    with tempfile.TemporaryDirectory(prefix="rm-") as folder:  # the path of a socket must be short
        monkeypatch.setenv(ENV_VLLM_SOCKET, f"{folder}/socket")
        vllm = FakeVllm(f"{folder}/socket")
        user = await make_user({"endpoint": None, "model": {"source": "/m"}})
        assert (await user.call(ASKED, ANSWERED, ground_truth="4")).value["text"] == "Hi."
        vllm.close()
    warm_up, request = vllm.requests
    assert (warm_up["model"], warm_up["messages"], warm_up["max_tokens"]) == (
        "model",
        [{"role": "user", "content": "Hello"}],
        1,
    )
    assert request["messages"][0] == {"role": "system", "content": "You want 4."}


async def test_served_model_gets_the_variables_of_its_chat_template(make_user, monkeypatch):
    variables = {"enable_thinking": False}
    with tempfile.TemporaryDirectory(prefix="rm-") as folder:
        monkeypatch.setenv(ENV_VLLM_SOCKET, f"{folder}/socket")
        vllm = FakeVllm(f"{folder}/socket")
        user = await make_user({"endpoint": None, "model": {"source": "/m", "chatTemplateArguments": variables}})
        assert (await user.call(ASKED, ANSWERED)).valid
        vllm.close()
    assert [request["chat_template_kwargs"] for request in vllm.requests] == [variables, variables]


async def test_endpoint_gets_no_variables_that_it_may_not_know(make_user, endpoint):
    endpoint.reset(lambda body, number: completion("No."))
    user = await make_user({"persona": "x"})
    await user.call(ASKED, ANSWERED)
    assert "chat_template_kwargs" not in endpoint.requests[0]


async def test_stop_text_ends_the_conversation(make_user, endpoint):
    endpoint.reset(lambda body, number: completion("Thanks. [DONE]"))
    result = await (await make_user()).call(ASKED, ANSWERED, state={"kept": 1})
    assert result.value == {
        "text": None,
        "reward": None,
        "state": {"kept": 1},
        "info": {"last_message": "Thanks. [DONE]"},
    }


@pytest.mark.parametrize(
    ("answer", "reason", "message"),
    [
        (completion(None), "empty", "the user's answer is empty"),
        (completion("<think>hm</think>"), "empty", "the user's answer is empty, except for its reasoning"),
        (
            completion("It is", finish_reason="length"),
            "bad_return",
            "the user's answer was cut off at sampling.maxTokens",
        ),
        (web.Response(text="<html>"), "bad_return", "the user's endpoint did not return a JSON object: <html>"),
        (web.Response(status=400, text="too long"), "exception", "the user's endpoint answered 400 too long"),
    ],
)
async def test_an_unusable_answer_is_a_reason_and_not_the_end_of_the_conversation(
    make_user, endpoint, answer, reason, message
):
    endpoint.reset(lambda body, number: answer)
    result = await (await make_user()).call(ASKED, ANSWERED)
    assert (result.valid, result.value, result.reason) == (False, None, reason)
    assert message in result.message


async def test_endpoint_that_never_answers_is_a_timeout(make_user, endpoint):
    endpoint.reset(nothing)
    result = await (await make_user(timeoutSeconds=0.3)).call(ASKED, ANSWERED)
    assert result.reason == "timeout"
    assert "the model ran longer than 0.3 s (timeoutSeconds)" in result.message
    assert "waiting for an answer of the user's endpoint" in result.message


async def test_row_without_a_column_of_the_persona_makes_the_reply_invalid(make_user, endpoint):
    endpoint.reset(lambda body, number: completion("No."))
    result = await (await make_user({"persona": "You are {{ extra_info.name }}."})).call(ASKED, ANSWERED)
    assert result.reason == "exception"
    assert result.message == "model.persona: UndefinedError: 'dict object' has no attribute 'name'"
    assert not endpoint.requests


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"persona": "You are\n{{ nam }}."}, "model.persona:2: unknown variable nam; known variables are prompt, mess"),
        ({"persona": "{{ completion }}"}, "model.persona:1: unknown variable completion"),
        ({"endpoint": {"apiKeySecretRef": {"name": "keys", "key": "k"}}}, "Secret keys has no key k"),
    ],
)
async def test_invalid_model_user_is_rejected_at_startup(make_user, model, message):
    with pytest.raises(UserError) as caught:
        await make_user(model)
    assert message in str(caught.value)


async def test_endpoint_that_refuses_everything_names_the_field(make_user, endpoint):
    endpoint.reset(lambda body, number: web.Response(status=404, text="no such model"))
    user = await make_user()
    assert (await user.call(ASKED, ANSWERED)).reason == "exception"
    assert str(user.executor.fatal_error.result()).startswith(
        "model.endpoint: the user's endpoint answered 404 no such model; correct its url, model or"
    )


CALL = {"id": "call_0", "type": "function", "function": {"name": "search", "arguments": {}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


OPENED = user(OPENING)


@pytest.mark.parametrize(
    ("messages", "swapped"),
    [
        (
            [user("2+2?"), assistant("3"), user("Wrong."), assistant("4")],
            [OPENED, assistant("2+2?"), user("3"), assistant("Wrong."), user("4")],
        ),
        (
            [{"role": "system", "content": "Be brief."}, user("2+2?"), assistant("4")],
            [OPENED, assistant("2+2?"), user("4")],
        ),
        (
            [assistant("Hi, I am Bob."), user("2+2?"), assistant("4")],
            [user("Hi, I am Bob."), assistant("2+2?"), user("4")],
        ),
        ([user("a"), user("b"), assistant("c")], [OPENED, assistant("a\n\nb"), user("c")]),
    ],
)
def test_roles_are_swapped_and_alternate_after_the_policys_first_message(messages, swapped):
    assert swap_roles(messages) == swapped


def test_only_the_text_of_what_the_policy_did_with_tools_is_shown():
    result = {"role": "tool", "tool_call_id": "call_0", "name": "search", "content": "{}"}
    messages = [
        user("2+2?"),
        assistant("Let me look.", tool_calls=[CALL]),
        result,
        assistant(None, tool_calls=[CALL]),
        result,
        assistant("4"),
    ]
    assert swap_roles(messages) == [OPENED, assistant("2+2?"), user("Let me look.\n\n4")]


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ("<think>2+2=4</think>\n\n4", "4"),
        ("2+2=4</think>4", "4"),
        ("<think>2+2=", "(an empty message)"),
        ("", "(an empty message)"),
    ],
)
def test_reasoning_of_the_policy_is_not_shown(answer, shown):
    assert swap_roles([user("2+2?"), assistant(answer)])[-1] == user(shown)


@pytest.mark.parametrize(
    ("text", "stop", "sent", "info"),
    [
        (" No.\n", "[DONE]", "No.", {}),
        ("Thanks! [DONE]", "[DONE]", None, {"last_message": "Thanks! [DONE]"}),
        ("Thanks! [DONE]", None, "Thanks! [DONE]", {}),
        ("<think>is it [DONE]?</think>No.", "[DONE]", "No.", {}),
        ("<think>good</think>[DONE]", "[DONE]", None, {"last_message": "[DONE]"}),
        ("half \ud83d", None, "half ?", {}),
    ],
)
def test_stop_text_ends_the_conversation_and_nothing_of_it_is_sent(text, stop, sent, info):
    reply = read_reply(text, stop, {"tries": 1})
    assert (reply.text, reply.info, reply.reward, reply.state) == (sent, info, None, {"tries": 1})


@pytest.mark.parametrize("text", ["<think>hm", "<think>hm</think>\n", " "])
def test_a_text_of_reasoning_alone_is_not_the_end_of_the_conversation(text):
    with pytest.raises(NoScoreError, match="answer is empty, except for its reasoning"):
        read_reply(text, "[DONE]", {})
