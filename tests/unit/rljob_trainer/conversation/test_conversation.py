"""Whatever the conversation: trained tokens are those that were sampled, in the context that the template writes."""

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.wire.protocol import ToolSchema
from rljob_trainer.conversation.conversation import Conversation
from rljob_trainer.conversation.tool_calls import Answer, parse
from rljob_trainer.episodes.types import NOT_SAMPLED, Completion
from tests.support.chat_templates import ENDS, FAMILIES, build_template, build_tokenizer

TOOLS = [ToolSchema(name="add", description="Adds.", parameters={"type": "object", "properties": {}})]
FIRST = [{"role": "user", "content": "What is 2 + 2?"}]
STOP = "\n\n"
"""A stop string. It is the one that ends an answer in the family `plain`."""
ALL_FAMILIES = pytest.mark.parametrize("family", FAMILIES)

TEXTS = st.one_of(
    st.sampled_from(
        ["4", " 4 ", "", "\n", "4\n", "\n\n4\n\n", "{", "Ünï 漢字 🙂", "user: 4\n\nassistant: ", "<", "a\n\n\nb"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)
CALL_TEXTS = st.sampled_from(
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        'Let me see.\n<tool_call>{"arguments":{"a":1.50,"b":[ ]},"name":"add"}</tool_call> Done.',
        '<tool_call>{"name": "add", "arguments": {"a": "\\u00fc\\ud83d"}}</tool_call><tool_call>{"name": "add"}',
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>\n<tool_call>{"name":"x","arguments":{}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '{"name": "add", "parameters": {"a":1}}',
        '{"parameters": {"a": {"b": {}}}, "name": "add"}; {"name": "x", "parameters": {}}',
    ]
)
REASONING_TEXTS = st.sampled_from(
    ["<think>\nTwo and two.\n</think>\n\n4", "<think>well</think>4", "<think>\n\n</think>\n\n4", "<think>\nno end"]
)


@dataclass(frozen=True)
class Sampled:
    """What the policy samples in a turn."""

    token_ids: list[int]
    """Not always those that the tokenizer has for their text."""
    end: str
    """The token that ends it, `cut`, or `string` for a stop string."""


@st.composite
def sampled(draw, texts):
    kind = draw(st.sampled_from(["text", "characters", "tokens"]))
    if kind == "tokens":  # Among them halves of characters, and special tokens.
        token_ids = draw(st.lists(st.integers(0, len(build_tokenizer()) - 1), max_size=8))
    elif kind == "characters":
        encoder = build_template("plain").encode
        token_ids = list(itertools.chain.from_iterable(map(encoder, draw(texts))))
    else:
        token_ids = build_template("plain").encode(draw(texts))
    return Sampled(token_ids, draw(st.sampled_from(["own", "own", "cut", "string", "<|endoftext|>", "<|eom_id|>"])))


def turns(*texts):
    replies = st.lists(TEXTS.filter(str.strip), min_size=1, max_size=2)
    return st.lists(st.tuples(sampled(st.one_of(*texts)), replies), min_size=1, max_size=4)


def complete(family, answer, turn):
    """Return the completion as the engine returns it."""
    template = build_template(family)
    truncated, end = answer.end == "cut", (ENDS[family] or "string") if answer.end == "own" else answer.end
    ending = [] if truncated else template.encode(STOP if end == "string" else end)
    token_ids = answer.token_ids + ending or template.encode("4")
    logprobs = [-0.5 - turn - i / 100 for i in range(len(token_ids))]
    versions = [turn + (i > 2) for i in range(len(token_ids))]
    stop = len(ending) if end == "string" else 0
    text = build_tokenizer().decode(token_ids[: len(token_ids) - stop], skip_special_tokens=True)
    return Completion(token_ids, logprobs, versions, text, truncated, "g")


def as_message(family, text, tools):
    """Return the message of an answer as a loop records it, and its calls."""
    answer = parse(text, build_template(family).tool_format) if tools else Answer(text)
    if not answer.calls or any(call.arguments is None for call in answer.calls):
        return {"role": "assistant", "content": text}, answer.calls
    calls = [
        {"id": str(i), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for i, call in enumerate(answer.calls)
    ]
    return {"role": "assistant", "content": answer.content, "tool_calls": calls}, answer.calls


def play(family, played, tools=()):
    """Play the turns. Return the conversation, the completions, and each prompt with its segment's number."""
    conversation, completions, prompts = Conversation(build_template(family), FIRST, tools), [], []
    for turn, (answer, replies) in enumerate(played):
        prompts.append(conversation.next_prompt())
        completions.append(complete(family, answer, turn))
        message, calls = as_message(family, completions[-1].text, tools)
        conversation.add_answer(completions[-1], message)
        if calls:
            conversation.add(
                [{"role": "tool", "tool_call_id": str(i), "content": replies[0]} for i in range(len(calls))]
            )
        else:
            conversation.add([{"role": "user", "content": replies[-1]}])
    return conversation, completions, prompts


def read(segments, field):
    """Return a field of all sampled tokens, in order."""
    rows = [zip(getattr(segment, field), segment.loss_mask, strict=True) for segment in segments]
    return [value for row in rows for value, is_sampled in row if is_sampled]


def join(completions, field):
    return [value for completion in completions for value in getattr(completion, field)]


@ALL_FAMILIES
@given(data=st.data())
def test_trained_tokens_are_exactly_the_sampled_ones(family, data):
    played = data.draw(turns(TEXTS, CALL_TEXTS, REASONING_TEXTS))
    tools = data.draw(st.sampled_from([[], TOOLS]))
    conversation, completions, prompts = play(family, played, tools)
    segments = conversation.segments
    for field in ("token_ids", "logprobs", "versions"):
        assert read(segments, field) == join(completions, field), f"{field} of the trained tokens changed"
    assert read(segments, "turns") == [i for i, c in enumerate(completions) for _ in c.token_ids]
    for segment in segments:
        context = [i for i, is_sampled in enumerate(segment.loss_mask) if not is_sampled]
        assert {segment.logprobs[i] for i in context} <= {0.0}
        assert {segment.versions[i] for i in context} | {segment.turns[i] for i in context} <= {NOT_SAMPLED}
        assert segment.loss_mask[-1] == 1, "context after the last answer trains nothing, and may be too long"
    assert len(segments) == len(conversation.breaks) + 1
    for turn, prompt in enumerate(prompts):
        [segment] = [segment for segment in segments if turn in segment.turns]
        seen = segment.token_ids[: segment.turns.index(turn)]
        assert prompt == seen, "the segment is not what the engine saw"


def squeeze(text):
    return "".join(text.split())


def split(segment):
    """Return the runs of context and of sampled tokens, as (turn, token ids)."""
    pairs = zip(segment.turns, segment.token_ids, strict=True)
    return [
        (turn, [token_id for _, token_id in run]) for turn, run in itertools.groupby(pairs, key=lambda pair: pair[0])
    ]


def is_answer(family, written, message, has_end):
    """Whether `written` is what the template writes for the message, up to white space, JSON and empty reasoning."""
    body = squeeze(written.removesuffix(ENDS[family]) if has_end else written)
    content = squeeze(message["content"])
    if "tool_calls" in message:
        return content in body and all(call["function"]["name"] in body for call in message["tool_calls"])
    return content in body if family == "qwen3" else content == body


def fits(family, text, runs, answers, ends):
    """Whether the template's text is that of the runs, where each sampled one stands for how the template writes it."""
    if not runs:
        return not text
    (turn, token_ids), rest = runs[0], runs[1:]
    decoded = build_template(family).decode(token_ids)
    if turn == NOT_SAMPLED:
        return text.startswith(decoded) and fits(family, text[len(decoded) :], rest, answers, ends)
    following = build_template(family).decode(rest[0][1])
    starts = [i for i in range(len(text)) if text.startswith(following, i)]
    return any(
        is_answer(family, text[:start], answers[turn], ends[turn]) and fits(family, text[start:], rest, answers, ends)
        for start in starts
    )


@ALL_FAMILIES
@given(data=st.data())
def test_context_is_what_the_template_writes(family, data):
    played = data.draw(turns(TEXTS, CALL_TEXTS, REASONING_TEXTS))
    tools = data.draw(st.sampled_from([[], TOOLS]))
    conversation, completions, _ = play(family, played, tools)
    template, indices = build_template(family), []
    indices = [i for i, message in enumerate(conversation.rendered) if message["role"] == "assistant"]
    answers = [conversation.rendered[i] for i in indices]
    ends = [not c.truncated and (template.is_special(c.token_ids[-1]) or family == "plain") for c in completions]
    for segment in conversation.segments:
        runs = split(segment)
        text = template.render(conversation.rendered[: indices[runs[-1][0]]], tools, generate=True)
        seen = [template.decode(token_ids) for _, token_ids in runs]
        assert fits(family, text, runs[:-1], answers, ends), f"the model saw {seen}, the template writes {text!r}"


@pytest.mark.parametrize("family", ["smollm2", "qwen25", "llama3", "plain"])
@given(data=st.data())
def test_no_segment_begins_where_the_template_keeps_history(family, data):
    conversation, _, _ = play(family, data.draw(turns(TEXTS, CALL_TEXTS)), data.draw(st.sampled_from([[], TOOLS])))
    assert conversation.breaks == []
    assert len(conversation.segments) == 1
