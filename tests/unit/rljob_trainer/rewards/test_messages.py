"""Parsing of reward responses."""

import pytest

from rljob_api.wire.protocol import InvalidReason
from rljob_trainer.rewards.messages import busy_seconds, parse_group_result, parse_openrlhf, parse_result


@pytest.mark.parametrize("number", ["NaN", "1e999"])
def test_component_that_is_not_finite_breaks_the_protocol(number):
    answer = f'{{"id": "r", "valid": true, "score": 1.0, "components": {{"length": {number}}}}}'
    found = parse_result("r", answer, 0.0)
    [of_group] = parse_group_result("g", ["r"], f'{{"id": "g", "results": [{answer}]}}', 0.0)
    assert found.reason is of_group.reason is InvalidReason.BAD_RETURN
    assert "component length" in found.message


@pytest.mark.parametrize(
    ("text", "reason"),
    [('{"rewards": ["NaN"]}', "not_finite"), ('{"rewards": [1, 2]}', "bad_return"), ("oops", "bad_return")],
)
def test_openrlhf_responses_are_checked(text, reason):
    found = parse_openrlhf(["r"], text, 0.0)[0]
    assert (found.valid, str(found.reason)) == (False, reason)


def test_openrlhf_responses_may_be_nested():
    assert parse_openrlhf(["r"], '{"rewards": [[0.5]]}', 0.0)[0].score == 0.5


def test_response_for_another_sample_is_invalid():
    assert parse_result("q", '{"id": "r", "valid": true, "score": 1.0}', 0.0).reason is InvalidReason.BAD_RETURN


def test_busy_seconds_are_limited():
    assert busy_seconds("2") == 2.0
    assert busy_seconds("9999") == busy_seconds("Fri, 31 Dec 9999 23:59:59 GMT") == 60.0
    assert busy_seconds("0") == 0.05
    assert busy_seconds("nan") == busy_seconds(None) == 1.0


def test_group_response_that_breaks_the_protocol_is_invalid():
    one = '{"id": "g", "results": [{"id": "a", "valid": true, "score": 1.0}]}'
    for text in ("oops", one, one.replace('"g"', '"h"')):
        found = parse_group_result("g", ["a", "b"], text, 0.0)
        assert [(result.id, result.reason) for result in found] == [("a", "bad_return"), ("b", "bad_return")]


def test_openrlhf_response_for_a_group_has_one_number_per_sample():
    assert [r.score for r in parse_openrlhf(["a", "b"], '{"rewards": [[1], [2]]}', 0.0)] == [1.0, 2.0]
    assert [r.score for r in parse_openrlhf(["a", "b"], '{"rewards": [[1, 2]]}', 0.0)] == [1.0, 2.0]
    assert [str(r.reason) for r in parse_openrlhf(["a", "b"], '{"rewards": [1, "NaN"]}', 0.0)] == ["None", "not_finite"]
    assert {r.reason for r in parse_openrlhf(["a", "b"], '{"rewards": [1]}', 0.0)} == {InvalidReason.BAD_RETURN}
