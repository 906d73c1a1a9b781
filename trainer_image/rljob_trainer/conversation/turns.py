"""The policy's turns of one episode as a tree, and the segments of exact tokens.

A turn is a prompt and its answer. Its parent is the turn whose answer it continues. Conversation is the tree with one
branch; Transcript finds parents by the histories that requests carry. continuation.py compares the texts.

Let F(messages) be what the chat template writes, `previous` the text of the parent's prompt, `closed` = F(messages up
to its answer), `text` = F(all messages, with the header of the next answer), and `tail` what the template writes after
the body of an answer.

    previous                                | answer                      | results, replies, header
    what the engine got, as token ids       | what it sampled, unchanged  | encode(unsampled tail + text[len(closed):])

The next prompt continues these tokens in one of three cases. First, `text` begins with `previous` and all that was
sampled, up to its end token: what follows is the rest of `text`. Second, `closed` begins with `previous`, `text` begins
with `closed`, and the template leaves nothing of the answer out. Third, `text` begins with `previous` and then writes
less for the answer than `closed`, such as no empty reasoning, but the whole message; what follows is then the text
after the answer. Otherwise a new segment begins with encode(text), and a Break says why. This is sound:

- Trained tokens. Sampled ids are copied from the completion to one segment, and never made from text. A prompt is the
  ids of its segment, so their log-probs are those of the context in which the trainer computes them again. In a new
  segment, earlier answers are context without loss: each sampled token is trained in one segment, once.
- Branches. A turn may have several children. The first to be recorded continues the parent's segment. Each other one
  opens a segment, which begins with a copy of the ids up to the parent's last one, as context: the engine gets the same
  ids, so what holds for the parent's context holds for the copy. Which child is first is decided when an answer is
  recorded, by whether the segment still ends with the parent's answer, so requests may overlap in any order.
- Context. By induction, a segment is what the template writes for its last prompt, except that answers are as the model
  wrote them: each step adds to both what follows the answer, or it begins a new segment. For a branch, `previous` is
  written again from the parent's messages; its hash must be that of the text for which the ids were made.
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
- Raw tokens. A prompt of token ids continues a turn if it begins with all ids up to the turn's last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rljob_api.wire.base import Message
from rljob_api.wire.calls import ToolSchema
from rljob_inputs.models.chat_template import ANSWER_SENTINEL
from rljob_trainer.conversation.answers import separate_reasoning
from rljob_trainer.conversation.continuation import Answered, Break, BreakCause, compare, find_following
from rljob_trainer.conversation.reasoning import find_opening
from rljob_trainer.conversation.template import ChatTemplate, TemplateError
from rljob_trainer.episodes.types import Completion, Segment, Whole, empty_segment

_NUM_SHOWN_BEFORE, _NUM_SHOWN_AFTER = 10, 40
"""Tokens around the place where a branch begins."""


@dataclass
class Turn:
    """An answered prompt."""

    number: int
    parent: Turn | None
    added: list[Message]
    """The messages between the parent's answer, or the start, and this answer. Empty for raw tokens."""
    tools: list[ToolSchema]
    message: Message
    """The answer in the conversation."""
    rendered: Message
    """The answer as the template gets it: one that it refuses is text."""
    opening: str
    """What of the message the prompt ends with, such as <think>."""
    text: str
    """What was sampled, without special tokens."""
    truncated: bool
    is_raw: bool
    """Whether its prompt was raw tokens."""
    continues: bool
    """Whether its prompt begins with all tokens up to the parent's last one."""
    segment: int
    start: int
    """Position of its first sampled token in the segment."""
    end: int
    """Position after its last one."""
    prompt: str | None
    """The text of its prompt; None for raw tokens, and once the segment continues. Texts of whole histories would need
    more memory than the tokens."""
    prompt_hash: int


@dataclass(frozen=True)
class Plan:
    """A prompt that waits for its answer. Nothing of it is in a segment yet."""

    parent: Turn | None
    """The turn whose tokens it continues, or would continue if there were no `cause`."""
    added: list[Message]
    tools: list[ToolSchema]
    text: str | None
    """None for raw tokens."""
    context: list[int] = field(repr=False)
    """The tokens after those of the parent; all of the prompt's if it has none, or for a `cause`."""
    cause: Break | None = None

    @property
    def opens(self) -> bool:
        """Whether `context` is the whole prompt."""
        return self.parent is None or self.cause is not None


class TurnTree:
    def __init__(self, template: ChatTemplate) -> None:
        self.segments: list[Segment] = []
        """Each ends with a sampled token: a prompt joins its segment when it is answered."""
        self.breaks: list[Break] = []
        """[segments - 1] Why each segment but the first began."""
        self.turns: list[Turn] = []
        self._template = template
        self._roots: dict[int, Turn] = {}
        """By the hash of their prompt: the turns without a parent."""

    def plan(self, parent: Turn | None, added: Sequence[Message], tools: Sequence[ToolSchema]) -> Plan:
        """Return the prompt of the conversation up to `parent`, and of `added`. Raise TemplateError if the template
        refuses the messages."""
        known, added = list(tools), list(added)
        if parent is not None and parent.tools == known:
            known = parent.tools  # one list for all turns: tools are long
        text = self._render(parent, added, known)
        if parent is None:
            return Plan(None, added, known, text, self._template.encode(text))
        following = self._follow(parent, text, known)
        if following is None:
            return self.plan(parent, added, known)
        if isinstance(following, Break):
            return Plan(parent, added, known, text, self._template.encode(text), following)
        return Plan(parent, added, known, text, self._encode_after(*following))

    def plan_tokens(self, parent: Turn | None, token_ids: Sequence[int]) -> Plan:
        """Return the prompt that is `token_ids`, which begin with all tokens up to `parent`."""
        return Plan(parent, [], [], None, list(token_ids[0 if parent is None else parent.end :]))

    def read_prompt(self, plan: Plan) -> list[int]:
        """Return the tokens after which the policy answers."""
        if plan.parent is None or plan.opens:
            return list(plan.context)
        return self._read_ids(plan.parent.segment, 0, plan.parent.end) + plan.context

    def record(self, plan: Plan, completion: Completion, message: Message, opening: str = "") -> Turn:
        """Record what was sampled after the prompt, unchanged, and what it is in the conversation."""
        number, parent = len(self.turns), plan.parent
        prompt_hash = hash(tuple(plan.context) if plan.text is None else plan.text)
        if parent is not None and not plan.opens and self.is_end(parent):
            segment, parent.prompt = parent.segment, None
        else:
            segment = self._open(plan, prompt_hash)
        tokens = self.segments[segment]
        tokens.append_context(plan.context)
        start = len(tokens.token_ids)
        tokens.append_sampled(completion, number)
        turn = Turn(
            number=number,
            parent=parent,
            added=plan.added,
            tools=plan.tools,
            message=message,
            rendered=message,
            opening=opening,
            text=completion.text,
            truncated=completion.truncated,
            is_raw=plan.text is None,
            continues=not plan.opens,
            segment=segment,
            start=start,
            end=len(tokens.token_ids),
            prompt=plan.text,
            prompt_hash=prompt_hash,
        )
        self.turns.append(turn)
        if parent is None:
            self._roots.setdefault(prompt_hash, turn)
        return turn

    def is_end(self, turn: Turn) -> bool:
        """Whether the turn's segment ends with its answer."""
        return len(self.segments[turn.segment].token_ids) == turn.end

    def read_messages(self, turn: Turn) -> list[Message]:
        """Return the conversation that ends with the turn's answer. Raw tokens are a message of the user."""
        messages: list[Message] = []
        for each in _path(turn):
            messages += [*self._read_added(each), each.message]
        return messages

    def read_whole(self, turn: Turn) -> Whole:
        """Return the conversation that ends with the turn's answer."""
        first, *others = _path(turn)
        token_ids: list[int] = self._sampled(first)
        messages = [self._describe_answer(first)]
        for each in others:
            token_ids += self._read_between(each) + self._sampled(each)
            messages += [*self._read_added(each), self._describe_answer(each)]
        return Whole(self.segments[first.segment].token_ids[: first.start], np.array(token_ids, np.int32), messages)

    def _read_ids(self, segment: int, start: int, end: int) -> list[int]:
        ids: list[int] = self.segments[segment].token_ids[start:end].tolist()
        return ids

    def _sampled(self, turn: Turn) -> list[int]:
        return self._read_ids(turn.segment, turn.start, turn.end)

    def _read_between(self, turn: Turn) -> list[int]:
        """Return the tokens between the parent's answer and this one: of a segment that begins with the template's
        version of the history, what the template writes after that answer."""
        parent = turn.parent
        assert parent is not None
        if turn.continues:
            return self._read_ids(turn.segment, parent.end, turn.start)
        sampled = self._sampled(parent)
        answer = {"role": "assistant", "content": ANSWER_SENTINEL}
        history = [*self.read_rendered(parent.parent), *parent.added, answer, *turn.added]
        try:
            following = self._template.render(history, turn.tools, generate=True).rpartition(ANSWER_SENTINEL)[2]
        except TemplateError:  # it refuses the stand-in, such as one without calls before their results
            following = "".join(f"\n{message.get('content') or ''}" for message in turn.added)
        end = self._decode(sampled[-1:]) if self._has_end(parent, sampled, following) else ""
        return self._encode_after(end, self._drop_end(following, end))

    def _describe_answer(self, turn: Turn) -> Message:
        """Return the answer as a client of the API gets it."""
        if not turn.tools:
            return turn.message
        start = self._read_ids(turn.segment, max(0, turn.start - _NUM_SHOWN_BEFORE), turn.start)
        opening = find_opening(self._decode(start))
        if not opening and not self._template.has_reasoning:
            return turn.message
        return separate_reasoning(turn.message, opening)

    def _read_added(self, turn: Turn) -> list[Message]:
        if not turn.is_raw:
            return turn.added
        start = 0 if turn.parent is None else turn.parent.end
        return [{"role": "user", "content": self._decode(self._read_ids(turn.segment, start, turn.start))}]

    def _open(self, plan: Plan, prompt_hash: int) -> int:
        """Begin a segment, and record why. Return its index."""
        if self.segments:
            cause = plan.cause or self._explain(plan, prompt_hash)
            self.breaks.append(replace(cause, turn=len(self.turns)))
        segment = empty_segment()
        if plan.parent is not None and not plan.opens:
            segment.append_context(self.segments[plan.parent.segment].token_ids[: plan.parent.end])
        self.segments.append(segment)
        return len(self.segments) - 1

    def _explain(self, plan: Plan, prompt_hash: int) -> Break:
        """Return why the prompt does not continue a segment, though the template would let it."""
        if plan.parent is not None:
            return self._compare_branch(plan.parent.segment, plan.parent.end, plan.context)
        if prompt_hash in self._roots:
            root = self._roots[prompt_hash]
            return self._compare_branch(root.segment, root.start, [])
        last = self.turns[-1]
        expected = self._decode_until(last.segment, last.end)
        found = self._decode(plan.context) if plan.text is None else plan.text
        return compare(last.number, BreakCause.UNMATCHED, expected, found)

    def _compare_branch(self, segment: int, end: int, context: list[int]) -> Break:
        """Compare what follows a position of a segment with other tokens there."""
        start = max(0, end - _NUM_SHOWN_BEFORE)
        earlier = self._decode(self._read_ids(segment, start, end + len(context) + _NUM_SHOWN_AFTER))
        return compare(0, BreakCause.BRANCH, earlier, self._decode(self._read_ids(segment, start, end) + context))

    def _follow(self, parent: Turn, text: str, tools: list[ToolSchema]) -> tuple[str, str] | Break | None:
        """Return the end token of the parent's answer and what follows it in `text`, or why nothing does. None: the
        message of the answer has changed, so `text` must be written again."""
        number, previous = len(self.turns), self._find_prompt(parent)
        sampled = self._sampled(parent)
        if hash(previous) != parent.prompt_hash:  # for example, the template writes the time
            return compare(number, BreakCause.PROMPT, self._decode_until(parent.segment, parent.start), text)
        if sampled and self._template.is_special(sampled[-1]):
            until = previous + self._decode(sampled)
            if text.startswith(until):
                return self._decode(sampled[-1:]), text[len(until) :]
        if parent.tools != tools and not text.startswith(previous):
            return compare(number, BreakCause.TOOLS, previous, text)
        closed = self._render_closed(parent)
        if closed is None:
            return None
        answered = self._describe(parent, sampled, previous, closed)
        following = find_following(answered, text, number)
        return following if isinstance(following, Break) else (answered.end, following)

    def _find_prompt(self, turn: Turn) -> str:
        if turn.prompt is not None:
            return turn.prompt
        return self._template.render([*self.read_rendered(turn.parent), *turn.added], turn.tools, generate=True)

    def _render(self, parent: Turn | None, added: list[Message], tools: list[ToolSchema]) -> str:
        """Render the next prompt. If the template refuses the parent's answer, such as two calls where it allows one,
        the answer becomes the text that was sampled."""
        try:
            return self._template.render([*self.read_rendered(parent), *added], tools, generate=True)
        except TemplateError:
            if parent is None or self._render_closed(parent) is not None:
                raise
            return self._template.render([*self.read_rendered(parent), *added], tools, generate=True)

    def _render_closed(self, turn: Turn) -> str | None:
        """Render the conversation up to the answer. None: the template refuses the answer, which is now text."""
        try:
            return self._template.render(self.read_rendered(turn), turn.tools, generate=False)
        except TemplateError:
            text = {"role": "assistant", "content": turn.opening + turn.text}
            if turn.rendered == text:
                raise
            turn.rendered = text
            return None

    def _describe(self, turn: Turn, sampled: list[int], previous: str, closed: str) -> Answered:
        messages = [*self.read_rendered(turn.parent), *turn.added, {"role": "assistant", "content": ANSWER_SENTINEL}]
        tail = self._template.render(messages, turn.tools, generate=False).rpartition(ANSWER_SENTINEL)[2]
        end = self._decode(sampled[-1:]) if self._has_end(turn, sampled, tail) else ""
        content = turn.rendered.get("content")
        if isinstance(content, str):
            content = content.removeprefix(turn.opening)
        return Answered(
            prompt=previous,
            body=self._decode(sampled[:-1] if end else sampled),
            end=end,
            message={**turn.rendered, "content": content},
            closed=closed,
            tail=tail,
            unsampled=self._drop_end(tail, end),
        )

    def _has_end(self, turn: Turn, sampled: list[int], tail: str) -> bool:
        """Whether the last sampled token ends the answer, instead of being a part of its text."""
        if not sampled:
            return False
        is_end = not turn.truncated and self._template.is_special(sampled[-1])
        return is_end or self._template.encode(tail)[:1] == sampled[-1:]

    def _drop_end(self, tail: str, end: str) -> str:
        """Return the part of the tail that follows `end`, or the end token of the template in whose place it is."""
        if not end:
            return tail
        if end not in tail:
            special = next(filter(self._template.is_special, self._template.encode(tail)), None)
            end = "" if special is None else self._decode([special])
        return tail.partition(end)[2] if end else tail

    def _encode_after(self, end: str, text: str) -> list[int]:
        """Encode `text` as it is encoded after `end`: some tokenizers write a space at the start of a text."""
        end_ids = self._template.encode(end)
        token_ids = self._template.encode(end + text)
        return token_ids[len(end_ids) :] if token_ids[: len(end_ids)] == end_ids else self._template.encode(text)

    def read_rendered(self, turn: Turn | None) -> list[Message]:
        """Return the conversation up to the turn's answer as the template gets it."""
        return [message for each in _path(turn) for message in (*each.added, each.rendered)]

    def _decode_until(self, segment: int, end: int) -> str:
        return self._decode(self._read_ids(segment, 0, end))

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._template.decode(token_ids)


def _path(turn: Turn | None) -> Iterator[Turn]:
    """Return the turns from the root to this one."""
    turns: list[Turn] = []
    while turn is not None:
        turns.append(turn)
        turn = turn.parent
    return reversed(turns)
