r"""What a program made the policy say: requests with whole histories, recorded as segments of exact tokens.

    plan(messages, tools) -> PendingAnswer.prompt --> the engine --> read_answer --> the API's response
                                                                 \-> record

A request carries the whole history. Its longest beginning that ends with a recorded answer names the turn that it
continues. echo.py compares histories in all forms in which clients send them back, and what the client kept of the
recorded messages is then replaced by them: the template gets the answer as the policy wrote it, with its reasoning, so
the same text is written for it as before. turns.py continues that turn's tokens, opens a branch, or begins a segment,
and proves that this is sound: the messages decide only which proof is tried, never which tokens are trained.

`Conversation` is that of an episode that the trainer plays itself: one branch of the tree, in which each prompt
continues the last answer; turns.py proves when it does.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rljob_api.wire.base import Message
from rljob_api.wire.calls import ToolSchema
from rljob_trainer.conversation import echo
from rljob_trainer.conversation.answers import parse_answer, restore
from rljob_trainer.conversation.continuation import Break
from rljob_trainer.conversation.reasoning import find_opening
from rljob_trainer.conversation.template import ChatTemplate
from rljob_trainer.conversation.turns import Plan, Turn, TurnTree
from rljob_trainer.episodes.types import Completion, Segment, Whole


class _Played:
    """What is played of an episode: turns as a tree."""

    def __init__(self, template: ChatTemplate) -> None:
        self._tree = TurnTree(template)

    @property
    def segments(self) -> list[Segment]:
        """Each ends with a sampled token: a prompt joins its segment when it is answered."""
        return self._tree.segments

    @property
    def breaks(self) -> list[Break]:
        """[segments - 1] Why each segment but the first began."""
        return self._tree.breaks


class Conversation(_Played):
    """Call next_prompt, generate, add_answer, then add what the environment replies, and so on."""

    def __init__(self, template: ChatTemplate, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> None:
        super().__init__(template)
        self.messages: list[Message] = list(messages)
        """All messages, with the prompt's."""
        self._tools = list(tools)
        self._added: list[Message] = list(messages)
        """What follows the last answer."""
        self._last: Turn | None = None
        self._plan: Plan | None = None

    @property
    def rendered(self) -> list[Message]:
        """`messages` as the template gets them: an answer that it refuses is text."""
        return self._tree.read_rendered(self._last) + self._added

    def read_whole(self) -> Whole | None:
        """Return the conversation up to the last answer; None without one."""
        return None if self._last is None else self._tree.read_whole(self._last)

    def next_prompt(self) -> list[int]:
        """Return the tokens after which the policy answers. Raise TemplateError if the template refuses the messages.

        Without an answer in between, it returns the same prompt.
        """
        if self._plan is None:
            self._plan = self._tree.plan(self._last, self._added, self._tools)
        return self._tree.read_prompt(self._plan)

    def add_answer(self, completion: Completion, message: Message) -> None:
        """Record what was sampled after `next_prompt`, unchanged, and what it is in the conversation."""
        if self._plan is None:
            raise ValueError("next_prompt must be called before add_answer")
        plan, self._plan = self._plan, None
        self._last = self._tree.record(plan, completion, message)
        self._added = []
        self.messages.append(message)

    def add(self, messages: Sequence[Message]) -> None:
        """Record results of tools, or the user's reply."""
        if self._plan is not None:
            raise ValueError("add_answer must be called before add: the last prompt has no answer yet")
        self.messages += messages
        self._added += messages


class _Digest:
    """Digest of the tokens of one sequence, which grows."""

    def __init__(self) -> None:
        self._hash, self._count = hashlib.blake2b(digest_size=16), 0

    def extend(self, token_ids: NDArray[np.int32], end: int) -> bytes:
        """Return the digest of the first `end` tokens. `end` never descends."""
        self._hash.update(token_ids[self._count : end].tobytes())
        self._count = end
        return self._hash.copy().digest()


class TokenIndex:
    """Finds the recorded tokens with which a prompt of raw tokens begins, by digests: no list is compared twice."""

    def __init__(self, tree: TurnTree) -> None:
        self._tree = tree
        self._turns: dict[bytes, Turn] = {}
        """By the digest of all tokens up to the answer's last one."""
        self._segments: dict[int, _Digest] = {}
        self._ends: set[int] = set()
        self._num_turns = 0

    def find(self, token_ids: Sequence[int]) -> Turn | None:
        """Return the turn that ends the longest recorded sequence with which the tokens begin."""
        self._add_new_turns()
        digest, ids, found = _Digest(), np.asarray(token_ids, np.int32), None
        for end in sorted(end for end in self._ends if end <= len(ids)):
            found = self._turns.get(digest.extend(ids, end), found)
        return found

    def _add_new_turns(self) -> None:
        for turn in self._tree.turns[self._num_turns :]:
            digest = self._segments.setdefault(turn.segment, _Digest())
            self._turns[digest.extend(self._tree.segments[turn.segment].token_ids, turn.end)] = turn
            self._ends.add(turn.end)
        self._num_turns = len(self._tree.turns)


@dataclass(frozen=True)
class PendingAnswer:
    """A request that waits for its answer. Nothing of it is in a segment yet."""

    prompt: list[int] = field(repr=False)
    """The tokens after which the policy answers."""
    text: str
    """What the chat template wrote; empty for raw tokens."""
    number: int
    """Number of the request, from 0: calls of tools in its answer get the ids call_NUMBER_0, call_NUMBER_1, ..."""
    plan: Plan = field(repr=False)
    digest: bytes | None
    """Digest of its messages; None for raw tokens."""


class Transcript(_Played):
    """One attempt of an episode. Not safe for threads; requests may overlap: plan, plan, record, record."""

    def __init__(self, template: ChatTemplate) -> None:
        super().__init__(template)
        self._template = template
        self._tokens = TokenIndex(self._tree)
        self._answers: defaultdict[bytes, list[Turn]] = defaultdict(list)
        """By the digest of the history that ends with the answer. Several turns: samples that say the same."""
        self._num_requests = 0

    def plan(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> PendingAnswer:
        """Return the prompt of a request. `messages`: the whole history, as OpenAI's chat completions have it.

        Raise TemplateError if the chat template refuses them. A pending answer that is never recorded has no effect.
        """
        known = echo.normalize(messages)
        digests = list(echo.digest_prefixes(known, has_reasoning=self._template.has_reasoning))
        parent, count = self._find_parent(known, digests, list(tools))
        added = known[count:] if parent is None else echo.relabel(known[count:], known[count - 1], parent.message)
        plan = self._tree.plan(parent, added, tools)
        return self._pend(plan, digests[-1] if digests else echo.START)

    def plan_tokens(self, token_ids: Sequence[int]) -> PendingAnswer:
        """Return the prompt of a request with raw tokens, which are the prompt. The longest recorded sequence with
        which they begin is continued."""
        return self._pend(self._tree.plan_tokens(self._tokens.find(token_ids), token_ids), None)

    def read_answer(self, pending: PendingAnswer, completion: Completion) -> Message:
        """Return the answer as a message of OpenAI's chat completions: role, content (None if there are calls alone),
        and if any reasoning_content and tool_calls, with arguments as JSON text."""
        has_calls = bool(pending.plan.tools) and not completion.truncated
        return parse_answer(
            completion.text,
            tool_format=self._template.tool_format if has_calls else None,
            prompt_text=pending.text,
            has_reasoning=pending.digest is not None and self._template.has_reasoning,
            call_prefix=f"call_{pending.number}",
        )

    def record(self, pending: PendingAnswer, completion: Completion, message: Message) -> int:
        """Record what was sampled after `pending.prompt`, unchanged, and the message that the program gets, which
        read_answer returned. Return the number of the turn.

        The segment is continued if it still ends where the pending answer began; else a new one begins."""
        has_reasoning = pending.digest is not None and self._template.has_reasoning
        original = restore(message, completion.text, prompt_text=pending.text, has_reasoning=has_reasoning)
        turn = self._tree.record(pending.plan, completion, original, find_opening(pending.text))
        if pending.digest is not None:
            [echoed] = echo.normalize([message])
            self._answers[echo.extend(pending.digest, echoed, has_reasoning=has_reasoning)].append(turn)
        return turn.number

    def messages_of(self, turn: int) -> list[Message]:
        """Return the conversation that ends with this answer, as agents of type loop record it: content is all that was
        sampled before the calls, with reasoning, and arguments of calls are objects."""
        return self._tree.read_messages(self._tree.turns[turn])

    def whole_of(self, turn: int) -> Whole:
        """Return the conversation that ends with this answer, as one sequence."""
        return self._tree.read_whole(self._tree.turns[turn])

    def _pend(self, plan: Plan, digest: bytes | None) -> PendingAnswer:
        number, self._num_requests = self._num_requests, self._num_requests + 1
        return PendingAnswer(self._tree.read_prompt(plan), plan.text or "", number, plan, digest)

    def _find_parent(
        self, messages: list[Message], digests: list[bytes], tools: list[ToolSchema]
    ) -> tuple[Turn | None, int]:
        """Return the turn of the last recorded answer, and the number of messages up to it."""
        for count in range(len(messages), 0, -1):
            if turns := self._answers.get(digests[count - 1]):
                return self._choose(turns, messages[:count], tools), count
        return None, 0

    def _choose(self, turns: list[Turn], messages: list[Message], tools: list[ToolSchema]) -> Turn:
        """Return which of several turns with the same messages is continued: the one with the details that the client
        kept, with the same tools, whose segment can be continued, the last one."""
        if len(turns) == 1:
            return turns[0]

        def rank(turn: Turn) -> tuple[int, bool, bool, int]:
            kept = echo.count_equal(messages, self._tree.read_messages(turn))
            return kept, turn.tools == tools, self._tree.is_end(turn), turn.number

        return max(turns, key=rank)
