"""OpenAI's completions."""

import pytest

from rljob_trainer.gateway.dialects.completions import Completions
from rljob_trainer.gateway.dialects.meaning import Rules
from rljob_trainer.gateway.types import RequestError

DIALECT = Completions()


def validate(answer):
    """Return an answer as its client has it, whose import takes seconds."""
    from openai.types import Completion

    return Completion.model_validate(answer)


def read(**body):
    return Rules().read(DIALECT, {"model": "policy", "prompt": "2 + 2 =", **body}, {})


@pytest.mark.parametrize(
    ("prompt", "expected"), [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([7], [7])]
)
def test_prompt_is_a_text_or_token_ids(prompt, expected):
    request = read(prompt=prompt)

    assert request.prompt == expected
    assert request.messages is None


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (None, "prompt: required"),
        ([], "prompt: required"),
        ("", "prompt: required"),
        (["a", "b"], "prompt: several prompts"),
        ([[1], [2]], "prompt: several prompts"),
        ([1, -1], r"prompt\[1\]"),
    ],
)
def test_other_prompts_are_refused(prompt, problem):
    with pytest.raises(RequestError, match=problem):
        read(prompt=prompt)


@pytest.mark.parametrize("field", [{"echo": True}, {"suffix": "x"}, {"n": 2}, {"best_of": 4}, {"prompt_logprobs": 1}])
def test_unsupported_fields_are_refused_by_name(field):
    with pytest.raises(RequestError, match=f"{next(iter(field))}: not supported"):
        read(**field)


def test_limits_and_stop_strings_are_read():
    request = read(max_tokens=3, stop="\n", echo=False, n=1, temperature=0.3)

    assert (request.max_tokens, request.stop, request.ignored) == (3, ["\n"], ("temperature",))


def test_answer_is_the_text_with_its_counts(make_answer):
    response = validate(DIALECT.write(read(), make_answer(finish="length")))

    assert response.id == "chatcmpl-1"
    assert (response.choices[0].text, response.choices[0].finish_reason) == ("Four", "length")
    assert response.choices[0].logprobs is None
    assert (response.usage.prompt_tokens, response.usage.completion_tokens, response.usage.total_tokens) == (7, 2, 9)


def test_logprobs_are_those_of_the_sampled_tokens(make_answer):
    response = validate(DIALECT.write(read(logprobs=1), make_answer()))

    logprobs = response.choices[0].logprobs
    assert (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset) == (["Fo", "ur"], [-0.5, -0.25], [0, 2])
    assert logprobs.top_logprobs == [{"Fo": -0.5}, {"ur": -0.25}]
    assert DIALECT.write(read(logprobs=0), make_answer())["choices"][0]["logprobs"]["top_logprobs"] is None


def test_stream_has_the_text_once_and_ends(make_answer, read_events):
    request = read(stream=True, logprobs=0, stream_options={"include_usage": True})
    events = DIALECT.events(request, make_answer())
    *chunks, done = read_events(events)

    assert done == {"event": ""}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "Four"
    assert [choice["finish_reason"] for choice in choices] == [None, "stop"]
    assert choices[0]["logprobs"]["tokens"] == ["Fo", "ur"]
    assert [chunk.get("usage", {}).get("total_tokens") for chunk in chunks] == [None, None, 9]


def test_stream_without_usage_has_none(make_answer, read_events):
    assert all("usage" not in event for event in read_events(DIALECT.events(read(stream=True), make_answer())))
