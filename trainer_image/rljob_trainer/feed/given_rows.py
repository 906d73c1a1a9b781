"""The rows of a warm start: given conversations as the trainer gets them, and which of them an update trains.

A conversation is written as an episode is recorded: each message of the assistant is an answer to the prompt that the
policy would get there, and its tokens are those that the policy would sample, up to the end of the answer.
Invariant: what an update trains follows from the data, the seed and its number alone, so a resume needs no state.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rljob_api.manifest.job import RLJobSpec
from rljob_api.wire.base import Message
from rljob_api.wire.calls import ToolSchema
from rljob_inputs.data.prompts import PromptSet
from rljob_inputs.findings import InputError
from rljob_inputs.prompts import Prompt
from rljob_trainer.conversation.template import ChatTemplate, TemplateError
from rljob_trainer.conversation.transcript import Conversation
from rljob_trainer.episodes.types import Completion, Segment, TrainRow, prompt_segment
from rljob_trainer.feed.prompt_feed import epoch_order

log = logging.getLogger(__name__)

FIELD = "spec.data.warmStart"
_SOURCE = 1000
"""Sources of prompts have lower numbers."""


@dataclass(frozen=True)
class GivenRows:
    numbers: list[int]
    """[conversations] Rows of the data, in the order of the first epoch."""
    rows: list[list[TrainRow]]
    """[conversations][segments]"""
    seed: int
    shuffle: bool

    def take(self, first: int, count: int) -> tuple[list[int], list[TrainRow]]:
        """Return the numbers and the rows of `count` conversations, from the one at `first` since the run began."""
        places = [self._find(position) for position in range(first, first + count)]
        return [self.numbers[place] for place in places], [row for place in places for row in self.rows[place]]

    def _find(self, position: int) -> int:
        epoch, place = divmod(position, len(self.rows))
        order = epoch_order(len(self.rows), epoch, seed=self.seed, shuffle=self.shuffle and epoch > 0, source=_SOURCE)
        return int(order[place])


def build_given(spec: RLJobSpec, prompts: PromptSet, tokenizer: Any, limit: int | None) -> GivenRows:
    """Return the conversations that the warm start trains on. `prompts`: with the answers as ground truth. `limit`: of
    a conversation in tokens, longer ones are left out. Raise InputError if a conversation is unusable."""
    data, schedule = spec.data, spec.schedule
    template = None
    if data.format == "chat":
        template = ChatTemplate(tokenizer, spec.agent.tool_format, data.chat_template_arguments)
    known, wanted = list(prompts.by_row.values()), schedule.num_warm_steps * schedule.prompts_per_step
    given, num_too_long = GivenRows([], [], schedule.seed, data.shuffle), 0
    for place in epoch_order(len(known), 0, seed=schedule.seed, shuffle=data.shuffle, source=_SOURCE).tolist():
        prompt = known[place]
        segments = _write_text(prompt, tokenizer) if template is None else _write_chat(prompt, template)
        if limit is not None and max(len(segment.token_ids) for segment in segments) > limit:
            num_too_long += 1
            continue
        given.numbers.append(prompt.index)
        given.rows.append([_build_row(segment, prompt.index) for segment in segments])
        if len(given.rows) == wanted:
            break
    if num_too_long:
        problem = f"{num_too_long} conversations have more than {limit} tokens, the length of rollout.maxModelLen"
        if not given.rows:
            raise InputError(f"{FIELD}.source", f"all {problem}, or of the model's context; raise it, or shorten them")
        log.warning("%s: %s, or of the model's context, and are left out", FIELD, problem)
    return given


def _build_row(segment: Segment, number: int) -> TrainRow:
    weights = segment.loss_mask.astype(np.float32)
    return TrainRow(segment.token_ids, segment.loss_mask, segment.logprobs, weights, segment.versions, episode=number)


def _write_text(prompt: Prompt, tokenizer: Any) -> list[Segment]:
    text = str(prompt.prompt)
    answer = "".join(str(message["content"]) for message in prompt.ground_truth)
    whole = [int(token_id) for token_id in tokenizer([text + answer])["input_ids"][0]]
    is_prefix = whole[: len(prompt.token_ids)] == prompt.token_ids
    rest = (
        whole[len(prompt.token_ids) :] if is_prefix else tokenizer([answer], add_special_tokens=False)["input_ids"][0]
    )
    end = tokenizer.eos_token_id
    segment = prompt_segment(prompt)
    segment.append_sampled(_complete([*rest, *([] if end is None or rest[-1:] == [end] else [end])], answer), turn=0)
    return [segment]


def _write_chat(prompt: Prompt, template: ChatTemplate) -> list[Segment]:
    assert not isinstance(prompt.prompt, str)
    messages = [*prompt.prompt, *prompt.ground_truth]
    try:
        return _play(messages, _read_tools(prompt), template)
    except TemplateError as error:
        raise InputError(f"{FIELD}.prompt", f"row {prompt.index + 1}: {error}") from error


def _read_tools(prompt: Prompt) -> list[ToolSchema]:
    """Return what the column `tools` describes, as OpenAI's API has it."""
    try:
        return [ToolSchema.model_validate(each.get("function", each)) for each in prompt.extra_info.get("tools") or []]
    except (AttributeError, TypeError, ValueError) as error:
        problem = f"row {prompt.index + 1}: the column tools is no list of functions, as OpenAI's API has them"
        raise InputError(f"{FIELD}.source", f"{problem}: {error}") from error


def _play(messages: Sequence[Message], tools: Sequence[ToolSchema], template: ChatTemplate) -> list[Segment]:
    """Return the segments of the conversation. Raise TemplateError."""
    conversation = Conversation(template, [], tools)
    for message in messages:
        if message["role"] != "assistant":
            conversation.add([message])
            continue
        conversation.next_prompt()
        history = conversation.rendered
        token_ids = _encode_answer(history, message, tools, template)
        conversation.add_answer(_complete(token_ids, str(message.get("content") or "")), message)
    return conversation.segments


def _encode_answer(
    history: Sequence[Message], message: Message, tools: Sequence[ToolSchema], template: ChatTemplate
) -> list[int]:
    """Return the tokens that the policy would sample after `history` to say `message`, with the one that ends it."""
    prompt = template.render(history, tools, generate=True)
    closed = template.render([*history, message], tools, generate=False)
    if not closed.startswith(prompt):
        raise TemplateError(
            "the chat template writes an answer of a conversation otherwise than after its generation prompt, which "
            f"ends with {prompt[-30:]!r}, so nothing is known to train on; set data.chatTemplateArguments, such as "
            "enable_thinking, or model.chatTemplate so that they agree"
        )
    before, whole = template.encode(prompt), template.encode(closed)
    is_prefix = whole[: len(before)] == before
    token_ids = whole[len(before) :] if is_prefix else template.encode(closed[len(prompt) :])
    if template.end_token in token_ids:  # what follows it is of the next prompt
        token_ids = token_ids[: len(token_ids) - token_ids[::-1].index(template.end_token)]
    return token_ids


def _complete(token_ids: Sequence[int], text: str) -> Completion:
    nothing = [0] * len(token_ids)
    return Completion([*token_ids], [*map(float, nothing)], nothing, text, truncated=False)
