"""A judge at a fake endpoint: its requests, and every way in which an answer can fail."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from rljob_api.errors import UserError
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.contract import ENV_JUDGE_API_KEY
from rljob_service.models import upstream
from tests.support.fake_endpoint import completion, nothing
from tests.support.waiting import DEADLINE_SECONDS

KEY = "sk-very-secret-key"
SCHEMA = {
    "type": "object",
    "properties": {"score": {"type": "number"}, "clear": {"type": "boolean"}},
    "required": ["score", "clear"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def _fast_retries(monkeypatch):
    monkeypatch.setattr(upstream, "FIRST_DELAY_SECONDS", 0.01)


@pytest.fixture
async def judge(make_judge, monkeypatch):
    """The smallest judge, with a key."""
    monkeypatch.setenv(ENV_JUDGE_API_KEY, KEY)
    return await make_judge({"endpoint": {"apiKeySecretRef": {"name": "keys", "key": "OPENAI"}}})


def answers(*given: Any):
    """Return each answer once, then the last one: a function that returns a Response, or the text of a completion."""

    def answer(body: dict[str, Any], number: int) -> web.Response:
        value = given[min(number, len(given) - 1)]
        return completion(value) if isinstance(value, str) else value()

    return answer


def status(code: int, text: str = "", **headers: str):
    return lambda: web.Response(status=code, text=text, headers={k.replace("_", "-"): v for k, v in headers.items()})


async def test_pause_that_the_endpoint_asks_for_is_bounded_and_shown(make_judge, endpoint):
    judge = await make_judge(timeoutSeconds=1)
    endpoint.reset(answers(status(429, "slow down", Retry_After="1e9")))
    assert (await judge.score("x")).reason is InvalidReason.TIMEOUT
    assert 50 < judge.metric('rljob_reward_limit_pause_seconds{reward="test"}') <= 60
    assert judge.executor.pool.notice.startswith("the endpoint answered 429: the next request follows in ")


async def test_request_follows_the_template_and_answer_is_the_score(judge, endpoint):
    endpoint.reset(answers("I think that 3 is low.\nScore: 3\nNo: better.\nScore: 0.5"))
    result = await judge.score("four")
    assert (result.valid, result.score) == (True, 0.5), "the last match counts"
    request = endpoint.requests[0]
    assert request["messages"] == [{"role": "user", "content": "Rate: four"}]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("gpt-judge", 0.0, 512)
    assert endpoint.keys == [f"Bearer {KEY}"]
    assert judge.metric('rljob_reward_tokens_total{kind="prompt",reward="test"}') == 70
    assert judge.metric('rljob_reward_calls_total{outcome="200",reward="test"}') == 1


async def test_rate_limits_are_waited_for_and_are_not_failures(judge, endpoint):
    endpoint.reset(answers(status(429, "slow down", Retry_After="0.2"), status(429, "slow down"), "Score: 1"))
    result = await judge.score("x")
    assert (result.score, len(endpoint.requests)) == (1.0, 3)
    assert endpoint.at[1] - endpoint.at[0] >= 0.2, "Retry-After is honoured"
    assert judge.metric('rljob_reward_calls_total{outcome="429",reward="test"}') == 2


@pytest.mark.parametrize("codes", [(500, 503), (507, 521), (530, 408)])
async def test_server_errors_are_retried(judge, endpoint, codes):
    endpoint.reset(answers(*map(status, codes), "Score: 1"))
    assert (await judge.score("x")).score == 1.0


@pytest.mark.parametrize(
    ("answer", "reason", "message"),
    [
        (status(401, f"bad key {KEY}"), "exception", "answered 401 bad key ***"),
        (status(404, "no such model"), "exception", "answered 404 no such model"),
        (status(302, "", Location="http://elsewhere/"), "exception", "answered 302"),
        (status(200, "<html>hello"), "bad_return", "did not return a JSON object: <html>hello"),
        (status(200, "[]"), "bad_return", "did not return a JSON object: []"),
        (status(200, "[" * 10_000), "bad_return", "did not return a JSON object: [[["),
        (status(200, '{"choices": []}'), "bad_return", "not a chat completion: \"{'choices': []}\""),
        (status(200, '{"choices": [{"message": 3}]}'), "bad_return", "not a chat completion"),
        (status(200, f'{{"error": "bad key {KEY}"}}'), "bad_return", "not a chat completion: \"{'error': 'bad key ***"),
        (status(200, f'{{"error": "{"x" * 175} {KEY}"}}'), "bad_return", "xxx ***"),
        (lambda: completion(None), "empty", "the judge's answer is empty"),
        (lambda: completion("<think>Score: 1</think>"), "empty", "has its reasoning alone"),
        (
            lambda: completion("", message={"content": None, "reasoning_content": "It is Score: 1"}),
            "empty",
            "the judge's answer is empty; it has reasoning_content alone: 'It is Score: 1'",
        ),
        (lambda: completion("", message={"content": "", "reasoning": "Hm."}), "empty", "it has reasoning alone: 'Hm.'"),
        (lambda: completion("", message={"content": None, "refusal": "I cannot"}), "refused", "refused: 'I cannot'"),
        (
            lambda: completion("", finish_reason="content_filter"),
            "content_filter",
            "a filter withheld the",
        ),
        (lambda: completion("Score: 1", finish_reason="content_filter"), "content_filter", "after 'Score: 1'"),
        (lambda: completion("Score: 1", finish_reason="length"), "bad_return", "cut off at sampling.maxTokens"),
        (lambda: completion("no idea"), "bad_return", "does not match judge.parser.regex: 'no idea'"),
        (lambda: completion("Score: high"), "bad_return", "'high', which is not a number"),
        (lambda: completion("Score: nan"), "not_finite", "nan"),
        (lambda: completion("Score: 1e999"), "not_finite", "inf"),
    ],
)
async def test_unusable_answer_is_invalid_with_its_beginning(judge, endpoint, answer, reason, message):
    endpoint.reset(answers(answer))
    result = await judge.score("x")
    assert (result.valid, result.score, result.reason) == (False, None, reason)
    assert message in result.message
    assert KEY not in str(result)
    assert len(endpoint.requests) == 1, "a retry would not help"


async def test_verdict_in_a_tool_call_is_read(make_judge, endpoint):
    function = {"name": "verdict", "arguments": '{"score": 3, "clear": true}'}
    calls = [{"id": "c", "type": "function", "function": function}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    endpoint.reset(lambda body, number: completion(None, message=message, finish_reason="tool_calls"))
    assert (await (await make_judge({"parser": {"jsonSchema": SCHEMA}})).score("x")).score == 3.0


@pytest.mark.parametrize("code", [429, "429", 503])
async def test_error_in_the_body_of_a_200_is_its_status(judge, endpoint, code):
    body = json.dumps({"error": {"code": code, "message": "later"}})
    endpoint.reset(answers(status(200, body), "Score: 1"))
    assert (await judge.score("x")).score == 1.0
    assert judge.metric(f'rljob_reward_calls_total{{outcome="{code}",reward="test"}}') == 1


async def test_endpoint_that_refuses_everything_ends_the_server(make_judge, endpoint):
    endpoint.reset(answers(status(401, "bad key")))
    judge = await make_judge()
    assert (await judge.score("x")).reason == "exception"
    error = judge.executor.fatal_error.result()
    assert isinstance(error, UserError)
    assert str(error) == (
        "judge.endpoint: the judge's endpoint answered 401 bad key; correct its url, model or apiKeySecretRef"
    )


@pytest.mark.parametrize("given", [("Score: 1", status(401)), (status(403), status(400))])
async def test_endpoint_that_has_answered_or_refuses_one_text_fails_only_that_sample(make_judge, endpoint, given):
    endpoint.reset(answers(*given))
    judge = await make_judge(timeoutSeconds=1)
    assert not (await judge.score("x"), await judge.score("y"))[1].valid
    assert not judge.executor.fatal_error.done()


async def test_endpoint_that_never_answers_is_a_timeout(make_judge, endpoint):
    endpoint.reset(nothing)
    result = await (await make_judge(timeoutSeconds=0.3)).score("x")
    assert result.reason == "timeout"
    assert "waiting for an answer of the judge's endpoint" in result.message
    async with asyncio.timeout(DEADLINE_SECONDS):
        while endpoint.in_flight:  # the connection is closed  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("code", "reason", "message"),
    [(500, "unreachable", "500 out of memory"), (429, "timeout", "429 out of memory")],
)
async def test_error_is_final_when_a_retry_would_be_too_late(make_judge, endpoint, code, reason, message):
    endpoint.reset(answers(status(503), status(code, "out of memory", Retry_After="60")))
    result = await (await make_judge(timeoutSeconds=30)).score("x")
    assert result.reason == reason
    assert message in result.message
    assert len(endpoint.requests) == 2, "the first error is retried"


async def test_endpoint_without_a_connection_is_unreachable(make_judge, endpoint):
    judge = await make_judge({"endpoint": {"url": f"http://{endpoint.host}:1/v1"}}, timeoutSeconds=1)
    result = await judge.score("x")
    assert result.reason == "unreachable"
    assert "Connect" in result.message


def answers_but(fault, is_faulty):
    """Answer all requests whose text is not faulty."""
    return lambda body, number: fault() if is_faulty(body["messages"][-1]["content"]) else completion("Score: 1")


@pytest.mark.parametrize("code", [401, 402, 404, 500, 503])
async def test_endpoint_that_fails_what_it_answered_is_unreachable_until_it_is_back(make_judge, endpoint, code):
    judge = await make_judge(timeoutSeconds=1)
    endpoint.reset(answers("Score: 1"))
    assert (await judge.score("x")).valid
    endpoint.reset(answers(status(code, "gone")))
    result = await judge.score("y")
    assert (result.reason, judge.executor.fatal_error.done()) == ("unreachable", False)
    assert f"{code} gone" in result.message, "by the endpoint's client, or at the end of timeoutSeconds"
    endpoint.reset(answers("Score: 1"))
    assert (await judge.score("y")).valid


async def test_request_that_gives_up_just_after_the_endpoint_is_back_is_unreachable(make_judge, endpoint):
    judge = await make_judge(timeoutSeconds=1)
    endpoint.reset(answers("Score: 1"))
    assert (await judge.score("x")).valid
    endpoint.reset(answers(status(503)))
    assert (await judge.score("y")).reason == "unreachable"
    scoring = asyncio.create_task(judge.score("odd"))
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not any("odd" in str(body) for body in endpoint.requests):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    endpoint.reset(answers_but(status(503), lambda text: "odd" in text))
    assert (await judge.score("x")).valid, "it is back"
    assert not scoring.done()
    assert (await scoring).reason == "unreachable", "its first requests failed as all others did"
    assert (await judge.score("odd")).reason == "exception"


async def test_text_that_alone_fails_is_invalid(make_judge, endpoint):
    """The request that was answered last is answered again."""
    judge = await make_judge(timeoutSeconds=1)
    endpoint.reset(answers_but(status(500, "odd text"), lambda text: "odd" in text))
    assert (await judge.score("x")).valid
    result = await judge.score("odd")
    assert (result.reason, "500 odd text" in result.message) == ("exception", True)
    answered = judge.metric('rljob_reward_calls_total{outcome="200",reward="test"}')
    assert answered > 1
    assert judge.metric('rljob_reward_tokens_total{kind="prompt",reward="test"}') == 70 * answered, "all are paid for"


async def test_endpoint_that_hangs_is_unreachable_once_it_fails_what_it_answered(make_judge, endpoint, monkeypatch):
    monkeypatch.setattr(upstream, "_PROBE_SECONDS", 0.1)
    judge = await make_judge(timeoutSeconds=0.3)
    endpoint.reset(answers("Score: 1"))
    assert (await judge.score("x")).valid
    endpoint.reset(nothing)
    assert (await judge.score("y")).reason == "timeout", "a long answer looks the same"
    assert (await judge.score("y")).reason == "unreachable"


async def test_schema_is_sent_as_structured_output_and_gives_components(make_judge, endpoint):
    endpoint.reset(answers('{"score": 0.25, "clear": true}'))
    result = await (await make_judge({"parser": {"jsonSchema": SCHEMA}})).score("x")
    assert (result.score, result.components) == (0.25, {"clear": 1.0})
    sent = endpoint.requests[0]["response_format"]["json_schema"]
    assert sent == {"name": "verdict", "schema": SCHEMA, "strict": True}


@pytest.mark.parametrize(
    ("form", "sent"), [("json_object", {"response_format": {"type": "json_object"}}), ("none", {})]
)
async def test_schema_is_checked_where_the_endpoint_does_not_enforce_it(make_judge, endpoint, form, sent):
    endpoint.reset(answers('{"score": "9", "clear": true}', 'Well: {"score": 9, "clear": false}'))
    judge = await make_judge({"parser": {"jsonSchema": SCHEMA, "responseFormat": form}})
    wrong, right = await judge.score("x"), await judge.score("x")
    assert (wrong.reason, right.score) == ("bad_return", 9.0)
    assert '"9" is not of type "number" at $.score' in wrong.message
    request = endpoint.requests[0]
    assert {name: request[name] for name in request if name == "response_format"} == sent


async def test_headers_are_sent_and_a_temperature_of_null_is_not(make_judge, endpoint):
    endpoint.reset(answers("Score: 1"))
    judge = await make_judge({"endpoint": {"headers": {"X-Team": "rl"}}, "sampling": {"temperature": None}, "votes": 2})
    assert (await judge.score("x")).score == 1.0
    assert [headers["X-Team"] for headers in endpoint.headers] == ["rl", "rl"]
    assert all("temperature" not in request for request in endpoint.requests)


@pytest.mark.parametrize(
    "text", [[{"type": "text", "text": "Score: "}, {"type": "text", "text": "4"}], "\ud800 Score: 4"]
)
async def test_parts_and_halves_of_surrogate_pairs_are_read(judge, endpoint, text):
    endpoint.reset(lambda body, number: completion(text))
    assert (await judge.score("x")).score == 4.0


@pytest.mark.parametrize("count", ["Infinity", "1e300", f"1{'0' * 400}", "NaN", "-5", '"many"'])
async def test_implausible_token_counts_do_not_block_the_limit(make_judge, endpoint, count):
    usage = f'{{"prompt_tokens": {count}, "completion_tokens": 1}}'
    text = f'{{"choices": [{{"message": {{"content": "Score: 1"}}}}], "usage": {usage}}}'
    endpoint.reset(answers(status(200, text)))
    judge = await make_judge({"endpoint": {"limits": {"tokensPerMinute": 1e7}}}, slots=1)
    assert [(await judge.score("x")).score for _ in range(2)] == [1.0, 1.0]


@pytest.mark.parametrize("garbage", ["[" * 10_000, f'{{"score": "none", "n": 1{"0" * 400}}}'])
async def test_unreadable_vote_does_not_affect_other_votes(make_judge, endpoint, garbage):
    endpoint.reset(answers(garbage, '{"score": 1}'))
    sampling, parser = {"temperature": 1}, {"jsonSchema": {"type": "object"}}
    result = await (await make_judge({"votes": 3, "sampling": sampling, "parser": parser})).score("x")
    assert (result.score, result.components["votes"]) == (1.0, 2.0), result.message


async def test_votes_are_aggregated_and_some_may_fail(make_judge, endpoint):
    endpoint.reset(answers("Score: good", "Score: bad", "no idea", "Score: good", "Score: good"))
    voting = {"votes": 5, "aggregate": "majority", "sampling": {"temperature": 1}}
    parser = {"regex": r"Score: (\w+)", "scores": {"Good": 1, "bad": 0}}
    result = await (await make_judge({**voting, "parser": parser})).score("x")
    assert (result.score, result.components) == (1.0, {"votes": 4.0, "agreement": 0.75})


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        ({"template": "a\n{{ completon }}"}, "judge.template:2: unknown variable completon"),
        ({"template": "a\nb\n{% if %}"}, "judge.template:3: "),
        ({"template": "{{ completion | nofilter }}"}, "judge.template:1: "),
        ({"parser": {"regex": "("}}, "judge.parser.regex is not a regular expression of RE2"),
        ({"parser": {"regex": "x"}}, "judge.parser.regex has no group"),
        ({"parser": {"jsonSchema": SCHEMA, "scorePath": "points"}}, "judge.parser.scorePath refers to points"),
        ({"endpoint": {"apiKeySecretRef": {"name": "keys", "key": "k"}}}, "Secret keys has no key k"),
    ],
)
async def test_invalid_judge_is_rejected_at_startup(make_judge, judge, message):
    with pytest.raises(UserError) as caught:
        await make_judge(judge)
    assert message in str(caught.value)


async def test_template_that_fails_on_a_sample_makes_it_invalid(make_judge, endpoint):
    endpoint.reset(answers("Score: 1"))
    judge = await make_judge({"template": "{{ completion }} {{ extra_info.rubric }}"})
    result = await judge.score("x")
    assert result.reason == "exception"
    assert "rubric" in result.message
    assert (await judge.score("x", extra_info={"rubric": "be kind"})).score == 1.0
    assert len(endpoint.requests) == 1, "no request for the sample that failed"


async def test_template_is_sandboxed(make_judge, endpoint):
    endpoint.reset(answers("Score: 1"))
    judge = await make_judge({"template": "{{ completion.__class__.__mro__[1].__subclasses__() }}"})
    assert (await judge.score("x")).reason == "exception"
    assert not endpoint.requests


async def test_waiting_for_limits_is_queueing_and_does_not_count_towards_timeouts(make_judge, endpoint):
    async def slow(body: dict[str, Any], number: int) -> web.Response:
        await asyncio.sleep(0.05)
        return completion("Score: 1")

    endpoint.reset(slow)
    judge = await make_judge({"endpoint": {"limits": {"concurrency": 1}}}, timeoutSeconds=1, slots=64)
    results = await asyncio.gather(*(judge.score(f"x{i}") for i in range(24)))
    assert all(result.valid for result in results), next(result for result in results if not result.valid)
    assert max(result.queue_seconds for result in results) > 1, "longer than the timeout"
    assert max(result.execute_seconds for result in results) < 1
    assert endpoint.max_in_flight == 1
    assert judge.metric('rljob_reward_limit_wait_seconds_total{limit="concurrency"') > 0


async def test_request_rate_delays_executions(make_judge, endpoint):
    endpoint.reset(answers("Score: 1"))
    judge = await make_judge({"endpoint": {"limits": {"requestsPerMinute": 600}}}, slots=64)
    results = await asyncio.gather(*(judge.score(f"x{i}") for i in range(10)))
    assert all(result.valid for result in results)
    assert endpoint.at[-1] - endpoint.at[0] > 0.8, "9 per second after an empty bucket"


async def test_replicas_divide_the_limits(make_judge, endpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("RLJOB_PEERS", "judges")
    monkeypatch.setenv("RLJOB_POD_IP", "10.0.0.1")
    monkeypatch.setenv("RLJOB_HOSTS_FILE", str(tmp_path / "hosts"))
    (tmp_path / "hosts").write_text("10.0.0.1 judges\n10.0.0.2 judges\n")

    async def slow(body: dict[str, Any], number: int) -> web.Response:
        await asyncio.sleep(0.02)
        return completion("Score: 1")

    endpoint.reset(slow)
    judges = [await make_judge({"endpoint": {"limits": {"concurrency": 4}}}, replicas=2) for _ in range(2)]
    assert [judge.metric("rljob_reward_limit_peers") for judge in judges] == [2.0, 2.0]
    results = await asyncio.gather(*(judge.score(f"x{i}") for i in range(10) for judge in judges))
    assert all(result.valid for result in results)
    assert endpoint.max_in_flight == 4, "the limit is used, and not exceeded"
