"""Bodies of requests to rewards, and parsing of their responses."""

import json

import pytest

from rljob_api.wire.base import InvalidReason
from rljob_api.wire.scores import GroupRequest, ScoreRequest, WholeCompletion
from rljob_trainer.rewards.messages import RewardCall


def read(text, *ids, protocol="rljob", group=None):
    samples = [ScoreRequest(id=each, prompt="p", completion="c") for each in ids]
    request = GroupRequest(id=group, lane="train", samples=samples) if group or len(ids) > 1 else samples[0]
    return RewardCall(request, protocol).read(text, 0.0)


class Decoder:
    """Token 3 is special."""

    def decode(self, token_ids, *, skip_special_tokens):
        assert not skip_special_tokens
        return " ".join(map(str, token_ids))


WHOLE = WholeCompletion(text="5 6", messages=[{"role": "assistant"}], prompt_ids=[1], completion_ids=[5, 3, 6])
IDS = {"prompt_ids": [1, 5, 3], "completion_ids": [6]}


def sent(*reads, whole=WHOLE, group=False, protocol="rljob"):
    sample = ScoreRequest(id="s", prompt="p", completion="6", ground_truth="g", whole=whole, **IDS)
    request = GroupRequest(id="g", samples=[sample, sample]) if group else sample
    return json.loads(RewardCall(request, protocol, Decoder()).encode(reads))


@pytest.mark.parametrize("group", [False, True])
def test_parts_are_sent_to_servers_that_read_them(group):
    def parts(*reads):
        body = sent(*reads, group=group)
        first = body["samples"][0] if group else body
        assert not group or body["samples"][1] == first
        return {name: first[name] for name in ("whole", "rendered", *IDS) if first.get(name) is not None}

    text = {"text": "5 6", "messages": [{"role": "assistant"}]}
    rendered = {"prompt": "1", "query": "1 5 3 6"}
    assert parts() == {}
    assert parts("whole") == {"whole": text}
    assert parts("tokens") == IDS
    assert parts("tokens", "whole") == {**IDS, "whole": text | {"prompt_ids": [1], "completion_ids": [5, 3, 6]}}
    assert parts("rendered") == {"rendered": rendered}
    assert parts("whole", "rendered", "tokens")["rendered"] == rendered


def test_text_with_special_tokens_is_of_the_last_answer_without_the_whole_completion():
    assert sent("rendered", whole=None)["rendered"] == {"prompt": "1 5 3", "query": "1 5 3 6"}


def test_openrlhfs_protocol_has_the_texts_with_special_tokens():
    expected = {"query": ["1 5 3 6"], "prompts": ["1"], "labels": ["g"]}
    assert sent(protocol="openrlhf") == expected
    assert sent(protocol="openrlhf", group=True) == {name: each * 2 for name, each in expected.items()}


def test_sample_without_token_ids_is_refused_by_a_reward_that_reads_rendered_text():
    call = RewardCall(ScoreRequest(id="s", prompt="p", completion="c"), "openrlhf", Decoder())
    with pytest.raises(ValueError, match="the sample s has no token ids"):
        call.encode()


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
