"""Parsing of reward responses."""

import pytest

from rljob_api.wire.protocol import GroupRequest, InvalidReason, ScoreRequest
from rljob_trainer.rewards.messages import RewardCall, busy_seconds


def read(text, *ids, protocol="rljob", group=None):
    samples = [ScoreRequest(id=each, prompt="p", completion="c") for each in ids]
    request = GroupRequest(id=group, lane="train", samples=samples) if group or len(ids) > 1 else samples[0]
    return RewardCall(request, protocol).read(text, 0.0)


@pytest.mark.parametrize("number", ["NaN", "1e999"])
def test_component_that_is_not_finite_breaks_the_protocol(number):
    answer = f'{{"id": "r", "valid": true, "score": 1.0, "components": {{"length": {number}}}}}'
    [found] = read(answer, "r")
    [of_group] = read(f'{{"id": "g", "results": [{answer}]}}', "r", group="g")
    assert found.reason is of_group.reason is InvalidReason.BAD_RETURN
    assert "component length" in found.message


@pytest.mark.parametrize(
    ("text", "reason"),
    [('{"rewards": ["NaN"]}', "not_finite"), ('{"rewards": [1, 2]}', "bad_return"), ("oops", "bad_return")],
)
def test_openrlhf_responses_are_checked(text, reason):
    [found] = read(text, "r", protocol="openrlhf")
    assert (found.valid, str(found.reason)) == (False, reason)


def test_openrlhf_responses_may_be_nested():
    assert read('{"rewards": [[0.5]]}', "r", protocol="openrlhf")[0].score == 0.5


def test_response_for_another_sample_is_invalid():
    [found] = read('{"id": "r", "valid": true, "score": 1.0}', "q")
    assert found.reason is InvalidReason.BAD_RETURN


def test_busy_seconds_are_limited():
    assert busy_seconds("2") == 2.0
    assert busy_seconds("9999") == busy_seconds("Fri, 31 Dec 9999 23:59:59 GMT") == 60.0
    assert busy_seconds("0") == 0.05
    assert busy_seconds("nan") == busy_seconds(None) == 1.0


def test_group_response_that_breaks_the_protocol_is_invalid():
    one = '{"id": "g", "results": [{"id": "a", "valid": true, "score": 1.0}]}'
    for text in ("oops", one, one.replace('"g"', '"h"')):
        found = read(text, "a", "b", group="g")
        assert [(result.id, result.reason) for result in found] == [("a", "bad_return"), ("b", "bad_return")]


@pytest.mark.parametrize(
    ("rewards", "scores", "reasons"),
    [
        ("[[1], [2]]", [1.0, 2.0], [None, None]),
        ("[[1, 2]]", [1.0, 2.0], [None, None]),
        ('[1, "NaN"]', [1.0, None], [None, "not_finite"]),
        ("[1]", [None, None], ["bad_return", "bad_return"]),
    ],
)
def test_openrlhf_response_for_a_group_has_one_number_per_sample(rewards, scores, reasons):
    found = read(f'{{"rewards": {rewards}}}', "a", "b", protocol="openrlhf", group="g")
    assert [result.score for result in found] == scores
    assert [result.reason for result in found] == reasons
