"""Whatever the conversation: trained tokens are those that were sampled, in the context that the template writes."""

import copy
import itertools
import json
from dataclasses import dataclass

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from rljob_api.wire.calls import ToolSchema
from rljob_trainer.conversation.template import ChatTemplate, TemplateError
from rljob_trainer.conversation.tool_calls import Answer, parse
from rljob_trainer.conversation.transcript import Conversation
from rljob_trainer.episodes.types import NOT_SAMPLED, Completion
from tests.support.chat_templates import ENDS, FAMILIES, SMOLLM2, build_template, build_tokenizer
from tests.support.episodes import listed

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
    logprobs = [-0.5 - turn - i / 128 for i in range(len(token_ids))]  # as fp32 has them
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
    rows = [zip(getattr(segment, field), segment.loss_mask, strict=True) for segment in listed(segments)]
    return [value for row in rows for value, is_sampled in row if is_sampled]


def join(completions, field):
    return [value for completion in completions for value in getattr(completion, field)]


@ALL_FAMILIES
@given(data=st.data())
def test_trained_tokens_are_exactly_the_sampled_ones(family, data):
    played = data.draw(turns(TEXTS, CALL_TEXTS, REASONING_TEXTS))
    tools = data.draw(st.sampled_from([[], TOOLS]))
    conversation, completions, prompts = play(family, played, tools)
    segments = listed(conversation.segments)
    for field in ("token_ids", "logprobs", "versions"):
        assert read(conversation.segments, field) == join(completions, field), f"{field} of the trained tokens changed"
    assert read(conversation.segments, "turns") == [i for i, c in enumerate(completions) for _ in c.token_ids]
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
    pairs = zip(segment.turns.tolist(), segment.token_ids.tolist(), strict=True)
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


@given(played=turns(TEXTS))
def test_no_segment_begins_for_answers_without_reasoning(played):
    conversation, completions, _ = play("qwen3", played)
    assume(not any("think>" in completion.text for completion in completions))  # a token can have it
    assert conversation.breaks == []


def answer(family, token_ids, *, truncated=False, text=None):
    decoded = build_tokenizer().decode(token_ids, skip_special_tokens=True)
    count = len(token_ids)
    return Completion(token_ids, [-1.0] * count, [0] * count, decoded if text is None else text, truncated, "g")


def converse(family, *texts, tools=()):
    """Play answers that end with the template's token; each text is an answer, or a message that replies to it."""
    conversation = Conversation(build_template(family), FIRST, tools)
    for text in texts:
        if isinstance(text, dict):
            conversation.add([text])
            continue
        conversation.next_prompt()
        message, _ = as_message(family, text, tools)
        completion = answer(family, build_template(family).encode(text + ENDS[family]), text=text)
        conversation.add_answer(completion, message)
    return conversation


def reply(text, role="user"):
    return {"role": role, "content": text}


AGAIN = "<|im_start|>user\nAgain<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("sampled_text", "truncated", "text", "following"),
    [
        ("4<|im_end|>", False, "4", f"\n{AGAIN}"),
        ("4", True, "4", f"<|im_end|>\n{AGAIN}"),
        ("4 <", True, "4 <", f"<|im_end|>\n{AGAIN}"),
        ("4<|im_end|>", True, "4", f"\n{AGAIN}"),
        ("4<|im_start|>", True, "4", f"<|im_end|>\n{AGAIN}"),
        ("4 STOP", False, "4 ", f"<|im_end|>\n{AGAIN}"),
        ("4<|endoftext|>", False, "4", f"\n{AGAIN}"),
        ("<|im_end|>", False, "", f"\n{AGAIN}"),
        ("4\n<|im_end|>", False, "4\n", f"\n{AGAIN}"),
        ("<|im_end|>4<|im_end|>", False, "4", f"\n{AGAIN}"),
    ],
    ids=["own", "cut", "cut-in-mark", "cut-after", "cut-special", "stop", "other", "empty", "newline", "inner"],
)
def test_next_prompt_writes_what_the_answer_lacks(sampled_text, truncated, text, following):
    template = build_template("smollm2")
    conversation = Conversation(template, FIRST)
    first = conversation.next_prompt()
    token_ids = template.encode(sampled_text)
    conversation.add_answer(answer("smollm2", token_ids, truncated=truncated, text=text), reply(text, "assistant"))
    conversation.add([reply("Again")])
    prompt = conversation.next_prompt()
    assert prompt[: len(first) + len(token_ids)] == first + token_ids
    assert template.decode(prompt[len(first) + len(token_ids) :]) == following


def test_the_end_of_a_message_takes_the_place_of_the_end_of_a_turn():
    """Llama 3 ends a call with <|eom_id|>, and its template writes <|eot_id|>."""
    template, text = build_template("llama3"), '{"name": "add", "parameters": {}}'
    conversation = Conversation(template, FIRST, TOOLS)
    first, token_ids = conversation.next_prompt(), template.encode(f"{text}<|eom_id|>")
    conversation.add_answer(answer("llama3", token_ids, text=text), as_message("llama3", text, TOOLS)[0])
    conversation.add([reply("4", "tool")])
    after = template.decode(conversation.next_prompt()[len(first) + len(token_ids) :])
    assert after.startswith("<|start_header_id|>ipython<|end_header_id|>")


def test_tokens_stay_where_the_text_has_other_tokens():
    """The engine samples tokens that the tokenizer would not choose, and halves of characters."""
    template = build_template("smollm2")
    separate = [token_id for character in "Too high" for token_id in template.encode(character)]
    halves = template.encode("漢")[:1] + template.encode("🙂")[1:]
    assert separate != template.encode("Too high")
    for token_ids in (separate, halves):
        conversation = Conversation(template, FIRST)
        first = conversation.next_prompt()
        completion = answer("smollm2", token_ids + template.encode("<|im_end|>"))
        conversation.add_answer(completion, reply(completion.text, "assistant"))
        conversation.add([reply("Again")])
        assert conversation.next_prompt()[len(first) :][: len(token_ids)] == token_ids
        assert conversation.breaks == []


def test_calls_stay_as_they_were_written():
    text = 'So.<tool_call>{"arguments":{"a":1.50},"name":"add"}</tool_call>'
    conversation = converse("qwen25", text, reply("3", "tool"), tools=TOOLS)
    shown = build_template("qwen25").decode(conversation.next_prompt())
    assert f"{text}<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>" in shown
    assert conversation.breaks == []


def test_a_template_that_drops_reasoning_begins_a_segment_and_says_why():
    reasoning = "<think>\nTwo and two.\n</think>\n\n"
    conversation = converse("qwen3", f"{reasoning}4", reply("Again"), f"{reasoning}5", reply("More"), "6")
    assert [(each.turn, each.cause) for each in conversation.breaks] == [(1, "history"), (2, "history")]
    assert conversation.breaks[0].expected.endswith(f"assistant\n{reasoning}4<|im_end|>\n")
    assert "assistant\n4<|im_end|>\n<|im_start|>user\nAgain" in conversation.breaks[0].found
    template = build_template("qwen3")
    contexts = [template.decode(run[1]) for segment in conversation.segments for run in split(segment)[:1]]
    assert [reasoning in context for context in contexts] == [False] * 3, "each segment is as the template writes it"
    assert contexts[2].endswith(
        "4<|im_end|>\n<|im_start|>user\nAgain<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"
        "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    )


def test_reasoning_stays_between_calls_of_tools():
    call = '<think>\nAdd.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    conversation = converse("qwen3", call, reply("3", "tool"), call, reply("4", "tool"), "4", tools=TOOLS)
    assert (len(conversation.segments), conversation.breaks) == (1, [])


def test_an_answer_without_reasoning_does_not_begin_a_segment():
    """Qwen 3's template writes empty reasoning into the last answer, and drops it once the user replies."""
    conversation = converse("qwen3", "4", reply("Again"), "5", reply("More"), "6")
    assert (len(conversation.segments), conversation.breaks) == (1, [])


def with_template(source):
    tokenizer = copy.deepcopy(build_tokenizer())
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer)


OTHER_END = "('<|endoftext|>' if '</think>' in message.content else '<|im_end|>') + '\n'"
NEWEST = "message['role'] + ('?' if 'user' in messages[loop.index0 + 1:]|map(attribute='role')|list else '!') + '"
MARKED = SMOLLM2.replace("message['role'] + '", NEWEST).replace("assistant\n' }}", "assistant!\n' }}")
LATE_END = "('' if message.role == 'assistant' and not loop.last else '<|im_end|>') + '\n'"


@pytest.mark.parametrize(
    ("source", "cause", "found"),
    [
        (SMOLLM2.replace("message['content']", "message['content'].split('</think>')[-1]"), "answer", "4<|im_end|>"),
        (SMOLLM2.replace("assistant\n' }}", "assistant\n<think>\n' }}"), "prompt", "assistant\n<think>well"),
        (SMOLLM2.replace("<|im_start|>system", "<|im_start|>system {{ messages|length }}"), None, ""),
        (SMOLLM2.replace("{% for", "{{ messages|length }}{% for", 1), "prompt", "2<|im_start|>"),
        (SMOLLM2.replace("'<|im_end|>' + '\n'", LATE_END), "history", "4\n<|im"),
        (MARKED, "history", "user?\nWhat"),
        (SMOLLM2.replace("'<|im_end|>' + '\n'", OTHER_END), "answer", "</think>4<|endoftext|>"),
        (SMOLLM2.replace("message['role'] + '", "message['role'] + message['content'][-9:-6] + '"), "prompt", "eas"),
    ],
    ids=["reasoning", "header", "escaped", "counts", "late-end", "marks-newest", "other-end", "role"],
)
def test_every_way_to_rewrite_history_has_its_cause(source, cause, found):
    template = with_template(source)
    conversation = Conversation(template, FIRST)
    conversation.next_prompt()
    text = "<think>well, easily done</think>4"
    conversation.add_answer(answer("", template.encode(f"{text}<|im_end|>"), text=text), reply(text, "assistant"))
    conversation.add([reply("Again")])
    conversation.next_prompt()
    assert conversation.breaks == [], "a break counts once its prompt is answered"
    conversation.add_answer(answer("", template.encode("5<|im_end|>")), reply("5", "assistant"))
    assert [each.cause for each in conversation.breaks] == ([cause] if cause else [])
    assert all(found in each.found for each in conversation.breaks), conversation.breaks


def test_calls_that_the_template_refuses_are_text():
    text = '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}'
    conversation = converse("llama3", text, reply("1", "tool"), reply("2", "tool"), "3", tools=TOOLS)
    assert conversation.breaks == []
    assert len(conversation.messages[1]["tool_calls"]) == 2, "the rewards see the calls"
    assert conversation.rendered[1] == reply(text, "assistant")


def test_a_template_that_drops_calls_begins_a_segment():
    template = with_template(SMOLLM2.replace("{% for", "{{ tools }}{% for", 1))
    conversation, text = Conversation(template, FIRST, TOOLS), '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {}}}
    conversation.next_prompt()
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    conversation.add_answer(answer("", template.encode(f"{text}<|im_end|>"), text=text), message)
    conversation.add([reply("4", "tool")])
    conversation.next_prompt()
    conversation.add_answer(answer("", template.encode("4<|im_end|>")), reply("4", "assistant"))
    assert [each.cause for each in conversation.breaks] == ["answer"]


def test_a_template_that_refuses_a_message_is_a_typed_error():
    template = with_template("{% if messages[-1].role == 'tool' %}{{ raise_exception('No tools.') }}{% endif %}.")
    conversation = Conversation(template, FIRST)
    conversation.next_prompt()
    conversation.add_answer(answer("", [40]), reply("x", "assistant"))
    conversation.add([reply("4", "tool")])
    with pytest.raises(TemplateError, match="roles user, assistant, tool: TemplateError: No tools"):
        conversation.next_prompt()
    assert read(conversation.segments, "token_ids") == [40], "what was sampled stays"


def test_a_prompt_without_an_answer_is_in_no_segment():
    conversation = converse("smollm2", "4", reply("Again"))
    assert conversation.next_prompt() == conversation.next_prompt()
    assert [len(segment.token_ids) for segment in conversation.segments] == [len(conversation.segments[0].turns)]
    assert conversation.segments[0].loss_mask[-1] == 1
    with pytest.raises(ValueError, match="the last prompt has no answer yet"):
        conversation.add([reply("More")])


def test_an_answer_without_a_prompt_is_an_error():
    conversation = converse("smollm2", "4")
    with pytest.raises(ValueError, match="next_prompt must be called before add_answer"):
        conversation.add_answer(answer("smollm2", [40]), reply("x", "assistant"))


def test_what_follows_an_end_token_gets_no_space():
    """Tokenizers of SentencePiece's kind write a space before the first word of each text that they encode."""
    tokenizer = copy.deepcopy(build_tokenizer())
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), backend.pre_tokenizer]
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    template = ChatTemplate(tokenizer)
    assert template.encode("Again") != template.encode("<|im_end|>Again")[1:]
    conversation = Conversation(template, FIRST)
    first, end = conversation.next_prompt(), template.encode("<|im_end|>")
    conversation.add_answer(answer("", [*template.encode("4"), *end]), reply("4", "assistant"))
    conversation.add([reply("Again")])
    assert conversation.next_prompt()[len(first) :] == template.encode("4") + template.encode(
        "<|im_end|>Again<|im_end|>"
    )


@ALL_FAMILIES
@given(data=st.data())
def test_whole_conversation_is_one_sequence_with_each_answer_as_it_was_sampled(family, data):
    played = data.draw(turns(TEXTS, CALL_TEXTS, REASONING_TEXTS))
    tools = data.draw(st.sampled_from([[], TOOLS]))
    conversation, completions, prompts = play(family, played, tools)
    whole, decode = conversation.read_whole(), build_template(family).decode
    assert whole.prompt_ids.tolist() == prompts[0]
    if len(conversation.segments) == 1:
        [segment] = listed(conversation.segments)
        assert [*whole.prompt_ids.tolist(), *whole.completion_ids.tolist()] == segment.token_ids
    first, last = completions[0].token_ids, completions[-1].token_ids
    assert whole.completion_ids.tolist()[: len(first)] == first
    assert whole.completion_ids.tolist()[-len(last) :] == last
    remaining = iter(whole.completion_ids.tolist())
    assert all(token_id in remaining for token_id in join(completions, "token_ids")), "in order"
    text = "".join(decode(whole.completion_ids.tolist()).split())
    for _, replies in played[:-1]:
        written = [form for reply in replies for form in (reply, json.dumps(reply, ensure_ascii=False)[1:-1])]
        assert any("".join(form.split()) in text for form in written), "what followed an answer"
    roles = [message["role"] for message in whole.messages]
    assert roles == [message["role"] for message in conversation.messages[len(FIRST) : len(FIRST) + len(roles)]]
    assert (roles[0], roles[-1]) == ("assistant", "assistant")


def exchange(family, *exchanges, tools=()):
    """Play answers, each with its end token, and the messages that follow. Return the conversation."""
    conversation, template = Conversation(build_template(family), FIRST, tools), build_template(family)
    for turn, (text, following) in enumerate(exchanges):
        conversation.next_prompt()
        token_ids = template.encode(text + ENDS[family])
        completion = Completion(token_ids, [0.0] * len(token_ids), [turn] * len(token_ids), text, False, "g")
        conversation.add_answer(completion, as_message(family, text, tools)[0])
        if following:
            conversation.add(following)
    return conversation


USER = [{"role": "user", "content": "Again."}]
RESULT = [{"role": "tool", "tool_call_id": "0", "name": "add", "content": "17"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_whole_conversation_has_the_reasoning_that_the_template_drops():
    thought = "<think>\nTwo and two.\n</think>\n\n4"
    conversation = exchange("qwen3", (thought, USER), (thought, USER), ("5", None))
    assert len(conversation.segments) == 3, "each message of the user drops reasoning"
    whole, end = conversation.read_whole(), "<|im_end|>\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n"
    text = build_template("qwen3").decode(whole.completion_ids.tolist())
    assert text == f"{thought}{end}{thought}{end}5<|im_end|>"
    assert [message["content"] for message in whole.messages] == [thought, "Again.", thought, "Again.", "5"]


def test_messages_with_tools_have_reasoning_apart_and_calls_as_the_api_has_them():
    text = f"<think>\nI add.\n</think>\n\nLet me see.\n{CALL}"
    conversation = exchange("qwen3", (text, RESULT), ("<think>\n\n</think>\n\n17", None), tools=TOOLS)
    call = {"id": "0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert conversation.read_whole().messages == [
        {"role": "assistant", "content": "Let me see.\n", "reasoning_content": "I add.", "tool_calls": [call]},
        *RESULT,
        {"role": "assistant", "content": "17", "reasoning_content": ""},
    ]


@pytest.mark.parametrize("tools", [(), TOOLS])
def test_reasoning_stays_in_the_content_without_tools_or_a_template_that_reads_it(tools):
    text = "<think>well</think>4"
    for family in ("qwen3", "qwen25") if not tools else ("qwen25",):
        [message] = exchange(family, (text, None), tools=tools).read_whole().messages
        assert message == {"role": "assistant", "content": text}


def test_whole_conversation_follows_an_answer_that_ended_otherwise():
    template = build_template("qwen3")
    thought = "<think>\nTwo.\n</think>\n\n4"
    for end, kept in (("<|endoftext|>", "<|endoftext|>"), ("", "")):
        conversation = Conversation(template, FIRST)
        conversation.next_prompt()
        token_ids = template.encode(thought + end)
        zeros = [0.0] * len(token_ids)
        completion = Completion(token_ids, zeros, [0] * len(token_ids), thought, not end, "g")
        conversation.add_answer(completion, {"role": "assistant", "content": thought})
        conversation.add(USER)
        conversation.next_prompt()
        five = template.encode("5<|im_end|>")
        conversation.add_answer(
            Completion(five, [0.0] * 2, [1] * 2, "5", False, "g"), {"role": "assistant", "content": "5"}
        )
        assert len(conversation.segments) == 2
        cut = "" if end else "<|im_end|>"
        header = "\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n"
        assert template.decode(conversation.read_whole().completion_ids) == f"{thought}{kept}{cut}{header}5<|im_end|>"


def test_conversation_without_an_answer_has_no_whole():
    assert Conversation(build_template("qwen25"), FIRST).read_whole() is None
