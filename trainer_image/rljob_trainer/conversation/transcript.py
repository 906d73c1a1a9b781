"""What a program made the policy say: requests with whole histories, recorded as segments of exact tokens.

plan(messages, tools) -> PendingAnswer.prompt --> the engine --> read_answer --> the API's response
                                                             \-> record
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rljob_api.wire.protocol import Message, ToolSchema
from rljob_trainer.conversation.continuation import Break
from rljob_trainer.conversation.template import ChatTemplate
from rljob_trainer.episodes.types import Completion, Segment

__all__ = ["PendingAnswer", "Transcript"]


@dataclass(frozen=True)
class PendingAnswer:
    """A request that waits for its answer. Nothing of it is in a segment yet."""

    prompt: list[int]
    """The tokens after which the policy answers."""
    text: str
    """What the chat template wrote; for raw tokens, their text."""
    number: int
    """Of the request, from 0: calls of tools in its answer get the ids call_NUMBER_0, call_NUMBER_1, ..."""


class Transcript:
    """One attempt of an episode. Not safe for threads; requests may overlap: plan, plan, record, record."""

    def __init__(self, template: ChatTemplate) -> None:
        self.segments: list[Segment] = []
        """Each ends with a sampled token: a prompt joins its segment when it is answered."""
        self.breaks: list[Break] = []
        """[segments - 1] Why each segment but the first began."""
        self._template = template

    def plan(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> PendingAnswer:
        """Return the prompt of a request. `messages`: the whole history, as OpenAI's chat completions have it.

        Raise TemplateError if the chat template refuses them. A pending answer that is never recorded has no effect.
        """
        raise NotImplementedError

    def plan_tokens(self, token_ids: Sequence[int]) -> PendingAnswer:
        """Return the prompt of a request with raw tokens, which are the prompt."""
        raise NotImplementedError

    def read_answer(self, pending: PendingAnswer, completion: Completion) -> Message:
        """Return the answer as a message of OpenAI's chat completions: role, content (None if there are calls alone),
        and if any reasoning_content and tool_calls, with arguments as JSON text."""
        raise NotImplementedError

    def record(self, pending: PendingAnswer, completion: Completion, message: Message) -> int:
        """Record what was sampled after `pending.prompt`, unchanged, and the message that the program gets. Return the
        number of the turn.

        The segment is continued if it still ends where the pending answer began; else a new one begins."""
        raise NotImplementedError

    def messages_of(self, turn: int) -> list[Message]:
        """Return the conversation that ends with this answer, as agents of type loop record it: content is all that was
        sampled before the calls, with reasoning, and arguments of calls are objects."""
        raise NotImplementedError
