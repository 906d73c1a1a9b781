"""The real server with a judge that compares the completions of a group, at somebody else's endpoint."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
import yaml
from aiohttp import web

from rljob_api.manifest.reward import Reward
from rljob_api.wire.contract import ExitCode
from tests.paths import ROOT
from tests.support.fake_endpoint import completion, nothing
from tests.support.reward_process import build_group

PAIRWISE = {
    "compare": "pairwise",
    "template": "{{ prompt }} First: {{ first }} Second: {{ second }}",
    "parser": {"regex": r"Winner: (\w+)", "scores": {"first": 1, "second": 0, "tie": 0.5}},
}
SCHEMA = {"type": "object", "properties": {"order": {"type": "array", "items": {"type": "integer"}}}}
LISTS = {
    "template": "{% for text in completions %}{{ loop.index }}. {{ text }}\n{% endfor %}",
    "parser": {"jsonSchema": SCHEMA, "scorePath": "order"},
}


def pair_of(body: dict[str, Any]) -> tuple[str, str]:
    match = re.search(r"First: (\S+) Second: (\S+)", body["messages"][-1]["content"])
    assert match
    return match[1], match[2]


def longest_wins(body: dict[str, Any], number: int) -> web.Response:
    first, second = map(len, pair_of(body))
    return completion(f"Winner: {'tie' if first == second else 'first' if first > second else 'second'}")


def outcomes(result: Any) -> list[float | str]:
    return [each.score if each.valid else each.reason.value for each in result.results]


def test_pairwise_asks_about_each_two_in_both_orders_and_holds_the_limits(start_judge, endpoint):
    async def slow(body: dict[str, Any], number: int) -> web.Response:
        await asyncio.sleep(0.02)
        return longest_wins(body, number)

    endpoint.reset(slow)
    server = start_judge({**PAIRWISE, "endpoint": {"limits": {"concurrency": 2}}}, scope="group")
    result = server.score_group(build_group("a", "bbb", "cc", "ddd"))
    assert outcomes(result) == pytest.approx([0.0, 2.5 / 3, 1 / 3, 2.5 / 3])
    assert result.results[0].components == {"comparisons": 6.0}
    assert len({pair_of(body) for body in endpoint.requests}) == len(endpoint.requests) == 12
    assert endpoint.most_in_flight == 2, "each question waits its turn, and the limit is used"
    assert server.metric('rljob_reward_limit_wait_seconds_total{limit="concurrency"') > 0


def test_the_pairwise_judge_of_the_documents_works(start_judge, endpoint):
    text = (ROOT / "docs" / "judge.md").read_text()
    (block,) = re.findall(r"```yaml\n(- name: preferred\n.*?)```", text, re.S)
    (reward,) = yaml.safe_load(block)
    Reward.model_validate(reward)

    def answer(body: dict[str, Any], number: int) -> web.Response:
        assert body["messages"][0]["content"].startswith("Question: 2+2?\nA: ")
        return completion("A is brief.\nWinner: A" if "A: 4\n" in body["messages"][0]["content"] else "Winner: B")

    endpoint.reset(answer)
    own = {name: value for name, value in reward["judge"].items() if name != "model"}
    result = start_judge(own, scope=reward["scope"]).score_group(build_group("4", "four"))
    assert outcomes(result) == [1.0, 0.0]


def test_waiting_for_limits_counts_for_no_time_out_of_a_group(start_judge, endpoint):
    async def slow(body: dict[str, Any], number: int) -> web.Response:
        await asyncio.sleep(0.3)
        return longest_wins(body, number)

    endpoint.reset(slow)
    server = start_judge({**PAIRWISE, "endpoint": {"limits": {"concurrency": 1}}}, scope="group", timeoutSeconds=3)
    result = server.score_group(build_group("a", "bb", "ccc", "dddd"))
    assert outcomes(result) == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert result.results[0].execute_seconds > 3, "12 questions, one after another"


def test_slots_bound_the_questions_of_all_groups(start_judge, endpoint):
    endpoint.reset(longest_wins)
    server = start_judge(PAIRWISE, scope="group", slots=3)
    server.score_group(build_group("a", "bb", "ccc", "dddd"))
    assert endpoint.most_in_flight <= 3


def test_a_question_that_fails_costs_its_comparison(start_judge, endpoint):
    async def answer(body: dict[str, Any], number: int) -> web.Response:
        if pair_of(body) == ("a", "bb"):
            return await nothing(body, number)
        return completion("no idea") if pair_of(body) == ("d", "ccc") else longest_wins(body, number)

    endpoint.reset(answer)
    server = start_judge(PAIRWISE, scope="group", timeoutSeconds=2)
    result = server.score_group(build_group("a", "bb", "ccc"))
    assert outcomes(result) == pytest.approx([0.0, 2 / 3 - 1 / 3, 1.0]), "the mean of the comparisons that there are"
    assert [each.components["comparisons"] for each in result.results] == [3.0, 3.0, 4.0]
    of_two = server.score_group(build_group("d", "ccc"))
    assert outcomes(of_two) == ["bad_return"] * 2, "half of them are not enough"
    assert "1 of 2 comparisons failed, the first: the judge's answer does not match" in of_two.results[0].message


def test_a_judge_that_never_answers_is_a_time_out_of_every_sample(start_judge, endpoint):
    endpoint.reset(nothing)
    result = start_judge(PAIRWISE, scope="group", timeoutSeconds=1).score_group(build_group("a", "bb"))
    assert outcomes(result) == ["timeout"] * 2
    assert "longer than 1 s (timeoutSeconds); it was waiting for the judge's endpoint's answer" in str(result)


def test_ranking_is_one_question_with_votes_and_components(start_judge, endpoint):
    answers = [{"order": [2, 1, 3], "sure": True}, {"order": [1, 2, 3], "sure": False}, {"order": [1, 1, 3]}]
    endpoint.reset(lambda body, number: completion(json.dumps(answers[number])))
    voting = {"votes": 3, "sampling": {"temperature": 1}}
    server = start_judge({**LISTS, **voting, "compare": "ranking"}, scope="group")
    result = server.score_group(build_group("a", "bb", "ccc"))
    assert outcomes(result) == [0.75, 0.75, 0.0], "the mean of two votes; the third ranks nobody twice"
    assert result.results[0].components == {"sure": 0.5, "votes": 2.0, "agreement": 0.5}
    assert endpoint.requests[0]["messages"][0]["content"] == "1. a\n2. bb\n3. ccc\n"
    assert endpoint.requests[0]["response_format"]["json_schema"]["schema"] == SCHEMA
    assert outcomes(server.score_group(build_group("alone"))) == [0.5]
    assert len(endpoint.requests) == 3, "nothing was asked about one that is alone"


def test_listwise_gives_each_completion_its_score_or_its_reason(start_judge, endpoint):
    endpoint.reset(lambda body, number: completion('{"order": [3, null, 1]}'))
    server = start_judge({**LISTS, "compare": "listwise"}, scope="group")
    assert outcomes(server.score_group(build_group("a", "b", "c"))) == [3.0, "abstained", 1.0]
    assert outcomes(server.score_group(build_group("a", "b"))) == ["bad_return"] * 2


def test_a_template_has_of_extra_info_what_all_samples_share(start_judge, endpoint):
    endpoint.reset(longest_wins)
    template = PAIRWISE["template"] + " {{ extra_info }}"
    server = start_judge({**PAIRWISE, "template": template}, scope="group")
    request = build_group("a", "bb", extra_info={"rubric": "brief"})
    for i, sample in enumerate(request["samples"]):
        sample["extra_info"] = sample["extra_info"] | {"num_tokens": i}
    assert outcomes(server.score_group(request)) == [0.0, 1.0]
    assert endpoint.requests[0]["messages"][0]["content"].endswith("{'rubric': 'brief'}")


@pytest.mark.parametrize(
    ("judge", "words"),
    [
        (PAIRWISE | {"template": "a\n{{ completion }}"}, "judge.template:2: there is no completion"),
        (LISTS | {"compare": "ranking", "template": "{{ first }}"}, "judge.template:1: there is no first"),
        (
            LISTS | {"compare": "listwise", "parser": {"jsonSchema": {"properties": {"score": {"type": "number"}}}}},
            "judge.parser.scorePath names score, which is of type number; compare: ranking and listwise need an array",
        ),
    ],
)
def test_a_judge_that_cannot_compare_is_refused_at_the_start(start_judge, judge, words):
    server = start_judge(dict(judge), scope="group", wait=False)
    assert server.process.wait(120) == ExitCode.USER
    assert words in server.log.read_text()
