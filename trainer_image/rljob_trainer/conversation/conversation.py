"""The conversation of one episode: messages, and the segments of exact tokens.

Let F(messages) be what the chat template writes, `previous` the text of the last prompt, `closed` = F(messages up to
its answer), `text` = F(all messages, with the header of the next answer), and `tail` what the template writes after the
body of an answer.

    previous                                | answer                      | results, replies, header
    what the engine got, as token ids       | what it sampled, unchanged  | encode(unsampled tail + text[len(closed):])

The next prompt continues these tokens if `closed` begins with `previous`, `text` begins with `closed`, and the template
leaves nothing of the answer out. Or if `text` begins with `previous` and then writes less for the answer than `closed`,
such as no empty reasoning, but the whole message; what follows is then the text after the answer. Otherwise a new
segment begins with encode(text), and a Break says why. This is sound:

- Trained tokens. Sampled ids are copied from the completion to the segment, and never made from text. A prompt is the
  ids of its segment, so their log-probs are those of the context in which the trainer computes them again. In a new
  segment, earlier answers are context without loss: each sampled token is in one segment, once.
- Context. By induction, a segment is what the template writes for its last prompt, except that answers are as the model
  wrote them: each step adds to both what follows the answer, or it begins a new segment.
- How an answer is written makes no difference, because it is not encoded: JSON of a call that the template prints with
  other spaces, tokens that the tokenizer would not choose for the text, bytes that decode to U+FFFD, special tokens
  within the answer. The check compares what the template writes with the message, without white space.
- An answer that was cut off has no end token, so all of the tail follows. The same holds for an answer that a stop
  string ended: the engine sampled the string, so its tokens stay before the tail.
- An end token that differs from the template's (<|eom_id|> of Llama 3, <|endoftext|>) takes its place: the model has
  marked the end, so what follows the mark in the tail follows here.
- Seams. What is encoded follows a special token, or begins with one, over which no tokenizer merges. Around a template
  without special tokens, the tokens at the seam may differ from those of the whole text; the engine and the trainer see
  the same ids nevertheless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rljob_api.wire.protocol import Message, ToolSchema
from rljob_trainer.conversation.continuation import Answered, Break, BreakCause, find_following
from rljob_trainer.conversation.template import ChatTemplate, TemplateError
from rljob_trainer.episodes.types import Completion, Segment, empty_segment

__all__ = ["Break", "BreakCause", "Conversation"]

_SENTINEL = "RLJOB7SENTINEL"
"""Stands for the body of an answer, to find what the template writes after it."""


@dataclass(frozen=True)
class _Prompt:
    """A prompt that waits for its answer. Nothing of it is in a segment yet."""

    text: str
    context: list[int]
    """The tokens after those of the segment; all of the prompt's if it opens one."""
    opens: bool
    cause: Break | None = None


@dataclass(frozen=True)
class _Turn:
    """The last answered prompt."""

    prompt: str
    completion: Completion
    num_messages: int
    """Of the conversation up to this answer."""


class Conversation:
    """Call next_prompt, generate, add_answer, then add what the environment replies, and so on."""

    def __init__(self, template: ChatTemplate, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> None:
        self.messages: list[Message] = list(messages)
        """All messages, with the prompt's."""
        self.segments: list[Segment] = []
        """Each ends with a sampled token: a prompt joins its segment when it is answered."""
        self.breaks: list[Break] = []
        """Why each segment but the first began."""
        self._template = template
        self._tools = list(tools)
        self.rendered: list[Message] = list(messages)
        """`messages` as the template gets them: an answer that it refuses is text."""
        self._prompt: _Prompt | None = None
        self._last: _Turn | None = None
        self._num_turns = 0

    def next_prompt(self) -> list[int]:
        """Return the tokens after which the policy answers. Raise TemplateError if the template refuses the messages.

        Without an answer in between, it returns the same prompt.
        """
        if self._prompt is None:
            self._prompt = self._plan()
        if self._prompt.opens:
            return list(self._prompt.context)
        return self.segments[-1].token_ids + self._prompt.context

    def add_answer(self, completion: Completion, message: Message) -> None:
        """Record what was sampled after `next_prompt`, unchanged, and what it is in the conversation."""
        if self._prompt is None:
            raise ValueError("next_prompt must be called before add_answer")
        prompt, self._prompt = self._prompt, None
        if prompt.opens:
            self.segments.append(empty_segment())
        if prompt.cause is not None:
            self.breaks.append(prompt.cause)
        self.segments[-1].append_context(prompt.context)
        self.segments[-1].append_sampled(completion, self._num_turns)
        self._num_turns += 1
        self.messages.append(message)
        self.rendered.append(message)
        self._last = _Turn(prompt.text, completion, len(self.messages))

    def add(self, messages: Sequence[Message]) -> None:
        """Record results of tools, or the user's reply."""
        if self._prompt is not None:
            raise ValueError("add_answer must be called before add: the last prompt has no answer yet")
        self.messages += messages
        self.rendered += messages

    def _plan(self) -> _Prompt:
        answered = None if self._last is None else self._describe(self._last)
        text = self._template.render(self.rendered, self._tools, generate=True)
        if answered is None or self._last is None:
            return _Prompt(text, self._template.encode(text), opens=True)
        following = find_following(answered, text, self._num_turns)
        if isinstance(following, Break):
            return _Prompt(text, self._template.encode(text), opens=True, cause=following)
        return _Prompt(text, self._encode_after(answered.end, following), opens=False)

    def _describe(self, turn: _Turn) -> Answered:
        closed = self._render_closed(turn)
        tail = self._find_tail(self.rendered[: turn.num_messages - 1])
        token_ids = turn.completion.token_ids
        end = self._template.decode(token_ids[-1:]) if self._has_end(turn.completion, tail) else ""
        return Answered(
            prompt=turn.prompt,
            body=self._template.decode(token_ids[:-1] if end else token_ids),
            end=end,
            message=self.rendered[turn.num_messages - 1],
            closed=closed,
            tail=tail,
            unsampled=self._drop_end(tail, end),
        )

    def _render_closed(self, turn: _Turn) -> str:
        """Render the conversation up to the answer. A message that the template refuses, such as two calls where it
        allows one, becomes the text that was sampled."""
        index = turn.num_messages - 1
        try:
            return self._template.render(self.rendered[: index + 1], self._tools, generate=False)
        except TemplateError:
            self.rendered[index] = {"role": "assistant", "content": turn.completion.text}
            return self._template.render(self.rendered[: index + 1], self._tools, generate=False)

    def _find_tail(self, earlier: list[Message]) -> str:
        answer = {"role": "assistant", "content": _SENTINEL}
        return self._template.render([*earlier, answer], self._tools, generate=False).rpartition(_SENTINEL)[2]

    def _has_end(self, completion: Completion, tail: str) -> bool:
        """Whether the last sampled token ends the answer, instead of being a part of its text."""
        if not completion.token_ids:
            return False
        last = completion.token_ids[-1]
        is_end = not completion.truncated and self._template.is_special(last)
        return is_end or self._template.encode(tail)[:1] == [last]

    def _drop_end(self, tail: str, end: str) -> str:
        """Return the part of the tail that follows `end`, or the end token of the template in whose place it is."""
        if not end:
            return tail
        if end not in tail:
            special = next(filter(self._template.is_special, self._template.encode(tail)), None)
            end = "" if special is None else self._template.decode([special])
        return tail.partition(end)[2] if end else tail

    def _encode_after(self, end: str, text: str) -> list[int]:
        """Encode `text` as it is encoded after `end`: some tokenizers write a space at the start of a text."""
        end_ids = self._template.encode(end)
        token_ids = self._template.encode(end + text)
        return token_ids[len(end_ids) :] if token_ids[: len(end_ids)] == end_ids else self._template.encode(text)
