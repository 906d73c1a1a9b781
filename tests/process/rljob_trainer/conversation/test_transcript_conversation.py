"""Exact tokens with the tokenizer and the chat template of SmolLM2, as the head loads them."""

import pytest

from examples import prepare
from rljob_api.manifest.job_sections import Data, Model
from rljob_api.wire.calls import ToolSchema
from rljob_inputs.data.prompts import tokenize
from rljob_trainer.conversation.template import ChatTemplate
from rljob_trainer.conversation.transcript import Conversation, Transcript
from rljob_trainer.episodes.types import Completion
from rljob_trainer.head.inputs import load_tokenizer
from tests.support.episodes import listed

FOLDER = prepare.MODELS / "smollm2-135m-instruct"
FIRST = [{"role": "user", "content": "What is 2 + 2?"}]
TOOLS = [ToolSchema(name="add", description="Adds.", parameters={"type": "object", "properties": {}})]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


@pytest.fixture(scope="module")
def template():
    if not FOLDER.is_dir():
        pytest.skip(f"{FOLDER} not found; python examples/prepare.py creates it")
    return ChatTemplate(load_tokenizer(str(FOLDER), Model(source=str(FOLDER))))


def sample(template, text, *, truncated=False):
    """Sample the characters one by one, which are not the tokens that the tokenizer has for the text."""
    token_ids = [token_id for character in text for token_id in template.encode(character)]
    token_ids += [] if truncated else template.encode("<|im_end|>")
    return Completion(token_ids, [-1.0] * len(token_ids), [3] * len(token_ids), text, truncated)


def test_first_prompt_has_the_tokens_of_the_data(template):
    data = Data.model_validate({"train": {"source": "x.jsonl", "prompt": "p"}, "format": "chat"})
    [expected] = tokenize(data, [FIRST], template._tokenizer)
    assert Conversation(template, FIRST).next_prompt() == expected


def test_conversation_is_one_segment_of_what_was_sampled(template):
    conversation = Conversation(template, FIRST)
    completions = [
        sample(template, "It is 5."),
        sample(template, " Is it 3\n", truncated=True),
        sample(template, "漢🙂"),
    ]
    for completion in completions:
        prompt = conversation.next_prompt()
        conversation.add_answer(completion, {"role": "assistant", "content": completion.text})
        conversation.add([{"role": "user", "content": "Too high."}])
    assert conversation.breaks == []
    [segment] = listed(conversation.segments)
    trained = [i for i, is_sampled in zip(segment.token_ids, segment.loss_mask, strict=True) if is_sampled]
    assert trained == [token_id for completion in completions for token_id in completion.token_ids]
    assert segment.token_ids[: len(prompt)] == prompt
    assert (
        template.decode(segment.token_ids) == template.render(conversation.messages[:-1], [], generate=False).rstrip()
    )


def test_tools_and_their_results_are_seen(template):
    conversation = Conversation(template, FIRST, TOOLS)
    assert '"name": "add"' in template.decode(conversation.next_prompt())
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    conversation.add_answer(sample(template, text), {"role": "assistant", "content": "", "tool_calls": [CALL]})
    conversation.add([{"role": "tool", "content": "4"}])
    seen = template.decode(conversation.next_prompt())
    assert seen.endswith(
        f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert conversation.breaks == []


def test_a_program_gets_the_tokens_of_a_conversation(template):
    transcript, conversation, history = Transcript(template), Conversation(template, FIRST, TOOLS), FIRST
    texts = ['Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>', "It is 5.", "4"]
    for turn, text in enumerate(texts):
        pending, completion = transcript.plan(history, TOOLS), sample(template, text)
        assert pending.prompt == conversation.next_prompt()
        message = transcript.read_answer(pending, completion)
        assert transcript.record(pending, completion, message) == turn
        conversation.add_answer(completion, transcript.messages_of(turn)[-1])
        calls = message.get("tool_calls", [])
        following = [{"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in calls]
        conversation.add(following or [{"role": "user", "content": "Too high."}])
        history = [*history, message, *(following or [{"role": "user", "content": "Too high."}])]
    assert listed(transcript.segments) == listed(conversation.segments)
    assert (len(transcript.segments), transcript.breaks) == (1, [])


def test_a_branch_begins_with_the_sampled_tokens(template):
    transcript = Transcript(template)
    pending, completion = transcript.plan(FIRST), sample(template, "It is 5.")
    transcript.record(pending, completion, message := transcript.read_answer(pending, completion))
    for text in ("Too high.", "Why?"):
        pending = transcript.plan([*FIRST, message, {"role": "user", "content": text}])
        assert template.decode(pending.prompt) == pending.text
        transcript.record(pending, other := sample(template, "4"), transcript.read_answer(pending, other))
    first, second = listed(transcript.segments)
    assert [each.cause for each in transcript.breaks] == ["branch"]
    start = second.turns.index(2)
    assert second.token_ids[:start] == pending.prompt
    assert sum(second.loss_mask) == len(other.token_ids)
    assert completion.token_ids != template.encode("It is 5.<|im_end|>"), "they are not those of the text"
    shared = first.turns.index(0) + len(completion.token_ids)
    assert second.token_ids[:shared] == first.token_ids[:shared]
