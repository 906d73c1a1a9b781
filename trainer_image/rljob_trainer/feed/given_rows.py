"""The rows of a warm start: given conversations as the trainer gets them, and which of them an update trains.

A conversation is written as an episode is recorded: each message of the assistant is an answer to the prompt that the
policy would get there, and its tokens are those that the policy would sample, up to the end of the answer.
Invariant: what an update trains follows from the data, the seed and its number alone, so a resume needs no state.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
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
    conversations: list[tuple[int, list[TrainRow]]]
    """Each with its row of the data, in the order of the first epoch."""
    seed: int
    shuffle: bool

    def take(self, first: int, count: int) -> tuple[list[int], list[TrainRow]]:
        """Return the numbers and the rows of `count` conversations, from the one at `first` since the run began."""
        size = len(self.conversations)
        draw = partial(epoch_order, size, seed=self.seed, source=_SOURCE)
        order = cache(lambda epoch: draw(epoch, shuffle=self.shuffle and epoch > 0))  # once for each epoch
        places = (divmod(position, size) for position in range(first, first + count))
        found = [self.conversations[order(epoch)[place]] for epoch, place in places]
        return [number for number, _ in found], [row for _, rows in found for row in rows]


def build_given(spec: RLJobSpec, prompts: PromptSet, tokenizer: Any, limit: int | None) -> GivenRows:
    """Return the conversations that the warm start trains on. `prompts`: with the answers as ground truth. `limit`: of
    a conversation in tokens, longer ones are left out. Raise InputError if a conversation is unusable."""
    data, schedule, known = spec.data, spec.schedule, list(prompts.by_row.values())
    template, num_too_long = None, 0
    if data.format == "chat":
        template = ChatTemplate(tokenizer, spec.agent.tool_format, data.chat_template_arguments)
    given = GivenRows([], schedule.seed, data.shuffle)
    for place in epoch_order(len(known), 0, seed=schedule.seed, shuffle=data.shuffle, source=_SOURCE):
        prompt = known[place]
        segments = _write_text(prompt, tokenizer) if template is None else _write_chat(prompt, template)
        if limit is not None and max(len(segment.token_ids) for segment in segments) > limit:
            num_too_long += 1
            continue
        given.conversations.append((prompt.index, [_build_row(segment, prompt.index) for segment in segments]))
        if len(given.conversations) == schedule.num_warm_steps * schedule.prompts_per_step:
            break
    problem = f"{num_too_long} conversations have more than {limit} tokens, rollout.maxModelLen or the model's context"
    if not given.conversations:
        raise InputError(f"{FIELD}.source", f"all {problem}; raise it, or shorten them")
    if num_too_long:
        log.warning("%s: %s, and are left out", FIELD, problem)
    return given


def _build_row(segment: Segment, number: int) -> TrainRow:
    mask = segment.loss_mask
    return TrainRow(
        segment.token_ids, mask, segment.logprobs, mask.astype(np.float32), segment.versions, episode=number
    )


def _write_text(prompt: Prompt, tokenizer: Any) -> list[Segment]:
    def encode(text: str) -> list[int]:
        return list(tokenizer([text], add_special_tokens=False)["input_ids"][0])

    answer, segment = "".join(str(message["content"]) for message in prompt.ground_truth), prompt_segment(prompt)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    segment.append_sampled(_complete([*_encode_rest(encode, str(prompt.prompt), answer), *end], answer), turn=0)
    return [segment]


def _write_chat(prompt: Prompt, template: ChatTemplate) -> list[Segment]:
    try:
        tools = [ToolSchema.model_validate(each["function"]) for each in prompt.extra_info.get("tools") or []]
        conversation = Conversation(template, [], tools)
        for message in [*prompt.prompt, *prompt.ground_truth]:
            if message["role"] == "assistant":
                conversation.next_prompt()
                token_ids = _encode_answer(conversation.rendered, message, tools, template)
                conversation.add_answer(_complete(token_ids, str(message.get("content") or "")), message)
            else:
                conversation.add([message])
    except (TemplateError, KeyError, TypeError, ValueError) as error:
        remedy = "tools must be functions, and messages such as the chat template takes; correct the row, or remove it"
        raise InputError(FIELD, f"row {prompt.index + 1}: {error}: {remedy}") from error
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
    token_ids = _encode_rest(template.encode, prompt, closed[len(prompt) :])
    if template.end_token in token_ids:  # what follows it is of the next prompt
        token_ids = token_ids[: len(token_ids) - token_ids[::-1].index(template.end_token)]
    return token_ids


def _encode_rest(encode: Callable[[str], list[int]], before: str, rest: str) -> list[int]:
    """Encode `rest` as it is encoded after `before`: some tokenizers write a space at the start of a text."""
    known, whole = encode(before), encode(before + rest)
    return whole[len(known) :] if whole[: len(known)] == known else encode(rest)


def _complete(token_ids: list[int], text: str) -> Completion:
    return Completion(token_ids, [0.0] * len(token_ids), [0] * len(token_ids), text, truncated=False)
