from __future__ import annotations

import re

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.services.models import JudgeReward
from rljob_api.wire.base import InvalidReason
from rljob_service.models.execution import NoScoreError, Score
from rljob_service.models.judge.parser import Parser, combine, is_strict


def make(**parser):
    endpoint = {"url": "https://x", "model": "m"}
    return Parser(JudgeReward.model_validate({"template": "x", "endpoint": endpoint, "parser": parser}))


def error_of(parser, answer):
    with pytest.raises(NoScoreError) as error:
        parser.read(answer)
    return error.value


def test_nested_repetition_does_not_block_the_server():
    parser = make(regex=r"(?:(\w+)\s?)+ ends here")
    assert error_of(parser, "word " * 60).reason is InvalidReason.BAD_RETURN


@pytest.mark.parametrize("answer", ["```json" + "\n" * 4000, "```\n" + " \n`" * 4000, "```", "``````"])
def test_odd_markdown_does_not_block_the_server(answer):
    parser = make(jsonSchema={"type": "object", "properties": {"score": {"type": "number"}}})
    assert error_of(parser, answer).reason is InvalidReason.BAD_RETURN


def test_regex_may_end_with_the_answer():
    assert make(regex=r"Score: (\d)$").read("Score: 1\nScore: 5\n \n").value == 5


def test_regex_uses_the_last_match_and_the_named_group():
    parser = make(regex=r"(\w+): (?P<score>-?\d+)")
    assert parser.read("draft: 1, final: -7").value == -7


def test_words_have_scores_in_any_case():
    parser = make(regex=r"Verdict: (\w+)", scores={"Good": 1, "bad": 0})
    assert [parser.read(f"Verdict: {word}").value for word in ("GOOD", "Bad")] == [1, 0]
    error = error_of(parser, "Verdict: fine")
    assert error.reason is InvalidReason.BAD_RETURN
    assert "Good, bad" in error.message


def test_score_path_goes_through_objects_and_lists():
    parser = make(jsonSchema={"type": "object"}, scorePath="verdicts.1.points")
    score = parser.read('{"verdicts": [{"points": 1}, {"points": "2", "sure": true, "why": "x", "big": 1e400}]}')
    assert (score.value, score.components) == (2.0, {"sure": 1.0})


def test_unusable_components_are_dropped():
    answer = f'{{"score": 1, "huge": 1{"0" * 400}, "lone \\ud800": 2}}'
    score = make(jsonSchema={"type": "object"}).read(answer)
    assert (score.value, score.components) == (1.0, {"lone ?": 2.0}), "the result must be valid UTF-8"


@pytest.mark.parametrize("answer", ['```json\n{"score": 3}\n```', ' {"score": 3}\n', '{"score": true, "x": 1}'])
def test_fenced_json_and_bool_scores_are_read(answer):
    assert make(jsonSchema={"type": "object"}).read(answer).value in (3, 1)


@pytest.mark.parametrize(
    "answer", ["", "{", "[]", "3", '{"points": 3}', '{"score": {}}', '{"score": "many"}', "[" * 10_000]
)
def test_json_without_a_score_is_a_bad_return_with_its_beginning(answer):
    error = error_of(make(jsonSchema={"type": "object"}), answer)
    assert error.reason is InvalidReason.BAD_RETURN
    assert answer.strip('{}" ')[:4] in error.message


RATED = {
    "type": "object",
    "properties": {"score": {"type": "integer", "enum": [1, 2, 3]}, "id": {"type": "string", "pattern": "^[a-z]+$"}},
    "required": ["score"],
}


@pytest.mark.parametrize(
    "answer",
    [
        '<think>{"score": 1} is too low</think>{"score": 3}',
        'hm, or {"score": 1}</think>\n```json\n{"score": 3}\n```',
        'At first {"score": 1}.\nMy verdict: {"score": 3, "id": "a"}. Well {done}!',
        'Here:\n```json\n{"score": 3}\n```\nThat is all.',
        '{"score": 3} because of {"x": 1}, and not {"score": 9}',
    ],
)
def test_last_object_outside_of_the_reasoning_counts(answer):
    assert make(jsonSchema=RATED).read(answer).value == 3


def test_last_object_with_the_score_counts_where_the_schema_allows_others():
    assert make(jsonSchema={"type": "object"}).read('{"score": 3}, not {"x": {"score": 1}}').value == 3


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ('{"score": 9} or {"score": 8}', r"8 is not one of 1, 2 or 3 at \$.score"),
        ('{"score": 9}', r"9 is not one of 1, 2 or 3 at \$.score"),
        ('{"score": "3"}', '"3" is not of type "integer"'),
        ('{"score": 3, "id": "A"}', '"A" does not match'),
        ('{"score": null, "id": 4}', '4 is not of type "string"'),
    ],
)
def test_answer_that_does_not_meet_the_schema_is_a_bad_return(answer, problem):
    error = error_of(make(jsonSchema=RATED), answer)
    assert error.reason is InvalidReason.BAD_RETURN
    assert re.search(problem, error.message)


def test_null_abstains_also_where_the_schema_has_no_null():
    assert error_of(make(jsonSchema=RATED), '{"score": null}').reason is InvalidReason.ABSTAINED


@pytest.mark.parametrize("answer", ["{" * 16_000, '{"a":' * 4000, '{"id": "' + "a" * 16_000 + '!", "score": 3}'])
def test_hostile_answers_to_a_schema_do_not_block_the_server(answer):
    schema = {**RATED, "properties": {**RATED["properties"], "id": {"pattern": "^(a+)+$"}}}
    assert error_of(make(jsonSchema=schema), answer).reason is InvalidReason.BAD_RETURN


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "objekt"}, 'is not a JSON schema: "objekt"'),
        (
            {"properties": {"score": {"pattern": "(?=a)"}}},
            '"\\(\\?=a\\)" is not a "regex" at \\$.properties.score.pattern',
        ),
        ({"patternProperties": {"(?=a)": {}}}, "is not a JSON schema"),
    ],
)
def test_schema_that_cannot_be_checked_is_refused(schema, problem):
    with pytest.raises(UserError, match=rf"judge\.parser\.jsonSchema .*{problem}"):
        make(jsonSchema=schema)


def test_reference_to_another_place_is_not_downloaded():
    schema = {"properties": {"score": {"$ref": "http://127.0.0.1:9/schema.json"}}}
    with pytest.raises(UserError, match=r"reference to another place, http.* is not supported"):
        make(jsonSchema=schema)


def test_numbers_outside_of_the_range_are_bad_returns_and_words_are_not():
    parser = make(regex=r"Score: (\S+)", minScore=1, maxScore=5, scores={"none": 0})
    assert [parser.read(f"Score: {number}").value for number in ("1", "5", "none")] == [1, 5, 0]
    for number in ("0.9", "1000"):
        error = error_of(parser, f"Score: {number}")
        assert (error.reason, number in error.message) == (InvalidReason.BAD_RETURN, True)


def test_range_that_is_empty_is_refused():
    with pytest.raises(ValueError, match="minScore"):
        make(regex=r"(\d)", minScore=5, maxScore=1)


def test_null_score_is_an_abstention():
    assert error_of(make(jsonSchema={"type": "object"}), '{"score": null}').reason is InvalidReason.ABSTAINED


@pytest.mark.parametrize("number", ["nan", "inf", "-1e999"])
def test_infinite_score_is_not_finite(number):
    assert error_of(make(regex="(.*)x"), f"{number}x").reason is InvalidReason.NOT_FINITE


def failed(message="x"):
    return NoScoreError(InvalidReason.BAD_RETURN, message)


def test_mean_of_votes_and_components():
    score = combine([Score(1, {"a": 1}), Score(0, {"a": 0, "b": 4}), Score(1)], "mean")
    assert score.value == pytest.approx(2 / 3)
    assert score.components == {"a": 0.5, "b": 4, "votes": 3, "agreement": pytest.approx(2 / 3)}


@pytest.mark.parametrize(("votes", "score"), [([1, 1, 0], 1), ([0, 3, 3, 0], 1.5), ([1, 2, 3], 2)])
def test_majority_of_votes_is_the_mean_of_tied_scores(votes, score):
    assert combine([Score(vote) for vote in votes], "majority").value == score


def test_half_of_the_votes_are_not_enough():
    with pytest.raises(NoScoreError, match="2 of 4 votes failed, the first: one"):
        combine([Score(1), failed("one"), failed("two"), Score(1)], "mean")
    assert combine([Score(1), failed(), Score(1)], "mean").components["votes"] == 2


@pytest.mark.parametrize(
    ("schema", "strict"),
    [
        ({"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False}, True),
        ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, False),
        ({"type": "object", "properties": {"a": {}}, "required": [], "additionalProperties": False}, False),
        ({"anyOf": [{"type": "number"}, {"type": "object"}]}, False),
    ],
)
def test_strict_requires_closed_objects_with_required_properties(schema, strict):
    assert is_strict(schema) is strict
