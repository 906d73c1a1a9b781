"""A judge that compares the completions of a group, at a fake endpoint."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
import yaml
from aiohttp import web

from rljob_api.errors import UserError
from rljob_api.manifest.services.reward import Reward
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


def slowly(seconds: float):
    async def answer(body: dict[str, Any], number: int) -> web.Response:
        await asyncio.sleep(seconds)
        return longest_wins(body, number)

    return answer


def outcomes(result: Any) -> list[float | str]:
    return [each.score if each.valid else each.reason.value for each in result.results]


async def test_pairwise_asks_both_orders_within_the_limits(make_judge, endpoint):
    endpoint.reset(slowly(0.02))
    judge = await make_judge({**PAIRWISE, "endpoint": {"limits": {"concurrency": 2}}}, scope="group")
    result = await judge.score_group(build_group("a", "bbb", "cc", "ddd"))
    assert outcomes(result) == pytest.approx([0.0, 2.5 / 3, 1 / 3, 2.5 / 3])
    assert result.results[0].components == {"comparisons": 6.0}
    assert len({pair_of(body) for body in endpoint.requests}) == len(endpoint.requests) == 12
    assert endpoint.max_in_flight == 2, "the limit is used, and not exceeded"
    assert judge.metric('rljob_reward_limit_wait_seconds_total{limit="concurrency"') > 0


async def test_pairwise_example_of_the_docs_works(make_judge, endpoint):
    text = (ROOT / "docs" / "judge.md").read_text()
    (block,) = re.findall(r"```yaml\n(- name: preferred\n.*?)```", text, re.S)
    (reward,) = yaml.safe_load(block)
    Reward.model_validate(reward)

    def answer(body: dict[str, Any], number: int) -> web.Response:
        assert body["messages"][0]["content"].startswith("Question: 2+2?\nA: ")
        return completion("A is brief.\nWinner: A" if "A: 4\n" in body["messages"][0]["content"] else "Winner: B")

    endpoint.reset(answer)
    fields = {name: value for name, value in reward["judge"].items() if name != "model"}
    judge = await make_judge(fields, scope=reward["scope"])
    assert outcomes(await judge.score_group(build_group("4", "four"))) == [1.0, 0.0]


async def test_waiting_for_limits_does_not_count_towards_the_timeout_of_questions(make_judge, endpoint):
    endpoint.reset(slowly(0.1))
    limited = {**PAIRWISE, "endpoint": {"limits": {"concurrency": 1}}}
    judge = await make_judge(limited, scope="group", timeoutSeconds=1)
    result = await judge.score_group(build_group("a", "bb", "ccc", "dddd"))
    assert outcomes(result) == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert result.results[0].execute_seconds > 1, "12 questions, one after another"


async def test_slots_limit_the_questions_of_all_groups(make_judge, endpoint):
    endpoint.reset(slowly(0.02))
    judge = await make_judge(PAIRWISE, scope="group", slots=3)
    await judge.score_group(build_group("a", "bb", "ccc", "dddd"))
    assert endpoint.max_in_flight == 3


async def test_failed_question_costs_only_its_comparison(make_judge, endpoint):
    async def answer(body: dict[str, Any], number: int) -> web.Response:
        if pair_of(body) == ("a", "bb"):
            return await nothing(body, number)
        return completion("no idea") if pair_of(body) == ("d", "ccc") else longest_wins(body, number)

    endpoint.reset(answer)
    judge = await make_judge(PAIRWISE, scope="group", timeoutSeconds=1)
    result = await judge.score_group(build_group("a", "bb", "ccc"))
    assert outcomes(result) == pytest.approx([0.0, 2 / 3 - 1 / 3, 1.0]), "the mean of the remaining comparisons"
    assert [each.components["comparisons"] for each in result.results] == [3.0, 3.0, 4.0]
    pair = await judge.score_group(build_group("d", "ccc"))
    assert outcomes(pair) == ["bad_return"] * 2, "half of the comparisons is not enough"
    assert "1 of 2 comparisons failed, the first: the judge's answer does not match" in pair.results[0].message


async def test_judge_that_never_answers_is_a_timeout_of_all_samples(make_judge, endpoint):
    endpoint.reset(nothing)
    judge = await make_judge(PAIRWISE, scope="group", timeoutSeconds=0.2)
    result = await judge.score_group(build_group("a", "bb"))
    assert outcomes(result) == ["timeout"] * 2
    assert "longer than 0.2 s (timeoutSeconds); it was waiting for an answer of the judge's endpoint" in str(result)


async def test_ranking_is_one_question_with_votes_and_components(make_judge, endpoint):
    answers = [{"order": [2, 1, 3], "sure": True}, {"order": [1, 2, 3], "sure": False}, {"order": [1, 1, 3]}]
    endpoint.reset(lambda body, number: completion(json.dumps(answers[number])))
    voting = {"votes": 3, "sampling": {"temperature": 1}}
    judge = await make_judge({**LISTS, **voting, "compare": "ranking"}, scope="group")
    result = await judge.score_group(build_group("a", "bb", "ccc"))
    assert outcomes(result) == [0.75, 0.75, 0.0], "the mean of two votes; the third is not a ranking"
    assert result.results[0].components == {"sure": 0.5, "votes": 2.0, "agreement": 0.5}
    assert endpoint.requests[0]["messages"][0]["content"] == "1. a\n2. bb\n3. ccc\n"
    assert endpoint.requests[0]["response_format"]["json_schema"]["schema"] == SCHEMA
    assert outcomes(await judge.score_group(build_group("alone"))) == [0.5]
    assert len(endpoint.requests) == 3, "no question about a single sample"


async def test_listwise_gives_each_completion_a_score_or_a_reason(make_judge, endpoint):
    endpoint.reset(lambda body, number: completion('{"order": [3, null, 1]}'))
    judge = await make_judge({**LISTS, "compare": "listwise"}, scope="group")
    assert outcomes(await judge.score_group(build_group("a", "b", "c"))) == [3.0, "abstained", 1.0]
    assert outcomes(await judge.score_group(build_group("a", "b"))) == ["bad_return"] * 2


async def test_extra_info_of_a_group_has_the_shared_entries(make_judge, endpoint):
    endpoint.reset(longest_wins)
    template = PAIRWISE["template"] + " {{ extra_info }}"
    judge = await make_judge({**PAIRWISE, "template": template}, scope="group")
    request = build_group("a", "bb", extra_info={"rubric": "brief"})
    for i, sample in enumerate(request["samples"]):
        sample["extra_info"] = sample["extra_info"] | {"num_tokens": i}
    assert outcomes(await judge.score_group(request)) == [0.0, 1.0]
    assert endpoint.requests[0]["messages"][0]["content"].endswith("{'rubric': 'brief'}")


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (PAIRWISE | {"template": "a\n{{ completion }}"}, "judge.template:2: unknown variable completion"),
        (LISTS | {"compare": "ranking", "template": "{{ first }}"}, "judge.template:1: unknown variable first"),
        (
            LISTS | {"compare": "listwise", "parser": {"jsonSchema": {"properties": {"score": {"type": "number"}}}}},
            "judge.parser.scorePath refers to score, which has type number; compare: ranking and listwise need",
        ),
    ],
)
async def test_invalid_comparison_is_rejected_at_startup(make_judge, judge, message):
    with pytest.raises(UserError) as caught:
        await make_judge(judge, scope="group")
    assert message in str(caught.value)
