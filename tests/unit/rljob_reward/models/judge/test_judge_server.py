"""The real server with a judge at somebody else's endpoint: every way in which that can fail, and the limits."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from aiohttp import web

from rljob_api.wire.contract import ExitCode
from tests.support.fake_endpoint import completion, nothing
from tests.support.reward_process import wait_for

KEY = "sk-very-secret-key"
SCHEMA = {
    "type": "object",
    "properties": {"score": {"type": "number"}, "clear": {"type": "boolean"}},
    "required": ["score", "clear"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def judge(start_judge):
    """One judge with the defaults and a key, for all tests of single answers."""
    reference = {"apiKeySecretRef": {"name": "keys", "key": "OPENAI"}}
    server = start_judge({"endpoint": reference}, {"RLJOB_JUDGE_API_KEY": KEY})
    yield server
    assert KEY not in server.log.read_text(), "the key must not be in the log"


def answers(*given: Any):
    """Each answer once, then the last for ever: a Response, or text of a completion."""

    def answer(body: dict[str, Any], number: int) -> web.Response:
        value = given[min(number, len(given) - 1)]
        return completion(value) if isinstance(value, str) else value()

    return answer


def status(code: int, text: str = "", **headers: str):
    return lambda: web.Response(status=code, text=text, headers={k.replace("_", "-"): v for k, v in headers.items()})


def test_a_verdict_is_a_score_and_the_request_is_what_the_template_says(judge, endpoint):
    endpoint.reset(answers("I think that 3 is low.\nScore: 3\nNo: better.\nScore: 0.5"))
    result = judge.score("four")
    assert (result["valid"], result["score"]) == (True, 0.5), "the last match counts"
    asked = endpoint.requests[0]
    assert asked["messages"] == [{"role": "user", "content": "Rate: four"}]
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("gpt-judge", 0.0, 512)
    assert endpoint.keys == [f"Bearer {KEY}"]
    assert judge.metric('rljob_reward_tokens_total{kind="prompt",reward="test"}') >= 70
    assert judge.metric('rljob_reward_calls_total{outcome="200",reward="test"}') >= 1


def test_rate_limits_of_the_endpoint_are_waited_for_and_are_no_failure(judge, endpoint):
    endpoint.reset(answers(status(429, "slow down", Retry_After="1"), status(429, "slow down"), "Score: 1"))
    result = judge.score("x")
    assert (result["score"], len(endpoint.requests)) == (1.0, 3)
    assert endpoint.at[1] - endpoint.at[0] >= 1, "Retry-After is honoured"
    assert judge.metric('rljob_reward_calls_total{outcome="429",reward="test"}') == 2


@pytest.mark.parametrize("codes", [(500, 503), (507, 521), (530, 408)])
def test_a_server_error_is_tried_again(judge, endpoint, codes):
    endpoint.reset(answers(*map(status, codes), "Score: 1"))
    assert judge.score("x")["score"] == 1.0


@pytest.mark.parametrize(
    ("answer", "reason", "words"),
    [
        (status(401, f"bad key {KEY}"), "exception", "answered 401 bad key ***"),
        (status(404, "no such model"), "exception", "answered 404 no such model"),
        (status(302, "", Location="http://elsewhere/"), "exception", "answered 302"),
        (status(200, "<html>hello"), "bad_return", "no JSON object: <html>hello"),
        (status(200, "[]"), "bad_return", "no JSON object: []"),
        (status(200, "[" * 10_000), "bad_return", "no JSON object: [[["),
        (status(200, '{"choices": []}'), "bad_return", "no chat completion: \"{'choices': []}\""),
        (status(200, '{"choices": [{"message": 3}]}'), "bad_return", "no chat completion"),
        (
            status(200, f'{{"error": "bad key {KEY}"}}'),
            "bad_return",
            "no chat completion: \"{'error': 'bad key ***'}\"",
        ),
        (status(200, f'{{"error": "{"x" * 175} {KEY}"}}'), "bad_return", "xxx ***"),
        (lambda: completion(None), "bad_return", "wrote nothing"),
        (lambda: completion("Score: 1", finish_reason="length"), "bad_return", "cut off at sampling.maxTokens"),
        (lambda: completion("no idea"), "bad_return", "does not match judge.parser.regex: 'no idea'"),
        (lambda: completion("Score: high"), "bad_return", "'high', which is no number"),
        (lambda: completion("Score: nan"), "not_finite", "nan"),
        (lambda: completion("Score: 1e999"), "not_finite", "inf"),
    ],
)
def test_an_answer_that_is_none_is_invalid_with_its_beginning_and_never_a_zero(judge, endpoint, answer, reason, words):
    endpoint.reset(answers(answer))
    result = judge.score("x")
    assert (result["valid"], result["score"], result["reason"]) == (False, None, reason)
    assert words in result["message"]
    assert KEY not in str(result)
    assert len(endpoint.requests) == 1, "asking again would not help"


def test_an_endpoint_that_never_answers_is_a_time_out(start_judge, endpoint):
    endpoint.reset(nothing)
    server = start_judge(timeoutSeconds=1)
    result = server.score("x")
    assert result["reason"] == "timeout"
    assert "waiting for the judge's endpoint's answer" in result["message"]
    assert wait_for(lambda: endpoint.in_flight == 0, "the connection to be given up") is True


def test_server_errors_without_end_are_invalid_before_the_time_out_and_say_so(start_judge, endpoint):
    endpoint.reset(answers(status(500, "out of memory")))
    result = start_judge(timeoutSeconds=2).score("x")
    assert result["reason"] == "exception"
    assert "500 out of memory" in result["message"]
    assert len(endpoint.requests) > 1


def test_rate_limits_without_end_are_a_time_out(start_judge, endpoint):
    endpoint.reset(answers(status(429, "slow down", Retry_After="30")))
    result = start_judge(timeoutSeconds=2).score("x")
    assert result["reason"] == "timeout"
    assert "429 slow down" in result["message"]


def test_an_endpoint_that_is_not_there_is_invalid_with_the_reason(start_judge, endpoint):
    result = start_judge({"endpoint": {"url": f"http://{endpoint.host}:1/v1"}}, timeoutSeconds=2).score("x")
    assert result["reason"] == "exception"
    assert "Connect" in result["message"]


def test_a_schema_is_sent_as_structured_output_and_its_other_numbers_are_components(start_judge, endpoint):
    endpoint.reset(answers('{"score": 0.25, "clear": true, "why": "x"}'))
    server = start_judge({"parser": {"jsonSchema": SCHEMA}})
    result = server.score("x")
    assert (result["score"], result["components"]) == (0.25, {"clear": 1.0})
    sent = endpoint.requests[0]["response_format"]["json_schema"]
    assert sent == {"name": "verdict", "schema": SCHEMA, "strict": True}


@pytest.mark.parametrize("count", ["Infinity", "1e300", f"1{'0' * 400}", "NaN", "-5", '"many"'])
def test_a_count_of_tokens_that_nobody_can_believe_closes_no_limit(start_judge, endpoint, count):
    usage = f'{{"prompt_tokens": {count}, "completion_tokens": 1}}'
    text = f'{{"choices": [{{"message": {{"content": "Score: 1"}}}}], "usage": {usage}}}'
    endpoint.reset(answers(status(200, text)))
    judge = start_judge({"endpoint": {"limits": {"tokensPerMinute": 1e6}}}, slots=1)
    assert [judge.score("x")["score"] for _ in range(2)] == [1.0, 1.0]


@pytest.mark.parametrize("garbage", ["[" * 10_000, f'{{"score": "none", "n": 1{"0" * 400}}}'])
def test_a_vote_of_garbage_costs_no_other_vote(start_judge, endpoint, garbage):
    endpoint.reset(answers(garbage, '{"score": 1}'))
    sampling, parser = {"temperature": 1}, {"jsonSchema": {"type": "object"}}
    result = start_judge({"votes": 3, "sampling": sampling, "parser": parser}).score("x")
    assert (result["score"], result["components"]["votes"]) == (1.0, 2.0), result["message"]


def test_votes_make_one_score_and_some_may_fail(start_judge, endpoint):
    endpoint.reset(answers("Score: good", "Score: bad", "no idea", "Score: good", "Score: good"))
    voting = {"votes": 5, "aggregate": "majority", "sampling": {"temperature": 1}}
    parser = {"regex": r"Score: (\w+)", "scores": {"Good": 1, "bad": 0}}
    result = start_judge({**voting, "parser": parser}).score("x")
    assert (result["score"], result["components"]) == (1.0, {"votes": 4.0, "agreement": 0.75})


@pytest.mark.parametrize(
    ("judge", "words"),
    [
        ({"template": "a\n{{ completon }}"}, "judge.template:2: there is no completon"),
        ({"template": "a\nb\n{% if %}"}, "judge.template:3: "),
        ({"template": "{{ completion | nofilter }}"}, "judge.template:1: "),
        ({"parser": {"regex": "("}}, "judge.parser.regex is no regular expression"),
        ({"parser": {"regex": "x"}}, "judge.parser.regex has no group"),
        ({"parser": {"jsonSchema": SCHEMA, "scorePath": "points"}}, "judge.parser.scorePath names points"),
        ({"endpoint": {"apiKeySecretRef": {"name": "keys", "key": "k"}}}, "Secret keys has nothing under k"),
    ],
)
def test_a_judge_that_cannot_work_is_refused_at_the_start(start_judge, judge, words):
    server = start_judge(judge, wait=False)
    assert server.process.wait(60) == ExitCode.USER
    assert words in server.log.read_text()


def test_a_template_that_fails_on_a_sample_is_that_samples_own_failure(start_judge, endpoint):
    endpoint.reset(answers("Score: 1"))
    server = start_judge({"template": "{{ completion }} {{ extra_info.rubric }}"})
    result = server.score("x")
    assert result["reason"] == "exception"
    assert "rubric" in result["message"]
    assert server.score("x", extra_info={"rubric": "be kind"})["score"] == 1.0
    assert len(endpoint.requests) == 1, "nothing was asked for the one that failed"


def test_a_template_cannot_reach_out_of_its_sandbox(start_judge, endpoint):
    endpoint.reset(answers("Score: 1"))
    result = start_judge({"template": "{{ completion.__class__.__mro__[1].__subclasses__() }}"}).score("x")
    assert result["reason"] == "exception"
    assert not endpoint.requests


async def slow(body: dict[str, Any], number: int) -> web.Response:
    await asyncio.sleep(0.05)
    return completion("Score: 1")


def score_many(server: Any, number: int) -> list[Any]:
    with ThreadPoolExecutor(number) as threads:
        return list(threads.map(lambda i: server.score(f"x{i}"), range(number)))


def test_limits_are_waited_for_in_the_queue_and_count_for_no_time_out(start_judge, endpoint):
    endpoint.reset(slow)
    limits = {"requestsPerMinute": 600, "concurrency": 2}
    # 90 requests of a fresh bucket take 3 s and more; an execution has one.
    server = start_judge({"endpoint": {"limits": limits}}, timeoutSeconds=1, slots=64)
    results = score_many(server, 90)
    assert all(result["valid"] for result in results), next(r for r in results if not r["valid"])
    assert max(result["queue_seconds"] for result in results) > 1, "more than the time-out was waited"
    assert max(result["execute_seconds"] for result in results) < 1
    assert endpoint.most_in_flight <= 2
    assert server.metric("rljob_reward_limit_wait_seconds_total") > 0


def test_two_replicas_hold_the_limits_together(start_judge, endpoint, tmp_path):
    endpoint.reset(slow)
    limits = {"concurrency": 3}
    hosts = tmp_path / "hosts"
    addresses = [f"127.77.250.{number}" for number in (1, 2)]
    hosts.write_text("".join(f"{address} judges\n" for address in addresses))
    environment = {"RLJOB_PEERS": "judges", "RLJOB_HOSTS_FILE": str(hosts)}
    servers = [
        start_judge({"endpoint": {"limits": limits}}, environment, host=address, replicas=2) for address in addresses
    ]
    for server in servers:
        wait_for(lambda server=server: server.metric("rljob_reward_limit_peers") == 2, "the replica to have its share")
    with ThreadPoolExecutor(2) as threads:
        results = [result for many in threads.map(lambda server: score_many(server, 20), servers) for result in many]
    assert all(result["valid"] for result in results)
    assert endpoint.most_in_flight <= 3, "all replicas together"
    assert endpoint.most_in_flight == 3, "and all of the limit is used"
