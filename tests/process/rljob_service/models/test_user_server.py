"""A real server of a model user at a fake endpoint: each fault costs its call, and each call has a reason.

The unit tests of models cover every fault in this process.
"""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from rljob_api.wire.contract import ExitCode
from tests.support.fake_endpoint import completion, nothing
from tests.support.waiting import DEADLINE_SECONDS

KEY = "sk-very-secret-key"
MESSAGES = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "3"}]
CALL = {"messages": MESSAGES, "prompt": "2+2?", "ground_truth": "4", "state": {}, "turn": 0, "episode": "e"}


def answer_by_content(body: dict[str, Any], number: int) -> Any:
    """Answer as the policy's last message says."""
    faults = {
        "500": lambda: web.Response(status=500, text="out of memory", headers={"Retry-After": "60"}),
        "429": lambda: web.Response(status=429, text="slow down", headers={"Retry-After": "60"}),
        "garbage": lambda: web.Response(text="<html>"),
        "empty": lambda: completion(""),
        "never": lambda: nothing(body, number),
        "done": lambda: completion("Thanks. [DONE]"),
    }
    asked = body["messages"][-1]["content"]
    return faults.get(asked, lambda: completion(f"You said {asked}."))()


@pytest.fixture(scope="module")
def server(start_user, endpoint):
    reference = {"apiKeySecretRef": {"name": "keys", "key": "OPENAI"}}
    return start_user({"endpoint": reference}, {"RLJOB_JUDGE_API_KEY": KEY}, timeoutSeconds=2)


def call(server, answer: str) -> dict[str, Any]:
    result: dict[str, Any] = server.call(CALL | {"messages": [MESSAGES[0], {"role": "assistant", "content": answer}]})
    return result


def test_every_fault_has_its_reason_and_the_next_call_works(server, endpoint):
    endpoint.reset(answer_by_content)
    assert call(server, "3")["value"]["text"] == "You said 3."
    expected = {
        "500": ("exception", "the user's endpoint failed within timeoutSeconds (1 try); last: 500 out of memory"),
        "garbage": ("bad_return", "the user's endpoint did not return a JSON object: <html>"),
        "empty": ("empty", "the user's answer is empty"),
        "never": ("timeout", "the model ran longer than 2 s (timeoutSeconds) and was killed; it was waiting for"),
        "429": ("timeout", "the user's endpoint failed within timeoutSeconds (1 try, next try in 60"),
    }
    for answer, (reason, message) in expected.items():  # 429 is the last: the server pauses
        result = call(server, answer)
        assert (result["valid"], result["value"], result["reason"]) == (False, None, reason)
        assert message in result["message"]
    status, text, _ = server.request("GET", "/rljob/ready")
    assert (status, text[:36]) == (200, "ready: the endpoint answered 429: th")
    assert endpoint.requests[2]["messages"][-1]["content"] == "3", "after a 500, what was answered last is repeated"
    assert set(endpoint.keys) == {f"Bearer {KEY}"}
    assert KEY not in server.log.read_text()


def test_a_pause_is_waited_for_and_the_conversation_may_end(start_user, endpoint):
    asked = []

    def answer(body: dict[str, Any], number: int) -> Any:
        asked.append(body)
        headers = {"Retry-After": "0.2"}
        return answer_by_content(body, number) if len(asked) > 1 else web.Response(status=429, headers=headers)

    endpoint.reset(answer)
    server = start_user()
    result = call(server, "done")
    assert (result["valid"], result["value"]["text"]) == (True, None)
    assert endpoint.at[1] - endpoint.at[0] >= 0.2
    _, info, _ = server.request("GET", "/v1/info")
    assert (info["signature"], info["entrypoint"], len(info["version"])) == ("user", "gpt-user", 64)
    assert server.request("POST", "/v1/call", {"id": "a", "arguments": {"messages": 3}})[0] == 422


def test_refusal_of_the_first_request_ends_the_server_as_a_user_error(start_user, endpoint):
    endpoint.reset(lambda body, number: web.Response(status=401, text="bad key"))
    server = start_user()
    result = call(server, "3")
    assert (result["valid"], "answered 401 bad key" in result["message"]) == (False, True)
    assert server.process.wait(DEADLINE_SECONDS) == ExitCode.USER
    assert "model.endpoint: the user's endpoint answered 401 bad key; correct its url, model" in server.log.read_text()
